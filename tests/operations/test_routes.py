"""Every choice of an operation names its route, on every platform: what `report()` shows."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from ejkernel import ops
from ejkernel._device import Device, on_device
from ejkernel.kernels._pallas._chips import CHIPS
from ejkernel.modules import attention, gated_delta_rule, recurrent_attention
from ejkernel.ops import Invocation
from ejkernel.testing.record import records

DEVICES = [Device("cpu", "cpu"), Device("gpu", "NVIDIA H200", 90), Device("gpu", "AMD MI300X"), CHIPS["v5e"].device]


def x(*shape):
    return jnp.full(shape, 0.1)


def chosen():
    return ops.report()[-1]


def test_on_xla_a_route_is_the_schedule_with_its_sizes():
    recurrent_attention(x(1, 40, 2, 16), x(1, 40, 2, 16), x(1, 40, 2, 16), g=-x(1, 40, 2))
    assert chosen().route == "chunks of 32, 2 at a time, gates per head"
    q, v = x(1, 40, 2, 96), x(1, 40, 2, 96)
    gated_delta_rule(q, q, v, x(1, 40, 2), -x(1, 40, 2, 96))
    assert chosen().route == "chunks of 32, gate per key channel"
    gated_delta_rule(q[:, :4], q[:, :4], v[:, :4], x(1, 4, 2))
    assert chosen().route == "step by step (gradient: chunks of 4, no gate)"
    attention(q, q, v)
    assert chosen().route == "all scores at once"


@pytest.mark.parametrize("shape", [(1, 0, 2, 16), (0, 3, 2, 16)], ids=str)
def test_a_call_without_tokens_computes_nothing(shape):
    q = x(*shape)
    assert recurrent_attention(q, q, q, gk=q).shape == shape
    assert chosen().route == "empty"
    assert gated_delta_rule(q, q, q, x(*shape[:3])).shape == shape
    assert chosen().route == "empty"


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_every_candidate_has_a_route(record, device):
    """The name is of the configuration that runs: planned for the device that the call computes on."""
    with on_device(device):
        for text in record.usual_shapes("cpu")[:2]:
            shape = record.shape(text, None, record.usual_dtype(device.backend))
            inv = Invocation.of(record.kernel(), **record.abstract(shape), **record.options)
            for cfg in inv.kernel.candidate_cfgs(inv):
                assert inv.kernel.route(inv, cfg), cfg
