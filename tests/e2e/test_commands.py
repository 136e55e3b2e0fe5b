"""The command line: help, exit statuses, what goes to stdout and what to stderr; every command on a tiny file."""

import csv
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from headrace.commands import COMMANDS, main, module_of
from headrace.commands import bench as bench_command
from headrace.commands.options import list_of
from headrace.synth import find_shape, synthesize, writer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synthesize(path, find_shape("tiny-qwen3moe", n_layer=1))
    return path


def headrace(*args: str | Path, **kw: object) -> subprocess.CompletedProcess[str]:
    """A process of its own, as a shell starts it."""
    command = [sys.executable, "-m", "headrace", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kw)  # type: ignore[call-overload,no-any-return]


def error_line(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """Runs a command that must fail with status 2 and one line on stderr."""
    assert main([str(a) for a in args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("headrace: error: ")
    return err


# help and errors


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from headrace.commands import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('numpy', 'numba', 'tqdm', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert all(f"\n  {name} " in out and module_of(name).HELP in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0
    assert f"examples:\n  headrace {name}" in out
    assert max(map(len, out.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"headrace {__version__}\n"


def test_without_a_command_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "commands:" in err


def test_errors_are_one_line(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'inspect'" in error_line(capsys, "inspcet")
    assert "headrace synth --help" in error_line(capsys, "synth", "tiny-llama", "--no-such-flag")
    assert "--list" in error_line(capsys, "synth")
    assert "absent.gguf" in error_line(capsys, "inspect", tmp_path / "absent.gguf")
    assert "regular expression" in error_line(capsys, "inspect", tiny, "--filter", "(")
    assert "-f replaces it" in error_line(capsys, "synth", "tiny-llama", "-o", tiny)
    assert "unknown" in error_line(capsys, "run", "-m", tiny, "-p", "x", "--schedule", "unknown")
    assert "-p and -f" in error_line(capsys, "run", "-m", tiny, "-p", "x", "-f", "y")
    assert "--system needs" in error_line(capsys, "run", "-m", tiny, "-p", "x", "--system", "y")
    assert "nothing to measure" in error_line(capsys, "bench", "-m", tiny, "-p", "0", "-n", "0")


def test_a_bug_is_a_traceback(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    def bug(args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module_of("inspect"), "run", bug)
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(tiny)])


@pytest.mark.skipif(os.name == "nt", reason="a pipe whose reader leaves is a signal of POSIX")
def test_reader_that_leaves_is_no_error(tiny: Path) -> None:
    command = [sys.executable, "-m", "headrace", "inspect", str(tiny), "--arrays"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout is not None and p.stderr is not None
        p.stdout.readline()
        p.stdout.close()
        assert p.stderr.read() == b""
        assert p.wait() in (0, 141)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_like_dev_null(tiny: Path, closed: str) -> None:
    command = f"{sys.executable} -m headrace run -m {tiny} -p a -n 2 {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["run -p a -n 2 -q -m", "inspect", "plan -m"])
def test_a_full_disk_is_told_in_one_line(tiny: Path, command: str) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "headrace", *command.split(), str(tiny)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and "cannot write the output" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_unknown_instruction_set_is_refused(tiny: Path) -> None:
    done = headrace("run", "-m", tiny, "-p", "a", env=os.environ | {"HEADRACE_ISA": "avx3"})
    assert done.returncode == 2 and "HEADRACE_ISA=avx3" in done.stderr and "Traceback" not in done.stderr


# synth and inspect


def test_synth_writes_and_inspect_reads(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    done = headrace("synth", "tiny-qwen35moe", "--layers", 4, "--type-mix", "Q8_0", "-o", path)
    assert done.returncode == 0 and done.stdout == ""
    assert re.search(r"0\.\d+ GB in .* MB/s", done.stderr)
    report = json.loads(headrace("inspect", path, "--json").stdout)
    assert report["architecture"] == "qwen35moe"
    assert report["totals"]["tensors"] == len(report["tensors"])
    assert report["totals"]["bytes"] == sum(t["bytes"] for t in report["tensors"])
    assert set(report["types"]) == {"F32", "Q8_0"}
    assert [x["layer"] for x in report["experts"]] == [0, 1, 2, 3]
    # 16 experts x (3 matrices of 256 x 256), 34 bytes per 32 weights
    assert all(x["bytes"] == 16 * 3 * 256 * 256 // 32 * 34 for x in report["experts"])
    assert report["metadata"]["tokenizer.ggml.tokens"]["length"] == 1024
    assert sum(g["bytes"] for g in report["roles"].values()) == report["totals"]["bytes"]
    assert "other" not in report["roles"]


def test_inspect_text_and_filters(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny)]) == 0
    text = capsys.readouterr().out
    assert "qwen3moe" in text and "(1024 elements)" in text and "routed experts" in text
    assert "blk.0.attn_q.weight" not in text
    assert main(["inspect", str(tiny), "-f", r"blk\.0\.attn|rope"]) == 0
    text = capsys.readouterr().out
    assert "blk.0.attn_q.weight" in text and "rope.freq_base" in text
    assert "ffn_" not in text and "general.name" not in text
    assert main(["inspect", str(tiny), "--arrays", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["metadata"]["tokenizer.ggml.merges"]) == 1024 - 259


def test_synth_list_and_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synth", "--list"]) == 0
    text = capsys.readouterr().out
    assert "Qwen3.6-35B-A3B" in text and "19.71" in text and "8 of 256" in text
    assert main(["synth", "Qwen3-30B-A3B", "-n", "-o", str(tmp_path / "x")]) == 0
    assert "289 Q4_K" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# bench: flags and formats


@pytest.mark.parametrize(
    ("text", "values"),
    [("7", [7]), ("1,2", [1, 2]), ("1-3", [1, 2, 3]), ("10-20+5", [10, 15, 20]), ("1-9*2", [1, 2, 4, 8]), ("-1", [-1])],
)
def test_lists_and_ranges(text: str, values: list[int]) -> None:
    assert list_of(int)(text) == values


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-4*2", "1-4*1", "1-2+0"])
def test_bad_ranges(text: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "-p" in error_line(capsys, "bench", "-m", tiny, f"-p={text}")


def test_tests_come_in_order() -> None:
    args = type("Args", (), {"n_prompt": [8, 0], "n_gen": None, "pg": [(4, 2)], "n_depth": [0, 16]})
    names = ["pp8", "tg128", "pp4+tg2", "pp8 @ d16", "tg128 @ d16", "pp4+tg2 @ d16"]
    assert [t.name for t in bench_command.tests_of(args)] == names  # type: ignore[arg-type]
    assert bench_command.Test(5, 0, 0).name == "pp5"


SLOW = ("--backend", "reference")
"""Starts at once; what the commands do with the engine does not depend on the backend."""
BENCH = ("-p", "8", "-n", "2", "-r", "2", "-ub", "4,8", *SLOW)


def bench(capsys: pytest.CaptureFixture[str], tiny: Path, form: str) -> str:
    assert main(["bench", "-m", str(tiny), *BENCH, "-o", form]) == 0
    return capsys.readouterr().out


def test_bench_formats_hold_the_same_rows(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(bench(capsys, tiny, "json"))
    assert [(r["test"], r["n_ubatch"]) for r in rows] == [("pp8", 4), ("tg2", 4), ("pp8", 8), ("tg2", 8)]
    for r in rows:
        assert len(r["samples_ns"]) == len(r["samples_ts"]) == 2
        assert r["avg_ts"] == pytest.approx(sum(r["samples_ts"]) / 2)
        assert r["command"].startswith("headrace bench") and r["cpu_info"] and r["version"] == __version__
        assert r["model_type"] == "qwen3moe Q4_K_M" and r["moved_bytes"] == 0
    lines = [json.loads(line) for line in bench(capsys, tiny, "jsonl").splitlines()]
    assert [set(r) for r in lines] == [set(r) for r in rows]
    table = list(csv.DictReader(io.StringIO(bench(capsys, tiny, "csv"))))
    assert [r["test"] for r in table] == [r["test"] for r in rows]
    with sqlite3.connect(":memory:") as db:
        db.executescript(bench(capsys, tiny, "sql"))
        found = db.execute("SELECT test, n_ubatch, avg_ts FROM headrace_bench").fetchall()
    assert [f[:2] for f in found] == [(r["test"], r["n_ubatch"]) for r in rows] and all(f[2] > 0 for f in found)


def test_bench_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, rule, *rows, _, last = bench(capsys, tiny, "md").splitlines()
    columns = [c.strip() for c in head.strip("|").split("|")]
    assert columns == ["model", "size", "params", "backend", "threads", "n_ubatch", "test", "t/s"]
    assert len({len(line) for line in (head, rule, *rows)}) == 1 and len(rows) == 4
    assert re.search(r"\d+\.\d\d ± \d+\.\d\d \|$", rows[0])
    assert last.startswith(f"headrace {__version__}")


# plan and run


def test_plan_says_where_everything_lives(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", str(tiny), "-c", "512", *SLOW]) == 0
    text = capsys.readouterr().out
    assert "4 of 16" in text and "context     512 tokens" in text
    assert main(["plan", "-m", str(tiny), "--tensors", *SLOW]) == 0
    assert "blk.0.ffn_up_exps.weight" in capsys.readouterr().out
    assert main(["plan", "-m", str(tiny), "--json", *SLOW]) == 0
    assert "blk.0.ffn_up_exps.weight" in json.loads(capsys.readouterr().out)["placements"]


def test_run_writes_text_to_stdout_only(tiny: Path) -> None:
    args = ("run", "-m", tiny, "-p", "def f(x):", "-n", 8, "--temp", 0, "-c", 256, *SLOW)
    done = headrace(*args)
    assert done.returncode == 0
    assert re.search(r"prefill \d+ tokens .* decode 7 tokens", done.stderr)
    assert done.stdout == headrace(*args).stdout and len(done.stdout) > 4
    assert headrace(*args, "-q").stderr == ""
    echoed = headrace(*args, "--echo").stdout
    assert echoed == "def f(x):" + done.stdout


def test_everything_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model on the default backend."""
    assert main(["run", "-p", "def read_lines(path):", "-n", "8", "--temp", "0"]) == 0
    assert len(capsys.readouterr().out) > 8


def test_run_takes_prompts_from_anywhere(tiny: Path, tmp_path: Path) -> None:
    rest = ("-n", 4, "--temp", 0, "-c", 256, "-q", *SLOW)
    wanted = headrace("run", "-m", tiny, "-p", "import os\n", *rest).stdout
    assert wanted
    (tmp_path / "prompt").write_text("import os\n")
    assert headrace("run", "-m", tiny, "-f", tmp_path / "prompt", *rest).stdout == wanted
    assert headrace("run", "-m", tiny, "-p", "-", *rest, input="import os\n").stdout == wanted


def test_same_seed_same_text(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert (
            main(["run", "-m", str(tiny), "-p", "a", "-n", "16", "--temp", "1", "--seed", seed, "-c", "256", *SLOW])
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_talk_keeps_what_was_said(tiny: Path) -> None:
    args = ("run", "-m", tiny, "-i", "--system", "Be brief.", "-n", 6, "--temp", 0, "-c", 512, *SLOW)
    done = headrace(*args, input="first question\nsecond question\n")
    assert done.returncode == 0
    speeds = [line for line in done.stderr.splitlines() if "prefill" in line]
    assert len(speeds) == 2 and "in the cache" in speeds[1]


def test_a_talk_outlives_the_context() -> None:
    """The demo model: its oldest turns are forgotten, and it says so."""
    questions = "".join(f"Write me a function number {i}, please, and make it short.\n" for i in range(8))
    done = headrace("run", "-i", "--temp", "0", "-c", "256", "-n", "24", input=questions)
    assert done.returncode == 0 and done.stderr.count("prefill") == 8
    assert "the oldest 1 turns are forgotten" in done.stderr and ">" not in done.stderr


def test_a_full_context_is_told(tiny: Path) -> None:
    done = headrace("run", "-m", tiny, "-p", "a", "-n", "-1", "--temp", "0", "-c", "64")
    assert done.returncode == 0 and "the context of 64 tokens is full" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="sends a signal of POSIX")
def test_ctrl_c_ends_with_130(tiny: Path) -> None:
    command = [sys.executable, "-m", "headrace", "run", "-m", str(tiny), "-p", "a", "-c", "4096", "--temp", "1", *SLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout is not None
        assert p.stdout.read(1)
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=60)
        assert p.returncode == 130


def test_inspect_reads_split_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any shard stands for the set."""
    for i in range(2):
        split = {"split.no": i, "split.count": 2, "split.tensors.count": 2}
        tensor = writer.Tensor(f"blk.{i}.ffn_up_exps.weight", (4, 8, 32), "Q8_0")
        writer.save(
            tmp_path / f"m-0000{i + 1}-of-00002.gguf",
            {"general.architecture": "some-new-one", **split} if i == 0 else split,
            [tensor], lambda t: [memoryview(bytes(t.n_bytes))],
        )  # fmt: skip
    assert main(["inspect", str(tmp_path / "m-00002-of-00002.gguf"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "some-new-one" and len(report["shards"]) == 2
    assert [(t["name"], t["shard"]) for t in report["tensors"]] == [
        ("blk.0.ffn_up_exps.weight", 0),
        ("blk.1.ffn_up_exps.weight", 1),
    ]
    assert [x["bytes_per_expert"] for x in report["experts"]] == [8 * 34, 8 * 34]
    assert main(["inspect", str(tmp_path / "m-00001-of-00002.gguf"), "-t"]) == 0
    assert "2 shards" in capsys.readouterr().out


def test_plan_for_cards_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--card", "8GiB"]) == 0
    out = capsys.readouterr().out
    assert "8GiB card (gpu)" in out and "prompt      2048 tokens" in out and "decode      at most" in out
    assert main(["plan", "-cmoe", "--card", "RTX 3060,rtx 4070", "--link", "3x16,PCIe 4.0 x16,20GB/s"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| RTX")]
    assert len(rows) == 6 and "20GB/s (20)" in rows[2]
    for args, says in (
        (("--card", "8 apples"), "--card 8 apples"), (("--card", "8G", "--link", "USB"), "--link USB"),
        (("--link", "4x16"), "--card"), (("a.gguf", "-m", "b.gguf"), "one model"),
        (("--device-memory-limit", "8G", "--backend", "cpu"), "no GPU backend"),
    ):  # fmt: skip
        assert main(["plan", *args]) == 2
        assert says in capsys.readouterr().err
