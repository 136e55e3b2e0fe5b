"""The command line: `headrace COMMAND ...`. One module a command, imported only when it is asked for.

A module exports HELP (one line), `add_arguments(parser)` and `run(args) -> int | None`; its docstring is the text of
its `--help`. Modules import numpy and the engine inside `run`, so that help answers at once.
Exit status: 0 done, 1 a bug (with its traceback) or a check that failed (verify, doctor), 2 bad input, 130 Ctrl-C, 141
the reader of stdout went away.
"""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from .. import __version__
from ..errors import UserError

COMMANDS = ("run", "bench", "plan", "doctor", "verify", "inspect", "synth")

DESCRIPTION = """\
headrace runs Mixture-of-Experts language models from GGUF files, also those
whose experts do not fit on the GPU.

commands:
{commands}

examples:
  headrace run -p 'def fibonacci(n):' -n 64     the demo model continues a text
  headrace run -m model.gguf -i                 talk with a model
  headrace bench -m model.gguf -p 512 -n 128    how fast it reads and writes here

`headrace COMMAND --help` explains a command and shows examples.
"""


class Parser(argparse.ArgumentParser):
    """Complains with one line, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def module_of(name: str) -> ModuleType:
    return import_module(f"{__name__}.{name}")


def command_parser(name: str, module: ModuleType) -> Parser:
    """The parser of one command; the text before and after its options is the module's docstring."""
    text, _, examples = (module.__doc__ or "").partition("\n\nexamples:")
    parser = Parser(
        prog=f"headrace {name}", description=text, epilog="examples:" + examples if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    module.add_arguments(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is decided and done on stderr")
    return parser


def main_parser() -> Parser:
    commands = "\n".join(f"  {name:9} {module_of(name).HELP}" for name in COMMANDS)
    parser = Parser(
        prog="headrace", usage="headrace COMMAND ...", description=DESCRIPTION.format(commands=commands),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    return parser


def dispatch(argv: Sequence[str]) -> int:
    if not argv:
        main_parser().print_help(sys.stderr)
        return 2
    name, *rest = argv
    if name == "help":
        name, *rest = [*rest, "--help"]
    if name not in COMMANDS:
        if name.startswith("-"):
            main_parser().parse_args(argv)
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COMMANDS)}"
        raise UserError(f"no command {name!r}; {hint}")
    module = module_of(name)
    args = command_parser(name, module).parse_args(rest)
    quiet = getattr(args, "quiet", getattr(module, "QUIET", False))
    level = logging.INFO if args.verbose else logging.ERROR if quiet else logging.WARNING
    logging.basicConfig(format="headrace: %(message)s", level=level)
    return module.run(args) or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; only bugs leave as exceptions."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started the process
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        status = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        drop_stdout()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"headrace: error: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        drop_stdout()
        return 2


def drop_stdout() -> None:
    """Python flushes stdout once more at exit; gives it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
