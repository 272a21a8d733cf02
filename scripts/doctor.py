#!/usr/bin/env python3
"""Test ranks, libraries and network, and say what to set: hosts, threads, shared memory, collectives, equal bits.

python scripts/doctor.py --ranks 4                              this machine
mpirun -n 8 python -m mpi4py scripts/doctor.py                  hosts of a cluster
srun --mpi=pmix -n 8 python -m mpi4py scripts/doctor.py --json doctor.json
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run

if __name__ == "__main__":
    sys.exit(run(lambda: module("parallel.command.doctor").main()))
