"""What NVIDIA's management library knows of a GPU: the driver's version and the PCIe link as it runs now."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane by PCIe generation, before packet headers: copies reach about 87 % of it (an H200: 55 of 63)."""


@dataclass(frozen=True)
class PcieLink:
    """Generation and width now, at most in this slot, and the generation that the card itself knows; 0: unknown.

    An idle card lowers its generation: ask while copies run.
    """

    gen: int
    width: int
    max_gen: int
    max_width: int
    card_gen: int

    @property
    def gbps(self) -> float:
        return LANE_GBPS.get(self.gen, 0.0) * self.width

    @property
    def max_gbps(self) -> float:
        return LANE_GBPS.get(self.max_gen, 0.0) * self.max_width


@cache
def _lib() -> Any:
    """The library, initialised for the life of the process; None where there is none."""
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            lib = ctypes.CDLL(name)
        except OSError:
            continue
        return None if lib.nvmlInit_v2() else lib
    return None


def driver_version() -> str:
    """Such as "580.95.05"; "" where it cannot be asked."""
    text = ctypes.create_string_buffer(96)
    lib = _lib()
    return "" if lib is None or lib.nvmlSystemGetDriverVersion(text, 96) else text.value.decode()


def pcie_link(bus_id: str) -> PcieLink | None:
    """The link of the GPU at a PCI address such as "00000000:65:00.0"; None where it cannot be asked."""
    lib, handle = _lib(), ctypes.c_void_p()
    if lib is None or lib.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)):
        return None

    def ask(what: str) -> int:
        number = ctypes.c_uint()
        call = getattr(lib, f"nvmlDeviceGet{what}", None)
        return 0 if call is None or call(handle, ctypes.byref(number)) else number.value

    return PcieLink(
        gen=ask("CurrPcieLinkGeneration"), width=ask("CurrPcieLinkWidth"), max_gen=ask("MaxPcieLinkGeneration"),
        max_width=ask("MaxPcieLinkWidth"), card_gen=ask("GpuMaxPcieLinkGeneration"),
    )  # fmt: skip
