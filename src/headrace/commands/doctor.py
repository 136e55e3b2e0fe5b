"""Says what this machine has, how fast it is, and what limits it: a line for each thing that can be changed.

The link is measured as weights will cross it, in each way that works; -m takes the model file itself for that, and
tells whether it fits. Without -m the rates are kept for this kind of GPU: predictions and bounds use them. Takes some
seconds a GPU and about 1 GiB of memory.

examples:
  headrace doctor
  headrace doctor -m model.gguf            also: does it fit, and how fast is its disk
  headrace doctor --backend cuda           exit status 1 if no GPU can be used
  headrace doctor -o json
"""

import argparse
from collections.abc import Iterator
from typing import Any

from .options import add_model

HELP = "say what this machine has, how fast its link is, and what to change"
GIB = 2**30
BACKENDS = ("auto", "cpu", "cuda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="what must work (default: whatever does)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format (default text)")


def run(args: argparse.Namespace) -> int:
    from . import doctor_facts as facts

    report: dict[str, Any] = {"software": facts.software(), "host": facts.host()}
    if args.model:
        report["model"] = facts.model(args.model)
    if args.backend != "cpu":
        report["gpus"], report["no_gpu"] = facts.gpus(args.model, seconds=0.7)
    report["findings"] = list(findings(report))
    if args.output == "json":
        import json

        print(json.dumps(report, indent=2))
    else:
        print("\n".join(lines(report)))
    usable = any("unusable" not in gpu for gpu in report.get("gpus", ()))
    return int(args.backend == "cuda" and not usable)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    s, h = report["software"], report["host"]
    yield f"software    {', '.join(f'{name} {version}' for name, version in s.items() if version)}"
    yield f"cpu         {h['cpu']}, {h['threads']} of {h['cores']} cores' threads, {h['isa']}"
    limit = f", a cgroup allows {h['limit_bytes'] / GIB:.1f}" if h["limit_bytes"] else ""
    yield (
        f"ram         {h['available_bytes'] / GIB:.1f} of {h['ram_bytes'] / GIB:.1f} GiB available{limit}; "
        f"reads at {h['read_gbps']:.1f} GB/s"
    )
    memlock = "unlimited" if h["memlock_bytes"] is None else f"{h['memlock_bytes'] / 2**20:.0f} MiB"
    yield f"locking     {h['lockable_bytes'] / GIB:.1f} GiB may be page-locked (memlock {memlock}: does not bind CUDA)"
    if m := report.get("model"):
        disk = f", disk {m['disk_gbps']:.2f} GB/s" if m["disk_gbps"] else ""
        yield f"model       {m['bytes'] / GIB:.1f} GiB, of which experts {m['expert_bytes'] / GIB:.1f}{disk}"
    if report.get("no_gpu"):
        yield f"gpu         {report['no_gpu']}"
    for i, g in enumerate(report.get("gpus", ())):
        yield from gpu_lines(i, g)
    yield ""
    yield from (f"- {text}" for text in report["findings"] or ["nothing limits this machine that could be changed"])


def gpu_lines(i: int, g: dict[str, Any]) -> Iterator[str]:
    if "unusable" in g:
        yield f"gpu {i}       {g['name']}: {g['unusable']}"
        return
    yield (
        f"gpu {i}       {g['name']}, {g['free_bytes'] / GIB:.1f} of {g['memory_bytes'] / GIB:.1f} GiB free, "
        f"compute capability {g['capability']}, driver {g['driver'] or 'unknown'}, CUDA {g['cuda']}"
    )
    if p := g["pcie"]:
        yield (
            f"  pcie      {p['gen']}.0 x{p['width']} under load ({p['gbps']:.0f} GB/s), "
            f"{p['max_gen']}.0 x{p['max_width']} possible here, {p['card_gen'] or '?'}.0 by the card"
        )
    ways = ", ".join(
        f"{way} {g[f'{way}_gbps']:.1f}" for way in ("registered", "staged", "pageable") if g[f"{way}_gbps"]
    )
    gather = f"; kernels read registered memory in place at {g['gather_gbps']:.1f}" if g["gather_gbps"] else ""
    yield f"  link      GB/s: {ways}{gather}"
    yield f"  rung      {g['rung']}" + (f" ({g['why_not_registered']})" if g["why_not_registered"] else "")
    yield f"  speed     memory {g['memory_gbps']:.0f} GB/s, products {g['matmul_tflops']:.0f} TFLOP/s ({g['dtype']})"


def findings(report: dict[str, Any]) -> Iterator[str]:
    """What limits the speed, each with what to change."""
    h, model = report["host"], report.get("model")
    if h["threads"] < h["cores"] // 2:
        yield (
            f"this process may use {h['threads']} of {h['cores']} processors: raise the container's CPU limit "
            "or its CPU set"
        )
    if h["limit_bytes"] and h["limit_bytes"] < 0.9 * h["ram_bytes"]:
        yield (
            f"a cgroup allows {h['limit_bytes'] / GIB:.1f} of {h['ram_bytes'] / GIB:.1f} GiB of RAM: "
            "raise the container's memory limit"
        )
    if model and model["bytes"] > h["available_bytes"]:
        disk = f", at {model['disk_gbps']:.2f} GB/s" if model["disk_gbps"] else ""
        yield (
            f"the model has {model['bytes'] / GIB:.1f} GiB and {h['available_bytes'] / GIB:.1f} of RAM are available: "
            f"the rest comes from the disk at each pass{disk}. Free memory, or take a smaller type mix"
        )
    for i, gpu in enumerate(report.get("gpus", ())):
        if "unusable" not in gpu:
            yield from (f"gpu {i}: {text}" for text in gpu_findings(gpu, h))


def gpu_findings(g: dict[str, Any], h: dict[str, Any]) -> Iterator[str]:
    if float(g["capability"]) < 8.0:
        yield (
            f"compute capability {g['capability']}: Triton emits no tensor-core instructions below 8.0, so prompts are "
            "several times slower than the card's figures; 16-bit numbers are float16. Only another card changes that"
        )
    p = g["pcie"]
    if p and p["gen"] < p["max_gen"]:
        yield (
            f"the link runs at PCIe {p['gen']}.0 under load where {p['max_gen']}.0 is possible: set the slot's speed "
            "in the BIOS, turn PCIe power saving (ASPM) off, try without a riser cable"
        )
    if p and p["max_gen"] < p["card_gen"]:
        yield f"the board gives PCIe {p['max_gen']}.0, the card could do {p['card_gen']}.0: another slot or board"
    if p and p["width"] < p["max_width"]:
        yield (
            f"the link is x{p['width']} wide where x{p['max_width']} is possible: move the card to the slot nearest "
            "the processor, and check which slots share lanes"
        )
    best = max(g["registered_gbps"], g["staged_gbps"], g["pageable_gbps"])
    if p and best < 0.7 * p["gbps"] and g["registered_gbps"]:
        node = g["numa_node"]
        remedy = f"run under numactl --cpunodebind={node} --membind={node}, and see" if node is not None else "see"
        yield (
            f"the link brings {best:.1f} GB/s of the {p['gbps']:.0f} that PCIe {p['gen']}.0 x{p['width']} has (87 % is "
            f"usual): {remedy} whether other devices share it, or an IOMMU slows it (iommu=pt)"
        )
    if not g["registered_gbps"]:
        yield (
            f"file pages cannot be page-locked ({g['why_not_registered']}): experts are {g['rung']}. Put the model on "
            "a local file system (ext4, xfs), and update the driver"
        )
        if g["rung"] == "staged" and p and g["staged_gbps"] < 0.5 * p["gbps"]:
            yield f"staged copies reach {g['staged_gbps']:.1f} GB/s with {h['threads']} threads: more cores help"
    elif h["read_gbps"] and h["read_gbps"] < g["registered_gbps"]:
        yield (
            f"RAM reads at {h['read_gbps']:.1f} GB/s, less than the link: fill all memory channels, "
            "check the modules' speed in the BIOS"
        )
