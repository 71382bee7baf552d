"""The toy's registry: implementations lie at `_<platform>/<operation>/_interface.py` below this package."""

from ejkernel.kernels._registry import KernelRegistry

registry = KernelRegistry("tests.toy.kernels")
