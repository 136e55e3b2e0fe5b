"""Spec + tensors + memory + wishes -> where everything lives and how it is fed, with reasons. Pure; prints itself."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .backends.base import DeviceInfo
from .budget import N_WINDOW, Bytes, Scratch, Sizes, Task, fit
from .config import ALL_THAT_IS_LEFT, Config, overrides
from .errors import UserError
from .expertsplit import choose_rank
from .gguf import TensorInfo
from .kvcache import PAGE
from .placement import GIB, Placement, host_placements
from .predict import Costs, Prediction, count, decode_s, predict
from .program import Program
from .rates import Rates
from .spec import MoeSpec

__all__ = ["Placement", "Plan", "make_plan"]
MIB = 2**20
N_UBATCH = 512
"""Micro-batch on a CPU."""
PROMPTS = (2048, 16384, 32768)
"""Prompts whose time is predicted."""


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
    n_lines: int
    """Experts of each streamed layer that the expert cache can keep."""
    line_bytes: int
    """Of all its lines together."""
    cache_bytes: int
    arena_bytes: int
    state_bytes: int
    scratch_bytes: int
    """What the ops keep beside the arena."""
    budget_bytes: int | None
    """What might be allocated on the device; None: it does not say."""
    lock_bytes: int
    """Host memory that may be page-locked; 0: none is to be."""
    rates: Rates | None
    costs: Costs | None
    """Of the device, and of the program under this plan: what predictions take; None where rates are not known."""
    reasons: tuple[str, ...]

    @property
    def streamed(self) -> tuple[str, ...]:
        return tuple(p.tensor for p in self.placements.values() if p.feed == "stream")

    def n_bytes(self, *feeds: str) -> int:
        return sum(p.n_bytes for p in self.placements.values() if p.feed in feeds)

    @property
    def device_bytes(self) -> int:
        """All memory that the plan asks the device for; mapped weights are the page cache's."""
        slots, working = self.n_slots * self.slot_bytes, self.arena_bytes + self.scratch_bytes + self.state_bytes
        return self.n_bytes("resident") + slots + self.line_bytes + self.cache_bytes + working

    @property
    def spare_bytes(self) -> int:
        """What the budget leaves over; 0 where it is not known."""
        return max(0, (self.budget_bytes or 0) - self.device_bytes)

    @property
    def lockable_bytes(self) -> int:
        """Of the streamed bytes, those that fit the budget for page-locked memory."""
        return min(self.lock_bytes, self.n_bytes("stream"))

    def predict(self, n_tokens: int) -> Prediction | None:
        """The time of a prompt."""
        if not self.rates or not self.costs:
            return None
        return predict(self.costs, self.rates, n_tokens, self.n_ubatch, self.n_window, self.lock_bytes)

    def decode_s(self) -> tuple[float, float] | None:
        """At the least, for a decoded token: (seconds of fetching experts, seconds of reading weights)."""
        return decode_s(self.costs, self.rates, self.lock_bytes) if self.rates and self.costs else None

    def lines(self) -> Iterator[str]:
        """The plan for people: sizes, then counts of each kind of placement with its reason."""
        yield f"device      {self.device.name} ({self.device.kind}), {self.device.free_bytes / GIB:.1f} GiB available"
        for label, n_bytes in (
            ("mapped", self.n_bytes("mapped")), ("streamed", self.n_bytes("stream")),
            ("page-locked", self.lockable_bytes), ("resident", self.n_bytes("resident")),
            (f"slots x {self.n_slots}", self.n_slots * self.slot_bytes),
            (f"kept x {self.n_lines}", self.line_bytes), ("kv cache", self.cache_bytes),
            ("workspace", self.arena_bytes), ("scratch", self.scratch_bytes), ("hidden", self.state_bytes),
        ):  # fmt: skip
            if n_bytes:
                yield f"{label:11} {n_bytes / MIB:10.1f} MiB"
        if self.budget_bytes is not None:
            yield f"{'in all':11} {self.device_bytes / MIB:10.1f} MiB of {self.budget_bytes / MIB:.1f} on the device"
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
        yield from self.prediction_lines()

    def prediction_lines(self) -> Iterator[str]:
        """Predicted seconds and tokens a second of prompts that fit the context, and of a decoded token."""
        for n_tokens in PROMPTS:
            if n_tokens <= self.n_ctx and (p := self.predict(n_tokens)):
                yield (
                    f"prompt      {n_tokens} tokens: {p.seconds:.3f} s, {p.tokens_per_s:.0f} t/s = "
                    f"max(upload {p.upload_s:.3f}, compute {p.compute_s:.3f}) + fill {p.fill_s:.3f}"
                )
        if self.costs and (times := self.decode_s()):
            fetch_s, read_s = times
            c = self.costs
            yield (
                f"decode      at most {1 / (fetch_s + read_s):.0f} t/s: {c.gather_bytes / MIB:.0f} MiB of experts over "
                f"the link {1e3 * fetch_s:.1f} ms, {c.read_bytes / MIB:.0f} MiB read {1e3 * read_s:.1f} ms"
            )


def no_scratch(*_: object) -> int:
    return 0


def make_plan(
    program: Program, tensors: Mapping[str, TensorInfo], device: DeviceInfo, config: Config, act_dtype: str, *,
    scratch: Scratch = no_scratch, rates: Rates | None = None, lockable_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """Decides everything before anything is allocated; raises UserError if it cannot fit.

    scratch: Device.scratch_bytes; rates: what is known of the device's speeds; lockable_bytes: host memory that may be
    page-locked (None: any).
    """
    reasons: list[str] = []
    on_host = device.kind != "gpu"
    rates = rates if rates and rates.predict and not on_host else None
    task = Task(program, tensors, device, config, act_dtype, scratch)
    sizes, placements, used = (_fit_host if on_host else fit)(task, reasons)
    if not config.n_ctx and sizes.n_ctx < program.spec.n_ctx_train:
        reasons.append(f"context {sizes.n_ctx} of the model's {program.spec.n_ctx_train} tokens: -c asks for more")
    streamed_bytes = sum(p.n_bytes for p in placements.values() if p.feed == "stream")
    order = task.order(placements)
    n_slots, slot_bytes = task.slots(sizes, placements)
    cpu_rank = _cpu_rank(program, device, config, reasons) if streamed_bytes else None
    n_lines, line_bytes = _lines(task, placements, used, cpu_rank, reasons)
    plan = Plan(
        device=device, placements=placements, n_ctx=sizes.n_ctx, n_ubatch=sizes.n_ubatch,
        n_window=task.window(sizes, order), n_out=sizes.n_out, n_seq_max=config.n_seq_max, schedule=order,
        cpu_rank=cpu_rank, n_slots=n_slots, slot_bytes=slot_bytes, n_lines=n_lines, line_bytes=line_bytes,
        cache_bytes=used.cache, arena_bytes=used.workspace, state_bytes=used.state,
        scratch_bytes=used.scratch, budget_bytes=None if on_host else task.budget_bytes,
        lock_bytes=_lock_bytes(config, streamed_bytes, lockable_bytes, reasons), rates=rates,
        costs=count(program, tensors, placements) if rates else None, reasons=tuple(reasons),
    )  # fmt: skip
    if on_host and plan.device_bytes > device.free_bytes:
        cache, weights = plan.cache_bytes / GIB, plan.n_bytes("resident") / GIB
        raise UserError(
            f"-c {plan.n_ctx} x -np {config.n_seq_max}, -ub {plan.n_ubatch}: {plan.device_bytes / GIB:.1f} GiB are "
            f"needed ({cache:.1f} for the cache, {weights:.1f} for regrouped weights); "
            f"{device.free_bytes / GIB:.1f} are available: ask for less"
        )
    return plan


def _lines(
    task: Task, placements: Mapping[str, Placement], used: Bytes, cpu_rank: int | None, reasons: list[str]
) -> tuple[int, int]:  # fmt: skip
    """(lines a layer, bytes of all) of the expert cache: as asked for, or in what the budget leaves over."""
    wish = task.config.expert_cache_bytes
    if not wish:
        return 0, 0
    if cpu_rank == 0:
        reasons.append("no expert cache: the CPU computes all experts on the host")
        return 0, 0
    left = (task.budget_bytes or 0) - used.total
    found = task.lines(placements, left if wish == ALL_THAT_IS_LEFT else wish)
    if not found[0]:
        reasons.append(f"--expert-cache {task.config.expert_cache} keeps nothing: not one expert of each layer fits")
    return found


def _lock_bytes(config: Config, streamed_bytes: int, lockable_bytes: int | None, reasons: list[str]) -> int:
    """How much host memory may be page-locked; UserError where --register-host on asks for more."""
    if config.register_host == "off" or not streamed_bytes:
        return 0
    limits = [n for n in (lockable_bytes, config.host_limit_bytes) if n is not None]
    if not limits or min(limits) >= streamed_bytes:
        return min(limits, default=streamed_bytes)
    by_flag = config.host_limit_bytes == min(limits)
    why = f"--host-memory-limit {config.host_memory_limit}" if by_flag else "what this machine has available"
    if config.register_host == "on":
        raise UserError(
            f"--register-host on: {streamed_bytes / GIB:.1f} GiB of experts are on the host, {min(limits) / GIB:.1f} "
            f"may be page-locked ({why}); free memory, lower -ncmoe, or leave the flag out: the rest is then staged"
        )
    reasons.append(
        f"{min(limits) / GIB:.1f} of {streamed_bytes / GIB:.1f} GiB of experts are page-locked ({why}), the rest is "
        "staged, which is slower"
    )
    return min(limits)


def _fit_host(task: Task, reasons: list[str]) -> tuple[Sizes, dict[str, Placement], Bytes]:
    """A device that computes from host memory."""
    c, device = task.config, task.device
    for flag, given in (
        (f"-ngl {c.n_gpu_layers}", c.n_gpu_layers > 0),
        (f"--expert-decode {c.expert_decode}", c.expert_decode != "gather"),
        (f"--expert-cache {c.expert_cache}", c.expert_cache),
        (f"-ot {c.override_tensor}", any(not o.on_host for o in overrides(c.override_tensor))),
        (f"--device-memory-limit {c.device_memory_limit}", c.device_memory_limit),
        (f"--register-host {c.register_host}", c.register_host == "on"),
    ):  # fmt: skip
        if given:
            raise UserError(f"{flag}: there is no GPU backend in use ({device.name}); leave it out")
    n_ctx = _host_context(task)
    sizes = task.tidy(Sizes(n_ctx, c.n_ubatch or N_UBATCH, N_WINDOW, 1 << 30, 2))
    working = task.bytes(sizes, {})
    placements = host_placements(
        task.program, task.tensors, device, c, working.cache + working.workspace, reasons
    )  # fmt: skip
    return sizes, placements, task.bytes(sizes, placements)


def _host_context(task: Task) -> int:
    """The wish, or the model's context halved until its cache takes at most a quarter of the free memory."""
    if task.config.n_ctx:
        return task.config.n_ctx
    n_ctx = task.program.spec.n_ctx_train
    while n_ctx > 1024 and task.cache_bytes(n_ctx) > task.device.free_bytes // 4:
        n_ctx //= 2
    return max(n_ctx, PAGE)


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
