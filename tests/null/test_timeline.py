"""The drawn timeline of a trace: every box where its time says, every layer that is asked for, readable XML."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "timeline.py"
spec = importlib.util.spec_from_file_location("timeline", TOOL)
assert spec and spec.loader
timeline: Any = importlib.util.module_from_spec(spec)
sys.modules["timeline"] = timeline
spec.loader.exec_module(timeline)

SVG = "{http://www.w3.org/2000/svg}"


def event(row: str, name: str, layer: int, start_ms: float, ms: float, **args: Any) -> dict[str, Any]:
    args |= {"layer": layer, **({"bytes": int(ms * 1e6)} if row == "copy" else {"steps": name.split(" … ")})}
    return {
        "ph": "X", "pid": 1, "tid": 1, "cat": row, "name": name, "ts": 1e3 * start_ms, "dur": 1e3 * ms, "args": args
    }  # fmt: skip


PASS = [
    e for n in range(4) for e in (
        event("copy", f"blk.{n}.ffn_gate_up_exps.weight", n, 10 * n, 6),
        event("copy", f"blk.{n}.ffn_down_exps.weight", n, 10 * n + 6, 4),
        event("compute", f"blk.{n}.attn", n, 10 * n + 2, 1), event("compute", f"blk.{n}.attn", n, 10 * n + 3, 1),
        event("compute", f"blk.{n}.ffn", n, 10 * n + 10, 2), event("compute", f"blk.{n}.ffn", n, 10 * n + 12, 2),
    )
]  # fmt: skip


def rects(svg: str, colour: str) -> list[tuple[float, float]]:
    """Left and right edges, in drawing units, of the boxes of a kind."""
    found = [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.get("fill") == colour and r.get("width") != "12.00"]
    return [(float(r.get("x", "")), float(r.get("x", "")) + float(r.get("width", ""))) for r in found]


def x_of(ms: float, start: float, stop: float) -> float:
    return timeline.LEFT + (ms - start) / (stop - start) * (timeline.WIDTH - timeline.LEFT - timeline.RIGHT)


def test_boxes_lie_where_their_times_say() -> None:
    svg = timeline.draw(PASS, "a < b", range(1, 3))
    whole, zoom = (0, 44), (10, 34)
    for kind, first, ms in (("gate_up", 0, 6), ("down", 6, 4), ("attention", 2, 2), ("experts", 10, 4)):
        edges = rects(svg, timeline.KINDS[kind][0])
        parts = 2 if kind in ("attention", "experts") else 1  # joined above, one for each micro-batch below
        wanted = [(n * 10 + first, n * 10 + first + ms, *whole) for n in range(4)]
        wanted += [
            (n * 10 + first + i * ms / parts, n * 10 + first + (i + 1) * ms / parts, *zoom)
            for n in (1, 2) for i in range(parts)
        ]  # fmt: skip
        assert len(edges) == len(wanted)
        for (left, right), (start, stop, *frame) in zip(edges, wanted):
            assert left == pytest.approx(x_of(start, *frame), abs=0.02)
            assert right == pytest.approx(x_of(stop, *frame), abs=0.6)
    words = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert "a < b" in words and "layer 1" in words and "layer 2" in words and "layer 3" not in words
    assert words[1] == ("44.0 ms, copying 40.0 ms (0.04 GB at 1.0 GB/s), computing 24.0 ms, overlap 83 %")


def test_the_middle_layers_are_shown_unless_others_are_asked_for() -> None:
    many = [event("copy", f"blk.{n}.ffn_up_exps.weight", n, n, 1) for n in range(40)]
    many += [event("compute", "token_embd … blk.0.attn", 0, 0, 1), event("compute", "output", -1, 40, 0.1)]
    words = [t.text for t in ET.fromstring(timeline.draw(many, "", None)).iter(f"{SVG}text")]
    assert [w for w in words if w and w.startswith("layer")] == ["layer 18", "layer 19", "layer 20", "layer 21"]
    assert "attention, delta net" in words and "embedding, head" in words


def test_a_trace_without_copies_has_one_lane() -> None:
    svg = timeline.draw([event("compute", "token_embd … blk.0.attn … blk.0.ffn", -1, 0, 5)], "", None)
    words = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert "device" in words and "link" not in words and words[1] == "5.0 ms" and "whole layers" in words


def test_command_line(tmp_path: Path) -> None:
    names = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"pp{pid}"}} for pid in (1, 2)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [*names, *PASS]}))
    command = [sys.executable, str(TOOL), str(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg")]
    subprocess.run([*command, "--layers", "0-1", "--title", "mine"], check=True)
    assert ">mine<" in (tmp_path / "t.svg").read_text()
    failed = subprocess.run([*command, "--test", "pp2"], capture_output=True, text=True)
    assert failed.returncode == 2 and "there are pp1, pp2" in failed.stderr
