"""TensorParallel: which rank of how many this is, and the one collective that layers need."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorParallel:
    """A rank's place among those that share a model; of size 1 by default, without any process group."""

    rank: int = 0
    size: int = 1

    def split(self, total: int, what: str) -> int:
        """Return the share of ``total`` that a rank holds; ValueError if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}.")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks (in place where there are several)."""
        if self.size > 1:
            torch.distributed.all_reduce(x)
        return x


SINGLE = TensorParallel()
