"""Linear layers that may be split over ranks, each knowing which slice of a checkpoint tensor is its own.

Checkpoint weights are [output, input]; column parallel splits the output, row parallel the input. A `weight_loader`
takes anything that slices like a tensor, so a rank reads its own part of a file and no more.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.utils.parallel import SINGLE, TensorParallel

ShardId = str | int | None


class Shard(NamedTuple):
    """The part of one checkpoint tensor that a rank holds, along the split dimension (in rows or columns)."""

    full_size: int  # of the whole checkpoint tensor
    source_start: int  # where this rank's part begins in it
    size: int  # how much of it this rank holds
    target_start: int  # where it goes in the rank's own parameter


def load_shard(target: torch.Tensor, source: Any, shard: Shard, dim: int = 0) -> None:
    """Copy a rank's part of a checkpoint tensor into its place.

    Args:
        target: The rank's parameter.
        source: The whole checkpoint tensor, or a safetensors slice of it.
        shard: Which part, and where to.
        dim: The split dimension.

    Raises:
        ValueError: The checkpoint tensor has another shape than the layer.
    """
    shape = list(source.get_shape() if hasattr(source, "get_shape") else source.shape)
    expected = list(target.shape)
    expected[dim] = shard.full_size
    if shape != expected:
        raise ValueError(f"has shape {shape}, expected {expected}")
    index = [slice(None)] * dim + [slice(shard.source_start, shard.source_start + shard.size)]
    target.narrow(dim, shard.target_start, shard.size).copy_(source[tuple(index)])


class LinearBase(nn.Module):
    """What all linear layers share: a weight [output, input] and perhaps a bias [output], loaded by `weight_loader`."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., input] to x @ weight.T; replaced where a device has a better way (see `layers/onednn.py`)."""
        return F.linear(x, self.weight)

    def shard(self, shard_id: ShardId) -> Shard:
        """Return which output rows of the checkpoint tensor ``shard_id`` this rank holds: here all."""
        size = self.weight.size(0)
        return Shard(size, 0, size, 0)

    def weight_loader(self, param: torch.Tensor, source: Any, shard_id: ShardId = None) -> None:
        """Load this rank's part of a checkpoint tensor; ValueError if its shape is another."""
        load_shard(param, source, self.shard(shard_id))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., input] to this rank's part of [..., output]."""
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(LinearBase):
    """The same whole layer on every rank."""


class ColumnParallelLinear(LinearBase):
    """Output rows split over the ranks; needs no communication."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TensorParallel = SINGLE) -> None:
        super().__init__(input_size, tp.split(output_size, "output size"), bias, tp)

    def shard(self, shard_id: ShardId) -> Shard:
        size = self.weight.size(0)
        return Shard(size * self.tp.size, self.tp.rank * size, size, 0)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers with one input, fused; shard ids 0, 1, ... in order of ``output_sizes``."""

    def __init__(
        self, input_size: int, output_sizes: list[int], bias: bool = False, tp: TensorParallel = SINGLE
    ) -> None:
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(output_sizes), bias, tp)

    def shard(self, shard_id: ShardId) -> Shard:
        assert isinstance(shard_id, int)
        sizes = [self.tp.split(size, "output size") for size in self.output_sizes]
        size = sizes[shard_id]
        return Shard(self.output_sizes[shard_id], self.tp.rank * size, size, sum(sizes[:shard_id]))


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections, fused and split by heads; shard ids "q", "k", "v".

    With fewer KV heads than ranks, each KV head is held by several ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
        tp: TensorParallel = SINGLE,
    ) -> None:
        self.head_size = head_size
        self.total_num_kv_heads = total_num_kv_heads
        self.num_heads = tp.split(total_num_heads, "num_attention_heads")
        self.num_kv_heads, replicas = tp.split_kv_heads(total_num_kv_heads)
        self.kv_rank = tp.rank // replicas
        super().__init__(hidden_size, tp.size * (self.num_heads + 2 * self.num_kv_heads) * head_size, bias, tp)

    def shard(self, shard_id: ShardId) -> Shard:
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        if shard_id == "q":
            return Shard(q_size * self.tp.size, self.tp.rank * q_size, q_size, 0)
        assert shard_id in ("k", "v")
        target = q_size if shard_id == "k" else q_size + kv_size
        return Shard(self.total_num_kv_heads * self.head_size, self.kv_rank * kv_size, kv_size, target)


class RowParallelLinear(LinearBase):
    """Input columns split over the ranks; partial sums are added over all ranks, and the bias once."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TensorParallel = SINGLE) -> None:
        super().__init__(tp.split(input_size, "input size"), output_size, bias, tp)

    def weight_loader(self, param: torch.Tensor, source: Any, shard_id: ShardId = None) -> None:
        """See `LinearBase.weight_loader`; the bias is whole on every rank."""
        if param is self.bias:
            super().weight_loader(param, source)
        else:
            size = param.size(1)
            load_shard(param, source, Shard(size * self.tp.size, self.tp.rank * size, size, 0), dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's part of [num_tokens, input] to the whole [num_tokens, output].

        Where `TensorParallel.sums_in_norm` says so, to this rank's share of it.
        """
        y = self.multiply(x)
        if self.bias is not None and self.tp.rank == 0:
            y = y + self.bias
        return y if self.tp.sums_in_norm(len(x)) else self.tp.all_reduce(y)
