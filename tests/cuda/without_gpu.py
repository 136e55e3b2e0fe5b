"""What the ops launch, compiled for any GPU without having one: `python without_gpu.py CAPABILITY [TYPE ...]`.

A stand-in driver names the card, and a launch becomes a compilation; so constants, tiles and integer specialisations
are those of real runs. Prints JSON: "kernels", the compiled ones; "again", those that another token count compiled
anew; "missing", kernels that were never launched. Weights are Q4_K; the types named are compiled beside it.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, KernelInterface

from headrace.backends import cuda
from headrace.backends.base import Lines, StepState
from headrace.backends.cuda.decode_ops import DecodeOps
from headrace.backends.cuda.device import SLOT_PADDING_BYTES, CudaDevice, CudaWeight
from headrace.backends.cuda.ops import CudaOps
from headrace.backends.cuda.tiles import Tiles
from headrace.gguf import TensorInfo
from headrace.quants import TYPES
from headrace.sampling import MOST_CANDIDATES
from headrace.spec import MoeSpec, RopeSpec
from ops import cases

PAGE = 64
TILES = ((1024, 1025, 1600), (512, 513, 700), (256, 300), (64, 65, 100), (17, 32, 18, 1))
"""Prompt lengths, grouped by the tiles they take (8 of 64 experts a token)."""
BATCHES = (1, 2, 3, 16)
"""Sequences in a decode step."""


class Driver:
    """What the JIT asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Launches:
    """Every kernel that was compiled, once, with the constants of its launch."""

    def __init__(self) -> None:
        self.compiled: dict[int, tuple[Any, JITFunction, dict[str, Any]]] = {}
        KernelInterface.__getitem__ = lambda kernel, grid: self.launcher(kernel, grid)

    def launcher(self, kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            built = kernel.run(*args, grid=grid, warmup=True, **constants)
            self.compiled.setdefault(id(built), (built, kernel, constants))

        return launch

    def describe(self) -> Iterator[dict[str, Any]]:
        for built, kernel, constants in self.compiled.values():
            yield {
                "kernel": kernel.__name__,
                "constants": {k: getattr(v, "__name__", str(v)) for k, v in constants.items()},
                "shared_bytes": built.metadata.shared,
                "dot": "tt.dot" in built.asm["ttir"],
                "tensor_cores": "mma" in built.asm["ptx"],
            }


class Lab(cases.Lab):
    """Tensors of the right shapes whose numbers do not matter; with `cached`, gathered experts have cache lines."""

    cached = False

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def weight(self, type_name: str, *shape: int, scale: float = 1.0, gathered: bool = False) -> Any:
        kind = TYPES[type_name]
        info = TensorInfo("w", kind, shape, 0, 0, kind.n_bytes(shape))
        data = torch.empty(info.n_bytes + SLOT_PADDING_BYTES, dtype=torch.uint8)
        lines = Lines(data, *(torch.zeros(shape[0], dtype=torch.int32) for _ in range(3))) if self.cached else None
        return CudaWeight(info, data, data if gathered else None, lines)

    def state(self, *sequences: tuple[int, int], n_block: int = 32, page: int = PAGE) -> StepState:
        return super().state(*sequences, n_block=32, page=PAGE)

    def get(self, *tensors: Any) -> cases.Result:
        return []


def all_kernels() -> set[str]:
    """The names of the package's kernels."""
    found = set()
    for module in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found.add(name)
    return found


def prefill(lab: Lab, t: int) -> None:
    """Every op of the prefill phase in the shapes of Qwen3.6-35B-A3B, with fewer experts, and of other families."""
    cases.norm_case(lab, t, 2048)
    cases.gate_case(lab, t, 512)
    cases.rows_case(lab, t)
    cases.row_case(lab, t, 2048)
    for rope in (RopeSpec(64), RopeSpec(128, interleaved=True)):
        cases.rope_case(lab, rope, t=t, heads=16, dim=256)
    cases.embed_case(lab, "Q4_K", t)
    cases.linear_case(lab, "Q4_K", t, 512, 2048)
    cases.linear_case(lab, "F32", t, 256, 2048)
    for heads, kv, dim, window, sinks in ((16, 2, 256, 0, False), (32, 4, 128, 0, False), (64, 8, 64, 128, True)):
        cases.attention_case(lab, (0, t), heads=heads, kv=kv, dim=dim, window=window, sinks=sinks)
    cases.route_case(lab, t, MoeSpec(256, 8, 512, 1e-6))
    cases.route_case(lab, t, MoeSpec(128, 4, 512, 1e-6, gating="sigmoid"), bias=True)
    cases.experts_case(lab, "Q4_K", t, 512, 256, used=8, n_expert=64)
    if t < 64:
        cases.experts_case(lab, "MXFP4", t, 96, 1408, used=8, n_expert=64, bias=True, activation="gelu")
        cases.experts_case(lab, "Q4_K", t, 512, 256, used=8, n_expert=64, gathered=True)
    cases.delta_case(lab, (0, t), k_heads=16, v_heads=32, dim=128)


def decode(lab: Lab, n: int) -> None:
    """The ops of a decode step of n sequences, as far as they differ."""
    cases.row_case(lab, n, 2048)
    for k in (1, MOST_CANDIDATES):
        cases.top_k_case(lab, n, 248320, k)
    cases.linear_case(lab, "Q4_K", n, 512, 2048)
    cases.attention_case(lab, *[(130, 1)] * n, heads=16, kv=2, dim=256)
    for cached in (False, True):
        lab.cached = cached
        cases.experts_case(lab, "Q4_K", n, 2048, 512, used=4, gathered=True, bias=True)
    cases.experts_case(lab, "Q4_K", n, 2048, 512, used=4, fused=True)
    cases.route_case(lab, n, MoeSpec(256, 8, 512, 1e-6))
    cases.route_case(lab, n, MoeSpec(128, 4, 512, 1e-6, gating="sigmoid"), bias=True)
    cases.delta_case(lab, *[(70, 1)] * n, k_heads=16, v_heads=32, dim=128)


def split(lab: Lab, n: int) -> None:
    """Experts of a decode step that the CPU has a part in."""
    lab.cached = False
    cases.experts_case(lab, "Q4_K", n, 2048, 512, used=4, gathered=True)


def tensor_type(ops: Lab, decode_ops: Lab, name: str) -> None:
    """The kernels that decode weights of a type; those of experts have the loop of the mat-vec."""
    cases.embed_case(ops, name)
    cases.linear_case(ops, name, 64, 512, 512)
    cases.linear_case(decode_ops, name, 1, 512, 512)


def main(capability: int, types: list[str]) -> dict[str, Any]:
    triton.runtime.driver.set_active(Driver(capability))
    launches, device = Launches(), CudaDevice(0, interpret=True)
    device.act_dtype = "bf16"
    device.ops = CudaOps(device.where, torch.bfloat16, Tiles.of(divmod(capability, 10)))
    device.decode_ops = DecodeOps(device.ops)
    labs = Lab(device), Lab(device, decode=True)
    again = []

    def run(lab: Lab, step: Callable[[Lab, int], None], group: tuple[int, ...]) -> None:
        step(lab, group[0])
        for t in group[1:]:
            before = len(launches.compiled)
            step(lab, t)
            again.extend({"tokens": t, "after": group[0], **d} for d in list(launches.describe())[before:])

    for group in TILES:
        run(labs[0], prefill, group)
    run(labs[1], decode, BATCHES)
    device.split_experts(2, 1)
    run(Lab(device, decode=True), split, BATCHES)
    device.close()
    for name in types:
        tensor_type(*labs, name)
    kernels = list(launches.describe())
    missing = sorted(all_kernels() - {k["kernel"] for k in kernels})
    return {"triton": triton.__version__, "kernels": kernels, "again": again, "missing": missing}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
