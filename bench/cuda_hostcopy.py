"""How fast each rung of the host memory ladder feeds a GPU, from a file of random bytes in the page cache.

    python bench/cuda_hostcopy.py [--gib 4] [--path /tmp] [--readers 4,8,14] [--ring 24x16,16x4] [--seconds 50]

Prints one JSON row per setting: GB/s (the best of three passes over the file, its parts the size of an expert tensor),
and whether the bytes on the device are the file's. Rows: seconds to lock, by several threads; registered; staged, by
number of readers and by ring (buffers x MiB), also beside a busy Python thread; staged with O_DIRECT, which is the
disk's speed; pageable. Leaves out what does not fit into the seconds.
"""

import argparse
import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import torch

from headrace.backends.cuda.driver import CudaDriver, DriverError, cuda_driver
from headrace.backends.cuda.hostcopy import HostCopier
from headrace.backends.cuda.readers import n_cores
from headrace.gguf import TensorInfo
from headrace.hostmem import HostMemory, MappedRange
from headrace.quants import TYPES

PART_BYTES = 151 << 20
START = time.perf_counter()


def report(**row: object) -> None:
    print(json.dumps(row | {"at_s": round(time.perf_counter() - START, 1)}), flush=True)


def write(path: Path, n_bytes: int) -> None:
    """Random bytes, different in every 64 MiB."""
    block = np.random.default_rng(0).integers(0, 1 << 63, (64 << 20) // 8, np.int64)
    with open(path, "wb", buffering=0) as f:
        for at in range(0, n_bytes, block.nbytes):
            f.write((block ^ at).view(np.uint8)[: n_bytes - at])
        os.fsync(f.fileno())


class LocksNothing(CudaDriver):
    def register_writable(self, address: int, n_bytes: int) -> None:
        raise DriverError("refused on purpose")


class Bench:
    def __init__(self, path: Path, n_bytes: int) -> None:
        shard = SimpleNamespace(path=path, size_bytes=n_bytes)
        self.host = HostMemory(SimpleNamespace(shards=[shard]))  # type: ignore[arg-type]
        info = TensorInfo("file", TYPES["Q8_0"], (n_bytes >> 20, 1 << 20), 0, 0, n_bytes)
        self.pieces, self.bytes = self.host.ranges([info]), self.host.bytes(info)
        self.stream = torch.cuda.Stream()
        self.dst = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
        self.expected = torch.from_numpy(np.fromfile(path, np.uint8)).cuda()
        self.driver = cuda_driver(0)

    def measure(self, rung: str, n_passes: int = 3, n_bytes: int = 0, **options: object) -> None:
        n_bytes, start = n_bytes or len(self.bytes), time.perf_counter()
        driver, about = options.pop("driver", self.driver), {"beside": options.pop("beside", "nothing")}
        pieces = [p for p in self.pieces if p.offset_bytes < n_bytes]
        copier = HostCopier(driver, pieces, 1 << 40, **options)  # type: ignore[arg-type]
        opened_s, seconds = time.perf_counter() - start, []
        try:
            for _ in range(n_passes):
                self.dst.zero_()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for at in range(0, n_bytes, PART_BYTES):
                    n, src = min(PART_BYTES, n_bytes - at), self.bytes.ctypes.data + at
                    copier.copy(self.dst.data_ptr() + at, src, n, self.stream.cuda_stream)
                self.stream.synchronize()
                seconds.append(time.perf_counter() - start)
                copier.check()
            same = torch.equal(self.dst[:n_bytes], self.expected[:n_bytes])
            found = max(copier.bytes_by_rung(), key=lambda r: copier.bytes_by_rung()[r])
        finally:
            start = time.perf_counter()
            copier.close()
        gbps = [n_bytes / s / 1e9 for s in seconds]
        report(
            rung=rung, gbps=round(max(gbps), 2), first_gbps=round(gbps[0], 2), same=same and found == rung.split()[0],
            open_s=round(opened_s, 3), close_s=round(time.perf_counter() - start, 3), gib=n_bytes / 2**30,
            **about, **{k: v for k, v in options.items() if k != "register"},
        )  # fmt: skip

    def register_in_parallel(self, n_threads: int) -> None:
        def lock(piece: MappedRange) -> None:
            self.driver.register(piece.address, piece.n_bytes)

        with ThreadPoolExecutor(n_threads) as pool:
            start = time.perf_counter()
            list(pool.map(lock, self.pieces))
            seconds = time.perf_counter() - start
        for piece in self.pieces:
            self.driver.unregister(piece.address)
        report(register_threads=n_threads, seconds=round(seconds, 3), gib=len(self.bytes) / 2**30)


def disk_alone(path: Path, n_bytes: int, part_bytes: int, n_threads: int = 12) -> None:
    """What O_DIRECT reads give without a GPU."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(n_threads):
        buffers.put(mmap.mmap(-1, part_bytes))

    def read(at: int) -> None:
        buffer = buffers.get()
        os.preadv(fd, [buffer], at)
        buffers.put(buffer)

    with ThreadPoolExecutor(n_threads) as pool:
        start = time.perf_counter()
        list(pool.map(read, range(0, n_bytes, part_bytes)))
        report(
            disk_alone_gbps=round(n_bytes / (time.perf_counter() - start) / 1e9, 2),
            n_threads=n_threads,
            part_mib=part_bytes >> 20,
        )
    os.close(fd)


@contextmanager
def busy_python() -> Iterator[None]:
    """Another thread that never lets go of the GIL of its own will."""
    stop = False

    def spin() -> None:
        while not stop:
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    yield
    stop = True
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--readers", default=f"4,8,{n_cores() - 2}")
    parser.add_argument("--ring", default="24x16,16x4")
    parser.add_argument("--seconds", type=float, default=50)
    args = parser.parse_args()
    logging.getLogger("headrace").setLevel(logging.ERROR)
    path, n_bytes = args.path / f"cuda_hostcopy.{os.getpid()}", int(args.gib * 2**30) >> 20 << 20
    try:
        write(path, n_bytes)
        bench = Bench(path, n_bytes)
        report(gpu=torch.cuda.get_device_name(), cores=n_cores(), gib=n_bytes / 2**30)
        for n in (1, 2, 4, 8):
            bench.register_in_parallel(n)
        bench.measure("registered")
        rings = [tuple(map(int, ring.split("x"))) for ring in args.ring.split(",")]
        direct_bytes = min(n_bytes, 2 << 30)
        todo = [
            lambda n=n, b=b, mib=mib: bench.measure(
                "staged", register=False, n_readers=n, n_buffers=b, buffer_bytes=mib << 20
            )
            for b, mib in rings for n in map(int, args.readers.split(","))
        ]  # fmt: skip
        for b, mib in rings:
            ring = {"n_buffers": b, "buffer_bytes": mib << 20}
            todo.append(
                lambda ring=ring: bench.measure("staged O_DIRECT", 1, direct_bytes, register=False, direct=True, **ring)
            )
            todo.append(lambda mib=mib: disk_alone(path, direct_bytes, mib << 20))
        todo.append(lambda: bench.measure("pageable", 2, direct_bytes, register=False, driver=LocksNothing(0)))
        for run in todo:
            if time.perf_counter() - START < args.seconds:
                run()
        with busy_python():
            for register in (True, False):
                bench.measure("registered" if register else "staged", register=register, beside="a busy Python thread")
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
