"""The mapped file: views, pieces, giving pages back, files that change, and what memory there is."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import write_gguf
from headrace import hostmem
from headrace.errors import UserError
from headrace.gguf import TensorInfo, open_gguf
from headrace.hostmem import PAGE_BYTES, HostMemory, available_bytes, lockable_bytes
from headrace.quants import TYPES


@pytest.fixture
def host(tmp_path: Path) -> HostMemory:
    write_gguf(tmp_path / "m.gguf", {f"t{i}": ("Q8_0", (64, 256)) for i in range(4)})
    return HostMemory(open_gguf(tmp_path / "m.gguf"))


def test_views_and_drop(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", {f"t{i}": ("Q8_0", (64, 256)) for i in range(4)})
    file = open_gguf(tmp_path / "m.gguf")
    host = HostMemory(file)
    for name, raw in written.items():
        view = host.bytes(file.tensors[name])
        assert not view.flags.writeable and (view == np.asarray(raw).reshape(-1)).all()
        host.drop(file.tensors[name])
        assert (host.bytes(file.tensors[name]) == view).all(), "given back pages are read again"


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4000), st.integers(0, 9000)), min_size=1, max_size=6),
    piece_bytes=st.integers(1, 40_000),
)
def test_pieces_are_cut_between_experts(layers: list[tuple[int, int, int]], piece_bytes: int) -> None:
    """Tensors of (experts, bytes an expert, bytes before it): every expert is in one piece, every piece is full."""
    at, infos = 0, []
    for i, (n, size, gap) in enumerate(layers):
        infos.append(TensorInfo(f"t{i}", TYPES["Q8_0"], (n, 1, 32), 0, at + gap, n * size))
        at += gap + n * size
    host = HostMemory.__new__(HostMemory)
    host._maps, host._files = [np.zeros(at, np.uint8)], [None]  # type: ignore[list-item]
    host.file = type("File", (), {"shards": [type("Shard", (), {"path": Path("x")})]})()
    base = host._maps[0].ctypes.data  # type: ignore[attr-defined]
    pieces = host.ranges(iter(infos), piece_bytes)
    borders = [(p.offset_bytes, p.offset_bytes + p.n_bytes) for p in pieces]
    experts = [
        (t.offset_bytes + e * t.n_bytes // n, t.offset_bytes + (e + 1) * t.n_bytes // n)
        for t in infos for n in [t.shape[0]] for e in range(n)
    ]  # fmt: skip
    assert all(p.address == base + p.offset_bytes and p.n_bytes > 0 for p in pieces)
    assert all(b <= c for (_, b), (c, _) in pairwise(borders)), "disjoint, sorted"
    assert all(sum(a <= first and last <= b for a, b in borders) == 1 for first, last in experts)
    held = [[e for e in experts if a <= e[0] and e[1] <= b] for a, b in borders]
    for (a, b), inside in zip(borders, held):
        assert (inside[0][0], inside[-1][1]) == (a, b), "starts and ends with an expert"
        assert b - a <= piece_bytes or len(inside) == 1
        assert all(y[0] - x[1] < PAGE_BYTES for x, y in pairwise(inside))
    for (a, _), (_, end), following in zip(borders, borders, held[1:]):
        assert following[0][1] - a > piece_bytes or following[0][0] - end >= PAGE_BYTES, "no smaller than need be"


def test_a_file_that_changes(host: HostMemory) -> None:
    path = host.file.shards[0].path
    host.check()
    content = path.read_bytes()
    path.rename(path.with_name("other"))
    path.write_bytes(b"another file of the same name is not ours")
    host.check()
    path = path.with_name("other")
    os.truncate(path, len(content) - 1)
    with pytest.raises(UserError, match=rf"m.gguf has {len(content) - 1} bytes, not {len(content)}"):
        host.check()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="was written to"):
        host.check()


def test_close_leaves_no_open_file(host: HostMemory) -> None:
    n_fd = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    view = host.bytes(host.file.tensors["t1"])
    expected = view.copy()
    host.close()
    host.close()
    assert (view == expected).all(), "a view keeps its map"
    if n_fd:
        assert len(os.listdir("/proc/self/fd")) < n_fd


def test_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < lockable_bytes() < available_bytes()
    monkeypatch.setattr(hostmem, "available_bytes", lambda: 100 << 30)
    assert lockable_bytes() == 90 << 30
    hostmem.locked[1 << 20] = 50 << 30
    assert lockable_bytes() == 40 << 30, "the system says that locked file pages are available"
    del hostmem.locked[1 << 20]
    monkeypatch.setattr(hostmem, "available_bytes", lambda: 1 << 29)
    assert lockable_bytes() == 0


GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, object]) -> int:
    """available_bytes of a machine with 64 GiB available and the given cgroup files."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   {64 << 20} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, value in files.items():
        path = root / "cg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(value))
    return available_bytes(root / "proc", root / "cg")


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"


@pytest.mark.parametrize(("cgroup", "files", "gib"), [
    ("", {}, 64),
    ("0::/\n", {"memory.max": "max", "memory.current": GIB, "memory.stat": "anon 5"}, 64),
    ("0::/\n", {"memory.max": 9 * GIB, "memory.current": 4 * GIB, "memory.stat": "anon 5"}, 5),
    ("0::/\n", {"memory.max": 9 * GIB, "memory.current": 8 * GIB, "memory.stat":
                f"active_file {GIB}\ninactive_file {6 * GIB}\nfile 5"}, 8),
    ("0::/a/b\n", {"a/memory.max": 3 * GIB, "a/memory.current": GIB, "a/memory.stat": "",
                   "a/b/memory.max": 9 * GIB, "a/b/memory.current": 0, "a/b/memory.stat": ""}, 2),
    ("0::/gone\n", {"memory.max": 9 * GIB, "memory.current": 10 * GIB, "memory.stat": ""}, 0),
    ("5:cpu:/x\n4:memory:/host/id\n0::/\n", {f"memory/{V1[0]}": 7 * GIB, f"memory/{V1[1]}": 5 * GIB,
     "memory/memory.stat": f"total_active_file {GIB}\ntotal_inactive_file 0"}, 3),
], ids=["none", "no limit", "limit", "cached files", "nested", "over", "version 1"])  # fmt: skip
def test_available_memory_heeds_cgroups(tmp_path: Path, cgroup: str, files: dict[str, object], gib: int) -> None:
    assert machine(tmp_path, cgroup, files) == gib * GIB
