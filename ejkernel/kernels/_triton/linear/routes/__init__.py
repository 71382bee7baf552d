"""Which way a call is computed: decided here, once, from its plan. `docs/routes.md` has the table."""

from __future__ import annotations

from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.routes.decode import DecodeStep
from ejkernel.kernels._triton.linear.routes.general import General
from ejkernel.kernels._triton.linear.routes.head_gate import HeadGate, HeadGateByPasses, StoredHeadGate, WideHeadGate
from ejkernel.kernels._triton.linear.routes.key_gate import KeyGate
from ejkernel.kernels._triton.linear.routes.key_value_gate import KeyValueGate
from ejkernel.kernels._triton.linear.routes.route import Gradients, Route

CHUNKED: tuple[type[Route], ...] = (  # the first that covers the call
    HeadGate,  # g [B, T, H], g_gamma, none
    WideHeadGate,  # the same with 129 to 256 key channels
    StoredHeadGate,  # the same, whatever is left
    KeyGate,  # gk, bfloat16, chunks of 64
    KeyValueGate,  # gk and gv, bfloat16, chunks of 64
    General,  # float32, float16, gv alone, other chunks
)
ROUTES: tuple[type[Route], ...] = (DecodeStep, *CHUNKED, HeadGateByPasses)

__all__ = ["CHUNKED", "ROUTES", "Gradients", "Route", "route_of"]


def route_of(plan: Plan) -> Route:
    """The route of a call."""
    chunked = next(found for route in CHUNKED if (found := route.covering(plan)) is not None)
    return DecodeStep(plan, chunked) if plan.schedule == "recurrent" else chunked
