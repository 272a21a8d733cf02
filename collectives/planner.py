"""From the arguments of a collective call to the plan that carries it out.

Data that is only moved travels as bytes: elements without holes are sent from where they lie, others are packed before
and unpacked after. Data that is reduced travels as elements of its datatype.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS
from collectives.executor import Plan, copying, writes
from collectives.messages import Message, incoming, is_in_place, name_of, outgoing, refuse_overlap
from collectives.selection import check_name, choose

# Operations for which a (+) b and b (+) a are the same to the last bit (not MAX and MIN: a NaN may meet a number).
SYMMETRIC = (MPI.SUM, MPI.PROD, MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR)
HALF = {MPI.SUM.handle: np.add, MPI.PROD.handle: np.multiply, MPI.MAX.handle: np.maximum, MPI.MIN.handle: np.minimum}


class Native:
    """Stands where a plan would: the call belongs to the MPI library."""

    bytes, used = 0, False

    def free(self):
        """There is nothing to free."""


NATIVE = Native()


@dataclass
class Bytes:
    """A message as bytes: where the blocks lie, and the calls that pack and unpack what is not plain."""

    memory: np.ndarray
    blocks: list[tuple[int, int]]
    pack: list
    unpack: list


def as_bytes(message: Message, slices=None) -> Bytes:
    """The given slices (in elements) of a message as bytes; all of it by default."""
    slices = [(0, message.count)] if slices is None else slices
    size, extent, datatype = message.size, message.extent, message.datatype
    if message.plain:
        end = max((hi for _, hi in slices), default=0)
        return Bytes(message.bytes(0, end), [(lo * size, hi * size) for lo, hi in slices], [], [])
    ends = np.cumsum([0] + [(hi - lo) * size for lo, hi in slices]).tolist()
    blocks = list(zip(ends, ends[1:], strict=False))
    packed = np.empty(ends[-1], np.uint8)
    pack, unpack = [], []
    for (lo, hi), (start, end) in zip(slices, blocks, strict=True):
        if hi > lo and size:
            memory = MPI.buffer.fromaddress(message.address + lo * extent, (hi - lo) * extent)
            pack.append(partial(datatype.Pack, memory, packed[start:end], 0, MPI.COMM_SELF))
            unpack.append(partial(datatype.Unpack, packed[start:end], 0, memory, MPI.COMM_SELF))
    return Bytes(packed, blocks, pack, unpack)


class Planner:
    """Makes the plans of one communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        a private duplicate
    names : operation -> algorithm asked for, "auto" or "native"
    synchronous : send with Ssend semantics
    """

    def __init__(self, comm, names, synchronous):
        self.comm, self.names, self.synchronous = comm, names, synchronous
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def asked(self, operation, algorithm):
        return self.names[operation] if algorithm is None else check_name(operation, algorithm)

    def check_root(self, root):
        if not 0 <= root < self.size:
            raise ValueError(f"root {root}: the communicator has ranks 0 ... {self.size - 1}")

    def rounds(self, operation, name, count, **options):
        """This rank's rounds, all of them."""
        return list(ALGORITHMS[operation][name].rounds(self.rank, self.size, count, **options))

    def move(self, rounds, x=None, y=None, keep=()):
        """A plan that moves bytes. x is packed before; y, or x where there is no y, is unpacked after."""
        result = x if y is None else y
        return Plan(
            rounds,
            self.comm,
            {name: b.memory for name, b in (("x", x), ("y", y)) if b is not None},
            synchronous=self.synchronous,
            before=x.pack if x else (),
            after=result.unpack if result else (),
            keep=keep,
        )

    # ---------------------------------------------------------------------------------- data that is moved

    def barrier(self, algorithm):
        name = choose("barrier", self.asked("barrier", algorithm), 0)
        if name == "native":
            return NATIVE
        rounds = list(ALGORITHMS["barrier"][name].rounds(self.rank, self.size))
        return Plan(rounds, self.comm, {"x": np.zeros(1, np.uint8)}, synchronous=self.synchronous)

    def broadcast(self, buf, root, algorithm):
        self.check_root(root)
        if (asked := self.asked("broadcast", algorithm)) == "native":
            return NATIVE
        message = outgoing(buf) if self.rank == root else incoming(buf)
        x = as_bytes(message)
        name = choose("broadcast", asked, x.memory.nbytes)
        if name == "native":
            return NATIVE
        if self.rank == root:
            x.unpack = []
        else:
            x.pack = []
        return self.move(self.rounds("broadcast", name, x.memory.nbytes, root=root), x, keep=(message.datatype,))

    def scatter(self, sendbuf, recvbuf, root, algorithm):
        return self.rooted("scatter", sendbuf, recvbuf, root, algorithm)

    def gather(self, sendbuf, recvbuf, root, algorithm):
        return self.rooted("gather", recvbuf, sendbuf, root, algorithm)

    def rooted(self, operation, whole, own, root, algorithm, vector=False):
        """Scatter and gather: `whole` is the root's buffer of all blocks, `own` each rank's block."""
        self.check_root(root)
        if (asked := self.asked(operation, algorithm)) == "native":
            return NATIVE
        to_root = operation == "gather"
        whole_is, own_is = (incoming, outgoing) if to_root else (outgoing, incoming)
        keep, mine, everything = [], None, None
        if not (self.rank == root and is_in_place(own)):
            message = own_is(own)
            mine = as_bytes(message)
            keep.append(message.datatype)
        if self.rank == root:
            message = whole_is(whole, self.size, vector)
            slices = message.slices or [(i * message.count, (i + 1) * message.count) for i in range(self.size)]
            everything = as_bytes(message, slices)
            keep.append(message.datatype)
            lo, hi = everything.blocks[root]
            if mine is None:  # in place: the root's block is where it belongs
                mine = Bytes(everything.memory[lo:hi], [(0, hi - lo)], [], [])
            elif mine.memory.nbytes != hi - lo:
                raise ValueError(
                    f"{operation}: the root's own block has {mine.memory.nbytes} bytes in the one buffer, "
                    f"{hi - lo} in the other"
                )
        length = mine.memory.nbytes
        name = choose(operation, asked, length * self.size) if not vector else self.vector_name(operation, asked)
        if name == "native":
            return NATIVE
        if not vector:
            blocks = (
                everything.blocks
                if self.rank == root
                else [(i * length, i * length + length) for i in range(self.size)]
            )
        elif name == "flat":
            blocks = everything.blocks if self.rank == root else {self.rank: (0, length)}
        else:
            blocks = self.told_blocks(everything, root)
        rounds = self.rounds(operation, name, blocks, root=root)
        x, y = (mine, everything) if to_root else (everything, mine)
        return self.move(rounds, x, y, tuple(keep))

    # ---------------------------------------------------------------------------------- data that is reduced

    def operands(self, sendbuf, recvbuf, parts=1):
        """(send or None, recv), checked against each other."""
        recv = incoming(recvbuf, parts)
        if is_in_place(sendbuf):
            return None, recv
        send = outgoing(sendbuf)
        same_type(send, recv)
        if send.count != recv.count * parts:
            raise ValueError(f"the send buffer has {send.count} elements, the receive buffer {recv.count * parts}")
        refuse_overlap(send, recv)
        return send, recv

    def reduction(self, operation, asked, message, op):
        """The algorithm for a reduction of these elements; NATIVE where only the library can do it."""
        outside = message.datatype.Get_true_extent()
        low, high = outside[0], outside[0] + outside[1]
        if low < 0 or high > message.extent:  # data outside the extent: slices of elements would overlap
            return "native"
        return choose(operation, asked, message.count * message.size, ordered=not op.Is_commutative())

    def reduce_plan(self, rounds, x, message, op, before=(), after=(), keep=()):
        """A plan that reduces elements of the message's datatype in x."""
        if message.half:
            if op.handle not in HALF:
                raise TypeError("float16 has SUM, PROD, MAX and MIN; for another operation convert to float32")
            combine = partial(combine_half, HALF[op.handle])
        else:
            combine = partial(combine_native, op.Reduce_local, message.datatype)
        return Plan(
            rounds,
            self.comm,
            {"x": x},
            message.datatype,
            message.extent,
            combine,
            commutes=op in SYMMETRIC,
            synchronous=self.synchronous,
            before=before,
            after=after,
            keep=(op, message.datatype, *keep),
        )

    def allreduce(self, sendbuf, recvbuf, op, algorithm):
        if (asked := self.asked("allreduce", algorithm)) == "native":
            return NATIVE
        send, recv = self.operands(sendbuf, recvbuf)
        name = self.reduction("allreduce", asked, recv, op)
        if name == "native":
            return NATIVE
        x = recv.bytes(0, recv.count)
        before = [copying(x, send.bytes(0, send.count))] if send else []
        return self.reduce_plan(self.rounds("allreduce", name, recv.count), x, recv, op, before)

    def reduce(self, sendbuf, recvbuf, op, root, algorithm):
        self.check_root(root)
        if (asked := self.asked("reduce", algorithm)) == "native":
            return NATIVE
        if self.rank == root:
            send, message = self.operands(sendbuf, recvbuf)
        else:
            send = message = outgoing(sendbuf)
        name = self.reduction("reduce", asked, message, op)
        if name == "native":
            return NATIVE
        rounds = self.rounds("reduce", name, message.count, root=root)
        before, keep, x = [], (), message.bytes(0, message.count)
        if self.rank != root and writes(rounds, "x"):
            x = np.empty_like(x)
            keep = (x,)
        if (send and send is not message) or keep:
            before.append(copying(x, send.bytes(0, send.count)))
        return self.reduce_plan(rounds, x, message, op, before, keep=keep)


def combine_native(reduce_local, datatype, source, target, count):
    """The call target = source (+) target through MPI, for any operation and datatype."""
    return partial(reduce_local, (source, count, datatype), (target, count, datatype))


def combine_half(ufunc, source, target, count):
    """The same for float16, which MPI cannot reduce: each sum is made in float32 and rounded once."""
    a, b = source.view(np.float16), target.view(np.float16)
    return partial(ufunc, a, b, b)


def same_type(send, recv):
    if send.datatype != recv.datatype or send.half != recv.half:
        raise TypeError(f"the send buffer holds {name_of(send)}, the receive buffer {name_of(recv)}")
