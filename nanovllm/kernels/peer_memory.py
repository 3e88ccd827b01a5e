"""PeerMemory: memory on every rank's GPU that the kernels of all ranks can write.

Through the driver's interprocess handles, which are plain bytes: what torch shares in such a way leaves files behind
when a process is killed.
"""

import ctypes
from typing import Any

import torch

from nanovllm.utils.parallel import TensorParallel

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class PeerMemory:
    """Memory of the current GPU, and that of all other ranks; made by all of them at once.

    Args:
        patterns: Pairs of a number of bytes, a multiple of 16, and the 32-bit pattern that fills them at first.
        tp: The ranks, connected, each with a GPU of one host.

    Attributes:
        addresses: Of each rank's memory, as this rank sees it; empty if some rank cannot write that of another.
        problem: In that case, what the driver said if it was on this rank.
    """

    def __init__(self, patterns: list[tuple[int, int]], tp: TensorParallel) -> None:
        self.problem = ""
        self._own, self._opened = ctypes.c_uint64(), list[ctypes.c_uint64]()
        try:
            self._open(patterns, tp)
        except BaseException:  # of a rank that is lost; the caller may go on without an engine
            self.close()
            raise

    def _open(self, patterns: list[tuple[int, int]], tp: TensorParallel) -> None:
        handle = _Handle()
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
            self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(sum(size for size, _ in patterns)))
            first = self._own.value
            for size, pattern in patterns:
                self._call("cuMemsetD32_v2", ctypes.c_uint64(first), ctypes.c_uint(pattern), ctypes.c_size_t(size // 4))
                first += size
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        except OSError as error:
            self.problem = str(error)
        handles = tp.all_gather(torch.tensor(list(handle.bytes), dtype=torch.uint8, device="cuda")).tolist()
        self.addresses = [self._own.value] * tp.size
        try:
            for rank, values in enumerate(handles):
                if rank != tp.rank and not self.problem:
                    address = ctypes.c_uint64()
                    other = _Handle((ctypes.c_ubyte * 64)(*values))
                    self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), other, ctypes.c_uint(_LAZY_PEER_ACCESS))
                    self._opened.append(address)
                    self.addresses[rank] = address.value
        except OSError as error:
            self.problem = str(error)
        torch.cuda.synchronize()  # it is filled before anyone writes there
        if not tp.least(not self.problem):
            self.close()

    def close(self) -> None:
        """Give the memory back; no kernel may be using it."""
        for address in self._opened:
            self._driver.cuIpcCloseMemHandle(address)
        if self._own.value:
            self._driver.cuMemFree_v2(self._own)
        self._own, self._opened, self.addresses = ctypes.c_uint64(), [], []

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        if code:
            raise OSError(f"{name} gave CUDA error {code}")
