"""Checkpoints: from a folder or the hub into a model's parameters, each rank reading only its part."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.models.config import read_json
from nanovllm.utils.checks import near_name

_HUB_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model"]
_WEIGHT_TYPES = ("BF16", "F16", "F32", "F64")  # as safetensors spells them
_EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"


def find_checkpoint(name: str, revision: str | None = None, what: str = "model", with_weights: bool = True) -> Path:
    """Return the folder of a model or tokenizer, fetching it from the hub if need be.

    Args:
        name: A folder, "embedded" (unless a folder with a config.json has that name), or a hub id.
        revision: Branch, tag or commit on the hub.
        what: "model" or "tokenizer": the setting that gave the name.
        with_weights: Whether to fetch a model's weights too.

    Raises:
        ValueError: Neither a folder nor something that can be a hub id.
        OSError: The hub does not have it or cannot be reached.
    """
    path = Path(name)
    if name == "embedded" and not (path / "config.json").exists():
        return _EMBEDDED
    if path.is_dir():
        return path
    files = "config.json and *.safetensors" if what == "model" else "tokenizer.json"
    hint = f"Give a folder with {files}, a hub id, or 'embedded' for the {what} in this package."
    kind = " but a file" if path.exists() else " but a broken link" if path.is_symlink() else ""
    if kind or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"{what}={name!r} is no folder{kind}. {hint}")
    from huggingface_hub import snapshot_download

    try:
        patterns = _HUB_FILES + ["*.safetensors"] * (with_weights and what == "model")
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors come from several libraries
        raise OSError(
            f"{what}={name!r} is no folder here and could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'})."
            f"{near_name(name, ['embedded'])} {hint}"
        ) from error


def load_model(model: nn.Module, folder: Path) -> None:
    """Fill every parameter from the folder's safetensors files.

    Names are checked over all files before the first tensor is read.

    Raises:
        ValueError: No safetensors files, or tensors missing, unexpected, in two files, quantized or of wrong shape.
    """
    targets = dict(_targets(model))
    own_names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own_names
    with ExitStack() as stack:
        sources: dict[str, Any] = {}  # checkpoint name -> the open file that has it
        for path in _weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{str(path)!r} cannot be read as safetensors: {error}") from error
            twice = sorted(sources.keys() & file.keys())
            if twice:
                raise ValueError(f"{str(path)!r} has tensors that another file has too: {_some(twice)}. Remove one.")
            sources |= dict.fromkeys(file.keys(), file)
        missing = sorted(targets.keys() - sources.keys())
        unexpected = sorted(
            name for name in sources.keys() - targets.keys() if name not in tied and "rotary_emb.inv_freq" not in name
        )
        if missing or unexpected:
            raise ValueError(
                f"The weights in {str(folder)!r} do not fit the model. Missing ({len(missing)}): {_some(missing)}. "
                f"Unexpected ({len(unexpected)}): {_some(unexpected)}."
            )
        for name, (param, shard_id) in targets.items():
            loader = getattr(param, "weight_loader", _load_whole)
            source = sources[name].get_slice(name)
            try:
                if source.get_dtype() not in _WEIGHT_TYPES:
                    raise ValueError(f"has type {source.get_dtype()}; use a checkpoint that is not quantized")
                loader(param, source, *(() if shard_id is None else (shard_id,)))
            except ValueError as error:
                raise ValueError(f"Tensor {name!r} in {str(folder)!r} {error}.") from error
    for param in model.parameters():
        vars(param).pop("weight_loader", None)  # a reference to its own layer, which would outlive `del`


def fill_with_random_weights(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Draw every weight from a normal distribution of deviation ``std``; norm weights become 1."""
    for name, param in model.named_parameters():
        if "norm" in name:
            param.fill_(1.0)
        else:
            generator = torch.Generator(param.device).manual_seed(seed)
            param.normal_(0.0, std, generator=generator)
            seed += 1


def _targets(model: nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, str | int | None]]]:
    """Yield the checkpoint names that a model wants, each with the parameter and the part of it that it fills."""
    packed: dict[str, list[tuple[str, str | int]]] = {}
    for source, (target, shard_id) in getattr(model, "packed_modules_mapping", {}).items():
        packed.setdefault(target, []).append((source, shard_id))
    for name, param in model.named_parameters():
        path = name.split(".")
        for part in packed.get(path[-2], ()) if len(path) > 1 else ():
            yield ".".join((*path[:-2], part[0], path[-1])), (param, part[1])
        if len(path) < 2 or path[-2] not in packed:
            yield name, (param, None)


def _weight_files(folder: Path) -> list[Path]:
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) and name.endswith(".safetensors") for name in names):
            raise ValueError(
                f"model.safetensors.index.json in {str(folder)!r} lacks a weight_map to *.safetensors files."
            )
        paths = [folder / name for name in sorted(set(names))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in paths if not path.exists()]
    if not paths or absent:
        detail = f"lacks {_some(absent)}" if absent else "has no *.safetensors files"
        raise ValueError(f"{str(folder)!r} {detail}; other weight formats have to be converted to safetensors first.")
    return paths


def _load_whole(param: torch.Tensor, source: Any) -> None:
    if list(source.get_shape()) != list(param.shape):
        raise ValueError(f"has shape {source.get_shape()}, expected {list(param.shape)}")
    param.copy_(source[:])


def _some(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest if names else "none"
