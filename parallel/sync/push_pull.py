"""Push and pull: how gradients and parameters travel between workers and parameter servers, as schedules.

    price(push, 9, n, servers=1)        one server, eight workers: 8 n beta at the server
    price(push, 16, n, servers=8)       as many servers as workers: n beta
    draw(pull, 4, 16, servers=4, place="workers")

In both, x is a worker's vector and y what a server holds of it. All messages between workers and servers of a round are
in flight at once; long slices go in segments, so that a server needs room for one segment from each worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from collectives.algorithms.registry import SEGMENT, how_many, segments
from collectives.steps import Blocks, Copy, Recv, RecvReduce, Reduce, Round, Send, blocks, chunk
from nn.core.layout import ALIGN

PLACES = ("dedicated", "workers")


def roles(size: int, servers: int, place: str = "dedicated") -> tuple[Sequence[int], Sequence[int]]:
    """Return (ranks of the workers, ranks of the servers) among `size`.

    Servers on ranks of their own are the last ones, so that rank 0 is a worker; servers on workers are spread evenly.

    Raises
    ------
    ValueError
        No such place, or more servers than ranks that there are for them.
    """
    if place not in PLACES:
        raise ValueError(f"place {place!r} of parameter servers: expected one of {', '.join(PLACES)}")
    most = size - 1 if place == "dedicated" else size
    if not 1 <= servers <= most:
        room = "beside one worker" if place == "dedicated" else "among the workers"
        hint = "; or let workers be servers (--server-place workers)" if place == "dedicated" else ""
        raise ValueError(
            f"{servers} parameter servers on {size} ranks: there is room for at most {most} {room}; use fewer, or more "
            f"ranks{hint}"
        )
    if place == "dedicated":
        return range(size - servers), range(size - servers, size)
    return range(size), [j * size // servers for j in range(servers)]


def push(
    rank: int,
    size: int,
    count: Blocks,
    servers: int = 1,
    place: str = "dedicated",
    tail: int = 0,
    segment: int = SEGMENT,
) -> Iterator[Round]:
    """Every server adds its slice of all workers' x to its y, in worker order; y is zero at first.

    Parameters
    ----------
    rank, size : int
    count : int or list of (lo, hi)
        Elements of x, cut among the servers, or each server's slice.
    servers, place
        See `roles`.
    tail : int
        So many elements more at the end of x go to every server, behind its slice.
    segment : int
        Elements in a message at most: a round carries one from every worker to every server.
    """
    workers, hosts = roles(size, servers, place)
    for here in _messages(count, hosts, tail, hosts, segment):
        sends = [Send(host, "x", lo, hi) for host, lo, hi, _ in _from(rank, here) if host != rank and rank in workers]
        sums = []
        for _, lo, hi, at in (message for message in here if message[0] == rank):
            for worker in workers:
                if worker == rank:
                    sums.append(Reduce("y", at, at + hi - lo, "x", lo, operand_left=False))
                else:
                    sums.append(RecvReduce(worker, "y", at, at + hi - lo, operand_left=False))
        yield *sends, *sums


def pull(
    rank: int,
    size: int,
    count: Blocks,
    servers: int = 1,
    place: str = "dedicated",
    tail: int = 0,
    segment: int = SEGMENT,
) -> Iterator[Round]:
    """Every worker's x gets the servers' y, each at its slice, and the tail from the first one.

    Parameters are those of `push`.
    """
    workers, hosts = roles(size, servers, place)
    for here in _messages(count, hosts, tail, hosts[:1], segment):
        steps = []
        for host, lo, hi, at in here:
            if host == rank:
                steps += [Send(worker, "y", at, at + hi - lo) for worker in _from(rank, workers) if worker != rank]
            if rank in workers:
                steps.append(Copy("x", lo, hi, "y", at) if host == rank else Recv(host, "x", lo, hi))
        yield tuple(steps)


def _from(rank: int, items: Sequence) -> list:
    """Return the items in a circle, each rank from another one on: so that not all send to the same one first."""
    start = rank % max(1, len(items))
    return [*items[start:], *items[:start]]


def _messages(count: Blocks, hosts: Sequence[int], tail: int, tailed: Sequence[int], segment: int):
    """Yield for every round the messages between a worker and the hosts: (host, lo, hi in x, where lo is in y)."""
    total = count if isinstance(count, int) else max(hi for _, hi in count)
    columns = []
    for j, host in enumerate(hosts):
        lo, hi = blocks(count, len(hosts))(j)
        column = [(host, a, b, a - lo) for a, b in segments(lo, hi, how_many(hi - lo, segment))]
        columns.append(column + [(host, total, total + tail, hi - lo)] * (host in tailed))
    return (tuple(message for message in row if message) for row in zip_longest(*columns))


def server_slices(count: int, servers: int) -> list[tuple[int, int]]:
    """Return slices of `count` elements, one a server, nearly equal, on bounds of 16 elements.

    Raises
    ------
    ValueError
        More servers than there are pieces of 16.
    """
    pieces = -(-count // ALIGN)
    if servers > pieces:
        raise ValueError(
            f"{servers} servers for {count:,} values: slices are multiples of {ALIGN}, so use at most {pieces}"
        )
    bounds = [chunk(pieces, servers, j) for j in range(servers)]
    return [(lo * ALIGN, min(hi * ALIGN, count)) for lo, hi in bounds]
