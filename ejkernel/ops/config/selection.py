"""`ConfigSelectorChain`: which configuration a call runs with, and which level said so."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ejkernel.ops import reporting
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.codec import from_fields
from ejkernel.ops.config.overlay import overlaid
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import VARIABLE, AutotunePolicy
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.key import backend_of
from ejkernel.ops.notices import warn_once

if TYPE_CHECKING:
    from ejkernel.ops.tuner import Tuner


class Level(enum.StrEnum):
    """Who chose a configuration, in the order they are asked."""

    EXPLICIT = "explicit"
    OVERLAY = "overlay"
    MEMORY = "memory"
    DISK = "disk"
    SHIPPED = "shipped"
    AUTOTUNE = "autotune"
    HEURISTICS = "heuristics"


@dataclass(frozen=True)
class Choice:
    """A configuration with the level that chose it and what is known of its measurement."""

    config: Any
    level: Level
    record: Mapping[str, Any] = field(default_factory=dict)


class NoConfigError(LookupError):
    """Nothing is known about a call and the policy forbids measuring or guessing."""


class ConfigSelectorChain:
    """Asks each level in turn: explicit > overlay > memory > disk > shipped > autotune > heuristics > error.

    Only measured results are kept, in memory and on disk; what a level offers is checked against the configuration's
    class and `Kernel.check_cfg` before it is used, and what fails that check is passed over with one warning.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | Callable[..., PersistentCache] | None = None,
    ):
        """
        Args:
            cache: measured configurations in memory; None: a new, empty one.
            policy: what a miss does; None: `AutotunePolicy()`.
            tuner: measures candidates; None: a miss is never measured.
            persistent: a cache on disk; other operations' entries go beside it. The class `PersistentCache` itself stands for
                the usual folder; None: no disk.
        """
        self.cache = ConfigCache() if cache is None else cache
        self.policy = AutotunePolicy() if policy is None else policy
        self.tuner = tuner
        self._persistent = persistent
        self._disks: dict[tuple[str, type | None], PersistentCache] = {}
        self._failed: dict[str, Mapping[str, Any]] = {}
        self._tuning = threading.Lock()

    @property
    def generation(self) -> int:
        """Changes whenever the memory does, so that nobody keeps a choice that is no longer the right one."""
        return self.cache.generation

    def choose(self, inv: Invocation, cfg: Any = None) -> Choice:
        """The configuration for this call. NoConfigError when the policy is `"error"` and nothing is known."""
        choice = self._given(inv, cfg) or self._stored(inv, Level.MEMORY, self.cache) or self._decide(inv)
        reporting.note(reporting.Chosen(inv.kernel.op_id, inv.shapes, str(choice.level), choice.config, choice.record, inv.key))
        return choice

    def _given(self, inv: Invocation, cfg: Any) -> Choice | None:
        if cfg is not None:
            return Choice(cfg, Level.EXPLICIT)
        config = overlaid(inv.kernel.op_id, inv.key)
        if config is None:
            return None
        reason = self._refusal(inv, config)
        if reason is not None:
            raise ValueError(f"the overlay's configuration for {inv.kernel.op_id!r} cannot run this call: {reason}.")
        return Choice(config, Level.OVERLAY)

    def _decide(self, inv: Invocation) -> Choice:
        return self._decide_here(inv)

    def _decide_here(self, inv: Invocation) -> Choice:
        disk = self.disk(inv)
        found = None if disk is None else self._stored(inv, Level.DISK, disk)
        if found is not None:
            self.cache.put(inv.key, found.config, found.record)
            return found
        fallback = self.policy.fallback(inv.kernel, backend_of(inv.device))
        if fallback == "error":
            raise NoConfigError(
                f"no tuned configuration of {inv.kernel.op_id!r} is known for {inv.shapes} on {inv.device.device_kind}, and "
                f"the policy is 'error'. Tune ahead with ejkernel.ops.tune, give cfg, or set {VARIABLE} to 'autotune' or "
                f"'heuristics'."
            )
        return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS)

    def disk(self, inv: Invocation) -> PersistentCache | None:
        """The cache on disk of this call's operation, or None when the chain has no disk."""
        if self._persistent is None:
            return None
        name = (inv.kernel.op_id, inv.kernel._config_cls)
        if name not in self._disks:
            if isinstance(self._persistent, PersistentCache):
                self._disks[name] = self._persistent.sibling(*name)
            else:
                self._disks[name] = self._persistent(name[0], config_cls=name[1])
        return self._disks[name]

    def _stored(self, inv: Invocation, level: Level, cache: Any) -> Choice | None:
        config = cache.get(inv.key)
        if config is None:
            return None
        return self._checked(inv, level, config, cache.record(inv.key))

    def _checked(self, inv: Invocation, level: Level, config: Any, record: Mapping[str, Any]) -> Choice | None:
        """What a level offers, in its class; None with one warning where this call cannot run with it."""
        try:
            config = from_fields(self._config_cls(inv), config)
            reason = self._refusal(inv, config)
        except Exception as problem:  # whatever is wrong with stored data must not break the call
            reason = f"{type(problem).__name__}: {problem}"
        if reason is None:
            return Choice(config, level, record)
        warn_once((str(level), inv.key), f"passed over the {level} configuration {config} of {inv.kernel.op_id!r}: {reason}.")
        return None

    def _config_cls(self, inv: Invocation) -> type:
        return inv.kernel._config_cls or type(inv.kernel.heuristic_cfg(inv))

    def _refusal(self, inv: Invocation, config: Any) -> str | None:
        wanted = self._config_cls(inv)
        if not isinstance(config, wanted):
            return f"it is a {type(config).__name__}, not a {wanted.__name__}"
        return inv.kernel.check_cfg(inv, config)
