"""What a plan will take: seconds of a prompt and of a decoded token, from shapes and rates. Pure.

A prompt takes max(upload, compute) and what cannot overlap (`fill_s`): the first experts' upload, and the layers behind
the last streamed one where the link is what limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .gguf import TensorInfo
from .placement import Placement
from .program import NoOps, Program, Run, ShapeArena, ShapeTensor, Weights, run_step, shape_state
from .rates import Rates
from .spec import MoeSpec

PRODUCTS, ATTENTION, MEMORY, GATHER = 0.75, 0.35, 0.7, 0.92
"""Shares of the measured rates that passes reach (H200, docs/performance.md): products and attention of the product
rate, memory traffic of the copy rate, fetched experts of the link's."""
TRAFFIC = 2
"""How often a temporary crosses the device's memory: written once, read once."""


@dataclass(frozen=True)
class Costs:
    """Work of a program under a placement, counted over shapes. `host_share`: of the work on a token, the part up to
    the last streamed layer."""

    flops: int
    """Of products, for each token of a prompt."""
    pair_flops: int
    """Of attention, for each token and each token before it."""
    temporary_bytes: int
    """Written for each token of a prompt."""
    weight_bytes: int
    """Read and written to decode all weights, once a micro-batch."""
    upload_bytes: int
    first_bytes: int
    """Of it, what the first step waits for."""
    host_share: float
    gather_bytes: int
    """Routed experts of a decoded token that are on the host."""
    read_bytes: int
    """Weights that a decoded token reads in device memory."""


@dataclass(frozen=True)
class Prediction:
    n_tokens: int
    upload_s: float
    compute_s: float
    fill_s: float

    @property
    def seconds(self) -> float:
        return max(self.upload_s, self.compute_s) + self.fill_s

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


def count(program: Program, tensors: Mapping[str, TensorInfo], placements: Mapping[str, Placement]) -> Costs:
    spec = program.spec
    flops, weight_bytes, streams_at = [0.0] * len(program.steps), 0, -1
    gather = read = 0.0
    uploads: list[int] = []
    for i, step in enumerate(program.steps):
        moe = spec.ffn[step.layer] if step.experts else None
        share = moe.n_expert_used / moe.n_expert if isinstance(moe, MoeSpec) else 0.0
        names = [(name, 1.0) for name in step.weights] + [
            (n, share) for n in (step.experts.tensors if step.experts else ())
        ]
        for name, part in names:
            t = tensors[name]
            n_weights = _n_weights(t)
            if len(t.shape) > 1 and i:  # the embedding reads a row
                read += part * t.n_bytes
                if i < len(program.steps) - 1:  # the head runs for a row or two
                    flops[i] += 2 * part * n_weights
                    weight_bytes += t.n_bytes + 4 * n_weights
        streamed = [n for n in (step.experts.tensors if step.experts else ()) if placements[n].feed == "stream"]
        if streamed:
            streams_at = i
            uploads.append(sum(placements[n].n_bytes for n in streamed))
            gather += share * uploads[-1]
    total = sum(flops)
    return Costs(
        flops=int(total), pair_flops=sum(4 * a.q_width for a in spec.attention if a),
        temporary_bytes=_temporary_bytes(program), weight_bytes=weight_bytes,
        upload_bytes=sum(uploads), first_bytes=uploads[0] if uploads else 0,
        host_share=sum(flops[: streams_at + 1]) / total if total else 0.0,
        gather_bytes=int(gather), read_bytes=int(read),
    )  # fmt: skip


def _n_weights(t: TensorInfo) -> int:
    n = 1
    for size in t.shape:
        n *= size
    return n


def _temporary_bytes(program: Program, n: int = 64) -> int:
    """Bytes of temporaries a token, over all steps but the head: a dry run."""
    arena, ops, total = ShapeArena(), NoOps(), 0
    any_ops: Any = ops
    run = Run(
        any_ops, arena, "bf16", shape_state(n, 1, 1, 1, 1), ShapeTensor((n, program.spec.n_embd)),
        ShapeTensor((1, program.spec.n_vocab)), {},
    )  # fmt: skip
    for step in program.steps[:-1]:
        run_step(step, run, Weights(experts=SimpleNamespace(gate=None, up=None, down=None)))
        total += arena.n_bytes
    return total // n


def predict(costs: Costs, rates: Rates, n_tokens: int, n_ubatch: int, n_window: int, lock_bytes: int) -> Prediction:
    """A prompt of n_tokens, of which n_window share an upload; lock_bytes of the host's experts are page-locked."""
    n_windows = -(-n_tokens // n_window)
    n_batches = -(-n_tokens // n_ubatch)
    compute_s = (
        n_tokens * costs.flops / (PRODUCTS * rates.matmul_tflops * 1e12)
        + n_tokens * (n_tokens + 1) / 2 * costs.pair_flops / (ATTENTION * rates.matmul_tflops * 1e12)
        + (n_batches * costs.weight_bytes + TRAFFIC * n_tokens * costs.temporary_bytes)
        / (MEMORY * rates.hbm_gbps * 1e9)
    )
    gbps = _host_gbps(costs, rates, lock_bytes)
    upload_s = n_windows * costs.upload_bytes / gbps / 1e9
    first_s = n_windows * costs.first_bytes / gbps / 1e9
    if upload_s > compute_s * costs.host_share:  # the layers behind the last streamed one wait for its upload
        whole_s = upload_s + compute_s * (1 - costs.host_share) + min(first_s, compute_s / max(1, n_windows))
    else:
        whole_s = compute_s + first_s
    return Prediction(n_tokens, upload_s, compute_s, max(0.0, whole_s - max(upload_s, compute_s)))


def decode_s(costs: Costs, rates: Rates, lock_bytes: int) -> tuple[float, float]:
    """At the least, for a token: (seconds of fetching experts, seconds of reading weights)."""
    gbps = _host_gbps(costs, rates, lock_bytes)
    return costs.gather_bytes / (GATHER * gbps) / 1e9, costs.read_bytes / (MEMORY * rates.hbm_gbps) / 1e9


def _host_gbps(costs: Costs, rates: Rates, lock_bytes: int) -> float:
    """The link's speed over all streamed experts, of which only some may be page-locked."""
    if not costs.upload_bytes:
        return rates.link_gbps
    locked = min(1.0, lock_bytes / costs.upload_bytes) if rates.link_gbps else 0.0
    other_gbps = rates.staged_gbps or rates.pageable_gbps or rates.link_gbps
    return 1 / (locked / (rates.link_gbps or 1.0) + (1 - locked) / other_gbps)
