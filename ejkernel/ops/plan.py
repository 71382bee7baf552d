"""Running a kernel with a chosen configuration: inline in a trace, compiled once for eager calls, with its own gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from ejkernel._device import Device, on_device
from ejkernel.ops.invocation import Layout, is_array, is_float
from ejkernel.ops.kernel import Kernel


class Plan:
    """One kernel with one configuration and one arrangement of arguments, as a function of the arrays alone."""

    def __init__(self, kernel: Kernel[Any, Any], cfg: Any, layout: Layout, device: Device):
        """
        Args:
            layout: where the arrays are among the arguments, and the static values between them.
            device: where the call computes; while it is traced, its arrays do not say so.
        """
        self.kernel, self.cfg, self.layout, self.device = kernel, cfg, layout, device
        self.inline: Callable[..., Any] = _with_own_gradient(self) if kernel.has_own_gradient else self._run

    def _run(self, *arrays: Any) -> Any:
        args, kwargs = self.layout.rebuild(arrays)
        with on_device(self.device):
            return self.kernel.run(*args, cfg=self.cfg, **kwargs)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The same as one jitted function."""
        function = functools.partial(self.inline)
        function.__name__ = self.kernel.op_id  # type: ignore[attr-defined]  # what a profile shows
        return jax.jit(function)


def _with_own_gradient(plan: Plan) -> Callable[..., Any]:
    """`run` whose gradient is the kernel's own `vjp`. Without a gradient being asked for, `run` itself runs."""
    kernel, cfg, layout = plan.kernel, plan.cfg, plan.layout
    function = jax.custom_vjp(plan._run)

    def forward(*arrays: Any) -> tuple[Any, Any]:
        arrays = tuple(x if is_array(x) else jnp.asarray(x) for x in arrays)  # without `jit` a Python number comes as it is
        args, kwargs = layout.rebuild(arrays)
        y, residuals = kernel.fwd_with_residuals(*args, cfg=cfg, **kwargs)
        return y, (residuals, y, arrays)

    def backward(kept: Any, dy: Any) -> tuple[Any, ...]:
        residuals, y, arrays = kept
        args, kwargs = layout.rebuild(arrays)
        _refuse_keyword_floats(kernel, kwargs)
        gradients = kernel.vjp(residuals, y, dy, *args, cfg=cfg, **kwargs)
        flat = _gradient_leaves(kernel, args, gradients)
        return (*flat, *(_zero(leaf) for leaf in tree_util.tree_leaves(kwargs) if is_array(leaf)))

    function.defvjp(forward, backward)
    return function


def _gradient_leaves(kernel: Kernel[Any, Any], args: tuple[Any, ...], gradients: Any) -> list[Any]:
    """The gradients in the order of the arrays, zeros where the kernel gave None."""
    if not isinstance(gradients, tuple) or len(gradients) != len(args):
        given = f"a tuple of {len(gradients)}" if isinstance(gradients, tuple) else type(gradients).__name__
        raise TypeError(f"{kernel!r}.vjp must return a tuple of {len(args)}, one gradient per argument; got {given}.")
    flat: list[Any] = []
    for position, (argument, gradient) in enumerate(zip(args, gradients, strict=True)):
        treedef: Any
        leaves, treedef = tree_util.tree_flatten(argument)
        parts = [None] * len(leaves) if gradient is None else treedef.flatten_up_to(gradient)
        for leaf, part in zip(leaves, parts, strict=True):
            if is_array(leaf):
                flat.append(_checked_gradient(kernel, position, leaf, part))
    return flat


def _checked_gradient(kernel: Kernel[Any, Any], position: int, leaf: Any, gradient: Any) -> Any:
    if gradient is None or not is_float(leaf):
        return _zero(leaf)
    if jnp.shape(gradient) != jnp.shape(leaf):
        raise ValueError(
            f"{kernel!r}.vjp gave argument {position} a gradient of shape {list(jnp.shape(gradient))}; "
            f"the argument has shape {list(jnp.shape(leaf))}."
        )
    return jnp.asarray(gradient, leaf.dtype)


def _refuse_keyword_floats(kernel: Kernel[Any, Any], kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if any(is_array(leaf) and is_float(leaf) for leaf in tree_util.tree_leaves(value)):
            raise TypeError(
                f"{kernel!r} defines its own gradient, which covers positional arguments; pass {name!r} by position."
            )


def _zero(leaf: Any) -> Any:
    return jnp.zeros_like(leaf) if is_float(leaf) else np.zeros(jnp.shape(leaf), jax.dtypes.float0)
