"""From the arguments of a collective call to the plan that carries it out.

Data that is only moved travels as bytes: elements without holes are sent from where they lie, others are packed before
and unpacked after. Data that is reduced travels as elements of its datatype.
"""

from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import CONSECUTIVE, NODES, SEGMENT
from collectives.executor import Plan, copying, writes
from collectives.messages import Message, incoming, is_in_place, name_of, outgoing, refuse_overlap
from collectives.selection import Call, Selection
from collectives.steps import part

# Operations for which a (+) b and b (+) a are the same to the last bit (not MAX and MIN: a NaN may meet a number).
SYMMETRIC = (MPI.SUM, MPI.PROD, MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR)
HALF = {MPI.SUM.handle: np.add, MPI.PROD.handle: np.multiply, MPI.MAX.handle: np.maximum, MPI.MIN.handle: np.minimum}
SEGMENT_BYTES = 4 * SEGMENT


class Native:
    """Stands where a plan would: the call belongs to the MPI library."""

    bytes, used, busy = 0, False, 0

    def free(self):
        """There is nothing to free."""


NATIVE = Native()


@dataclass
class Bytes:
    """A message as bytes: where the blocks lie, and the calls that pack and unpack what cannot travel as it lies."""

    memory: np.ndarray
    blocks: list[tuple[int, int]]
    pack: list = field(default_factory=list)
    unpack: list = field(default_factory=list)

    def block(self, i: int) -> np.ndarray:
        lo, hi = self.blocks[i]
        return self.memory[lo:hi]


def as_bytes(message: Message, slices, consecutive=False) -> Bytes:
    """Slices (in elements) of a message as blocks of bytes, one after another where they must be `consecutive`."""
    size, extent = message.size, message.extent
    in_order = all(first[1] == second[0] for first, second in pairwise(slices))
    if message.plain and (in_order or not consecutive):
        end = max((hi for _, hi in slices), default=0)
        return Bytes(message.bytes(0, end), [(lo * size, hi * size) for lo, hi in slices])
    ends = [0, *accumulate((hi - lo) * size for lo, hi in slices)]
    packed = Bytes(np.empty(ends[-1], np.uint8), list(pairwise(ends)))
    for i, (lo, hi) in enumerate(slices):
        if hi <= lo or not size:
            continue
        room = packed.block(i)
        if message.plain:
            packed.pack.append(copying(room, message.bytes(lo, hi)))
            packed.unpack.append(copying(message.bytes(lo, hi), room))
        else:
            memory = MPI.buffer.fromaddress(message.address + lo * extent, (hi - lo) * extent)
            packed.pack.append(partial(message.datatype.Pack, memory, room, 0, MPI.COMM_SELF))
            packed.unpack.append(partial(message.datatype.Unpack, room, 0, memory, MPI.COMM_SELF))
    return packed


def whole(message: Message) -> Bytes:
    return as_bytes(message, [(0, message.count)])


def slices_of(message: Message, parts: int) -> list[tuple[int, int]]:
    """(lo, hi) of each block in elements."""
    return message.slices or [(i * message.count, (i + 1) * message.count) for i in range(parts)]


class Planner:
    """Makes the plans of one communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        a private duplicate
    given : operation -> algorithm asked for
    synchronous : send with Ssend semantics
    """

    def __init__(self, comm, given, synchronous):
        self.comm, self.synchronous = comm, synchronous
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.node = same_node(comm)
        self.nodes = comm.allgather(self.node.bcast(self.rank))  # of each rank: the first rank on its node
        self.selection = Selection(given, self.nodes)
        self._window = None
        self.tag = 0

    def nonblocking(self) -> "Planner":
        """One that plans for messages only, with a tag of their own: they travel beside those of blocking calls."""
        planner = copy(self)
        planner.tag = 1
        planner.selection = self.selection.without_memory()
        return planner

    @property
    def window(self):
        """The memory that the ranks of a node share, made when first asked for (collective)."""
        if self._window is None:
            from collectives.window import SharedWindow

            self._window = SharedWindow(self.node)
        return self._window

    def free(self):
        if self._window is not None:
            self._window.free()
        self.node.Free()
        self.comm.Free()

    # ------------------------------------------------------------------------------------- names and rounds

    def asked(self, operation, algorithm):
        return self.selection.asked(operation, algorithm)

    def choose(self, asked, operation, nbytes, **properties):
        return self.selection.choose(asked, Call(operation, nbytes, **properties))

    def check_root(self, root):
        if not 0 <= root < self.size:
            raise ValueError(f"root {root}: the communicator has ranks 0 ... {self.size - 1}")

    def rounds(self, operation, name, *count, itemsize=1, **options):
        """This rank's rounds, all of them."""
        entry = ALGORITHMS[operation][name]
        if entry.requires == NODES:
            options["nodes"] = self.nodes
        if entry.pipelined:
            options["segment"] = max(1, SEGMENT_BYTES // itemsize)
        return list(entry.rounds(self.rank, self.size, *count, **options))

    def moving(self, rounds, buffers, before=(), after=(), keep=()):
        """A plan that moves bytes."""
        return Plan(
            rounds,
            self.comm,
            buffers,
            synchronous=self.synchronous,
            tag=self.tag,
            before=before,
            after=after,
            keep=keep,
        )

    # ---------------------------------------------------------------------------------- data that is moved

    def barrier(self, algorithm):
        name = self.choose(self.asked("barrier", algorithm), "barrier", 0)
        if name == "native":
            return NATIVE
        if name == "shared":
            return self.window.barrier()
        return self.moving(self.rounds("barrier", name), {"x": np.zeros(1, np.uint8)})

    def broadcast(self, buf, root, algorithm):
        self.check_root(root)
        if (asked := self.asked("broadcast", algorithm)) == "native":
            return NATIVE
        message = outgoing(buf) if self.rank == root else incoming(buf)
        x = whole(message)
        before, after = (x.pack, []) if self.rank == root else ([], x.unpack)
        name = self.choose(asked, "broadcast", x.memory.nbytes)
        if name == "native":
            return NATIVE
        if name == "shared":
            return Sequence(before, [self.window.broadcast(x.memory, root)], after, (message.datatype,))
        rounds = self.rounds("broadcast", name, x.memory.nbytes, root=root)
        return self.moving(rounds, {"x": x.memory}, before, after, keep=(message.datatype,))

    def scatter(self, sendbuf, recvbuf, root, algorithm, vector=False):
        return self.rooted("scatter", sendbuf, recvbuf, root, algorithm, vector)

    def gather(self, sendbuf, recvbuf, root, algorithm, vector=False):
        return self.rooted("gather", recvbuf, sendbuf, root, algorithm, vector)

    def rooted(self, operation, all_blocks, own_block, root, algorithm, vector):
        """Scatter and gather: the root has the buffer of all blocks, each rank that of its own."""
        self.check_root(root)
        if (asked := self.asked(operation, algorithm)) == "native":
            return NATIVE
        reads, writes_ = (outgoing, incoming) if operation == "scatter" else (incoming, outgoing)
        keep, own, all_ = [], None, None
        if not (self.rank == root and is_in_place(own_block)):
            message = writes_(own_block)
            own = whole(message)
            keep.append(message.datatype)
        if self.rank == root:
            message = reads(all_blocks, self.size, vector)
            all_ = as_bytes(message, slices_of(message, self.size))
            keep.append(message.datatype)
            if own is None:  # in place: the root's block is where it belongs
                own = Bytes(all_.block(root), [(0, all_.block(root).nbytes)])
            self.check_lengths(operation, all_.block(root).nbytes, own.memory.nbytes)
        length = own.memory.nbytes
        name = self.choose(asked, operation, length * self.size, vector=vector)
        if name == "native":
            return NATIVE
        if self.rank == root:
            blocks = all_.blocks
        elif vector:
            blocks = {self.rank: (0, length)}  # the others' lengths are not known here, and flat does not ask
        else:
            blocks = [(i * length, (i + 1) * length) for i in range(self.size)]
        if vector and name != "flat":
            blocks = self.told_by_root(blocks, root)
        x, y = (all_, own) if operation == "scatter" else (own, all_)
        buffers = {label: b.memory for label, b in (("x", x), ("y", y)) if b is not None}
        rounds = self.rounds(operation, name, blocks, root=root)
        return self.moving(rounds, buffers, x.pack if x else (), y.unpack if y else (), tuple(keep))

    def told_by_root(self, blocks, root):
        """Blocks of the lengths that only the root knows (collective)."""
        lengths = [hi - lo for lo, hi in blocks] if self.rank == root else None
        ends = [0, *accumulate(self.comm.bcast(lengths, root))]
        return blocks if self.rank == root else list(pairwise(ends))

    def check_lengths(self, operation, one, other):
        if one != other:
            raise ValueError(
                f"{operation}: the block of rank {self.rank} has {one} bytes in the buffer of all blocks, "
                f"{other} in its own"
            )

    def allgather(self, sendbuf, recvbuf, algorithm, vector=False):
        if (asked := self.asked("allgather", algorithm)) == "native":
            return NATIVE
        recv = incoming(recvbuf, self.size, vector)
        slices = slices_of(recv, self.size)
        nbytes = sum(hi - lo for lo, hi in slices) * recv.size
        name = self.choose(asked, "allgather", nbytes, vector=vector)
        if name == "native":
            return NATIVE
        x = as_bytes(recv, slices, name == "shared" or ALGORITHMS["allgather"][name].requires == CONSECUTIVE)
        before, keep = x.pack, (recv.datatype,)
        if not is_in_place(sendbuf):
            send = outgoing(sendbuf)
            own = whole(send)
            self.check_lengths("allgather", x.block(self.rank).nbytes, own.memory.nbytes)
            before = [*own.pack, copying(x.block(self.rank), own.memory)]
            keep = (recv.datatype, send.datatype)
        if name == "shared":
            lengths = [hi - lo for lo, hi in x.blocks]
            return Sequence(before, [self.window.allgather(None, x.memory, lengths)], x.unpack, keep)
        return self.moving(self.rounds("allgather", name, x.blocks), {"x": x.memory}, before, x.unpack, keep)

    def alltoall(self, sendbuf, recvbuf, algorithm, vector=False):
        if (asked := self.asked("alltoall", algorithm)) == "native":
            return NATIVE
        recv = incoming(recvbuf, self.size, vector)
        y = as_bytes(recv, slices_of(recv, self.size))
        nbytes = sum(hi - lo for lo, hi in y.blocks)
        name = self.choose(asked, "alltoall", nbytes, vector=vector)
        if vector and name == "bruck":  # needs blocks of one length
            name = "pairwise"
        if name == "native":
            return NATIVE
        if is_in_place(sendbuf):
            x = Bytes(np.empty_like(y.memory), y.blocks, [*y.pack])
            x.pack.append(copying(x.memory, y.memory))
            keep = (recv.datatype, x.memory)
        else:
            send = outgoing(sendbuf, self.size, vector)
            x = as_bytes(send, slices_of(send, self.size))
            keep = (recv.datatype, send.datatype)
        self.check_lengths("alltoall", y.block(self.rank).nbytes, x.block(self.rank).nbytes)
        rounds = self.rounds("alltoall", name, x.blocks, into=y.blocks)
        return self.moving(rounds, {"x": x.memory, "y": y.memory}, x.pack, y.unpack, keep)

    # ---------------------------------------------------------------------------------- data that is reduced

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

    def reducing(self, rounds, x, message, op, before=(), after=(), keep=()):
        """A plan that reduces elements of the message's datatype in x."""
        if message.half:
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


def same_node(comm):
    """The ranks that share this one's memory (collective)."""
    return comm.Split_type(MPI.COMM_TYPE_SHARED)


class Sequence:
    """Plans one after another."""

    used, busy = False, 0

    def __init__(self, before, plans, after, keep=()):
        self.plans, self.keep = plans, keep
        self.calls = [*before, *plans, *after]
        self.bytes = sum(plan.bytes for plan in plans)

    def __call__(self):
        self.used = True
        for call in self.calls:
            call()

    def free(self):
        for plan in self.plans:
            plan.free()


def dtype_of(message: Message) -> np.dtype | None:
    """The NumPy dtype of a message's elements; None if there is none."""
    if message.half:
        return np.dtype(np.float16)
    if not message.datatype.is_predefined:
        return None
    code = message.datatype.tocode() if message.plain else None
    try:
        return np.dtype(code) if code else None
    except TypeError:
        return None


def typed(message: Message, count: int | None = None) -> np.ndarray:
    """The first `count` elements of a message as an array; by default all."""
    return message.bytes(0, message.count if count is None else count).view(dtype_of(message))


def can_share(op, dtype) -> bool:
    """Whether shared memory reduces these elements."""
    from collectives.shared import OPERATIONS

    return op.handle in OPERATIONS and dtype.kind in OPERATIONS[op.handle][2]


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
