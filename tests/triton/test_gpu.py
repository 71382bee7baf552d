"""The triton kernels on a GPU: the interpreted cases and larger ones, against the float64 recurrence; determinism."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import recurrent
from ejkernel.testing.compare import LINEAR_TOLERANCES, relative_rms
from tests.triton.linear_cases import GATES, INTERPRETED, Case
from tests.triton.linear_reference import value_and_grads
from tests.triton.linear_reference import values as reference_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_of(()).backend != "gpu", reason="needs an NVIDIA GPU"),
]
LONG = (0, 100, 100, 257, 600, 601)
BF16 = {"dtype": "bfloat16", "block_q": 64}
LARGE = [
    *(Case((gate,), strength, (1, 300, 2, 2, 128, 128), state=True, **BF16) for gate in ("g", "gk") for strength in GATES),
    Case((), shape=(2, 256, 2, 1, 64, 64), **BF16),
    Case(("g_gamma",), shape=(2, 256, 4, 2, 64, 64), state=True, reverse=True, **BF16),
    Case(("gk",), "strong", (1, 256, 2, 1, 64, 64), reverse=True, gate_heads="Hkv", gate_dtype="bfloat16", **BF16),
    Case(("gk",), "mild", (1, 200, 1, 1, 256, 512), gate_dtype="bfloat16", state=True, **BF16),
    Case(("g",), "mild", (1, 200, 1, 1, 256, 512), state=True, **BF16),
    Case(("g",), "mild", (1, 4096, 1, 1, 256, 128), state=True, **BF16),  # splits the sequence
    Case(("gk",), "resets", (1, 601, 2, 1, 256, 160), cu_seqlens=LONG, state=True, reverse=True, **BF16),
    Case(("g",), "mild", (1, 200, 1, 1, 512, 320), state=True, **BF16),
    Case(("gk",), "mild", (1, 130, 1, 1, 512, 320), **BF16),
    Case(("g", "g_gamma"), "-inf", (1, 601, 2, 1, 128, 128), cu_seqlens=LONG, state=True, **BF16),
    Case(("gk",), "-inf", (1, 601, 2, 1, 128, 128), cu_seqlens=LONG, state=True, reverse=True, **BF16),
    *(Case(("gk", "gv"), strength, (1, 200, 2, 2, 128, 128), state=True, **BF16) for strength in GATES),
    Case(("gk", "gv"), "mild", (1, 130, 1, 1, 256, 512), state=True, reverse=True, **BF16),
    Case(("gk", "gv"), "resets now and then", (1, 4096, 1, 1, 64, 64), state=True, **BF16),  # splits the sequence
    Case(("g", "gk", "gv", "g_gamma"), "resets", (1, 601, 2, 1, 64, 96), cu_seqlens=LONG, state=True, **BF16),
    Case(("gk",), "mild", (1, 1100, 1, 1, 100, 36), block_q=64, state=True),
    Case(("g",), "-inf", (1, 1100, 1, 1, 100, 36), block_q=64, state=True),
    Case(("gk",), "resets", (1, 200, 2, 2, 64, 64), dtype="float16", gate_dtype="float32", block_q=64),
    Case(("g_gamma",), "mild", (1, 8192, 1, 1, 64, 64), state=True, **BF16),  # splits the sequence
    Case(("gk",), "mild", (1, 8192, 1, 1, 64, 64), state=True, **BF16),
    Case(("g", "gk", "gv", "g_gamma"), "mild", (4, 4, 8, 4, 128, 128), schedule="recurrent", state=True, **BF16),
]
HEAD_GATE = [  # by `head_gate_scan_by_warpgroups` (and `head_gate_backward_by_warpgroups`) on Hopper
    *(
        Case(gates, "mild", (2, tokens, 4, 2, K, V), state=True, **BF16)
        for gates in ((), ("g",), ("g_gamma",))
        for tokens, K, V in ((300, 64, 128), (1024, 128, 64), (512, 128, 128), (129, 64, 64))
    ),
    *(Case(gates, "mild", (1, 8192, 1, 1, 128, 128), state=True, **BF16) for gates in ((), ("g",))),  # splits the sequence
    *(
        Case(gates, "mild", (1, 601, 4, 2, 128, V), cu_seqlens=LONG, state=True, reverse=reverse, **BF16)
        for gates in ((), ("g",), ("g_gamma",))
        for V in (64, 128)
        for reverse in (False, True)
    ),
    *(Case(("g",), strength, (1, 300, 2, 2, 64, 64), state=True, reverse=True, **BF16) for strength in GATES),
]
KEY = {**BF16, "gate_dtype": "bfloat16"}
KEY_GATE = [  # by `key_gate_scan_by_warpgroups` on Hopper where segments are weakly gated throughout
    *(
        Case(("gk",), "mild", (2, tokens, 4, heads, K, V), state=True, reverse=reverse, gate_heads=gate_heads, **KEY)
        for tokens, K, V, heads, gate_heads, reverse in (
            (512, 128, 128, 4, "H", False), (300, 128, 128, 2, "H", True), (1024, 64, 64, 4, "Hkv", False),
            (129, 64, 128, 2, "Hkv", True), (64, 128, 64, 1, "H", False),
        )
    ),
    *(Case(("gk",), "mild", (1, 8192, 1, 1, K, K), state=True, **KEY) for K in (64, 128)),  # splits the sequence
    Case(("gk",), "resets now and then", (1, 8192, 1, 1, 128, 128), state=True, **KEY),
    Case(("gk",), "resets in some segments", (1, 8192, 1, 1, 128, 128), state=True, **KEY),
    Case(("gk",), "resets in some segments", (1, 4096, 2, 1, 64, 64), state=True, reverse=True, **KEY),
    Case(("gk",), "resets in one head", (2, 512, 2, 2, 128, 64), state=True, **KEY),
    Case(("gk",), "at sequences' beginnings", (1, 601, 2, 2, 64, 128), cu_seqlens=LONG, state=True, **KEY),
    *(
        Case(("gk",), "mild", (1, 601, 4, 2, K, V), cu_seqlens=LONG, state=True, reverse=reverse, **KEY)
        for K, V in ((128, 128), (64, 64))
        for reverse in (False, True)
    ),
    Case(("gk",), "resets now and then", (1, 601, 4, 2, 128, 128), cu_seqlens=LONG, state=True, **KEY),
    *(Case(("gk",), strength, (2, 300, 2, 2, 128, 128), state=True, **KEY) for strength in GATES),
]  # fmt: skip

ALONE = [  # forward passes without a gradient, which may take other kernels
    *(case for case in LARGE if "gk" in case.gates),
    *HEAD_GATE,
    *KEY_GATE,
    *(
        Case(("gk",), "mild", (2, tokens, 4, 2, K, K), gate_dtype="bfloat16", state=True, **BF16)
        for tokens in (512, 300, 4096)
        for K in (64, 128)
    ),
    *(
        Case(("gk",), strength, (1, 601, 2, 1, 128, 96), cu_seqlens=LONG, gate_dtype="bfloat16", state=True, **BF16)
        for strength in ("mild", "positive", "resets now and then")
    ),
    Case(("gk", "g", "g_gamma"), "mild", (1, 300, 2, 1, 100, 36), state=True, reverse=True, **BF16),
]


def run(case: Case, heuristic: bool = False):
    arrays, (wo, ws) = case.arrays(), case.weights()
    cu = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)
    cfg = None if heuristic else LinearConfig(schedule=case.schedule, block_q=case.block_q)

    @jax.jit
    def gradient(arrays, cu):
        def loss(arrays):
            o, S = recurrent(**arrays, cu_seqlens=cu, reverse=case.reverse, cfg=cfg)
            return jnp.sum(o.astype(jnp.float32) * wo) + jnp.sum(S * ws), (o, S)

        return jax.grad(loss, has_aux=True)(arrays)

    grads, values = gradient(arrays, cu)
    return values, grads


def error_of_sum(case: Case, got, want) -> float:
    """The error of g_gamma's gradient, one number per head, over the size of the terms whose sum it is.

    The terms, one for each token, are the gradients of g where it is g_gamma throughout. They have both signs, so their sum
    can be far smaller than its terms' rounding allows; independent errors of the terms add up like their squares.
    """
    arrays = case.arrays()
    gamma = arrays.pop("g_gamma")
    T, lengths = case.shape[1], None if case.cu_seqlens is None else np.diff(case.cu_seqlens)
    rows = jnp.repeat(gamma[:, None], T, 1) if lengths is None else jnp.repeat(gamma, lengths, 0, total_repeat_length=T)[None]
    g = arrays.get("g", jnp.zeros((1, 1, 1)))
    arrays["g"] = jnp.repeat(g, rows.shape[-1] // g.shape[-1], -1) + rows
    _, grads = value_and_grads(arrays, case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens)
    size = np.sqrt(np.sum(np.square(np.asarray(grads["g"], np.float64))) / np.asarray(want).size)
    return float(np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - np.asarray(want)))) / size)


@pytest.mark.parametrize("case", [*INTERPRETED, *LARGE, *HEAD_GATE, *KEY_GATE], ids=str)
def test_matches_float64(case):
    values, grads = run(case)
    want_values, want_grads = value_and_grads(
        case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens
    )
    errors = {"output": relative_rms(values[0], want_values[0]), "final state": relative_rms(values[1], want_values[1])}
    errors |= {f"d{name}": relative_rms(grads[name], want_grads[name]) for name in grads}
    print(case, {n: f"{e:.1e}" for n, e in errors.items()})
    of_values, of_gradients = LINEAR_TOLERANCES[case.dtype]
    limits = {name: of_values if name in ("output", "final state") else of_gradients for name in errors}
    if case.dtype != "float32" and errors.get("dg_gamma", 0) > of_gradients:
        errors["dg_gamma"] = error_of_sum(case, grads["g_gamma"], want_grads["g_gamma"])
    assert not {name: (e, limits[name]) for name, e in errors.items() if e > limits[name]}


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_forward_alone_matches_float64(case):
    cfg = LinearConfig(schedule=case.schedule, block_q=case.block_q)
    cu = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)
    forward = jax.jit(lambda arrays, cu: recurrent(**arrays, cu_seqlens=cu, reverse=case.reverse, cfg=cfg))
    values = forward(case.arrays(), cu)
    want = reference_values(case.arrays(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens)
    errors = [relative_rms(x, y) for x, y in zip(values, want, strict=True)]
    print(case, [f"{e:.1e}" for e in errors])
    assert max(errors) < LINEAR_TOLERANCES[case.dtype][0]
    jax.tree.map(np.testing.assert_array_equal, values, forward(case.arrays(), cu))


@pytest.mark.parametrize("gate", ["g", "gk", "gv"])
def test_same_bits_on_repeat(gate):
    case = dataclasses.replace(Case((gate,), "strong", (2, 1000, 4, 2, 128, 128), state=True), **BF16)
    first, second = run(case, heuristic=True), run(case, heuristic=True)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.alone
def test_offsets_beyond_32_bits():
    """The last tokens of 2^31 elements, after a reset, are those of a call that has no others."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is not None and memory < 90e9:
        pytest.skip(f"needs 90 GB of the GPU's memory; JAX has {memory / 1e9:.0f}")
    for gate in ("g", "gk"):
        whole, alone = after_a_reset(gate, T=2**20 + 64, H=32, rows=128)
        for name, want in alone.items():
            assert relative_rms(whole[name], want) < 1e-3, (gate, name)


def after_a_reset(gate: str, T: int, H: int, rows: int):
    """Output and gradients of the last rows of a call with T tokens whose state is reset before them, and of them alone."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    draw = jax.jit(lambda key: jax.random.normal(key, (1, T, H, 64), jnp.bfloat16))
    arrays = {name: draw(next(keys)) for name in ("query", "key", "value")}
    decays = jnp.full((1, T, H, 64) if gate == "gk" else (1, T, H), -0.05, jnp.bfloat16)
    arrays[gate] = decays.at[:, T - rows].set(-jnp.inf)
    weights = draw(next(keys)).at[:, : T - rows].set(0)

    @jax.jit
    def run(arrays, weights):
        output, pull = jax.vjp(lambda a: recurrent(**a)[0], arrays)
        return {"output": output[:, -rows:], **{n: x[:, -rows:] for n, x in pull(weights)[0].items()}}

    last = lambda x: x[:, T - rows :]
    return run(arrays, weights), run(jax.tree.map(last, arrays), last(weights))
