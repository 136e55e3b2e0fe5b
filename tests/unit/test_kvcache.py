"""Pages and recurrent states of sequences: sharing, trimming, snapshots, seen in what the caches hold."""

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends import open_device
from headrace.errors import UserError
from headrace.kvcache import N_SNAPSHOT, PAGE, KVCache, Sequence, cache_bytes
from headrace.spec import AttentionSpec, DeltaNetSpec, FfnSpec, ModelSpec, RopeSpec

ATTENTION = AttentionSpec(2, 1, 4, RopeSpec(4), 0.5, 1e-6)
DELTA_NET = DeltaNetSpec(1, 2, 4, 4, 4, 1e-6)
MOVES = ["new", "write", "write", "write", "trim", "fork", "snapshot", "interrupt", "release"]
MOVE = st.tuples(st.sampled_from(MOVES), st.integers(0, 99), st.integers(1, 150))


def cache(recurrent: bool = False, n_ctx: int = 4 * PAGE, n_seq_max: int = 2) -> KVCache:
    layers = [(ATTENTION, None), (None, DELTA_NET)] if recurrent else [(ATTENTION, None)]
    spec = ModelSpec(
        "x", "x", len(layers), 8, 10, 100, 1e-6, tuple(a for a, _ in layers), tuple(d for _, d in layers),
        (FfnSpec(8, 1e-6),) * len(layers),
    )  # fmt: skip
    made = KVCache(open_device("reference"), spec, n_ctx, n_seq_max, "f32", "f32")
    assert cache_bytes(spec, n_ctx, n_seq_max, "f32", "f32") == sum(
        x.nbytes for layer in made.layers.values() for x in vars(layer).values()
    ), "the plan counts what is allocated"
    return made


def write(c: KVCache, seq: Sequence, tokens: list[int]) -> None:
    """Appends tokens, leaving each one's number in its cache row and in the recurrent state."""
    c.reserve(seq, len(tokens))
    rows = c.rows(seq, seq.n_past, seq.n_past + len(tokens))
    c.layers[0].k[rows] = np.array(tokens, np.float32)[:, None, None]
    if 1 in c.layers:
        c.layers[1].s[seq.state_slot] = tokens[-1]
    seq.tokens += tokens


def read(c: KVCache, seq: Sequence) -> list[int]:
    return c.layers[0].k[c.rows(seq, 0, seq.n_past), 0, 0].astype(int).tolist()


def test_positions_lie_where_the_block_table_says() -> None:
    c = cache()
    a, b = c.sequence(), c.sequence()
    for i in range(3):
        write(c, a, [i] * 50)
        write(c, b, [100 + i] * 10)
    table = c.block_table([a, b])
    for s, seq in enumerate((a, b)):
        p = np.arange(seq.n_past)
        assert (table[s, p // PAGE] * PAGE + p % PAGE == c.rows(seq, 0, seq.n_past)).all()
        assert read(c, seq) == seq.tokens


def test_a_fork_shares_whole_pages_and_owns_its_end() -> None:
    c = cache()
    a = c.sequence()
    write(c, a, list(range(PAGE + 10)))
    b = c.fork(a)
    assert b.pages[0] == a.pages[0] and b.pages[1] != a.pages[1]
    write(c, a, [777])
    write(c, b, [888])
    assert read(c, a)[-1] == 777 and read(c, b)[-1] == 888 and read(c, b)[:-1] == list(range(PAGE + 10))
    c.release(a)
    assert read(c, b)[:-1] == list(range(PAGE + 10)), "shared pages outlive the one that made them"


def test_trimming_into_a_shared_page_copies_it() -> None:
    c = cache()
    a = c.sequence()
    write(c, a, list(range(2 * PAGE)))
    b = c.fork(a)
    c.trim(b, PAGE + 5)
    write(c, b, [999])
    assert read(c, a) == list(range(2 * PAGE)) and read(c, b)[-2:] == [PAGE + 4, 999]


def test_everything_comes_back() -> None:
    c = cache(recurrent=True)
    n_free = len(c.free_pages), len(c.free_slots), len(c.free_snapshots)
    for _ in range(20):
        a = c.sequence()
        write(c, a, [1] * 70)
        c.snapshot(a)
        b = c.fork(a)
        write(c, b, [2] * 10)
        c.snapshot(b)
        c.release(a)
        c.release(b)
    assert (len(c.free_pages), len(c.free_slots), len(c.free_snapshots)) == n_free


def test_a_recurrent_sequence_falls_back_to_a_snapshot() -> None:
    c = cache(recurrent=True)
    a = c.sequence()
    for token in (1, 2, 3):
        write(c, a, [token] * 10)
        c.snapshot(a)
    write(c, a, [4] * 5)
    assert len(a.snapshots) == N_SNAPSHOT
    assert c.trim(a, 34) == 30 and (c.layers[1].s[a.state_slot] == 3).all()
    assert c.trim(a, 25) == 20 and (c.layers[1].s[a.state_slot] == 2).all()
    assert c.trim(a, 15) == 0 and not a.snapshots and not a.pages


def test_rewind_restores_an_interrupted_state() -> None:
    c = cache(recurrent=True)
    a = c.sequence()
    write(c, a, [1] * 10)
    c.snapshot(a)
    c.layers[1].s[a.state_slot] = 99  # half a ubatch
    c.rewind(a)
    assert a.n_past == 10 and (c.layers[1].s[a.state_slot] == 1).all()


def test_a_copy_of_states_that_is_interrupted_loses_no_row_and_leaves_no_half_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cache(recurrent=True)
    a = c.sequence()
    n_rows = len(c.free_snapshots)
    write(c, a, [1] * 10)
    c.snapshot(a)
    write(c, a, [2] * 10)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(c, "_copy_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            c.snapshot(a)
        assert list(a.snapshots) == [10] and len(c.free_snapshots) == n_rows - 1
        with pytest.raises(KeyboardInterrupt):
            c.trim(a, 15)
        assert a.n_past == 0 and len(c.free_snapshots) == n_rows
    write(c, a, [3] * 10)
    c.snapshot(a)
    write(c, a, [4] * 10)
    assert c.trim(a, 15) == 10 and (c.layers[1].s[a.state_slot] == 3).all()


def test_full_context_and_too_many_sequences_are_told() -> None:
    for recurrent in (False, True):
        c = cache(recurrent, n_ctx=100, n_seq_max=1)
        a = c.sequence()
        write(c, a, [1] * 100)
        with pytest.raises(UserError, match="context of 100"):
            c.reserve(a, 1)
        with pytest.raises(UserError, match="-np"):
            c.sequence()


@settings(deadline=None, max_examples=80)
@given(recurrent=st.booleans(), moves=st.lists(MOVE, min_size=30, max_size=60))
def test_any_moves_leave_every_text_whole(recurrent: bool, moves: list[tuple[str, int, int]]) -> None:
    """Against plain lists: what each sequence reads back, its recurrent state, and who owns every page and row."""
    c = cache(recurrent, n_seq_max=4)
    texts: list[tuple[Sequence, list[int]]] = []
    for i, (move, which, n) in enumerate(moves):
        if move == "new" or not texts:
            with suppress(UserError):
                texts.append((c.sequence(), []))
            continue
        seq, text = texts[which % len(texts)]
        if move == "write":
            with suppress(UserError):
                write(c, seq, [1000 * i + j for j in range(n)])
                text += seq.tokens[len(text) :]
        elif move == "trim":
            n = c.trim(seq, n % (len(text) + 1))
            del text[n:]
        elif move == "fork":
            with suppress(UserError):
                texts.append((c.fork(seq), list(text)))
        elif move == "snapshot":
            c.snapshot(seq)
        elif move == "interrupt":  # half a ubatch was done
            if recurrent and text:
                c.layers[1].s[seq.state_slot] = -1
            c.rewind(seq)
            del text[seq.n_past :]
        else:
            c.release(seq)
            texts.pop(which % len(texts))
        for s, expected in texts:
            assert s.tokens == expected and read(c, s) == expected
            if recurrent and expected:
                assert (c.layers[1].s[s.state_slot] == expected[-1]).all()
        users = Counter(page for s, _ in texts for page in s.pages)
        assert [users[page] for page in range(len(c.n_users))] == c.n_users
        assert sorted(c.free_pages) == [page for page in range(len(c.n_users)) if not users[page]]
        assert sorted(c.free_slots + [s.state_slot for s, _ in texts]) == [0, 1, 2, 3]
        rows = c.free_snapshots + [row for s, _ in texts for row in s.snapshots.values()]
        assert sorted(rows) == list(range(4, 4 + 4 * N_SNAPSHOT * recurrent))
