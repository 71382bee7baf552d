"""Warnings that are given once, however often the same thing happens."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

_given: set[tuple[str, ...]] = set()
_lock = threading.Lock()


class ConfigWarning(UserWarning):
    """Something about a configuration went wrong; the call itself goes on with another one."""


class ValueWarning(UserWarning):
    """The values of an argument are legal, but look like a mistake."""


def warn_once(about: tuple[str, ...], message: str, kind: type[Warning] = ConfigWarning) -> None:
    """Warns with `message` unless a warning about the same thing was given before in this process."""
    with _lock:
        if about in _given:
            return
        _given.add(about)
    warnings.warn(message, kind, stacklevel=2 + _frames_of_the_library())


def _frames_of_the_library() -> int:
    """How many callers of `warn_once` belong to the library: the warning shows the user's own line."""
    frame: Any = sys._getframe(2)
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        frame, count = frame.f_back, count + 1
    return count


def forget_warnings() -> None:
    """Lets every warning be given again."""
    with _lock:
        _given.clear()
