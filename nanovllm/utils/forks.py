"""What a fork of this process gets of its engines: nothing. It may neither use nor end them."""

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

_actions: "weakref.WeakKeyDictionary[Any, Callable[[Any], None]]" = weakref.WeakKeyDictionary()


def in_forks(owner: Any, action: Callable[[Any], None]) -> None:
    """Have every fork begin with ``action(owner)``, as long as ``owner`` lives."""
    _actions[owner] = action


def keep_in_forks(owner: Any) -> None:
    """Have no fork collect ``owner``, nor what it holds: ending that would need a device, or threads that it lacks."""
    in_forks(owner, lambda owner: ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner)))


def _act() -> None:
    for owner, action in list(_actions.items()):
        action(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_act)
