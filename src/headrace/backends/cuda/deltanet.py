"""Gated delta net in chunks of CHUNK tokens, and the short convolution in front of it.

Inside a chunk with start state S0 and running log decay c_i (c_i - c_j <= 0 for j <= i) the rule
    S_i = exp(g_i) S_{i-1} + k_i u_i^T,   u_i = b_i (v_i - exp(g_i) S_{i-1}^T k_i)
is the triangular system (I + A) U = diag(b) V - diag(b exp(c)) K S0, A_ij = b_i exp(c_i - c_j) k_i.k_j for j < i
(Gated DeltaNet, arXiv 2412.06464, section 3.3). `prepare_kernel` solves it for all chunks at once up to S0:
U = U0 - W S0. `scan_kernel` then walks the chunks of a sequence with a slice of S in registers.

Chunks start at the first token of a ubatch's sequence part, which is a multiple of CHUNK in every prompt because
micro-batches are; a state carried over a border is the same float32 numbers as one kept in registers.
"""

import triton
import triton.language as tl

CHUNK = 64
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def find_chunk(seq_start, n_seq, chunk, CHUNK: tl.constexpr):
    """(sequence, first token, end of the sequence) of the chunk-th chunk over all sequences; past the last: end 0."""
    s, n_before, found = 0, 0, 0
    first = 0
    stop = tl.load(seq_start + 1)
    n = tl.cdiv(stop, CHUNK)
    while (s + 1 < n_seq) & (chunk >= n_before + n):
        n_before += n
        s += 1
        first = stop
        stop = tl.load(seq_start + s + 1)
        n = tl.cdiv(stop - first, CHUNK)
    row = first + (chunk - n_before) * CHUNK
    return s, row, tl.where(row < stop, stop, found)


@triton.jit(do_not_specialize=["n_seq"])
def prepare_kernel(
    q, k, v, alpha, beta, dt_bias, a, decay, u0, w, p, seq_start, n_seq, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, alpha_token, beta_token, n_k_head, n_v_head,
    KD: tl.constexpr, VD: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Per chunk and v-head: decay [chunk, H, C] running log decay, u0 [., C, DIM_V], w [., C, DIM_K], p [., C, C] =
    masked, decayed q k^T * scale. KD, VD are the dimensions rounded up to powers of two."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    _, row, stop = find_chunk(seq_start, n_seq, chunk, CHUNK)
    if row >= stop:
        return
    i = tl.arange(0, CHUNK)
    rows = (row + i).to(tl.int64)
    live = row + i < stop
    dk, dv = tl.arange(0, KD), tl.arange(0, VD)
    khead = head % n_k_head
    kt = tl.load(
        k + rows[:, None] * k_token + khead * k_head + dk[None, :],
        mask=live[:, None] & (dk < DIM_K)[None, :],
        other=0.0,
    )
    qt = tl.load(
        q + rows[:, None] * q_token + khead * q_head + dk[None, :],
        mask=live[:, None] & (dk < DIM_K)[None, :],
        other=0.0,
    )
    vt = tl.load(
        v + rows[:, None] * v_token + head * v_head + dv[None, :], mask=live[:, None] & (dv < DIM_V)[None, :], other=0.0
    )
    x = tl.load(alpha + rows * alpha_token + head, mask=live, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    g = tl.where(live, tl.load(a + head) * softplus(x), 0.0)
    b = 1.0 / (1.0 + tl.exp(-tl.load(beta + rows * beta_token + head, mask=live, other=0.0).to(tl.float32)))
    b = tl.where(live, b, 0.0)
    c = tl.cumsum(g, 0)
    at = (chunk * n_v_head + head).to(tl.int64)
    tl.store(decay + at * CHUNK + i, c)
    gap = tl.where(i[:, None] >= i[None, :], c[:, None] - c[None, :], 0.0)
    gamma = tl.exp(gap)
    kk = tl.dot(kt, tl.trans(kt))
    lower = i[:, None] > i[None, :]
    strict = tl.where(lower, b[:, None] * gamma * kk, 0.0)
    # (I + A)^-1 by halves: [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]] for blocks of 2, 4, ... CHUNK rows.
    # Every part is an inverse itself, so nothing grows. (I - A)(I + A^2)(I + A^4)... is as short, but equal keys, as of
    # a repeated token, make its powers 1e10 times the result: 1e9 off with b = 0.9.
    half = i[:, None] ^ i[None, :]
    inverse = tl.where(half == 0, 1.0, tl.where(half == 1, -strict, 0.0))
    size = 2
    while size < CHUNK:
        b_part = tl.where((half >= size) & (half < 2 * size), strict, 0.0)
        b_part = tl.dot(inverse, b_part, input_precision="tf32x3")
        inverse -= tl.dot(b_part, inverse, input_precision="tf32x3")
        size *= 2
    t = inverse.to(kt.dtype)
    u = tl.dot(t, (b[:, None] * vt.to(tl.float32)).to(kt.dtype))
    wt = tl.dot(t, (b[:, None] * tl.exp(c)[:, None] * kt.to(tl.float32)).to(kt.dtype))
    tl.store(
        u0 + at * CHUNK * DIM_V + i[:, None] * DIM_V + dv[None, :],
        u.to(u0.dtype.element_ty),
        mask=(dv < DIM_V)[None, :],
    )
    tl.store(
        w + at * CHUNK * DIM_K + i[:, None] * DIM_K + dk[None, :], wt.to(w.dtype.element_ty), mask=(dk < DIM_K)[None, :]
    )
    qk = tl.dot(qt, tl.trans(kt)) * scale
    pt = tl.where(i[:, None] >= i[None, :], gamma * qk, 0.0)
    tl.store(p + at * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :], pt.to(p.dtype.element_ty))


@triton.jit
def scan_kernel(
    q, k, out, decay, u0, w, p, state, state_slots, positions, seq_start, scale,
    q_token, q_head, k_token, k_head, out_token, out_head, n_k_head, n_v_head,
    KD: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of one head's state through all chunks of one sequence. Grid: (VD / BV, H, S)."""
    v0, head, s = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(seq_start + s), tl.load(seq_start + s + 1)
    if first >= stop:
        return
    chunk = 0
    for before in range(s):
        chunk += tl.cdiv(tl.load(seq_start + before + 1) - tl.load(seq_start + before), CHUNK)
    i, dk, dv = tl.arange(0, CHUNK), tl.arange(0, KD), v0 + tl.arange(0, BV)
    kmask, vmask = dk < DIM_K, dv < DIM_V
    slot = tl.load(state_slots + s).to(tl.int64) * n_v_head + head
    sp = state + slot * DIM_K * DIM_V + dk[:, None] * DIM_V + dv[None, :]
    fresh = tl.load(positions + first) == 0
    st = tl.load(sp, mask=kmask[:, None] & vmask[None, :] & (fresh == 0), other=0.0)
    khead = head % n_k_head
    for row in range(first, stop, CHUNK):
        at = (chunk * n_v_head + head).to(tl.int64)
        rows = (row + i).to(tl.int64)
        live = row + i < stop
        kt = tl.load(
            k + rows[:, None] * k_token + khead * k_head + dk[None, :], mask=live[:, None] & kmask[None, :], other=0.0
        )
        qt = tl.load(
            q + rows[:, None] * q_token + khead * q_head + dk[None, :], mask=live[:, None] & kmask[None, :], other=0.0
        )
        c = tl.load(decay + at * CHUNK + i)
        end = tl.sum(tl.where(i == CHUNK - 1, c, 0.0), 0)
        wt = tl.load(w + at * CHUNK * DIM_K + i[:, None] * DIM_K + dk[None, :], mask=kmask[None, :], other=0.0)
        ut = tl.load(u0 + at * CHUNK * DIM_V + i[:, None] * DIM_V + dv[None, :], mask=vmask[None, :], other=0.0).to(
            tl.float32
        )
        pt = tl.load(p + at * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
        s16 = st.to(kt.dtype)
        ut -= tl.dot(wt, s16)
        u16 = ut.to(kt.dtype)
        o = tl.dot(qt, s16) * (tl.exp(c) * scale)[:, None]
        o = tl.dot(pt, u16, o)
        op = out + rows[:, None] * out_token + head * out_head + dv[None, :]
        tl.store(op, o.to(out.dtype.element_ty), mask=live[:, None] & vmask[None, :])
        kd = (kt.to(tl.float32) * tl.exp(end - c)[:, None]).to(kt.dtype)
        st = tl.dot(tl.trans(kd), u16, st * tl.exp(end))
        chunk += 1
    tl.store(sp, st, mask=kmask[:, None] & vmask[None, :])


@triton.jit(do_not_specialize=["n_seq", "n_tokens"])
def conv_kernel(
    x, weight, out, conv, state_slots, positions, seq_start, n_seq, n_tokens, n, x_token, out_token,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = silu(sum over taps of weight[c, i] * input at token - TAPS + 1 + i), earlier inputs from conv."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, cm = t < n_tokens, c < n
    s = tl.zeros((TOKENS,), tl.int32)
    for other in range(1, n_seq):
        s += (tl.load(seq_start + other) <= t).to(tl.int32)
    first = tl.load(seq_start + s, mask=live, other=0)
    slot = tl.load(state_slots + s, mask=live, other=0).to(tl.int64)
    fresh = tl.load(positions + first, mask=live, other=0) == 0
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(TAPS):
        at = t - (TAPS - 1 - i)
        inside = live & (at >= first)
        new = tl.load(
            x + at.to(tl.int64)[:, None] * x_token + c[None, :], mask=inside[:, None] & cm[None, :], other=0.0
        )
        old_row = slot * (TAPS - 1) + (at - first + TAPS - 1)
        kept = live & (at < first) & (fresh == 0)
        old = tl.load(conv + old_row[:, None] * n + c[None, :], mask=kept[:, None] & cm[None, :], other=0.0)
        total += (new.to(tl.float32) + old) * tl.load(weight + c * TAPS + i, mask=cm, other=0.0)[None, :]
    y = total / (1.0 + tl.exp(-total))
    tl.store(
        out + t.to(tl.int64)[:, None] * out_token + c[None, :],
        y.to(out.dtype.element_ty),
        mask=live[:, None] & cm[None, :],
    )


@triton.jit
def conv_state_kernel(x, conv, state_slots, positions, seq_start, n, x_token, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Leaves the last TAPS - 1 inputs of each sequence in conv; runs after conv_kernel. Grid: (S, channels / BLOCK)."""
    s = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cm = c < n
    first, stop = tl.load(seq_start + s), tl.load(seq_start + s + 1)
    if first >= stop:
        return
    fresh = tl.load(positions + first) == 0
    base = conv + tl.load(state_slots + s).to(tl.int64) * (TAPS - 1) * n + c
    for i in tl.static_range(TAPS - 1):  # rising i: an old row is read before a later i overwrites it
        at = stop - (TAPS - 1) + i
        new = tl.load(x + at.to(tl.int64) * x_token + c, mask=cm & (at >= first), other=0.0).to(tl.float32)
        old_row = at - first + TAPS - 1
        old = tl.load(base + old_row * n, mask=cm & (at < first) & (fresh == 0), other=0.0)
        tl.store(base + i * n, new + old, mask=cm)
