"""Arguments by the names that they have elsewhere: refused, with the name that they have here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# By the name in flash-linear-attention, jax.nn or torch: the names here, of which an operation has one.
ELSEWHERE = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "output_final_state": ("return_state",),
    "initial_h": ("initial_state",),
    "h0": ("initial_state",),
    "gk": ("g",),
    "log_decay": ("g",),
    "use_qk_l2norm_in_kernel": ("use_qk_l2norm",),
    "offsets": ("cu_seqlens",),
    "mask": ("attention_mask",),
    "attn_mask": ("attention_mask",),
    "is_causal": ("causal",),
    "dropout_p": ("dropout_prob",),
    "dropout_rate": ("dropout_prob",),
    "local_window_size": ("sliding_window",),
    "window_size": ("sliding_window",),
    "softcap": ("logits_soft_cap",),
    "sinks": ("softmax_aux",),
    "implementation": ("platform",),
    "backend": ("platform",),
    "config": ("cfg",),
}
LAYOUT = "arrays are [batch, time, heads, channels], and no argument says otherwise: jnp.swapaxes(x, 1, 2) exchanges two axes"
STATE = "states are [sequences, heads, key channels, value channels], and no argument says otherwise"
GATE = "pass g as it is to be used, such as -jnp.exp(A_log) * jax.nn.softplus(x + dt_bias)"
BOUND = "leave it away, since gates of any size are exact"
BETA = "pass beta as it is to be used: jax.nn.sigmoid(x), or twice that"
READ_BACK = "leave it away, since nothing is read back from the device"
LENGTHS = "sequences are packed by cu_seqlens, their offsets: np.cumsum([0, *lengths])"
SEGMENTS = (
    "documents are told apart by mask_info: ejkernel.types.mask.MaskInfo.from_segments(ids), or .from_cu_seqlens(offsets)"
)
PAST = "the past goes in by initial_state and comes back by return_state=True"

SPLIT_KEYS = (
    "attention counts positions from a shard's own first token; where time is split, gather keys and values and say by "
    'mask_info where the queries stand (docs/several_devices.md, "Softmax attention beside it")'
)

# What softmax attention has another way for.
MASKED = {
    **dict.fromkeys(("cu_seqlens", "segment_ids", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions"), SEGMENTS),
    "sequence_axis": SPLIT_KEYS,
}

# By the name elsewhere: what to do, where no argument here does the same.
ADVICE = {
    "head_first": LAYOUT,
    "bhtd": LAYOUT,
    "state_v_first": STATE,
    "transpose_state_layout": STATE,
    "use_gate_in_kernel": GATE,
    "A_log": GATE,
    "dt_bias": GATE,
    "safe_gate": BOUND,
    "lower_bound": BOUND,
    "use_beta_sigmoid_in_kernel": BETA,
    "allow_neg_eigval": BETA,
    "cu_seqlens_cpu": READ_BACK,
    "chunk_indices": READ_BACK,
    "lengths": LENGTHS,
    "seqlens": LENGTHS,
    "seq_lens": LENGTHS,
    "segment_ids": LENGTHS,
    "attention_mask": f"{LENGTHS}; nothing is masked",
    "cache": PAST,
    "past_key_values": PAST,
    "use_cache": PAST,
    "chunk_size": "cfg says how many tokens a chunk has, by its field block_q; without it they are chosen",
    "mode": "chunks or steps are chosen by the length; cfg says it by hand, by its field schedule",
    "gv": "recurrent_attention alone has decays per value channel",
    "normalize": "outputs are not normalised, which is up to you",
    "cp_context": "inside jax.shard_map, sequence_axis names the mesh axis that time is split over",
    "sequence_axis": "where time is split, pass the last inputs of the shard before as initial_state (docs/several_devices.md)",
}


def explains_names(function: Function) -> Function:
    """`function`, which answers a keyword that it does not take with the one that was meant."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= parameters.keys():
            raise TypeError(_explanation(function.__name__, tuple(parameters), kwargs))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # it takes the same arguments


def _explanation(name: str, parameters: tuple[str, ...], given: dict[str, Any]) -> str:
    strangers = [argument for argument in given if argument not in parameters]
    hints = list(dict.fromkeys(_hint(stranger, parameters) for stranger in strangers))
    named = ", ".join(map(repr, strangers))
    return f"{name} has no argument{'s' * (len(strangers) > 1)} {named}: {'; '.join(hints)}."


def _hint(stranger: str, parameters: tuple[str, ...]) -> str:
    """What to write for an argument that there is not."""
    meant = [here for here in ELSEWHERE.get(stranger, ()) if here in parameters]
    advice = {**ADVICE, **MASKED} if "mask_info" in parameters else ADVICE
    if not meant and stranger in advice:
        return advice[stranger]
    if stranger == "gk" and meant == ["g"]:
        return "gk is g here, of shape [batch, time, heads, key channels]; recurrent_attention takes gk and gv"
    meant = meant or difflib.get_close_matches(stranger, parameters, n=1)
    return f"{stranger} is {meant[0]} here" if meant else f"it takes {', '.join(parameters)}"
