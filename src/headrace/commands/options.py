"""Flags that several commands share. Those of the engine come from the fields of Config."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import UserError

if TYPE_CHECKING:
    from ..trace import Span

N_VALUES = 10_000
"""Most values of a list, and most settings of a bench: more is a slip of the keyboard."""


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", metavar="FILE", type=Path, help="GGUF file, any shard (without: the demo model)"
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write when each copy and computation ran: open it in Perfetto"
    )


@contextmanager
def trace_file(path: Path | None) -> "Iterator[dict[str, list[Span]]]":
    """Spans by title, to be filled in, that are a Chrome trace in the file when all is done or has failed."""
    groups: dict[str, list[Span]] = {}
    if path is None:
        yield groups
        return
    import json

    from ..trace import chrome_trace

    try:
        file = path.open("w")
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from None
    with file:
        try:
            yield groups
        finally:
            json.dump(chrome_trace(groups), file)


def add_config(parser: argparse.ArgumentParser, *, lists: bool = False) -> None:
    """The fields of Config as flags; with `lists` each takes values separated by commas, and may be repeated."""
    group = parser.add_argument_group("engine", "lists such as 512,2048 are tried in turn" if lists else None)
    for f in dataclasses.fields(Config):
        kind = type(f.default)
        if kind is bool:
            group.add_argument(
                *f.metadata["flags"], dest=f.name, default=argparse.SUPPRESS, action="store_const",
                const=[True] if lists else True, help=f.metadata["help"],
            )  # fmt: skip
            continue
        group.add_argument(
            *f.metadata["flags"], dest=f.name, metavar="LIST" if lists else "N" if kind is int else "X",
            type=list_of(kind) if lists else kind, default=argparse.SUPPRESS,
            action="extend" if lists else Joined if f.metadata["joins"] else "store", help=_help(f),
        )  # fmt: skip


class Joined(argparse.Action):
    """A flag that may be repeated: its texts joined by commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def _help(f: "dataclasses.Field[Any]") -> str:
    choices = f.metadata["choices"]
    text = f"{f.metadata['help']}: {', '.join(choices)}" if choices else f.metadata["help"]
    return f"{text} (default {f.default})" if f.default != "" else text


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The Config keywords that were given as flags."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if hasattr(args, f.name)}


def list_of(kind: type) -> Callable[[str], list[Any]]:
    """An argparse type: values separated by commas; integers also as ranges, see `_range`."""

    def parse(text: str) -> list[Any]:
        return [v for item in text.split(",") for v in (_range(item) if kind is int else [kind(item)])]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def _range(text: str) -> list[int]:
    """llama-bench's ranges: 7, 1-4, 128-512+128, 128-2048*2."""
    first, dash, rest = text.partition("-") if not text.startswith("-") else (text, "", "")
    if not dash:
        return [int(first)]
    for sign in "+*":
        last, found, step_text = rest.partition(sign)
        if found:
            break
    step = int(step_text) if found else 1
    low, high, out = int(first), int(last), []
    if low > high or step < 1 or (found and sign == "*" and (step < 2 or low < 1)):
        raise ValueError(f"{text} is no range")
    while low <= high:
        if len(out) == N_VALUES:
            raise argparse.ArgumentTypeError(f"{text} has over {N_VALUES} values")
        out.append(low)
        low = low * step if found and sign == "*" else low + step
    return out


@contextmanager
def progress(label: str, unit: str = "B", *, least: int = 1 << 30) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, in all) that shows them on stderr.

    On a terminal it is a bar, from the first call on; elsewhere a line for every quarter, if there are at least `least`
    units in all.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=label, unit=unit, unit_scale=True, leave=False, file=sys.stderr, delay=1e-6) as bar:

            def show(n_done: int, n_total: int) -> None:
                bar.total = n_total
                bar.update(n_done - bar.n)

            yield show
    else:
        quarter = 0

        def say(n_done: int, n_total: int) -> None:
            nonlocal quarter
            if n_total >= least and 4 * n_done >= (quarter + 1) * n_total:
                quarter = 4 * n_done // n_total
                print(f"{label}: {25 * quarter} %", file=sys.stderr)

        yield say


@contextmanager
def opening(*, quiet: bool = False, lines: bool = True) -> Iterator[dict[str, Callable[[int, int], None]]]:
    """What a model is opened with to show how it loads and compiles; without `lines` only on a terminal."""
    if quiet:
        yield {}
        return
    never = 1 << 62
    with (
        progress("loading", least=1 << 30 if lines else never) as load,
        progress("compiling", "kernels", least=1 if lines else never) as compiled,
    ):
        yield {"load_progress": load, "compile_progress": compiled}
