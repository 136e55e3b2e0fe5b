"""How ranks are shared between link and CPU, and what the plan says of it."""

import pytest

from headrace.config import Config
from headrace.errors import UserError
from headrace.expertsplit import choose_rank, share_s


@pytest.mark.parametrize(("link", "cpu", "rank"), [
    (50, 50, 4), (50, 25, 6), (25, 50, 3), (50, 1, 7), (1, 50, 1), (50, 30, 5), (50, 29, 5),
])  # fmt: skip
def test_the_slower_side_is_done_first(link: float, cpu: float, rank: int) -> None:
    assert choose_rank(8, link, cpu) == rank
    assert all(share_s(rank, 8, link, cpu) <= share_s(other, 8, link, cpu) for other in range(1, 8))


def test_one_expert_a_token_goes_to_the_faster() -> None:
    assert choose_rank(1, 50, 20) == 1 and choose_rank(1, 20, 50) == 0


def test_of_equals_the_gpu_takes_more() -> None:
    assert choose_rank(3, 1, 1) == 2


def test_choices_are_checked() -> None:
    with pytest.raises(UserError, match="--expert-decode"):
        Config(expert_decode="both")
