"""Signals that come at a bad moment, held back for a while; and those that other processes shall not get at all."""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

# What a terminal sends to all processes of a job.
OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # by which callers break off a call, if they handle them


@contextlib.contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and for ever in processes started inside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def interrupts_at_end() -> Iterator[None]:
    """Have what interrupts the caller wait until the end of the block; a second signal of a kind does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _INTERRUPTS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    came: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        if number in came:
            handlers[number](number, frame)
        came.setdefault(number, frame)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in came.items():
        handlers[number](number, frame)
