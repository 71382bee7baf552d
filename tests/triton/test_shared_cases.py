"""The triton platform over the cases that all platforms share: interpreted here, compiled where there is a GPU."""

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton import recurrent
from ejkernel.testing.compare import assert_close
from ejkernel.testing.linear_cases import CASES

pytestmark = [pytest.mark.gpu] if device_of(()).backend == "gpu" else []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case):
    assert_close(case.evaluate(recurrent), case.expected(), case.tolerance)
