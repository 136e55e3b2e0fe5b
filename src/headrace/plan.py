"""Spec + tensors + memory + wishes -> where everything lives and how it is fed, with reasons. Pure; prints itself."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .backends.base import DeviceInfo
from .batch import state_bytes
from .config import Config
from .errors import UserError
from .expertsplit import choose_rank
from .gguf import TensorInfo
from .kvcache import PAGE, cache_bytes
from .program import Program, arena_bytes
from .spec import MoeSpec

MIB, GIB = 2**20, 2**30
LOGITS_BYTES = 256 * MIB
"""Most bytes of logits computed at once; wider requests go through the head in parts."""
REPACK_HEADROOM = 1.15
"""Peak memory over the weights' bytes while they are regrouped."""


@dataclass(frozen=True)
class Placement:
    """Where one tensor lives.

    feed: "mapped" (read in the file's map), "resident" (loaded once into the device's own memory), "stream" (uploaded
    whole into a slot each time). layout: "in_place" or "interleaved".
    """

    tensor: str
    feed: str
    layout: str
    n_bytes: int
    reason: str


@dataclass(frozen=True)
class Plan:
    device: DeviceInfo
    placements: Mapping[str, Placement]
    n_ctx: int
    n_ubatch: int
    n_window: int
    n_out: int
    n_seq_max: int
    schedule: str
    cpu_rank: int | None
    """In decode the CPU computes the routed ranks from it on of experts in host memory; None: the GPU computes all."""
    n_slots: int
    slot_bytes: int
    cache_bytes: int
    arena_bytes: int
    state_bytes: int
    reasons: tuple[str, ...]

    @property
    def streamed(self) -> tuple[str, ...]:
        return tuple(p.tensor for p in self.placements.values() if p.feed == "stream")

    def n_bytes(self, *feeds: str) -> int:
        return sum(p.n_bytes for p in self.placements.values() if p.feed in feeds)

    @property
    def device_bytes(self) -> int:
        """All memory that the plan asks the device for; mapped weights are the page cache's."""
        slots = self.n_slots * self.slot_bytes
        return self.n_bytes("resident") + slots + self.cache_bytes + self.arena_bytes + self.state_bytes

    def lines(self) -> Iterator[str]:
        """The plan for people: sizes, then counts of each kind of placement with its reason."""
        yield f"device      {self.device.name} ({self.device.kind}), {self.device.free_bytes / GIB:.1f} GiB available"
        for label, n_bytes in (
            ("mapped", self.n_bytes("mapped")), ("resident", self.n_bytes("resident")),
            ("streamed", self.n_bytes("stream")), ("slots", self.n_slots * self.slot_bytes),
            ("kv cache", self.cache_bytes), ("workspace", self.arena_bytes), ("hidden", self.state_bytes),
        ):  # fmt: skip
            if n_bytes:
                yield f"{label:11} {n_bytes / MIB:10.1f} MiB"
        yield f"context     {self.n_ctx} tokens x {self.n_seq_max}, micro-batch {self.n_ubatch}, window {self.n_window}"
        yield f"schedule    {self.schedule}-major"
        if self.cpu_rank is not None:
            yield f"decode      routed ranks from {self.cpu_rank} on of host experts on the CPU"
        groups = Counter((p.feed, p.layout, p.reason) for p in self.placements.values())
        for (feed, layout, reason), n in sorted(groups.items()):
            n_bytes = sum(
                p.n_bytes for p in self.placements.values() if (p.feed, p.layout, p.reason) == (feed, layout, reason)
            )
            yield f"{n:5} tensors {n_bytes / MIB:10.1f} MiB  {feed}, {layout.replace('_', ' ')}: {reason}"
        yield from (f"note        {reason}" for reason in self.reasons)


def make_plan(
    program: Program, tensors: Mapping[str, TensorInfo], device: DeviceInfo, config: Config, act_dtype: str
) -> Plan:
    """Decides everything before anything is allocated; raises UserError if it cannot fit."""
    spec, reasons = program.spec, []
    on_host = device.kind != "gpu"
    if on_host and config.expert_decode != "gather":
        raise UserError(f"--expert-decode {config.expert_decode}: there is no GPU backend in use ({device.name})")
    if on_host and config.n_gpu_layers > 0:
        raise UserError(f"-ngl {config.n_gpu_layers}: there is no GPU backend in use ({device.name}); leave -ngl out")

    n_ctx = _context(program, device, config)
    if not config.n_ctx and n_ctx < spec.n_ctx_train:
        reasons.append(f"context {n_ctx} of the model's {spec.n_ctx_train} tokens: -c asks for more")
    n_ubatch = min(config.n_ubatch, config.n_batch, n_ctx)
    n_out = max(config.n_seq_max, min(n_ubatch, LOGITS_BYTES // (4 * spec.n_vocab)))
    sizes = {
        "cache_bytes": cache_bytes(spec, n_ctx, config.n_seq_max, config.cache_type_k, config.cache_type_v),
        "arena_bytes": arena_bytes(program, n_ubatch, n_out, act_dtype),
    }
    if on_host:
        placements = _host_placements(program, tensors, device, config, sum(sizes.values()), reasons)
        n_slots = slot_bytes = 0
    else:
        placements = _gpu_placements(program, tensors, config)
        streamed = [p for p in placements.values() if p.feed == "stream"]
        slot_bytes = max((p.n_bytes for p in streamed), default=0)
        n_slots = _slots(program, placements, device, config)
    streams = any(p.feed == "stream" for p in placements.values())
    order = config.schedule if config.schedule != "auto" else "layer" if streams else "ubatch"
    cpu_rank = _cpu_rank(program, device, config, reasons) if streams else None
    n_window = n_ubatch if order == "ubatch" else max(n_ubatch, min(n_ctx, 32768) // n_ubatch * n_ubatch)
    sizes["state_bytes"] = (
        4 * spec.n_embd * (n_window + (n_ubatch if n_window > n_ubatch else 0))
        + 4 * n_out * spec.n_vocab
        + state_bytes(n_ubatch, config.n_seq_max, -(-n_ctx // PAGE), n_ubatch, n_window // n_ubatch)
    )
    plan = Plan(
        device=device, placements=placements, n_ctx=n_ctx, n_ubatch=n_ubatch, n_window=n_window, n_out=n_out,
        n_seq_max=config.n_seq_max, schedule=order, cpu_rank=cpu_rank, n_slots=n_slots,
        slot_bytes=slot_bytes,
        reasons=tuple(reasons), **sizes,
    )  # fmt: skip
    if on_host and plan.device_bytes > device.free_bytes:
        cache, weights = plan.cache_bytes / GIB, plan.n_bytes("resident") / GIB
        raise UserError(
            f"-c {n_ctx} x -np {config.n_seq_max}, -ub {n_ubatch}: {plan.device_bytes / GIB:.1f} GiB are needed "
            f"({cache:.1f} for the cache, {weights:.1f} for regrouped weights); "
            f"{device.free_bytes / GIB:.1f} are available: ask for less"
        )
    return plan


def _cpu_rank(program: Program, device: DeviceInfo, config: Config, reasons: list[str]) -> int | None:
    """The first routed rank that the CPU computes in decode; see `Plan.cpu_rank`."""
    if config.expert_decode == "gather":
        return None
    if config.expert_decode == "cpu":
        return 0
    n_used = max(m.n_expert_used for m in program.spec.ffn if isinstance(m, MoeSpec))
    if config.split_rank >= 0:
        if config.split_rank > n_used:
            raise UserError(f"--split-rank {config.split_rank}: a token has {n_used} experts, ranks 0 to {n_used - 1}")
        return config.split_rank
    link_gbps, cpu_gbps = device.link_gbps, device.cpu_gbps
    if not link_gbps or not cpu_gbps:
        reasons.append("--expert-decode split: speeds of link and CPU are unknown, each takes half of the ranks")
        return choose_rank(n_used, 1, 1)
    rank = choose_rank(n_used, link_gbps, cpu_gbps)
    reasons.append(
        f"--expert-decode split: {rank} of {n_used} ranks over the link ({link_gbps:.0f} GB/s), the rest on the CPU "
        f"({cpu_gbps:.0f} GB/s); --split-rank {rank} makes it so on any machine"
    )
    return rank


def _context(program: Program, device: DeviceInfo, config: Config) -> int:
    """The wish, or the model's context halved until its cache takes at most a quarter of the free memory."""
    if config.n_ctx:
        return config.n_ctx
    n_ctx, types = program.spec.n_ctx_train, (config.cache_type_k, config.cache_type_v)
    while n_ctx > 1024 and cache_bytes(program.spec, n_ctx, config.n_seq_max, *types) > device.free_bytes // 4:
        n_ctx //= 2
    return max(n_ctx, PAGE)


def _host_placements(
    program: Program, tensors: Mapping[str, TensorInfo], device: DeviceInfo, config: Config, other_bytes: int,
    reasons: list[str],
) -> dict[str, Placement]:  # fmt: skip
    """A device that computes from host memory: weights stay mapped, or are regrouped if that fits."""
    names = [*program.resident_tensors, *program.expert_tensors]
    fast = [
        name for name in names
        if tensors[name].type.name in device.repack_types and len(tensors[name].shape) > 1
        and name != "token_embd.weight"  # its rows are read one by one
    ]  # fmt: skip
    need_bytes = int(REPACK_HEADROOM * sum(tensors[name].n_bytes for name in fast)) + other_bytes
    if config.repack == "on" and not fast:
        raise UserError(f"--repack on: {device.name} has no interleaved layout for this file's tensor types")
    repack = config.repack == "on" or (config.repack == "auto" and need_bytes < device.free_bytes)
    if fast and not repack and config.repack == "auto":
        reasons.append(
            f"regrouping would need {need_bytes / GIB:.1f} GiB of {device.free_bytes / GIB:.1f}: weights in place"
        )
    why = {"on": "--repack on", "auto": "faster, and RAM allows"}.get(config.repack, "")
    chosen = set(fast) if repack else set()
    return {
        name: Placement(name, "resident", "interleaved", tensors[name].n_bytes, why)
        if name in chosen
        else Placement(name, "mapped", "in_place", tensors[name].n_bytes, "read where the file is mapped")
        for name in names
    }


def _gpu_placements(program: Program, tensors: Mapping[str, TensorInfo], config: Config) -> dict[str, Placement]:
    """Everything on the device but the experts of the first `n_cpu_moe` layers (all of them on auto)."""
    n_layer = program.spec.n_layer
    n_host = n_layer if config.n_cpu_moe < 0 else min(config.n_cpu_moe, n_layer)
    out = {
        name: Placement(name, "resident", "in_place", tensors[name].n_bytes, "not an expert")
        for name in program.resident_tensors
    }
    for step in program.steps:
        for name in step.experts.tensors if step.experts else ():
            streamed = step.layer < n_host
            feed, reason = ("stream", f"-ncmoe {n_host}") if streamed else ("resident", "beyond -ncmoe")
            out[name] = Placement(name, feed, "in_place", tensors[name].n_bytes, reason)
    return out


def _slots(program: Program, placements: Mapping[str, Placement], device: DeviceInfo, config: Config) -> int:
    """How many slots: at least what one step needs; lookahead wants two steps' worth, and asynchronous copies."""
    per_step = [
        sum(placements[name].feed == "stream" for name in step.experts.tensors)
        for step in program.steps
        if step.experts
    ]
    least = max(per_step, default=0)
    if not least or config.prefetch_experts == 0 or not device.copies_async:
        return least
    wish = {-1: 2 * least, 1: 3}.get(config.prefetch_experts, config.prefetch_experts)
    return min(max(wish, least), sum(per_step))
