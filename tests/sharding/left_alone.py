"""Time split by `jax.shard_map`, batch and heads left to XLA's partitioner or to explicit types: compared with the whole call.

Run as a program it prints what was found as JSON.
"""

from __future__ import annotations

import functools
import json
import traceback

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.testing.compare import relative_rms
from tests.sharding.sequences import LENGTHS, Case, values_and_gradients

P = PartitionSpec
A, E = AxisType.Auto, AxisType.Explicit
MESHES = {"automatic": (A, A, A), "explicit": (E, E, E), "mixed": (E, A, E)}
CASES = {
    "linear": Case("recurrent", ("g", "gk")),
    "delta": Case("delta", ("g",), exchange="steps", check=False),
    "packed linear": Case("recurrent", ("g", "g_gamma"), lengths=LENGTHS),
    "packed delta": Case("delta", ("g",), lengths=LENGTHS),
}
NAMES = [
    "automatic-delta", "explicit-linear", "explicit-delta", "mixed-linear", "explicit-packed linear", "explicit-packed delta",
]  # fmt: skip


def check(case: Case, types: tuple[AxisType, ...]) -> None:
    arrays, whole, local, specs = case.arrays(), case.call(), case.call(sequence_axis="s"), case.specs()
    want = jax.jit(functools.partial(values_and_gradients, lambda arrays: whole(**arrays)))(arrays)
    mesh = jax.make_mesh((2, 2, 2), ("b", "s", "h"), axis_types=types)
    time = {name: P(*(axis if axis == "s" else None for axis in spec)) for name, spec in specs.items()}
    given = {name: time[name] for name in arrays}
    out = time["query"], time["initial_state"]
    run = jax.shard_map(
        lambda arrays: local(**arrays), mesh=mesh, in_specs=(given,), out_specs=out, axis_names={"s"}, check_vma=case.check
    )
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        got = jax.jit(functools.partial(values_and_gradients, run))(placed)
    errors = jax.tree.map(lambda x, y: float(relative_rms(np.asarray(x), np.asarray(y))), got, want)
    assert all(error < 1e-5 for error in jax.tree.leaves(errors)), errors


def main() -> None:
    found = {}
    for name in NAMES:
        mesh, case = name.split("-")
        try:
            check(CASES[case], MESHES[mesh])
            found[name] = ""
        except Exception:  # every check reports, whatever went wrong in another
            found[name] = traceback.format_exc(limit=-6)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
