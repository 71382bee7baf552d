"""Prints the kernels of softmax attention whose products ptxas waits for one by one, by call (its warning C7515 or alike).

Such a kernel is right, and slow. Run in a process of its own, where kernels are compiled.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas

from ejkernel.callib import Launch, instead_of_launching
from tests.triton.test_attention_routes import launches_of, problem

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": "mask"},
    "mask of keys": {"mask": "mask of keys"},
    "bias": {"bias": "bias"},
    "bias of keys": {"bias": "bias of keys"},
    "documents": {"ids": "documents"},
    "cap": {"flags": ("cap",)},
}


def serialized(launch: Launch) -> bool:
    """Whether ptxas says so of a kernel for an H100 or H200."""
    with tempfile.TemporaryDirectory() as folder:
        code = pathlib.Path(folder) / "kernel.ptx"
        code.write_text(launch.compile(90).asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(code), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return "serialized" in said.stdout + said.stderr


def main(names: list[str]) -> None:
    found = {}
    for name in names or CALLS:
        seen: list[Launch] = []
        with instead_of_launching(seen.append):
            launches_of(problem(2048, 2048, 128, 128, **CALLS[name]))
        found[name] = sorted({launch.name for launch in seen if "flash" in launch.name and serialized(launch)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
