"""The user's wishes: one frozen Config. Flags, Python keywords and bench columns come from its fields.

Wishes may say `auto`; decisions are in the Plan, and nothing writes back here. To add an option add one field.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import env
from .errors import UserError


def option(
    default: Any, *flags: str, help: str, choices: tuple[str, ...] = (), low: int | None = None,
    parse: Callable[[str], Any] | None = None, joins: bool = False,
) -> Any:  # fmt: skip
    """A Config field with its command-line flags; `low` is the least value of a number, `parse` raises ValueError on a
    bad text, and a flag that `joins` may be repeated: its texts are joined by commas."""
    about = {"flags": flags, "help": help, "choices": choices, "low": low, "parse": parse, "joins": joins}
    return field(default=default, metadata=about)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_bytes(text: str) -> int | None:
    """Bytes of a size such as 12GiB or 12G (both 2^30), 12GB (10^9), or a bare number; None for an empty text.

    Raises ValueError.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?b?)", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError("give a size such as 12GiB, 8G or 500MiB")
    number, unit, ending = match[1], match[2].upper(), match[3].lower()
    if not unit and ending.startswith("i"):
        raise ValueError("give a size such as 12GiB, 8G or 500MiB")
    return int(float(number) * UNITS[unit + ("B" if unit and ending == "b" else "")])


ALL_THAT_IS_LEFT = -1


def cache_bytes(text: str) -> int:
    """Bytes for the expert cache: of a size, 0 for an empty text, ALL_THAT_IS_LEFT for "auto". Raises ValueError."""
    return ALL_THAT_IS_LEFT if text == "auto" else size_bytes(text) or 0


HOST_NAMES, GPU_NAMES = ("CPU", "CUDA_Host"), ("GPU", "CUDA0")


@dataclass(frozen=True)
class Override:
    """Where tensors live whose name a pattern is found in: on the host, or on the GPU."""

    pattern: re.Pattern[str]
    on_host: bool


def overrides(text: str) -> tuple[Override, ...]:
    """REGEX=DEVICE, separated by commas or semicolons; a comma within a pattern is fine. Raises ValueError."""
    pieces: list[str] = []
    for piece in re.split("[,;]", text) if text else ():
        if pieces and "=" not in pieces[-1]:  # the comma was one of {1,2}
            pieces[-1] += "," + piece
        else:
            pieces.append(piece)
    found = []
    for piece in pieces:
        pattern, equals, device = piece.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"{piece!r} is not REGEX=DEVICE, such as 'blk\\.[0-9]\\.ffn_.*_exps=CPU'")
        if device.lower() not in {name.lower() for name in HOST_NAMES + GPU_NAMES}:
            raise ValueError(f"{device!r} is no device; known are {', '.join(HOST_NAMES + GPU_NAMES)}")
        try:
            compiled = re.compile(pattern)
        except re.error as e:
            raise ValueError(f"{pattern!r} is no regular expression: {e}") from None
        found.append(Override(compiled, device.lower() in {name.lower() for name in HOST_NAMES}))
    return tuple(found)


KV_TYPES = ("f16", "f32")


@dataclass(frozen=True)
class Config:
    # fmt: off
    backend: str = option("auto", "--backend", help="what computes: auto (cuda, else cpu), cpu, cuda, reference, null")
    n_threads: int = option(0, "-t", "--threads", low=0, help="CPU threads (0: the cores this process may use)")
    n_ctx: int = option(0, "-c", "--ctx-size", low=0, help="context in tokens (0: the model's, cut to fit memory)")
    n_batch: int = option(
        0, "-b", "--batch-size", low=0, help="no micro-batch is larger, as in llama.cpp (0: no limit)")
    n_ubatch: int = option(
        0, "-ub", "--ubatch-size", low=0, help="tokens computed at once (0: 512, on a GPU up to 16384)")
    n_seq_max: int = option(1, "-np", "--parallel", low=1, help="sequences held at once")
    n_gpu_layers: int = option(
        -1, "-ngl", "--n-gpu-layers", low=-1, help="layers whose experts may be on the GPU, the last ones (-1: all)")
    n_cpu_moe: int = option(
        -1, "-ncmoe", "--n-cpu-moe", low=-1, help="the experts of the first N layers stay on the host (-1: auto)")
    cpu_moe: bool = option(False, "-cmoe", "--cpu-moe", help="the experts of all layers stay on the host")
    override_tensor: str = option(
        "", "-ot", "--override-tensor", parse=overrides, joins=True,
        help="REGEX=DEVICE,...: expert tensors on the host (CPU) or the GPU (CUDA0), whatever -ncmoe says")
    device_memory_limit: str = option(
        "", "--device-memory-limit", parse=size_bytes, help="GPU memory to use, such as 12GiB (default: all free)")
    host_memory_limit: str = option(
        "", "--host-memory-limit", parse=size_bytes,
        help="host memory to page-lock, such as 16GiB (default: what RAM allows)")
    register_host: str = option(
        "auto", "--register-host", choices=("auto", "on", "off"),
        help="page-lock experts on the host: as far as memory allows, all of them or an error, or none")
    schedule: str = option(
        "auto", "--schedule", choices=("auto", "layer", "ubatch"), help="order of the work on long prompts")
    prefetch_experts: int = option(
        -1, "--prefetch-experts", low=-1, help="slots for streamed experts: 0 off, 1 means 3, at most 8 (-1: auto)")
    expert_cache: str = option(
        "", "--expert-cache", parse=cache_bytes,
        help="GPU memory that keeps host experts in use, such as 5GiB, or auto: what is left over (default: none)")
    expert_decode: str = option(
        "gather", "--expert-decode", choices=("gather", "cpu", "split"),
        help="host experts of a decoded token: fetched by the GPU, computed by the CPU, or shared by router rank")
    split_rank: int = option(
        -1, "--split-rank", low=-1, help="first rank of the CPU's share of a split (-1: by measured speeds)")
    cache_type_k: str = option("f16", "-ctk", "--cache-type-k", choices=KV_TYPES, help="type of cached keys")
    cache_type_v: str = option("f16", "-ctv", "--cache-type-v", choices=KV_TYPES, help="type of cached values")
    repack: str = option(
        "auto", "--repack", choices=("auto", "on", "off"), help="regroup weights for speed (auto: if RAM allows)")
    # fmt: on

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, flag = getattr(self, f.name), f.metadata["flags"][0]
            if type(value) is not type(f.default):
                raise UserError(f"{flag} ({f.name}) takes {type(f.default).__name__}, not {value!r}")
            if f.metadata["choices"] and value not in f.metadata["choices"]:
                raise UserError(f"{flag} {value}: choose one of {', '.join(f.metadata['choices'])}")
            if f.metadata["low"] is not None and value < f.metadata["low"]:
                raise UserError(f"{flag} {value}: the least value is {f.metadata['low']}")
            if f.metadata["parse"]:
                try:
                    f.metadata["parse"](value)
                except ValueError as e:
                    raise UserError(f"{flag} {value}: {e}") from None
        if self.prefetch_experts > 8:
            raise UserError(f"--prefetch-experts {self.prefetch_experts}: at most 8")
        if self.cpu_moe and self.n_cpu_moe >= 0:
            raise UserError(f"-cmoe keeps all experts on the host, -ncmoe {self.n_cpu_moe} those of some: give one")

    @property
    def device_limit_bytes(self) -> int | None:
        return size_bytes(self.device_memory_limit)

    @property
    def host_limit_bytes(self) -> int | None:
        return size_bytes(self.host_memory_limit)

    @property
    def expert_cache_bytes(self) -> int:
        return cache_bytes(self.expert_cache)

    def with_environment(self) -> "Config":
        """The same wishes, where they say auto with what llama.cpp's environment names ask for; see env.py."""
        n_slots = env.prefetch_experts() if self.prefetch_experts < 0 else None
        return self if n_slots is None else dataclasses.replace(self, prefetch_experts=n_slots)

    @classmethod
    def of(cls, **options: Any) -> "Config":
        """A Config from keywords; an unknown one is a UserError that lists those that exist."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise UserError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**options)
