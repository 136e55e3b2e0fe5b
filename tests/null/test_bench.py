"""What `bench` says about the link, on the null device: its clock is arithmetic, so every column can be worked out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.backends import null
from headrace.backends.base import DeviceInfo
from headrace.commands import main
from headrace.commands.bench import peak_gbps
from headrace.commands.bench_rows import link_row, overlap
from headrace.gguf import open_gguf
from headrace.rates import Rates, save_rates
from headrace.trace import Span
from models.tiny import Tiny, write

LINK_GBPS = 25.0
"""Of the null device, as it is opened by name."""
N_LAYER, N_EXPERT, N_USED = 4, 8, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bench") / "m.gguf", Tiny("qwen3moe", "Q8_0", n_layer=N_LAYER))


def layer_bytes(model: Path) -> int:
    """The experts of one layer."""
    return sum(
        t.n_bytes for name, t in open_gguf(model).tensors.items() if name.startswith("blk.0.ffn_") and "exps" in name
    )


def bench(model: Path, capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    streamed = () if "-ncmoe" in args else ("-ncmoe", str(N_LAYER))
    assert main(["bench", "-m", str(model), "--backend", "null", "-r", "2", "-o", "json", *streamed, *args]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_prompt_moves_every_expert_once_a_window(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("-p", "200", "-n", "0", "-c", "256", "-ub", "32")
    (layer,) = bench(model, capsys, *common)
    (ubatch,) = bench(model, capsys, *common, "--schedule", "ubatch")
    experts = N_LAYER * layer_bytes(model)
    for row, n_window in ((layer, 1), (ubatch, 7)):
        assert row["streamed_bytes"] == experts and row["moved_bytes"] == n_window * experts
        assert row["copy_s"] == pytest.approx(n_window * experts / LINK_GBPS / 1e9)
        assert row["samples_ns"][0] == row["samples_ns"][1] == row["avg_ns"], "the virtual clock has no noise"
        assert row["link_gbps"] == pytest.approx(row["moved_bytes"] / row["avg_ns"], rel=1e-4)
        upload_ts, resident_ts = 200 / row["copy_s"], 200 / row["compute_s"]
        assert row["bound_ts"] == pytest.approx(min(upload_ts, resident_ts))
        assert row["bound_percent"] == pytest.approx(100 * row["avg_ts"] / row["bound_ts"])
        assert 80 < row["bound_percent"] <= 100 and 0 < row["overlap"] < 1


def test_without_lookahead_nothing_is_hidden(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench(model, capsys, "-p", "200", "-n", "0", "-ub", "32", "--prefetch-experts", "0")
    # what comes before the first experts and behind the last copy is computed beside no copy anyway
    assert row["avg_ns"] / 1e9 < row["copy_s"] + row["compute_s"]
    assert row["overlap"] < 0.4


def test_a_token_moves_its_uploads(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench(model, capsys, "-p", "0", "-n", "3", "-ncmoe", "2")
    assert row["moved_bytes"] == 3 * 2 * layer_bytes(model)
    assert row["bound_ts"] == pytest.approx(3 * LINK_GBPS * 1e9 / row["moved_bytes"])


def test_gathered_experts_count_and_their_computation_bounds_nothing(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace.engine.open_device", lambda *args, **options: null.open_device(link_gbps=LINK_GBPS, gathers=True)
    )
    token, both = bench(model, capsys, "-p", "0", "-n", "3", "-pg", "64,3")
    routed = N_LAYER * layer_bytes(model) * N_USED // N_EXPERT
    assert token["moved_bytes"] == 3 * routed and token["copy_s"] is None and token["overlap"] is None
    assert token["bound_ts"] == pytest.approx(LINK_GBPS * 1e9 / routed)
    assert 90 < token["bound_percent"] < 100
    assert both["moved_bytes"] == 3 * routed + N_LAYER * layer_bytes(model)
    assert both["copy_s"] == pytest.approx(N_LAYER * layer_bytes(model) / LINK_GBPS / 1e9) and both["overlap"] > 0


def test_what_only_the_device_knows_is_left_empty(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt too short for uploads fetches the experts that its tokens share."""
    monkeypatch.setattr("headrace.engine.open_device", lambda *args, **options: null.open_device(gathers=True))
    short, long = bench(model, capsys, "-p", "5,6", "-n", "0")
    assert short["moved_bytes"] is None and short["link_gbps"] is None and short["bound_ts"] is None
    assert long["moved_bytes"] == N_LAYER * layer_bytes(model), "two assignments an expert: 6 tokens x 3 of 8"
    prompt, token = bench(model, capsys, "-p", "6", "-n", "2", "--expert-cache", "1MiB")
    assert prompt["moved_bytes"] == long["moved_bytes"] and token["moved_bytes"] is None, "some experts are here"
    assert main(["bench", "-m", str(model), "-p", "5", "-n", "0", "-r", "1", "-ncmoe", str(N_LAYER)]) == 0
    assert [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")][-5:] == [""] * 5


def test_the_link_s_speed_is_the_device_s_or_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    save_rates("a gpu", Rates(link_gbps=0.0, staged_gbps=36.0, pageable_gbps=6.5))
    for name, link_gbps, wanted in (("a gpu", 0.0, 36.0), ("a gpu", 55.0, 55.0), ("another", 0.0, 0.0)):
        device = SimpleNamespace(info=DeviceInfo(name, "gpu", 0, 0, link_gbps))
        assert peak_gbps(SimpleNamespace(device=device)) == wanted  # type: ignore[arg-type]


def test_nothing_streamed_nothing_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench(model, capsys, "-p", "64", "-n", "0", "-ncmoe", "0")
    assert row["moved_bytes"] == 0
    assert [row[c] for c in ("link_gbps", "bound_ts", "bound_percent", "copy_s", "compute_s", "overlap")] == [None] * 6


def test_the_table_grows_columns_when_something_is_streamed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-m", str(model), "--backend", "null", "-p", "64", "-n", "0", "-ncmoe", "0,4"]) == 0
    tables = capsys.readouterr().out.split("\n\n")
    columns = [[c.strip() for c in t.splitlines()[0].strip("|").split("|")] for t in tables[:2]]
    assert columns[1][: len(columns[0])] == columns[0]
    assert columns[1][len(columns[0]) :] == ["moved", "link GB/s", "% of bound", "overlap %"]
    assert [len(t.splitlines()) for t in tables[:2]] == [3, 3]


COPY, COMPUTE = Span("copy", "a", 0.0, 2.0, {}), Span("compute", "b", 1.0, 4.0, {})


@pytest.mark.parametrize(
    ("peak_gbps", "moved_gb", "bound_s"),
    [(5.0, 10, 3.0), (2.5, 10, 4.0), (0.0, 10, None)],
    ids=["compute is the bound", "the link is the bound", "nobody measured the link"],
)
def test_link_columns_by_hand(peak_gbps: float, moved_gb: int, bound_s: float | None) -> None:
    """600 tokens in 5 s: 2 s of copies, 3 s of computation, 4 s from the first to the last in the traced run."""
    row = link_row(120.0, 600, moved_gb * 10**9, [COPY, COMPUTE], peak_gbps)
    assert row["link_gbps"] == pytest.approx(2.0) and (row["copy_s"], row["compute_s"]) == (2.0, 3.0)
    assert row["overlap"] == pytest.approx(0.5)
    assert row["bound_ts"] == (bound_s and pytest.approx(600 / bound_s))
    assert row["bound_percent"] == (bound_s and pytest.approx(100 * bound_s / 5))


@pytest.mark.parametrize(
    ("wall_s", "copy_s", "compute_s", "share"),
    [(5, 2, 3, 0.0), (3, 2, 3, 1.0), (4, 2, 3, 0.5), (4, 3, 2, 0.5), (9, 2, 3, 0.0), (2.9, 2, 3, 1.0), (3, 0, 3, None)],
)
def test_overlap(wall_s: float, copy_s: float, compute_s: float, share: float | None) -> None:
    assert overlap(wall_s, copy_s, compute_s) == share


def test_trace_of_every_test(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    rows = bench(model, capsys, "-p", "64", "-n", "2", "-ub", "16,32", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["1: pp64, n_ubatch 16", "2: tg2, n_ubatch 16", "3: pp64, n_ubatch 32", "4: tg2, n_ubatch 32"]
    for pid, row in enumerate(rows, 1):
        copied = [e["args"]["bytes"] for e in events if e["pid"] == pid and e.get("cat") == "copy"]
        assert sum(copied) == row["moved_bytes"], "the warm-up and the timed runs are not in it"


def test_trace_of_a_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    args = ["run", "-m", str(model), "-p", "abc", "-n", "3", "--temp", "0", "-ncmoe", "4", "--trace", str(path)]
    for backend, has_copies in (("null", True), ("reference", False)):
        assert main([*args, "--backend", backend]) == 0
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert {e["args"]["phase"] for e in events if e["cat"] == "compute"} == {"prefill", "decode"}
        assert any(e["cat"] == "copy" for e in events) == has_copies
    capsys.readouterr()
    assert main([*args[:-1], str(tmp_path / "absent" / "trace.json")]) == 2
    assert capsys.readouterr().err.startswith("headrace: error: --trace ")


@pytest.mark.parametrize(
    "args", [("-p", "1-1000000000"), ("-p", "1-10000", "-d", "1-10000"), ("-ub", "1-200", "-b", "1-200")]
)
def test_endless_lists_are_refused(model: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    assert main(["bench", "-m", str(model), *args]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "over 10000" in err
