"""Every backend that computes, against the reference, over the one op-case table."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from headrace.backends import open_device
from headrace.backends.base import Device, RecurrentLayer
from headrace.spec import DeltaNetSpec, MoeSpec
from ops.cases import CASES, Case, Lab, Result

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and all(map(importlib.util.find_spec, ("torch", "triton")))
BACKENDS = ["cpu", *(["cuda"] if INTERPRETED else [])]
LIMITS = {
    "cpu": {"bits": (0, 0), "exact": (2e-5, 2e-6), "product": (0.12, 0.025)},
    "cuda": {"bits": (0, 0), "exact": (2e-2, 2e-3), "product": (3e-2, 3e-3)},
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


def decoded(device: Device, chosen: list[int]) -> Result:
    """What route, conv1d and delta_net leave of some of three sequences, a row each."""
    lab, spec, moe = Lab(device, decode=True), DeltaNetSpec(2, 6, 96, 96, 4, 1e-6), MoeSpec(100, 6, 32, 1e-6)
    h, kv = spec.n_v_head, (spec.n_k_head, 96)
    weight, dt_bias, a = lab.normal(spec.conv_width, 4), lab.normal(h), -np.abs(lab.normal(h))
    shapes = (100,), (spec.conv_width,), kv, kv, (h, 96), (2, h), (3, spec.conv_width), (h, 96, 96)
    logits, x, q, k, v, gates, inputs, states = (lab.normal(3, *shape)[chosen] for shape in shapes)
    state = lab.state(*((past, 1) for past in np.array([40, 0, 7])[chosen]))
    slots, n = device.download(state.state_slots).copy(), len(chosen)
    cache = RecurrentLayer(*(lab.tensor(kept[np.argsort(slots)], "f32") for kept in (inputs, states)))
    conv, out, routing = lab.out(n, spec.conv_width), lab.out(n, h, 96), lab.routing(n, moe)
    lab.ops.route(routing, lab.tensor(logits, "f32"), moe)
    lab.ops.conv1d(conv, lab.tensor(x), lab.vector(weight), cache, state)
    alpha, beta = (lab.tensor(g, "f32") for g in (gates[:, 0], gates[:, 1]))
    qkv = [lab.tensor(t / 96**0.5) for t in (q, k, v)]
    lab.ops.delta_net(out, *qkv, alpha, beta, lab.vector(dt_bias), lab.vector(a), cache, state, spec)
    kept = [t[slots] for t in lab.get(cache.conv, cache.s)]
    return [*lab.get(routing.ids, routing.weights, conv, out), *kept]


def test_a_sequence_decodes_alike_whatever_is_beside_it(device: Device) -> None:
    together = decoded(device, [0, 1, 2])
    for i in range(3):
        for a, b in zip(together, decoded(device, [i])):
            np.testing.assert_array_equal(a[i : i + 1], b)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_nan_logits_route_to_experts_that_exist(device: Device, decode: bool, gating: str) -> None:
    lab, spec = Lab(device, decode=decode), MoeSpec(6, 4, 32, 1e-6, gating=gating)
    logits, routing = lab.normal(3, 6), lab.routing(3, spec)
    logits[1, 2], logits[2] = np.nan, np.nan
    lab.ops.route(routing, lab.tensor(logits, "f32"), spec)
    ids = device.download(routing.ids)
    assert ids.min() >= 0 and ids.max() < 6


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
