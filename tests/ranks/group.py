"""The parent's side of a launch: start ranks for some tests, read their diaries, end them whatever happens."""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from collectives.failures.awake import Awake
from parallel.launch import launcher
from ranks import report
from ranks.rank import queued

ROOM = "RINGPROP_TEST_ROOM"  # in the environment of ranks, and only there: the directory of their diaries
STARTUP = 900.0  # seconds for the ranks to start, import and collect, and to meet before a test
GRACE = 1.0  # seconds that the other ranks get to tell their result after one has failed
FINALIZE = 60.0  # seconds to leave after the last test


class Group:
    """One launch: ranks that run the tests of one folder that need that many of them.

    Parameters
    ----------
    config : pytest.Config
    ranks : int
    items : list of pytest.Item
        The tests, in order. `tests`, their node ids, loses those that have been reported.
    """

    def __init__(self, config, ranks, items):
        self.config, self.ranks = config, ranks
        self.tests = [item.nodeid for item in items]
        self.room = Path(tempfile.mkdtemp(prefix="ranks-"))
        (self.room / "tests").write_text(json.dumps(self.tests))
        self.read = [0] * ranks  # bytes of each diary
        self.clock = Awake()  # a machine that stands still is no test's fault
        self.started = {}  # (rank, node id) -> (time, process, seconds that it had been `queued` then)
        self.told = {}  # (rank, node id) -> {phase: report}
        self.output = open(self.room / "output", "w+")  # noqa: SIM115 - closed in remove()
        show = config.getoption("capture") == "no"
        options = ["-q", "--no-header", f"--rootdir={config.rootpath}", "-o", "addopts=", *(["-s"] if show else [])]
        options += ["-c", str(config.inipath)] if config.inipath else []
        options += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "ranks"]
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        try:
            self.job = launcher.Job(
                ["-m", "pytest", *options, *dict.fromkeys(str(item.path) for item in items)],
                ranks,
                env=os.environ | {ROOM: str(self.room), "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                cwd=config.invocation_params.dir,
                stdout=None if show else self.output,
            )
        except BaseException:
            self.remove()
            raise

    def reports(self, item):
        """Wait until a test has ended on every rank, or cannot; return its reports for pytest, one a phase."""
        begin = time.monotonic()
        trouble = self.wait_for(item)
        self.tests.remove(item.nodeid)
        if not trouble:
            return list(self.told[0, item.nodeid].values())
        self.job.stop()
        told = [self.told.get((rank, item.nodeid), {}) for rank in range(self.ranks)]
        where = {
            rank: report.where(self.room / f"{rank}.stack", (rank, item.nodeid) in self.started)
            for rank, phases in enumerate(told)
            if not _over(phases)
        }
        output = (self.room / "output").read_text(errors="replace")
        return [report.failure(item, trouble, told, where, output, time.monotonic() - begin)]

    def wait_for(self, item) -> str:
        """Wait until every rank has told all of a test; return what is wrong with that, or ''."""
        limit = float(item.get_closest_marker("mpi").kwargs.get("timeout", self.config.getini("mpi_timeout")))
        keys = [(rank, item.nodeid) for rank in range(self.ranks)]
        begin, failed_at = self.clock.now(), None
        while True:
            status = self.job.wait(0.02)
            self.read_diaries()
            now = self.clock.now()
            told = [self.told.get(key, {}) for key in keys]
            if any(_failed(phases) for phases in told):
                failed_at = failed_at or now
                if now > failed_at + GRACE or all(map(_over, told)):
                    self.ask_where()
                    return "failed"
            elif all(map(_over, told)):
                skipped = [any(phase.skipped for phase in phases.values()) for phases in told]
                if len(set(skipped)) > 1:
                    said = [f"rank {rank} {'skipped' if it else 'passed'}" for rank, it in enumerate(skipped)]
                    return f"the ranks disagree about the outcome: {', '.join(said)}"
                return "" if len(self.tests) > 1 else self.finish()
            elif status is not None:
                return launcher.ending(status)
            elif all(key in self.started for key in keys):
                start = max(self.started[key][0] for key in keys)
                if now > start + limit and now > start + limit + self.held_up(keys):
                    self.ask_where()
                    return f"no end within {limit:g} s"
            elif now > begin + STARTUP:
                self.ask_where()
                return f"not begun by every rank within {STARTUP:g} s"

    def held_up(self, keys) -> float:
        """Seconds of a test in which a rank, the one worst off, was ready to run and had no core: others' work."""
        return max(queued(process) - before for _, process, before in map(self.started.get, keys))

    def finish(self) -> str:
        """After the last test: wait until the ranks have left."""
        status = self.job.wait(FINALIZE)
        if status is None:
            self.ask_where()
            return f"passed, but then the ranks did not end within {FINALIZE:g} s"
        return status and f"passed, but then {launcher.ending(status)}"

    def read_diaries(self):
        hook = self.config.hook.pytest_report_from_serializable
        for rank in range(self.ranks):
            try:
                with open(self.room / f"{rank}.diary", "rb") as diary:
                    diary.seek(self.read[rank])
                    text = diary.read()
            except FileNotFoundError:  # not yet there
                continue
            text = text[: text.rfind(b"\n") + 1]  # whole lines
            self.read[rank] += len(text)
            for entry in map(json.loads, text.splitlines()):
                if "started" in entry:
                    self.started[rank, entry["started"]] = self.clock.now(), entry["process"], entry["queued"]
                else:
                    phase = hook(config=self.config, data=entry["report"])
                    if isinstance(phase.longrepr, list):  # of a skip: JSON has no tuples
                        phase.longrepr = tuple(phase.longrepr)
                    self.told.setdefault((rank, phase.nodeid), {})[phase.when] = phase

    def ask_where(self):
        """Have every rank write down where it is, which ends it."""
        if self.job.poll() is None:
            self.job.show_stacks()
            self.job.wait(GRACE)

    def close(self):
        self.job.stop()
        self.remove()

    def remove(self):
        self.output.close()
        shutil.rmtree(self.room, ignore_errors=True)


def _failed(phases) -> bool:
    return any(phase.failed for phase in phases.values())


def _over(phases) -> bool:
    """Whether a rank has told all that it will tell: a failed one waits to be ended."""
    return "teardown" in phases or _failed(phases)
