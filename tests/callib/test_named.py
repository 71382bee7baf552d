"""`triton_call` with arguments and outputs by name: nothing is filled by its place, and what does not fit is said."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the triton platform needs Triton")
import triton.language as tl  # noqa: E402

from ejkernel._device import device_of  # noqa: E402
from ejkernel.callib import instead_of_launching, triton_call  # noqa: E402

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
N = 32


@triton.jit
def both(x, y, n, total, product, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i, mask=i < n)
    b = tl.load(y + i, mask=i < n)
    tl.store(total + i, a + b, mask=i < n)
    if product is not None:
        tl.store(product + i, a * b, mask=i < n)


@triton.jit
def outputs_first(out, x, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i))


x, y = jnp.arange(N, dtype=jnp.float32), jnp.full(N, 3.0)
LIKE = jax.ShapeDtypeStruct((N,), jnp.float32)


def call(arguments=None, out_shape=None, **options):
    arguments = {"n": N, "y": y, "x": x} if arguments is None else arguments  # in any order
    out_shape = {"product": LIKE, "total": LIKE} if out_shape is None else out_shape
    return triton_call(arguments=arguments, out_shape=out_shape, kernel=both, grid=1, B=N, **options)


def test_names_decide():
    found = call()
    np.testing.assert_array_equal(found["total"], x + y)
    np.testing.assert_array_equal(found["product"], x * y)


def test_an_output_may_be_absent():
    assert list(call(out_shape={"total": LIKE, "product": None})) == ["total"]


def test_memory_is_shared_by_name():
    half = call({"x": x, "y": y, "n": N // 2}, input_output_aliases={"x": "total"}, zeroed_outputs=["product"])
    np.testing.assert_array_equal(half["total"], jnp.where(x < N // 2, x + y, x))
    np.testing.assert_array_equal(half["product"], jnp.where(x < N // 2, x * y, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"x": x, "n": N}}, "both also needs y"),
        ({"arguments": {"x": x, "y": y, "n": N, "z": x}}, "both has no parameter z; it has x, y, n"),
        ({"out_shape": {"total": LIKE}}, "both also needs product"),
        ({"out_shape": [LIKE, LIKE]}, "out_shape must be a dict by name, as arguments are; got list"),
        ({"arguments": {"x": x, "y": y, "n": N, "total": x}}, "total of both must be given once"),
        ({"input_output_aliases": {"x": "sum"}}, "must name arguments and outputs of both; got sum"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(TypeError, match=message):
        call(**changes)


def test_by_position_or_by_name():
    with pytest.raises(TypeError, match="by position or by name; got 1 by position"):
        triton_call(x, arguments={"y": y, "n": N}, out_shape={"total": LIKE, "product": None}, kernel=both, grid=1, B=N)


def test_outputs_are_last():
    with pytest.raises(TypeError, match=r"the outputs of outputs_first \(out\) must be its last parameters"):
        triton_call(arguments={"x": x}, out_shape={"out": LIKE}, kernel=outputs_first, grid=1, B=N)


def test_launches_are_seen_instead():
    seen: list[Any] = []
    with instead_of_launching(seen.append):
        found = call()
    (launch,) = seen
    assert (launch.name, launch.grid, launch.constants) == ("both", (1, 1, 1), {"B": N})
    assert launch.names == ["x", "y", "n", "total", "product"]
    assert not found["total"].any()
