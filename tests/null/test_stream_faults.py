"""What the stream does when device memory ends, on the null device: every point at which a slot can fail."""

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Device
from headrace.backends.null import NullDevice, NullQueue, NullTensor
from headrace.engine import open_engine
from headrace.errors import UserError
from models.tiny import Tiny, write
from null.programs import Layer, Rig

LEAST = 3
"""What one step of LAYERS needs."""
LAYERS = [Layer(4, 64), Layer(4, 64, fused=True), Layer(0, 64), Layer(4, 64), Layer(4, 32)]


class Scarce(NullDevice):
    """Refuses the n-th slot and all after it; notes when slots are freed and queues are waited for."""

    def __init__(self, n_slots: int) -> None:
        super().__init__(25.0, 1e14, 1 << 40)
        self.left, self.slot_bytes = n_slots, 0
        self.events: list[str] = []
        for queue in (self.compute, self.copy):
            queue.synchronize = self._noted(queue)  # type: ignore[method-assign]

    def _noted(self, queue: NullQueue) -> Any:
        def synchronize() -> None:
            self.events.append(queue.name)
            NullQueue.synchronize(queue)

        return synchronize

    def alloc(self, shape: tuple[int, ...], dtype: str) -> NullTensor:
        is_slot = shape == (self.slot_bytes,)
        if is_slot and not self.left:
            raise MemoryError("7 MiB could not be allocated")
        tensor = super().alloc(shape, dtype)
        if is_slot:
            self.left -= 1
            weakref.finalize(tensor, self.events.append, "freed")
        return tensor


def rig(n_slots: int, n_wanted: int) -> Rig:
    wanted = Rig(
        LAYERS, frozenset(), n_wanted - LEAST, NullDevice(25.0, 1e14, 1 << 40), n_ubatch=16, n_ctx=300, n_cpu_moe=9
    )
    device = Scarce(n_slots)
    device.slot_bytes = wanted.plan.slot_bytes
    return Rig(LAYERS, frozenset(), n_wanted - LEAST, device, n_ubatch=16, n_ctx=300, n_cpu_moe=9)


@pytest.mark.parametrize("n_wanted", [3, 6, 8])
def test_a_slot_that_fails_at_any_point(n_wanted: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two steps' worth is kept; else one step's, and uploads no longer run ahead; else it is refused."""
    for k in range(n_wanted + 1):
        caplog.clear()
        if k < LEAST:
            with pytest.raises(UserError, match=r"no memory for 3 slots of .* \(7 MiB could not .*-ncmoe"):
                rig(k, n_wanted)
            continue
        made = rig(k, n_wanted)
        device, n_kept = made.device, k if k == n_wanted or k >= 2 * LEAST else LEAST
        assert isinstance(device, Scarce) and made.stream.n_slots == n_kept
        assert [r.levelno for r in caplog.records] == [logging.WARNING] * (k < n_wanted)
        assert device.events == [] if k == n_wanted else ["copy", "compute"] + ["freed"] * (k - n_kept)
        seq = made.cache.sequence()
        for n in (40, 1):
            made.runner.prefill(seq, [1] * n)
        assert device.hazards() == [] and made.stream.n_slots == n_kept, "it stays so"
        if k < n_wanted:
            assert (f"{n_kept} of {n_wanted} slots" in caplog.text) and "7 MiB could not be" in caplog.text
            assert ("do not run ahead" in caplog.text) == (n_kept == LEAST)


def test_without_lookahead_each_upload_waits_for_the_step_before() -> None:
    made = rig(5, 8)
    made.runner.prefill(made.cache.sequence(), [1] * 40)
    assert made.stream.n_slots == LEAST
    made.plan = rig(8, 8).plan
    assert made.unordered_lookahead(0), "the layer after is not on its way"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("faults") / "m.gguf", Tiny("qwen3moe", "Q4_K_M", n_layer=5))


def test_memory_that_ends_at_any_allocation(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening is refused in one line, or it works with fewer slots; the device is closed if it was refused."""
    devices: list[NullDevice] = []

    def short_of_memory(at: int) -> type[NullDevice]:
        class Device(NullDevice):
            n = 0

            def alloc(self, shape: tuple[int, ...], dtype: str) -> NullTensor:
                self.n += 1
                if self.n == at:
                    raise MemoryError("null: no memory")
                return super().alloc(shape, dtype)

        return Device

    def opened(at: int) -> int:
        def open_device(*args: object, **options: object) -> Device:
            devices.append(short_of_memory(at)(25.0, 1e14, 1 << 40))
            return devices[-1]

        monkeypatch.setattr("headrace.engine.open_device", open_device)
        with open_engine(model, backend="null", n_ctx=128, n_cpu_moe=9) as engine:
            engine.logits([1, 2, 3])
            assert engine.device.hazards() == []
        return devices[-1].n

    n_refused = 0
    for at in range(1, opened(0) + 1):
        try:
            opened(at)
        except UserError as e:
            assert "no memory" in str(e) and "-ncmoe" in str(e)
            n_refused += 1
        assert devices[-1].closed
    assert 0 < n_refused < at


def test_memory_that_ends_on_a_long_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any allocation behind a prompt (workspace that grows) is one line; the engine goes on with a shorter one."""
    with open_engine(model, backend="null", n_ctx=512, n_ubatch=64, n_cpu_moe=9) as engine:
        record = NullDevice.record

        def growing(self: NullDevice, key: Any) -> Any:
            if engine.sequence.n_past + 200 > 300:
                raise MemoryError("null: no memory for the workspace of this batch")
            return record(self, key)

        list(engine.generate([1] * 200, n_predict=2))
        monkeypatch.setattr(NullDevice, "record", growing)
        monkeypatch.setattr(NullDevice, "replay", lambda self, key: False)
        with pytest.raises(UserError, match=r"no memory for the workspace of this batch; lower -c or -ub"):
            list(engine.generate([1] * 400, n_predict=2))
        assert engine.sequence.n_past == 200, "what was whole is kept"
        monkeypatch.undo()
        assert len(list(engine.generate([1] * 150, n_predict=2))) == 2
        assert engine.device.hazards() == []
