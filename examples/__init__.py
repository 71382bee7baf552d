"""Programs that show the library at work; run one with `python -m examples.<name>` in the checkout."""
