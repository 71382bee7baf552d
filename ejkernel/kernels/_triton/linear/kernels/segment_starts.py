"""What segments start from, made once from their ends, where each scan would otherwise combine them for itself.

    S_0 = the sequence's own state,   S_{n+1} = decay_n S_n + end_n          one decay for each segment and head

A scan's last segment has all others before it: as many states to read one after the other, 64 KB each, before its first chunk.
Here they are read ahead, and a state is cut into many programs, since its elements do not meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.segments import scanned_segment, starts_sequence
from ejkernel.kernels._triton.linear.kernels.tiles import program_at


@triton.jit
def segment_starts(
    begin, ends, end_decay, segments, NT, NS, SC,
    starts,
    H: tl.constexpr, SIZE: tl.constexpr, DECAYS: tl.constexpr, B: tl.constexpr, ADJOINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of B elements * segments * heads, of which those of a sequence's first segment do the work.

    ends, starts [segments, H, SIZE]; begin [N, H, SIZE], 0 where None; end_decay [segments, H, DECAYS], all alike. ADJOINT goes
    back in time, from a sequence's last segment.
    """
    tile, head, unit = program_at((SIZE + B - 1) // B, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    if not starts_sequence(segment, ADJOINT):
        return
    g, _first, _count, seq, _place, total = segment
    at = tile * B + tl.arange(0, B)
    here = at < SIZE
    S = tl.zeros([B], tl.float32)
    if begin is not None:
        S += tl.load(begin + (seq.to(tl.int64) * H + head) * SIZE + at, mask=here, other=0.0).to(tl.float32)
    tl.store(starts + (g.to(tl.int64) * H + head) * SIZE + at, S, mask=here)
    for n in tl.range(total - 1, num_stages=STAGES):
        before = g + n
        after = before + 1
        if ADJOINT:
            before = g - n
            after = before - 1
        index = before.to(tl.int64) * H + head
        S = S * tl.load(end_decay + index * DECAYS) + tl.load(ends + index * SIZE + at, mask=here, other=0.0)
        tl.store(starts + (after.to(tl.int64) * H + head) * SIZE + at, S, mask=here)
