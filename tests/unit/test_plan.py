"""Plans are pure: shapes and wishes in, placements and sizes out."""

import dataclasses

import pytest

from headrace.backends.base import DeviceInfo
from headrace.config import Config
from headrace.errors import UserError
from headrace.gguf import File, open_gguf
from headrace.models import load_program
from headrace.plan import Plan, make_plan
from models.tiny import Tiny, write

CPU = DeviceInfo("a cpu", "cpu", 1 << 34, 1 << 34, repack_types=frozenset({"Q4_K", "Q6_K"}))
GPU = DeviceInfo("a gpu", "gpu", 1 << 34, 1 << 34, link_gbps=25, copies_async=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    return open_gguf(write(tmp_path_factory.mktemp("plan") / "m.gguf", Tiny("qwen3moe", "Q4_K_M", n_layer=4)))


def plan(file: File, device: DeviceInfo, **wishes: object) -> Plan:
    return make_plan(load_program(file), file.tensors, device, Config.of(**wishes), "f32")


def test_every_tensor_has_one_place(file: File) -> None:
    for device in (CPU, GPU):
        assert set(plan(file, device).placements) == set(file.tensors)


def test_cpu_repacks_when_memory_allows_and_says_why(file: File) -> None:
    rich = plan(file, CPU)
    assert {p.layout for p in rich.placements.values() if p.tensor.endswith("exps.weight")} == {"interleaved"}
    assert rich.placements["token_embd.weight"].layout == "in_place", "its rows are read one by one"
    poor = plan(file, dataclasses.replace(CPU, free_bytes=4 << 20), n_ctx=256)
    assert {p.feed for p in poor.placements.values()} == {"mapped"} and "weights in place" in " ".join(poor.reasons)
    assert {p.feed for p in plan(file, CPU, repack="off").placements.values()} == {"mapped"}
    with pytest.raises(UserError, match="--repack on"):
        plan(file, dataclasses.replace(CPU, repack_types=frozenset()), repack="on")


def test_n_cpu_moe_streams_the_first_layers(file: File) -> None:
    for n in range(5):
        p = plan(file, GPU, n_cpu_moe=n)
        assert {name.split(".")[1] for name in p.streamed} == {str(i) for i in range(n)}


@pytest.mark.parametrize(("wish", "slots"), [(0, 3), (1, 3), (2, 3), (3, 3), (5, 5), (8, 8), (-1, 6)])
def test_slots(file: File, wish: int, slots: int) -> None:
    p = plan(file, GPU, prefetch_experts=wish, n_cpu_moe=4)
    assert p.n_slots == slots
    assert p.slot_bytes == max(file.tensors[name].n_bytes for name in p.streamed)


def test_without_asynchronous_copies_there_is_no_lookahead(file: File) -> None:
    assert plan(file, dataclasses.replace(GPU, copies_async=False), prefetch_experts=8, cpu_moe=True).n_slots == 3


def test_context_is_cut_to_memory_and_told(file: File) -> None:
    p = plan(file, dataclasses.replace(CPU, free_bytes=8 << 20))
    assert p.n_ctx < load_program(file).spec.n_ctx_train or p.cache_bytes <= 2 << 20
    assert plan(file, CPU, n_ctx=77).n_ctx == 77


def test_what_cannot_fit_is_refused_before_it_is_allocated(file: File) -> None:
    for wish in ({"n_ctx": 10**12}, {"n_seq_max": 10**6}):
        with pytest.raises(UserError, match="GiB are needed"):
            plan(file, CPU, **wish)
    with pytest.raises(UserError, match="regrouped"):
        plan(file, dataclasses.replace(CPU, free_bytes=4 << 20), n_ctx=256, repack="on")


def test_windows_are_whole_micro_batches(file: File) -> None:
    p = plan(file, GPU, n_ubatch=100, n_ctx=450, n_cpu_moe=4)
    assert p.schedule == "layer" and p.n_window == 500, "a prompt that fills the context is one window"
    assert plan(file, GPU, n_ubatch=100, n_ctx=450, schedule="ubatch").n_window == 100


def test_gpu_layers_on_a_cpu_are_refused(file: File) -> None:
    with pytest.raises(UserError, match="-ngl"):
        plan(file, CPU, n_gpu_layers=10)


def test_it_prints_itself(file: File) -> None:
    text = "\n".join(plan(file, GPU, n_cpu_moe=4).lines())
    assert "streamed" in text and "layer-major" in text


def test_the_cpus_share_of_a_decode_step(file: File) -> None:
    """Ranks are shared as the speeds are, or as the user says; the plan states which and why."""
    fast = dataclasses.replace(GPU, link_gbps=50, cpu_gbps=100)
    assert plan(file, fast).cpu_rank is None and plan(file, fast, expert_decode="cpu", n_cpu_moe=4).cpu_rank == 0
    p = plan(file, fast, expert_decode="split", n_cpu_moe=4)
    assert p.cpu_rank == 1 and "1 of 3 ranks over the link (50 GB/s)" in " ".join(p.reasons)
    assert "routed ranks from 1 on" in "\n".join(p.lines())
    assert plan(file, fast, expert_decode="split", split_rank=2, n_cpu_moe=4).cpu_rank == 2
    unknown = plan(file, GPU, expert_decode="split", n_cpu_moe=4)
    assert unknown.cpu_rank == 2 and "unknown" in " ".join(unknown.reasons)
    assert plan(file, fast, expert_decode="split", n_cpu_moe=0).cpu_rank is None, "nothing is on the host"
    with pytest.raises(UserError, match="--split-rank 4"):
        plan(file, fast, expert_decode="split", split_rank=4, n_cpu_moe=4)
    with pytest.raises(UserError, match="--expert-decode cpu"):
        plan(file, CPU, expert_decode="cpu")
