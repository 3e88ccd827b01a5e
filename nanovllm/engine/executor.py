"""Executor: the processes of ranks 1..n-1, as rank 0 sees them.

It starts them, passes commands on through a `Channel`, notices when one dies, and leaves nothing behind however it
ends. It knows nothing of tensors; what a rank does is the worker function's matter.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from multiprocessing import connection, util
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from nanovllm.engine.channel import EXIT, Channel
from nanovllm.utils.forks import in_forks
from nanovllm.utils.signals import OF_A_TERMINAL, blocked

logger = logging.getLogger("nanovllm")

AT_EXIT = 10  # before what multiprocessing made (0)

_NEEDS_GUARD = (
    "Each rank of tensor_parallel_size > 1 imports the script anew, so the script must create its LLM under\n"
    '    if __name__ == "__main__":'
)


class Executor:
    """Ranks 1..n-1 in processes of their own; rank 0 is the caller. For one thread.

    A rank that dies or raises makes the call under way, or else the next one, stop all ranks and raise RuntimeError
    with the rank's number, exit code or signal, and traceback.

    Args:
        num_ranks: At least 2, rank 0 included.
        worker: A function of a module, called as ``worker(rank, *args, channel)`` in each new process. It prepares its
            rank, for as long as that takes, and calls ``channel.serve(handler)``, which runs methods of ``handler`` as
            commanded and returns when the executor is closed.
        args: Picklable.
        slot_bytes: Larger messages travel in several pieces of this size. Rank 0 may run ahead by four pieces.
        on_death: Called at once, in a thread of ours, when a worker dies unasked; from then on `check` raises. Abort
            the process group here: rank 0 may be blocked in a collective that will never end. May be set later.
        grace_s: Seconds that `close` gives the workers to finish commands under way.

    Attributes:
        init_method: Where the ranks' process group can meet, until `wait_ready`; workers find it in ``channel``.

    Raises:
        RuntimeError: The script lacks the guard that `multiprocessing` needs.
    """

    def __init__(
        self,
        num_ranks: int,
        worker: Callable[..., None],
        args: SequenceOf[Any] = (),
        *,
        slot_bytes: int = 1 << 16,
        on_death: Callable[[], None] = lambda: None,
        grace_s: float = 5.0,
    ) -> None:
        assert num_ranks >= 2, num_ranks
        _check_can_spawn()
        self.on_death = on_death
        self._workers = _Workers(num_ranks, worker, args, slot_bytes, grace_s)
        # When this is collected, or at exit: before multiprocessing ends its children, and takes away semaphores.
        util.Finalize(self, self._workers.stop, exitpriority=AT_EXIT)
        self._channel, self.init_method = self._workers.channel, self._workers.channel.init_method
        # The thread must not keep this object alive, nor what on_death holds.
        threading.Thread(target=_watch, args=(self._workers, weakref.ref(self)), daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until every worker serves; to be called once, when rank 0 has joined the group, before any command.

        From then on nothing has a name in the file system. Before that, what rank 0 has named is removed, if it is
        killed, by the workers and by multiprocessing's resource tracker, a process of its own.
        """
        self._channel.gather(self.check)
        self._channel.forget()
        self._workers.is_ready = True

    def send(self, command: str, *arrays: np.ndarray | None) -> None:
        """Have every worker run ``handler.command(*arrays)``, without waiting for it.

        Args:
            command: The method's name, at most 32 bytes.
            *arrays: Of numbers or bools, any shape; each worker gets copies of its own.
        """
        self.check()
        with self._workers.sending:
            self._channel.send(command, arrays, self.check)

    def call(self, command: str, *arrays: np.ndarray | None) -> list[int]:
        """Have every worker run a command, wait, and return the results of ranks 1..n-1, ints (0 for None)."""
        self.check()
        with self._workers.sending:
            return self._channel.send(command, arrays, self.check, wants_reply=True)

    def check(self, wait_s: float = 0.0) -> None:
        """Raise RuntimeError if a worker has died or this is closed; costs nothing otherwise.

        Args:
            wait_s: How long to wait for such news: a collective may fail before the death behind it is known.
        """
        workers = self._workers
        if os.getpid() != workers.owner_pid:
            raise RuntimeError(
                f"The ranks belong to process {workers.owner_pid}, of which this one is a fork. Use the engine there, "
                "or make one in a process that is spawned."
            )
        if not workers.is_stopping and (workers.died.is_set() or (wait_s and workers.died.wait(wait_s))):
            workers.failure = workers.describe(workers.dead)
            workers.stop()
        if workers.is_stopping:
            raise RuntimeError(workers.failure or "The executor is closed.")

    def close(self, reason: str = "") -> None:
        """Let the workers finish, stop those that do not, and give everything back; any number of times.

        Args:
            reason: An error after which no rank can go on, which later calls report; nobody is waited for then.
        """
        if reason and not self._workers.failure:
            self._workers.failure = reason
        self._workers.stop()


class _Workers:
    """Running processes and what has to be cleaned up after them; apart from the executor, which may be collected."""

    def __init__(
        self, num_ranks: int, worker: Callable[..., None], args: SequenceOf[Any], slot_bytes: int, grace_s: float
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: list[SpawnProcess] = []
        self.grace_s = grace_s
        self.owner_pid = os.getpid()
        self.sending = threading.RLock()  # one message at a time; held again in a signal's handler, which is refused
        self._stopping = threading.RLock()
        self._stopper = 0  # the thread that holds it
        in_forks(self, _Workers._disown)
        self.died = threading.Event()  # set when a worker has ended unasked
        self.dead: list[SpawnProcess] = []  # the first to do so
        self.failure = ""
        self.is_ready = self.is_stopping = self.is_stopped = False
        with blocked(OF_A_TERMINAL):
            self.channel = Channel(context, num_ranks, slot_bytes)
        try:
            # Daemonic: if all else fails, multiprocessing stops them at exit.
            self.processes += [
                context.Process(target=_run_worker, args=(rank, worker, args, self.channel), daemon=True)
                for rank in range(1, num_ranks)
            ]
            with blocked(OF_A_TERMINAL):  # again: to start the resource tracker is to unblock some
                for process in self.processes:
                    process.start()
        except BaseException:
            self.stop()
            raise

    def describe(self, dead: SequenceOf[SpawnProcess]) -> str:
        """Say how workers ended."""
        texts = []
        for process in dead:
            process.join(1.0)  # the exit code comes a moment after the sentinel
            code, rank = process.exitcode, self.processes.index(process) + 1
            cause = "cause unknown" if code is None else f"exit code {code}"  # None if SIGCHLD is ignored
            cause = next((s.name for s in signal.Signals if code == -s), cause)
            report = self.channel.report_of(rank)
            if report is None:
                advice = "" if code is None or code < 0 else _NEEDS_GUARD  # who lacks it is not killed
                report = f"It had not begun to work; its own output may say why. {advice}"
            texts.append(f"Tensor-parallel rank {rank} died ({cause}). {report}".rstrip())
        return "\n".join(texts)

    def _disown(self) -> None:
        """In a fork of rank 0, keep multiprocessing from ending the workers when the fork exits."""
        getattr(multiprocessing.process, "_children", set[Any]()).difference_update(self.processes)

    def stop(self) -> None:
        """End all processes and give everything back."""
        if os.getpid() != self.owner_pid:  # a fork of rank 0 owns nothing of this
            return
        if self._stopper == threading.get_ident():  # a signal's handler, in the midst of this
            return
        with self._stopping:
            self._stopper = threading.get_ident()
            try:
                if not self.is_stopped:
                    self._stop()
            finally:
                self._stopper = 0

    def _stop(self) -> None:
        is_first_time, self.is_stopping = not self.is_stopping, True  # another, if this was interrupted
        started = [process for process in self.processes if process.pid is not None]
        try:
            if is_first_time and self.is_ready and not self.dead and not self.failure:
                self._ask_to_exit()
            failed = self.dead or [process for process in started if process.exitcode]
            if is_first_time and failed and not self.failure:  # no call is left to raise it
                logger.error(self.describe(failed))
        finally:
            for end, patience_s in (SpawnProcess.terminate, 1.0), (SpawnProcess.kill, 5.0):
                for process in started:
                    if not connection.wait([process.sentinel], 0):  # its number may be another process's by now
                        end(process)
                _join(started, patience_s)
            self.channel.close()
            self.is_stopped = True

    def _ask_to_exit(self) -> None:
        deadline = time.monotonic() + self.grace_s

        def check() -> None:
            if time.monotonic() > deadline or any(process.exitcode is not None for process in self.processes):
                raise TimeoutError

        if self.sending.acquire(timeout=self.grace_s):  # another thread may be in the midst of a message
            try:
                with contextlib.suppress(TimeoutError, RuntimeError):  # the latter if this one was
                    self.channel.send(EXIT, [], check)
                    _join(self.processes, self.grace_s)
            finally:
                self.sending.release()


def _check_can_spawn() -> None:
    """Raise RuntimeError in a process of which the ranks could not be started."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a new rank that imports the script
        raise RuntimeError(_NEEDS_GUARD)
    if multiprocessing.current_process().daemon:  # multiprocessing forbids it by an assertion
        raise RuntimeError("A daemonic process, such as one of multiprocessing.Pool, cannot start further ranks.")
    if script := _missing_script():
        raise RuntimeError(f"Each rank imports the script anew, but {script!r} is no file. Save it to one.")


def _missing_script() -> str:
    """Return the script that a new process would fail to import, or "" if there is none such."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    if script is None or getattr(sys, "frozen", False):
        return ""
    folder = getattr(multiprocessing.process, "ORIGINAL_DIR", None) or ""  # of a relative path, as the new process does
    return "" if os.path.exists(os.path.join(folder, script)) else script


def _join(processes: SequenceOf[SpawnProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _watch(workers: _Workers, executor_ref: "weakref.ref[Executor]") -> None:
    """Wait for the first death, in a thread of rank 0."""
    sentinels = connection.wait([process.sentinel for process in workers.processes])
    if not workers.is_stopping:
        workers.dead = [process for process in workers.processes if process.sentinel in sentinels]
        workers.died.set()
        if executor := executor_ref():
            executor.on_death()


def _run_worker(rank: int, worker: Callable[..., None], args: SequenceOf[Any], channel: Channel) -> None:
    """Be a worker process, which does not hear a terminal's signals: it ends when rank 0 does."""
    threading.Thread(target=_exit_with_parent, args=(channel,), daemon=True).start()
    channel.attach(rank)
    try:
        worker(rank, *args, channel)
    except BaseException:
        try:
            channel.report(traceback.format_exc())
        finally:
            os._exit(1)  # at once: the usual way out may wait for a device or for other ranks
    channel.close()


def _exit_with_parent(channel: Channel) -> None:
    """End this process when rank 0 does, whatever it is doing: a collective may never end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not connection.wait([parent.sentinel], 1.0) and os.getppid() == parent.pid:
        pass  # a process that rank 0 forked may hold the sentinel open, hence the second condition
    # Ends this process even if another thread keeps the interpreter to itself, as a FileStore does.
    faulthandler.dump_traceback_later(2, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    channel.abandon()
    os._exit(1)
