"""Every operation as a kernel of the executor: its implementations are in the registry, its configurations theirs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

from ejkernel.kernels._implementation import Implementation, PlatformFunction, Signature
from ejkernel.kernels._registry import Backend, KernelRegistry, Platform, Registered, as_platform, kernel_registry
from ejkernel.modules._names import explains_names
from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.kernel import named_arguments

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")
Function = TypeVar("Function", bound=Callable[..., Any])

CHOSEN_ALREADY = " (with None, an executor or the operation's function chooses one)"


class RegistryKernel(Kernel[Cfg, Out]):
    """An operation that solves its family's problem on the platform that its configuration names.

    A subclass says its `signature` (its name, how arguments become a problem, its configuration) and what of the family's
    results a caller gets (`results`). The function that users call is marked with `called_by_users`: the kernel takes the same
    arguments, by position and by name.
    """

    signature: ClassVar[Signature[Any]]
    registry: ClassVar[KernelRegistry] = kernel_registry
    not_of_the_problem: ClassVar[tuple[str, ...]] = ("platform",)  # arguments that the problem does not depend on
    numbers: ClassVar[tuple[str, ...]] = ()  # arguments that must be known numbers, whatever kind of scalar holds them
    _parameters: ClassVar[inspect.Signature]
    _called: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any):
        if "signature" in cls.__dict__:
            cls.op_id, cls._config_cls = cls.signature.name, cls.signature.config
            cls._config_name = cls.signature.config_name
        super().__init_subclass__(**kwargs)

    @classmethod
    def called_by_users(cls, function: Function) -> Function:
        """Marks the function whose arguments this kernel takes. It answers names of other libraries with the ones here."""
        whole = inspect.signature(function)
        parameters = [p for p in whole.parameters.values() if p.name != "cfg"]
        cls._parameters = whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        cls._called = function.__name__
        return explains_names(function)

    @property
    def called(self) -> str:
        return self._called or self.op_id

    def parameters(self) -> inspect.Signature:
        return self._parameters

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Numpy's scalars are numbers that are known, not data: a scale or a layer given as one compiles as Python's would."""
        args = tuple(x.item() if isinstance(x, np.generic) else x for x in args)
        return args, {name: _known(x) if name in self.numbers or isinstance(x, np.generic) else x for name, x in kwargs.items()}

    def problem(self, *args: Any, **kwargs: Any) -> Any:
        named = named_arguments(self, args, kwargs)
        return self.signature.problem(**{name: x for name, x in named.items() if name not in self.not_of_the_problem})

    # How to run

    def get_impl(self, cfg: Cfg) -> Callable[..., Any]:
        """The platform-level function of the platform that `cfg` names, which runs with `cfg`.

        `"auto"`: the best platform that supports the arguments it is called with.
        """
        self.signature.check_config(cfg, CHOSEN_ALREADY)
        named = as_platform(cfg.platform)  # type: ignore[attr-defined]  # every configuration names one
        if named is not None:
            first = self._select(named, cfg.backend)  # type: ignore[attr-defined]  # an error where there is none
            if sum(entry.platform is named for entry in self._askable()) == 1:
                return functools.partial(first.function, cfg=cfg)
        return functools.partial(self._run_best, cfg)

    def _run_best(self, cfg: Cfg, *args: Any, **kwargs: Any) -> Any:
        problem = self.signature.problem(*args, **kwargs)
        return self._chosen(problem, None, cfg).function.solve(problem, cfg)  # type: ignore[attr-defined]

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Computes the operation with a configuration; the arguments are those of the function that users call."""
        self.signature.check_config(cfg, CHOSEN_ALREADY)
        named = named_arguments(self, args, kwargs)
        asked = as_platform(named["platform"])
        if asked is not None:
            _check_agreement(asked, cfg)
            cfg = dataclasses.replace(cfg, platform=str(asked))  # type: ignore[type-var]  # a dataclass
        found = self.get_impl(cfg)(**{name: x for name, x in named.items() if name not in self.not_of_the_problem})
        return self.results(found, named)

    def results(self, found: Any, named: Mapping[str, Any]) -> Out:
        """What a caller gets of the family's results, by the arguments of the call."""
        raise NotImplementedError(f"{type(self).__name__} must define results.")

    # Which configuration

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Cfg:
        """The choice of the best platform that supports the call."""
        entry = self._select(inv.arguments["platform"], problem=inv.problem)
        return self._implementation(entry).heuristic(inv.problem)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[Cfg]:
        """What the best platform for the call would measure, and the best guess of every other that supports it.

        More of the others would take the time that the best needs; a platform that was asked for is alone.
        """
        asked = as_platform(inv.arguments["platform"])
        best = self._select(asked, problem=inv.problem)
        yield from self._implementation(best).candidates(inv.problem)
        for entry in self._askable():
            if entry is not best and asked is None and self.registry.refusal(entry, inv.problem) is None:
                yield self._implementation(entry).heuristic(inv.problem)

    def check_cfg(self, inv: Invocation[Any, Any], cfg: Cfg) -> str | None:
        """The reason why the call cannot run with `cfg`."""
        try:
            self.settled(inv, cfg)
        except ValueError as reason:
            return str(reason).removesuffix(".")
        return None

    def settled(self, inv: Invocation[Any, Any], cfg: Cfg) -> Cfg:
        """With the platform that runs it; ValueError where none does."""
        self.signature.check_config(cfg)
        entry = self._chosen(inv.problem, inv.arguments["platform"], cfg)
        return dataclasses.replace(cfg, platform=str(entry.platform))  # type: ignore[type-var]  # a dataclass

    def route(self, inv: Invocation[Any, Any], cfg: Cfg) -> str | None:
        return self._implementation(self._chosen(inv.problem, inv.arguments["platform"], cfg)).route(inv.problem, cfg)

    def key_fields(self, inv: Invocation[Any, Any]) -> Mapping[str, str]:
        """The platform that was asked for, since no other is measured then."""
        asked = as_platform(inv.arguments["platform"])
        return {} if asked is None else {"platform": str(asked)}

    def library_versions(self, inv: Invocation[Any, Any]) -> Mapping[str, str]:
        """Versions of what compiles the kernels that could take the call on its device."""
        found: dict[str, str] = {}
        for entry in self._askable():
            if self.registry.refusal(entry, backend=inv.target.backend) is None:
                found |= self._implementation(entry).versions()
        return found

    def _chosen(self, problem: Any, platform: str | Platform | None, cfg: Any) -> Registered:
        """The best implementation that supports the call and runs `cfg`; ValueError with the reasons when there is none."""
        self.signature.check_config(cfg)
        asked = as_platform(platform)
        if asked is not None:
            _check_agreement(asked, cfg)
        wanted, backend = asked or as_platform(cfg.platform), None if cfg.backend == Backend.ANY else cfg.backend
        first = self._select(wanted, backend, problem)  # raises where nothing takes the call at all
        refused = []
        for entry in (first, *self._askable()):
            if wanted not in (None, entry.platform) or self.registry.refusal(entry, problem, backend) is not None:
                continue
            reason = entry.function.refuses(problem, cfg)  # type: ignore[attr-defined]
            if reason is None:
                return entry
            refused.append(f"{entry.platform}: {reason}")
        raise ValueError(f"{self.op_id} cannot run with {self.signature.shown(cfg)}: {'; '.join(dict.fromkeys(refused))}.")

    def _askable(self) -> list[Registered]:
        """The implementations that can say what they take and how. A plain function cannot, and is called by its name alone."""
        return [entry for entry in self.registry.list_implementations(self.op_id) if _can_be_asked(entry)]

    def _select(self, platform: str | Platform | None, backend: str | Backend | None = None, problem: Any = None) -> Registered:
        """The best of them; TypeError where only a plain function fits."""
        try:
            return self.registry.select(self.op_id, platform, backend, problem, among=_can_be_asked)
        except ValueError:
            self._implementation(self.registry.select(self.op_id, platform, backend, problem))
            raise

    def _implementation(self, entry: Registered) -> Implementation[Any, Cfg]:
        if not isinstance(entry.function, PlatformFunction):
            raise TypeError(
                f"{entry} is a plain function: call it by kernel_registry.get. For the executor to choose it, register a "
                f"PlatformFunction of an Implementation."
            )
        return entry.function.implementation


def _can_be_asked(entry: Registered) -> bool:
    return isinstance(entry.function, PlatformFunction)


def _known(x: Any) -> Any:
    """A scalar whose value is known as Python's, also in a tuple; everything else as it is."""
    if isinstance(x, tuple):
        return tuple(map(_known, x))
    scalar = isinstance(x, (np.generic, np.ndarray, jax.Array)) and x.shape == () and not isinstance(x, jax.core.Tracer)
    return x.item() if scalar else x


def _check_agreement(asked: Platform, cfg: Any) -> None:
    configured = as_platform(cfg.platform)
    if configured not in (None, asked):
        raise ValueError(f"platform {str(asked)!r} was asked for, but cfg is for platform {str(configured)!r}.")
