"""How many files a call goes through, from the method to the wire: few enough to be read in one sitting."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import collectives

ROOT = Path(collectives.__file__).parent
# The shortcut of short calls, which all come by; and what a rank passes that waits long for another.
BESIDE = {"running/shortcuts.py", "running/planner.py", "node_memory/flags.py", "failures/awake.py", "progress.py"}


class Walk:
    """The files of the package that a call passes, while `with walk:` holds.

    passed : Counter of files, by the calls of their functions
    deep : files on the stack at the time when a schedule is written, a plan bound, and its first call made
    """

    def __init__(self):
        self.passed, self.deep = Counter(), set()

    def __enter__(self):
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def look(self, frame, event, _):
        if event != "call" or not (file := self.file_of(frame)):
            return
        self.passed[file] += 1
        schedule = file.startswith("algorithms/") and file != "algorithms/registry.py"
        if schedule or (file, frame.f_code.co_name) == ("executor/plan.py", "__call__"):
            while frame is not None:
                self.deep.add(self.file_of(frame))
                frame = frame.f_back
            self.deep.discard("")

    @staticmethod
    def file_of(frame) -> str:
        path = Path(frame.f_code.co_filename)
        return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


@pytest.mark.mpi(ranks=[2])
def test_a_call_passes_few_files(comm, ranks):
    """A new call at most 8 on the way down, without what these ask on the way; one that was seen before at most 3."""
    from collectives import Communicator

    communicator = Communicator(comm)
    x, y = np.ones(20_000, "f4"), np.empty(20_000, "f4")
    communicator.empty(1)  # the ranks have met
    for algorithm in (None, "ring"):
        for again in (False, True):
            with Walk() as walk:
                communicator.Allreduce(x, y, algorithm=algorithm)
            assert len(walk.deep) <= 8, (algorithm, walk.deep)
            if again and algorithm == "ring":
                assert set(walk.passed) - BESIDE == {"communicator.py", "running/plan_cache.py", "executor/plan.py"}
    request = communicator.Allreduce_init(x, y, algorithm="ring")
    for _ in range(2):
        with Walk() as walk:
            request.Start()
            request.Wait()
        assert set(walk.passed) - BESIDE == {"running/nonblocking.py", "executor/plan.py"}
    request.Free()
    communicator.release()
