"""Names of other libraries, asked of this one: refused, with what there is here."""

from __future__ import annotations

import sys
from typing import NoReturn

LAYER = "there are no layers here, but examples/layers has some to start from"

# By the end of a name in flash-linear-attention, or a name in jax.nn: what to use here.
ELSEWHERE = {
    "recurrent_gla": "it is ejkernel.recurrent_attention here",
    "gla": "it is ejkernel.gla_attention here",
    "retention": "it is ejkernel.gla_attention here",
    "lightning_attn": "it is ejkernel.lightning_attention here",
    "linear_attn": "it is ejkernel.recurrent_attention here",
    "delta_rule": "it is ejkernel.gated_delta_rule here",
    "kda": "it is ejkernel.gated_delta_rule here",
    "dot_product_attention": "it is ejkernel.attention here",
    "ShortConvolution": "it is ejkernel.causal_conv1d here",
    "l2norm": "gated_delta_rule does it by use_qk_l2norm=True",
    "GatedLinearAttention": LAYER,
    "DeltaNet": LAYER,
    "KimiDeltaAttention": LAYER,
    "RMSNorm": LAYER,
    "RMSNormGated": LAYER,
}
# Names that are in another module here, which one asks the package for.
INSIDE = {
    name: f"it is ejkernel.modules.{name}"
    for name in (
        "AttentionConfig",
        "GLAttentionConfig",
        "GatedDeltaRuleConfig",
        "LightningAttentionConfig",
        "RecurrentAttentionConfig",
    )
} | {"MaskInfo": "it is ejkernel.types.mask.MaskInfo"}

# Functions here that no command takes.
UNTUNED = {"causal_conv1d": "it has one configuration on every device: there is nothing to choose or tune"}


def hint_for(name: str) -> str | None:
    """What to use for a name of another library, or of another module of this one; None where nothing is known."""
    return INSIDE.get(name) or next((here for there, here in ELSEWHERE.items() if name.endswith(there)), None)


def refuse(module: str, name: str) -> NoReturn:
    """AttributeError for a name that a module does not have, with what was meant where that is known."""
    hint = hint_for(name)
    if hint is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # An import statement asks by hasattr first, and would say no more than that the name cannot be imported.
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        raise ImportError(f"cannot import name {name!r} from {module!r}: {hint}", name=name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}: {hint}")
