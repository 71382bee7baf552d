"""Calls that the triton kernels are tested on beside the shared ones: other chunk lengths, mixed dtypes, packed bfloat16."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

GATES = {
    "mild": lambda x: jax.nn.log_sigmoid(x) / 16,
    "strong": lambda x: jax.nn.log_sigmoid(x) * 8,
    "near -20": lambda x: x * 0.1 - 20,
    "resets": lambda x: jnp.where(x > 1.5, -1e4, jax.nn.log_sigmoid(x) / 16),
    "-inf": lambda x: jnp.where(x > 1.5, -jnp.inf, jax.nn.log_sigmoid(x) / 16),
    "positive": lambda x: x * 0.05,
    "resets now and then": lambda x: jnp.where(_in_odd(x, 64) & (x > 1.5), -1e4, jax.nn.log_sigmoid(x) / 16),
}


def _in_odd(x: jax.Array, length: int) -> jax.Array:
    """Which tokens of a gate [B, T, ...] lie in runs 1, 3, ... of so many."""
    return (jnp.arange(x.shape[1]) // length % 2 == 1).reshape(1, -1, *[1] * (x.ndim - 2))


# Those that say something of long sequences or of several heads alone, for gates [B, T, H, channels].
LONG_GATES = GATES | {
    "resets in some segments": lambda x: jnp.where(_in_odd(x, 512) & (x > 1.5), -1e4, jax.nn.log_sigmoid(x) / 16),
    "resets in one head": lambda x: jnp.where((jnp.arange(x.shape[2]) == 0)[:, None] & (x > 1.5), -1e4, x * 0.01 - 0.02),
    "at sequences' beginnings": lambda x: jnp.where((jnp.arange(x.shape[1]) % 64 == 0)[:, None, None], -78.0, x * 0.01 - 0.02),
}


@dataclasses.dataclass(frozen=True)
class Case:
    gates: tuple[str, ...] = ()  # of g, gk, gv, g_gamma
    strength: str = "mild"
    shape: tuple[int, int, int, int, int, int] = (2, 40, 2, 2, 16, 16)  # B, T, H, Hkv, K, V
    gate_heads: str = "H"
    cu_seqlens: tuple[int, ...] | None = None
    reverse: bool = False
    state: bool = False
    dtype: str = "float32"
    gate_dtype: str = "float32"
    schedule: str = "chunked"
    block_q: int = 16

    def __str__(self) -> str:
        extra = [n for n in ("reverse", "state") if getattr(self, n)] + (["packed"] if self.cu_seqlens else [])
        return "-".join(
            ["+".join(self.gates) or "none", self.strength, "x".join(map(str, self.shape)), self.dtype, self.schedule, *extra]
        )

    @property
    def sequences(self) -> int:
        return self.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def arrays(self, seed: int = 0) -> dict[str, jax.Array]:
        B, T, H, Hkv, K, V = self.shape
        keys = iter(jax.random.split(jax.random.key(seed), 10))
        normal = lambda *s: jax.random.normal(next(keys), s, jnp.float32)
        Hg = H if self.gate_heads == "H" else Hkv
        gate = LONG_GATES[self.strength]
        out = {"query": normal(B, T, H, K), "key": normal(B, T, Hkv, K), "value": normal(B, T, Hkv, V)}
        out = {n: x.astype(self.dtype) for n, x in out.items()}
        drawn = {"g": normal(B, T, Hg), "gk": normal(B, T, Hg, K), "gv": normal(B, T, Hg, V)}
        gamma = -jnp.abs(normal(self.sequences, H)) / 8
        out |= {name: gate(x).astype(self.gate_dtype) for name, x in drawn.items() if name in self.gates}
        out |= {"g_gamma": gamma} if "g_gamma" in self.gates else {}
        if self.state:
            out["initial_state"] = normal(self.sequences, H, K, V)
        return out

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        B, T, H, _, K, V = self.shape
        rng = np.random.default_rng(1)
        wo = np.asarray(jnp.asarray(rng.standard_normal((B, T, H, V)), self.dtype))  # as the kernels get it
        return wo, rng.standard_normal((self.sequences, H, K, V)).astype(np.float32)


PACKED = (0, 5, 5, 37, 64)
INTERPRETED = [
    Case(("g",), "-inf", shape=(1, 40, 2, 2, 16, 24), block_q=32),
    Case(("gk",), "near -20", shape=(1, 32, 1, 1, 40, 16), block_q=32),
    Case(("gk",), "mild", dtype="bfloat16", gate_dtype="bfloat16", shape=(1, 40, 2, 2, 16, 16), state=True),
    Case(("g", "gk", "g_gamma"), "-inf", dtype="bfloat16", shape=(1, 100, 2, 1, 24, 16), state=True, block_q=64, reverse=True),
    Case(
        ("gk",), "resets", dtype="bfloat16", shape=(1, 100, 1, 1, 40, 24), cu_seqlens=(0, 5, 5, 70, 100), block_q=64, state=True
    ),
    Case(("gk",), "near -20", dtype="bfloat16", shape=(1, 70, 1, 1, 24, 136), block_q=64),
    Case(("g",), "near -20", dtype="bfloat16", shape=(1, 130, 1, 1, 24, 16), block_q=64),
    Case(("gk",), "mild", dtype="bfloat16", shape=(1, 40, 2, 1, 16, 16), block_q=64, schedule="recurrent", state=True),
    Case(("gk",), "resets now and then", dtype="bfloat16", shape=(1, 130, 1, 1, 40, 24), block_q=64, state=True, reverse=True),
    Case(("gk", "gv"), "resets now and then", dtype="bfloat16", shape=(1, 150, 1, 1, 40, 24), block_q=64, state=True),
    Case(
        ("g", "gk", "gv"), dtype="bfloat16", shape=(1, 90, 2, 1, 24, 16), cu_seqlens=(0, 5, 5, 20, 90), block_q=64, state=True
    ),
    Case(("g",), "resets", dtype="bfloat16", shape=(1, 580, 1, 1, 140, 72), block_q=64, state=True),  # splits the sequence
    Case(("gk",), dtype="bfloat16", shape=(1, 75, 1, 1, 140, 72), cu_seqlens=(0, 5, 5, 75), block_q=64, reverse=True),
    Case((), dtype="bfloat16", shape=(1, 70, 2, 1, 200, 16), block_q=64),
    Case(
        ("g", "g_gamma"),
        "-inf",
        dtype="bfloat16",
        shape=(1, 40, 4, 2, 16, 16),
        gate_heads="Hkv",
        cu_seqlens=(0, 5, 5, 30, 40),
        reverse=True,
        state=True,
    ),
    Case(("g",), "resets", dtype="float16", shape=(1, 40, 2, 1, 70, 20), gate_heads="Hkv", reverse=True),
    Case(("g_gamma",), dtype="bfloat16", shape=(1, 300, 2, 1, 24, 16), state=True),
    Case(("g",), "mild", dtype="bfloat16", shape=(1, 40, 2, 2, 16, 16), state=True),
    Case(("g", "gk", "gv", "g_gamma"), "-inf", shape=(1, 3, 2, 1, 5, 19), schedule="recurrent", state=True),
    Case(("g_gamma",), schedule="recurrent", shape=(1, 64, 2, 1, 16, 16), cu_seqlens=PACKED, reverse=True),
]

# One call of every route in bfloat16, with resets in every second chunk: what candidates are compared on, since weakly gated
# chunks alone leave the exact kernels, whose tiles candidates change, nothing to do.
_BF16 = {"strength": "resets now and then", "dtype": "bfloat16", "block_q": 64, "state": True}
BY_ROUTE = {
    "decode step (gradient: general)": Case(("gk",), shape=(1, 2, 1, 1, 64, 64), schedule="recurrent", **_BF16),
    "head gate": Case(("g",), shape=(1, 80, 1, 1, 128, 128), **_BF16),
    "head gate, gradient by three scans": Case((), shape=(1, 80, 1, 1, 64, 64), **_BF16),
    "head gate, wide keys, wide tiles": Case(("g",), shape=(1, 80, 1, 1, 144, 128), **_BF16),
    "head gate, stored states": Case(("g",), shape=(1, 80, 1, 1, 272, 64), **_BF16),
    "key gate": Case(("gk",), shape=(1, 80, 1, 1, 64, 64), **_BF16),
    "key gate, wide tiles": Case(("gk",), shape=(1, 80, 1, 1, 144, 128), **_BF16),
    "key and value gate, outputs in the scan": Case(("gk", "gv"), shape=(1, 80, 1, 1, 64, 64), **_BF16),
    "key and value gate": Case(("gk", "gv"), shape=(1, 80, 1, 1, 144, 64), **_BF16),
    "general": Case(("gv",), shape=(1, 80, 1, 1, 64, 64), **_BF16),
}
