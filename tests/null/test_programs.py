"""The streaming contract on random programs: layers, slots, windows, micro-batches, what is resident, and failures."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.backends.null import NullDevice, NullOps, open_device
from headrace.kvcache import Sequence
from headrace.program import Step
from headrace.schedule import split
from headrace.stream import ExpertStream
from null.programs import Layer, Rig

TYPE = st.sampled_from(["F32", "Q8_0", "Q4_0"])
LAYER = st.builds(Layer, st.sampled_from([0, 1, 3, 8]), st.sampled_from([32, 64, 160]), st.booleans(),
                  st.tuples(TYPE, TYPE, TYPE))  # fmt: skip
CHECKED = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@st.composite
def rigs(draw: Callable[..., Any]) -> Rig:
    layers = draw(st.lists(LAYER, min_size=1, max_size=6).filter(lambda ls: any(x.n_expert for x in ls)))
    names = [f"blk.{i}.ffn_{kind}_exps.weight" for i in range(len(layers)) for kind in ("gate", "up", "down")]
    device = open_device(10 ** draw(st.integers(-2, 2)), 10.0 ** draw(st.integers(8, 13)), gathers=draw(st.booleans()))
    return Rig(
        layers, frozenset(draw(st.sets(st.sampled_from(names), max_size=4))), draw(st.integers(0, 8)), device,
        n_ubatch=draw(st.sampled_from([1, 5, 16, 40])), n_ctx=draw(st.sampled_from([50, 300])), n_seq_max=2,
        schedule=draw(st.sampled_from(["layer", "ubatch"])),
    )  # fmt: skip


@CHECKED
@given(rig=rigs(), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5), data=st.data())
def test_any_program(rig: Rig, lengths: list[int], data: st.DataObject) -> None:
    """No hazard, each streamed byte once per window, every layer's upload ahead, and the plan's memory to the byte."""
    runner, cache, device, n_passes = rig.runner, rig.cache, rig.device, 0
    seqs = [cache.sequence(), cache.sequence()]
    for n in lengths:
        n_orders, seq = len(device.orders), data.draw(st.sampled_from(seqs))
        if n % 3 == 0 and all(0 < s.n_past < cache.n_ctx for s in seqs):
            k = data.draw(st.sampled_from([None, 1, 64]))
            assert np.shape(getattr(found := runner.decode(seqs, [1, 2], k), "ids", found)) == (2, min(k or 50, 50))
            n_passes += not rig.stream.gathers
            if rig.stream.gathers:
                continue
        else:
            n = min(n, cache.n_ctx - seq.n_past)
            rows = sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else []
            assert runner.prefill(seq, [1] * n, rows).shape == (len(rows), 50)
            windows = split(n, rig.plan.n_window, rig.plan.n_ubatch)
            uploading = [w for w in windows if w[-1][1] - w[0][0] >= runner.gather_below]
            n_passes += len(uploading)
            if len(windows) != 1 or not uploading:
                continue
        assert rig.unordered_lookahead(n_orders) == []
    assert device.hazards() == []
    assert device.link_bytes == rig.stream.uploaded_bytes == n_passes * rig.pass_bytes
    assert device.allocated_bytes == rig.plan.device_bytes


class Failing(NullOps):
    """Raises at one op, once."""

    def __init__(self, device: NullDevice, at: int) -> None:
        super().__init__(device)
        self.left = at

    def __getattr__(self, name: str) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("injected")
        return super().__getattr__(name)


@CHECKED
@given(rig=rigs(), at=st.integers(1, 150), n=st.integers(1, 40))
def test_a_step_that_fails_anywhere_releases_its_slots(rig: Rig, at: int, n: int) -> None:
    seq, ops = rig.cache.sequence(), rig.device.ops
    rig.device.ops = Failing(rig.device, at)
    try:
        rig.runner.prefill(seq, [1] * n)
    except RuntimeError:
        assert seq.n_past < n and seq.n_past % rig.plan.n_window == 0, "the windows that were whole"
    rig.device.ops = ops
    rig.runner.prefill(seq, [1] * (n + 1 - seq.n_past))
    rig.runner.decode([seq], [1])
    assert seq.n_past == n + 2 and rig.device.hazards() == []


# the proof can fail

LAYERS = [Layer(4, 64), Layer(4, 64, fused=True), Layer(0, 64), Layer(4, 64), Layer(4, 32)]


def small_rig(more_slots: int = 3) -> Rig:
    return Rig(LAYERS, frozenset(), more_slots, open_device(), n_ubatch=16, n_ctx=300)


def no_wait_for_ready(self: ExpertStream, step: Step) -> None: ...


def no_record_of_free(self: ExpertStream, step: Step) -> None: ...


def no_wait_for_free(self: ExpertStream, name: str) -> None:
    slot, info, copy = self.slot_of[name], self.streamed[name], self.device.copy
    copy.copy(slot.buffer[: info.n_bytes], self.host(info))
    copy.record(slot.ready)


def ready_before_the_copy(self: ExpertStream, name: str) -> None:
    slot, info, copy = self.slot_of[name], self.streamed[name], self.device.copy
    copy.wait(slot.free)
    copy.record(slot.ready)
    copy.copy(slot.buffer[: info.n_bytes], self.host(info))


def half_a_copy(self: ExpertStream, name: str) -> None:
    slot, info, copy = self.slot_of[name], self.streamed[name], self.device.copy
    copy.wait(slot.free)
    copy.copy(slot.buffer[: info.n_bytes // 2], self.host(info)[: info.n_bytes // 2])
    copy.record(slot.ready)


def nothing_uploaded(self: ExpertStream, name: str) -> None: ...


def another_tensor(self: ExpertStream, name: str) -> None:
    """Everything is in order, but a slot gets its next tensor's bytes."""
    slot, info, copy = self.slot_of[name], self.streamed[name], self.device.copy
    names = list(self.slot_of)
    wrong = names[(names.index(name) + len(self.slots)) % len(names)]
    copy.wait(slot.free)
    copy.copy(slot.buffer[: info.n_bytes], self.host(self.streamed[wrong]))
    copy.record(slot.ready)


def test_a_gather_into_slots_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps that fetch experts into the slots, between prompts; forgetting to release them is found.

    Events alone do it: here not even reading the logits makes the host wait.
    """
    monkeypatch.setattr(NullDevice, "download", lambda self, src: np.zeros(src.shape))

    def hazards() -> list[str]:
        rig = Rig(LAYERS, frozenset(), 3, open_device(gathers=True), n_ubatch=16, n_ctx=300)
        seq = rig.cache.sequence()
        for _ in range(2):
            rig.runner.prefill(seq, [1] * 40)
            rig.runner.decode([seq], [1])
        assert rig.stream.gathers and rig.device.link_bytes == 2 * rig.pass_bytes
        return rig.device.hazards()

    assert hazards() == []
    monkeypatch.setattr(ExpertStream, "release_all", lambda self: None)
    assert hazards()


BROKEN = {
    "acquire": [no_wait_for_ready], "release": [no_record_of_free],
    "upload": [no_wait_for_free, ready_before_the_copy, half_a_copy, nothing_uploaded, another_tensor],
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "broken"), [(m, f) for m, fs in BROKEN.items() for f in fs], ids=lambda x: getattr(x, "__name__", x)
)
def test_a_broken_stream_is_found(
    method: str, broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(ExpertStream, method, broken)
    rig = small_rig()
    rig.runner.prefill(rig.cache.sequence(), [1] * 40)
    assert rig.device.hazards()


def test_late_uploads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of lookahead sees uploads that wait for the step before, which is no hazard."""
    rig = small_rig()
    acquire, upload = ExpertStream.acquire, ExpertStream.upload
    monkeypatch.setattr(ExpertStream, "upload", lambda self, name: None)
    monkeypatch.setattr(ExpertStream, "acquire", lambda self, step: (
        [upload(self, name) for name in step.experts.tensors], acquire(self, step)))  # fmt: skip
    rig.runner.prefill(rig.cache.sequence(), [1] * 40)
    assert rig.device.hazards() == [] and rig.unordered_lookahead(0)


# time


def flow(rig: Rig, n_tokens: int, flops: float) -> tuple[float, float, float]:
    """Seconds of copies, of compute, and of both queues together, for one pass."""
    device = rig.device
    device.info = open_device(10.0, flops).info
    rig.runner.prefill(rig.cache.sequence(), [1] * n_tokens)
    assert device.hazards() == []
    return device.busy_s("copy"), device.busy_s("compute"), device.elapsed_s


def ring(more_slots: int) -> Rig:
    return Rig([Layer(8, 160)] * 8, frozenset(), more_slots, open_device(), n_ubatch=16, n_ctx=128)


@settings(CHECKED, max_examples=25)
@given(exponent=st.floats(8, 14), more_slots=st.integers(3, 8), n_tokens=st.integers(1, 128))
def test_time_is_the_greater_of_copy_and_compute(exponent: float, more_slots: int, n_tokens: int) -> None:
    """Within 5 % and one layer's copy and compute, for like layers, when the slots hold two of them."""
    copy_s, compute_s, elapsed_s = flow(ring(more_slots), n_tokens, 10**exponent)
    assert elapsed_s <= 1.05 * max(copy_s, compute_s) + (copy_s + compute_s) / 8


def test_without_lookahead_it_is_more() -> None:
    """The slots of one layer only: a layer's copy runs beside attention alone, so the bound above is missed."""
    copy_s, compute_s, _ = flow(ring(3), 128, 1e12)
    balanced = 1e12 * compute_s / copy_s
    copy_s, compute_s, elapsed_s = flow(ring(0), 128, balanced)
    assert elapsed_s > 1.05 * max(copy_s, compute_s) + (copy_s + compute_s) / 8


# order


def per_ubatch(rig: Rig, seq: Sequence, n_tokens: int) -> list[list[tuple[str, tuple[str, ...]]]]:
    """Each micro-batch's ops with their weights in order; layer-major, an op belongs to the batch selected last."""
    rig.runner.prefill(seq, [1] * n_tokens)
    row_bytes = rig.runner.state.buffer.span[2]
    found: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
    current, staged, n_batches = -1, rig.runner.state.staged.buffer, rig.runner.state.staged.shape[1]
    for order in rig.device.orders:
        if order.name == "upload":
            current += n_batches == 1
        elif order.name == "copy" and n_batches > 1:
            rows = [first // row_bytes % n_batches for b, first, _ in order.reads if b == staged]
            current = rows[0] if rows else current
        elif order.queue == "compute" and order.name not in ("copy", "download"):
            found.setdefault(current, []).append((order.name, tuple(name for name, _ in order.weights)))
    return [found[u] for u in sorted(found)]


def test_both_schedules_run_each_micro_batch_alike() -> None:
    found: Iterator[Any] = (
        per_ubatch(rig, rig.cache.sequence(), 75)
        for schedule in ("layer", "ubatch")
        for rig in [Rig(LAYERS, frozenset(), 3, open_device(), n_ubatch=16, n_ctx=300, schedule=schedule)]
    )
    by_layer, by_ubatch = found
    assert len(by_layer) == 5 and by_layer == by_ubatch
    assert [name for name, _ in by_layer[0]].count("expert_glu") == 4
