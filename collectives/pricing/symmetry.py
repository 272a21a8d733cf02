"""Blocks of ranks that stand for all: the ranks of every other block do the same, relabelled.

Then B ranks are enough for a simulation: what one of them sends beyond the block, the block gets at the same moment
from the rank that the relabelling puts in the sender's place. Two groups of relabellings are tried. *Shifts*: rank
r + B does what r does with all peers shifted by B, as in a ring. *Exclusive or*, where there are 2^d ranks: rank r ^ B
does what r does with the peers ^ B, as in recursive doubling. In either group `minus(a, b)` is the difference of two
ranks, and blocks begin at the multiples of B.

On a topology the relabelling must also map routes to routes, so that messages share channels with the images of the
same messages: a ring on a fat tree needs the ranks of one pod, recursive doubling there only one rank.
"""

from collections.abc import Callable
from itertools import islice, zip_longest
from operator import xor
from typing import NamedTuple

from collectives.pricing.networks import Network
from collectives.pricing.progress_bar import ProgressBar
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, is_live, mistake_in

FIRST_ROUNDS = 4  # enough to refuse most blocks

Minus = Callable[[int, int], int]


class Symmetry(NamedTuple):
    """A block of ranks that stands for all.

    Attributes
    ----------
    block : int
        Ranks 0 ... block - 1.
    minus : callable (rank, rank) -> rank
        Difference in the group of relabellings.
    channels : dict
        Channel of the topology -> the channel that stands for it.
    """

    block: int
    minus: Minus
    channels: dict[int, int] = {}


def shift(size: int) -> Minus:
    """The difference of two ranks in the group of shifts."""
    return lambda a, b: (a - b) % size


def smallest_block(program: Callable, size: int, network: Network, most: int) -> Symmetry | None:
    """The fewest ranks, at most `most`, that stand for all `size` of a topology."""
    per_host = network.ranks_per_node
    if network.placement is not None and per_host > 1:
        return None
    for block in range(per_host, min(most, size // 2) + 1, per_host):
        if size % block:
            continue
        for minus in (shift(size), xor) if size & (size - 1) == 0 else (shift(size),):
            for rounds in (FIRST_ROUNDS, None):
                messages = messages_if_alike(program, size, block, minus, rounds)
                channels = None if messages is None else representatives(messages, size, block, minus, network)
                if channels is None:
                    break
            else:
                return Symmetry(block, minus, channels)
    return None


def messages_if_alike(
    program: Callable, size: int, block: int, minus: Minus, most_rounds: int | None = None
) -> list[tuple[int, int]] | None:
    """(sender, receiver) of all messages of the block; None where other blocks do not do the same.

    Only kinds, peers and lengths matter to a price. A sample, not a proof: the first blocks, a middle and the last one.
    """
    starts = sorted({0, block % size, size // block // 2 * block, size - block})
    messages: list[tuple[int, int]] = []

    def relative(steps, rank):
        row = []
        for step in steps:
            kind = type(step)
            if kind is Send or kind is Recv or kind is RecvReduce:  # nearly all are: no time for patterns
                if (elements := step.hi - step.lo) > 0:
                    row.append((kind, minus(step.peer, rank), elements))
            elif is_live(step):
                row.append(in_memory(step, rank))
        return row

    def in_memory(step, rank):
        match step:
            case Copy() | Reduce():
                return type(step), step.hi - step.lo
            case Barrier():
                return Barrier, None if step.ranks is None else sorted(minus(other, rank) for other in step.ranks)
            case Compute():
                return Compute, step.seconds
        raise ValueError(f"rank {rank}: {mistake_in((step,)) or f'{step!r} is a step that has no price'}")

    def distances(rank):
        """To all receivers of a rank's messages; None where one of its images does not do the same."""
        images = [minus(rank, minus(0, start)) for start in starts]
        found: set[int] = set()
        for rounds in zip_longest(*(islice(program(image), most_rounds) for image in images)):
            if None in rounds:
                return None
            row = relative(rounds[0], rank)
            for steps, image in zip(rounds, images, strict=True):
                if image != rank and relative(steps, image) != row:
                    return None
            found.update([entry[1] for entry in row if entry[0] is Send])
        return sorted(found)

    bar = ProgressBar(block)
    try:
        for rank in range(block):
            bar.update(rank)
            if (to_all := distances(rank)) is None:
                return None
            messages += [(rank, minus(rank, minus(0, distance))) for distance in to_all]
    finally:
        bar.close()
    return messages


def representatives(
    messages: list[tuple[int, int]], size: int, block: int, minus: Minus, network: Network
) -> dict[int, int] | None:
    """Channel -> the channel of the block's own messages that stands for it; None where no relabelling maps channels.

    Looks at all images of the messages. Each relabelling must map every channel to one with the same bandwidth and
    latency, the same for all messages that cross it, and only the one that changes nothing may map one to itself.
    """
    hosts, topology = network.nodes_of(size), network.topology
    starts = range(0, size, block)
    inverse = [minus(0, start) for start in starts]
    stands_for: dict[int, tuple[int, int]] = {}  # channel -> the representative, start of the block that maps it there
    for rank, peer in messages:
        routes: list[tuple[int, ...]] = []
        for back in inverse:
            routes.append(topology.channels_between(hosts[minus(rank, back)], hosts[minus(peer, back)]))
            if len(routes[-1]) != len(routes[0]):
                return None
        for images in zip(*routes, strict=True):
            if images[0] in stands_for:
                first, at = stands_for[images[0]]
                if any(stands_for.get(c) != (first, minus(at, b)) for c, b in zip(images, inverse, strict=True)):
                    return None
                continue
            kinds = {topology.channels[channel][2:] for channel in images}
            if len(kinds) > 1 or len(set(images)) < len(images) or not stands_for.keys().isdisjoint(images):
                return None
            stands_for |= {channel: (images[0], start) for channel, start in zip(images, starts, strict=True)}
    return {channel: first for channel, (first, _) in stands_for.items()}
