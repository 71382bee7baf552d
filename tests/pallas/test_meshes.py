"""Programs on several TPUs: what the kernels can be part of, and what they say of the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, PartitionSpec

from ejkernel import kernel_registry
from ejkernel._device import Device, on_device
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._pallas._chips import CHIPS
from ejkernel.modules import attention, gated_delta_rule, gla_attention

X = jnp.ones((1, 64, 2, 16), jnp.bfloat16)


def mesh(kind: AxisType):
    return jax.make_mesh((1,), ("data",), axis_types=(kind,))


def planned() -> AttentionProblem:
    return AttentionProblem.from_arguments(X, X, X, causal=True, dtype=None, return_weights=False)


def platform_here() -> str:
    with on_device(CHIPS["v5e"].device):
        return str(kernel_registry.select("attention", problem=planned()).platform)


def test_a_call_on_one_chip_takes_the_kernel():
    assert platform_here() == "pallas"


def test_arrays_that_xla_may_split_go_to_xla():
    with jax.set_mesh(mesh(AxisType.Auto)):
        assert platform_here() == "xla"
    with jax.set_mesh(mesh(AxisType.Explicit)):
        assert platform_here() == "pallas"


@pytest.mark.parametrize(
    "call",
    [lambda x: attention(x, x, x, platform="pallas"), lambda x: gated_delta_rule(x, x, x, x[..., 0], platform="pallas")],
    ids=["attention", "gated_delta_rule"],
)
def test_naming_the_platform_says_what_to_do(call):
    with on_device(CHIPS["v5e"].device), jax.set_mesh(mesh(AxisType.Auto)), pytest.raises(ValueError, match=r"data.*shard_map"):
        jax.eval_shape(call, X)


CALLS = {
    "attention": lambda x, **options: attention(x, x, x, **options),
    "gated_delta_rule": lambda x, **options: gated_delta_rule(x, x, x, x[..., 0], **options),
    "gla_attention": lambda x, **options: gla_attention(x, x, x, -x, **options),
    "packed": lambda x, **options: gla_attention(x, x, x, cu_seqlens=jnp.array([0, 5, 64]), **options),
}


@pytest.fixture
def eight_chips(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with on_device(CHIPS["v5e"].device):
        yield


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_under_jit_on_several_chips_calls_go_to_xla(call, eight_chips):
    """Nobody knows how their arrays will lie. What chooses and what runs must agree on that."""
    program = export.export(jax.jit(call), platforms=["tpu"])(X).mlir_module()
    assert "tpu_custom_call" not in program
    with pytest.raises(ValueError, match=r"8 devices.*explicit axes"):
        jax.eval_shape(lambda x: call(x, platform="pallas"), X)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arrays_on_one_of_several_chips_take_the_kernel(call, eight_chips):
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):  # it was taken
        call(X)


@pytest.mark.parametrize("operation", ["attention", "gated_delta_rule"])
def test_what_is_the_same_on_all_shards(operation):
    """Inside `shard_map` a kernel's results have a type, also where nothing is split."""
    calls = {
        "attention": lambda x: attention(x, x, x, dtype=None, return_weights=False, platform="pallas"),
        "gated_delta_rule": lambda x: gated_delta_rule(x, x, x, x[..., 0], platform="pallas"),
    }
    loss = lambda x: jnp.sum(calls[operation](x).astype(jnp.float32))
    for spec in (PartitionSpec(), PartitionSpec("data")):
        inside = jax.shard_map(jax.grad(loss), mesh=mesh(AxisType.Auto), in_specs=spec, out_specs=spec)
        with on_device(CHIPS["v5e"].device):
            assert jax.eval_shape(inside, X).shape == X.shape


def test_another_generation_is_refused():
    with on_device(Device("tpu", "TPU v3")):
        problem = planned()
        (entry,) = (e for e in kernel_registry.list_implementations("attention") if str(e.platform) == "pallas")
        assert "TPU v3" in (entry.refusal(problem) or "")
