"""How many files a call goes through, from the method to the wire: few enough to be read in one sitting."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import collectives

ROOT = Path(collectives.__file__).parent
# What compiles a schedule counts as one, with the schedule itself.
COMPILER = {"executor/program.py", "executor/fusing.py", "steps.py"}
# What the calls of a plan are made of, and what a rank passes that waits long for another.
CALLS = {f"node_memory/{name}.py" for name in ("barriers", "flags", "reduction")}
CALLS |= {"failures/awake.py", "failures/deadline.py", "progress.py"}


class Walk:
    """The files of the package that a call passes, while `with walk:` holds.

    passed : Counter of files, by the calls of their functions
    """

    def __init__(self):
        self.passed = Counter()

    def __enter__(self):
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def look(self, frame, event, _):
        if event == "call" and (file := self.file_of(frame)):
            self.passed[file] += 1

    def stations(self) -> set[str]:
        """The files that a reader follows, up to the calls of the plan."""
        compiler = {file for file in self.passed if file in COMPILER or file.startswith("algorithms/")}
        return set(self.passed) - compiler - CALLS | ({"compile"} if compiler & COMPILER else set())

    @staticmethod
    def file_of(frame) -> str:
        path = Path(frame.f_code.co_filename)
        return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


@pytest.mark.mpi(ranks=[2])
def test_a_call_passes_few_files(comm, ranks):
    """A new call at most 8, which `explain` names; one that was seen before at most 3."""
    from collectives import Communicator

    communicator = Communicator(comm)
    communicator.empty(1)  # the ranks have met
    for count in (20_000, 20_001):  # the first makes what all use
        for algorithm in (None, "ring"):
            x, y = np.ones(count, "f4"), np.empty(count, "f4")
            with Walk() as new:
                communicator.Allreduce(x, y, algorithm=algorithm)
            with Walk() as again:
                communicator.Allreduce(x, y, algorithm=algorithm)
            path = communicator.explain("allreduce", count, algorithm=algorithm).splitlines()[1]
            assert all(file in path for file in new.stations()), (new.stations(), path)
            assert len(new.stations()) <= 8 == path.count(" -> ") + 1
            seen = again.stations() - ({"running/planner.py"} if algorithm else set())  # where a message is late
            assert seen == {"communicator.py", "running/plan_cache.py", "executor/plan.py"}
    request = communicator.Allreduce_init(x, y, algorithm="ring")
    for _ in range(2):
        with Walk() as walk:
            request.Start()
            request.Wait()
        assert walk.stations() - {"running/planner.py"} == {"running/nonblocking.py", "executor/plan.py"}
    request.Free()
    communicator.release()
