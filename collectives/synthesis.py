"""Find a schedule for any connected network, and say how far it is from the best possible.

    found = synthesize("allreduce", Network.torus((4, 4)))
    communicator.Allreduce(x, y, algorithm=found)          # an ordinary schedule: check, price, draw and run it
    print(found.share_of_bound, found.as_python())

Two searches, of which the faster result counts. Time goes in equal *steps*, in which a channel carries as many pieces
of the vector as it has units of bandwidth; switches only pass on.

*Matching* (TACOS, Won et al. 2023): in each step free channels are matched with pieces that their source had when the
step began and their target lacks, first into the rank with the fewest, first the piece with the fewest holders; the
rest is chance, and the shortest of many tries is kept. So a piece travels along a tree out of the rank that has it,
which is an allgather. Backwards, with sums, that is a reduce-scatter; both after each other are an allreduce.

*Packed trees*, for an allreduce of long vectors: spanning trees that share the channels evenly, each for its part of
the vector. Segments follow each other up to the root, added on the way, and down again (ForestColl, Zhao et al. 2024,
packs trees so that the bound is met; here they are chosen greedily).

Bounds: `pricing.lower_bounds.bandwidth_bound`.
"""

import json
import math
import random
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from collectives.pricing.lower_bounds import allgather_bound, bandwidth_bound
from collectives.pricing.networks import Network, find_network
from collectives.pricing.price import price
from collectives.pricing.progress_bar import ProgressBar
from collectives.pricing.topology import Topology, breadth_first
from collectives.reading import read_json
from collectives.steps import Blocks, Recv, RecvReduce, Round, Send, blocks, chunk

OPERATIONS = ("allgather", "reduce_scatter", "allreduce")
MOST_RANKS = 128
CHUNKS = 4  # most pieces of a block that are tried where the caller does not say
MOST_TREES = 24
LEAST_PIECE = 4096  # bytes: smaller pieces gain little anywhere, and make a price slow
ITEMSIZE = 4  # bytes of an element, where a schedule is priced
FILLS = 40, 20, 10, 5, 2, 1  # segments of a pipeline for every level that it must fill: 40 keep it full 95% of the time

Move = tuple[int, int, int, bool]  # source, dest, piece, whether it is added


class Schedule:
    """A schedule that was found: call it as any algorithm, `schedule(rank, size, count)`.

    Attributes
    ----------
    operation : str
    size : int
        Ranks; it fits no other number.
    pieces : int
        Into which the vector is cut: of an allgather or reduce-scatter so many a block.
    steps : list of list of (source, dest, piece, adds)
        A step is one round of every rank that takes part in it.
    seconds_per_byte : float
        That it takes for long vectors, by the search's own time: without latencies.
    bound : float
        Seconds a byte below which no schedule can stay (`bandwidth_bound`).
    """

    def __init__(self, operation, size, pieces, steps, seconds_per_byte=math.nan, bound=math.nan):
        self.operation, self.size, self.pieces = operation, size, pieces
        self.steps = [[tuple(move) for move in step] for step in steps]
        self.seconds_per_byte, self.bound = seconds_per_byte, bound
        self.__name__ = f"synthesized {operation}"
        self._moves: list[list[list[Move]]] | None = None

    @property
    def share_of_bound(self) -> float:
        """The bound over what the schedule takes: 1 is the best possible."""
        return self.bound / self.seconds_per_byte if self.seconds_per_byte else 1.0

    def __call__(self, rank: int, size: int, count: Blocks) -> Iterator[Round]:
        if size != self.size:
            raise ValueError(f"this schedule was found for {self.size} ranks, not {size}: synthesize one for {size}")
        if self._moves is None:
            self._moves = [[] for _ in range(size)]
            for step in self.steps:
                taking_part: dict[int, list[Move]] = {}
                for move in step:
                    taking_part.setdefault(move[0], []).append(move)
                    taking_part.setdefault(move[1], []).append(move)
                for other, moves in taking_part.items():
                    self._moves[other].append(moves)
        whole = self.operation == "allreduce"
        block = None if whole else blocks(count, size)

        def slice_of(piece):
            if whole:
                return chunk(count, self.pieces, piece)
            lo, hi = block(piece // self.pieces)
            return tuple(lo + at for at in chunk(hi - lo, self.pieces, piece % self.pieces))

        for moves in self._moves[rank]:
            sends = [Send(dest, "x", *slice_of(piece)) for source, dest, piece, _ in moves if source == rank]
            into = [
                (RecvReduce if adds else Recv)(source, "x", *slice_of(piece))
                for source, dest, piece, adds in moves
                if dest == rank
            ]
            yield (*sends, *into)

    def trees(self) -> list[list[tuple[int, int, int]]]:
        """Return the tree along which each piece travels from its root: (source, dest, step) of every edge.

        Of a reduce-scatter the tree along which it is added up.
        """
        found: list[list[tuple[int, int, int]]] = []
        adds_up = self.operation == "reduce_scatter"
        for number, step in enumerate(self.steps):
            for source, dest, piece, adds in step:
                found += [[] for _ in range(piece + 1 - len(found))]
                if adds == adds_up:
                    found[piece].append((source, dest, number))
        return found

    def save(self, file: str | Path) -> None:
        """Write as JSON."""
        names = ("operation", "size", "pieces", "steps", "seconds_per_byte", "bound")
        Path(file).write_text(json.dumps({name: getattr(self, name) for name in names}) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> "Schedule":
        """Read what `save` wrote. Nothing of it is executed; `collectives.check` says whether it is right.

        Raises
        ------
        ValueError
            The file is not JSON, or no schedule.
        """
        try:
            found = cls(**read_json(file))
            whole = lambda number: type(number) is int and 1 <= number <= 1 << 20
            if found.operation not in OPERATIONS or not whole(found.size) or not whole(found.pieces):
                raise ValueError(f"expected an operation ({', '.join(OPERATIONS)}), ranks and pieces")
            number = found.pieces * (1 if found.operation == "allreduce" else found.size)
            for move in (move for step in found.steps for move in step):
                source, dest, piece, adds = move
                fits = all(type(n) is int and n >= 0 for n in (source, dest, piece)) and type(adds) is bool
                if not (fits and max(source, dest) < found.size and source != dest and piece < number):
                    raise ValueError(
                        f"a move is (source, dest, piece, adds), of ranks and pieces that are there: {move}"
                    )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise ValueError(f"{file}: not a schedule ({type(error).__name__}: {error})") from error
        return found

    def as_python(self) -> str:
        """The schedule as a generator function in plain Python."""
        lines = ["from collectives import Recv, RecvReduce, Send, blocks, chunk", ""]
        lines += ["STEPS = (  # (source, dest, piece of the vector, whether it is added)"]
        lines += [f"    {tuple(step)!r}," for step in self.steps]
        lines += [")", "", "", f"def {self.operation}(rank, size, count):", f"    assert size == {self.size}", ""]
        lines += ["    def piece(i):"]
        if self.operation == "allreduce":
            lines += [f"        return chunk(count, {self.pieces}, i)"]
        else:
            lines += [f"        lo, hi = blocks(count, size)(i // {self.pieces})"]
            lines += [f"        return [lo + at for at in chunk(hi - lo, {self.pieces}, i % {self.pieces})]"]
        lines += ["", "    for step in STEPS:"]
        lines += ["        sends = [Send(dest, 'x', *piece(i)) for source, dest, i, _ in step if source == rank]"]
        lines += ["        receive = {True: RecvReduce, False: Recv}"]
        lines += [
            "        into = [receive[adds](source, 'x', *piece(i)) for source, dest, i, adds in step if dest == rank]"
        ]
        return "\n".join([*lines, "        if sends or into:", "            yield (*sends, *into)", ""])


def synthesize(
    operation: str,
    network: Network | str,
    chunks: int | None = None,
    tries: int = 60,
    seed: int = 0,
    nbytes: int | None = None,
) -> Schedule:
    """Find a schedule of `operation` for the network's ranks.

    Parameters
    ----------
    operation : "allgather", "reduce_scatter" or "allreduce"
    network : Network or str
        With a topology; a rank on each host (those that its placement names).
    chunks : int, optional
        Into which a matching cuts every block; by default that one of 1 to 4 which comes nearest to the bound.
    tries, seed : int
        Random searches for each number of chunks.
    nbytes : int, optional
        Bytes of the vector. Then what is found for each number of chunks, and trees with fewer segments too, are priced
        on the network, and the cheapest counts: short vectors pay for every message. Pieces have 4 KiB or more, where
        that is possible. By default a vector without end.

    Returns
    -------
    Schedule
        Proven by `collectives.check` in tests; the sums of a reduction are not in rank order.

    Raises
    ------
    ValueError
        An unknown operation, a network without a topology, more than 128 ranks, or chunks or nbytes below 1.
    """
    network = find_network(network) if isinstance(network, str) else network
    if operation not in OPERATIONS:
        raise ValueError(f"synthesize: operation {operation!r}; there are {', '.join(OPERATIONS)}")
    if network.topology is None:
        raise ValueError(
            "synthesize needs a network with a topology, such as Network.torus((4, 4)) or 'torus:dims=4x4'"
        )
    for name, value in (("chunks", chunks), ("nbytes", nbytes)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
    hosts = network.placement or range(len(network.topology.hosts))
    if len(hosts) > MOST_RANKS:
        raise ValueError(f"synthesize: {len(hosts)} ranks; up to {MOST_RANKS} are searched: take one group of them")
    if len(set(hosts)) < len(hosts) or network.ranks_per_node > 1:
        raise ValueError("synthesize places one rank on each host: several ranks share theirs here")
    size = len(hosts)
    if size == 1:
        return Schedule(operation, 1, 1, [], 0.0, 0.0)
    arcs = arcs_of(network.topology, tuple(hosts), both_ways=operation != "allgather")
    bound = bandwidth_bound(network, operation)
    times = 2 if operation == "allreduce" else 1
    half = allgather_bound(network.topology, hosts)
    narrowest = min(network.topology.channels[i].bandwidth for arc in arcs for i in arc.channels)
    found: list[Schedule] = []
    numbers = (chunks,) if chunks else range(1, CHUNKS + 1)
    units, bar = units_of(network.topology, narrowest), ProgressBar(tries * len(numbers))
    for row, number in enumerate(numbers):
        shortest = None
        for attempt in range(tries):
            bar.update(row * tries + attempt)
            steps = matching(size, arcs, units, number, random.Random(f"{seed} {number} {attempt}"))
            shortest = steps if shortest is None or len(steps) < len(shortest) else shortest
            if times * len(shortest) / narrowest / (size * number) <= times * half * (1 + 1e-9):
                break
        seconds = times * len(shortest) / narrowest / (size * number)
        found.append(_from_matching(operation, size, number, shortest, seconds, bound))
    bar.close()
    long = lambda schedule: schedule.seconds_per_byte
    if operation == "allreduce" and min(found, key=long).share_of_bound < 0.97:
        for attempt in range(3):
            trees = pack_trees(size, arcs, network.topology, seed + attempt)
            for fill in FILLS if nbytes else FILLS[:1]:
                found.append(_from_trees(size, trees, network.topology, bound, fill))
    if nbytes is None:
        return min(found, key=long)
    count = -(-nbytes // ITEMSIZE)
    fewest = min(schedule.pieces for schedule in found)
    found = [schedule for schedule in found if schedule.pieces <= max(fewest, nbytes // LEAST_PIECE)]
    return min(found, key=lambda schedule: price(schedule, size, count, ITEMSIZE, network).seconds)


class Arc(NamedTuple):
    """A route from one rank to another with no rank between."""

    source: int
    dest: int
    channels: tuple[int, ...]


def arcs_of(topology: Topology, hosts: tuple[int, ...], both_ways: bool) -> list[Arc]:
    """The arcs between ranks; only those that also lead back, where a schedule will be reversed."""
    ranks = {topology.hosts[host] for host in hosts}
    arcs = []
    for source, dest in permutations(range(len(hosts)), 2):
        channels = topology.route(hosts[source], hosts[dest]).channels
        if not any(topology.channels[i].target in ranks for i in channels[:-1]):
            arcs.append(Arc(source, dest, channels))
    if both_ways:
        pairs = {(arc.source, arc.dest) for arc in arcs}
        arcs = [arc for arc in arcs if (arc.dest, arc.source) in pairs]
    reached = breadth_first(0, {rank: [arc.dest for arc in arcs if arc.source == rank] for rank in range(len(hosts))})
    if len(reached) < len(hosts):
        lost = next(rank for rank in range(len(hosts)) if rank not in reached)
        raise ValueError(f"synthesize {'sums need' if both_ways else 'needs'} channels to rank {lost} and back from it")
    return arcs


def units_of(topology: Topology, unit: float) -> list[int]:
    """How many pieces each channel carries in a step: its bandwidth in units of the narrowest."""
    return [int(channel.bandwidth / unit * (1 + 1e-9)) for channel in topology.channels]


def matching(size: int, arcs: list[Arc], units: list[int], chunks: int, rng: random.Random) -> list[list[tuple]]:
    """The steps of one random allgather, each a list of (source, dest, piece)."""
    have = [set(range(rank * chunks, (rank + 1) * chunks)) for rank in range(size)]
    holders = [1] * (size * chunks)
    narrowness = {arc: min(units[channel] for channel in arc.channels) for arc in arcs}
    steps = []
    while any(len(mine) < size * chunks for mine in have):
        step, left, coming = [], list(units), [set(mine) for mine in have]
        active = arcs
        while active:  # an arc may carry several pieces in a step
            again = []
            for arc in sorted(active, key=lambda arc: (narrowness[arc], len(coming[arc.dest]), rng.random())):
                if any(left[channel] < 1 for channel in arc.channels):
                    continue
                if not (new := have[arc.source] - coming[arc.dest]):
                    continue
                piece = min(new, key=lambda piece: (holders[piece], rng.random()))
                step.append((arc.source, arc.dest, piece))
                coming[arc.dest].add(piece)
                holders[piece] += 1
                for channel in arc.channels:
                    left[channel] -= 1
                again.append(arc)
            active = again
        have = coming
        steps.append(step)
    return steps


def _from_matching(operation, size, chunks, steps, seconds, bound) -> Schedule:
    out = [[(*move, False) for move in step] for step in steps]
    back = [[(dest, source, piece, True) for source, dest, piece in step] for step in reversed(steps)]
    if operation == "allreduce":
        return Schedule(operation, size, size * chunks, back + out, seconds, bound)
    return Schedule(operation, size, chunks, out if operation == "allgather" else back, seconds, bound)


Tree = list[tuple[Arc, Arc]]  # of every rank but the root the arc to its parent and back, parents first


def pack_trees(size: int, arcs: list[Arc], topology: Topology, seed: int = 0) -> list[Tree]:
    """Spanning trees that share the channels: each next one takes, edge by edge, what is least loaded so far.

    Of 1, 2, ... trees, at most 2 `size` and MOST_TREES, the number is kept with the least load for each.
    """
    rng, load = random.Random(seed), [0.0] * len(topology.channels)
    arc_of = {(arc.source, arc.dest): arc for arc in arcs}
    edges = [(arc, arc_of[arc.dest, arc.source]) for arc in arcs]
    width = [channel.bandwidth for channel in topology.channels]
    trees: list[Tree] = []
    best = math.inf, 0
    for _ in range(min(2 * size, MOST_TREES)):
        reached, tree = {rng.randrange(size)}, []
        while len(reached) < size:
            growing = [(down, up) for down, up in edges if down.source in reached and down.dest not in reached]
            fullness = lambda edge: sum(((load[c] + 1) / width[c]) ** 6 for arc in edge for c in arc.channels)
            down, up = min(growing, key=lambda edge: (fullness(edge), rng.random()))
            tree.append((up, down))
            reached.add(down.dest)
            for channel in (*down.channels, *up.channels):
                load[channel] += 1
        trees.append(tree)
        seconds = max(l / w for l, w in zip(load, width, strict=True)) / len(trees)
        best = min(best, (seconds, len(trees)))
    return trees[: best[1]]


def _from_trees(size, trees, topology, bound, fill) -> Schedule:
    depths = []
    for tree in trees:
        depth = {tree[0][0].dest: 0}
        for up, _ in tree:
            depth[up.source] = depth[up.dest] + 1
        depths.append(depth)
    deepest = max(max(depth.values()) for depth in depths)
    segments, load = fill * deepest, [0] * len(topology.channels)
    steps: list[list[Move]] = [[] for _ in range(segments + 2 * deepest)]
    for number, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
        for up, down in tree:
            for channel in (*up.channels, *down.channels):
                load[channel] += 1
            below = depth[up.source]
            for segment in range(segments):  # up from the deepest first; a root has all once `deepest` steps are over
                piece = number * segments + segment
                steps[segment + deepest - below].append((up.source, up.dest, piece, True))
                steps[segment + deepest + below - 1].append((down.source, down.dest, piece, False))
    step_seconds = max(l / channel.bandwidth for l, channel in zip(load, topology.channels, strict=True))
    pieces = len(trees) * segments
    return Schedule("allreduce", size, pieces, steps, len(steps) * step_seconds / pieces, bound)
