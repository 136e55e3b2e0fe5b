"""Experts on request: what a device would write to shared memory, against the reference."""

import threading
import time

import numpy as np
import pytest

from headrace.backends import open_device
from headrace.backends.base import Routing
from headrace.backends.cpu.calls import at
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.service import CALLS, DONE, N_CALLS, SERIAL, WORDS, Service, expert_program
from headrace.backends.cpu.team import Team
from headrace.backends.cpu.weights import CpuWeight
from headrace.gguf import TensorInfo
from headrace.quants import TYPES, random_blocks

N_EXPERT, D, F = 16, 256, 512
LIMIT = 0.04
"""RMS error over the RMS: int8 activations in two products, one behind the other (measured: at most 0.026)."""


def box():
    block = np.zeros(2 * WORDS, np.int64)
    start = -at(block) % 64 // 8
    return block[start : start + WORDS]


def raw_weight(rng, name, *shape):
    kind = TYPES[name]
    raw = random_blocks(kind, int(np.prod(shape)) // kind.block, rng, shape[-1] ** -0.5).reshape(-1)
    return TensorInfo("w", kind, shape, 0, 0, raw.nbytes), raw


class Layer:
    """Random experts and inputs of n tokens, k experts each."""

    def __init__(self, n, k, types=("Q4_K", "Q4_K", "Q6_K"), seed=0):
        rng = np.random.default_rng(seed)
        self.raws = [raw_weight(rng, t, N_EXPERT, *s) for t, s in zip(types, ((F, D), (F, D), (D, F)))]
        self.x = rng.standard_normal((n, D)).astype(np.float32)
        self.ids = np.stack([rng.permutation(N_EXPERT)[:k] for _ in range(n)]).astype(np.int32).reshape(n, k)
        self.weights = rng.random((n, k)).astype(np.float32)
        self.y = np.full((n, D), np.nan, np.float32)

    def program(self, ops):
        gate, up, down = (CpuWeight(info, raw) for info, raw in self.raws)
        return expert_program(ops, self.x, self.ids, self.weights, self.y, gate, up, down, "silu")

    def right(self):
        device = open_device("reference")
        gate, up, down = (device.load(info, raw) for info, raw in self.raws)
        flat = self.ids.ravel()
        starts = np.searchsorted(np.sort(flat), np.arange(N_EXPERT + 1)).astype(np.int32)
        routing = Routing(self.ids, self.weights, np.argsort(flat, kind="stable").astype(np.int32), starts)
        act, out = np.zeros((flat.size, F), np.float32), np.zeros((flat.size, D), np.float32)
        y = np.zeros_like(self.y)
        device.ops.expert_glu(act, self.x, routing, gate, up, "silu")
        device.ops.expert_down(out, act, routing, down)
        device.ops.combine(y, out, routing)
        return y


class Served:
    def __init__(self, n_threads):
        self.team, self.box = Team(n_threads), box()
        self.ops, self.service = CpuOps(self.team), Service(self.team, self.box)
        self.kept = []

    def request(self, program):
        """As a device does it: the serial number last."""
        self.kept.append(program)
        self.box[CALLS], self.box[N_CALLS] = program.address, program.n_calls
        self.box[SERIAL] += 1

    def wait(self):
        end = time.monotonic() + 30
        while self.box[DONE] != self.box[SERIAL]:
            assert time.monotonic() < end, "not served"
            time.sleep(1e-4)

    def close(self):
        self.service.close()
        self.team.close()


@pytest.fixture(params=[1, 2])
def served(request):
    made = Served(request.param)
    yield made
    made.close()


def error(right, got):
    return np.sqrt(np.mean((right - got) ** 2)) / np.sqrt(np.mean(right**2))


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_requests_against_the_reference(served, n, k):
    layer = Layer(n, k, seed=n + 10 * k)
    served.service.expect(1)
    served.request(layer.program(served.ops))
    served.wait()
    assert error(layer.right(), layer.y) < LIMIT


def test_types_without_kernels_of_their_own(served):
    layer = Layer(3, 4, ("Q3_K", "Q3_K", "F16"))
    served.request(layer.program(served.ops))
    served.service.expect(1)
    served.wait()
    assert error(layer.right(), layer.y) < LIMIT


def test_the_same_request_again_reads_new_data(served):
    layer = Layer(1, 3)
    program = layer.program(served.ops)
    served.service.expect(20)
    for i in range(20):
        layer.x[:] = np.random.default_rng(i).standard_normal(layer.x.shape)
        layer.ids[:] = (layer.ids + 1) % N_EXPERT
        served.request(program)
        served.wait()
        assert error(layer.right(), layer.y) < LIMIT


def test_it_sleeps_and_wakes(served):
    """A request that comes when thread and team have long been idle is served, whether announced before or after."""
    layer = Layer(1, 2)
    program, right = layer.program(served.ops), layer.right()
    for announce_first in (True, False, True):
        time.sleep(0.05)
        layer.y[:] = np.nan
        if announce_first:
            served.service.expect(1)
            time.sleep(0.01)
        served.request(program)
        if not announce_first:
            served.service.expect(1)
        served.wait()
        assert error(right, layer.y) < LIMIT


def test_what_was_expected_and_never_came(served):
    """Keeps the thread awake, until who was interrupted says that it will not come; then all is as before."""
    served.service.expect(2)
    time.sleep(0.05)
    assert not served.service.asleep
    served.service.settle()
    end = time.monotonic() + 10
    while not served.service.asleep:
        assert time.monotonic() < end
        time.sleep(0.01)
    layer = Layer(1, 2)
    served.service.expect(1)
    served.request(layer.program(served.ops))
    served.wait()
    assert error(layer.right(), layer.y) < LIMIT


def test_closing_ends_the_thread():
    before = threading.active_count()
    served = Served(2)
    served.close()
    assert threading.active_count() == before
    served = Served(1)
    time.sleep(0.05)  # asleep
    served.close()
    assert threading.active_count() == before


def test_a_forgotten_service_ends():
    before = threading.active_count()
    served = Served(2)
    del served
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
