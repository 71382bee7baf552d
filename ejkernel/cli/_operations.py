"""The operations by the names that people use, and how a shape becomes a call of one of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ejkernel.cli._screen import wrong_use
from ejkernel.kernels._linear.platform_function import gla_problem, lightning_decay, lightning_problem, recurrent_problem
from ejkernel.kernels._registry import Platform, kernel_registry
from ejkernel.testing.shapes import DTYPES, GATES, Shape

LAYER = {"layer_idx": 1, "num_layers": 12}  # where lightning attention is measured and verified


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: the function in `ejkernel.modules`.
        op_id: the registry's name, and the cache's.
        legal_gates: the gates it takes, as in `Shape`.
        gates: the gates it is measured with when none are named.
        problem: its arguments as the problem that implementations are asked about; None for softmax attention.
        options: what a call has beside its arrays.
    """

    name: str
    op_id: str
    legal_gates: tuple[str, ...]
    gates: tuple[str, ...]
    problem: Callable[..., Any] | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def linear(self) -> bool:
        """Whether it is the recurrence, and not softmax attention."""
        return self.problem is not None

    @property
    def function(self) -> Callable[..., Any]:
        """The operation as users call it, giving the output alone."""
        from ejkernel import modules

        return functools.partial(getattr(modules, self.name), **self.options)

    def decay(self, heads: int) -> jax.Array | None:
        """The constant decay that the operation adds by itself."""
        return lightning_decay(heads, **LAYER) if self.op_id == "lightning_attn" else None

    def shape(self, text: str, gates: tuple[str, ...] | None, dtype: str) -> Shape:
        """The shape that a text means for this operation; exits with what is legal when it means none."""
        try:
            shape = Shape.parse(text, self.gates if gates is None else gates, dtype)
        except ValueError as problem:
            wrong_use(str(problem))
        if shape.dtype == "float64" and jax.dtypes.canonicalize_dtype("float64").itemsize != 8:
            wrong_use(f"float64 needs 64-bit numbers in JAX: set JAX_ENABLE_X64=1; got {text!r}.")
        wrong = [gate for gate in shape.gates if gate not in self.legal_gates]
        if wrong:
            legal = ", ".join(self.legal_gates) or "no gates"
            wrong_use(f"{self.name} takes {legal}; got {', '.join(wrong)} in {text!r}. Write :none for a call without gates.")
        return shape


OPERATIONS = (
    Operation("recurrent_attention", "recurrent", GATES, ("gk",), recurrent_problem),
    Operation("gla_attention", "recurrent_gla", ("g", "g4", "g_gamma"), ("g4",), gla_problem),
    Operation("lightning_attention", "lightning_attn", (), (), lightning_problem, LAYER),
    Operation("attention", "attention", (), (), None, {"causal": True, "dtype": None, "return_weights": False}),
)


def name_of(op_id: str) -> str:
    """The name that users call an operation by; the registry's own where it is none of ours."""
    return next((op.name for op in OPERATIONS if op.op_id == op_id), op_id)


def words(values: Sequence[str] | None) -> list[str]:
    """The words of an option that may be repeated or hold several, separated by commas."""
    return [word.strip() for value in values or () for word in value.split(",") if word.strip()]


def chosen_operations(values: Sequence[str] | None) -> list[Operation]:
    """The operations that an option names; all where it names none."""
    named = words(values)
    unknown = [word for word in named if not any(word in (op.name, op.op_id) for op in OPERATIONS)]
    if unknown:
        legal = ", ".join(op.name if op.name == op.op_id else f"{op.name} ({op.op_id})" for op in OPERATIONS)
        wrong_use(f"--op must be one of {legal}; got {', '.join(map(repr, unknown))}.")
    return [op for op in OPERATIONS if not named or op.name in named or op.op_id in named]


def chosen_platforms(values: Sequence[str] | None, auto: bool = True) -> list[str]:
    """The platforms that an option names; none where it names none.

    Args:
        auto: whether "auto" is one of them.
    """
    named = words(values)
    legal = [*map(str, Platform), *(["auto"] if auto else [])]
    unknown = [word for word in named if word not in legal]
    if unknown:
        wrong_use(f"--platform must be one of {', '.join(legal)}; got {', '.join(map(repr, unknown))}.")
    return named


def chosen_dtypes(values: Sequence[str] | None, legal: Sequence[str] = DTYPES) -> list[str]:
    """The dtypes that an option names; none where it names none."""
    named = words(values)
    unknown = [word for word in named if word not in legal]
    if unknown:
        wrong_use(f"--dtype must be one of {', '.join(legal)}; got {', '.join(map(repr, unknown))}.")
    return named


def chosen_gates(text: str | None, operations: Sequence[Operation] = OPERATIONS) -> tuple[str, ...] | None:
    """The gates that an option names, `()` for "none", None where it was not given."""
    if text is None:
        return None
    if not any(op.legal_gates for op in operations):
        names = ", ".join(op.name for op in operations)
        wrong_use(f"--gates does not go together with {names}, which takes no gates; got {text!r}.")
    named = () if text == "none" else tuple(part for word in words([text]) for part in word.split("+"))
    unknown = [word for word in named if word not in GATES]
    if unknown:
        wrong_use(f"--gates must be of {', '.join(GATES)}, or none; got {', '.join(map(repr, unknown))}.")
    return named


def load_modules(values: Sequence[str] | None) -> None:
    """Imports modules that register implementations of their own."""
    for name in words(values):
        try:
            importlib.import_module(name)
        except ImportError as problem:
            wrong_use(f"--load {name}: {problem}. Name a module that Python finds, with PYTHONPATH set where it needs to be.")


def unavailable(op_id: str, platforms: Sequence[str] = ()) -> dict[str, str]:
    """The platforms that cannot run an operation here, with the reasons; of `platforms` where any are named."""
    return {
        str(platform): reason
        for platform, reason in kernel_registry.status(op_id).items()
        if reason is not None and (not platforms or platform in platforms)
    }
