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
from tests.triton.processes import outside  # noqa: E402

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


def test_a_grid_of_numpy_integers():
    x = jnp.arange(40.0)
    for grid in (np.int64(2), (np.int32(2), 1), lambda constants: (np.int64(2),)):
        out = triton_call(x, None, 40, 2.0, kernel=scaled_sum, out_shape=x, grid=grid, B=32)
        np.testing.assert_array_equal(out, 2 * x)


def test_vmap_runs_each():
    x = jnp.arange(60.0).reshape(3, 20)
    np.testing.assert_array_equal(jax.vmap(lambda row: call(row, row))(x), 4 * x)


def test_without_jit():
    x = jnp.arange(60.0).reshape(3, 20)
    with jax.disable_jit():
        np.testing.assert_array_equal(call(x[0], x[0]), 4 * x[0])
        np.testing.assert_array_equal(jax.vmap(lambda row: call(row, row))(x), 4 * x)


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.debug_infs])
def test_what_no_program_writes_is_no_nan_to_look_for(setting):
    out_shape = jax.ShapeDtypeStruct((60,), jnp.float32)
    run = lambda x: triton_call(x, None, 40, 2.0, kernel=scaled_sum, out_shape=out_shape, grid=2, B=32)
    assert jnp.isnan(run(jnp.ones(40))[40:]).all()
    with setting(True):
        np.testing.assert_array_equal(jax.jit(run)(jnp.ones(40)), [2.0] * 40 + [0.0] * 20)


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


@triton.heuristics({"B": lambda args: triton.next_power_of_2(args["n"]), "EVEN": lambda args: args["n"] % args["B"] == 0})
@triton.jit
def doubled(x, n, out, B: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        tl.store(out + i, 2 * tl.load(x + i))
    else:
        tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def twice(x, **options):
    grids = {"grid": lambda constants: cdiv(x.size, constants["B"])}  # a grid sees what the heuristics said
    return triton_call(x, x.size, kernel=doubled, out_shape=x, **{**grids, **options})


@pytest.mark.parametrize("size", [5, 16])
def test_heuristics_are_evaluated(size):
    x = jnp.arange(float(size))
    np.testing.assert_array_equal(twice(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(twice)(x), 2 * x)


def test_heuristics_read_shapes_dtypes_and_what_is_missing():
    seen = []

    def note(args):
        seen.append((args["x"].shape, args["out"].dtype, args["y"] is None, args["factor"], args["B"]))
        return 8

    noted = triton.heuristics({"num_warps": note})(scaled_sum)
    x = jnp.arange(4.0)
    run = lambda x: triton_call(x, None, 4, 3.0, kernel=noted, out_shape=x, grid=1, B=4)
    np.testing.assert_array_equal(jax.jit(run)(x), 3 * x)
    assert seen == [((4,), jnp.float32, True, 3.0, 4)]


def test_a_constant_that_a_heuristic_gives_is_refused():
    with pytest.raises(TypeError, match=r"B comes from @triton.heuristics; leave it out, or pass kernel\.fn"):
        twice(jnp.ones(4), B=8)


@pytest.mark.parametrize("over", [lambda kernel: kernel, triton.heuristics({"B": lambda args: 4})])
def test_a_kernel_that_triton_would_tune_is_refused_with_what_to_pass(over):
    configs = [triton.Config({"B": size}, num_warps=2, num_stages=4) for size in (16, 32)]
    tuned = over(triton.autotune(configs, key=["n"])(scaled_sum))
    x = jnp.ones(4)
    says = r"scaled_sum is under @triton.autotune.*one of its 2 .*kernel=scaled_sum.fn, B=16, num_warps=2, num_stages=4\)"
    with pytest.raises(TypeError, match=says):
        triton_call(x, None, 4, 1.0, kernel=tuned, out_shape=x, grid=1)
    if tuned.fn is scaled_sum:
        np.testing.assert_array_equal(
            triton_call(x, None, 4, 2.0, kernel=tuned.fn, out_shape=x, grid=1, B=16, num_warps=2), 2 * x
        )


def test_the_name_is_in_the_program():
    lowered = lambda **options: jax.jit(lambda x: call(x, None, **options)).lower(jnp.ones(4)).as_text(debug_info=True)
    assert "scaled_sum/interpreted_triton_kernel" in lowered()
    assert "gate sums/interpreted_triton_kernel" in lowered(name="gate sums")


@pytest.mark.parametrize("name", ["", " ", 3])
def test_a_name_that_no_profile_could_show_is_refused(name):
    with pytest.raises(TypeError, match="name must be a string"):
        call(jnp.ones(4), None, name=name)


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match=r"kernel must be a @triton.jit function; got function"):
        triton_call(jnp.ones(4), kernel=call, out_shape=jnp.ones(4), grid=1)


COMPILED = """
import pathlib, subprocess, sys
import jax, jax.numpy as jnp, triton
from ejkernel.callib import _compiled, compile_for, triton_call
from tests.callib.test_triton_call import scaled_sum

warps = []
def kernel(args):
    warps.append(args["n"])
    return 8
tuned = triton.heuristics({"num_warps": kernel})(scaled_sum)
made, plugin = [], _compiled._plugin()
class Plugin:
    def __getattr__(self, name):
        return getattr(plugin, name)
    def TritonKernel(self, *given):
        made.append(given)
        return plugin.TritonKernel(*given)
_compiled._plugin = Plugin
f = lambda x: triton_call(x, None, 5, 2.0, kernel=tuned, out_shape=x, grid=1, B=32, name="9 gate sums/chunk")
with compile_for(90):
    text = jax.jit(f).trace(jnp.ones(5)).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
(symbol, num_warps, _, _, ptx, _, _), = made
assert (symbol, num_warps, warps) == ("_9_gate_sums_chunk", 8, [5]), made[0][:2]
assert ptx.count(".entry _9_gate_sums_chunk(") == ptx.count(".entry ") == 1
assert "9 gate sums/chunk/" in text
from triton.backends.nvidia.compiler import get_ptxas
folder = pathlib.Path(sys.argv[1])
(folder / "k.ptx").write_text(ptx)
assembled = [get_ptxas(90).path, "-v", "-arch=sm_90a", folder / "k.ptx", "-o", folder / "k.bin"]
print(subprocess.run(assembled, check=True, capture_output=True, text=True).stderr)
"""


def test_compiled_the_name_is_the_functions_symbol(tmp_path):
    gpu_triton = pytest.importorskip("jaxlib.gpu_triton")
    if not hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("needs JAX's CUDA plugin (make setup installs it)")
    assert "'_9_gate_sums_chunk' for 'sm_90a'" in outside("-c", COMPILED, str(tmp_path))


@pytest.mark.parametrize(("capability", "num_stages", "STAGES"), [(90, 3, 2), (80, 2, 2), (89, 1, 1), (130, 1, 1)])
def test_as_many_stages_as_the_gpu_has_room_for(monkeypatch, capability, num_stages, STAGES):
    compiled = _pretend_to_compile(monkeypatch, bytes_per_stage=60_000)
    options = _compiled.Options(4, 3, None, shrink_stages=True)
    _compiled.compile_to_fit(scaled_sum, (), {"B": 32, "STAGES": 2}, options, capability)
    assert compiled[-1] == (num_stages, STAGES)


@pytest.mark.parametrize(("shrink_stages", "needed"), [(True, 120_000), (False, 360_000)])
def test_too_little_shared_memory_is_said(monkeypatch, shrink_stages, needed):
    _pretend_to_compile(monkeypatch, bytes_per_stage=120_000)
    options = _compiled.Options(4, 3, None, shrink_stages)
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
