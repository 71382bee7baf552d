"""The kernels by warpgroups: which calls take them, and what they are compiled to.

Their values: test_warpgroups_interpreted.py on the host, test_gpu.py and test_delta.py on a GPU."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.callib import Launch, compile_for, instead_of_launching
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import recurrent
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule.routes import route_of as route_of_delta
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.kernels._triton.linear.routes.head_gate import MANY_SEGMENTS
from tests.triton.processes import outside
from tests.triton.test_delta import TRITON
from tests.triton.test_delta import problem as delta_problem
from tests.triton.test_routes import problem

CHANNELS = [(64, 64), (64, 128), (128, 64), (128, 128)]


def scans(gates, K, V, cfg=None, **of_problem) -> set[str]:
    """The scans with outputs that a call launches, forward and backward."""
    call = problem(gates, K, V, 2000, **of_problem)
    found = launches(route_of(Plan.of(call, cfg or LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in (*found.forward, *found.backward) if launch.name.startswith("head_gate_scan")}


@pytest.mark.parametrize("gates", [(), ("g",), ("g_gamma",), ("g", "g_gamma")], ids=lambda gates: "+".join(gates) or "none")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_scan_of_whole_tiles_on_hopper(gates, packed):
    for K, V in CHANNELS:
        assert scans(gates, K, V, packed=packed) == {"head_gate_scan_by_warpgroups"}


def test_all_others_by_the_portable_kernel():
    portable = {"head_gate_scan"}
    assert scans(("g",), 100, 64) == portable
    assert scans(("g",), 128, 36) == portable
    assert scans(("g",), 64, 64, dtype="float16") == portable
    for capability in (80, 89, 100, 120):
        assert scans(("g",), 128, 128, capability=capability) == portable
    for cfg in (LinearConfig(block_q=32), LinearConfig(block_d=32), LinearConfig(num_warps=8), LinearConfig(num_stages=2)):
        assert scans(("g",), 128, 128, cfg) == portable


def key_gate_launches(K, V, tokens=2000, gates=("gk",), cfg=None, **of_problem) -> set[str]:
    """The kernels of a call with a gate per key channel that are for Hopper alone."""
    call = problem(gates, K, V, tokens, **of_problem)
    found = launches(route_of(Plan.of(call, cfg or LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in (*found.forward, *found.backward)} & {
        "key_gate_scan_by_warpgroups", "key_gate_segment_ends",
    }  # fmt: skip


def test_weakly_gated_segments_of_a_key_gate_on_hopper():
    scan, ends = {"key_gate_scan_by_warpgroups"}, {"key_gate_segment_ends"}
    for K, V in CHANNELS:
        assert key_gate_launches(K, V, tokens=200) == scan  # one segment
        assert key_gate_launches(K, V, tokens=16384) == scan | ends
        assert key_gate_launches(K, V, packed=True) == scan | ends


SCANS = {"gk": "key_gate_scan_by_warpgroups", "g_gamma": "head_gate_scan_by_warpgroups"}


def launched(run, *shapes, gate, tokens=16384, heads=2, packed=False) -> list[Launch]:
    """What `run(solve, arrays, *shapes)` launches on an H200; solve gives the output of (arrays)."""
    arrays = {name: jax.ShapeDtypeStruct((1, tokens, heads, 128), jnp.bfloat16) for name in ("query", "key", "value")}
    arrays |= {"gk": arrays["key"]} if gate == "gk" else {}
    cu_seqlens = jax.ShapeDtypeStruct((3,), jnp.int32) if packed else None
    constant = {} if gate == "gk" else {"g_gamma": jnp.full(heads, -0.1)}

    def traced(arrays, cu_seqlens, *shapes):
        solve = lambda arrays: recurrent(**arrays, **constant, cu_seqlens=cu_seqlens)[0]
        return run(solve, arrays, *shapes)

    seen: list[Launch] = []
    with compile_for(90), instead_of_launching(seen.append):
        jax.clear_caches()
        jax.eval_shape(traced, arrays, cu_seqlens, *shapes)
    return seen


def lengths(launches: list[Launch], name: str, rows: int | None = None) -> list[int]:
    """Chunks of a segment, of every launch of a kernel; those of so many rows of a batch, where `rows` says."""
    given = [dict(zip(x.names, x.args, strict=False)) for x in launches if x.name == name]
    return [x["SC"] for x in given if rows is None or x["q"].shape[0] == rows]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", SCANS)
def test_gradients_go_back_along_the_segments_of_the_forward_pass(gate, packed):
    """Though `vmap` gives the backward pass alone 64 times the batch."""

    def run(solve, arrays, adjoints):
        return jax.vmap(jax.vjp(solve, arrays)[1])(adjoints)

    seen = launched(run, jax.ShapeDtypeStruct((64, 1, 16384, 2, 128), jnp.bfloat16), gate=gate, packed=packed)
    assert {launch.constants["ADJOINT"] for launch in seen if launch.name == SCANS[gate]} == {False, True}
    if gate == "gk" or not packed:
        assert len(set(lengths(seen, SCANS[gate]))) == 1


def test_what_segments_leave_is_computed_once():
    """By the forward pass, and kept for dq where nothing asks for a decay's gradient. The backward pass has its own, of dS."""
    seen = launched(lambda solve, arrays: jax.vjp(solve, arrays)[1](arrays["value"]), gate="g_gamma")
    ends = [launch.constants["ADJOINT"] for launch in seen if launch.name == "state_scan"]
    assert ends == [False, True]
    assert len(lengths(seen, SCANS["g_gamma"])) == 4


def starts_of_segments(gates, length, **of_problem) -> tuple[list[bool], list[bool]]:
    """Of launches that make what segments of so many chunks start from, whether they go back; forward pass and backward."""
    call = problem(gates, 128, 128, 2048, **of_problem)
    plan = dataclasses.replace(Plan.of(call, LinearConfig()), segment=length)
    found = launches(route_of(plan), arrays_of(call), call.cu_seqlens)
    adjoint = lambda seen: [launch.constants["ADJOINT"] for launch in seen if launch.name == "segment_starts"]
    return adjoint(found.forward), adjoint(found.backward)


@pytest.mark.parametrize("gates", [(), ("g",), ("g_gamma",)], ids=lambda gates: "".join(gates) or "none")
def test_starts_of_four_segments_and_more_are_made_once(gates):
    """Of dense sequences, by the kernels for Hopper: fewer segments, and packed ones, combine the ends before them."""
    assert MANY_SEGMENTS == 4
    back = [True] if gates else [False, True, True]  # without a gate three scans: dq forward, dk and dv back
    for length in (8, 4, 1):  # 4, 8 and 32 segments
        assert starts_of_segments(gates, length) == ([False], back)
    for length in (32, 16, 11):  # 1, 2 and 3
        assert starts_of_segments(gates, length) == ([], [])
    assert starts_of_segments(gates, 1, packed=True) == ([], [])
    for capability in (80, 89, 100, 120):
        assert starts_of_segments(gates, 1, capability=capability) == ([], [])


@pytest.mark.parametrize("gate", SCANS)
def test_a_batch_by_vmap_is_cut_like_any_other(gate):
    """Into whole sequences where those fill the device: not as one of them alone would be."""

    def run(solve, arrays, rows):
        many = jax.vmap(lambda x: solve({**arrays, "query": x}))
        return jax.grad(lambda rows: many(rows).astype(jnp.float32).sum())(rows)

    seen = launched(run, jax.ShapeDtypeStruct((64, 1, 4096, 2, 128), jnp.bfloat16), gate=gate, tokens=4096)
    assert set(lengths(seen, SCANS[gate], rows=64)) == {64}


@pytest.mark.parametrize("devices", [1, 8])
def test_segments_of_a_batch_that_devices_may_share(devices, monkeypatch):
    """Enough to fill a device with what it may be left with: 16 heads of one sequence, not of eight."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x = jax.ShapeDtypeStruct((8, 16384, 16, 128), jnp.bfloat16)
    seen: list[Launch] = []
    with compile_for(90), instead_of_launching(seen.append):
        loss = lambda arrays: recurrent(**arrays)[0].astype(jnp.float32).sum()
        jax.clear_caches()
        jax.eval_shape(jax.grad(loss), dict.fromkeys(("query", "key", "value", "gk"), x))
    assert lengths(seen, "key_gate_scan_by_warpgroups") == [256 if devices == 1 else 32] * 2


def test_all_other_key_gates_by_the_portable_kernels():
    assert not key_gate_launches(100, 64)
    assert not key_gate_launches(128, 256)
    assert not key_gate_launches(64, 64, dtype="float16")
    assert not key_gate_launches(64, 64, dtypes={"gk": jax.ShapeDtypeStruct((1, 2000, 2, 64), jnp.float32)}.items())
    assert not key_gate_launches(64, 64, gates=("gk", "g"))
    assert not key_gate_launches(64, 64, gates=("gk", "gv"))
    for capability in (80, 89, 100, 120):
        assert not key_gate_launches(128, 128, capability=capability)
    for cfg in (LinearConfig(block_q=32), LinearConfig(block_d=32), LinearConfig(num_warps=8), LinearConfig(num_stages=2)):
        assert not key_gate_launches(128, 128, cfg=cfg)


def gradients(gates, K, V, cfg=None, **of_problem) -> set[str]:
    """What makes dq, dk and dg of a call, chunk by chunk."""
    call = problem(gates, K, V, 2000, **of_problem)
    found = launches(route_of(Plan.of(call, cfg or LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in found.backward if launch.name.startswith("head_gate_backward")}


@pytest.mark.parametrize("gates", [("g",), ("g", "g_gamma")], ids="+".join)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_gated_chunks_on_hopper(gates, packed):
    for K, V in CHANNELS:
        assert gradients(gates, K, V, packed=packed) == {"head_gate_backward_by_warpgroups"}


def test_all_other_gradients_by_the_portable_kernel():
    portable = {"head_gate_backward"}
    assert gradients(("g_gamma",), 128, 128) == portable
    assert gradients(("g",), 100, 64) == portable
    assert gradients(("g",), 128, 36) == portable
    assert gradients(("g",), 256, 128) == portable
    assert gradients(("g",), 64, 64, dtype="float16") == portable
    for capability in (80, 89, 100, 120):
        assert gradients(("g",), 128, 128, capability=capability) == portable
    for fields in ({"block_q": 32}, {"block_d": 32}, {"block_k": 32}, {"num_warps": 8}, {"num_stages": 2}):
        assert gradients(("g",), 128, 128, LinearConfig(**fields)) == portable


def wide_scans(gates, K, V, **of_problem) -> set[str]:
    """The scans of wide tiles that a call launches, forward and backward."""
    call = problem(gates, K, V, 2000, **of_problem)
    found = launches(route_of(Plan.of(call, LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in (*found.forward, *found.backward) if "wide" in launch.name}


@pytest.mark.parametrize("gates", [(), ("g",), ("gk",)], ids=lambda gates: "".join(gates) or "none")
def test_scans_of_wide_keys_on_hopper(gates):
    portable = {"scan_rows_wide"}
    assert wide_scans(gates, 256, 128) == wide_scans(gates, 256, 512, packed=True) == {"wide_scan_by_warpgroups"}
    assert wide_scans(gates, 240, 128) == wide_scans(gates, 256, 192) == portable
    assert not wide_scans(gates, 256, 64)
    assert wide_scans(gates, 256, 128, capability=100) == portable
    for capability in (80, 89, 120):  # less shared memory: not even the portable one's wide tiles
        assert not wide_scans(gates, 256, 128, capability=capability)


def delta_scans(gate, K, V, cfg=None, **of_problem) -> set[str]:
    """The scans with outputs that a call of the delta rule launches, forward and backward."""
    call = delta_problem(gate, K, V, 2000, **of_problem)
    found = launches(route_of_delta(delta_plan(call, cfg or TRITON.heuristic(call))), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in (*found.forward, *found.backward) if "_scan" in launch.name}


@pytest.mark.parametrize("gate", [None, "head", "channel"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_delta_scan_of_whole_tiles_on_hopper(gate, packed):
    wanted = {"delta_scan_by_warpgroups", "delta_adjoint_scan_by_warpgroups"}
    for K, V in CHANNELS:
        assert delta_scans(gate, K, V, packed=packed) == wanted


def test_all_other_delta_scans_by_the_portable_kernels():
    portable = {"delta_scan", "delta_adjoint_scan"}
    assert delta_scans("head", 100, 64) == portable
    assert delta_scans("head", 128, 256) == portable
    assert delta_scans("head", 64, 64, dtype="float16") == portable
    assert delta_scans("channel", 64, 64, dtype="float32") == portable
    for capability in (80, 89, 100, 120):
        assert delta_scans("head", 128, 128, capability=capability) == portable
    of_head = functools.partial(GatedDeltaRuleConfig, "chunked")
    for cfg in (of_head(32), of_head(64, block_d=32), of_head(64, num_warps=8), of_head(64, num_stages=2)):
        assert delta_scans("head", 128, 128, cfg) == portable


def gradients_of_keys(gates, K, V, cfg=None, **of_problem) -> set[str]:
    """What computes the gated channels' gradients in the weakly gated chunks of a call."""
    call = problem(gates, K, V, 2000, **of_problem)
    found = launches(route_of(Plan.of(call, cfg or LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in found.backward if launch.name.startswith("weak_axis")}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_gated_keys_on_hopper(packed):
    for K, V in CHANNELS:
        assert gradients_of_keys(("gk",), K, V, packed=packed) == {"weak_axis_by_warpgroups"}


def test_all_other_gradients_of_gated_keys_by_the_portable_kernel():
    portable = {"weak_axis"}
    assert gradients_of_keys(("gk",), 100, 64) == portable
    assert gradients_of_keys(("gk",), 128, 256) == portable
    for gates in (("gk", "g"), ("gk", "g_gamma")):
        assert gradients_of_keys(gates, 128, 128) == portable
    in_float32 = {"gk": jax.ShapeDtypeStruct((1, 2000, 2, 128), jnp.float32)}
    assert gradients_of_keys(("gk",), 128, 128, dtypes=in_float32) == portable
    for capability in (80, 89, 100, 120):
        assert gradients_of_keys(("gk",), 128, 128, capability=capability) == portable
    for cfg in (LinearConfig(block_k=32), LinearConfig(block_d=32), LinearConfig(num_warps=8), LinearConfig(num_stages=2)):
        assert gradients_of_keys(("gk",), 128, 128, cfg) == portable


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_gated_keys_and_values_on_hopper(packed):
    for K, V in CHANNELS:
        assert gradients_of_keys(("gk", "gv"), K, V, packed=packed) == {"weak_axis_from_rows_by_warpgroups"}
    in_float32 = {"gv": jax.ShapeDtypeStruct((1, 2000, 2, 128), jnp.float32)}
    one_axis = gradients_of_keys(("gk", "gv"), 128, 128, dtypes=in_float32, packed=packed)
    assert one_axis == {"weak_axis_from_rows_by_warpgroups", "weak_axis"}


def test_all_other_gradients_of_gated_keys_and_values_by_the_portable_kernel():
    portable = {"weak_axis"}
    assert gradients_of_keys(("gk", "gv"), 100, 64) == portable
    assert gradients_of_keys(("gk", "gv", "g"), 128, 128) == portable
    for capability in (80, 89, 100, 120):
        assert gradients_of_keys(("gk", "gv"), 128, 128, capability=capability) == portable
    for cfg in (LinearConfig(block_k=32), LinearConfig(block_d=32), LinearConfig(num_warps=8), LinearConfig(num_stages=2)):
        assert gradients_of_keys(("gk", "gv"), 128, 128, cfg) == portable


def scans_of_keys_and_values(gates, K, V, cfg=None, **of_problem) -> set[str]:
    """What makes the outputs of a call with gates on keys and values."""
    call = problem(gates, K, V, 200, **of_problem)  # one segment
    found = launches(route_of(Plan.of(call, cfg or LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in found.forward if "scan" in launch.name}


def test_scans_of_gated_keys_and_values_on_hopper():
    portable = {"scan_key_value"}
    for gates in (("gk", "gv"), ("gk", "gv", "g")):
        assert scans_of_keys_and_values(gates, 128, 128) == {"key_value_scan_by_warpgroups"}
    assert scans_of_keys_and_values(("gk", "gv"), 128, 128, packed=True) == {"key_value_scan_by_warpgroups", *portable}  # ends
    assert scans_of_keys_and_values(("gk", "gv"), 64, 128) == scans_of_keys_and_values(("gk", "gv"), 128, 100) == portable
    in_float32 = {"gv": jax.ShapeDtypeStruct((1, 200, 2, 128), jnp.float32)}
    assert scans_of_keys_and_values(("gk", "gv"), 128, 128, dtypes=in_float32) == portable
    assert scans_of_keys_and_values(("gk", "gv"), 128, 128, LinearConfig(num_stages=1)) == portable
    assert scans_of_keys_and_values(("gk", "gv"), 128, 128, capability=100) == portable


FOUR_WARPGROUPS = ("head_gate_backward_by_warpgroups", "weak_axis_by_warpgroups", "weak_axis_from_rows_by_warpgroups")


@pytest.mark.long
def test_compiled_for_hopper():
    """Within its shared memory, with all warpgroups, and products that are waited for only where the kernel says so."""
    found = json.loads(outside("-m", "tests.triton.warpgroups"))
    assert all(found.values())
    for call, launches_of_call in found.items():
        for launch in launches_of_call:
            if launch["kernel"] in FOUR_WARPGROUPS:
                warpgroups = 4  # one each copies and makes scores or sums, two compute
            else:
                # Warpgroups that copy and make scores.
                others = 1 if launch["kernel"].startswith(("delta", "wide", "key_value")) else 2
                warpgroups = others + min(launch["values"], 128) // 64
            assert launch["warps"] == 4 * warpgroups, call
            assert not launch["serialized"], call
            assert not launch["overwritten"], call
