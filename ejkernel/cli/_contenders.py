"""Who is measured against whom: ours on every platform asked for, and what people would use instead."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli._operations import Operation, unavailable
from ejkernel.cli._screen import wrong_use
from ejkernel.testing import flash_linear
from ejkernel.testing.hand_written import scan_attention
from ejkernel.testing.timing import directed

OURS = "ejkernel"
LINEAR_RIVALS, SOFTMAX_RIVALS = ("scan", "fla"), ("jax.nn", "cudnn")
RIVALS = (*LINEAR_RIVALS, *SOFTMAX_RIVALS)
Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute an operation.

    Attributes:
        name: as the table shows it.
        prepare: gives, for a direction and arrays, a function of the output's gradient that starts the work.
        wait: returns when what that function gave is there.
        absent: why it cannot run here; None when it can.
        platform: what ours was asked to run on; None for all others.
    """

    name: str
    prepare: Callable[[str, Arrays], Callable[[jax.Array], Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    absent: str | None = None
    platform: str | None = None


def contenders(op: Operation, platforms: Sequence[str], rivals: Sequence[str] | None) -> list[Contender]:
    """Ours, once for every platform named (once in all where none is), then the rivals of an operation.

    Args:
        rivals: names of `RIVALS`; None: all that run here.
    """
    found = [_ours(op, platform, several=len(platforms) > 1) for platform in platforms or ("auto",)]
    for name in rivals_of(op):
        if rivals is None or name in rivals:
            rival = {"scan": _scan, "fla": _fla, "jax.nn": _jax_nn, "cudnn": _cudnn}[name](op)
            if rivals is not None or rival.absent is None:
                found.append(rival)
    return found


def chosen_rivals(names: Sequence[str], operations: Sequence[Operation]) -> list[str] | None:
    """What `--compare` names; None where it names nothing, an empty list for "none"."""
    if not names:
        return None
    if list(names) == ["none"]:
        return []
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        wrong_use(f"--compare must be of {', '.join(RIVALS)}, or none alone; got {', '.join(map(repr, unknown))}.")
    of_them = [name for op in operations for name in rivals_of(op)]
    idle = [name for name in names if name not in of_them]
    if idle:
        legal = ", ".join(dict.fromkeys(of_them))
        wrong_use(f"--compare must be of {legal} for {', '.join(op.name for op in operations)}; got {', '.join(idle)}.")
    return list(names)


def rivals_of(op: Operation) -> tuple[str, ...]:
    """Who can be measured against an operation."""
    return LINEAR_RIVALS if op.linear else SOFTMAX_RIVALS


def fetched(result: Any, direction: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A result of any contender as `(output, gradients by name)`."""
    output, gradients = result if direction != "forward" else (result, {})
    return _numpy(output), {name: _numpy(x) for name, x in gradients.items()}


def _numpy(array: Any) -> np.ndarray:
    return np.asarray(array) if isinstance(array, jax.Array) else array.float().cpu().numpy()


def _jitted(function: Callable[..., Any]) -> Callable[[str, Arrays], Callable[[jax.Array], Any]]:
    def prepare(direction: str, arrays: Arrays) -> Callable[[jax.Array], Any]:
        compiled = jax.jit(directed(function, direction))
        return lambda cotangent: compiled(arrays, cotangent)

    return prepare


def _ours(op: Operation, platform: str, several: bool) -> Contender:
    absent = unavailable(op.op_id, [platform]).get(platform) if platform != "auto" else None
    name = f"{OURS} {platform}" if several else OURS
    return Contender(name, _jitted(functools.partial(op.function, platform=platform)), absent=absent, platform=platform)


def _scan(op: Operation) -> Contender:
    def scan(**arrays: Any) -> jax.Array:
        decay = op.decay(arrays["query"].shape[2])
        return scan_attention(**arrays, **({} if decay is None else {"g_gamma": decay}))[0]

    return Contender("scan", _jitted(scan))


def _jax_nn(op: Operation) -> Contender:
    run = lambda query, key, value: jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
    return Contender("jax.nn", _jitted(run))


def _cudnn(op: Operation) -> Contender:
    run = lambda query, key, value: jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    absent = unavailable(op.op_id, ["cuda"]).get("cuda")
    return Contender("cudnn", _jitted(run), absent=absent)


def _fla(op: Operation) -> Contender:
    def prepare(direction: str, arrays: Arrays) -> Callable[[jax.Array], Any]:
        shape = (*arrays["query"].shape[:3], arrays["value"].shape[-1])
        decay = op.decay(shape[2])
        named = arrays | ({} if decay is None else {"g_gamma": decay})
        made: dict[int, flash_linear.FlashLinear] = {}

        def run(cotangent: jax.Array) -> Any:
            if id(cotangent) not in made:  # torch copies its arguments once, not in every call that is timed
                made.clear()
                made[id(cotangent)] = flash_linear.FlashLinear(named, jnp.broadcast_to(cotangent, shape))
            call = made[id(cotangent)]
            return call.forward() if direction == "forward" else call.both()

        return run

    return Contender("fla", prepare, flash_linear.FlashLinear.wait, flash_linear.missing())
