"""Paged attention in plain torch: the path of machines without a GPU, and the oracle that kernels are tested against.

It reads and writes the same cache through the same slots and block tables as the kernels do.
"""

import torch
import torch.nn.functional as F

from nanovllm.utils.context import Context

# Decode copies the K and V of some rows next to each other; this bounds the copy (elements of K).
_MAX_GATHERED_ELEMENTS = 1 << 24


class TorchBackend:
    """See `nanovllm.layers.attention.AttentionBackend`. Any block size, head size and dtype."""

    name = "torch"
    default_block_size = 16
    always_paged = False
    can_capture = False  # it looks at context lengths on the host

    def check(self, block_size: int, dtype: torch.dtype) -> None:
        """Take any block size and dtype."""

    def store_kvcache(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write K and V to their slots; slot -1 writes nothing."""
        if bool((slot_mapping < 0).any()):
            kept = slot_mapping >= 0
            k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
        k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)

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
        """Attend sequence by sequence; a query at position p sees positions 0..p."""
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        ends_q, ends_k = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        out = torch.empty_like(q)
        for i in range(len(ends_q) - 1):
            new = slice(ends_q[i], ends_q[i + 1])
            len_q, len_k = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]
            if context.block_tables is None:
                keys, values = k[new], v[new]
            else:
                slots = _slots(context.block_tables[i : i + 1], k_cache.size(1), torch.arange(len_k, device=q.device))
                keys, values = _gather(k_cache, slots)[0], _gather(v_cache, slots)[0]
            mask = None
            if len_q != len_k:  # the diagonal ends at the bottom right corner, which is_causal cannot say
                mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)
            attended = F.scaled_dot_product_attention(
                q[new].transpose(0, 1).unsqueeze(0),  # [1, num_heads, len_q, head_dim]
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            out[new] = attended[0].transpose(0, 1)
        return out

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, context: Context
    ) -> torch.Tensor:
        """Attend in groups of rows, each as wide as its longest context."""
        assert context.block_tables is not None and context.context_lens is not None
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k_cache.size(2)
        # The query heads that share a KV head are rows of one small matrix.
        grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = torch.empty_like(grouped)
        lens = context.context_lens
        width = max(1, int(lens.max()))  # rows without a sequence have length 0
        step = max(1, _MAX_GATHERED_ELEMENTS // (width * num_kv_heads * head_dim))
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            columns = torch.arange(max(1, int(lens[rows].max())), device=q.device)
            mask = columns < lens[rows].unsqueeze(1)  # [rows, width]
            # Columns behind a row's end read its last token, so that no stale memory enters the sums.
            last = (lens[rows] - 1).clamp(min=0)
            slots = _slots(context.block_tables[rows], k_cache.size(1), torch.minimum(columns, last.unsqueeze(1)))
            out[rows] = F.scaled_dot_product_attention(
                grouped[rows],
                _gather(k_cache, slots).transpose(1, 2),  # [rows, num_kv_heads, width, head_dim]
                _gather(v_cache, slots).transpose(1, 2),
                attn_mask=mask[:, None, None],
                scale=scale,
            )
        return out.view(num_rows, num_heads, head_dim)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return [rows, width, num_kv_heads, head_dim] for slots [rows, width]."""
    # index_select copies whole slots and is four times faster on a CPU than indexing with a tensor.
    return cache.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _slots(block_tables: torch.Tensor, block_size: int, positions: torch.Tensor) -> torch.Tensor:
    """Map positions [rows, width] or [width] to slots [rows, width] through block tables [rows, max_blocks]."""
    positions = positions.expand(len(block_tables), -1)
    blocks = torch.gather(block_tables.long(), 1, positions // block_size)
    return blocks * block_size + positions % block_size
