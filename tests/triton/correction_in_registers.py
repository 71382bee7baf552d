"""Prints what the correction in registers is compiled to for GPUs of every kind.

Run in a process of its own, where kernels are compiled.
"""

import json
import pathlib
import re
import subprocess
import tempfile

import triton

from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule.routes import route_of
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from tests.triton.test_delta import TRITON, problem

CAPABILITIES = (80, 89, 90, 120)
USED = {"registers": "REG", "spills": "STACK"}
COUNTED = {"products": "HMMA", "shuffles": "SHFL", "barriers": "BAR"}


def main() -> None:
    found = []
    for packed, tokens in ((False, 4096), (True, 2000)):
        rule = problem("channel", 64, 64, tokens, packed=packed)
        seen = launches(route_of(delta_plan(rule, TRITON.heuristic(rule))), arrays_of(rule), rule.cu_seqlens).forward
        (launch,) = (x for x in seen if x.name == "delta_correction_in_registers")
        for capability in CAPABILITIES:
            compiled = launch.compile(capability)
            with tempfile.TemporaryDirectory() as folder:
                code = pathlib.Path(folder) / "kernel.cubin"
                code.write_bytes(compiled.asm["cubin"])
                command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", str(code)]
                listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            counts = {name: len(re.findall(rf"\b{op}\b", listing)) for name, op in COUNTED.items()}
            used = {name: int(re.findall(rf"\b{word}:(\d+)", listing)[0]) for name, word in USED.items()}
            found.append({"capability": capability, **used, **counts, "shared": compiled.metadata.shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
