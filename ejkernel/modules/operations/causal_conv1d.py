"""A short depthwise convolution over time, which sees the past alone: what delta-rule layers have before q, k and v."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
from jaxtyping import Array, Float, Int

from ejkernel._checking import checking
from ejkernel._device import device_of
from ejkernel._numbers import as_flag
from ejkernel._sizes import known
from ejkernel.kernels._linear import checks
from ejkernel.kernels._linear.checks import float_array
from ejkernel.kernels._triton.causal_conv1d import covers
from ejkernel.kernels._xla._common.explicit_mesh import over_explicit_axes
from ejkernel.kernels._xla.causal_conv1d import activated, last_inputs
from ejkernel.modules._names import explains_names
from ejkernel.modules.operations._results import OutputAndState
from ejkernel.modules.operations._value_checks import offsets_check

__all__ = ["causal_conv1d"]

Activation = Literal["silu"]


@explains_names
def causal_conv1d(
    x: Float[Array, "B T C"] | Float[Array, "tokens C"],
    weight: Float[Array, "W C"],
    bias: Float[Array, " C"] | None = None,
    initial_state: Float[Array, "N W-1 C"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    *,
    activation: Activation | None = None,
    return_state: bool = False,
) -> Float[Array, "B T C"] | Float[Array, "tokens C"] | OutputAndState:
    """A depthwise convolution of each channel with its own W past inputs: y_t = activation(sum_j weight_j x_{t-W+1+j} + bias).

    Sums are in float32 (float64 for float64); every argument has its gradient. Sequences of a packed row do not see each other.

    Args:
        x: `[B, T, C]`; packed by `cu_seqlens` `[1, tokens, C]` or `[tokens, C]`.
        weight: `[W, C]`; the last row multiplies the current token.
        bias: `[C]`.
        initial_state: `[N, W - 1, C]`, the inputs before the first token, oldest first; None: zeros. N is the batch, or the
            number of packed sequences.
        cu_seqlens: `[N + 1]` offsets that pack N sequences in one row. Empty sequences are legal and keep their state.
        activation: None or `"silu"`.
        return_state: also return the last W - 1 inputs of each sequence, from which decoding goes on.

    Returns:
        y, of x's shape and dtype; with `return_state`, also the state `[N, W - 1, C]` in x's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(5.0)[None, :, None]
        >>> causal_conv1d(x, jnp.array([[1.0], [10.0]])).ravel().tolist()
        [0.0, 10.0, 21.0, 32.0, 43.0]
        >>> _, state = causal_conv1d(x[:, :4], jnp.array([[1.0], [10.0]]), return_state=True)
        >>> causal_conv1d(x[:, 4:], jnp.array([[1.0], [10.0]]), initial_state=state).ravel().tolist()  # decode the last token
        [43.0]
    """
    x = float_array("x", x)
    rank2 = cu_seqlens is not None and x.ndim == 2
    if x.ndim != 3 and not rank2:
        hint = " (rank 2 needs cu_seqlens)" if x.ndim == 2 else ""
        raise ValueError(f"x must be [batch, time, channels]{hint}; got {list(x.shape)}.")
    rows = x[None] if rank2 else x  # [B, T, C]
    weight, bias = _checked_weights(rows, weight, bias)
    offsets = _checked_offsets(rows, cu_seqlens)
    state = _checked_state(rows, weight, offsets, initial_state)
    if activation is not None and activation not in get_args(Activation):
        same = " They are the same function." if str(activation) == "swish" else ""
        raise ValueError(f"activation must be None or 'silu'; got {activation!r}.{same}")
    return_state = as_flag("return_state", return_state)
    given = {"x": rows, "weight": weight, "bias": bias, "state": state}
    arrays = {name: array for name, array in given.items() if array is not None}
    placed = [(("x", 0), None, ("x", 2)), (None if offsets is not None else ("x", 0), None, ("x", 2))]
    run = functools.partial(_run, covers(device_of(arrays.values()), arrays), activation, return_state)
    y, *last = over_explicit_axes(run, arrays, placed[: 1 + return_state], ("x",))(arrays, offsets)
    y = y[0] if rank2 else y
    return (y, *last) if return_state else y


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that calls outside `jit` compile once for each shape
def _run(
    on_triton: bool, activation: str | None, return_state: bool, arrays: dict[str, Array], offsets: Array | None
) -> tuple[Array, ...]:
    x, state, W = arrays["x"], arrays.get("state"), arrays["weight"].shape[0]
    # XLA's compiler for CPUs ends the process over derivatives of products of nothing.
    y = x if 0 in x.shape else (_by_triton if on_triton else activated)(activation, arrays, offsets)
    return (y, last_inputs(x, state, offsets, W - 1)) if return_state else (y,)


def _by_triton(activation: str | None, arrays: dict[str, Array], offsets: Array | None) -> Array:
    from ejkernel.kernels._triton.causal_conv1d._solve import activated  # which needs Triton

    return activated(activation, arrays, offsets)


def _checked_weights(x: Array, weight: Any, bias: Any) -> tuple[Array, Array | None]:
    weight, channels = float_array("weight", weight), x.shape[2]
    if not known(*weight.shape[:1]):
        raise ValueError(f"weight must have a known width, since each tap is a product of its own; got {list(weight.shape)}.")
    if weight.ndim != 2 or weight.shape[1] != channels or weight.shape[0] < 1:
        raise ValueError(
            f"weight must be [width, {channels}] (taps from the oldest to the current token, channels) to match x, "
            f"with a width of at least 1; got {list(weight.shape)}.{_weight_hint(weight.shape, channels)}"
        )
    if bias is not None and (bias := float_array("bias", bias)).shape != (channels,):
        raise ValueError(f"bias must be [{channels}] (channels) to match x; got {list(bias.shape)}.")
    return weight, bias


def _weight_hint(shape: tuple[int, ...], channels: int) -> str:
    """What makes a weight of one here of what torch's convolutions have, `[channels, 1, width]`, or of that without the 1."""
    if len(shape) == 3 and shape[:2] == (channels, 1):
        return " One of torch's Conv1d goes in as weight[:, 0].T."
    return " It goes in as weight.T." if len(shape) == 2 and shape[0] == channels else ""


def _checked_offsets(x: Array, cu_seqlens: Any) -> Array | None:
    if cu_seqlens is None:
        return None
    if x.shape[0] != 1:
        raise ValueError(
            f"x must have a batch of 1 when cu_seqlens packs the sequences; got {list(x.shape)}. Rows of a batch go one after "
            f"another, by x.reshape(1, -1, *x.shape[2:]), and cu_seqlens holds offsets in all of it."
        )
    checks.sequences(cu_seqlens, x)
    offsets = checks.cu_seqlens(cu_seqlens, x)
    if checking():
        offsets_check(offsets, x.shape[1]).make()
    return offsets


def _checked_state(x: Array, weight: Array, offsets: Array | None, initial_state: Any) -> Array | None:
    """`[N, W - 1, C]` in x's dtype, or None."""
    sequences = x.shape[0] if offsets is None else offsets.shape[0] - 1
    legal = (sequences, weight.shape[0] - 1, x.shape[2])
    if initial_state is None:
        return None
    state = float_array("initial_state", initial_state)
    if state.shape != legal:
        cached = state.shape == (legal[0], legal[2], legal[1] + 1)  # as flash-linear-attention keeps it, with one input more
        hint = " A cache [sequences, channels, width] goes in as jnp.swapaxes(cache[..., 1:], 1, 2)." if cached else ""
        raise ValueError(
            f"initial_state must be {list(legal)} (sequences, width - 1, channels) to match x and weight; "
            f"got {list(state.shape)}.{hint}"
        )
    return state.astype(x.dtype)
