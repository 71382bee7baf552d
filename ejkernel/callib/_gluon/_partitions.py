"""The partitions of an interpreted Gluon program, what each has under way, and the barriers between them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.callib._gluon._clocks import Actor, Clock, RaceError, Slot, join
from ejkernel.callib._gluon._turns import Condition, DeadlockError, Turns
from ejkernel.callib._gluon._values import Tensor

THREADS = 32  # of a warp
Place = tuple[int, ...]


class _Here(threading.local):
    """What this thread runs."""

    partition: Partition
    program: tuple[Place, Place]
    wait: Callable[[Condition, str], None]


_here = _Here()


def partition() -> Partition:
    """The one that runs in this thread."""
    return _here.partition


def place() -> tuple[Place, Place]:
    """(place of this program in the grid, the grid)."""
    return _here.program


class Barrier:
    """An mbarrier: a phase ends when as many as it counts have arrived."""

    def __init__(self, name: str):
        self.name = name
        self.count: int | None = None
        self.phase = 0
        self.pending = 0
        self.arrived: Clock = {}
        self.released: Clock = {}  # what those know who arrived in phases that ended

    def init(self, count: int) -> None:
        self.count = self.pending = int(count)

    def arrive(self, count: int, knows: Clock) -> None:
        if self.count is None:
            raise RaceError(f"{partition().name} arrives at {self.name}, which was not initialised.")
        if count > self.pending:
            raise RaceError(f"{partition().name} is {count - self.pending} arrivals more than {self.name} counts in a phase.")
        join(self.arrived, knows)
        self.pending -= count
        if self.pending == 0:
            join(self.released, self.arrived)
            self.phase, self.pending, self.arrived = self.phase + 1, self.count, {}

    def passed(self, parity: int) -> bool:
        """Whether the last phase of this parity has ended."""
        return (self.phase & 1) != parity


class Product(Tensor):
    """A result of an asynchronous product: nobody may look at it before it was waited for."""

    def __init__(self, result: Any, group: int, owner: Partition):
        self._result, self.group, self.owner = result, group, owner

    @property
    def data(self) -> Any:  # type: ignore[override]
        raise RaceError(f"{self.owner.name} uses the result of a product that it has not waited for.")

    def result(self) -> Tensor:
        return Tensor(self._result)


class Partition(Actor):
    """One partition of a program: its warps, its copies under way, its products under way."""

    def __init__(self, name: str, warps: int, knows: Clock | None = None):
        super().__init__(name, knows)
        self.warps = warps
        self.copies = Actor(f"a copy by {name}")
        self.copying = False  # copies that no barrier and no group counts yet
        self.stored: list[Slot] = []  # since the last fence
        self.groups: list[int] = []  # of copies: when each was committed, in the time of `copies`
        self.under_way: list[tuple[int, list[Slot]]] = []  # products, oldest first
        self.products = 0
        self.scattered = False  # threads may have gone on at different speeds since they last met

    def start_copy(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.writes(self.copies, self)
        self.copying = True

    def arrive_after_copies(self, barrier: Barrier) -> None:
        """Every thread arrives when its copies so far are done, and so has read what it read before; what it wrote it does not
        tell by that."""
        knows = {**self.knows, self.copies.name: self.copies.now, self.name: self.now - 1}
        self.tick_reads()
        self.copies.tick()
        self.copying = False
        barrier.arrive(THREADS * self.warps, knows)

    def commit_copies(self) -> None:
        self.groups.append(self.copies.now)
        self.copies.tick()
        self.copying = False

    def wait_for_copies(self, pending: int) -> None:
        """Until at most so many groups of copies are under way."""
        done = self.groups[: len(self.groups) - pending] if pending else self.groups
        if done:
            join(self.knows, {self.copies.name: done[-1]})
        self.groups = self.groups[len(done) :]

    def start_product(self, result: Any, operands: Sequence[Slot]) -> Product:
        for slot in operands:
            slot.check_read(self, "multiplies")
            if slot.unfenced:
                raise RaceError(
                    f"{self.name} multiplies {slot.name}, stored by {min(slot.unfenced)} without fence_async_shared."
                )
            slot.products.add((self.name, self.products))
        self.under_way.append((self.products, list(operands)))
        self.products += 1
        return Product(result, self.products - 1, self)

    def wait_for_products(self, pending: int) -> None:
        done = self.under_way[: max(0, len(self.under_way) - pending)]
        for number, operands in done:
            for slot in operands:
                slot.products.discard((self.name, number))
                slot.reads(self)
        self.under_way = self.under_way[len(done) :]
        self.scattered = True

    def finished(self, product: Product) -> Tensor:
        if any(number == product.group for number, _ in self.under_way):
            raise RaceError(f"{self.name} takes the result of a product that is still under way.")
        return product.result()

    def fence(self) -> None:
        """Products see what was stored until now."""
        for slot in self.stored:
            slot.unfenced.discard(self.name)
        self.stored = []

    def meet(self) -> None:
        """All threads of the partition wait for each other."""
        self.scattered = False

    def arrive(self, barrier: Barrier, count: int) -> None:
        if self.scattered:
            raise RaceError(
                f"{self.name} arrives at {barrier.name} by one thread while others may still read or write: "
                "a barrier of the partition has to come before it."
            )
        barrier.arrive(count, self.knows)
        self.tick()

    def leave(self) -> None:
        """At the end of a partition no product may be under way."""
        if self.under_way:
            raise RaceError(f"{self.name} ends while a product is under way.")

    def check_copies(self, end: Actor) -> None:
        """Nor a copy at the end of the program: somebody must have waited for the last of them."""
        if self.copying or not end.knows_of(self.copies.name, self.copies.now - 1):
            raise RaceError(
                f"{self.name} starts copies that may be under way when the program ends: nobody has waited for them."
            )


def run_partitions(functions: Sequence[Callable[[], None]], names: Sequence[str], warps: Sequence[int]) -> None:
    """Runs functions as the partitions of the program that this thread runs."""
    whole, program = partition(), place()
    turns = Turns(names)
    parts = [Partition(name, count, whole.knows) for name, count in zip(names, warps, strict=True)]

    def run(i: int) -> None:
        _here.partition, _here.program, _here.wait = parts[i], program, functools.partial(turns.wait, i)
        functions[i]()
        parts[i].leave()

    turns.run([functools.partial(run, i) for i in range(len(parts))])
    for part in parts:
        join(whole.knows, part.knows)
    for part in parts:
        part.check_copies(whole)


def wait_for(barrier: Barrier, parity: int) -> None:
    """The partition of this thread waits for a phase, and knows then what those knew who arrived."""
    missing = (
        f"waits for {barrier.name}, parity {parity}, where {barrier.pending} arrivals are missing in phase {barrier.phase}"
    )
    _here.wait(lambda: barrier.passed(parity), missing)
    partition().learn(barrier.released)


def run_program(function: Callable[[], None], program: tuple[Place, Place], warps: int) -> None:
    """Runs a kernel's function as one program: (its place in the grid, the grid)."""

    def alone(condition: Condition, what: str) -> None:
        if not condition():
            raise DeadlockError(f"the program {what}, and nobody else runs.")

    whole = Partition("the program", warps)
    _here.partition, _here.program, _here.wait = whole, program, alone
    function()
    whole.leave()
    whole.check_copies(whole)
