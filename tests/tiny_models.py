"""Tiny random Qwen3 checkpoints, and transformers as the oracle for what they should answer.

The files are written here, not by transformers, in the form that its versions 4.51 and 5 both read alike: `rope_theta`
on top and no `rope_parameters`. Weights are drawn at a deviation of 0.3, biases and norms at random too: smaller
weights make a tied model repeat its last token, and zeros and ones hide a term that is missing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEAR_TIE = 1e-4  # logits closer than this may change places between two ways of adding the same float32 numbers


@dataclass(frozen=True)
class TinyConfig:
    """Shape of a tiny Qwen3 checkpoint and the seed of its weights."""

    hidden: int = 20
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 36
    vocab: int = 130
    tied: bool = True
    bias: bool = False
    rope_theta: float = 5000.0
    eps: float = 1e-5
    max_positions: int = 1024
    eos_token_ids: tuple[int, ...] = ()
    std: float = 0.3
    seed: int = 0

    def config_json(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": self.bias,
            "attention_dropout": 0.0,
            "eos_token_id": list(self.eos_token_ids) or None,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.layers,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float32",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint's tensors by name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            projections = {
                "self_attn.q_proj": (q, self.hidden),
                "self_attn.k_proj": (kv, self.hidden),
                "self_attn.v_proj": (kv, self.hidden),
                "self_attn.o_proj": (self.hidden, q),
                "mlp.gate_proj": (self.intermediate, self.hidden),
                "mlp.up_proj": (self.intermediate, self.hidden),
                "mlp.down_proj": (self.hidden, self.intermediate),
            }
            for name, shape in projections.items():
                shapes[f"model.layers.{i}.{name}.weight"] = shape
                if self.bias and name.startswith("self_attn"):
                    shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
            for name, size in (
                ("self_attn.q_norm", self.head_dim),
                ("self_attn.k_norm", self.head_dim),
                ("input_layernorm", self.hidden),
                ("post_attention_layernorm", self.hidden),
            ):
                shapes[f"model.layers.{i}.{name}.weight"] = (size,)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def tensors(self) -> dict[str, Any]:
        """Return the random weights by name, float32."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: torch.randn(shape, generator=generator) * self.std + (1.0 if "norm" in name else 0.0)
            for name, shape in self.tensor_shapes().items()
        }

    def save(self, folder: Path, tensors: dict[str, Any] | None = None) -> Path:
        """Write the checkpoint into ``folder`` (made if need be), with other ``tensors`` if given, and return it."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config_json()), encoding="utf-8")
        tensors = self.tensors() if tensors is None else tensors
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


SHAPES = {
    "plain": TinyConfig(hidden=24, heads=2, kv_heads=2, head_dim=12, intermediate=40, vocab=101, tied=False),
    "tied": TinyConfig(),
    "one_kv_head": TinyConfig(hidden=36, kv_heads=1, head_dim=6, intermediate=50, vocab=97, tied=False, eps=1e-6),
    "bias": TinyConfig(hidden=28, layers=3, head_dim=10, intermediate=44, vocab=211, tied=False, bias=True),
    "bias_tied": TinyConfig(hidden=32, heads=8, head_dim=4, intermediate=33, vocab=73, bias=True),
    "wide": TinyConfig(hidden=44, heads=3, kv_heads=3, head_dim=16, intermediate=30, vocab=513, rope_theta=1e6),
}


def load_reference(folder: Path, dtype: str = "float32") -> Any:
    """Return transformers' model of a checkpoint."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.to(getattr(torch, dtype)).eval()


def reference_logits(reference: Any, rows: Sequence[Sequence[int]]) -> list[Any]:
    """Return the logits [len(row), vocabulary] after each token of each row, float32."""
    import torch

    results = []
    for start in range(0, len(rows), 8):
        group = rows[start : start + 8]
        padded = torch.zeros(len(group), max(map(len, group)), dtype=torch.int64)
        for i, row in enumerate(group):
            padded[i, : len(row)] = torch.tensor(row)  # attention is causal: what stands behind a row changes nothing
        with torch.inference_mode():
            logits = reference(input_ids=padded, use_cache=False).logits.float()
        results += [logits[i, : len(row)] for i, row in enumerate(group)]
    return results


def assert_greedy(reference: Any, outputs: Sequence[Any]) -> None:
    """Assert that each token of each output is the reference's likeliest, or within a near tie of it."""
    rows = [out.prompt_token_ids + out.token_ids for out in outputs]
    for out, logits in zip(outputs, reference_logits(reference, rows), strict=True):
        assert out.token_ids, out
        first = len(out.prompt_token_ids) - 1
        for i, token in enumerate(out.token_ids):
            behind = float(logits[first + i].max() - logits[first + i, token])
            assert behind <= NEAR_TIE, f"output {out.index}, token {i}: {token} is {behind:.3g} behind the likeliest"
