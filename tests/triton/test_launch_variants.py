"""benchmarks/launch_variants_gpu.py: its variants change launches of the calls that they name, and of nothing afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, device_of, on_device
from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._triton import gated_delta_rule, recurrent
from ejkernel.testing import delta_gpu, linear_gpu
from ejkernel.testing.launch_variants import VARIANTS, launched

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="where there is a GPU, the benchmark itself runs")
H200 = Device("gpu", "NVIDIA H200", 90)
CALLS = [
    pytest.param(variant, call, id=f"{variant.kernel}-{variant.name}-{call[1]}-{call[2]}")
    for variant in VARIANTS
    for call in variant.calls
]


def launches(family: str, shape: str, gate: str) -> list[Launch]:
    """What a call and its gradient launch on an H200."""
    rows = {"linear": linear_gpu, "delta": delta_gpu}[family]
    arrays = jax.eval_shape(lambda: rows.inputs(shape, gate.partition(",")[0])[0])
    gamma = {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items() if name == "g_gamma"}
    cu_seqlens = jnp.arange(17, dtype=jnp.int32) * 2048 if shape.startswith("packed") else None
    solve = {"linear": recurrent, "delta": gated_delta_rule}[family]
    found: list[Launch] = []

    def both(arrays):
        out, pull = jax.vjp(lambda arrays: solve(**arrays, **gamma, cu_seqlens=cu_seqlens)[0], arrays)
        return pull(out)

    with on_device(H200), instead_of_launching(found.append):
        jax.eval_shape(both, {name: x for name, x in arrays.items() if name not in gamma})
    jax.clear_caches()
    return found


@pytest.mark.parametrize(("variant", "call"), CALLS)
def test_a_variant_changes_a_launch(variant, call):
    usual = launches(*call)
    with launched(variant) as changed:
        so = launches(*call)
    assert changed
    assert [x.name for x in so] == [x.name for x in usual]
    known = lambda launch: (launch.grid, launch.constants, launch.options)
    different = {new.name for new, old in zip(so, usual, strict=True) if known(new) != known(old)}
    assert different == {variant.kernel}
    assert [known(x) for x in launches(*call)] == [known(x) for x in usual]
