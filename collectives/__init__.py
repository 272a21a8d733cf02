"""Collective communication: every algorithm is a schedule, one small generator of rounds per rank, with four tools.

    run    collectives.run(my_allreduce, x=array), or communicator.Allreduce(x, y, algorithm=my_allreduce)
    check  collectives.check(my_allreduce, ranks=range(1, 18))
    price  collectives.price(...)
    draw   collectives.draw(...), draw_buffers(...), draw_timeline(...), draw_race(...), animate(...)

Start with collectives/steps.py (the vocabulary) and collectives/algorithms/allreduce.py (`ring`). Importing this
package does not import mpi4py; `Communicator` and what else needs it is imported when it is first named.
"""

from importlib import import_module

from collectives.algorithms import ALGORITHMS
from collectives.checking.simulator import Deadlock, ScheduleError, simulate
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, Slice, blocks, chunk

LAZY = {
    "Communicator": "communicator",
    "check_world": "failures.launch_check",
    "install_excepthooks": "failures.job_end",
    "testall": "running.nonblocking",
    "waitall": "running.nonblocking",
    "animate": "drawing.film",
    "check": "report",
    "check_algorithm": "report",
    "draw": "drawing.diagrams",
    "draw_buffers": "drawing.diagrams",
    "draw_race": "drawing.race",
    "draw_timeline": "drawing.timeline",
    "price": "pricing.price",
    "run": "communicator",
    "synthesize": "synthesis",
}

__all__ = [
    "ALGORITHMS",
    "Compute",
    "Copy",
    "Deadlock",
    "Barrier",
    "Recv",
    "RecvReduce",
    "Reduce",
    "ScheduleError",
    "Send",
    "Slice",
    "blocks",
    "chunk",
    "simulate",
    *LAZY,
]


def __getattr__(name):
    if name in LAZY:
        return getattr(import_module(f"collectives.{LAZY[name]}"), name)
    raise AttributeError(f"module 'collectives' has no attribute {name!r}")
