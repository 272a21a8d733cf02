#!/usr/bin/env python
"""Run mpi4py's own tests of collectives with our Communicator in place of MPI.COMM_WORLD.

    python scripts/mpi4py_conformance.py --ranks 1,2,3
    python scripts/mpi4py_conformance.py --brief
    python scripts/mpi4py_conformance.py --ranks 4 allreduce=rabenseifner allgather=doubling
    python scripts/mpi4py_conformance.py --brief --every --ranks 2

The test files of blocking and persistent collectives come, unmodified, from the source distribution of the mpi4py that
is installed, fetched by pip. What follows the options is passed to Communicator; an operation that is not named runs
the algorithm that short messages take on a network. All of it takes some minutes on two cores, half with --brief;
--every makes nine runs of each, in which every algorithm of every operation has its turn.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from parallel.launch import launcher

FILES = ("test_cco_buf", "test_cco_vec", "test_cco_pr_buf", "test_cco_pr_vec")
REPEATED = ("Self", "SelfDup", "WorldDup")  # classes that run the same tests on COMM_SELF, and on duplicates
BUILD = Path(__file__).resolve().parents[1] / "build"  # git does not see it
# Whoever waits lets others have the core: beside other work two ranks on two cores are else ten times slower.
GIVE_WAY = {"OMPI_MCA_mpi_yield_when_idle": "1"}
TIMEOUT = 1200.0  # seconds for a number of ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,3,4,5", metavar="N,...", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--brief", action="store_true", help="on several ranks leave out the tests that repeat others")
    parser.add_argument("--every", action="store_true", help="run all with every algorithm, `shared` included")
    parser.add_argument("--tests", type=Path, help="mpi4py's test directory, if it is already here")
    parser.add_argument("--this-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("algorithms", nargs="*", metavar="OPERATION=NAME", help="as for collectives.Communicator")
    options = parser.parse_args()
    if options.this_rank:
        return run_tests(options.tests, options.brief, dict(a.split("=") for a in options.algorithms))
    tests = options.tests or fetch()
    runs = [[*chosen, *options.algorithms] for chosen in turns()] if options.every else [options.algorithms]
    worst = 0
    for ranks in map(int, options.ranks.split(",")):
        for chosen in runs:
            said: list[str] = []
            flags = ["--this-rank", *(["--brief"] if options.brief else []), "--tests", tests]
            command = [Path(__file__), *flags, *chosen]
            status = launcher.run(command, ranks=ranks, timeout=TIMEOUT, stdout=said.append, env=GIVE_WAY | os.environ)
            summary = re.findall(r"^conformance: (.*)$", "".join(said), re.MULTILINE)
            what = " ".join([f"{ranks} ranks", *(chosen if options.every else [])])
            print(f"{what}: {summary[0] if summary and not status else f'failed, status {status}'}", flush=True)
            if status or len(summary) != 1:
                print("".join(said))
            worst = worst or status or int(len(summary) != 1)
    return worst


def turns() -> list[list[str]]:
    """OPERATION=NAME of each operation, so often that every name has been there."""
    from collectives import ALGORITHMS
    from collectives.algorithms.registry import by_messages
    from collectives.choosing.selection import SHARED

    names = {op: [*by_messages(op), *(["shared"] if op in SHARED else [])] for op in ALGORITHMS}
    longest = max(map(len, names.values()))
    return [[f"{op}={known[k % len(known)]}" for op, known in names.items()] for k in range(longest)]


def fetch() -> Path:
    """mpi4py's test directory, from the source distribution of the installed version; kept in build/ for next time."""
    name = f"mpi4py-{version('mpi4py')}"
    if not (BUILD / name).exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as directory:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command = [*pip, "--no-binary", "mpi4py", "--dest", directory, name.replace("-", "==")]
            if subprocess.run(command).returncode:
                raise SystemExit(
                    f"conformance: pip cannot fetch the source distribution of {name} (no network?), so nothing was "
                    "tested. Unpack it yourself and name its test directory with --tests."
                )
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
            with tarfile.open(Path(directory) / f"{name}.tar.gz") as file:
                file.extractall(directory, **safely)
            (Path(directory) / name).rename(BUILD / name)
    return BUILD / name / "test"


def run_tests(tests: Path, brief: bool, algorithms: dict[str, str]) -> int:
    """On one rank: run the files' tests on our communicators, and check that those did the work."""
    import unittest

    from mpi4py import MPI

    from collectives import Communicator
    from collectives.choosing.selection import TABLE
    from collectives.executor.plan import Plan

    algorithms = {operation: rows[0][1] for operation, rows in TABLE["network"].items()} | algorithms
    ours = 0

    def counting(run):
        def call(plan):
            nonlocal ours
            ours += 1
            run(plan)

        return call

    Plan.__call__ = counting(Plan.__call__)
    world = MPI.COMM_WORLD
    MPI.COMM_WORLD = Communicator(world, **algorithms)
    MPI.COMM_SELF = Communicator(MPI.COMM_SELF, **algorithms)
    sys.path.insert(0, str(tests))
    left_out = REPEATED if brief and world.Get_size() > 1 else ()

    class Loader(unittest.TestLoader):
        def loadTestsFromTestCase(self, case):
            return self.suiteClass() if case.__name__.endswith(left_out) else super().loadTestsFromTestCase(case)

    suite = Loader().loadTestsFromNames(FILES)
    report = io.StringIO()  # not the ranks' common output, where it would break rank 0's line in two
    result = unittest.TextTestRunner(stream=report, verbosity=0, failfast=True).run(suite)
    if not result.wasSuccessful() or ours < result.testsRun:
        print(f"rank {world.Get_rank()}: {ours} plans run; {result}\n{report.getvalue()}", flush=True)
        world.Abort(1)  # the other ranks wait
    if world.Get_rank() == 0:
        skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
        print(f"conformance: {result.testsRun} tests passed{skipped}; {ours} collectives were ours", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
