"""Threads that take turns: one runs at a time, until it ends or waits for what is not there yet.

What they wait for can only come from each other. So where all wait, the program would hang, which is an error here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Condition = Callable[[], bool]


class DeadlockError(RuntimeError):
    """All partitions wait."""


class _Stopped(BaseException):
    """Another thread failed; this one ends without a word."""


class Turns:
    """Runs functions by turns, in the order of their names and then whenever they can go on."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._waits: dict[int, tuple[Condition, str]] = {}
        self._ended: set[int] = set()
        self._turn = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Returns when all have ended, or raises the first of their errors."""
        threads = [threading.Thread(target=self._thread, args=(i, function)) for i, function in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, i: int, condition: Condition, what: str) -> None:
        """Function i waits until the condition holds; others run meanwhile. what: for the error where none can."""
        if condition():
            return
        with self._changed:
            self._waits[i] = condition, what
            self._pass_on(i)
        self._until_turn(i)
        del self._waits[i]

    def _thread(self, i: int, function: Callable[[], None]) -> None:
        try:
            self._until_turn(i)
            function()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._ended.add(i)
            self._pass_on(i)

    def _until_turn(self, i: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == i or self._error is not None)
        if self._error is not None:
            raise _Stopped

    def _pass_on(self, i: int) -> None:
        """The turn goes to the next that can go on."""
        count = len(self._names)
        left = [j % count for j in range(i + 1, i + count + 1) if j % count not in self._ended]
        ready = [j for j in left if j not in self._waits or self._waits[j][0]()]
        if ready:
            self._turn = ready[0]
        elif left and self._error is None:
            self._error = DeadlockError(
                f"nobody can go on: {'; '.join(f'{self._names[j]} {self._waits[j][1]}' for j in left)}."
            )
        self._changed.notify_all()
