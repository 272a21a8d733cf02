"""The network under the ranks, measured: messages of many lengths inside a node and between nodes, and memory.

    network = measure_network(MPI.COMM_WORLD)
    network.save("network.json")

Of each length is measured what parameterised LogP asks for (Kielmann, Bal, Verstoep 2000; `networks.Point`): half of a
ping-pong, what a processor is busy with a send and with a receive, the gap between the messages of a stream, and how
long one takes where others go at once: from every rank to the next, and between partners. The longest message
that is sent before its receive is there is found by bisection, and measured beside the next longer one, since the
library changes its protocol between them. Of many repetitions the fast quartile counts, as other processes only ever
add; of messages that go at once the median, as whether two directions hinder each other is a matter of chance.

What is sent has just been written, as in a run: else the receiver's core would hold it since the last time.

Between nodes all but the streams begin after a rest. Cables that are shaped by token buckets (the lab's, a cloud's) let
a rested sender's first bytes through at once; the stream shows what they do in the long run.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from statistics import mean, median

import numpy as np
from mpi4py import MPI

from collectives.failures.launch_check import nodes_of
from collectives.pricing.networks import Link, Network, Point, fit, interpolate

# 4 B ... 16 MiB; closer where libraries change from one way of sending to another.
SIZES = tuple(sorted({4**k for k in range(1, 13)} | {2**k for k in range(8, 17)}))
MEMORY_SIZES = tuple(4**k for k in range(4, 13))  # 256 B ... 16 MiB
MIB = 1 << 20
REST = 4e-3  # seconds in which a token bucket fills: 5 ms at most are usual
STREAM = 512 << 10  # bytes of a stream: more than a token bucket holds
MESSAGE, WAKE = 1, 2  # tags
FEW, MANY = 3, 200  # repetitions


def measure_network(comm: MPI.Intracomm, sizes: Sequence[int] = SIZES, seconds: float = 0.2) -> Network:
    """The network under `comm`, as its rank 0 sees it (collective, equal on all ranks).

    Where all ranks share a node, or none does, the level that is not there gets the numbers of the other.

    Parameters
    ----------
    comm : MPI.Intracomm
        At least two ranks.
    sizes : sequence of int
        Bytes of the messages.
    seconds : float
        To spend on each measurement, about.

    Raises
    ------
    ValueError
        One rank only.
    """
    if comm.Get_size() < 2:
        raise ValueError("one rank has no network: measure with two or more")
    near, far = neighbours(comm)
    nodes = nodes_of(comm)
    first = nodes.index(nodes[comm.Get_rank()])  # of the ranks of this node
    node = comm.Split(first)
    leaders = comm.Split(int(node.Get_rank() > 0))
    inside = between = None
    if node.Get_size() > 1:  # on all nodes at once, as in a collective
        inside = measure_link(node, sizes, seconds)
    quietly(comm)
    if far and node.Get_rank() == 0:
        between = measure_link(leaders, sizes, seconds, REST)
    quietly(comm)
    reductions, copies = measure_memory(comm, seconds)
    memory = interpolate(copies, 16 * MIB)[1] / (2 * 16 * MIB * node.Get_size())
    barriers, (posts, fetches) = measure_barriers(node, seconds), measure_sharing(node, seconds)
    quietly(comm)
    gamma, copy = interpolate(reductions, MIB)[1] / MIB, interpolate(copies, MIB)[1] / MIB
    source = f"measured with {MPI.get_vendor()[0]}, {len(near) + 1} ranks a node"
    network = Network(
        inside or between,
        between or inside,
        len(near) + 1,
        gamma,
        copy,
        source,
        reductions,
        copies,
        memory,
        barriers,
        fetches,
        posts,
    )
    for each in (node, leaders):
        each.Free()
    return comm.bcast(network)


def neighbours(comm: MPI.Intracomm) -> tuple[list[int], list[int]]:
    """The other ranks on the node of rank 0, and those on other nodes (collective)."""
    first, *others = nodes_of(comm)
    near = [rank for rank, node in enumerate(others, 1) if node == first]
    return near, [rank for rank, node in enumerate(others, 1) if node != first]


def measure_link(comm: MPI.Intracomm, sizes: Sequence[int] = SIZES, seconds: float = 0.2, rest: float = 0.0) -> Link:
    """What messages between ranks 0 and 1 cost (collective; the other ranks take part in the ring)."""
    eager = eager_limit(comm, sizes)
    limits = () if eager in (None, max(sizes)) else (eager, eager + 1)
    points = [measure_point(comm, nbytes, seconds, rest) for nbytes in sorted({*sizes, *limits})]
    points = comm.bcast(points)
    line = summary(points)
    return Link(line.alpha, line.beta, line.overhead, 0.0, tuple(points), eager)


def summary(points: Sequence[Point]) -> Link:
    """The line through them; what a rested port lets through at once counts as it does in a stream."""
    return fit([(p.nbytes, max(p.time, p.gap)) for p in points], points[0].sending)


def measure_point(comm: MPI.Intracomm, nbytes: int, seconds: float, rest: float = 0.0) -> Point:
    """What messages of one length cost (collective; what rank 0 gets counts)."""
    one_way, sending, receiving = [], [], []
    if comm.Get_rank() < 2:
        for there_and_back, send in repeated(comm, lambda: ping_pong(comm, nbytes, rest), seconds, pair=True):
            one_way.append(there_and_back / 2)
            sending.append(send)
        busy = 2 * typical(one_way)
        for left in repeated(comm, lambda: receive_late(comm, nbytes, busy), seconds / 4, pair=True):
            receiving.append(left)
        receiving = comm.sendrecv(receiving, 1 - comm.Get_rank(), source=1 - comm.Get_rank())  # rank 1's
    quietly(comm)
    gap = spacing(comm, nbytes, seconds) if comm.Get_rank() < 2 else 0.0
    quietly(comm)
    both = repeated(comm, lambda: at_once(comm, nbytes, rest, around=True), seconds)
    exchange = repeated(comm, lambda: at_once(comm, nbytes, rest, around=False), seconds)
    times = [typical(seconds or [0.0]) for seconds in (one_way, sending, receiving)]
    return Point(nbytes, *times, gap, median(both), median(exchange))  # two directions are fast by chance, too


def repeated(comm: MPI.Intracomm, call: Callable[[], object], seconds: float, pair: bool = False) -> Iterator:
    """The results of so many calls as rank 0 finds time for, after one that does not count; equal on all ranks."""
    call()
    begin = time.perf_counter()
    yield call()
    once = time.perf_counter() - begin
    number = int(np.clip(seconds / max(once, 1e-9), FEW, MANY)) - 1
    if not pair:
        number = comm.bcast(number)
    elif comm.Get_rank() == 0:
        comm.send(number, 1)
    else:
        number = comm.recv(source=0)
    yield from (call() for _ in range(number))


def ping_pong(comm: MPI.Intracomm, nbytes: int, rest: float = 0.0) -> tuple[float, float]:
    """Seconds there and back between ranks 0 and 1, and for the call to send alone."""
    rank, other = comm.Get_rank(), 1 - comm.Get_rank()
    out, into = arrays(nbytes)
    if rest:
        time.sleep(rest)
    out.fill(1)
    for _ in range(2):
        wake(comm, other)
    begin = time.perf_counter()
    if rank:
        comm.Recv(into, other)
        comm.Send(out, other)
        return time.perf_counter() - begin, 0.0
    request = comm.Isend(out, other)
    sent = time.perf_counter()
    request.Wait()
    comm.Recv(into, other)
    return time.perf_counter() - begin, sent - begin


def receive_late(comm: MPI.Intracomm, nbytes: int, busy: float) -> float:
    """Seconds that rank 1 still needs for a message which had time to come while its processor was busy elsewhere."""
    rank, other = comm.Get_rank(), 1 - comm.Get_rank()
    out, into = arrays(nbytes)
    request = comm.Irecv(into, other, MESSAGE) if rank else None
    out.fill(1)
    wake(comm, other)
    if rank == 0:
        comm.Send(out, other, MESSAGE)
        return 0.0
    until = time.perf_counter() + busy
    while (now := time.perf_counter()) < until:
        pass
    request.Wait()
    return time.perf_counter() - now


def at_once(comm: MPI.Intracomm, nbytes: int, rest: float, around: bool) -> float:
    """Seconds until every rank has sent one message to the next and got one, or partners one from each other.

    The partners are those of recursive doubling, 1, 2, 4 ... apart, of whose times this is the mean: Open MPI's TCP
    joins some pairs by connections that carry both directions at once, and others by one that does not.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    partners = [rank ^ 1 << k for k in range((size - 1).bit_length())]
    out, into = arrays(nbytes)
    times = []
    for to, source in [((rank + 1) % size, (rank - 1) % size)] if around else zip(partners, partners, strict=True):
        if rest:
            time.sleep(rest)
        out.fill(1)
        comm.Barrier()
        begin = end = time.perf_counter()
        if to < size:
            comm.Sendrecv(out, to, MESSAGE, into, source, MESSAGE)
            end = time.perf_counter()
        times.append(comm.allreduce(end - begin, MPI.MAX))  # one direction may be served after the other
    return mean(times)


def spacing(comm: MPI.Intracomm, nbytes: int, seconds: float) -> float:
    """Seconds from message to message in a stream from rank 0 to 1.

    What a stream of twice the length takes longer: so latencies and what rested ports let through cancel.
    """
    rank, other = comm.Get_rank(), 1 - comm.Get_rank()
    number = int(np.clip(STREAM // nbytes, 1, 64))
    whole = arrays(2 * number * nbytes)[rank]
    messages = whole.reshape(-1, nbytes)

    def stream(number):
        if rank == 0:
            whole.fill(1)
        wake(comm, other)
        begin = time.perf_counter()
        each = comm.Irecv if rank else comm.Isend
        MPI.Request.Waitall([each(message, other, MESSAGE) for message in messages[:number]])
        wake(comm, other)
        return time.perf_counter() - begin

    pairs = list(repeated(comm, lambda: (stream(number), stream(2 * number)), seconds, pair=True))
    return max(1e-9, typical(long for _, long in pairs) - typical(short for short, _ in pairs)) / number


def eager_limit(comm: MPI.Intracomm, sizes: Sequence[int]) -> int | None:
    """The longest message that is sent before its receive is there; None where all of these lengths are."""

    def waits(nbytes):
        times = []
        if comm.Get_rank() < 2:
            out, into = arrays(nbytes)
            for _ in range(FEW):
                wake(comm, 1 - comm.Get_rank())
                begin = time.perf_counter()
                if comm.Get_rank() == 0:
                    comm.Send(out, 1)
                else:
                    time.sleep(patience)
                    comm.Recv(into, 0)
                times.append(time.perf_counter() - begin)
        return comm.bcast(bool(times) and min(times) > patience / 2)

    patience = 10e-3  # far more than a message takes that is buffered
    longest = [n for n in sorted(sizes) if n <= 4 * MIB]
    below = 0
    for above in longest:
        if waits(above):
            break
        below = above
    else:
        return None
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if waits(middle) else (middle, above)
    return below


def measure_memory(comm: MPI.Intracomm, seconds: float) -> tuple[list, list]:
    """((bytes, seconds) of reductions, and of copies), made by all ranks at once as in a collective; equal on all."""
    reductions, copies = [], []
    for nbytes in MEMORY_SIZES:
        a, b = np.ones(nbytes // 4, "f4"), np.ones(nbytes // 4, "f4")
        source, target = MPI.buffer.fromaddress(a.ctypes.data, nbytes), MPI.buffer.fromaddress(b.ctypes.data, nbytes)

        def reduce(a=a, b=b):
            MPI.SUM.Reduce_local(a, b)

        def copy(source=source, target=target):
            target[:] = source

        for calls, points in ((reduce, reductions), (copy, copies)):
            comm.Barrier()
            calls()
            times = list(islice(repeated(comm, lambda calls=calls: clocked(calls), seconds / 4), MANY))
            points.append((nbytes, comm.allreduce(typical(times), MPI.SUM) / comm.Get_size()))
    return reductions, copies


def measure_barriers(node: MPI.Intracomm, seconds: float) -> list[tuple[int, float]]:
    """(ranks, seconds) that the ranks of a node take to wait for each other in shared memory: 2, 4, ... and all."""
    from collectives.node_memory.window import SharedWindow

    size, barriers = node.Get_size(), []
    for ranks in sorted({2**k for k in range(1, size.bit_length()) if 2**k < size} | {size} - {1}):
        part = node.Split(0 if node.Get_rank() < ranks else MPI.UNDEFINED)
        taken = 0.0
        if part != MPI.COMM_NULL:
            window = SharedWindow(part)
            barrier = window.barrier()

            def ten(barrier=barrier):
                for _ in range(10):
                    barrier()

            taken = typical(repeated(part, lambda: clocked(ten), seconds)) / 10
            window.free()
            part.Free()
        barriers.append((ranks, node.bcast(taken)))
        quietly(node)
    return barriers


def measure_sharing(node: MPI.Intracomm, seconds: float) -> tuple[list, list]:
    """((bytes, seconds) to write over what the next rank has read, and to copy what it has just written).

    By all ranks of a node at once, so that each core has to ask the other for its lines; [], [] for one rank.
    """
    from collectives.node_memory.window import SharedWindow

    size, posts, fetches = node.Get_size(), [], []
    if size == 1:
        return posts, fetches
    window = SharedWindow(node)
    barrier = window.barrier()
    for nbytes in MEMORY_SIZES:
        own, (source, target) = window.empty(nbytes, "u1"), arrays(nbytes)
        theirs = window.peers(own).parts[(window.rank + 1) % size]

        def both(own=own, source=source, target=target, theirs=theirs):
            posted = clocked(partial(own.__setitem__, ..., source))
            barrier()
            fetched = clocked(partial(target.__setitem__, ..., theirs))
            barrier()
            return posted, fetched

        times = zip(*islice(repeated(node, both, seconds / 4), MANY), strict=True)
        for points, each in zip((posts, fetches), times, strict=True):
            points.append((nbytes, node.allreduce(typical(each), MPI.SUM) / size))
    window.free()
    return posts, fetches


def wake(comm: MPI.Intracomm, other: int) -> None:
    """Neither of two ranks goes on before the other has come."""
    byte = np.ones(1, "u1")
    comm.Sendrecv(byte, other, WAKE, byte.copy(), other, WAKE)


def typical(seconds: Iterable[float]) -> float:
    """The fast quartile."""
    return float(np.quantile(list(seconds), 0.25))


def clocked(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def quietly(comm: MPI.Intracomm) -> None:
    """Wait for all ranks without keeping a core busy."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


@lru_cache(maxsize=1)
def arrays(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """A message and the place for one, all pages of both written: none is made while a message is timed."""
    return np.ones(nbytes, "u1"), np.ones(nbytes, "u1")
