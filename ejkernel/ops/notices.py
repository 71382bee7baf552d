"""Warnings that are given once, however often the same thing happens."""

from __future__ import annotations

import threading
import warnings

_given: set[tuple[str, ...]] = set()
_lock = threading.Lock()


class ConfigWarning(UserWarning):
    """Something about a configuration went wrong; the call itself goes on with another one."""


def warn_once(about: tuple[str, ...], message: str) -> None:
    """Warns with `message` unless a warning about the same thing was given before in this process."""
    with _lock:
        if about in _given:
            return
        _given.add(about)
    warnings.warn(message, ConfigWarning, stacklevel=3)


def forget_warnings() -> None:
    """Lets every warning be given again."""
    with _lock:
        _given.clear()
