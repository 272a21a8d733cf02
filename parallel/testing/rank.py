"""A rank's side of a test on ranks: run the tests that the parent sends, and write the log."""

import contextlib
import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

POLL = 0.002  # seconds between two looks for the next test
# pytest's own options that shape a report; a rank has its own values of the others, and all of conftest.py's.
SHARED = ("tbstyle", "showlocals", "fulltrace")


def seconds_without_a_core(process: int) -> float:
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
    directory : Path
        Directory of this launch. `tests`: node ids in the parent and on this rank, a pair a line, appended by the
        parent; null ends the list. `options`: the parent's command line. `<rank>.log`: what this rank has begun and how
        it ended. `<rank>.stack`: where it was when it was ended from outside.
    """

    def __init__(self, config, directory):
        from mpi4py import MPI

        self.config, self.directory = config, directory
        self.comm = MPI.COMM_WORLD.Dup()
        rank = self.comm.Get_rank()
        self.log = open(directory / f"{rank}.log", "w", buffering=1)  # noqa: SIM115 - open as long as this process
        self.stack = open(directory / f"{rank}.stack", "w")  # noqa: SIM115
        faulthandler.enable(self.stack)  # SIGABRT, sent by the parent at the time limit; crashes
        faulthandler.register(signal.SIGTERM, self.stack, chain=True)  # sent by mpiexec when a peer has died
        config.option.basetemp = directory / f"tmp{rank}"
        options, own = json.loads((directory / "options").read_text()), vars(config.known_args_namespace)
        for name in vars(config.option):
            if name in options and (name in SHARED or name not in own):
                setattr(config.option, name, options[name])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report):
        if report.failed:
            self.write(not_collected=report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:  # some could not be collected: pytest ends
            return None
        by_id = {item.nodeid: item for item in session.items}
        sent = self.sent(by_id)
        item = next(sent)
        for following in sent:
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def sent(self, by_id) -> Iterator[pytest.Item | None]:
        """The parent's tests as they come, and None after the last."""
        with open(self.directory / "tests") as file:
            line = ""
            while line != "null\n":
                line = file.readline()
                while not line.endswith("\n"):
                    time.sleep(POLL)
                    line += file.readline()
                nodeid, collected_as = json.loads(line) or (None, None)
                if nodeid and collected_as not in by_id:
                    raise pytest.UsageError(
                        f"{nodeid} was collected by pytest but not by its rank: are the parameters random, or do they "
                        "come from a plugin that the ini option mpi_plugins lacks?"
                    )
                item = by_id[collected_as] if nodeid else None
                if item:
                    item._nodeid = nodeid
                yield item

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.comm.Barrier()
        self.write(started=nodeid, process=os.getpid(), without_a_core=seconds_without_a_core(os.getpid()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.write(test=report.nodeid, report=data)
        while report.failed:  # from here on nothing is certain, not even a teardown: the parent ends this launch
            time.sleep(1)

    def write(self, **entry):
        self.log.write(json.dumps(entry) + "\n")
