"""Prints for each kernel of softmax attention, with a mask and with a bias, how many loads of tiles its loops wait for.

What Triton copies ahead is no `tt.load` in a loop's body any more. Run in a process of its own, where kernels are compiled.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp

from ejkernel._device import Device, on_device
from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._triton.attention._launches import backward, forward
from ejkernel.kernels._triton.attention._plan import Plan
from ejkernel.kernels._triton.attention._platform import HEURISTIC

IN_A_LOOP = re.compile(r"^ {6,}.* = tt\.load .*tensor<\d\d+x\d\d+x!tt\.ptr")


def loads(plane: str) -> dict[str, int]:
    """By the names of the kernels that a call with this plane launches."""
    B, T, H, D = 2, 1000, 2, 64
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    arrays = {"query": of(B, T, H, D), "key": of(B, T, H, D), "value": of(B, T, H, D)}
    arrays |= {"bias": of(1, H, T, T)} if plane == "bias" else {}
    others = {"mask": of(B, 1, T, T, dtype=jnp.bool_)} if plane == "mask" else {}
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        plan = Plan.of(AttentionProblem(**arrays, **others, right=0), HEURISTIC)
    seen: list[Launch] = []
    with instead_of_launching(seen.append):
        output, lse = jax.eval_shape(functools.partial(forward, plan), arrays, others)
        jax.eval_shape(functools.partial(backward, plan), arrays, others, output, lse, output)
    code = {launch.name: launch.compile(90).asm["ttgir"] for launch in seen}
    return {name: sum(map(bool, map(IN_A_LOOP.match, text.splitlines()))) for name, text in code.items()}


if __name__ == "__main__":
    print(json.dumps({plane: loads(plane) for plane in ("mask", "bias")}))
