"""Write K and V of a step's tokens to their slots. Twin: `TorchBackend.store_kvcache`."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kvcache_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr, PAD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)  # 64 bits: a cache may hold more than 2**31 elements
    columns = tl.arange(0, PAD)
    mask = columns < tl.where(slot >= 0, WIDTH, 0)
    key = tl.load(k + token * k_stride + columns, mask=mask)
    value = tl.load(v + token * v_stride + columns, mask=mask)
    tl.store(k_cache + slot * WIDTH + columns, key, mask=mask)
    tl.store(v_cache + slot * WIDTH + columns, value, mask=mask)


def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write each token's K and V to its slot.

    Args:
        k: [num_tokens, num_kv_heads, head_dim]; heads contiguous, any stride between tokens.
        v: The same shape.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        v_cache: The same shape.
        slot_mapping: [num_tokens] int32 or int64; -1 writes nothing.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride(1) == v.stride(1) == head_dim and k.stride(2) == v.stride(2) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    if num_tokens:
        width = num_heads * head_dim
        _store_kvcache_kernel[(num_tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k.stride(0),
            v.stride(0),
            WIDTH=width,
            PAD=triton.next_power_of_2(width),
        )
