"""The pointwise work of a layer, fused: what lies between two matrix products or attention is one kernel each.

Twins: `RMSNorm`, `SiluAndMul` and `Qwen3Attention.prepare_qkv` in plain torch, replaced by `install_kernels`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.qwen3 import Qwen3Attention
from nanovllm.utils.context import get_context


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, new_residual, eps, SIZE: tl.constexpr, PAD: tl.constexpr,
                     HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, PAD)
    mask = columns < SIZE
    value = tl.load(x + row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(new_residual + row + columns, value.to(out.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = value * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """See `RMSNorm.rms_forward`; ``x`` is contiguous in its last dimension."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.size(-1)
    pad = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x, x, norm.weight, out, out, norm.eps, SIZE=size, PAD=pad, HAS_RESIDUAL=False, num_warps=_warps(pad)
    )
    return out


def add_rms_norm(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `RMSNorm.add_rms_forward`; both inputs [num_tokens, hidden], contiguous, and left as they are."""
    assert x.is_contiguous() and residual.is_contiguous()
    out, new_residual = torch.empty_like(x), torch.empty_like(x)
    size = x.size(-1)
    pad = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x,
        residual,
        norm.weight,
        out,
        new_residual,
        norm.eps,
        SIZE=size,
        PAD=pad,
        HAS_RESIDUAL=True,
        num_warps=_warps(pad),
    )
    return out, new_residual


@triton.jit
def _silu_and_mul_kernel(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `SiluAndMul.forward`; ``x`` [num_tokens, 2 * size], contiguous."""
    assert x.is_contiguous()
    size = x.size(-1) // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(out.numel() // size, triton.cdiv(size, block))](x, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _prepare_qkv_kernel(qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps,
                        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_HEADS: tl.constexpr,
                        PAD_HALF: tl.constexpr):  # fmt: skip
    """One program a token: all heads as one tile of their first and one of their second halves."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    heads, half = tl.arange(0, PAD_HEADS), tl.arange(0, PAD_HALF)
    is_q, is_v = (heads < HEADS)[:, None], (heads >= HEADS + KV_HEADS)[:, None]
    in_half = half < HALF
    mask = (heads < TOTAL)[:, None] & in_half[None, :]
    pointers = qkv + token * (TOTAL * HEAD_DIM) + heads[:, None] * HEAD_DIM + half[None, :]
    raw1 = tl.load(pointers, mask=mask, other=0.0)
    raw2 = tl.load(pointers + HALF, mask=mask, other=0.0)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_DIM + eps)[:, None]
    qw1 = tl.load(q_weight + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    qw2 = tl.load(q_weight + HALF + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kw1 = tl.load(k_weight + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kw2 = tl.load(k_weight + HALF + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    x1 = x1 * scale * tl.where(is_q, qw1, kw1)
    x2 = x2 * scale * tl.where(is_q, qw2, kw2)
    cos = tl.load(cos_sin + position * HEAD_DIM + half, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + half, mask=in_half, other=0.0)[None, :]
    y1 = tl.where(is_v, raw1, (x1 * cos - x2 * sin).to(raw1.dtype))
    y2 = tl.where(is_v, raw2, (x2 * cos + x1 * sin).to(raw2.dtype))
    tl.store(pointers, y1, mask=mask & (heads < HEADS + KV_HEADS)[:, None])
    tl.store(pointers + HALF, y2, mask=mask & (heads < HEADS + KV_HEADS)[:, None])
    is_k = (heads >= HEADS)[:, None] & (heads < HEADS + KV_HEADS)[:, None]
    kv_head = tl.where(is_v, heads[:, None] - HEADS - KV_HEADS, heads[:, None] - HEADS)
    at = (slot * KV_HEADS + kv_head) * HEAD_DIM + half[None, :]
    stored = mask & (slot >= 0)
    tl.store(k_cache + at, y1, mask=stored & is_k)
    tl.store(k_cache + at + HALF, y2, mask=stored & is_k)
    tl.store(v_cache + at, y1, mask=stored & is_v)
    tl.store(v_cache + at + HALF, y2, mask=stored & is_v)


def prepare_qkv(
    attention: Qwen3Attention, positions: torch.Tensor, qkv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Qwen3Attention.prepare_qkv`; ``qkv`` [num_tokens, heads, head_dim], contiguous, is overwritten."""
    assert qkv.is_contiguous()
    slot_mapping = get_context().slot_mapping
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    pad_heads = triton.next_power_of_2(heads + 2 * kv_heads)
    pad_half = triton.next_power_of_2(head_dim // 2)
    _prepare_qkv_kernel[(len(qkv),)](
        qkv, attention.q_norm.weight, attention.k_norm.weight, attention.rotary_emb.cos_sin_cache, positions,
        slot_mapping, attention.attn.k_cache, attention.attn.v_cache, attention.q_norm.eps, HEADS=heads,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAD_HEADS=pad_heads, PAD_HALF=pad_half,
        num_warps=_warps(pad_heads * pad_half))  # fmt: skip
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def install_kernels(model: nn.Module) -> None:
    """Let a CUDA model's pointwise work run in these kernels instead of plain torch."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.rms_forward = functools.partial(rms_norm, module)  # type: ignore[method-assign]
            module.add_rms_forward = functools.partial(add_rms_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, SiluAndMul):
            module.forward = silu_and_mul  # type: ignore[method-assign]
        elif isinstance(module, Qwen3Attention):
            module.prepare_qkv = functools.partial(prepare_qkv, module)  # type: ignore[method-assign]


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 512))
