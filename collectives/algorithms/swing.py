"""Swing: an allreduce whose partners swing from one side to the other, so that messages on a torus travel less far.

In step s partners are rho(s) = (1 - (-2)^(s+1)) / 3 = 1, -1, 3, -5, 11 ... apart; halving has 1, 2, 4, 8 ... On a ring
of 64 ranks the fullest channel carries 1.55 n in the reduce-scatter, and 3 n by halving. Source: De Sensi et al.,
Swing, NSDI 2024.
"""

from itertools import zip_longest

from collectives.algorithms.bine import distance, to_negabinary
from collectives.algorithms.bucket import sides_of
from collectives.algorithms.power_of_two import on_power_of_two
from collectives.algorithms.reduce import halving_cost
from collectives.algorithms.registry import COMMUTATIVE, DIMS, algorithm
from collectives.steps import Recv, RecvReduce, Send, chunk


@algorithm("allreduce", cost=halving_cost, needs={COMMUTATIVE, DIMS})
def swing(rank, size, count, dims=None):
    """Reduce-scatter by swinging partners, allgather back: 2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma.

    With `dims` the steps go through the dimensions in turn; all sides must be powers of two. Without them any number of
    ranks will do: what is beyond a power of two is folded, which takes two messages of n more.
    """
    sides = sides_of(size, dims)
    if dims is not None:
        refuse_odd_sides(sides)
        yield from exchanges(rank, sides, 0, count, 0, 1, lambda number: number)
        return

    def exchange(folded):
        yield from exchanges(folded.number, (folded.power,), 0, count, 0, 1, folded.rank)

    yield from on_power_of_two(rank, size, exchange, lambda r: (0, count), lambda r: (0, count))


def multiport_swing(rank, size, count, dims=None):
    """All 2D directions of a torus at once: 2D Swings on n/2D each.

    Half of them are mirrored, and each begins in another dimension.
    """
    sides = sides_of(size, dims)
    refuse_odd_sides(sides)
    directions = [(first, direction) for first in range(len(sides)) for direction in (1, -1)]
    copies = [
        exchanges(rank, sides, *chunk(count, len(directions), i), first, direction, lambda number: number)
        for i, (first, direction) in enumerate(directions)
    ]
    for rounds in zip_longest(*copies, fillvalue=()):
        yield tuple(step for steps in rounds for step in steps)


def refuse_odd_sides(sides) -> None:
    """Swing needs sides that are powers of two."""
    if wrong := [side for side in sides if side & (side - 1)]:
        raise ValueError(
            f"swing on {'x'.join(map(str, sides))}: a side of {wrong[0]} is no power of two; take bucket, or no dims"
        )


def exchanges(number, sides, lo, hi, first, direction, rank_of):
    """The rounds of one rank on x[lo:hi]: halves kept and given, and the way back.

    Which half a rank keeps follows from its place in the order of `position`, so that what it has is always one slice.
    """
    size, place, rest = 1, [], number
    for side in reversed(sides):
        place.insert(0, rest % side)
        rest, size = rest // side, size * side
    steps, remaining = [], [side.bit_length() - 1 for side in sides]
    while any(remaining):  # through the dimensions in turn, the last one first
        for i in range(len(sides)):
            axis = (len(sides) - 1 - first - i) % len(sides)
            if remaining[axis]:
                steps.append((axis, sides[axis].bit_length() - 1 - remaining[axis]))
                remaining[axis] -= 1
    path, whole, count = [], (0, size), hi - lo
    for axis, step in steps:
        side, at = sides[axis], place[axis]
        by = direction * (distance(step) if at % 2 == 0 else -distance(step))
        stride = 1
        for later in sides[axis + 1 :]:
            stride *= later
        peer = number + ((at + by) % side - at) * stride
        bits = position(at if direction == 1 else -at % side, side)
        upper = bits >> (side.bit_length() - 2 - step) & 1
        middle = sum(whole) // 2
        halves = (whole[0], middle), (middle, whole[1])
        keep, give = (halves[1], halves[0]) if upper else halves
        slices = [(lo + chunk(count, size, a)[0], lo + chunk(count, size, b - 1)[1]) for a, b in (keep, give)]
        path.append((rank_of(peer), *slices))
        whole = keep
    for peer, keep, give in path:
        yield Send(peer, "x", *give), RecvReduce(peer, "x", *keep)
    for peer, keep, give in reversed(path):
        yield Send(peer, "x", *keep), Recv(peer, "x", *give)


def position(place: int, side: int) -> int:
    """Where the block of a rank of a ring lies (nu of the Bine paper), so that what it sends at once is one slice."""
    bits = side.bit_length() - 1
    least = sum((-2) ** i for i in range(1, bits, 2))
    most = sum((-2) ** i for i in range(0, bits, 2))
    found = []
    for x in (place, place - side) if place % 2 else (-place, side - place):
        if least <= x <= most:
            digits = to_negabinary(x)
            gray = (digits ^ digits >> 1) & (side - 1)
            found.append(int(format(gray, f"0{bits}b")[::-1], 2) if bits else 0)
    return min(found)
