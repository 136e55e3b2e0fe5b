"""Writes a GGUF file, version 3: header, metadata, tensor directory, then the tensors' bytes in order.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian, 64-bit lengths.
"""

import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..quants import TYPES

ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Tensor:
    """One tensor to write; shape in numpy order (rows first)."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def n_bytes(self) -> int:
        return TYPES[self.type].n_bytes(self.shape)


def save(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor],
    data: Callable[[Tensor], Iterable[memoryview]] | None, progress: Callable[[int], None] = lambda n_bytes: None,
) -> int:  # fmt: skip
    """Writes the file beside its name and renames it when complete; returns its bytes.

    `data(tensor)` yields the tensor's bytes in pieces; without it they are a hole in the file, which reads as zeros and
    takes no room. Raises UserError if the disk has no room.
    """
    head = header(metadata, tensors)
    n_total = len(head) + sum(aligned(t.n_bytes) for t in tensors)
    check_room(path, n_total if data else len(head))
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as f:
            progress(f.write(head))
            if not data:
                f.truncate(n_total)
            for t in tensors if data else ():
                n_written = 0
                for piece in data(t):
                    n_written += f.write(piece)
                    progress(piece.nbytes)
                assert n_written == t.n_bytes, f"{t.name}: {n_written} bytes of {t.n_bytes}"
                f.write(bytes(aligned(n_written) - n_written))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return n_total


def check_room(path: Path, n_bytes: int) -> None:
    if path.is_dir():
        raise UserError(f"-o {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"-o {path}: there is no folder {path.parent}")
    free = shutil.disk_usage(path.parent).free
    if n_bytes > free:
        raise UserError(
            f"-o {path}: the file takes {n_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free; "
            "choose fewer --layers or another disk"
        )


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def header(metadata: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Everything before the first tensor's bytes."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_string(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for t in tensors:
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        parts.append(_string(t.name) + dims + struct.pack("<IQ", TYPES[t.type].id, offset))
        offset += aligned(t.n_bytes)
    head = b"".join(parts)
    return head + bytes(aligned(len(head)) - len(head))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    """A metadata value after its type: bool, int (uint32), float (float32), str, lists of them, int32 arrays."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int32
        return struct.pack("<IIQ", ARRAY, INT32, value.size) + value.tobytes()
    if isinstance(value, list):
        if isinstance(value[0], int):
            return _typed(np.array(value, np.int32))
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    return struct.pack("<I", STRING) + _string(value)
