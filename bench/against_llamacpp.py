"""headrace on the CPU against llama.cpp (PyPI xllamacpp, an AVX2 build), on one synthetic model, in one run.

    python bench/against_llamacpp.py [--layers 3] [--mixes Q4_K_M,Q8_0] [--rounds 3] [-t 2]

Each engine lives in a process of its own, rounds alternate between them, medians are compared: pp512 (a prompt of 512
random tokens) and tg (tokens one by one). "in place" reads the mapped file, "repacked" the regrouped weights. Rows go
to bench/results/against_llamacpp.jsonl; RssAnon is the memory that is not the mapped file, in MiB, after the runs.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

N_PROMPT, N_GEN = 512, 32
ENGINES = ("llama.cpp", "in place", "repacked")


def anonymous_mib() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024


def prompt(n_vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, N_PROMPT).tolist()


def serve_headrace(model: str, threads: int, repack: str) -> None:
    """Answers each line of stdin with one round's figures."""
    import headrace

    base = anonymous_mib()
    with headrace.open(model, n_threads=threads, repack=repack, n_ctx=1024) as engine:
        for line in sys.stdin:
            engine.reset()
            ids = prompt(engine.spec.n_vocab, int(line))
            start = time.perf_counter()
            engine.runner.prefill(engine.sequence, ids)
            middle = time.perf_counter()
            for token in ids[:N_GEN]:
                engine.runner.decode([engine.sequence], [token])
            end = time.perf_counter()
            row = {"pp": N_PROMPT / (middle - start), "tg": N_GEN / (end - middle), "anon_mib": anonymous_mib() - base}
            print(json.dumps(row), flush=True)


def serve_llamacpp(model: str, threads: int) -> None:
    import xllamacpp as xl

    params = xl.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_gpu_layers = 1024, 2048, 512, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = True
    base = anonymous_mib()
    server = xl.Server(params)
    n_vocab = 150000
    for line in sys.stdin:
        ids = prompt(n_vocab, int(line))
        request = {"prompt": ids, "n_predict": N_GEN + 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        timings = server.handle_completions(request)["timings"]
        row = {
            "pp": timings["prompt_per_second"],
            "tg": timings["predicted_per_second"],
            "anon_mib": anonymous_mib() - base,
        }
        print(json.dumps(row), flush=True)


def start(engine: str, model: str, threads: int) -> subprocess.Popen:
    command = [sys.executable, __file__, "--serve", engine, "--model", model, "-t", str(threads)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def one_round(process: subprocess.Popen, seed: int) -> dict:
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith("{"):
        assert line, "the engine died"
    return json.loads(line)


def compare(model: str, mix: str, rounds: int, threads: int) -> list[dict]:
    found: dict[str, list[dict]] = {engine: [] for engine in ENGINES}
    processes = {engine: start(engine, model, threads) for engine in ENGINES}
    for seed in range(rounds + 1):
        for engine, process in processes.items():
            row = one_round(process, seed)
            if seed:  # the first round warms up
                found[engine].append(row)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    rows = []
    for engine in ENGINES:
        row = {"mix": mix, "engine": engine, "threads": threads, "rounds": rounds, "load": os.getloadavg()[0]}
        for key in ("pp", "tg"):
            row[key] = round(statistics.median(r[key] for r in found[engine]), 1)
            ratios = [r[key] / base[key] for r, base in zip(found[engine], found["llama.cpp"])]
            row[f"{key}_ratio"] = round(statistics.median(ratios), 2)
        rows.append(row | {"anon_mib": found[engine][-1]["anon_mib"], "file_mib": os.path.getsize(model) >> 20})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3, help="layers of the Qwen3-30B-A3B shape")
    parser.add_argument("--mixes", default="Q4_K_M,Q8_0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", help="use this file instead")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve == "llama.cpp":
        serve_llamacpp(args.model, args.threads)
    elif args.serve:
        serve_headrace(args.model, args.threads, {"in place": "off", "repacked": "on"}[args.serve])
    else:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", "commit": commit}
        results = Path(__file__).parent / "results" / "against_llamacpp.jsonl"
        with tempfile.TemporaryDirectory() as folder:
            for mix in args.mixes.split(","):
                model = args.model or f"{folder}/{mix}.gguf"
                if not args.model:
                    shape = ["synth", "Qwen3-30B-A3B", "--layers", str(args.layers), "--type-mix", mix, "-o", model]
                    subprocess.run([sys.executable, "-m", "headrace", *shape], check=True, capture_output=True)
                for row in compare(model, mix, args.rounds, args.threads):
                    speeds = [
                        f"{n} {row[k]:7.1f} t/s ({row[k + '_ratio']:.2f}x)" for k, n in (("pp", "pp512"), ("tg", "tg"))
                    ]
                    memory = f"anonymous {row['anon_mib']} of {row['file_mib']} MiB"
                    print(f"{mix:8} {row['engine']:10}", *speeds, memory, sep="  ", flush=True)
                    with results.open("a") as f:
                        command = " ".join(["python bench/against_llamacpp.py", *sys.argv[1:]])
                        f.write(json.dumps(row | about | {"command": command}) + "\n")
                if not args.model:
                    os.unlink(model)


if __name__ == "__main__":
    main()
