"""The loop: prefill a prompt, decode one token for each of several sequences; logits come back, or the greatest.

Executes the orders of `schedule` blindly. Sequences advance only when their work is done: an interrupted prefill
keeps the windows that were finished, an interrupted decode may fall back to the prompt.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .backends.base import Device, Tensor, Weight
from .batch import Batch, Ints, StateBuffer
from .kvcache import PAGE, KVCache, Sequence
from .plan import Plan
from .program import Program, Run, Step, Weights, run_step, short_name
from .sampling import MOST_CANDIDATES, Candidates, Logits
from .schedule import Acquire, Compute, Release, Upload, gather_below, schedule, split
from .stream import ExpertStream

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) after every micro-batch of a segment; may raise to cancel."""
Tap = Callable[[int, Ints, NDArray[np.float32]], None]
"""Called after every step with its number, the tokens' positions [T] and their hidden states [T, n_embd]."""


class Mode(NamedTuple):
    """How a pass runs: with which op table, whether its ops find the routed experts without uploads, and how many
    candidates it leaves of each wanted row (None: all logits)."""

    phase: str
    gathers: bool
    n_candidates: int | None


class Runner:
    def __init__(
        self,
        program: Program,
        plan: Plan,
        device: Device,
        cache: KVCache,
        stream: ExpertStream,
        weights: dict[str, Weight],
    ) -> None:
        self.program, self.plan, self.device, self.cache, self.stream = program, plan, device, cache, stream
        spec, n = program.spec, plan.n_ubatch
        self.arena = device.arena(plan.arena_bytes)
        self.state = StateBuffer(device, n, plan.n_seq_max, cache.n_block, n, PAGE, -(-plan.n_window // n))
        self.x = device.alloc((n, spec.n_embd), "f32")
        self.hidden = device.alloc((plan.n_window, spec.n_embd), "f32") if plan.n_window > n else None
        self.logits = device.alloc((plan.n_out, spec.n_vocab), "f32")
        self.best_logits, self.best_ids = (
            device.alloc_host((plan.n_seq_max * MOST_CANDIDATES,), dtype) for dtype in ("f32", "i32")
        )
        modes = [(phase, gathers) for phase in ("prefill", "decode") for gathers in (False, True)]
        self.weights = {mode: [self._step_weights(step, weights, *mode) for step in program.steps] for mode in modes}
        self.gather_below = gather_below(program) if stream.gathers else 0
        self.n_body = len(program.steps) - 1  # the last step is the head, which runs for wanted rows only
        self.tap: Tap | None = None

    def _step_weights(self, step: Step, weights: dict[str, Weight], phase: str, gathers: bool) -> Weights:
        named = {short_name(name): weights[name] for name in step.weights}
        return Weights(experts=self.stream.experts(step, phase, gathers), **named)

    def prefill(
        self, seq: Sequence, token_ids: Seq[int], rows: Seq[int] | None = None, progress: Progress | None = None,
        n_candidates: int | None = None,
    ) -> Logits | Candidates:  # fmt: skip
        """Appends tokens to a sequence; float32 [len(rows), n_vocab] of the given rising rows (None: the last), or
        their [len(rows), n_candidates] greatest, of up to n_seq_max rows."""
        ids = np.asarray(token_ids, np.int32)
        wanted = np.array([len(ids) - 1] if rows is None else rows, np.int32)
        k = self._within_vocab(n_candidates)
        out = self._rows(len(wanted), k)
        n_done = 0
        for window in split(len(ids), self.plan.n_window, self.plan.n_ubatch):
            start, stop = window[0][0], window[-1][1]
            self.cache.snapshot(seq)
            self.cache.reserve(seq, stop - start)
            batches = [self._prompt_batch(seq, ids, a, b, start, wanted) for a, b in window]
            report = partial(_report, progress, start, len(ids)) if progress else None
            with self._whole([seq]):
                for logits in self._run_window(batches, report, "prefill", k):
                    out[n_done : n_done + len(logits)] = logits
                    n_done += len(logits)
                seq.tokens += ids[start:stop].tolist()
        self.cache.snapshot(seq)
        return out

    def decode(
        self, seqs: Seq[Sequence], token_ids: Seq[int], n_candidates: int | None = None
    ) -> Logits | Candidates:  # fmt: skip
        """Appends one token to each; float32 [len(seqs), n_vocab], or the [len(seqs), n_candidates] greatest."""
        for seq in seqs:
            self.cache.reserve(seq, 1)
        n = len(seqs)
        batch = Batch(
            token_ids=np.array(token_ids, np.int32), positions=np.array([s.n_past for s in seqs], np.int32),
            kv_slots=np.concatenate([self.cache.rows(s, s.n_past, s.n_past + 1) for s in seqs]),
            seq_start=np.arange(n + 1, dtype=np.int32), block_table=self.cache.block_table(list(seqs)),
            state_slots=np.array([s.state_slot for s in seqs], np.int32), out_rows=np.arange(n, dtype=np.int32),
        )  # fmt: skip
        with self._whole(seqs):
            (logits,) = self._run_window([batch], None, "decode", self._within_vocab(n_candidates))
            for seq, token in zip(seqs, token_ids):
                seq.tokens.append(int(token))
        return logits

    @contextmanager
    def _whole(self, seqs: Seq[Sequence]) -> Iterator[None]:
        """The work inside is done in full, or an exception leaves the sequences as they were, or shorter."""
        lengths = [seq.n_past for seq in seqs]
        try:
            yield
        except BaseException:
            self.device.compute.synchronize()
            for seq, n in zip(seqs, lengths):
                del seq.tokens[n:]
                self.cache.rewind(seq)
            raise

    def _prompt_batch(self, seq: Sequence, ids: Ints, a: int, b: int, window_start: int, wanted: Ints) -> Batch:
        first = seq.n_past + a - window_start
        return Batch(
            token_ids=ids[a:b], positions=np.arange(first, first + b - a, dtype=np.int32),
            kv_slots=self.cache.rows(seq, first, first + b - a), seq_start=np.array([0, b - a], np.int32),
            block_table=self.cache.block_table([seq]), state_slots=np.array([seq.state_slot], np.int32),
            out_rows=wanted[(wanted >= a) & (wanted < b)] - a,
        )  # fmt: skip

    def _run_window(
        self, batches: list[Batch], progress: Callable[[int], None] | None, phase: str, k: int | None
    ) -> list[Logits | Candidates]:
        """One pass over all steps for the micro-batches of a window; of each in order the wanted rows' logits, or their
        k greatest."""
        logits: list[Logits | Candidates] = []
        n_done = 0
        ends = np.cumsum([b.n_tokens for b in batches])
        gathers = self.stream.decodes if phase == "decode" else int(ends[-1]) < self.gather_below
        mode = Mode(phase, gathers, k)
        streamed = () if gathers else self.stream.streamed
        self.state.stage(batches, uploads=bool(streamed))
        with self.stream.pass_():
            for order in schedule(self.program, streamed, self.stream.n_slots, len(batches)):
                match order:
                    case Upload(name):
                        self.stream.upload(name)
                    case Acquire(step):
                        self.stream.acquire(self.program.steps[step])
                    case Release(step):
                        self.stream.release(self.program.steps[step])
                    case Compute(first, stop, u):
                        offset = int(ends[u]) - batches[u].n_tokens
                        with self.stream.trace.compute(self.program.steps[first:stop], u, batches[u].n_tokens, phase):
                            self.state.select(u)
                            logits += self._compute(first, stop, batches[u], offset, mode)
                        if progress:
                            n_done += batches[u].n_tokens * (stop - first)
                            progress(n_done // len(self.program.steps))
        if gathers:
            self.stream.release_all()
            self.stream.after_decode()
        return logits

    def _compute(self, first: int, stop: int, batch: Batch, offset: int, mode: Mode) -> list[Logits | Candidates]:
        """Steps first..stop for one micro-batch, whose hidden states start at `offset` of the window."""
        x, n = self.x[: batch.n_tokens], batch.n_tokens
        if self.hidden is not None and first:
            self.device.compute.copy(x, self.hidden[offset : offset + n])
        n_out = len(batch.out_rows) if stop > self.n_body else 0
        whole = 0 < n_out <= self.plan.n_out
        self._steps(first, stop if whole else min(stop, self.n_body), batch, n_out if whole else 0, mode)
        if stop <= self.n_body:
            if self.hidden is not None:
                self.device.compute.copy(self.hidden[offset : offset + n], x)
            return []
        if whole:
            return [self._read_logits(n_out, mode.n_candidates)]
        return list(self._head_in_parts(batch, mode))

    def _head_in_parts(self, batch: Batch, mode: Mode) -> Iterator[Logits | Candidates]:
        """The head for more rows than the logits buffer holds."""
        for start in range(0, len(batch.out_rows), self.plan.n_out):
            rows = batch.out_rows[start : start + self.plan.n_out]
            self.state.set_out_rows(rows)
            self._steps(self.n_body, self.n_body + 1, batch, len(rows), mode)
            yield self._read_logits(len(rows), mode.n_candidates)

    def _within_vocab(self, n_candidates: int | None) -> int | None:
        return n_candidates and min(n_candidates, self.program.spec.n_vocab)

    def _rows(self, n: int, k: int | None) -> Logits | Candidates:
        """Host memory for the logits of n rows, or the k greatest of each."""
        if k is None:
            return np.empty((n, self.program.spec.n_vocab), np.float32)
        return Candidates(np.empty((n, k), np.float32), np.empty((n, k), np.int32))

    def _best(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        """Where top_k leaves logits and ids [n, k]."""
        assert n * k <= self.best_ids.shape[0], f"{k} candidates of {n} rows"
        return self.best_logits[: n * k].reshape(n, k), self.best_ids[: n * k].reshape(n, k)

    def _read_logits(self, n: int, k: int | None) -> Logits | Candidates:
        if k is None:
            return np.array(self.device.download(self.logits[:n]), np.float32)
        logits, ids = map(self.device.download, self._best(n, k))
        return Candidates(np.array(logits, np.float32), np.array(ids, np.int32))

    def _steps(self, first: int, stop: int, batch: Batch, n_out: int, mode: Mode) -> None:
        """Runs steps first..stop together, or one by one where a tap wants to see what each leaves."""
        if not self.tap:
            self._run(first, stop, batch, n_out, mode)
            return
        for i in range(first, stop):
            self._run(i, i + 1, batch, n_out, mode)
            self.tap(i, batch.positions, self.device.download(self.x[: batch.n_tokens]))

    def _run(self, first: int, stop: int, batch: Batch, n_out: int, mode: Mode) -> None:
        """Runs or replays steps first..stop; the shape is the key, all that changes is in device memory."""
        if first >= stop:
            return
        key = (mode, first, stop, batch.n_tokens, batch.n_seq, n_out)
        if self.device.replay(key):
            return
        state = self.state.view(batch.n_tokens, batch.n_seq, n_out)
        with self.device.record(key):
            ops = self.device.decode_ops if mode.phase == "decode" else self.device.ops
            x, logits = self.x[: batch.n_tokens], self.logits[:n_out]
            run = Run(ops, self.arena, self.device.act_dtype, state, x, logits, self.cache.layers)
            for step, weights in zip(self.program.steps[first:stop], self.weights[mode[:2]][first:stop]):
                run_step(step, run, weights)
            if mode.n_candidates and n_out and stop > self.n_body:
                ops.top_k(*self._best(n_out, mode.n_candidates), logits)


def _report(progress: Progress, n_before: int, n_total: int, n_done: int) -> None:
    progress(n_before + n_done, n_total)
