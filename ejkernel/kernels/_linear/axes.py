"""What the axes of a recurrence's arguments and results are, by name: this says how a mesh may split them."""

from __future__ import annotations

from ejkernel.kernels._linear.gates import GATES, Gate

Roles = tuple[str, ...]
FREE = ("batch", "heads")  # what may be split
SPLIT_TIME = "Inside jax.shard_map time may stay split: sequence_axis= names its mesh axis."
ADVICE = (
    "A state goes through all tokens of a sequence and holds all channels of a head, so only batch and heads are split: gather "
    "the other axis first, with jax.sharding.reshard(x, jax.P(...)) that names None there. " + SPLIT_TIME
)
_TOKEN: Roles = ("batch", "time", "heads")


def roles(name: str, packed: bool) -> Roles:
    """What the axes of an argument or result of that name are. Names that are not known are like `value` and `output`.

    Example:
        >>> roles("gk", packed=False), roles("g_gamma", packed=True)
        (('batch', 'time', 'heads', 'key channels'), ('packed sequences', 'heads'))
    """
    sequence = "packed sequences" if packed else "batch"
    known: dict[str, Roles] = {
        **{argument: _of_gate(gate, sequence) for argument, gate in GATES.items() if argument == gate.argument},
        "beta": _TOKEN,
        "cu_seqlens": (sequence,),
        **dict.fromkeys(("initial_state", "final", "dfinal"), (sequence, "heads", "key channels", "value channels")),
        **dict.fromkeys(("query", "key"), (*_TOKEN, "key channels")),
    }
    return known.get(name, (*_TOKEN, "value channels"))


def _of_gate(gate: Gate, sequence: str) -> Roles:
    rows = (sequence, "heads") if gate.constant else _TOKEN
    return rows if gate.channels is None else (*rows, f"{gate.channels} channels")
