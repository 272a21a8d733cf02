"""Plans of the collectives that only move data, and what those that reduce (planner.py) need as well."""

from copy import copy
from functools import lru_cache
from itertools import accumulate, pairwise

from mpi4py import MPI

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import CONSECUTIVE, NODES, SEGMENT_BYTES
from collectives.executor import Plan, copying
from collectives.messages import array, incoming, is_in_place, outgoing, room
from collectives.packing import Bytes, as_bytes, slices_of, whole
from collectives.program import Program, Programs
from collectives.selection import Call, Selection


class Native:
    """Stands where a plan would: the call belongs to the MPI library."""

    bytes, used, busy, gone = 0, False, 0, False

    def free(self):
        """There is nothing to free."""


NATIVE = Native()


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

    @property
    def gone(self):
        return any(plan.gone for plan in self.plans)

    def free(self):
        for plan in self.plans:
            plan.free()


def same_node(comm):
    """The ranks that share this one's memory (collective)."""
    return comm.Split_type(MPI.COMM_TYPE_SHARED)


class MovingPlanner:
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
        self.nodes = tuple(comm.allgather(self.node.bcast(self.rank)))  # of each rank: the first rank on its node
        self.selection = Selection(given, self.nodes, MPI.Get_library_version())
        self.choose_for = lru_cache(1024)(self.selection.choose)
        self.programs = Programs()
        self._window = None
        self.tag = 0

    def nonblocking(self) -> "MovingPlanner":
        """One that plans for messages only, with a tag of their own: they travel beside those of blocking calls."""
        planner = copy(self)
        planner.tag = 1
        planner.selection = self.selection.without_memory()
        planner.choose_for = lru_cache(1024)(planner.selection.choose)
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
        return self.choose_for(asked, Call(operation, nbytes, **properties))

    def check_root(self, root):
        if not 0 <= root < self.size:
            raise ValueError(f"root {root}: the communicator has ranks 0 ... {self.size - 1}")

    def program(self, operation, name, *count, itemsize=1, half=False, **options):
        """This rank's part in an algorithm; `count` is a number of elements or a tuple of blocks."""
        entry = ALGORITHMS[operation][name]
        if entry.requires == NODES:
            options["nodes"] = self.nodes
        if entry.pipelined:
            options["segment"] = max(1, SEGMENT_BYTES // itemsize)

        def make():
            return Program(entry.rounds(self.rank, self.size, *count, **options), together=half)

        return self.programs.of((operation, name, count, half, *options.items()), make)

    def moving(self, program, buffers, before=(), after=(), keep=()):
        """A plan that moves bytes."""
        return Plan(
            program,
            self.comm,
            buffers,
            synchronous=self.synchronous,
            tag=self.tag,
            before=before,
            after=after,
            keep=keep,
        )

    # --------------------------------------------------------------------------------------- the collectives

    def barrier(self, algorithm):
        name = self.choose(self.asked("barrier", algorithm), "barrier", 0)
        if name == "native":
            return NATIVE
        if name == "shared":
            return self.window.barrier()
        return self.moving(self.program("barrier", name), {})

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
            return Sequence(before, [self.window.broadcast(array(x.memory), root)], after, (message.datatype,))
        program = self.program("broadcast", name, x.memory.nbytes, root=root)
        return self.moving(program, {"x": x.memory}, before, after, keep=(message.datatype,))

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
                own = Bytes(all_.block(root), ((0, all_.block(root).nbytes),), all_.pack)
            self.check_lengths(operation, all_.block(root).nbytes, own.memory.nbytes)
        length = own.memory.nbytes
        name = self.choose(asked, operation, length * self.size, vector=vector)
        if name == "native":
            return NATIVE
        if self.rank == root:
            blocks = all_.blocks
        elif vector:
            blocks = ((0, length),) * self.size  # the others' lengths are not known here, and flat does not ask
        else:
            blocks = tuple((i * length, (i + 1) * length) for i in range(self.size))
        if vector and name != "flat":
            blocks = self.told_by_root(blocks, root)
        x, y = (all_, own) if operation == "scatter" else (own, all_)
        buffers = {label: b.memory for label, b in (("x", x), ("y", y)) if b is not None}
        program = self.program(operation, name, blocks, root=root)
        return self.moving(program, buffers, x.pack if x else (), y.unpack if y else (), tuple(keep))

    def told_by_root(self, blocks, root):
        """Blocks of the lengths that only the root knows (collective)."""
        lengths = [hi - lo for lo, hi in blocks] if self.rank == root else None
        ends = [0, *accumulate(self.comm.bcast(lengths, root))]
        return blocks if self.rank == root else tuple(pairwise(ends))

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
            return Sequence(before, [self.window.allgather(None, array(x.memory), lengths)], x.unpack, keep)
        return self.moving(self.program("allgather", name, x.blocks), {"x": x.memory}, before, x.unpack, keep)

    def alltoall(self, sendbuf, recvbuf, algorithm, vector=False):
        if (asked := self.asked("alltoall", algorithm)) == "native":
            return NATIVE
        recv = incoming(recvbuf, self.size, vector)
        y = as_bytes(recv, slices_of(recv, self.size))
        nbytes = sum(hi - lo for lo, hi in y.blocks)
        name = self.choose(asked, "alltoall", nbytes, vector=vector)
        if name == "native":
            return NATIVE
        if is_in_place(sendbuf):
            x = Bytes(room(y.memory.nbytes), y.blocks, [*y.pack])
            x.pack.append(copying(x.memory, y.memory))
            keep = (recv.datatype, x.memory)
        else:
            send = outgoing(sendbuf, self.size, vector)
            x = as_bytes(send, slices_of(send, self.size))
            keep = (recv.datatype, send.datatype)
        self.check_lengths("alltoall", y.block(self.rank).nbytes, x.block(self.rank).nbytes)
        program = self.program("alltoall", name, x.blocks, into=y.blocks)
        return self.moving(program, {"x": x.memory, "y": y.memory}, x.pack, y.unpack, keep)
