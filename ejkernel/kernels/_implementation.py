"""The one contract between an operation and a platform: how a platform computes a family of operations, and how users call it.

A family (`kernels/_linear`, `kernels/_attention`, ...) has one problem: a frozen dataclass of checked arguments, with the
device of the call. A platform brings one `Implementation` of the family; each operation of the family is then a
`PlatformFunction` of it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ejkernel._device import Device
from ejkernel.kernels._registry import Backend, KernelRegistry, Platform, as_backend, backend_of

Problem = TypeVar("Problem")
Config = TypeVar("Config")


class Implementation(Generic[Problem, Config]):
    """How one platform computes one family of operations."""

    def supports(self, problem: Problem) -> str | None:
        """The reason why this call cannot run here (its device, dtypes, sizes); None when it can."""
        return None

    def preferred(self, problem: Problem) -> bool:
        """Whether to take this supported call before implementations of lower priority: False where those are faster."""
        return True

    def refuses(self, problem: Problem, cfg: Config) -> str | None:
        """The reason why a supported call cannot run with `cfg`; None when it can. `solve` follows every other one."""
        return None

    def heuristic(self, problem: Problem) -> Config:
        """The configuration to take when nothing was measured. Never refused."""
        raise NotImplementedError(f"{type(self).__name__} must define heuristic.")

    def candidates(self, problem: Problem) -> Sequence[Config]:
        """The configurations worth measuring; none that is refused."""
        return [self.heuristic(problem)]

    def route(self, problem: Problem, cfg: Config) -> str:
        """The name of the way that a call takes with `cfg`, as `report()` shows it."""
        raise NotImplementedError(f"{type(self).__name__} must define route.")

    def solve(self, problem: Problem, cfg: Config) -> Any:
        """The family's results."""
        raise NotImplementedError(f"{type(self).__name__} must define solve.")

    def versions(self) -> Mapping[str, str]:
        """Libraries beyond JAX that compile these kernels, with their versions: a measurement depends on them."""
        return {}


@dataclasses.dataclass(frozen=True)
class Signature(Generic[Problem]):
    """One operation of a family, as every platform offers it.

    Attributes:
        name: the operation's name in the registry.
        problem: makes the family's problem from the operation's arguments, in the order of the documents; its signature is the
            platform-level function's.
        config: the class of its configurations.
        finish: the results of `Implementation.solve` as users get them, from `(problem, results)`.
        config_alias: the name that users know `config` by, where the operations of a family share the class.
    """

    name: str
    problem: Callable[..., Problem]
    config: type
    finish: Callable[[Problem, Any], Any] = lambda problem, results: results
    config_alias: str | None = None

    @property
    def config_name(self) -> str:
        return self.config_alias or self.config.__name__

    def shown(self, cfg: Any) -> str:
        """A configuration as the user wrote it."""
        return repr(cfg).replace(self.config.__name__, self.config_name, 1) if type(cfg) is self.config else repr(cfg)

    def check_config(self, cfg: Any, legal_else: str = " or None") -> None:
        """TypeError unless `cfg` is of the operation's own class. `legal_else`: what the caller takes beside it, in words."""
        if isinstance(cfg, self.config):
            return
        came = "None" if cfg is None else type(cfg).__name__
        if names := getattr(type(cfg), "public_names", ()):
            came += f" (the class of {', '.join(names)})"
        raise TypeError(f"cfg must be of class {self.config_name}{legal_else}; got {came}.")

    def register(
        self,
        implementation: Implementation[Problem, Any],
        registry: KernelRegistry,
        platform: Platform,
        backend: Backend,
        priority: int = 0,
    ) -> PlatformFunction[Problem, Any]:
        """This operation by an implementation of its family, registered for a platform and a kind of device."""
        function = PlatformFunction(self, implementation, str(platform))
        return registry.register(self.name, platform, backend, priority)(function)


@dataclasses.dataclass(frozen=True, repr=False)
class PlatformFunction(Generic[Problem, Config]):
    """One operation on one platform, called with the operation's own arguments; it needs no executor.

    `cfg=None` takes the platform's heuristic. Where the platform cannot take the call it raises a ValueError that says why.
    """

    signature: Signature[Problem]
    implementation: Implementation[Problem, Config]
    platform: str

    def __repr__(self) -> str:
        return f"<{self.signature.name} on {self.platform}>"

    def supports(self, problem: Problem) -> str | None:
        """The reason why this platform cannot take a call; None when it can."""
        return self.implementation.supports(problem)

    def preferred(self, problem: Problem) -> bool:
        """Whether this platform should take a call before others of lower priority."""
        return self.implementation.preferred(problem)

    def refuses(self, problem: Problem, cfg: Config) -> str | None:
        """The reason why a supported call cannot run with `cfg`; None when it can."""
        wanted, device = as_backend(getattr(cfg, "backend", None)), getattr(problem, "device", None)
        if wanted not in (None, Backend.ANY) and isinstance(device, Device) and wanted is not backend_of(device):
            return f"cfg is for backend {str(wanted)!r}, and this call computes on {device}"
        return self.implementation.refuses(problem, cfg)

    def __call__(self, *args: Any, cfg: Config | None = None, **kwargs: Any) -> Any:
        return self.solve(self.signature.problem(*args, **kwargs), cfg)

    def solve(self, problem: Problem, cfg: Config | None = None) -> Any:
        """The results for a problem; ValueError where platform or configuration do not fit it."""
        how = self.implementation
        if cfg is not None:
            self.signature.check_config(cfg)
        reason = how.supports(problem)
        if reason is None and cfg is not None:
            reason = self.refuses(problem, cfg)
        if reason is not None:
            raise ValueError(f"{self.signature.name} cannot run on platform {self.platform!r}: {reason}.")
        return self.signature.finish(problem, how.solve(problem, how.heuristic(problem) if cfg is None else cfg))

    @property
    def __signature__(self) -> inspect.Signature:
        operation = inspect.signature(self.signature.problem)
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        return operation.replace(parameters=[*operation.parameters.values(), cfg], return_annotation=tuple)
