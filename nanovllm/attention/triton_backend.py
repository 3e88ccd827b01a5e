"""Paged attention in Triton: prefill over ragged chunks, decode split over the context. Twin: torch_backend.py.

Online softmax in base 2 (FlashAttention, arXiv 2205.14135 and 2307.08691); K and V are read through block tables
(PagedAttention, arXiv 2309.06180); a decode step with few rows splits each context over several programs, whose partial
results a second kernel merges (Flash-Decoding).
"""

import math

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import dependent_launch, wait_for_inputs
from nanovllm.kernels.store_kvcache import store_kvcache
from nanovllm.utils.context import Context

_DECODE_PROGRAMS = 264  # two for each of the multiprocessors of a large card: fewer leave memory idle
_MAX_SPLITS = 64


@triton.jit
def _load_kv(cache, block, slot_in_block, token_mask, dims, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
             HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load [tokens, PAD_DIM] of one head; tokens behind the end read as zero, so stale memory enters no sum."""
    offsets = (block.to(tl.int64) * BLOCK_SIZE + slot_in_block) * (KV_HEADS * HEAD_DIM)
    pointers = cache + offsets[:, None] + dims[None, :]
    if MASKED or HEAD_DIM != dims.shape[0]:
        return tl.load(pointers, mask=token_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(q, accumulator, row_max, row_sum, k_cache, v_cache, table, start, stop, length, last_visible, scale_log2,
            BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
            MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add the tokens start..stop (a multiple of TILE apart) to an online softmax."""
    dims = tl.arange(0, q.shape[1])
    columns = tl.arange(0, TILE)
    # The block number is carried through the loop, loaded one tile ahead: otherwise the pipeliner sees a chain
    # block table -> K, V in each round and does not buffer K and V twice.
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < length, other=0)
    else:
        block = tl.load(table + (start + columns) // BLOCK_SIZE, mask=start + columns < length, other=0)
    for at in range(start, stop, TILE):
        tokens = at + columns
        if BLOCK_SIZE % TILE == 0:
            slot_in_block = at % BLOCK_SIZE + columns
        else:
            slot_in_block = tokens % BLOCK_SIZE
        k = _load_kv(k_cache, block, slot_in_block, tokens < length, dims, BLOCK_SIZE, KV_HEADS, HEAD_DIM, MASKED)
        v = _load_kv(v_cache, block, slot_in_block, tokens < length, dims, BLOCK_SIZE, KV_HEADS, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if MASKED:
            scores = tl.where(tokens[None, :] <= last_visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        decay = tl.exp2(row_max - safe_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
        row_max = new_max
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + (at + TILE) // BLOCK_SIZE, mask=at + TILE < length, other=0)
        else:
            block = tl.load(table + (tokens + TILE) // BLOCK_SIZE, mask=tokens + TILE < length, other=0)
    return accumulator, row_max, row_sum


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _prefill_kernel(q, k_cache, v_cache, out, cu_seqlens_q, cu_seqlens_k, block_tables, scale_log2, num_seqs,
                    table_stride, q_stride, out_stride, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
                    HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
                    TILE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One program a tile of queries and query head. Tiles are numbered so that tile t of sequence s is
    cu_seqlens_q[s] // ROWS + s + t: at least as many numbers as tiles, found by bisection, no table needed.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    low, high = num_seqs * 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // ROWS + middle <= number:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    q_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    first_row = (number - q_start // ROWS - seq) * ROWS
    if first_row < q_len:
        k_len = tl.load(cu_seqlens_k + seq + 1) - tl.load(cu_seqlens_k + seq)
        rows = first_row + tl.arange(0, ROWS)
        dims = tl.arange(0, PAD_DIM)
        q_mask = (rows < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
        q_offsets = (q_start + rows).to(tl.int64)[:, None] * q_stride + head * HEAD_DIM + dims[None, :]
        q_tile = tl.load(q + q_offsets, mask=q_mask, other=0.0)
        last_visible = k_len - q_len + rows  # position of each query
        kv_offset = (head // GROUP) * HEAD_DIM
        table = block_tables + seq.to(tl.int64) * table_stride
        accumulator = tl.zeros((ROWS, PAD_DIM), tl.float32)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        # Tiles that every query of this program sees whole need no mask.
        stop = tl.minimum(k_len, k_len - q_len + first_row + ROWS)
        unmasked = (k_len - q_len + first_row + 1) // TILE * TILE
        accumulator, row_max, row_sum = _attend(
            q_tile, accumulator, row_max, row_sum, k_cache + kv_offset, v_cache + kv_offset, table, first_row * 0,
            unmasked, k_len, last_visible, scale_log2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, TILE, False,
            PRECISION)  # fmt: skip
        accumulator, row_max, row_sum = _attend(
            q_tile, accumulator, row_max, row_sum, k_cache + kv_offset, v_cache + kv_offset, table, unmasked, stop,
            k_len, last_visible, scale_log2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, TILE, True, PRECISION)  # fmt: skip
        result = accumulator / row_sum[:, None]
        out_offsets = (q_start + rows).to(tl.int64)[:, None] * out_stride + head * HEAD_DIM + dims[None, :]
        tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(q, k_cache, v_cache, out, partials, partial_lse, context_lens, block_tables, scale_log2,
                   table_stride, q_stride, GROUP: tl.constexpr, PAD_GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
                   HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
                   NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program a KV head, split of the context, and sequence; a row of length 0 gives zeros."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(PDL)
    length = tl.load(context_lens + row)
    split_len = tl.cdiv(tl.cdiv(length, NUM_SPLITS), TILE) * TILE
    start = split * split_len
    stop = tl.minimum(start + split_len, length)
    group, dims = tl.arange(0, PAD_GROUP), tl.arange(0, PAD_DIM)
    heads = kv_head * GROUP + group
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + row.to(tl.int64) * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    accumulator = tl.zeros((PAD_GROUP, PAD_DIM), tl.float32)
    row_max = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    row_sum = tl.zeros((PAD_GROUP,), tl.float32)
    last_visible = tl.zeros((PAD_GROUP,), tl.int32) + length - 1
    accumulator, row_max, row_sum = _attend(
        q_tile, accumulator, row_max, row_sum, k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM,
        block_tables + row.to(tl.int64) * table_stride, start, stop, length, last_visible, scale_log2, BLOCK_SIZE,
        KV_HEADS, HEAD_DIM, TILE, True, PRECISION)  # fmt: skip
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
    if NUM_SPLITS == 1:
        tl.store(out + row_head[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        at = row_head * NUM_SPLITS + split
        tl.store(partials + at[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(partial_lse + at, tl.where(row_sum > 0, row_max + tl.log2(row_sum), float("-inf")), mask=group < GROUP)


@triton.jit
def _merge_kernel(partials, partial_lse, out, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """One program a row and head: weigh the partial results of the splits by their sums."""
    row_head = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, PAD_DIM)
    lse = tl.load(partial_lse + row_head * NUM_SPLITS + splits)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total > 0, total, 1.0)
    offsets = (row_head * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(partials + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(values * weights[:, None], 0)
    tl.store(out + row_head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Return how many programs share a context: a power of two that follows from the batch size alone."""
    programs = num_rows * num_kv_heads
    if programs >= _DECODE_PROGRAMS:
        return 1
    return min(_MAX_SPLITS, 1 << round(math.log2(_DECODE_PROGRAMS / programs)))


class TritonBackend:
    """See `nanovllm.layers.attention.AttentionBackend`. Any head size, blocks of a power of two from 16 on."""

    name = "triton"
    default_block_size = 64
    always_paged = True
    can_capture = True

    def check(self, block_size: int, dtype: torch.dtype) -> None:
        """See `AttentionBackend`."""
        if block_size < 16 or block_size & (block_size - 1):
            raise ValueError(
                f"kvcache_block_size={block_size}: triton takes powers of two from 16 on; 'torch' takes any."
            )

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
        """Attend from ragged chunks to K and V in the cache (``k`` and ``v`` are there already)."""
        assert context.cu_seqlens_q is not None and context.block_tables is not None
        num_tokens, num_heads, head_dim = q.shape
        block_size, num_kv_heads = k_cache.shape[1:3]
        pad_dim = max(16, triton.next_power_of_2(head_dim))
        num_seqs = len(context.cu_seqlens_q) - 1
        if q.dtype == torch.float32:
            rows, tile, warps, stages = 32, 32, 4, 1
        elif context.max_seqlen_k > 2048 and pad_dim <= 128:
            rows, tile, warps, stages = 128, 128, 8, 2
        else:
            rows, tile, warps, stages = 64, 64, 4, 3 if pad_dim <= 128 else 1
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
        _prefill_kernel[(num_tokens // rows + num_seqs, num_heads)](
            q, k_cache, v_cache, out, context.cu_seqlens_q, context.cu_seqlens_k, context.block_tables,
            scale * math.log2(math.e), num_seqs, context.block_tables.stride(0), q.stride(0), out.stride(0),
            GROUP=num_heads // num_kv_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAD_DIM=pad_dim,
            BLOCK_SIZE=block_size, ROWS=rows, TILE=tile, PRECISION="ieee", num_warps=warps,
            num_stages=stages)  # fmt: skip
        return out

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, context: Context
    ) -> torch.Tensor:
        """Attend from one token a sequence; a row of length 0 gives zeros."""
        assert context.context_lens is not None and context.block_tables is not None
        num_rows, num_heads, head_dim = q.shape
        block_size, num_kv_heads = k_cache.shape[1:3]
        group = num_heads // num_kv_heads
        pad_dim = max(16, triton.next_power_of_2(head_dim))
        splits = num_splits(num_rows, num_kv_heads)
        is_float32 = q.dtype == torch.float32
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
        partials = lse = out
        if splits > 1:
            partials = torch.empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
            lse = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
        _decode_kernel[(num_kv_heads, splits, num_rows)](
            q, k_cache, v_cache, out, partials, lse, context.context_lens, context.block_tables,
            scale * math.log2(math.e), context.block_tables.stride(0), q.stride(0), GROUP=group,
            PAD_GROUP=max(16, triton.next_power_of_2(group)), KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            PAD_DIM=pad_dim, BLOCK_SIZE=block_size,
            TILE=32 if is_float32 else 64, NUM_SPLITS=splits, PRECISION="ieee", num_warps=4,
            num_stages=1 if is_float32 or pad_dim > 128 else 3, **dependent_launch(q))  # fmt: skip
        if splits > 1:
            _merge_kernel[(num_rows * num_heads,)](
                partials, lse, out, HEAD_DIM=head_dim, PAD_DIM=pad_dim, NUM_SPLITS=splits, num_warps=1,
                **dependent_launch(q))  # fmt: skip
        return out
