"""Find a schedule for any connected network, and say how far it is from the best possible.

    found = synthesize("allreduce", Network.torus((4, 4)))
    communicator.Allreduce(x, y, algorithm=found)          # an ordinary schedule: check, price, draw and run it
    print(found.share_of_bound, found.as_python())

Three searches, of which the fastest result counts. Time goes in *steps*; switches only pass on.

*Matching* (TACOS, Won et al. 2023): in a step a channel carries as many pieces as it has units of bandwidth. Free
channels are matched with pieces that their source had when the step began and their target lacks, first into the rank
with the fewest, first the piece with the fewest holders; the rest is chance, and the shortest of many tries is kept.
So a piece travels along a tree out of the rank that has it, which is an allgather. Backwards, with sums, that is a
reduce-scatter; both after each other are an allreduce.

*Parts*: without its narrow channels a network falls into parts, such as the hosts of each edge switch. Blocks go round
a ring of equal parts, and each rank that gets one copies it to the others of its part. A narrow channel carries
messages between the same ranks in every step, so ranks that run ahead of others delay nobody. With one rank in each
part it is the ordinary ring, as fast as anything on a star.

*Packed trees*, for an allreduce of long vectors: spanning trees that share the channels evenly, each for its part of
the vector. Segments follow each other up to the root, added on the way, and down again (ForestColl, Zhao et al. 2024,
packs trees so that the bound is met; here they are chosen greedily).

Bounds: `pricing.lower_bounds.bandwidth_bound`.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import NamedTuple

from collectives.pricing.lower_bounds import allgather_bound, bandwidth_bound, parts_of
from collectives.pricing.networks import Network, find_network
from collectives.pricing.price import price
from collectives.pricing.progress_bar import ProgressBar
from collectives.pricing.topology import Topology, breadth_first
from collectives.reading import read_json
from collectives.steps import Blocks, Recv, RecvReduce, Round, Send, blocks, chunk

OPERATIONS = ("allgather", "reduce_scatter", "allreduce")
MOST_RANKS = 128
CHUNKS = 4  # most pieces of a block that are tried where the caller does not say
TRIES, TRIES_WORK = 60, 1_500_000  # random searches; their arcs x ranks x chunks, of which all take some ten seconds
RING_CHUNKS = 1, 2, 4, 8, 16  # the same of rings of parts, until the bound is near
NEAR_BOUND = 0.97
MOST_TREES = 24
LEAST_PIECE = 4096  # bytes: smaller pieces gain little anywhere, and make a price slow
ITEMSIZE = 4  # bytes of an element, where a schedule is priced
ENDLESS = 1 << 30  # bytes of a vector of which latencies are no part
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
    tries: int | None = None,
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
        Into which matchings and rings of parts cut every block; by default as many as come near to the bound.
    tries : int, optional
        Random searches for each number of chunks; by default 60, and fewer on large networks: 64 ranks take less than a
        minute.
    seed : int
        Of these searches.
    nbytes : int, optional
        Bytes of the vector; by default a vector without end. What is found is priced on the network, and the cheapest
        counts. With `nbytes` all numbers of chunks are priced, and trees with fewer segments too: short vectors pay for
        every message. Pieces have 4 KiB or more then, where that is possible.

    Returns
    -------
    Schedule
        Proven by `collectives.check` in tests; the sums of a reduction are not in rank order.

    Raises
    ------
    ValueError
        An unknown operation, a network without a topology, more than 128 ranks, or chunks or nbytes below 1.

    Examples
    --------
    >>> import collectives
    >>> from collectives.pricing.networks import Network
    >>> found = collectives.synthesize("allreduce", Network.torus((2, 2)))
    >>> bool(collectives.check(found, ranks=4))
    True
    """
    network = find_network(network) if isinstance(network, str) else network
    if operation not in OPERATIONS:
        raise ValueError(f"synthesize: operation {operation!r}; there are {', '.join(OPERATIONS)}")
    if network.topology is None:
        raise ValueError(
            "synthesize needs a network with a topology, such as Network.torus((4, 4)) or 'torus:dims=4x4'"
        )
    for name, value in (("chunks", chunks), ("nbytes", nbytes), ("tries", tries)):
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
    topology = network.topology
    arcs = arcs_of(topology, tuple(hosts), both_ways=operation != "allgather")
    bound, half = bandwidth_bound(network, operation), allgather_bound(topology, hosts)
    narrowest = min(topology.channels[i].bandwidth for arc in arcs for i in arc.channels)
    equal_parts = [[[rank] for rank in range(size)]]  # an ordinary ring
    equal_parts += [
        parts
        for parts, _ in parts_of(topology, [topology.hosts[host] for host in hosts])
        if len({len(part) for part in parts}) == 1
    ]
    from_allgather = partial(_from_allgather, operation, topology, hosts, bound)
    matchings: list[Schedule] = []
    rings: list[Schedule] = []
    trees: list[Schedule] = []
    numbers = (chunks,) if chunks else range(1, CHUNKS + 1)
    affordable = {number: TRIES_WORK // (len(arcs) * size * number) for number in numbers}
    attempts = {number: tries or min(TRIES, max(1, affordable[number])) for number in numbers}
    units, bar = units_of(topology, narrowest), ProgressBar(len(numbers))
    for row, number in enumerate(numbers):
        shortest = None
        for attempt in range(attempts[number]):
            bar.update(row + attempt / attempts[number])
            steps = matching(size, arcs, units, number, random.Random(f"{seed} {number} {attempt}"))
            shortest = steps if shortest is None or len(steps) < len(shortest) else shortest
            if len(shortest) / narrowest / (size * number) <= half * (1 + 1e-9):
                break
        matchings.append(from_allgather(number, shortest))
    bar.close()
    for parts in equal_parts:
        for number in (chunks,) if chunks else RING_CHUNKS:
            rings.append(from_allgather(number, around_parts(parts, number)))
            if rings[-1].share_of_bound > NEAR_BOUND or len(parts) == size:
                break
    long = lambda schedule: schedule.seconds_per_byte
    if operation == "allreduce" and min(matchings + rings, key=long).share_of_bound < NEAR_BOUND:
        for attempt in range(3):
            packed = pack_trees(size, arcs, topology, seed + attempt)
            trees += [_from_trees(size, packed, topology, bound, fill) for fill in (FILLS if nbytes else FILLS[:1])]
    if nbytes is None:
        found = [min(kind, key=long) for kind in (matchings, rings, trees) if kind]
    else:
        found = matchings + rings + trees
        fewest = min(schedule.pieces for schedule in found)
        found = [schedule for schedule in found if schedule.pieces <= max(fewest, nbytes // LEAST_PIECE)]
    if len(found) == 1:
        return found[0]
    count = -(-(nbytes or ENDLESS) // ITEMSIZE)
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


def around_parts(parts: list[list[int]], chunks: int) -> list[list[tuple]]:
    """The steps of an allgather around a ring of equal parts, each a list of (source, dest, piece).

    Rank i of a part sends to rank i of the next one: first its own block, then what came in the step before. In the
    same step it sends the block to the others of its part. Chunks of blocks follow each other.
    """
    laps = len(parts) - 1
    steps: list[list[tuple]] = [[] for _ in range(chunks * laps + 1)]
    for number, lap in product(range(chunks), range(laps + 1)):
        step = steps[number * laps + lap]
        for at, part in enumerate(parts):
            for i, rank in enumerate(part):
                piece = parts[at - lap][i] * chunks + number
                if lap < laps:
                    step.append((rank, parts[(at + 1) % len(parts)][i], piece))
                step += [(rank, other, piece) for other in part if other != rank]
    return [step for step in steps if step]


def _from_allgather(operation, topology, hosts, bound, chunks, steps) -> Schedule:
    size = len(hosts)
    out = [[(*move, False) for move in step] for step in steps]
    back = [[(dest, source, piece, True) for source, dest, piece in step] for step in reversed(steps)]
    steps = {"allgather": out, "reduce_scatter": back, "allreduce": back + out}[operation]
    pieces = size * chunks if operation == "allreduce" else chunks
    seconds = sum(_seconds_of(step, topology, hosts) for step in steps) / (size * chunks)
    return Schedule(operation, size, pieces, steps, seconds, bound)


def _seconds_of(step, topology, hosts) -> float:
    """Seconds until all of a step has crossed its fullest channel, where a piece has one byte."""
    routes = (topology.route(hosts[source], hosts[dest]).channels for source, dest, *_ in step)
    load = Counter(channel for route in routes for channel in route)
    return max(number / topology.channels[channel].bandwidth for channel, number in load.items())


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
