"""`ConfigSelectorChain`: which configuration a call runs with, and which level said so."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from ejkernel._device import backend_of
from ejkernel._sizes import unknown_sizes
from ejkernel.ops import reporting
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.codec import check_config, from_fields
from ejkernel.ops.config.overlay import overlaid
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import VARIABLE, AutotunePolicy, as_policy
from ejkernel.ops.config.shipped import shipped_default
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.notices import warn_once
from ejkernel.ops.worker import inside_worker

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


# One tuning at a time in a process: two would disturb each other's times.
_tuning = threading.Lock()


class ConfigSelectorChain:
    """Asks each level in turn: explicit > overlay > memory > disk > shipped > autotune > heuristics > error.

    Only measured results are kept, in memory and on disk. What a level offers is checked against the configuration's class
    and `Kernel.check_cfg` before it is used; what fails is passed over with one warning. In a multi-process program process 0
    decides everything below memory, and the others receive it.

    Attributes:
        patience: seconds that another process waits for process 0, beyond the time that tuning may take.
    """

    patience: float = 60.0

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | str | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | Callable[..., PersistentCache] | None = None,
    ):
        """
        Args:
            cache: measured configurations in memory; None: a new, empty one.
            policy: what a miss does; None: `AutotunePolicy()`. "autotune", "heuristics" and "error" stand for the policy with
                that `cache_miss_fallback`.
            tuner: measures candidates; None: a miss is never measured.
            persistent: a cache on disk; other operations' entries go beside it. The class `PersistentCache` itself stands for
                the usual folder; None: no disk.
        """
        for name, value, wanted in (("cache", cache, "entry"), ("tuner", tuner, "tune")):
            if value is not None and (isinstance(value, type) or not hasattr(value, wanted)):
                raise TypeError(f"{name} must be a {'ConfigCache' if name == 'cache' else 'Tuner'} or None; got {value!r}.")
        if not (persistent is None or isinstance(persistent, PersistentCache) or callable(persistent)):
            raise TypeError(f"persistent must be a PersistentCache, the class PersistentCache or None; got {persistent!r}.")
        self.cache = ConfigCache() if cache is None else cache
        self.policy = as_policy(policy)
        self.tuner = tuner
        self._persistent = persistent
        self._disks: dict[tuple[str, type | None], PersistentCache] = {}  # by op_id and class of configurations
        self._failed: dict[str, Mapping[str, Any]] = {}  # by key: the record of a tuning that failed, which is not repeated
        self._agreed: dict[tuple[str, str], Choice] = {}  # by purpose and key: what process 0 has decided for all

    @property
    def generation(self) -> int:
        """Changes whenever the memory does, so that nobody keeps a choice that is no longer the right one."""
        return self.cache.generation

    def choose(self, inv: Invocation[Any, Any], cfg: Any = None) -> Choice:
        """The configuration for this call. NoConfigError when the policy is `"error"` and nothing is known."""
        return self._noted(inv, self._given(inv, cfg) or self._known(inv) or self._decide(inv, "choose", self._decide_here))

    def tune(self, inv: Invocation[Any, Any], again: bool = False) -> Choice:
        """Measures this call whatever the policy says, unless memory or disk has a result already.

        Args:
            again: measure even then (in a multi-process program, once per call). The older result is replaced when the new
                one is there, not before.
        """
        if again:
            return self._noted(inv, self._decide(inv, "tune again", self._measured_again))
        return self._noted(inv, self._known(inv) or self._decide(inv, "tune", self._measured_here))

    def _noted(self, inv: Invocation[Any, Any], choice: Choice) -> Choice:
        check_config(choice.config, f"the {choice.level} configuration of {inv.kernel.op_id!r}")
        reporting.note(inv, str(choice.level), choice.config, choice.record)
        return choice

    def _given(self, inv: Invocation[Any, Any], cfg: Any) -> Choice | None:
        if cfg is not None:
            return Choice(cfg, Level.EXPLICIT)
        config = overlaid(inv.kernel.op_id, inv.key)
        if config is None:
            return None
        reason = self._refusal(inv, config)
        if reason is not None:
            raise ValueError(f"the overlay's configuration for {inv.kernel.op_id!r} cannot run this call: {reason}.")
        return Choice(config, Level.OVERLAY)

    def _known(self, inv: Invocation[Any, Any]) -> Choice | None:
        """What memory has. In a multi-process program, process 0 publishes it for the others."""
        found = self._stored(inv, Level.MEMORY, self.cache)
        if found is not None and jax.process_count() > 1 and not inside_worker():
            from ejkernel.ops import distributed

            distributed.publish(inv.key, found)
        return found

    def _decide(self, inv: Invocation[Any, Any], purpose: str, decide: Callable[[Invocation[Any, Any]], Choice]) -> Choice:
        """What memory does not have: decided here, or by process 0 for all processes."""
        if jax.process_count() == 1 or inside_worker():  # only process 0 has workers, so nobody waits for those
            return decide(inv)
        from ejkernel.ops import distributed

        name = (purpose, inv.key)
        if name not in self._agreed:
            seconds = self.patience + (0 if self.tuner is None else self.tuner.max_seconds)
            agreed = distributed.agree(inv, purpose, lambda: decide(inv), self._checked, seconds)
            if agreed.level in (Level.DISK, Level.AUTOTUNE):
                self.cache.put(inv.key, agreed.config, agreed.record)
            self._agreed[name] = agreed
        return self._agreed[name]

    def _decide_here(self, inv: Invocation[Any, Any]) -> Choice:
        if sizes := unknown_sizes(inv.problem):  # nothing can be measured, and what was measured was of one size
            return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS, {"not_tuned": f"unknown sizes: {', '.join(sizes)}"})
        found = self._from_disk(inv) or self._shipped(inv)
        if found is not None:
            return found
        fallback, whose = self.policy.ruling(inv.kernel, backend_of(inv.device))
        if fallback == "autotune":
            if self.tuner is not None and not inside_worker():
                return self._autotune(inv, self.tuner)
            whose = "the chain has no tuner" if self.tuner is None else "the call is part of a candidate that is being measured"
        if fallback == "error":
            raise NoConfigError(
                f"no tuned configuration of {inv.kernel.op_id!r} is known for {inv.shapes} on {inv.device.device_kind}, and "
                f"the policy is 'error'. Tune ahead with ejkernel.ops.tune, give cfg, or set {VARIABLE} to 'autotune' or "
                f"'heuristics'."
            )
        return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS, {"not_tuned": whose})

    def _measured_here(self, inv: Invocation[Any, Any]) -> Choice:
        from ejkernel.ops.tuner import Tuner

        return self._from_disk(inv) or self._autotune(inv, self.tuner or Tuner())

    def _measured_again(self, inv: Invocation[Any, Any]) -> Choice:
        from ejkernel.ops.tuner import Tuner

        self._failed.pop(inv.key, None)
        return self._autotune(inv, self.tuner or Tuner(), again=True)

    def _from_disk(self, inv: Invocation[Any, Any]) -> Choice | None:
        disk = self.disk(inv)
        found = None if disk is None else self._stored(inv, Level.DISK, disk)
        if found is not None:
            self.cache.put(inv.key, found.config, found.record)
        return found

    def _shipped(self, inv: Invocation[Any, Any]) -> Choice | None:
        found = shipped_default(inv)
        return None if found is None else self._checked(inv, Level.SHIPPED, *found)

    def _autotune(self, inv: Invocation[Any, Any], tuner: Tuner, again: bool = False) -> Choice:
        """Measures and stores, once per key however many threads ask. Where nothing could be measured: the heuristic."""
        from ejkernel.ops.tuner import TuningFailed

        with _tuning:
            found = None if again else self._stored(inv, Level.MEMORY, self.cache)
            if found is not None:  # another thread measured while this one waited
                return found
            if inv.key in self._failed:
                return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS, self._failed[inv.key])
            try:
                tuned = tuner.tune(inv, self.policy.validate_backward)
            except TuningFailed as failure:
                self._failed[inv.key] = failure.record
                warn_once(
                    ("tuning", inv.key),
                    f"tuning {inv.kernel.op_id!r} for {inv.shapes} failed, so the heuristic is used and nothing is stored. "
                    f"{failure}.",
                )
                return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS, failure.record)
            self.cache.put(inv.key, tuned.config, tuned.record)
            disk = self.disk(inv)
            if disk is not None and tuned.decided:  # else another process, which finds more compiled already, may decide it
                disk.put(inv.key, tuned.config, tuned.record)
            return Choice(tuned.config, Level.AUTOTUNE, tuned.record)

    def disk(self, inv: Invocation[Any, Any]) -> PersistentCache | None:
        """The cache on disk of this call's operation, or None when the chain has no disk."""
        if self._persistent is None:
            return None
        name = (inv.kernel.op_id, inv.kernel._config_cls)
        if name not in self._disks:
            if not isinstance(self._persistent, PersistentCache):
                self._disks[name] = self._persistent(name[0], config_cls=name[1])
            elif self._persistent.op_id == name[0]:
                self._disks[name] = self._persistent
            else:
                self._disks[name] = self._persistent.sibling(*name)
        return self._disks[name]

    def _stored(self, inv: Invocation[Any, Any], level: Level, cache: Any) -> Choice | None:
        found = cache.entry(inv.key)
        return None if found is None else self._checked(inv, level, *found)

    def _checked(self, inv: Invocation[Any, Any], level: Level, config: Any, record: Mapping[str, Any]) -> Choice | None:
        """What a level offers, in its class; None with one warning where this call cannot run with it."""
        try:
            config = from_fields(self._config_cls(inv), config)
            reason = self._refusal(inv, config)
        except Exception as problem:  # whatever is wrong with stored data must not break the call
            reason = f"{type(problem).__name__}: {problem}"
        if reason is None:
            return Choice(config, level, record)
        warn_once(
            (str(level), inv.key, reason), f"passed over the {level} configuration {config} of {inv.kernel.op_id!r}: {reason}."
        )
        return None

    def _config_cls(self, inv: Invocation[Any, Any]) -> type:
        return inv.kernel._config_cls or type(inv.kernel.heuristic_cfg(inv))

    def _refusal(self, inv: Invocation[Any, Any], config: Any) -> str | None:
        wanted = self._config_cls(inv)
        if not isinstance(config, wanted):
            return f"it is a {type(config).__name__}, not a {inv.kernel._config_name or wanted.__name__}"
        return inv.kernel.check_cfg(inv, config)
