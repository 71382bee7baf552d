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


X = jnp.ones((1, 4, 2, 4))


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match=r"sequence_axis='sp' must name a mesh axis .* jax.shard_map"):
        gla_attention(X, X, X, sequence_axis="sp")
    with pytest.raises(ValueError, match="sequence_axis must be the name of a mesh axis, or None; got 3"):
        gated_delta_rule(X, X, X, X[..., 0], sequence_axis=3)


def test_offsets_are_those_of_the_whole_row():
    mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    run = lambda offsets: jax.shard_map(
        lambda x: gla_attention(x, x, x, cu_seqlens=offsets, sequence_axis="sp"), mesh=mesh, in_specs=P(None, "sp"),
        out_specs=P(None, "sp"),
    )(X)  # fmt: skip
    assert run([0, 3, 4]).shape == X.shape
    with pytest.raises(ValueError, match="cu_seqlens must end at the number of tokens, 4; got 3"):
        run([0, 1, 3])


def test_an_exchange_needs_an_axis():
    with pytest.raises(ValueError, match="exchange must be None where no sequence_axis splits time; got 'steps'"):
        gla_attention(X, X, X, cfg=GLAttentionConfig(exchange="steps"))
    with pytest.raises(ValueError, match="exchange must be None, 'gather' or 'steps'; got 'ring'"):
        GLAttentionConfig(exchange="ring")


def test_configurations_stored_before_there_was_an_exchange():
    fields = to_fields(GLAttentionConfig(block_q=32))
    del fields["exchange"]
    assert from_fields(GLAttentionConfig, fields) == GLAttentionConfig(block_q=32)
