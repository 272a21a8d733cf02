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
from collectives.executor import Plan, copying
from collectives.messages import array, incoming, is_in_place, name_of, outgoing, refuse_overlap, room
from collectives.moving import NATIVE, MovingPlanner, Sequence
from collectives.program import Program
from collectives.reducing import OPERATIONS, operation
from collectives.steps import part

# Operations for which a (+) b and b (+) a are the same to the last bit (not MAX and MIN: a NaN may meet a number).
SYMMETRIC = {op.handle for op in (MPI.SUM, MPI.PROD, MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR)}
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
        if not message.elements.apart:
            return "native"
        return self.choose(
            asked,
            operation,
            count * message.size,
            ordered=not op.Is_commutative(),
            shareable=can_share(op, message.elements.dtype),
            half=message.half,
        )

    def schedule(self, rounds, op, buffers):
        """A schedule of the caller's own on named arrays."""
        if not buffers:
            raise ValueError("compile: give at least one array by its name in the schedule, such as x=array")
        messages = {name: incoming(array) for name, array in buffers.items()}
        first = next(iter(messages.values()))
        for message in messages.values():
            same_type(first, message)
        program = Program(rounds, together=first.half)
        for name, message in messages.items():
            if (reach := program.reach.get(name, 0)) > message.count:
                raise ValueError(
                    f"compile: rank {self.rank}'s schedule needs {reach} elements of {name}, which has {message.count}"
                )
        buffers = {name: m.bytes(0, m.count) for name, m in messages.items()}
        return self.reducing(program, buffers, first, op)

    def reducing(self, program, buffers, message, op, before=(), after=(), keep=()):
        """A plan that reduces elements of the message's datatype in named buffers."""
        return Plan(
            program,
            self.comm,
            buffers,
            message.datatype,
            message.extent,
            partial(partial, op.Reduce_local),
            partial(total_half, op),
            commutes=op.handle in SYMMETRIC,
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
            s, x = send and send.array(), recv.array()
            return self.window.allreduce(s, x, op) if self.selection.place == "node" else self.two_level(s, x, op)
        x, before, keep = recv.bytes(0, recv.count), [], ()
        if operation == "exscan" and self.rank == 0 and send:
            x = room(x.nbytes)  # rank 0 has no result: its receive buffer stays as it is
            keep = (x,)
        if send:
            before = [copying(x, send.bytes(0, send.count))]
        program = self.program(operation, name, recv.count, itemsize=recv.size, half=recv.half)
        return self.reducing(program, {"x": x}, recv, op, before, keep=keep)

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
            s, x = send and send.array(), message.array() if self.rank == root else None
            return self.window.reduce(s, x, op, root)
        program = self.program("reduce", name, message.count, itemsize=message.size, half=message.half, root=root)
        x, before, keep = message.bytes(0, message.count), [], ()
        if self.rank != root and program.writes("x"):
            x = room(x.nbytes)  # the send buffer is not ours to write
            keep = (x,)
        if send and (send is not message or keep):
            before = [copying(x, send.bytes(0, send.count))]
        return self.reducing(program, {"x": x}, message, op, before, keep=keep)

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
            x, y = source.array(total), recv.array(lengths[self.rank])
            if not in_place:
                return self.window.reduce_scatter(x, y, op, lengths)
            result = np.empty_like(y)  # others may still read what y overlaps
            return Sequence(
                [], [self.window.reduce_scatter(x, result, op, lengths)], [copying(y, result)], (op, result)
            )
        x, extent = room(total * recv.extent), recv.extent
        before = [copying(x, source.bytes(0, total))]
        after = [copying(recv.bytes(0, own.stop - own.start), x[own.start * extent : own.stop * extent])]
        program = self.program("reduce_scatter", name, tuple(pairwise(ends)), half=recv.half)
        return self.reducing(program, {"x": x}, recv, op, before, after, keep=(x,))

    def two_level(self, send, x, op):
        """Allreduce over several nodes: each node sums in its memory, and its ranks each carry a part between nodes."""
        members: dict[int, list[int]] = {}
        for r, node in enumerate(self.nodes):
            members.setdefault(node, []).append(r)
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
            message = outgoing(mine)
            buffers = {"x": message.bytes(0, message.count)}
            plans.append(self.reducing(Program(between), buffers, message, op))
        plans.append(self.window.allgather(mine, x, lengths))
        return Sequence([], plans, [], (op, mine))


def can_share(op, dtype) -> bool:
    """Whether shared memory reduces these elements."""
    return op.handle in OPERATIONS and dtype is not None and dtype.kind in OPERATIONS[op.handle][2]


def total_half(op, operands, target):
    """Calls for the sum of float16 operands, which MPI cannot make: from left to right in float32, rounded once."""
    _, combine = operation(op, np.dtype(np.float16))
    return combine([array(a, np.float16) for a in operands], [array(target, np.float16)])


def same_type(send, recv):
    if send.datatype != recv.datatype or send.half != recv.half:
        raise TypeError(f"the send buffer holds {name_of(send)}, the receive buffer {name_of(recv)}")
