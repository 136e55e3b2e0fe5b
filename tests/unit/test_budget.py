"""How a plan fits a GPU's memory around what the user fixed: cards of 8 to 141 GiB and a real model's shape."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.base import DeviceInfo
from headrace.backends.cuda.footprint import MEMORY, scratch_bytes
from headrace.backends.cuda.tiles import Tiles
from headrace.commands.plan_cards import CARDS, rates
from headrace.config import Config
from headrace.errors import UserError
from headrace.gguf import TensorInfo, open_gguf
from headrace.models import load_program
from headrace.plan import Plan, make_plan
from headrace.program import Program
from headrace.synth import find_shape, synthesize

GIB = 2**30
SCRATCH = partial(scratch_bytes, tiles=Tiles.of((8, 6)))


@cache
def shape(name: str = "Qwen3.6-35B-A3B") -> tuple[Program, Mapping[str, TensorInfo]]:
    """A real model as names and sizes alone."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        synthesize(path, find_shape(name), sparse=True)
        assert path.stat().st_blocks * 512 < 64 << 20 < path.stat().st_size
        file = open_gguf(path)
        return load_program(file), file.tensors


def plan(gib: float, /, **wishes: object) -> Plan:
    n_bytes = int(gib * GIB)
    device = DeviceInfo("a card", "gpu", n_bytes, n_bytes - MEMORY["context_bytes"], copies_async=True, **MEMORY)
    more = {name: wishes.pop(name) for name in ("rates", "lockable_bytes") if name in wishes}
    return make_plan(*shape(), device, Config.of(**wishes), "bf16", scratch=SCRATCH, **more)


def n_streamed(p: Plan) -> int:
    return len({name.split(".")[1] for name in p.streamed})


@pytest.mark.parametrize(
    ("gib", "n_host", "n_ubatch"), [(8, 37, 16384), (12, 29, 16384), (24, 0, 16384), (141, 0, 16384)]
)
def test_cards(gib: int, n_host: int, n_ubatch: int) -> None:
    p = plan(gib)
    assert n_streamed(p) == pytest.approx(n_host, abs=2) and p.n_ubatch == n_ubatch and p.n_window >= 16384
    assert p.device_bytes <= p.budget_bytes
    assert n_streamed(plan(gib, n_cpu_moe=n_streamed(p))) == n_streamed(p), "auto equals an -ncmoe"


def test_a_small_card_gives_up_speed_before_the_window() -> None:
    p = plan(12, cpu_moe=True, device_memory_limit="6GiB")
    assert n_streamed(p) == 40 and p.n_window >= 16384 and p.n_ubatch >= 1024
    assert "memory is short" in " ".join(p.reasons)


def test_what_cannot_fit_is_refused_with_numbers_and_remedies() -> None:
    with pytest.raises(UserError, match=r"GiB are needed .*-c 32768.*-ub 16384") as e:
        plan(4, n_ctx=32768, n_ubatch=16384)
    assert "for weights" in str(e.value)
    with pytest.raises(UserError, match="-cmoe"):
        plan(12, n_cpu_moe=0)
    with pytest.raises(UserError, match=r"--device-memory-limit \(2GiB\)"):
        plan(12, device_memory_limit="2GiB")


@settings(deadline=None, max_examples=40)
@given(
    gib=st.floats(3, 60), more=st.floats(0, 20), ub=st.sampled_from([0, 0, 100, 512, 4096]),
    ctx=st.sampled_from([0, 0, 1000, 65536]), slots=st.sampled_from([-1, 0, 1, 8]),
    ncmoe=st.sampled_from([-1, -1, 0, 20]),
)  # fmt: skip
def test_never_over_budget_never_against_the_user_never_worse_with_more(
    gib: float, more: float, ub: int, ctx: int, slots: int, ncmoe: int
) -> None:
    wishes = {"n_ubatch": ub, "n_ctx": ctx, "prefetch_experts": slots, "n_cpu_moe": ncmoe}
    try:
        p = plan(gib, **wishes)
    except UserError:
        return
    assert p.device_bytes <= p.budget_bytes
    assert not ctx or p.n_ctx == ctx
    assert not ub or p.n_ubatch == min(ub, p.n_ctx)
    assert ncmoe < 0 or n_streamed(p) == ncmoe
    assert p.n_window % p.n_ubatch == 0
    richer = plan(gib + more, **wishes)
    assert n_streamed(richer) <= n_streamed(p), "more memory, more streaming"


def test_a_device_limit_counts_the_context() -> None:
    assert plan(141, device_memory_limit="12GiB").budget_bytes == plan(12).budget_bytes


def test_the_expert_cache_is_budgeted() -> None:
    """A size comes before resident experts, auto takes what is left over, nothing without experts on the host."""
    plain, kept = plan(12), plan(12, expert_cache="2GiB")
    assert 0 < kept.line_bytes <= 2 * GIB and kept.n_lines > 5 and plain.n_lines == 0
    assert kept.device_bytes <= kept.budget_bytes and n_streamed(kept) > n_streamed(plain)
    most = plan(141, n_cpu_moe=40, expert_cache="auto")
    assert most.n_lines == 256 and most.device_bytes <= most.budget_bytes
    assert plan(141, expert_cache="auto").n_lines == 0
    some = plan(16, n_cpu_moe=40, expert_cache="auto")
    assert 0 < some.n_lines < 256 and some.spare_bytes < some.line_bytes / some.n_lines
    assert any("the CPU computes" in r for r in plan(16, expert_cache="1G", expert_decode="cpu").reasons)
    with pytest.raises(UserError, match=r"--expert-cache 50GiB|expert cache"):
        plan(12, expert_cache="50GiB", n_cpu_moe=40)


def test_overrides_win_over_ncmoe_and_the_first_one_counts() -> None:
    p = plan(24, n_cpu_moe=2, override_tensor=r"blk\.0\.ffn_up_exps=GPU,blk\.(0|39)\.ffn_.*_exps=CPU")
    places = {name.split(".", 1)[1].removesuffix(".weight") for name in p.streamed}
    assert {x for x in places if x.startswith("0.")} == {"0.ffn_gate_exps", "0.ffn_down_exps"}
    assert {x.split(".")[0] for x in places} == {"0", "1", "39"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ffn_(=CPU", "no regular expression"), ("ffn=TPU", "'TPU' is no device"), ("ffn", "REGEX=DEVICE"),
        ("blk.99.=CPU", "no tensor has such a name"), ("attn_q=CPU", "is no expert tensor"),
    ],
)  # fmt: skip
def test_bad_overrides(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan(24, override_tensor=text)


def test_gpu_layers_are_the_last_ones() -> None:
    assert n_streamed(plan(141, n_gpu_layers=30)) == 10
    assert n_streamed(plan(141, n_gpu_layers=30, n_cpu_moe=15)) == 15
    assert n_streamed(plan(141, n_gpu_layers=99)) == 0


def test_host_memory_has_a_budget() -> None:
    assert plan(8, lockable_bytes=64 * GIB).lockable_bytes == plan(8).n_bytes("stream")
    part = plan(8, lockable_bytes=64 * GIB, host_memory_limit="4GiB")
    assert part.lock_bytes == 4 * GIB and "--host-memory-limit 4GiB" in " ".join(part.reasons)
    assert plan(8, lockable_bytes=64 * GIB, register_host="off").lock_bytes == 0
    with pytest.raises(UserError, match="--register-host on"):
        plan(8, lockable_bytes=GIB, register_host="on")


def test_predictions_follow_the_link_until_compute_limits() -> None:
    card = CARDS["rtx 4070"]
    slow, fast = (plan(12, cpu_moe=True, rates=rates(card, gbps)) for gbps in (12.5, 55.0))
    for n in (2048, 16384):
        a, b = slow.predict(n), fast.predict(n)
        assert a and b and a.upload_s > 4 * b.upload_s and a.compute_s == b.compute_s and a.seconds >= b.seconds
    assert slow.predict(2048).upload_s == pytest.approx(slow.n_bytes("stream") / 12.5e9)
    half = plan(12, cpu_moe=True, rates=rates(card, 55.0), host_memory_limit="9GiB")
    assert half.predict(2048).upload_s > fast.predict(2048).upload_s, "what is not page-locked is slower"
    text = "\n".join(fast.lines())
    assert "prompt      16384 tokens" in text and "decode      at most" in text
