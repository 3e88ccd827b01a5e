"""ModelConfig: what a checkpoint's config.json says, read as plain JSON in this one place.

Old and new spellings (transformers 4 and 5) are settled here; what we cannot run is refused here, by name.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
                sliding window, or sizes that do not fit together.
        """
        raw = read_json(folder / "config.json")
        if raw is None:
            raise ValueError(f"{str(folder)!r} is no model folder: it has no config.json.")
        generation = read_json(folder / "generation_config.json") or {}
        return cls.from_dict(raw, generation)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Build from the contents of config.json and generation_config.json; errors as in `from_folder`."""
        architecture = (raw.get("architectures") or [raw.get("model_type", "unnamed")])[0]
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ValueError(
                f"Architecture {architecture!r} is not supported. Supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
            )
        quantization = raw.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
            raise ValueError(f"Quantized checkpoints (here: {method!r}) are not supported; use the unquantized one.")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: 'silu'.")
        if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
            raise ValueError("Sliding-window attention is not supported; every layer must use full attention.")
        sizes: dict[str, Any] = {name: raw.get(name) for name in _SIZES}
        sizes["num_key_value_heads"] = raw.get("num_key_value_heads") or raw.get("num_attention_heads")
        sizes["head_dim"] = raw.get("head_dim") or 128  # the architecture's default, whatever hidden_size says
        wrong = [name for name, n in sizes.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1]
        if wrong:
            raise ValueError(f"config.json lacks a positive integer for {', '.join(wrong)}.")
        num_heads, num_kv_heads, head_dim = (
            sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}.")
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; rotary embedding needs pairs.")
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=raw.get("max_position_embeddings", 32768),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            eos_token_ids=_ids(raw.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id")),
            generation=generation or {},
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON file's object, or None if there is no such file; ValueError if it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
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
            raise ValueError(f"{name}={value!r} in config.json must be an object or null.")
        parameters |= value
    # Whatever stands there besides theta changes the embedding, also where it has no type of its own.
    untyped = "default" if parameters.keys() <= {"rope_theta"} else "unnamed"
    rope_type = parameters.get("rope_type", parameters.get("type", untyped))
    if rope_type != "default":
        raise ValueError(f"RoPE type {rope_type!r} is not supported; supported: 'default'.")
    theta = parameters.get("rope_theta", raw.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"rope_theta={theta!r} in config.json must be a number.")
    return float(theta)


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)
