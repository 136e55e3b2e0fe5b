"""Every tile decoder on Triton's interpreter: the very numbers of `headrace.quants`."""

import numpy as np
import pytest

from headrace.quants import TYPES, dequantize, random_blocks

torch = pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")

from headrace.backends.cuda import decoders  # noqa: E402
from headrace.backends.cuda.dequant import dequant_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
N_ROWS, WIDTH, ROWS = 13, 512, 8


def test_no_type_is_left_out() -> None:
    assert set(decoders.DECODERS) == set(TYPES)


@pytest.mark.parametrize("valid", [True, False], ids=["valid", "any bits"])
@pytest.mark.parametrize("name", TYPES)
def test_decodes_as_the_definition(name: str, valid: bool) -> None:
    kind, rng = TYPES[name], np.random.default_rng(5)
    n = N_ROWS * WIDTH // kind.block
    raw = random_blocks(kind, n, rng, 0.1) if valid else rng.integers(0, 256, (n, kind.block_bytes), np.uint8)
    block = decoders.decode_block(name, kind.block)
    out = torch.full((N_ROWS, WIDTH), -7.0)
    dequant_kernel[(triton.cdiv(N_ROWS, ROWS) * (WIDTH // block),)](
        torch.from_numpy(raw.reshape(-1)), torch.from_numpy(decoders.table(name)), out, N_ROWS, WIDTH // block,
        kind.row_bytes(WIDTH), out, 0, 1, DECODE=decoders.DECODERS[name], BLOCK=block,
        BLOCK_BYTES=block * kind.block_bytes // kind.block, ROWS=ROWS, SKIP=False,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        right = dequantize(raw.reshape(-1), kind, (N_ROWS, WIDTH))
    np.testing.assert_array_equal(out.numpy(), right)
