"""Shows what is in a GGUF file: metadata, tensors, types, and how large the experts are.

Works for any architecture, also those that headrace cannot run, and for split sets (name any shard).

examples:
  headrace inspect model.gguf
  headrace inspect model.gguf --tensors --filter 'blk\\.0\\.'
  headrace inspect model.gguf --filter rope                  only keys and tensors that match
  headrace inspect model.gguf --json | jq .totals
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from ..gguf import File, TensorInfo

HELP = "show a file's metadata, tensors and expert bytes"
MIB = 2**20
SHOWN = 4
"""Elements of an array that are shown."""

ROLES = {
    "next token": r"\.nextn\.", "routed experts": r"_exps\.|ffn_(gate|up|down)\.\d+\.",
    "router": r"ffn_gate_inp\.|exp_probs_b", "shared expert": r"_shexp\.",
    "embedding": r"^token_embd|^per_layer_token_embd", "output head": r"^output\.", "norms": r"norm",
    "recurrent": r"\.ssm_|\.time_mix|\.shortconv", "attention": r"\.attn_|\.indexer",
    "dense ffn": r"\.ffn_|\.channel_mix",
}  # fmt: skip
"""What a tensor is for: the first pattern that its name matches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="GGUF file; any shard of a split set")
    parser.add_argument("-t", "--tensors", action="store_true", help="list the tensors")
    parser.add_argument("-f", "--filter", metavar="REGEX", default="", help="only keys and tensors that match")
    parser.add_argument("--arrays", action="store_true", help="show arrays whole, not their first elements")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> None:
    from ..gguf import open_gguf

    try:
        pattern = re.compile(args.filter)
    except re.error as error:
        raise UserError(f"--filter {args.filter!r} is no regular expression: {error}") from None
    report = inspect(open_gguf(args.file), pattern, None if args.arrays else SHOWN)
    if args.json:
        import json

        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(report, tensors=args.tensors or bool(args.filter))))


def inspect(file: "File", pattern: re.Pattern[str], n_shown: int | None = SHOWN) -> dict[str, Any]:
    """Everything worth knowing of a file as plain data; sizes in bytes, shapes in numpy order (rows first)."""
    tensors = [t for t in file.tensors.values() if pattern.search(t.name)]
    return {
        "file": str(file.path),
        "shards": [{"path": str(s.path), "bytes": s.size_bytes} for s in file.shards],
        "architecture": file.architecture,
        "metadata": {k: value_of(v, n_shown) for k, v in file.metadata.items() if pattern.search(k)},
        "totals": totals(tensors),
        "types": grouped(tensors, lambda t: t.type.name),
        "roles": grouped(tensors, lambda t: role_of(t.name)),
        "experts": list(expert_layers(tensors)),
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "type": t.type.name, "bytes": t.n_bytes, "shard": t.shard}
            for t in tensors
        ],
    }


def value_of(value: Any, n_shown: int | None) -> Any:
    """A metadata value as JSON; of an array its length and first elements."""
    if isinstance(value, str | bool | int | float):
        return value
    if n_shown is None or len(value) <= n_shown:
        return [getattr(v, "item", lambda v=v: v)() for v in value]
    return {"length": len(value), "first": [getattr(value[i], "item", lambda i=i: value[i])() for i in range(n_shown)]}


def totals(tensors: Iterable["TensorInfo"]) -> dict[str, Any]:
    tensors = list(tensors)
    n_params, n_bytes = sum(prod(t.shape) for t in tensors), sum(t.n_bytes for t in tensors)
    bits = round(8 * n_bytes / n_params, 3) if n_params else 0.0
    return {"tensors": len(tensors), "parameters": n_params, "bytes": n_bytes, "bits_per_weight": bits}


def grouped(tensors: Iterable["TensorInfo"], key: Any) -> dict[str, dict[str, Any]]:
    """Totals by key, largest first."""
    groups: dict[str, list[TensorInfo]] = {}
    for t in tensors:
        groups.setdefault(key(t), []).append(t)
    found = {name: totals(members) for name, members in groups.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def role_of(name: str) -> str:
    return next((role for role, pattern in ROLES.items() if re.search(pattern, name)), "other")


def expert_layers(tensors: Iterable["TensorInfo"]) -> Iterator[dict[str, Any]]:
    """The routed experts of each layer: their number, bytes, bytes per expert, and the type of each tensor."""
    layers: dict[int, list[TensorInfo]] = {}
    for t in tensors:
        if (found := re.match(r"blk\.(\d+)\.ffn_\w+_exps\.weight$", t.name)) and len(t.shape) == 3:
            layers.setdefault(int(found[1]), []).append(t)
    for layer, members in sorted(layers.items()):
        n_bytes, n_expert = sum(t.n_bytes for t in members), members[0].shape[0]
        types = {t.name.split(".")[2].removeprefix("ffn_").removesuffix("_exps"): t.type.name for t in members}
        yield {
            "layer": layer, "experts": n_expert, "bytes": n_bytes, "bytes_per_expert": n_bytes // n_expert,
            "types": types,
        }  # fmt: skip


# text


def lines(report: Mapping[str, Any], *, tensors: bool) -> Iterator[str]:
    t, n_shards = report["totals"], len(report["shards"])
    yield f"{report['file']}: {report['architecture']}" + (f", {n_shards} shards" if n_shards > 1 else "")
    yield (
        f"{t['tensors']} tensors, {t['parameters'] / 1e9:.2f} B parameters, {t['bytes'] / 2**30:.2f} GiB, "
        f"{t['bits_per_weight']:.2f} bits per weight"
    )
    if report["metadata"]:
        yield "\nmetadata"
        width = max(map(len, report["metadata"]))
        yield from (f"  {key:{width}}  {text_of(value)}" for key, value in report["metadata"].items())
    if tensors and report["tensors"]:
        yield "\ntensors"
        width = max(len(x["name"]) for x in report["tensors"])
        for x in report["tensors"]:
            shard = f"  shard {x['shard']}" if n_shards > 1 else ""
            shape = " x ".join(map(str, x["shape"]))
            yield f"  {x['name']:{width}}  {shape:>22}  {x['type']:8} {x['bytes'] / MIB:10.2f} MiB{shard}"
    for title in ("types", "roles") if t["tensors"] else ():
        yield f"\n{title:16} {'tensors':>8} {'parameters':>16} {'MiB':>11} {'bits/weight':>12}"
        for name, g in report[title].items():
            mib, bits = g["bytes"] / MIB, g["bits_per_weight"]
            yield f"  {name:14} {g['tensors']:8} {g['parameters']:16,} {mib:11.1f} {bits:12.2f}"
    yield from expert_lines(report["experts"])


def expert_lines(layers: list[dict[str, Any]]) -> Iterator[str]:
    """Layers with the same experts share a line."""
    if not layers:
        return
    yield f"\nexperts          {'number':>8} {'MiB a layer':>16} {'MiB an expert':>15}  types: layers"
    groups: dict[tuple[Any, ...], list[int]] = {}
    for x in layers:
        groups.setdefault((x["experts"], x["bytes"], tuple(x["types"].items())), []).append(x["layer"])
    for (n_expert, n_bytes, types), numbers in groups.items():
        kinds = ", ".join(f"{name} {kind}" for name, kind in types)
        mib = n_bytes / MIB
        yield f"  {len(numbers):4} layers    {n_expert:8} {mib:16.1f} {mib / n_expert:15.2f}  {kinds}: {spans(numbers)}"
    n_bytes = sum(x["bytes"] for x in layers)
    yield f"  {len(layers):4} in all    {n_bytes / MIB:25.1f}"


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def text_of(value: Any) -> str:
    """A metadata value on one line of at most about 100 characters."""
    if isinstance(value, dict):
        first = ", ".join(map(repr, value["first"]))
        return f"[{first}, ...] ({value['length']} elements)"
    text = value if isinstance(value, str) else f"{value:.7g}" if isinstance(value, float) else repr(value)
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= 100 or isinstance(value, list) else f"{text[:96]} ... ({len(text)} characters)"
