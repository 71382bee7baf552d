"""Which of sorted numbers are at most another: as `jnp.searchsorted`, also where that fails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from ejkernel._search import how_many_up_to

NUMBERS = [[4], [0, 0], [0, 3, 3, 3, 9], [-2, 1, 1, 5, 5, 7, 30, 31], list(range(0, 34, 2))]


@pytest.mark.parametrize("numbers", NUMBERS, ids=len)
@pytest.mark.parametrize("side", ["right", "left"])
def test_is_searchsorted(numbers, side):
    numbers, asked = jnp.asarray(numbers, jnp.int32), jnp.arange(-3, 34, dtype=jnp.int32)
    found = jax.jit(lambda x, y: how_many_up_to(x, y, or_equal=side == "right"))(numbers, asked)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.searchsorted(numbers, asked, side=side))


def test_under_vmap():
    numbers, asked = jnp.asarray([[0, 2, 2], [1, 5, 9]]), jnp.arange(6)
    found = jax.vmap(how_many_up_to, (0, None))(numbers, asked)
    np.testing.assert_array_equal(found, [np.searchsorted(row, asked, side="right") for row in numbers])


def test_of_an_open_length():
    (tokens,) = export.symbolic_shape("tokens")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (tokens,))]
    exported = export.export(jax.jit(how_many_up_to))(*shapes)
    np.testing.assert_array_equal(exported.call(jnp.asarray([1, 1, 4]), jnp.arange(5)), [0, 2, 2, 2, 3])
