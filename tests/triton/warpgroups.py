"""Prints what `head_gate_scan_by_warpgroups` is compiled to for calls of several kinds, forward and backward.

Run in a process of its own, where kernels are compiled.
"""

import json
import sys

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.routes import route_of
from tests.triton.serialized import serialized
from tests.triton.test_routes import problem

CALLS = {  # gates, K, V, tokens, packed
    "none": ((), 128, 128, 2048, False),
    "g": (("g",), 128, 128, 2000, False),
    "g_gamma packed": (("g_gamma",), 128, 64, 2000, True),
    "g narrow packed": (("g",), 64, 64, 2048, True),
}


def main(names: list[str]) -> None:
    found = {}
    for name in names or CALLS:
        gates, K, V, tokens, packed = CALLS[name]
        call = problem(gates, K, V, tokens, packed=packed)
        seen = launches(route_of(Plan.of(call, LinearConfig())), arrays_of(call), call.cu_seqlens)
        found[name] = [
            {
                "values": launch.constants["V"],
                "warps": launch.compile(90).metadata.num_warps,
                "serialized": serialized(launch),
            }
            for launch in (*seen.forward, *seen.backward)
            if launch.name == "head_gate_scan_by_warpgroups"
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
