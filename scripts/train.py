"""Train a network: on one process, on --ranks N of this machine, or on the ranks that mpirun or srun started."""

import os
import signal
import sys

# Until there is something to end (parallel/command/main.py), Ctrl-C just ends this process.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from door import module

if __name__ == "__main__":
    sys.exit(module("parallel.command.main").main())
