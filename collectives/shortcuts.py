"""The shortest way into a collective, for calls that take microseconds: what a communicator does before its methods.

A short call of the MPI library takes a few microseconds; finding a plan by all that a call is made of takes one more.
So a Communicator has, in front of the methods of its class, functions of a few comparisons that know its table:

- a NumPy array that is so short that the table leaves it to the library goes there at once;
- an allreduce in place of an array object that a plan was made for finds the plan by that object (`Known`).

All other calls go on to the method, which does everything: a shortcut decides nothing that the method would decide
otherwise. Where the library finds that arguments do not fit each other, before it sends anything, the method says so in
its own words.

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


def shortcuts(communicator: MPI.Intracomm, native_below, waiting, known: Known) -> dict[str, Callable]:
    """Name of a method -> the function that stands before it.

    Parameters
    ----------
    communicator : whose methods they are; it has no shortcuts yet
    native_below : operation -> bytes up to which the library's is chosen; -1 for none
    waiting : the nonblocking collectives in flight: while there are any there are no shortcuts
    known : plans of the communicator's allreduces
    """
    native = MPI.Intracomm(communicator)  # the same handle, without our methods
    limit = native_below("allreduce")
    made = {"Allreduce": allreduce(native.Allreduce, communicator.Allreduce, limit, waiting, known.entries.get)}
    for operation, make in (
        ("allgather", allgather),
        ("barrier", barrier),
        ("broadcast", broadcast),
        ("reduce", reduce),
        ("reduce_scatter", reduce_scatter),
    ):
        if (limit := native_below(operation)) >= 0:
            made |= make(native, communicator, limit, waiting)
    return made


def allreduce(native, method, limit, waiting, known):
    def Allreduce(sendbuf, recvbuf, op=SUM, algorithm=None):
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


def allgather(comm, communicator, limit, waiting):
    native, method = comm.Allgather, communicator.Allgather

    def Allgather(sendbuf, recvbuf, algorithm=None):
        if algorithm is None and not waiting and type(recvbuf) is ndarray and recvbuf.nbytes <= limit:
            try:
                return native(sendbuf, recvbuf)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, algorithm)

    return {"Allgather": Allgather}


def barrier(comm, communicator, limit, waiting):
    native, method = comm.Barrier, communicator.Barrier

    def Barrier(algorithm=None):
        return native() if algorithm is None and not waiting else method(algorithm)

    return {"Barrier": Barrier}


def broadcast(comm, communicator, limit, waiting):
    native, method, size = comm.Bcast, communicator.Bcast, comm.Get_size()

    def Bcast(buf, root=0, algorithm=None):
        if algorithm is None and not waiting and type(buf) is ndarray and buf.nbytes <= limit and 0 <= root < size:
            return native(buf, root)
        return method(buf, root, algorithm)

    return {"Bcast": Bcast}


def reduce(comm, communicator, limit, waiting):
    native, method, size = comm.Reduce, communicator.Reduce, comm.Get_size()

    def Reduce(sendbuf, recvbuf, op=SUM, root=0, algorithm=None):
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        short = algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit
        if short and x.itemsize != HALF and 0 <= root < size:
            try:
                return native(sendbuf, recvbuf, op, root)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, root, algorithm)

    return {"Reduce": Reduce}


def reduce_scatter(comm, communicator, limit, waiting):
    native, method = comm.Reduce_scatter_block, communicator.Reduce_scatter_block

    def Reduce_scatter_block(sendbuf, recvbuf, op=SUM, algorithm=None):
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        if algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit and x.itemsize != HALF:
            try:
                return native(sendbuf, recvbuf, op)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, algorithm)

    return {"Reduce_scatter_block": Reduce_scatter_block}
