"""The only wiring file: opens a model, plans, loads, and offers it as an Engine."""

import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import env
from .backends import choose_backend, measured_rates, open_device
from .backends.base import Device, Weight
from .chat import ChatTemplate
from .config import Config
from .errors import UserError
from .generate import Piece, generate
from .gguf import File, open_gguf
from .hostmem import HostMemory, lockable_bytes
from .kvcache import KVCache
from .models import load_program
from .plan import Plan, make_plan
from .program import Program
from .rates import load_rates
from .rehearsal import distinct, rehearse
from .runner import Progress, Runner
from .sampling import SamplingParams
from .stats import Stats
from .stream import MORE_MEMORY, ExpertStream
from .tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("headrace")
Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
LoadProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights load, or (kernels done, in all) while they are compiled."""


def demo_path() -> Path:
    """The small trained model that ships with the package."""
    return Path(str(resources.files("headrace") / "data" / "demo.gguf"))


def open_engine(
    path: str | Path | None = None, *, load_progress: LoadProgress | None = None,
    compile_progress: LoadProgress | None = None, **config: Any,
) -> "Engine":  # fmt: skip
    """Opens a GGUF model (None: the demo model); keywords are the fields of Config. Raises UserError on bad input."""
    return Engine(path, Config.of(**config), load_progress, compile_progress)


@dataclass(frozen=True)
class Prepared:
    """A model that is read and planned; nothing is loaded yet. Whoever takes it closes the device."""

    file: File
    program: Program
    device: Device
    plan: Plan


def prepare(path: str | Path | None, config: Config, *, measure_rates: bool = False) -> Prepared:
    """Reads the file's directory, opens the device and plans; raises UserError on bad input.

    Speeds are those that were measured before on this machine, or now, if `measure_rates`.
    """
    file = open_gguf(path or demo_path())
    program = load_program(file)
    measure = config.expert_decode == "split" and config.split_rank < 0
    backend = choose_backend(config.backend, config.n_gpu_layers)
    device = open_device(backend, n_threads=config.n_threads, measure_cpu=measure)
    try:
        if (name := env.register_host()) and config.register_host == "off":
            log.warning("%s is set, and --register-host off beats it", name)
        rates = load_rates(device.info.name) or (measured_rates(backend, device) if measure_rates else None)
        plan = make_plan(
            program, file.tensors, device.info, config.with_environment(), device.act_dtype,
            scratch=device.scratch_bytes, rates=rates, lockable_bytes=lockable_bytes(),
        )  # fmt: skip
    except BaseException:
        device.close()
        raise
    return Prepared(file, program, device, plan)


class Engine:
    """A loaded model. Close it, or use it in a `with`; one text at a time: a call ends the generation before it."""

    def __init__(
        self, path: str | Path | None, config: Config, load_progress: LoadProgress | None = None,
        compile_progress: LoadProgress | None = None,
    ) -> None:  # fmt: skip
        start_s = time.perf_counter()
        self.config, self.stats = config, Stats()
        self._busy, self._text = threading.Lock(), object()
        self._process, self._closed = os.getpid(), False
        ready = prepare(path, config)
        self.file, self.program, self.device, self.plan = ready.file, ready.program, ready.device, ready.plan
        self.spec = self.program.spec
        if self.plan.n_ctx > self.spec.n_ctx_train:
            log.warning("context %d: the model was trained for %d tokens", self.plan.n_ctx, self.spec.n_ctx_train)
        try:
            self.host = HostMemory(self.file)
            with self.device.compiled_ahead(self._rehearse, compile_progress):
                weights = self._load(load_progress)
                self._pin()
                self.runner = self._runner(self.device, self.program, weights)
                wait_start_s = time.perf_counter()
        except BaseException as e:
            self.device.close()
            if isinstance(e, MemoryError):
                raise UserError(f"{e or 'out of memory'}; {MORE_MEMORY}") from None
            raise
        self.cache, self.stream = self.runner.cache, self.runner.stream
        self.sequence = self.cache.sequence()
        s, stop_s = self.stats, time.perf_counter()
        s.compile_s = stop_s - wait_start_s
        s.load_s = stop_s - start_s - s.lock_s - s.compile_s
        log.info(
            "%s: %s on %s, opened in %.2f s: load %.2f s, page-lock %.2f s, compile %.2f s", self.file.path,
            self.spec.name, self.device.info.name, stop_s - start_s, s.load_s, s.lock_s, s.compile_s,
        )  # fmt: skip

    def _pin(self) -> None:
        """Makes what is streamed fast to copy from."""
        start_s = time.perf_counter()
        if streamed := [self.file.tensors[name] for name in self.plan.streamed]:
            budget_bytes = min(n for n in (self.config.host_limit_bytes, lockable_bytes()) if n is not None)
            self.device.pin(self.host.ranges(streamed), budget_bytes, self.plan.lock_bytes > 0)
        self.stats.lock_s = time.perf_counter() - start_s

    def _runner(self, device: Device, program: Program, weights: dict[str, Weight]) -> Runner:
        """Cache, slots and workspace of a device for a program; `weights` are those that are not streamed."""
        config, plan, here = self.config, self.plan, set(program.expert_tensors)
        streamed = {name: self.file.tensors[name] for name in plan.streamed if name in here}
        device.reserve(self.spec, plan.n_ubatch, plan.n_seq_max)
        cache = KVCache(device, self.spec, plan.n_ctx, config.n_seq_max, config.cache_type_k, config.cache_type_v)
        if plan.cpu_rank is not None:
            device.split_experts(plan.cpu_rank, config.n_threads)
        stream = ExpertStream(
            device, program, streamed, plan.n_slots, plan.slot_bytes, weights, self.host.bytes, self.host.check,
            plan.n_lines,
        )  # fmt: skip
        return Runner(program, plan, device, cache, stream, weights)

    def _rehearse(self, device: Device) -> None:
        """Runs, on a device that computes nothing, all that this model may run."""
        tensors, placements = self.file.tensors, self.plan.placements
        program = distinct(self.program, tensors, placements)
        names = [n for n in (*program.resident_tensors, *program.expert_tensors) if placements[n].feed != "stream"]
        weights = {n: device.load(tensors[n], self.host.bytes(tensors[n]), placements[n].layout) for n in names}
        rehearse(self._runner(device, program, weights))

    def _load(self, progress: LoadProgress | None) -> dict[str, Weight]:
        """Every weight that is not streamed; what was copied is given back to the page cache."""
        weights: dict[str, Weight] = {}
        todo = [p for p in self.plan.placements.values() if p.feed != "stream"]
        n_total, n_done = sum(p.n_bytes for p in todo), 0
        for p in todo:
            info = self.file.tensors[p.tensor]
            weights[p.tensor] = self.device.load(info, self.host.bytes(info), p.layout)
            if p.feed == "resident":
                self.host.drop(info)
            n_done += p.n_bytes
            if progress:
                progress(n_done, n_total)
        return weights

    # text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.file.metadata, str(self.file.path))

    @cached_property
    def chat(self) -> ChatTemplate:
        """The file's chat template; UserError if it has none."""
        return ChatTemplate.from_metadata(self.file.metadata, self.tokenizer, str(self.file.path))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, token_ids: Seq[int]) -> str:
        return self.tokenizer.decode(self._checked(token_ids))

    # computation

    def logits(self, token_ids: Seq[int], rows: Seq[int] | None = None) -> NDArray[np.float32]:
        """float32 [len(rows), n_vocab]: what follows each named position (None: all) of a text from its start."""
        ids = self._checked(token_ids)
        wanted = list(range(len(ids))) if rows is None else [int(r) for r in rows]
        if any(not -len(ids) <= r < len(ids) for r in wanted):
            raise UserError(f"rows {rows}: the text has {len(ids)} tokens")
        if len(ids) > self.plan.n_ctx:
            raise UserError(f"the text has {len(ids)} tokens, the context {self.plan.n_ctx}; raise n_ctx (-c)")
        order = sorted({r % len(ids) for r in wanted})
        with self._turn():
            self.cache.trim(self.sequence, 0)
            if not order:
                return np.empty((0, self.spec.n_vocab), np.float32)
            found = self.runner.prefill(self.sequence, ids, order)
        return found[np.searchsorted(order, [r % len(ids) for r in wanted])]

    def generate(
        self, prompt: Prompt, n_predict: int = -1, sampling: SamplingParams | None = None,
        progress: Progress | None = None, parse_special: bool = False,
    ) -> Iterator[Piece]:  # fmt: skip
        """Continues a prompt piece by piece; what the cache still holds of it is not computed again.

        The prompt is a text, token ids, or the messages of a talk (dicts with role and content), which go through the
        chat template. Each Piece has `token`, `text`, `finish` ("" until the last: "stop", "length" or "context") and
        `stats` (this call's counts and seconds).
        """
        ids = self._ids(prompt, parse_special)
        if not ids:
            raise UserError("the prompt is empty")
        if n_predict < -1:
            raise UserError(f"n_predict is {n_predict}: give a number of tokens, or -1 for until the model ends")
        if len(ids) > self.plan.n_ctx:
            raise UserError(f"the prompt has {len(ids)} tokens, the context {self.plan.n_ctx}; raise n_ctx (-c)")
        return self._generate(ids, n_predict, sampling or SamplingParams(), progress)

    def _ids(self, prompt: Prompt, parse_special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt, parse_special=parse_special)
        if isinstance(prompt, Seq) and prompt and isinstance(prompt[0], Mapping):
            return self.tokenize(self.chat.render(prompt), parse_special=True)
        return self._checked(prompt)

    def _generate(
        self, ids: list[int], n_predict: int, sampling: SamplingParams, progress: Progress | None
    ) -> Iterator[Piece]:  # fmt: skip
        stats = Stats()
        pieces = generate(
            self.runner, self.cache, self.sequence, self.tokenizer, ids, n_predict, sampling, stats, progress
        )
        text = self._text = object()
        try:
            while True:
                with self._turn(text):
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            for name in ("n_prompt", "n_reused", "prefill_s", "n_decoded", "decode_s", "compile_s"):
                setattr(self.stats, name, getattr(self.stats, name) + getattr(stats, name))
            self.stats.uploaded_bytes = self.stream.uploaded_bytes
            if cache := self.stream.cache:
                self.stats.n_routed, self.stats.n_cached = cache.n_used, cache.n_hits
                self.stats.saved_bytes = cache.saved_bytes

    def reset(self) -> None:
        """Forgets the text in the cache."""
        with self._turn():
            self.cache.trim(self.sequence, 0)

    @contextmanager
    def _turn(self, text: object = None) -> Iterator[None]:
        """The engine for one caller, who goes on with `text` or (None) begins another; UserError if that cannot be."""
        if self._closed:
            raise UserError("the engine is closed")
        if self._process != os.getpid():
            raise UserError(f"the engine belongs to process {self._process}: open one after the fork")
        if not self._busy.acquire(blocking=False):
            raise UserError("the engine is in use by another thread, or by who calls it from a progress callback")
        try:
            if text is None:
                self._text = object()
            elif text is not self._text:
                raise UserError("the engine has been given another text since: generate anew to go on with this one")
            yield
        except MemoryError as e:
            raise UserError(f"{e or 'out of memory'}; {MORE_MEMORY}") from None
        finally:
            self._busy.release()

    def _checked(self, token_ids: Seq[int]) -> list[int]:
        try:
            ids = [operator.index(t) for t in token_ids]
        except TypeError:
            raise UserError(
                f"token ids must be whole numbers, not {token_ids!r:.40}; engine.tokenize makes them"
            ) from None
        if bad := [t for t in ids if not 0 <= t < self.spec.n_vocab]:
            raise UserError(f"token {bad[0]} is outside the vocabulary of {self.spec.n_vocab}")
        return ids

    # lifetime

    def close(self) -> None:
        """Stops the device and lets go of the file; twice is fine."""
        self._closed = True
        try:
            self.device.close()
        finally:
            self.host.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
