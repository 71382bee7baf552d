"""`Executor`: picks a configuration for a call and runs it."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as inside_jit

from ejkernel._checking import checking
from ejkernel._device import mesh_platform, planned, underneath
from ejkernel.ops import collecting
from ejkernel.ops.config.codec import check_config
from ejkernel.ops.config.overlay import active
from ejkernel.ops.config.policy import VARIABLE
from ejkernel.ops.config.selection import Choice, ConfigSelectorChain
from ejkernel.ops.invocation import Invocation, mapped_axes, split, with_arrays_of_others
from ejkernel.ops.kernel import Cfg, Kernel, Out, named_arguments
from ejkernel.ops.key import thread_settings
from ejkernel.ops.notices import ValueWarning, warn_once
from ejkernel.ops.plan import Plan

_LIMIT = 4096


class Executor:
    """Runs kernels with the configurations that a chain chooses.

    In a trace the kernel's own operations are all that is added to the program. An eager call runs one compiled function,
    found again by the shapes, dtypes and static values of its arguments.

    Example:
        >>> class Power(Kernel[int, jax.Array]):
        ...     op_id = "power"
        ...     def run(self, x, *, cfg):
        ...         return x**cfg
        ...     def heuristic_cfg(self, inv):
        ...         return len(inv.args[0].shape)
        >>> executor = Executor(ConfigSelectorChain())
        >>> float(executor(Power(), np.float32(3))), float(executor(Power(), np.float32(3), _cfg=2))
        (1.0, 9.0)
        >>> executor.choose(Power(), np.ones((5, 5), np.float32)).config
        2
    """

    def __init__(self, chooser: ConfigSelectorChain):
        """Args: chooser: what picks the configurations."""
        self.chooser = chooser
        self._plans: dict[Any, Plan] = {}  # by kernel, configuration, arrangement of arguments and device
        self._known: dict[Any, Plan] = {}  # by all that a choice depends on

    def __call__(self, kernel: Kernel[Cfg, Out], *args: Any, _cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Runs `kernel` on the arguments.

        Args:
            *args, **kwargs: pytrees; their arrays are data, all other leaves are static and must be hashable.
            _cfg: an explicit configuration; it wins over everything and is used as given.
        """
        if not isinstance(kernel, Kernel):
            raise _no_kernel(kernel)
        args, kwargs = kernel.prepare(*with_arrays_of_others(args, kwargs))
        if collecting.current() is not None:
            return self._listed(kernel, args, kwargs, _cfg)
        if checked := checking():
            for check in kernel.value_checks(named_arguments(kernel, args, kwargs)):
                check.make()
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        arrays, signature, concrete = _signature(leaves)
        name = (kernel, treedef, signature, _cfg, *self._surroundings())
        try:
            plan = self._known.get(name)
        except TypeError as problem:
            if _cfg is not None:
                check_config(_cfg, f"{kernel.op_id}: cfg")
            raise TypeError(f"{kernel.op_id}: every static argument must be hashable ({problem}).") from None
        if plan is None:
            _refuse_shapes(kernel, args, kwargs)
            inv = Invocation.of(kernel, *args, **kwargs)
            plan = self._plan(inv, self.chooser.choose(inv, _cfg).config)
            _remember(self._known, name, plan)
            readable = not inv.mapped and all(map(_at_hand, arrays))  # under vmap, what is underneath has another shape
            if not checked and inv.target.backend == "cpu" and not inside_jit() and readable:
                _warn_of_values(inv.kernel, named_arguments(kernel, *tree_util.tree_map(underneath, (args, kwargs))))
        out: Out = plan.compiled(*arrays) if concrete and not inside_jit() else plan.inline(*arrays)
        return out

    def choose(self, kernel: Kernel[Cfg, Out], *args: Any, _cfg: Cfg | None = None, **kwargs: Any) -> Choice:
        """The configuration that a call would run with, and which level chose it, without running it."""
        args, kwargs = kernel.prepare(*with_arrays_of_others(args, kwargs))
        return self.chooser.choose(Invocation.of(kernel, *args, **kwargs), _cfg)

    def _listed(self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None) -> Out:
        """Adds the call to the list being made, and runs it with any configuration, since only shapes matter."""
        calls, inv = collecting.current(), Invocation.of(kernel, *args, **kwargs)
        if cfg is None:
            assert calls is not None
            calls.add(self.chooser, inv)
        out: Out = self._plan(inv, kernel.heuristic_cfg(inv) if cfg is None else cfg).inline(*split(args, kwargs)[0])
        return out

    def _plan(self, inv: Invocation[Any, Any], config: Any) -> Plan:
        """The plan for a configuration, shared by all shapes that have the same one."""
        config, device = inv.kernel.settled(inv, config), inv.target
        _, layout = split(inv.args, inv.kwargs)
        name = (inv.kernel, config, layout, device)
        plan = self._plans.get(name)
        if plan is None:
            plan = Plan(inv.kernel, config, layout, device)
            _remember(self._plans, name, plan)
        return plan

    def _surroundings(self) -> tuple[Any, ...]:
        """What else the choice depends on."""
        return self.chooser.generation, active(), os.environ.get(VARIABLE), planned(), mesh_platform(), *thread_settings()


def _no_kernel(kernel: Any) -> TypeError:
    """What to say where something else stands in a kernel's place."""
    if isinstance(kernel, type):
        return TypeError(f"kernel must be an instance; got the class {kernel.__name__} itself: call {kernel.__name__}().")
    return TypeError(f"kernel must be an instance of ejkernel.ops.Kernel, such as Attention(); got {kernel!r}.")


def _signature(leaves: list[Any]) -> tuple[list[Any], tuple[Any, ...], bool]:
    """The arrays among the leaves, what a choice depends on of all leaves, and whether every array has a value.

    The tracers of an eager `jax.grad` or `jax.vmap` have a value underneath.
    """
    arrays: list[Any] = []
    signature: list[Any] = []
    traced, concrete = False, True
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            value = leaf
            if isinstance(leaf, jax.core.Tracer):
                traced, value = True, underneath(leaf)
                concrete = concrete and value is not None
            arrays.append(leaf)
            signature += (leaf.aval, getattr(value, "sharding", None))
        elif isinstance(leaf, (np.ndarray, np.generic)):
            arrays.append(leaf)
            signature += (leaf.shape, leaf.dtype)
        else:
            signature += (type(leaf), leaf)
    if traced:
        signature.append(mapped_axes(arrays))
    return arrays, tuple(signature), concrete


def _refuse_shapes(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """TypeError naming an argument that is the description of an array: a call computes, and needs the values."""
    for name, value in named_arguments(kernel, args, kwargs).items():
        for leaf in tree_util.tree_leaves(value):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{kernel.op_id}: {name} must hold arrays; got {leaf}, which has no values. jax.eval_shape calls a "
                    f"function on shapes alone, and `Executor.choose` says how such a call would run."
                )


def _at_hand(array: Any) -> bool:
    """Whether this process can read all of an array: one of several processes must not ask for others' parts alone."""
    value = underneath(array)
    return value is not None and getattr(value, "is_fully_addressable", True)


def _warn_of_values(kernel: Kernel[Any, Any], named: dict[str, Any]) -> None:
    """Warns once of values that are legal but look like a mistake. On a CPU alone: a look at a GPU waits for it."""
    for check in kernel.value_checks(named):
        if check.doubtful and (mistake := check.mistake()):
            warn_once((kernel.op_id, "values", check.argument), f"{kernel.called}: {mistake}", ValueWarning)


def _remember(store: dict[Any, Plan], name: Any, plan: Plan) -> None:
    if len(store) >= _LIMIT:  # static values that never repeat must not fill the memory
        store.clear()
    store[name] = plan
