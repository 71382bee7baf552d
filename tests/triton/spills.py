"""Default tiles that spill registers, and why they are the default all the same.

A kernel may spill `FEW` bytes a thread without a word. Beyond that it needs an entry here, with the bytes that were seen and
the measurement (benchmarks/NOTES_gpu.md, on an H200) that justifies it, or the plain statement that there is none.
"""

from __future__ import annotations

from typing import NamedTuple

FEW = 32  # bytes a thread: eight registers
SLACK = 1.25  # compilers differ by this much (Triton 3.6 to 3.9)


class Spill(NamedTuple):
    capability: int
    call: str  # of ejkernel.testing.triton_calls.CALLS
    kernel: str
    most: int  # bytes a thread
    reason: str


_AMPERE = "compiled for Ampere, not tuned: nobody has measured there"
_EXACT = "float32 products are three tf32 ones, for accuracy; not tuned, not measured"
_WARPGROUPS = (
    "at lengths that 64 does not divide; 0.073 ms on r1, where Triton 3.6 spills nothing; 56, 144 and 152 registers spill 32 "
    "bytes, not measured"
)
_BACKWARD = "64-wide tiles 0.240 ms on r1; in an older form 0.43, 128 wide 0.51 to 0.95, 8 warps 0.57 to 0.70, 32 rows 0.75"
_AXIS = (
    "strongly gated chunks; 128 registers, two programs a multiprocessor: 0.565 ms on r1 (even lengths, 88 bytes); "
    "unlimited 0.85, 96 registers 0.76"
)
_ROWS = "strongly gated chunks; levels in registers: forward 0.31 ms on r1, 1.09 in the version through shared memory"
_WEAK_ROWS = (
    "168 registers 0.141 ms on r1; before, with operands cut off, 0.148; unlimited 0.166, 128 registers 0.193, 8 warps "
    "from 0.27, 32 channels 0.17 and 0.19"
)
_WEAK_AXIS = (
    "grouped heads at lengths that 64 does not divide (Triton 3.6: 168); r1 0.239 ms (64 bytes, 3.6), 0.41 with 664 bytes"
)
_KEY_SCAN = "0.149 ms on r1 forward and 0.174 back (24 bytes where rows are full, 3.6); 72 bytes 0.156, by rows 0.226 forward"
_NARROW_SCAN = "only the segments' ends; 64 value channels 0.334 ms on r4 for everything, before `scan_rows_wide`"
_WIDE_SCAN = (
    "of the beginning and the end, where an initial state is read and the last one written: no store of a spill among products;"
    " 0.16 ms on r4, the portable kernel 0.23 to 0.24"
)
_KEY_ROWS = (
    "strongly gated chunks; 64 channels a turn 0.296 ms on r1 of the delta rule (even lengths, 48 bytes, Triton 3.6), 32 "
    "channels twice that; 128 channels spill 944 there"
)
_DELTA_GATED = (
    "strongly gated chunks; 128 registers, 64 value channels a turn, the states first: 0.91 ms on r1 of the delta rule (even "
    "lengths, 128 bytes, Triton 3.6), four warps without a limit 0.91, too; all value channels and the states last 1.08"
)
_ROWS_SPLIT = "strongly gated chunks; 0.74 ms on r1 for both axes, 128 channels a turn 0.88"
_KEY_VALUE_SCAN = "0.28 ms on r1 (432 bytes, Triton 3.6); 0.27 without the loop for strongly gated chunks, which spills"
_DELTA_KEPT = (
    "0.155 ms on r1 of the delta rule with states and scores kept (76 bytes where rows are full, no initial state), "
    "`delta_scan` 0.188; packed 0.437 with 64 bytes, 0.553 with fewer registers for copies"
)
_DELTA_ROWS = "0.098 ms on r1, forward alone (nothing spilled where rows are full), `delta_scan` 0.132; else not timed"
_DELTA_BACK = "0.142 ms on r1 of the delta rule, `delta_adjoint_scan` 0.170; packed 0.394, with fewer registers to copy 0.436"
_DELTA = "0.72 ms on r1 of the delta rule for forward and gradient; no other tiles were faster"
_DELTA_WIDE = "256 channels of the delta rule: not tuned, not measured"
_DELTA_AHEAD = "by Triton 3.9 alone: 3.6, which was measured, spills nothing here"
_DELTA_WEAK = "168 registers 0.55 ms on r1 of the delta rule; unlimited 0.66, 128 registers 0.75"
_QUERY = "64,64 tiles, 4 warps, 2 stages, of calls with options; plain ones take 128,64 tiles, 8 warps, 3 stages: no spills"
_KEY = (
    "32,64 tiles, 4 warps, 3 stages 0.611 ms of softmax attention at (8, 2048, 16, 128); 32,128 0.760, 64,128 1.00, 64,64 1.35"
)
_OPTIONS = "every option at once, with the tiles of the plain call: not measured"
_WIDE = "256 channels of softmax attention: not tuned, not measured"

SPILLS = [
    Spill(90, "none", "head_gate_scan_by_warpgroups", 56, _WARPGROUPS),
    Spill(90, "g", "head_gate_scan_by_warpgroups", 72, _WARPGROUPS),
    Spill(90, "g_gamma", "head_gate_backward", 72, "168 registers 0.203 ms on r3 (8 bytes, Triton 3.6), unlimited 0.229"),
    Spill(90, "g wide", "head_gate_backward", 240, _BACKWARD + "; K = 512 not measured"),
    Spill(90, "g broad", "head_gate_backward", 240, _BACKWARD),
    Spill(90, "g float16", "head_gate_scan", 208, "float16 runs as tf32, rounded for accuracy; not measured"),
    Spill(90, "g float16", "head_gate_backward", 440, "float16 runs as tf32; not measured"),
    Spill(90, "gk", "gated_rows", 136, _ROWS),
    Spill(90, "gk", "gated_axis", 272, _AXIS),
    Spill(90, "gk", "weak_rows", 160, _WEAK_ROWS),
    Spill(90, "gk", "weak_axis_by_warpgroups", 496, _WEAK_AXIS),
    Spill(90, "gk", "key_gate_scan_by_warpgroups", 152, _KEY_SCAN),
    Spill(90, "gk wide", "weak_rows", 400, "128 channels a turn 0.159 ms on r4; 64 and 168 registers 0.170"),
    Spill(90, "gk wide", "weak_axis", 520, "0.935 ms on r4; 64 other channels a turn 1.17, 32 channels 1.22"),
    Spill(90, "gk wide", "gated_rows", 960, _ROWS),
    Spill(90, "gk wide", "gated_axis", 80, _AXIS + "; r4 1.01, states after the scores 2.1"),
    Spill(90, "gk wide", "scan_rows", 440, _NARROW_SCAN),
    Spill(90, "g broad", "scan_rows", 480, _NARROW_SCAN),
    Spill(90, "gk wide", "wide_scan_by_warpgroups", 1240, _WIDE_SCAN),
    Spill(90, "g broad", "wide_scan_by_warpgroups", 1240, _WIDE_SCAN),
    Spill(90, "gk gv", "weak_axis", 576, "two axes 1.29 ms on r1; one load in flight 1.38, 64 other channels a turn 1.40"),
    Spill(90, "gk gv", "gated_rows", 256, _ROWS_SPLIT),
    Spill(90, "gk gv", "weak_rows", 48, _WEAK_ROWS),
    Spill(90, "gk gv", "scan_key_value", 432, _KEY_VALUE_SCAN),
    Spill(90, "gk gv forward", "gated_rows", 256, _ROWS_SPLIT),
    Spill(90, "gk gv forward", "weak_rows", 48, _WEAK_ROWS),
    Spill(90, "gk gv forward", "scan_key_value", 648, _KEY_VALUE_SCAN),
    Spill(90, "all float32", "state_scan", 296, _EXACT),
    Spill(90, "all float32", "general_gated_axis", 1416, _EXACT),
    Spill(80, "none", "head_gate_scan", 456, _AMPERE),
    Spill(80, "g", "head_gate_scan", 408, _AMPERE),
    Spill(80, "g", "head_gate_backward", 112, _AMPERE),
    Spill(80, "g_gamma", "head_gate_scan", 136, _AMPERE),
    Spill(80, "g_gamma", "head_gate_backward", 368, _AMPERE),
    Spill(80, "g float16", "head_gate_scan", 280, _AMPERE),
    Spill(80, "gk", "scan_rows", 664, _AMPERE),
    Spill(80, "gk", "gated_axis", 1416, _AMPERE),
    Spill(80, "gk wide", "gated_axis", 240, _AMPERE),
    Spill(80, "gk wide", "scores_in_blocks", 1064, _AMPERE),
    Spill(80, "gk wide", "gated_rows", 296, _AMPERE),
    Spill(80, "gk wide", "scan_rows", 928, _AMPERE),
    Spill(80, "g wide", "head_gate_backward", 296, _AMPERE),
    Spill(80, "g broad", "head_gate_backward", 128, _AMPERE),
    Spill(80, "g broad", "scan_rows", 840, _AMPERE),
    Spill(80, "gk", "weak_rows", 88, _AMPERE),
    Spill(80, "gk", "weak_axis", 528, _AMPERE),
    Spill(80, "gk wide", "weak_rows", 416, _AMPERE),
    Spill(80, "gk wide", "weak_axis", 592, _AMPERE),
    Spill(80, "gk gv", "scan_states", 512, _AMPERE),
    Spill(80, "gk gv forward", "gated_rows", 136, _AMPERE),
    Spill(80, "gk gv forward", "scan_states", 512, _AMPERE),
    Spill(80, "gk gv", "weak_axis", 432, _AMPERE),
    Spill(80, "gk gv", "gated_axis", 192, _AMPERE),
    Spill(80, "all float32", "state_scan", 128, _EXACT),
    Spill(80, "all float32", "general_gated_axis", 1536, _EXACT),
    Spill(90, "delta head", "delta_scan_by_warpgroups", 432, _DELTA_KEPT),
    Spill(90, "delta head", "delta_adjoint_scan_by_warpgroups", 88, _DELTA_BACK),
    Spill(90, "delta head", "delta_head_gradients", 64, _DELTA),
    Spill(90, "delta none wide", "delta_scan", 304, _DELTA_WIDE),
    Spill(90, "delta none wide", "delta_adjoint_scan", 384, _DELTA_WIDE),
    Spill(90, "delta none wide", "delta_head_gradients", 408, _DELTA_WIDE),
    Spill(90, "delta head float32", "delta_scan", 1008, _EXACT),
    Spill(90, "delta head float32", "delta_adjoint_scan", 888, _EXACT),
    Spill(90, "delta head float32", "delta_head_gradients", 1984, _EXACT),
    Spill(90, "delta channel", "weak_rows", 80, "keys' own rows besides: 0.205 ms on r1 of the delta rule; 168 registers 0.30"),
    Spill(90, "delta channel", "gated_key_rows", 448, _KEY_ROWS),
    Spill(90, "delta channel", "delta_weak_gradients", 232, _DELTA_WEAK),
    Spill(90, "delta channel", "delta_gated_gradients", 312, _DELTA_GATED),
    Spill(90, "delta channel wide", "weak_rows", 1216, _DELTA_WIDE),
    Spill(90, "delta channel wide", "gated_key_rows", 680, _DELTA_WIDE),
    Spill(90, "delta channel wide", "delta_scan", 528, _DELTA_WIDE),
    Spill(90, "delta channel wide", "delta_adjoint_scan", 368, _DELTA_WIDE),
    Spill(90, "delta channel wide", "delta_weak_gradients", 208, _DELTA_WIDE),
    Spill(90, "delta channel wide", "delta_scores_in_blocks", 48, _DELTA_WIDE),
    Spill(90, "delta channel wide", "delta_gated_gradients", 304, _DELTA_GATED),
    Spill(90, "delta channel float32", "delta_scan", 584, _EXACT),
    Spill(90, "delta channel float32", "delta_adjoint_scan", 656, _EXACT),
    Spill(90, "delta channel float32", "general_gated_axis", 880, _EXACT),
    Spill(80, "delta head", "delta_scan", 384, _AMPERE),
    Spill(80, "delta head", "delta_adjoint_scan", 2504, _AMPERE),
    Spill(80, "delta head", "delta_head_gradients", 296, _AMPERE),
    Spill(80, "delta none wide", "delta_scan", 120, _AMPERE),
    Spill(80, "delta none wide", "delta_adjoint_scan", 608, _AMPERE),
    Spill(80, "delta none wide", "delta_head_gradients", 560, _AMPERE),
    Spill(80, "delta channel", "weak_rows", 232, _AMPERE),
    Spill(80, "delta channel", "gated_key_rows", 368, _AMPERE),
    Spill(80, "delta channel", "delta_scores_in_blocks", 824, _AMPERE),
    Spill(80, "delta channel", "delta_scan", 2624, _AMPERE),
    Spill(80, "delta channel", "delta_adjoint_scan", 1448, _AMPERE),
    Spill(80, "delta channel", "delta_weak_gradients", 328, _AMPERE),
    Spill(80, "delta channel", "delta_gated_gradients", 696, _AMPERE),
    Spill(80, "delta channel wide", "weak_rows", 6184, _AMPERE),
    Spill(80, "delta channel wide", "gated_key_rows", 432, _AMPERE),
    Spill(80, "delta channel wide", "delta_scan", 152, _AMPERE),
    Spill(80, "delta channel wide", "delta_adjoint_scan", 488, _AMPERE),
    Spill(80, "delta channel wide", "delta_weak_gradients", 328, _AMPERE),
    Spill(80, "delta channel wide", "delta_scores_in_blocks", 1152, _AMPERE),
    Spill(80, "delta channel wide", "delta_gated_gradients", 688, _AMPERE),
    Spill(80, "delta head float32", "delta_scan", 728, _EXACT),
    Spill(80, "delta head float32", "delta_adjoint_scan", 664, _EXACT),
    Spill(80, "delta head float32", "delta_head_gradients", 1912, _EXACT),
    Spill(80, "delta channel float32", "delta_scan", 1488, _EXACT),
    Spill(80, "delta channel float32", "delta_adjoint_scan", 1280, _EXACT),
    Spill(80, "delta channel float32", "general_gated_axis", 696, _EXACT),
    Spill(90, "attention", "flash_query_gradient", 64, _QUERY),
    Spill(90, "attention", "flash_key_gradient", 104, _KEY),
    Spill(90, "attention 256", "flash_forward", 96, _WIDE),
    Spill(90, "attention 256", "flash_query_gradient", 480, _WIDE),
    Spill(90, "attention 256", "flash_key_gradient", 328, _WIDE),
    Spill(90, "attention everything", "flash_query_gradient", 264, _OPTIONS),
    Spill(90, "attention everything", "flash_key_gradient", 256, _OPTIONS),
    Spill(90, "attention everything", "flash_bias_gradient", 40, _OPTIONS),
    Spill(90, "attention float32", "flash_forward", 72, _EXACT),
    Spill(90, "attention float32", "flash_key_gradient", 152, _EXACT),
    Spill(90, "attention float32", "flash_bias_gradient", 656, _EXACT),
    Spill(80, "attention", "flash_forward", 64, _AMPERE),
    Spill(80, "attention 64", "flash_key_gradient", 664, _AMPERE),
    Spill(80, "attention 256", "flash_forward", 200, _AMPERE),
    Spill(80, "attention 256", "flash_key_gradient", 200, _AMPERE),
    Spill(80, "attention everything", "flash_forward", 96, _AMPERE),
    Spill(80, "attention everything", "flash_key_gradient", 64, _AMPERE),
    Spill(80, "attention everything", "flash_bias_gradient", 584, _AMPERE),
    Spill(80, "attention float32", "flash_forward", 232, _EXACT),
    Spill(80, "attention float32", "flash_key_gradient", 448, _EXACT),
    Spill(80, "attention float32", "flash_bias_gradient", 624, _EXACT),
    Spill(90, "delta channel", "delta_scan_by_warpgroups", 296, _DELTA_ROWS),
    Spill(90, "delta channel", "delta_adjoint_scan_by_warpgroups", 144, _DELTA_ROWS),
    Spill(90, "delta channel float32", "delta_segment_ends", 336, _EXACT),
    Spill(90, "delta channel wide", "delta_segment_starts", 680, _DELTA_WIDE),
    Spill(90, "delta head", "delta_correction", 88, _DELTA_AHEAD),
    Spill(90, "delta head float32", "delta_segment_ends", 152, _EXACT),
    Spill(90, "delta head float32", "delta_segment_starts", 464, _EXACT),
    Spill(90, "delta none wide", "delta_correction", 48, _DELTA_WIDE),
    Spill(90, "delta none wide", "delta_segment_starts", 680, _DELTA_WIDE),
    Spill(80, "delta channel float32", "delta_segment_ends", 672, _EXACT),
    Spill(80, "delta channel wide", "delta_segment_starts", 352, _AMPERE),
    Spill(80, "delta head float32", "delta_segment_ends", 48, _EXACT),
    Spill(80, "delta none wide", "delta_segment_starts", 352, _AMPERE),
]


def unexplained(entries: list[dict]) -> list[str]:
    """What spills and has no entry above, as the entries that would be missing."""
    allowed = {(s.capability, s.call, s.kernel): s.most * SLACK for s in SPILLS}
    worst: dict[tuple[int, str, str], int] = {}
    for e in entries:
        at = (e["capability"], e["call"], e["kernel"].partition("[")[0])
        worst[at] = max(worst.get(at, 0), e["spills"])
    return [f"Spill{(*at, n, '...')}," for at, n in worst.items() if n > max(FEW, allowed.get(at, 0))]


def outdated(entries: list[dict]) -> list[Spill]:
    """Entries above whose kernel is not among those that their call launches."""
    launched = {(e["capability"], e["call"], e["kernel"].partition("[")[0]) for e in entries}
    compiled = {at[:2] for at in launched}
    return [s for s in SPILLS if (s.capability, s.call) in compiled and (s.capability, s.call, s.kernel) not in launched]
