"""The order of copies and computations, as pure data: no device takes part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.program import ExpertGroup, Program, Step
from headrace.schedule import Acquire, Compute, Release, Upload, schedule, segments, split


def program(pattern: str) -> Program:
    """One step per letter: "." has no experts, "3" three expert tensors, "2" a fused pair."""
    groups = {
        ".": lambda i: None,
        "3": lambda i: ExpertGroup(f"{i}.gate", f"{i}.up", f"{i}.down"),
        "2": lambda i: ExpertGroup(f"{i}.gate_up", None, f"{i}.down"),
    }
    return Program(None, tuple(Step(str(i), None, None, (), groups[c](i)) for i, c in enumerate(pattern)))


def test_without_streaming_a_pass_is_one_computation_per_micro_batch() -> None:
    assert schedule(program(".3.3."), set(), 0, 2) == [Compute(0, 5, 0), Compute(0, 5, 1)]


def test_layer_major_uploads_each_tensor_once_for_all_micro_batches() -> None:
    p = program(".2.")
    assert schedule(p, set(p.expert_tensors), 2, 2) == [
        Upload("1.gate_up"), Upload("1.down"), Compute(0, 1, 0), Compute(0, 1, 1),
        Acquire(1), Compute(1, 2, 0), Compute(1, 2, 1), Release(1), Compute(2, 3, 0), Compute(2, 3, 1),
    ]  # fmt: skip


def test_more_slots_let_uploads_run_further_ahead() -> None:
    p = program("2.2.2")
    orders = schedule(p, set(p.expert_tensors), 4, 1)
    assert orders.index(Upload("2.gate_up")) < orders.index(Compute(0, 1, 0)) < orders.index(Upload("4.gate_up"))
    assert orders.index(Upload("4.gate_up")) < orders.index(Compute(2, 3, 0))


@given(st.text(".23", min_size=1, max_size=12), st.integers(0, 9), st.integers(1, 3), st.data())
def test_orders_keep_the_contract(pattern: str, extra: int, n_ubatch: int, data: st.DataObject) -> None:
    p = program(pattern)
    streamed = set(data.draw(st.sets(st.sampled_from(p.expert_tensors)))) if p.expert_tensors else set()
    per_step = [[n for n in s.experts.tensors if n in streamed] if s.experts else [] for s in p.steps]
    n_slots = max(map(len, per_step)) + extra
    orders = schedule(p, streamed, n_slots, n_ubatch)

    names = [n for names in per_step for n in names]
    assert [o.tensor for o in orders if isinstance(o, Upload)] == names, "every streamed tensor once, in order"
    for u in range(n_ubatch):
        ran = [i for o in orders if isinstance(o, Compute) and o.ubatch == u for i in range(o.first, o.stop)]
        assert ran == list(range(len(p.steps))), "every micro-batch passes every step once, in order"

    tenant: dict[int, str] = {}
    for order in orders:
        if isinstance(order, Upload):
            slot = names.index(order.tensor) % n_slots
            assert slot not in tenant, "a slot is refilled only after its release"
            tenant[slot] = order.tensor
        elif isinstance(order, Acquire):
            assert set(per_step[order.step]) <= set(tenant.values()), (
                "experts were on their way before they are awaited"
            )
        elif isinstance(order, Release):
            tenant = {slot: n for slot, n in tenant.items() if n not in per_step[order.step]}
    assert not tenant, "everything is released at the end"


def test_segments_isolate_the_named_steps() -> None:
    assert list(segments(5, [1, 2])) == [(0, 1), (1, 2), (2, 3), (3, 5)]
    assert list(segments(2, [0, 1])) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("n", [1, 5, 8, 9, 33])
def test_split_covers_the_prompt_in_order(n: int) -> None:
    windows = split(n, 16, 4)
    assert [t for w in windows for a, b in w for t in range(a, b)] == list(range(n))
    assert all(b - a <= 4 for w in windows for a, b in w)
    assert all(w[-1][1] - w[0][0] <= 16 for w in windows)


def test_too_few_slots_is_an_invariant() -> None:
    p = program("3")
    with pytest.raises(AssertionError):
        schedule(p, set(p.expert_tensors), 2, 1)
