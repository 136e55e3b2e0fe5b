"""Traces on the null device, whose clock is arithmetic: everything appears once, queues are in order, and overlap."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.engine import Engine, open_engine
from headrace.runner import Runner
from headrace.trace import Span, Trace, busy_s, chrome_trace
from models.tiny import Tiny, write

N_LAYER, N_TOKENS, N_UBATCH = 5, 200, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace") / "m.gguf", Tiny("qwen3moe", "Q4_K_M", n_layer=N_LAYER))


def opened(model: Path, backend: str = "null", **config: object) -> Engine:
    return open_engine(model, backend=backend, **({"n_ctx": 512, "n_ubatch": N_UBATCH, "n_cpu_moe": N_LAYER} | config))


def traced(engine: Engine) -> list[Span]:
    trace = engine.stream.trace = Trace(engine.device)
    engine.runner.prefill(engine.sequence, [1] * N_TOKENS)
    return trace.spans()


def rows(spans: list[Span]) -> tuple[list[Span], list[Span]]:
    return [s for s in spans if s.row == "copy"], [s for s in spans if s.row == "compute"]


def test_every_copy_and_computation_appears_once(model: Path) -> None:
    with opened(model) as engine:
        copies, computations = rows(traced(engine))
        assert Counter(s.name for s in copies) == Counter(engine.program.expert_tensors)
        for s in copies:
            assert s.about["bytes"] == engine.file.tensors[s.name].n_bytes
            assert s.about["gbps"] == pytest.approx(engine.device.info.link_gbps)
            assert s.name.startswith(f"blk.{s.about['layer']}.ffn_")
        done = Counter((step, s.about["ubatch"]) for s in computations for step in s.about["steps"])
        n_ubatch = -(-N_TOKENS // N_UBATCH)
        assert done == Counter((step.name, u) for step in engine.program.steps for u in range(n_ubatch))
        assert {s.about["tokens"] for s in computations} == {N_UBATCH, N_TOKENS % N_UBATCH}


def test_a_queue_does_one_thing_at_a_time_and_the_sums_are_the_clock_s(model: Path) -> None:
    with opened(model) as engine:
        spans = traced(engine)
        for row in rows(spans):
            assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(row))
        assert busy_s(spans, "copy") == pytest.approx(engine.device.busy_s("copy"))
        assert busy_s(spans, "compute") == pytest.approx(engine.device.busy_s("compute"))
        assert max(s.stop_s for s in spans) == pytest.approx(engine.device.elapsed_s)
        assert min(s.start_s for s in spans) == 0


def overlap_s(a: list[Span], b: list[Span]) -> float:
    """How long two stretches of work, each from its first start to its last stop, lie upon each other."""
    return min(a[-1].stop_s, b[-1].stop_s) - max(a[0].start_s, b[0].start_s)


@pytest.mark.parametrize(("slots", "ahead"), [(6, True), (0, False)])
def test_the_next_layer_is_copied_while_one_computes(model: Path, slots: int, ahead: bool) -> None:
    with opened(model, prefetch_experts=slots) as engine:
        copies, computations = rows(traced(engine))
        for layer in range(N_LAYER - 1):
            experts = [s for s in computations if s.name == f"blk.{layer}.ffn"]
            following = [s for s in copies if s.about["layer"] == layer + 1]
            assert len(experts) == 7 and len(following) == 3
            assert (overlap_s(experts, following) > 0) == ahead


def test_tracing_changes_no_order(model: Path) -> None:
    with opened(model) as plain, opened(model) as watched:
        plain.runner.prefill(plain.sequence, [1] * N_TOKENS)
        traced(watched)
        assert [(o.name, o.start_s, o.clock) for o in plain.device.orders] == [
            (o.name, o.start_s, o.clock) for o in watched.device.orders
        ]


def test_a_failed_order_leaves_no_span(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model) as engine:
        monkeypatch.setattr(Runner, "_compute", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            traced(engine)
        assert {row for row, *_ in engine.stream.trace.noted} == {"copy"}


def test_chrome_s_format(model: Path) -> None:
    with opened(model) as engine:
        spans = traced(engine)
    trace = json.loads(json.dumps(chrome_trace({"first": spans, "second": spans[:3]})))
    assert trace["displayTimeUnit"] == "ms"
    meta = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(meta) + len(complete) == len(trace["traceEvents"]) and len(complete) == len(spans) + 3
    assert [(e["pid"], e["args"]["name"]) for e in meta if e["name"] == "process_name"] == [(1, "first"), (2, "second")]
    assert [e["args"]["name"] for e in meta if e["name"] == "thread_name"] == ["copy", "compute"] * 2
    threads = {(e["pid"], e["tid"]) for e in meta if e["name"] == "thread_name"}
    for event, span in zip(complete, spans):
        assert (event["pid"], event["tid"]) in threads and event["name"] == span.name
        assert event["ts"] == pytest.approx(1e6 * span.start_s) and event["dur"] == pytest.approx(1e6 * span.seconds)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_host_s_clock_where_work_is_done_at_once(model: Path, backend: str) -> None:
    with opened(model, backend) as engine:
        assert Trace().spans() == [] and engine.stream.trace.spans() == []
        copies, computations = rows(traced(engine))
        assert not copies and [s.about["tokens"] for s in computations] == [N_UBATCH] * 6 + [N_TOKENS % N_UBATCH]
        assert all(s.seconds > 0 for s in computations)
        assert all(a.stop_s <= b.start_s for a, b in pairwise(computations))
