"""How far the heuristic's configuration is from the best candidate, over the shared shapes.

    python -m benchmarks.heuristic_cpu

For each shape every candidate is timed, forward and forward+backward; the table shows the heuristic's time over the best's.
"""

from __future__ import annotations

import functools

from ejkernel.kernels._linear.operations import recurrent as problem_of
from ejkernel.kernels._xla import recurrent
from ejkernel.testing.shapes import CPU
from ejkernel.testing.timing import DIRECTIONS, best_times, directed


def main() -> None:
    print("| shape | direction | heuristic | its ms | best | its ms | ratio |\n|---|---|---|---|---|---|---|")
    label = lambda cfg: f"{cfg.schedule} {cfg.block_q}"
    for shape in CPU:
        arrays = shape.arrays()
        problem = problem_of(**arrays)
        chosen = recurrent.implementation.heuristic(problem)
        for direction in DIRECTIONS:
            functions = {}
            for cfg in dict.fromkeys([chosen, *recurrent.implementation.candidates(problem)]):
                call = functools.partial(lambda cfg, **a: recurrent(**a, cfg=cfg)[0], cfg)
                functions[label(cfg)] = directed(call, direction)
            times = best_times(functions, arrays, shape.cotangent(), seconds=0.4)
            best = min(times, key=times.__getitem__)
            mine = times[label(chosen)]
            print(
                f"| {shape.name} | {direction} | {label(chosen)} | {mine * 1e3:.2f} | {best} | {times[best] * 1e3:.2f} "
                f"| {mine / times[best]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
