"""The expert cache's policy: a map stays a map, the hot stay, and it settles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.expertcache import DECAY, LOYALTY, choose


@given(st.data())
def test_a_map_is_a_map(data: st.DataObject) -> None:
    n_expert, rng = data.draw(st.integers(1, 40)), np.random.default_rng(data.draw(st.integers(0, 999)))
    n_lines = data.draw(st.integers(1, n_expert))
    line = np.full(n_expert, -1, np.int32)
    for _ in range(4):
        use = rng.integers(0, 5, n_expert).astype(np.float32)
        before, line = line, choose(use, line, n_lines)
        held = line[line >= 0]
        assert len(set(held)) == len(held) <= n_lines and (held < n_lines).all()
        stayed = (before >= 0) & (line >= 0)
        assert (line[stayed] == before[stayed]).all(), "who stays keeps its line: its bytes are there"
        assert not ((line >= 0) & (before < 0) & (use == 0)).any(), "nobody enters unused"
        left_out = (line < 0) & (use > 0)
        if left_out.any():
            assert len(held) == n_lines, "lines stay empty only if there is nobody to enter"
            assert use[left_out].max() <= LOYALTY * use[line >= 0].min()


def test_the_hottest_hold_the_lines_and_noise_does_not_move_them() -> None:
    rng = np.random.default_rng(1)
    share = np.where(np.arange(64) % 4 == 0, 8.0, 1.0)
    share /= share.sum()
    use, line, changes = np.zeros(64, np.float32), np.full(64, -1, np.int32), []
    for _ in range(50):
        use = DECAY * use + rng.multinomial(256, share).astype(np.float32)
        before, line = line, choose(use, line, 16)
        changes.append(int((before != line).sum()))
    assert (line[::4] >= 0).all()
    assert sum(changes[10:]) <= 4


def test_a_new_favourite_replaces_the_coldest() -> None:
    line = np.array([0, 1, -1], np.int32)
    assert choose(np.array([9, 4, 4.9], np.float32), line, 2).tolist() == [0, 1, -1]
    assert choose(np.array([9, 4, 5.1], np.float32), line, 2).tolist() == [0, -1, 1]
