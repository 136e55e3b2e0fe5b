"""The only reader of the environment."""

import os
import re
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


def register_host() -> str | None:
    """The name that asks for page-locked weights, if one is set: GGML_CUDA_REGISTER_HOST or GGML_VK_REGISTER_HOST.

    As in llama.cpp they count by presence, also `=0` or empty.
    """
    return next((name for name in ("GGML_CUDA_REGISTER_HOST", "GGML_VK_REGISTER_HOST") if name in os.environ), None)


def prefetch_experts() -> int | None:
    """GGML_SCHED_PREFETCH_EXPERTS as `--prefetch-experts` takes it: read as C's atoi does, a text without a number in
    front and what is below 0 are 0 (off), at most 8; None if it is not set."""
    text = os.environ.get("GGML_SCHED_PREFETCH_EXPERTS")
    if text is None:
        return None
    number = re.match(r"\s*([+-]?[0-9]{1,9})", text)
    return min(max(int(number[1]), 0), 8) if number else 0
