"""The shortest way into a collective, for calls that take microseconds: what a communicator does before its methods.

A short call of the MPI library takes a few microseconds; finding a plan by all that a call is made of takes one more.
So a Communicator has, in front of some methods of its class, functions of a few comparisons:

- a NumPy array that is so short that the table leaves it to the library goes there at once, if that reduces all values
  as NumPy does (reduction.py);
- an allreduce in place of an array object that a plan was made for finds the plan by that object (`plan_cache.Known`).

All other calls go on to the method, which does everything: a shortcut decides nothing that the method would decide
otherwise. Where the library finds that arguments do not fit each other, before it sends anything, the method says so in
its own words.

The functions are attributes of the communicator, each with the parameters of its method: a closure finds its variables
sooner than a method its attributes. One closure for all, with *args, takes 0.15 to 0.6 us more, of 1 to 4 us (measured,
two ranks).
"""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from collectives.node_memory.reduction import libraries_differ

IN_PLACE, SUM = MPI.IN_PLACE, MPI.SUM
ndarray = np.ndarray
SHORT = 2  # bytes of elements that the library cannot sum (float16), or differently: sooner asked for than the type


def shortcuts(methods, native: MPI.Intracomm, native_below, waiting, known) -> dict[str, Callable]:
    """Name of a method -> the function that stands before it.

    Parameters
    ----------
    methods : what has the methods that do everything
    native : the same communicator without our methods
    native_below : operation -> bytes up to which the library's is chosen; -1 for none
    waiting : what nonblocking collectives are in flight on this process: while there are any there are no shortcuts
    known : id of an array -> what is known of its allreduce in place, or None
    """
    made = {}
    for name, operation, make, more in (
        ("Allreduce", "allreduce", allreduce, known),
        ("Allgather", "allgather", allgather, None),
        ("Barrier", "barrier", barrier, None),
        ("Bcast", "broadcast", broadcast, native.Get_size()),
        ("Reduce", "reduce", reduce, native.Get_size()),
        ("Reduce_scatter_block", "reduce_scatter", reduce_scatter_block, None),
    ):
        limit = native_below(operation)
        if limit >= 0 or operation == "allreduce":
            made[name] = make(getattr(native, name), getattr(methods, name), limit, waiting, more)
    return made


def allreduce(native, method, limit, waiting, known):
    def Allreduce(sendbuf, recvbuf, op=SUM, algorithm=None):
        if algorithm is None and not waiting and type(recvbuf) is ndarray:
            if recvbuf.nbytes <= limit:
                as_numpy = op is SUM or not libraries_differ(op, recvbuf.dtype)
                if recvbuf.itemsize > SHORT and as_numpy and sendbuf is not recvbuf:
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


def allgather(native, method, limit, waiting, _):
    def Allgather(sendbuf, recvbuf, algorithm=None):
        if algorithm is None and not waiting and type(recvbuf) is ndarray and recvbuf.nbytes <= limit:
            try:
                return native(sendbuf, recvbuf)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, algorithm)

    return Allgather


def barrier(native, method, limit, waiting, _):
    def Barrier(algorithm=None):
        return native() if algorithm is None and not waiting else method(algorithm)

    return Barrier


def broadcast(native, method, limit, waiting, size):
    def Bcast(buf, root=0, algorithm=None):
        if algorithm is None and not waiting and type(buf) is ndarray and buf.nbytes <= limit and 0 <= root < size:
            return native(buf, root)
        return method(buf, root, algorithm)

    return Bcast


def reduce(native, method, limit, waiting, size):
    def Reduce(sendbuf, recvbuf, op=SUM, root=0, algorithm=None):
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        short = algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit
        if short and x.itemsize > SHORT and 0 <= root < size and (op is SUM or not libraries_differ(op, x.dtype)):
            try:
                return native(sendbuf, recvbuf, op, root)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, root, algorithm)

    return Reduce


def reduce_scatter_block(native, method, limit, waiting, _):
    def Reduce_scatter_block(sendbuf, recvbuf, op=SUM, algorithm=None, keep=True):
        x = recvbuf if sendbuf is IN_PLACE else sendbuf
        short = algorithm is None and not waiting and type(x) is ndarray and x.nbytes <= limit
        if short and x.itemsize > SHORT and (op is SUM or not libraries_differ(op, x.dtype)):
            try:
                return native(sendbuf, recvbuf, op)
            except ValueError:
                pass
        return method(sendbuf, recvbuf, op, algorithm, keep)

    return Reduce_scatter_block
