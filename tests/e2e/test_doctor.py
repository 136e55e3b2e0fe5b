"""`headrace doctor`: what it says without a GPU, and what it makes of the facts of machines that are too slow."""

import copy
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.backends.base import HostEvent
from headrace.backends.cuda import nvml
from headrace.commands import doctor, doctor_facts, main
from headrace.commands.doctor_facts import disk_gbps, read_gbps
from headrace.synth import find_shape, synthesize
from unit.fake_driver import FakeDriver

GIB = 2**30
HAS_TORCH = importlib.util.find_spec("torch") is not None

GPU = {
    "name": "NVIDIA GeForce RTX 3060", "capability": "8.6", "memory_bytes": 12 * GIB, "free_bytes": 11 * GIB,
    "driver": "580.95", "cuda": "13.0", "dtype": "bf16", "numa_node": None,
    "pcie": {"gen": 4, "width": 16, "max_gen": 4, "max_width": 16, "card_gen": 4, "gbps": 31.5, "max_gbps": 31.5},
    "registered_gbps": 26.0, "staged_gbps": 18.0, "pageable_gbps": 6.5, "gather_gbps": 24.0, "why_not_registered": "",
    "memory_gbps": 330.0, "matmul_tflops": 50.0, "rung": "registered",
}  # fmt: skip
REPORT: dict[str, Any] = {
    "software": {"headrace": "1", "python": "3.12", "torch": "2.11", "triton": None},
    "host": {
        "cpu": "AMD Ryzen", "cores": 16, "threads": 8, "isa": "avx2", "ram_bytes": 64 * GIB,
        "available_bytes": 60 * GIB, "limit_bytes": None, "lockable_bytes": 54 * GIB,
        "memlock_bytes": 8 << 20, "read_gbps": 45.0,
    },
    "gpus": [GPU], "no_gpu": "",
}  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """The report with one fact replaced, named like "gpu.pcie.gen"."""
    report = copy.deepcopy(REPORT)
    first, *rest, last = path.split(".")
    place = report["gpus"][0] if first == "gpu" else report[first]
    for key in rest:
        place = place[key]
    place[last] = value
    return report


def test_a_good_machine_has_nothing_to_change() -> None:
    assert list(doctor.findings(REPORT)) == []
    text = "\n".join(doctor.lines(REPORT | {"findings": []}))
    assert "registered 26.0, staged 18.0, pageable 6.5; kernels read registered memory in place at 24.0" in text
    assert "4.0 x16 under load (32 GB/s)" in text and "nothing limits" in text and "triton" not in text


@pytest.mark.parametrize(("path", "value", "words"), [
    ("gpu.pcie.gen", 3, ["PCIe 3.0 under load where 4.0 is possible", "BIOS"]),
    ("gpu.pcie.width", 8, ["x8 wide where x16 is possible", "slot"]),
    ("gpu.pcie.card_gen", 5, ["board gives PCIe 4.0, the card could do 5.0"]),
    ("gpu.registered_gbps", 20.0, ["brings 20.0 GB/s of the 32", "IOMMU"]),
    ("gpu.capability", "7.5", ["no tensor-core instructions below 8.0"]),
    ("gpu.registered_gbps", 0.0, ["cannot be page-locked", "ext4"]),
    ("host.read_gbps", 20.0, ["RAM reads at 20.0 GB/s, less than the link", "memory channels"]),
    ("host.threads", 2, ["2 of 16 processors", "CPU limit"]),
    ("host.limit_bytes", 8 * GIB, ["8.0 of 64.0 GiB of RAM", "memory limit"]),
])  # fmt: skip
def test_each_limit_is_told_with_its_remedy(path: str, value: Any, words: list[str]) -> None:
    (text,) = doctor.findings(changed(path, value))
    assert all(word in text for word in words) and "\n" not in text


def test_a_node_is_named_and_a_large_model_is_told() -> None:
    report = changed("gpu.registered_gbps", 20.0)
    report["gpus"][0]["numa_node"] = 1
    assert "numactl --cpunodebind=1 --membind=1" in next(doctor.findings(report))
    model = {"path": "m", "bytes": 80 * GIB, "expert_bytes": 70 * GIB, "disk_gbps": 3.5}
    (text,) = doctor.findings(REPORT | {"model": model})
    assert "80.0 GiB and 60.0 of RAM" in text and "3.50 GB/s" in text
    assert "model       80.0 GiB, of which experts 70.0, disk 3.50 GB/s" in list(
        doctor.lines(REPORT | {"model": model, "findings": []})
    )


# this machine


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine without one."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvml, "_lib", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_tells_of_the_processor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["software", "cpu", "ram", "locking", "gpu"]
    assert out.count("pip install 'headrace[cuda]'") == 1


@pytest.mark.usefixtures("no_gpu")
def test_what_was_asked_for_must_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--backend", "cuda", "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"] == [] and report["no_gpu"] and report["host"]["read_gbps"] > 0
    assert main(["doctor", "-m", str(tmp_path / "absent.gguf")]) == 2
    assert "absent.gguf" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_a_model_is_weighed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synthesize(path, find_shape("tiny-qwen3moe", n_layer=1))
    before = sorted(tmp_path.iterdir())
    assert main(["doctor", "-m", str(path), "--backend", "cpu", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["bytes"] == path.stat().st_size > report["model"]["expert_bytes"] > 0
    assert "gpus" not in report and sorted(p for p in tmp_path.iterdir() if p.suffix) == before


def test_rates_of_memory_and_disk(tmp_path: Path) -> None:
    assert read_gbps(2, 1 << 22, 0.02) > 0.1
    path = tmp_path / "f"
    path.write_bytes(bytes(3 << 20))
    assert disk_gbps(path) is None  # less than a block
    found = disk_gbps(path, 0.2, block=1 << 20)
    assert found is None or found > 0


@pytest.mark.parametrize(("modules", "driver", "words"), [
    ({"torch": None}, "", "none; one needs its driver, and pip install 'headrace[cuda]'"),
    ({"torch": None}, "580.1", "driver 580.1 is here, torch is not: pip install"),
    ({"torch": (None, False)}, "580.1", "built without CUDA"),
    ({"torch": ("13.0", False)}, "", "no NVIDIA driver answers"),
    ({"torch": ("13.0", False)}, "470.1", "driver 470.1 answers, but torch finds no GPU: it may be too old"),
    ({"torch": ("13.0", True)}, "580.1", "the error itself"),
])  # fmt: skip
def test_what_is_missing_for_a_gpu(
    modules: dict[str, Any], driver: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, made in modules.items():
        cuda = made and SimpleNamespace(is_available=lambda made=made: made[1])
        fake = made and SimpleNamespace(__version__="2.11", version=SimpleNamespace(cuda=made[0]), cuda=cuda)
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(nvml, "driver_version", lambda: driver)
    assert words in doctor_facts.why_no_gpu("the error itself")


# GPUs that are made up


LINK = {"CurrPcieLinkGeneration": 3, "CurrPcieLinkWidth": 8, "MaxPcieLinkGeneration": 4, "MaxPcieLinkWidth": 16}


class FakeNvml:
    """A library whose calls fill in numbers, and one that this version does not have."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                return int(args[0] != b"00000000:65:00.0")
            if (key := name.removeprefix("nvmlDeviceGet")) not in LINK:
                return 3
            args[1]._obj.value = LINK[key]
            return 0

        return call


def test_the_link_as_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_lib", FakeNvml)
    link = nvml.pcie_link("00000000:65:00.0")
    assert link == nvml.PcieLink(gen=3, width=8, max_gen=4, max_width=16, card_gen=0)
    assert link.gbps == pytest.approx(7.88) and link.max_gbps == pytest.approx(31.504)
    assert nvml.pcie_link("00000000:66:00.0") is None and nvml.driver_version() == ""


class FakeDevice:
    """Device memory that is the host's, and a stream of the fake driver."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.copy = SimpleNamespace(
            stream=SimpleNamespace(cuda_stream=1), synchronize=driver.finish, record=lambda event: event.record()
        )

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Any:
        memory = np.zeros(shape, np.uint8)
        return SimpleNamespace(data_ptr=lambda: memory.ctypes.data, memory=memory)

    timer = staticmethod(HostEvent)

    def between_s(self, start: HostEvent, stop: HostEvent) -> float:
        self.driver.finish()
        return stop.time_s - start.time_s


@pytest.mark.skipif(not HAS_TORCH or not sys.platform.startswith("linux"), reason="needs torch, and Linux")
@pytest.mark.parametrize("refuses", [False, True])
def test_every_way_over_the_link_is_measured_and_released(refuses: bool) -> None:
    from headrace.backends.cuda import probe

    driver = FakeDriver(refuse=lambda n: refuses and n >= 0)
    with probe.sample(n_bytes=3 << 20) as source:
        found = probe.link_rates(FakeDevice(driver), driver, source, 0.01, gather=False, n_readers=2)
    assert (found.registered_gbps > 0) is not refuses and found.staged_gbps > 0 and found.pageable_gbps > 0
    assert ("OUT_OF_MEMORY" in found.why_not_registered) is refuses and found.gather_gbps == 0
    assert not driver.locked and not driver.n_bad_unlocks
    driver.close()


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_speeds_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from headrace.backends.cuda import probe

    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    rates, calls = probe.Rates(link_gbps=25.5, matmul_tflops=50), []

    def measure(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return rates, None

    monkeypatch.setattr(probe, "measure", measure)
    device = SimpleNamespace(info=SimpleNamespace(name="card"), compute=SimpleNamespace(stream=None))
    assert probe.measured_rates(device) == probe.Rates() and not calls
    device.compute.stream = 1
    assert probe.measured_rates(device) == probe.Rates() and not list(tmp_path.iterdir())
    assert [probe.measured_rates(device) for _ in range(2)] == [rates, rates] and len(calls) == 2
    device.info.name = "another card"
    probe.measured_rates(device)
    assert len(calls) == 3
