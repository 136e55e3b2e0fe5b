"""Text generation as a Python generator: pieces of text with their token and the costs so far.

`run`, `bench` and a server only consume it. Knows tokens, sampling and when to stop; nothing of weights or devices.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .backends.base import Device
from .kvcache import KVCache, Sequence
from .runner import Progress, Runner
from .sampling import Sampler, SamplingParams
from .stats import Stats
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """One token's worth of output; `text` may be empty while a character is incomplete.

    `finish` is "" but for the last piece: "stop" (end of text), "length" (n_predict) or "context".
    """

    token: int
    text: str
    stats: Stats = field(repr=False)
    finish: str = ""


def generate(
    runner: Runner, cache: KVCache, seq: Sequence, tokenizer: Tokenizer, prompt: Seq[int], n_predict: int,
    sampling: SamplingParams, stats: Stats, progress: Progress | None = None,
) -> Iterator[Piece]:  # fmt: skip
    """Continues `prompt` in a sequence whose common prefix with it is reused; n_predict < 0: until the model ends."""
    sampler, text, history = Sampler(sampling), tokenizer.stream(), list(prompt)
    n_room = cache.n_ctx - len(prompt)
    stats.n_reused = cache.trim(seq, min(common_prefix(seq.tokens, prompt), len(prompt) - 1))
    clock = _Clock(runner.device)
    few = sampling.n_candidates
    (logits,) = runner.prefill(seq, prompt[stats.n_reused :], progress=progress, n_candidates=few)
    stats.n_prompt, stats.prefill_s, stats.compile_s = len(prompt) - stats.n_reused, *clock.read()
    if n_predict == 0:
        return
    clock, compile_s = _Clock(runner.device), stats.compile_s
    while True:
        token = sampler.sample(logits, history)
        history.append(token)
        n_new = len(history) - len(prompt)
        if token in tokenizer.eog_ids:
            yield Piece(token, text.flush(), stats, "stop")
            return
        finish = "length" if n_new == n_predict else "context" if n_new > n_room else ""
        yield Piece(token, text.push(token) + (text.flush() if finish else ""), stats, finish)
        if finish:
            return
        (logits,) = runner.decode([seq], [token], few)
        stats.n_decoded, (stats.decode_s, more_s) = n_new, clock.read()
        stats.compile_s = compile_s + more_s


class _Clock:
    """Seconds since it was made, without those that went into compiling kernels, and those."""

    def __init__(self, device: Device) -> None:
        self.device, self.start_s, self.compile_s = device, time.perf_counter(), device.compile_s

    def read(self) -> tuple[float, float]:
        compile_s = self.device.compile_s - self.compile_s
        return time.perf_counter() - self.start_s - compile_s, compile_s


def common_prefix(a: Seq[int], b: Seq[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
