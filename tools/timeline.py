"""Draws a trace that `headrace bench --trace` or `headrace run --trace` wrote, as an SVG.

    python tools/timeline.py trace.json -o docs/timeline.svg [--test pp8192] [--layers 18-21] [--title TEXT]

Above, the whole trace: what the link carried and what the device computed. Below, some layers by themselves, one a
row: their experts arrive while the layer before computes. The figures in the title are sums over the trace.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headrace.commands.bench_rows import overlap

WIDTH, LEFT, RIGHT = 1120, 92, 24
LANE, THIN, GAP = 26, 15, 8
KINDS = {
    "gate": ("#1f5f99", "copy of gate"), "up": ("#4f93cf", "copy of up"), "gate_up": ("#3577b5", "copy of gate and up"),
    "down": ("#9cc5e8", "copy of down"), "attention": ("#3d9a5b", "attention, delta net"),
    "experts": ("#ee8a2b", "experts"), "layers": ("#c9a227", "whole layers"), "rest": ("#8d8d8d", "embedding, head"),
}  # fmt: skip
"""Kind of a span -> colour and legend."""


@dataclass(frozen=True)
class Box:
    """One or several adjacent spans of a kind; times in ms."""

    row: str
    kind: str
    layer: int
    start: float
    stop: float
    name: str = ""


def boxes_of(events: list[dict[str, Any]]) -> list[Box]:
    return [
        Box(e["cat"], kind_of(e), e["args"]["layer"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["name"])
        for e in sorted(events, key=lambda e: float(e["ts"]))
    ]


def kind_of(event: dict[str, Any]) -> str:
    if event["cat"] == "copy":  # blk.3.ffn_gate_up_exps.weight
        return str(event["name"]).split("ffn_")[-1].split("_exps")[0]
    ends = {step.rpartition(".")[2] for step in event["args"]["steps"] if "." in step}
    return "layers" if len(ends) > 1 else {"attn": "attention", "ffn": "experts"}.get("".join(ends), "rest")


def merged(boxes: list[Box], least_ms: float) -> Iterator[Box]:
    """Boxes of a lane in order, joined where kind and layer are the same and the gap would not be seen."""
    last: Box | None = None
    for b in boxes:
        if last and (last.kind, last.layer) == (b.kind, b.layer) and b.start - last.stop < least_ms:
            last = Box(b.row, b.kind, b.layer, last.start, b.stop, last.name)
            continue
        if last:
            yield last
        last = b
    if last:
        yield last


class Panel:
    """A stretch of time over the drawing's width; `top` grows as lanes are added."""

    def __init__(self, start: float, stop: float, top: float) -> None:
        self.start, self.stop, self.top, self.parts = start, stop, top, list[str]()

    def x(self, ms: float) -> float:
        ms = min(max(ms, self.start), self.stop)
        return LEFT + (ms - self.start) / (self.stop - self.start) * (WIDTH - LEFT - RIGHT)

    def lane(self, label: str, *rows: list[Box], names: bool = False) -> None:
        """One strip with a label, or as many thinner ones as there are rows; `names` shows every box with its name."""
        height = LANE if len(rows) == 1 else THIN
        self.parts.append(text(LEFT - 8, self.top + height * len(rows) / 2 + 4, label, anchor="end"))
        for boxes in rows:
            self.parts.append(rect(LEFT, self.top, WIDTH - LEFT - RIGHT, height, "#f1f1f1"))
            self.parts += self.boxes(boxes, height, names)
            self.top += height
        self.top += GAP

    def boxes(self, boxes: list[Box], height: float, names: bool) -> Iterator[str]:
        ms_a_pixel = (self.stop - self.start) / (WIDTH - LEFT - RIGHT)
        for b in boxes if names else merged(boxes, ms_a_pixel / 2):
            x, width = self.x(b.start), max(self.x(b.stop) - self.x(b.start), 0.3)
            title = f"{b.name}: {b.stop - b.start:.3f} ms" if names else ""
            yield rect(x, self.top, width - 0.5 if names and width > 2 else width, height, KINDS[b.kind][0], title)
            if names and b.row == "copy" and width > 6.5 * len(b.kind) + 6:
                colour = "#123" if b.kind == "down" else "#fff"
                yield text(x + width / 2, self.top + height / 2 + 4, b.kind, anchor="middle", colour=colour, size=11)

    def axis(self) -> None:
        step = next(s for s in steps() if (self.stop - self.start) / s <= 11)
        tick = -(-self.start // step) * step
        while tick <= self.stop:
            x = self.x(tick)
            self.parts.append(f'<path d="M{x:.1f} {self.top - GAP + 2:.1f}v5" stroke="#555"/>')
            self.parts.append(text(x, self.top + 14, f"{tick:g}", anchor="middle", size=11))
            tick = round(tick + step, 9)
        self.parts.append(text(WIDTH - RIGHT, self.top + 28, "ms", anchor="end", size=11))
        self.top += 34


def steps() -> Iterator[float]:
    """0.01, 0.02, 0.05, 0.1, …"""
    power = 0.01
    while True:
        yield from (round(power * n, 9) for n in (1, 2, 5))
        power *= 10


def rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = "#222", bold: bool = False
) -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}{weight}>{escape(words)}</text>"


def summary(events: list[dict[str, Any]]) -> str:
    """What the trace adds up to."""
    wall_us = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    copy_us, compute_us = (sum(e["dur"] for e in events if e["cat"] == row) for row in ("copy", "compute"))
    n_bytes = sum(e["args"].get("bytes", 0) for e in events)
    hidden = overlap(wall_us, copy_us, compute_us)
    parts = [f"{wall_us / 1e3:.1f} ms"]
    if hidden is not None:
        rate = f"{n_bytes / 1e9:.2f} GB at {n_bytes / copy_us / 1e3:.1f} GB/s"
        parts += [f"copying {copy_us / 1e3:.1f} ms ({rate})", f"computing {compute_us / 1e3:.1f} ms"]
        parts.append(f"overlap {100 * hidden:.0f} %")
    return ", ".join(parts)


def draw(events: list[dict[str, Any]], title: str, layers: range | None) -> str:
    boxes = boxes_of(events)
    copies, computations = ([b for b in boxes if b.row == row] for row in ("copy", "compute"))
    top = 74.0
    whole = Panel(min(b.start for b in boxes), max(b.stop for b in boxes), top)
    if copies:
        whole.lane("link", copies)
    whole.lane("device", computations)
    whole.axis()
    parts, bottom = whole.parts, whole.top
    known = sorted({b.layer for b in copies or computations} - {-1})
    if layers is None:
        middle = len(known) // 2
        layers = range(known[max(0, middle - 2)], known[min(len(known) - 1, middle + 1)] + 1) if known else range(0)
    near = [b for b in boxes if b.layer in layers]
    if near:
        start, stop = min(b.start for b in near), max(b.stop for b in near)
        left, right = whole.x(start), whole.x(stop)
        parts.append(
            f'<path d="M{left:.1f} {top - 4}V{bottom - 34 - GAP + 4}M{right:.1f} {top - 4}V{bottom - 34 - GAP + 4}" '
            'stroke="#222" stroke-dasharray="3 2"/>'
        )
        parts.append(
            f'<path d="M{left:.1f} {bottom - 30}L{LEFT} {bottom + 10}H{WIDTH - RIGHT}L{right:.1f} {bottom - 30}z" '
            'fill="#000" fill-opacity="0.05"/>'
        )
        zoom = Panel(start, stop, bottom + 16)
        for layer in layers:
            lanes = [[b for b in row if b.layer == layer] for row in (copies, computations) if row]
            zoom.lane(f"layer {layer}", *lanes, names=True)
        zoom.axis()
        parts, bottom = parts + zoom.parts, zoom.top
    x, used = float(LEFT), {b.kind for b in boxes}
    for kind, (colour, label) in KINDS.items():
        if kind in used:
            parts += [rect(x, bottom + 8, 12, 12, colour), text(x + 17, bottom + 18, label)]
            x += 34 + 6.6 * len(label)
    height = bottom + 32
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" font-family="system-ui, sans-serif">',
            rect(0, 0, WIDTH, height, "#fff"),
            text(LEFT, 28, title, size=16, bold=True),
            text(LEFT, 50, summary(events), colour="#555", size=13),
            *parts,
            "</svg>\n",
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--test", default="", help="draw the first test whose title contains this")
    parser.add_argument("--layers", help="FIRST-LAST: the layers shown by themselves")
    parser.add_argument("--title")
    args = parser.parse_args()
    events = json.loads(args.trace.read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    pid = next((pid for pid, title in titles.items() if args.test in title), None)
    shown = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
    if pid is None or not shown:
        parser.error(f"{args.trace}: no test {args.test!r} in it; there are {', '.join(titles.values())}")
    layers = None
    if args.layers:
        first, _, last = args.layers.partition("-")
        layers = range(int(first), int(last or first) + 1)
    args.output.write_text(draw(shown, args.title or titles[pid], layers))


if __name__ == "__main__":
    main()
