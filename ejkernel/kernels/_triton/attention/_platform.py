"""Softmax attention on Triton."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._attention.direct import direct_weights
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._triton.attention._launches import forward
from ejkernel.kernels._triton.attention._plan import (
    LEAST_CAPABILITY,
    LEGAL_BLOCKS,
    LEGAL_WARPS,
    MAX_CHANNELS,
    Plan,
    capability_of,
    interpreted,
)
from ejkernel.kernels._triton.attention._solve import DIFFERENTIABLE, flash_output

HEURISTIC = AttentionConfig("flash", platform="triton", backend="gpu")
CHANGES = (
    {"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 3},
    {"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 2},
    {"block_q": 128, "block_k": 64, "num_warps": 8, "num_stages": 3},
    {"block_q": 128, "block_k": 128, "num_warps": 8, "num_stages": 2},
    {"block_q": 128, "block_k": 32, "num_warps": 4, "num_stages": 3},
)
DECODING_CHANGES = ({"block_k": 128, "num_stages": 2}, {"block_k": 32, "num_stages": 4}, {"num_warps": 2})


class TritonAttention(Implementation[AttentionProblem, AttentionConfig]):
    """Softmax attention with every option on NVIDIA GPUs from compute capability 8.0.

    What a field of a configuration does:

        block_q      queries of the forward kernel's tile; decoding: rows, which are the queries of all heads of a group
        block_k      keys of the forward kernel's tile
        num_warps    of the forward kernel
        num_stages   loads in flight in the forward kernel

    The gradient's tiles follow from channels, dtype and device.
    """

    def supports(self, problem: AttentionProblem) -> str | None:
        capability = capability_of(problem)
        if capability is None or capability < LEAST_CAPABILITY:
            has = "is none" if capability is None else f"has {capability / 10}"
            least = f"{LEAST_CAPABILITY / 10}"
            return f"Triton kernels need an NVIDIA GPU of compute capability {least} or newer; {problem.device} {has}"
        if not all(isinstance(n, int) for x in jax.tree.leaves(problem) for n in x.shape):
            return "Triton kernels are compiled for sizes, and some of this call's are symbolic: platform='xla' takes those"
        if problem.dtype == jnp.float64:
            return "Triton kernels sum in float32; float64 is for platform='xla'"
        if problem.softmax_dtype != jnp.float32:
            return f"the softmax of Triton kernels is in float32, not {problem.softmax_dtype}: platform='xla' has others"
        if max(problem.head_dim, problem.value_dim) > MAX_CHANNELS:
            return f"channels of keys and values go up to {MAX_CHANNELS}; got {problem.head_dim} and {problem.value_dim}"
        return None

    def refuses(self, problem: AttentionProblem, cfg: AttentionConfig) -> str | None:
        """A configuration that names other tiles than a candidate is compiled to see whether they fit, once for each call."""
        if cfg.schedule != "flash":
            return f"triton has only schedule 'flash', not {cfg.schedule!r}"
        for name in ("block_q", "block_k"):
            if getattr(cfg, name) not in (None, *LEGAL_BLOCKS):
                return f"{name} must be None or one of {', '.join(map(str, LEGAL_BLOCKS))} on triton; got {getattr(cfg, name)}"
        if cfg.num_warps not in (None, *LEGAL_WARPS):
            return f"num_warps must be None or one of {', '.join(map(str, LEGAL_WARPS))}; got {cfg.num_warps}"
        capability = problem.device.capability
        if capability is None or interpreted() or _tiles(cfg) == (None,) * 4:
            return None
        return _does_not_fit(problem, cfg, capability)

    def heuristic(self, problem: AttentionProblem) -> AttentionConfig:
        return HEURISTIC

    def candidates(self, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        """The heuristic first; none that does not fit."""
        changes: Sequence[dict[str, Any]] = DECODING_CHANGES if Plan.of(problem, HEURISTIC).grouped else CHANGES
        others = [dataclasses.replace(HEURISTIC, **change) for change in changes]
        return [HEURISTIC, *(cfg for cfg in others if self.refuses(problem, cfg) is None)]

    def route(self, problem: AttentionProblem, cfg: AttentionConfig) -> str:
        return route_name(Plan.of(problem, cfg))

    def solve(
        self, problem: AttentionProblem, cfg: AttentionConfig
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"] | None]:
        # A packing's rows say nothing that its segment ids do not.
        alone = dataclasses.replace(problem, packing=None, return_weights=False)
        return flash_output(alone, Plan.of(problem, cfg)), _weights(problem) if problem.return_weights else None

    def versions(self) -> Mapping[str, str]:
        import triton

        return {"triton": triton.__version__}


_weights = jax.jit(direct_weights)


def route_name(plan: Plan) -> str:
    """What `report()` shows."""
    if not plan.grouped:
        return "flash"
    return "flash decoding" if plan.parts == 1 else f"flash decoding, keys in {plan.parts} parts"


def _tiles(cfg: AttentionConfig) -> tuple[int | None, ...]:
    return cfg.block_q, cfg.block_k, cfg.num_warps, cfg.num_stages


def _does_not_fit(problem: AttentionProblem, cfg: AttentionConfig, capability: int) -> str | None:
    """The reason why the forward kernel does not compile for a GPU; None when it does. A call compiles it no second time."""
    if 0 in (*problem.query.shape, problem.kv_len):
        return None
    leaves = {name: x for name, x in vars(problem).items() if hasattr(x, "dtype") and hasattr(x, "shape")}
    shapes = tuple((name, x.shape, x.dtype) for name, x in leaves.items())
    return _first_failure(Plan.of(problem, cfg), shapes, capability)


@functools.cache
def _first_failure(plan: Plan, shapes: tuple[Any, ...], capability: int) -> str | None:
    from triton.errors import TritonError

    given = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes}
    arrays = {name: x for name, x in given.items() if name in DIFFERENTIABLE}
    others = {name: x for name, x in given.items() if name not in DIFFERENTIABLE}
    seen: list[Launch] = []
    with instead_of_launching(seen.append):
        jax.eval_shape(functools.partial(forward, plan), arrays, others)
    for launch in seen:
        try:
            launch.compile(capability)
        except (RuntimeError, TritonError) as error:
            return str(error).strip().rstrip(".")
    return None
