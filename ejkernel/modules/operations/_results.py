"""The second form of what an operation returns, for annotations.

Which form it is depends on an argument (`return_state`, `return_weights`). A union of both would make every caller who checks
types narrow it by hand; `Array | Any` lets him use the array, or unpack the pair, as he asked for.
"""

from __future__ import annotations

from typing import Any

OutputAndState = Any  # tuple[Array, Array]: the output and the final state
OutputAndWeights = Any  # tuple[Array, Array]: the output and the weights
