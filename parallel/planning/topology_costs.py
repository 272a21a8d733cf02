"""Seconds of what all groups of a mesh do at once on a topology, where their messages share channels, by simulation.

    moving_seconds("allgather", count=8, stride=2, nbytes=100e6, network=Network.fat_tree(4, 4).of_ranks(16))

A simulation gives what an algorithm takes for two lengths; between and beyond them lies a straight line, as the
latencies are the same, and the shares of the channels too. Additions are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from collectives.algorithms import ALGORITHMS
from collectives.pricing.networks import Network
from collectives.pricing.price import price
from collectives.steps import Recv, Round, Send, relabel_ranks

TRIED = {
    "allgather": ("ring", "doubling", "bruck", "pat"),
    "allreduce": ("doubling", "swing"),
    "alltoall": ("pairwise",),
    "broadcast": ("binomial", "bine"),
    "reduce": ("binomial", "bine"),
    "scatter": ("flat", "binomial"),
}
SHORT, LONG = 1 << 10, 1 << 20  # bytes of each rank


def moving_seconds(operation: str, count: int, stride: int, nbytes: float, network: Network) -> float:
    """Seconds of the fastest algorithm of TRIED, all groups of `count` ranks, `stride` apart, at once.

    Parameters
    ----------
    operation : one of TRIED
    nbytes : float
        of the whole vector of a group
    network : with a topology and a placement of all ranks (`Network.of_ranks`)
    """
    return min(start + nbytes * byte for start, byte in _lines(operation, count, stride, network))


@lru_cache(1 << 10)
def _lines(operation: str, count: int, stride: int, network: Network) -> list[tuple[float, float]]:
    """(seconds, seconds a byte) of each algorithm."""
    size, found = len(network.placement), []
    free = replace(network, gamma=0.0, reductions=())
    for name in TRIED[operation]:
        entry = ALGORITHMS[operation].get(name)
        if entry is None:
            continue

        def groups(rank, size, nbytes, entry=entry):
            ranks = group_of(rank, count, stride)
            return relabel_ranks(entry.rounds(ranks.index(rank), count, nbytes), ranks)

        try:
            short, long = (price(groups, size, count * n, 1, free).seconds for n in (SHORT, LONG))
        except ValueError:  # not for this number of ranks
            continue
        slope = max(0.0, long - short) / (count * (LONG - SHORT))
        found.append((max(0.0, short - slope * count * SHORT), slope))
    return found


def group_of(rank: int, count: int, stride: int) -> list[int]:
    """The ranks of the group to which `rank` belongs."""
    first = rank - rank // stride % count * stride
    return [first + i * stride for i in range(count)]


def server_seconds(servers: int, nbytes: float, network: Network) -> tuple[float, float]:
    """Seconds of a push, a message from every rank to each of the last `servers` ranks at once, and of a pull back."""
    size = len(network.placement)
    workers, served = range(size - servers), range(size - servers, size)

    def transfer(senders, receivers):
        def rounds(rank, size, count):
            if rank in senders:
                yield [Send(peer, "x", 0, count) for peer in receivers]
            else:
                yield [Recv(peer, "y", 0, count) for peer in senders]

        return price(rounds, size, max(1, round(nbytes)), 1, network).seconds

    return transfer(workers, served), transfer(served, workers)


def hop_seconds(stages: int, tensor: int, nbytes: float, network: Network) -> float:
    """Seconds of a message from each stage to the next, of all pipelines at once, cut on the axis "tensor"."""

    def hops(rank, size, count):
        group = group_of(rank, stages, tensor)
        return relabel_ranks(_hop(group.index(rank), stages, count), group)

    return price(hops, len(network.placement), max(1, round(nbytes / tensor)), 1, network).seconds


def _hop(stage: int, stages: int, count: int) -> Iterator[Round]:
    sends = [Send(stage + 1, "x", 0, count)] if stage + 1 < stages else []
    yield (*sends, *([Recv(stage - 1, "y", 0, count)] if stage else []))


def all_pipelines(program: Sequence[Sequence[Round]], tensor: int):
    """The schedule of one pipeline, run by all pipelines of a mesh at once, with messages cut on the axis "tensor"."""

    def rounds(rank, size, count):
        group = group_of(rank, len(program), tensor)
        for steps in relabel_ranks(program[group.index(rank)], group):
            yield tuple(_cut(step, tensor) for step in steps)

    return rounds


def _cut(step, tensor: int):
    if not hasattr(step, "peer"):
        return step
    return step._replace(hi=step.lo + -(-(step.hi - step.lo) // tensor))
