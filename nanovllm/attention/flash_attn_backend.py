"""The flash-attn 2 package as a backend: nano-vLLM's own path (arXiv 2205.14135, 2307.08691)."""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from nanovllm.kernels.store_kvcache import store_kvcache
from nanovllm.utils.context import Context


class FlashAttnBackend:
    """See `nanovllm.layers.attention.AttentionBackend`. 16-bit dtypes, blocks of multiples of 256."""

    name = "flash_attn"
    default_block_size = 256
    always_paged = False
    can_capture = True

    def check(self, block_size: int, dtype: torch.dtype) -> None:
        """See `AttentionBackend`."""
        if block_size % 256:
            raise ValueError(
                f"kvcache_block_size={block_size}: flash_attn takes multiples of 256; 'triton' takes 16 on."
            )
        if dtype == torch.float32:
            raise ValueError("attention_backend='flash_attn' needs a 16-bit dtype, not float32; 'triton' takes both.")

    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write K and V to their slots; slot -1 writes nothing."""
        store_kvcache(k, v, k_cache, v_cache, slot_mapping)

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
        """Attend from ragged chunks, to the cache where a prefix is in it."""
        if context.block_tables is not None:
            k, v = k_cache, v_cache
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=context.block_tables,
        )

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, context: Context
    ) -> torch.Tensor:
        """Attend from one token a sequence."""
        return flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=context.context_lens,
            block_table=context.block_tables,
            softmax_scale=scale,
            causal=True,
        ).squeeze(1)
