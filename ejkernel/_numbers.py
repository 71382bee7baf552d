"""Numbers that users pass, as Python's: numpy integers are integers, bools are not, and errors name the argument."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_int(value: Any) -> bool:
    """Whether a value is a known integer: an int, a numpy integer, or an integer array without axes.

    >>> [is_int(value) for value in (3, np.int8(3), jnp.int32(3), True, 3.0, "3", np.array([3]))]
    [True, True, True, False, False, False, False]
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def as_int(argument: str, value: Any, least: int | None = None) -> int:
    """A known integer as an int.

    Raises:
        TypeError: it is something else.
        ValueError: it is below `least`.
    """
    if not is_int(value):
        came = "a traced value" if isinstance(value, jax.core.Tracer) else repr(value)
        raise TypeError(f"{argument} must be an int; got {came}.")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{argument} must be at least {least}; got {number}.")
    return number


def as_float(argument: str, value: Any) -> float:
    """A known number as a float. TypeError naming the argument for anything else, text and bools included."""
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    try:
        if not is_bool and np.shape(value) == () and not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError):
        pass  # neither a number nor anything with one in it: the error below names the argument
    came = "a traced value" if isinstance(value, jax.core.Tracer) else repr(value)
    raise TypeError(f"{argument} must be a number; got {came}.")


def as_flag(argument: str, value: Any) -> bool:
    """A known bool, Python's or numpy's. TypeError naming the argument for anything else: "no" is not False."""
    if not isinstance(value, (bool, np.bool_)):
        if isinstance(value, jax.core.Tracer):
            known = f"functools.partial(f, {argument}=True), or jax.jit(f, static_argnames={argument!r})"
            raise TypeError(f"{argument} must be known when the function is traced; got a traced value. Use {known}.")
        raise TypeError(f"{argument} must be True or False, known when the function is traced; got {value!r}.")
    return bool(value)


def as_dtype(argument: str, value: Any) -> np.dtype:
    """A dtype by its name or class. TypeError naming the argument where it is none."""
    try:
        return jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{argument} must be a dtype, such as jnp.float32 or 'bfloat16'; got {value!r}.") from None


def as_array(argument: str, value: Any) -> jax.Array:
    """The argument as a JAX array. TypeError naming it where it is none."""
    if isinstance(value, jax.Array):  # converting it again would cost an eager call more than all checks together
        return value
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{argument} must be an array; got {value!r}.")
    if isinstance(value, jax.ShapeDtypeStruct):
        hint = "jax.eval_shape calls a function on shapes alone."
        raise TypeError(f"{argument} must be an array; got {value}, which has no values. {hint}")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as problem:
        tensor = hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray)  # such as torch's, on a GPU or in 16 bits
        if isinstance(problem, RuntimeError) and not tensor:
            raise
        text = repr(value) if len(repr(value)) < 80 else type(value).__name__
        hint = " jax.dlpack.from_dlpack(x.detach()) makes one of a tensor." if tensor else ""
        raise TypeError(f"{argument} must be an array; got {text} ({str(problem).splitlines()[0]}).{hint}") from None


def as_numpy(argument: str, value: Any) -> np.ndarray:
    """A list of numbers as a numpy array, integers as JAX would have them. TypeError naming the argument where it is none."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise TypeError(f"{argument} must be an array; got {value!r} ({str(problem).splitlines()[0]})") from None
    if array.dtype == object:
        raise TypeError(f"{argument} must be an array; got {value!r}.")
    return array


def known_values(value: Any, array: jax.Array) -> np.ndarray | None:
    """The values of an argument whose array is `array`; None where they are traced.

    Inside `jit` the array of a numpy constant is a tracer, but the constant itself is known.
    """
    if isinstance(value, jax.core.Tracer):
        return None
    return np.asarray(array if isinstance(value, jax.Array) else value)


def offsets_mistake(argument: str, offsets: np.ndarray, tokens: int | None = None, padded: bool = False) -> str | None:
    """What is wrong with the offsets of packed sequences, in words; None where nothing is.

    Args:
        tokens: the length of the row, where they must end; None: anywhere.
        padded: whether they may also end before it.
    """
    mistake = None
    if offsets.size and offsets[0] != 0:
        mistake = f"{argument} must start at 0; got {offsets[0]} first."
    elif (falls := np.flatnonzero(offsets[1:] < offsets[:-1])).size:
        at = int(falls[0])
        mistake = f"{argument} must not decrease; got {offsets[at]} before {offsets[at + 1]} at index {at + 1}."
    elif tokens is not None and padded and offsets[-1] > tokens:
        mistake = f"{argument} must not exceed total, {tokens}; got {offsets[-1]} last."
    elif tokens is not None and not padded and offsets[-1] != tokens:
        mistake = f"{argument} must end at the number of tokens, {tokens}; got {offsets[-1]} last."
    if mistake is not None and tokens is not None and offsets.sum() == tokens:
        mistake += f" These are lengths, which add up to {tokens}: the offsets are np.cumsum([0, *lengths])."
    return mistake
