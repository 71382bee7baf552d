"""Prints what the scans by warpgroups are compiled to for calls of several kinds, forward and backward.

Run in a process of its own, where kernels are compiled.
"""

import json
import sys

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule.routes import route_of as route_of_delta
from ejkernel.kernels._triton.linear._launches import Launches, arrays_of, launches
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.routes import route_of
from tests.triton.serialized import serialized
from tests.triton.test_delta import TRITON
from tests.triton.test_delta import problem as delta_problem
from tests.triton.test_routes import problem

CALLS = {  # gates, K, V, tokens, packed
    "none": ((), 128, 128, 2048, False),
    "g": (("g",), 128, 128, 2000, False),
    "g_gamma packed": (("g_gamma",), 128, 64, 2000, True),
    "g narrow packed": (("g",), 64, 64, 2048, True),
}
DELTA_CALLS = {  # gate, K, V, tokens, packed
    "delta none": (None, 128, 64, 2000, True),
    "delta head": ("head", 128, 128, 2048, False),
    "delta head narrow": ("head", 64, 64, 2000, False),
    "delta channel": ("channel", 128, 128, 2000, False),
}


def launches_of(name: str) -> Launches:
    if name in DELTA_CALLS:
        gate, K, V, tokens, packed = DELTA_CALLS[name]
        rule = delta_problem(gate, K, V, tokens, packed=packed)
        return launches(route_of_delta(delta_plan(rule, TRITON.heuristic(rule))), arrays_of(rule), rule.cu_seqlens)
    gates, K, V, tokens, packed = CALLS[name]
    call = problem(gates, K, V, tokens, packed=packed)
    return launches(route_of(Plan.of(call, LinearConfig())), arrays_of(call), call.cu_seqlens)


def main(names: list[str]) -> None:
    found = {}
    for name in names or (*CALLS, *DELTA_CALLS):
        seen = launches_of(name)
        found[name] = [
            {
                "kernel": launch.name,
                "values": launch.constants["V"],
                "warps": launch.compile(90).metadata.num_warps,
                "serialized": serialized(launch),
            }
            for launch in (*seen.forward, *seen.backward)
            if launch.name.endswith("_by_warpgroups")
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
