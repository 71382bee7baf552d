"""What happens before what in an interpreted Gluon program, and errors where two accesses have no order.

Partitions of a program run at one time; only barriers order them. Everybody who acts has a clock: for every actor, up to when
it knows what that one did. An access is right if all that it depends on is known to who makes it, in whatever order the
interpreter happened to run the partitions: so a missing wait is an error here, not a matter of luck as on a GPU.
"""

from __future__ import annotations

import dataclasses

Clock = dict[str, int]


class RaceError(RuntimeError):
    """Two partitions touch the same memory and no barrier says which of them is first."""


def reads_of(name: str) -> str:
    """Who an actor is where it reads: that may be told to others before what it wrote."""
    return f"reads of {name}"


class Actor:
    """A partition, or its copies under way, which read and write in a time of their own."""

    def __init__(self, name: str, knows: Clock | None = None):
        self.name = name
        self.knows: Clock = dict(knows or {})
        self.knows |= {name: 1, reads_of(name): 1}

    @property
    def now(self) -> int:
        return self.knows[self.name]

    def tick(self) -> None:
        """What comes now is later than all that others have been told."""
        self.knows[self.name] += 1
        self.tick_reads()

    def tick_reads(self) -> None:
        self.knows[reads_of(self.name)] += 1

    def learn(self, clock: Clock) -> None:
        join(self.knows, clock)

    def knows_of(self, actor: str, time: int) -> bool:
        return self.knows.get(actor, 0) >= time


def join(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        if clock.get(name, 0) < time:
            clock[name] = time


@dataclasses.dataclass
class Slot:
    """A part of shared memory that is handed on as one, and who touched it last."""

    name: str
    written: tuple[str, int] | None = None
    read: dict[str, int] = dataclasses.field(default_factory=dict)
    unfenced: set[str] = dataclasses.field(default_factory=set)  # stores that products cannot see yet
    products: set[tuple[str, int]] = dataclasses.field(default_factory=set)  # under way, which read it

    def check_read(self, reader: Actor, what: str) -> None:
        if self.written is None:
            raise RaceError(f"{reader.name} {what} {self.name} before anything is written there.")
        if not reader.knows_of(*self.written):
            raise RaceError(f"{reader.name} {what} {self.name} and does not wait for what {self.written[0]} writes there.")

    def reads(self, reader: Actor) -> None:
        self.check_read(reader, "reads")
        self.read[reader.name] = reader.knows[reads_of(reader.name)]

    def writes(self, writer: Actor, knows: Actor) -> None:
        """knows: whose clock counts; that of the partition for its copies, whose own time is `writer`'s."""
        if self.products:
            raise RaceError(f"{writer.name} writes {self.name} while a product that reads it is under way.")
        if self.written is not None and not knows.knows_of(*self.written):
            raise RaceError(f"{writer.name} writes {self.name} and does not wait for what {self.written[0]} writes there.")
        for reader, time in self.read.items():
            if not knows.knows_of(reads_of(reader), time):
                raise RaceError(f"{writer.name} writes {self.name} and does not wait until {reader} has read it.")
        self.written = (writer.name, writer.now)
        self.read = {}
        self.unfenced.clear()
