"""ModelConfig: what a checkpoint's config.json says, read as plain JSON in this one place.

Old and new spellings (transformers 4 and 5) are settled here; what we cannot run is refused here, by name.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import check_bool, check_choice, check_float, check_int

SUPPORTED_ARCHITECTURES = {"Qwen3ForCausalLM": "nanovllm.models.qwen3:Qwen3ForCausalLM"}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a model; sizes in elements, positions in tokens; `generation` as in its file."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    generation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json and generation_config.json of a checkpoint folder.

        Raises:
            ValueError: No or broken config.json, an unsupported architecture, RoPE type, activation, quantization or
                sliding window, a field of the wrong type or out of range, or sizes that do not fit together.
        """
        raw = read_json(folder / "config.json")
        if raw is None:
            raise ValueError(f"{str(folder)!r} is no model folder: it has no config.json.")
        with faults_of(folder / "config.json"):
            config = cls.from_dict(raw)
        generation = read_json(path := folder / "generation_config.json") or {}
        with faults_of(path):
            more_ids = _end_ids(generation.get("eos_token_id"), config.vocab_size)
        return replace(config, eos_token_ids=config.eos_token_ids + more_ids, generation=generation)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Build from the contents of config.json; TypeError or ValueError where `from_folder` has its errors."""
        architectures = raw.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else None
        if architecture not in list(SUPPORTED_ARCHITECTURES):
            raise ValueError(f"architectures={architectures!r} is not supported; use {[*SUPPORTED_ARCHITECTURES]}.")
        quantization = raw.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
            raise ValueError(f"Quantized checkpoints (here: {method!r}) are not supported; use the unquantized one.")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: 'silu'.")
        layer_types = raw.get("layer_types") or []
        is_full = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
        if raw.get("use_sliding_window") or not is_full:
            raise ValueError("Sliding-window or linear attention is not supported; use 'full_attention' alone.")
        sizes: dict[str, Any] = {name: check_int(name, raw.get(name), 1) for name in _SIZES}
        # Null stands for these, too; the head dim is the architecture's, whatever hidden_size says.
        for name, default in (("num_key_value_heads", raw["num_attention_heads"]), ("head_dim", 128)):
            sizes[name] = check_int(name, default if raw.get(name) is None else raw[name], 1)
        num_heads, num_kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}.")
        if sizes["head_dim"] % 2:
            raise ValueError(f"head_dim={sizes['head_dim']} is odd; rotary embedding needs pairs.")
        dtype_name = "dtype" if raw.get("dtype") else "torch_dtype"
        dtype = str(raw.get(dtype_name) or "bfloat16").removeprefix("torch.")
        return cls(
            architecture=architecture,
            **sizes,
            rms_norm_eps=check_float("rms_norm_eps", raw.get("rms_norm_eps", 1e-6), 0.0, above=True),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=check_int("max_position_embeddings", raw.get("max_position_embeddings", 32768), 2),
            tie_word_embeddings=check_bool("tie_word_embeddings", raw.get("tie_word_embeddings", False)),
            attention_bias=check_bool("attention_bias", raw.get("attention_bias", False)),
            dtype=check_choice(dtype_name, dtype, ("float32", "bfloat16", "float16")),
            eos_token_ids=_end_ids(raw.get("eos_token_id"), sizes["vocab_size"]),
        )


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Make what is found wrong with a file's values a ValueError that names the file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON file's object, or None if there is no such file; ValueError if it is broken, as is a dead link."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, not {type(content).__name__}.")
    return content


def _rope_theta(raw: dict[str, Any]) -> float:
    # transformers 4: rope_theta on top and an optional rope_scaling; transformers 5: all in rope_parameters.
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{name}={value!r} must be an object or null.")
        parameters |= value
    # Whatever stands there besides theta changes the embedding, also where it has no type of its own.
    untyped = "default" if parameters.keys() <= {"rope_theta"} else "unnamed"
    rope_type = parameters.get("rope_type", parameters.get("type", untyped))
    if rope_type != "default":
        raise ValueError(f"RoPE type {rope_type!r} is not supported; supported: 'default'.")
    for name in ("partial_rotary_factor", "factor"):
        value = parameters.get(name, raw.get(name, 1))
        if value != 1:
            raise ValueError(f"RoPE with {name}={value!r} is not supported; it must be 1.")
    return check_float("rope_theta", parameters.get("rope_theta", raw.get("rope_theta", 10000.0)), 0.0, above=True)


def _end_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens that a file names; ids outside the vocabulary can never come, so they are left out."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise TypeError(f"eos_token_id={value!r} must be an int or a list of ints.")
    known = tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)
    if len(known) < len(ids):
        log = logging.getLogger("nanovllm")
        log.warning("eos_token_id=%s: what is outside the vocabulary of %d is ignored.", value, vocab_size)
    return known
