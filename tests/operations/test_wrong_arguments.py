"""What users get wrong around the operations: names, configurations of another operation, classes for instances."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules
from ejkernel.modules import (
    AttentionConfig,
    GLAttention,
    GLAttentionConfig,
    create_default_executor,
    gla_attention,
    lightning_attention,
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
