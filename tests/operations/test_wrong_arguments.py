"""What users get wrong around the operations: names, configurations of another operation, classes for instances."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules, ops
from ejkernel._elsewhere import INSIDE
from ejkernel.kernels import KernelRegistry, Platform, _xla
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
from ejkernel.ops.notices import forget_warnings

X = jnp.ones((1, 4, 1, 2))


@pytest.mark.parametrize("name", ["attention", "causal_conv1d", "gated_delta_rule", "gla_attention", "lightning_attention"])
def test_operations_are_names_of_the_package(name):
    assert getattr(ejkernel, name) is getattr(modules, name)
    assert name in dir(ejkernel)


@pytest.mark.parametrize(
    ("name", "here"),
    [("chunk_gla", "gla_attention"), ("chunk_kda", "gated_delta_rule"), ("fused_recurrent_gla", "recurrent_attention")],
)
def test_operations_of_other_libraries_are_answered_with_the_ones_here(name, here):
    for module in (ejkernel, modules):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': it is ejkernel.{here} here"):
            getattr(module, name)
        assert not hasattr(module, name)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from ejkernel import chunk_gla", "cannot import name 'chunk_gla' from 'ejkernel': it is ejkernel.gla_attention here"),
        ("from ejkernel.modules import ShortConvolution", "it is ejkernel.causal_conv1d here"),
        ("from ejkernel import GatedDeltaNet", "examples/layers has some"),
        ("from ejkernel import GLAttentionConfig", "it is ejkernel.modules.GLAttentionConfig"),
        ("from ejkernel import MaskInfo", "it is ejkernel.types.mask.MaskInfo"),
    ],
)
def test_import_statements_say_what_was_meant(statement, message):
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(statement, {})


def test_what_is_inside_is_there():
    for where in INSIDE.values():
        module, _, name = where.removeprefix("it is ").rpartition(".")
        assert hasattr(importlib.import_module(module), name), where


@pytest.mark.parametrize("name", ["ops.report", "modules.GLAttentionConfig", "types.mask.MaskInfo", "testing", "callib.cdiv"])
def test_modules_are_there_without_an_import_of_their_own(name):
    program = f"import ejkernel; ejkernel.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        (gla_attention, {"scale": 1.0}, "gla_attention has no argument 'scale': scale is softmax_scale here."),
        (gla_attention, {"output_final_state": True}, "output_final_state is return_state here."),
        (gla_attention, {"gk": X}, "gk is g here, of shape [batch, time, heads, key channels]; recurrent_attention takes gk"),
        (
            gla_attention,
            {"scale": 1, "h0": X},
            "has no arguments 'scale', 'h0': scale is softmax_scale here; h0 is initial_state",
        ),
        (gla_attention, {"head_first": True}, "jnp.swapaxes(x, 1, 2)"),
        (gla_attention, {"revers": True}, "revers is reverse here."),
        (gla_attention, {"nonsense": 1}, "it takes query, key, value, g, g_gamma,"),
        (gla_attention, {"gv": X}, "recurrent_attention alone has decays per value channel."),
        (gla_attention, {"state_v_first": True}, "states are [sequences, heads, key channels, value channels]"),
        (
            gla_attention,
            {"attention_mask": X},
            "packed by cu_seqlens, their offsets: np.cumsum([0, *lengths]); nothing is masked.",
        ),
        (gla_attention, {"chunk_size": 64}, "by its field block_q"),
        (gla_attention, {"cu_seqlens_cpu": X}, "leave it away"),
        (gla_attention, {"segment_ids": X}, "packed by cu_seqlens"),
        (attention, {"segment_ids": X}, "mask_info: ejkernel.types.mask.MaskInfo.from_segments(ids)"),
        (attention, {"cu_seqlens": X}, ".from_cu_seqlens(offsets)"),
        (
            gated_delta_rule,
            {"A_log": X, "dt_bias": X},
            "'A_log', 'dt_bias': pass g as it is to be used, such as -jnp.exp(A_log)",
        ),
        (gated_delta_rule, {"allow_neg_eigval": True}, "pass beta as it is to be used"),
        (gated_delta_rule, {"cp_context": X}, "sequence_axis names the mesh axis"),
        (modules.causal_conv1d, {"cache": X}, "the past goes in by initial_state"),
        (modules.causal_conv1d, {"sequence_axis": "time"}, "the last inputs of the shard before"),
        (attention, {"sequence_axis": "time"}, "gather keys and values and say by mask_info where the queries stand"),
        (gated_delta_rule, {"use_qk_l2norm_in_kernel": True}, "use_qk_l2norm_in_kernel is use_qk_l2norm here."),
        (attention, {"is_causal": True}, "is_causal is causal here."),
        (attention, {"mask": X}, "mask is attention_mask here."),
        (
            modules.causal_conv1d,
            {"output_final_state": True},
            "causal_conv1d has no argument 'output_final_state': output_final_state is return_state",
        ),
    ],
)
def test_names_of_other_libraries_are_answered_with_the_names_here(operation, arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        operation(X, X, X, **arguments)


def test_a_platform_whose_import_failed_says_so_where_another_takes_its_calls(monkeypatch):
    registry = KernelRegistry()
    registry.register("sum", "xla", "any")(lambda: None)
    monkeypatch.setitem(registry._import_failures, ("sum", Platform.TRITON), "ModuleNotFoundError: No module named 'triton'")
    with pytest.warns(UserWarning, match=r"'triton' is passed over: its import failed: .* \(pip install \"\.\[cuda13\]\""):
        assert registry.select("sum", backend="gpu").platform is Platform.XLA
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.select("sum", backend="cpu")
        registry.select("sum", backend="gpu")
    with pytest.raises(ValueError, match="triton: its import failed: ModuleNotFoundError"):
        registry.select("sum", "triton", "gpu")


LONG = jnp.ones((2, 6, 3, 4))
BETA = LONG[..., 0]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: gla_attention(LONG, LONG, LONG, BETA[..., None]), ValueError, "A gate per head goes in as g[..., 0]."),
        (lambda: gated_delta_rule(LONG, LONG, LONG, -LONG, BETA), ValueError, "The order is query, key, value, beta, g."),
        (lambda: gated_delta_rule(LONG, LONG, LONG, BETA[..., None]), ValueError, "It goes in as beta[..., 0]."),
        (lambda: gla_attention(LONG, LONG, LONG, cu_seqlens=[0, 12]), ValueError, "must have a batch of 1 when cu_seqlens"),
        (lambda: gla_attention(LONG, LONG, LONG, cu_seqlens=[0, 6]), ValueError, "by x.reshape(1, -1, *x.shape[2:])"),
        (lambda: gla_attention(LONG, LONG, LONG, -LONG, 0.5), ValueError, "got []. A scale goes in by name: softmax_scale."),
        (lambda: gated_delta_rule(LONG, LONG, LONG, BETA, -BETA, 0.5), ValueError, "got []. A scale goes in by name"),
        (
            lambda: gla_attention(LONG, LONG, LONG[..., :2], initial_state=jnp.ones((2, 3, 2, 4))),
            ValueError,
            "got [2, 3, 2, 4]. It goes in as jnp.swapaxes(initial_state, 2, 3).",
        ),
        (
            lambda: modules.causal_conv1d(BETA, jnp.ones((4, 3)), initial_state=jnp.ones((2, 3, 4))),
            ValueError,
            "goes in as jnp.swapaxes(cache[..., 1:], 1, 2).",
        ),
        (lambda: modules.causal_conv1d(BETA, BETA[0, :3, None]), ValueError, "torch's Conv1d goes in as weight[:, 0].T."),
        (lambda: modules.causal_conv1d(BETA, jnp.ones((3, 4))), ValueError, "It goes in as weight.T."),
        (lambda: modules.causal_conv1d(BETA, jnp.ones((5, 4))), ValueError, "got [5, 4]."),
        (lambda: modules.causal_conv1d(BETA, BETA[0], cu_seqlens=[0, 12]), ValueError, "by x.reshape(1, -1, *x.shape[2:])"),
        (lambda: modules.causal_conv1d(BETA, BETA[0], activation="swish"), ValueError, "They are the same function."),
        (
            lambda: jax.jit(gla_attention)(LONG, LONG, LONG, return_state=True),
            TypeError,
            "must be known when the function is traced; got a traced value. Use functools.partial(f, return_state=True)",
        ),
    ],
)
def test_errors_say_what_makes_the_argument_legal(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_warnings_name_the_function_that_was_called():
    forget_warnings()
    with pytest.warns(ops.ValueWarning, match="^gla_attention: g is 1 at"):
        gla_attention(LONG, LONG, LONG, BETA)


class Tensor:
    """What torch's tensors look like from outside where numpy cannot have them: they need a gradient, or lie on a GPU."""

    dtype, shape, ndim = "torch.float32", (1, 4, 1, 2), 4

    def __init__(self, problem):
        self.problem = problem

    def __array__(self, dtype=None, copy=None):
        raise self.problem

    def __dlpack__(self, **options):
        raise self.problem

    __dlpack_device__ = __dlpack__


@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
def test_a_tensor_that_numpy_cannot_have_is_named_with_the_way_in(kind):
    message = r"key must be an array; got .*\(no numpy\). jax.dlpack.from_dlpack\(x.detach\(\)\) makes one of a tensor"
    with pytest.raises(TypeError, match=message):
        gla_attention(X, Tensor(kind("no numpy")), X)


@pytest.mark.parametrize("kind", [list, np.array])
def test_numpy_arrays_of_64_bits_pass_without_a_warning_of_jax(kind):
    x = np.ones((1, 13, 1, 2))  # a shape of its own, which is planned here
    offsets = kind(np.cumsum([0, 4, 9]).tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gla_attention(x, x, x, cu_seqlens=offsets).dtype == jnp.float32
    found = ops.Invocation.of(GLAttention(), x, x, x, cu_seqlens=np.asarray(offsets)).arguments
    assert found["query"].dtype == jnp.float32
    assert found["cu_seqlens"].dtype == jnp.int32


def test_offsets_of_several_rows_say_how_rows_go_in():
    with pytest.raises(ValueError, match=re.escape("got [2, 3]. Offsets of several rows: jax.vmap over the rows")):
        gla_attention(X, X, X, cu_seqlens=np.zeros((2, 3), np.int32))


def test_a_mask_without_heads_is_reported_as_it_was_given():
    B, T = X.shape[:2]
    with pytest.raises(ValueError, match=re.escape(f"got [{T + 1}, {T}]. Rank 2 is [batch, keys], here [{B}, {T}].")):
        attention(X, X, X, attention_mask=np.ones((T + 1, T), bool))
    legal = f"Rank 3 is [batch, queries, keys], here [{B}, {T}, {T}]."
    with pytest.raises(ValueError, match=re.escape(f"got [{B}, {T + 1}, {T}]. {legal}")):
        attention(X, X, X, attention_mask=np.ones((B, T + 1, T), bool))
