"""Signals that come at a bad moment, held back for a while; and those that other processes shall not get at all."""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any


def _known(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


# What a terminal sends to all processes of a job.
OF_A_TERMINAL = _known("SIGINT", "SIGHUP", "SIGQUIT")

_INTERRUPTS = _known("SIGINT", "SIGTERM", "SIGALRM")  # by which callers break off a call, where they handle them


@contextlib.contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and for ever in processes started inside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Notes:
    """A handler that notes what comes, and passes it on once it is over: another that raised may have kept it there."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}  # those in whose place it stands
        self.came: dict[int, Any] = {}
        self.is_over = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_over or number in self.came:
            self.handlers[number](number, frame)
        else:
            self.came[number] = frame


@contextlib.contextmanager
def interrupts_at_end() -> Iterator[None]:
    """Have what interrupts the caller wait until the end of the block; a second signal of a kind does not wait.

    In the main thread, where alone Python handles signals. What `signal.siginterrupt` has set for them is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    notes = _Notes()
    try:
        for kind in _INTERRUPTS:
            handler: Any = signal.getsignal(kind)
            while isinstance(handler, _Notes) and handler.is_over:
                handler = handler.handlers[kind]
            if callable(handler):
                notes.handlers[kind] = handler
                signal.signal(kind, notes)
        yield
    finally:
        notes.is_over = True
        with contextlib.ExitStack() as stack:  # the last first, and each of them whatever the others raise
            for number, frame in reversed(notes.came.items()):
                stack.callback(notes.handlers[number], number, frame)
            for number, handler in notes.handlers.items():
                stack.callback(signal.signal, number, handler)
