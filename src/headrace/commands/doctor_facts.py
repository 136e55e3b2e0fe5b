"""What `doctor` finds out about this machine: facts, measured on the spot where they are speeds."""

import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, hostmem
from ..errors import UserError
from ..rates import save_rates

Facts = dict[str, Any]
READ_BYTES = 256 << 20


def software() -> Facts:
    """Versions, None for what is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: Facts = {"headrace": __version__, "python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def host() -> Facts:
    """The processor, the memory, and what this process may use of them; bytes and GB/s."""
    from ..backends.cpu import machine, simd

    available = hostmem.available_bytes()
    return {
        "cpu": machine.cpu_name(), "cores": os.cpu_count() or 1, "threads": machine.threads(0), "isa": simd.ISA,
        "ram_bytes": machine.total_bytes(), "available_bytes": available, "limit_bytes": limit_bytes(),
        "lockable_bytes": hostmem.lockable_bytes(), "memlock_bytes": memlock_bytes(),
        "read_gbps": read_gbps(machine.threads(0), min(READ_BYTES, available // 4)),
    }  # fmt: skip


def limit_bytes() -> int | None:
    """The least memory limit of the cgroups around this process; None without one."""
    found = []
    for folder in hostmem.memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                found.append(int((folder / name).read_text()))
    return min((n for n in found if n < 1 << 60), default=None)


def memlock_bytes() -> int | None:
    """RLIMIT_MEMLOCK; None: no limit, or no such thing."""
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def read_gbps(n_threads: int, n_bytes: int, seconds: float = 0.4) -> float:
    """GB/s at which threads read memory together, in loops that hold no lock."""
    from numba import njit

    @njit(nogil=True)
    def read(x, n_times):  # type: ignore[no-untyped-def]
        total = 0
        for turn in range(n_times):
            for value in x:
                total += value ^ turn
        return total

    parts = np.array_split(np.ones(n_bytes // 8, np.int64), n_threads)
    read(parts[0][:1], 1)
    with ThreadPoolExecutor(n_threads) as team:

        def once_s(n_times: int) -> float:
            begin = time.perf_counter()
            list(team.map(lambda part: read(part, n_times), parts))
            return time.perf_counter() - begin

        n_times = max(1, int(seconds / once_s(1)))
        return n_times * n_bytes / once_s(n_times) / 1e9


def model(path: Path) -> Facts:
    """Size of a GGUF file (all shards), and how fast the disk under its first shard is; UserError if it is none."""
    from ..gguf import open_gguf

    file = open_gguf(path)
    experts = sum(t.n_bytes for t in file.tensors.values() if "_exps." in t.name)
    size = sum(shard.size_bytes for shard in file.shards)
    return {"path": str(path), "bytes": size, "expert_bytes": experts, "disk_gbps": disk_gbps(file.shards[0].path)}


def disk_gbps(path: Path, seconds: float = 1.0, n_threads: int = 4, block: int = 8 << 20) -> float | None:
    """GB/s of reads that pass by the page cache, spread over the file; None where the system has no such reads."""
    n_blocks = path.stat().st_size // block
    if not hasattr(os, "O_DIRECT") or not n_blocks:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    begin = time.perf_counter()

    def read(thread: int) -> int:
        n_done = 0
        with closing(mmap.mmap(-1, block)) as memory:
            for i in range(thread, n_blocks, n_threads):
                if time.perf_counter() - begin > seconds:
                    break
                at = i * 7919 % n_blocks  # 7919 is a prime: all over the file
                n_done += os.preadv(fd, [memory], at * block)
        return n_done

    try:
        with ThreadPoolExecutor(n_threads) as team:
            n_bytes = sum(team.map(read, range(n_threads)))
        return n_bytes / (time.perf_counter() - begin) / 1e9
    except OSError:
        return None
    finally:
        os.close(fd)


def gpus(model_path: Path | None, seconds: float) -> tuple[list[Facts], str]:
    """(every GPU with its speeds, what is missing if there is none)."""
    from ..backends import open_device

    try:
        open_device("cuda").close()
    except UserError as error:
        return [], why_no_gpu(str(error))
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        try:
            with closing(open_device("cuda", index=index)) as device:
                found.append(gpu(device, model_path, seconds))
        except (UserError, MemoryError) as error:
            found.append({"name": torch.cuda.get_device_name(index), "unusable": str(error)})
    return found, "" if found else "kernels run in Triton's interpreter: unset TRITON_INTERPRET"


def why_no_gpu(error: str) -> str:
    """What is missing, and how to get it; `error` is what opening the device said."""
    from ..backends.cuda import nvml

    driver = nvml.driver_version()
    try:
        import torch
    except ImportError:
        need = "pip install 'headrace[cuda]'"
        return f"driver {driver} is here, torch is not: {need}" if driver else f"none; one needs its driver, and {need}"
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build, see https://pytorch.org"
    if not driver:
        return "no NVIDIA driver answers: install it, or pass the GPU into the container (docker: --gpus all)"
    if not torch.cuda.is_available():
        return (
            f"driver {driver} answers, but torch finds no GPU: it may be too old for CUDA {torch.version.cuda}, "
            "or CUDA_VISIBLE_DEVICES hides the GPU"
        )
    return error


def gpu(device: Any, model_path: Path | None, seconds: float) -> Facts:
    """One GPU: what it is, how it is connected, how fast it copies and computes (each for about so many seconds)."""
    import torch

    from ..backends.cuda import nvml, probe

    p = torch.cuda.get_device_properties(device.where)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device.where)
    address = probe.pci_address(device)
    facts: Facts = {
        "name": p.name, "capability": f"{p.major}.{p.minor}", "processors": p.multi_processor_count,
        "memory_bytes": total_bytes, "free_bytes": free_bytes, "driver": nvml.driver_version(),
        "cuda": torch.version.cuda, "dtype": device.act_dtype, "pci_address": address, "numa_node": numa_node(address),
    }  # fmt: skip
    link = probe.pcie_under_load(device)
    facts["pcie"] = {**asdict(link), "gbps": link.gbps, "max_gbps": link.max_gbps} if link else None
    with probe.sample(model_path) as source:
        rates, ways = probe.measure(device, source, seconds)
    if not model_path:  # a file may stand on another rung than the machine allows
        save_rates(device.info.name, rates)
    facts |= asdict(ways) | {"memory_gbps": rates.hbm_gbps, "matmul_tflops": rates.matmul_tflops}
    facts["rung"] = next((r for r in ("registered", "staged", "pageable") if facts[f"{r}_gbps"]), "none")
    return facts


def numa_node(pci_address: str) -> int | None:
    """The node of a machine of several to which a PCI device is connected; None where there is but one."""
    with suppress(OSError, ValueError):
        if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
            node = int(Path("/sys/bus/pci/devices", pci_address[4:].lower(), "numa_node").read_text())
            return node if node >= 0 else None
    return None
