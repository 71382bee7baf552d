"""Packed documents give the loss and the gradients of the documents one by one, and of the padded batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples import packing


@pytest.mark.long
@pytest.mark.parametrize("way", [packing.packed, packing.padded])
def test_loss_and_gradients_are_those_of_one_by_one(way, params_and_texts, one_by_one):
    loss, gradients = way(*params_and_texts)
    want_loss, want = one_by_one
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)
    for name in want:
        np.testing.assert_allclose(gradients[name], want[name], rtol=0, atol=2e-6 * float(abs(want[name]).max()))


@pytest.mark.long
def test_the_order_of_documents_in_the_row_does_not_matter_but_their_borders_do(params_and_texts):
    params, (first, second) = params_and_texts
    loss, _ = packing.packed(params, [first, second])
    swapped, _ = packing.packed(params, [second, first])
    joined, _ = packing.packed(params, [np.concatenate([first, second]), np.array([], np.int32)])
    assert float(swapped) == pytest.approx(float(loss), rel=1e-6)
    assert abs(float(joined) - float(loss)) > 1.0


@pytest.fixture(scope="module")
def params_and_texts():
    return packing.init(jax.random.key(0)), packing.documents()[:2]


@pytest.fixture(scope="module")
def one_by_one(params_and_texts):
    return packing.one_by_one(*params_and_texts)
