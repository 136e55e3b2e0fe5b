"""Everything that the documentation says of a GPU, in one run: results checked, then speeds against their targets.

    python bench/cuda_report.py [--model FILE] [--only verify,prefill,limits,decode,start] [-r 3]

Without --model a file of Qwen3.6-35B-A3B's shape is made (21 GB, in --folder or the system's for temporary files).
Rows go to bench/results/cuda_report.jsonl as they come. Needs a GPU of 24 GB or more for all of it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEADRACE = [sys.executable, "-m", "headrace"]
RESULTS = Path(__file__).parent / "results" / "cuda_report.jsonl"

VERIFY = {
    "demo": [],
    "experts 512 wide": ["tiny-qwen35moe"],
    "experts 768 wide": ["Qwen3-30B-A3B", "--layers", "2", "--vocab", "4096"],
    "experts 1408 wide": ["Qwen1.5-MoE-A2.7B", "--layers", "2", "--vocab", "4096"],
}
"""Name -> arguments of synth (none: the demo model)."""

SPEED = {
    # flags of bench, tokens a second at least (an H200)
    "prefill": [
        ("-ncmoe 40 -p 512 -n 0", 1328), ("-ncmoe 40 -p 2048 -n 0", 5500), ("-ncmoe 40 -p 8192 -n 0", 19000),
        ("-ncmoe 40 -p 16384 -n 0", 33000), ("-ncmoe 40 -p 32768 -n 0", 40000), ("-ncmoe 26 -p 2048 -n 0", 8000),
        ("-ncmoe 0 -p 16384 -n 0", 36000), ("-ncmoe 40 -p 131072 -n 0 -r 1", 0),
    ],
    "limits": [
        ("--device-memory-limit 12GiB -p 16384 -n 0", 0.9 * 33000), ("--device-memory-limit 8GiB -p 2048 -n 0", 0),
        ("--register-host off -ncmoe 40 -p 2048 -n 0", 0.6 * 5500),
        ("--host-memory-limit 8GiB -ncmoe 40 -p 2048 -n 0", 0),
    ],
    "decode": [
        ("-ncmoe 40 -p 0 -n 128 -d 2048", 66), ("-ncmoe 0 -p 0 -n 128 -d 2048", 300),
        ("-ncmoe 40 --expert-decode split -p 0 -n 128 -d 2048", 80),
        ("-ncmoe 40 --expert-decode cpu -p 0 -n 128 -d 2048", 0),
    ],
}  # fmt: skip


def report(**row: object) -> None:
    print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    with RESULTS.open("a") as f:
        f.write(json.dumps(row) + "\n")


def bench(model: Path, flags: str, at_least: float, repetitions: int) -> Iterator[dict[str, object]]:
    command = [
        "bench",
        "-m",
        str(model),
        "--backend",
        "cuda",
        "-r",
        str(repetitions),
        "-o",
        "jsonl",
        *shlex.split(flags),
    ]
    done = subprocess.run([*HEADRACE, *command], capture_output=True, text=True)
    if done.returncode:
        yield {"flags": flags, "failed": done.stderr.strip().splitlines()[-1:]}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        keep = (
            "test",
            "avg_ts",
            "stddev_ts",
            "moved_bytes",
            "link_gbps",
            "n_ubatch",
            "n_window",
            "device_bytes",
            "load_s",
        )
        more = {k: v for k, v in row.items() if k in keep or "bound" in k or "overlap" in k}
        yield {"flags": flags, **more, "at_least": at_least, "reached": row["avg_ts"] >= at_least,
               "commit": row["build_commit"], "device": row["device"]}  # fmt: skip


def verify(name: str, shape: list[str], folder: Path) -> dict[str, object]:
    """`headrace verify` of a small model; the demo model is also compared with the CPU."""
    model = folder / "small.gguf"
    if shape:
        subprocess.run([*HEADRACE, "synth", *shape, "-f", "-o", str(model)], check=True, capture_output=True)
    command = ["verify", "--backend", "cuda", *(["-m", str(model)] if shape else ["--against", "cpu"])]
    start = time.perf_counter()
    done = subprocess.run([*HEADRACE, *command], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"verify": name, "same": done.returncode == 0, "said": lines[-3:], "seconds": time.perf_counter() - start}


def cold_start(model: Path, folder: Path) -> Iterator[dict[str, object]]:
    """Process start to the first token of a prompt of 2048 tokens: with no compiled kernels, then with them."""
    code = (
        "import time; start = time.perf_counter(); import json, sys, headrace\n"
        "imported = time.perf_counter()\n"
        "with headrace.open(sys.argv[1], backend='cuda', n_ctx=4096, n_cpu_moe=40) as engine:\n"
        "    opened = time.perf_counter(); piece = next(engine.generate([i % 9999 for i in range(2048)], 1))\n"
        "    end, s = time.perf_counter(), piece.stats\n"
        "print(json.dumps(dict(import_s=imported - start, open_s=opened - imported, compile_s=s.compile_s,\n"
        "      prefill_s=s.prefill_s, total_s=end - start)))"
    )
    for label in ("no kernels compiled", "kernels compiled"):
        env = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton")}
        done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, env=env)
        yield {"start": label, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--only", default="verify,prefill,limits,decode,start")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, parts = Path(name), args.only.split(",")
        model = args.model or folder / "model.gguf"
        if not args.model and set(parts) - {"verify"}:
            subprocess.run([*HEADRACE, "synth", "Qwen3.6-35B-A3B", "-o", str(model)], check=True)
        if "verify" in parts:
            for label, shape in VERIFY.items():
                report(**verify(label, shape, folder))
        for part in parts:
            for flags, at_least in SPEED.get(part, ()):
                for row in bench(model, flags, at_least, args.repetitions):
                    report(**row)
        if "start" in parts:
            for row in cold_start(model, folder):
                report(**row)


if __name__ == "__main__":
    main()
