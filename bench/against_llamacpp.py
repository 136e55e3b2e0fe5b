"""headrace on the CPU against llama.cpp (PyPI xllamacpp, a prebuilt AVX2 build), on one model file, in one run.

    python bench/against_llamacpp.py [--model FILE | --layers 3 --mixes Q4_K_M,Q8_0] [--rounds 5] [-t 2]

Without --model, files of Qwen3-30B-A3B's shape cut to a few layers are made, with random weights. Each engine lives in
a process of its own; rounds go from one to the next, the first warms up, medians are compared: pp512 (a prompt of 512
random tokens, micro-batch 512) and tg64 (64 tokens one by one, the most likely next). llama.cpp maps the file and
regroups the types it can; "in place" reads the mapped file, "repacked" the regrouped weights.

The file is locked in memory meanwhile, so that nobody measures the disk. A round in which other processes took more
than 5 % of the processors does not count and is repeated (llama.cpp's waiting threads suffer most from company);
`others` is their share in the rounds that counted. `anon` is the peak of RssAnon (memory that is not the mapped file)
above what the interpreter had with its imports, in MiB. Rows go to bench/results/against_llamacpp.jsonl.
"""

import argparse
import ctypes
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

N_PROMPT, N_GEN = 512, 64
ENGINES = ("llama.cpp", "in place", "repacked")
TARGETS = {"in place": {"pp": 0.9, "tg": 0.9}, "repacked": {"pp": 2.0, "tg": 1.0}}
QUIET = 0.05


def anonymous_mib(pid="self"):
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def busy_s():
    """Processor seconds that the machine has spent, or lost to its host, on anything."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_s(pid):
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# the engines' processes: ids on a line of stdin, tokens a second on a line of stdout ----------------------------------


def serve_headrace(model, threads, repack):
    import headrace
    import headrace.backends.cpu

    print(json.dumps({"base_mib": anonymous_mib()}), flush=True)
    with headrace.open(model, n_threads=threads, repack=repack, n_ctx=1024) as engine:
        for line in sys.stdin:
            engine.reset()
            start = time.perf_counter()
            logits = engine.runner.prefill(engine.sequence, json.loads(line))
            middle = time.perf_counter()
            for _ in range(N_GEN):
                logits = engine.runner.decode([engine.sequence], [int(logits[-1].argmax())])
            end = time.perf_counter()
            print(json.dumps({"pp": N_PROMPT / (middle - start), "tg": N_GEN / (end - middle)}), flush=True)


def serve_llamacpp(model, threads):
    import xllamacpp

    print(json.dumps({"base_mib": anonymous_mib()}), flush=True)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_gpu_layers = 1024, 2048, 512, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = True
    server = xllamacpp.Server(params)
    request = {"n_predict": N_GEN + 1, "samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "ignore_eos": True}
    for line in sys.stdin:
        timings = server.handle_completions(request | {"prompt": json.loads(line)})["timings"]
        row = {"pp": timings["prompt_per_second"], "tg": timings["predicted_per_second"]}
        print(json.dumps(row), flush=True)


class Engine:
    """A process that serves one engine."""

    def __init__(self, name, model, threads):
        command = [sys.executable, __file__, "--serve", name, "--model", str(model), "-t", str(threads)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.base_mib, self.peak_mib, self.rounds = self.read()["base_mib"], 0.0, []
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while self.process.poll() is None:
            try:
                self.peak_mib = max(self.peak_mib, anonymous_mib(self.process.pid) - self.base_mib)
            except (OSError, TypeError):
                return
            time.sleep(0.05)

    def read(self):
        while not (line := self.process.stdout.readline()).startswith("{"):
            assert line, f"an engine died: {self.process.args}"
        return json.loads(line)

    def round(self, ids):
        """Tokens a second, and the share of the processors that others had meanwhile."""
        start, busy, own = time.perf_counter(), busy_s(), own_s(self.process.pid)
        self.process.stdin.write(json.dumps(ids) + "\n")
        self.process.stdin.flush()
        figures = self.read()
        others = busy_s() - busy - own_s(self.process.pid) + own
        return figures | {"others": max(0.0, others) / (time.perf_counter() - start) / os.cpu_count()}

    def quiet(self):
        return [r for r in self.rounds if r["others"] < QUIET]

    def medians(self):
        """Of the quiet rounds; of the quieter half of all where there are none."""
        rounds = self.quiet() or sorted(self.rounds, key=lambda r: r["others"])[: (len(self.rounds) + 1) // 2]
        found = {key: round(statistics.median(r[key] for r in rounds), 1) for key in ("pp", "tg")}
        others = round(statistics.median(r["others"] for r in rounds), 3)
        best = {f"{key}_best": round(max(r[key] for r in rounds), 1) for key in ("pp", "tg")}
        return found | best | {"rounds": len(rounds), "of": len(self.rounds), "others": others}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def locked_in_memory(path):
    """The file's pages stay in the page cache; says so if the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
        address = np.frombuffer(view, np.uint8).ctypes.data
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(view))):
            print(f"note: mlock: {os.strerror(ctypes.get_errno())}; the page cache may lose pages meanwhile")
        yield
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(len(view)))


def compare(model, rounds, threads):
    """One row for each engine."""
    from headrace.gguf import open_gguf

    n_vocab = open_gguf(model).tensors["token_embd.weight"].shape[0]
    rng = np.random.default_rng(0)
    with locked_in_memory(model):
        engines = {name: Engine(name, model, threads) for name in ENGINES}
        for i in range(1 + 8 * rounds):
            ids = rng.integers(0, n_vocab, N_PROMPT).tolist()
            for engine in engines.values():
                figures = engine.round(ids)
                if i:
                    engine.rounds.append(figures)
            if all(len(engine.quiet()) >= rounds for engine in engines.values()):
                break
        for engine in engines.values():
            engine.close()
    medians = {name: engine.medians() for name, engine in engines.items()}
    base, file_mib = medians["llama.cpp"], round(os.path.getsize(model) / 2**20)
    return [
        {"engine": name, "threads": threads, **found, "pp_ratio": round(found["pp"] / base["pp"], 2),
         "tg_ratio": round(found["tg"] / base["tg"], 2), "anon_mib": round(engines[name].peak_mib),
         "file_mib": file_mib}
        for name, found in medians.items()
    ]  # fmt: skip


def machine():
    text = Path("/proc/cpuinfo").read_text()
    return f"{re.search(r'model name.*: (.*)', text)[1]} family {re.search(r'cpu family.*: (.*)', text)[1]}, " + (
        f"{len(os.sched_getaffinity(0))} cores"
    )


def report(mix, row):
    def speed(key):
        low = row[f"{key}_ratio"] < TARGETS.get(row["engine"], {"pp": 0, "tg": 0})[key]
        return f"{row[key]:7.1f} t/s (best {row[f'{key}_best']:7.1f}) {row[f'{key}_ratio']:5.2f}x{'!' if low else ' '}"

    share = 100 * row["anon_mib"] / row["file_mib"]
    memory = f"anon {row['anon_mib']:5d} of {row['file_mib']} MiB ({share:.1f} %)"
    rounds = f"{row['rounds']} of {row['of']} rounds, others {100 * row['others']:.0f} %"
    print(f"{mix:8} {row['engine']:10} pp512 {speed('pp')}  tg64 {speed('tg')}  {memory}  {rounds}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="use this file")
    parser.add_argument("--layers", type=int, default=3, help="layers of the Qwen3-30B-A3B shape (%(default)s)")
    parser.add_argument("--mixes", default="Q4_K_M,Q8_0", help="type mixes of the files that are made (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve == "llama.cpp":
        serve_llamacpp(str(args.model), args.threads)
    elif args.serve:
        serve_headrace(args.model, args.threads, {"in place": "off", "repacked": "on"}[args.serve])
    else:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"machine": machine(), "commit": commit, "command": " ".join(["python", *sys.argv])}
        results = Path(__file__).parent / "results" / "against_llamacpp.jsonl"
        print("! marks a ratio below its target; llama.cpp is an AVX2 build", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for mix in [args.model.stem] if args.model else args.mixes.split(","):
                model = args.model or Path(folder) / f"{mix}.gguf"
                if not args.model:
                    shape = ["synth", "Qwen3-30B-A3B", "--layers", str(args.layers), "--type-mix", mix, "-o", model]
                    subprocess.run([sys.executable, "-m", "headrace", *shape], check=True, capture_output=True)
                for row in compare(model, args.rounds, args.threads):
                    report(mix, row)
                    with results.open("a") as f:
                        f.write(json.dumps({"model": mix, **row, **about}) + "\n")
                if not args.model:
                    model.unlink()


if __name__ == "__main__":
    main()
