"""What opening a model compiles ahead, without a GPU: `python rehearsed.py CAPABILITY MODEL [FIELD=INTEGER ...]`.

Opens the model on a device that cannot launch, then runs passes of many lengths over all of its steps. Prints JSON:
"ahead", the kernels that were compiled while it was opened, and "missed", how many the passes compiled after that.
"""

import json
import sys
from typing import Any

import torch
import triton
from without_gpu import Driver

from headrace import engine as engines
from headrace.backends.cuda.compiling import compile_ahead, compiling
from headrace.backends.cuda.decode_ops import DecodeOps
from headrace.backends.cuda.device import CudaDevice
from headrace.backends.cuda.ops import CudaOps
from headrace.backends.cuda.rehearsal import Rehearsal
from headrace.backends.cuda.tiles import Tiles
from headrace.sampling import SamplingParams

SAMPLING = SamplingParams()
LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 63, 65, 100, 127, 129, 200, 255)


class Card(CudaDevice):
    """A card that compiles for a capability, with its memory on the host."""

    def __init__(self, capability: int) -> None:
        super().__init__(0, interpret=True)
        self.act_dtype = "bf16"
        self.ops = CudaOps(self.where, torch.bfloat16, Tiles.of(divmod(capability, 10)))
        self.decode_ops = DecodeOps(self.ops)

    def compiled_ahead(self, run: Any, progress: Any = None) -> Any:
        return compile_ahead(lambda: run(Rehearsal(self)), progress)


def passes(engine: engines.Engine) -> None:
    """Prompts of all lengths, alone and behind a whole micro-batch, and a decode step behind each."""
    device, tensors = Rehearsal(engine.device), engine.file.tensors
    resident = [name for name, p in engine.plan.placements.items() if p.feed != "stream"]
    weights = {name: device.load(tensors[name], engine.host.bytes(tensors[name])) for name in resident}
    runner = engine._runner(device, engine.program, weights)
    seq, n = runner.cache.sequence(), engine.plan.n_ubatch
    for length in [*LENGTHS, *(n + m for m in LENGTHS)]:
        runner.cache.trim(seq, 0)
        if length < engine.plan.n_ctx:
            runner.prefill(seq, [0] * length, n_candidates=SAMPLING.n_candidates)
            runner.decode([seq], [0], SAMPLING.n_candidates)


def main(capability: int, path: str, config: dict[str, int]) -> dict[str, Any]:
    triton.runtime.driver.set_active(Driver(capability))
    engines.open_device = lambda *_, **__: Card(capability)
    seen: list[tuple[int, int]] = []
    with engines.open_engine(path, backend="cuda", compile_progress=lambda *p: seen.append(p), **config) as engine:
        n_ahead = compiling.n_compiled
        with compile_ahead(lambda: passes(engine)):
            pass
    return {"ahead": n_ahead, "missed": compiling.n_compiled - n_ahead, "progress": seen}


if __name__ == "__main__":
    fields = {k: int(v) for k, _, v in (field.partition("=") for field in sys.argv[3:])}
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], fields)))
