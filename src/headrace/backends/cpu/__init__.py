"""The CPU backend: kernels in Python, compiled by LLVM on the user's machine."""

from .device import open_device

__all__ = ["open_device"]
