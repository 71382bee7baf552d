"""Tuned configurations as text: to carry them to another machine, to merge them, to ship them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.cache import ConfigCache, shared_cache
from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.config.persistent import FORMAT, PersistentCache
from ejkernel.ops.config.validity import finite_json, wrong_key, wrong_record
from ejkernel.ops.notices import warn_once

Entry = tuple[str, dict[str, Any], dict[str, Any]]


def dumps(*caches: ConfigCache | PersistentCache) -> str:
    """The entries of these caches as JSON text; without an argument, those of the default executors' memory.

    An entry whose key or record is not of this library's form is left out with a warning: nothing could read it back.

    >>> cache = ConfigCache()
    >>> cache.put('{"op":"scale"}', {"block": 64}, {"seconds": 1e-3})
    >>> other = ConfigCache()
    >>> loads(dumps(cache), other)
    1
    >>> other.get('{"op":"scale"}')
    {'block': 64}
    """
    entries: dict[str, Entry] = {}
    for cache in caches or (shared_cache(),):
        readable = ((key, to_fields(config), record) for key, config, record in cache.entries())
        _merge(entries, ((key, fields, dict(record)) for key, fields, record in readable if _carried(key, record)))
    return _text(entries.values())


def loads(text: str, into: ConfigCache | PersistentCache | None = None) -> int:
    """Adds the entries of a text that `dumps` or `merge` made; gives how many were taken.

    Where both have an entry, the one measured later stays. Eager calls use the new entries at once; a function that was jitted
    before keeps what it was traced with.

    Args:
        into: where to; None: the default executors' memory. Into a `PersistentCache`, each entry goes to its own operation's
            folder.

    Raises:
        ValueError: `dumps` and `merge` make no such text; nothing was added.
    """
    target = shared_cache() if into is None else into
    taken = 0
    for key, fields, record in parse(text):
        cache = target.sibling(_op_id(key), None) if isinstance(target, PersistentCache) else target
        present = cache.entry(key)
        if present is None or _time(record) > _time(present[1]):
            cache.put(key, fields, record)
            taken += 1
    return taken


def merge(*texts: str) -> str:
    """One text with the entries of several; of two entries with one key, the one measured later stays."""
    entries: dict[str, Entry] = {}
    for text in texts:
        _merge(entries, parse(text))
    return _text(entries.values())


def parse(text: str) -> list[Entry]:
    """The `(key, fields, record)` of a text. ValueError that says what is wrong with it."""
    content = finite_json(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("entries"), list):
        raise ValueError(f"text must be what dumps gives: format {FORMAT} with a list of entries.")
    entries: list[Entry] = []
    for number, entry in enumerate(content["entries"]):
        kinds = {"key": str, "config": dict, "record": dict}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), kind) for name, kind in kinds.items()):
            raise ValueError(f"entry {number} of the text must have a key (string), a config and a record (objects).")
        if (wrong := wrong_key(entry["key"]) or wrong_record(entry["record"])) is not None:
            raise ValueError(f"entry {number} of the text cannot be read: {wrong}.")
        entries.append((entry["key"], entry["config"], entry["record"]))
    return entries


def read(file: Path) -> list[Entry]:
    """The entries of a file that holds such a text."""
    return parse(file.read_text(encoding="utf-8"))


def _op_id(key: str) -> str:
    return str(json.loads(key)["op"])


def _carried(key: str, record: Mapping[str, Any]) -> bool:
    wrong = wrong_key(key) or wrong_record(record)
    if wrong is not None:
        warn_once(("carry", key, wrong), f"left out the entry under {key!r:.80}: {wrong}.")
    return wrong is None


def _merge(entries: dict[str, Entry], more: Iterable[Entry]) -> None:
    for entry in more:
        if entry[0] not in entries or _time(entry[2]) > _time(entries[entry[0]][2]):
            entries[entry[0]] = entry


def _time(record: Mapping[str, Any]) -> str:
    return str(record.get("time", ""))


def _text(entries: Iterable[Entry]) -> str:
    listed = [{"key": key, "config": fields, "record": record} for key, fields, record in sorted(entries, key=lambda e: e[0])]
    return json.dumps({"format": FORMAT, "entries": listed}, indent=1, allow_nan=False) + "\n"
