"""The few calls of the CUDA driver that PyTorch does not offer: page-locking a range, copies from raw addresses,
streams that wait for or write a number in memory. A failed driver call leaves no pending error behind, unlike the
runtime's (where the next unrelated call would fail)."""

import ctypes
from functools import cache
from typing import Any

PORTABLE, READ_ONLY = 1, 8
WAIT_GEQ = 0
READ_ONLY_HOST_REGISTER_SUPPORTED = 113
"""CUdevice_attribute: read-only mappings can be registered."""


class DriverError(Exception):
    """A CUDA driver call failed; the text is the driver's name for the reason."""


@cache
def _lib() -> Any:
    lib = ctypes.CDLL("libcuda.so.1")
    u64, size, u32, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
    for name, argtypes in {
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


def call(name: str, *args: Any) -> None:
    """Raises DriverError with the driver's own name for what went wrong."""
    if code := getattr(_lib(), name)(*args):
        text = ctypes.c_char_p()
        _lib().cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'error').decode()} ({code})")


def register(address: int, n_bytes: int) -> None:
    """Page-locks mapped memory for DMA, read-only; address and size are multiples of the page size."""
    call("cuMemHostRegister_v2", address, n_bytes, PORTABLE | READ_ONLY)


def register_writable(address: int, n_bytes: int) -> None:
    """Page-locks ordinary memory."""
    call("cuMemHostRegister_v2", address, n_bytes, PORTABLE)


def unregister(address: int) -> None:
    call("cuMemHostUnregister", address)


def device_pointer(address: int) -> int:
    """The device's address of registered host memory."""
    found = ctypes.c_uint64()
    call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), address, 0)
    return found.value


def copy_to_device(dst: int, src: int, n_bytes: int, stream: int) -> None:
    call("cuMemcpyHtoDAsync_v2", dst, src, n_bytes, stream)


def wait_value(stream: int, address: int, value: int) -> None:
    """Work queued on the stream after this waits until the uint32 at a device address is at least `value`."""
    call("cuStreamWaitValue32_v2", stream, address, value, WAIT_GEQ)


def write_value(stream: int, address: int, value: int) -> None:
    call("cuStreamWriteValue32_v2", stream, address, value, 0)


def can_register_read_only(device: int) -> bool:
    found = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(found), READ_ONLY_HOST_REGISTER_SUPPORTED, device)
    return bool(found.value)
