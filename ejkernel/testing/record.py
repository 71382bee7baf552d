"""One record per operation: all that tests, `ejkernel verify`, `bench` and `tune` ask of it beside its kernels.

The library's records lie beside the problems, in `RECORDS` of `ejkernel/kernels/_<family>/record.py`; they are imported when
records are first asked for, never by a call. A package with operations of its own calls `register`, and `--load PACKAGE` shows
them to the command.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import kernels
from ejkernel.kernels._registry import KernelRegistry, kernel_registry
from ejkernel.ops import Kernel
from ejkernel.testing import floors, judge
from ejkernel.testing.contenders import Contender
from ejkernel.testing.judge import Judge
from ejkernel.testing.shapes import Shape


class Case(Protocol):
    """One call that every implementation of an operation must get right; hashable, and as text its name.

    `function` is a platform-level function: it takes the operation's arguments and gives all of its results.
    """

    def __hash__(self) -> int:
        """Equal cases are the same call."""

    @property
    def name(self) -> str:
        """What it is called, in words joined by `-`."""

    @property
    def dtype(self) -> str:
        """The dtype of its arrays."""

    @property
    def tolerance(self) -> tuple[float, float]:
        """The largest relative RMS errors of values and of gradients."""

    @property
    def problem(self) -> Any:
        """The call as an implementation sees it."""

    def values(self, function: Callable[..., Any]) -> Mapping[str, Any]:
        """Every result by name, of `compare.VALUES`; without gradients, which compiles much faster."""

    def evaluate(self, function: Callable[..., Any]) -> Mapping[str, Any]:
        """Every result by name, and the gradient of every array."""

    def expected(self) -> Mapping[str, np.ndarray]:
        """What `evaluate` must give, in float64."""


class Sizes(Protocol):
    """The sizes of one call: a frozen dataclass with these fields.

    As text, sizes joined by `x`, the batch first and the tokens second, then `:` and the dtype: `2x4096x8:float32`. The
    record's `parse` reads it back.
    """

    @property
    def time(self) -> int:
        """T, the tokens of a row."""

    @property
    def dtype(self) -> str:
        """The dtype of the arrays."""


S = TypeVar("S", bound=Sizes)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Record(Generic[S]):
    """What there is to know of one operation.

    Attributes:
        operation: the function that users call.
        kernel: the operation as the executor sees it.
        options: what a measured call has beside its arrays; with these `operation` must give the output alone.
        legal_gates: the gates that a shape of this operation may name.
        gates: the gates that it is measured with when none are named.
        key_gate: the argument that a gate per key channel, `gk` in a shape, goes in by.
        rivals: who is measured against it: what makes the contender from the record, by name. The first is what people have
            without this library.
    """

    operation: Callable[..., Any]
    kernel: type[Kernel[Any, Any]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    legal_gates: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    key_gate: str = "gk"
    rivals: Mapping[str, Callable[[Any], Contender]] = dataclasses.field(default_factory=dict)

    # What it is called, and where its implementations are

    @property
    def name(self) -> str:
        """The name that users call it by."""
        return self.operation.__name__

    @property
    def op_id(self) -> str:
        """The registry's name, and the cache's."""
        return self.kernel.op_id

    @property
    def registry(self) -> KernelRegistry:
        """Where its implementations are."""
        return getattr(self.kernel, "registry", kernel_registry)

    def answers_to(self, word: str) -> bool:
        """Whether a word means this operation: its name, or one of the registry's for it."""
        return word == self.name or self.registry.name_of(word) == self.op_id

    def unavailable(self, platforms: Sequence[str] = ()) -> dict[str, str]:
        """The platforms that cannot run it here, with the reasons; of `platforms` where any are named."""
        return {
            str(platform): reason
            for platform, reason in self.registry.status(self.op_id).items()
            if reason is not None and (not platforms or platform in platforms)
        }

    # Calls that are timed and tuned

    @property
    def function(self) -> Callable[..., jax.Array]:
        """The operation of arrays by name and `platform`, giving the output alone."""
        return functools.partial(self.operation, **self.options)

    def parse(self, text: str, gates: tuple[str, ...], dtype: str) -> S:
        """The sizes that a text means; `gates` and `dtype` where it has none. ValueError says what is legal."""
        raise NotImplementedError(f"{type(self).__name__} must define parse.")

    def shape(self, text: str, gates: tuple[str, ...] | None = None, dtype: str = "float32") -> S:
        """The sizes that a text means for this operation; `gates=None`: its own. ValueError says what is legal."""
        sizes = self.parse(text, self.gates if gates is None else gates, dtype)
        wrong = [gate for gate in getattr(sizes, "gates", ()) if gate not in self.legal_gates]
        if wrong:
            legal = ", ".join(self.legal_gates) or "no gates"
            raise ValueError(
                f"{self.name} takes {legal}; got {', '.join(wrong)} in {text!r}. Write :none for a call without gates."
            )
        if self.key_gate == "g" and {"g", "gk"} <= set(getattr(sizes, "gates", ())):
            raise ValueError(f"{self.name} takes g (per head) or gk (per key channel), which are one argument; got {text!r}.")
        if sizes.dtype == "float64" and jax.dtypes.canonicalize_dtype("float64").itemsize != 8:
            raise ValueError(f"float64 needs 64-bit numbers in JAX: set JAX_ENABLE_X64=1; got {text!r}.")
        return sizes

    def usual_shapes(self, backend: str) -> Sequence[str]:
        """Calls of usual size, as texts without dtype, at lengths that a kind of device takes in reasonable time."""
        raise NotImplementedError(f"{type(self).__name__} must define usual_shapes.")

    def usual_dtype(self, backend: str) -> str:
        """The dtype that people compute in on a kind of device."""
        return "float32" if backend == "cpu" else "bfloat16"

    def abstract(self, shape: S) -> dict[str, jax.ShapeDtypeStruct]:
        """Every array by the name of its argument, as shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define abstract.")

    def output(self, shape: S) -> jax.ShapeDtypeStruct:
        """The output's shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define output.")

    def arrays(self, shape: S, strong_gates: bool = False) -> dict[str, jax.Array]:
        """Random arrays to measure a call with.

        Args:
            strong_gates: some runs of tokens with strong gates and some with resets, instead of weak gates alone.
        """
        wanted = self.abstract(shape)
        keys = jax.random.split(jax.random.key(0), len(wanted))
        return {name: _normal(key, array) for key, (name, array) in zip(keys, wanted.items(), strict=True)}

    def cotangent(self, shape: S) -> jax.Array:
        """A normal gradient of the output."""
        return _normal(jax.random.key(5), self.output(shape))

    # What no implementation can beat

    def compulsory_bytes(self, shape: S, direction: str) -> int:
        """Bytes that a call must move: every input is read once and every result written once; the backward pass reads the
        inputs and the output's gradient again."""
        inputs, output = sum(map(_bytes, self.abstract(shape).values())), _bytes(self.output(shape))
        return inputs + output if direction == "forward" else 2 * (inputs + output) + inputs

    def operations(self, shape: S, direction: str) -> int:
        """Multiplications and additions that a call must do."""
        raise NotImplementedError(f"{type(self).__name__} must define operations.")

    def floor(self, shape: S, direction: str) -> floors.Floor:
        """The least time of a call on this device, by measured rates."""
        return floors.floor(self.compulsory_bytes(shape, direction), self.operations(shape, direction), shape.dtype)

    # What is right

    def cases(self) -> Sequence[Case]:
        """The calls that every implementation must get right."""
        raise NotImplementedError(f"{type(self).__name__} must define cases.")

    def reference(self, **arrays: Any) -> jax.Array:
        """The output of a timed call as its definition says it, differentiable, where 64-bit numbers are enabled."""
        raise NotImplementedError(f"{type(self).__name__} must define reference or judge.")

    def judge(self, shape: S, arrays: Mapping[str, jax.Array], cotangent: jax.Array, gradients: bool) -> Judge:
        """What a timed call must give: by default all of it, by `reference`. Override it where a part must do."""
        return judge.of_whole(self.reference, arrays, cotangent, gradients)


class HeadsRecord(Record[Shape]):
    """An operation whose calls are written as `BxTxHxKxV[:gates][:dtype]`, and whose output is `[B, T, H, V]`."""

    def parse(self, text: str, gates: tuple[str, ...], dtype: str) -> Shape:
        return Shape.parse(text, gates, dtype)

    def abstract(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        return self.by_argument(shape.abstract())

    def arrays(self, shape: Shape, strong_gates: bool = False) -> dict[str, jax.Array]:
        return self.by_argument(shape.arrays(strong_gates))

    def by_argument(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a shape by the operation's own arguments."""
        return {self.key_gate if name == "gk" else name: array for name, array in arrays.items()}

    def output(self, shape: Shape) -> jax.ShapeDtypeStruct:
        return shape.output()

    def cotangent(self, shape: Shape) -> jax.Array:
        return shape.cotangent()


def _normal(key: jax.Array, array: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.normal(key, array.shape).astype(array.dtype)


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * jnp.dtype(array.dtype).itemsize


_registered: list[Record[Any]] = []


def register(record: Record[Any]) -> None:
    """Adds an operation to those that the command and the tests know.

    Raises:
        ValueError: another one already has its name.
    """
    for name in (record.name, record.op_id):
        known = find(name)
        if known is not None:
            raise ValueError(f"{name!r} is taken: there is a record of {known.name} ({known.op_id}).")
    _registered.append(record)


def records() -> list[Record[Any]]:
    """Every operation: the library's, then those that were registered."""
    return [*_library(), *_registered]


def find(word: str) -> Record[Any] | None:
    """The operation that a name means, as users call it or as the registry does; None where there is none.

    Example:
        >>> find("recurrent_gla").name, find("gla").name, find("softmax")
        ('gla_attention', 'gla_attention', None)
    """
    return next((record for record in records() if record.answers_to(word)), None)


@functools.cache
def _library() -> tuple[Record[Any], ...]:
    """`RECORDS` of every `record` module that lies beside a problem."""
    found: list[Record[Any]] = []
    for folder in map(Path, kernels.__path__):
        families = sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if module.ispkg)
        for family in families:  # looked at, not imported: only those with a record are
            if any(module.name == "record" for module in pkgutil.iter_modules([str(folder / family)])):
                found += importlib.import_module(f"{kernels.__name__}.{family}.record").RECORDS
    return tuple(found)
