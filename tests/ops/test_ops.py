"""Every backend that computes, against the reference, over the one op-case table."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from headrace.backends import open_device
from headrace.backends.base import Device
from ops.cases import CASES, Case, Result

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and all(map(importlib.util.find_spec, ("torch", "triton")))
BACKENDS = ["cpu", *(["cuda"] if INTERPRETED else [])]
LIMITS = {
    "cpu": {"exact": (2e-5, 2e-6), "product": (0.12, 0.025)},
    "cuda": {"exact": (2e-2, 2e-3), "product": (3e-2, 3e-3)},
}
"""Greatest and RMS error, both relative to the RMS of the right numbers. On a CPU activations are quantised to int8 and
the products of two of them lie one behind the other; on CUDA they are float16 everywhere."""


def wrong(right: Result, got: Result, most: float, rms_most: float) -> str:
    """Where the results differ by more than the limits, worst element first; empty if they agree."""
    for i, (a, b) in enumerate(zip(right, got, strict=True)):
        assert a.shape == b.shape and np.isfinite(a).all()
        if not a.size:
            continue
        scale = np.sqrt(np.mean(a**2)) or 1.0
        error = np.abs(a - b) / np.maximum(scale, np.abs(a))  # gates make a few outputs many times the RMS
        error = np.where(np.isnan(error), np.inf, error)
        worst, rms = np.unravel_index(np.argmax(error), error.shape), np.sqrt(np.mean(error**2))
        if error.max() > most or rms > rms_most:
            at = f"output {i} at {tuple(map(int, worst))}: {b[worst]} instead of {a[worst]}"
            return f"{at}; error {error.max():.2g} of {most}, RMS {rms:.2g} of {rms_most}; scale {scale:.3g}"
    return ""


@pytest.fixture(scope="module", params=BACKENDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param, n_threads=2)
    yield opened
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_the_reference(case: Case, device: Device) -> None:
    name = "cuda" if device.info.kind == "gpu" else "cpu"
    found = wrong(case.run(open_device("reference")), case.run(device), *LIMITS[name][case.tolerance])
    assert not found, found


@pytest.mark.skipif(not INTERPRETED, reason="the CUDA cases need torch, triton and TRITON_INTERPRET=1")
def test_cuda_is_among_the_backends() -> None:
    """One visible skip instead of two hundred where the CUDA kernels cannot be interpreted."""
    assert "cuda" in BACKENDS


@pytest.mark.parametrize("case", [c for c in CASES if c.tolerance == "product"], ids=lambda c: c.name)
def test_interleaved_weights_on_cpu(case: Case) -> None:
    with closing(open_device("cpu", n_threads=2)) as device:
        found = wrong(case.run(open_device("reference")), case.run(device, "interleaved"), *LIMITS["cpu"]["product"])
    assert not found, found


@pytest.mark.parametrize("spoil", [
    lambda x: x[::-1], lambda x: np.where(x == x[1, 2], np.nan, x), lambda x: np.where(x == x[1, 2], -x, x),
    lambda x: x * 1.05,
], ids=["rows swapped", "one not written", "one sign", "five percent"])  # fmt: skip
def test_the_check_can_fail(spoil: Callable[[np.ndarray], np.ndarray]) -> None:
    right = np.random.default_rng(0).standard_normal((5, 8))
    right[1, 2] = 1
    assert not wrong([right], [right], 0.12, 0.025) and wrong([right], [spoil(right)], 0.12, 0.025)
