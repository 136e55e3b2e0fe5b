"""What `verify` runs and compares: settings by pairs of values, prompts, logits, and fingerprints of hidden states."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine import Engine
from ..program import Program

Setting = Mapping[str, Any]
"""Fields of Config."""
Axes = Mapping[str, Sequence[Any]]
Part = tuple[str, str]
"""(name of a prompt, phase)."""
Array = NDArray[np.float32]
LOGITS_BYTES = 32 << 20
"""Most bytes of logits kept of one prompt; more rows are sampled evenly, and the last is always there."""
NEEDS_STREAM = ("prefetch_experts", "register_host")
"""Fields that mean nothing while no experts are on the host."""
OTHER_ARITHMETIC = ("repack", "expert_decode", "split_rank", "cache_type_k", "cache_type_v")
"""Fields that round otherwise, on every device."""


@dataclass(frozen=True)
class Check:
    """A setting, and whether its logits must be the first setting's bit for bit, or may come of other arithmetic."""

    setting: Setting
    exact: bool = True


def default_axes(kind: str, program: Program) -> tuple[Axes, Axes]:
    """Fields and values that must not change a bit on a kind of device, and those that are other arithmetic there."""
    if kind != "gpu":
        return {"schedule": ("ubatch", "layer")}, {"n_ubatch": (512, 128), "n_threads": (0, 1), "repack": ("off", "on")}
    exact: Axes = {"schedule": ("ubatch", "layer"), "n_ubatch": (256, 128, 512)}
    if not program.expert_tensors:
        return exact, {}
    n = program.spec.n_layer
    exact = {
        "n_cpu_moe": tuple(dict.fromkeys((n, -(-n // 3), 0))), "prefetch_experts": (0, 1, 2, 3, 8),
        "register_host": ("auto", "off"), **exact,
    }  # fmt: skip
    other = {"expert_decode": ("gather", "cpu", "split")}
    return exact, other


def checks(exact: Axes, other: Axes, every: bool) -> list[Check]:
    """All combinations of exact values, or as few as let every two values of two fields meet; then each other
    arithmetic by itself. The first has the first value of every field."""
    base = {field: values[0] for field, values in other.items()}
    found: list[Setting] = []
    for values in itertools.product(*exact.values()):
        setting = dict(zip(exact, values))
        if setting.get("n_cpu_moe") == 0:
            setting = {field: value for field, value in setting.items() if field not in NEEDS_STREAM}
        if setting not in found:
            found.append(setting)
    chosen = found if every else _covering(found)
    alone = [{field: value} for field, values in other.items() for value in values[1:]]
    return [*(Check({**s, **base}) for s in chosen), *(Check({**chosen[0], **base, **s}, exact=False) for s in alone)]


def _covering(found: list[Setting]) -> list[Setting]:
    """Few settings that hold every pair of values that some setting holds: always the one with most new pairs next."""
    chosen, missing = [], set().union(*map(_pairs, found))
    while missing:
        chosen.append(max(found, key=lambda s: len(_pairs(s) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen or found


def _pairs(setting: Setting) -> set[tuple[Any, ...]]:
    items = setting.items()
    return set(itertools.combinations(items, 2 if len(items) > 1 else 1))


@dataclass(frozen=True)
class Prompt:
    """Token ids that are read, the positions whose logits are compared, and tokens that are decoded behind them."""

    name: str
    ids: list[int]
    rows: list[int]
    decoded: list[int]


def prompts(n_vocab: int, lengths: Sequence[int], n_decode: int) -> list[Prompt]:
    """Of each length: random tokens, and one token over and over, which routes all of them alike."""
    rng, out = np.random.default_rng(0), []
    most = max(1, LOGITS_BYTES // (4 * n_vocab))
    for n in lengths:
        rows = sorted({n - 1 - i * n // min(n, most) for i in range(min(n, most))})
        for name, ids in (("random", rng.integers(n_vocab, size=n)), ("equal", np.full(n, rng.integers(n_vocab)))):
            decoded = rng.integers(n_vocab, size=n_decode)
            out.append(Prompt(f"{n} {name}", ids.tolist(), rows, decoded.tolist()))
    return out


def run_prompts(engine: Engine, todo: Sequence[Prompt]) -> Iterator[tuple[Part, int, Array]]:
    """((prompt, phase), run, logits): a GPU runs a shape at first, then records it, then replays."""
    for prompt in todo:
        for i in range(3 if engine.plan.device.copies_async else 2):
            yield (prompt.name, "prefill"), i, engine.logits(prompt.ids, prompt.rows)
            if prompt.decoded:
                steps = [engine.runner.decode([engine.sequence], [token]) for token in prompt.decoded]
                yield (prompt.name, "decode"), i, np.concatenate(steps)


def fingerprints(engine: Engine, todo: Sequence[Prompt]) -> Iterator[tuple[Part, int, NDArray[np.uint64]]]:
    """As `run_prompts`, but of the hidden states behind every step: uint64 [steps, tokens]. States that are no numbers
    are like no others, not even the same ones."""
    rng, prints = (
        np.random.default_rng(),
        np.zeros((len(engine.program.steps), max(len(p.ids) + len(p.decoded) for p in todo)), np.uint64),
    )
    odd = np.random.default_rng(0).integers(1 << 63, size=engine.spec.n_embd, dtype=np.uint64) * 2 + 1

    def note(step: int, positions: NDArray[np.int32], x: Array) -> None:
        sums = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64) @ odd
        strange = rng.integers(1 << 63, size=len(x), dtype=np.uint64)
        prints[step, positions] = np.where(np.isfinite(x).all(-1), sums, strange)

    engine.runner.tap = note
    lengths = {p.name: (len(p.ids), len(p.decoded)) for p in todo}
    for part, i, _ in run_prompts(engine, todo):
        n, n_decoded = lengths[part[0]]
        yield part, i, (prints[:, :n] if part[1] == "prefill" else prints[:, n : n + n_decoded]).copy()


def first_difference(program: Program, a: NDArray[np.uint64], b: NDArray[np.uint64]) -> str:
    """The first step that leaves other hidden states, with its layer and tokens; "" if none does."""
    steps, tokens = np.nonzero(a != b)
    if not len(steps):
        return ""
    step, tokens = program.steps[steps[0]], tokens[steps == steps[0]]
    layer = f"layer {step.layer}, " if step.layer >= 0 else ""
    return f"{layer}step {step.name} ({len(tokens)} of {a.shape[1]} tokens, the first is token {tokens[0]})"


def same_bits(a: Array, b: Array) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def kl(a: Array, b: Array) -> NDArray[np.float64]:
    """KL(a || b) in nats of each row of logits."""
    p, q = (x - x.max(-1, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return np.asarray((np.exp(p) * (p - q)).sum(-1))
