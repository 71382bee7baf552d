"""What of a call is known when it is traced: its sizes, its configuration and what the device has room for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import is_interpreted, shared_memory_of
from ejkernel.kernels._delta import DeltaProblem
from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.linear.kernels.decode_step import decode_steps

Problem = LinearProblem | DeltaProblem  # chunks serve both recurrences
GATES = ("g", "g_gamma", "gk", "gv")
LEAST_CAPABILITY = 80
INTERPRETED_AS = 90  # the interpreter knows no device: what it runs is planned for an H100 or H200
ROWS = (16, 32, 64, 128)  # legal block_q
WEAK_LIMIT = 80.0
MIN_SEGMENT = 8
STATE_BYTES = 1 << 30


def interpreted() -> bool:
    """Whether kernels run on the host, for tests of the mathematics."""
    return is_interpreted(decode_steps)


def capability_of(problem: Problem) -> int | None:
    """The compute capability that a call is planned for; None where kernels would have to be compiled for no NVIDIA GPU."""
    capability = problem.device.capability
    return INTERPRETED_AS if capability is None and interpreted() else capability


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static data of a call, from which its route is chosen. Hashable: what is compiled is compiled once for each.

    Attributes:
        gates: those of `GATES` that are given.
        K, V: key and value channels.
        C: rows of a chunk.
        operand: dtype of the operands of matrix products.
        precision: Triton's name of how float32 operands are multiplied.
        shared: bytes of shared memory that a program may take.
        warpgroups: whether kernels may be taken whose products are of whole warpgroups, asynchronous, from shared memory: on
            compute capability 9.0, where this Triton has their Gluon.
        weak_limit: a chunk is weakly gated where the sizes of its log decays add up to at most this in every channel.
        min_segment: chunks of the shortest segment that is worth its own programs; shorter ones cost more in their combination
            than they save.
        state_bytes: bytes of states that a forward pass may store where no gradient is to come; a longer call goes in windows.
        segment: chunks of a segment, where backward passes need those of the forward pass, on every device of a mesh.
    """

    schedule: str
    gates: frozenset[str]
    K: int
    V: int
    C: int
    scale: float
    reverse: bool
    operand: np.dtype
    precision: str
    output: np.dtype
    shared: int
    warpgroups: bool = False
    block_k: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    weak_limit: float = WEAK_LIMIT
    min_segment: int = MIN_SEGMENT
    state_bytes: int = STATE_BYTES
    segment: int | None = None

    @classmethod
    def of(cls, problem: Problem, cfg: RecurrenceConfig) -> Plan:
        _, T, _, K, V = problem.shape
        operand, precision = _operands(problem)
        return cls(
            schedule=cfg.schedule,
            gates=frozenset(GATES) & frozenset(problem.differentiable),
            K=K,
            V=V,
            C=max(16, min(cfg.block_q, 1 << max(0, T - 1).bit_length(), 128)),
            scale=problem.scale,
            reverse=problem.reverse,
            operand=operand,
            precision=precision,
            output=problem.output_dtype,
            shared=shared_memory_of(capability_of(problem) or LEAST_CAPABILITY),
            warpgroups=HAS_GLUON and problem.device.capability == 90,  # not of what is interpreted
            block_k=cfg.block_k,
            block_d=cfg.block_d,
            num_warps=cfg.num_warps,
            num_stages=cfg.num_stages,
        )

    @property
    def sign(self) -> int:
        return -1 if self.reverse else 1

    @property
    def exact(self) -> bool:
        """Whether products are as good as float32's."""
        return self.operand == np.float32 and self.precision == "tf32x3"

    @property
    def bfloat16(self) -> bool:
        """Whether products are of bfloat16 operands."""
        return self.operand == jnp.bfloat16

    @property
    def per_head(self) -> bool:
        """Whether nothing but g of rank 3 and g_gamma decays."""
        return not self.gates & {"gk", "gv"}

    @property
    def named_scan_tiles(self) -> bool:
        """Whether the configuration names what a scan over the chunks would otherwise choose itself."""
        return any((self.block_d, self.num_warps, self.num_stages))


def _operands(problem: Problem) -> tuple[np.dtype, str]:
    """bfloat16 inputs are multiplied as such. float16 ones as tf32, which has float16's digits and float32's range (a state
    may pass 65504); float32 ones as three tf32 products, whose sum has float32's digits."""
    dtypes = {x.dtype.name for x in (problem.query, problem.key, problem.value)}
    if dtypes == {"bfloat16"}:
        return np.dtype(jnp.bfloat16), "tf32"
    return np.dtype(np.float32), "tf32x3" if "float32" in dtypes else "tf32"


def tile(channels: int, most: int) -> int:
    """The power of two from 16 to `most` that covers the channels, or `most` when none does."""
    return max(16, min(most, 1 << (channels - 1).bit_length()))


def gate_parts(plan: Plan, *gates: Any) -> int:
    """bfloat16 parts that hold a log decay: one for a lone bfloat16 gate, three for float32's digits, else two."""
    given = [x for x in gates if x is not None]
    if len(given) == 1 and given[0].dtype == jnp.bfloat16:
        return 1
    return 3 if plan.exact else 2
