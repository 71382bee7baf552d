"""What the pallas platform takes and refuses, its configurations, and transformations of its calls."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import kernel_registry, ops
from ejkernel._device import Device, on_device
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._pallas import recurrent
from ejkernel.kernels._pallas._chips import CHIPS, chip_of, interpreted
from ejkernel.kernels._xla import recurrent as on_xla
from ejkernel.modules import RecurrentAttention, gla_attention
from ejkernel.ops import Invocation
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_cases import LinearCase

small = functools.partial(LinearCase, batch=1, time=20, heads=2, kv_heads=2, key_channels=8, value_channels=8)
SMALL = small("small", gates=("g",))
q, k, v = (SMALL.arguments()[0][name] for name in ("query", "key", "value"))


def test_on_a_cpu_it_says_that_the_kernels_are_for_tpus():
    with pytest.raises(ValueError, match="these kernels are for TPUs, and this call computes on cpu"):
        recurrent(q, k, v)
    with pytest.raises(ValueError, match="not on a TPU, which these kernels are for"):
        gla_attention(q, k, v, platform="pallas")


def test_a_generation_that_nothing_was_compiled_for_is_refused():
    with on_device(Device("tpu", "TPU v3")), pytest.raises(ValueError, match="compiled for TPU v4, v5e, v5p, v6e, tpu7x"):
        recurrent(q, k, v)
    assert all(chip_of(chip.device) is chip for chip in CHIPS.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "the matrix unit takes no float16; got float16: use bfloat16"),
        ({"key_channels": 513}, "channels go up to 512, a state in VMEM; got 513 and 8"),
    ],
)
def test_calls_that_are_refused(change, message):
    with interpreted(), pytest.raises(ValueError, match=message):
        recurrent(**small("refused", **change).arguments()[0])


def test_a_traced_scale_of_sixty_four_bits_is_no_operand():
    with interpreted(), jax.enable_x64(True):
        (entry,) = (e for e in kernel_registry.list_implementations("recurrent") if str(e.platform) == "pallas")
        assert entry.refusal(recurrent_problem(q, k, v, softmax_scale=jnp.asarray(0.5, jnp.float64))) is None


@pytest.mark.parametrize(
    ("case", "cfg", "message"),
    [
        (SMALL, LinearConfig(block_k=64), "block_k must be None on pallas"),
        (SMALL, LinearConfig(num_warps=4), "num_warps must be None on pallas, .* know no warps"),
        (SMALL, LinearConfig("recurrent"), "takes up to 16 tokens on pallas; got 20"),
        (SMALL, LinearConfig(block_q=8), "block_q must be from 16 to 512"),
        (small("gk", gates=("gk",)), LinearConfig(block_q=512), "block_q must be from 16 to 256"),
        (small("packed", lengths=(3, 4)), LinearConfig("recurrent"), "takes no packed sequences"),
    ],
)
def test_configurations_that_are_refused(case, cfg, message):
    arrays, options = case.arguments()
    with interpreted(), pytest.raises(ValueError, match=message):
        recurrent(**arrays, **options, cfg=cfg)


def wide(gates, channels, dtype=jnp.bfloat16, time=2048):
    tokens = lambda *more: jax.ShapeDtypeStruct((8, time, 16, *more), dtype)
    arrays = {name: tokens(channels) for name in ("query", "key", "value", *(set(gates) - {"g"}))}
    return arrays | ({"g": tokens()} if "g" in gates else {})


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("gates", [(), ("g",), ("gk",), ("gk", "gv")], ids=str)
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_heuristic_and_candidates_fit_every_chip(chip, gates, channels):
    found: list[LinearConfig] = []

    def look(arrays):
        problem = recurrent_problem(**arrays)
        assert recurrent.supports(problem) is None
        candidates = recurrent.implementation.candidates(problem)
        assert candidates[0] == recurrent.implementation.heuristic(problem)
        assert all(recurrent.refuses(problem, cfg) is None for cfg in candidates)
        found.extend(candidates)

    with on_device(CHIPS[chip].device):
        jax.eval_shape(look, wide(gates, channels))
    assert len(set(found)) == len(found) >= 1


def test_blocks_that_vmem_does_not_hold_are_refused():
    def look(arrays):
        problem = recurrent_problem(**arrays)
        reason = recurrent.refuses(problem, LinearConfig(block_q=512, block_h=16))
        assert "MiB of VMEM and a kernel has 12.0 MiB on v4: use a smaller block_q or block_h" in reason

    def look_wider(arrays):
        reason = recurrent.supports(recurrent_problem(**arrays))
        assert "a state of 512 x 512 needs about 12.1 MiB of VMEM and a kernel has 12.0 MiB on v4: use platform='xla'" in reason

    with on_device(CHIPS["v4"].device):
        jax.eval_shape(look, wide(("g",), 256))
        jax.eval_shape(look_wider, wide(("g",), 512))


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_other_platforms_refuse_heads_of_a_block(platform):
    if platform == "triton":
        pytest.importorskip("triton", reason="the triton platform needs Triton")
    entry = next(e for e in kernel_registry.list_implementations("recurrent") if str(e.platform) == platform)
    function: Any = entry.function
    assert "block_h" in function.refuses(SMALL.problem, LinearConfig(block_h=2))


@pytest.mark.long
def test_the_tuner_chooses_among_interpreted_candidates():
    with interpreted():
        arrays, options = small("tuned", gates=("g",), time=40).arguments()
        tuned = ops.Tuner(warmup=0, iters=1).tune(
            Invocation.of(RecurrentAttention(), **arrays, **options, platform="pallas"), validate_backward=True
        )
    assert tuned.config.platform == "pallas"
    assert tuned.record["measured"] == "forward+backward"


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
def test_vmap_is_one_larger_call(packed):
    case = small("mapped", gates=("g",), lengths=(5, 0, 15) if packed else None, initial_state=True)
    arrays, options = case.arguments()
    many = {name: jnp.stack([x, x[::-1], 2 * x]) if name == "value" else jnp.stack([x] * 3) for name, x in arrays.items()}

    def loss(function, arrays):
        output, state = function(**arrays, **options)
        return jnp.sum(output**2) + jnp.sum(state**2)

    with interpreted():
        got = jax.jit(jax.vmap(jax.grad(functools.partial(loss, recurrent))))(many)
    want = jax.jit(jax.vmap(jax.grad(functools.partial(loss, on_xla))))(many)
    assert all(relative_rms(got[name], want[name]) < 1e-5 for name in want)


@pytest.mark.long
def test_the_operation_by_name_and_under_scan_and_checkpoint():
    arrays, _ = small("named", gates=("g",), time=17).arguments()

    def step(carry, _):
        output = gla_attention(**{**arrays, "value": carry}, platform="pallas")
        return output, jnp.sum(output)

    def run(value):
        return jnp.sum(jax.lax.scan(jax.checkpoint(step), value, None, length=2)[1])

    with interpreted():
        got = jax.jit(jax.grad(run))(arrays["value"])
    wanted = jax.jit(jax.grad(lambda value: run_on_xla(arrays, value)))(arrays["value"])
    assert relative_rms(got, wanted) < 1e-5


def run_on_xla(arrays, value):
    total = jnp.zeros(())
    for _ in range(2):
        value = gla_attention(**{**arrays, "value": value}, platform="xla")
        total += jnp.sum(value)
    return total


def test_derivatives_that_the_kernels_do_not_have_say_so():
    with interpreted(), pytest.raises(TypeError, match="the pallas platform has reverse mode only"):
        jax.jvp(lambda value: recurrent(q, k, value)[0], (v,), (v,))


@pytest.mark.long
def test_a_traced_scale_and_a_nan_of_one_sequence():
    arrays, options = small("traced", gates=("g",), lengths=(7, 20), initial_state=True).arguments()
    spoilt = {**arrays, "value": arrays["value"].at[0, 2].set(jnp.nan)}
    with interpreted():
        run = jax.jit(lambda arrays, scale: recurrent(**arrays, **{**options, "softmax_scale": scale}))
        output, state = run(spoilt, 0.7)
    want, want_state = on_xla(**arrays, **{**options, "softmax_scale": 0.7})
    assert relative_rms(output[:, 7:], want[:, 7:]) < 2e-6
    assert relative_rms(state[1], want_state[1]) < 2e-6
    assert np.isnan(np.asarray(output[:, 2:7])).all()
