"""Argument checks for the public edge: one place that words the errors.

Knows no setting by name; whoever checks passes the name, the value and the limits.
"""

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def near_name(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" for the known name closest to ``name``, or ""."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def strict_keywords(cls: T) -> T:
    """Make a dataclass refuse unknown keyword arguments with the nearest known name (a class decorator)."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{cls.__name__} has no setting {name!r}.{near_name(name, known)} Known: {', '.join(known)}."
                )
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int; TypeError unless integral, ValueError outside ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {value!r} ({type(value).__name__}).")
    number = int(value)
    if number < low or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name}={value} is out of range: it must be {limits}.")
    return number


def check_float(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """Return ``value`` as a float; it must be finite and in ``low..high`` (``above``: low itself excluded)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__}).")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number > high or number < low or (above and number == low):
        limits = f"{'above' if above else 'at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise ValueError(f"{name}={value} is out of range: it must be finite, {limits}.")
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``; ValueError with the choices otherwise."""
    if value not in choices:
        near = near_name(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r} is unknown.{near} Known: {', '.join(map(repr, choices))}.")
    return str(value)


def check_bool(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool; TypeError otherwise (0 and 1 are likelier a slip than a wish)."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value
