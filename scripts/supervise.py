"""Run a training command, and restart it from its last complete checkpoint whenever it ends too early.

    python scripts/supervise.py -- mpirun -n 4 python -m mpi4py scripts/train.py --out runs/mine --epochs 100
    python scripts/supervise.py --restarts 3 -- python scripts/train.py --ranks 2 --out runs/mine

The command must name the directory of the run (--out or --resume). Ctrl-C and SIGTERM go to the run, which saves and
ends; it is not started again then. A wrong option (exit status 2) is not tried twice.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run


def main() -> int:
    words = sys.argv[1:]
    mine, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments, supervisor = module("parallel.command.arguments"), module("parallel.elastic.supervisor")
    parser = arguments.Parser(
        prog="supervise.py",
        usage="%(prog)s [--restarts N] [--pause SECONDS] -- COMMAND",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--restarts", type=arguments.whole(0), default=10, help="at most, without a new checkpoint (default: 10)"
    )
    parser.add_argument(
        "--pause", type=arguments.number(), default=1.0, help="seconds before the first, then doubled (default: 1)"
    )
    options = parser.parse_args(mine)
    if not command:
        parser.error("give the command to run after --")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        return supervisor.Supervisor(command, options.restarts, options.pause, say).run()
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(run(main))
