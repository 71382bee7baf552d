"""Programs for TPUs that this machine need not have: every operation with a kernel for them, compiled by libtpu for a chip.

libtpu must be importable, and these settings made before JAX starts (`make test-tpu` does both):

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-4
    ALLOW_MULTIPLE_LIBTPU_LOAD=1

Host and type are words that libtpu asks for; it compiles for any chip.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel._device import on_device
from ejkernel.kernels._linear.gates import CONSTANT
from ejkernel.kernels._pallas._chips import CHIPS
from ejkernel.kernels._registry import Backend, Platform
from ejkernel.testing.record import Record, find, records

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TRAINING, DECODING = "2x512x8x128x128", "8x1x8x128x128"
MESH = ("v5e:2x4", (2, 4), ("batch", "heads"))


def libtpu_requirement() -> str:
    """The libtpu that goes with the installed JAX, as pip takes it.

    Example:
        >>> libtpu_requirement().startswith("libtpu==")
        True
    """
    wanted = [re.split(r"[;\s]", text)[0] for text in importlib.metadata.requires("jax") or () if text.startswith("libtpu")]
    if not wanted:
        raise RuntimeError(f"jax {jax.__version__} does not say which libtpu it goes with.")
    return wanted[0]


@dataclasses.dataclass(frozen=True)
class Program:
    """One call of an operation, as text its name."""

    record: Record[Any]
    shape: Any

    def __str__(self) -> str:
        return f"{self.record.op_id}-{self.shape}"

    @property
    def entry(self) -> Any:
        return _entry(self.record)

    def problem(self, chip: str) -> Any:
        """The call as the platform sees it on a chip."""
        with on_device(CHIPS[chip].device):
            options = {name: x for name, x in self.record.options.items() if name not in ("platform", "cfg")}
            return jax.eval_shape(functools.partial(self.entry.function.signature.problem, **options), **self.arrays())

    def candidates(self, chip: str) -> list[Any]:
        return list(self.entry.function.implementation.candidates(self.problem(chip)))

    def arrays(self, place: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the call; `place`: the sharding of one with so many axes."""
        put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if place is None else place(x.ndim))
        return {name: put(x) for name, x in self.record.abstract(self.shape).items()}

    def both(self, cfg: Any = None) -> Any:
        """A function of the arrays that gives the output, and every gradient."""
        call = functools.partial(self.record.function, platform="pallas", cfg=cfg)
        loss = lambda arrays: jnp.sum(call(**arrays).astype(jnp.float32) ** 2)
        return lambda arrays: (call(**arrays), jax.grad(loss)(arrays))

    def forward(self, cfg: Any = None) -> Any:
        return lambda arrays: functools.partial(self.record.function, platform="pallas", cfg=cfg)(**arrays)

    def compiled(self, chip: str, function: Any) -> Any:
        """The program for one chip; an error where its compiler refuses."""
        one = NamedSharding(_mesh(CHIPS[chip].topology, (1,), ("x",), AxisType.Auto), PartitionSpec())
        with on_device(CHIPS[chip].device):
            return jax.jit(function).lower(self.arrays(lambda ndim: one)).compile()

    def compiled_for_mesh(self, function: Any) -> Any:
        """The program for eight chips, over which batch and heads are split."""
        mesh = _mesh(*MESH, AxisType.Explicit)

        def place(ndim: int) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec("batch", None, "heads") if ndim > 2 else PartitionSpec())

        chip = MESH[0].partition(":")[0]
        with on_device(CHIPS[chip].device), jax.set_mesh(mesh):
            return jax.jit(function).lower(self.arrays(place)).compile()


CALLS = (  # an operation and its gates, which the compiler's schedules are shown of
    "recurrent:none", "recurrent:g", "recurrent:gk", "recurrent:gv", "recurrent:gk+gv", "gated_delta_rule:none",
    "gated_delta_rule:g", "gated_delta_rule:gk", "attention:none",
)  # fmt: skip


def named(call: str, sizes: str = TRAINING, dtype: str = "bfloat16") -> Program:
    """The program of a call as text: `recurrent:gk+gv`, `attention:none`. ValueError where there is none."""
    name, _, gates = call.partition(":")
    record = find(name)
    if record is None:
        raise ValueError(f"a call must name an operation of {', '.join(one.op_id for one in records())}; got {call!r}.")
    return Program(record, record.shape(sizes, () if gates == "none" else tuple(gates.split("+")), dtype))


def programs(dtype: str, sizes: str = TRAINING) -> list[Program]:
    """Every operation that has a kernel for TPUs, with each of its gates, none, and all; kernels that operations share once."""
    found, seen = [], set()
    for record in records():
        if (entry := _entry(record)) is None:
            continue
        for gates in _combinations(record):
            kernels = (id(entry.function.implementation), gates)
            if kernels not in seen:
                seen.add(kernels)
                found.append(Program(record, record.shape(sizes, gates, dtype)))
    return found


def _combinations(record: Record[Any]) -> Iterator[tuple[str, ...]]:
    yield ()
    legal = record.legal_gates
    same = dict.fromkeys(CONSTANT, "g")  # which become the other on their way to the kernels
    for gate in legal:
        if same.get(gate) not in legal:
            yield (gate,)
    together = tuple(gate for gate in legal if gate != "g" or record.key_gate != "g")  # not two in one argument
    if len(together) > 2:
        yield together


def _entry(record: Record[Any]) -> Any:
    entries = record.registry.list_implementations(record.op_id)
    return next((e for e in entries if e.platform is Platform.PALLAS and e.backend is Backend.TPU), None)


@functools.cache
def _mesh(topology: str, shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices)[: int(np.prod(shape))].reshape(shape), names, axis_types=(kind,) * len(names))
