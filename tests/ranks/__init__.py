"""A pytest plugin: plain `pytest` runs a test on MPI ranks that it launches itself.

    @pytest.mark.mpi(ranks=[1, 2, 3], timeout=60)
    def test_sum(comm, ranks):                # comm: a private duplicate of COMM_WORLD, of `ranks` ranks
        assert comm.allreduce(1) == ranks

becomes test_sum[p1], test_sum[p2] and test_sum[p3]; with more=[4, 5] also test_sum[p4] and test_sum[p5], which are
marked exhaustive: `make test` leaves them out. A test fails if any rank fails, and the report shows each rank's
own traceback. A rank that hangs, dies or leaves ends the test within its timeout (seconds, default 60), with a
report that names it and the lines where its peers, and it, were; no process stays behind. What a rank waits for a core,
because the machine is busy with other work, does not count.

The tests of one folder on as many ranks share a launch (0.7 s, and more for each file's imports), also where several
workers (pytest -n) share the tests. The pytest that the user started, the
**parent**, runs none of their code: it starts the ranks (group.py), each of which is a pytest of its own (rank.py)
that runs the same tests in the same order, with a barrier before each, and appends what happens to its **diary**,
a file of JSON lines. The parent reads the diaries and reports one result a test (report.py). After a failure that
launch ends and the next test begins a new one, so no test sees what a failed one left behind.

Fixtures: `comm`, `ranks`, and `shared_tmp_path`, a directory that is the same on every rank (tmp_path is each
rank's own). Within a folder the tests on fewer ranks run first. Ranks load no other plugins. With hypothesis,
derandomize: the ranks must draw the same examples. `pytest -s` passes the ranks' output on as it comes.
`pytest --most-ranks 2` leaves out the tests on more: for an MPI library that is slow with more ranks than cores.
`pytest --exhaustive 6` runs one in six of the tests that are marked exhaustive, on ranks or not: which ones, the code
decides, so that each has its turn and a failure can be tried again.
"""

import functools
import gc
import os
import re
import zlib
from itertools import takewhile
from pathlib import Path

import pytest

from parallel.launch import launcher
from ranks.group import ROOM, Group
from ranks.rank import Rank
from ranks.report import failure


def pytest_addoption(parser):
    parser.addoption("--most-ranks", type=int, metavar="N", help="skip tests on more than N MPI ranks")
    help = "run one in N of the tests marked exhaustive, drawn by the code"
    parser.addoption("--exhaustive", type=int, metavar="N", help=help)
    parser.addini("mpi_timeout", "seconds that a test on MPI ranks may take", default="60")


def pytest_report_header(config):
    if one_in := config.getoption("exhaustive"):
        return f"exhaustive: one in {one_in}, drawn by the code, {code():08x}"


def pytest_configure(config):
    if (one_in := config.getoption("exhaustive")) is not None and one_in < 1:
        raise pytest.UsageError(f"--exhaustive runs one in N, N at least 1, given {one_in}")
    config.addinivalue_line("markers", "mpi(ranks, more, timeout): run the test on that many MPI ranks")
    config.addinivalue_line("markers", "exhaustive: large, with a small one beside it")
    if ROOM in os.environ:
        config.pluginmanager.register(Rank(config, Path(os.environ[ROOM])), "ranks-rank")
    elif launcher.inside() and launcher.size_from_environment() != 1:
        raise pytest.UsageError("start pytest without mpiexec or srun: it launches the ranks of a test itself")
    else:
        config.pluginmanager.register(Parent(), "ranks-parent")


def ranks_of(item) -> int:
    """How many ranks a test runs on; 0 for a test without them."""
    return item.callspec.params["ranks"] if item.get_closest_marker("mpi") else 0


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is None:
        return
    ranks = mark.kwargs.get("ranks", mark.args[0] if mark.args else None)
    ranks = [ranks] if isinstance(ranks, int) else ranks
    if not ranks or not all(isinstance(n, int) and n > 0 for n in ranks):
        where = metafunc.definition.nodeid
        raise pytest.UsageError(f"{where}: @pytest.mark.mpi needs ranks=2 or ranks=[1, 2, 3], given {ranks!r}")
    if "ranks" not in metafunc.fixturenames:  # parametrised all the same: the test's name tells its ranks
        metafunc.fixturenames.append("ranks")
    more = [pytest.param(n, marks=pytest.mark.exhaustive, id=f"p{n}") for n in mark.kwargs.get("more", ())]
    metafunc.parametrize("ranks", [*(pytest.param(n, id=f"p{n}") for n in ranks), *more])


def left_out(item, config) -> bool:
    """Whether a test runs on more ranks than the user wants."""
    most = config.getoption("most_ranks")
    return most is not None and ranks_of(item) > most


@functools.cache
def code() -> int:
    """A number for what is tested, and the tests."""
    root, found = Path(__file__).parents[2], 0
    for folder in ("collectives", "nn", "parallel", "scripts", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            found = zlib.crc32(path.read_bytes(), found)
    return found


def not_drawn(items, one_in) -> list:
    """The exhaustive ones but one in so many, which this code draws."""
    seed = code()
    left = lambda item: zlib.crc32(f"{seed} {item.nodeid}".encode()) % one_in
    return [item for item in items if item.get_closest_marker("exhaustive") and left(item)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Bring together the tests of a folder that can share a launch; the order of files, and within a group, stays."""
    if one_in := config.getoption("exhaustive"):
        out = set(not_drawn(items, one_in))
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    for item in items:
        if left_out(item, config):
            item.add_marker(pytest.mark.skip(reason=f"needs {ranks_of(item)} ranks"))
    place = {folder: i for i, folder in enumerate(dict.fromkeys(item.path.parent for item in items))}
    items.sort(key=lambda item: (place[item.path.parent], ranks_of(item)))


def pytest_collection_finish():
    """The garbage collector passes over the thousands of tests and their modules from now on: they stay to the end."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """With pytest-xdist, -n logical: one worker more than cores, for some wait for programs, or for a time to pass."""
    return launcher.cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With pytest-xdist: which tests one worker runs one after the other, and which of them are begun first.

    It knows tests by their names alone. The longest come first, or one worker would end minutes after the others: a
    test on ranks, or of a file that starts programs, takes some fifty times as long as another one; one on a cluster
    waits for it for ten seconds, in which the other workers have the cores. Files that compare with PyTorch go to one
    worker: to import it takes as long as all their tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByLaunch(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, _, test = nodeid.partition("::")
            ranks = re.search(r"[\[-](p\d+)[]-]", test)
            if ranks:
                return f"{path.rpartition('/')[0]} {ranks[1]}"
            return "torch" if imports_torch(config.rootpath / path) else path

        def _assign_work_unit(self, node):
            self.workqueue.move_to_end(max(self.workqueue, key=self.expected), last=False)
            super()._assign_work_unit(node)

        def expected(self, scope):
            files = {config.rootpath / nodeid.partition("::")[0] for nodeid in self.workqueue[scope]}
            alone = " " not in scope and not any(map(starts_programs, files))
            return len(self.workqueue[scope]) * (1 if alone else 1000 if any(map(on_a_cluster, files)) else 50)

    return ByLaunch(config, log)


@functools.cache
def starts_programs(file: Path) -> bool:
    return re.search("subprocess|launch|scripts", file.read_text()) is not None


@functools.cache
def on_a_cluster(file: Path) -> bool:
    return re.search("import slurmlab", file.read_text()) is not None


@functools.cache
def imports_torch(file: Path) -> bool:
    """Whether the tests themselves do; what a program that they start imports is its own."""
    return not starts_programs(file) and re.search(r'importorskip\("torch', file.read_text()) is not None


@pytest.fixture
def ranks(request):
    """The number of ranks this test runs on."""
    pytest.fail(f"{request.node.name} uses `ranks`: mark it @pytest.mark.mpi(ranks=[...])", pytrace=False)


@pytest.fixture
def comm(request):
    """A duplicate of COMM_WORLD, of this test alone, on its `ranks` ranks."""
    if ROOM not in os.environ:
        pytest.fail(
            f"{request.node.name} uses the fixture `comm`: mark it @pytest.mark.mpi(ranks=[...])", pytrace=False
        )
    from mpi4py import MPI

    private = MPI.COMM_WORLD.Dup()
    yield private
    private.Free()


@pytest.fixture
def shared_tmp_path(comm, request):
    """A temporary directory, empty at first, the same on every rank of this test."""
    path = Path(os.environ[ROOM]) / "shared" / re.sub(r"\W", "_", request.node.nodeid)
    if comm.Get_rank() == 0:
        path.mkdir(parents=True)
    comm.Barrier()
    return path


class Parent:
    """In the pytest that the user started: have the tests on ranks run by launched ranks."""

    def __init__(self):
        self.group = None  # the running launch

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not ranks_of(item) or left_out(item, item.config):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports(item) + self.tear_down(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def reports(self, item):
        try:
            if self.group is None or self.group.tests[0] != item.nodeid:
                self.end_group()
                self.group = Group(item.config, ranks_of(item), self.same_launch(item))
            reports = self.group.reports(item)
        except launcher.LaunchError as error:
            return [failure(item, str(error))]
        except BaseException:  # Ctrl-C
            self.end_group()
            raise
        if not self.group.tests or any(report.failed for report in reports):
            self.end_group()
        return reports

    def same_launch(self, item):
        """This test and those that follow it in the same folder on as many ranks."""
        items, launch = item.session.items, lambda other: (other.path.parent, ranks_of(other))
        return list(takewhile(lambda other: launch(other) == launch(item), items[items.index(item) :]))

    def tear_down(self, item, nextitem):
        """Fixtures that tests without ranks have set up, and that no later test needs."""
        finish = lambda: item.session._setupstate.teardown_exact(nextitem)
        call = pytest.CallInfo.from_call(finish, "teardown", reraise=(KeyboardInterrupt, pytest.exit.Exception))
        return [pytest.TestReport.from_item_and_call(item, call)] if call.excinfo else []

    def pytest_sessionfinish(self):
        self.end_group()

    def end_group(self):
        if self.group:
            self.group.close()
        self.group = None
