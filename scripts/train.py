"""Train a network: on one process, on --ranks N of this machine, or on the ranks that mpirun or srun started."""

import sys

from parallel.job import main

if __name__ == "__main__":
    sys.exit(main())
