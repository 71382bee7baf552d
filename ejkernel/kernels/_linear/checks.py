"""Argument checks of the linear operations. Each error names the argument, what is legal and what came."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._meshes import repeat
from ejkernel._numbers import as_array, as_flag, as_float, as_numpy, offsets_mistake
from ejkernel._sizes import known
from ejkernel.kernels._linear.gates import GATES

FLOATS = ("float32", "bfloat16", "float16", "float64")
_FLOAT_DTYPES = frozenset(jnp.dtype(name) for name in FLOATS)


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes that every other argument must match."""

    B: int
    T: int
    H: int
    Hkv: int
    K: int
    V: int
    N: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array, sequences: int) -> Dims:
        B, T, H, K = q.shape
        return cls(B, T, H, k.shape[2], K, v.shape[3], sequences)

    @property
    def heads(self) -> str:
        return str(self.H) if self.Hkv == self.H else f"{self.H}|{self.Hkv}"


def float_array(name: str, x: Any) -> jax.Array:
    if x is None:
        raise TypeError(f"{name} must be an array; got None.")
    array = as_array(name, x)
    if array.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"{name} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}; got {array.dtype.name}.")
    return array


def rank4(name: str, x: jax.Array, rank3: str | None) -> jax.Array:
    """Rank 4 as it is; `[tokens, H, D]` of packed calls as `[1, tokens, H, D]`."""
    if rank3 is not None:
        if x.ndim != 3:
            raise ValueError(f"{name} must be {rank3} like query, which is packed by cu_seqlens; got {list(x.shape)}.")
        return x[None]
    if x.ndim != 4:
        hint = " (rank 3 needs cu_seqlens)" if x.ndim == 3 else ""
        raise ValueError(f"{name} must be [batch, time, heads, channels]{hint}; got {list(x.shape)}.")
    return x


def rows(query: Any, key: Any, value: Any, cu_seqlens: Any) -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    """query, key and value in rank 4, and whether they came packed in rank 3."""
    q, k, v = (float_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    packed_rank3 = cu_seqlens is not None and q.ndim == 3
    rank3 = "[tokens, heads, channels]" if packed_rank3 else None
    q, k, v = (rank4(name, x, rank3) for name, x in (("query", q), ("key", k), ("value", v)))
    return q, k, v, packed_rank3


def query_key_value(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    (B, T, H, K), Hkv = q.shape, k.shape[2]
    if k.shape != (B, T, Hkv, K):
        raise ValueError(
            f"key must be [{B}, {T}, kv heads, {K}] (batch, time, heads, key channels) to match query; got {list(k.shape)}."
        )
    if v.shape[:3] != (B, T, Hkv):
        raise ValueError(
            f"value must be [{B}, {T}, {Hkv}, value channels] (batch, time, heads, channels) to match query and key; "
            f"got {list(v.shape)}.{_shared_hint(H, Hkv, v.shape[2])}"
        )
    heads_and_channels(q, k, v)
    if H % Hkv:
        raise ValueError(f"key must have a number of heads that divides query's {H}; got {Hkv}.")


def _shared_hint(heads: int, kv_heads: int, value_heads: int) -> str:
    """What to do where several heads of values share a key, as Mamba-2's groups do."""
    if not known(heads, kv_heads, value_heads) or not 0 < kv_heads < value_heads or value_heads % kv_heads:
        return ""
    both = "query and key" if heads == kv_heads else "key"
    return f" Where heads of values share them, repeat {both}: jnp.repeat(x, {value_heads // kv_heads}, axis=2)."


def heads_and_channels(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """ValueError unless there are some of each; `jax.export` may leave batch and time open, but not these."""
    sizes = [size for x in (q, k, v) for size in x.shape[2:]]
    if not known(*sizes) or min(sizes) < 1:
        must = "at least 1" if known(*sizes) else "known, since only batch and time may be symbolic"
        raise ValueError(
            f"heads and channels must be {must}; got query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}."
        )


def sequences(cu: Any, q: jax.Array) -> int:
    """N: the batch, or what cu_seqlens packs (its own checks are in `cu_seqlens`)."""
    if cu is None:
        return q.shape[0]
    shape = jnp.shape(offsets(cu))
    if len(shape) == 1 and not known(*shape):
        raise ValueError(
            f"cu_seqlens must have a known size, and so must initial_state and g_gamma, since each sequence has a state; got "
            f"[{shape[0]}]. With jax.export, leave only the tokens open: fix the most sequences and repeat the last offset for "
            f"those that are not there, which are empty then."
        )
    if len(shape) != 1 or shape[0] < 2:
        rows = " Offsets of several rows: jax.vmap over the rows, or pack all of them into one." if len(shape) == 2 else ""
        raise ValueError(f"cu_seqlens must be [sequences + 1] with at least one sequence; got {list(shape)}.{rows}")
    if q.shape[0] != 1:
        raise ValueError(
            f"query must have a batch of 1 when cu_seqlens packs the sequences; got {list(q.shape)}. Rows of a batch go "
            f"one after another, by x.reshape(1, -1, *x.shape[2:]), and cu_seqlens holds offsets in all of it."
        )
    return shape[0] - 1


def cu_seqlens(cu: Any, q: jax.Array) -> jax.Array | None:
    """int32 offsets. Traced ones are taken at their word; concrete ones are checked for start, order and end."""
    if cu is None:
        return None
    array = offsets(cu)
    if array.dtype.name not in ("int32", "int64"):
        raise TypeError(f"cu_seqlens must be int32 or int64; got {array.dtype.name}.")
    offsets_in_order(array, q.shape[1])
    return jnp.asarray(array, jnp.int32)


def offsets(cu: Any) -> jax.Array | np.ndarray:
    """`cu_seqlens` as an array; lists of ints are taken too, as numpy's, whose values stay known under `jit`."""
    if isinstance(cu, (jax.Array, np.ndarray)):
        return cu
    return as_array("cu_seqlens", cu) if hasattr(cu, "__jax_array__") else as_numpy("cu_seqlens", cu)


def offsets_in_order(array: jax.Array | np.ndarray, tokens: int) -> None:
    """ValueError unless offsets whose values are known start at 0, do not decrease and end at the number of tokens."""
    if isinstance(array, jax.core.Tracer) or array.ndim != 1 or array.shape[0] < 2:
        return
    if (mistake := offsets_mistake("cu_seqlens", np.asarray(array), tokens)) is not None:
        raise ValueError(mistake)


def gates(dims: Dims, g: Any, gk: Any, packed_rank3: bool) -> tuple[jax.Array | None, jax.Array | None]:
    """(g of rank 3 or None, gk or None): a `g` per key channel decays rows just as `gk` does, so the two are added."""
    gk = channel_gate(dims, "gk", gk, packed_rank3)
    if g is None:
        return None, gk
    scalar_rank = 2 if packed_rank3 else 3
    g = float_array("g", g)
    if g.ndim == scalar_rank:
        return _checked_gate(dims, "g", g[None] if packed_rank3 else g, None, f"or [..., {dims.K}] per key channel "), gk
    if g.ndim != scalar_rank + 1:
        raise ValueError(
            f"g must be [{dims.B}, {dims.T}, {dims.heads}] (batch, time, heads) or "
            f"[{dims.B}, {dims.T}, {dims.heads}, {dims.K}] (... key channels){_packed_hint(packed_rank3)}; got {list(g.shape)}."
        )
    rows = channel_gate(dims, "g", g, packed_rank3)
    if rows is None or gk is None:
        return None, rows
    return None, _add_gates(dims, rows, gk)


def channel_gate(dims: Dims, name: str, gate: Any, packed_rank3: bool) -> jax.Array | None:
    """A gate with one decay for each channel; `g`, which also has a form without, for each key channel."""
    if gate is None:
        return None
    gate = float_array(name, gate)
    if packed_rank3:
        if gate.ndim != 3:
            raise ValueError(f"{name} must be of rank 3{_packed_hint(True)}; got {list(gate.shape)}.")
        gate = gate[None]
    return _checked_gate(dims, name, gate, GATES[name].channels or "key", "")


def _checked_gate(dims: Dims, name: str, gate: jax.Array, channels: str | None, alternative: str) -> jax.Array:
    """`channels`: "key" or "value" for a gate per channel, None for a gate per head."""
    size = {"key": (dims.K,), "value": (dims.V,), None: ()}[channels]
    legal = [(dims.B, dims.T, heads, *size) for heads in (dims.H, dims.Hkv)]
    if gate.shape not in legal:
        names = "batch, time, heads" + (f", {channels} channels" if channels else "")
        sizes = ", ".join(map(str, (dims.B, dims.T, dims.heads, *size)))
        one = channels is not None and gate.shape[:3] in {shape[:3] for shape in legal} and gate.shape[3] == 1
        hint = f" A gate per head goes in as {name}[..., 0]." if one and name == "g" else ""
        raise ValueError(f"{name} must be [{sizes}] ({names}) {alternative}to match query; got {list(gate.shape)}.{hint}")
    return gate


def _packed_hint(packed_rank3: bool) -> str:
    return ", without the batch since query is packed in rank 3" if packed_rank3 else ""


def _add_gates(dims: Dims, a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[2] != b.shape[2]:  # one has a gate for each query head, the other for each kv head
        a, b = (x if x.shape[2] == dims.H else repeat(x, dims.H // dims.Hkv, axis=2) for x in (a, b))
    wide = np.float64 if np.float64 in (a.dtype, b.dtype) else np.float32
    return a.astype(wide) + b.astype(wide)


def gamma(dims: Dims, g_gamma: Any) -> jax.Array | None:
    """`[H]`, `[1, H]` or `[N, H]` as `[N, H]`."""
    if g_gamma is None:
        return None
    array = float_array("g_gamma", g_gamma)
    if array.shape not in ((dims.H,), (1, dims.H), (dims.N, dims.H)):
        raise ValueError(
            f"g_gamma must be [{dims.H}] (heads), [1, {dims.H}] or [{dims.N}, {dims.H}] (sequences, heads); "
            f"got {list(array.shape)}.{_scale_hint(array)}"
        )
    return jnp.broadcast_to(array, (dims.N, dims.H))


def initial_state(dims: Dims, state: Any, dtype: np.dtype) -> jax.Array | None:
    if state is None:
        return None
    array = float_array("initial_state", state)
    if dims.N == 1 and array.shape == (dims.H, dims.K, dims.V):
        array = array[None]
    if array.shape != (dims.N, dims.H, dims.K, dims.V):
        turned = array.shape == (dims.N, dims.H, dims.V, dims.K)
        hint = " It goes in as jnp.swapaxes(initial_state, 2, 3)." if turned else _scale_hint(array)
        raise ValueError(
            f"initial_state must be [{dims.N}, {dims.H}, {dims.K}, {dims.V}] (sequences, heads, key channels, value channels); "
            f"got {list(array.shape)}.{hint}"
        )
    return array.astype(dtype)


def _scale_hint(array: jax.Array) -> str:
    """Other libraries have the scale at this position."""
    return " A scale goes in by name: softmax_scale." if array.ndim == 0 else ""


def scale(softmax_scale: Any, key_channels: int) -> tuple[float, jax.Array | None]:
    """(number, None), or (1.0, the array) for a scale that is traced or lives on a device."""
    if softmax_scale is None:
        return key_channels**-0.5, None
    if isinstance(softmax_scale, jax.Array):
        kinds = (jnp.floating, jnp.integer)
        if softmax_scale.shape != () or not any(jnp.issubdtype(softmax_scale.dtype, kind) for kind in kinds):
            came = f"{softmax_scale.dtype.name}{list(softmax_scale.shape)}"
            raise ValueError(f"softmax_scale must be a number or a scalar array; got {came}.")
        return 1.0, softmax_scale
    return as_float("softmax_scale", softmax_scale), None


flag = as_flag
