"""The notebook's %%mpi: values go in and out, errors name their rank, and no cell leaves a process behind."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import longer

from parallel.launch import notebook, notebook_rank
from parallel.launch.notebook_output import Output

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
    assert run("from math import sqrt as root\nasync def later():\n    pass\n") is None
    error = run(
        "%%mpi -n 2 --with twice,Box,np,scale,F,root,later -o x,told,half\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "rank = comm.Get_rank()\n"
        "assert root(4) == 2 and callable(later)\n"
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
    assert sorted(printed) == sorted(f"[rank {r}] line {i} of rank {r}" for i in range(100) for r in range(2))


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
    monkeypatch.setattr("parallel.launch.notebook_session.START", 0.0)
    error = run("%%mpi -n 2\nimport time\ntime.sleep(1000)")
    assert str(error) == "the ranks did not begin within 0 s"


def test_a_killed_rank(run, capfd):
    error = run("%%mpi -n 2\nimport os, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.rank or os.kill(os.getpid(), 9)")
    assert str(error).startswith("the ranks ended") and "signal 9" in capfd.readouterr().out


def test_interrupting_the_kernel_ends_the_ranks_and_the_session(run, tmp_path, capfd):
    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    cell = f"import time\nopen({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(1000)"
    assert isinstance(run(f"%%mpi --session i -n 2\n{cell}"), KeyboardInterrupt)
    assert "interrupted: the session i has ended" in capfd.readouterr().out and not notebook.sessions


def test_the_last_value_and_figures_are_shown(run, capfd, monkeypatch):
    outputs = []
    monkeypatch.setattr(
        notebook, "Output", lambda *given, **named: outputs.append(Output(*given, **named)) or outputs[-1]
    )
    text = (
        "%%mpi -n 2\nimport os, matplotlib.pyplot as plt\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        "plt.plot([1, rank]); plt.show()\nos.write(1, b'raw\\n')\nif rank: print('<b>')\nrank * 10"
    )
    assert run(text) is None
    shown = "".join(capfd.readouterr())
    assert "[rank 0] = 0 1 figures" in shown and "[rank 1] = 10 1 figures" in shown and "interactive" not in shown
    output = outputs[0]
    assert output.text == ["raw\n", "raw\n<b>\n"] and output.values == ["0", "10"]
    assert all(png[:4] == b"\x89PNG" for each in output.figures for png in each)
    page = output._repr_html_()
    assert page.count("<img ") == 2 and "&lt;b&gt;" in page and page.index("rank 0<") < page.index("rank 1<")
    assert str(output).splitlines() == [
        "rank 0" + " " * 8 + "rank 1", "raw" + " " * 11 + "raw", "0" + " " * 13 + "<b>", "(1 figures)   10",
        " " * 14 + "(1 figures)",
    ]  # fmt: skip
    assert run("%%mpi -n 1\n2 + 2;") is None and "=" not in capfd.readouterr().out, "a semicolon: not shown"


@pytest.mark.parametrize(
    "cell, value",
    [
        ("5", 5),
        ("5;", None),
        ("'é'; # why", None),
        ("5  # why;", 5),
        ("5\n# why;", 5),
        ("(5,\n)  ;\n\n", None),
        ("x=5", None),
    ],
)
def test_the_last_value_unless_a_semicolon_is_behind_it(cell, value):
    assert notebook_rank.evaluate(cell, "cell", {}) == value


def test_output_is_shown_as_a_terminal_would_and_what_is_left_out_is_said(tmp_path):
    output = Output(1, live=True)
    output.show = lambda: None
    (tmp_path / "0.out").write_bytes(b"10%\r\x1b[3")
    output.read(tmp_path)
    with open(tmp_path / "0.out", "ab") as file:
        file.write(b"1m100%\x1b[0m\nend\r\n" + b"".join(b"line %d\n" % k for k in range(5000)))
    output.read(tmp_path)
    lines = output.text[0].splitlines()
    assert lines[0] == "[... what it printed before is left out]" and lines[-1] == "line 4999"
    assert lines[1:] == [f"line {k}" for k in range(5001 - len(lines), 5000)] and len(output.text[0]) < 20_100
    with open(tmp_path / "0.out", "ab") as file:
        file.write(b"x" * 50_000 + b"\n")
    (tmp_path / "0.value").write_text("7" * 50_000)
    output.read(tmp_path, end=True)
    assert output.text[0].endswith("x" * 19_999 + "\n") and output.text[0].startswith("[...")
    assert output.values[0] == "7" * 20_000 + " ... (50,000 characters)"
    output.say("mpiexec: no\n")
    output.text, output.values = ["a\n"], [""]
    assert repr(output) == "rank 0\na\nmpiexec: no"
    short = Output(1, live=True)
    short.show = lambda: None
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "0.out").write_bytes(b"10%\r\x1b[31m20%\x1b[0m\n\r\n")
    short.read(tmp_path / "short", end=True)
    assert short.text == ["20%\n\r\n"]


def test_in_a_kernel_the_page_grows_while_ranks_print(monkeypatch, tmp_path):
    pages = []

    class Handle:
        def update(self, output):
            pages.append(output._repr_html_())

    monkeypatch.setattr(
        "IPython.display.display", lambda output, display_id: pages.append(output._repr_html_()) or Handle()
    )
    monkeypatch.setattr("parallel.launch.notebook_output.OFTEN", 0.0)
    output = Output(2, live=True)
    output.read(tmp_path)
    assert not pages
    (tmp_path / "1.out").write_text("one\ntw")
    output.read(tmp_path)
    assert "one\ntw" in pages[-1]
    (tmp_path / "0.out").write_bytes(b"caf\xc3")
    output.read(tmp_path)
    with open(tmp_path / "0.out", "ab") as file:
        file.write(b"\xa9")
    (tmp_path / "0.value").write_text("5")
    output.read(tmp_path, end=True)
    assert "café" in pages[-1] and ">5<" in pages[-1] and len(pages) == 3


def test_variables_stay_in_a_session(ipython, run, capfd):
    try:
        assert run("%%mpi --session s -n 2\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\nx = comm.rank + 1") is None
        assert (
            run("%%mpi --session s -o total,where\ntotal = comm.allreduce(x)\nimport os; where = os.getpid()") is None
        )
        assert ipython.user_ns["total"] == [3, 3]
        before = ipython.user_ns["where"]
        capfd.readouterr()
        assert run("%mpi") is None and capfd.readouterr().out == "sessions: s (2 ranks, 2 cells)\n"
        error = run("%%mpi --session s\nif comm.rank: wrong")
        assert "rank 1 of 2: Traceback" in str(error) and "ended" not in str(error), "nobody waits: it goes on"
        assert run("def f():\n    return 1 / 0") is None
        assert run("%%mpi --session s -n 2 --with f -o where\nwhere = os.getpid()") is None
        assert ipython.user_ns["where"] == before, "the same processes"
        assert "the session s has 2 ranks" in told(run, "%%mpi --session s -n 3\n1", capfd)
        error = run("%%mpi --session s\nif comm.rank: f()\ncomm.Barrier()")
        assert "ZeroDivisionError" in str(error) and str(error).endswith("the session has ended")
        assert "rank 0 of 2 was at line 2 of the cell: comm.Barrier()" in str(error)
        assert run("%%mpi --session s -n 1 -o x\nx = 'x' in vars()") is None, "a new one"
        assert ipython.user_ns["x"] == [False]
    finally:
        run("%mpi --end s")
    assert not notebook.sessions
    assert "--end s: no such session" in told(run, "%mpi --end s", capfd)


def told(run, cell, capfd):
    """What is shown of a cell that is refused."""
    capfd.readouterr()
    assert run(cell) is not None
    return "".join(capfd.readouterr())


def test_a_slowed_rank_takes_longer(run, ipython):
    """Of what it works, in the same time, it does less; compared with the other rank in the same cell."""
    count = (
        "from mpi4py import MPI\nimport time\ncomm = MPI.COMM_WORLD\n"
        "comm.Barrier(); steps, ends = 0, time.monotonic() + {seconds}\n"
        "while time.monotonic() < ends:\n    time.sleep(0.001); steps += 1"
    )
    for seconds in longer(0.5):
        error = run("%%mpi -n 2 --slow 1:8 -o steps\n" + count.format(seconds=seconds))
        assert error is None
        steps = ipython.user_ns["steps"]
        if steps[0] > 2 * steps[1]:
            break
    assert steps[0] > 2 * steps[1]


def test_a_rank_that_is_killed_from_the_cell(run, capfd):
    error = run("%%mpi -n 2 --kill 1:0\nfrom mpi4py import MPI\nMPI.COMM_WORLD.recv()")
    assert str(error).startswith("the ranks ended")
    assert "signal 9" in capfd.readouterr().out


def test_it_is_documented(ipython):
    told = ipython.find_line_magic("mpi").__doc__
    for word in ("--session", "--slow", "--kill", "--with", "--end", "-o OUT", "side by side"):
        assert word in told
    assert ipython.find_cell_magic("mpi") is not None


@pytest.mark.parametrize(
    "line, message",
    [
        ("--slow 1", "--slow 1: expected RANK:NUMBER, such as 1:3"),
        ("--slow 2:3", "--slow 2:3: the ranks are 0 to 1"),
        ("--slow 1:0.5", "--slow 1:0.5: expected a factor of at least 1"),
        ("--slow 1:inf", "--slow 1:inf: expected a factor of at least 1"),
        ("--kill 0:-1", "--kill 0:-1: expected seconds of at least 0"),
        ("--kill 0:nan", "--kill 0:nan: expected seconds of at least 0"),
        ("-n 0", "-n 0: expected 1 to 64 ranks"),
        ("-n 100000", "-n 100000: expected 1 to 64 ranks"),
        ("-t 0", "-t 0: expected seconds above 0"),
        ("-t nan", "-t nan: expected seconds above 0"),
        ("-o 1x", "-o 1x: expected names separated by commas"),
        ("--with nowhere", "--with nowhere: the notebook has no such name"),
        ("--end work", "--end work: the line %mpi --end work does that; the cell has not run"),
        ("--with rounds", "--with rounds: Stage.rounds is defined within another function or a class"),
        ("--with added", "--with added: add.<locals>.added is defined within another function or a class"),
        ("--with thrice", "--with thrice: no cell defines it with `def` or `class`"),
        ("--with odd", "--with: `odd` cannot go between the notebook and the ranks: set is not"),
        ("--ranks two", "argument -n/--ranks: invalid int value"),
    ],
)
def test_mistakes_are_explained_before_any_rank_starts(run, line, message, capfd):
    run("odd = {1, 2}\nfrom collectives.puzzles import Stage\nrounds = Stage.rounds\nthrice = lambda x: 3 * x")
    run("def add(n):\n    def added(x):\n        return x + n\n    return added\nadded = add(2)")
    error = run(f"%%mpi {line}\nprint('started')")
    assert error is not None
    shown = "".join(capfd.readouterr())
    assert message in shown and "started" not in shown


def test_a_cell_that_is_refused_begins_no_session(run, capfd):
    assert "no such name" in told(run, "%%mpi --session s -n 2 --with nowhere\n1", capfd)
    assert not notebook.sessions


@pytest.mark.parametrize(
    "cell, message",
    [
        ("print('started')\nx = = 3", "line 2 of the cell, `x = = 3`: invalid syntax"),
        ("print('started')\nreturn 3", "line 2 of the cell, `return 3`: 'return' outside function"),
        ("!ls", "line 1 of the cell, `!ls`: invalid syntax; ranks run Python alone, without lines of !, % and ?"),
        ("x = 1\nx?", "line 2 of the cell, `x?`: invalid syntax; ranks run Python alone"),
        ("await x", "line 1 of the cell, `await x`: 'await' outside function; ranks have no event loop: asyncio.run("),
    ],
)
def test_a_cell_that_is_no_python_starts_no_rank(run, cell, message, capfd):
    error = run(f"%%mpi -n 2\n{cell}")
    shown = "".join(capfd.readouterr())
    assert error is not None and message in shown and "started" not in shown and "Traceback" not in shown


def test_what_cannot_be_brought_back(run):
    error = run("%%mpi -n 1 -o open_file\nopen_file = object()")
    assert "TypeError: `open_file` cannot go between the notebook and the ranks: object is not" in str(error)
    error = run("%%mpi -n 1 -o nothing\npass")
    assert "NameError: -o asks for nothing, which this rank has not set" in str(error)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.1,
        2 - 1j,
        "text",
        [1, [2.5, None]],
        (1, "a"),
        {"a": 1, 2: {"b": (3,)}},
        {"array": "a0"},
        {},
        [],
        (),
    ],
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
