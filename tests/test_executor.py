"""Ranks in processes of their own: every command reaches every rank once and in order, and nothing outlives trouble.

The workers here are numpy-only and start in a tenth of a second.
"""

import contextlib
import ctypes
import errno
import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from traces import SECONDS, Traces, watch

from nanovllm.engine import channel as channel_module
from nanovllm.engine import executor as executor_module
from nanovllm.engine.channel import decode, encode
from nanovllm.engine.executor import Executor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for what is left in /proc and /dev/shm")

HERE = Path(__file__).resolve().parent


# What the workers run.


class Handler:
    """The commands that tests send."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.digest = 0

    def record(self, *arrays: np.ndarray | None) -> None:
        self.digest = digest_of(self.digest, arrays)

    def get_digest(self) -> int:
        return self.digest

    def value(self, factor: np.ndarray) -> np.int64:
        return self.rank * factor[0]

    def nothing(self) -> None:
        pass

    def wait_for_file(self, path: np.ndarray) -> None:
        while not os.path.exists(bytes(path).decode()):
            time.sleep(0.01)

    def trouble(self, rank: np.ndarray, kind: np.ndarray) -> None:
        if rank[0] == self.rank:
            TROUBLES[kind[0]]()

    def ignore_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def digest_of(digest: int, arrays: Any) -> int:
    """Return a number that depends on all earlier arrays and on every byte, shape and dtype of these."""
    for array in arrays:
        description = "None" if array is None else f"{array.dtype.str} {array.shape}"
        digest = zlib.crc32(b"" if array is None else array.tobytes(), zlib.crc32(description.encode(), digest))
    return zlib.crc32(b"end", digest)


def raise_error() -> None:
    raise ValueError("the weights do not fit")


def raise_lone_surrogate() -> None:
    raise ValueError("no such file: /data/\udcff")


def raise_long_error() -> None:
    raise ValueError("begin " + 30_000 * "ä" + " end")


TROUBLES = [
    raise_error,
    raise_long_error,
    lambda: os._exit(3),
    lambda: sys.exit("no such device"),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda: time.sleep(1000),
    raise_lone_surrogate,
]
RAISE, RAISE_LONG, EXIT_3, SYS_EXIT, KILL, HANG, RAISE_SURROGATE = range(len(TROUBLES))
ENDS = [
    (RAISE, "exit code 1", "ValueError: the weights do not fit"),
    (EXIT_3, "exit code 3", ""),
    (SYS_EXIT, "exit code 1", "SystemExit: no such device"),
    (KILL, "SIGKILL", ""),
    (RAISE_SURROGATE, "exit code 1", r"ValueError: no such file: /data/\udcff"),
]


def work(rank: int, channel: Any) -> None:
    channel.serve(Handler(rank))


def work_with_trouble(rank: int, victim: int, at_start: int | None, at_end: int | None, channel: Any) -> None:
    if rank == victim and at_start is not None:
        TROUBLES[at_start]()
    channel.serve(Handler(rank))
    if rank == victim and at_end is not None:
        TROUBLES[at_end]()


def hold_interpreter(rank: int, channel: Any) -> None:
    """Once the ranks' folder is gone, let no other thread go on, as a FileStore does when its file is gone."""
    folder = Path(channel.init_method.removeprefix("file://")).parent
    while folder.exists():
        time.sleep(0)
    ctypes.PyDLL(None).sleep(1000)


# What must not be left.


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    def end(signum: int, frame: Any) -> None:
        raise TimeoutError("the test hangs")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def traces(tmp_path: Path) -> Iterator[Traces]:
    """Assert after each test that nothing is left of it."""
    with watch(tmp_path / "temp") as traces:
        yield traces


def start(num_ranks: int, worker: Any = work, args: Any = (), **options: Any) -> Executor:
    executor = Executor(num_ranks, worker, args, **options)
    executor.wait_ready()
    return executor


def attached(*trouble: Any) -> Executor:
    """Return an executor whose workers have begun, and may never serve."""
    executor = Executor(3, work_with_trouble, trouble)
    while any(executor._channel.report_of(rank) is None for rank in (1, 2)):
        time.sleep(0.01)
    return executor


# Messages.


ARRAYS = [
    *(np.array([[0, 1, 2], [3, 4, 100]]).astype(code) for code in "?bBhHiIlLqQefdFD"),
    np.array([-(2**63), 2**63 - 1]),
    np.array([np.nan, -np.inf, 1e-45], np.float32),
    np.array([1, 2, 3], ">i4"),
    np.array(7, np.int32),
    np.zeros((0, 5), np.float16),
    np.zeros(0, bool),
    np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(10)[::-2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    None,
]


def test_every_array_arrives_as_it_was():
    command, arrays, wants_reply = decode(bytearray(encode("run", ARRAYS, True)))
    assert (command, wants_reply, len(arrays)) == ("run", True, len(ARRAYS))
    for array, sent in zip(arrays, ARRAYS, strict=True):
        if sent is None:
            assert array is None
        else:
            assert (array.dtype, array.shape) == (sent.dtype, sent.shape)
            np.testing.assert_array_equal(array, sent)
            assert array.flags.writeable and array.flags.aligned and array.flags.c_contiguous


def test_a_message_without_arrays_is_a_command():
    assert decode(bytearray(encode("x" * 32, [], False))) == ("x" * 32, [], False)


def test_what_has_no_flat_form_is_refused():
    for array in (np.array(["text"]), np.array([object()]), np.zeros(2, [("a", int)])):
        with pytest.raises(AssertionError):
            encode("run", [array], False)
    with pytest.raises(AssertionError):
        encode("x" * 33, [], False)


@pytest.mark.parametrize("slot_bytes", [8, 1000, 1 << 16])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_gets_every_message_once_and_in_order(num_ranks, slot_bytes):
    """With slots of 8 bytes a message takes more slots than the ring has; with 65,536 rank 0 runs far ahead."""
    rng, digest = np.random.default_rng(slot_bytes + num_ranks), 0
    executor = start(num_ranks, slot_bytes=slot_bytes)
    for i in range(200 if slot_bytes > 8 else 30):
        arrays = [np.array(i)]
        for _ in range(rng.integers(4)):
            size = int(rng.integers(10 ** rng.integers(1, 4 if slot_bytes > 8 else 3)))
            arrays.append(rng.integers(256, size=size).astype(rng.choice(["u1", "i4", "i8", "f4"])))
        executor.send("record", *arrays, *ARRAYS[i % len(ARRAYS) :][:1])
        digest = digest_of(digest, [*arrays, *ARRAYS[i % len(ARRAYS) :][:1]])
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.003)  # so that workers fall asleep
            assert executor.call("get_digest") == [digest] * (num_ranks - 1)
    assert executor.call("get_digest") == [digest] * (num_ranks - 1)
    executor.close()


def test_a_message_of_many_rings_arrives():
    array = np.random.default_rng(0).integers(2**62, size=100_000)
    executor = start(3, slot_bytes=4096)
    executor.send("record", array)
    assert executor.call("get_digest") == [digest_of(0, [array])] * 2
    executor.close()


def test_rank_0_runs_ahead_by_the_ring_and_then_waits(tmp_path):
    """The worker has taken the first message and is busy with it; four more fit, the next waits for a slot."""
    path = tmp_path / "file"
    executor = start(2)
    executor.call("nothing")
    executor.send("wait_for_file", np.frombuffer(str(path).encode(), np.uint8))
    time.sleep(0.1)
    begin = time.monotonic()
    for _ in range(4):
        executor.send("nothing")
    assert time.monotonic() - begin < 0.3
    timer = threading.Timer(0.5, path.touch)
    timer.start()
    executor.send("nothing")
    assert path.exists()
    timer.join()
    executor.close()


def test_results_come_by_rank():
    executor = start(4)
    for factor in (3, -(2**61), 0):
        assert executor.call("value", np.array([factor])) == [factor, 2 * factor, 3 * factor]
    assert executor.call("nothing") == [0, 0, 0]
    executor.close()


def test_two_executors_do_not_meet():
    first, second = start(2), start(3)
    assert first.init_method != second.init_method
    first.send("record", np.array([1]))
    second.send("record", np.array([2]))
    assert first.call("get_digest") == [digest_of(0, [np.array([1])])]
    assert second.call("get_digest") == [digest_of(0, [np.array([2])])] * 2
    first.close()
    assert second.call("value", np.array([5])) == [5, 10]
    second.close()


def test_a_message_takes_microseconds():
    """About 30 on a machine of two cores; the bound is for a busy one."""
    executor = start(2)
    arrays = [np.arange(64)] * 10
    executor.call("nothing")
    begin = time.perf_counter()
    for _ in range(1000):
        executor.send("record", *arrays)
    executor.call("nothing")
    assert time.perf_counter() - begin < 1.0
    begin = time.perf_counter()
    for _ in range(100_000):
        executor.check()
    assert time.perf_counter() - begin < 0.5
    executor.close()


def test_once_all_serve_nothing_has_a_name(traces):
    executor = Executor(3, work)
    folder = Path(executor.init_method.removeprefix("file://")).parent
    assert folder.parent == traces.folder and folder.stat().st_mode & 0o777 == 0o700
    assert any(name.startswith("nanovllm_") for name in traces.found())
    executor.wait_ready()
    assert not folder.exists()
    assert not any(traces.tag in name for name in os.listdir("/dev/shm"))
    assert executor.call("value", np.array([2])) == [2, 4]
    executor.close()


# Trouble.


def assert_raises(executor: Executor, rank: int, cause: str, text: str, call: Any) -> str:
    """Assert that a call, or else one of the next, raises with the words expected, in seconds, and ends everything."""
    begin = time.monotonic()
    message = ""
    while not message and time.monotonic() < begin + SECONDS:
        try:
            call()
        except RuntimeError as error:
            message = str(error)
    assert time.monotonic() - begin < SECONDS
    assert f"rank {rank} died ({cause})" in message
    assert text in message
    assert not any(process.is_alive() for process in executor._workers.processes)
    for again in (executor.check, lambda: executor.send("nothing"), lambda: executor.call("nothing")):
        with pytest.raises(RuntimeError) as caught:
            again()
        assert str(caught.value) == message
    executor.close()
    return message


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize(("kind", "cause", "text"), ENDS)
def test_a_rank_that_cannot_start_is_named(kind, cause, text, victim):
    deaths = []
    executor = Executor(3, work_with_trouble, (victim, kind, None), on_death=lambda: deaths.append(1))
    message = assert_raises(executor, victim, cause, text, executor.wait_ready)
    assert ("work_with_trouble" in message) == bool(text)  # the worker's own traceback
    assert deaths == [1]


@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize(("kind", "cause", "text"), ENDS)
def test_a_rank_that_dies_in_a_command_is_named(kind, cause, text, victim, is_call):
    deaths = []
    executor = start(3, on_death=lambda: deaths.append(1))
    arrays = np.array([victim]), np.array([kind])
    if is_call:
        assert_raises(executor, victim, cause, text, lambda: executor.call("trouble", *arrays))
    else:
        executor.send("trouble", *arrays)
        assert_raises(executor, victim, cause, text, lambda: executor.send("nothing"))
    assert deaths == [1]


@pytest.mark.parametrize("notice", ["hook", "check", "call"])
def test_a_rank_that_dies_idle_is_noticed(notice):
    """By the hook, in time to abort a collective; by check, which may wait for it; by the next call."""
    death = threading.Event()
    executor = start(3, on_death=death.set)
    executor.check()
    os.kill(executor._workers.processes[1].pid, signal.SIGKILL)
    call = {
        "hook": executor.check,
        "check": lambda: executor.check(wait_s=SECONDS),
        "call": lambda: executor.call("nothing"),
    }[notice]
    assert notice != "hook" or death.wait(SECONDS)
    assert_raises(executor, 2, "SIGKILL", "", call)


def test_a_death_is_noticed_while_rank_0_waits_for_a_slot(caplog):
    """The ring is full since rank 2 hangs; then rank 1 dies."""
    executor = start(3)
    executor.send("trouble", np.array([2]), np.array([HANG]))
    for _ in range(3):
        executor.send("nothing")
    threading.Timer(0.3, os.kill, (executor._workers.processes[0].pid, signal.SIGKILL)).start()
    assert_raises(executor, 1, "SIGKILL", "", lambda: executor.send("nothing"))
    assert not caplog.records  # what was raised is not logged too


def test_a_long_report_keeps_its_end():
    executor = start(2)
    arrays = np.array([1]), np.array([RAISE_LONG])
    message = assert_raises(executor, 1, "exit code 1", "ä end", lambda: executor.call("trouble", *arrays))
    assert "begin" not in message
    assert len(message.encode()) < 17_000


def test_an_unknown_command_and_a_result_that_is_no_int_are_errors():
    executor = start(2)
    assert_raises(executor, 1, "exit code 1", "no attribute 'fly'", lambda: executor.call("fly"))
    executor = start(2)
    assert_raises(executor, 1, "exit code 1", "struct.error", lambda: executor.call("value", np.array([0.5])))


def test_a_worker_that_stops_serving_is_an_error():
    executor = Executor(2, print)  # returns at once
    assert_raises(executor, 1, "exit code 0", "", executor.wait_ready)


@pytest.mark.parametrize(("kind", "cause", "text"), ENDS)
def test_trouble_in_close_is_logged(kind, cause, text, caplog):
    executor = start(3, work_with_trouble, (2, None, kind))
    with caplog.at_level(logging.ERROR, "nanovllm"):
        executor.close()
    assert caplog.text.count(f"rank 2 died ({cause})") == 1
    assert text in caplog.text


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_an_error_that_no_call_was_left_to_raise_is_logged(delay_s, caplog):
    executor = start(3)
    executor.send("trouble", np.array([1]), np.array([RAISE]))
    time.sleep(delay_s)
    with caplog.at_level(logging.ERROR, "nanovllm"):
        executor.close()
    assert caplog.text.count("rank 1 died (exit code 1)") == 1
    assert "ValueError: the weights do not fit" in caplog.text


def test_close_stops_a_rank_that_hangs_and_may_be_called_again(caplog):
    for kind in ("sleeps", "ignores SIGTERM", "is stopped", "ring full"):
        executor = start(3, grace_s=0.3)
        if kind == "ignores SIGTERM":
            executor.call("ignore_sigterm")
        if kind == "is stopped":
            os.kill(executor._workers.processes[0].pid, signal.SIGSTOP)
        else:
            executor.send("trouble", np.array([1]), np.array([HANG]))
        if kind == "ring full":
            for _ in range(3):
                executor.send("nothing")
            time.sleep(0.1)
            executor.send("nothing")
        begin = time.monotonic()
        executor.close()
        assert 0.25 < time.monotonic() - begin < 3.0, kind
        executor.close()
        with pytest.raises(RuntimeError, match=r"^The executor is closed\.$"):
            executor.send("nothing")
    assert not caplog.records


def test_close_lets_commands_under_way_finish(tmp_path):
    path = tmp_path / "file"
    executor = start(2)
    executor.send("wait_for_file", np.frombuffer(str(path).encode(), np.uint8))
    threading.Timer(0.5, path.touch).start()
    executor.close()
    assert path.exists()
    assert executor._workers.processes[0].exitcode == 0


def test_close_before_all_serve_does_not_wait():
    executor = Executor(2, work_with_trouble, (1, HANG, None))
    begin = time.monotonic()
    executor.close()
    assert time.monotonic() - begin < 2.0


def test_a_forgotten_executor_is_closed(traces):
    executor = start(2)
    del executor
    gc.collect()
    traces.assert_none()


def test_what_ends_the_start_leaves_nothing(traces, monkeypatch):
    with pytest.raises(TypeError, match="pickle"):
        Executor(3, work, (threading.Lock(),))
    traces.assert_none()
    process_class = multiprocessing.context.SpawnProcess
    process_start = process_class.start

    def start_and_interrupt(process: Any) -> None:
        process_start(process)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(process_class, "start", start_and_interrupt)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        Executor(3, work)
    signal.signal(signal.SIGINT, previous)
    traces.assert_none()


def test_close_again_finishes_what_an_interrupt_broke_off(traces, caplog, monkeypatch):
    executor = start(3)
    monkeypatch.setattr(executor_module, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.close()
    monkeypatch.undo()
    executor.close()
    traces.assert_none()
    assert not caplog.records


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def test_threads_that_close_at_once_do_it_once(monkeypatch):
    executor, closed = start(2), list[int]()
    close = executor._channel.close

    def close_slowly() -> None:
        closed.append(1)
        time.sleep(0.2)
        close()

    monkeypatch.setattr(executor._channel, "close", close_slowly)
    threads = [threading.Thread(target=executor.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        assert executor._workers.is_stopped
    assert closed == [1]


def test_a_handler_that_closes_in_the_midst_of_closing_lets_it_end(traces, caplog):
    """At any point of it, several times."""
    previous = signal.getsignal(signal.SIGALRM)
    try:
        for delay_s in (0.001, 0.02, 0.3):
            executor = start(3, grace_s=1.0)
            signal.signal(signal.SIGALRM, lambda number, frame, executor=executor: executor.close())
            executor.send("trouble", np.array([1]), np.array([HANG]))
            signal.setitimer(signal.ITIMER_REAL, delay_s, 0.05)
            executor.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not any(process.is_alive() for process in executor._workers.processes)
            traces.assert_none()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not caplog.records


def test_a_close_in_another_thread_does_not_cut_into_a_message(monkeypatch):
    executor = start(2)
    closing = threading.Thread(target=executor.close)
    was_closing = []

    def encode_slowly(*args: Any) -> bytes:
        if not was_closing:
            closing.start()
            closing.join(0.3)
            was_closing.append(closing.is_alive())
        return encode(*args)

    monkeypatch.setattr(channel_module, "encode", encode_slowly)
    executor.send("nothing")
    closing.join()
    assert was_closing == [True]
    assert executor._workers.processes[0].exitcode == 0


def test_a_hook_that_holds_its_owner_does_not_keep_it_alive(traces):
    owner = SimpleNamespace()
    owner.on_death = lambda owner=owner: owner.executor
    owner.executor = start(2, on_death=owner.on_death)
    del owner
    gc.collect()
    traces.assert_none()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_rank_0_leaves_the_workers_alone():
    executor = start(2)
    pid = os.fork()
    if pid == 0:
        executor.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert executor.call("value", np.array([3])) == [3]
    executor.close()


def test_a_fork_of_rank_0_cannot_use_the_workers_and_may_exit(tmp_path, traces):
    body = """
        executor = start(2)
        pid = os.fork()
        if pid == 0:
            try:
                executor.call("value", np.array([3]))
            except RuntimeError as error:
                print(error, flush=True)
            sys.exit(5)
        print(os.waitpid(pid, 0)[1] >> 8, executor.call("value", np.array([4])), os.getpid(), flush=True)
        executor.close()
    """
    script = Script(body, tmp_path)
    begin, error, results = (script.read_line() for _ in range(3))
    assert begin == "begin"
    assert error == (
        f"The ranks belong to process {script.process.pid}, of which this one is a fork. Use the engine there, or make "
        "one in a process that is spawned."
    )
    assert results == f"5 [4] {script.process.pid}"
    assert script.wait() == (0, "")
    traces.assert_none()


def test_memory_that_is_not_there_is_told_before_anything_starts(monkeypatch, traces):
    def refuse(fd: int, offset: int, size: int) -> None:
        assert (offset, size > 4 * (1 << 16)) == (0, True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        RuntimeError, match=r"need semaphores and \d+ bytes of shared memory .*No space left.* --shm-size"
    ):
        Executor(2, work)
    traces.assert_none()


def test_a_start_without_file_descriptors_leaves_nothing(tmp_path, traces):
    """Also where multiprocessing's resource tracker does not run yet."""
    body = """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        used = len(os.listdir("/proc/self/fd")) - 1
        causes = set()
        for more in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, most))
            try:
                Executor(2, work)
            except (OSError, RuntimeError) as error:
                causes.add(str(error))
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        print(*causes, flush=True)
    """
    script = Script(body, tmp_path)
    assert script.read_line() == "begin"
    causes = script.read_line()
    assert "shared memory (/dev/shm on Linux), which cannot be had: [Errno 24] Too many open files." in causes
    assert "--shm-size" not in causes
    assert script.wait() == (0, "")
    traces.assert_none()


def test_where_no_rank_can_start_it_is_told(tmp_path, traces):
    body = """
        def main():
            try:
                Executor(2, work)
            except RuntimeError as error:
                print(error, flush=True)
        multiprocessing.current_process()._config["daemon"] = True
        main()
    """
    script = Script(body, tmp_path)
    assert script.read_line() == "begin"
    assert script.read_line().startswith(
        "A daemonic process, such as one of multiprocessing.Pool, cannot start further"
    )
    script.wait()
    script = Script("executor = Executor(2, work)", tmp_path)
    script.wait()
    result = subprocess.run(
        [sys.executable, "-"], input=script.path.read_text(), capture_output=True, text=True, check=False
    )
    assert result.stderr.splitlines()[-1] == (
        "RuntimeError: Each rank imports the script anew, but '<stdin>' is no file. Save it to one."
    )
    traces.assert_none()


def test_an_interrupt_in_a_message_leaves_no_rank_out_of_step():
    """A later call must neither take the reply of the interrupted one nor cut into its message."""

    previous = signal.signal(signal.SIGALRM, interrupted)
    try:
        executor = start(2, grace_s=100.0)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            executor.call("trouble", np.array([1]), np.array([HANG]))
        with pytest.raises(RuntimeError, match="interrupted halfway"):
            executor.send("nothing")
        executor.close()
    finally:
        signal.signal(signal.SIGALRM, previous)


# Whole scripts.


class Script:
    """A script in a session of its own, all of whose output is kept."""

    def __init__(self, body: str, tmp_path: Path, *, guard: bool = True, first: str = "") -> None:
        head = f"""
            {first}
            import os, sys, time, signal, resource, multiprocessing
            sys.path[:0] = [{str(HERE.parent)!r}, {str(HERE)!r}]
            import numpy as np
            from nanovllm.engine.executor import Executor
            from test_executor import work, work_with_trouble, start, attached, HANG
            from traces import tag_names
            signal.signal(signal.SIGINT, signal.default_int_handler)
            tag_names(os.environ["NANOVLLM_TEST_TAG"])
            if __name__ == "__main__":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                for number in signal.SIGHUP, signal.SIGQUIT:  # a job in the background ignores them
                    signal.signal(number, signal.SIG_DFL)
            else:
                time.sleep(float(os.environ.get("IMPORT_S", "0")))
        """
        body = textwrap.dedent(body)
        if guard:
            body = "if __name__ == '__main__':\n    print('begin', flush=True)\n" + textwrap.indent(body, "    ")
        self.path = tmp_path / "script.py"
        self.path.write_text(textwrap.dedent(head) + body)
        self.errors = tmp_path / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore::DeprecationWarning", self.path],  # of forks, since 3.12
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def read_line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def wait(self) -> tuple[int, str]:
        """Return exit code and standard error."""
        try:
            code = self.process.wait(4 * SECONDS)
        finally:
            self.process.kill()
            if self.process.stdout:
                self.process.stdout.close()
        return code, self.errors.read_text()


def test_a_script_without_the_guard_is_told_so(tmp_path, traces):
    script = Script("Executor(2, work).wait_ready()", tmp_path, guard=False)
    code, errors = script.wait()
    assert code == 1
    child, parent = errors.split("Traceback (most recent call last):")[1:]
    assert "\nRuntimeError: Each rank of tensor_parallel_size > 1 imports the script anew" in child
    assert "\nRuntimeError: Tensor-parallel rank 1 died (exit code 1). It had not begun to work" in parent
    for text in (child, parent):
        assert text.rstrip().endswith('the script must create its LLM under\n    if __name__ == "__main__":')
    traces.assert_none()


def test_a_script_that_never_closes_ends_well(tmp_path, traces):
    for body in ("executor = start(3)\nexecutor.send('nothing')", "executor = Executor(3, work)"):
        script = Script(body, tmp_path)
        begin = time.monotonic()
        assert script.wait() == (0, "")
        assert time.monotonic() - begin < SECONDS
        traces.assert_none()


def test_at_exit_the_workers_end_before_multiprocessing_ends_them(tmp_path, traces):
    """Its hook runs before an earlier one of weakref's; a worker that it ends would leave this folder behind."""
    first = "import tempfile; folder = tempfile.TemporaryDirectory()"
    script = Script("executor = start(3)", tmp_path, first=first)
    assert script.wait() == (0, "")
    traces.assert_none()


@pytest.mark.parametrize("scope", ["", "global executor"])
def test_a_process_of_the_user_may_be_rank_0(scope, tmp_path):
    body = """
        context = multiprocessing.get_context(sys.argv[1] if sys.argv[1:] else "spawn")
        process = context.Process(target=main)
        process.start()
        process.join()
        assert process.exitcode == 0
    """
    script = Script(body, tmp_path)
    text = script.path.read_text()
    script.wait()
    main = f"def main():\n    {scope}\n    executor = start(2)\n"
    main += "    assert executor.call('value', np.array([4])) == [4]\n"
    for method in ("spawn", "fork", "forkserver"):
        script.path.write_text(text.replace("if __name__", main + "\nif __name__"))
        result = subprocess.run(
            [sys.executable, script.path, method], capture_output=True, text=True, timeout=4 * SECONDS, check=False
        )
        assert (result.returncode, result.stderr) == (0, ""), method


HANGS = "executor.send('trouble', np.array([2]), np.array([HANG]))"
SERVES, NOW = "executor = start(3)", "print('now', flush=True)"
WAITS = {
    "in its own work": [SERVES, NOW, "time.sleep(100)"],
    "in a call": [SERVES, HANGS, NOW, "executor.call('nothing')"],
    "for a slot": [SERVES, HANGS, NOW, "while True: executor.send('nothing')"],
    "for a start": ["executor = attached(1, HANG, None)", NOW, "executor.wait_ready()"],
    "while sending": [SERVES, NOW, "while True: executor.send('record', np.arange(9))"],
    "for imports": ["os.environ['IMPORT_S'] = '3'", "executor = Executor(3, work)", NOW, "executor.wait_ready()"],
}


def waiting(place: str, tmp_path: Path) -> Script:
    """Return a script that has begun to wait there."""
    script = Script("\n".join(WAITS[place]), tmp_path)
    assert (script.read_line(), script.read_line()) == ("begin", "now")
    return script


@pytest.mark.parametrize("place", WAITS)
def test_ctrl_c_ends_everything(place, tmp_path, traces):
    script = waiting(place, tmp_path)
    time.sleep(0.3)
    begin = time.monotonic()
    os.killpg(script.process.pid, signal.SIGINT)  # a terminal sends it to all of a job's processes
    code, errors = script.wait()
    assert time.monotonic() - begin < SECONDS + 2
    assert code == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1  # rank 0's
    traces.assert_none()


@pytest.mark.parametrize("place", [place for place in WAITS if place != "for imports"])
def test_killing_rank_0_leaves_nothing(place, tmp_path, traces):
    script = waiting(place, tmp_path)
    time.sleep(0.1)
    script.process.kill()
    traces.assert_none()
    code, errors = script.wait()
    assert code == -signal.SIGKILL
    assert "shared_memory" not in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("place", WAITS)
def test_what_a_terminal_sends_to_all_processes_leaves_nothing(place, number, tmp_path, traces):
    script = waiting(place, tmp_path)
    time.sleep(0.1)
    os.killpg(script.process.pid, number)
    traces.assert_none()
    code, errors = script.wait()
    assert code == -number
    assert "Traceback" not in errors or place == "for imports"  # whose end finds nothing to attach to


@pytest.mark.parametrize("place", [place for place in WAITS if place not in ("for a start", "for imports")])
def test_killing_all_processes_at_once_leaves_nothing(place, tmp_path, traces):
    script = waiting(place, tmp_path)
    os.killpg(script.process.pid, signal.SIGKILL)
    traces.assert_none()
    script.wait()


def test_a_death_without_exit_code_is_told(tmp_path, traces):
    """Where the system forgets children at once, as some services have it."""
    body = """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        executor = start(2)
        executor.send("trouble", np.array([1]), np.array([4]))
        kill = os.kill
        os.kill = lambda *args: print("kill", *args, flush=True) or kill(*args)
        try:
            executor.check(wait_s=5)
        except RuntimeError as error:
            print(error, flush=True)
    """
    script = Script(body, tmp_path)
    assert [script.read_line() for _ in range(2)] == ["begin", "Tensor-parallel rank 1 died (cause unknown)."]
    code, errors = script.wait()
    assert (code, errors) == (0, "")
    traces.assert_none()


def test_a_worker_that_holds_the_interpreter_ends_with_rank_0(tmp_path, traces):
    script = Script(
        "from test_executor import hold_interpreter\nexecutor = Executor(2, hold_interpreter)\n"
        "while executor._channel.report_of(1) is None: time.sleep(0.01)\ntime.sleep(0.2)\n"
        "print('now', flush=True)\ntime.sleep(100)", tmp_path
    )  # fmt: skip
    assert (script.read_line(), script.read_line()) == ("begin", "now")
    script.process.kill()
    traces.assert_none()
    script.wait()


def test_workers_end_even_if_a_fork_of_rank_0_lives_on(tmp_path, traces):
    """The fork holds the pipe by whose end workers notice at once; its parent's number changes all the same."""
    script = Script(f"{SERVES}\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(100)", tmp_path)
    assert script.read_line() == "begin"
    fork_pid = int(script.read_line())
    script.process.kill()
    deadline = time.monotonic() + SECONDS
    while any("spawn_main" in trace for trace in traces.found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any("spawn_main" in trace for trace in traces.found())
    assert Path(f"/proc/{fork_pid}").exists()
    os.kill(fork_pid, signal.SIGKILL)
    script.wait()


# Random trouble.

RUN = """
    import random
    rng = random.Random(int(os.environ["SEED"]))
    executor = start(rng.choice([2, 3]), slot_bytes=rng.choice([64, 1024]))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        executor.send("record", np.arange(rng.randrange(100)))
        if rng.random() < 0.1:
            executor.call("get_digest")
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
    executor.close()
"""


def run_with_a_worker_killed(rng: random.Random) -> None:
    """Run random traffic and kill one rank at a random moment between the start and some time after the end."""
    num_ranks, victim = rng.choice([(2, 1), (3, 1), (3, 2)])
    signum = rng.choice([signal.SIGKILL, signal.SIGTERM])
    duration_s, digest, error = rng.random() * 0.3, 0, None
    executor = Executor(num_ranks, work, slot_bytes=rng.choice([64, 1024]))
    pid = executor._workers.processes[victim - 1].pid

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    timer = threading.Timer(rng.random() * (duration_s + 0.2), kill)
    timer.start()
    end = time.monotonic() + duration_s
    try:
        executor.wait_ready()
        while time.monotonic() < end:
            array = np.arange(rng.randrange(100))
            executor.send("record", array)
            digest = digest_of(digest, [array])
            if rng.random() < 0.1:
                assert executor.call("get_digest") == [digest] * (num_ranks - 1)
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.01)
    except RuntimeError as caught:
        error = caught
    executor.close()
    timer.cancel()
    timer.join()
    assert error is None or f"rank {victim} died ({signum.name})" in str(error)
    assert time.monotonic() - end < SECONDS


def run_with_rank_0_signalled(rng: random.Random, signum: int, tmp_path: Path, traces: Traces) -> None:
    """Run random traffic in a script, and kill or interrupt it at a random moment."""
    os.environ["SEED"] = str(rng.randrange(10**6))
    script = Script(RUN, tmp_path)
    assert script.read_line() == "begin"
    time.sleep(rng.random() * 0.8)
    if signum == signal.SIGINT:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.process.pid, signum)
    else:
        os.kill(script.process.pid, signum)
    traces.assert_none()
    code, errors = script.wait()
    assert code in (0, -signum)
    if code == 0:
        assert not errors
    if signum == signal.SIGINT:
        assert "spawn_main" not in errors  # no worker's traceback
        assert "leaked" not in errors


@pytest.mark.parametrize("seed", [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 100))])
def test_a_random_fault_leaves_nothing(seed, tmp_path, traces):
    rng = random.Random(seed)
    kind = seed % 5
    if kind < 3:
        run_with_a_worker_killed(rng)
        traces.assert_none()
    else:
        run_with_rank_0_signalled(rng, [signal.SIGKILL, signal.SIGINT][kind - 3], tmp_path, traces)
