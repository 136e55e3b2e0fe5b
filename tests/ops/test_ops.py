"""Every backend that computes, against the reference, over the one op-case table."""

import importlib.util
import os

import numpy as np
import pytest

from headrace.backends import open_device
from headrace.backends.base import Device
from headrace.quants import TYPES
from ops.cases import CASES, Case, Lab

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
BACKENDS = ["cpu", *(["cuda"] if INTERPRETED else [])]
"""`cuda` runs here on Triton's interpreter; tests/cuda starts a process that does so."""

LIMITS = {
    # backend: tolerance -> (greatest error, RMS error), both relative to the RMS of the right numbers
    "cpu": {"exact": (2e-5, 2e-6), "product": (0.12, 0.025)},
    "cuda": {"exact": (2e-2, 2e-3), "product": (3e-2, 3e-3)},
}


@pytest.fixture(scope="module", params=BACKENDS)
def device(request: pytest.FixtureRequest) -> Device:
    opened = open_device(request.param, n_threads=2)
    yield opened
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_the_reference(case: Case, device: Device) -> None:
    name = "cuda" if device.info.kind == "gpu" else "cpu"
    if name == "cuda":
        from headrace.backends.cuda.decoders import DECODERS

        if case.name.split()[-1] in set(TYPES) - set(DECODERS):
            pytest.skip("this tensor type has no CUDA decoder yet")
    right, got = case.run(Lab(open_device("reference"))), case.run(Lab(device))
    most, rms_most = LIMITS[name][case.tolerance]
    for i, (a, b) in enumerate(zip(right, got, strict=True)):
        assert a.shape == b.shape
        if not a.size:
            continue
        scale = np.sqrt(np.mean(a**2)) or 1.0
        error = np.abs(a - b) / np.maximum(scale, np.abs(a))  # gates make a few outputs many times the RMS
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        text = f"output {i} at {tuple(map(int, worst))}: {b[worst]} instead of {a[worst]}, RMS {scale:.3g}"
        assert error.max() <= most, text
        assert np.sqrt(np.mean(error**2)) <= rms_most, text


def test_the_check_can_fail(device: Device) -> None:
    """A swapped pair of outputs is seen."""
    (right,) = Case("", lambda lab: lab.get(lab.acts(3, 4))).run(Lab(device))
    assert np.abs(right - right[::-1]).max() > LIMITS["cpu"]["exact"][0]
