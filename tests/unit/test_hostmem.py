"""The mapped file: views, page ranges, and giving pages back."""

from pathlib import Path

import numpy as np
import pytest

from gguf_files import write_gguf
from headrace.gguf import open_gguf
from headrace.hostmem import PAGE_BYTES, HostMemory, available_bytes, lockable_bytes, merge_pages


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([], []),
        ([(1, 2)], [(0, 10)]),
        ([(25, 31), (3, 9), (10, 11)], [(0, 40)]),
        ([(0, 10), (30, 40)], [(0, 10), (30, 40)]),
        ([(5, 15), (12, 38)], [(0, 40)]),
    ],
)
def test_merge_pages(spans: list[tuple[int, int]], merged: list[tuple[int, int]]) -> None:
    assert merge_pages(spans, 10) == merged


def test_views_ranges_and_drop(tmp_path: Path) -> None:
    tensors = {f"t{i}": ("Q8_0", (64, 256)) for i in range(4)}
    written = write_gguf(tmp_path / "m.gguf", tensors)
    file = open_gguf(tmp_path / "m.gguf")
    host = HostMemory(file)
    for name, raw in written.items():
        view = host.bytes(file.tensors[name])
        assert not view.flags.writeable and (view == np.asarray(raw).reshape(-1)).all()
        host.drop(file.tensors[name])
        assert (host.bytes(file.tensors[name]) == view).all(), "given back pages are read again"
    ranges = host.ranges(list(file.tensors.values()), piece_bytes=4 * PAGE_BYTES)
    assert all(r.address % PAGE_BYTES == r.offset_bytes % PAGE_BYTES == 0 for r in ranges)
    assert all(0 < r.n_bytes <= 4 * PAGE_BYTES for r in ranges)
    starts = [host.bytes(t).ctypes.data for t in file.tensors.values()]
    assert all(any(r.address <= a < r.address + r.n_bytes for r in ranges) for a in starts)


def test_memory_is_measured() -> None:
    assert 0 < lockable_bytes() < available_bytes()
