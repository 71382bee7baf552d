"""How far the heuristic's configuration is from the best candidate, over the shared shapes.

    python -m benchmarks.heuristic_cpu

For each shape every candidate is timed, forward and forward+backward; the table shows the heuristic's time over the best's.
"""

from __future__ import annotations

import functools

import jax

from benchmarks.linear_attention_cpu import directions
from benchmarks.shapes import CPU, Shape
from benchmarks.timing import best_times
from ejkernel.kernels._linear.platform_function import recurrent_problem
from ejkernel.kernels._xla import recurrent


def arrays_of(shape: Shape) -> dict[str, jax.Array]:
    """Normal q, k, v and mild gates."""
    normal = lambda i, *size: jax.random.normal(jax.random.key(i), size)
    rows = (shape.batch, shape.time, shape.heads)
    sizes = {
        "query": (*rows, shape.key_channels),
        "key": (*rows, shape.key_channels),
        "value": (*rows, shape.value_channels),
        "g": rows,
        "gk": (*rows, shape.key_channels),
        "gv": (*rows, shape.value_channels),
    }
    arrays = {name: normal(i, *sizes[name]) for i, name in enumerate(("query", "key", "value"))}
    return arrays | {gate: jax.nn.log_sigmoid(normal(7 + i, *sizes[gate])) / 16 for i, gate in enumerate(shape.gates)}


def main() -> None:
    print("| shape | direction | heuristic | its ms | best | its ms | ratio |\n|---|---|---|---|---|---|---|")
    label = lambda cfg: f"{cfg.schedule} {cfg.block_q}"
    for shape in CPU:
        arrays = arrays_of(shape)
        problem = recurrent_problem(**arrays)
        chosen = recurrent.heuristic(problem)
        for direction in ("forward", "forward+backward"):
            functions = {}
            for cfg in dict.fromkeys([chosen, *recurrent.candidates(problem)]):
                call = functools.partial(lambda cfg, **a: recurrent(**a, cfg=cfg)[0], cfg)
                functions[label(cfg)] = directions(call, direction)
            times = best_times(functions, arrays, jax.numpy.ones_like(arrays["value"]), seconds=0.4)
            best = min(times, key=times.__getitem__)
            mine = times[label(chosen)]
            print(
                f"| {shape.name} | {direction} | {label(chosen)} | {mine * 1e3:.2f} | {best} | {times[best] * 1e3:.2f} "
                f"| {mine / times[best]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
