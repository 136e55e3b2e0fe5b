"""Says where every tensor of a model will live on this machine and why, before anything is loaded.

examples:
  headrace plan -m model.gguf
  headrace plan -m model.gguf -c 32768 -ub 2048
  headrace plan -m model.gguf --tensors          every tensor, its place and the reason
  headrace plan -m model.gguf --json
  headrace plan model.gguf --card 12GiB --link "PCIe 4.0 x16"       a card that is not here, by its data sheet
  headrace plan model.gguf --card "RTX 3060,RTX 4070" --link 3x16,4x8,4x16,5x16
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .options import add_config, add_model, config_of, list_of

if TYPE_CHECKING:
    from ..plan import Plan
    from ..spec import ModelSpec

HELP = "show where everything will live and why, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", type=Path, help="the same as -m FILE")
    add_model(parser)
    add_config(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its place")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    lists = {"metavar": "LIST", "type": list_of(str), "action": "extend"}
    parser.add_argument("--card", help="plan for cards that are not here, by memory or name: 12GiB, RTX 4070", **lists)
    parser.add_argument("--link", help="their links (default PCIe 4.0 x16): PCIe 3.0 x16, 5x8, 20GB/s", **lists)


def run(args: argparse.Namespace) -> None:
    from ..config import Config
    from ..engine import prepare

    if args.file and args.model:
        raise UserError(f"{args.file} and -m {args.model}: give one model")
    args.model = args.file or args.model
    if args.link and not args.card:
        raise UserError("--link says how a --card is connected; this machine's own link is measured by headrace doctor")
    if args.card:
        cards(args)
        return
    ready = prepare(args.model, Config.of(**config_of(args)), measure_rates=True)
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


def cards(args: argparse.Namespace) -> None:
    """Plans for cards by their data sheets: one in full, several as a table."""
    from ..backends.cuda import footprint
    from ..backends.cuda.tiles import Tiles
    from ..config import Config
    from ..engine import demo_path
    from ..gguf import open_gguf
    from ..models import load_program
    from ..plan import make_plan
    from .plan_cards import card, device_info, link_gbps, rates

    config = Config.of(**config_of(args))
    file = open_gguf(args.model or demo_path())
    program = load_program(file)
    plans = []
    for name in args.card:
        c = card(name)
        tiles = Tiles.of(c.capability)
        for link in args.link or ["PCIe 4.0 x16"]:
            gbps = link_gbps(link)

            def scratch(spec: "ModelSpec", n: int, n_seq: int, tiles: Tiles = tiles) -> int:
                return footprint.scratch_bytes(spec, n, n_seq, tiles)

            plan = make_plan(
                program, file.tensors, device_info(c, gbps), config, "bf16", scratch=scratch, rates=rates(c, gbps)
            )
            plans.append((link, plan))
    if len(plans) == 1:
        print("\n".join([*describe(program.spec), *plans[0][1].lines()]))
        return
    print("\n".join([*describe(program.spec), "", *table_lines(plans)]))


def table_lines(plans: "list[tuple[str, Plan]]") -> Iterator[str]:
    """A Markdown table: what is streamed, and the predicted speeds, each with what limits it."""
    from ..plan import PROMPTS

    heads = ["card", "link (GB/s)", "experts on the host", "micro-batch", *(f"pp{n}" for n in PROMPTS), "tg at most"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for link, plan in plans:
        assert plan.rates
        speeds = []
        for n in PROMPTS:
            p = plan.predict(n) if n <= plan.n_ctx else None
            speeds.append(f"{p.tokens_per_s:.0f} ({'link' if p.upload_s > p.compute_s else 'compute'})" if p else "-")
        decode = plan.decode_s() or (0.0, 1.0)
        yield (
            f"| {plan.device.name} | {link} ({plan.rates.link_gbps:g}) | {plan.n_bytes('stream') / 2**30:.1f} GiB | "
            f"{plan.n_ubatch} | {' | '.join(speeds)} | {1 / sum(decode):.0f} |"
        )


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
