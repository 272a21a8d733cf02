"""From the arguments of a collective call to the plan that carries it out.

Data that is only moved travels as bytes (moving.py, packing.py). Data that is reduced travels as elements of its
datatype: this file.
"""

from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import SEGMENT_BYTES
from collectives.executor import Plan, copying, writes
from collectives.messages import incoming, is_in_place, name_of, outgoing, refuse_overlap
from collectives.moving import NATIVE, MovingPlanner, Sequence
from collectives.packing import dtype_of, typed
from collectives.steps import part

# Operations for which a (+) b and b (+) a are the same to the last bit (not MAX and MIN: a NaN may meet a number).
SYMMETRIC = (MPI.SUM, MPI.PROD, MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR)
HALF = {op.handle for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)}  # what float16 has


class Planner(MovingPlanner):
    """Makes the plans of all collectives of one communicator."""

    def operands(self, sendbuf, recvbuf):
        """(send or None, recv), checked against each other."""
        recv = incoming(recvbuf)
        if is_in_place(sendbuf):
            return None, recv
        send = outgoing(sendbuf)
        same_type(send, recv)
        if send.count != recv.count:
            raise ValueError(f"the send buffer has {send.count} elements, the receive buffer {recv.count}")
        refuse_overlap(send, recv)
        return send, recv

    def choice(self, operation, asked, message, count, op):
        """The algorithm for a reduction of so many elements; native where only the library can do it."""
        if message.half and op.handle not in HALF:
            raise TypeError("float16 has SUM, PROD, MAX and MIN; for another operation convert to float32")
        low, length = message.datatype.Get_true_extent()
        if low < 0 or low + length > message.extent:  # elements overlap: they cannot be cut apart
            return "native"
        return self.choose(
            asked,
            operation,
            count * message.size,
            ordered=not op.Is_commutative(),
            shareable=dtype_of(message) is not None and can_share(op, dtype_of(message)),
            half=message.half,
        )

    def schedule(self, rounds, op, buffers):
        """A schedule of the caller's own on named arrays."""
        messages = {name: incoming(array) for name, array in buffers.items()}
        first = next(iter(messages.values()))
        for message in messages.values():
            same_type(first, message)
        return self.reducing(rounds, {name: m.bytes(0, m.count) for name, m in messages.items()}, first, op)

    def reducing(self, rounds, x, message, op, before=(), after=(), keep=()):
        """A plan that reduces elements of the message's datatype in x, or in named buffers."""
        combine = combine_all = None
        if message.half:
            combine_all = partial(combine_half, op)
        else:
            combine = partial(combine_native, op.Reduce_local, message.datatype)
        return Plan(
            rounds,
            self.comm,
            x if isinstance(x, dict) else {"x": x},
            message.datatype,
            message.extent,
            combine,
            combine_all,
            commutes=op in SYMMETRIC,
            synchronous=self.synchronous,
            tag=self.tag,
            before=before,
            after=after,
            keep=(op, message.datatype, *keep),
        )

    def allreduce(self, sendbuf, recvbuf, op, algorithm):
        return self.everywhere("allreduce", sendbuf, recvbuf, op, algorithm)

    def scan(self, sendbuf, recvbuf, op, algorithm):
        return self.everywhere("scan", sendbuf, recvbuf, op, algorithm)

    def exscan(self, sendbuf, recvbuf, op, algorithm):
        return self.everywhere("exscan", sendbuf, recvbuf, op, algorithm)

    def everywhere(self, operation, sendbuf, recvbuf, op, algorithm):
        """Every rank gets a result of the same length, made in its receive buffer."""
        if (asked := self.asked(operation, algorithm)) == "native":
            return NATIVE
        send, recv = self.operands(sendbuf, recvbuf)
        name = self.choice(operation, asked, recv, recv.count, op)
        if name == "native":
            return NATIVE
        if name == "shared":
            s, x = send and typed(send), typed(recv)
            return self.window.allreduce(s, x, op) if self.selection.place == "node" else self.two_level(s, x, op)
        x, before, keep = recv.bytes(0, recv.count), [], ()
        if operation == "exscan" and self.rank == 0 and send:
            x = np.empty_like(x)  # rank 0 has no result: its receive buffer stays as it is
            keep = (x,)
        if send:
            before = [copying(x, send.bytes(0, send.count))]
        rounds = self.rounds(operation, name, recv.count, itemsize=recv.size)
        return self.reducing(rounds, x, recv, op, before, keep=keep)

    def reduce(self, sendbuf, recvbuf, op, root, algorithm):
        self.check_root(root)
        if (asked := self.asked("reduce", algorithm)) == "native":
            return NATIVE
        if self.rank == root:
            send, message = self.operands(sendbuf, recvbuf)
        else:
            send = message = outgoing(sendbuf)
        name = self.choice("reduce", asked, message, message.count, op)
        if name == "native":
            return NATIVE
        if name == "shared":
            s, x = send and typed(send), typed(message) if self.rank == root else None
            return self.window.reduce(s, x, op, root)
        rounds = self.rounds("reduce", name, message.count, itemsize=message.size, root=root)
        x, before, keep = message.bytes(0, message.count), [], ()
        if self.rank != root and writes(rounds, "x"):
            x = np.empty_like(x)  # the send buffer is not ours to write
            keep = (x,)
        if send and (send is not message or keep):
            before = [copying(x, send.bytes(0, send.count))]
        return self.reducing(rounds, x, message, op, before, keep=keep)

    def reduce_scatter(self, sendbuf, recvbuf, counts, op, algorithm):
        """`counts` of each rank's block, or None where all are as long as this one's."""
        if (asked := self.asked("reduce_scatter", algorithm)) == "native":
            return NATIVE
        in_place = is_in_place(sendbuf)
        parts = self.size if counts is None else 1  # a count that is given with a buffer is then one block's
        recv = incoming(recvbuf, parts if in_place else 1)
        source = recv if in_place else outgoing(sendbuf, parts)
        if counts is None:
            counts = [recv.count] * self.size
        ends = [0, *accumulate(map(int, counts))]
        total, own = ends[-1], slice(*list(pairwise(ends))[self.rank])
        same_type(source, recv)
        if source.count * parts != total:
            raise ValueError(
                f"reduce_scatter: the blocks have {total} elements in all, the send buffer {source.count * parts}"
            )
        if recv.count < own.stop - own.start:
            raise ValueError(
                f"reduce_scatter: the block of rank {self.rank} has {own.stop - own.start} elements, "
                f"its receive buffer {recv.count}"
            )
        if source is not recv:
            refuse_overlap(source, recv)
        name = self.choice("reduce_scatter", asked, recv, total, op)
        if name == "native":
            return NATIVE
        if name == "shared":
            lengths = [hi - lo for lo, hi in pairwise(ends)]
            x, y = typed(source, total), typed(recv, lengths[self.rank])
            if not in_place:
                return self.window.reduce_scatter(x, y, op, lengths)
            result = np.empty_like(y)  # others may still read what y overlaps
            return Sequence(
                [], [self.window.reduce_scatter(x, result, op, lengths)], [copying(y, result)], (op, result)
            )
        x, extent = np.empty(total * recv.extent, np.uint8), recv.extent
        before = [copying(x, source.bytes(0, total))]
        after = [copying(recv.bytes(0, own.stop - own.start), x[own.start * extent : own.stop * extent])]
        rounds = self.rounds("reduce_scatter", name, list(pairwise(ends)))
        return self.reducing(rounds, x, recv, op, before, after, keep=(x,))

    def two_level(self, send, x, op):
        """Allreduce over several nodes: each node sums in its memory, and its ranks each carry a part between nodes."""
        members = {node: [r for r in range(self.size) if self.nodes[r] == node] for node in dict.fromkeys(self.nodes)}
        here = members[self.nodes[self.rank]].index(self.rank)
        carriers = min(map(len, members.values()))
        parts = [part(x.size, carriers, i) if i < carriers else (0, 0) for i in range(self.node.Get_size())]
        lengths = [hi - lo for lo, hi in parts]
        mine = np.empty(lengths[here], x.dtype)
        plans = [self.window.reduce_scatter(x if send is None else send, mine, op, lengths)]
        if here < carriers:
            peers = [group[here] for group in members.values()]
            rounds = ALGORITHMS["allreduce"]["segmented_ring"].rounds(
                peers.index(self.rank), len(peers), mine.size, segment=max(1, SEGMENT_BYTES // x.itemsize)
            )
            between = [tuple(s._replace(peer=peers[s.peer]) if hasattr(s, "peer") else s for s in r) for r in rounds]
            plans.append(self.reducing(between, mine.view(np.uint8), outgoing(mine), op))
        plans.append(self.window.allgather(mine, x, lengths))
        return Sequence([], plans, [], (op, mine))


def can_share(op, dtype) -> bool:
    """Whether shared memory reduces these elements."""
    from collectives.shared import OPERATIONS

    return op.handle in OPERATIONS and dtype.kind in OPERATIONS[op.handle][2]


def combine_native(reduce_local, datatype, source, target, count):
    """The call target = source (+) target through MPI, for any operation and datatype."""
    source, target = MPI.buffer.frombuffer(source), MPI.buffer.frombuffer(target)  # sooner taken apart than arrays
    return partial(reduce_local, (source, count, datatype), (target, count, datatype))


def combine_half(op, operands, target):
    """Calls for the sum of float16 operands, which MPI cannot make: from left to right in float32, rounded once."""
    from collectives.shared import operation

    _, combine = operation(op, np.dtype(np.float16))
    return combine([a.view(np.float16) for a in operands], [target.view(np.float16)])


def same_type(send, recv):
    if send.datatype != recv.datatype or send.half != recv.half:
        raise TypeError(f"the send buffer holds {name_of(send)}, the receive buffer {name_of(recv)}")
