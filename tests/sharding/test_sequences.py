"""Time split over the devices of a mesh: everything is that of the whole sequences, and only states travel."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.modules import GLAttentionConfig, gated_delta_rule, gla_attention
from ejkernel.ops.config.codec import from_fields, to_fields
from tests.sharding.sequences import TRITON, checks
from tests.triton.processes import outside

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}
COMPILED = [name for name in checks() if name not in TRITON]


@pytest.fixture(scope="module")
def compiled(once):
    return once("sequences", lambda: json.loads(outside("-m", "tests.sharding.sequences", *COMPILED, environment=EIGHT)))


@pytest.fixture(scope="module")
def interpreted(once):
    pytest.importorskip("triton", reason="the triton platform needs Triton")
    variables = {**EIGHT, "TRITON_INTERPRET": "1"}
    run = lambda: json.loads(outside("-m", "tests.sharding.sequences", *TRITON, environment=variables))
    return once("triton-sequences", run)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.long
def test_split_along_time(compiled, name):
    assert not compiled[name], compiled[name]


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.long
def test_split_along_time_on_triton(interpreted, name):
    assert not interpreted[name], interpreted[name]


@pytest.mark.long
def test_batch_and_heads_that_shard_map_leaves_alone():
    found = json.loads(outside("-m", "tests.sharding.left_alone", environment=EIGHT))
    assert not any(found.values()), "\n".join(found.values())


X = jnp.ones((1, 4, 2, 4))


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match=r"sequence_axis='sp' must name a mesh axis .* jax.shard_map"):
        gla_attention(X, X, X, sequence_axis="sp")
    with pytest.raises(ValueError, match="sequence_axis must be the name of a mesh axis, or None; got 3"):
        gated_delta_rule(X, X, X, X[..., 0], sequence_axis=3)
    mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens, local = P(None, "time"), lambda x: gla_attention(x, x, x, sequence_axis="sp")
    with pytest.raises(ValueError, match="splits over; here these are 'time'"):
        jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens)(X)


def test_offsets_are_those_of_the_whole_row():
    mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens = P(None, "sp")
    call = lambda offsets: lambda x: gla_attention(x, x, x, cu_seqlens=offsets, sequence_axis="sp")
    run = lambda offsets: jax.jit(jax.shard_map(call(offsets), mesh=mesh, in_specs=tokens, out_specs=tokens))(X)
    assert run([0, 3, 4]).shape == X.shape
    with pytest.raises(ValueError, match="cu_seqlens must end at the number of tokens, 4; got 3"):
        run([0, 1, 3])


@pytest.mark.parametrize("operation", ["gla", "delta"])
def test_derivatives_that_do_not_exist_say_so(operation):
    mesh = jax.sharding.AbstractMesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda x: gla_attention(x, x, x, sequence_axis="sp")
    if operation == "delta":
        local = lambda x: gated_delta_rule(x, x, x, x[..., 0], sequence_axis="sp")
    run = jax.shard_map(local, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    loss = lambda x: jnp.sum(jnp.sin(run(x)))
    assert jax.eval_shape(jax.grad(loss), X).shape == X.shape
    lowered = jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).trace(X)
    with pytest.raises(TypeError, match=r"forward-mode .* with sequence_axis does not exist.* platform='xla'"):
        lowered.lower()
    with pytest.raises(TypeError, match=r"gradient of a gradient of a call with sequence_axis .* platform='xla'"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)), X)


@pytest.mark.parametrize(("shards", "sends", "not_this"), [(8, "all_gather", "ppermute"), (16, "ppermute", "all_gather")])
def test_the_exchange_that_is_chosen(shards, sends, not_this):
    """Within a node of 8 each shard gets every map; where bytes weigh more than latencies, the steps."""
    mesh = jax.sharding.AbstractMesh((shards,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda x: gla_attention(x, x, x, sequence_axis="sp")
    run = jax.shard_map(local, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    text = str(jax.make_jaxpr(run)(jnp.ones((1, 2 * shards, 2, 4))))
    assert sends in text
    assert not_this not in text


def test_an_exchange_needs_an_axis():
    with pytest.raises(ValueError, match="exchange must be None where no sequence_axis splits time; got 'steps'"):
        gla_attention(X, X, X, cfg=GLAttentionConfig(exchange="steps"))
    with pytest.raises(ValueError, match="exchange must be None, 'gather' or 'steps'; got 'ring'"):
        GLAttentionConfig(exchange="ring")


def test_configurations_stored_before_there_was_an_exchange():
    fields = to_fields(GLAttentionConfig(block_q=32))
    del fields["exchange"]
    assert from_fields(GLAttentionConfig, fields) == GLAttentionConfig(block_q=32)


def test_the_short_convolution_of_the_page_is_that_of_the_whole_row():
    found = json.loads(outside("-m", "tests.sharding.convolution", environment=EIGHT))
    assert set(found) == {"whole", "packed", "borders", "one over all"}
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("operation", ["gla", "delta"])
def test_an_explicit_axis_over_time_names_both_ways_out(operation):
    mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P(None, "sp")))
        call = (lambda x: gla_attention(x, x, x)) if operation == "gla" else lambda x: gated_delta_rule(x, x, x, x[..., 0])
        with pytest.raises(ValueError, match=r"jax\.sharding\.reshard.* jax\.shard_map .*sequence_axis="):
            call(x)


@pytest.mark.long
def test_float64_where_no_dtype_is_promoted():
    """Offsets of both widths, both exchanges and recurrences: places along the axis are compared in one dtype."""
    found = outside("-m", "tests.sharding.strict", environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    assert found.split() == ["alike"]
