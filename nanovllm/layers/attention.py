"""Attention, and the seam behind which a backend does the work.

The layer owns its view of the KV cache; a backend owns none and is chosen once, at start.
"""

from typing import Protocol

import torch
from torch import nn

from nanovllm.utils.context import Context, get_context


class AttentionBackend(Protocol):
    """What a backend does. Shapes: q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim],
    caches [num_blocks, block_size, num_kv_heads, head_dim]; all results have the shape of q.
    """

    name: str
    default_block_size: int
    always_paged: bool  # whether prefill wants block tables even if all K and V are new
    can_capture: bool  # whether its decode can be part of a CUDA graph

    def check(self, block_size: int, dtype: torch.dtype) -> None:
        """Raise ValueError for a block size or dtype that the backend cannot take."""

    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write each token's K and V to its slot; slot -1 writes nothing."""

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        context: Context,
    ) -> torch.Tensor:
        """Attend causally from each sequence's new tokens, to K and V in the cache if there are block tables."""

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, context: Context
    ) -> torch.Tensor:
        """Attend from one token a sequence to its whole context in the cache."""


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache.

    The model runner gives it `backend`, `k_cache` and `v_cache` before the first step.
    """

    backend: AttentionBackend
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.num_kv_heads = num_kv_heads

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write this step's K and V to their slots."""
        slot_mapping = get_context().slot_mapping
        assert slot_mapping is not None
        self.backend.store_kvcache(k, v, self.k_cache, self.v_cache, slot_mapping)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend, after this step's K and V were stored; see `AttentionBackend` for shapes."""
        context = get_context()
        if context.is_prefill:
            return self.backend.prefill(q, k, v, self.k_cache, self.v_cache, self.scale, context)
        return self.backend.decode(q, self.k_cache, self.v_cache, self.scale, context)
