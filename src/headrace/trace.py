"""When each copy and each computation ran, by the device's own events; as data, and as a Chrome trace for Perfetto.

Two timers are recorded around each upload and each compute order, on the queue that does the work, and read when the
pass is over. Nothing waits for them, so a traced pass runs as any other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from .backends.base import Device, Event
from .gguf import TensorInfo
from .program import Step


@dataclass(frozen=True)
class Span:
    """One copy or computation; `row` is "copy" or "compute", times are seconds behind the first span's start.

    `about` of a copy: tensor, layer, bytes, gbps; of a computation: steps, layer (-1: none, or several), ubatch (its
    number in the window), tokens, phase.
    """

    row: str
    name: str
    start_s: float
    stop_s: float
    about: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


class Trace:
    """Notes what a device's two queues do, and when; without a device it notes nothing."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.noted: list[tuple[str, str, Event, Event, dict[str, Any]]] = []

    def copy(self, info: TensorInfo) -> AbstractContextManager[None]:
        """Around the upload of a tensor, behind its wait for the slot."""
        if not self.device:
            return nullcontext()
        return self._span("copy", info.name, {"tensor": info.name, "layer": _layer(info.name), "bytes": info.n_bytes})

    def compute(self, steps: Sequence[Step], ubatch: int, n_tokens: int, phase: str) -> AbstractContextManager[None]:
        """Around the work of one compute order, behind its wait for the experts."""
        if not self.device:
            return nullcontext()
        names, layers = [step.name for step in steps], {step.layer for step in steps} - {-1}
        about = {
            "steps": names, "layer": layers.pop() if len(layers) == 1 else -1, "ubatch": ubatch, "tokens": n_tokens,
            "phase": phase,
        }  # fmt: skip
        return self._span("compute", " … ".join(dict.fromkeys((names[0], names[-1]))), about)

    @contextmanager
    def _span(self, row: str, name: str, about: dict[str, Any]) -> Iterator[None]:
        assert self.device
        queue = self.device.copy if row == "copy" else self.device.compute
        start, stop = self.device.timer(), self.device.timer()
        queue.record(start)
        yield
        queue.record(stop)
        self.noted.append((row, name, start, stop, about))

    def spans(self) -> list[Span]:
        """What was noted so far, in the order it was queued; waits for the device."""
        if not (device := self.device) or not self.noted:
            return []
        device.copy.synchronize()
        device.compute.synchronize()
        first = self.noted[0][2]
        starts = [device.between_s(first, start) for _, _, start, _, _ in self.noted]
        out = []
        for at_s, (row, name, start, stop, about) in zip(starts, self.noted):
            start_s, seconds = at_s - min(starts), device.between_s(start, stop)
            rate = {"gbps": about["bytes"] / seconds / 1e9} if seconds and "bytes" in about else {}
            out.append(Span(row, name, start_s, start_s + seconds, about | rate))
        return out


def busy_s(spans: Sequence[Span], row: str) -> float:
    return sum(span.seconds for span in spans if span.row == row)


def length_s(spans: Sequence[Span]) -> float:
    """From the first start to the last stop."""
    return max((s.stop_s for s in spans), default=0.0) - min((s.start_s for s in spans), default=0.0)


def chrome_trace(groups: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """The JSON object format of Chrome's trace viewer: each group is a process with the threads "copy" and "compute";
    microseconds. https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    events: list[dict[str, Any]] = []
    for pid, (title, spans) in enumerate(groups.items(), 1):
        tids = {"copy": 1, "compute": 2}
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}})
        for row, tid in tids.items():
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}})
        events += [
            {
                "ph": "X", "pid": pid, "tid": tids[s.row], "cat": s.row, "name": s.name, "ts": 1e6 * s.start_s,
                "dur": 1e6 * s.seconds, "args": dict(s.about),
            }
            for s in spans
        ]  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _layer(tensor: str) -> int:
    """blk.7.ffn_up_exps.weight -> 7; -1 for a tensor of no layer."""
    parts = tensor.split(".")
    return int(parts[1]) if parts[0] == "blk" else -1
