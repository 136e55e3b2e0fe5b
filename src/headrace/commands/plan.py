"""Says where every tensor of a model will live on this machine and why, before anything is loaded.

examples:
  headrace plan -m model.gguf
  headrace plan -m model.gguf -c 32768 -ub 2048
  headrace plan -m model.gguf --tensors          every tensor, its place and the reason
  headrace plan -m model.gguf --json
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .options import add_config, add_model, config_of

if TYPE_CHECKING:
    from ..plan import Plan
    from ..spec import ModelSpec

HELP = "show where everything will live and why, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its place")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")


def run(args: argparse.Namespace) -> None:
    from ..config import Config
    from ..engine import prepare

    ready = prepare(args.model, Config.of(**config_of(args)))
    try:
        if args.json:
            import dataclasses
            import json

            print(json.dumps(dataclasses.asdict(ready.plan), indent=2, default=plain))
            return
        print("\n".join([*describe(ready.program.spec), *ready.plan.lines()]))
        if args.tensors:
            print("\n".join(tensor_lines(ready.plan)))
    finally:
        ready.device.close()


def plain(value: object) -> object:
    """What JSON lacks: sets become sorted lists, paths text."""
    return sorted(value) if isinstance(value, frozenset | set) else str(value)


def describe(spec: "ModelSpec") -> Iterator[str]:
    from ..spec import MoeSpec

    yield f"model       {spec.name} ({spec.architecture}), {spec.n_layer} layers, a vocabulary of {spec.n_vocab}"
    experts = {(m.n_expert_used, m.n_expert, m.n_ff_exp) for m in spec.ffn if isinstance(m, MoeSpec)}
    for n_used, n_expert, width in sorted(experts):
        yield f"experts     {n_used} of {n_expert} per token and layer, width {width}"


def tensor_lines(plan: "Plan") -> Iterator[str]:
    width = max(map(len, plan.placements))
    for p in plan.placements.values():
        yield f"{p.tensor:{width}}  {p.n_bytes / 2**20:10.2f} MiB  {p.feed}, {p.layout.replace('_', ' ')}: {p.reason}"
