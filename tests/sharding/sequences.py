"""Time split over 8 simulated devices, compared with the call on whole sequences: outputs, final states and all gradients.

Run as a program it prints what was found as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel._device import Device, on_device
from ejkernel.modules import (
    GatedDeltaRuleConfig,
    RecurrentAttentionConfig,
    gated_delta_rule,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)
from ejkernel.testing.compare import relative_rms
from tests.sharding.partitions import sent

P = PartitionSpec
Arrays = dict[str, jax.Array]
TOKENS, H, HKV, K, V = 40, 4, 2, 8, 6  # 5 to 20 in a shard
PER_TOKEN = ("query", "key", "value", "beta", "g", "gk", "gv")
LENGTHS = (3, 0, 19, 8, 10)  # within a shard, empty, over several shards, up to an edge, the rest
FLOATS = {"float32": 1e-5, "bfloat16": 6e-4}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `mesh`: devices over batch, time and heads. `weak`: gates that forget little over all tokens."""

    operation: str
    gates: tuple[str, ...] = ()
    mesh: tuple[int, int, int] = (1, 8, 1)
    exchange: str = "gather"
    reverse: bool = False
    lengths: tuple[int, ...] = ()
    resets: bool = False
    state: bool = True
    check: bool = True
    platform: str = "xla"
    dtype: str = "float32"
    tokens: int = TOKENS
    weak: bool = False

    @property
    def delta(self) -> bool:
        return self.operation == "delta"

    def arrays(self) -> Arrays:
        rng = np.random.default_rng(3)
        (B, N), T = (1, len(self.lengths)) if self.lengths else (2, 2), self.tokens
        heads = (HKV, HKV, H) if self.delta else (H, HKV, HKV)
        shapes: dict[str, tuple[int, ...]] = {
            "query": (B, T, heads[0], K), "key": (B, T, heads[1], K), "value": (B, T, heads[2], V),
        }  # fmt: skip
        gates = {"g": (B, T, H), "g4": (B, T, H, K), "gk": (B, T, H if self.delta else HKV, K), "gv": (B, T, H, V)}
        gates["g_gamma"] = (N, H)
        shapes |= {"beta": (B, T, H)} if self.delta else {}
        shapes |= {name: gates[name] for name in self.gates}
        shapes |= {"initial_state": (N, H, K, V)} if self.state else {}
        made: Arrays = {}
        for name, shape in shapes.items():
            x = rng.normal(size=shape)
            if name in gates:
                x = -np.abs(x) / (300 if self.weak else 3)
                if self.resets and name != "g_gamma":  # at a shard's edge, before one, and a whole shard
                    x[:, [5, 9]], x[:, 20:25] = -np.inf, -1e4
            if name == "beta":
                x = 1 / (1 + np.exp(-x))
            if self.delta and name in ("query", "key"):
                x /= np.linalg.norm(x, axis=-1, keepdims=True)
            made["g" if name == "g4" else name] = jnp.asarray(x, self.dtype if name != "initial_state" else "float32")
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        return made | ({"cu_seqlens": jnp.asarray(offsets)} if self.lengths else {})

    def call(self, **options: Any) -> Callable[..., Any]:
        """The operation with this case's options, `(output, final state)` of arrays by name."""
        kind = GatedDeltaRuleConfig if self.delta else RecurrentAttentionConfig
        exchange = self.exchange if "sequence_axis" in options else None
        cfg = kind(block_q=4 if self.platform == "xla" else 16, platform=self.platform, exchange=exchange)
        operations: dict[str, Any] = {
            "recurrent": recurrent_attention, "gla": gla_attention, "delta": gated_delta_rule,
            "lightning": functools.partial(lightning_attention, layer_idx=1, num_layers=4),
        }  # fmt: skip
        return functools.partial(operations[self.operation], **options, reverse=self.reverse, return_state=True, cfg=cfg)

    def specs(self) -> dict[str, PartitionSpec]:
        rows = None if self.lengths else "b"
        state = P(rows, "h")
        return dict.fromkeys(PER_TOKEN, P(rows, "s", "h")) | {"initial_state": state, "g_gamma": state, "cu_seqlens": P()}

    def split(self) -> tuple[Callable[[Arrays], Any], Any]:
        """The call on arrays split over a mesh, and the mesh."""
        count = int(np.prod(self.mesh))
        mesh = jax.make_mesh(self.mesh, ("b", "s", "h"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:count])
        specs, local = self.specs(), self.call(sequence_axis="s")

        def run(arrays: Arrays) -> Any:
            given = {name: specs[name] for name in arrays}
            out = specs["query"], specs["initial_state"]
            return jax.shard_map(
                lambda arrays: local(**arrays), mesh=mesh, in_specs=(given,), out_specs=out, check_vma=self.check
            )(arrays)

        return run, mesh


def values_and_gradients(call: Callable[[Arrays], Any], arrays: Arrays) -> Any:
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    outputs, pull = jax.vjp(lambda some: call({**arrays, **some}), floats)
    return outputs, pull(jax.tree.map(jnp.sin, outputs))[0]


def equal(case: Case, expected: dict[str, int] | None = None) -> None:
    """What a case gives split is what it gives whole; and the program sends what is expected."""
    with on_device(Device("gpu", "NVIDIA H200", 90)) if case.platform == "triton" else contextlib.nullcontext():
        compare(case, expected)


def compare(case: Case, expected: dict[str, int] | None) -> None:
    arrays = case.arrays()
    run, mesh = case.split()
    whole = case.call()
    want = jax.jit(functools.partial(values_and_gradients, lambda arrays: whole(**arrays)))(arrays)
    specs = case.specs()
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    compiled = jax.jit(functools.partial(values_and_gradients, run)).lower(placed).compile()
    got = compiled(placed)
    errors = jax.tree.map(lambda x, y: relative_rms(np.asarray(x, np.float32), np.asarray(y, np.float32)), got, want)
    assert all(error < FLOATS[case.dtype] for error in jax.tree.leaves(errors)), errors
    assert expected is None or sent(compiled.as_text()) == expected, sent(compiled.as_text())


XLA = {
    "no-gate": Case("recurrent", state=False),
    "every-gate": Case("recurrent", ("g", "gk", "gv"), mesh=(2, 4, 1), resets=True, exchange="steps"),
    "gla-reverse": Case("gla", ("g",), reverse=True, mesh=(1, 4, 2)),
    "lightning": Case("lightning", check=False),
    "packed": Case("recurrent", ("g", "g_gamma", "gk", "gv"), lengths=LENGTHS, resets=True),
    "packed-steps-reverse": Case("recurrent", ("g_gamma", "gk"), lengths=LENGTHS, exchange="steps", reverse=True, check=False),
    "delta-head-gate": Case("delta", ("g",), mesh=(2, 4, 1), resets=True, reverse=True, exchange="steps"),
    "delta-channels": Case("delta", ("g4",), mesh=(1, 4, 2), resets=True, check=False, dtype="bfloat16"),
    "delta-packed": Case("delta", lengths=LENGTHS, exchange="steps"),
}
TRITON = {  # interpreted, which is slow: few shards
    "triton-channels-packed": Case("recurrent", ("g_gamma", "gk"), mesh=(1, 2, 1), lengths=LENGTHS, platform="triton"),
    "triton-delta": Case("delta", ("g",), mesh=(1, 2, 2), reverse=True, resets=True, platform="triton"),
}
SENT = {  # states and, where they are the same on all shards, sums: of the final state, and of the initial state's gradient
    "no-gate": {"all-gather": 2, "all-reduce": 1},
    "every-gate": {"collective-permute": 6, "all-reduce": 2},
    "packed": {"all-gather": 2, "all-reduce": 2},
    "delta-head-gate": {"collective-permute": 6, "all-reduce": 2},
}


def spoiled(case: Case) -> None:
    """A sequence with a NaN, over several shards, leaves the others as they were, and those of its tokens that come before."""
    arrays = case.arrays()
    run, _ = case.split()
    bad = {**arrays, "value": arrays["value"].at[0, 12].set(jnp.nan)}
    call = jax.jit(functools.partial(values_and_gradients, run))
    (output, final), grads = call(bad)
    (want, want_final), want_grads = call(arrays)
    others = np.r_[0:3, 22:TOKENS]
    np.testing.assert_array_equal(output[0, others], want[0, others])
    np.testing.assert_array_equal(output[0, 3:8], want[0, 3:8])
    assert np.isnan(output[0, 13:22]).all()
    np.testing.assert_array_equal(np.delete(final, 2, 0), np.delete(want_final, 2, 0))
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(grads[name][0, others], want_grads[name][0, others])


def amplified(case: Case) -> None:
    """Gates above 0 that overflow over a shard: nothing stays nothing, in outputs and gradients, as in the whole call."""
    arrays = {**case.arrays(), "g": jnp.full((2, case.tokens, H), 1.5)}
    arrays["key"] = arrays["key"].at[:, :-20].set(0)  # the state is 0 up to the last tokens
    run, _ = case.split()
    whole = case.call()
    calls = run, lambda arrays: whole(**arrays)
    outputs = [jax.jit(call)(arrays)[0] for call in calls]
    first = lambda call: lambda q, k: jnp.sum(call({**arrays, "query": q, "key": k})[0][:, :20])
    slopes = [jax.jit(jax.grad(first(call), (0, 1)))(arrays["query"], arrays["key"]) for call in calls]
    for got, want in zip(jax.tree.leaves((outputs[0], slopes[0])), jax.tree.leaves((outputs[1], slopes[1])), strict=True):
        assert np.isfinite(want).all()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-30)


def without_tokens() -> None:
    """Packed sequences that are all empty keep their states, and their gradients, however many shards there are."""
    case = Case("recurrent", ("gk",), lengths=(0, 0), tokens=0)
    arrays, (run, _) = case.arrays(), case.split()
    (_, final), gradients = jax.jit(functools.partial(values_and_gradients, run))(arrays)
    np.testing.assert_array_equal(final, arrays["initial_state"])
    np.testing.assert_allclose(gradients["initial_state"], jnp.sin(final), rtol=1e-6)


def checks() -> dict[str, Callable[[], None]]:
    made = {name: functools.partial(equal, case, SENT.get(name)) for name, case in (XLA | TRITON).items()}
    for name, kind in (("linear", "gather"), ("delta", "steps")):
        case = Case("recurrent" if name == "linear" else "delta", ("g",), lengths=LENGTHS, exchange=kind)
        made[f"spoiled-{name}"] = functools.partial(spoiled, case)
    case = Case("recurrent", ("g",), state=False, mesh=(1, 4, 1), tokens=400)
    return made | {"no-tokens": without_tokens, "amplified": functools.partial(amplified, case)}


def main() -> None:
    found = {}
    made = checks()
    if set(sys.argv[1:]) & set(TRITON):
        from tests.interpreter import quicken

        quicken()
    for name in sys.argv[1:]:
        try:
            made[name]()
            found[name] = ""
        except Exception:  # every check reports, whatever went wrong in another
            found[name] = traceback.format_exc(limit=-6)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
