"""Writes a GGUF file with the shape of a named model and random weights.

Everything is as in the public files - tensor names, shapes, types, metadata - but the weights are noise of sane
magnitude and the vocabulary is made up. Such a file loads here and in llama.cpp and runs at the real model's speed.

examples:
  headrace synth --list                                    shapes and sizes
  headrace synth Qwen3.6-35B-A3B -o qwen.gguf              the whole 21 GB
  headrace synth Qwen3.6-35B-A3B --sparse -o plan.gguf      no weights: for headrace plan --card
  headrace synth Qwen3-30B-A3B --layers 4 -o cut.gguf      4 of its 48 layers
  headrace synth OLMoE-1B-7B --type-mix Q8_0 -o olmoe.gguf
  headrace synth tiny-qwen3moe -o tiny.gguf                for tests: 2 MB
"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .options import progress

if TYPE_CHECKING:
    from ..synth.writer import Tensor

HELP = "write a random-weight GGUF file with the shape of a named model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("shape", nargs="?", metavar="SHAPE", help="name of a model's shape (see --list)")
    add("-o", "--output", metavar="FILE", type=Path, help="the file to write")
    add("-l", "--list", action="store_true", help="list the shapes with their sizes and stop")
    add("-n", "--dry-run", action="store_true", help="say what would be written and stop")
    add("--sparse", action="store_true", help="no weights, only their places: takes no room, for headrace plan")
    add("-f", "--force", action="store_true", help="replace an existing file")
    add("--type-mix", metavar="MIX", default="", help="Q4_K_M, Q8_0, ..., or one type for all (default: the shape's)")
    add("--seed", type=int, default=0, help="another seed, other weights (default 0)")
    add("--router-skew", metavar="S", type=float, default=0.0,
        help="share of the assignments that the hottest quarter of the experts takes (default: even)")  # fmt: skip
    group = parser.add_argument_group("sizes (default: the shape's)")
    for flag, dest, text in (
        ("--layers", "n_layer", "layers"), ("--experts", "n_expert", "experts per layer"),
        ("--experts-used", "n_expert_used", "experts that a token takes"), ("--vocab", "n_vocab", "tokens"),
        ("--context", "n_ctx", "context in tokens"), ("--nextn", "n_nextn", "next-token-prediction blocks"),
    ):  # fmt: skip
        group.add_argument(flag, dest=dest, metavar="N", type=int, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--fused-gate-up", dest="fused_gate_up", action="store_true", default=argparse.SUPPRESS,
        help="one ffn_gate_up_exps instead of two tensors",
    )  # fmt: skip


SIZES = ("n_layer", "n_expert", "n_expert_used", "n_vocab", "n_ctx", "n_nextn", "fused_gate_up")


def run(args: argparse.Namespace) -> None:
    from ..synth import find_shape, model, synthesize

    if args.list:
        list_shapes()
        return
    if not args.shape:
        raise UserError("synth needs the name of a shape; headrace synth --list shows them")
    shape = find_shape(args.shape, **{key: getattr(args, key) for key in SIZES if hasattr(args, key)})
    _, tensors, _ = model(shape, args.type_mix)
    n_total = sum(t.n_bytes for t in tensors)
    if not args.dry_run:
        if args.output is None:
            raise UserError("synth needs -o FILE, the file to write")
        if args.output.exists() and not args.force:
            raise UserError(f"-o {args.output} exists; -f replaces it")
    print(f"{shape.name}: {describe(tensors)}", file=sys.stderr)
    if args.dry_run:
        return
    start_s, n_done = time.perf_counter(), 0
    with progress(f"writing {args.output.name}") as show:

        def count(n_bytes: int) -> None:
            nonlocal n_done
            n_done += n_bytes
            show(n_done, n_total)

        n_bytes = synthesize(
            args.output,
            shape,
            args.type_mix,
            seed=args.seed,
            router_skew=args.router_skew,
            sparse=args.sparse,
            progress=count,
        )
    seconds = time.perf_counter() - start_s
    print(
        f"{args.output}: {n_bytes / 1e9:.3f} GB in {seconds:.1f} s, {n_bytes / seconds / 1e6:.0f} MB/s", file=sys.stderr
    )


def describe(tensors: "list[Tensor]") -> str:
    """Size, parameters, and how many tensors of each type."""
    from collections import Counter
    from math import prod

    kinds = Counter(t.type for t in tensors)
    n_params, n_bytes = sum(prod(t.shape) for t in tensors), sum(t.n_bytes for t in tensors)
    counts = " + ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return f"{n_params / 1e9:.2f} B parameters, {n_bytes / 2**30:.2f} GiB, {counts}"


def list_shapes() -> None:
    from ..models import ARCHITECTURES
    from ..synth import SHAPES, model

    print(f"{'shape':18} {'architecture':12} {'layers':>6} {'experts':>9} {'type mix':10} {'GiB':>7}")
    for s in SHAPES.values():
        _, tensors, _ = model(s)
        experts = f"{s.n_expert_used} of {s.n_expert}" if s.n_expert else "dense"
        note = "" if s.arch in ARCHITECTURES else "  (headrace does not run it yet; llama.cpp does)"
        gib = sum(t.n_bytes for t in tensors) / 2**30
        print(f"{s.name:18} {s.arch:12} {s.n_layer:6} {experts:>9} {s.mix:10} {gib:7.2f}{note}")
