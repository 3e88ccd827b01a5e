"""What differs between a CPU and a GPU, as objects chosen once at start: this one is the CPU.

`create_device` is the only place that asks which of them it is; `CudaDevice` has the same methods.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.decode_state import DecodeRows, DecodeState
from nanovllm.layers.onednn import pack_linear_weights
from nanovllm.layers.sampler import Sampler

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

_CPU_POOL_BYTES = 2 << 30

Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # see `Sampler.forward`


class CpuDevice:
    """Plain torch; results are there as soon as a step returns."""

    decode_state = DecodeState
    graphs: Any = None  # captured decode steps, where the device has them

    def __init__(self, config: Config) -> None:
        self.torch_device = torch.device(config.device)
        self.sample: Sample = Sampler()

    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""
        return nullcontext()

    def optimize(self, runner: "ModelRunner", config: Config) -> None:
        """Put the device's own kernels in the place of plain torch."""
        pack_linear_weights(runner.model)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Return a host array's content on the device, without waiting."""
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying a tensor to the host; the result waits for the copy and returns it."""
        return lambda: tensor

    def num_kvcache_blocks(self, runner: "ModelRunner", config: Config, block_bytes: int) -> int:
        """Return how many KV blocks the device has room for; ValueError if there is none for a measured pool."""
        pool_bytes = _CPU_POOL_BYTES // runner.tp.size  # all ranks have the same memory
        if block_bytes > pool_bytes and config.num_kvcache_blocks in (None, -1):
            raise ValueError(
                f"A block of kvcache_block_size={runner.block_size} takes {block_bytes} bytes, but a measured "
                f"pool has {pool_bytes}. Lower it, or set num_kvcache_blocks."
            )
        wanted = config.max_num_seqs * -(-config.max_model_len // runner.block_size)
        return min(wanted, pool_bytes // block_bytes)

    def capture(self, runner: "ModelRunner", config: Config) -> None:
        """Prepare captured decode steps, where the device has them."""

    def replay(self, num_rows: int) -> tuple[DecodeRows, torch.Tensor, torch.Tensor] | None:
        """Run a captured `ModelRunner.decode_rows`: rows, logits, tokens; None if there is none."""
        return None

    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""

    def close(self) -> None:
        """Give memory back."""

    def describe(self) -> str:
        """Return what a start-up line says of memory and graphs."""
        return ""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a device's memory did not suffice; a CPU's allocator has no error of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def create_device(config: Config) -> "CpuDevice":
    """Return the device that the config's settled `device` names."""
    if config.device == "cpu":
        return CpuDevice(config)
    from nanovllm.engine.cuda_device import CudaDevice

    return CudaDevice(config)
