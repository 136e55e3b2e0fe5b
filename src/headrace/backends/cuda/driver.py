"""The few calls of the CUDA driver that PyTorch does not offer: page-locking a range, copies from raw addresses,
streams that wait for or write a number in memory. A failed driver call leaves no pending error behind, unlike the
runtime's (where the next unrelated call would fail).

Calls that only queue work keep the GIL: beside a busy Python thread, each that gave it away would wait 5 ms to get it
back (staged copies fell to 0.9 GB/s)."""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

PORTABLE, READ_ONLY = 1, 8
WAIT_GEQ = 0
READ_ONLY_HOST_REGISTER_SUPPORTED = 113
"""CUdevice_attribute: read-only mappings can be registered."""


class DriverError(Exception):
    """A CUDA driver call failed; the text is the driver's name for the reason."""


class Driver(Protocol):
    """What the host memory ladder needs of a device. Addresses are integers, a stream is its handle; any call may
    raise DriverError."""

    def can_register_read_only(self) -> bool: ...

    def register(self, address: int, n_bytes: int) -> None:
        """Page-locks mapped memory for DMA, read-only; address and size are multiples of the page size."""

    def register_writable(self, address: int, n_bytes: int) -> None:
        """Page-locks ordinary memory."""

    def unregister(self, address: int) -> None: ...

    def device_pointer(self, address: int) -> int:
        """The device's address of registered host memory."""

    def here(self) -> AbstractContextManager[None]:
        """Around copies and numbers."""

    def copy_to_device(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        """Queues a copy, from registered memory."""

    def copy_pageable(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        """Copies from any host memory; may wait for what the stream has to do before."""

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Work queued on the stream after this waits until the uint32 at a device address is at least `value`."""

    def write_value(self, stream: int, address: int, value: int) -> None: ...

    def check_stream_numbers(self, address: int) -> None:
        """Raises where streams cannot wait for numbers; `address` is the device's, of a uint32 0 that stays 0."""

    def finish(self) -> None:
        """Waits for all streams."""


@cache
def _lib(keep_gil: bool = False) -> Any:
    lib = (ctypes.PyDLL if keep_gil else ctypes.CDLL)("libcuda.so.1")
    u64, size, u32, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
    for name, argtypes in {
        "cuDevicePrimaryCtxRetain": [ctypes.POINTER(pointer), ctypes.c_int],
        "cuCtxPushCurrent_v2": [pointer],
        "cuCtxPopCurrent_v2": [ctypes.POINTER(pointer)],
        "cuCtxSynchronize": [],
        "cuMemHostRegister_v2": [pointer, size, u32],
        "cuMemHostUnregister": [pointer],
        "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(u64), pointer, u32],
        "cuMemcpyHtoDAsync_v2": [u64, pointer, size, pointer],
        "cuStreamWaitValue32_v2": [pointer, u64, u32, u32],
        "cuStreamWriteValue32_v2": [pointer, u64, u32, u32],
        "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
        "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    }.items():
        getattr(lib, name).argtypes = argtypes
    return lib


def _call(name: str, *args: Any, keep_gil: bool = False) -> None:
    """Raises DriverError with the driver's own name for what went wrong."""
    if code := getattr(_lib(keep_gil), name)(*args):
        text = ctypes.c_char_p()
        _lib().cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(f"{name.removesuffix('_v2')}: {(text.value or b'error').decode()} ({code})")


class CudaDriver:
    """A GPU by its number, from any thread: each call runs in the device's primary context, which is PyTorch's too."""

    def __init__(self, index: int) -> None:
        self.index, self.context = index, ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), index)

    @contextmanager
    def here(self) -> Iterator[None]:
        _call("cuCtxPushCurrent_v2", self.context, keep_gil=True)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()), keep_gil=True)

    def _call(self, name: str, *args: Any) -> None:
        with self.here():
            _call(name, *args)

    def can_register_read_only(self) -> bool:
        found = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(found), READ_ONLY_HOST_REGISTER_SUPPORTED, self.index)
        return bool(found.value)

    def register(self, address: int, n_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, n_bytes, PORTABLE | READ_ONLY)

    def register_writable(self, address: int, n_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, n_bytes, PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        found = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), address, 0)
        return found.value

    def copy_to_device(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        _call("cuMemcpyHtoDAsync_v2", dst, src, n_bytes, stream, keep_gil=True)

    def copy_pageable(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        _call("cuMemcpyHtoDAsync_v2", dst, src, n_bytes, stream)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        _call("cuStreamWaitValue32_v2", stream, address, value, WAIT_GEQ, keep_gil=True)

    def write_value(self, stream: int, address: int, value: int) -> None:
        _call("cuStreamWriteValue32_v2", stream, address, value, 0, keep_gil=True)

    def check_stream_numbers(self, address: int) -> None:
        with self.here():
            self.write_value(0, address, 0)
            self.wait_value(0, address, 0)
        self.finish()

    def finish(self) -> None:
        self._call("cuCtxSynchronize")


@cache
def cuda_driver(index: int) -> CudaDriver:
    """The driver of a GPU, which has the same number for PyTorch (both heed CUDA_VISIBLE_DEVICES)."""
    return CudaDriver(index)
