"""The null device itself: what it records, its clock, and that it finds hazards."""

import numpy as np
import pytest

from headrace.backends.null import NullDevice, open_device
from headrace.gguf import TensorInfo
from headrace.quants import TYPES


@pytest.fixture
def device() -> NullDevice:
    return open_device(link_gbps=1.0, flops=1e9)


HOST = np.zeros(1000, np.uint8)


def test_views_are_byte_ranges(device: NullDevice) -> None:
    t = device.alloc((4, 6, 8), "f32")
    assert t[1:3].span[1:] == (192, 576)
    assert t[:, 2:4].span[1:] == (64, 3 * 192 + 128)
    assert t.reshape(24, 8)[5].span[1:] == (160, 192)
    with pytest.raises(AssertionError):
        t[:, :, :4].reshape(96)


def test_unordered_copy_and_read_is_found(device: NullDevice) -> None:
    slot, other = device.alloc((1000,), "u8"), device.alloc((1000,), "u8")
    device.copy.copy(slot, HOST)
    device.ops.add(other, slot)
    assert device.hazards() == ["compute add #0 reads buffer 1 [0:1000] beside copy copy #0"]


def test_an_event_orders_them(device: NullDevice) -> None:
    slot, other, ready, free = device.alloc((1000,), "u8"), device.alloc((1000,), "u8"), device.event(), device.event()
    device.copy.copy(slot, HOST)
    device.copy.record(ready)
    device.compute.wait(ready)
    device.ops.add(other, slot)
    assert not device.hazards()
    device.copy.copy(slot[500:], HOST[:500])  # overwrites what may still be read
    assert len(device.hazards()) == 1
    device.compute.record(free)
    device.copy.wait(free)
    device.copy.copy(slot, HOST)
    assert len(device.hazards()) == 1, "the ordered copy adds none"


def test_an_event_recorded_too_early_does_not(device: NullDevice) -> None:
    slot, other, ready = device.alloc((1000,), "u8"), device.alloc((1000,), "u8"), device.event()
    device.copy.record(ready)
    device.copy.copy(slot, HOST)
    device.compute.wait(ready)
    device.ops.add(other, slot)
    assert device.hazards()


def test_order_passes_on_through_a_third_order(device: NullDevice) -> None:
    slot, x, a, b = device.alloc((1000,), "u8"), device.alloc((8,), "u8"), device.event(), device.event()
    device.ops.add(slot, x)
    device.compute.record(a)
    device.copy.wait(a)
    device.copy.copy(x, HOST[:8])
    device.copy.record(b)
    device.compute.wait(b)
    device.ops.add(x, slot)
    device.copy.copy(slot, HOST)
    assert [h.split(" beside ")[1] for h in device.hazards()] == ["compute add #1"], (
        "only the later read is not ordered"
    )


def test_virtual_clock(device: NullDevice) -> None:
    slot, ready = device.alloc((1000,), "u8"), device.event()
    device.copy.copy(slot, HOST)
    assert device.copy.time_s == pytest.approx(1e-6) and device.compute.time_s == 0
    device.copy.record(ready)
    device.compute.wait(ready)
    assert device.compute.time_s == device.elapsed_s == pytest.approx(1e-6)


def test_replay_repeats_the_orders(device: NullDevice) -> None:
    x = device.alloc((8,), "f32")
    assert not device.replay("key")
    with device.record("key"):
        device.ops.add(x, x)
    assert device.replay("key") and [o.name for o in device.orders] == ["add", "add"]


def f32_weight(name: str, n: int) -> TensorInfo:
    return TensorInfo(name, TYPES["F32"], (n,), 0, 0, 4 * n)


def test_a_slot_must_hold_the_tensor_that_is_read(device: NullDevice) -> None:
    slot, x, a, b = device.alloc((400,), "u8"), device.alloc((2, 100), "f32"), HOST[:400], HOST[400:800]
    weights = [device.view(f32_weight(name, 100), slot) for name in "ab"]
    for weight, raw in zip(weights, (a, b)):
        device.gather_view(weight.info, slot, raw)
    device.ops.add_bias(x, weights[0])
    assert device.hazards() == ["add_bias #0 reads a from buffer 1, where nothing was copied"]
    device.compute.copy(slot, a)
    device.ops.add_bias(x, weights[0])
    assert len(device.hazards()) == 1
    device.ops.add_bias(x, bias=weights[1])
    assert device.hazards()[1:] == ["add_bias #3 reads b from buffer 1, where a lies"]


def test_temporaries_are_written_first_and_end_with_their_step(device: NullDevice) -> None:
    arena, x = device.arena(10000), device.alloc((3, 8), "f32")
    t = arena.take((3, 16), "f32")
    device.ops.glu(t[:, :8], x, x, "silu")
    device.ops.add(x, t[:, :8])
    assert device.hazards() == []
    device.ops.add(x, t[:, 8:])
    assert len(device.hazards()) == 1 and "was not written" in device.hazards()[0]
    arena.reset()
    assert arena.take((3, 16), "f32").span[1:] == t.span[1:]
    device.ops.add(x, t[:, :8])
    assert len(device.hazards()) == 2 and "after it was freed" in device.hazards()[1]
    device.close()
    device.ops.add(x, x)
    assert "after it was freed" in device.hazards()[2]


def test_seconds_come_from_shapes(device: NullDevice) -> None:
    x, out = device.alloc((5, 20), "f32"), device.alloc((5, 30), "f32")
    weight = device.load(TensorInfo("w", TYPES["F32"], (30, 20), 0, 0, 2400), HOST)
    device.ops.linear(out, x, weight)
    assert device.busy_s("compute") == pytest.approx(2 * 5 * 20 * 30 / 1e9)


def test_memory_is_finite() -> None:
    small = open_device(memory_bytes=100)
    small.alloc((60,), "u8")
    with pytest.raises(MemoryError):
        small.alloc((60,), "u8")
