"""The user's wishes: one frozen Config. Flags, Python keywords and bench columns come from its fields.

Wishes may say `auto`; decisions are in the Plan, and nothing writes back here. To add an option add one field.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .errors import UserError


def option(default: Any, *flags: str, help: str, choices: tuple[str, ...] = (), low: int | None = None) -> Any:
    """A Config field with its command-line flags; `low` is the least value of a number."""
    return field(default=default, metadata={"flags": flags, "help": help, "choices": choices, "low": low})


KV_TYPES = ("f16", "f32")


@dataclass(frozen=True)
class Config:
    # fmt: off
    backend: str = option("auto", "--backend", help="what computes: auto, cpu, cuda, reference, null (auto: cpu)")
    n_threads: int = option(0, "-t", "--threads", low=0, help="CPU threads (0: the cores this process may use)")
    n_ctx: int = option(0, "-c", "--ctx-size", low=0, help="context in tokens (0: the model's, cut to fit memory)")
    n_batch: int = option(2048, "-b", "--batch-size", low=1, help="most tokens handed over at once")
    n_ubatch: int = option(512, "-ub", "--ubatch-size", low=1, help="tokens computed at once")
    n_seq_max: int = option(1, "-np", "--parallel", low=1, help="sequences held at once")
    n_gpu_layers: int = option(-1, "-ngl", "--n-gpu-layers", low=-1, help="layers on the GPU (-1: all that fit)")
    n_cpu_moe: int = option(
        -1, "-ncmoe", "--n-cpu-moe", low=-1, help="experts of the first N layers stay on the host (-1: auto)")
    schedule: str = option(
        "auto", "--schedule", choices=("auto", "layer", "ubatch"), help="order of the work on long prompts")
    prefetch_experts: int = option(
        -1, "--prefetch-experts", low=-1, help="slots for streamed experts: 0 off, 1 means 3, at most 8 (-1: auto)")
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
        if self.prefetch_experts > 8:
            raise UserError(f"--prefetch-experts {self.prefetch_experts}: at most 8")

    @classmethod
    def of(cls, **options: Any) -> "Config":
        """A Config from keywords; an unknown one is a UserError that lists those that exist."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise UserError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**options)
