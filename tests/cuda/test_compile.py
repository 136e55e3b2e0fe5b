"""Every Triton kernel compiled, without a GPU, for the cards people have and with each Triton that is supported."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.cuda.tiles import Tiles
from headrace.quants import TYPES
from models.tiny import Tiny, write

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory that one block may use, by compute capability (CUDA programming guide, table of technical specs)."""
TRITONS = {"installed": "", "3.6.0": str(Path(sys.prefix, "triton-3.6.0"))}
"""Folders that go before the installed packages; `make test` fills them."""
CASES = [(version, capability) for version in TRITONS for capability in SHARED_BYTES]
TESTS = Path(__file__).parents[1]


def report_of(script: str, version: str, cache_dir: Path, *args: str) -> dict[str, Any]:
    """What a script of this folder reports, from a process of its own that does not interpret."""
    env = os.environ | {
        "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache_dir),
        "PYTHONPATH": os.pathsep.join(filter(None, (TRITONS[version], str(TESTS)))),
    }  # fmt: skip
    command = [sys.executable, str(TESTS / "cuda" / script), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(("version", "capability"), CASES)
def test_every_kernel(version: str, capability: int, pytestconfig: pytest.Config) -> None:
    """They fit the card's shared memory, products use tensor cores, every tile is built, and other token counts compile
    nothing anew. Each tensor type's kernels are built for one card a version, another one for each version."""
    if TRITONS[version] and not Path(TRITONS[version]).is_dir():
        pytest.skip(f"no {TRITONS[version]}: `make test` installs it there")
    turn, n = CASES.index((version, capability)), len(SHARED_BYTES)
    types = [name for i, name in enumerate(TYPES) if (i + turn // n - turn) % n == 0]
    assert pytestconfig.cache is not None
    cache_dir = pytestconfig.cache.mkdir("triton")
    report = report_of("without_gpu.py", version, cache_dir, str(capability), *types)
    assert version in ("installed", report["triton"])
    assert not report["missing"], "kernels that no step of without_gpu.py launches"
    assert not report["again"], "another token count compiles these again: see do_not_specialize"
    kernels, limit = report["kernels"], SHARED_BYTES[capability]
    assert not [k for k in kernels if k["shared_bytes"] > limit], f"over {limit} bytes of shared memory"
    assert not [k for k in kernels if k["dot"] and not k["tensor_cores"]], "products without tensor cores"
    tiles = Tiles.of((capability // 10, capability % 10))
    for name, wanted in (("gemm", tiles.gemm), ("expert_glu", tiles.glu), ("expert_down", tiles.down)):
        constants = [k["constants"] for k in kernels if k["kernel"] == f"{name}_kernel"]
        built = {tuple(int(c[n]) for n in ("BM", "BN", "num_warps", "num_stages")) for c in constants}
        assert set(wanted) <= built, f"{name} tiles"


@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize(
    "fields", [("n_cpu_moe=0",), ("n_cpu_moe=99", "n_ctx=512", "n_ubatch=128")], ids=["resident", "streamed"]
)
def test_all_that_a_model_launches_is_compiled_ahead(version: str, fields: tuple[str, ...], tmp_path: Path) -> None:
    """Passes of any length compile nothing after the model was opened, and who opens it sees all kernels counted."""
    if TRITONS[version] and not Path(TRITONS[version]).is_dir():
        pytest.skip(f"no {TRITONS[version]}: `make test` installs it there")
    model = write(tmp_path / "m.gguf", Tiny("qwen35moe", "Q4_K_M", n_layer=4, n_expert=40))
    report = report_of("rehearsed.py", version, tmp_path / "triton", "90", str(model), *fields)
    assert report["ahead"] > 20 and not report["missed"]
    n_done, n_total = report["progress"][-1]
    assert n_done == n_total >= report["ahead"]


def test_a_compilation_that_the_pool_gave_up_is_done_by_who_asks() -> None:
    from headrace.backends.cuda.compiling import Jobs

    jobs, gate = Jobs(), threading.Event()
    begun = [jobs.submit(gate.wait) for _ in range(10)]
    job = jobs.submit(lambda: "cubin")
    jobs.pool.shutdown(wait=False, cancel_futures=True)
    assert job.result() == "cubin"
    gate.set()
    assert begun[0].result()
