"""Times, errors and floors of calls, as records: what `bench` tables, plots and JSON are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from ejkernel.cli._contenders import OURS
from ejkernel.cli._operations import Operation
from ejkernel.ops.collecting import collecting
from ejkernel.ops.invocation import Invocation
from ejkernel.testing.contenders import Contender, fetched
from ejkernel.testing.judge import Judge
from ejkernel.testing.record import Sizes
from ejkernel.testing.timing import best_time


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contender on one call in one direction.

    Attributes:
        operation: its name.
        shape: the call, as its record writes it: `BxTx...`, then gates, if any, and dtype.
        tokens: T.
        direction: "forward" or "forward+backward".
        contender: who.
        seconds: of one call; None where it did not run.
        output_error, gradient_error: relative RMS against float64; None where not compared.
        floor_seconds: what no implementation can beat on this device.
        bound: what sets the floor: "bytes" or "operations".
        reason: why it did not run; "" where it did.
        config: what ours chose to run.
        route: the name of the way that ours took with it; "" for others.
    """

    operation: str
    shape: str
    tokens: int
    direction: str
    contender: str
    seconds: float | None
    output_error: float | None
    gradient_error: float | None
    floor_seconds: float
    bound: str
    reason: str = ""
    config: str = ""
    route: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is this library."""
        return self.contender.split()[0] == OURS

    @property
    def distance(self) -> float | None:
        """How many times the floor it takes."""
        return None if self.seconds is None else self.seconds / self.floor_seconds

    @property
    def family(self) -> tuple[str, str]:
        """The operation and the shape without its length: measurements that belong in one plot."""
        batch, _, rest = self.shape.split("x", 2)
        return self.operation, f"{batch}xTx{rest}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        directions: of `timing.DIRECTIONS`.
        seconds: for each measurement.
        errors: whether to compare with float64.
        strong_gates: whether gates are strong in places, with resets, instead of weak.
    """

    directions: Sequence[str]
    seconds: float
    errors: bool
    strong_gates: bool


def measure(
    op: Operation, shape: Sizes, who: Sequence[Contender], settings: Settings
) -> Iterator[tuple[str, Callable[[], Measured]]]:
    """One step per direction and contender: what it is, and the function that does it."""
    arrays, cotangent = op.arrays(shape, settings.strong_gates), op.cotangent(shape)
    judges: list[Judge] = []

    def judge() -> Judge:
        if not judges:
            judges.append(op.judge(shape, arrays, cotangent, "forward+backward" in settings.directions))
        return judges[0]

    asked, seconds = judge if settings.errors else None, settings.seconds
    for direction in settings.directions:
        for contender in who:
            step = lambda d=direction, c=contender: _one(op, shape, d, c, arrays, cotangent, seconds, asked)
            yield f"{op.name} T={shape.time} {direction} {contender.name}", step


def _one(
    op: Operation,
    shape: Sizes,
    direction: str,
    contender: Contender,
    arrays: dict[str, jax.Array],
    cotangent: jax.Array,
    seconds: float,
    judge: Callable[[], Judge] | None,
) -> Measured:
    least = op.floor(shape, direction)
    known = (op.name, str(shape), shape.time, direction, contender.name)
    if contender.absent is not None:
        return Measured(*known, None, None, None, least.seconds, least.bound, contender.absent)
    output_error = gradient_error = None
    try:
        run = contender.prepare(direction, arrays)
        first = run(cotangent if judge is None else judge().cotangent)
        contender.wait(first)
        if judge is not None:
            output_error, gradient_error = judge().errors(*fetched(first, direction))
        del first  # its memory is for the calls that are timed
        took = best_time(lambda: run(cotangent), contender.wait, seconds=seconds)
        config, route = ("", "") if contender.platform is None else _chosen(op, shape, contender.platform)
    except Exception as problem:  # one that cannot run this call, or runs out of memory, must not take the others with it
        reason = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:300]
        return Measured(*known, None, None, None, least.seconds, least.bound, reason)
    return Measured(*known, took, output_error, gradient_error, least.seconds, least.bound, config=config, route=route)


def invocations(op: Operation, shape: Sizes, platform: str | None = None) -> list[Invocation]:
    """The calls that the executor sees when an operation is called with a shape; nothing is computed."""
    with collecting() as calls:
        jax.eval_shape(lambda arrays: op.function(**arrays, platform=platform), op.abstract(shape))
    return [inv for _, inv in calls.found.values()]


def _chosen(op: Operation, shape: Sizes, platform: str) -> tuple[str, str]:
    """The configuration that a call ran with, and its route."""
    from ejkernel.modules.base import default_executor

    (inv,) = invocations(op, shape, platform)
    config = default_executor().chooser.choose(inv).config
    return str(config), inv.kernel.route(inv, config) or ""
