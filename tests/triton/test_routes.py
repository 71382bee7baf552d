"""Which route a call takes: decided once, the same for forward, backward and candidates, and shown in the docs as it is."""

import dataclasses
import importlib.util
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device
from ejkernel.callib import shared_memory_of
from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._triton._recurrence import MAX_STEPS, MOST
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from ejkernel.kernels._triton.linear._plan import GATES, Plan
from ejkernel.kernels._triton.linear._platform import TritonLinear
from ejkernel.kernels._triton.linear._solve import gradients_along
from ejkernel.kernels._triton.linear.routes import ROUTES, route_of
from ejkernel.kernels._triton.linear.routes.scans import WIDE_SHARED
from tests.triton.processes import ROOT, outside

TRITON = TritonLinear()
EVERY_GATE = [gates for n in range(5) for gates in itertools.combinations(GATES, n)]
DTYPES = ["bfloat16", "float16", "float32"]
CHANNELS = [(16, 16), (24, 40), (64, 64), (100, 36), (128, 128), (140, 72), (256, 512), (512, 320)]
LENGTHS = [MAX_STEPS, 20, 60, 2048]  # a few steps; chunks of 32 and of 64 rows
CAPABILITIES = [80, 89, 90, 120]


def problem(gates, K, V, T, dtype="bfloat16", packed=False, capability=90, dtypes=(), heads=2):
    """A call as shapes."""
    N = 3 if packed else 1
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    gate = {"g": of(1, T, heads), "g_gamma": of(N, heads), "gk": of(1, T, heads, K), "gv": of(1, T, heads, V)}
    arrays = {"query": of(1, T, heads, K), "key": of(1, T, heads, K), "value": of(1, T, heads, V)}
    arrays |= {name: gate[name] for name in gates} | dict(dtypes)
    if packed:
        arrays["cu_seqlens"] = of(N + 1, dtype="int32")
    return LinearProblem(**arrays, device=Device("gpu", "a GPU", capability))


def expected(plan: Plan) -> str:
    """The route by the words of the documentation, beside the code that chooses it."""
    chunks_of_64 = plan.operand == jnp.bfloat16 and plan.C == 64
    wide = ", wide tiles" if 128 < plan.K <= 256 and plan.V > 64 and plan.shared >= WIDE_SHARED else ""
    if plan.gates <= {"g", "g_gamma"}:
        if (128 if plan.operand == jnp.bfloat16 else 64) >= plan.K:
            return "head gate"
        return f"head gate, wide keys{wide}" if chunks_of_64 and plan.K <= 256 else "head gate, stored states"
    if chunks_of_64 and "gv" not in plan.gates and plan.K <= 256:
        return f"key gate{wide}"
    if chunks_of_64 and {"gk", "gv"} <= plan.gates:
        return "key and value gate" + (", outputs in the scan" if 16 < plan.K <= 128 and plan.shared >= WIDE_SHARED else "")
    return "general"


@pytest.mark.parametrize("gates", EVERY_GATE, ids=lambda gates: "+".join(gates) or "none")
def test_every_call_has_one_route(gates):
    """Forward, gradient and candidates agree on it, for every dtype, size, length, packing and device."""
    for (K, V), T, dtype, capability, packed in itertools.product(CHANNELS, LENGTHS, DTYPES, CAPABILITIES, (False, True)):
        call = problem(gates, K, V, T, dtype, packed, capability)
        assert TRITON.supports(call) is None
        first, *others = found = TRITON.candidates(call)
        assert first == TRITON.heuristic(call)
        assert len(set(found)) == len(found) <= MOST
        for cfg in found:
            assert TRITON.refuses(call, cfg) is None, cfg
        plan = Plan.of(call, first)
        assert plan.shared == shared_memory_of(capability)
        route = route_of(plan)
        assert route == route_of(Plan.of(call, first))  # static data: the same call is not compiled twice
        assert hash(route) == hash(route_of(Plan.of(call, first)))
        name = expected(plan)
        assert route.name == TRITON.route(call, first) == (f"decode step (gradient: {name})" if T <= MAX_STEPS else name)
        for asked in (False, True):
            differentiated = route.differentiated(constant_decay=asked)
            assert differentiated.plan == plan
            by_scans = "gradient by three scans" in differentiated.name
            assert by_scans == (name == "head gate" and "g" not in gates and not asked and limit(plan) >= V)
            assert by_scans or differentiated == route
        assert all(route_of(Plan.of(call, cfg)).plan.gates == plan.gates for cfg in others)


def limit(plan: Plan) -> int:
    return 128 if plan.operand == jnp.bfloat16 else 64


CASES = [
    ((), 64, 64), ((), 128, 160), (("g",), 64, 64), (("g", "g_gamma"), 256, 128), (("g_gamma",), 300, 64), (("gk",), 64, 64),
    (("g", "gk"), 256, 128), (("gk", "gv"), 64, 64), (("g", "gk", "gv"), 256, 64), (("g_gamma", "gv"), 64, 64),
]  # fmt: skip


@pytest.mark.parametrize(("gates", "K", "V"), CASES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_gradient_finds_what_the_forward_pass_has_kept(gates, K, V, packed):
    """For every route of a call that a configuration can lead to: by chunks and step by step."""
    for schedule, block_q, capability in (("chunked", 64, 90), ("chunked", 64, 80), ("chunked", 32, 90), ("recurrent", 64, 90)):
        call = problem(gates, K, V, 1200, packed=packed, capability=capability)
        arrays, route = arrays_of(call), route_of(Plan.of(call, LinearConfig(schedule=schedule, block_q=block_q)))
        found = launches(route, arrays, call.cu_seqlens)
        assert found.forward
        assert found.backward
        grads = jax.eval_shape(lambda a, c, r=route: gradients(r, a, c), arrays, call.cu_seqlens)
        assert {n: (x.shape, x.dtype) for n, x in grads.items()} == {n: (x.shape, x.dtype) for n, x in arrays.items()}


def gradients(route, arrays, cu_seqlens):
    from ejkernel.callib import instead_of_launching
    from ejkernel.kernels._triton.linear._call import Call

    route = route.differentiated(constant_decay=True)
    with instead_of_launching(lambda launch: None):
        output, final, saved = route.forward(Call.of(route.plan, arrays, cu_seqlens), True)
        return gradients_along(route, arrays, cu_seqlens, saved, output, final)


def test_every_route_is_taken_by_some_call():
    taken = set()
    for gates, (K, V), dtype in itertools.product(EVERY_GATE, CHANNELS, DTYPES):
        for T in (1, 2048):
            call = problem(gates, K, V, T, dtype)
            route = route_of(Plan.of(call, TRITON.heuristic(call)))
            taken |= {type(route), type(route.differentiated(constant_decay=False))}
    assert taken == set(ROUTES)


def test_the_page_shows_what_the_code_does():
    spec = importlib.util.spec_from_file_location("routes_table", ROOT / "docs/routes_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text(encoding="utf-8")
    assert text == module.page(text), "docs/routes.md is stale: python docs/routes_table.py"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cpu", "cpu"), None),  # interpreted
        (Device("gpu", "NVIDIA H200", 90), None),
        (Device("gpu", "NVIDIA A100", 80), None),
        (Device("gpu", "Tesla V100", 70), "compute capability 8.0 or newer; Tesla V100 (gpu) has 7.0"),
    ],
    ids=str,
)
def test_devices(device, reason):
    found = TRITON.supports(dataclasses.replace(problem(("g",), 64, 64, 100), device=device))
    assert found is None if reason is None else reason in found


NO_GPU = """
from ejkernel._device import Device
from tests.triton.test_routes import TRITON, problem
import dataclasses
call = problem(("g",), 64, 64, 100)
for device in (Device("cpu", "cpu"), Device("gpu", "AMD Instinct MI300X")):
    print(TRITON.supports(dataclasses.replace(call, device=device)))
"""


def test_compiled_kernels_need_an_nvidia_gpu():
    first, second = outside("-c", NO_GPU).splitlines()
    assert first.endswith("need an NVIDIA GPU of compute capability 8.0 or newer; cpu is none")
    assert second.endswith("AMD Instinct MI300X (gpu) is none")


@pytest.mark.parametrize("name", ["query", "gv"])
def test_what_no_kernel_takes(name):
    with jax.enable_x64(True):
        wide = problem(("gv",), 64, 64, 100, dtypes={name: jax.ShapeDtypeStruct((1, 100, 2, 64), np.dtype("float64"))})
    assert "float64 is for platform='xla'" in TRITON.supports(wide)
    assert "up to 512; got 64 and 600" in TRITON.supports(problem((), 64, 600, 100))
    size = jax.export.symbolic_shape("t")[0]
    assert "platform='xla' takes those" in TRITON.supports(problem((), 64, 64, size))


def test_block_q_is_refused_before_it_raises():
    call = problem(("gk",), 64, 64, 2000)
    for block_q in (1, 8, 256, 1024):
        assert f"got {block_q}" in TRITON.refuses(call, LinearConfig(block_q=block_q))


TOO_LARGE = """
from ejkernel.kernels._linear import LinearConfig
from tests.triton.test_routes import TRITON, problem
for capability, stages in ((86, 6), (90, 3)):
    call = problem(("g_gamma",), 128, 128, 70, capability=capability)
    print(TRITON.refuses(call, LinearConfig(num_stages=stages)))
"""


def test_tiles_that_do_not_fit_are_refused():
    small, large = outside("-c", TOO_LARGE).splitlines()
    assert "bytes of shared memory with these tiles; a GPU of compute capability 8.6 has" in small
    assert large == "None"


def test_versions():
    import triton

    assert TRITON.versions() == {"triton": triton.__version__}
