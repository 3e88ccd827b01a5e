"""TensorParallel: which rank of how many this is, and what ranks do together with tensors.

A group of processes belongs to one engine and is no global state of torch's, so that engines and the caller's own
groups do not meet. Ranks share one host; all of them call the same methods in the same order.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from nanovllm.utils.forks import keep_in_forks

distributed: Any = torch.distributed  # its classes are not all in its stubs

_MEETING_S = 30  # to connect, once all are there
_FOR_EVER = timedelta(days=30)  # a rank that dies is noticed by other means, one that loads slowly is waited for
# NCCL's own watch would end the caller's process, and ask for files that are gone once all ranks have met.
_NO_WATCH = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(eq=False)
class TensorParallel:
    """A rank's place among those that share a model; of size 1 by default, where nothing below does anything.

    Attributes:
        rank: This one, from 0.
        size: Number of ranks.
        group: torch's process group.
        peers: A faster way for some collectives, `PeerBuffers`, where GPUs can write each other's memory; see `meet`.
        is_closed: Whether `close` was called.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    peers: Any = None
    is_closed: bool = False

    @classmethod
    def join(
        cls, rank: int, size: int, init_method: str, is_cuda: bool, check: Callable[[], None] = lambda: None
    ) -> "TensorParallel":
        """Wait for all ranks, and connect them by NCCL on GPUs, by gloo through the loopback device elsewhere.

        Args:
            rank: Of this process.
            size: Number of ranks.
            init_method: A file, as in `torch.distributed.init_process_group`; needed until the first collective.
            is_cuda: Whether tensors are on GPUs, one a rank.
            check: Called while waiting; it raises if there is nothing to wait for.
        """
        store = distributed.FileStore(os.fsencode(init_method.removeprefix("file://")), size)
        store.set(f"rank {rank}", "")
        while not store.check([f"rank {other}" for other in range(size)]):
            check()
            time.sleep(0.01)
        if is_cuda:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _FOR_EVER
            with _environment(_NO_WATCH):
                return cls(rank, size, distributed.ProcessGroupNCCL(store, rank, size, options))
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=_MEETING_S)
        store.set_timeout(options._timeout)
        group = _while_checking(lambda: distributed.ProcessGroupGloo(store, rank, size, options), check)
        group._set_default_timeout(_FOR_EVER)
        return cls(rank, size, group)

    def __post_init__(self) -> None:
        keep_in_forks(self)

    def meet(self, peers: Any) -> None:
        """Use ``peers`` from now on."""
        self.peers = peers
        if self.is_closed:  # meanwhile, by another thread
            peers.abort()

    def split(self, total: int, what: str) -> int:
        """Return the share of ``total`` that a rank holds; ValueError if it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what}={total} does not divide by tensor_parallel_size={self.size}. Take one that divides it."
            )
        return total // self.size

    def split_kv_heads(self, total: int) -> tuple[int, int]:
        """Return how many of ``total`` KV heads a rank holds, and how many ranks hold each; ValueError if uneven."""
        replicas = max(1, self.size // total)
        if total * replicas % self.size:
            raise ValueError(
                f"num_key_value_heads={total} neither divides by tensor_parallel_size={self.size} nor divides it. Take "
                "a tensor_parallel_size that divides it, or a multiple of it."
            )
        return total * replicas // self.size, replicas

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` [num_rows, width] over all ranks, perhaps in place."""
        if self.sums_in_norm(len(x)):
            return self.peers.all_reduce(x)
        if self.size > 1:
            options = distributed.AllreduceOptions()
            if hasattr(options, "asyncOp"):
                options.asyncOp = False  # on the stream of the kernels around it
            self._run(self.group.allreduce, [x], options)
        return x

    def sums_in_norm(self, num_rows: int) -> bool:
        """Return whether so many rows are added up by the norm behind a row-parallel layer, not by the layer."""
        # Of two ranks all rows: there, a ring would carry as many bytes.
        return self.peers is not None and (self.size == 2 or num_rows <= self.peers.max_rows)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all ranks have, [size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0)
        parts = x.new_empty((self.size, *x.shape))
        self._run(self.group.allgather, [list(parts.unbind())], [x.contiguous()])
        return parts

    def of_rank_0(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's ``x``, small; the others give one of the same shape and type."""
        return self.all_gather(x)[0]

    def least(self, number: int) -> int:
        """Return the least number of any rank."""
        least = int(self.all_gather(torch.tensor([number], dtype=torch.int64)).min())
        if self.is_closed:  # NCCL was aborted meanwhile, and left anything
            raise ConnectionError(f"Tensor-parallel rank {self.rank} has lost another one.")
        return least

    def whole_logits(self, part: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Put the ranks' parts of logits, [num_rows, width], together to [num_rows, vocab_size]."""
        if self.size == 1:
            return part
        return self.all_gather(part).transpose(0, 1).flatten(1)[:, :vocab_size]

    def pick(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return, for each row, the token of the rank with the highest score, the lowest such rank's if there are more.

        Args:
            tokens: [num_rows] int64, what this rank's part of the vocabulary would choose.
            scores: [num_rows] float32.
        """
        if self.size == 1:
            return tokens
        if self.peers is not None and len(tokens) <= self.peers.max_draws:
            return self.peers.pick(tokens, scores)
        draws = self.all_gather(torch.stack((scores.double(), tokens.double())))  # exact: [size, 2, num_rows]
        return draws[:, 1].gather(0, draws[:, 0].argmax(0, keepdim=True)).squeeze(0).long()

    def _run(self, collective: Any, *args: Any) -> None:
        try:
            work = collective(*args)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise ConnectionError(f"Tensor-parallel rank {self.rank} has lost another one: {error}") from error

    def close(self) -> None:
        """Leave the group, also in the midst of a collective that will never end; from any thread, more than once."""
        if self.size == 1:
            return
        self.is_closed = True
        if self.peers is not None:
            self.peers.abort()
        group = self.group  # another thread may let go of it
        if type(group).__name__ == "ProcessGroupNCCL":  # gloo's collectives end by themselves when a rank does
            (group.abort if hasattr(group, "abort") else group._shutdown)()


SINGLE = TensorParallel()


def _while_checking(build: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Return what ``build`` returns, and meanwhile call ``check``, which may raise; Ctrl-C gets through too."""
    results: Future[Any] = Future()

    def work() -> None:
        try:
            results.set_result(build())
        except BaseException as error:
            results.set_exception(error)

    threading.Thread(target=work, name="nanovllm-connect", daemon=True).start()
    while not results.done():
        check()
        time.sleep(0.01)
    return results.result()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set, inside the block."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
