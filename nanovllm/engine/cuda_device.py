"""CudaDevice: memory, copies and kernels of one GPU; see `CpuDevice` for what its methods are for."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.engine.cuda_graph import DecodeGraphs, graph_sizes
from nanovllm.engine.decode_state import DecodeRows
from nanovllm.engine.device import CpuDevice
from nanovllm.kernels import pointwise, small_batch
from nanovllm.kernels.compile import compile_kernels
from nanovllm.kernels.decode_state import TritonDecodeState
from nanovllm.kernels.sampler import sample

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")

_GRAPH_BYTES = 8 << 20  # what a captured step of some 300 kernels keeps on the device besides its activations

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

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.torch_device)

    def optimize(self, model: nn.Module) -> None:
        pointwise.install_kernels(model)
        small_batch.install_kernels(model)

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
        self.graphs = None
        torch.cuda.empty_cache()

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
