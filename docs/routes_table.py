"""Writes the tables of docs/routes.md as the code has them: python docs/routes_table.py"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).with_name("routes.md")
BEGIN, END = "<!-- routes -->\n", "<!-- /routes -->"


def page(text: str) -> str:
    """The page with the tables as they are now."""
    from ejkernel.kernels._triton.attention import _table as attention
    from ejkernel.kernels._triton.gated_delta_rule import _table as delta
    from ejkernel.kernels._triton.linear import _launches as linear
    from ejkernel.testing import tpu_routes

    before, _, following = text.partition(BEGIN)
    families = {"Linear attention": linear, "The delta rule": delta, "Softmax attention": attention}
    on_triton = "\n".join(f"### {title}\n\n{family.table()}" for title, family in families.items())
    tables = f"## On Triton\n\n{on_triton}\n## On TPUs\n\n{tpu_routes.table()}"
    return f"{before}{BEGIN}\n{tables}\n{END}{following.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
