"""The notebook's %%mpi: values go in and out, errors name their rank, and no cell leaves a process behind."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import longer

from parallel.launch import notebook_rank

interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def ipython(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shell = interactiveshell.InteractiveShell.instance()
        shell.history_manager.enabled = False
        shell.run_line_magic("load_ext", "parallel.launch.notebook")
        yield shell
        interactiveshell.InteractiveShell.clear_instance()


@pytest.fixture
def run(ipython):
    """run(cell) -> exception or None."""

    def run(text):
        result = ipython.run_cell(text, store_history=True)
        return result.error_before_exec or result.error_in_exec

    return run


def test_values_definitions_and_output(ipython, run, capfd):
    assert run("import numpy as np\nfrom fractions import Fraction as F\nscale = {'by': (2, np.float32(0.5))}") is None
    assert run("def twice(x):\n    return scale['by'][0] * x\n\n\nclass Box:\n    size = 3\n") is None
    error = run(
        "%%mpi -n 2 --with twice,Box,np,scale,F -o x,told,half\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "rank = comm.Get_rank()\n"
        "x = twice(np.full(Box.size, rank + F(1, 2).numerator, np.float32))\n"
        "told = comm.allgather({'rank': rank, 'box': type(comm.sendrecv(Box(), 1 - rank)).__name__})\n"
        "half = scale['by'][1]\n"
        "for i in range(100): print('line', i, 'of rank', rank)\n"
    )
    assert error is None
    x, told, half = (ipython.user_ns[name] for name in ("x", "told", "half"))
    assert [a.tolist() for a in x] == [[2, 2, 2], [4, 4, 4]] and x[0].dtype == np.float32
    assert told == 2 * [[{"rank": 0, "box": "Box"}, {"rank": 1, "box": "Box"}]]
    assert half == [0.5, 0.5] and type(half[0]) is np.float32
    printed = capfd.readouterr().out.splitlines()
    assert sorted(printed) == sorted(f"line {i} of rank {r}" for i in range(100) for r in range(2))


def test_an_error_names_the_rank_and_the_line_and_where_the_others_were(ipython, run, capfd):
    error = run(
        "%%mpi -n 3\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    1 / 0\nMPI.COMM_WORLD.Barrier()\n"
    )
    text = str(error)
    assert text.startswith("rank 1 of 3: Traceback") and "ZeroDivisionError: division by zero" in text
    assert "File the cell, line 3" in text and "1 / 0" in text
    for rank in 0, 2:
        assert f"rank {rank} of 3 was at line 4 of the cell: MPI.COMM_WORLD.Barrier()" in text
    shown = "".join(capfd.readouterr())
    assert "ZeroDivisionError" in shown and "prterun" not in shown and "_run" not in shown


def test_an_exit_of_one_rank_does_not_hang_the_others(run):
    error = run("%%mpi -n 2\nfrom mpi4py import MPI\nMPI.COMM_WORLD.rank or exit(0)\nMPI.COMM_WORLD.Barrier()")
    assert "rank 0 of 2: Traceback" in str(error) and "SystemExit: 0" in str(error)


def test_the_same_error_on_all_ranks_is_shown_once(run):
    error = run("%%mpi -n 2\nprint(missing)")
    assert str(error).startswith("rank 0, 1 of 2: Traceback") and str(error).count("NameError") == 1


def test_the_time_limit_tells_where_each_rank_was(run, tmp_path):
    limit = 0.75
    while len(list(tmp_path.iterdir())) < 2:  # a busy machine needs longer to start the ranks
        limit *= 2
        error = run(
            f"%%mpi -n 2 -t {limit}\n"
            f"import time, os; os.chdir({str(tmp_path)!r})\n"
            "from mpi4py import MPI\n"
            "if MPI.COMM_WORLD.rank == 0:\n"
            "    open('0', 'w').close(); MPI.COMM_WORLD.recv(source=1)\n"
            "open('1', 'w').close(); time.sleep(1000)\n"
        )
    assert str(error).splitlines() == [
        f"no end within {limit:g} s",
        "rank 0 of 2 was at line 4 of the cell: open('0', 'w').close(); MPI.COMM_WORLD.recv(source=1)",
        "rank 1 of 2 was at line 5 of the cell: open('1', 'w').close(); time.sleep(1000)",
    ]


def test_the_time_limit_counts_from_when_ranks_are_up(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for limit in longer(0.5):  # on a busy machine a meeting, too, may take longer than that
        (tmp_path / "sitecustomize.py").write_text(f"import time\ntime.sleep({limit + 0.2})\n")
        begin = time.monotonic()
        error = run(f"%%mpi -n 2 -t {limit}\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()")
        assert time.monotonic() > begin + limit, "control: they begin late"
        if error is None:
            break
    assert error is None


def test_ranks_that_do_not_begin(run, monkeypatch):
    monkeypatch.setattr("parallel.launch.notebook.START", 0.0)
    error = run("%%mpi -n 2\nimport time\ntime.sleep(1000)")
    assert str(error) == "the ranks did not begin within 0 s"


def test_a_killed_rank(run, capfd):
    error = run("%%mpi -n 2\nimport os, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.rank or os.kill(os.getpid(), 9)")
    assert str(error).startswith("the ranks ended") and "signal 9" in capfd.readouterr().out


def test_interrupting_the_kernel_ends_the_ranks(run, tmp_path):
    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    error = run(f"%%mpi -n 2\nimport time\nopen({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(1000)")
    assert isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize(
    "line, message",
    [
        ("--with nowhere", "--with nowhere: the notebook has no such name"),
        ("--with odd", "--with: `odd` cannot go between the notebook and the ranks: set is not"),
        ("--ranks two", "argument -n/--ranks: invalid int value"),
    ],
)
def test_mistakes_are_explained_before_any_rank_starts(run, line, message, capfd):
    run("odd = {1, 2}")
    error = run(f"%%mpi {line}\nprint('started')")
    assert error is not None
    shown = "".join(capfd.readouterr())
    assert message in shown and "started" not in shown


def test_what_cannot_be_brought_back(run):
    error = run("%%mpi -n 1 -o open_file\nopen_file = object()")
    assert "TypeError: `open_file` cannot go between the notebook and the ranks: object is not" in str(error)
    error = run("%%mpi -n 1 -o nothing\npass")
    assert "NameError: -o asks for nothing, which this rank has not set" in str(error)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -0.1, "text", [1, [2.5, None]], (1, "a"), {"a": 1, 2: {"b": (3,)}}, {"array": "a0"}, {}, [], ()],
    ids=repr,
)
def test_values_travel_unchanged(tmp_path, value):
    notebook_rank.save(tmp_path / "v", {"value": value, "other": 1})
    got = notebook_rank.load(tmp_path / "v")
    assert got == {"value": value, "other": 1} and type(got["value"]) is type(value)


def test_arrays_travel_unchanged_and_objects_do_not(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "nested": [np.float16(2), {"k": np.array([], np.int8)}]}
    notebook_rank.save(tmp_path / "v", arrays)
    got = notebook_rank.load(tmp_path / "v")
    np.testing.assert_array_equal(got["a"], arrays["a"])
    assert got["nested"][0] == 2 and got["nested"][0].dtype == np.float16
    assert got["nested"][1]["k"].dtype == np.int8 and got["nested"][1]["k"].shape == (0,)
    with pytest.raises(TypeError, match="`bad` cannot go"):
        notebook_rank.save(tmp_path / "v", {"bad": np.array([{}])})
