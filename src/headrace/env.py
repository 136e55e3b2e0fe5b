"""The only reader of the environment."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled kernels are kept: HEADRACE_CACHE_DIR, else `headrace` under the user's cache directory."""
    if own := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA"):
        return Path(base, "headrace")
    return Path("~/.cache/headrace").expanduser()


def cpu_isa() -> str | None:
    """HEADRACE_ISA: CPU kernels for this instruction set instead of the detected one."""
    return os.environ.get("HEADRACE_ISA") or None
