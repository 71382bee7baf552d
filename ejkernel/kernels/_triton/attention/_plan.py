"""What of a call is known when it is traced: its sizes, its options, and the tiles of its kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from ejkernel.callib import cdiv, is_interpreted, shared_memory_of
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._triton.attention.kernels.call import Call, Plane
from ejkernel.kernels._triton.attention.kernels.forward import flash_forward

LEAST_CAPABILITY = 80
INTERPRETED_AS = 90  # the interpreter knows no device: what it runs is planned for an H100 or H200
MAX_CHANNELS = 256
DECODED_QUERIES = 16  # up to which the heads of a group share a program, and the keys are split
PROGRAMS = 4 * 132  # of a decoding call: what keeps an H200's memory busy
LEAST_PART = 256  # keys of a part that is worth its own program


def interpreted() -> bool:
    """Whether kernels run on the host, for tests of the mathematics."""
    return is_interpreted(flash_forward)


def capability_of(problem: AttentionProblem) -> int | None:
    """The compute capability that a call is planned for; None where kernels would have to be compiled for no NVIDIA GPU."""
    capability = problem.device.capability
    return INTERPRETED_AS if capability is None and interpreted() else capability


class Tiles(NamedTuple):
    """Queries and keys of a kernel's tile, warps of its programs and loads in flight."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Kernels(NamedTuple):
    """The tiles of each kernel."""

    forward: Tiles
    query: Tiles
    key: Tiles
    bias: Tiles


# By the widest channels' tile, for operands of 16 bits.
HALF = {
    64: Kernels(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(128, 64, 8, 2)),
    128: Kernels(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(128, 64, 8, 2)),
    256: Kernels(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 1)),
}
# The forward kernel's where a bias is copied ahead too: two programs as above would not fit a multiprocessor.
HALF_PLANE = {128: Tiles(128, 64, 8, 3)}
# The query gradient's of calls without options: 0.401 ms for 0.418 at (8, 2048, 16, 128), 1.351 for 1.399 at (2, 8192, 16,
# 128). With a soft cap they lose (0.668 for 0.543 with two stages), and so do 64 channels (0.931 for 0.787).
HALF_PLAIN = {128: Tiles(128, 64, 8, 3)}
# The same as `HALF` where a program has less shared memory than an H100's.
HALF_SMALL = {
    64: Kernels(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 1)),
    128: Kernels(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1), Tiles(64, 64, 4, 1)),
    256: Kernels(Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
# Three tf32 products for each: float32's digits take registers.
SINGLE = {
    64: Kernels(Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1)),
    128: Kernels(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 4, 1)),
    256: Kernels(Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 4, 1)),
}
DECODE = Tiles(16, 64, 4, 3)
WHOLE = 128  # tokens of a kernel's largest usual tile: lengths that it divides need no bounds
LEGAL_BLOCKS = (16, 32, 64, 128, 256)
LEGAL_WARPS = (1, 2, 4, 8, 16)
# Heads that are computed at one time, see `program_at`: those whose keys and values take this much. Measured in turns of 4, 8
# and 16 heads of 128 channels, forward+backward: 4.83, 4.88, 4.96 ms at 8192 tokens; 1.393, 1.371, 1.349 at 2048. Of documents
# few keys are in use at one time: 5.33, 5.22, 5.22.
KEYS_TOGETHER = 16 << 20  # bytes
HEADS_TOGETHER = (4, 16)  # at least and at most
DOCUMENTS_TOGETHER = 8  # heads of packed documents
LARGE_CAP = 1000.0  # of scores, above which 1 - 2 r leaves a 16-bit call too few digits of those near 0
LARGE = 227 << 10  # bytes of shared memory of an H100's program


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static data of a call. Hashable: what is compiled is compiled once for each.

    Attributes:
        forward: the tiles of the forward kernel; `kernels` has those of the others.
        grouped: whether a program has the queries of all heads of a group: for decoding.
        parts: into how many the keys are split.
        named_stages: whether the configuration says how many loads are in flight, which is then so.
        together: heads whose programs take turns.
        exact: whether products have float32's digits; queries are scaled before them then.
    """

    kernels: Kernels
    forward: Tiles
    grouped: bool
    parts: int
    named_stages: bool
    together: int
    exact: bool
    scale: float
    left: int | None
    right: int | None
    soft_cap: float | None
    dropout_prob: float

    @classmethod
    def of(cls, problem: AttentionProblem, cfg: AttentionConfig) -> Plan:
        wide = max(64, _tile(problem.head_dim), _tile(problem.value_dim))
        exact = problem.dtype == np.float32
        shared = shared_memory_of(capability_of(problem) or LEAST_CAPABILITY)
        kernels = (SINGLE if exact else HALF if shared >= LARGE else HALF_SMALL)[wide]
        if not exact and shared < 128 << 10 and wide >= 128:
            kernels = HALF_SMALL[256]
        if varies(problem.bias) and kernels is HALF.get(wide):
            kernels = kernels._replace(forward=HALF_PLANE.get(wide, kernels.forward))
        if kernels is HALF.get(wide) and _without_options(problem):
            kernels = kernels._replace(query=HALF_PLAIN.get(wide, kernels.query))
        grouped = problem.q_len <= DECODED_QUERIES
        usual = _decoding(problem, exact, wide) if grouped else kernels.forward
        named = {name: getattr(cfg, name) for name in Tiles._fields if getattr(cfg, name) is not None}
        forward = usual._replace(**named)
        return cls(
            kernels=kernels,
            forward=forward,
            grouped=grouped,
            parts=_parts(problem, forward) if grouped else 1,
            named_stages=cfg.num_stages is not None,
            together=heads_together(problem),
            exact=exact,
            scale=problem.scale,
            left=problem.left,
            right=problem.right,
            soft_cap=problem.soft_cap,
            dropout_prob=problem.dropout_prob,
        )

    def call(self, arrays: dict[str, Any], others: dict[str, Any]) -> Call:
        """The constants that every kernel takes, of a call with these arrays."""
        bias, mask = arrays.get("bias"), others.get("mask")
        _, T, H, D = arrays["query"].shape
        _, S, HK, DV = arrays["value"].shape
        ids = next((others[name] for name in ("q_segment_ids", "q_positions") if others.get(name) is not None), None)
        fused = not self.exact and self.soft_cap is None and bias is None and "traced_scale" not in arrays and self.scale > 0
        return Call(
            H=H,
            HK=HK,
            D=D,
            DV=DV,
            BD=_tile(D),
            BDV=_tile(DV),
            PREC="tf32x3" if self.exact else "tf32",
            LEFT=self.left,
            RIGHT=self.right,
            BIAS=_plane(bias),
            MASK=_plane(mask),
            PACKED=False,
            IDS_VARY=int(ids is not None and ids.shape[0] > 1),
            SINKS_VARY=_of_rows(arrays.get("sinks"), 1),
            SCALE_VARIES=_of_rows(arrays.get("traced_scale"), 0),
            CAPPED=self.soft_cap is not None,
            CAPPED_NEAR_0=self.soft_cap is not None and (self.exact or self.soft_cap > LARGE_CAP),
            DROPPED=min(round(self.dropout_prob * 2**32), 2**32 - 1),
            SURVIVES=1.0 / (1.0 - self.dropout_prob),
            FUSED=fused,
            EXACT=self.exact,
            QUERIES_DIVIDE=math.gcd(T, WHOLE),
            KEYS_DIVIDE=math.gcd(S, WHOLE),
            SHARED=bias is not None and bias.shape[0] == 1,
            TOGETHER=self.together,
        )


def _tile(channels: int) -> int:
    """The power of two from 16 on that covers the channels."""
    return max(16, 1 << (channels - 1).bit_length())


def varies(plane: Any) -> bool:
    """Whether a mask or a bias has something else for every query and key."""
    return plane is not None and plane.shape[2] > 1 < plane.shape[3]


def heads_together(problem: AttentionProblem) -> int:
    """How many heads' programs take turns."""
    if problem.q_segment_ids is not None or problem.packing is not None:
        return DOCUMENTS_TOGETHER
    of_head = problem.kv_len * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    least, most = HEADS_TOGETHER
    return min(most, max(least, KEYS_TOGETHER // max(1, of_head)))


def _without_options(problem: AttentionProblem) -> bool:
    """Whether a call has nothing but causality, sinks and a scale."""
    arrays = (problem.bias, problem.mask, problem.q_segment_ids, problem.q_positions, problem.packing, problem.dropout_words)
    return problem.soft_cap is None and problem.left is None and all(x is None for x in arrays)


def _of_rows(x: Any, rank: int) -> int:
    """1 where every row of the batch has its own, as folding calls that `vmap` maps makes them."""
    return int(x is not None and x.ndim > rank)


def _plane(plane: Any) -> Plane | None:
    if plane is None:
        return None
    b, h, t, s = plane.shape
    return Plane(int(b > 1), h, int(t > 1), int(s > 1))


def _decoding(problem: AttentionProblem, exact: bool, wide: int) -> Tiles:
    rows = problem.groups * problem.q_len
    block_q = max(16, min(64, 1 << (rows - 1).bit_length()))
    if exact or wide > 128:
        return Tiles(min(block_q, 32), 32, 4, 2)
    return DECODE._replace(block_q=block_q)


def _parts(problem: AttentionProblem, tiles: Tiles) -> int:
    """As many parts of the keys as fill the device, but none too short."""
    rows = cdiv(problem.groups * problem.q_len, tiles.block_q)
    programs = max(1, problem.batch * problem.kv_heads * rows)
    return max(1, min(cdiv(PROGRAMS, programs), problem.kv_len // LEAST_PART))
