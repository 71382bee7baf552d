"""The operation classes as the documents use them: through an executor, by `run`, by `get_impl`, as kernels of one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import kernel_registry, ops
from ejkernel._device import Device, on_device
from ejkernel.kernels import _xla
from ejkernel.kernels._registry import Backend
from ejkernel.modules import (
    Attention,
    AttentionConfig,
    GLAttention,
    GLAttentionConfig,
    LightningAttention,
    RecurrentAttention,
    RecurrentAttentionConfig,
    attention,
    create_default_executor,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)
from ejkernel.modules.base import detect_platform
from ejkernel.ops import Invocation, Kernel

q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, 4, 8)) for i in range(3))
gate = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(3), (2, 20, 4, 8)))
state = jax.random.normal(jax.random.key(4), (2, 4, 8, 8))
same = np.testing.assert_array_equal


def both_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_classes_through_an_executor_take_what_the_functions_take():
    executor = create_default_executor()
    both_same(
        executor(Attention(), q, k, v, causal=True, softmax_scale=0.125), attention(q, k, v, causal=True, softmax_scale=0.125)
    )
    same(executor(Attention(), q, k, v, return_weights=False), attention(q, k, v, return_weights=False))
    arguments = {
        "query": q, "key": k, "value": v, "g": None, "g_gamma": None, "gk": gate, "gv": None, "initial_state": state,
        "cu_seqlens": None, "softmax_scale": None, "reverse": False, "platform": None,
    }  # fmt: skip
    same(
        executor(RecurrentAttention(), **arguments, return_state=False, _cfg=None),
        recurrent_attention(q, k, v, gk=gate, initial_state=state),
    )
    both_same(
        executor(RecurrentAttention(), q, k, v, None, None, gate, None, state, return_state=True),
        recurrent_attention(q, k, v, None, None, gate, None, state, return_state=True),
    )
    same(executor(GLAttention(), query=q, key=k, value=v, g=gate), gla_attention(q, k, v, gate))
    layer: dict[str, Any] = {"layer_idx": 2, "num_layers": 6}
    same(executor(LightningAttention(), query=q, key=k, value=v, **layer), lightning_attention(q, k, v, **layer))
    offsets = [0, 7, 20]
    packed = (q[0], k[0], v[0])
    same(executor(GLAttention(), *packed, cu_seqlens=offsets), gla_attention(*packed, cu_seqlens=offsets))
    same(executor(GLAttention(), *packed, None, None, None, offsets), gla_attention(*packed, cu_seqlens=jnp.array(offsets)))


def test_run_with_a_configuration():
    cfg = GLAttentionConfig(block_q=16)
    output, final = GLAttention().run(q, k, v, gate, return_state=True, platform="xla", cfg=cfg)
    wanted = gla_attention(q, k, v, gate, return_state=True, cfg=cfg)
    np.testing.assert_allclose(output, wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(final, wanted[1], rtol=1e-5, atol=1e-5)
    same(jax.jit(lambda q: GLAttention().run(q, k, v, gate, cfg=cfg))(q), wanted[0])
    with pytest.raises(ValueError, match="'xla' was asked for, but cfg is for platform 'triton'"):
        GLAttention().run(q, k, v, platform="xla", cfg=GLAttentionConfig(platform="triton"))
    with pytest.raises(TypeError, match=r"cfg must be of class GLAttentionConfig \(.*\); got AttentionConfig"):
        GLAttention().run(q, k, v, cfg=AttentionConfig())
    with pytest.raises(TypeError, match=r"gla: .*'gk'.*; it takes query, key, value, g, g_gamma"):
        GLAttention().run(q, k, v, gk=gate, cfg=cfg)


@pytest.mark.parametrize("platform", ["xla", "auto"])
def test_get_impl_is_the_platform_level_function_with_the_configuration(platform):
    cfg = RecurrentAttentionConfig(platform=platform, block_q=16)
    output, final = RecurrentAttention().get_impl(cfg)(query=q, key=k, value=v, gk=gate, initial_state=state)
    wanted = _xla.recurrent(q, k, v, gk=gate, initial_state=state, cfg=RecurrentAttentionConfig(block_q=16))
    both_same((output, final), wanted)
    output, weights = Attention().get_impl(AttentionConfig("direct", platform=platform))(query=q, key=k, value=v)
    assert (output.shape, weights.shape) == (q.shape, (2, 4, 20, 20))
    with pytest.raises(ValueError, match="no implementation of 'recurrent' for platform 'pallas'"):
        RecurrentAttention().get_impl(RecurrentAttentionConfig(platform="pallas"))


@dataclass(frozen=True)
class OwnConfig:
    platform: str = "auto"
    backend: str = "any"


class OwnAttention(Kernel[OwnConfig, jax.Array]):
    """A user's kernel over the library's implementations, written as the documents write them."""

    op_id = "own_attention"

    def run(self, query, key, value, g=None, *, return_state=False, cfg):
        platform = detect_platform("recurrent_gla", cfg.platform)
        function = kernel_registry.get("recurrent_gla", platform=platform, backend=cfg.backend)
        output, final = function(query=query, key=key, value=value, g=g)
        return (output, final) if return_state else output

    def heuristic_cfg(self, inv):
        return OwnConfig()


def test_a_kernel_of_ones_own_runs_like_ours():
    executor = create_default_executor()
    same(executor(OwnAttention(), q, k, v, gate), gla_attention(q, k, v, gate))
    both_same(
        executor(OwnAttention(), q, k, value=v, g=gate, return_state=True), gla_attention(q, k, v, gate, return_state=True)
    )
    grad = jax.grad(lambda q: jnp.sum(executor(OwnAttention(), q, k, v, gate) ** 2))(q)
    np.testing.assert_allclose(grad, jax.grad(lambda q: jnp.sum(gla_attention(q, k, v, gate) ** 2))(q), rtol=1e-4, atol=1e-4)


def test_what_the_results_are_no_part_of_is_no_part_of_the_key():
    key = lambda **options: Invocation.of(GLAttention(), q, k, v, gate, **options).key
    assert key(return_state=True) == key() == key(softmax_scale=0.3) == key(platform="auto")
    assert key(platform="xla") != key() != key(reverse=True)
    assert Invocation.of(GLAttention(), query=q, key=k, value=v, g=gate).key == key()
    soft = lambda **options: Invocation.of(Attention(), q, k, v, **options).key
    assert soft(return_weights=False) == soft() == soft(softmax_scale=0.3)
    assert soft(logits_soft_cap=3.0) == soft(logits_soft_cap=30.0) != soft()


def test_making_the_problem_computes_nothing():
    for kernel, kwargs in ((GLAttention(), {"g": gate}), (LightningAttention(), {"layer_idx": 0, "num_layers": 2})):
        inv = Invocation.of(kernel, q, k, v, **kwargs)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(inv.problem))
    with pytest.raises(ValueError, match="key must be"):
        _ = Invocation.of(GLAttention(), q, k[:, :3], v).problem


def test_platform_functions_take_the_documents_order_by_position():
    same(
        _xla.recurrent(q, k, v, None, None, gate, None, 0.5, state, True)[0],
        _xla.recurrent(q, k, v, gk=gate, softmax_scale=0.5, initial_state=state, reverse=True)[0],
    )
    same(
        _xla.recurrent_gla(q, k, v, gate, None, 0.5, state, True)[0],
        _xla.recurrent_gla(q, k, v, g=gate, softmax_scale=0.5, initial_state=state, reverse=True)[0],
    )
    same(
        _xla.lightning_attn(q, k, v, 1, 4, 0.5, state, True)[0],
        _xla.lightning_attn(q, k, v, layer_idx=1, num_layers=4, softmax_scale=0.5, initial_state=state, reverse=True)[0],
    )
    packed = [x[0] for x in (q, k, v)]
    offsets = jnp.array([0, 5, 20])
    same(
        _xla.recurrent_gla(*packed, None, None, None, None, False, offsets)[0],
        _xla.recurrent_gla(*packed, cu_seqlens=offsets)[0],
    )
    bias, sinks = jnp.ones((1, 1, 20, 20)), jnp.ones(4)
    same(_xla.attention(q, k, v, bias, None, sinks)[0], _xla.attention(q, k, v, bias=bias, softmax_aux=sinks)[0])


ORDERS = {
    "functions first": "from ejkernel.kernels._PLATFORM import recurrent, recurrent_gla, lightning_attn",
    "modules first": "import ejkernel.kernels._PLATFORM.recurrent._interface, ejkernel.kernels._PLATFORM.recurrent_gla",
    "registry first": "import ejkernel; ejkernel.kernel_registry.list_algorithms()",
}
NAMES_ARE_FUNCTIONS = """
{first}
from ejkernel.kernels._{platform} import recurrent, recurrent_gla, lightning_attn
import ejkernel.kernels._{platform} as package
from ejkernel.kernels._{platform}.recurrent._interface import recurrent as same
from ejkernel.kernels._{platform}.recurrent_gla import recurrent_gla as same_gla
assert callable(recurrent) and package.recurrent is recurrent is same and recurrent_gla is same_gla
assert callable(lightning_attn) and "recurrent" in dir(package)
"""


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_names_of_platform_packages_are_functions_whatever_came_first(platform):
    if platform == "triton":
        pytest.importorskip("triton")
    for first in ORDERS.values():
        program = NAMES_ARE_FUNCTIONS.format(first=first, platform=platform).replace("PLATFORM", platform)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_importing_the_triton_package_needs_no_triton():
    program = """
import sys
sys.modules["triton"] = None
import ejkernel.kernels._triton
try:
    ejkernel.kernels._triton.recurrent
except ImportError as problem:
    assert "triton" in str(problem)
else:
    raise AssertionError("asked for without Triton")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_any_backend_is_the_device_of_this_process():
    for backend in (None, "any", Backend.ANY):
        assert kernel_registry.get("recurrent", platform="xla", backend=backend) is _xla.recurrent
    assert kernel_registry.get("gla", "xla") is kernel_registry.get("recurrent_gla", "xla") is _xla.recurrent_gla
    assert {"gla", "recurrent_gla"} <= set(kernel_registry.list_algorithms())
    assert GLAttention().op_id == "gla"


def test_the_old_name_of_gla_is_an_alias():
    cfg = GLAttentionConfig("chunked", 4)
    with ops.overlay(recurrent_gla=cfg):
        choice = create_default_executor().choose(GLAttention(), q, k, v)
    assert (str(choice.level), choice.config) == ("overlay", cfg)
    assert ops.PersistentCache("recurrent_gla").folder == ops.PersistentCache("gla").folder


def test_the_version_of_what_compiles_a_kernel_is_in_its_key():
    triton = pytest.importorskip("triton")
    environment = lambda: json.loads(Invocation.of(GLAttention(), q, k, v).key)["environment"]
    assert "triton" not in environment()
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        assert environment()["triton"] == triton.__version__
