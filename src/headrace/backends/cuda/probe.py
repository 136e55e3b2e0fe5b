"""How fast this GPU's link, memory and products are, measured: what the plan decides by and `doctor` prints.

Nothing is left behind: the sample is memory without a name (or a given file, read only), locked pages are unlocked and
device memory is freed in every exit path.
"""

import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...hostmem import PAGE_BYTES, MappedRange
from ...rates import Rates, load_rates, save_rates
from . import nvml
from .driver import Driver, DriverError, cuda_driver
from .hostcopy import HostCopier

log = logging.getLogger("headrace")
SAMPLE_BYTES = 256 << 20
GATHERED_BYTES = 4 << 20
"""Size of the made-up experts that a kernel fetches."""


@contextmanager
def sample(path: Path | None = None, n_bytes: int = SAMPLE_BYTES) -> Iterator[MappedRange]:
    """The start of a file, or of a nameless one in memory, mapped as weights are."""
    with FileIO(str(path)) if path else _memory_file(n_bytes) as file:
        n_bytes = min(n_bytes, os.fstat(file.fileno()).st_size)
        with mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ) as mapped:
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            yield MappedRange(path or Path(f"/proc/self/fd/{file.fileno()}"), file, 0, address, n_bytes)


def _memory_file(n_bytes: int) -> Any:
    if hasattr(os, "memfd_create"):
        file: Any = FileIO(os.memfd_create("headrace-probe"), "r+")
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    block = np.random.default_rng(0).bytes(min(n_bytes, 1 << 20))
    for _ in range(n_bytes // len(block)):
        file.write(block)
    return file


def rate(device: Any, queue: Any, work: Callable[[], None], amount: float, seconds: float) -> float:
    """Amount per second of repeating `work` for about so many seconds, by the device's clock; two runs before that
    do not count."""
    for _ in range(2):
        begin = time.perf_counter()
        work()
        queue.synchronize()
        once_s = time.perf_counter() - begin
    start, stop, n = device.timer(), device.timer(), max(1, min(1000, int(seconds / max(once_s, 1e-6))))
    queue.record(start)
    for _ in range(n):
        work()
    queue.record(stop)
    return n * amount / max(device.between_s(start, stop), 1e-9)


@dataclass(frozen=True)
class LinkRates:
    """GB/s from host to device memory by the rungs of the ladder, and by a kernel that reads locked pages in place
    (`gather_gbps`); 0 where a way does not work."""

    registered_gbps: float
    staged_gbps: float
    pageable_gbps: float
    gather_gbps: float
    why_not_registered: str = ""


def link_rates(
    device: Any, driver: Driver, source: MappedRange, seconds: float, gather: bool = True, n_readers: int = 0
) -> LinkRates:  # fmt: skip
    """Measures each way for about so many seconds; `source` should be in the page cache."""
    queue, n = device.copy, source.n_bytes
    slot = device.alloc((n,), "u8")

    def measure(pieces: list[MappedRange], rung: str, register: bool) -> tuple[float, float]:
        """GB/s of copies and of a gather, 0 if the piece is not on the rung."""
        with _unheard():
            copier = HostCopier(driver, pieces, 1 << 62, register=register, direct=False, n_readers=n_readers)
        try:
            if pieces and copier.rung(pieces[0]) != rung:
                return 0.0, 0.0
            stream = queue.stream.cuda_stream
            copies = rate(device, queue, lambda: copier.copy(slot.data_ptr(), source.address, n, stream), n, seconds)
            copier.check()
            gathered = _gather_rate(device, source, slot, seconds) if gather and register else 0.0
            return copies / 1e9, gathered / 1e9
        finally:
            queue.synchronize()
            copier.close()

    registered, gathered = measure([source], "registered", True)
    staged, _ = measure([source], "staged", False)
    pageable, _ = measure([], "pageable", False)
    return LinkRates(registered, staged, pageable, gathered, "" if registered else _why_not_registered(driver, source))


def _gather_rate(device: Any, source: MappedRange, slot: Any, seconds: float) -> float:
    """Bytes per second of the kernel that decoding fetches experts with."""
    import triton

    from .device import HostBytes
    from .gather import BLOCK, WORDS, gather_kernel

    n_bytes = min(GATHERED_BYTES, source.n_bytes // (8 * WORDS) * 8 * WORDS)
    if not (n := min(8, source.n_bytes // n_bytes) if n_bytes else 0):
        return 0.0
    ids = torch.arange(n, dtype=torch.int32, device=device.where)
    host = HostBytes(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(source.address)))
    grid = (triton.cdiv(n_bytes // 8, WORDS), n)

    def work() -> None:
        with device.copy.here():
            gather_kernel[grid](host, slot, ids, n, n_bytes, WORDS=WORDS, BLOCK=BLOCK, num_warps=4)

    return rate(device, device.copy, work, n * n_bytes, seconds)


def _why_not_registered(driver: Driver, source: MappedRange) -> str:
    if not driver.can_register_read_only():
        return "the driver cannot lock read-only mappings"
    try:
        driver.register(source.address, source.n_bytes // PAGE_BYTES * PAGE_BYTES)
    except DriverError as e:
        return str(e)
    driver.unregister(source.address)
    return "it failed once"


@contextmanager
def _unheard() -> Iterator[None]:
    """Rungs are tried on purpose here: no warnings of what they cost."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def memory_gbps(device: Any, seconds: float, n_bytes: int = SAMPLE_BYTES) -> float:
    """GB/s of device memory, reads and writes together."""
    a, b = (device.alloc((n_bytes,), "u8") for _ in range(2))
    return rate(device, device.compute, lambda: device.compute.copy(a, b), 2 * n_bytes, seconds) / 1e9


def matmul_tflops(device: Any, seconds: float, n: int = 8192) -> float:
    """TFLOP/s of a library product [n, n] x [n, n] in the device's activation type."""
    a, b, c = (device.alloc((n, n), device.act_dtype) for _ in range(3))

    def work() -> None:
        with device.compute.here():
            torch.matmul(a, b, out=c)

    return rate(device, device.compute, work, 2 * n**3, seconds) / 1e12


def measure(device: Any, source: MappedRange, seconds: float, gather: bool = True) -> tuple[Rates, LinkRates]:
    """All speeds of a device, each measured for about so many seconds."""
    link = link_rates(device, cuda_driver(device.where.index), source, seconds, gather)
    rates = Rates(
        link_gbps=link.registered_gbps, staged_gbps=link.staged_gbps, pageable_gbps=link.pageable_gbps,
        hbm_gbps=memory_gbps(device, seconds), matmul_tflops=matmul_tflops(device, seconds),
    )  # fmt: skip
    torch.cuda.empty_cache()
    return rates, link


def measured_rates(device: Any) -> Rates:
    """The speeds of a device: those kept from before, else measured now (0.7 s on an H200) and kept. Nothing is
    known of the interpreter, nor of a card without 800 MiB of free memory."""
    if not device.compute.stream:
        return Rates()
    if found := load_rates(device.info.name):
        return found
    try:
        with sample() as source:
            rates, _ = measure(device, source, 0.1, gather=False)
    except MemoryError:
        return Rates()
    save_rates(device.info.name, rates)
    return rates


def pcie_under_load(device: Any, seconds: float = 0.3) -> nvml.PcieLink | None:
    """The link as it runs while copies keep it busy: the best of what is seen."""
    bus_id = pci_address(device)
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    slot, found, begin = device.alloc((len(host),), "u8"), [], time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(8):
            with device.copy.here():
                slot.copy_(host, non_blocking=True)
        found.append(nvml.pcie_link(bus_id))
        device.copy.synchronize()
    return max((link for link in found if link), key=lambda link: link.gbps, default=None)


def pci_address(device: Any) -> str:
    p = torch.cuda.get_device_properties(device.where)
    return f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
