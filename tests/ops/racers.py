"""A kernel whose candidates misbehave in every way that a candidate can."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.trial import Trial


@dataclass(frozen=True)
class Racer:
    """`work` is how much useless work is done on the way; `fault` is what goes wrong."""

    work: int = 300
    fault: str = "none"


release = threading.Event()  # lets the hanging candidates go when a test is over


def burn(x: jax.Array, work: int) -> jax.Array:
    """`x` itself, after work that the compiler cannot leave out."""
    spent = jax.lax.fori_loop(0, work, lambda _, y: jnp.sin(y) + 0.1, jnp.broadcast_to(x.ravel()[:1], (4096,)) * 0.0)
    return jnp.where(spent[0] > 1e6, jnp.nan, 1.0).astype(x.dtype) * x


@jax.custom_vjp
def wrong_gradient(x: jax.Array) -> jax.Array:
    """`x` with three times its gradient."""
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, d: (3 * d,))


def time_by_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each racer take a microsecond per unit of work, however busy the machine that runs the tests is."""

    def sample(self: Trial) -> None:
        assert self.run is not None
        jax.block_until_ready(self.run())
        self.samples.append(self.config.work * 1e-6)

    monkeypatch.setattr(Trial, "sample", sample)


class Race(Kernel[Racer, jax.Array]):
    """y = 2 x by a configurable number of detours."""

    op_id = "race"

    def __init__(self, *candidates: Racer, heuristic: Racer | None = None):
        super().__init__()
        self.candidates, self.heuristic = candidates, heuristic or Racer()

    def run(self, x: jax.Array, *, cfg: Racer) -> jax.Array:
        if cfg.fault == "raises":
            raise RuntimeError("this candidate cannot be built")
        if cfg.fault == "exits":
            raise SystemExit(3)
        if cfg.fault == "interrupts":
            raise KeyboardInterrupt
        if cfg.fault == "memory":
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.0TiB")
        if cfg.fault == "hangs compiling":
            release.wait(60)
        if cfg.fault == "hangs running":
            x = jax.pure_callback(_wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        y = burn(x, cfg.work) * 2
        if cfg.fault == "wrong":
            return y * 1.5
        if cfg.fault == "nan":
            return y.at[0].set(jnp.nan)
        if cfg.fault == "shape":
            return y[None]
        return wrong_gradient(y) if cfg.fault == "wrong gradient" else y

    def heuristic_cfg(self, inv: Invocation) -> Racer:
        return self.heuristic

    def candidate_cfgs(self, inv: Invocation):
        return self.candidates

    def check_cfg(self, inv: Invocation, cfg: Racer) -> str | None:
        return "it says so" if cfg.fault == "unsupported" else None


def _wait(x: np.ndarray) -> np.ndarray:
    release.wait(60)
    return np.asarray(x)
