"""The pytest plugin that launches ranks (parallel/testing): every way a test on ranks can end, seen from outside.

Each test runs a pytest of its own on a small file and reads what it printed; none may leave a process behind.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import PATIENCE, leaving_nothing

pytestmark = pytest.mark.usefixtures("nothing_left")
HERE = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
HEAD = (
    "import ctypes, os, signal, subprocess, sys, threading, time, pytest, parallel.testing.launch\n"
    "from parallel.launch import launcher\n"
)


def start(directory, source, *options, **environment):
    """A running pytest on this source as directory/test_it.py."""
    (directory / "pytest.ini").write_text("[pytest]\nmpi_timeout = 20\n")
    (directory / "test_it.py").write_text(HEAD + textwrap.dedent(source))
    command = [sys.executable, "-m", "pytest", "-p", "parallel.testing.plugin", "-v"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        light = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(HERE), "TMPDIR": str(directory)}
        for name, value in (light | environment).items():
            patch.setenv(name, value)
        return subprocess.Popen(
            [*command, *options], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def run(directory, source, *options, **environment):
    """What that pytest printed."""
    with start(directory, source, *options, **environment) as process:
        return process.communicate(timeout=4 * PATIENCE)[0]  # ten launches, one after the other


def counts(printed):
    """{'passed': 3, ...} from the last line."""
    return {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", printed.splitlines()[-1].partition(" in ")[0])}


def test_passing_tests_their_names_order_and_fixtures(tmp_path):
    source = """
        @pytest.mark.mpi(ranks=[1, 2], more=[3])
        def test_sum(comm, ranks):
            assert comm.Get_size() == ranks and comm.allreduce(1) == ranks

        @pytest.mark.mpi(ranks=2)
        @pytest.mark.parametrize("letter", ["a", "b"])
        class TestClass:
            def test_directories(self, comm, letter, tmp_path, shared_tmp_path):
                assert len(set(comm.allgather(str(tmp_path)))) == 2
                assert len(set(comm.allgather(str(shared_tmp_path)))) == 1
                assert list(shared_tmp_path.iterdir()) == []
                comm.Barrier()
                (shared_tmp_path / f"{comm.Get_rank()}").touch()
                comm.Barrier()
                assert len(list(shared_tmp_path.iterdir())) == 2

        @pytest.mark.mpi(ranks=2)
        def test_no_fixture():
            from mpi4py import MPI
            assert MPI.COMM_WORLD.Get_size() == 2

        @pytest.mark.mpi(ranks=2)
        def test_skipped():
            pytest.skip("not here")

        @pytest.mark.mpi(ranks=2)
        @pytest.mark.xfail(strict=True)
        def test_known():
            assert False

        def test_without_ranks():
            assert "mpi4py" not in sys.modules
        """
    printed = run(tmp_path, source)
    assert counts(printed) == {"passed": 7, "skipped": 1, "xfailed": 1}, printed
    assert re.findall(r"::(.+?) (?:PASSED|SKIPPED|XFAIL)", printed) == [
        "test_without_ranks",
        "test_sum[1 rank]",
        "test_sum[2 ranks]",
        "TestClass::test_directories[2 ranks-a]",
        "TestClass::test_directories[2 ranks-b]",
        "test_no_fixture[2 ranks]",
        "test_skipped[2 ranks]",
        "test_known[2 ranks]",
        "test_sum[3 ranks]",
    ]
    printed = run(tmp_path, source, "--collect-only", "-m", "not exhaustive")
    assert "test_sum[2 ranks]" in printed and "test_sum[3 ranks]" not in printed


def test_tests_on_more_ranks_than_wanted_are_skipped_with_the_reason(tmp_path):
    source = """
        @pytest.mark.mpi(ranks=[1, 2, 3])
        def test_it(comm, ranks):
            pass

        def test_without_ranks():
            pass
    """
    printed = run(tmp_path, source, "--most-ranks", "1", "-rs")
    assert counts(printed) == {"passed": 2, "skipped": 2}, printed
    assert "test_it.py:4: needs 2 ranks" in printed and "test_it.py:4: needs 3 ranks" in printed, printed


@pytest.mark.exhaustive
def test_of_the_exhaustive_ones_the_code_draws_some_and_other_code_others(tmp_path):
    source = """
        @pytest.mark.parametrize("ordinary", range(5))
        def test_always(ordinary):
            pass

        @pytest.mark.exhaustive
        @pytest.mark.parametrize("size", range(100))
        def test_large(size):
            pass

        @pytest.mark.mpi(ranks=1, more=[2])
        def test_on_ranks(comm):
            pass
    """
    drawn = []
    for code in (1, 1, 2):
        (tmp_path / "conftest.py").write_text(f"import suite\nsuite.code = lambda: {code}\n")
        printed = run(tmp_path, source, "-p", "suite", "--collect-only", "-q", "--exhaustive", "3")
        assert "test_always[0]" in printed and "test_on_ranks[1 rank]" in printed
        drawn.append(set(re.findall(r"test_large\[\d+\]", printed)))
        assert 10 < len(drawn[-1]) < 60, printed
    assert drawn[0] == drawn[1] != drawn[2], "the same code draws the same, other code others"
    assert "given 0" in run(tmp_path, source, "-p", "suite", "--exhaustive", "0")
    assert (
        len(re.findall("test_large", run(tmp_path, source, "-p", "suite", "--collect-only", "-q", "--exhaustive", "1")))
        == 100
    )


@pytest.mark.exhaustive
def test_tests_share_a_launch_until_one_fails_and_last_failed_runs_that_one(tmp_path):
    source = """
        parallel.testing.launch.GRACE = 100

        @pytest.mark.mpi(ranks=2)
        @pytest.mark.parametrize("i", range(5))
        def test_parent(comm, i):
            with open("launches", "a") as log:
                log.write(f"{i} {os.getppid()}\\n")
            assert i != 2
    """
    (tmp_path / "test_other.py").write_text(
        HEAD
        + "@pytest.mark.mpi(ranks=2)\ndef test_other(comm):\n    open('launches', 'a').write(f'5 {os.getppid()}\\n')\n"
    )
    printed = run(tmp_path, source, "--junitxml=junit.xml")
    assert counts(printed) == {"passed": 5, "failed": 1}, printed
    assert "ranks 0, 1/2, call" in printed, "equal tracebacks are shown once"
    tests_by_mpiexec = {}
    for line in (tmp_path / "launches").read_text().splitlines():
        test, mpiexec = line.split()
        tests_by_mpiexec.setdefault(mpiexec, set()).add(int(test))
    assert sorted(map(sorted, tests_by_mpiexec.values())) == [[0, 1, 2], [3, 4, 5]], "those of a folder"

    suite = ElementTree.parse(tmp_path / "junit.xml").find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("6", "1", "0")
    assert suite.find("testcase/failure").get("message").startswith("ranks 0, 1/2: assert 2 != 2")

    again = run(tmp_path, source, "--last-failed", "-x")
    assert counts(again) == {"failed": 1} and "test_parent[2 ranks-2]" in again


@pytest.mark.exhaustive
def test_workers_share_tests_by_launches_and_files(tmp_path):
    source = """
        @pytest.mark.mpi(ranks=2)
        @pytest.mark.parametrize("i", range(3))
        def test_on_ranks(comm, i):
            with open("launches", "a") as log:
                log.write(f"{os.getppid()}\\n")

        @pytest.mark.parametrize("i", range(3))
        def test_alone(i):
            with open("workers", "a") as log:
                log.write(f"{os.getpid()}\\n")
    """
    (tmp_path / "test_other.py").write_text(HEAD + textwrap.dedent(source))
    printed = run(tmp_path, source, "-p", "xdist", "-p", "suite", "-n", "2")
    assert counts(printed) == {"passed": 12}, printed
    launches, workers = ((tmp_path / name).read_text().split() for name in ("launches", "workers"))
    assert len(launches) == 12 and len(set(launches)) == 1, "one for the folder"
    assert sorted(workers.count(worker) for worker in set(workers)) in ([3, 3], [6])


@pytest.mark.exhaustive
def test_what_compares_with_pytorch_shares_a_worker(tmp_path):
    source = """
        import pytest

        @pytest.mark.parametrize("i", range(3))
        def test_compares(i, worker_id):
            with open("workers", "a") as log:
                log.write(worker_id + " ")

        def test_needs_it():
            pytest.importorskip("torch.none")
    """
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(textwrap.dedent(source))
    printed = run(tmp_path, "def test_other(): pass", "-p", "xdist", "-p", "suite", "-n", "2")
    assert counts(printed) == {"passed": 10, "skipped": 3}, printed
    assert len(set((tmp_path / "workers").read_text().split())) == 1


@pytest.mark.exhaustive
def test_what_waits_for_a_cluster_is_begun_first(tmp_path):
    many = "import pytest\n\n@pytest.mark.parametrize('i', range(9))\ndef test_{}(i): {!r}\n"
    (tmp_path / "test_a.py").write_text(many.format("program", "subprocess"))
    (tmp_path / "test_b.py").write_text("def test_cluster(): 'import slurmlab, subprocess'\n")
    printed = run(tmp_path, "def test_other(): pass", "-p", "xdist", "-p", "suite", "-n", "1")
    assert counts(printed) == {"passed": 11}, printed
    assert re.findall(r"PASSED \S+::test_([a-z]+)", printed) == ["cluster", *["program"] * 9, "other"]


FAILURES = """
    @pytest.fixture
    def broken(comm):
        assert comm.Get_rank() == 0, "no set-up here"
        yield
        comm.Barrier()

    @pytest.mark.mpi(ranks=3)
    def test_one_rank_fails(comm):
        print("said by", comm.Get_rank())
        assert comm.Get_rank() != 1
        comm.Barrier()  # the others wait here

    @pytest.mark.mpi(ranks=2)
    def test_set_up(comm, broken):
        comm.Barrier()

    @pytest.mark.mpi(ranks=2, timeout=1)
    def test_hang(comm):
        if comm.Get_rank() == 0:
            comm.recv(source=1)  # never sent
        else:
            time.sleep(1000)

    @pytest.mark.mpi(ranks=2)
    def test_killed(comm):
        if comm.Get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.Barrier()  # of the survivor

    @pytest.mark.mpi(ranks=2)
    def test_crash(comm):
        if comm.Get_rank() == 1:
            ctypes.string_at(0)  # crash
        comm.Barrier()

    @pytest.mark.mpi(ranks=2)
    def test_exit(comm):
        if comm.Get_rank() == 1:
            sys.exit(0)
        comm.Barrier()  # left alone

    @pytest.mark.mpi(ranks=2)
    def test_os_exit(comm):
        if comm.Get_rank() == 1:
            os._exit(3)
        comm.Barrier()  # for nobody

    @pytest.mark.mpi(ranks=2)
    def test_disagree(comm):
        if comm.Get_rank() == 1:
            pytest.skip("only here")

    @pytest.mark.mpi(ranks=2)
    def test_fine(comm):
        pass

"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Test name -> its part of the report, of one run of FAILURES; "" -> the part before, "printed" -> all."""
    with leaving_nothing():
        printed = run(tmp_path_factory.mktemp("failures"), FAILURES, "--durations=0", "-vv")
    head, *parts = re.split(r"^_+ (?:ERROR at \w+ of )?(test_\w+)\[\d ranks?\] _+$", printed, flags=re.MULTILINE)
    return {"": head, **dict(zip(parts[::2], parts[1::2], strict=True)), "printed": printed}


def line_number(marker):
    """Line of test_it.py, in FAILURES, that contains this text."""
    return next(i for i, line in enumerate((HEAD + FAILURES).splitlines(), 1) if marker in line)


def test_failures_are_counted_and_do_not_disturb_the_next_test(failures):
    assert counts(failures["printed"]) == {"failed": 7, "passed": 1, "error": 1}, failures["printed"]
    assert "test_fine[2 ranks] PASSED" in failures[""]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell")
def test_waiting_for_a_core_does_not_count(tmp_path):
    source = """
        @pytest.mark.mpi(ranks=1, timeout=3)  # waiting for a disk counts
        def test_in_a_crowd(comm):
            cores, (gate, key) = os.sched_getaffinity(0), os.pipe()
            os.sched_setaffinity(0, {min(cores)})
            wait = ["sh", "-c", "read line; while :; do :; done"]
            crowd = [subprocess.Popen(wait, stdin=gate) for _ in range(24)]
            os.close(key)  # now they begin, all on this core
            start = time.process_time()
            while time.process_time() < start + 0.16:  # four seconds, of which it has the core a twenty-fifth
                pass
            for process in crowd:
                process.kill()
                process.wait()
            os.close(gate)
            os.sched_setaffinity(0, cores)
    """
    printed = run(tmp_path, source, "--durations=0", "-vv")
    assert "test_in_a_crowd[1 rank] PASSED" in printed
    assert float(re.search(r"([\d.]+)s call .*test_in_a_crowd", printed)[1]) > 3


def test_a_failing_rank_shows_its_traceback_and_output_and_where_the_others_waited(failures):
    part = failures["test_one_rank_fails"]
    assert "rank 1/3, call" in part and ">       assert comm.Get_rank() != 1" in part
    assert re.search(r"Captured stdout call, rank 1/3 -+\nsaid by 1", part)
    assert f"ranks 0, 2/3 were in the test, at test_it.py:{line_number('the others wait here')}\n" in part
    assert "rank 1/3: assert 1 != 1" in failures["printed"].partition("short test summary")[2]


def test_a_rank_that_fails_in_a_fixture_is_an_error_at_set_up(failures):
    assert "ERROR at setup of test_set_up[2 ranks]" in failures["printed"]
    assert "rank 1/2, setup" in failures["test_set_up"] and "no set-up here" in failures["test_set_up"]


def test_a_hang_names_every_rank_and_line(failures):
    part = failures["test_hang"]
    assert "no end within 1 s" in part
    assert f"rank 0/2 was in the test, at test_it.py:{line_number('never sent')}" in part
    assert "comm.recv(source=1)  # never sent" in part
    assert f"rank 1/2 was in the test, at test_it.py:{line_number('time.sleep(1000)')}" in part


def test_a_killed_rank_is_told_from_its_survivor(failures):
    part = failures["test_killed"]
    assert "rank 1/2 died in the test without a word" in part and "signal 9" in part
    if "prterun" in part:  # MPICH's mpiexec kills the others at once, so they cannot say where they were
        assert f"rank 0/2 was in the test, at test_it.py:{line_number('of the survivor')}" in part


def test_a_crash_says_where(failures):
    part = failures["test_crash"]
    assert "rank 1/2 crashed (Segmentation fault) in the test" in part
    assert f"test_it.py:{line_number('# crash')} in test_crash" in part


def test_an_exit_is_a_failure(failures):
    assert "SystemExit: 0" in failures["test_exit"]
    assert f"rank 0/2 was in the test, at test_it.py:{line_number('left alone')}" in failures["test_exit"]
    assert "rank 1/2 died in the test without a word" in failures["test_os_exit"]


def test_ranks_must_agree_about_the_outcome(failures):
    assert "disagree about the outcome: rank 0 passed, rank 1 skipped" in failures["test_disagree"]


@pytest.mark.exhaustive
def test_a_rank_that_does_not_end_fails_the_last_test(tmp_path):
    source = """
        parallel.testing.launch.FINALIZE = 1

        @pytest.mark.mpi(ranks=1)
        def test_stays(comm):
            threading.Thread(target=lambda: time.sleep(1000)).start()
    """
    printed = run(tmp_path, source)
    assert counts(printed) == {"failed": 1} and "passed, but then the ranks did not end within 1 s" in printed, printed


@pytest.mark.exhaustive
def test_what_only_the_ranks_cannot_import_is_shown(tmp_path):
    printed = run(
        tmp_path,
        """
        if launcher.inside():
            import missing_module

        @pytest.mark.mpi(ranks=2)
        def test_it(comm):
            pass
        """,
    )
    assert counts(printed) == {"failed": 1} and "No module named 'missing_module'" in printed, printed
    assert re.search(r"^ranks? [01](, 1)?/2 could not import the tests$", printed, re.MULTILINE), printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_ranks_end_with_their_pytest(tmp_path, number):
    source = """
        @pytest.mark.mpi(ranks=2)
        def test_it(comm):
            comm.Barrier()
            open(f"ready{comm.Get_rank()}", "w").close()
            if comm.Get_rank() == 0:
                comm.recv(source=1)
            time.sleep(1000)
    """
    with start(tmp_path, source) as process:
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) != 0
    left = list(tmp_path.glob("ringprop-ranks-*"))
    assert bool(left) == (number != signal.SIGINT), "who is killed leaves a directory, which the next one removes"
    run(tmp_path, "@pytest.mark.mpi(ranks=1)\ndef test_it(comm): pass")
    assert not list(tmp_path.glob("*ringprop-ranks-*"))


def test_mistakes_are_explained(tmp_path):
    assert "given @pytest.mark.mpi(min_size=2)." in run(
        tmp_path, "@pytest.mark.mpi(min_size=2)\ndef test_it(comm): pass"
    )
    assert "test_it uses the fixture `comm`: mark it @pytest.mark.mpi(" in run(tmp_path, "def test_it(comm): pass")
    marked = "@pytest.mark.mpi(ranks=2)\ndef test_it(comm): pass"
    assert "start pytest without mpiexec" in run(tmp_path, marked, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    without_mpi = """
        def nothing():
            raise launcher.LaunchError("no mpiexec here")
        launcher.find_mpiexec = nothing

        @pytest.mark.mpi(ranks=2)
        def test_it(comm):
            pass
    """
    printed = run(tmp_path, without_mpi)
    assert counts(printed) == {"failed": 1} and "no mpiexec here" in printed


def test_a_project_that_does_not_use_it_imports_next_to_nothing(tmp_path):
    """Named by entry point, by conftest.py and by -p it is loaded once."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["parallel.testing.plugin"]\n')
    (tmp_path / "test_plain.py").write_text("""
import sys

def test_plain(request):
    own = sorted(m for m in sys.modules if m.split(".")[0] in ("parallel", "collectives", "nn", "numpy", "mpi4py"))
    assert own == ["parallel", "parallel.testing", "parallel.testing.mark", "parallel.testing.plugin"]
    plugins = [getattr(plugin, "__name__", "") for plugin in request.config.pluginmanager.get_plugins()]
    assert plugins.count("parallel.testing.plugin") == plugins.count("pytest_ringprop") == 1
""")
    printed = run(tmp_path, "", "-p", "pytest_ringprop", "-W", "error", "test_plain.py")
    assert counts(printed) == {"passed": 1}, printed


def test_a_project_with_a_package_of_the_same_name_is_tested_as_ever(tmp_path):
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": HERE[0]}
    for name, reason in ("nn.py", "nn.py hides ringprop's nn"), ("parallel.py", "'parallel' is not a package"):
        place = tmp_path / name.removesuffix(".py")
        place.mkdir()
        (place / name).write_text("")
        (place / "test_it.py").write_text("def test_it(): pass\n")
        command = [sys.executable, "-m", "pytest", "-p", "pytest_ringprop"]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert reason in done.stdout and counts(done.stdout) == {"passed": 1}, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_the_page_on_testing_shows_what_happens(tmp_path):
    page = (Path(HERE[0]) / "docs" / "howto" / "testing.md").read_text()
    for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(f"# {name}\n{text}")
    printed = run(tmp_path, "")
    assert counts(printed) == {"passed": 8, "failed": 3}, printed
    shown, printed = (re.sub("at 0x[0-9a-f]+", "at", text) for text in (page, printed))
    for block in re.findall(r"^```text\n(_.*?)^```$", shown, re.DOTALL | re.MULTILINE):
        for line in filter(None, block.splitlines()):
            line = re.sub("^_+|_+$|^ +test_failures", "", line)
            if "rank 0/2 was" not in line and ":26 in" not in line:  # MPICH's mpiexec kills the survivor at once
                assert line in printed, f"{line}\n{printed}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("dist", ["load", "loadfile", "loadgroup", "worksteal"])
def test_every_distribution_of_xdist_has_the_same_results(tmp_path, dist):
    source = """
        @pytest.mark.mpi(ranks=2)
        @pytest.mark.xdist_group("one")
        @pytest.mark.parametrize("i", range(4))
        def test_on_ranks(comm, i):
            assert comm.allreduce(i) == 2 * i
            assert (comm.rank, i) != (1, 2)

        @pytest.mark.mpi(ranks=1)
        def test_on_one(comm):
            pass

        @pytest.mark.parametrize("i", range(4))
        def test_alone(i):
            pass
    """
    (tmp_path / "test_other.py").write_text(HEAD + textwrap.dedent(source))
    printed = run(tmp_path, source, "-p", "xdist", "-n", "2", "--dist", dist)
    assert counts(printed) == {"passed": 16, "failed": 2}, printed
    assert re.search(r"FAILED .*- rank 1/2: assert", printed.partition("short test summary")[2]), printed


@pytest.mark.exhaustive
def test_ranks_have_the_options_of_conftest_and_the_plugins_that_the_ini_file_names(tmp_path):
    (tmp_path / "conftest.py").write_text("""
def pytest_addoption(parser):
    parser.addoption("--flavour", default="plain")
""")
    (tmp_path / "mocking.py").write_text("""
import pytest

@pytest.fixture
def mocked():
    return 7
""")
    source = """
        @pytest.mark.mpi(ranks=2)
        def test_it(comm, request, mocked):
            flavours = comm.allgather(request.config.getoption("flavour"))
            assert (flavours, mocked) == (["mint"] * 2, 7)

        @pytest.mark.mpi(ranks=2)
        def test_long(comm):
            local = comm.Get_size()
            assert list(range(100)) == list(range(99)) + [0]

        @pytest.mark.mpi(ranks=2)
        @pytest.mark.skip(reason="needs no ranks")
        def test_skipped(comm):
            pass
    """
    options = ("-p", "mocking", "-o", "mpi_plugins=mocking", "--flavour", "mint", "--showlocals", "-vv")
    printed = run(tmp_path, source, *options)
    assert counts(printed) == {"passed": 1, "failed": 1, "skipped": 1}, printed
    assert re.search("^local += 2$", printed, re.MULTILINE), "--showlocals"
    assert "...Full output truncated" not in printed, "-vv"


@pytest.mark.mpi(ranks=1)
def test_the_packages_are_the_repository_s():
    import collectives
    import nn
    import parallel

    for package in collectives, nn, parallel:  # not tests/nn and the like, which are on the path too
        assert Path(package.__file__).parents[1] == Path(HERE[0])


def test_the_packages_are_found_from_anywhere(tmp_path):
    this = f"{__file__}::{test_the_packages_are_the_repository_s.__name__}"
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", this]
    light = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=light, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout
