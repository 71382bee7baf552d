"""Reading the TPU compiler's schedule, from a dump as it writes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.modules import gated_delta_rule
from ejkernel.testing.tpu_programs import CALLS, named, programs
from ejkernel.testing.tpu_schedules import Schedule, kernels_of, schedules

BEFORE = [
    "     0   :  { %s1 = inlined_call_operand.hbm [shape: bf16[8,16]] }",
    "   0x1   :  { %2 = vsyncpa [#allocation4], 0 }",
]
LOOP = [
    "   0x2 LB: > { %v3 = vld [vmem:[#allocation2]] }",
    "   0x3   : > { %v4 = vst [vmem:[#allocation9_spill]] %v3 }",
    "   0x4   : > { %5 = sbr.rel (%p1) target bundleno = 7 (0x7), region = 20 }",  # over what only a first chunk does
    "   0x5   : >> { %v6 = vadd %v3, %v3 }",
    "   0x6   : >> { %v7 = vadd %v6, %v3 }",
    *(f"   0x{n:x}   : > {{ %v{n} = vmul %v3, %v3 }}" for n in range(7, 20)),
    "   0x14   : > { %21 = sbr.rel (!%p2) target bundleno = 2 (0x2), region = 30 }",
]
AFTER = ["   0x15   :  { %22 = vsyncpa [#allocation4], 1 }"]
ALLOCATIONS = """
  #allocation1 [shape = 'u32[72,128]', space=vmem, size = 0x9000, scoped, tag = 'internal scratch']
  #allocation2 [shape = 'f32[4,128,128]', space=vmem, size = 0x40000, scoped, tag = 'scratch operand']
  #allocation3 [shape = 's32[1]', space=sflag, size = 0x4, scoped]
"""


def test_bundles_of_a_step_are_those_of_the_loop_that_most_steps_take():
    (found,) = schedules("\n".join([*BEFORE, *LOOP, *AFTER]), ALLOCATIONS)
    assert found == Schedule(way="", bundles=len(LOOP) - 3, spills=1, vmem=0x49000)


def test_a_step_takes_one_of_two_ways():
    bundle = lambda n, text: f"   0x{n:x}   : > {{ {text} }}"
    weak = [
        bundle(3, "%5 = sbr.rel (%p1) target bundleno = 9 (0x9), region = 20"),
        *(bundle(n, "%v = vmul") for n in range(4, 9)),
    ]
    strong = [bundle(9, "%6 = sbr.rel (%p2) target bundleno = 20 (0x14), region = 21")]
    strong += [bundle(n, "%v7 = vst [vmem:[#allocation9_spill]] %v3") for n in range(10, 20)]
    loop = ["   0x2 LB: > { %v3 = vld [vmem:[#allocation2]] }", *weak, *strong]
    loop += [bundle(20, "%21 = sbr.rel (!%p2) target bundleno = 2 (0x2), region = 30")]
    dump = "\n".join([*BEFORE, *loop, *AFTER])
    first, second = schedules(dump, ALLOCATIONS, ("weakly gated", "strongly gated"))
    assert (first.way, first.bundles, first.spills) == ("weakly gated", len(loop) - len(strong), 0)
    assert (second.way, second.bundles, second.spills) == ("strongly gated", len(loop) - len(weak), 10)


def test_a_grid_of_one_step_has_no_loop():
    (found,) = schedules("\n".join([*BEFORE, *AFTER]), ALLOCATIONS)
    assert found.bundles == 0x15 + 1


def test_steps_and_bytes_are_those_of_the_call():
    x = jax.ShapeDtypeStruct((2, 256, 8, 128), jnp.bfloat16)
    beta = jax.ShapeDtypeStruct((2, 256, 8), jnp.bfloat16)
    with interpreted(how=False):
        program = jax.make_jaxpr(lambda x, beta: gated_delta_rule(x, x, x, beta, platform="pallas"))(x, beta)
    ((name, steps, moved),) = kernels_of(program.jaxpr)
    assert (name, steps) == ("delta_rule_forward", 2 * (8 // 4) * (256 // 64))  # batch, blocks of four heads, chunks
    tokens, states = 4 * x.size * 2, 2 * (2 * 8 * 128 * 128 * 4)  # q, k, v, output; initial and final states
    assert tokens + states <= moved < 1.1 * (tokens + states)


def test_every_call_that_is_shown_has_kernels_for_tpus():
    assert all(named(call).candidates("v5e") for call in CALLS)
    assert {str(p).partition("-")[0] for p in programs("bfloat16")} <= {call.partition(":")[0] for call in CALLS}
    with pytest.raises(ValueError, match=r"a call must name an operation of .*; got 'nothing:g'"):
        named("nothing:g")
