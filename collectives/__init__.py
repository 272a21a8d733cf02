"""Collective communication: every algorithm is a schedule, one small generator of rounds per rank, with four readers.

    run    collectives.Communicator(MPI.COMM_WORLD).Allreduce(x, y)
    check  collectives.check(my_allreduce, ranks=range(1, 18))
    price  collectives.price(...)
    draw   collectives.draw(...)

Start with collectives/steps.py (the vocabulary) and collectives/algorithms/allreduce.py (`ring`). Importing this
package does not import mpi4py; `Communicator` and what else needs it is imported when it is first named.
"""

from importlib import import_module

from collectives.algorithms import ALGORITHMS
from collectives.checking import check
from collectives.simulator import Deadlock, ScheduleError, simulate
from collectives.steps import Copy, Recv, RecvReduce, Reduce, Send, blocks, part

LATER = {
    "Communicator": "communicator",
    "check_world": "world",
    "install_excepthooks": "world",
    "testall": "nonblocking",
    "waitall": "nonblocking",
    "draw": "drawing",
    "price": "clock",
}

__all__ = [
    "ALGORITHMS",
    "Copy",
    "Deadlock",
    "Recv",
    "RecvReduce",
    "Reduce",
    "ScheduleError",
    "Send",
    "blocks",
    "check",
    "part",
    "simulate",
    *LATER,
]


def __getattr__(name):
    if name in LATER:
        return getattr(import_module(f"collectives.{LATER[name]}"), name)
    raise AttributeError(f"module 'collectives' has no attribute {name!r}")
