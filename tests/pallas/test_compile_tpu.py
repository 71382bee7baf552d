"""Every kernel for TPUs, compiled by libtpu for five generations of chips (`make test-tpu`). Nothing runs."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from ejkernel.kernels._pallas._chips import CHIPS
from ejkernel.testing.tpu_programs import DECODING, Program, libtpu_requirement, named, programs

pytestmark = pytest.mark.tpu
TRAINING = programs("bfloat16")
# Decoding is forward only, and float32 differs by its products: one chip shows that they compile.
DECODED = [program for program in programs("bfloat16", DECODING) if program.record.legal_gates or program.record.gates]
WIDE = programs("float32")
FIRST = list({program.record.op_id: program for program in reversed(TRAINING)}.values())  # one of each operation


def ids(found: list[Program]) -> list[str]:
    return [str(program) for program in found]


@pytest.fixture(scope="module", autouse=True)
def _there():
    assert importlib.util.find_spec("libtpu"), f"libtpu is not installed: pip install '{libtpu_requirement()}'"


def test_every_operation_of_the_platform_is_here():
    assert {program.record.op_id for program in TRAINING} >= {"recurrent", "gated_delta_rule", "attention"}


@pytest.mark.parametrize("program", TRAINING, ids=ids(TRAINING))
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_with_the_tiles_of_the_heuristic(chip, program):
    assert "tpu_custom_call" in program.compiled(chip, program.both()).as_text()


@pytest.mark.parametrize("program", DECODED, ids=ids(DECODED))
@pytest.mark.parametrize("chip", CHIPS)
def test_a_decode_step_compiles(chip, program):
    assert "tpu_custom_call" in program.compiled(chip, program.forward()).as_text()


@pytest.mark.parametrize("program", WIDE, ids=ids(WIDE))
def test_float32_compiles(program):
    assert "tpu_custom_call" in program.compiled("v5e", program.both()).as_text()


@pytest.mark.parametrize(
    ("chip", "call", "sizes", "dtype"),
    [
        ("v4", "attention:none", "8x1024x4x512", "float32"),
        ("v5e", "attention:none", "8x1024x4x512", "float32"),
        ("v4", "gated_delta_rule:gk", "8x512x4x256x256", "float32"),
        ("v4", "recurrent:gk", "8x512x4x128x128", "float32"),
        ("v4", "recurrent:gk+gv", "8x512x4x256x256", "bfloat16"),
    ],
)
def test_every_candidate_of_calls_that_need_most_of_vmem_compiles(chip, call, sizes, dtype):
    """The rows are many, so that the compiler does not keep whole arrays in VMEM: that would spare the kernels' buffers."""
    program = named(call, sizes, dtype)
    for cfg in program.candidates(chip):
        assert "tpu_custom_call" in program.compiled(chip, program.both(cfg)).as_text()


@pytest.mark.parametrize("program", FIRST, ids=ids(FIRST))
def test_compiles_with_sixty_four_bits(program):
    with jax.enable_x64(True):
        assert "tpu_custom_call" in program.compiled("v5e", program.both()).as_text()


@pytest.mark.parametrize("program", TRAINING, ids=ids(TRAINING))
def test_every_candidate_compiles_for_v5e(program):
    first, *others = program.candidates("v5e")
    assert first == program.entry.function.implementation.heuristic(program.problem("v5e"))
    for cfg in others:
        assert "tpu_custom_call" in program.compiled("v5e", program.both(cfg)).as_text()


@pytest.mark.parametrize("program", TRAINING, ids=ids(TRAINING))
def test_eight_chips_compute_their_parts_where_they_lie(program):
    text = program.compiled_for_mesh(program.both()).as_text()
    assert "tpu_custom_call" in text
    assert "all-gather" not in text
