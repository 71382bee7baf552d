"""What the operations become in a program for an NVIDIA GPU, on a machine without one."""

import json
import re

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from tests.triton.processes import outside

LOWER = """
import json, sys
import jax, jax.numpy as jnp
from ejkernel.testing.triton_calls import arguments
from ejkernel.callib import compile_for
from ejkernel.kernels._triton.lightning_attn import lightning_attn
from ejkernel.kernels._triton import recurrent
from ejkernel.kernels._triton.recurrent_gla import recurrent_gla

def lower(f, *args, **options):
    with compile_for(90):
        return jax.jit(f, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

def gradient(operation, gates, K=64, V=64, **options):
    loss = lambda a: sum(x.astype(jnp.float32).sum() for x in operation(**a, **options))
    return lower(jax.grad(loss), arguments(gates, K, V, "bfloat16"))

step = {n: jax.ShapeDtypeStruct((x.shape[0], 1, *x.shape[2:]), x.dtype) for n, x in arguments((), 64, 64, "bfloat16").items()}
state = arguments((), 64, 64, "bfloat16")["initial_state"]
step.pop("initial_state")
PROGRAMS = {
    # as in test_compiled.py: compiled once
    "recurrent": lambda: gradient(recurrent, ("gk", "gv"), K=128, V=96),
    "gla": lambda: gradient(recurrent_gla, ("g",)),
    "lightning": lambda: gradient(lightning_attn, (), layer_idx=1, num_layers=4),
    "mapped": lambda: lower(jax.vmap(lambda a: recurrent(**a)), {
        n: jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for n, x in arguments(("gk",), 64, 64, "bfloat16").items()}),
    "decode": lambda: lower(lambda a, S: recurrent(**a, initial_state=S), step, state, donate_argnums=1),
}
print(json.dumps({name: PROGRAMS[name]() for name in sys.argv[1:]}))
"""


def lowered(*names: str) -> dict[str, str]:
    gpu_triton = pytest.importorskip("jaxlib.gpu_triton")
    if not hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("needs JAX's CUDA plugin (make setup installs it)")
    return json.loads(outside("-c", LOWER, *names))


@pytest.fixture(scope="module")
def programs():
    return lowered("recurrent", "gla", "lightning", "mapped")


def kernels(program: str) -> list[str]:
    return re.findall(r"stablehlo\.custom_call @triton_kernel_call_ffi.*", program)


@pytest.mark.long  # two minutes where Triton has not compiled these kernels before
@pytest.mark.parametrize(("operation", "least"), [("recurrent", 7), ("gla", 4), ("lightning", 3)])
def test_operations_lower_to_triton_calls(programs, operation, least):
    assert len(kernels(programs[operation])) >= least


def test_decoding_writes_the_donated_state_in_place():
    program = lowered("decode")["decode"]
    (step,) = kernels(program)
    assert re.search(r"output_operand_alias<output_tuple_indices = \[1\],\s*operand_index = 3", step), step
    assert re.search(r"%arg\d+: tensor<2x4x64x64xf32> \{[^}]*tf.aliasing_output = 1", program)
