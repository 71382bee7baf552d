"""Which way a call of the delta rule is computed: decided here, once, from its plan. `docs/routes.md` has the table."""

from __future__ import annotations

from ejkernel.kernels._triton.gated_delta_rule.routes.decode import DeltaStep
from ejkernel.kernels._triton.gated_delta_rule.routes.head_gate import DeltaHeadGate
from ejkernel.kernels._triton.gated_delta_rule.routes.key_gate import DeltaGeneral, DeltaKeyGate
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.routes.route import Route

CHUNKED: tuple[type[Route], ...] = (  # the first that covers the call
    DeltaHeadGate,  # g [B, T, H], none
    DeltaKeyGate,  # g [B, T, H, K], bfloat16, chunks of 64
    DeltaGeneral,  # float32, float16, other chunks
)
ROUTES: tuple[type[Route], ...] = (DeltaStep, *CHUNKED)

__all__ = ["CHUNKED", "ROUTES", "route_of"]


def route_of(plan: Plan) -> Route:
    """The route of a call."""
    chunked = next(found for route in CHUNKED if (found := route.covering(plan)) is not None)
    return DeltaStep(plan, chunked) if plan.schedule == "recurrent" else chunked
