"""`Kernel`: one operation, the configurations it can run with, and how to run it with one of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, get_origin

import jax

from ejkernel.ops import names
from ejkernel.ops.key import check_op_id

if TYPE_CHECKING:
    from ejkernel._checking import ValueCheck
    from ejkernel.ops.invocation import Invocation

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")


class Kernel(Generic[Cfg, Out]):
    """An operation that runs with a configuration, chosen by an `Executor`.

    A subclass says its `op_id`, how to run (`run`, or `get_impl` when one function per configuration says it all), and which
    configuration to take when nothing was measured (`heuristic_cfg`). `candidate_cfgs` lists the alternatives that tuning
    may choose from. Configurations are frozen dataclasses whose fields are numbers, strings, enums or tuples of these.

    Attributes of an instance count as static arguments: two kernels of one class with equal attributes are the same kernel.

    Attributes:
        op_id: the operation's name; part of every key and of the cache's folder.
        aliases: other names of the operation, which overlays and the command line understand.
        version: raise it when the meaning or speed of a configuration changes; stored results of other versions are not found.
    """

    op_id: str = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    version: int = 1
    _config_cls: ClassVar[type | None] = None
    _config_name: ClassVar[str | None] = None  # the name that users know it by, where it has several

    def __init__(self, op_id: str | None = None):
        """Args: op_id: the operation's name, for kernels that do not set it on the class."""
        if op_id is not None:
            self.op_id = op_id
            names.declare(op_id)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        names.declare(cls.op_id, cls.__dict__.get("aliases", ()))
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Kernel) and isinstance(get_args(base)[0], type):
                cls._config_cls = get_args(base)[0]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items())))) if vars(self) else hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(vars(self).items()))})"

    @property
    def called(self) -> str:
        """The name that users call it by, for what is said to them."""
        return self.op_id

    # How to run

    def get_impl(self, cfg: Cfg) -> Callable[..., Out]:
        """The function that computes the operation with this configuration."""
        raise NotImplementedError(f"{type(self).__name__} must define get_impl(cfg) or run(*args, cfg, **kwargs).")

    # A subclass names the arguments that it takes, which type checkers allow where these say no more than *args and **kwargs.

    def run(self, *args: Any, **kwargs: Any) -> Out:
        """`run(*args, cfg=cfg, **kwargs)`: computes the operation on arrays, concrete or traced, with this configuration."""
        if "cfg" not in kwargs:
            raise TypeError(f"{type(self).__name__}.run needs a configuration: cfg=...")
        cfg: Cfg = kwargs.pop("cfg")
        return self.get_impl(cfg)(*args, **kwargs)

    def fwd_with_residuals(self, *args: Any, **kwargs: Any) -> tuple[Out, Any]:
        """`(result, residuals)`, for a kernel that defines its own gradient together with `vjp`; arguments as of `run`."""
        raise NotImplementedError(f"{type(self).__name__} defines no fwd_with_residuals.")

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """`vjp(residuals, y, dy, *args, cfg=cfg, **kwargs)`: one gradient per positional argument of `run`, of its structure.

        None stands where there is none. `residuals` is what `fwd_with_residuals` gave beside the result, `y` the result, `dy`
        the gradient with respect to it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no vjp.")

    # What is asked

    def parameters(self) -> inspect.Signature:
        """The arguments that a call takes: by default those of `run` without `cfg`."""
        return parameters_of(type(self).run)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Looks at values before anything is traced: checks them, or replaces arguments by what follows from them.

        Asked for every call, so it must cost little; traced arguments have no values yet.
        """
        return args, kwargs

    def value_checks(self, named: Mapping[str, Any]) -> Iterable[ValueCheck]:
        """What to look at where values are checked (`check_values`), for a call's arguments by name."""
        return ()

    def problem(self, *args: Any, **kwargs: Any) -> Any:
        """The call as configurations are chosen for it: a pytree of arrays and static fields, by default the arguments by name.

        Calls that make the same problem share a key, and so a configuration. It is traced on shapes alone.
        """
        return named_arguments(self, args, kwargs)

    # Which configuration

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """The configuration to take when nothing was measured: legal for every call, and good for most."""
        raise NotImplementedError(f"{type(self).__name__} must define heuristic_cfg(inv).")

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """The configurations worth measuring for this call. The heuristic's is measured in any case."""
        return (self.heuristic_cfg(inv),)

    def check_cfg(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> str | None:
        """The reason why this call cannot run with `cfg`; None when it can. Asked of everything stored, before use."""
        return None

    def settled(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> Cfg:
        """The configuration as this call runs with it: choices that it leaves open ("auto") are made by the call's device."""
        return cfg

    def route(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> str | None:
        """The name of the route that a call takes with `cfg`, for the report; None where there is only one."""
        return None

    def default_policy(self, backend: str) -> str:
        """`"autotune"` or `"heuristics"`: what a miss does when neither policy nor environment says.

        Tuning pays on accelerators; on a CPU compiling the candidates costs more than it saves.
        """
        return "autotune" if backend in ("gpu", "tpu") else "heuristics"

    # What distinguishes one call from another

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of an array that count tokens or the like. Calls that differ only within a bucket share a key.

        Args:
            name: where the array is in the problem: by default `"argument"` or `"argument.field"`, argument being a parameter
                of `run`.
            shape: its shape.
        """
        return ()

    def key_fields(self, inv: Invocation[Cfg, Out]) -> Mapping[str, str]:
        """What else tells this call from others: whatever restricts the candidates and is no part of the problem."""
        return {}

    def library_versions(self, inv: Invocation[Cfg, Out]) -> Mapping[str, str]:
        """Libraries beyond JAX whose version a measurement depends on, such as `{"triton": "3.9.0"}`."""
        return {}

    # How to measure

    def random_inputs(self, inv: Invocation[Cfg, Out], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` to measure a call with: normal floats, zero integers, False booleans, static values as they are.

        Override it where such values are senseless for the operation (sorted offsets, gates that must not be positive).
        """
        from ejkernel.ops.inputs import random_arguments

        return random_arguments(inv, key)

    def differentiable(self, inv: Invocation[Cfg, Out]) -> bool:
        """Whether tuning should also measure and compare gradients, where the policy asks for it."""
        return True

    def tolerance(self, dtype: Any) -> float:
        """How far two configurations' results may be apart, relative to the result's size, and both be right.

        Asked for the result's own dtype and those of the float arguments; the largest answer counts.
        """
        from ejkernel.ops.compare import default_tolerance

        return default_tolerance(dtype)

    @property
    def has_own_gradient(self) -> bool:
        """Whether the class defines `fwd_with_residuals` and `vjp`."""
        forward = type(self).fwd_with_residuals is not Kernel.fwd_with_residuals
        backward = type(self).vjp is not Kernel.vjp
        if forward != backward:
            there, missing = ("fwd_with_residuals", "vjp") if forward else ("vjp", "fwd_with_residuals")
            raise TypeError(f"{type(self).__name__} defines {there} but not {missing}; its own gradient needs both.")
        return forward

    def check_identity(self) -> None:
        """ValueError unless `op_id` can name a folder and `version` is an integer."""
        check_op_id(self.op_id, f"{type(self).__name__}.op_id")
        if not isinstance(self.version, int):
            raise ValueError(f"{type(self).__name__}.version must be an integer; got {self.version!r}.")


@functools.cache
def parameters_of(run: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a method `run` without `self` and `cfg`."""
    whole = inspect.signature(run)
    rest = list(whole.parameters.values())[1:]
    return whole.replace(parameters=[p for p in rest if p.name != "cfg"], return_annotation=inspect.Signature.empty)


def named_arguments(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the name of their parameter, defaults included. TypeError when they do not fit."""
    signature = kernel.parameters()
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise TypeError(f"{kernel.op_id}: {problem}; it takes {', '.join(signature.parameters)}.") from None
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({str(position): item for position, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named
