"""What a fork of this process gets of its engines: nothing. It may neither use nor end them."""

import ctypes
import os
import weakref
from typing import Any

_kept: "weakref.WeakSet[Any]" = weakref.WeakSet()


def keep_in_forks(owner: Any) -> None:
    """Never collect ``owner`` in a fork, nor what it holds: to end that would be to ask a device or a thread for it.

    A fork has no threads but the one that forked, and cannot use CUDA.
    """
    _kept.add(owner)


def _keep() -> None:
    for owner in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
