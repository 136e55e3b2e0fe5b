"""What can go wrong between two queues, read off the list of their orders. Pure: used by the null device."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

Range = tuple[int, int, int]
"""(buffer, first byte, past the last byte)."""


@dataclass
class Order:
    """Something that a queue does. `clock` counts, for each queue, the orders known to be done before it."""

    queue: str
    name: str
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    seconds: float
    clock: dict[str, int]
    start_s: float
    at: int
    weights: tuple[tuple[str, Range], ...] = ()
    """The weights among what it reads, by tensor name."""
    source: str = ""
    """The tensor that a copy brings from the host, if the device was told of it."""


def races(orders: list[Order]) -> Iterator[str]:
    """Orders of different queues that touch the same bytes, one writing, with nothing to order them."""
    touched: defaultdict[tuple[str, int], list[tuple[Range, bool, Order]]] = defaultdict(list)
    for order in orders:
        other = "copy" if order.queue == "compute" else "compute"
        uses = [(r, False) for r in order.reads] + [(w, True) for w in order.writes]
        for mine, is_write in uses:
            for theirs, wrote, before in touched[other, mine[0]]:
                if (is_write or wrote) and overlap(mine, theirs) and before.at >= order.clock.get(other, 0):
                    verb = "writes" if is_write else "reads"
                    where = f"buffer {mine[0]} [{mine[1]}:{mine[2]}]"
                    beside = f"{other} {before.name} #{before.at}"
                    yield f"{order.queue} {order.name} #{order.at} {verb} {where} beside {beside}"
        for mine, is_write in uses:
            touched[order.queue, mine[0]].append((mine, is_write, order))


def wrong_slots(orders: list[Order], slots: Collection[int]) -> Iterator[str]:
    """Weights read from a slot where no copy has put them; where nothing races the latest copy counts."""
    held: dict[int, Order] = {}
    for order in orders:
        for name, (buffer, _, stop) in order.weights:
            copy = held.get(buffer)
            if buffer in slots and (copy is None or copy.writes[0][2] < stop or copy.source not in ("", name)):
                lies = f"{copy.source or 'something shorter'} lies" if copy else "nothing was copied"
                yield f"{order.name} #{order.at} reads {name} from buffer {buffer}, where {lies}"
        for buffer, _, _ in order.writes:
            held.pop(buffer, None)
            if order.name == "copy" and buffer in slots:
                held[buffer] = order


def covered(ranges: list[tuple[int, int]], first: int) -> int:
    """How far the union of ranges reaches from `first` without a gap."""
    for start, stop in sorted(ranges):
        if start <= first < stop:
            first = stop
    return first


def overlap(a: Range, b: Range) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
