"""Which implementation runs where.

An implementation is a callable registered for an algorithm, a platform (how it is written) and a backend (what it runs
on): a `PlatformFunction`, or any function of one's own. One that cannot take every call has `supports(problem) -> str | None`.

Implementations live at `ejkernel.kernels._<platform>.<algorithm>._interface`, or one directory for a family of algorithms, and
are imported when they are first looked for, so that importing the library needs no GPU, no Triton and no torch. When such an
import fails, the reason is kept and shown when nothing else fits.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ejkernel._device import Device, device_of
from ejkernel._sizes import unknown_sizes

NOT_WRITTEN = "not written for this operation"  # of a platform, in `status`
Function = TypeVar("Function", bound=Callable[..., Any])


class Platform(enum.StrEnum):
    """How an implementation is written."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    XLA = "xla"


class Backend(enum.StrEnum):
    """What an implementation runs on."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


@dataclass(frozen=True)
class Registered:
    """One registered callable with what the registry knows of it."""

    algorithm: str
    platform: Platform
    backend: Backend
    priority: int
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.algorithm}-{self.platform}-{self.backend}"

    def refusal(self, problem: Any) -> str | None:
        """Why this implementation cannot take `problem`; None when it can."""
        supports = getattr(self.function, "supports", None)
        return None if supports is None else supports(problem)

    def preferred(self, problem: Any) -> bool:
        """Whether it should take `problem` before others of lower priority."""
        prefers = getattr(self.function, "preferred", None)
        return True if prefers is None else prefers(problem)


def backend_of(device: Device) -> Backend:
    """The kind of a device; platforms that JAX has beside GPUs and TPUs count as CPUs, for which only xla is written."""
    return {"gpu": Backend.GPU, "tpu": Backend.TPU}.get(device.backend, Backend.CPU)


def _as_member(kind: type[Platform] | type[Backend], value: Any, argument: str) -> Any:
    if value is None or value == "auto":
        return None
    try:
        return kind(value.lower() if isinstance(value, str) else value)
    except ValueError:
        legal = ", ".join(repr(str(member)) for member in kind)
        raise ValueError(f"{argument} must be one of {legal}, 'auto' or None; got {value!r}.") from None


def as_platform(value: str | Platform | None) -> Platform | None:
    """The platform that a name means; None for None and "auto"."""
    return _as_member(Platform, value, "platform")


def as_backend(value: str | Backend | None) -> Backend | None:
    """The backend that a name means; None for None and "auto"."""
    return _as_member(Backend, value, "backend")


def _wanted_backend(value: str | Backend | None, problem: Any) -> Backend:
    """The backend that is meant: None and "any" mean the device of the call, or of this process where there is none."""
    named = as_backend(value)
    if named not in (None, Backend.ANY):
        return named
    device = getattr(problem, "device", None)
    return backend_of(device if isinstance(device, Device) else device_of(()))


class KernelRegistry:
    """Implementations by algorithm, platform and backend, imported when they are first looked for."""

    def __init__(
        self, package: str | None = None, *, families: Mapping[str, str] | None = None, aliases: Mapping[str, str] | None = None
    ):
        """
        Args:
            package: where `_<platform>/<algorithm>/_interface.py` lie; None: only what `register` is given.
            families: the directory of algorithms that share one, by algorithm.
            aliases: further names of algorithms, and which one each means.
        """
        self._package = package
        self._families, self._aliases = dict(families or {}), dict(aliases or {})
        self._implementations: dict[str, list[Registered]] = {}
        self._import_failures: dict[tuple[str, Platform], str] = {}
        self._visited: set[tuple[str, Platform]] = set()
        self._said: set[tuple[Platform, str]] = set()  # failures that were warned of
        self._lock = threading.RLock()

    def register(
        self, algorithm: str, platform: Platform | str, backend: Backend | str, priority: int = 0
    ) -> Callable[[Function], Function]:
        """Decorates an implementation: `@kernel_registry.register("recurrent", "xla", "any")`.

        Raises:
            ValueError: another callable already stands under the same algorithm, platform, backend and priority.
        """
        algorithm = self.name_of(algorithm)
        known_platform, known_backend = as_platform(platform), as_backend(backend)
        if known_platform is None or known_backend is None:
            raise ValueError(f"register needs a named platform and backend; got {platform!r} and {backend!r}.")

        def add(function: Function) -> Function:
            entry = Registered(algorithm, known_platform, known_backend, priority, function)
            with self._lock:
                entries = self._implementations.setdefault(algorithm, [])
                for other in entries:
                    if (other.platform, other.backend, other.priority) == (known_platform, known_backend, priority):
                        raise ValueError(
                            f"{algorithm!r} already has an implementation for platform {str(known_platform)!r}, backend "
                            f"{str(known_backend)!r} at priority {priority}; give the new one another priority."
                        )
                entries.append(entry)
            return function

        return add

    def name_of(self, algorithm: str) -> str:
        """The algorithm that a name means: itself, unless it is an alias.

        Example:
            >>> kernel_registry.name_of("recurrent_gla"), kernel_registry.name_of("recurrent")
            ('gla', 'recurrent')
        """
        return self._aliases.get(algorithm, algorithm)

    def get(
        self, algorithm: str, platform: Platform | str | None = None, backend: Backend | str | None = None
    ) -> Callable[..., Any]:
        """The implementation with the highest priority that fits; ValueError with everything refused and why.

        Args:
            backend: None and "any" mean the device that this process computes on.
        """
        return self.select(algorithm, platform, backend).function

    def select(
        self,
        algorithm: str,
        platform: Platform | str | None = None,
        backend: Backend | str | None = None,
        problem: Any = None,
        among: Callable[[Registered], bool] = lambda entry: True,
    ) -> Registered:
        """Like `get`, for a given call: implementations whose `supports(problem)` gives a reason are passed over.

        Where no platform is named, those that take the call but not well (`preferred`) come last.

        Args:
            among: which implementations may be chosen.
        """
        wanted, device = as_platform(platform), _wanted_backend(backend, problem)
        candidates = [entry for entry in self.list_implementations(algorithm) if among(entry)]
        if not candidates and not self._failures(algorithm):
            known = ", ".join(map(repr, self.list_algorithms())) or "none"
            raise ValueError(f"unknown algorithm {algorithm!r}; known: {known}.")
        fitting, refused = [], []
        for entry in candidates:
            if wanted is not None and entry.platform is not wanted:
                continue
            reason = self.refusal(entry, problem, device)
            if reason is None:
                fitting.append(entry)
            else:
                refused.append(f"{entry.platform} ({entry.backend}): {reason}")
        if fitting:
            if wanted is None:
                self._warn_of_failures(algorithm, device)
            return next((entry for entry in fitting if problem is None or entry.preferred(problem)), fitting[0])
        refused += [
            f"{at}: its import failed: {why}{remedy(why)}"
            for at, why in self._failures(algorithm).items()
            if wanted in (None, at)
        ]
        raise ValueError(_no_implementation(algorithm, wanted, device, refused, candidates))

    def refusal(self, entry: Registered, problem: Any = None, backend: Backend | str | None = None) -> str | None:
        """Why an implementation cannot take a call on a device; None when it can."""
        device = _wanted_backend(backend, problem)
        reason = _wrong_device(entry, device)
        if reason is not None or problem is None:
            return reason
        return _unknown_sizes(entry, problem) or entry.refusal(problem)

    def status(self, algorithm: str, backend: Backend | str | None = None) -> dict[Platform, str | None]:
        """For every platform the reason why it cannot run an algorithm on a device; None where it can.

        Example:
            >>> kernel_registry.status("attention")[Platform.XLA] is None, kernel_registry.status("recurrent")[Platform.CUDA]
            (True, 'not written for this operation')
        """
        entries, failures = self.list_implementations(algorithm), self._failures(algorithm)
        found: dict[Platform, str | None] = {}
        for platform in Platform:
            reasons = [self.refusal(entry, backend=backend) for entry in entries if entry.platform is platform]
            if platform in failures:
                reasons.append(f"its import failed: {failures[platform]}{remedy(failures[platform])}")
            elif not reasons:
                reasons.append(NOT_WRITTEN)
            found[platform] = None if None in reasons else "; ".join(reason for reason in reasons if reason is not None)
        return found

    def list_algorithms(self) -> list[str]:
        """The names of algorithms that have an implementation, aliases included."""
        families = set(self._families.values())
        for platform in Platform:
            for algorithm in (*self._families, *(name for name in self._shipped(platform) if name not in families)):
                self._load(algorithm, platform)
        with self._lock:
            known = self._implementations.keys()
            return sorted([*known, *(alias for alias, name in self._aliases.items() if name in known)])

    def list_implementations(self, algorithm: str) -> list[Registered]:
        """Every implementation of an algorithm that could be imported, best first."""
        algorithm = self.name_of(algorithm)
        for platform in Platform:
            self._load(algorithm, platform)
        with self._lock:
            return sorted(self._implementations.get(algorithm, ()), key=lambda entry: -entry.priority)

    def validate_signatures(self) -> None:
        """ValueError unless all implementations of each algorithm take the same arguments."""
        for algorithm in self.list_algorithms():
            entries = self.list_implementations(algorithm)
            first = inspect.signature(entries[0].function)
            for entry in entries[1:]:
                other = inspect.signature(entry.function)
                if [(p.name, p.kind, p.default) for p in other.parameters.values()] != [
                    (p.name, p.kind, p.default) for p in first.parameters.values()
                ]:
                    raise ValueError(f"{entry} takes {other}, but {entries[0]} takes {first}.")

    def _failures(self, algorithm: str) -> dict[Platform, str]:
        name = self.name_of(algorithm)
        return {platform: why for (failed, platform), why in self._import_failures.items() if failed == name}

    def _warn_of_failures(self, algorithm: str, device: Backend) -> None:
        """Warns once of a platform for this kind of device that could not be imported: another one takes its calls."""
        for platform, why in self._failures(algorithm).items():
            if device in _MADE_FOR.get(platform, ()) and (platform, why) not in self._said:
                self._said.add((platform, why))
                warnings.warn(
                    f"platform {str(platform)!r} is passed over: its import failed: {why}{remedy(why)}. Others take its calls.",
                    stacklevel=2,
                )

    def _shipped(self, platform: Platform) -> list[str]:
        """The algorithms that have a directory for this platform."""
        if self._package is None:
            return []
        spec = importlib.util.find_spec(f"{self._package}._{platform}")
        if spec is None or spec.submodule_search_locations is None:
            return []
        import pkgutil

        return [module.name for module in pkgutil.iter_modules(list(spec.submodule_search_locations)) if module.ispkg]

    def _load(self, algorithm: str, platform: Platform) -> None:
        with self._lock:
            if (algorithm, platform) in self._visited:
                return
            self._visited.add((algorithm, platform))
            directory = self._families.get(algorithm, algorithm)
            if directory not in self._shipped(platform):
                return
            try:
                importlib.import_module(f"{self._package}._{platform}.{directory}._interface")
            except Exception as failure:  # any failure means "not here"; the reason is shown when nothing else fits
                self._import_failures[algorithm, platform] = f"{type(failure).__name__}: {failure}"


_MADE_FOR = {Platform.TRITON: (Backend.GPU,), Platform.CUDA: (Backend.GPU,), Platform.PALLAS: (Backend.TPU, Backend.GPU)}


def remedy(why: str) -> str:
    """What to do about an import that failed, in brackets; nothing where that is not known."""
    return ' (pip install ".[cuda13]" brings it)' if "No module named 'triton'" in why else ""


def _wrong_device(entry: Registered, device: Backend) -> str | None:
    if entry.backend in (Backend.ANY, device):
        return None
    names = {Backend.GPU: "an NVIDIA GPU", Backend.TPU: "a TPU, which these kernels are for", Backend.CPU: "a CPU"}
    return f"this call computes on a {device}, not on {names[entry.backend]}"


def _unknown_sizes(entry: Registered, problem: Any) -> str | None:
    """Kernels are planned for sizes; xla alone compiles loops whose length the program finds out."""
    sizes = [] if entry.platform is Platform.XLA else unknown_sizes(problem)
    return f"it needs to know all sizes, and jax.export left {', '.join(sizes)} open" if sizes else None


def _no_implementation(
    algorithm: str, wanted: Platform | None, device: Backend, refused: list[str], candidates: list[Registered]
) -> str:
    import jax

    where = f" for platform {str(wanted)!r}" if wanted else ""
    devices = ", ".join(sorted({d.platform for d in jax.devices()}))
    if refused:
        why = "; ".join(refused)
    else:
        there = ", ".join(sorted({str(entry.platform) for entry in candidates}))
        why = f"it exists only for {there}" if there else "it exists for no platform"
    hint = ' Use platform="auto" or "xla".' if wanted not in (None, Platform.XLA) else ""
    return f"no implementation of {algorithm!r}{where} here (devices: {devices}): {why}.{hint}"


kernel_registry = KernelRegistry(
    "ejkernel.kernels",
    families={"recurrent": "linear", "gla": "linear", "lightning_attn": "linear"},
    aliases={"recurrent_gla": "gla"},
)
