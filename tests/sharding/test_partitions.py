"""Batch and heads split over devices under `jit`: nothing is gathered, forward and backward, on any platform."""

from __future__ import annotations

import collections
import json
import re

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from tests.sharding.partitions import NAMES
from tests.triton.processes import outside

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}


@pytest.fixture(scope="module")
def found(once):
    variables = {**EIGHT, "TRITON_INTERPRET": "1"}
    return once("partitions", lambda: json.loads(outside("-m", "tests.sharding.partitions", environment=variables)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_split_over_eight_devices(found, name):
    assert not found[name], found[name]


# Partitioning happens when a program is compiled, for which there must be a GPU; what it is told stands in the lowered program.
SETUP = """
import functools, re
import jax, jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ejkernel.callib import compile_for
from ejkernel.kernels._cuda import attention
from ejkernel.kernels._triton import attention as flash, gated_delta_rule, recurrent
from ejkernel.modules import RecurrentAttentionConfig

fused_attention_stablehlo.check_cudnn_version = lambda: 91000  # which a machine without a GPU does not have
mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
TOKENS = P("b", None, "h")

def array(spec, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

def rules(call, *arrays):
    with compile_for(90):
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"CustomSPMDPartitioning.*?op_sharding_rule<(.*?) \\{", text)
"""
FORWARD = """
step = functools.partial(recurrent, cfg=RecurrentAttentionConfig("recurrent"))
call = lambda q, k, v, S: step(q, k, v, initial_state=S)
tokens = [array(TOKENS, 4, 1, heads, 64) for heads in (4, 2, 2)]
print(*rules(call, *tokens, array(P("b", "h"), 4, 4, 64, 64)))
soft = functools.partial(attention, causal=True)
print(len(rules(soft, *(array(TOKENS, 4, 128, heads, 64) for heads in (4, 2, 2)))))
"""


def test_a_program_for_gpus_says_how_its_calls_split():
    pytest.importorskip("jaxlib.gpu_triton", reason="lowering for CUDA needs JAX's CUDA plugin")
    rule, cudnn = outside("-c", SETUP + FORWARD, environment=EIGHT).splitlines()
    states, key, query, value, *results = re.findall(r"\[(.*?)\]", rule)
    letters = {name: text.split(", ") for name, text in {"S": states, "q": query, "k": key, "v": value}.items()}
    assert len({letters[name][0] for name in "Sqkv"}) == 1, "rows of the batch go together"
    assert letters["S"][1] == letters["q"][2]
    assert letters["k"][2] == letters["v"][2]
    places = {"q": (1, 3), "k": (1, 3), "v": (1, 3), "S": (2, 3)}
    alone = [letters[name][axis] for name, axes in places.items() for axis in axes]
    assert len({*alone, letters["q"][0], letters["q"][2], letters["k"][2]}) == len(alone) + 3, "no other axes are tied"
    final, output = (text.split(", ") for text in results)
    assert [output[0], output[2]] == [final[0], final[1]] == [letters["q"][0], letters["q"][2]]
    assert int(cudnn) == 1, "cuDNN's calls have JAX's own rule"


GRADIENTS = """
grad = lambda call: jax.grad(lambda *arrays: jnp.sum(call(*arrays)[0].astype(jnp.float32) ** 2), argnums=(0, 1, 2))
wide, narrow, gate = array(TOKENS, 4, 128, 4, 64), array(TOKENS, 4, 128, 2, 64), array(TOKENS, 4, 128, 4)
for call, arrays in (
    (lambda q, k, v, g: recurrent(q, k, v, g=g), (wide, narrow, narrow, gate)),
    (lambda q, k, v, g: gated_delta_rule(q, k, v, g, g=g), (narrow, narrow, wide, gate)),
    (lambda q, k, v: flash(q, k, v, causal=True, return_weights=False), (wide, narrow, narrow)),
):
    print(*rules(grad(call), *arrays), sep="; ")
"""


@pytest.mark.long
def test_gradients_for_gpus_say_how_their_calls_split():
    """Forward and backward: rows of the batch go together in every array, heads in those that have as many; nothing else."""
    pytest.importorskip("jaxlib.gpu_triton", reason="lowering for CUDA needs JAX's CUDA plugin")
    for line in outside("-c", SETUP + GRADIENTS, environment=EIGHT).splitlines():
        forward, backward = line.split("; ")
        for rule in (forward, backward):
            arrays = [text.split(", ") for text in re.findall(r"\[(.*?)\]", rule)]
            (batch,) = {array[0][0] for array in arrays}  # chunks, in the order of the batch, are its factor and one more
            met = collections.Counter(factor for array in arrays for factor in array)
            tied = {factor for factor, times in met.items() if times > 1} - {batch}
            heads = {array[2] for array in arrays if len(array) == 4}  # of [batch, time, heads, channels]
            assert len(tied) == 2, rule
            assert tied <= heads, rule
