"""Which schedule and chunk length suit a call on xla, from measurements (benchmarks/RESULTS.md).

On a CPU a step costs one pass over the states, which is cheap while they stay in the cache, and a chunk costs small matrix
products, more of them with gates per channel. So calls with such gates go step by step in the forward pass while a state is
small, others only with few states and not the smallest; the rest goes by chunks, several at a time. On accelerators a step is
a kernel launch or worse.
"""

from __future__ import annotations

import jax

from ejkernel._sizes import known
from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.config import RecurrenceConfig, Schedule

FEW_TOKENS = 8  # below, steps are cheaper than building a chunk on any device
# Rows of all heads that one turn of the loop over chunks takes, on CPUs: enough products to share among threads, little
# enough to stay in the cache. Gates per channel need a copy of the rows for each level of the tree.
SCALAR_ROWS, CHANNEL_ROWS = 2048, 1024
MOST_CHUNKS = 8  # the state goes through them unrolled, and what a turn holds adds to the memory of short calls
NARROW, MIDDLE = 32 * 32, 64 * 64  # K * V
# Elements of all states up to which steps are faster: four of 64 x 64; eight with jax 0.10, whose products are slower.
FEW_STATES = (4 if jax.__version_info__ >= (0, 11) else 8) * MIDDLE


def heuristic(problem: LinearProblem) -> LinearConfig:
    """The configuration for a call that nobody has measured."""
    B, T, H, K, V = problem.shape
    if known(T) and T <= FEW_TOKENS:
        return _config(problem, "recurrent", T)
    if problem.device.backend != "cpu":
        return _config(problem, "chunked", 64)
    per_channel = problem.gk is not None or problem.gv is not None
    wide = K * V > MIDDLE
    few = known(B, H) and B * H * K * V <= FEW_STATES and K * V > NARROW
    stepwise = not wide and (per_channel or few)
    return _config(problem, "recurrent" if stepwise else "chunked", 64 if wide and not per_channel else 32)


def no_tiles(cfg: RecurrenceConfig) -> str | None:
    """Why xla does not run with a configuration: it names tiles, which nothing here would read."""
    named = cfg.tiles()
    return f"{' and '.join(named)} must be None on xla, which chooses tiles itself" if named else None


def chunks_together(problem: LinearProblem, rows: int) -> int:
    """How many chunks of `rows` tokens one turn of the loop takes: few enough that little of the last turn stays empty."""
    if problem.device.backend != "cpu":
        return 1
    B, T, H, _, _ = problem.shape
    if not known(B, T, H, problem.sequences):
        return 1
    budget = SCALAR_ROWS if problem.gk is None and problem.gv is None else CHANNEL_ROWS
    most = min(max(budget // (B * H * rows), 1), MOST_CHUNKS)
    chunks = -(-T // rows)
    if problem.cu_seqlens is not None:  # a sequence leaves half a turn empty on average: an eighth of its length at most
        return min(max(chunks // max(problem.sequences, 1) // 4, 1), most)
    return -(-chunks // -(-chunks // most))


def candidates(problem: LinearProblem) -> list[LinearConfig]:
    """The configurations worth measuring: both schedules, and the chunk lengths that are ever best."""
    if problem.shape[1] <= FEW_TOKENS:
        return [_config(problem, "recurrent", problem.shape[1]), _config(problem, "chunked", problem.shape[1])]
    found = [_config(problem, schedule, rows) for schedule in ("recurrent", "chunked") for rows in (16, 32, 64, 128)]
    return list(dict.fromkeys(found))


def _config(problem: LinearProblem, schedule: Schedule, rows: int) -> LinearConfig:
    """A chunk no longer than the call or the mean packed sequence: a run costs the same whether it is full or not."""
    if not known(problem.shape[1], problem.sequences):
        return LinearConfig(schedule, rows, platform="xla")
    tokens = max(problem.shape[1], 1)
    if problem.cu_seqlens is not None:
        tokens = max(tokens // max(problem.sequences, 1), 1)
    longest = 1 << max(tokens - 1, 0).bit_length()
    shortest = 1 << max(rows - 1, 0).bit_length()
    return LinearConfig(schedule, min(shortest, longest), platform="xla")
