"""Prints what the kernels by warpgroups are compiled to for calls of several kinds, forward and backward.

Run in a process of its own, where kernels are compiled.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import triton

from ejkernel.callib import Launch
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
    "g wide values": (("g",), 64, 128, 2048, False),
    "gk": (("gk",), 128, 128, 2048, False),
    "gk segments": (("gk",), 128, 128, 16384, False),
    "gk narrow packed": (("gk",), 64, 64, 2000, True),
    "gk wide values packed": (("gk",), 64, 128, 2000, True),
    "g wide": (("g",), 256, 512, 2048, False),
    "gk wide packed": (("gk",), 256, 128, 2000, True),
    "gk gv": (("gk", "gv"), 128, 128, 2048, False),
    "gk gv wide values packed": (("gk", "gv"), 64, 128, 2000, True),
}
DELTA_CALLS = {  # gate, K, V, tokens, packed
    "delta none": (None, 128, 64, 2000, True),
    "delta head": ("head", 128, 128, 2048, False),
    "delta head narrow": ("head", 64, 64, 2000, False),
    "delta channel": ("channel", 128, 128, 2000, False),
}


def overwritten(launch: Launch) -> bool:
    """Whether a register is written while a product still reads its left operand from it: seen of waits that do not name it."""
    with tempfile.TemporaryDirectory() as folder:
        code = pathlib.Path(folder) / "kernel.cubin"
        code.write_bytes(launch.compile(90).asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(code)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    groups: list[set[int]] = [set()]  # of products under way: registers that they read; the last is not closed yet
    for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", listing, re.MULTILINE):
        if product := re.match(r"HGMMA\S*\s+\w+,\s*(?:R(\d+)|gdesc)", line):
            groups[-1] |= set() if product[1] is None else {int(product[1]) + i for i in range(4)}
            groups += [set()] if "gsb0" in line else []
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", line):
            groups = groups[len(groups) - 1 - min(int(wait[1], 16), len(groups) - 1) :]
        elif (wrote := re.match(r"(\S+)\s+(?:U?P\w+,\s*)*R(\d+)\b", line)) and not re.match(r"ST|SYNCS|LDGSTS|R2UR", wrote[1]):
            width = 4 if re.search(r"128|M88\.4", wrote[1]) else 2 if re.search(r"64|WIDE", wrote[1]) else 1
            if set().union(*groups) & set(range(int(wrote[2]), int(wrote[2]) + width)):
                return True
    return False


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
                "values": launch.constants.get("V", 128),  # kernels without it have that many
                "warps": launch.compile(90).metadata.num_warps,
                "serialized": serialized(launch),
                "overwritten": overwritten(launch),
            }
            for launch in (*seen.forward, *seen.backward)
            if launch.name.endswith("_by_warpgroups") or launch.name == "key_gate_segment_ends"
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
