"""The pointwise work of a layer, fused: what lies between two matrix products or attention is one kernel each.

Each class is a heir of its twin in plain torch, whose place `install_kernels` gives it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from nanovllm.kernels.all_reduce import all_reduce_row, padded
from nanovllm.kernels.launch import dependent_launch, wait_for_inputs, warps_for
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.qwen3 import Qwen3Attention
from nanovllm.utils.context import get_context
from nanovllm.utils.parallel import SINGLE, TensorParallel


def _name(specialization: Any) -> str:
    """Return the kernel's name in traces, where an exchange between ranks is to be seen."""
    return "_rms_norm_kernel" if specialization.constants["RANKS"] == 1 else "_all_reduce_rms_norm_kernel"


@triton.jit(do_not_specialize=["part_stride"], repr=_name)
def _rms_norm_kernel(x, residual, weight, out, new_residual, eps, part_stride, pointers, turns, stop, stopped,
                     SIZE: tl.constexpr, PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NUM_PARTS: tl.constexpr,
                     RANK: tl.constexpr, RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, PAD)
    mask = columns < SIZE
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(x + row + columns, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        value += tl.load(x + part * part_stride + row + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual + row + columns, mask=mask, other=0.0).to(tl.float32)
        if RANKS > 1:
            value = all_reduce_row(value, tl.program_id(0), columns, mask, pointers, turns, stop, stopped,
                                   out.dtype.element_ty, SIZE, RANK, RANKS, MAX_ROWS)  # fmt: skip
        value += before
        tl.store(new_residual + row + columns, value.to(out.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + row + columns, (value * scale * gain).to(out.dtype.element_ty), mask=mask)


_ALONE = {"pointers": None, "turns": None, "stop": None, "stopped": None, "RANK": 0, "RANKS": 1, "MAX_ROWS": 1}


class TritonRMSNorm(RMSNorm):
    """`RMSNorm` in one kernel a call; inputs are left as they are."""

    tp: TensorParallel = SINGLE

    def rms_forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `RMSNorm.rms_forward`."""
        return self._run(x, None)[0]

    def add_rms_forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RMSNorm.add_rms_forward`.

        ``x`` may be in float32 parts, [num_parts, num_tokens, hidden], and is this rank's share where
        `TensorParallel.sums_in_norm` says so.
        """
        return self._run(x, residual)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous() and (residual is None or residual.is_contiguous())
        size = x.size(-1)
        pad = padded(size)
        like = x.view(-1, size) if residual is None else residual
        out, num_rows = torch.empty_like(like), len(like)
        total = out if residual is None else torch.empty_like(like)
        step, ranks = max(1, num_rows), _ALONE
        if residual is not None and self.tp.sums_in_norm(num_rows):
            step, ranks = self.tp.peers.max_rows, self.tp.peers.arguments()
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            _rms_norm_kernel[(len(out[rows]),)](
                x[..., rows, :], like[rows], self.weight, out[rows], total[rows], self.eps, out.numel(), **ranks,
                SIZE=size, PAD=pad, HAS_RESIDUAL=residual is not None, NUM_PARTS=x.numel() // out.numel(),
                num_warps=warps_for(pad), **dependent_launch(x))  # fmt: skip
        return out.view(x.shape if residual is None else like.shape), total


@triton.jit
def _silu_and_mul_kernel(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


class TritonSiluAndMul(SiluAndMul):
    """`SiluAndMul` in one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `SiluAndMul.forward`."""
        assert x.is_contiguous()
        size = x.size(-1) // 2
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
        block = min(1024, triton.next_power_of_2(size))
        _silu_and_mul_kernel[(out.numel() // size, triton.cdiv(size, block))](
            x, out, SIZE=size, BLOCK=block, num_warps=4
        )
        return out


@triton.jit
def _prepare_qkv_kernel(qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps,
                        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_HEADS: tl.constexpr,
                        PAD_HALF: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program a token: all heads as one tile of their first and one of their second halves."""
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
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
    stored = mask & (heads < tl.where(slot >= 0, TOTAL, 0))[:, None]
    tl.store(k_cache + at, y1, mask=stored & is_k)
    tl.store(k_cache + at + HALF, y2, mask=stored & is_k)
    tl.store(v_cache + at, y1, mask=stored & is_v)
    tl.store(v_cache + at + HALF, y2, mask=stored & is_v)


class TritonQwen3Attention(Qwen3Attention):
    """`Qwen3Attention` with norm, rotation and KV store of q, k and v in one kernel."""

    def prepare_qkv(
        self, positions: torch.Tensor, qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Qwen3Attention.prepare_qkv`; ``qkv`` is overwritten."""
        assert qkv.is_contiguous()
        pad_heads = triton.next_power_of_2(self.num_heads + 2 * self.num_kv_heads)
        pad_half = triton.next_power_of_2(self.head_dim // 2)
        _prepare_qkv_kernel[(len(qkv),)](
            qkv, self.q_norm.weight, self.k_norm.weight, self.rotary_emb.cos_sin_cache, positions,
            get_context().slot_mapping, self.attn.k_cache, self.attn.v_cache, self.q_norm.eps, HEADS=self.num_heads,
            KV_HEADS=self.num_kv_heads, HEAD_DIM=self.head_dim, PAD_HEADS=pad_heads, PAD_HALF=pad_half,
            num_warps=warps_for(pad_heads * pad_half), **dependent_launch(qkv))  # fmt: skip
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return q, k, v


def install_kernels(model: nn.Module, tp: TensorParallel = SINGLE) -> None:
    """Let a rank's CUDA model do its pointwise work in these kernels instead of plain torch."""
    for module in model.modules():
        for kernel_class in (TritonRMSNorm, TritonSiluAndMul, TritonQwen3Attention):
            if type(module) is kernel_class.__base__:
                module.__class__ = kernel_class  # the same parameters, other methods
        if isinstance(module, TritonRMSNorm):
            module.tp = tp
