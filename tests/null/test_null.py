"""The null device itself: what it records, its clock, and that it finds hazards."""

import numpy as np
import pytest

from headrace.backends.null import NullDevice, open_device


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


def test_memory_is_finite() -> None:
    small = open_device(memory_bytes=100)
    small.alloc((60,), "u8")
    with pytest.raises(MemoryError):
        small.alloc((60,), "u8")
