"""A thread that runs one task after another and is given up when a task takes too long.

JAX's trace state belongs to a thread. A new thread has none, so what is computed there cannot touch the program that the
calling thread may be tracing. And a compilation that hangs cannot be stopped from inside the process, nor can a candidate
be sent to another process in general (kernels may hold closures; a second process may not get the device), so the thread
that hangs is left behind and a new one goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from ejkernel._device import interpretation, interpreting, planned
from ejkernel.ops.config import overlay
from ejkernel.ops.key import thread_settings

Result = TypeVar("Result")
THREAD = "ejkernel-tuner"
PATIENCE_AT_EXIT = 5.0  # seconds, for all threads together: one may hang for good
_here = threading.local()


class OvertimeError(Exception):
    """A task did not end in its time; its thread was left behind."""


class EndedError(Exception):
    """A task raised what ends a program (SystemExit, KeyboardInterrupt), which is not a candidate's to decide.

    A real Ctrl-C reaches the thread that waits, never the one that works.
    """


class _Task(Generic[Result]):
    result: Result  # once it is done without a failure

    def __init__(self, function: Callable[[], Result]):
        self.function, self.done = function, threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as failure:  # handed to the thread that waits
            self.failure = failure
        finally:
            self.done.set()


class Worker:
    """Runs tasks in a thread with a clean trace state and the caller's settings (x64, precision, overlays, interpretation)."""

    def __init__(self, device: jax.Device):
        """Args: device: where the tasks compute."""
        self._device = device
        self._overlays = overlay.active()
        self._x64, self._precision, _ = thread_settings()
        self._planned, self._interpreted = planned(), interpretation()
        self._tasks: queue.SimpleQueue[_Task[Any] | None] | None = None

    def call(self, function: Callable[[], Result], seconds: float) -> Result:
        """The function's result, or its exception.

        Raises:
            OvertimeError: it takes longer than `seconds`.
            EndedError: it raised what would end the program.
        """
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            _wait_at_exit()
            threading.Thread(target=self._serve, args=(self._tasks,), name=THREAD, daemon=True).start()
        task = _Task(function)
        self._tasks.put(task)
        try:
            ended = task.done.wait(max(0.0, seconds))
        except BaseException:  # an interrupt while waiting
            self.close()
            raise
        if not ended:
            self.close()
            raise OvertimeError(f"it took longer than {seconds:.3g} s")
        if task.failure is not None and not isinstance(task.failure, Exception):
            raise EndedError(f"it raised {task.failure!r}, which would end the program") from task.failure
        if task.failure is not None:
            raise task.failure
        return task.result

    def close(self) -> None:
        """Lets the thread end after its present task; a later call starts a new one."""
        if self._tasks is not None:
            self._tasks.put(None)
            self._tasks = None

    def _serve(self, tasks: queue.SimpleQueue[_Task[Any] | None]) -> None:
        _here.tuning = True
        with contextlib.ExitStack() as settings:
            settings.enter_context(jax.enable_x64(self._x64))
            settings.enter_context(jax.default_matmul_precision(self._precision))
            settings.enter_context(jax.default_device(self._device))
            settings.enter_context(jax.disable_jit(False))
            settings.enter_context(overlay.carry(self._overlays))
            if self._planned is not None and self._interpreted:
                settings.enter_context(interpreting(self._planned, self._interpreted))
            while (task := tasks.get()) is not None:
                task.run()


def left_behind(patience: float = 0.5) -> bool:
    """Whether a thread still works on a task that nobody waits for. Python cannot end such a thread when the program ends."""
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD]
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


@functools.cache
def _wait_at_exit() -> None:
    """A thread that still compiles while Python ends takes the process down with it (SIGABRT); most are done soon."""
    atexit.register(left_behind, PATIENCE_AT_EXIT)


def inside_worker() -> bool:
    """Whether this thread measures candidates, so that operations called by them are not tuned in turn."""
    return getattr(_here, "tuning", False)
