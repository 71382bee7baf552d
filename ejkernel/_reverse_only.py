"""What says so when a derivative is asked for that the kernels do not have: forward mode, or a gradient's gradient.

`jax.custom_vjp` has messages of its own for both, which name neither the operation nor the way out. The identity here marks
the arrays on their way in; its tangents can be transposed, which is all that reverse mode does with them, but not computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True)
class Refusals:
    """What is said to who asks for forward mode, and for the gradient of a gradient."""

    forward: str
    second: str


def of_platform(name: str) -> Refusals:
    """What a platform says whose kernels know reverse mode alone."""
    return Refusals(
        "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) of this operation needs platform='xla': "
        f"the {name} platform has reverse mode only.",
        f"the gradient of a gradient of this operation needs platform='xla': the {name} platform's gradient has no derivative.",
    )


KERNELS = of_platform("triton")

_marked_p = Primitive("reverse_mode_only")
_marked_p.multiple_results = True
_tangent_p = Primitive("tangent_of_reverse_mode_only")


def differentiable_once(arrays: dict[str, jax.Array], refusals: Refusals = KERNELS) -> dict[str, jax.Array]:
    """The arrays, whose tangents may be transposed but not computed."""
    return _marked(arrays, False, refusals)


def not_differentiable(tree: Any, refusals: Refusals = KERNELS) -> Any:
    """The arrays, whose tangents are refused."""
    return _marked(tree, True, refusals)


def _marked(tree: Any, again: bool, refusals: Refusals) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return tree  # nothing is being transformed
    return jax.tree.unflatten(structure, _marked_p.bind(*leaves, again=again, refusals=refusals))


def _same(*arrays: Any, **_: Any) -> list[Any]:
    return list(arrays)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, again: bool, refusals: Refusals) -> tuple[list[Any], list[Any]]:
    if again:
        raise TypeError(refusals.second)
    out = [t if isinstance(t, ad.Zero) else _tangent_p.bind(t, refusals=refusals) for t in tangents]
    return _marked_p.bind(*primals, again=again, refusals=refusals), out


def _refuse(*_: Any, refusals: Refusals) -> Any:
    raise TypeError(refusals.forward)


_marked_p.def_impl(_same)
_marked_p.def_abstract_eval(_same)
mlir.register_lowering(_marked_p, lambda ctx, *operands, **_: list(operands))
ad.primitive_jvps[_marked_p] = _jvp
batching.primitive_batchers[_marked_p] = lambda args, axes, **params: (_marked_p.bind(*args, **params), axes)

_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_tangent_p, _refuse)
ad.deflinear2(_tangent_p, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[_tangent_p] = lambda args, axes, **params: (_tangent_p.bind(*args, **params), axes[0])
