"""What this process may use of the machine: cores, memory, the processor's name."""

import math
import os
import platform
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from .team import available_cores

MAX_THREADS = 62
"""A team's most."""


def cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def total_bytes() -> int:
    """RAM of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _physical_cores() -> int:
    """Cores among those this process may run on, counting the hardware threads of one core once."""
    if not hasattr(os, "sched_getaffinity"):
        return available_cores()
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    found = set()
    for cpu in os.sched_getaffinity(0):
        try:
            found.add(Path(topology.format(cpu)).read_text())
        except OSError:
            found.add(str(cpu))
    return len(found)


def _quota() -> float:
    """Cores' worth of time that the process's cgroup (version 2, else 1) grants; infinite without a limit."""
    with suppress(OSError, ValueError):
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit, period = (int(Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{n}_us").read_text()) for n in ("quota", "period"))
        return math.inf if limit <= 0 else limit / period
    return math.inf


def threads(wish: int) -> int:
    """Threads of the team: the wish, or for 0 the physical cores within affinity and quota.

    More than the cores that the process may run on is a UserError: spinning threads would wait for each other.
    """
    if wish > (most := min(available_cores(), MAX_THREADS)):
        raise UserError(f"-t {wish}: this process may run on {most} cores; use -t {most} or less")
    return wish or max(1, min(_physical_cores(), MAX_THREADS, math.floor(_quota()) if _quota() < math.inf else 1 << 30))
