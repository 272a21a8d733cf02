"""Train a network: on one process, on --ranks N of this machine, or on the ranks that mpirun or srun started."""

import _signal

# Until there is something to end (parallel/command/main.py), Ctrl-C just ends this process. Python's own `signal`
# takes a while to import, in which Ctrl-C would end in a traceback.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module

if __name__ == "__main__":
    sys.exit(module("parallel.command.main").main())
