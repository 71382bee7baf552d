"""Implementations of a user's own beside the library's: each takes the calls that it can, and disturbs no other."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from ejkernel import kernel_registry, ops
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import RECURRENT
from ejkernel.kernels._registry import Backend, Platform
from ejkernel.modules import RecurrentAttention, recurrent_attention
from ejkernel.ops import Invocation

x = jnp.full((1, 12, 2, 4), 0.5)


@pytest.fixture
def registered(monkeypatch):
    """`kernel_registry`, which forgets afterwards what a test registers."""
    kernel_registry.list_implementations("recurrent")
    entries = {name: list(found) for name, found in kernel_registry._implementations.items()}
    monkeypatch.setattr(kernel_registry, "_implementations", entries)
    return kernel_registry


@pytest.mark.parametrize(("platform", "priority"), [("pallas", -5), ("pallas", 50), ("xla", 50), ("xla", -5)])
def test_a_plain_function_is_called_by_its_name_alone(registered, platform, priority):
    @registered.register("recurrent", platform, "cpu", priority)
    def mine(query, key, value, **options):
        return "mine"

    inv = Invocation.of(RecurrentAttention(), x, x, x)
    assert len(list(inv.kernel.candidate_cfgs(inv))) > 1
    for asked in (None, "xla"):
        for cfg in (None, LinearConfig(block_q=4)):
            assert recurrent_attention(x, x, x, platform=asked, cfg=cfg).shape == x.shape
            assert ops.report()[-1].route.startswith(("chunks of", "step by step"))
    if priority > 0:
        assert registered.get("recurrent", platform)(x, x, x) == "mine"
    if platform == "pallas":
        with pytest.raises(TypeError, match=r"is a plain function: call it by kernel_registry\.get"):
            recurrent_attention(x, x, x, platform=platform)


class OnlyShort(Implementation):
    """Takes calls of up to four tokens, and only block_q 16."""

    def supports(self, problem):
        return None if problem.shape[1] <= 4 else "it takes up to four tokens"

    def refuses(self, problem, cfg):
        return None if cfg.block_q == 16 else "block_q must be 16"

    def heuristic(self, problem):
        return LinearConfig(block_q=16, platform="xla")

    def route(self, problem, cfg):
        return "short"

    def solve(self, problem, cfg):
        return problem.value + 100, jnp.zeros((1, 2, 4, 4))


def test_two_implementations_of_one_platform_share_its_calls(registered):
    """What runs is what was chosen: the one that supports the call and takes the configuration."""
    RECURRENT.register(OnlyShort(), registered, Platform.XLA, Backend.ANY, priority=9)
    few = x[:, :3]
    assert recurrent_attention(few, few, few).max() > 99
    assert ops.report()[-1].route == "short"
    for more in ({}, {"platform": "xla"}, {"cfg": LinearConfig(block_q=4)}, {"cfg": LinearConfig(block_q=16, platform="xla")}):
        assert recurrent_attention(x, x, x, **more).max() < 99, more
    assert recurrent_attention(few, few, few, cfg=LinearConfig(block_q=4, platform="xla")).max() < 99
    assert ops.report()[-1].route.startswith("chunks of 4")
    output, _ = RecurrentAttention().get_impl(LinearConfig(block_q=4, platform="xla"))(few, few, few)
    assert output.max() < 99
