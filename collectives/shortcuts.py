"""The shortest way into a collective, for calls that take microseconds: what a communicator does before its methods.

A short call of the MPI library takes a few microseconds; finding a plan by all that a call is made of takes one more.
So a Communicator has, in front of the methods of its class, functions of a few comparisons that know its table:

- a NumPy array that is so short that the table leaves it to the library goes there at once;
- an allreduce in place of an array object that a plan was made for finds the plan by that object (`Known`).

All other calls go on to the method, which does everything: a shortcut decides nothing that the method would decide
otherwise. Where the library finds that arguments do not fit each other, before it sends anything, the method says so in
its own words.

Each counts its calls: all that a watchdog needs of them (watchdog.py).

The functions are attributes of the communicator: a closure finds its variables sooner than a method its attributes.
"""

import weakref
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

IN_PLACE, SUM = MPI.IN_PLACE, MPI.SUM
ndarray = np.ndarray
HALF = 2  # bytes of a float16, which the library cannot reduce: sooner asked for than the type


class Known:
    """Plans by the array object that they reduce in place.

    An entry goes with its array. While it is here NumPy refuses to move the array's memory (`resize`), as something
    refers to the array; what else may change about an array is compared.
    """

    def __init__(self):
        self.entries: dict[int, tuple] = {}  # id of an array -> dtype, flags, the plan's call, what guards the id

    def note(self, array: np.ndarray, plan: Callable) -> None:
        """Remember the plan of an array."""
        key, entries = id(array), self.entries
        entries[key] = array.dtype, array.flags.num, plan.__call__, weakref.ref(array, lambda _: entries.pop(key, None))

    def forget(self, plan: Callable) -> None:
        """Let go of a plan that goes, and of no other: an array is noted only when its plan is made."""
        for key in list(self.entries):  # entries may go meanwhile, with their arrays
            entry = self.entries.get(key)
            if entry is not None and entry[2].__self__ is plan:
                self.entries.pop(key, None)


class Calls:
    """How many calls that wait for other ranks have begun: collectives, and others."""

    __slots__ = ("collectives", "inside", "others")

    def __init__(self):
        self.collectives = self.others = 0
        self.inside = False  # a method that counts


def shortcuts(methods, native: MPI.Intracomm, native_below, waiting, known: Known, calls: Calls) -> dict[str, Callable]:
    """Name of a method -> the function that stands before it.

    Parameters
    ----------
    methods : what has the methods that do everything
    native : the same communicator without our methods
    native_below : operation -> bytes up to which the library's is chosen; -1 for none
    waiting : the nonblocking collectives in flight: while there are any there are no shortcuts
    known : plans of the communicator's allreduces
    calls : counted here
    """
    made = {}
    for name, operation, make, more in (
        ("Allreduce", "allreduce", allreduce, known.entries.get),
        ("Allgather", "allgather", allgather, None),
        ("Barrier", "barrier", barrier, None),
        ("Bcast", "broadcast", broadcast, native.Get_size()),
        ("Reduce", "reduce", reduce, native.Get_size()),
        ("Reduce_scatter_block", "reduce_scatter", reduce_scatter_block, None),
    ):
        limit = native_below(operation)
        if limit >= 0 or operation == "allreduce":
            made[name] = make(getattr(native, name), getattr(methods, name), limit, waiting, calls, more)
    return made


def allreduce(native, method, limit, waiting, calls, known):
    def Allreduce(sendbuf, recvbuf, op=SUM, algorithm=None):
        calls.collectives += 1
        if algorithm is None and not waiting and type(recvbuf) is ndarray:
            if recvbuf.nbytes <= limit:
                if recvbuf.itemsize != HALF and sendbuf is not recvbuf:
                    try:
                        return native(sendbuf, recvbuf, op)
                    except ValueError:
                        pass
            elif sendbuf is IN_PLACE and op is SUM and (entry := known(id(recvbuf))) is not None:
                dtype, flags, plan, _ = entry
                if recvbuf.dtype is dtype and recvbuf.flags.num == flags:
                    return plan()
        return method(sendbuf, recvbuf, op, algorithm)

    return Allreduce


def allgather(native, method, limit, waiting, calls, _):
    def Allgather(sendbuf, recvbuf, algorithm=None):
        calls.collectives += 1
        if algorithm is None and not waiting and type(recvbuf) is ndarray and recvbuf.nbytes <= limit:
            try:
                return native(sendbuf, recvbuf)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, algorithm)

    return Allgather


def barrier(native, method, limit, waiting, calls, _):
    def Barrier(algorithm=None):
        calls.collectives += 1
        return native() if algorithm is None and not waiting else method(algorithm)

    return Barrier


def broadcast(native, method, limit, waiting, calls, size):
    def Bcast(buf, root=0, algorithm=None):
        calls.collectives += 1
        if algorithm is None and not waiting and type(buf) is ndarray and buf.nbytes <= limit and 0 <= root < size:
            return native(buf, root)
        return method(buf, root, algorithm)

    return Bcast


def reduce(native, method, limit, waiting, calls, size):
    def Reduce(sendbuf, recvbuf, op=SUM, root=0, algorithm=None):
        calls.collectives += 1
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        short = algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit
        if short and x.itemsize != HALF and 0 <= root < size:
            try:
                return native(sendbuf, recvbuf, op, root)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, root, algorithm)

    return Reduce


def reduce_scatter_block(native, method, limit, waiting, calls, _):
    def Reduce_scatter_block(sendbuf, recvbuf, op=SUM, algorithm=None):
        calls.collectives += 1
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        if algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit and x.itemsize != HALF:
            try:
                return native(sendbuf, recvbuf, op)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, algorithm)

    return Reduce_scatter_block
