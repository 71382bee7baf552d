"""What the site may break over lines is marked; numbers and names are not."""

from __future__ import annotations

import importlib.util

import pytest

from tests.documentation.pages import ROOT

LONG = "ejkernel/kernels/_<platform>/linear/_interface.py".replace("<", "&lt;").replace(">", "&gt;")


def marked(html: str) -> str:
    spec = importlib.util.spec_from_file_location("wrapping", ROOT / "docs" / "wrapping.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.on_page_content(html, page=None)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p><code>--json</code></p>", "<p><code>--json</code></p>"),
        (f"<p><code>{LONG}</code></p>", f'<p><code class="long">{LONG}</code></p>'),
        (f"<li><code><a>{LONG}</a></code></li>", f'<li><code class="long"><a>{LONG}</a></code></li>'),
        (f"<pre><span></span><code>{LONG}</code></pre>", f"<pre><span></span><code>{LONG}</code></pre>"),
        ("<td>softmax, T = 4096</td>", "<td>softmax, T&nbsp;=&nbsp;4096</td>"),
        ("<td>&lt;1&gt; to &lt;2&gt; and &lt;3&gt;</td>", "<td>&lt;1&gt; to &lt;2&gt; and &lt;3&gt;</td>"),
        ("<td style='x'>a cell of several words</td>", "<td style='x'>a cell of several words</td>"),
        ("<td x>a cell of several <b>more</b> words</td>", '<td class="long" x>a cell of several <b>more</b> words</td>'),
    ],
)  # fmt: skip
def test_long_code_and_long_cells_are_marked(html, expected):
    assert marked(html) == expected
