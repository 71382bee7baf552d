"""What lies where: tokens in chunks and back, and heads that share a matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas._products import Products
from ejkernel.kernels._pallas.gated_delta_rule.kernels.triangular import UnitLower
from ejkernel.kernels._pallas.linear._chunks import Chunks


@pytest.mark.parametrize("reverse", [False, True])
def test_tokens_after_the_last_sequence_have_no_row(reverse):
    """Traced offsets may end before the row does; these tokens' gates had the gradient of the last state."""
    offsets = jnp.asarray([0, 0, 17, 17, 22, 22])
    tokens = jnp.arange(1.0, 41.0)[None, :, None]

    @jax.jit
    def there_and_back(x, offsets):
        chunks = Chunks.of(16, 1, 40, reverse, offsets)
        rows = chunks.filled(x)
        return rows, chunks.taken(rows), chunks.taken(jnp.ones_like(rows))

    rows, back, ones = there_and_back(tokens.at[:, 22:].set(jnp.nan), offsets)
    assert np.isfinite(rows).all()
    np.testing.assert_array_equal(back[0, :, 0], np.where(np.arange(40) < 22, tokens[0, :, 0], 0))
    np.testing.assert_array_equal(ones[0, :, 0], np.arange(40) < 22)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_systems_of_several_heads_do_not_spoil_each_other(narrow, bad):
    """They are blocks of one matrix, and 0 times NaN is NaN."""
    C = 16
    systems = [jnp.tril(x, -1) for x in jax.random.normal(jax.random.key(0), (3, C, C))]
    spoilt = [systems[0], systems[1].at[9, 2].set(bad), systems[2]]
    run = jax.jit(lambda systems: [x.inverse for x in UnitLower.of_each(Products(narrow), systems)])
    found, want = run(spoilt), run(systems)
    for head in (0, 2):
        np.testing.assert_array_equal(found[head], want[head])
    assert not np.isfinite(found[1]).all()
