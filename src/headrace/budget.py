"""Fits a model into a GPU's memory around what the user fixed. Pure: all is counted before anything is allocated.

First as many layers' experts as fit become resident beside everything else at its full size: so more memory never
means more streaming. Only where not even one fits is the rest made smaller, in the order of `STEPS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .backends.base import DeviceInfo
from .batch import state_bytes
from .config import Config
from .errors import UserError
from .gguf import TensorInfo
from .kvcache import PAGE, cache_bytes
from .placement import GIB, Placement, fixed_by_user, gpu_placements, pinned_by_user
from .program import Program, arena_bytes
from .spec import ModelSpec

LOGITS_BYTES = 256 << 20
"""Most bytes of logits computed at once; wider requests go through the head in parts."""
N_CTX, N_UBATCH, N_WINDOW = 32768, 16384, 32768
"""Context (if nobody asks for more), micro-batch and window at full size on a GPU.

On an H200 (32k tokens, all experts streamed) micro-batches of 8192 read 33300, of 16384 37500 tokens a second: each
decodes all weights once.
"""
STEPS = (
    ("n_ubatch", 2048), ("n_out", 64), ("n_window", 16384), ("n_ctx", 16384), ("n_ahead", 1), ("n_ubatch", 512),
    ("n_window", 2048), ("n_ctx", 4096), ("n_ubatch", 64), ("n_window", 64), ("n_out", 1), ("n_ctx", 1024),
)  # fmt: skip
"""What is halved, down to what, while memory is short: a prompt of 16k tokens in one window comes before the rest."""
Scratch = Callable[[ModelSpec, int, int], int]


@dataclass(frozen=True)
class Sizes:
    """What can be traded for memory; n_ahead: for how many steps' experts there are slots."""

    n_ctx: int
    n_ubatch: int
    n_window: int
    n_out: int
    n_ahead: int


@dataclass(frozen=True)
class Bytes:
    """What a plan takes of the device, by use; `weights` and `experts` are those that are resident."""

    weights: int
    experts: int
    cache: int
    workspace: int
    scratch: int
    state: int
    slots: int
    kept: int
    """The expert cache's lines."""

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.experts
            + self.cache
            + self.workspace
            + self.scratch
            + self.state
            + self.slots
            + self.kept
        )


@dataclass(frozen=True)
class Task:
    """What is to be fitted, and into what."""

    program: Program
    tensors: Mapping[str, TensorInfo]
    device: DeviceInfo
    config: Config
    act_dtype: str
    scratch: Scratch

    @cached_property
    def budget_bytes(self) -> int | None:
        """What may be allocated; None where the device does not know its memory."""
        if not self.device.total_bytes:
            return None
        found = self.device.free_bytes
        if limit := self.config.device_limit_bytes:
            found = min(found, limit - self.device.context_bytes)
        return found - self.device.reserve_bytes

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The sizes that the user chose."""
        c = self.config
        chosen = {"n_ctx": c.n_ctx, "n_ubatch": c.n_ubatch, "n_ahead": c.prefetch_experts >= 0}
        return frozenset(name for name, wish in chosen.items() if wish)

    @cached_property
    def _workspaces(self) -> dict[tuple[int, int], int]:
        return {}

    def tidy(self, s: Sizes) -> Sizes:
        """Sizes that go together: whole micro-batches in a window, none larger than the context or -b."""
        n_ubatch = min(s.n_ubatch, s.n_ctx, self.config.n_batch or s.n_ubatch)
        n_window = -(-max(min(s.n_window, s.n_ctx), n_ubatch) // n_ubatch) * n_ubatch
        n_out = max(self.config.n_seq_max, min(n_ubatch, s.n_out, LOGITS_BYTES // (4 * self.program.spec.n_vocab)))
        return replace(s, n_ubatch=n_ubatch, n_window=n_window, n_out=n_out)

    def full(self) -> Sizes:
        """Everything as the user wants it, or at its full size."""
        c, spec = self.config, self.program.spec
        n_ctx = c.n_ctx or max(min(spec.n_ctx_train, N_CTX), PAGE)
        n_ubatch = c.n_ubatch or (N_UBATCH if self.budget_bytes is not None else 512)
        return self.tidy(Sizes(n_ctx, n_ubatch, N_WINDOW, 1 << 30, 2))

    def smaller(self, s: Sizes) -> Iterator[Sizes]:
        """s, then ever less of what the user left open."""
        yield s
        for name, least in STEPS:
            while name not in self.fixed and getattr(s, name) > least:
                before, s = s, self.tidy(replace(s, **{name: max(least, getattr(s, name) // 2)}))
                if s == before:
                    break
                yield s

    def order(self, placements: Mapping[str, Placement]) -> str:
        """The schedule."""
        if self.config.schedule != "auto":
            return self.config.schedule
        return "layer" if any(p.feed == "stream" for p in placements.values()) else "ubatch"

    def window(self, s: Sizes, order: str) -> int:
        return s.n_ubatch if order == "ubatch" else s.n_window

    def slots(self, s: Sizes, placements: Mapping[str, Placement]) -> tuple[int, int]:
        """(how many slots, bytes of each): at least what one step needs; lookahead wants asynchronous copies."""
        streamed = {p.tensor: p.n_bytes for p in placements.values() if p.feed == "stream"}
        steps = [
            [streamed[name] for name in step.experts.tensors if name in streamed]
            for step in self.program.steps
            if step.experts
        ]
        least, wish = max(map(len, steps), default=0), self.config.prefetch_experts
        if not least:
            return 0, 0
        n = {-1: s.n_ahead * least, 1: 3}.get(wish, wish) if self.device.copies_async else 0
        return min(max(n, least), sum(map(len, steps))), max(max(step, default=0) for step in steps)

    def lines(self, placements: Mapping[str, Placement], n_bytes: int) -> tuple[int, int]:
        """(expert cache lines a layer, bytes of them all) within n_bytes, for layers whose experts are all streamed."""
        if n_bytes <= 0:
            return 0, 0
        groups = [step.experts.tensors for step in self.program.steps if step.experts]
        tensors = [
            self.tensors[name]
            for names in groups
            if all(placements[name].feed == "stream" for name in names)
            for name in names
        ]
        if not tensors:
            return 0, 0
        n_expert = tensors[0].shape[0]
        line_bytes = sum(t.n_bytes // n_expert for t in tensors)
        n_lines = min(n_expert, n_bytes // line_bytes)
        return n_lines, n_lines * line_bytes

    def hidden_bytes(self, s: Sizes, order: str) -> int:
        """Hidden states, logits and the integers of the batches of two windows."""
        spec, n_window = self.program.spec, self.window(s, order)
        n_rows = n_window + (s.n_ubatch if n_window > s.n_ubatch else 0)
        n_seq = self.config.n_seq_max
        ints = state_bytes(s.n_ubatch, n_seq, -(-s.n_ctx // PAGE), s.n_ubatch, n_window // s.n_ubatch)
        return 4 * spec.n_embd * n_rows + 4 * s.n_out * spec.n_vocab + ints

    def arena_bytes(self, s: Sizes) -> int:
        key = (s.n_ubatch, s.n_out)
        if key not in self._workspaces:
            self._workspaces[key] = arena_bytes(self.program, *key, self.act_dtype)
        return self._workspaces[key]

    def cache_bytes(self, n_ctx: int) -> int:
        c = self.config
        return cache_bytes(self.program.spec, n_ctx, c.n_seq_max, c.cache_type_k, c.cache_type_v)

    def taken(self, n_bytes: int) -> int:
        """What an allocation really takes."""
        grain = self.device.granule_bytes
        return -(-n_bytes // grain) * grain if n_bytes >= 5 * grain else n_bytes

    def bytes(self, s: Sizes, placements: Mapping[str, Placement]) -> Bytes:
        spec, order = self.program.spec, self.order(placements)
        experts = set(self.program.expert_tensors)
        resident = [(p.tensor in experts, self.taken(p.n_bytes)) for p in placements.values() if p.feed == "resident"]
        n_slots, slot_bytes = self.slots(s, placements)
        return Bytes(
            weights=sum(n for is_expert, n in resident if not is_expert),
            experts=sum(n for is_expert, n in resident if is_expert),
            cache=self.cache_bytes(s.n_ctx), workspace=self.arena_bytes(s),
            scratch=self.scratch(spec, s.n_ubatch, self.config.n_seq_max),
            state=self.hidden_bytes(s, order), slots=n_slots * self.taken(slot_bytes),
            kept=self.lines(placements, self.config.expert_cache_bytes)[1],
        )  # fmt: skip


def fit(task: Task, reasons: list[str]) -> tuple[Sizes, dict[str, Placement], Bytes]:
    """The sizes and places that fit; UserError with the numbers if none do."""
    n_layer, full, budget = task.program.spec.n_layer, task.full(), task.budget_bytes
    pinned = pinned_by_user(task.program, task.config, reasons)
    n_host, flag = fixed_by_user(task.program, task.config)

    def placed(n: int, why: str = "auto") -> dict[str, Placement]:
        return gpu_placements(task.program, task.tensors, pinned, n, why)

    def fits(s: Sizes, places: Mapping[str, Placement]) -> bool:
        return budget is None or task.bytes(s, places).total <= budget

    if n_host is None and budget is None:
        n_host, flag = n_layer, "auto: the device does not say how much memory it has"
    if n_host is None:
        at_once = (s for s in task.smaller(full) if s.n_ctx == full.n_ctx and s.n_ubatch >= min(2048, full.n_ubatch))
        everything = placed(0)
        whole = any(fits(s, everything) for s in at_once)
        n_host = 0 if whole else next((n for n in range(1, n_layer + 1) if fits(full, placed(n))), n_layer)
        flag = f"auto, as -ncmoe {n_host}"
    places = placed(n_host, flag)
    sizes = next((s for s in task.smaller(full) if fits(s, places)), None)
    if sizes is None:
        raise _too_much(task, list(task.smaller(full))[-1], places)
    if task.config.n_batch and task.config.n_ubatch > task.config.n_batch:
        reasons.append(f"-ub {task.config.n_ubatch} is cut to {sizes.n_ubatch}: -b {task.config.n_batch} says so")
    if changed := [
        f"{label} {getattr(sizes, name)}" for name, label in SHORT if getattr(sizes, name) < getattr(full, name)
    ]:
        reasons.append(f"memory is short: {', '.join(changed)}")
    if "n_ctx" not in task.fixed and sizes == full and budget is not None:
        sizes = _more_context(task, sizes, places, budget)
    return sizes, places, task.bytes(sizes, places)


SHORT = (
    ("n_ubatch", "micro-batch"), ("n_window", "window"), ("n_ctx", "context"), ("n_ahead", "slots for steps ahead"),
)  # fmt: skip


def _more_context(task: Task, sizes: Sizes, places: Mapping[str, Placement], budget: int) -> Sizes:
    """What is left over goes to the context, up to the model's, while its cache takes at most a quarter."""
    while sizes.n_ctx < task.program.spec.n_ctx_train:
        n_ctx = min(2 * sizes.n_ctx, task.program.spec.n_ctx_train)
        more = replace(sizes, n_ctx=n_ctx)
        if task.cache_bytes(n_ctx) > budget // 4 or task.bytes(more, places).total > budget:
            break
        sizes = more
    return sizes


def _too_much(task: Task, least: Sizes, places: Mapping[str, Placement]) -> UserError:
    b, c, budget = task.bytes(least, places), task.config, task.budget_bytes or 0
    parts = ", ".join(
        f"{n / GIB:.2f} {label}"
        for label, n in (
            ("for weights", b.weights), ("for resident experts", b.experts), ("for slots", b.slots),
            ("for the expert cache", b.kept),
            (f"for the cache of {least.n_ctx} tokens", b.cache),
            (f"to compute micro-batches of {least.n_ubatch}", b.workspace + b.scratch + b.state),
        )
        if n
    )  # fmt: skip
    remedies = [
        text for text, useful in (
            (f"a smaller context (-c {least.n_ctx}, -np {c.n_seq_max})", c.n_ctx or c.n_seq_max > 1),
            (f"smaller micro-batches (-ub {c.n_ubatch})", c.n_ubatch > 64),
            ("more experts on the host (-cmoe)", b.experts),
            (f"a smaller expert cache (--expert-cache {c.expert_cache})", b.kept),
            (f"fewer slots (--prefetch-experts {c.prefetch_experts})", c.prefetch_experts > 0),
            (f"a higher --device-memory-limit ({c.device_memory_limit})", c.device_memory_limit),
            ("--backend cpu", True),
        )
        if useful
    ]  # fmt: skip
    kept = task.device.reserve_bytes + (task.device.context_bytes if c.device_memory_limit else 0)
    return UserError(
        f"{task.device.name}: {b.total / GIB:.2f} GiB are needed ({parts}), {max(0, budget) / GIB:.2f} may be used "
        f"({kept / GIB:.2f} are kept for the driver): try {', '.join(remedies)}"
    )
