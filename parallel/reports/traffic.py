"""Bytes on the wire: a communicator that counts what its collectives carry.

    counted = Traffic(communicator)              # in its place everywhere
    trainer = FullyShardedDataParallel(network, loss, optimizer, counted)
    trainer.step(x, y)
    counted.total                                # bytes that this rank had to send

Counted is what was handed to each call, n bytes, times what the best algorithm makes a rank send of it among p (Chan et
al. 2007): the ring's for all but small messages, so what network cards count, headers aside. An allreduce is a
reduce-scatter and an allgather, 2 n (p-1)/p. Of a schedule that a strategy compiles itself its Sends are counted.
Pickled objects (the lower-case methods) are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from collectives.running.buffers import Message, is_in_place
from collectives.steps import Send

# operation -> (whether the second buffer is the whole vector, how often all but a rank's own part of it is sent)
WHOLE = {
    "bcast": (False, 1),
    "reduce": (False, 1),
    "allreduce": (True, 2),
    "allgather": (True, 1),
    "allgatherv": (True, 1),
    "reduce_scatter": (False, 1),
    "reduce_scatter_block": (False, 1),
    "alltoall": (False, 1),
    "alltoallv": (False, 1),
}
BLOCK = {"gather", "gatherv", "send", "ssend", "bsend", "rsend"}  # a rank sends the first buffer, as it is
VECTOR = {"allgatherv", "gatherv", "alltoallv", "scatterv"}


class Traffic:
    """Stands in for a communicator; what is not counted is the communicator's own.

    Parameters
    ----------
    communicator : collectives.Communicator

    Attributes
    ----------
    bytes, calls : Counter
        By operation ("allreduce", blocking or not; "run"): bytes that this rank had to send, and calls.
    """

    def __init__(self, communicator):
        self.communicator = communicator
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.plans: dict[object, int] = {}  # plan -> bytes that it sends

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.bytes.values())

    def reset(self) -> None:
        """Count from zero again."""
        self.bytes.clear()
        self.calls.clear()

    def Dup(self, *arguments, **options) -> Traffic:
        """A duplicate that counts here too."""
        return self._with(self.communicator.Dup(*arguments, **options))

    def Split(self, *arguments, **options) -> Traffic:
        """Some of the ranks, whose messages count here too."""
        return self._with(self.communicator.Split(*arguments, **options))

    def _with(self, communicator) -> Traffic:
        other = Traffic(communicator)
        other.bytes, other.calls = self.bytes, self.calls
        return other

    def compile(self, rounds, *arguments, computations=None, **buffers):
        """A plan for `Run`, with the bytes of its Sends."""
        rounds = list(rounds)
        plan = self.communicator.compile(rounds, *arguments, computations=computations, **buffers)
        itemsize = next(iter(buffers.values())).itemsize
        self.plans[plan] = itemsize * sum(
            step.hi - step.lo for steps in rounds for step in steps if isinstance(step, Send)
        )
        return plan

    def Run(self, plan, name: str = "") -> None:
        self._count(plan)
        self.communicator.Run(plan, name)

    def Irun(self, plan, name: str = ""):
        self._count(plan)
        return self.communicator.Irun(plan, name)

    def _count(self, plan) -> None:
        self.calls["run"] += 1
        self.bytes["run"] += self.plans[plan]

    def __getattr__(self, name: str):
        method = getattr(self.communicator, name)
        operation = name.lower().removeprefix("i").removesuffix("_init")
        if name[0].islower() or not (operation in WHOLE or operation in BLOCK or operation.startswith("scatter")):
            return method
        counted = self._counting(method, operation)
        setattr(self, name, counted)  # found directly from now on
        return counted

    def _counting(self, method: Callable, operation: str) -> Callable:
        rank, size, counted, counts = self.communicator.rank, self.communicator.size, self.bytes, self.calls

        def call(*buffers, **options):
            counts[operation] += 1
            counted[operation] += sent(operation, buffers, options, rank, size)
            return method(*buffers, **options)

        def plan(*buffers, **options):
            return CountedRequest(method(*buffers, **options), start, sent(operation, buffers, options, rank, size))

        def start(nbytes):
            counts[operation] += 1
            counted[operation] += nbytes

        return plan if method.__name__.endswith("_init") else call


class CountedRequest:
    """A persistent request of which every Start is counted."""

    def __init__(self, request, start: Callable[[int], None], nbytes: int):
        self.request, self.start, self.nbytes = request, start, nbytes

    def Start(self) -> None:
        self.start(self.nbytes)
        self.request.Start()

    def __getattr__(self, name: str):
        return getattr(self.request, name)


def sent(operation: str, buffers: tuple, options: dict, rank: int, size: int) -> int:
    """Bytes that this rank has to send in a call with these arguments."""
    vector = operation in VECTOR
    if operation in WHOLE:
        second, times = WHOLE[operation]
        whole = buffers[1] if second or is_in_place(buffers[0]) else buffers[0]
        return times * nbytes(whole, size, vector) * (size - 1) // size
    if operation in BLOCK:
        root = options.get("root", buffers[2] if len(buffers) > 2 else 0) if operation.startswith("gather") else -1
        return 0 if rank == root else nbytes(buffers[0], 1, False)
    root = options.get("root", buffers[2] if len(buffers) > 2 else 0)  # scatter
    return nbytes(buffers[0], size, vector) * (size - 1) // size if rank == root else 0


def nbytes(buffer, parts: int, vector: bool) -> int:
    """Bytes of data in a buffer as mpi4py takes it."""
    if hasattr(buffer, "nbytes"):
        return buffer.nbytes
    message = Message(buffer, parts, vector)
    return message.count * message.itemsize * (1 if vector else parts)
