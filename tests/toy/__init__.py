"""A miniature of the library, with one toy operation: what CONTRIBUTING.md walks through, so that its steps cannot rot.

`ejkernel verify --load tests.toy --op decayed_sum` verifies it, likewise `bench` and `tune`: importing this package registers
its record.
"""

from ejkernel.testing.record import register
from tests.toy.record import DECAYED_SUM

register(DECAYED_SUM)
