"""Continues a text, answers a question, or talks.

Text goes to stdout as it is made, everything else to stderr. Without -m the small demo model that ships with headrace
writes Python. Without -p and -f the prompt is read from stdin. With -i Ctrl-C stops an answer and Ctrl-D ends the talk;
when the context is full the oldest turns are forgotten.

examples:
  headrace run -p 'def read_lines(path):' -n 64 --temp 0
  headrace run -m model.gguf --chat -p 'Why is the sky blue?'
  headrace run -m model.gguf -i --system 'You answer in one sentence.'
  git diff | headrace run -m model.gguf --chat -p - --system 'Write a commit message.'
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .options import add_config, add_model, add_trace, config_of, opening, progress, trace_file

if TYPE_CHECKING:
    from ..engine import Engine
    from ..generate import Piece
    from ..sampling import SamplingParams
    from ..stats import Stats

HELP = "write text: continue a prompt, answer, or talk"

SAMPLING: tuple[tuple[tuple[str, ...], str, type, str], ...] = (
    (("--temp", "--temperature"), "temperature", float, "randomness; 0 always takes the likeliest token"),
    (("--top-k",), "top_k", int, "only the K likeliest tokens (0: all)"),
    (("--top-p",), "top_p", float, "only the likeliest tokens that together reach P (1: all)"),
    (("--min-p",), "min_p", float, "only tokens at least P times as likely as the likeliest (0: all)"),
    (("--typical",), "typical_p", float, "only tokens about as likely as expected, that together reach P (1: all)"),
    (("--repeat-penalty",), "repeat_penalty", float, "makes recent tokens less likely (1: off)"),
    (("--repeat-last-n",), "repeat_last_n", int, "how many tokens count as recent"),
    (("--presence-penalty",), "presence_penalty", float, "lowers tokens that occurred recently (0: off)"),
    (("--frequency-penalty",), "frequency_penalty", float, "lowers tokens by how often they occurred (0: off)"),
    (("-s", "--seed"), "seed", int, "the same seed gives the same text"),
)
"""Flags, the field of SamplingParams, its type, help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..sampling import SamplingParams

    add_model(parser)
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="the text to continue or the question; - reads stdin")
    add("-f", "--file", metavar="FILE", type=Path, help="read the prompt from a file")
    add("-n", "--n-predict", metavar="N", type=int, default=-1, help="most tokens to write (-1: until the model ends)")
    add("--chat", action="store_true", help="the prompt is a question: use the model's chat template")
    add("-i", "--interactive", action="store_true", help="talk: read a line, answer, and so on")
    add("--system", metavar="TEXT", help="system message for --chat and -i")
    add("--echo", action="store_true", help="print the prompt before its continuation")
    add("-q", "--quiet", action="store_true", help="no speeds and no progress on stderr")
    group = parser.add_argument_group("sampling")
    defaults = {f.name: f for f in dataclasses.fields(SamplingParams)}
    for flags, field, kind, text in SAMPLING:
        usual = defaults[field].default
        text += "" if usual is None else f" (default {usual})"
        group.add_argument(
            *flags, dest=f"sampling_{field}", metavar="N" if kind is int else "X", type=kind,
            default=argparse.SUPPRESS, help=text,
        )  # fmt: skip
    add_trace(parser)
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    from .. import open as open_model
    from ..sampling import SamplingParams
    from ..trace import Trace

    prompt = read_prompt(args)
    if args.system and not (args.chat or args.interactive):
        raise UserError("--system needs --chat or -i")
    given = {
        field: getattr(args, f"sampling_{field}") for _, field, _, _ in SAMPLING if hasattr(args, f"sampling_{field}")
    }
    sampling = SamplingParams(**given)
    with trace_file(args.trace) as groups:
        with opening(quiet=args.quiet) as bars:
            engine = open_model(args.model, **bars, **config_of(args))
        with engine:
            trace = engine.stream.trace = Trace(engine.device if args.trace else None)
            try:
                return write(engine, prompt, args, sampling)
            finally:
                groups["run"] = trace.spans()


def write(engine: "Engine", prompt: str | None, args: argparse.Namespace, sampling: "SamplingParams") -> int:
    if args.interactive:
        return talk(engine, args, sampling, prompt)
    assert prompt is not None
    if args.chat:
        prompt = engine.chat.render(messages(args.system, prompt))
    elif args.echo:
        print(prompt, end="")
    return 130 if answer(engine, prompt, args, sampling)[1] else 0


def read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt from -p, -f or stdin; None if -i may ask for it."""
    if args.prompt is not None and args.file is not None:
        raise UserError("-p and -f: give one of them")
    if args.file is not None and str(args.file) != "-":
        try:
            return str(args.file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"-f {args.file}: {error.strerror}; name a text file") from None
        except UnicodeDecodeError as error:
            raise UserError(
                f"-f {args.file} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#x}"
            ) from None
    if (
        args.file is not None
        or args.prompt == "-"
        or (args.prompt is None and not args.interactive and not sys.stdin.isatty())
    ):
        return sys.stdin.read()
    if args.prompt is None and not args.interactive:
        raise UserError("run needs a prompt: -p TEXT, -f FILE, or -i to talk")
    return str(args.prompt) if args.prompt is not None else None


def messages(system: str | None, question: str) -> list[dict[str, str]]:
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": question}]


@contextlib.contextmanager
def quietly(label: str, unit: str, quiet: bool) -> Iterator[Any]:
    """`progress`, or None that shows nothing."""
    if quiet:
        yield None
    else:
        with progress(label, unit) as show:
            yield show


def answer(engine: "Engine", prompt: str, args: argparse.Namespace, sampling: "SamplingParams") -> tuple[str, bool]:
    """Streams the continuation to stdout; (its text, whether Ctrl-C ended it). Speeds follow on stderr."""
    parts: list[str] = []
    stats, stopped, finish = None, False, ""
    try:
        for piece in pieces_of(engine, prompt, args, sampling):
            stats, finish = piece.stats, piece.finish
            parts.append(piece.text)
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stopped = True
    if parts:
        sys.stdout.write("\n")
    sys.stdout.flush()
    if stats is not None and not args.quiet:
        print(speeds(stats), file=sys.stderr)
    if finish == "context":
        print(f"headrace: stopped: the context of {engine.plan.n_ctx} tokens is full; raise -c", file=sys.stderr)
    return "".join(parts), stopped


def pieces_of(engine: "Engine", prompt: str, args: argparse.Namespace, sampling: "SamplingParams") -> "Iterator[Piece]":
    """The engine's pieces, with a bar while the prompt is read."""
    with quietly("reading", "tok", args.quiet) as show:
        pieces = engine.generate(
            prompt, n_predict=args.n_predict, sampling=sampling, progress=show,
            parse_special=args.chat or args.interactive,
        )  # fmt: skip
        first = next(pieces, None)
    if first is not None:
        yield first
        yield from pieces


def speeds(s: "Stats") -> str:
    reused = f" ({s.n_reused} more were still in the cache)" if s.n_reused else ""
    compiled = f"kernels in {s.compile_s:.1f} s; " if s.compile_s > 1 else ""
    return (
        f"{compiled}prefill {s.n_prompt} tokens in {s.prefill_s:.2f} s, {s.prefill_tps:.1f} t/s{reused}; "
        f"decode {s.n_decoded} tokens in {s.decode_s:.2f} s, {s.decode_tps:.1f} t/s"
    )


def talk(engine: "Engine", args: argparse.Namespace, sampling: "SamplingParams", question: str | None) -> int:
    """Questions from the terminal or from stdin, one a line; the cache keeps what was said."""
    said = messages(args.system, "")[:-1]
    while True:
        if question is None:
            try:
                question = ask()
            except (EOFError, KeyboardInterrupt):
                if sys.stdin.isatty():
                    print(file=sys.stderr)
                return 0
        if question.strip():
            said.append({"role": "user", "content": question})
            forget(engine, said)
            text, _ = answer(engine, engine.chat.render(said), args, sampling)
            said.append({"role": "assistant", "content": text})
        question = None


def forget(engine: "Engine", said: list[dict[str, str]]) -> None:
    """Drops the oldest questions with their answers until the talk leaves a quarter of the context for the answer."""
    room, n_dropped = engine.plan.n_ctx * 3 // 4, 0
    start = 1 if said[0]["role"] == "system" else 0
    while len(said) > start + 2 and len(engine.tokenize(engine.chat.render(said), parse_special=True)) > room:
        del said[start : start + 2]
        n_dropped += 1
    if n_dropped:
        print(f"headrace: the context is full: the oldest {n_dropped} turns are forgotten", file=sys.stderr)


def ask() -> str:
    """A line from the user, with history on a terminal; `>` is on stderr where stdout goes elsewhere."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # Windows has no readline, and edits lines by itself
            import readline  # noqa: F401
        return input("> ")
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
