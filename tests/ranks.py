"""A pytest plugin: plain `pytest` runs a test on MPI ranks that it launches itself.

    @pytest.mark.mpi(ranks=[1, 2, 3], timeout=30)
    def test_sum(comm, ranks):                # comm: a private duplicate of COMM_WORLD, of `ranks` ranks
        assert comm.allreduce(1) == ranks

becomes test_sum[1], test_sum[2] and test_sum[3]. A test fails if any rank fails, and the report shows each rank's own
traceback; a rank that hangs, dies or leaves is named with the line where it and its peers were, within the timeout
(seconds for each test, default 30), and no process stays behind.

Consecutive tests of one file on as many ranks share one launch (0.6 s): **this process** (the parent) starts the ranks,
each of which is a pytest of its own that runs the group's tests in order, a barrier before each, and appends what
happens to its **diary**, a file of JSON lines. The parent reads the diaries and reports one result a test. After
a failure the launch ends and the rest of the group runs in a new one: no test sees what a failed one left behind.

Within a file tests on fewer ranks run first. Fixtures: `comm`, `ranks`, and `shared_tmp_path`, a directory that is
the same on every rank; tmp_path is each rank's own. With hypothesis, derandomize: ranks must draw the same examples.
`pytest -s` shows the ranks' output as it comes. Do not start pytest itself under mpiexec.
"""

import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from parallel import launch

ROOM = "RINGPROP_TEST_ROOM"  # in the environment of ranks only: the directory of their diaries
STARTUP = 60.0  # seconds for the ranks to start, import and collect
GRACE = 1.0  # seconds that the other ranks get to tell their result after one has failed
FINALIZE = 10.0  # seconds to leave after the last test
PHASES = ("setup", "call", "teardown")


def pytest_addoption(parser):
    parser.addini("mpi_timeout", "seconds that a test on MPI ranks may take", default="30")


def pytest_configure(config):
    config.addinivalue_line("markers", "mpi(ranks, timeout): run the test on that many MPI ranks")
    if ROOM in os.environ:
        config.pluginmanager.register(Rank(config, Path(os.environ[ROOM])), "ranks-rank")
    elif launch.inside() and launch.size_from_environment() != 1:
        raise pytest.UsageError("start pytest without mpiexec or srun: it launches the ranks of a test itself")
    else:
        config.pluginmanager.register(Parent(config), "ranks-parent")


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is None:
        return
    ranks = mark.kwargs.get("ranks", mark.args[0] if mark.args else None)
    ranks = [ranks] if isinstance(ranks, int) else ranks
    if not ranks or not all(isinstance(n, int) and n > 0 for n in ranks):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: mark it @pytest.mark.mpi(ranks=2) or (ranks=[1, 2, 3]), given {ranks!r}"
        )
    if "ranks" not in metafunc.fixturenames:
        metafunc.fixturenames.append("ranks")
    metafunc.parametrize("ranks", ranks)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Bring the tests of a file that can share a launch together; files, and the order within a group, stay."""
    place = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (place[item.path], _ranks(item)))


def _ranks(item) -> int:
    """How many ranks a test runs on; 0 for a test without them."""
    return item.callspec.params["ranks"] if item.get_closest_marker("mpi") else 0


def _timeout(item) -> float:
    return float(item.get_closest_marker("mpi").kwargs.get("timeout", item.config.getini("mpi_timeout")))


@pytest.fixture
def ranks(request):
    """The number of ranks this test runs on."""
    pytest.fail(f"{request.node.name} uses the fixture `ranks`: mark it @pytest.mark.mpi(ranks=[...])", pytrace=False)


@pytest.fixture
def comm(request):
    """A duplicate of COMM_WORLD, of this test alone."""
    if ROOM not in os.environ:
        pytest.fail(f"{request.node.name} uses the fixture `comm`: mark it @pytest.mark.mpi(ranks=[...])", False)
    from mpi4py import MPI

    private = MPI.COMM_WORLD.Dup()
    yield private
    private.Free()


@pytest.fixture
def shared_tmp_path(comm, request):
    """An empty temporary directory, the same on every rank of this test."""
    path = Path(os.environ[ROOM]) / "shared" / re.sub(r"\W", "_", request.node.name)
    if comm.Get_rank() == 0:
        path.mkdir(parents=True)
    comm.Barrier()
    return path


# ---- in each rank ----------------------------------------------------------------------------------------------


class Rank:
    """The side of a rank: run the tests that the parent wrote down, and keep the diary."""

    def __init__(self, config, room: Path):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.Get_rank()
        self.config, self.room = config, room
        self.diary = open(room / f"{self.rank}.diary", "a", buffering=1)  # noqa: SIM115
        self.stack = open(room / f"{self.rank}.stack", "w")  # noqa: SIM115
        faulthandler.enable(self.stack)  # SIGABRT from the parent, SIGSEGV, ...
        faulthandler.register(signal.SIGTERM, self.stack, chain=True)  # from mpiexec, when a peer has died
        config.option.basetemp = room / f"tmp{self.rank}"

    def pytest_collection_modifyitems(self, items):
        """Exactly the parent's tests in the parent's order."""
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[nodeid] for nodeid in json.loads((self.room / "tests").read_text())]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.comm.Barrier()
        self.write(started=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.write(report=data)
        while report.failed:  # nothing more is certain here: the parent ends this launch
            time.sleep(1)

    def write(self, **entry):
        self.diary.write(json.dumps(entry) + "\n")


# ---- in the pytest that the user started -----------------------------------------------------------------------


class Parent:
    """The side of the user's pytest: launch the ranks, read their diaries, report one result a test."""

    def __init__(self, config):
        self.config = config
        self.group = None  # the running launch

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not _ranks(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # fixtures of the tests before it without ranks
        return True

    def reports(self, item):
        try:
            if self.group is None or self.group.tests[:1] != [item.nodeid]:
                self.end_group()
                items = item.session.items
                rest = items[items.index(item) :]
                same = takewhile(lambda other: (other.path, _ranks(other)) == (item.path, _ranks(item)), rest)
                self.group = Group(item, [other.nodeid for other in same])
            reports = self.group.reports(item)
        except launch.LaunchError as error:
            return [_failed(item, str(error), [])]
        except BaseException:
            self.end_group()
            raise
        if not self.group.tests or any(report.failed for report in reports):
            self.end_group()
        return reports

    def end_group(self):
        if self.group:
            self.group.close()
        self.group = None

    def pytest_sessionfinish(self):
        self.end_group()


class Group:
    """One launch: ranks that run the tests of one file that need that many ranks.

    Parameters
    ----------
    item : pytest.Item
        The first of them.
    tests : list of str
        The node ids of all of them; reported ones are taken off the front.
    """

    def __init__(self, item, tests):
        self.config, self.tests, self.ranks = item.config, tests, _ranks(item)
        self.room = Path(tempfile.mkdtemp(prefix="ranks-"))
        (self.room / "tests").write_text(json.dumps(tests))
        self.read = [0] * self.ranks  # bytes of each diary
        self.started = {}  # (rank, node id) -> time
        self.told = {}  # (rank, node id) -> {phase: report}
        self.since = time.monotonic()
        self.output = open(self.room / "output", "w+")  # noqa: SIM115
        config = [
            f"--rootdir={item.config.rootpath}",
            f"--confcutdir={item.config.rootpath}",
            "-o",
            "addopts=",
        ]
        config += ["-c", str(item.config.inipath)] if item.config.inipath else []
        config += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", __name__]
        show = item.config.getoption("capture") == "no"
        self.job = launch.Job(
            ["-m", "pytest", "-q", "--no-header", *(["-s"] if show else []), *config, str(item.path)],
            self.ranks,
            env=os.environ
            | {ROOM: str(self.room), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            cwd=item.config.invocation_params.dir,
            stdout=None if show else self.output,
        )

    def reports(self, item):
        """Wait for a test's end on every rank and return its reports, one a phase."""
        trouble = self.wait_for(item)
        self.tests.remove(item.nodeid)
        told = [self.told.get((rank, item.nodeid), {}) for rank in range(self.ranks)]
        if trouble:
            return [self.merged_failure(item, told, trouble)]
        outcomes = [{phase: report.outcome for phase, report in phases.items()} for phases in told]
        if any(outcome != outcomes[0] for outcome in outcomes):
            return [_failed(item, f"the ranks disagree about the outcome: {outcomes}", [])]
        return list(told[0].values())

    def wait_for(self, item) -> str:
        """Wait until every rank has told all of a test, or cannot; return what is wrong, or ''."""
        limit, failed_at = _timeout(item), None
        self.since = time.monotonic()
        while True:
            status = self.job.wait(0.01)
            self.read_diaries()
            keys = [(rank, item.nodeid) for rank in range(self.ranks)]
            told = [self.told.get(key, {}) for key in keys]
            failed = [any(report.failed for report in phases.values()) for phases in told]
            if all("teardown" in phases for phases in told) and not any(failed):
                return "" if len(self.tests) > 1 else self.finish()
            now = time.monotonic()
            if any(failed):
                failed_at = failed_at or now
                if now > failed_at + GRACE or all(f or "teardown" in t for f, t in zip(failed, told, strict=True)):
                    self.stacks()
                    return "failed"
            elif status is not None:
                return _ending(status)
            started = [self.started[key] for key in keys if key in self.started]
            begun = max(started) if len(started) == self.ranks else None
            if (begun and now > begun + limit) or (begun is None and now > self.since + STARTUP):
                self.stacks()
                return f"no end within {limit:g} s" if begun else f"not started by every rank within {STARTUP:g} s"

    def finish(self) -> str:
        """After the last test: the ranks must leave."""
        status = self.job.wait(FINALIZE)
        if status is None:
            self.stacks()
            return f"the test passed, but then the ranks did not finalize MPI within {FINALIZE:g} s"
        return "" if status == 0 else f"the test passed, but then {_ending(status)}"

    def read_diaries(self):
        for rank in range(self.ranks):
            path = self.room / f"{rank}.diary"
            if not path.exists():
                continue
            with open(path, "rb") as diary:
                diary.seek(self.read[rank])
                text = diary.read()
            text = text[: text.rfind(b"\n") + 1]  # whole lines
            self.read[rank] += len(text)
            for line in text.splitlines():
                entry = json.loads(line)
                if "started" in entry:
                    self.started[rank, entry["started"]] = time.monotonic()
                else:
                    report = self.config.hook.pytest_report_from_serializable(config=self.config, data=entry["report"])
                    self.told.setdefault((rank, report.nodeid), {})[report.when] = report

    def stacks(self):
        """Have every rank write down where it is; this ends it."""
        if self.job.poll() is None:
            self.job.show_stacks()
            self.job.wait(GRACE)

    def merged_failure(self, item, told, trouble):
        """One report from all ranks: what each failed with, and where the others were."""
        tracebacks, where, sections = {}, [], []
        self.job.stop()
        for rank, phases in enumerate(told):
            name = f"rank {rank}/{self.ranks}"
            bad = [report for report in phases.values() if report.failed]
            for report in bad:
                tracebacks.setdefault(str(report.longrepr), (report, []))[1].append(rank)
                sections += [(f"{title}, {name}", text) for title, text in report.sections]
            if not bad and "teardown" not in phases:
                reached = "in" if (rank, item.nodeid) in self.started else "before"
                where.append(f"{name} {_where(self.room / f'{rank}.stack', reached)}")
        if not tracebacks:
            sections.append(("Output of the ranks", (self.room / "output").read_text(errors="replace")))
        return _failed(
            item,
            trouble,
            list(tracebacks.values()),
            self.ranks,
            where,
            sections,
            time.monotonic() - self.since,
        )

    def close(self):
        self.job.stop()
        self.output.close()
        shutil.rmtree(self.room, ignore_errors=True)


def _ending(status: int) -> str:
    if status > 128:
        return f"the ranks ended by signal {status - 128} ({signal.Signals(status - 128).name})"
    return f"the ranks ended with exit status {status}"


def _where(stack: Path, reached: str) -> str:
    """What a rank was doing, from its faulthandler file."""
    text = stack.read_text(errors="replace") if stack.exists() else ""
    # the thread that the signal met comes last or alone; other threads, if any, before it
    frames = re.findall(r'  File "(.+)", line (\d+) in (.+)', text.rpartition("most recent call first")[2])
    frames = list(takewhile(lambda frame: "_pytest" not in frame[0], frames))
    if not text:
        return f"died {reached} the test without a word (killed, or left by os._exit)"
    lines = [f"  {path}:{line} in {name}: {linecache.getline(path, int(line)).strip()}" for path, line, name in frames]
    return "\n".join([f"was {reached} the test, at", *(lines or ["  " + text.strip().replace("\n", "\n  ")])])


class RanksRepr(TerminalRepr):
    """The failure of a test as its ranks tell it."""

    def __init__(self, message, tracebacks, ranks, where, crash):
        self.message, self.tracebacks, self.ranks, self.where, self.reprcrash = (
            message,
            tracebacks,
            ranks,
            where,
            crash,
        )

    def toterminal(self, tw):
        for report, members in self.tracebacks:
            tw.sep("_", f"rank {', '.join(map(str, members))}/{self.ranks}, {report.when}", bold=True)
            report.toterminal(tw)
        if self.message:
            tw.line(self.message, red=True)
        for line in self.where:
            tw.line(line)


def _failed(item, trouble, tracebacks, ranks=0, where=(), sections=(), duration=0.0):
    path, line, _ = item.location
    summary, when = trouble, "call"
    if tracebacks:
        report, members = tracebacks[0]
        crash = getattr(report.longrepr, "reprcrash", None)
        summary = f"rank {members[0]}/{ranks}: {crash.message if crash else trouble}"
        when, trouble = report.when, "Meanwhile:" if where else ""
    elif where:
        summary = f"{trouble}: {where[0].splitlines()[0]}"
    crash = ReprFileLocation(path, (line or 0) + 1, summary)
    longrepr = RanksRepr(trouble, tracebacks, ranks, where, crash)
    return pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        "failed",
        longrepr,
        when,
        sections,
        duration,
    )
