"""What turns a call into a plan: which algorithm, its program, and the memory and requests that it runs with.

From a call to the wire in one direction: the functions of plan_moves.py and plan_reductions.py read the arguments of a
collective; the Planner of the communicator chooses the algorithm (selection.py), compiles its schedule (program.py) and
binds it (plan.py). Schedules that a caller wrote come by way of custom_schedules.py.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from itertools import accumulate

import numpy as np
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import NODES, SEGMENT_BYTES
from collectives.choosing.selection import AUTOMATIC, NODE_MEMORY, Selection
from collectives.executor.plan import Plan, array, copying
from collectives.executor.program import Program, Programs, Transfer
from collectives.failures.deadline import Deadline
from collectives.failures.revocation import register, unregister
from collectives.failures.unfinished import keep_alive
from collectives.node_memory.barriers import barrier_of, first_barrier, split_barrier_of
from collectives.node_memory.plans import LINE_BYTES
from collectives.node_memory.reduction import by_numpy, libraries_differ, sum_into
from collectives.node_memory.window import SharedWindow
from collectives.running.custom_schedules import compile_function
from collectives.running.nonblocking import write_stderr

# Operations for which a (+) b and b (+) a are the same to the last bit (not MAX and MIN: one operand may be a NaN).
SYMMETRIC = {op.handle for op in (MPI.SUM, MPI.PROD, MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR)}

warn_once = cache(write_stderr)
IN_MEMORY = "a schedule in shared memory"


def same_node(comm):
    """The ranks that share this one's memory (collective)."""
    return comm.Split_type(MPI.COMM_TYPE_SHARED)


def wait_for_ranks(comm, deadline: Deadline) -> None:
    """Return when all ranks of a communicator have called this; TimeoutError after the deadline, on any nodes."""
    request, others = comm.Ibarrier(), comm.Get_size() - 1

    def late(waited):
        whose = "rank to make its" if others == 1 else f"{others} ranks to make their"
        raise TimeoutError(
            f"rank {comm.Get_rank()} has waited {deadline.seconds:g} s for the other {whose} Communicator: has a rank "
            f"ended, or does one make none? Communicator(watch=900), or RINGPROP_WATCH=900, waits longer"
        )

    deadline.wait(request.Test, lambda: None, late)


class Planner:
    """What the plans of one communicator are made with (collective).

    Parameters
    ----------
    comm : MPI.Intracomm
        of which it makes a private duplicate
    algorithms : operation -> the requested one
    synchronous : send with Ssend semantics
    memory : whether ranks of a node may share memory
    seconds : how long ranks wait for each other
    """

    def __init__(self, comm, algorithms, synchronous, memory, seconds):
        self.deadline, self.synchronous = Deadline(seconds), synchronous
        wait_for_ranks(comm, self.deadline)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        first, nodes = np.array(self.rank), np.empty(self.size, int)  # of each rank: the first rank on its node
        with self.deadline.inside_mpi("for the other ranks, to make a Communicator"):
            self.comm = register(comm.Dup())
            self.node = register(same_node(self.comm))
            self.node.Bcast(first)
            self.comm.Allgather(first, nodes)
        self.nodes = tuple(nodes.tolist())
        comm.allreduce(0)  # mpi4py's first of a communicator waits with the interpreter held: while all are here
        self.node_ranks = [r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank]]
        self.selection = Selection(algorithms, self.nodes, MPI.Get_library_version(), memory)
        self.programs = Programs()
        self.scratch, self.scratch_bytes = {}, 0  # for what ranks name of each other's in the caller's algorithms
        self.forget_scratch = lambda: None  # called when plans on `scratch` must go
        self.selection.make_window = self.shares
        self.may_wait = True  # for other ranks while it plans: not for a nonblocking call
        self.on_abort = lambda error, place: None  # called with what aborts a plan

    @cached_property
    def window(self) -> SharedWindow:
        """The memory that the ranks of a node share, made at the first use (collective)."""
        try:  # behind a barrier with a limit: SharedWindow waits inside MPI, where nothing ends the wait
            self.wait_for(self.node.Ibarrier(), "for the other ranks of its node, to make the memory that they share")
            # The first barrier counts a rank that has given up meanwhile; a rank that comes late learns of it here.
            self.wait_for(self.node.Ibarrier(), "for the other ranks of its node, none of which may have given up")
            window = SharedWindow(self.node, self.deadline)
        except BaseException as error:
            if isinstance(error, TimeoutError) or not isinstance(error, OSError):  # an OSError is that of all ranks
                self.on_abort(error, "")  # the others may still come, and go on without this rank
            raise
        window.on_abort, self.selection.make_window = self.on_abort, None
        return window

    @property
    def made_window(self) -> SharedWindow | None:
        """The window if it is made, else None."""
        return vars(self).get("window")

    def abort(self, cause: str) -> None:
        """Tell the other ranks of the node, if memory is shared with them, that this one has ended a call early."""
        if self.made_window is not None:
            self.window.flags.abort(cause)

    def wait_long(self, request: MPI.Prequest, transfer: Transfer) -> None:
        """Wait until a message has come or gone: as `wait_for`."""
        what = "to send to" if transfer.sends else "for a message of"
        self.wait_for(request, f"{what} rank {transfer.peer}")

    def wait_for(self, request: MPI.Request, what: str) -> None:
        """Wait until a request is done, as `wait_until`; MPI keeps its memory where that raises."""
        try:
            self.wait_until(request.Test, what)
        except BaseException:
            keep_alive([request])
            raise

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Return when done() is true; what is in flight advances meanwhile.

        Raises
        ------
        Aborted
            Another rank has ended a call early meanwhile.
        TimeoutError
            On one node, after the deadline. Ranks on several only say then for whom they wait: what has become of
            another node is for the launcher to find out.
        """

        def late(waited):
            message = (
                f"rank {self.rank} has waited {self.deadline.seconds:g} s {what}: has a rank ended, is one in another "
                f"call, or, with a buffer that only the MPI library takes, in the library's own? "
                f"Communicator(watch=60) says where all ranks are"
            )
            if self.selection.place == "node":
                raise TimeoutError(message)
            warn_once(message)

        self.deadline.wait(done, self.refuse_aborted, late)

    def wait_or_abort(self, request: MPI.Request, what: str) -> None:
        """Wait as `wait_for`; abort where that raises: other ranks would take a later message for this one."""
        try:
            self.wait_for(request, what)
        except BaseException as error:
            self.on_abort(error, "")
            raise

    def exchange(self, numbers: np.ndarray, root: int | None = None) -> np.ndarray:
        """Return numbers of every rank, or those of the root (collective): what is needed before there is a plan.

        Raises as `wait_or_abort`.
        """
        result = np.array(numbers) if root is not None else np.empty((self.size, *numbers.shape), numbers.dtype)
        request = self.comm.Ibcast(result, root) if root is not None else self.comm.Iallgather(numbers, result)
        self.wait_or_abort(request, "for what the other ranks say of their blocks or schedules")
        return result

    def refuse_aborted(self) -> None:
        """Raise Aborted if another rank of the node has ended a call early; without a window nobody can see it."""
        if self.made_window is not None:
            self.window.flags.refuse_aborted()

    def shares(self) -> bool:
        """Whether all ranks have the memory that they share; where one is refused it, none uses it (collective)."""
        problem = ""
        try:
            self.window  # noqa: B018 - made here
        except TimeoutError:  # an OSError too, but not one that all ranks have
            raise
        except OSError as error:
            problem = error.strerror
        problem = next(filter(None, self.comm.allgather(problem)), "")
        if problem:
            if self.made_window is not None:  # another node's ranks are refused it
                self.window.free()
                del self.window
            self.selection.refused = problem
            if self.rank == 0:
                warn_once(f"{problem}: collectives of {self.size} ranks send messages instead")
        return not problem

    def free(self, aborted: bool):
        """Free all; but where a call was `aborted`, its messages may still come, and another communicator must not get
        the mark by which the library tells them apart: the duplicate stays."""
        if self.made_window is not None:
            self.window.free()
        unregister(self.node), unregister(self.comm)
        if not aborted:
            self.node.Free()
            self.comm.Free()

    # ---------------------------------------------------------------------------------- which algorithm, as a program

    def requested_in_flight(self, operation, algorithm):
        """What a nonblocking or persistent call asks for: schedules of ours, as the library would not advance its own.

        Without a window they send messages, as to make one is to wait for other ranks.
        """
        requested = self.selection.requested(operation, algorithm)
        if not callable(requested) and self.made_window is None and not self.may_wait and self.size > 1:
            return "messages" if requested in (*AUTOMATIC, *NODE_MEMORY) else requested
        return "schedule" if requested == "auto" else requested

    def check_root(self, root):
        if not 0 <= root < self.size:
            raise ValueError(f"root {root}: the communicator has ranks 0 ... {self.size - 1}")

    def program(self, operation, name, *count, itemsize=1, float16=False, ordered=False, **options) -> Program:
        """This rank's part in an algorithm; `count` is a number of elements or a tuple of blocks."""
        if callable(name):
            key = operation, name, count, itemsize, float16, ordered, *options.items()
            return self.programs.of(key, partial(compile_function, self, *key[:6], options))
        entry = ALGORITHMS[operation][name]
        if NODES in entry.needs:
            options["nodes"] = self.nodes
        if entry.pipelined:
            options["segment"] = max(1, SEGMENT_BYTES // itemsize)

        def make():
            return Program(entry.rounds(self.rank, self.size, *count, **options), self.rank, round_once=float16)

        return self.programs.of((operation, name, count, float16, *options.items()), make)

    # ------------------------------------------------------------------------------------------ bound to memory

    def plan(
        self, program, buffers, before=(), after=(), keep=(), *, message=None, op=None, computations=None, own=None
    ):
        """A plan: of bytes, or of a message's datatype, of which `op` reduces elements.

        `own` says where the buffers that ranks name of each other lie; by default in copies that all can see.
        """
        references, elements, agree, split = [*keep], {}, None, None
        dtype = np.dtype(np.uint8) if message is None else message.elements.dtype
        if message is not None:
            references += [op, message.datatype]  # grows by what the sums of float16 need
            elements = {"datatype": message.datatype, "extent": message.itemsize}
            if op is not None:
                elements |= self.reducing(message, op)
                elements["sum_into"] = partial(sum_into, op, dtype, references.append)
        if program.named is not None:
            extent = elements.get("extent", 1)
            shared = self.copies_of(program, extent) if own is None else own
            own_parts = {name: parts[self.rank] for name, parts in shared.items()}
            pairs = {name: (own_parts[name], buffers[name]) for name in own_parts if name in buffers}
            copies = {name: (a[: b.nbytes], b) for name, (a, b) in pairs.items() if a.address != b.address}
            changed = [pair for name, pair in copies.items() if (name, self.rank) in program.named.written]
            before = [*before, *(copying(a, b) for a, b in copies.values())]
            after = [*(copying(b, a) for a, b in changed), *after]
            agree, split = first_barrier(self.window, program.named.call, [], 0)
            parts_of_others = {
                (name, r): part for name, parts in shared.items() for r, part in parts.items() if r != self.rank
            }
            buffers = buffers | own_parts | parts_of_others
        return Plan(
            program,
            self.comm,
            buffers,
            **elements,
            barrier=lambda step: barrier_of(self.window, IN_MEMORY, self.node_ranks, step),
            agree=agree,
            split_barrier=lambda step, first: (
                split() if first else split_barrier_of(self.window, IN_MEMORY, self.node_ranks, step)
            ),
            compute=partial(computing, computations or {}, dtype),
            wait_long=self.wait_long,
            synchronous=self.synchronous,
            before=before,
            after=after,
            keep=references,
            on_abort=self.on_abort,
        )

    @staticmethod
    def reducing(message, op) -> dict:
        """What a plan has to know of the elements of a message, which `op` reduces one operand at a time."""
        dtype = message.elements.dtype
        differ = libraries_differ(op, dtype)
        return {
            "datatype": message.datatype,
            "combine": partial(by_numpy, op, dtype) if differ else partial(partial, op.Reduce_local),
            "commutes": op.handle in SYMMETRIC,
        }

    def copies_of(self, program, extent) -> dict[str, dict[int, MPI.buffer]]:
        """Memory for what ranks name of each other's buffers in an algorithm (collective at the first use).

        One array serves all algorithms, one call after another. It grows for an algorithm that needs more, on all ranks
        in the same call, as that has the same key on all; plans on the memory that it had before go.
        """
        lengths = (n * extent for _, n in sorted(program.named.lengths.items()))
        ends = [0, *accumulate(-(-n // LINE_BYTES) * LINE_BYTES for n in lengths)]
        if ends[-1] > self.scratch_bytes or not self.scratch:
            if not self.may_wait:
                raise ValueError("ranks wait to make the memory for others' buffers: call this blocking first")
            self.forget_scratch()
            nbytes = max(ends[-1], 2 * self.scratch_bytes)
            self.scratch, self.scratch_bytes = {}, 0  # if that fails, the next call asks again, on all ranks
            self.scratch = self.allocate_shared({"scratch": nbytes})["scratch"]
            self.scratch_bytes = nbytes
        return {
            name: {rank: memory[at : at + n * extent] for rank, memory in self.scratch.items()}
            for (name, n), at in zip(sorted(program.named.lengths.items()), ends[:-1], strict=True)
        }

    def allocate_shared(self, lengths: dict[str, int]) -> dict[str, dict[int, MPI.buffer]]:
        """Return new memory that the ranks of a node share, name -> rank -> memory of that length (collective)."""
        if self.made_window is None and not self.shares():
            raise OSError(f"an algorithm in shared memory, and there is none: {self.selection.refused}")
        peers = {name: self.window.peers(self.window.empty(n, np.uint8)) for name, n in sorted(lengths.items())}
        return {name: self.by_rank(each) for name, each in peers.items()}

    def by_rank(self, peers) -> dict[int, MPI.buffer]:
        """Every rank's part of a shared array."""
        return {r: MPI.buffer(part) for r, part in zip(self.node_ranks, peers.parts, strict=True)}


def computing(computations, dtype, step, sources, targets):
    """The call for a Compute: what is registered under its name, with an array for each slice."""
    return partial(computations[step.name], *(array(memory, dtype) for memory in [*sources, *targets]))
