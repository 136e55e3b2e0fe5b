"""A mapped file of expert tensors, and what a stream does with it."""

from pathlib import Path

import numpy as np

from gguf_files import write_gguf
from headrace import hostmem
from headrace.backends.cuda.hostcopy import HostCopier
from headrace.gguf import open_gguf
from headrace.hostmem import HostMemory
from unit.fake_driver import FakeDriver

SMALL = {"n_readers": 3, "n_buffers": 4, "buffer_bytes": 16384}
PLENTY = 1 << 40


class Mapped:
    """A file of five expert tensors, mapped; `pieces` of 100 kB, cut at odd bytes."""

    def __init__(self, folder: Path) -> None:
        names = {f"blk.{i}.ffn_up_exps.weight": ("Q8_0", (7, 165, 96)) for i in range(5)}
        self.path = folder / "m.gguf"
        write_gguf(self.path, names)
        self.open()

    def open(self) -> None:
        self.file = open_gguf(self.path)
        self.host = HostMemory(self.file)
        self.infos = list(self.file.tensors.values())
        self.views = [self.host.bytes(t) for t in self.infos]
        self.pieces = self.host.ranges(self.infos, 100_000)
        self.total = sum(p.n_bytes for p in self.pieces)
        self.content = self.path.read_bytes()
        self.bytes = [v.copy() for v in self.views]


def upload(copier: HostCopier, driver: FakeDriver, mapped: Mapped, passes: int = 1) -> list[np.ndarray]:
    """Copies every tensor as the stream does; what arrived."""
    slots = [np.zeros(t.n_bytes, np.uint8) for t in mapped.infos]
    driver.memory += slots
    for _ in range(passes):
        for slot, view in zip(slots, mapped.views):
            copier.copy(slot.ctypes.data, view.ctypes.data, view.nbytes, 7)
    driver.stream(7).synchronize()
    return slots


def check(copier: HostCopier, driver: FakeDriver, mapped: Mapped) -> None:
    """The bytes are right, everything is given back, and it was not used after that."""
    for slot, expected in zip(upload(copier, driver, mapped, passes=2), mapped.bytes):
        assert (slot == expected).all()
    copier.check()
    driver.memory.clear()
    copier.close()
    copier.close()
    assert driver.locked == {} and driver.n_bad_unlocks == 0 and driver.n_here == 0 and not hostmem.locked
