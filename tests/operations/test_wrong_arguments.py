"""What users get wrong around the operations: names, configurations of another operation, classes for instances."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules, ops
from ejkernel.kernels import _xla
from ejkernel.modules import (
    Attention,
    AttentionConfig,
    GatedDeltaRule,
    GatedDeltaRuleConfig,
    GLAttention,
    GLAttentionConfig,
    LightningAttention,
    LightningAttentionConfig,
    RecurrentAttention,
    RecurrentAttentionConfig,
    attention,
    create_default_executor,
    gated_delta_rule,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

X = jnp.ones((1, 4, 1, 2))


@pytest.mark.parametrize("name", ["attention", "causal_conv1d", "gated_delta_rule", "gla_attention", "lightning_attention"])
def test_operations_are_names_of_the_package(name):
    assert getattr(ejkernel, name) is getattr(modules, name)
    assert name in dir(ejkernel)


def test_other_names_of_the_package_are_none():
    with pytest.raises(AttributeError, match="no attribute 'softmax_attention'"):
        ejkernel.softmax_attention  # noqa: B018  (asking is what is tested)


@pytest.mark.parametrize("cfg", [AttentionConfig(), "xla", 64])
def test_a_configuration_of_another_kind_is_refused_by_name(cfg):
    with pytest.raises(TypeError, match=rf"cfg must be of class \w+ or None; got {type(cfg).__name__}"):
        gla_attention(X, X, X, cfg=cfg)


LINEAR = "LinearConfig (the class of RecurrentAttentionConfig, GLAttentionConfig, LightningAttentionConfig)"
lightning = functools.partial(lightning_attention, layer_idx=0, num_layers=1)


@pytest.mark.parametrize(
    ("operation", "cfg", "message"),
    [
        (recurrent_attention, GatedDeltaRuleConfig(), "RecurrentAttentionConfig or None; got GatedDeltaRuleConfig."),
        (gla_attention, GatedDeltaRuleConfig(), "GLAttentionConfig or None; got GatedDeltaRuleConfig."),
        (_xla.recurrent_gla, GatedDeltaRuleConfig(), "GLAttentionConfig or None; got GatedDeltaRuleConfig."),
        (lightning, GatedDeltaRuleConfig(), "LightningAttentionConfig or None; got GatedDeltaRuleConfig."),
        (attention, GatedDeltaRuleConfig(), "AttentionConfig or None; got GatedDeltaRuleConfig."),
        (attention, GLAttentionConfig(), f"AttentionConfig or None; got {LINEAR}."),
        (
            functools.partial(gated_delta_rule, beta=X[..., 0]),
            GLAttentionConfig(),
            f"GatedDeltaRuleConfig or None; got {LINEAR}.",
        ),
    ],
)
def test_each_operation_takes_configurations_of_its_own_class(operation, cfg, message):
    with pytest.raises(TypeError, match=re.escape(f"cfg must be of class {message}")):
        operation(X, X, X, cfg=cfg)


def test_the_linear_operations_share_their_configurations():
    want = gla_attention(X, X, X)
    for cfg in (RecurrentAttentionConfig("recurrent", 4), LightningAttentionConfig("chunked", 4)):
        np.testing.assert_allclose(gla_attention(X, X, X, cfg=cfg), want, rtol=1e-6)


def test_an_overlay_of_another_class_names_both():
    with (
        ops.overlay(gla=GatedDeltaRuleConfig()),
        pytest.raises(ValueError, match="it is a GatedDeltaRuleConfig, not a GLAttentionConfig"),
    ):
        gla_attention(X, X, X)


def test_a_configuration_that_cannot_run_is_shown_by_the_name_it_was_given_by():
    cfg = GLAttentionConfig(platform="xla", backend="gpu")
    with pytest.raises(ValueError, match=r"gla cannot run with GLAttentionConfig\(schedule='chunked', block_q=64"):
        gla_attention(X, X, X, cfg=cfg)


@pytest.mark.parametrize("kernel", [RecurrentAttention, GLAttention, LightningAttention, GatedDeltaRule, Attention])
def test_none_is_no_configuration_where_nobody_chooses_one(kernel):
    message = rf"cfg must be of class {kernel.__name__}Config \(with None, .* chooses one\); got None"
    with pytest.raises(TypeError, match=message):
        kernel().get_impl(None)
    with pytest.raises(TypeError, match=message):
        kernel().run(X, X, X, cfg=None)


@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_offsets_are_checked_beside_lists_too(kind):
    rows = np.ones((4, 1, 2)).tolist()
    with pytest.raises(ValueError, match="cu_seqlens must end at the number of tokens, 4; got 9"):
        gla_attention(rows, rows, rows, cu_seqlens=kind([0, 9]))


def test_offsets_beside_what_is_no_array_leave_the_error_to_it():
    with pytest.raises(TypeError, match="query must be an array"):
        gla_attention([[1.0, 2.0], [3.0]], X[0], X[0], cu_seqlens=jnp.array([0, 4]))


def test_a_class_is_no_kernel():
    with pytest.raises(TypeError, match=r"kernel must be an instance; got the class GLAttention itself"):
        create_default_executor()(GLAttention, X, X, X)


def test_a_configuration_for_another_kind_of_device_is_refused():
    with pytest.raises(ValueError, match=r"cfg is for backend 'gpu', and this call computes on cpu"):
        gla_attention(X, X, X, cfg=GLAttentionConfig(platform="xla", backend="gpu"))


def test_no_layers_are_named():
    with pytest.raises(ValueError, match="num_layers must be at least 1; got 0"):
        lightning_attention(X, X, X, layer_idx=0, num_layers=0)
