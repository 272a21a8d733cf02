"""The mark `mpi`, its options and fixtures, and the hooks that have marked tests run on ranks.

    @pytest.mark.mpi(ranks=[1, 2, 3], timeout=60)
    def test_sum(comm, ranks):                # comm: a private duplicate of COMM_WORLD, of `ranks` ranks
        assert comm.allreduce(1) == ranks

becomes test_sum[1 rank], test_sum[2 ranks] and test_sum[3 ranks]. A test fails if any rank fails, and the report shows
the traceback of each rank that failed. A rank that hangs, dies or leaves ends the test within its timeout, with a
report that names it and the lines where all ranks were; no process stays behind.

The tests of one folder on the same number of ranks share a launch (0.7 s, and more for each file's imports). The
pytest that the user started, the **parent**, runs none of their code: it starts the ranks (launch.py), each of which
is a pytest of its own (rank.py), and sends them one test after the other. Each rank appends what happens to its log.
The parent reads the logs and reports one result a test (report.py). After a failure that launch ends and the next
test begins a new one, so no test sees what a failed one left behind.

pytest loads this file in every project of the environment: it imports the launcher when the first marked test runs.
"""

import os
import re
from pathlib import Path

import pytest

from parallel.testing.mark import DIRECTORY, is_skipped, ranks_of

MARK = (
    "mpi(ranks, more, timeout): run the test on MPI ranks that pytest launches: ranks=2, or ranks=[1, 2, 3] for a "
    "test of each; more=[4, 5]: the same, marked exhaustive; timeout: seconds, else that of the ini file (ringprop)"
)


def pytest_addoption(parser):
    """Add --most-ranks and the ini options."""
    group = parser.getgroup("mpi", "tests on MPI ranks (ringprop)")
    group.addoption(
        "--most-ranks", type=int, metavar="N",
        help="skip the tests marked mpi that need more than N ranks (`-m 'not mpi'` leaves out all of them)",
    )  # fmt: skip
    parser.addini("mpi_timeout", "seconds that a test marked mpi may take (ringprop)", default="60")
    parser.addini(
        "mpi_plugins",
        "pytest plugins that MPI ranks load, named as for -p: they load no others (ringprop)",
        type="args",
    )


def pytest_configure(config):
    """Register the marks, and the side of the ranks or of their parent."""
    config.addinivalue_line("markers", MARK)
    config.addinivalue_line("markers", "exhaustive: large: -m 'not exhaustive' leaves it out (ringprop: more=[4, 5])")
    if (most := config.getoption("most_ranks")) is not None and most < 0:
        raise pytest.UsageError(f"--most-ranks: expected a number of ranks, 0 or more, given {most}")
    if DIRECTORY in os.environ:
        from parallel.testing.rank import Rank

        config.pluginmanager.register(Rank(config, Path(os.environ[DIRECTORY])), "mpi-rank")
    else:
        config.pluginmanager.register(Parent(), "mpi-parent")


def pytest_generate_tests(metafunc):
    """Make one test of a marked function for each number of ranks."""
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is None:
        return
    ranks = mark.kwargs.get("ranks", mark.args[0] if mark.args else None)
    ranks, more = [ranks] if isinstance(ranks, int) else ranks, mark.kwargs.get("more", ())
    unknown = set(mark.kwargs) - {"ranks", "more", "timeout"}
    if not ranks or unknown or not all(isinstance(n, int) and n > 0 for n in [*ranks, *more]):
        given = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())])
        pytest.fail(
            f"{metafunc.definition.nodeid}: @pytest.mark.mpi needs ranks=2 or ranks=[1, 2, 3], and takes "
            f"more=[4, 5] and timeout=60; given @pytest.mark.mpi({given}). If that mark belongs to another plugin, "
            "run pytest with -p no:pytest_ringprop",
            pytrace=False,
        )
    if "ranks" not in metafunc.fixturenames:  # parametrized all the same: the test's name shows its ranks
        metafunc.fixturenames.append("ranks")
    names = {n: f"{n} rank{'s' * (n > 1)}" for n in [*ranks, *more]}
    exhaustive = [pytest.param(n, marks=pytest.mark.exhaustive, id=names[n]) for n in more]
    metafunc.parametrize("ranks", [*(pytest.param(n, id=names[n]) for n in ranks), *exhaustive])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Bring together the tests of a folder that can share a launch; the order of files, and within a launch, stays."""
    if not any(map(ranks_of, items)):
        return
    if DIRECTORY not in os.environ:
        from parallel.launch import launcher

        if launcher.inside() and launcher.size_from_environment() != 1:
            raise pytest.UsageError("start pytest without mpiexec or srun: it launches the ranks of a test itself")
    most = config.getoption("most_ranks")
    for item in items:
        if most is not None and ranks_of(item) > most:
            item.add_marker(pytest.mark.skip(reason=f"needs {ranks_of(item)} ranks, --most-ranks allows {most}"))
    place = {folder: i for i, folder in enumerate(dict.fromkeys(item.path.parent for item in items))}
    items.sort(key=lambda item: (place[item.path.parent], ranks_of(item)))


@pytest.fixture
def ranks(request):
    """The number of ranks this test runs on."""
    pytest.fail(f"{request.node.name} uses `ranks`: mark it @pytest.mark.mpi(ranks=[...])", pytrace=False)


@pytest.fixture
def comm(request):
    """A duplicate of MPI.COMM_WORLD, for this test alone, on its `ranks` ranks."""
    if DIRECTORY not in os.environ:
        pytest.fail(
            f"{request.node.name} uses the fixture `comm`: mark it @pytest.mark.mpi(ranks=[...])", pytrace=False
        )
    from mpi4py import MPI

    private = MPI.COMM_WORLD.Dup()
    yield private
    private.Free()


@pytest.fixture
def shared_tmp_path(comm, request):
    """A temporary directory, empty at first, the same on every rank of this test; tmp_path is each rank's own."""
    path = Path(os.environ[DIRECTORY]) / "shared" / re.sub(r"\W", "_", request.node.nodeid)
    if comm.Get_rank() == 0:
        path.mkdir(parents=True)
    comm.Barrier()
    return path


class Parent:
    """In the pytest that the user started: have the tests on ranks run by launched ranks."""

    def __init__(self):
        self.launch = None  # the running one

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not ranks_of(item) or is_skipped(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.run_on_ranks(item, nextitem) + self.tear_down(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def run_on_ranks(self, item, nextitem):
        """Run a test on the running launch if that waits for it, else on a new one; return its reports."""
        from parallel.launch.launcher import LaunchError
        from parallel.testing.launch import Launch
        from parallel.testing.report import failure

        try:
            if self.launch is None or self.launch.tests != [item.nodeid]:
                self.end_launch()
                self.launch = Launch(item)
            follows = nextitem and ranks_of(nextitem) and not is_skipped(nextitem) and self.launch.holds(nextitem)
            self.launch.send(nextitem if follows else None)
            reports = self.launch.reports(item)
        except LaunchError as error:
            return [failure(item, f"{error} Tests on ranks are left out with -m 'not mpi'.")]
        except BaseException:  # Ctrl-C
            self.end_launch()
            raise
        if not self.launch.tests or any(report.failed for report in reports):
            self.end_launch()
        return reports

    def tear_down(self, item, nextitem):
        """Tear down fixtures that tests without ranks have set up, and that no later test needs."""
        finish = lambda: item.session._setupstate.teardown_exact(nextitem)
        call = pytest.CallInfo.from_call(finish, "teardown", reraise=(KeyboardInterrupt, pytest.exit.Exception))
        return [pytest.TestReport.from_item_and_call(item, call)] if call.excinfo else []

    def pytest_sessionfinish(self):
        self.end_launch()

    def end_launch(self):
        if self.launch:
            self.launch.close()
        self.launch = None
