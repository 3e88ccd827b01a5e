"""CudaDevice: memory, copies and kernels of one GPU; see `CpuDevice` for what its methods are for."""

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.cuda_graph import DecodeGraphs, graph_sizes
from nanovllm.engine.decode_state import DecodeRows
from nanovllm.engine.device import CpuDevice
from nanovllm.kernels import pointwise, small_batch
from nanovllm.kernels.all_reduce import PeerBuffers
from nanovllm.kernels.compile import compile_kernels
from nanovllm.kernels.decode_state import TritonDecodeState
from nanovllm.kernels.peer_memory import PeerMemory
from nanovllm.kernels.sampler import sample
from nanovllm.utils.parallel import TensorParallel

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")

_GRAPH_BYTES = 8 << 20  # what a captured step of some 300 kernels keeps on the device besides its activations

# What a rank sends in one launch. Two ranks never do better by NCCL, and larger launches would gain under a tenth; of
# more ranks it adds up rows with fewer bytes, if there are many.
_SENT_BYTES_OF_TWO, _SENT_BYTES = 16 << 20, 4 << 20
_ANSWER_S = 30.0  # within which the first sums of all ranks must be there, kernels compiled

_POOL_FACTOR = 4  # of what all sequences can hold: a tiny model on a large card would get a hundred million blocks


class CudaDevice(CpuDevice):
    """One NVIDIA GPU."""

    decode_state = TritonDecodeState

    def __init__(self, config: Config) -> None:
        self.torch_device = torch.device(config.device)
        if self.torch_device.index is None:
            self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.sample = sample
        self.graphs = None
        self.replay_events: list[tuple[Any, Any]] | None = None  # a list here collects start and end of each replay
        self._notes: list[str] = []
        self._peer_memory: PeerMemory | None = None

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.torch_device)

    def optimize(self, runner: "ModelRunner", config: Config) -> None:
        if runner.tp.size > 1:
            with runner.timed("peers"):
                self._meet_peers(runner, config.max_num_seqs)
        pointwise.install_kernels(runner.model, runner.tp)
        small_batch.install_kernels(runner.model)

    def _meet_peers(self, runner: "ModelRunner", max_num_seqs: int) -> None:
        """Give the ranks their faster way to add up rows, if each can write the memory of all others."""
        tp, width, dtype = runner.tp, runner.model_config.hidden_size, runner.dtype
        sent_bytes = _SENT_BYTES_OF_TWO if tp.size == 2 else _SENT_BYTES
        max_rows = max(small_batch.MAX_ROWS, sent_bytes // ((tp.size - 1) * width * dtype.itemsize))
        shape = width, max_rows, max_num_seqs, dtype
        self._peer_memory = PeerMemory(PeerBuffers.patterns(tp.size, *shape), tp)
        if self._peer_memory.addresses:
            peers = PeerBuffers(tp.rank, self._peer_memory.addresses, *shape, self.torch_device)
            tp.meet(peers)
            if tp.least(self._is_right(peers, tp)):
                return
            tp.peers = None
            self._peer_memory.close()
        logger.info(
            f"{self.torch_device} cannot write the memory of other ranks' GPUs, so NCCL does all of their exchange. "
            f"{self._peer_memory.problem}"
        )

    def _is_right(self, peers: PeerBuffers, tp: TensorParallel) -> bool:
        """Return whether sums through the peers' memory come, and are right; on some machines they do not."""
        rows = torch.arange(4 * peers.width).view(4, -1) % 64
        sums = [peers.all_reduce(((rows + turn) * (tp.rank + 1)).to(peers.dtype)) for turn in range(4)]
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + _ANSWER_S
        while not done.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not done.query():
            peers.abort()
        weight = tp.size * (tp.size + 1) // 2
        return all(torch.allclose(x.double(), (rows + i).double() * weight, rtol=0.01) for i, x in enumerate(sums))

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """See `CpuDevice`; through pinned memory, which the allocator keeps until the copy is done."""
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> torch.Tensor:
            done.synchronize()
            return host

        return wait

    def num_kvcache_blocks(self, runner: "ModelRunner", config: Config, block_bytes: int) -> int:
        """See `CpuDevice`: what the user's share of the card leaves after weights, the largest steps and graphs.

        Raises:
            ValueError: Not even one block fits; says where the memory is.
        """
        torch.cuda.empty_cache()  # what an earlier engine left in the allocator is free
        with runner.timed("compile"):
            compile_kernels(runner, config.max_num_seqs, config.max_model_len)
        with runner.timed("warmup"):
            prefill_bytes, decode_bytes = runner.warmup_model(config)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        sizes = [] if runner.is_eager else graph_sizes(config.max_num_seqs)
        graph_bytes = len(sizes) * _GRAPH_BYTES + (decode_bytes if sizes else 0)
        used = total - free
        budget = int(total * config.gpu_memory_utilization)
        available = budget - used - prefill_bytes - graph_bytes
        gib = 1 << 30
        own = torch.cuda.memory_reserved()
        self._notes = [
            f"of {total / gib:.1f} GiB {config.gpu_memory_utilization:.0%} usable: {own / gib:.2f} weights",
            f"{(used - own) / gib:.2f} others and CUDA",
            f"{prefill_bytes / gib:.2f} activations",
            f"{graph_bytes / gib:.2f} for {len(sizes)} graphs",
        ]
        if available < block_bytes and config.num_kvcache_blocks in (None, -1):
            raise ValueError(
                f"No KV block of {block_bytes / 2**20:.1f} MiB fits: {', '.join(self._notes)} GiB. Raise "
                f"gpu_memory_utilization={config.gpu_memory_utilization}, free the card, or lower "
                f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs={config.max_num_seqs}."
            )
        return min(available // block_bytes, _POOL_FACTOR * config.max_num_seqs * runner.max_blocks)

    def capture(self, runner: "ModelRunner", config: Config) -> None:
        if not runner.is_eager:
            with runner.timed("capture"):
                self.graphs = DecodeGraphs(runner, graph_sizes(config.max_num_seqs))

    def replay(self, num_rows: int) -> tuple[DecodeRows, torch.Tensor, torch.Tensor] | None:
        return None if self.graphs is None else self.graphs.replay(num_rows, self.replay_events)

    def close(self) -> None:
        with self.active():
            if self._peer_memory is not None:
                with contextlib.suppress(RuntimeError):  # of a device that is lost
                    self.synchronize()
                self._peer_memory.close()
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def describe(self) -> str:
        return "; " + ", ".join(self._notes) if self._notes else ""


def peak_bytes(run: Callable[[], Any]) -> int:
    """Run something and return the most memory it held at once, beyond what it found."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
