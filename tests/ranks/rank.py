"""A rank's side of a test on ranks: run the tests that the parent wrote down, and keep the diary."""

import contextlib
import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import pytest


def queued(process: int) -> float:
    """Seconds that the threads of a process were ready to run and had no core, as Linux counts them; 0 elsewhere."""
    seconds = 0.0
    for file in Path("/proc").glob(f"{process}/task/*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            seconds += int(file.read_text().split()[1]) / 1e9
    return seconds


class Rank:
    """A plugin of the pytest that runs as one MPI rank.

    Parameters
    ----------
    config : pytest.Config
    room : Path
        Directory of this launch. `tests`: node ids, written by the parent. `<rank>.diary`: what this rank has
        begun and how it ended. `<rank>.stack`: where it was when it was ended from outside.
    """

    def __init__(self, config, room):
        from mpi4py import MPI

        self.config, self.room = config, room
        self.comm = MPI.COMM_WORLD.Dup()
        rank = self.comm.Get_rank()
        self.diary = open(room / f"{rank}.diary", "w", buffering=1)  # noqa: SIM115 - open as long as this process
        self.stack = open(room / f"{rank}.stack", "w")  # noqa: SIM115
        faulthandler.enable(self.stack)  # SIGABRT, sent by the parent at the time limit; crashes
        faulthandler.register(signal.SIGTERM, self.stack, chain=True)  # sent by mpiexec when a peer has died
        config.option.basetemp = room / f"tmp{rank}"

    def pytest_collection_modifyitems(self, session, items):
        """The parent's tests in the parent's order."""
        wanted, by_id = json.loads((self.room / "tests").read_text()), {item.nodeid: item for item in items}
        missing = [nodeid for nodeid in wanted if nodeid not in by_id]
        if missing and not session.testsfailed:  # else pytest shows why it could not collect them
            raise pytest.UsageError(f"collected by the parent but not by this rank (random parameters?): {missing}")
        items[:] = [by_id[nodeid] for nodeid in wanted if nodeid in by_id]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.comm.Barrier()
        self.write(started=nodeid, process=os.getpid(), queued=queued(os.getpid()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        self.write(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
        while report.failed:  # from here on nothing is certain, not even a teardown: the parent ends this launch
            time.sleep(1)

    def write(self, **entry):
        self.diary.write(json.dumps(entry) + "\n")
