"""Tuned calls as people look at them: those on disk, those that come with the package, and those of a recorded run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel._device import default_device
from ejkernel.cli._operations import name_of
from ejkernel.cli._screen import fail, wrong_use
from ejkernel.ops.config.codec import in_words
from ejkernel.ops.config.persistent import VARIABLE, PersistentCache
from ejkernel.ops.config.shipped import FOLDER, device_name, read, relatives
from ejkernel.ops.config.validity import wrong_key, wrong_record
from ejkernel.ops.key import device_kind, environment, is_op_id

_QUERY = re.compile(r"(\w+)\[([\d,~]*)\]")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One choice of a configuration.

    Attributes:
        key: the call's key.
        level: who chose: disk, shipped, or what a recorded run says.
        fields: the configuration's fields.
        record: how it was measured; empty where nothing was.
        here: whether a call on this device, with these versions, would find it.
        file: where it is stored, if it is.
        broken: why the file cannot be read, if it cannot.
    """

    key: str
    level: str
    fields: Mapping[str, Any]
    record: Mapping[str, Any]
    here: bool
    file: Path | None = None
    broken: str | None = None

    @functools.cached_property
    def id(self) -> str:
        """Ten characters that name the entry; the file on disk begins with them."""
        return self.file.stem[:10] if self.file is not None else hashlib.sha256(self.key.encode()).hexdigest()[:10]

    @functools.cached_property
    def unreadable(self) -> str | None:
        """Why this is no entry of ours; None when it is."""
        return self.broken or wrong_key(self.key) or wrong_record(self.record)

    @functools.cached_property
    def call(self) -> dict[str, Any]:
        """The key's parts; none where it cannot be read."""
        return {} if self.unreadable else json.loads(self.key)

    @property
    def op_id(self) -> str:
        """The operation; of a file that cannot be read, the one whose folder it is in."""
        return str(self.call.get("op", "?" if self.file is None else self.file.parent.name))

    @property
    def seconds(self) -> float | None:
        """The time of the configuration."""
        return None if self.unreadable else self.record.get("seconds")

    @property
    def route(self) -> str | None:
        """The name of the way that a call takes with the configuration; None where it was not kept, or there is only one."""
        return self.record.get("route")

    @property
    def gain(self) -> float | None:
        """The heuristic's time over this one's."""
        heuristic = self.record.get("heuristic_seconds")
        return None if not heuristic or not self.seconds else heuristic / self.seconds

    def arrays(self) -> dict[str, str]:
        """The arrays of the call by name, without the name of the problem they are in."""
        return {name.removeprefix("problem."): text for name, text in self.call.get("arrays", {}).items()}

    def shape(self) -> str:
        """The call in a few words: `2x~2048x4x64x64 g float32`; `~` marks a length that stands for its bucket."""
        if self.unreadable:
            return "unreadable"
        arrays = self.arrays()
        found = {name: _QUERY.match(text) for name, text in arrays.items()}
        query, value = found.get("query"), found.get("value")
        if query is None or value is None:
            return ", ".join(arrays.values())
        sizes = [*query[2].split(","), value[2].split(",")[-1]]
        extra = [name for name in arrays if name not in ("query", "key", "value")]
        return " ".join(["x".join(sizes), *(["+".join(extra)] if extra else []), query[1]])

    def config(self) -> str:
        """The configuration in a few words, `xla chunked block_q=64`; fields that say nothing are left out."""
        if self.unreadable:
            return self.unreadable
        return in_words(self.fields)

    def as_json(self) -> dict[str, Any]:
        """Everything that is known."""
        return {
            "id": self.id,
            "operation": name_of(self.op_id),
            "level": self.level,
            "config": dict(self.fields),
            "route": self.route,
            "seconds": self.seconds,
            "usable_here": self.here,
            "unreadable": self.unreadable,
            "call": self.call,
            "record": dict(self.record),
        }


def stored_entries(folder: Path) -> list[Entry]:
    """What is on disk, by operation and key; files that cannot be read are among them and say why."""
    present = _present()
    found: list[Entry] = []
    for op_id in operation_folders(folder):
        for file, read_, broken in PersistentCache.of_folder(folder / op_id).readings():
            key, fields, record = (file.stem, {}, {}) if read_ is None else read_
            found.append(Entry(key, "disk", fields, record, _same(key, present), file, broken))
    return found


def operation_folders(folder: Path) -> list[str]:
    """The operations that have a folder of their own in the cache."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    except OSError as problem:
        fail(f"{folder} cannot be read: {problem.strerror}.")
    return [name for name in names if is_op_id(name)]


def _present() -> Mapping[str, str] | None:
    """What measurements on this device depend on; None where JAX has no device, which `ejkernel doctor` explains."""
    try:
        return environment(default_device())
    except RuntimeError:
        return None


def shipped_entries() -> list[Entry]:
    """What comes with the package for this device and its relatives; versions do not matter for these."""
    found: dict[str, Entry] = {}
    if _present() is None:
        return []
    for name in relatives(device_name(device_kind(default_device()))):
        file = FOLDER / f"{name}.json"
        for call, won in read(file).items() if file.is_file() else ():
            fields, record = ({"configuration": won}, {}) if isinstance(won, str) else (won["config"], won["record"])
            found.setdefault(call, Entry(call, "shipped", fields, {**record, "shipped_for": name}, True))
    return list(found.values())


def recorded_choices(file: Path) -> list[dict[str, Any]]:
    """The choices in the file that a run's `report().save(file)` wrote."""
    from ejkernel.ops.recording import load

    try:
        return load(file)
    except OSError as problem:
        wrong_use(f"{file} cannot be read: {problem.strerror}.")
    except ValueError as problem:
        fail(f"{file} is not a recorded run: {problem}. Write one with ejkernel.ops.report().save(file).")


def recorded_entries(file: Path) -> list[Entry]:
    """What a run picked."""
    present = _present()
    choices = recorded_choices(file)
    with_route = lambda c: c["record"] | ({} if c.get("route") is None else {"route": c["route"]})
    return [Entry(c["key"], c["level"], c["config"], with_route(c), _same(c["key"], present)) for c in choices]


def _same(key: str, present: Mapping[str, str] | None) -> bool:
    if present is None or wrong_key(key) is not None:
        return False
    stored = json.loads(key).get("environment", {})
    return all(stored.get(name) == value for name, value in present.items())


def writable(folder: Path) -> bool:
    """Whether a file can be made in a folder, or in the nearest one above that exists."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def check_writable(folder: Path, otherwise: str) -> None:
    """Exits unless the cache can be written to, before any work is done for it."""
    if not writable(folder):
        fail(f"{folder} cannot be written to, so {otherwise}. Name another with --cache-dir or {VARIABLE}.")
