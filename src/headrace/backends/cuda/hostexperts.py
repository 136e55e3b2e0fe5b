"""Routed experts of the decode phase that the CPU computes where they lie, while the GPU does the rest of the step.

Ranks from `first_rank` on of a layer whose experts are in host memory go to the CPU; the ranks before it are gathered
and computed here at the same time. `request_kernel` writes the layer's activations, ids and weights to pinned memory
and asks for the sum (see cpu/service.py); the combining kernel waits for it. Both are ordinary kernels, so a step stays
one graph, and no host function, copy or Python stands between the two processors.

The CPU quantises activations to int8: its part is outside of the bit contract (docs/numerics.md). The order of the sum
is fixed by the rank alone: ranks of the GPU in rank order, plus the sum of the CPU's in rank order.
"""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from ...errors import UserError
from ...gguf import TensorInfo
from ...quants import TYPES, random_blocks
from ...rates import Rates, load_rates, save_rates
from ..base import DeviceInfo, Routing
from ..cpu import machine
from ..cpu.ops import CpuOps
from ..cpu.service import CALLS, DONE, GIVEN_UP, N_CALLS, SERIAL, WORDS, Service, expert_program
from ..cpu.team import Program, Team
from ..cpu.weights import CpuWeight
from .decode_ops import DecodeOps
from .ops import CudaOps

Tensor = torch.Tensor
MOST_TURNS = 1 << 24
"""Looks over the link, about 1 us each, after which the GPU takes the CPU for gone: the step ends, wrong."""


@triton.jit(do_not_specialize=["calls", "n_calls", "n_tokens"])
def request_kernel(
    x, ids, weights, host_x, host_ids, host_weights, own_ids, own_weights, box, serial, calls, n_calls, n_tokens, n,
    x_stride, FIRST: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, CALLS: tl.constexpr,
    N_CALLS: tl.constexpr, SERIAL: tl.constexpr,
):  # fmt: skip
    """Hands x [T, n] and the ranks from FIRST on to the host, keeps the ranks before; one program."""
    r = tl.arange(0, RANKS)
    k = tl.arange(0, BLOCK)
    mine, theirs = r < FIRST, (r >= FIRST) & (r < TOP_K)
    for t in range(n_tokens):
        e = tl.load(ids + t * TOP_K + r, mask=r < TOP_K, other=0)
        w = tl.load(weights + t * TOP_K + r, mask=r < TOP_K, other=0.0)
        tl.store(own_ids + t * FIRST + r, e, mask=mine)
        tl.store(own_weights + t * FIRST + r, w, mask=mine)
        tl.store(host_ids + t * (TOP_K - FIRST) + r - FIRST, e, mask=theirs)
        tl.store(host_weights + t * (TOP_K - FIRST) + r - FIRST, w, mask=theirs)
        for start in range(0, n, BLOCK):
            inside = start + k < n
            v = tl.load(x + t * x_stride + start + k, mask=inside, other=0.0).to(tl.float32)
            tl.store(host_x + t * n + start + k, v, mask=inside)
    tl.store(box + CALLS, calls.to(tl.int64))
    tl.store(box + N_CALLS, n_calls.to(tl.int64))
    tl.debug_barrier()
    number = tl.atomic_add(serial, 1, sem="acq_rel", scope="sys") + 1  # what was written before is seen before
    tl.store(box + SERIAL, number)


@triton.jit
def combine_host_kernel(
    x, y, weights, host_y, box, serial, n, x_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr, DONE: tl.constexpr,
    GIVEN_UP: tl.constexpr, MOST_TURNS: tl.constexpr,
):  # fmt: skip
    """x [T, n] += weights[t, r] * y[t * TOP_K + r] over r in rank order, + host_y [T, n], once the host is done. If it
    has not answered after MOST_TURNS looks nobody waits any more, and what is added is wrong."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < n
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(TOP_K):
        w = tl.load(weights + token * TOP_K + r)
        total += w * tl.load(y + (token * TOP_K + r) * n + k, mask=mask, other=0.0).to(tl.float32)
    wanted = tl.load(serial)
    done = tl.load(box + DONE, volatile=True)
    turns = tl.where(tl.load(box + GIVEN_UP, volatile=True) != 0, MOST_TURNS, 0)
    while (done < wanted) & (turns < MOST_TURNS):
        done = tl.load(box + DONE, volatile=True)
        turns += 1
    if done < wanted:
        tl.store(box + GIVEN_UP, 1)
    tl.debug_barrier()
    total += tl.load(host_y + token * n + k, mask=mask, other=0.0, volatile=True)
    xp = x + token * x_stride + k
    tl.store(xp, tl.load(xp, mask=mask) + total, mask=mask)


@dataclass(frozen=True)
class Exchange:
    """Buffers for a number of tokens: x, ids, weights and y in host memory, ids and weights of the GPU's own ranks."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor
    own_ids: Tensor
    own_weights: Tensor


def host_bytes(weight: Any) -> NDArray[np.uint8]:
    """The mapped bytes of a weight that stays in host memory."""
    return weight.host.array if hasattr(weight.host, "array") else weight.host.numpy()


def team_threads(where: torch.device, n_threads: int) -> int:
    """Threads of the CPU's team: the wish, or all but the one that waits for the GPU, spinning."""
    return machine.threads(n_threads) if n_threads else max(1, machine.threads(0) - (where.type == "cuda"))


class HostExperts:
    """The CPU's side of a device: a team, words and buffers shared with the GPU, a program per layer and number of
    tokens. Without streams (the interpreter) a request is served at once by who makes it."""

    def __init__(self, where: torch.device, first_rank: int, n_threads: int) -> None:
        self.where, self.first_rank, self.on_gpu = where, first_rank, where.type == "cuda"
        self.team = Team(team_threads(where, n_threads), PATIENCE)
        self.cpu = CpuOps(self.team)
        self.box = self._host((WORDS,), torch.int64)
        self.serial = torch.zeros(1, dtype=torch.int64, device=where)
        self.service = Service(self.team, self.box.numpy()) if self.on_gpu else None
        self.exchanges: dict[tuple[int, int, int], Exchange] = {}
        self.programs: dict[tuple[str, int], Program] = {}
        self.n_captured = 0
        """Requests in recordings so far."""

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.on_gpu)

    def exchange(self, n_tokens: int, n_embd: int, top_k: int) -> Exchange:
        key = (n_tokens, n_embd, top_k)
        if key not in self.exchanges:
            own, theirs = (n_tokens, self.first_rank), (n_tokens, top_k - self.first_rank)
            self.exchanges[key] = Exchange(
                self._host((n_tokens, n_embd), torch.float32), self._host(theirs, torch.int32),
                self._host(theirs, torch.float32), self._host((n_tokens, n_embd), torch.float32),
                torch.zeros(own, dtype=torch.int32, device=self.where),
                torch.zeros(own, dtype=torch.float32, device=self.where),
            )  # fmt: skip
        return self.exchanges[key]

    def program(self, at: Exchange, gate: Any, up: Any, down: Any, activation: str) -> Program:
        key = (down.info.name, len(at.x))
        if key not in self.programs:
            views = (v.numpy() for v in (at.x, at.ids, at.weights, at.y))
            gate, up, down = (w and CpuWeight(w.info, host_bytes(w)) for w in (gate, up, down))
            self.programs[key] = expert_program(self.cpu, *views, gate, up, down, activation)
        return self.programs[key]

    def request(self, at: Exchange, x: Tensor, routing: Routing, program: Program) -> None:
        n_tokens, n = x.shape
        top_k = routing.ids.shape[1]
        if self.service and torch.cuda.is_current_stream_capturing():
            self.n_captured += 1
        else:
            self.expect(1)
        request_kernel[(1,)](
            x, routing.ids, routing.weights, at.x, at.ids, at.weights, at.own_ids, at.own_weights, self.box,
            self.serial, program.address, program.n_calls, n_tokens, n, x.stride(0), FIRST=self.first_rank, TOP_K=top_k,
            RANKS=triton.next_power_of_2(top_k), BLOCK=min(1024, triton.next_power_of_2(n)), CALLS=CALLS,
            N_CALLS=N_CALLS, SERIAL=SERIAL, num_warps=8,
        )  # fmt: skip
        if not self.service:
            self.answer(program)

    def answer(self, program: Program) -> None:
        """What the service does, here and now."""
        self.team.run(program)
        self.box[DONE] = self.box[SERIAL]

    def expect(self, n: int) -> None:
        """n requests are about to be queued."""
        if self.service:
            self.service.expect(n)

    def check(self) -> None:
        """UserError if a request was not answered; it stays so."""
        if self.box[GIVEN_UP]:
            raise UserError("the CPU did not answer the GPU within some 20 s of a decode step; open the model again")

    def settle(self) -> None:
        """After an exception, when the device is idle."""
        if self.service:
            self.service.settle()

    def close(self) -> None:
        """To be called when the device is idle."""
        if self.service:
            self.service.close()
        self.team.close()


PATIENCE = 150_000
"""Turns that an idle team waits, 2 to 7 ms: longer than choosing a token takes, so that it is awake for the next."""
SAMPLE_EXPERTS, SAMPLE_USED, SAMPLE_EMBD, SAMPLE_FF = 256, 8, 2048, 512
"""Shape of the experts that `measured` computes: 453 MB of Q4_K, more than caches hold."""


def measured(device: Any, n_threads: int) -> DeviceInfo:
    """What is known of a device, with the speeds that a split is chosen by: measured once on a machine, then kept."""
    from .probe import measured_rates

    n = team_threads(device.where, n_threads)
    name = f"{machine.cpu_name()} {n} threads"
    kept = load_rates(name)
    if not kept or not kept.expert_gbps:
        kept = Rates(expert_gbps=cpu_gbps(n))
        save_rates(name, kept)
    link_gbps = device.info.link_gbps or measured_rates(device).link_gbps
    return replace(device.info, link_gbps=link_gbps, cpu_gbps=kept.expert_gbps)


def cpu_gbps(n_threads: int, n_runs: int = 24) -> float:
    """GB/s of one token's experts, other ones each time."""
    team, rng = Team(n_threads), np.random.default_rng(0)
    kind, shapes = TYPES["Q4_K"], [(SAMPLE_FF, SAMPLE_EMBD)] * 2 + [(SAMPLE_EMBD, SAMPLE_FF)]
    infos = [
        TensorInfo("sample", kind, (SAMPLE_EXPERTS, *s), 0, 0, SAMPLE_EXPERTS * s[0] * kind.row_bytes(s[1]))
        for s in shapes
    ]
    one = random_blocks(kind, infos[0].n_bytes // kind.block_bytes // SAMPLE_EXPERTS, rng, 0.02).reshape(-1)
    weights = [CpuWeight(info, np.tile(one, SAMPLE_EXPERTS)) for info in infos]
    x, y = (rng.standard_normal((1, SAMPLE_EMBD)).astype(np.float32) for _ in range(2))
    ids, gates = np.zeros((1, SAMPLE_USED), np.int32), np.ones((1, SAMPLE_USED), np.float32)
    program = expert_program(CpuOps(team), x, ids, gates, y, *weights, "silu")
    seconds = []
    for i in range(n_runs):
        ids[0] = np.arange(SAMPLE_USED) * SAMPLE_EXPERTS // SAMPLE_USED + i % (SAMPLE_EXPERTS // SAMPLE_USED)
        start = time.perf_counter()
        team.run(program)
        seconds.append(time.perf_counter() - start)
    team.close()
    return sum(info.n_bytes for info in infos) * SAMPLE_USED / SAMPLE_EXPERTS / statistics.median(seconds) / 1e9


class SplitOps(DecodeOps):
    """The decode phase's ops where the CPU computes experts of host layers. The request needs all three weights, so
    expert_glu waits for expert_down."""

    def __init__(self, ops: CudaOps, host: HostExperts) -> None:
        super().__init__(ops)
        self.host = host
        self.glu_args: tuple[Any, ...] = ()
        self.asked: Exchange | None = None
        """What a combine of this layer must wait for."""

    def expert_glu(
        self, out: Tensor, x: Tensor, routing: Routing, gate: Any, up: Any, activation: str,
        gate_bias: Any = None, up_bias: Any = None,
    ) -> None:  # fmt: skip
        args = (out, x, routing, gate, up, activation)
        self.glu_args, self.asked = (), None  # an exception may have left something of another layer
        if gate.host is None or (up and up.host is None):
            super().expert_glu(*args, gate_bias, up_bias)
        elif gate_bias or up_bias:
            raise UserError(f"tensor {gate.info.name!r} has a bias: use --expert-decode gather")
        else:
            self.glu_args = args

    def expert_down(self, out: Tensor, h: Tensor, routing: Routing, down: Any, bias: Any = None) -> None:
        if not self.glu_args:
            super().expert_down(out, h, routing, down, bias)
            return
        args, self.glu_args = self.glu_args, ()
        _, x, _, gate, up, activation = args
        if down.host is None or not len(x) or self.host.first_rank >= routing.ids.shape[1]:
            super().expert_glu(*args)
            super().expert_down(out, h, routing, down, bias)
            return
        if bias:
            raise UserError(f"tensor {down.info.name!r} has a bias: use --expert-decode gather")
        at = self.host.exchange(*x.shape, routing.ids.shape[1])
        self.host.request(at, x, routing, self.host.program(at, gate, up, down, activation))
        if n := at.own_ids.numel():
            own = Routing(at.own_ids, at.own_weights, routing.order, routing.starts)
            super().expert_glu(h[:n], x, own, gate, up, activation)
            super().expert_down(out[:n], h[:n], own, down)
        self.asked = at

    def fetched(self, w: Any, routing: Routing, last: bool = False) -> Tensor:
        if w.host is not None and not self.host.first_rank:
            why = "others of its layer are not: keep them together, or use --expert-decode gather"
            raise UserError(f"tensor {w.info.name!r} is in host memory, {why}")
        return super().fetched(w, routing, last)

    def combine(self, x: Tensor, y: Tensor, routing: Routing) -> None:
        at, self.asked = self.asked, None
        if at is None:
            super().combine(x, y, routing)
            return
        t, n = x.shape
        block = min(256, triton.next_power_of_2(n))
        combine_host_kernel[(t, triton.cdiv(n, block))](
            x, y, at.own_weights, at.y, self.host.box, self.host.serial, n, x.stride(0), TOP_K=self.host.first_rank,
            BLOCK=block, DONE=DONE, GIVEN_UP=GIVEN_UP, MOST_TURNS=MOST_TURNS, num_warps=2,
        )  # fmt: skip
