"""Names, argument order, defaults and dtypes that users rely on."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.modules.base import detect_platform
from ejkernel.testing.linear_cases import LinearCase

PATHS = {
    "ejkernel": ["kernel_registry", "Platform", "Backend", "__version__"],
    "ejkernel.modules": ["attention", "Attention", "AttentionConfig", "recurrent_attention", "gla_attention",
                         "lightning_attention", "RecurrentAttention", "GLAttention",
                         "LightningAttention", "RecurrentAttentionConfig", "GLAttentionConfig", "LightningAttentionConfig",
                         "create_default_executor"],
    "ejkernel.modules.operations": ["recurrent_attention", "gla_attention", "lightning_attention", "RecurrentAttention"],
    "ejkernel.modules.operations.recurrent": ["recurrent_attention", "RecurrentAttention"],
    "ejkernel.modules.operations.gated_linear_attention": ["gla_attention", "GLAttention"],
    "ejkernel.modules.operations.lightning_attention": ["lightning_attention", "LightningAttention"],
    "ejkernel.modules.operations.attention": ["attention", "Attention"],
    "ejkernel.modules.operations.configs": ["AttentionConfig", "RecurrentAttentionConfig", "GLAttentionConfig",
                                                 "LightningAttentionConfig"],
    "ejkernel.modules.base": ["detect_platform", "create_default_executor"],
    "ejkernel.kernels._registry": ["kernel_registry", "KernelRegistry", "Platform", "Backend"],
    "ejkernel.kernels._xla": ["attention", "recurrent", "recurrent_gla", "lightning_attn"],
    "ejkernel.ops": ["Kernel", "Invocation", "Executor", "ConfigSelectorChain", "ConfigCache", "PersistentCache",
                     "AutotunePolicy", "Tuner"],
    "ejkernel.ops.config.persistent": ["PersistentCache"],
    "ejkernel.types.mask": ["MaskInfo"],
    "ejkernel.kernels._xla.attention._interface": ["attention"],
    "ejkernel.kernels._cuda.attention._interface": ["attention"],
    "ejkernel.kernels._xla.recurrent._interface": ["recurrent"],
    "ejkernel.kernels._xla.recurrent_gla._interface": ["recurrent_gla"],
    "ejkernel.kernels._xla.lightning_attn._interface": ["lightning_attn"],
}  # fmt: skip


@pytest.mark.parametrize(("path", "names"), PATHS.items(), ids=PATHS)
def test_import_paths(path, names):
    module = importlib.import_module(path)
    assert all(hasattr(module, name) for name in names)


SIGNATURES = {
    "recurrent_attention": "query key value g=None g_gamma=None gk=None gv=None initial_state=None cu_seqlens=None * "
    "softmax_scale=None reverse=False return_state=False sequence_axis=None platform=None cfg=None",
    "gla_attention": "query key value g=None g_gamma=None initial_state=None cu_seqlens=None * softmax_scale=None "
    "reverse=False return_state=False sequence_axis=None platform=None cfg=None",
    "lightning_attention": "query key value initial_state=None cu_seqlens=None * layer_idx num_layers softmax_scale=None "
    "reverse=False return_state=False sequence_axis=None platform=None cfg=None",
}


@pytest.mark.parametrize(("name", "written"), SIGNATURES.items(), ids=SIGNATURES)
def test_signatures(name, written):
    words = []
    for parameter in inspect.signature(getattr(modules, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}")
    assert " ".join(words) == written


def test_every_array_works_by_position():
    arrays, _ = LinearCase("position", time=7, gates=("g", "g_gamma", "gk", "gv"), initial_state=True).arguments()
    order = ["query", "key", "value", "g", "g_gamma", "gk", "gv", "initial_state"]
    named = modules.recurrent_attention(**arrays)
    np.testing.assert_array_equal(modules.recurrent_attention(*(arrays[n] for n in order)), named)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_of_output_and_state(dtype):
    arrays, _ = LinearCase("dtypes", time=5, gates=("g",), dtype=dtype).arguments()
    output, state = modules.recurrent_attention(**arrays, return_state=True)
    assert (output.dtype, state.dtype) == (jnp.dtype(dtype), jnp.float32)


def test_gates_may_have_a_dtype_of_their_own():
    arrays, _ = LinearCase("mixed", time=5, gates=("gk",), dtype="bfloat16").arguments()
    arrays["gk"] = arrays["gk"].astype(jnp.float32)
    gradient = jax.grad(lambda gk: jnp.sum(modules.recurrent_attention(**(arrays | {"gk": gk})).astype(jnp.float32)))(
        arrays["gk"]
    )
    assert gradient.dtype == jnp.float32


def test_an_initial_state_of_one_sequence_needs_no_batch():
    arrays, _ = LinearCase("single", batch=1, time=5, initial_state=True).arguments()
    short = arrays | {"initial_state": arrays["initial_state"][0].astype(jnp.bfloat16)}
    full = arrays | {"initial_state": arrays["initial_state"].astype(jnp.bfloat16)}
    np.testing.assert_array_equal(modules.recurrent_attention(**short), modules.recurrent_attention(**full))


def test_numpy_arrays_are_welcome():
    arrays, _ = LinearCase("numpy", time=5, gates=("g",)).arguments()
    plain = {name: np.asarray(x) for name, x in arrays.items()}
    np.testing.assert_array_equal(modules.recurrent_attention(**plain), modules.recurrent_attention(**arrays))


@pytest.mark.parametrize("platform", [None, "auto", "xla", Platform.XLA])
def test_platforms(platform):
    arrays, _ = LinearCase("platform", time=5).arguments()
    assert modules.recurrent_attention(**arrays, platform=platform).shape == (2, 5, 2, 16)
    assert detect_platform("recurrent", platform) in Platform


def test_platform_level_functions_return_the_pair_and_need_no_executor():
    arrays, options = LinearCase("pair", time=5, gates=("g",)).arguments()
    for name in ("recurrent", "recurrent_gla"):
        output, state = kernel_registry.get(name, platform="xla")(**arrays, **options)
        assert output.shape == (2, 5, 2, 16)
        assert state.shape == (2, 2, 16, 16)
    function = kernel_registry.get("lightning_attn", "xla", Backend.CPU)
    assert "layer_idx" in inspect.signature(function).parameters


def test_registry_signatures_agree():
    kernel_registry.validate_signatures()


def test_importing_the_library_is_cheap_and_needs_no_extras():
    script = (
        "import sys, time, jax, jax.numpy\n"
        "start = time.perf_counter(); import ejkernel; took = time.perf_counter() - start\n"
        "assert not {'triton', 'torch', 'platformdirs', 'ejkernel.kernels._xla'} & set(sys.modules), 'imports too much'\n"
        "print(took)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.2, times


def test_a_star_brings_the_operations():
    names: dict = {}
    exec("from ejkernel import *", names)
    assert names["gla_attention"] is ejkernel.gla_attention
    assert {"attention", "causal_conv1d", "gated_delta_rule", "check_values"} <= names.keys()


def test_version():
    assert ejkernel.__version__.count(".") == 2
