"""What executors leave in the system, which must be nothing."""

import contextlib
import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm.engine import channel as channel_module

SECONDS = 5.0  # within which trouble must be noticed, and everything gone


class Traces:
    """Knows everything that this test's executors leave in the system, by a tag of their names and environment."""

    def __init__(self, tag: str, folder: Path) -> None:
        self.tag, self.folder = tag, folder

    def found(self) -> list[str]:
        found = [name for name in os.listdir("/dev/shm") if self.tag in name]
        found += [str(path) for path in self.folder.iterdir() if "torchinductor" not in path.name]  # torch's own cache
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(pid) != os.getpid() and self.tag.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(Path(f"/proc/{pid}/cmdline").read_text())
        return found

    def assert_none(self, timeout_s: float = SECONDS) -> None:
        deadline = time.monotonic() + timeout_s
        while (found := self.found()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not found


def tag_names(tag: str) -> None:
    """Have all shared memory and semaphores of this process named after ``tag``."""
    multiprocessing.current_process()._config["semprefix"] = f"/{tag}"  # type: ignore[attr-defined]
    channel_module.secrets = SimpleNamespace(token_hex=lambda n: f"{tag}_{os.urandom(3).hex()}")  # type: ignore


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[Traces]:
    """Have what is started inside leave its traces where they are found; in the end there must be none."""
    resource_tracker.ensure_running()  # pytest's own, which stays
    tag = f"nv{os.urandom(4).hex()}"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_TEST_TAG", tag)
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(channel_module, "secrets", None)
        patch.setitem(multiprocessing.current_process()._config, "semprefix", "")  # type: ignore[attr-defined]
        tag_names(tag)
        threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
        traces = Traces(tag, folder)
        yield traces
        gc.collect()
        traces.assert_none()
        for thread in set(threading.enumerate()) - threads:
            if "nanovllm" in str(getattr(getattr(thread, "_target", None), "__module__", "")):  # not tqdm's, or torch's
                thread.join(SECONDS)
                assert not thread.is_alive(), thread
        assert set(multiprocessing.active_children()) <= children
