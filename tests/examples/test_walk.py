"""A new user's way from the README: a layer of one's own trains on packed rows that are split over four devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documentation.pages import ROOT


@pytest.mark.long
def test_a_layer_of_ones_own_trains_on_packed_rows_over_four_devices():
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.examples.walk"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "->" in done.stdout
