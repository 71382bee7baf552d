"""Types that users pass to operations."""

from ejkernel.types.mask import MaskInfo

__all__ = ["MaskInfo"]
