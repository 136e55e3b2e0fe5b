"""The CPU device: recordings, threads, layouts, memory; attention's independence of its batch."""

import dataclasses
import gc
import math
from itertools import pairwise

import numpy as np
import pytest

from headrace.backends import reference
from headrace.backends.base import KVLayer, RecurrentLayer, Routing, StepState
from headrace.backends.cpu import device as cpu
from headrace.backends.cpu import machine, open_device
from headrace.errors import UserError
from headrace.gguf import TensorInfo
from headrace.quants import TYPES, random_blocks
from headrace.spec import AttentionSpec, DeltaNetSpec, RopeSpec

PAGE = 64
ROPE = RopeSpec(32)
rng = np.random.default_rng(7)


@pytest.fixture(scope="module")
def device():
    found = open_device(n_threads=1)
    yield found
    found.close()


def floats(*shape):
    return rng.standard_normal(shape, np.float32)


def tensor(type_name, *shape):
    t = TYPES[type_name]
    raw = random_blocks(t, math.prod(shape) // t.block, rng, 0.1).reshape(-1)
    return TensorInfo("w", t, shape, 0, 0, raw.size), raw


def step_state(*sequences, n_block=16):
    """StepState of sequences (positions before, new tokens), their pages shuffled."""
    n = len(sequences)
    table = rng.permutation(n * n_block).astype(np.int32).reshape(n, n_block)
    positions = [np.arange(past, past + new) for past, new in sequences]
    slots = [table[s, p // PAGE] * PAGE + p % PAGE for s, p in enumerate(positions)]
    starts = np.cumsum([0, *(new for _, new in sequences)])
    ids = np.concatenate(positions).astype(np.int32)
    return StepState(
        ids, ids, np.concatenate(slots).astype(np.int32), starts.astype(np.int32), table, np.arange(n, dtype=np.int32),
        ids[:1], PAGE,
    )  # fmt: skip


def error(found, expected):
    return np.abs(found - expected).max() / np.sqrt(np.mean(np.square(expected)) + 1e-30)


def attend(device, state, spec, q, cache, sinks=None):
    out = np.full_like(q, np.nan)
    device.ops.attention(out, q, cache, state, spec, sinks)
    return out


# recordings


def test_a_recording_reads_its_buffers_anew(device):
    x, y = device.alloc((3, 40), "f32"), device.alloc((3, 40), "f32")
    x[...], y[...] = 1, 2
    assert not device.replay("sum")
    with device.record("sum"):
        device.ops.add(x, y)
        assert x[0, 0] == 1, "ops are collected, not run"
        device.ops.add(x, y)
    assert (x == 5).all(), "a recording runs once at its end"
    y[...] = 10
    assert device.replay("sum") and (x == 25).all()


def test_recordings_keep_their_memory(device):
    out = device.alloc((1, 64), "f32")

    def record():
        info, raw = tensor("F32", 64)
        with device.record("norm"):
            device.ops.rms_norm(out, floats(1, 64), device.load(info, raw), 1e-6)

    record()
    first = out.copy()
    gc.collect()
    junk = [np.full(64, 1e9, np.float32) for _ in range(1000)]
    assert device.replay("norm") and (out == first).all() and junk


def test_a_failed_recording_leaves_nothing_behind(device):
    x = device.alloc((1, 8), "f32")
    with pytest.raises(RuntimeError), device.record("broken"):
        device.ops.add(x, x)
        raise RuntimeError
    assert not device.replay("broken")
    x[...] = 3
    device.ops.add(x, x)
    assert (x == 6).all()


def test_the_oldest_recording_goes_first(device):
    x = device.alloc((1, 8), "f32")
    for i in range(cpu.N_PROGRAMS + 1):
        with device.record(("lru", i)):
            device.ops.add(x, x)
        device.replay(("lru", 0))
    assert device.replay(("lru", 0)) and not device.replay(("lru", 1))


def test_packed_activations_follow_writes(device):
    """Products of one program share packed activations, but not across a write to them."""
    a, b = device.load(*tensor("Q8_0", 48, 64)), device.load(*tensor("Q8_0", 32, 64))
    x, first, second, third = floats(2, 64), *(np.empty((2, n), np.float32) for n in (48, 32, 48))
    with device.record("packed"):
        device.ops.linear(first, x, a)
        device.ops.linear(second, x, b)
        n_calls = len(device.ops.collected.calls)
        device.ops.add(x[1:], x[1:])
        device.ops.linear(third, x, a)
    assert n_calls == 3, "one packing for two products"
    assert np.allclose(third[0], first[0]) and np.allclose(third[1], 2 * first[1], atol=1e-5)


# memory


def test_the_arena_repeats_its_addresses(device):
    arena = device.arena(4096)
    shapes = [((3, 5), "f32"), ((7,), "i32"), ((1, 100), "f32")]
    first = [arena.take(*s).ctypes.data for s in shapes]
    arena.reset()
    assert first == [arena.take(*s).ctypes.data for s in shapes]
    assert all(b - a == 256 for a, b in pairwise(first))
    with pytest.raises(AssertionError, match="too small"):
        arena.take((1000,), "f32")


@pytest.mark.parametrize("dtype", ["f32", "f16", "i32", "u8"])
def test_memory_is_zeroed_and_aligned(device, dtype):
    x = device.alloc((3, 7), dtype)
    assert x.shape == (3, 7) and not x.any() and x.ctypes.data % 64 == 0


def test_queues_copy_bytes(device):
    slot, source = device.alloc((16,), "u8"), np.arange(8, dtype=np.uint8)
    device.copy.copy(slot, source)
    assert (slot[:8] == source).all() and not slot[8:].any()
    x, y = device.alloc((2, 3), "f32"), floats(2, 3)
    device.compute.copy(x, y)
    device.upload(x[1:], np.zeros((1, 3), np.float32))
    got = device.download(x)
    assert (got[0] == y[0]).all() and not got[1].any() and got is not x


def test_weights_in_place_are_not_copied(device):
    info, raw = tensor("Q4_K", 32, 256)
    assert np.shares_memory(device.load(info, raw).data, raw)
    assert not np.shares_memory(device.load(info, raw, "interleaved").data, raw)


# layouts, threads


@pytest.mark.parametrize("n_tokens", [1, 5, 40])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q8_0"])
def test_layouts_agree(device, type_name, n_tokens):
    info, raw = tensor(type_name, 48, 512)
    x, outs = floats(n_tokens, 512), []
    for layout in ("in_place", "interleaved"):
        outs.append(np.empty((n_tokens, 48), np.float32))
        device.ops.linear(outs[-1], x, device.load(info, raw, layout))
    assert error(outs[1], outs[0]) < 1e-4


@pytest.mark.parametrize("type_name", ["F32", "BF16"])
def test_rows_of_any_width(device, type_name):
    """Float weights need no multiple of a vector."""
    ref, info, raw = reference.open_device(), *tensor(type_name, 7, 45)
    experts, table = tensor(type_name, 3, 5, 45), tensor(type_name, 20, 45)
    x, ids = floats(6, 45), np.arange(6, dtype=np.int32).reshape(6, 1) % 3
    order = np.argsort(ids.ravel(), kind="stable").astype(np.int32)
    routing = Routing(ids, np.ones((6, 1), np.float32), order, np.array([0, 2, 4, 6], np.int32))
    results = []
    for one in (device, ref):
        y, h, rows = np.ones((6, 7), np.float32), np.empty((6, 5), np.float32), np.empty((6, 45), np.float32)
        one.ops.linear(y, x, one.load(info, raw), add=True)
        one.ops.expert_down(h, x, routing, one.load(*experts))
        one.ops.embed(rows, one.load(*table), np.arange(6, dtype=np.int32) * 3)
        results.append((y, h, rows))
    assert all(error(a, b) < 1e-5 for a, b in zip(*results))


@pytest.mark.skipif(machine.available_cores() < 2, reason="needs two cores")
def test_threads_do_not_change_a_bit(device):
    two = open_device(n_threads=2)
    state, spec = step_state((700, 3), (0, 50)), AttentionSpec(8, 2, 64, ROPE, 0.2, 1e-6)
    net = DeltaNetSpec(2, 4, 32, 48, 4, 1e-6)
    n = len(state.positions)
    cache = KVLayer(*(floats(2 * 16 * PAGE, 2, 64).astype(np.float16) for _ in range(2)))
    q, x = floats(n, 8, 64), floats(n, 512)
    k, v, gates = floats(n, 2, 32) / 6, floats(n, 4, 48), floats(n, 4)
    conv, s = floats(2, 3, 512), floats(2, 4, 32, 48)
    w, taps, head = (one.load(*tensor(*t)) for one, t in (
        (device, ("Q4_K", 80, 512)), (device, ("F32", 512, 4)), (device, ("F32", 4))))  # fmt: skip
    results = []
    for one in (device, two):
        recurrent = RecurrentLayer(conv.copy(), s.copy())
        y, c, d = (np.empty(shape, np.float32) for shape in ((n, 80), (n, 512), (n, 4, 48)))
        one.ops.linear(y, x, w)
        one.ops.conv1d(c, x, taps, recurrent, state)
        one.ops.delta_net(d, k, k, v, gates, gates, head, head, recurrent, state, net)
        results.append((attend(one, state, spec, q, cache), y, c, d, recurrent.conv, recurrent.s))
    two.close()
    assert all((a == b).all() for a, b in zip(*results))


def test_more_threads_than_cores_are_refused():
    with pytest.raises(UserError, match="-t 9999: this process may run on"):
        open_device(n_threads=9999)


def test_the_device_tells_what_it_is(device):
    assert device.info.kind == "cpu" and 0 < device.info.free_bytes <= device.info.total_bytes
    assert "Q4_K" in device.info.repack_types and not device.info.copies_async


# recurrent layers


@pytest.mark.parametrize("sequences", [[(3, 1), (0, 1)], [(0, 9), (4, 20), (2, 0)]], ids=["decode", "prefill"])
def test_full_size_delta_net_is_the_references(device, sequences):
    """Heads of 128, whose strips are wide for one token and narrow for many."""
    net, state, ref = DeltaNetSpec(2, 4, 128, 128, 4, 1e-6), step_state(*sequences), reference.open_device()
    n, n_seq = len(state.positions), len(sequences)
    q, k, v, alpha, beta = floats(n, 2, 128) / 11, floats(n, 2, 128) / 11, floats(n, 4, 128), floats(n, 4), floats(n, 4)
    s, x, conv = floats(n_seq, 4, 128, 128), floats(n, net.conv_width), floats(n_seq, 3, net.conv_width)
    dt, taps = tensor("F32", 4), tensor("F32", net.conv_width, 4)
    decay = dt[0], (-np.abs(floats(4))).view(np.uint8)
    results = []
    for one in (device, ref):
        cache = RecurrentLayer(conv.copy(), s.copy())
        y, c = np.empty_like(v), np.empty_like(x)
        one.ops.conv1d(c, x, one.load(*taps), cache, state)
        one.ops.delta_net(y, q, k, v, alpha, beta, one.load(*dt), one.load(*decay), cache, state, net)
        results.append((y, c, cache.conv, cache.s))
    assert all(error(a, b) < 1e-5 for a, b in zip(*results))


# attention


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "heads, dim", [((8, 2), 64), ((3, 3), 128), ((16, 1), 32), ((2, 1), 40)], ids=["group4", "group1", "group16", "odd"]
)
def test_long_attention_is_the_references(device, heads, dim, dtype, window):
    """Positions split in ranges (few tokens), and tiles (many)."""
    spec = AttentionSpec(*heads, dim, ROPE, 2.0 * dim**-0.5, 1e-6, window)
    for state in (step_state((900, 1), (255, 2), (0, 0)), step_state((600, 40), (3, 1))):
        n = len(state.positions)
        cache = KVLayer(*(floats(state.block_table.size * PAGE, heads[1], dim).astype(dtype) for _ in range(2)))
        q, ref = floats(n, heads[0], dim), reference.open_device()
        assert error(attend(device, state, spec, q, cache), attend(ref, state, spec, q, cache)) < 5e-5


def test_a_row_of_attention_does_not_depend_on_its_batch(device):
    spec = AttentionSpec(8, 2, 64, ROPE, 0.25, 1e-6, window=70)
    state = step_state((0, 150), n_block=3)
    cache = KVLayer(*(floats(3 * PAGE, 2, 64).astype(np.float16) for _ in range(2)))
    q = floats(150, 8, 64)
    whole = attend(device, state, spec, q, cache)
    part = dataclasses.replace(
        state, positions=state.positions[90:140].copy(), seq_start=np.array([0, 50], np.int32)
    )  # fmt: skip
    assert (attend(device, part, spec, q[90:140].copy(), cache) == whole[90:140]).all()


def test_half_precision_keys_are_rounded_to_nearest_even(device):
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].astype(np.float32)
    ties = (every[:-1] + every[1:]) / 2
    x = np.concatenate([every, ties, np.float32([65519.99, 65520, 1e9, -1e9, np.inf, 1e-9])])
    x = np.resize(x, (-(-len(x) // 64), 1, 64)).astype(np.float32)
    cache = KVLayer(*(device.alloc(x.shape, "f16") for _ in range(2)))
    state = dataclasses.replace(step_state((0, 1)), kv_slots=np.arange(len(x), dtype=np.int32))
    device.ops.kv_store(cache, x, -x, state)
    with np.errstate(over="ignore"):
        assert (cache.k.view(np.uint16) == x.astype(np.float16).view(np.uint16)).all()
        assert (cache.v.view(np.uint16) == (-x).astype(np.float16).view(np.uint16)).all()
