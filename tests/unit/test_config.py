import pytest

from headrace import env
from headrace.config import Config, overrides, size_bytes
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
        ({"device_memory_limit": "12 cakes"}, "--device-memory-limit"),
        ({"host_memory_limit": "12iB"}, "--host-memory-limit"),
        ({"override_tensor": "a=CPU,(=GPU"}, "-ot"),
        ({"cpu_moe": True, "n_cpu_moe": 3}, "-cmoe"),
        ({"register_host": "0"}, "--register-host"),
    ],
)
def test_bad_wishes_name_the_flag(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Config.of(**options)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("", None), ("12GiB", 12 << 30), ("12G", 12 << 30), ("12gb", 12 * 10**9), ("1.5 MiB", 3 << 19), ("77", 77),
        ("2K", 2048), ("1TB", 10**12), ("5B", 5),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int | None) -> None:
    assert size_bytes(text) == n_bytes


def test_overrides_are_split_at_commas_that_are_not_in_a_pattern() -> None:
    found = overrides(r"blk\.\d{1,2}\.ffn_up_exps=cpu;gate(?=_exps)=CUDA0,x=GPU")
    assert [(o.pattern.pattern, o.on_host) for o in found] == [
        (r"blk\.\d{1,2}\.ffn_up_exps", True), ("gate(?=_exps)", False), ("x", False),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "0", "1", "off"])
@pytest.mark.parametrize("name", ["GGML_CUDA_REGISTER_HOST", "GGML_VK_REGISTER_HOST"])
def test_registering_counts_by_presence(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    assert env.register_host() is None
    monkeypatch.setenv(name, text)
    assert env.register_host() == name


@pytest.mark.parametrize(
    ("text", "n_slots"),
    [("1", 1), ("3", 3), ("8", 8), ("99", 8), ("0", 0), ("-4", 0), ("yes", 0), ("", 0), (" 2x", 2), ("+5", 5)],
)
def test_prefetching_is_read_as_a_number(monkeypatch: pytest.MonkeyPatch, text: str, n_slots: int) -> None:
    assert Config().with_environment().prefetch_experts == -1
    monkeypatch.setenv("GGML_SCHED_PREFETCH_EXPERTS", text)
    assert Config().with_environment().prefetch_experts == n_slots
    assert Config(prefetch_experts=6).with_environment().prefetch_experts == 6, "a flag beats it"
