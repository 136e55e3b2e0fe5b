"""The only reader of the environment."""

import os
from pathlib import Path

from .errors import UserError

ISAS = ("avx512-vnni", "avx-vnni", "avx2", "generic")
"""Instruction sets that the CPU kernels know."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: HEADRACE_CACHE_DIR, else `headrace` under the user's cache directory."""
    if own := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA"):
        return Path(base, "headrace")
    return Path("~/.cache/headrace").expanduser()


def cpu_isa() -> str | None:
    """HEADRACE_ISA: CPU kernels for this instruction set instead of the detected one."""
    isa = os.environ.get("HEADRACE_ISA") or None
    if isa is not None and isa not in ISAS:
        raise UserError(f"HEADRACE_ISA={isa}: choose one of {', '.join(ISAS)}, or leave it out")
    return isa
