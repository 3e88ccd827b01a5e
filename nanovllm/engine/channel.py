"""Channel: rank 0's commands to the other ranks, through one piece of shared memory.

A ring of slots that every worker reads once and in order, while rank 0 may run ahead. It knows bytes, arrays and
semaphores; processes and their deaths are the executor's matter, the meaning of a command its handler's.

Two semaphores for each worker count its filled and its free slots. A count loses no wake-up, and POSIX makes every
semaphore call a memory barrier, so nothing here rests on the order in which a CPU shows its stores.
`multiprocessing.Event` will not do: its `set` waits until each sleeper has woken, for ever if one was killed asleep.
"""

import contextlib
import errno
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from multiprocessing import resource_tracker, util
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np

EXIT = "exit"  # the command that ends `serve`

_RING = 4  # slots
_POLL_S = 100e-6  # waking a sleeper costs about as much
_CHECK_S = 0.05  # between two looks at whether those waited for still live
_REPORT_BYTES = 16384

_WORKER = struct.Struct("<qqq")  # whether it has begun, its last reply, the bytes of its report; then the report
_SLOT = struct.Struct("<qq")  # number of the slot since the start, bytes of the message from here on; then these
_MESSAGE = struct.Struct("<32sqq")  # command, whether it wants a reply, number of arrays; then these
_ARRAY = struct.Struct("<8sq")  # dtype, number of dimensions; then the shape, and data in whole words
_NONE = np.empty(0, "V1")  # travels in place of None

Arrays = SequenceOf[np.ndarray | None]
Check = Callable[[], None]  # called now and then while waiting; it raises if there is nothing to wait for


def encode(command: str, arrays: Arrays, wants_reply: bool) -> bytes:
    """Return a message in the flat layout above; arrays hold numbers or bools."""
    assert len(command.encode()) <= 32, command
    parts = [_MESSAGE.pack(command.encode(), wants_reply, len(arrays))]
    for array in (_NONE if array is None else array for array in arrays):
        assert array.dtype.kind in "biufc" or array is _NONE, array.dtype
        parts += (_ARRAY.pack(array.dtype.str.encode(), array.ndim), struct.pack(f"<{array.ndim}q", *array.shape))
        parts += (array.tobytes(), bytes(-array.nbytes % 8))
    return b"".join(parts)


def decode(data: bytearray) -> tuple[str, list[np.ndarray | None], bool]:
    """Return what `encode` was given; the arrays are writable and share ``data``."""
    command, wants_reply, num_arrays = _MESSAGE.unpack_from(data)
    arrays: list[np.ndarray | None] = []
    offset = _MESSAGE.size
    for _ in range(num_arrays):
        dtype, ndim = _ARRAY.unpack_from(data, offset)
        shape = struct.unpack_from(f"<{ndim}q", data, offset + _ARRAY.size)
        array = np.ndarray(shape, dtype.strip(b"\0").decode(), data, offset + _ARRAY.size + 8 * ndim)
        arrays.append(None if array.dtype == _NONE.dtype else array)
        offset += _ARRAY.size + 8 * ndim + array.nbytes + -array.nbytes % 8
    return command.strip(b"\0").decode(), arrays, bool(wants_reply)


class Channel:
    """A queue of messages from rank 0 to all others; from each of them a number and a last text come back.

    Rank 0 creates it and passes it to its workers as an argument of their processes; each then calls `attach`.

    Attributes:
        init_method: For `torch.distributed.init_process_group`: a file in a private folder, so that there is no port
            which another job might take first. Gone after `forget`.
    """

    def __init__(self, context: SpawnContext, num_ranks: int, slot_bytes: int) -> None:
        self.rank = 0
        self._workers = range(num_ranks - 1)
        self._slot_bytes = slot_bytes
        self._num_slots = 0  # sent or received since the start
        self._is_sending = False
        self._poll_s = _POLL_S if (os.cpu_count() or 1) >= num_ranks else 0.0
        size = self._worker_start(num_ranks) + _RING * (_SLOT.size + slot_bytes)
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")
        self.init_method = f"file://{self._folder}/rendezvous"
        try:
            resource_tracker.ensure_running()  # first: of what it does not get to know, nothing is removed at the end
            memory: Any = SharedMemory(f"nanovllm_{secrets.token_hex(8)}", create=True, size=size)
            # Nobody keeps a view of the memory: each access is a copy, so that it can be given back at any time.
            self._memory = memory
            # Of what is only promised, the first write would end the process. Python gives no other way to the file.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(memory._fd, 0, size)
            self._filled, self._free, self._replied = (
                [context.Semaphore(count) for _ in self._workers] for count in (0, _RING, 0)
            )
        except BaseException as error:
            if hasattr(self, "_memory"):
                self._memory.unlink()
                self._memory.close()
            self._remove_folder()
            if not isinstance(error, OSError):
                raise
            is_full = error.errno in (errno.ENOSPC, errno.ENOMEM)
            raise RuntimeError(
                f"The ranks of tensor_parallel_size > 1 need semaphores and {size} bytes of shared memory (/dev/shm on "
                f"Linux), which cannot be had: {error}."
                f"{' Free some of it, or make it larger (docker run --shm-size).' if is_full else ''}"
            ) from error

    def _worker_start(self, rank: int) -> int:
        return (rank - 1) * (_WORKER.size + _REPORT_BYTES)

    def _slot_start(self) -> int:
        return self._worker_start(len(self._workers) + 1) + self._num_slots % _RING * (_SLOT.size + self._slot_bytes)

    def send(self, command: str, arrays: Arrays, check: Check, *, wants_reply: bool = False) -> list[int]:
        """Send a message of any size to all workers; it blocks only while the ring is full, and for replies.

        Returns:
            The replies by rank, if wanted.

        Raises:
            RuntimeError: An earlier message was interrupted halfway, so that the ranks are out of step.
        """
        if self._is_sending:
            raise RuntimeError("A command to the other ranks was interrupted halfway; close and start anew.")
        data = encode(command, arrays, wants_reply)
        self._is_sending = True
        for start in range(0, len(data), self._slot_bytes):
            _wait(self._free, check)
            slot, piece = self._slot_start(), data[start : start + self._slot_bytes]
            _SLOT.pack_into(self._memory.buf, slot, self._num_slots, len(data) - start)
            self._memory.buf[slot + _SLOT.size : slot + _SLOT.size + len(piece)] = piece
            self._num_slots += 1
            for i in self._workers:
                self._filled[i].release()
        replies = self.gather(check) if wants_reply else []
        self._is_sending = False
        return replies

    def gather(self, check: Check) -> list[int]:
        """Return one reply of each worker, by rank; the first of all says that it serves."""
        _wait(self._replied, check)
        return [_WORKER.unpack_from(self._memory.buf, self._worker_start(i + 1))[1] for i in self._workers]

    def report_of(self, rank: int) -> str | None:
        """Return a dead worker's report, "" if it left none, or None if it never attached."""
        start = self._worker_start(rank)
        has_begun, _, size = _WORKER.unpack_from(self._memory.buf, start)
        report = bytes(self._memory.buf[start + _WORKER.size : start + _WORKER.size + size])
        return report.decode(errors="replace") if has_begun else None

    def forget(self) -> None:
        """Remove what has a name in the file system, and is not needed once every worker serves."""
        with contextlib.suppress(FileNotFoundError):
            self._memory.unlink()
        self._remove_folder()
        if self.rank == 0:
            _forget_names(semaphore for kind in (self._filled, self._free, self._replied) for semaphore in kind)

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):  # these calls need no file descriptor, of which there may be none left
            os.unlink(f"{self._folder}/rendezvous")
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def abandon(self) -> None:
        """`forget` in a process that is about to end, and of which another thread may keep the interpreter for long."""
        with contextlib.suppress(OSError):
            os.posix_spawnp("rm", ["rm", "-rf", "--", self._folder], os.environ)
        self.forget()

    def close(self) -> None:
        """Give back this process' share; rank 0 does so when no worker lives."""
        if self.rank == 0:
            self.forget()
        for semaphores in (self._filled, self._free, self._replied):
            semaphores.clear()  # in place, for the frames of an error that somebody keeps
        self._memory.close()

    def attach(self, rank: int) -> None:
        """Make this the end of a worker."""
        self.rank = rank
        self._answer(0)

    def serve(self, handler: Any) -> None:
        """Say that this rank is ready, then run ``handler``'s methods as commanded, until `EXIT`."""
        self._replied[self.rank - 1].release()
        while (message := self.receive())[0] != EXIT:
            command, arrays, wants_reply = message
            reply = getattr(handler, command)(*arrays)
            if wants_reply:
                self._answer(reply or 0)
                self._replied[self.rank - 1].release()

    def receive(self) -> tuple[str, list[np.ndarray | None], bool]:
        """Return a worker's next message, as soon as there is one; see `decode`."""
        filled, data, num_left = self._filled[self.rank - 1], bytearray(), 1
        while num_left > 0:
            deadline = time.perf_counter() + self._poll_s
            while not filled.acquire(block=time.perf_counter() >= deadline):
                pass  # awake for a moment, then asleep
            slot = self._slot_start()
            number, num_left = _SLOT.unpack_from(self._memory.buf, slot)
            assert number == self._num_slots, (number, self._num_slots)
            data += self._memory.buf[slot + _SLOT.size : slot + _SLOT.size + min(num_left, self._slot_bytes)]
            num_left -= self._slot_bytes
            self._num_slots += 1
            self._free[self.rank - 1].release()
        return decode(data)

    def report(self, text: str) -> None:
        """Leave the end of ``text`` for rank 0 to read after this worker's death."""
        self._answer(0, text.encode(errors="backslashreplace")[-_REPORT_BYTES:])

    def _answer(self, value: int, report: bytes = b"") -> None:
        start = self._worker_start(self.rank)
        self._memory.buf[start + _WORKER.size : start + _WORKER.size + len(report)] = report
        _WORKER.pack_into(self._memory.buf, start, True, value, len(report))


def _forget_names(semaphores: Iterable[Semaphore]) -> None:
    """Run at once what multiprocessing would do at the end, which a group of processes that is killed never reaches.

    All of this is private to multiprocessing; where it is otherwise, names stay until the end.
    """
    names = {getattr(getattr(semaphore, "_semlock", None), "name", None) for semaphore in semaphores} - {None}
    for finalizer in list(getattr(util, "_finalizer_registry", {}).values()):
        args = getattr(finalizer, "_args", None) or ()
        if names.intersection(arg for arg in args if isinstance(arg, str)):
            finalizer()


def _wait(semaphores: list[Semaphore], check: Check) -> None:
    """Take one from each."""
    for i in range(len(semaphores)):
        while not semaphores[i].acquire(timeout=_CHECK_S):
            check()
