"""Qwen3, dense: modules and weights named as in the checkpoint."""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import ModelConfig
from nanovllm.utils.parallel import SINGLE, TensorParallel


class Qwen3Attention(nn.Module):
    """Grouped-query attention with a norm on each query and key head."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            tp=tp,
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.attention_bias, tp=tp
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.num_heads, config.head_dim, config.head_dim**-0.5, self.num_kv_heads)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden] to the same shape."""
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # [num_tokens, heads, head_dim]
        return self.o_proj(self.attn(*self.prepare_qkv(positions, qkv)).flatten(1))

    def prepare_qkv(
        self, positions: torch.Tensor, qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split, norm and rotate q and k, store k and v; fused into one kernel on a GPU."""
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        self.attn.store(k, v)
        return q, k, v


class Qwen3MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [config.intermediate_size] * 2, tp=tp)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, tp=tp)
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden] to the same shape."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that also adds what came before to the residual."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, rotary_emb, tp)
        self.mlp = Qwen3MLP(config, tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output and the residual that it has yet to be added to."""
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen3Model(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig, max_model_len: int, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        rotary_emb = RotaryEmbedding(config.head_dim, max_model_len, config.rope_theta)  # one table for all layers
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, rotary_emb, tp) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map ids and positions [num_tokens] to hidden states [num_tokens, hidden]."""
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Qwen3ForCausalLM(nn.Module):
    """Qwen3 with its LM head.

    Args:
        config: The checkpoint's shape.
        max_model_len: Positions that will be used: 0..max_model_len - 1.
        tp: This rank's place among those that share the model.
    """

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, max_model_len: int, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.model = Qwen3Model(config, max_model_len, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map ids and positions [num_tokens] to hidden states [num_tokens, hidden]."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map hidden states to logits for the rows that the context asks for, in ``out`` if it is given."""
        return self.lm_head(hidden_states, out)
