"""A wrong argument of any program is one line that names it, with exit status 2, before anything is computed."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE
from forks import run_program

from collectives.pricing.topology import named_topology
from parallel.command.arguments import new_directory, new_file, number, whole

SCRIPTS = Path(__file__).parents[2] / "scripts"
WRONG = [
    ("plan_collective.py workstation --ranks 0", "argument --ranks: expected a whole number"),
    ("plan_collective.py workstation --ranks 1e3", "argument --ranks: expected a whole number"),
    (
        "plan_collective.py workstation --ranks 99999999999",
        "expected a whole number from 1 to 65,536",
    ),
    ("plan_collective.py star:1", "at least 2 ranks, given 1"),
    ("plan_collective.py workstation --table /nowhere/x.json", "argument --table: there is no directory /nowhere for"),
    ("plan_collective.py workstation --json /tmp", "argument --json: expected the name of a file, given '/tmp'"),
    ("plan_collective.py workstation --json=", "argument --json: expected the name of a file, given ''"),
    ("plan_collective.py fat-tree:k=4 --pictures setup.cfg", "argument --pictures: "),
    ("plan_collective.py fat-tree:k=100000", "at most 131,072 hosts"),
    ("plan_collective.py", "the following arguments are required: NETWORK"),
    (
        "bench.py engine --json /nowhere/x.json",
        "there is no directory /nowhere for x.json: make it first",
    ),
    ("bench.py collectives --tune /nowhere/x.json", "argument --tune: there is no directory"),
    ("bench.py network --table /nowhere/x.json", "argument --table: there is no directory"),
    ("bench.py network --network /proc/x.json", "argument --network: nothing can be written into /proc"),
    ("estimate.py cnn --json /nowhere/x.json", "argument --json: there is no directory"),
    ("estimate.py cnn --measure --save-profile /nowhere/x.csv", "argument --save-profile: there is no directory"),
    ("estimate.py cnn --draw /proc/x.png", "argument --draw: nothing can be written into /proc"),
    ("estimate.py cnn --batch 0", "argument --batch: expected a whole number from 1 to"),
    ("estimate.py cnn --strategy local-sgd:x --ranks 2", "--strategy local-sgd:x: every must be a whole number"),
    ("estimate.py cnn --strategy ddp:5 --ranks 2", "--strategy ddp:5: ddp takes no keys"),
    ("predict.py x y --top 0", "argument --top: expected a whole number of at least 1, given '0'"),
    ("sample.py x --length -1", "argument --length: expected a whole number of at least 0, given '-1'"),
    ("sample.py x --temperature nan", "argument --temperature: expected a number of at least 0, given 'nan'"),
    ("sample.py x --top-k 0", "argument --top-k: expected a whole number of at least 1"),
    ("sample.py x --seed -1", "argument --seed: expected a whole number of at least 0"),
    ("doctor.py --ranks 0", "argument --ranks: expected a whole number of at least 1"),
    ("doctor.py --seconds 0", "argument --seconds: expected a number from 1 to 300"),
    ("doctor.py --json /nowhere/x.json", "argument --json: there is no directory /nowhere for"),
    ("report.py x --out=", "argument --out: expected the name of a file"),
    ("supervise.py --restarts x -- true --out y", "argument --restarts: expected a whole number of at least 0"),
    ("supervise.py --pause nan -- true --out y", "argument --pause: expected a number of at least 0"),
    ("workload.py cnn --classes 0", "argument --classes: expected a whole number from 1 to"),
    ("get_data.py mnist --timeout nan", "argument --timeout: expected a number of seconds above 0"),
    ("get_data.py mnist --mirror=", "argument --mirror: expected http://, https:// or file:///"),
    ("experiments/scaling.py --out setup.cfg", "argument --out: "),
    ("experiments/experts.py --seeds 0", "argument --seeds: expected a whole number of at least 1"),
    ("experiments/large_batch.py --seeds 0", "argument --seeds: expected a whole number of at least 1"),
    ("experiments/asynchronous.py --slow 0", "argument --slow: expected a number from 1 to"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_a_wrong_argument_is_one_line(arguments, words, monkeypatch):
    script, *rest = arguments.split()
    monkeypatch.chdir(SCRIPTS.parent)
    status, out, errors = run_program(SCRIPTS / script, *rest)
    assert status == 2 and not out, (status, out, errors)
    assert words in errors and errors.count("\n") == 1, errors


def test_a_program_in_a_fork_ends_as_in_a_process_of_its_own():
    """Control of the test above."""
    command = SCRIPTS / "workload.py", "cnn", "--classes", "0"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == run_program(*command)


@pytest.fixture
def bench(monkeypatch):
    """bench.py with one suite, which is interrupted after a row."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench

    def rows(quick, only, explain):
        from benchmarking import Row

        if not only:
            yield Row("a case", 1.0)
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "bench_engine", SimpleNamespace(rows=rows))
    return bench


def test_a_benchmark_that_is_interrupted_keeps_its_rows(bench, tmp_path, capsys):
    file = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["engine", "--json", str(file)])
    assert [row["case"] for row in json.loads(file.read_text())] == ["a case"]
    with pytest.raises(SystemExit, match="2"):
        bench.main(["engine", "--only", "zzz"])
    assert "argument --only: no case of engine has 'zzz' in its name" in capsys.readouterr().err


def test_the_kinds_of_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # messages are short where paths are
    here = Path()
    assert whole(0)("0") == 0 and whole()("12") == 12 and whole(-3)("-3") == -3
    assert number()("0.5") == 0.5 and number(1, 2)("2") == 2
    file = here / "file"
    assert new_file(str(file)) == str(file) and not file.exists()
    assert new_directory(str(file / "a" / "b")) and not file.exists()
    link = here / "link"
    link.symlink_to("nothing")
    with pytest.raises(argparse.ArgumentTypeError, match="link is a link to nothing"):
        new_directory(str(link / "run"))
    file.touch()
    assert new_file(str(file)) == str(file)
    for read, text in (
        *((whole(), text) for text in ("0", "", "x", "1.0", "--1", "9" * 5000)),
        *((number(), text) for text in ("-1", "inf", "nan", "", "x")),
        *((new_file, text) for text in ("", str(here), str(here / "no" / "x"), str(file / "x"))),
        *((new_directory, text) for text in ("", str(file), str(file / "below"), "/proc/x")),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=r"^.{1,200}$"):
            read(text)


@pytest.mark.parametrize(
    "text",
    [
        *("star:1000000000000", "backbone:1000000000000", "nodes:1000000,1000000", "fat-tree:k=100000"),
        *("torus:dims=99999x99999", "mesh:dims=99999x99999", "hypercube:d=1000000000", "dragonfly:999,999,999"),
    ],
)
def test_a_short_text_makes_no_topology_that_takes_all_memory(text):
    with pytest.raises(ValueError, match="at most 131,072 hosts"):
        named_topology(text)
