"""Blocks of ranks that stand for all: rank r + B does what rank r does, with all peers shifted by B.

Then B ranks are enough for a simulation: what one of them sends beyond the block, the block gets from the rank as far
away on the other side, at the same moment. On a topology the shift must also map routes to routes, so that messages
share channels with the images of the same messages: a ring on a fat tree needs the ranks of one pod.
"""

from collections.abc import Callable, Iterator
from itertools import islice, zip_longest

from collectives.pricing.networks import Network
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, is_live, mistake_in

FIRST_ROUNDS = 4  # enough to refuse most blocks


def smallest_block(program: Callable, size: int, network: Network, most: int) -> tuple[int, dict[int, int]] | None:
    """The fewest ranks, at most `most`, that stand for all `size` of a topology; for each channel the one for it."""
    per_host = network.ranks_per_node
    if network.placement is not None and per_host > 1:
        return None
    for block in range(per_host, min(most, size // 2) + 1, per_host):
        if size % block or representatives(program, size, block, network, FIRST_ROUNDS) is None:
            continue
        if blocks_are_alike(program, size, block):
            channels = representatives(program, size, block, network)
            if channels is not None:
                return block, channels
    return None


def blocks_are_alike(program: Callable, size: int, block: int) -> bool:
    """Whether rank r + k block does what r does with all peers shifted by k block, for a few k and every r of a block.

    Only kinds, peers and lengths matter to a price. A sample, not a proof: the first, a middle and the last block.
    """

    def relative(rank):
        for steps in program(rank):
            yield [seen(step, rank) for step in steps if is_live(step)]

    def seen(step, rank):
        if type(step) in (Send, Recv, RecvReduce):  # nearly all are: no time for patterns
            return type(step), (step.peer - rank) % size, step.hi - step.lo
        match step:
            case Copy() | Reduce():
                return type(step), step.hi - step.lo
            case Barrier():
                return Barrier, None if step.ranks is None else sorted((other - rank) % size for other in step.ranks)
            case Compute():
                return Compute, step.seconds
        raise ValueError(f"rank {rank}: {mistake_in((step,)) or f'{step!r} is a step that has no price'}")

    blocks = {0, 1 % (size // block), (size // block) // 2, size // block - 1}
    rounds = (row for rank in range(block) for row in zip_longest(*(relative(rank + k * block) for k in blocks)))
    return all(row.count(row[0]) == len(blocks) for row in rounds)


def representatives(
    program: Callable, size: int, block: int, network: Network, rounds: int | None = None
) -> dict[int, int] | None:
    """Channel -> the channel of the block's own messages that stands for it; None where the shift maps no channels.

    Looks at all messages of the block, or those of the first `rounds`, and at all their images. The shift must map each
    channel to one with the same bandwidth and latency, and return to it after all blocks, not before.
    """
    hosts, channels, copies = network.nodes_of(size), network.topology.channels, size // block
    image: dict[int, int] = {}
    for rank, peer in set(_messages(program, block, rounds)):
        routes = []
        for k in range(copies):
            ends = hosts[(rank + k * block) % size], hosts[(peer + k * block) % size]
            routes.append(network.topology.route(*ends).channels)
            if len(routes[-1]) != len(routes[0]):
                return None
        for k, route in enumerate(routes):
            for channel, shifted in zip(route, routes[(k + 1) % copies], strict=True):
                if image.setdefault(channel, shifted) != shifted or channels[channel][2:] != channels[shifted][2:]:
                    return None
    if len(set(image.values())) < len(image):
        return None
    stands_for: dict[int, int] = {}
    for first in image:
        if first in stands_for:
            continue
        orbit = [first]
        while image[orbit[-1]] != first:
            orbit.append(image[orbit[-1]])
        if len(orbit) != copies:
            return None
        stands_for |= dict.fromkeys(orbit, first)
    return stands_for


def _messages(program: Callable, block: int, rounds: int | None) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of every message that the ranks of the block send."""
    for rank in range(block):
        for steps in islice(program(rank), rounds):
            for step in steps:
                if type(step) is Send and step.hi > step.lo:
                    yield rank, step.peer
