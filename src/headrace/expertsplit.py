"""Which router ranks of a decoded token the CPU computes while the GPU fetches the others: a pure choice."""


def share_s(first: int, n_used: int, link_gbps: float, cpu_gbps: float) -> float:
    """Time of a layer's experts with ranks first.. on the CPU, in units of an expert's bytes a GB/s."""
    return max(first / link_gbps, (n_used - first) / cpu_gbps)


def choose_rank(n_used: int, link_gbps: float, cpu_gbps: float) -> int:
    """The first rank of the CPU's share, 1 .. n_used - 1 where there are two ranks: the split whose slower side is done
    first; of equals the one that gives the GPU more."""
    assert link_gbps > 0 and cpu_gbps > 0
    if n_used < 2:
        return 0 if cpu_gbps > link_gbps else n_used
    return min(range(n_used - 1, 0, -1), key=lambda first: share_s(first, n_used, link_gbps, cpu_gbps))
