import pytest

from headrace.config import Config
from headrace.errors import UserError


def test_defaults_are_valid_and_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().n_ctx = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_ubatch": -1}, "-ub"),
        ({"schedule": "diagonal"}, "--schedule"),
        ({"n_ctx": "many"}, "-c"),
        ({"prefetch_experts": 9}, "--prefetch-experts"),
        ({"n_ctxx": 1}, "n_ctxx"),
        ({"n_threads": True}, "-t"),
    ],
)
def test_bad_wishes_name_the_flag(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Config.of(**options)
