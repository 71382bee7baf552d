"""Doctests are collected from the whole package; where there is no Triton, its platform cannot be imported."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["ejkernel/kernels/_triton/*"]
