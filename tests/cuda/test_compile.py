"""Every Triton kernel compiled, without a GPU, for the cards people have: it must fit their shared memory, and the
products must use tensor cores. Runs in a process without the interpreter (see conftest.py)."""

from dataclasses import dataclass, field
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: E402

from headrace.backends.cuda import attention, decoders, deltanet, dequant, experts, gemm, router, rows  # noqa: E402
from headrace.backends.cuda.tiles import Tiles  # noqa: E402

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory that one block may use, by compute capability (CUDA programming guide, table of technical specs)."""

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted in this process")


@dataclass(frozen=True)
class Specimen:
    """A kernel with the constants of a real launch; `types` names the arguments that are no plain i32."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    tensor_cores: bool = False


ACT = "*bf16"


def specimens(capability: int) -> list[Specimen]:
    tiles = Tiles.of((capability // 10, capability % 10))
    out = []

    def weights(bn: int, dtype: str = "bf16") -> str:
        return f"tensordesc<{dtype}[{bn},{gemm.BK}]>" if tiles.tma else f"*{dtype}"

    for name, decode in decoders.DECODERS.items():
        block = decoders.decode_block(name, 32 if name == "Q8_0" else 256)
        constants = {"DECODE": decode, "BLOCK": block, "BLOCK_BYTES": 64, "ROWS": 8}
        out.append(
            Specimen(
                f"dequant-{name}",
                dequant.dequant_kernel,
                {"src": "*u8", "lut": "*i32", "dst": ACT},
                constants,
                {"num_warps": 2},
            )
        )
    for bm, bn, warps, stages in tiles.gemm:
        types = {"x": ACT, "w": weights(bn), "bias": "*fp32", "out": "*fp32"}
        flags = {"TMA": tiles.tma, "ADD": True, "HAS_BIAS": True, "EVEN_K": True, "PRECISION": "ieee", "GROUP": 8}
        out.append(
            Specimen(
                f"gemm-{bm}",
                gemm.gemm_kernel,
                types,
                {**flags, "BM": bm, "BN": bn, "BK": gemm.BK},
                {"num_warps": warps, "num_stages": stages},
                True,
            )
        )
    f32 = {"x": ACT, "w": weights(64, "fp32"), "bias": "*fp32", "out": "*fp32"}
    flags = {"TMA": tiles.tma, "ADD": False, "HAS_BIAS": False, "EVEN_K": True, "PRECISION": "tf32x3", "GROUP": 8}
    out.append(
        Specimen(
            "gemm-f32",
            gemm.gemm_kernel,
            f32,
            {**flags, "BM": 64, "BN": 64, "BK": gemm.BK},
            {"num_warps": 4, "num_stages": 2},
            True,
        )
    )
    maps = {"order": "*i32", "starts": "*i32", "tile_expert": "*i32", "tile_row": "*i32"}
    flags = {"TMA": tiles.tma, "HAS_BIAS": False, "EVEN_K": True, "PRECISION": "ieee", "BK": gemm.BK}
    for bm, bn, warps, stages in tiles.glu:
        types = {
            "x": ACT,
            "gate": weights(bn),
            "up": weights(bn),
            "gate_bias": "*fp32",
            "up_bias": "*fp32",
            "out": ACT,
            **maps,
        }
        out.append(
            Specimen(
                f"glu-{bm}",
                experts.expert_glu_kernel,
                types,
                {**flags, "TOP_K": 8, "GELU": False, "BM": bm, "BN": bn},
                {"num_warps": warps, "num_stages": stages},
                True,
            )
        )
    for bm, bn, warps, stages in tiles.down:
        types = {"h": ACT, "down": weights(bn), "bias": "*fp32", "out": ACT, **maps}
        out.append(
            Specimen(
                f"down-{bm}",
                experts.expert_down_kernel,
                types,
                {**flags, "BM": bm, "BN": bn},
                {"num_warps": warps, "num_stages": stages},
                True,
            )
        )
    out.append(
        Specimen(
            "tile-map",
            experts.tile_map_kernel,
            {"starts": "*i32", "tile_expert": "*i32", "tile_row": "*i32"},
            {"BM": 128, "E": 256, "BLOCK": 16},
            {"num_warps": 8},
        )
    )
    for c in (64, 128, 256):
        bm, bn, warps, stages = tiles.attention_wide if c > 128 else tiles.attention
        types = {
            "q": ACT,
            "k_cache": f"tensordesc<fp16[{bn},{c}]>" if tiles.tma else "*fp16",
            "v_cache": f"tensordesc<fp16[{bn},{c}]>" if tiles.tma else "*fp16",
            "out": ACT,
            "sinks": "*fp32",
            "positions": "*i32",
            "seq_start": "*i32",
            "block_table": "*i32",
            "scale": "fp32",
        }
        constants = {"TMA": tiles.tma, "PAGE": 64, "WINDOW": 0, "HAS_SINKS": False, "C": c, "DIM": c, "BN": bn}
        for height in (bm, 16):
            out.append(
                Specimen(
                    f"attention-{c}-{height}",
                    attention.attention_kernel,
                    types,
                    {**constants, "BM": height},
                    {"num_warps": warps, "num_stages": stages},
                    True,
                )
            )
    ints = {"seq_start": "*i32", "state_slots": "*i32", "positions": "*i32"}
    prepare = {
        "q": ACT,
        "k": ACT,
        "v": ACT,
        "alpha": "*fp32",
        "beta": "*fp32",
        "dt_bias": "*fp32",
        "a": "*fp32",
        "decay": "*fp32",
        "u0": ACT,
        "w": ACT,
        "p": ACT,
        "seq_start": "*i32",
        "scale": "fp32",
    }
    dims = {"KD": 128, "DIM_K": 128, "DIM_V": 128, "CHUNK": deltanet.CHUNK}
    out.append(Specimen("delta-prepare", deltanet.prepare_kernel, prepare, {**dims, "VD": 128}, {"num_warps": 4}, True))
    scan = {
        "q": ACT,
        "k": ACT,
        "out": ACT,
        "decay": "*fp32",
        "u0": ACT,
        "w": ACT,
        "p": ACT,
        "state": "*fp32",
        "scale": "fp32",
        **ints,
    }
    out.append(
        Specimen("delta-scan", deltanet.scan_kernel, scan, {**dims, "BV": 32}, {"num_warps": 4, "num_stages": 2}, True)
    )
    conv = {"x": ACT, "weight": "*fp32", "out": ACT, "conv": "*fp32", **ints}
    out.append(Specimen("conv", deltanet.conv_kernel, conv, {"TAPS": 4, "TOKENS": 16, "BLOCK": 128}))
    out.append(
        Specimen(
            "conv-state", deltanet.conv_state_kernel, {"x": ACT, "conv": "*fp32", **ints}, {"TAPS": 4, "BLOCK": 128}
        )
    )
    top = {
        "logits": "*fp32",
        "bias": "*fp32",
        "ids": "*i32",
        "weights": "*fp32",
        "counts": "*i32",
        "weight_scale": "fp32",
    }
    out.append(
        Specimen(
            "topk",
            router.topk_kernel,
            top,
            {
                "TOP_K": 8,
                "E": 256,
                "SIGMOID": False,
                "HAS_BIAS": False,
                "NORM": True,
                "TOKENS": router.TOKENS,
                "RANKS": 8,
            },
        )
    )
    out.append(
        Specimen("scan", router.scan_kernel, {"counts": "*i32", "totals": "*i32"}, {"E": 256, "COLS": 16, "BLOCKS": 64})
    )
    out.append(
        Specimen(
            "order",
            router.order_kernel,
            dict.fromkeys(("ids", "counts", "totals", "order", "starts"), "*i32"),
            {"TOP_K": 8, "E": 256, "TOKENS": router.TOKENS},
        )
    )
    out.append(
        Specimen(
            "norm",
            rows.norm_kernel,
            {"x": "*fp32", "weight": "*fp32", "out": ACT, "eps": "fp32"},
            {"L2": False, "HAS_WEIGHT": True, "ROWS": 1, "BLOCK": 2048},
        )
    )
    out.append(Specimen("glu", rows.binary_kernel, {"a": ACT, "b": ACT, "out": ACT}, {"OP": rows.glu, "BLOCK": 1024}))
    out.append(
        Specimen(
            "rope",
            rows.rope_kernel,
            {"x": ACT, "positions": "*i32", "inverse_frequencies": "*fp32", "factors": "*fp32", "magnitude": "fp32"},
            {"HALF": 32, "PAIRS": 32, "INTERLEAVED": False, "HAS_FACTORS": False, "HEADS": 16},
        )
    )
    out.append(
        Specimen(
            "combine", rows.combine_kernel, {"x": "*fp32", "y": ACT, "weights": "*fp32"}, {"TOP_K": 8, "BLOCK": 1024}
        )
    )
    out.append(
        Specimen(
            "embed",
            rows.embed_kernel,
            {"table": "*u8", "lut": "*i32", "ids": "*i32", "out": "*fp32"},
            {"DECODE": decoders.DECODERS["Q4_K"], "BLOCK": 256, "BLOCK_BYTES": 144},
        )
    )
    return out


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(capability: int) -> None:
    for s in specimens(capability):
        names = s.kernel.arg_names
        missing = set(s.types) | set(s.constants)
        assert missing <= set(names), f"{s.name}: no argument {missing - set(names)}"
        signature = {n: "constexpr" if n in s.constants else s.types.get(n, "i32") for n in names}
        constexprs = {(names.index(n),): value for n, value in s.constants.items()}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n not in s.constants and signature[n][0] in "*i" and not n.startswith("n_tokens")
        }
        source = ASTSource(fn=s.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
        built = compile(source, target=GPUTarget("cuda", capability, 32), options=s.options)
        assert built.metadata.shared <= SHARED_BYTES[capability], (
            f"{s.name}: {built.metadata.shared} bytes of shared memory on sm_{capability}"
        )
        if s.tensor_cores:
            assert "mma" in built.asm["ptx"], f"{s.name}: no tensor-core instruction on sm_{capability}"
