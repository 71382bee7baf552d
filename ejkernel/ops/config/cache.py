"""`ConfigCache`: measured configurations in this process's memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

_generations = itertools.count(1)


class ConfigCache:
    """Configurations by key, in memory. Only measured ones belong here, whoever measured them.

    >>> cache = ConfigCache()
    >>> cache.put("a key", 3, record={"seconds": 1e-3})
    >>> cache.get("a key"), cache.get("another"), cache.record("a key")
    (3, None, {'seconds': 0.001})
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        self._lock = threading.Lock()
        self.generation = 0

    def get(self, key: str) -> Any | None:
        """The configuration under this key, or None. Imported ones are fields that the chain turns into their class."""
        found = self.entry(key)
        return None if found is None else found[0]

    def put(self, key: str, config: Any, record: Mapping[str, Any] | None = None) -> None:
        """Keeps a configuration. `record` says how it was measured: times, losers with reasons, environment."""
        with self._lock:
            self._entries[key] = (config, dict(record or {}))
            self.generation = next(_generations)

    def record(self, key: str) -> Mapping[str, Any]:
        """What was recorded with the configuration under this key; empty when there is none."""
        found = self.entry(key)
        return {} if found is None else found[1]

    def entry(self, key: str) -> tuple[Any, Mapping[str, Any]] | None:
        """`(configuration, record)` under this key, or None."""
        return self._entries.get(key)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every key with its configuration, as they are now."""
        return ((key, config) for key, config, _ in self.entries())

    def entries(self) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        """Every key with its configuration and record, as they are now."""
        with self._lock:
            found = list(self._entries.items())
        return iter([(key, config, record) for key, (config, record) in found])

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries.clear()
            self.generation = next(_generations)


_shared = ConfigCache()


def shared_cache() -> ConfigCache:
    """The cache that all default executors of this process use."""
    return _shared
