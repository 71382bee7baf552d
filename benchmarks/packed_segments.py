"""Which length of packed segments a model of the GPU prefers (ejkernel/testing/segment_model.py), for several mixes.

python -m benchmarks.packed_segments      needs no GPU; times are predictions
"""

from __future__ import annotations

from ejkernel.testing.linear_gpu import LENGTHS
from ejkernel.testing.segment_model import CALLS

MIXES = {
    "the benchmark's": LENGTHS,
    "one sequence": (32768, *[0] * 15),
    "two": (19200, 13568, *[0] * 14),
    "equal ones": (2048,) * 16,
    "one much longer": (*[64, 64, 128, 192, 256, 320, 384, 512, 640, 896, 1280, 1920, 2880, 4224, 6400], 12608),
}


def main() -> None:
    lengths = (24, 28, 31, 32, 33, 34, 36, 40, 48, 64)
    for name, call in CALLS.items():
        print(f"\n{name}, 16 heads, microseconds: ends + scan of segments of so many chunks\n")
        print("| sequences | " + " | ".join(map(str, lengths)) + " |\n" + "|---" * (1 + len(lengths)) + "|")
        for mix, tokens in MIXES.items():
            found = [call.microseconds(tokens, 16, length) for length in lengths]
            print(f"| {mix} | " + " | ".join(f"{ends:.0f} + {scan:.0f}" for ends, scan in found) + " |")


if __name__ == "__main__":
    main()
