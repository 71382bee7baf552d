"""What the three linear operations share as kernels: which implementation runs, and what may be tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ejkernel.kernels._linear import LinearConfig, LinearFunction, LinearProblem
from ejkernel.kernels._registry import Backend, as_platform, kernel_registry
from ejkernel.ops import Invocation, Kernel

Config = TypeVar("Config", bound=LinearConfig)
PER_TOKEN = ("query", "key", "value", "g", "gk", "gv")
DECODED_TOKENS = 16  # the most that a call of a decoder has: one, or a few that are verified together (triton's MAX_STEPS)


class LinearKernel(Kernel[LinearConfig, tuple[jax.Array, jax.Array]]):
    """A linear operation as the executor sees it: solves a `LinearProblem` on the platform that its config names."""

    def run(  # type: ignore[override]  # this kernel's own arguments
        self, problem: LinearProblem, *, platform: str | None = None, cfg: LinearConfig
    ) -> tuple[jax.Array, jax.Array]:
        """`(output, final_state)`: `[B, T, H, V]` and `[N, H, K, V]`."""
        if not isinstance(cfg, LinearConfig):
            raise TypeError(f"cfg must be a configuration of {self.op_id} or None; got {type(cfg).__name__}.")
        return self._implementation(problem, platform, cfg).solve(problem, cfg)

    def heuristic_cfg(self, inv: Invocation) -> LinearConfig:
        """The choice of the best platform that supports the call."""
        problem, platform = inv.arguments["problem"], inv.arguments["platform"]
        return self._own(self._supporting(problem, platform).heuristic(problem))

    def candidate_cfgs(self, inv: Invocation) -> Iterable[LinearConfig]:
        """What every platform that supports the call would measure; one that was asked for is alone."""
        problem, asked = inv.arguments["problem"], as_platform(inv.arguments["platform"])
        for entry in kernel_registry.list_implementations(self.op_id):
            if asked in (None, entry.platform) and kernel_registry.refusal(entry, problem) is None:
                yield from map(self._own, cast(LinearFunction, entry.function).candidates(problem))

    def differentiable(self, inv: Invocation) -> bool:
        """Calls of a few tokens are steps of a decoder, which nobody trains through: they are tuned for the step alone."""
        return inv.arguments["problem"].shape[1] > DECODED_TOKENS

    def check_cfg(self, inv: Invocation, cfg: LinearConfig) -> str | None:
        """The reason why the call cannot run with `cfg`."""
        try:
            self._implementation(inv.arguments["problem"], inv.arguments["platform"], cfg)
        except ValueError as reason:
            return str(reason)
        return None

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens are a length, and so is the number of packed sequences."""
        field = name.removeprefix("problem.")
        return (1,) if field in PER_TOKEN else (0,) if field == "cu_seqlens" else ()

    def random_inputs(self, inv: Invocation, key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Mild gates, and sequences of nearly equal length: normal numbers would amplify, zero lengths would do nothing."""
        from ejkernel.ops.inputs import random_arguments  # only tuning needs it

        (problem,), kwargs = random_arguments(inv, key)
        gates = {
            name: (jax.nn.log_sigmoid(gate.astype(jnp.float32)) / 16).astype(gate.dtype)
            for name in ("g", "g_gamma", "gk", "gv")
            if (gate := getattr(problem, name)) is not None
        }
        if problem.cu_seqlens is not None:
            tokens, sequences = problem.query.shape[1], problem.sequences
            gates["cu_seqlens"] = jnp.round(jnp.linspace(0, tokens, sequences + 1)).astype(jnp.int32)
        return (dataclasses.replace(problem, **gates),), kwargs

    def _supporting(self, problem: LinearProblem, platform: Any, backend: Any = None) -> LinearFunction:
        return cast(LinearFunction, kernel_registry.select(self.op_id, platform, backend, problem).function)

    def _implementation(self, problem: LinearProblem, platform: str | None, cfg: LinearConfig) -> LinearFunction:
        asked, configured = as_platform(platform), as_platform(cfg.platform)
        if asked is not None and configured is not None and asked is not configured:
            raise ValueError(f"platform {str(asked)!r} was asked for, but cfg is for platform {str(configured)!r}.")
        return self._supporting(problem, asked or configured, None if cfg.backend == Backend.ANY else cfg.backend)

    def _own(self, cfg: LinearConfig) -> LinearConfig:
        """A platform's config in this operation's class."""
        assert self._config_cls is not None
        return self._config_cls(**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)})
