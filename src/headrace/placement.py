"""Where each tensor lives and why: mapped, resident, or streamed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from .backends.base import DeviceInfo
from .config import Config, overrides
from .errors import UserError
from .gguf import TensorInfo
from .program import Program

GIB = 2**30
REPACK_HEADROOM = 1.15
"""Peak memory over the weights' bytes while they are regrouped."""


@dataclass(frozen=True)
class Placement:
    """Where one tensor lives.

    feed: "mapped" (read in the file's map), "resident" (loaded once into the device's own memory), "stream" (uploaded
    whole into a slot each time). layout: "in_place" or "interleaved".
    """

    tensor: str
    feed: str
    layout: str
    n_bytes: int
    reason: str


def host_placements(
    program: Program, tensors: Mapping[str, TensorInfo], device: DeviceInfo, config: Config, other_bytes: int,
    reasons: list[str],
) -> dict[str, Placement]:  # fmt: skip
    """A device that computes from host memory: weights stay mapped, or are regrouped if that fits."""
    names = [*program.resident_tensors, *program.expert_tensors]
    fast = [
        name for name in names
        if tensors[name].type.name in device.repack_types and len(tensors[name].shape) > 1
        and name != "token_embd.weight"  # its rows are read one by one
    ]  # fmt: skip
    need_bytes = int(REPACK_HEADROOM * sum(tensors[name].n_bytes for name in fast)) + other_bytes
    if config.repack == "on" and not fast:
        raise UserError(f"--repack on: {device.name} has no interleaved layout for this file's tensor types")
    repack = config.repack == "on" or (config.repack == "auto" and need_bytes < device.free_bytes)
    if fast and not repack and config.repack == "auto":
        reasons.append(
            f"regrouping would need {need_bytes / GIB:.1f} GiB of {device.free_bytes / GIB:.1f}: weights in place"
        )
    why = {"on": "--repack on", "auto": "faster, and RAM allows"}.get(config.repack, "")
    chosen = set(fast) if repack else set()
    return {
        name: Placement(name, "resident", "interleaved", tensors[name].n_bytes, why)
        if name in chosen
        else Placement(name, "mapped", "in_place", tensors[name].n_bytes, "read where the file is mapped")
        for name in names
    }


def gpu_placements(
    program: Program, tensors: Mapping[str, TensorInfo], pinned: Mapping[str, bool], n_host: int, why: str
) -> dict[str, Placement]:  # fmt: skip
    """Everything on the device but the experts of the first n_host layers; `pinned` tensors are where -ot puts them.

    `why` is the reason for n_host.
    """
    out = {
        name: Placement(name, "resident", "in_place", tensors[name].n_bytes, "not an expert")
        for name in program.resident_tensors
    }
    for step in program.steps:
        for name in step.experts.tensors if step.experts else ():
            on_host = pinned.get(name, step.layer < n_host)
            out[name] = Placement(
                name, "stream" if on_host else "resident", "in_place", tensors[name].n_bytes,
                "-ot" if name in pinned else why if on_host else f"beyond {why}",
            )  # fmt: skip
    return out


def fixed_by_user(program: Program, config: Config) -> tuple[int | None, str]:
    """(layers from the first on whose experts stay on the host, or None if the user leaves it open; the flag)."""
    n_layer = program.spec.n_layer
    below_ngl = max(0, n_layer - config.n_gpu_layers) if config.n_gpu_layers >= 0 else 0
    if below_ngl and not program.spec.is_moe:
        raise UserError(
            f"-ngl {config.n_gpu_layers}: only experts can stay on the host and {program.spec.name} has none; "
            "leave -ngl out, or use --backend cpu"
        )
    n_host = n_layer if config.cpu_moe else min(config.n_cpu_moe, n_layer)
    if below_ngl > n_host >= 0 or (below_ngl and n_host < 0):
        return below_ngl, f"-ngl {config.n_gpu_layers}"
    if n_host < 0:
        return None, ""
    return n_host, "-cmoe" if config.cpu_moe else f"-ncmoe {n_host}"


def pinned_by_user(program: Program, config: Config, reasons: list[str]) -> dict[str, bool]:
    """Expert tensors that -ot sends somewhere -> whether to the host; the first pattern that is found in a name counts,
    as in llama.cpp. UserError for a pattern that is found nowhere, and for other tensors that cannot go there."""
    pinned: dict[str, bool] = {}
    experts, others = program.expert_tensors, program.resident_tensors
    found: set[str] = set()
    for o in overrides(config.override_tensor):
        hits = [name for name in (*experts, *others) if o.pattern.search(name)]
        if not hits:
            example = experts[0] if experts else others[0]
            raise UserError(f"-ot {o.pattern.pattern}: no tensor has such a name; names are like {example}")
        for name in hits:
            if name in found:
                continue
            found.add(name)
            if name in experts:
                pinned[name] = o.on_host
            elif o.on_host and "_exps." in name:
                reasons.append(f"{name} stays on the GPU: -ot moves weights of experts, not their biases and scales")
            elif o.on_host:
                raise UserError(
                    f"-ot {o.pattern.pattern}=CPU: {name} is no expert tensor, and only those can stay on the host; "
                    r"a pattern for them is 'ffn_(gate|up|down|gate_up)_exps'"
                )
    return pinned
