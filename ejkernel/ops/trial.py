"""One candidate of a tuning: running it, timing it, and what became of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.inputs import random_array
from ejkernel.ops.invocation import Invocation, Layout, is_float, split
from ejkernel.ops.plan import Plan

# Seconds; shorter calls are timed several at a time. Waiting for an accelerator and starting it again takes 0.1 to 0.3 ms,
# which must not count for more in one candidate's sample than in another's.
_SHORTEST_SAMPLE = 1e-2
_MOST_REPEATS = 256


@dataclass
class Trial:
    """A configuration under test.

    Attributes:
        config: the configuration.
        reason: why it was rejected; None while it is in the race.
        samples: seconds per call, one per round.
    """

    config: Any
    reason: str | None = None
    samples: list[float] = field(default_factory=list)
    run: Callable[[], Any] | None = field(default=None, repr=False)
    repeats: int = 1

    @property
    def seconds(self) -> float:
        """The median time of a call."""
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def noise(self) -> float:
        """The standard error of the median relative to it, from the median absolute deviation."""
        if len(self.samples) < 3:
            return 0.1  # too few to tell
        middle = self.seconds
        deviation = 1.4826 * statistics.median(abs(sample - middle) for sample in self.samples)
        return 1.2533 * deviation / math.sqrt(len(self.samples)) / max(middle, 1e-12)

    def first(self, inputs: Inputs, warmup: int) -> Any:
        """Compiles and warms up; gives the result and fixes how many calls make one sample."""
        self.run = inputs.runner(self.config)
        result = jax.block_until_ready(self.run())
        for _ in range(max(0, warmup - 1)):
            jax.block_until_ready(self.run())
        self.repeats = 1
        while self._is_short() and self.repeats < _MOST_REPEATS:
            self.repeats *= 2
        return result

    def sample(self) -> None:
        """Times the calls of one sample."""
        self.samples.append(self._timed() / self.repeats)

    def _is_short(self) -> bool:
        """Whether a sample would be too short. A long one must be seen twice: on a cold device the first ones are long."""
        return self._timed() < _SHORTEST_SAMPLE or self._timed() < _SHORTEST_SAMPLE

    def _timed(self) -> float:
        """Seconds that `repeats` calls take, one started after the other."""
        assert self.run is not None
        start = time.perf_counter()
        for _ in range(self.repeats):
            result = self.run()
        jax.block_until_ready(result)
        return time.perf_counter() - start

    def as_record(self) -> dict[str, Any]:
        """The candidate as stored: its fields with its time or the reason against it."""
        try:
            outcome: dict[str, Any] = {"config": to_fields(self.config)}
        except TypeError:  # it lost for that
            outcome = {"config": {"value": repr(self.config)}}
        if self.reason is not None:
            return {**outcome, "reason": self.reason}
        return {**outcome, "seconds": self.seconds, "noise": round(self.noise, 4), "samples": len(self.samples)}


@dataclass
class Inputs:
    """Concrete arguments of a call and what to compute of them: the result, or the result and its gradients."""

    inv: Invocation[Any, Any]
    arrays: list[Any]
    layout: Layout
    cotangents: Any = None  # of the result's structure; None: no gradients

    @classmethod
    def of(cls, inv: Invocation[Any, Any]) -> Inputs:
        """Random arguments of the invocation's shapes, repeated along the axes that are mapped around it."""
        args, kwargs = inv.kernel.random_inputs(inv, jax.random.key(0))
        arrays, layout = split(args, kwargs)
        arrays = [jnp.asarray(array) for array in arrays]
        for level in inv.mapped:
            arrays = [
                array if axis is None else jnp.repeat(jnp.expand_dims(array, axis), level.size, axis)
                for array, axis in zip(arrays, level.axes, strict=True)
            ]
        return cls(inv, jax.block_until_ready(arrays), layout)

    def with_cotangents(self, config: Any) -> Inputs:
        """The same with gradients; itself where nothing can be differentiated."""
        outputs = jax.eval_shape(self._function(config), *self.arrays)
        if not any(map(is_float, self.arrays)) or not any(map(is_float, tree_util.tree_leaves(outputs))):
            return self
        leaves = [leaf for leaf in tree_util.tree_leaves(outputs) if is_float(leaf)]
        keys = jax.random.split(jax.random.key(1), len(leaves))
        floats = [random_array(leaf.shape, leaf.dtype, key) for leaf, key in zip(leaves, keys, strict=True)]
        return Inputs(self.inv, self.arrays, self.layout, floats)

    def runner(self, config: Any) -> Callable[[], Any]:
        """A call with this configuration, jitted, as `(result, gradients)`."""
        function = self._function(config)
        if self.cotangents is None:
            compiled = jax.jit(lambda *arrays: (function(*arrays), ()))
            return lambda: compiled(*self.arrays)
        both = jax.jit(lambda arrays, cotangents: _with_gradients(function, arrays, cotangents))
        return lambda: both(self.arrays, self.cotangents)

    def _function(self, config: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = Plan(self.inv.kernel, config, self.layout, self.inv.target).inline
        for level in self.inv.mapped:
            function = jax.vmap(function, in_axes=level.axes)
        return function


def _with_gradients(function: Callable[..., Any], arrays: list[Any], cotangents: list[Any]) -> tuple[Any, list[Any]]:
    """The result, and the gradients of its floats weighted by `cotangents` with respect to the float arguments."""

    def of_floats(floats: list[Any]) -> tuple[list[Any], Any]:
        rest = iter(floats)
        result = function(*(next(rest) if is_float(array) else array for array in arrays))
        return [leaf for leaf in tree_util.tree_leaves(result) if is_float(leaf)], result

    _, pull, result = jax.vjp(of_floats, [array for array in arrays if is_float(array)], has_aux=True)
    return result, pull(cotangents)[0]
