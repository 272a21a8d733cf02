"""The parent's side of a launch: start ranks, send them tests, read their logs, end them whatever happens."""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from collectives.failures.awake import Awake
from parallel.launch import launcher, processes
from parallel.testing import report
from parallel.testing.mark import DIRECTORY, ranks_of
from parallel.testing.rank import seconds_without_a_core

DIRECTORIES = "ringprop-ranks-"  # how the names of directories begin in which ranks write logs
STARTUP = 900.0  # seconds for the ranks to start, import and collect, and for the barrier before a test
GRACE = 1.0  # seconds that the other ranks have for their result after one has failed
FINALIZE = 60.0  # seconds to leave after the last test
LOOKS = 0.001, 0.02  # seconds between two looks at the logs: short tests are many, long ones must not be disturbed


class Launch:
    """Ranks that run tests of one folder, all of them on the same number of ranks.

    Parameters
    ----------
    item : pytest.Item
        The first test. `tests` holds the node ids of those that were sent and are not yet reported.
    """

    def __init__(self, item):
        self.config, self.ranks = item.config, ranks_of(item)
        self.folder, self.tests = item.path.parent, []
        self.files = [other.path for other in item.session.items if self._fits(other)]
        processes.sweep(Path(tempfile.gettempdir()), DIRECTORIES)  # of those that were killed
        self.directory = Path(tempfile.gettempdir(), f"{DIRECTORIES}{os.urandom(8).hex()}")
        self.lock = processes.make_locked(self.directory)
        self.lengths = [0] * self.ranks  # bytes of each log that have been read
        self.clock = Awake()  # a machine that stands still is no test's fault
        self.started = {}  # (rank, node id) -> (time, process, its seconds_without_a_core then)
        self.not_collected = {}  # rank -> traceback
        self.phases = {}  # (rank, node id) -> {phase: report}
        self.output = open(self.directory / "output", "w+")  # noqa: SIM115 - closed in remove()
        (self.directory / "options").write_text(json.dumps(_options(self.config)))
        self.send(item)
        show = self.config.getoption("capture") == "no"
        try:
            self.job = launcher.Job(
                ["-m", "pytest", *self._arguments(), *(["-s"] if show else []), *dict.fromkeys(map(str, self.files))],
                self.ranks,
                env=os.environ | self._environment(),
                cwd=self.config.invocation_params.dir,
                stdout=None if show else self.output,
            )
        except BaseException:
            self.remove()
            raise

    def _fits(self, item):
        return item.path.parent == self.folder and ranks_of(item) == self.ranks

    def _arguments(self):
        """Options of the ranks' pytest; addopts is for the parent, as is what shows results."""
        options = ["-q", "--no-header", "--color=no", f"--rootdir={self.config.rootpath}", "-o", "addopts="]
        options += ["-c", str(self.config.inipath)] if self.config.inipath else []
        options += [part for name in self.config.getoption("override_ini") or () for part in ("-o", name)]
        options += [f"--import-mode={self.config.getoption('importmode')}"]
        options += ["-o", f"verbosity_assertions={self.config.get_verbosity('assertions')}"]  # how much of a difference
        plugins = ["no:cacheprovider", "no:faulthandler", "parallel.testing.plugin", *self.config.getini("mpi_plugins")]
        return options + [part for name in plugins for part in ("-p", name)]

    def _environment(self):
        return {
            DIRECTORY: str(self.directory),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }

    def holds(self, item):
        """Whether the ranks of this launch have collected a test."""
        return self._fits(item) and item.path in self.files

    def send(self, item):
        """Have the ranks run a test after those that they have; None: then they end."""
        with open(self.directory / "tests", "a") as file:
            file.write(json.dumps(item and [item.nodeid, _collected_as(item)]) + "\n")
        self.tests += [item.nodeid] if item else []

    def reports(self, item):
        """Wait until a test has ended on every rank, or cannot; return its reports for pytest, one a phase."""
        begin = time.monotonic()
        trouble = self.wait_for(item)
        self.tests.remove(item.nodeid)
        if not trouble:
            return list(self.phases[0, item.nodeid].values())
        self.job.stop()
        phases = [self.phases.get((rank, item.nodeid), {}) for rank in range(self.ranks)]
        positions = {
            rank: self._position(rank, item) for rank, of_rank in enumerate(phases) if not _has_failed(of_rank)
        }
        output = "" if self.not_collected else (self.directory / "output").read_text(errors="replace")
        return [report.failure(item, trouble, phases, positions, output, time.monotonic() - begin)]

    def _position(self, rank, item) -> str:
        """Where a rank is that has not reported a failure, in words that follow its number."""
        if rank in self.not_collected:
            return f"could not import the tests\n{self.not_collected[rank]}"
        if _is_over(self.phases.get((rank, item.nodeid), {})):
            return "had finished the test"
        return report.position(self.directory / f"{rank}.stack", (rank, item.nodeid) in self.started)

    def wait_for(self, item) -> str:
        """Wait until every rank has reported all of a test; return what is wrong with that, or ''."""
        limit = float(item.get_closest_marker("mpi").kwargs.get("timeout", self.config.getini("mpi_timeout")))
        keys = [(rank, item.nodeid) for rank in range(self.ranks)]
        begin, failed_at = self.clock.now(), None
        while True:
            shortest, longest = LOOKS
            status = self.job.wait(min(longest, shortest + 0.1 * (self.clock.now() - begin)))
            self.read_logs()
            now = self.clock.now()
            phases = [self.phases.get(key, {}) for key in keys]
            if any(map(_has_failed, phases)):
                failed_at = failed_at or now
                if now > failed_at + GRACE or all(map(_is_over, phases)):
                    self.write_stacks()
                    return "failed"
            elif all(map(_is_over, phases)):
                skipped = [any(phase.skipped for phase in of_rank.values()) for of_rank in phases]
                if len(set(skipped)) > 1:
                    outcomes = [f"rank {rank} {'skipped' if it else 'passed'}" for rank, it in enumerate(skipped)]
                    return f"the ranks disagree about the outcome: {', '.join(outcomes)}"
                return "" if len(self.tests) > 1 else self.finish()
            elif status is not None:
                return launcher.ending(status)
            elif all(key in self.started for key in keys):
                start = max(self.started[key][0] for key in keys)
                if now > start + limit and now > start + limit + self.held_up(keys):
                    self.write_stacks()
                    return f"no end within {limit:g} s"
            elif now > begin + STARTUP:
                self.write_stacks()
                return f"not begun by every rank within {STARTUP:g} s"

    def held_up(self, keys) -> float:
        """Seconds of a test in which one rank, the worst off, was ready to run and had no core: others' work."""
        return max(seconds_without_a_core(process) - before for _, process, before in map(self.started.get, keys))

    def finish(self) -> str:
        """After the last test: wait until the ranks have left."""
        status = self.job.wait(FINALIZE)
        if status is None:
            self.write_stacks()
            return f"passed, but then the ranks did not end within {FINALIZE:g} s"
        return status and f"passed, but then {launcher.ending(status)}"

    def read_logs(self):
        hook = self.config.hook.pytest_report_from_serializable
        for rank in range(self.ranks):
            try:
                with open(self.directory / f"{rank}.log", "rb") as log:
                    log.seek(self.lengths[rank])
                    text = log.read()
            except FileNotFoundError:  # not yet there
                continue
            text = text[: text.rfind(b"\n") + 1]  # whole lines
            self.lengths[rank] += len(text)
            for entry in map(json.loads, text.splitlines()):
                if "not_collected" in entry:
                    self.not_collected[rank] = entry["not_collected"]
                elif "started" in entry:
                    start = self.clock.now(), entry["process"], entry["without_a_core"]
                    self.started[rank, entry["started"]] = start
                else:
                    phase = hook(config=self.config, data=entry["report"])
                    if isinstance(phase.longrepr, list):  # of a skip: JSON has no tuples
                        phase.longrepr = tuple(phase.longrepr)
                    self.phases.setdefault((rank, entry["test"]), {})[phase.when] = phase

    def write_stacks(self):
        """Have every rank write down where it is, which ends it."""
        if self.job.poll() is None:
            self.job.show_stacks()
            self.job.wait(GRACE)

    def close(self):
        self.job.stop()
        self.remove()

    def remove(self):
        self.output.close()
        os.close(self.lock)
        shutil.rmtree(self.directory, ignore_errors=True)


def _collected_as(item) -> str:
    """The node id of a test on its rank, which has no xdist: that appends @GROUP with --dist loadgroup."""
    group = item.get_closest_marker("xdist_group")
    names = [*group.args, *group.kwargs.values()] if group else []
    return item.nodeid.removesuffix(f"@{names[0]}") if names else item.nodeid


def _options(config) -> dict:
    """The values of the command line that JSON can hold; rank.py takes those that a rank shares with its parent."""
    plain = str | int | float | None
    return {name: value for name, value in vars(config.option).items() if isinstance(value, plain)}


def _has_failed(phases) -> bool:
    return any(phase.failed for phase in phases.values())


def _is_over(phases) -> bool:
    """Whether a rank has reported all that it will: a failed one waits to be ended."""
    return "teardown" in phases or _has_failed(phases)
