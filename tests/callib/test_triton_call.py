"""`triton_call`, interpreted: arguments, outputs, aliases, errors. Compiled: see tests/triton/test_compiled.py."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the triton platform needs Triton")
import triton.language as tl  # noqa: E402

from ejkernel.callib import _compiled, cdiv, triton_call  # noqa: E402

ROOT = Path(__file__).parents[2]


@triton.jit
def scaled_sum(x, y, n, factor, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.load(x + i, mask=i < n).to(tl.float32)
    if y is not None:
        total += tl.load(y + i, mask=i < n).to(tl.float32)
    tl.store(out + i, (factor * total).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def product(a, b, out, B: tl.constexpr):
    r = tl.arange(0, B)
    tile = r[:, None] * B + r[None, :]
    tl.store(out + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))


@triton.jit
def count_up(x, n, out, hits, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
    tl.atomic_add(hits, 1)


def call(x, y, factor=2.0, **options):
    n = x.size
    return triton_call(
        x, y, n, factor, kernel=scaled_sum, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=cdiv(n, 32), B=32, **options
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_arrays_scalars_and_none(dtype):
    x = jnp.arange(100).astype(dtype)
    np.testing.assert_array_equal(call(x, x, 0.5), x)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, None))(x), 2 * x)


def test_vmap_runs_each():
    x = jnp.arange(60.0).reshape(3, 20)
    np.testing.assert_array_equal(jax.vmap(lambda row: call(row, row))(x), 4 * x)


def test_bfloat16_dot():
    a, b = (jax.random.normal(jax.random.key(i), (16, 16)).astype(jnp.bfloat16) for i in range(2))
    got = triton_call(a, b, kernel=product, out_shape=jax.ShapeDtypeStruct((16, 16), jnp.float32), grid=1, B=16)
    np.testing.assert_allclose(got, a.astype(jnp.float32) @ b.astype(jnp.float32), rtol=1e-5, atol=1e-5)


@triton.jit
def narrowed(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


def test_bfloat16_is_rounded_to_the_nearest():
    x = jnp.asarray([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-7.9, -0.1, 1e-40, 3e38, jnp.inf])
    out = triton_call(x, kernel=narrowed, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), grid=1, B=8)
    np.testing.assert_array_equal(out.astype(jnp.float32), np.asarray(x).astype(jnp.bfloat16).astype(np.float32))


def test_unwritten_elements_are_nan():
    x = jnp.ones(40)
    out = triton_call(x, None, 10, 1.0, kernel=scaled_sum, out_shape=jax.ShapeDtypeStruct((40,), jnp.float32), grid=1, B=32)
    assert np.isfinite(out[:10]).all()
    assert np.isnan(out[10:]).all()


def test_aliases_and_zeroed_outputs():
    x = jnp.arange(8.0)
    shapes = (jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32))
    out, hits = triton_call(
        x, 4, kernel=count_up, out_shape=shapes, grid=3, B=4, input_output_aliases={0: 0}, zeroed_outputs=(1,)
    )
    np.testing.assert_array_equal(out, [1, 2, 3, 4, 4, 5, 6, 7])  # beyond n the aliased input shows through
    assert hits[0] == 3
    np.testing.assert_array_equal(x, np.arange(8.0))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"C": 1}, TypeError, "has no parameter C"),
        ({"input_output_aliases": {1: 0}}, TypeError, "input_output_aliases must map an array argument"),
        ({"zeroed_outputs": (1,)}, TypeError, "zeroed_outputs must name outputs 0 to 0"),
    ],
)
def test_errors_name_the_mistake(change, error, says):
    with pytest.raises(error, match=says):
        call(jnp.ones(4), None, **change)


def test_wrong_counts_and_grids():
    x = jnp.ones(4)
    out = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(TypeError, match="needs 5 arguments and outputs"):
        triton_call(x, kernel=scaled_sum, out_shape=out, grid=1, B=4)
    with pytest.raises(ValueError, match="grid must be"):
        triton_call(x, None, 4, 1.0, kernel=scaled_sum, out_shape=out, grid=0, B=4)
    with pytest.raises(TypeError, match="arrays, numbers and None; got str"):
        triton_call("x", None, 4, 1.0, kernel=scaled_sum, out_shape=out, grid=1, B=4)


@pytest.mark.parametrize(("capability", "num_stages", "STAGES"), [(90, 3, 2), (80, 2, 2), (89, 1, 1), (130, 1, 1)])
def test_as_many_stages_as_the_gpu_has_room_for(monkeypatch, capability, num_stages, STAGES):
    compiled = _pretend_to_compile(monkeypatch, bytes_per_stage=60_000)
    options = _compiled.Options(4, 3, None, fewer_stages=True)
    _compiled.compile_to_fit(scaled_sum, (), {"B": 32, "STAGES": 2}, options, capability)
    assert compiled[-1] == (num_stages, STAGES)


@pytest.mark.parametrize(("fewer_stages", "needed"), [(True, 120_000), (False, 360_000)])
def test_too_little_shared_memory_is_said(monkeypatch, fewer_stages, needed):
    _pretend_to_compile(monkeypatch, bytes_per_stage=120_000)
    options = _compiled.Options(4, 3, None, fewer_stages)
    with pytest.raises(RuntimeError, match=rf"scaled_sum needs {needed} bytes .* capability 8.9 has 101376.* smaller tiles"):
        _compiled.compile_to_fit(scaled_sum, (), {"B": 32}, options, 89)


def _pretend_to_compile(monkeypatch, bytes_per_stage: int) -> list[tuple[int, int]]:
    """Programs that take so much shared memory; gives (num_stages, STAGES) of each that is asked for."""
    asked = []

    def compile_kernel(kernel, signature, constants, options, capability):
        asked.append((options.num_stages, dict(constants).get("STAGES", 1)))
        return SimpleNamespace(metadata=SimpleNamespace(shared=bytes_per_stage * max(asked[-1])))

    monkeypatch.setattr(_compiled, "compile_kernel", compile_kernel)
    return asked


def test_cdiv():
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores for its threads
import jax, jax.numpy as jnp
from ejkernel.callib import triton_call
from tests.callib.test_triton_call import scaled_sum

@jax.jit
def f(x):
    for _ in range(2):
        out = triton_call(x, x, 32, 0.5, kernel=scaled_sum, out_shape=x, grid=1, B=32)
        x = jnp.sin(jnp.nan_to_num(out)) @ jnp.eye(64)
    return x

x = jnp.ones((1000, 64))  # 256 KB
for _ in range(50):
    f(x), f(x + 1).block_until_ready()  # the second waits for its argument, hence runs on one of JAX's threads
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_large_arrays_on_a_single_thread():
    """The host's copies must not wait for threads that wait for the host (see _interpreted.py)."""
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True, timeout=30, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "done\n"
