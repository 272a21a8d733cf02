"""The end of a program in which nonblocking collectives are still in flight: they are named, and do no harm.

    rank 1: the program ends, and nobody has waited for a nonblocking allreduce of [IN_PLACE, (1000,) float32] (started
    at train.py:88 in step)

Python gives back the memory of arrays when it ends, before MPI does, and MPI then moves what is still under way: a
segmentation fault. And a rank that leaves lets those down that do wait. So at the end of Python, or in an MPI.Finalize
before it, what is in flight is advanced for some seconds, as long as no exception has ended the program; what is then
not finished keeps its memory for as long as the process lives.
"""

import atexit
import ctypes
import functools
import sys
import time
from collections import Counter

PATIENCE = 5.0  # seconds for the other ranks to do their part
NAMED = 8  # at most so many of a communicator's collectives

queues: set = set()  # those with something in flight (nonblocking.py)


@functools.cache
def expect_the_end() -> None:
    """Let `end` be called before memory goes."""
    from mpi4py import MPI

    # What belongs to COMM_SELF goes as the first act of MPI.Finalize; at the end of Python there is nobody to call.
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: end()), "collectives")
    atexit.register(end)


def end() -> None:
    """Name what is in flight, give it time to finish, and keep the memory of what does not."""
    left = [queue for queue in tuple(queues) if queue.waiting]
    if not left:
        return
    from mpi4py import MPI

    from collectives.watchdog import describe

    me = f"rank {MPI.COMM_WORLD.Get_rank()}"
    failed = hasattr(sys, "last_value")  # the other ranks may never come, or abort
    ending = "an exception ends the program" if failed else "the program ends"
    for queue in left:
        requests = [(request, request.buffers) for request in list(queue.waiting)]  # a thread may still end some
        alike = Counter(f"{r.what} of {describe(b)} (started at {r.place})" for r, b in requests if b is not None)
        for what, times in list(alike.items())[:NAMED]:
            often = f", {times} times" if times > 1 else ""
            tell(f"{me}: {ending}, and nobody has waited for a nonblocking {what}{often}")
        if len(alike) > NAMED:
            tell(f"{me}: nor for {len(alike) - NAMED} more")
    until = time.monotonic() + (0 if failed else PATIENCE)
    while time.monotonic() < until and any(queue.waiting for queue in left):
        for queue in left:
            queue.poke()
        time.sleep(1e-3)
    for queue in left:
        queue.stop()
        for request in queue.waiting:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))  # for ever: MPI may read and write its memory
    queues.clear()
    if not failed and (missing := sum(len(queue.waiting) for queue in left)):
        tell(f"{me}: {missing} not finished in {PATIENCE:g} s more: other ranks have not started the same, or are gone")


def tell(line: str) -> None:
    """Whole lines, so that those of several ranks do not mix."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
