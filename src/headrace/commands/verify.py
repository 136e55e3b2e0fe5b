"""Proves on this machine that where experts lie and how they come changes the speed and never the result.

The model runs under placements and prefetch settings, each prompt several times (run, recorded, replayed), and all
logits must be those of the first setting, bit for bit; if they are not, the first layer that differs is named and the
exit status is 1. Settings that do not fit are skipped. A flag of the engine fixes that setting, or lists its values.
On a CPU micro-batches, threads and regrouped weights are other arithmetic: there the KL per token is bounded.

examples:
  headrace verify -m model.gguf                          every two values of two settings meet once
  headrace verify -m model.gguf --full                   all combinations, and more prompts
  headrace verify -m model.gguf -ncmoe 0,20 -p 4096      these placements, a longer prompt
  headrace verify --backend cuda --against cpu           also the divergence from the CPU's arithmetic
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import UserError
from .options import add_config, add_model, config_of, list_of, opening

if TYPE_CHECKING:
    from ..engine import Engine
    from .verify_runs import Array, Check, Part, Prompt

HELP = "prove that placement and prefetch never change a result"
QUIET = True
"""Some settings are slow on purpose: nobody is warned of it."""
MAX_KL = 0.05
"""Most nats per token, on average, by which other arithmetic may differ; docs/numerics.md measures up to 0.008."""
TEXT = "def read_lines(path):\n    "
"""A prompt that `--against` continues with the likeliest tokens."""
N_GREEDY = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add(
        "-p", "--n-prompt", metavar="LIST", type=list_of(int), help="prompt lengths (default 700; --full 1,77,700,3000)"
    )
    add("-n", "--n-gen", metavar="N", type=int, default=4, help="tokens to decode behind each prompt (default 4)")
    add("--full", action="store_true", help="all combinations of the settings, and more prompts")
    add("--against", metavar="BACKEND", help="also compare with another backend: KL per token, greedy tokens")
    add_config(parser, lists=True)


@dataclass
class Reference:
    """What all settings are compared with: the first one, and its logits by prompt and phase."""

    model: Path | None
    fixed: dict[str, Any]
    """Fields of Config that are the same in every setting."""
    prompts: "list[Prompt]"
    first: "Check"
    logits: "dict[Part, Array]" = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    from ..engine import prepare
    from .verify_runs import OTHER_ARITHMETIC, checks, default_axes, prompts

    given = {"backend": ["auto"], **config_of(args)}
    if len(given["backend"]) > 1:
        raise UserError("--backend takes one here; --against compares with another")
    if "null" in (*given["backend"], args.against):
        raise UserError("--backend null computes nothing that could be compared")
    lengths = args.n_prompt or ([1, 77, 700, 3000] if args.full else [700])
    if min(lengths) < 1 or args.n_gen < 0:
        raise UserError("-p takes prompt lengths of at least 1, -n a number of tokens")
    fixed = {"n_ctx": max(*lengths, 64) + args.n_gen} | {k: v[0] for k, v in given.items() if len(v) == 1}
    lists = {k: v for k, v in given.items() if len(v) > 1}
    ready = prepare(args.model, Config.of(**fixed))
    ready.device.close()
    exact, other = default_axes(ready.device.info.kind, ready.program)
    other = other | {k: v for k, v in lists.items() if k in OTHER_ARITHMETIC or k in other}
    other = {k: v for k, v in other.items() if k not in fixed}
    exact = {k: v for k, v in {**exact, **lists}.items() if k not in fixed and k not in other}
    if "cpu_moe" in fixed:
        exact.pop("n_cpu_moe", None)
    todo = checks(exact, other, args.full)
    ref = Reference(args.model, fixed, prompts(ready.program.spec.n_vocab, lengths, args.n_gen), todo[0])
    good = compare(ref, todo, [*exact, *other])
    if args.against:
        good &= against(ref, args.against)
    return 0 if good else 1


def opened(ref: Reference, check: "Check") -> "Engine":
    from .. import open as open_model

    with opening(lines=False) as bars:
        return open_model(ref.model, **bars, **{**ref.fixed, **check.setting})


def compare(ref: Reference, todo: "list[Check]", varied: list[str]) -> bool:
    """Runs every setting and prints a line of each; whether none differs."""
    flags = [Config.__dataclass_fields__[name].metadata["flags"][0].lstrip("-") for name in varied]
    heads = [*flags, "experts", "seconds", "logits"]
    widths = [max(6, len(head)) for head in heads]
    table_row(heads, widths)
    table_row(["-" * width for width in widths], widths)
    n_bad = n_skipped = 0
    for check in todo:
        start_s, fed = time.perf_counter(), ""
        try:
            with opened(ref, check) as engine:
                fed, found = how_fed(engine), judge(ref, check, engine)
        except (UserError, MemoryError) as error:
            if check is ref.first:
                raise
            n_skipped, found = n_skipped + 1, Verdict(f"skipped: {error}")
        except Exception as error:
            error.add_note(f"in the setting {check.setting}")
            raise
        values = [str(check.setting.get(name, "")) for name in varied]
        table_row([*values, fed, f"{time.perf_counter() - start_s:.1f}", found.text], widths)
        if found.part:
            n_bad += 1
            print(f"first difference: {locate(ref, check, found.part)}", flush=True)
    if len(todo) - n_skipped < 2:
        raise UserError("only one setting could run: there is nothing to compare it with")
    skipped = f", {n_skipped} skipped" if n_skipped else ""
    print(f"{len(todo) - n_skipped} settings: {f'{n_bad} DIFFER' if n_bad else 'none differs'}{skipped}")
    return not n_bad


def table_row(cells: list[str], widths: list[int]) -> None:
    *right, last = cells
    print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(right, widths)) + f" | {last}", flush=True)


def how_fed(engine: "Engine") -> str:
    """How decoding gets the experts."""
    if not engine.plan.streamed:
        return "there"
    if (rank := engine.plan.cpu_rank) is not None:
        return f"split {rank}" if rank else "cpu"
    return "gather" if engine.stream.decodes else "upload"


@dataclass(frozen=True)
class Verdict:
    """What to say of a setting; `part` is the prompt and phase that failed, if one did."""

    text: str
    part: "Part | None" = None


def judge(ref: Reference, check: "Check", engine: "Engine") -> Verdict:
    """Runs all prompts; the first failure ends it."""
    import numpy as np

    from .verify_runs import kl, run_prompts, same_bits

    divergence = []
    for part, i, logits in run_prompts(engine, ref.prompts):
        run = f"{' '.join(part)}, run {i + 1}"
        expected = ref.logits.setdefault(part, logits)
        if not np.isfinite(logits).all():
            return Verdict(f"DIFFERS: {run}: logits that are no numbers", part)
        if not check.exact:
            divergence.append(kl(expected, logits))
        elif not same_bits(expected, logits):
            n, most = (expected != logits).any(-1).sum(), abs(expected - logits).max()
            return Verdict(f"DIFFERS: {run}: {n} of {len(logits)} rows, by up to {most:.2g}", part)
    if check.exact:
        return Verdict("the same bits")
    mean = np.concatenate(divergence).mean()
    text = f"KL {mean:.1e} per token"
    return Verdict(f"other arithmetic, {text}") if mean <= MAX_KL else Verdict(f"DIFFERS: {text}", part)


def locate(ref: Reference, check: "Check", part: "Part") -> str:
    """The first step whose hidden states differ: both settings run again, with every step by itself."""
    from .verify_runs import fingerprints, first_difference

    names = [prompt.name for prompt in ref.prompts]
    todo = ref.prompts[: names.index(part[0]) + 1]
    expected: dict[Part, Any] = {}
    with opened(ref, ref.first) as engine:
        for at, _, found in fingerprints(engine, todo):
            expected.setdefault(at, found)
    with opened(ref, check) as engine:
        for at, i, found in fingerprints(engine, todo):
            if where := first_difference(engine.program, expected[at], found):
                return f"{where}, {' '.join(at)}, run {i + 1}"
    return "no step, when each runs by itself: a race, the head, or a recording of several steps"


def against(ref: Reference, backend: str) -> bool:
    """Prints how far the logits are from another backend's; whether the mean KL per token is within MAX_KL."""
    import numpy as np

    from ..sampling import SamplingParams
    from .verify_runs import Check, kl

    keep = {k: v for k, v in ref.fixed.items() if k in ("n_ctx", "cache_type_k", "cache_type_v")}
    prompt = next(p for p in ref.prompts if p.name.endswith("random"))
    with opened(ref, ref.first) as engine:
        start = engine.tokenize(TEXT)
        n_new = min(N_GREEDY, engine.plan.n_ctx - len(start))
        ids = start + [p.token for p in engine.generate(start, n_new, SamplingParams(temperature=0.0))]
        mine = engine.logits(ids), engine.logits(prompt.ids, prompt.rows)
    other = Reference(ref.model, keep | {"backend": backend}, ref.prompts, Check({}))
    with opened(other, other.first) as engine:
        theirs = engine.logits(ids), engine.logits(prompt.ids, prompt.rows)
    greedy = slice(len(start) - 1, len(ids) - 1)
    n_equal = int((theirs[0][greedy].argmax(-1) == ids[len(start) :]).sum())
    worst = 0.0
    for name, a, b in zip(("text", f"{prompt.name} tokens"), theirs, mine):
        found = kl(a, b)
        worst = max(worst, float(found.mean()))
        print(
            f"KL from {backend}, {name}: {found.mean():.1e} per token, at most {found.max():.1e} ({len(found)} tokens)"
        )
    print(f"greedy tokens equal to {backend}'s: {n_equal} of {len(ids) - len(start)}")
    if not np.isfinite(worst) or worst > MAX_KL:
        print(f"that is more than {MAX_KL} per token: DIFFERS")
        return False
    return True
