"""ExpertStream: where the experts of a step are, now. Only this file knows slots.

A streamed tensor has a fixed slot (see schedule.py), so its address never changes and recorded work stays valid.
Each slot has two events. Copy queue: wait `free`, copy, record `ready`. Compute queue: wait `ready`, run, record
`free`. The host never waits.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from .backends.base import Device, Event, Tensor, Weight
from .errors import UserError
from .expertcache import ExpertCache
from .gguf import TensorInfo
from .program import ExpertWeights, Program, Step
from .trace import Trace

log = logging.getLogger("headrace")
MORE_MEMORY = "lower -c or -ub, or leave more experts on the host (-ncmoe)"


class Slot:
    """A fixed device buffer with the two events that guard it."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self.buffer: Tensor = device.alloc((n_bytes,), "u8")
        self.ready: Event = device.event()
        self.free: Event = device.event()
        device.compute.record(self.free)


class ExpertStream:
    """Uploads streamed expert tensors and hands out every step's ExpertWeights.

    `resident` holds the weights that need no upload; `host` gives a streamed tensor's bytes; `check` raises if they
    are not to be read any more, and is called before each pass.
    """

    def __init__(
        self, device: Device, program: Program, streamed: Mapping[str, TensorInfo], n_slots: int, slot_bytes: int,
        resident: Mapping[str, Weight], host: Callable[[TensorInfo], NDArray[np.uint8]],
        check: Callable[[], None] = lambda: None, n_lines: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.host, self.streamed, self.check = device, host, streamed, check
        self.uploaded_bytes, self.trace = 0, Trace()
        self.slots = self._allocate(program, n_slots, slot_bytes) if streamed else []
        names = [name for name in program.expert_tensors if name in streamed]
        self.slot_of = {name: self.slots[i % len(self.slots)] for i, name in enumerate(names)}
        self.weights = dict(resident)
        self.gathered: dict[str, Weight] = {}
        """Streamed tensors for passes of few tokens: fetched expert by expert, without an upload."""
        self.computed: dict[str, Weight] = {}
        """Streamed tensors for decode steps that leave them to the host's processor."""
        for name, slot in self.slot_of.items():
            self.weights[name] = device.view(streamed[name], slot.buffer)
            if weight := device.gather_view(streamed[name], slot.buffer, host(streamed[name])):
                self.gathered[name] = weight
            if weight := device.computed_view(streamed[name], host(streamed[name])):
                self.computed[name] = weight
        self.cache = self._cache(program, n_lines) if n_lines and self.gathers else None

    @property
    def n_slots(self) -> int:
        return len(self.slots)

    def upload(self, name: str) -> None:
        slot, info, copy = self.slot_of[name], self.streamed[name], self.device.copy
        copy.wait(slot.free)
        with self.trace.copy(info):
            n_here = self._from_cache(info, slot)
        copy.record(slot.ready)
        self.uploaded_bytes += info.n_bytes - n_here

    def _from_cache(self, info: TensorInfo, slot: Slot) -> int:
        """Fills the slot from the cache's lines and, where they have nothing, from the host; bytes that were here."""
        held = self.cache.held(info.name) if self.cache else []
        host, copy, size = self.host(info), self.device.copy, info.n_bytes // info.shape[0]
        start = 0
        for expert, line in [*held, (info.shape[0], 0)]:
            if start < expert:
                copy.copy(slot.buffer[start * size : expert * size], host[start * size : expert * size])
            if self.cache and expert < info.shape[0]:
                data = self.cache.lines[info.name].data
                copy.copy(slot.buffer[expert * size : (expert + 1) * size], data[line * size : (line + 1) * size])
            start = expert + 1
        if self.cache:
            self.cache.saved_bytes += len(held) * size
        return len(held) * size

    def acquire(self, step: Step) -> None:
        for slot in self._slots(step):
            self.device.compute.wait(slot.ready)

    def release(self, step: Step) -> None:
        for slot in self._slots(step):
            self.device.compute.record(slot.free)

    @contextmanager
    def pass_(self) -> Iterator[None]:
        """Around one pass: if it fails midway every slot is released behind the work that was queued.

        A pass whose logits were read has failed too if a copy went wrong: UserError.
        """
        try:
            self.check()
            yield
            self.device.check()
        except BaseException:
            self.device.copy.synchronize()
            self.release_all()
            raise

    @property
    def gathers(self) -> bool:
        """Whether a pass can do without uploads."""
        return 0 < len(self.gathered) == len(self.streamed)

    @property
    def decodes(self) -> bool:
        """Whether a decode step can do without uploads."""
        return self.gathers or 0 < len(self.computed) == len(self.streamed)

    def experts(self, step: Step, phase: str, gathers: bool) -> ExpertWeights | None:
        """A step's experts: as uploads leave them, or (gathers) as its ops find those that they need."""
        if not (e := step.experts):
            return None
        here = self.computed if phase == "decode" and self.computed else self.gathered
        weights = self.weights | here if gathers else self.weights
        return ExpertWeights(weights[e.gate], weights[e.up] if e.up else None, weights[e.down])

    def after_decode(self) -> None:
        """After a decode step's logits were read: the cache may choose what it keeps."""
        if self.cache:
            self.cache.after_step()

    def release_all(self) -> None:
        """After a pass that used the slots without uploads: the next upload waits for it."""
        for slot in self.slots:
            self.device.compute.record(slot.free)

    def _cache(self, program: Program, n_lines: int) -> ExpertCache | None:
        """Lines for every layer whose experts are streamed whole, and weights that are fetched through them."""
        names = [s.experts.tensors for s in program.steps if s.experts]
        groups = [[self.streamed[name] for name in group] for group in names if set(group) <= set(self.streamed)]
        try:
            cache = ExpertCache(self.device, groups, n_lines)
        except MemoryError as e:
            log.warning("no expert cache: %s; %s", e, MORE_MEMORY)
            return None
        for name, lines in cache.lines.items():
            info = self.streamed[name]
            weight = self.device.gather_view(info, self.slot_of[name].buffer, self.host(info), lines)
            assert weight is not None, "what could be fetched without a cache can be with one"
            self.gathered[name] = weight
        return cache

    def _slots(self, step: Step) -> list[Slot]:
        names = step.experts.tensors if step.experts else ()
        return [self.slot_of[name] for name in names if name in self.slot_of]

    def _allocate(self, program: Program, n_slots: int, slot_bytes: int) -> list[Slot]:
        """n_slots slots, or what the memory allows: two steps' worth or more; else one step's, and no lookahead."""
        least = max(sum(name in self.streamed for name in s.experts.tensors) for s in program.steps if s.experts)
        slots: list[Slot] = []
        try:
            while len(slots) < n_slots:
                slots.append(Slot(self.device, slot_bytes))
        except MemoryError as e:
            n_kept = len(slots) if len(slots) >= 2 * least else least if len(slots) >= least else 0
            self.device.copy.synchronize()
            self.device.compute.synchronize()
            del slots[n_kept:]
            size = f"slots of {slot_bytes / 2**20:.0f} MiB"
            if not slots:
                raise UserError(f"{self.device.info.name}: no memory for {least} {size} ({e}); {MORE_MEMORY}") from None
            log.warning(
                "%d of %d %s: %s; %s. For more, %s", n_kept, n_slots, size, e,
                "fewer uploads run ahead" if n_kept > least else "uploads do not run ahead of the computation",
                MORE_MEMORY,
            )  # fmt: skip
        return slots
