"""What operations look at where values are checked: gates, offsets, the delta rule's beta, heads in time's place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checking import ValueCheck, extreme
from ejkernel._numbers import offsets_mistake
from ejkernel._sizes import known
from ejkernel.ops.notices import ValueWarning, warn_once

_FAR = 8  # heads, or rows of the batch, to each token from which on they look exchanged
_MANY_ROWS = 64  # of a batch; with fewer, short sequences are as likely


def gate_check(name: str, gate: Any, order: str = "") -> ValueCheck:
    """Log decays above 0, and NaN. `order`: a word on the order of arguments, where it is easily mistaken."""
    shape = list(jnp.shape(gate))

    def judged(value: np.ndarray, *place: np.ndarray) -> str | None:
        if value <= 0:
            return None
        found = f"{name} is {float(value):.4g} at {[int(i) for i in place]}"
        if np.isnan(value):
            return f"{found}, which spoils its sequence. The logarithm of a decay below 0 is such a gate."
        if value <= 1:
            remedy = "A gate between 0 and 1 goes in by its logarithm: jax.nn.log_sigmoid(x), not jax.nn.sigmoid(x)."
        else:
            remedy = "A rate goes in with a minus: -jnp.exp(A_log) * jax.nn.softplus(x)."
        return (
            f"{found}, the largest of {shape}. Log decays are at most 0, since exp({name}) multiplies the state at every "
            f"step; above 0 it amplifies. {remedy}{order}"
        )

    return ValueCheck(name, lambda: extreme(jnp.asarray(gate), lambda x: x), judged, doubtful=True)


def beta_check(beta: Any) -> ValueCheck:
    """Values of beta outside 0 to 2: with them the delta rule's state grows without bound."""

    def judged(value: np.ndarray, *place: np.ndarray) -> str | None:
        if 0 <= value <= 2:
            return None
        return (
            f"beta is {float(value):.4g} at {[int(i) for i in place]}. Outside 0 to 2 the state grows without bound; layers "
            f"have jax.nn.sigmoid(x), or twice that."
        )

    return ValueCheck("beta", lambda: extreme(jnp.asarray(beta), lambda x: jnp.abs(x - 1)), judged)


def offsets_check(offsets: Any, tokens: int) -> ValueCheck:
    """Offsets of packed sequences that do not start at 0, fall, or end elsewhere than at the number of tokens."""
    if not known(tokens):  # the program is exported, without callbacks
        return ValueCheck("cu_seqlens", tuple, lambda: None)
    judged = lambda values: offsets_mistake("cu_seqlens", values, tokens)
    return ValueCheck("cu_seqlens", lambda: (offsets,), judged)


def warn_of_layout(operation: str, query: Any) -> None:
    """Warns once where heads outnumber tokens by far, as in `[batch, heads, time, channels]`; one token is decoding."""
    tokens, heads = jnp.shape(query)[-3:-1]
    if known(tokens, heads) and tokens > 1 and heads >= _FAR * tokens:
        warn_once(
            (operation, "layout"),
            f"{operation}: query {list(jnp.shape(query))} has {heads} heads and only {tokens} tokens. The order is "
            f"[batch, time, heads, channels]; if yours is [batch, heads, time, channels], use jnp.swapaxes(x, 1, 2).",
            ValueWarning,
        )


def warn_of_time_first(operation: str, query: Any, state: Any) -> None:
    """Warns once where a batch outnumbers tokens by far, as in the `[time, batch, heads, channels]` of a scan.

    Not for calls that start from a state, which decode. One token each without a state reads what it wrote and nothing else.
    """
    if state is not None or len(jnp.shape(query)) != 4:
        return
    batch, tokens = jnp.shape(query)[:2]
    if tokens and batch >= max(_FAR * tokens, _MANY_ROWS):
        warn_once(
            (operation, "time first"),
            f"{operation}: query {list(jnp.shape(query))} has a batch of {batch} and only {tokens} "
            f"token{'s' if tokens > 1 else ''}, without a state from before. The order is [batch, time, heads, channels]; if "
            f"yours is [time, batch, heads, channels], as a scan has it, use jnp.swapaxes(x, 0, 1).",
            ValueWarning,
        )


def warn_of_sinks(operation: str, sinks: Any, query: Any) -> None:
    """Warns once of as many sinks as heads in one row, which all heads share; one for each head is `[heads, 1]`."""
    heads = np.shape(query)[-2] if np.ndim(query) == 4 else 0
    if known(heads) and heads > 1 and np.shape(sinks) == (heads,):
        warn_once(
            (operation, "sinks"),
            f"{operation}: softmax_aux [{heads}] is {heads} sinks that every head has. One for each of the {heads} heads is "
            f"[{heads}, 1]: softmax_aux[:, None].",
            ValueWarning,
        )


def recurrence_checks(named: Mapping[str, Any], gates: tuple[str, ...], shards: int, order: str = "") -> Iterator[ValueCheck]:
    """The checks of a recurrence. `shards`: over how many time is split, whose offsets are those of the whole row."""
    for name in gates:
        if (gate := named.get(name)) is not None and has_values(gate):
            yield gate_check(name, gate, order)
    offsets = named["cu_seqlens"]
    if isinstance(offsets, jax.core.Tracer) and offsets.ndim == 1 and offsets.shape[0] > 1:  # known ones are always checked
        tokens = jnp.shape(named["query"])[-3]
        yield offsets_check(offsets, shards * tokens)


def has_values(x: Any) -> bool:
    """Whether there is anything to look at; what is no array of floats is refused elsewhere, by name."""
    return isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating) and 0 not in x.shape
