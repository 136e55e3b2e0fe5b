"""The file's bytes in host memory: shards are mapped read-only, never copied.

A device gets weights as uint8 views of the map. Ranges that nobody needs any more in the page cache (they were
uploaded or repacked) are given back with `drop`.
"""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .gguf import File, TensorInfo

PAGE_BYTES = mmap.PAGESIZE


class HostMemory:
    """Read-only maps of a File's shards; views stay valid until `close` and the last view are gone."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._maps: list[mmap.mmap] = []
        for shard in file.shards:
            try:
                with open(shard.path, "rb") as f:
                    if os.fstat(f.fileno()).st_size != shard.size_bytes:
                        raise UserError(f"{shard.path}: the file changed while it was being opened; try again")
                    self._maps.append(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            except OSError as e:
                raise UserError(f"{shard.path}: cannot map the file: {e.strerror}") from None

    def bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [n_bytes], read-only."""
        return np.frombuffer(self._maps[info.shard], np.uint8, info.n_bytes, info.offset_bytes)

    def drop(self, info: TensorInfo) -> None:
        """Gives the whole pages of a tensor back to the system; reading them again reads the file again."""
        start = -(-info.offset_bytes // PAGE_BYTES) * PAGE_BYTES
        n_bytes = (info.offset_bytes + info.n_bytes) // PAGE_BYTES * PAGE_BYTES - start
        if n_bytes <= 0:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[info.shard].madvise(mmap.MADV_DONTNEED, start, n_bytes)
        if hasattr(os, "posix_fadvise"):
            with open(self.file.shards[info.shard].path, "rb") as f:
                os.posix_fadvise(f.fileno(), start, n_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Forgets the maps; each is unmapped when its last view dies."""
        self._maps.clear()
