"""Puzzles of redundancy: any one rank may be lost, and with it all that it holds."""

from collectives.checking.definitions import Operation, held
from collectives.checking.simulator import Stats
from collectives.puzzles.puzzle import Puzzle


def survives(stats: Stats) -> str:
    """Whoever is lost, its x can be made of what the others hold: an element, or a sum less elements that are there."""
    for lost, buffers_lost in enumerate(stats.buffers):
        if len(stats.buffers) == 1:
            break
        values_left = [
            value
            for rank, each in enumerate(stats.buffers)
            if rank != lost
            for values in each.values()
            for value in values
        ]
        plain = {value[0] for value in values_left if len(value) == 1}
        for value in buffers_lost["x"]:
            element = value[0]
            sums = (v for v in values_left if v.count(element) == 1)
            if not any(all(other in plain for other in v if other != element) for v in sums):
                return f"if rank {lost} is lost, nothing that is left tells what its x[{element[1]}] was"
    return ""


KEEP = Operation(
    before=lambda r, p, n, root: {"x": held(r, 0, n)},
    after=lambda r, p, n, root: ("x", 0, held(r, 0, n)),
)

buddy = Puzzle(
    "a neighbour's copy",
    """Every rank has six elements of its own in x, and keeps them. Any one rank may be lost: say rank 2. Then all that
    it had must still be there. No rank may hold more than six elements beside its own, nor send more.""",
    4,
    6,
    KEEP,
    {"rounds": 1, "moved": 6, "held": 6},
    {"rounds": 1, "moved": 6, "held": 6},
    ((2, 3), (3, 4), (5, 4)),
    rule=survives,
)

parity = Puzzle(
    "a third of the memory",
    """The same, but no rank may hold more than two elements beside its own. An element need not be there itself: a sum
    is enough, if all but that one of its operands are there (so do disks, with RAID 5). `RecvReduce` adds what
    comes to what is there; what is not there yet must be copied or received first.""",
    4,
    6,
    KEEP,
    {"moved": 6, "held": 2},
    {"moved": 6, "held": 2},
    ((3, 4), (5, 8)),
    rule=survives,
)
