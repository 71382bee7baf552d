"""Every kernel compiles for Ampere, Hopper and RTX cards, within their shared memory, and on the first two spills only for a
reason: no GPU needed.

Compiled in a process of its own: in this one the kernels are interpreted (test_interpreted.py).
"""

import itertools
import json

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.testing.triton_calls import EVERY
from tests.triton.processes import outside
from tests.triton.spills import outdated, unexplained

# All of ejkernel.testing.triton_calls, in groups: 20 to 110 s each where nothing is cached.
GROUPS = [
    ["none", "gk", "g broad", "g float16", "decode"],
    ["g", "g_gamma", "gk wide", "g wide"],
    ["gk gv", "gk gv forward", "all float32"],
    ["delta head", "delta none wide", "delta head float32"],
    ["delta channel", "delta channel wide", "delta channel float32"],
    ["attention", "attention 64", "attention 256", "attention decode"],
    ["attention everything", "attention float32"],
    ["convolution", "convolution packed", "convolution float32"],
]


def compiled_for(capability, calls, *more):
    text = outside("-m", "benchmarks.triton_resources", "--json", "--capability", str(capability), *more, "--calls", *calls)
    entries = [json.loads(line) for line in text.splitlines()]
    assert {e["call"] for e in entries} == set(calls)
    return entries


@pytest.mark.parametrize("calls", GROUPS, ids=" and ".join)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.long
def test_kernels_compile_and_fit(capability, calls):
    entries = compiled_for(capability, calls)
    assert not [e for e in entries if e["lowered"]]  # the shared memory has room for the default's loads in flight
    missing = "\n".join(unexplained(entries))
    assert not missing, f"default tiles that spill need a reason and its measurement in tests/triton/spills.py:\n{missing}"
    assert outdated(entries) == []


RTX = [89, 120]  # RTX cards: 99 KB of shared memory for a program
ROOM = 99 << 10


# Each group for one card: both have the same plans and the same products of tiles, and so take the same shared memory.
ON_CARDS = [
    pytest.param(card, calls, id=f"{card}-{' and '.join(calls)}")
    for card, calls in zip(itertools.cycle(RTX), GROUPS, strict=False)
]


@pytest.mark.parametrize(("capability", "calls"), ON_CARDS)
@pytest.mark.long
def test_kernels_fit_an_rtx_card(capability, calls):
    assert not [e for e in compiled_for(capability, calls) if e["shared"] > ROOM]


@pytest.mark.parametrize("call", ["g", "gk", "gk wide", "delta head", "attention"])
@pytest.mark.long
def test_candidates_fit_an_rtx_card(call):
    entries = compiled_for(89, [call], "--candidates")
    assert len({e["config"] for e in entries}) > 1
    assert not [e for e in entries if e["shared"] > ROOM]


@pytest.mark.slow
def test_masks_and_biases_are_copied_ahead():
    """Loops wait for no tile of a mask or a bias: it comes as those of keys and values do."""
    waits = json.loads(outside("-m", "tests.triton.plane_loads"))
    assert waits["mask"].pop("pack_mask") >= 0  # has no loop: it reads every mask once
    # Triton 3.9 copies no bias ahead whose tile is transposed; 3.6 does.
    assert waits["bias"].pop("flash_key_gradient") in (0, 2)
    assert waits["bias"] == dict.fromkeys(("flash_forward", "row_products", "flash_query_gradient", "flash_bias_gradient"), 0)
    assert waits["mask"] == dict.fromkeys(("flash_forward", "row_products", "flash_query_gradient", "flash_key_gradient"), 0)


@pytest.mark.long
def test_products_are_in_flight_together():
    """Of every kind of mask: where ptxas waits for each product by itself, the gradients' kernels take half as long again."""
    found = json.loads(outside("-m", "tests.triton.serialized"))
    assert {"mask", "documents", "bias"} < set(found)
    assert not any(found.values()), found


def test_groups_hold_every_call():
    assert sorted(call for group in GROUPS for call in group) == sorted(EVERY)
