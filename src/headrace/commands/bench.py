"""Measures how fast a model reads prompts (pp) and writes (tg), with llama-bench's flags and tables.

A test runs -r times after a warm-up; the table shows the average and the standard deviation of tokens per second.
Lists such as 512,2048 and ranges such as 128-2048*2 run every combination. Where experts come over a link it also
shows the bytes that were moved, the link's GB/s, the speed in percent of what the link and the resident speed allow,
and how much of the copies was hidden behind computation: from one more run, which is traced and does not count.

examples:
  headrace bench -m model.gguf                           pp512 and tg128
  headrace bench -m model.gguf -p 512,2048 -n 0 -ub 512,2048
  headrace bench -m model.gguf -pg 1024,128 -d 0,8192 -r 3
  headrace bench -m model.gguf -p 8192 -n 0 --trace trace.json     every copy and computation, for Perfetto
  headrace bench -m model.gguf -o jsonl >> results.jsonl
"""

import argparse
import itertools
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import UserError
from .bench_rows import Sample, Test, link_row, machine, model_row, plan_row, test_row
from .options import N_VALUES, add_config, add_trace, config_of, list_of, opening, trace_file

if TYPE_CHECKING:
    from ..engine import Engine
    from ..trace import Span, Trace

HELP = "measure prompt and generation speed, with llama-bench's flags"
FORMATS = ("md", "csv", "json", "jsonl", "sql")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, ints = parser.add_argument, list_of(int)
    add(
        "-m",
        "--model",
        metavar="FILE",
        type=Path,
        action="append",
        help="GGUF file; may be repeated (without: the demo)",
    )
    add("-p", "--n-prompt", metavar="LIST", type=ints, action="extend", help="prompt lengths (default 512; 0: none)")
    add("-n", "--n-gen", metavar="LIST", type=ints, action="extend", help="tokens to write (default 128; 0: none)")
    add(
        "-pg", metavar="P,N", type=pair, action="append", default=[], help="read P tokens, then write N: timed together"
    )
    add("-d", "--n-depth", metavar="LIST", type=ints, action="extend", help="tokens already in the cache (default 0)")
    add("-r", "--repetitions", metavar="N", type=int, default=5, help="runs of each test (default 5)")
    add("-o", "--output", choices=FORMATS, default="md", help="format on stdout (default md)")
    add("--no-warmup", action="store_true", help="also time the first run")
    add("--progress", action="store_true", help="a line on stderr for every test, also when it is no terminal")
    add_trace(parser)
    add_config(parser, lists=True)


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return int(first), int(second)


def run(args: argparse.Namespace) -> None:
    from .bench_output import printer

    if args.repetitions < 1:
        raise UserError(f"-r {args.repetitions}: at least 1")
    tests = list(itertools.islice(tests_of(args), N_VALUES + 1))
    if not tests:
        raise UserError("nothing to measure: -p, -n or -pg must ask for some tokens")
    grid = config_of(args)
    if math.prod(map(len, grid.values())) * len(tests) > N_VALUES:
        raise UserError(f"the lists combine to over {N_VALUES} tests: give fewer values")
    n_ctx = max(t.n_depth + t.n_tokens for t in tests)
    configs = [{"n_ctx": n_ctx} | dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    for config in configs:
        Config.of(**config)  # a bad value is told before anything runs
    emit = printer(args.output, [name for name, values in grid.items() if len(values) > 1 or name in SHOWN])
    command, done = shlex.join(["headrace", "bench", *sys.argv[2:]]), False
    with trace_file(args.trace) as traces:
        for model in args.model or [None]:
            for config in configs:
                for row, spans in measure(model, config, tests, args, command):
                    emit(row)
                    done = True
                    if args.trace:
                        varied = "".join(f", {k} {v}" for k, v in config.items() if len(grid.get(k, ())) > 1)
                        traces[f"{len(traces) + 1}: {row['test']}{varied}"] = spans
    if done:
        emit(None)


SHOWN = ("n_gpu_layers", "n_cpu_moe")
"""Config fields that have a column as soon as their flag is given."""


def tests_of(args: argparse.Namespace) -> Iterator[Test]:
    """llama-bench's order: for each depth the prompts, then the generations, then the pairs."""
    wants = [(n, 0) for n in args.n_prompt or [512]] + [(0, n) for n in args.n_gen or [128]] + args.pg
    for depth in args.n_depth or [0]:
        for n_prompt, n_gen in wants:
            if n_prompt < 0 or n_gen < 0 or depth < 0:
                raise UserError("-p, -n, -pg and -d take numbers of tokens, at least 0")
            if n_prompt or n_gen:
                yield Test(n_prompt, n_gen, depth)


def measure(
    model: Path | None, config: dict[str, Any], tests: list[Test], args: argparse.Namespace, command: str
) -> "Iterator[tuple[dict[str, Any], list[Span]]]":  # fmt: skip
    """A row of each test, and what a traced run of it did (nothing, if nothing is streamed and nobody asked)."""
    from .. import open as open_model
    from ..trace import Trace

    with opening() as bars:
        engine = open_model(model, **bars, **config)
    with engine:
        wishes = asdict(Config.of(**config))
        about = {**machine(), "command": command, **model_row(engine), **wishes, **plan_row(engine)}
        for i, test in enumerate(tests):
            if args.progress or sys.stderr.isatty():
                print(f"headrace bench: {i + 1}/{len(tests)} {test.name}", file=sys.stderr)
            if not args.no_warmup:
                warm_up(engine, test)
            samples = [once(engine, test) for _ in range(args.repetitions)]
            trace = Trace(engine.device)
            if engine.plan.streamed or args.trace:
                once(engine, test, trace)
            spans = trace.spans()
            uploads = [s for s in spans if s.about.get("phase") != "decode" or not engine.stream.decodes]
            row = about | test_row(test, samples)
            yield (
                row | link_row(row["avg_ts"], test.n_tokens, samples[0].moved_bytes, uploads, peak_gbps(engine)),
                spans,
            )


def warm_up(engine: "Engine", test: Test) -> None:
    """Compiles and records all that the test will run: a GPU's second run of each shape is recorded as a graph."""
    if engine.plan.device.kind == "gpu":
        for _ in range(2):
            once(engine, Test(test.n_prompt, min(test.n_gen, 2)))
    else:
        once(engine, Test(min(test.n_prompt, engine.plan.n_ubatch), min(test.n_gen, 1)))


def once(engine: "Engine", test: Test, trace: "Trace | None" = None) -> Sample:
    """One run; random tokens, as speed must not depend on what is said."""
    import numpy as np

    from ..trace import Trace

    rng = np.random.default_rng(0)
    ids = rng.integers(engine.spec.n_vocab, size=test.n_depth + test.n_tokens).tolist()
    engine.reset()
    runner, seq, stream, device = engine.runner, engine.sequence, engine.stream, engine.device
    if test.n_depth:
        runner.prefill(seq, ids[: test.n_depth])
    before_bytes, start, stop = stream.uploaded_bytes, device.timer(), device.timer()
    stream.trace = trace or Trace()
    try:
        device.compute.record(start)
        if test.n_prompt:
            runner.prefill(seq, ids[test.n_depth : test.n_depth + test.n_prompt])
        for token in ids[test.n_depth + test.n_prompt :]:
            runner.decode([seq], [token], n_candidates=1)
        device.compute.record(stop)
    finally:
        stream.trace = Trace()
    fetched_bytes = fetched(engine, test)
    moved_bytes = None if fetched_bytes is None else stream.uploaded_bytes - before_bytes + fetched_bytes
    return Sample(device.between_s(start, stop), moved_bytes)


def peak_gbps(engine: "Engine") -> float:
    """The link's own speed, where it was measured; 0 where not."""
    from ..rates import Rates, load_rates

    device = engine.device.info
    rates = load_rates(device.name) or Rates()
    return device.link_gbps or max(rates.link_gbps, rates.staged_gbps, rates.pageable_gbps)


def fetched(engine: "Engine", test: Test) -> int | None:
    """Bytes that the device's ops fetch by themselves, beside the uploads: the routed experts of every token that is
    written, but the ranks that the CPU computes. None where only the device knows: a short prompt's tokens share
    experts, and the expert cache has some of those that are wanted."""
    from ..schedule import split

    if not engine.stream.gathers:
        return 0
    if test.n_gen and engine.stream.cache:
        return None
    windows = split(test.n_prompt, engine.plan.n_window, engine.plan.n_ubatch)
    if any(window[-1][1] - window[0][0] < engine.runner.gather_below for window in windows):
        return None
    routed_bytes, n_ranks = 0, engine.plan.cpu_rank  # None: the device fetches every rank
    for step in engine.program.steps:
        for name in step.experts.tensors if step.experts else ():
            if info := engine.stream.streamed.get(name):
                n_used = engine.spec.ffn[step.layer].n_expert_used
                n_fetched = n_used if n_ranks is None else min(n_used, n_ranks)
                routed_bytes += n_fetched * info.n_bytes // info.shape[0]
    return test.n_gen * routed_bytes
