"""Matrix products of a few rows: bound by reading the weight once, and by the launches around it.

Up to MAX_ROWS rows these kernels take the place of cuBLAS, which leaves half of the bandwidth unused there: a weight is
spread over the whole card, if need be along the inner dimension too, and what follows is folded in. SiLU and product
stand at the end of the MLP's first product; the partial sums of the products that go back into the residual are added
up by the norm behind them (see `TritonRMSNorm`).
"""

import torch
import triton
import triton.language as tl
from torch import nn

from nanovllm.kernels.launch import dependent_launch, wait_for_inputs
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.models.qwen3 import Qwen3MLP

MAX_ROWS = 16  # of one tile of the tensor cores; from 64 rows on cuBLAS is as fast
_PROGRAMS = 256  # two for each of the multiprocessors of a large card
_BLOCK_K = 128


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(x, weight, out, num_rows, N: tl.constexpr, K: tl.constexpr, K_LEN: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SILU: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    """One program a block of outputs and part of the inner dimension."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * K_LEN
    rows, inner = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    is_row = (rows < num_rows)[:, None]
    x_at = x + rows[:, None] * K + inner[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * K + inner[:, None]
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    total_up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    wait_for_inputs(PDL)
    for k in range(first, first + K_LEN, BLOCK_K):
        part = tl.load(x_at + k, mask=is_row, other=0.0)
        total = tl.dot(part, tl.load(weight_at + k), total)
        if SILU:
            total_up = tl.dot(part, tl.load(weight_at + N * K + k), total_up)
    if SILU:
        # Rounded in between, as if the product had been stored.
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate / (1 + tl.exp(-gate)) * total_up.to(out.dtype.element_ty).to(tl.float32)
    out_at = out + (tl.program_id(1) * num_rows + rows)[:, None] * N + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row)


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, *, silu_and_mul: bool = False, in_parts: bool = False
) -> torch.Tensor:
    """Return x @ weight.T for a few rows.

    Args:
        x: [num_rows, K] of 16 bits, at most MAX_ROWS rows, contiguous.
        weight: [N, K], for which `suits` holds.
        silu_and_mul: Return silu of the first half of the columns times the second half, [num_rows, N / 2].
        in_parts: Return float32 parts [num_parts, num_rows, N], whose sum is the product.
    """
    num_rows, k = x.shape
    n = len(weight) // 2 if silu_and_mul else len(weight)
    is_plain = not (silu_and_mul or in_parts)
    block_n = 16 if is_plain else 32
    num_parts = 1
    while in_parts and n // block_n * num_parts < _PROGRAMS and k % (2 * num_parts * _BLOCK_K) == 0:
        num_parts *= 2
    # Chosen among some 30 settings each on the shapes of 0.6B and 8B; a small grid needs deep pipelines.
    num_programs = n // block_n * num_parts
    num_stages = 5 if is_plain or num_programs <= _PROGRAMS else 3
    shape = (num_parts, num_rows, n) if in_parts else (num_rows, n)
    out = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    _few_rows_kernel[(n // block_n, num_parts)](
        x, weight, out, num_rows, N=n, K=k, K_LEN=k // num_parts, ROWS=MAX_ROWS, BLOCK_N=block_n, BLOCK_K=_BLOCK_K,
        SILU=silu_and_mul, num_warps=4 if silu_and_mul else 2, num_stages=num_stages,
        **dependent_launch(x))  # fmt: skip
    return out


def suits(weight: torch.Tensor) -> bool:
    """Return whether `few_rows_linear` takes a weight: 16 bits, and no block is cut off."""
    return weight.dtype.itemsize == 2 and weight.size(1) % _BLOCK_K == 0 and len(weight) % 64 == 0


class FewRowsQKVLinear(QKVParallelLinear):
    """`QKVParallelLinear` with its own kernel for a few rows."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearBase.multiply`."""
        return few_rows_linear(x, self.weight) if len(x) <= MAX_ROWS else super().multiply(x)


class FewRowsRowLinear(RowParallelLinear):
    """`RowParallelLinear` that leaves its sum to the norm behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `RowParallelLinear.forward`; of a few rows it gives parts, [num_parts, num_rows, output]."""
        return few_rows_linear(x, self.weight, in_parts=True) if len(x) <= MAX_ROWS else super().forward(x)


class FewRowsQwen3MLP(Qwen3MLP):
    """`Qwen3MLP` with SiLU and product folded into the first matrix product of a few rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Qwen3MLP.forward`."""
        if len(x) > MAX_ROWS:
            return super().forward(x)
        return self.down_proj(few_rows_linear(x, self.gate_up_proj.weight, silu_and_mul=True))


def install_kernels(model: nn.Module) -> None:
    """Let a CUDA model use these kernels wherever its weights suit them, and a norm adds up what is in parts."""
    for module in model.modules():
        if type(module) is QKVParallelLinear and suits(module.weight):
            module.__class__ = FewRowsQKVLinear
        elif type(module) is RowParallelLinear:
            adds_up_later = module.tp.size == 1 or module.tp.sums_in_norm(MAX_ROWS)
            if suits(module.weight) and module.bias is None and adds_up_later:
                module.__class__ = FewRowsRowLinear
        elif type(module) is Qwen3MLP and suits(module.gate_up_proj.weight):
            module.__class__ = FewRowsQwen3MLP
