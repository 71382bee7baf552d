"""Batch and heads split over devices: nothing is gathered, forward and backward. Time split: results are the whole call's."""

from __future__ import annotations

import json

import pytest

from tests.triton.processes import outside

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}


@pytest.mark.long
def test_split_over_eight_devices():
    found = json.loads(outside("-m", "tests.pallas.eight_devices", environment=EIGHT))
    assert len(found) == 11
    assert not {name: problems for name, problems in found.items() if problems}
