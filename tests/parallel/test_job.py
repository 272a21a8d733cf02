"""scripts/train.py as its users run it: from the shell, on one process and on ranks, with whatever goes wrong."""

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from calling import ROOT, call
from conftest import PATIENCE, longer

import nn
from parallel.command import main
from parallel.command.parsing import parse
from parallel.launch import launcher

DRAWN = ["--model", "mlp:64,16,10", "--limit", "100", "--epochs", "3", "--dtype", "float64", "--momentum", "0.9"]
SMALL = [*DRAWN, "--no-pictures"]  # they take most of the time of so short a run
RESUME = ["--no-pictures", "--resume"]
# Three epochs of 162 steps, to be stopped in the second: HELD waits there, so that no machine is too fast or too slow.
LONG = ["--model", "mlp:64,16,10", "--batch", "8", "--epochs", "3", "--checkpoint-steps", "100", "--lr", "0.01"]
LONG += ["--no-pictures"]
ENDLESS = [*LONG, "--epochs", str(10**9)]
HELD = f"""
import sys, time
from parallel.command import main

def then_hold(threads, asked=None):
    set_threads(threads)
    from nn.training import checkpoint_callback

    def hold(self, training, loss):
        on_step(self, training, loss)
        end = time.monotonic() + {2 * PATIENCE}
        if training.trainer.steps == 250 and training.trainer.is_writer:  # the other ranks wait for it in their sum
            while not self.termination.requested and time.monotonic() < end:
                time.sleep(0.01)

    on_step, checkpoint_callback.KeepCheckpoints.on_step = checkpoint_callback.KeepCheckpoints.on_step, hold

set_threads, main.set_threads = main.set_threads, then_hold  # only then may NumPy be imported
sys.exit(main.main())
"""


def command(*args: str) -> list[str]:
    return [sys.executable, "scripts/train.py", *args]


def train(*args, status=0, **options) -> str:
    """Run to the end, check the exit status, and return what it said."""
    done = subprocess.run(
        command(*map(str, args)), cwd=ROOT, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def train_here(*args, status=0) -> str:
    """As `train`, by a call in this process: for tests of the run and its files, not of the process."""
    ended, said = call(*args)
    assert ended == status, said
    return said


@pytest.fixture
def refused(capsys, monkeypatch):
    """A function: what the program says to options that it refuses before anything runs, in this process."""
    from parallel.command import main

    def said(*args) -> str:
        monkeypatch.setattr(main.signal, "signal", lambda *_: None)  # they are pytest's
        assert main.main([*map(str, args)]) == main.WRONG_OPTION
        return capsys.readouterr().err

    return said


def begin(*program) -> subprocess.Popen:
    """Start a program that does not end by itself."""
    return subprocess.Popen(
        [sys.executable, *map(str, program)], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def result(directory: Path) -> dict:
    return json.loads((directory / "result.json").read_text())


def parameters(directory: Path) -> np.ndarray:
    last = sorted((directory / "checkpoints").glob("step-*.npz"))[-1]
    with np.load(last, allow_pickle=False) as file:
        return np.concatenate([file[k].ravel() for k in sorted(file.files) if k.startswith("param/")])


def processes_of(directory: Path) -> list[int]:
    """Running processes that were told to work in `directory`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(directory) in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(directory, what it said) of a finished run on one process: to look at, and to go on from a copy."""
    out = tmp_path_factory.mktemp("small") / "run"
    return out, train(*DRAWN, "--out", out)


def test_a_run_directory_has_everything(small, refused):
    out, said = small
    assert "epoch 3/3" in said and "images/s" in said and str(out) in said
    assert {p.name for p in out.iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "result.json", "curves.png", "breakdown.png", "checkpoints",
        "network.npz",
    }  # fmt: skip
    left = nn.load(out / "network.npz")
    assert hashlib.sha256(left.flat_parameters).hexdigest() == result(out)["parameters_sha256"], (
        "of the epoch that was chosen"
    )
    assert left.about["data"] == "digits" and left.about["outputs"] == "logits" and left.about["scale"] == 1 / 16
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert {
        "step", "epoch", "loss", "lr", "validation_loss", "validation_accuracy", "images_per_second", "seconds",
        "breakdown",
    } == lines[0].keys()  # fmt: skip
    assert {"accuracy", "loss", "seconds", "images_per_second", "ranks", "parameters_sha256"} <= result(out).keys()
    assert json.loads((out / "config.json").read_text())["model"] == "mlp:64,16,10"
    assert {"ringprop", "commit", "numpy", "host", "cores", "threads", "blas"} <= json.loads(
        (out / "environment.json").read_text()
    ).keys()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    said = refused(*SMALL, "--out", out)
    assert "holds a run" in said or "already" in said


def test_training_on_is_advised_where_there_is_something_to_train_on(tmp_path):
    said = train_here("--model", "mlp", "--limit", "10", "--epochs", "0", "--no-pictures", "--out", tmp_path / "run")
    assert "what next:" in said and "# train on" not in said
    said = train_here("--model", "mlp", "--limit", "10", "--epochs", "1", "--no-pictures", "--out", tmp_path / "run")
    assert "the default network" in said and "the same network" not in said  # that line leaves --model out
    assert f"--resume {tmp_path}/run --epochs 11   # train on" in said


def test_ranks_that_mpiexec_starts_make_one_directory(tmp_path):
    from parallel.launch import launcher

    args = [ROOT / "scripts/train.py", "--model", "mlp", "--limit", "10", "--epochs", "1", "--no-pictures"]
    lines = []
    assert launcher.run(args, 2, timeout=PATIENCE, cwd=tmp_path, stdout=lines.append) == 0, "".join(lines)
    (made,) = (tmp_path / "runs").iterdir()
    assert result(made)["ranks"] == 2


def test_ranks_compute_what_one_process_does(tmp_path, small):
    """Two ranks that mpiexec starts from outside, and three that the program starts itself."""
    from parallel.launch import launcher

    mpiexec = launcher.find_mpiexec()
    args = [mpiexec, "-n", "2", sys.executable, "-m", "mpi4py", "scripts/train.py", *SMALL, "--out", tmp_path / "two"]
    env = launcher.settings(2, mpiexec) | os.environ
    done = subprocess.run(
        args, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "  mpirun -n 2 " in done.stdout
    assert f"python -m mpi4py scripts/train.py --resume {tmp_path / 'two'} --epochs 13" in done.stdout
    train(*SMALL, "--out", tmp_path / "three", "--ranks", "3", "--allreduce", "doubling")
    one = parameters(small[0])
    for name, ranks in (("two", 2), ("three", 3)):
        np.testing.assert_allclose(parameters(tmp_path / name), one, rtol=1e-10, atol=1e-13)
        assert result(tmp_path / name)["accuracy"] == result(small[0])["accuracy"]
        assert result(tmp_path / name)["ranks"] == ranks
        assert not list((tmp_path / name).glob("*.png"))


def test_the_first_rank_writes_for_tensorboard_and_a_resumed_run_adds_a_file(tmp_path):
    run, board = tmp_path / "run", tmp_path / "board"
    train_here(*SMALL, "--batch", "8", "--ranks", "2", "--out", run, "--tensorboard", board)
    (first,) = board.iterdir()
    assert b"epoch/validation_accuracy" in first.read_bytes() and b"step/lr" in first.read_bytes()
    train_here(*RESUME, run, "--epochs", "4")
    assert len(list(board.iterdir())) == 2
    train_here(*RESUME, run, "--epochs", "5", "--no-tensorboard")
    assert len(list(board.iterdir())) == 2


def test_digits_on_two_ranks_reach_97_percent(tmp_path):
    """What `make train` does, a quarter as long; the next one does it on more data."""
    train_here("--ranks", "2", "--epochs", "8", "--no-pictures", "--out", tmp_path / "run")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["command"].count("--out") == 1 and environment["ranks"] == 2
    assert result(tmp_path / "run")["accuracy"] >= 0.97


@pytest.mark.exhaustive
def test_the_classical_experiment(tmp_path):
    """Nielsen's network of 30 hidden sigmoid neurons: the first of the 30 epochs."""
    if not (Path(os.environ.get("RINGPROP_DATA", "")) / "mnist").is_dir():
        pytest.skip("needs mnist in $RINGPROP_DATA (scripts/get_data.py mnist)")
    options = (
        "--model mlp:784,30,10 --activation sigmoid --loss quadratic --optimizer sgd --lr 3.0 --batch 10 --data mnist "
        "--validation 10000"
    )
    said = train_here(*options.split(), "--ranks", "2", "--epochs", "1", "--no-pictures", "--out", tmp_path / "run")
    assert "mnist: 50,000 training, 10,000 validation and 10,000 test samples" in said
    assert result(tmp_path / "run")["accuracy"] >= 0.93


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of LONG, never interrupted, and its last parameters, on one process and on two ranks."""
    out = tmp_path_factory.mktemp("whole")
    train_here(*LONG, "--out", out / "1")
    train_here(*LONG, "--out", out / "2", "--ranks", "2")
    return {ranks: (result(out / str(ranks)), parameters(out / str(ranks))) for ranks in (1, 2)}


@pytest.mark.parametrize(
    ("ranks", "number", "status"),
    [
        (1, signal.SIGKILL, -signal.SIGKILL),
        (1, signal.SIGINT, 130),
        (1, signal.SIGTERM, 143),
        pytest.param(2, signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param(2, signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        (2, signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_stopped_and_resumed_is_bit_identical(tmp_path, whole, ranks, number, status):
    out = tmp_path / "run"
    ranked = ["--ranks", str(ranks)] if ranks > 1 else []
    manifest, held = out / "checkpoints" / "manifest.json", tmp_path / "held.py"
    held.write_text(HELD)
    program = begin(held, *LONG, "--out", out, *ranked)
    reached = lambda: manifest.exists() and "step-00000200" in manifest.read_text()
    wait_until(lambda: reached() or program.poll() is not None)
    program.send_signal(number)
    said, _ = program.communicate(timeout=PATIENCE)
    assert program.returncode == status, said
    if number != signal.SIGKILL:
        assert said.count(f"--resume {out}") == 2, "as it begins, and as it ends"
        assert "Traceback" not in said and "\0" not in said
        steps = re.findall(r"ended by SIGTERM after step (\d+), which is saved", said)
        assert [int(step) >= 200 for step in steps] == [True] * (number == signal.SIGTERM), said
        assert all(f"step-{int(step):08d}" in manifest.read_text() for step in steps)
    wait_until(lambda: not processes_of(out))
    assert not (out / "result.json").exists()
    assert not list(out.rglob("*.tmp")) or number == signal.SIGKILL
    said = train_here("--resume", out, *ranked)
    assert "continuing from" in said
    same, last = whole[ranks]
    assert result(out)["parameters_sha256"] == same["parameters_sha256"], "of the chosen epoch"
    assert np.array_equal(parameters(out), last), "of the last one"


def listens(pid: int) -> bool:
    """Whether a process has a handler of its own for Ctrl-C."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> signal.SIGINT - 1 & 1)


def test_what_a_rank_was_writing_when_another_one_ended_all_is_removed(tmp_path, monkeypatch):
    from parallel.command import main
    from parallel.command.parsing import parse

    def interrupted(options, inner, out):
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / ".step-00000003.npz.7.tmp").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run_ranks", interrupted)
    assert main.start_ranks(parse(["--ranks", "2", "--out", str(tmp_path)]), []) == 130
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("after", [0.0, 0.2, 0.5, 1.0])
def test_a_program_that_has_just_begun_ends_without_a_traceback(tmp_path, after):
    """Whatever it does just then: the moment differs with the machine, what is asked does not."""
    program = begin("scripts/train.py", *ENDLESS, "--out", tmp_path / "run", "--ranks", "2")
    end = time.monotonic() + 2
    while not listens(program.pid) and time.monotonic() < end:  # a moment, which this may be too slow to see
        pass
    wait_until(lambda: not listens(program.pid))  # Python has begun, and the program has
    time.sleep(after)
    program.send_signal(signal.SIGINT)
    said, _ = program.communicate(timeout=PATIENCE)
    assert program.returncode in (130, -signal.SIGINT) and "Traceback" not in said and "KeyboardInterrupt" not in said
    wait_until(lambda: not processes_of(tmp_path))


def test_pictures_that_cannot_be_drawn_lose_no_result(tmp_path):
    """All is trained and saved before; MPLBACKEND may be what another program has left."""
    environment = os.environ | {"MPLBACKEND": "nonsense"}
    said = train(*DRAWN, "--inspect", "--out", tmp_path / "run", env=environment)
    assert said.count("warning: some pictures are missing: ") == 2 and "test accuracy" in said
    assert result(tmp_path / "run")["epochs"] == 3 and (tmp_path / "run" / "network.npz").exists()


@pytest.mark.parametrize("options", [["--no-pictures"], ["--find-lr"]])
def test_a_library_that_is_missing_is_one_line(tmp_path, options):
    missing = {"--find-lr": "matplotlib"}.get(options[0], "threadpoolctl")
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('No module named {missing}', name={missing!r})")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = train(*DRAWN, *options, "--out", tmp_path / "run", status=1, env=environment)
    lines = [line for line in said.splitlines() if "has not all that the project needs" in line]
    assert len(lines) == 1 and f"(No module named {missing}): install it with pip" in lines[0]
    assert "Traceback" not in said


def test_a_current_directory_that_was_removed_is_told(tmp_path):
    place = tmp_path / "gone"
    for script in ("train.py", "report.py"):
        place.mkdir()
        words = [sys.executable, str(ROOT / "scripts" / script), "x"]
        call = f"import os; os.rmdir({str(place)!r}); os.execv({sys.executable!r}, {words})"
        done = subprocess.run([sys.executable, "-c", call], cwd=place, text=True, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done
        assert done.stderr.startswith("error: the current directory has been removed")


def test_a_python_without_the_project_is_told_what_to_do():
    done = subprocess.run(
        [sys.executable, "-I", "-S", "scripts/train.py"], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert re.match(r"error: .* has no module parallel: (use .*\.venv/bin/python|run `make train`)", done.stderr)


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "error: rank 1 was killed"), (signal.SIGSTOP, "rank 1 of 2 did not come")]
)
def test_a_rank_that_is_killed_or_stopped_ends_the_job(tmp_path, number, message):
    names = b"\0OMPI_COMM_WORLD_RANK=1\0", b"\0PMI_RANK=1\0"  # Open MPI, MPICH
    for limit in longer(2):  # too short for a busy machine, where ranks may start so far apart
        out = tmp_path / str(limit)
        program = begin("scripts/train.py", *ENDLESS, "--out", out, "--ranks", "2", "--watch", limit)
        wait_until(lambda: (out / "metrics.jsonl").exists() or program.poll() is not None)  # noqa: B023
        for process in processes_of(out):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                environment = Path(f"/proc/{process}/environ").read_bytes()
                if any(name in environment for name in names):
                    os.kill(process, number)
        said, _ = program.communicate(timeout=PATIENCE)
        wait_until(lambda: not processes_of(out))  # noqa: B023
        assert program.returncode != 0, said
        if message in said.lower():
            break
    assert message in said.lower(), said


STOPPED = """
import atexit, os, signal, sys
from parallel.command import main
from parallel.launch import launcher
from parallel.command import training_run

def stop():
    if launcher.rank_from_environment() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

def first(*arguments):
    stop()
    return prepare(*arguments)

def last(*arguments):
    train(*arguments)
    if when == "at the end":
        stop()
    else:
        atexit.register(stop)  # MPI has ended by then

if sys.argv[1] == "as memory is made":
    from collectives.failures import deadline
    from collectives.node_memory import window
    Flags, deadline.MARGIN = window.Flags, 1.0
prepare, train = training_run.prepare, training_run.train
when = sys.argv.pop(1)
if when == "as MPI starts":
    stop()
elif when == "in start-up":
    training_run.prepare = first
elif when == "as memory is made":
    window.Flags = lambda *arguments: stop() or Flags(*arguments)
else:
    training_run.train = last
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("in start-up", "rank 0 of 2: start-up has waited {} s for rank 1: stopped, or busy"),
        ("as MPI starts", "in start_mpi"),  # where MPI itself waits for all ranks
        ("as memory is made", "to make the memory that they share: is a rank stopped?"),  # likewise
        ("at the end", "in end_mpi"),  # likewise
        ("when MPI has ended", "process rank 1"),  # where mpiexec waits for each process
    ],
)
def test_a_rank_that_is_stopped_outside_training_ends_the_job(tmp_path, when, message):
    program = tmp_path / "program.py"
    program.write_text(STOPPED)
    for limit in longer(2):
        lines, args = [], [program, when, *SMALL, "--out", str(tmp_path / str(limit)), "--watch", str(limit)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        status = launcher.run(args, 2, timeout=PATIENCE, stdout=lines.append, env=env)
        said = "".join(lines)
        assert status in (1, 86, 128 + signal.SIGKILL), said
        if message.format(limit) in said:
            break
    assert message.format(limit) in said, said


DRAWS_LONG = """
import sys, time
from parallel.command import main, training_run

training_run.write_curves = lambda *_: time.sleep(2.5 * float(sys.argv[-1]))
sys.exit(main.main())
"""


def test_ranks_that_wait_for_pictures_do_not_end_the_job(tmp_path):
    """--watch is about ranks that stall; the first one works."""
    program = tmp_path / "program.py"
    program.write_text(DRAWS_LONG)
    for limit in longer(2):
        lines, args = [], [program, *DRAWN, "--out", str(tmp_path / str(limit)), "--watch", str(limit)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        status = launcher.run(args, 2, timeout=PATIENCE + 3 * limit, stdout=lines.append, env=env)
        if not status:
            break
    assert status == 0, "".join(lines)


# Writes down when the limit of MPI's start ends, and when what comes after that is loaded.
LIMITED = """
import faulthandler, sys
from parallel.command import main

class Told:
    def find_spec(name, *more):
        if name in ("mpi4py.MPI", "numpy"):
            print(name)

sys.meta_path.insert(0, Told)
faulthandler.dump_traceback_later = lambda seconds, exit: print("limit", seconds)
faulthandler.cancel_dump_traceback_later = lambda: print("end")
main.start_mpi(3.0)
"""


def test_the_limit_is_of_mpi_and_not_of_what_a_busy_machine_loads_after_it():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.split("\n")[:3] == ["limit 3.0", "mpi4py.MPI", "end"]


# Ranks, or one process, that are asked to end when all is written, as they part.
ASKED_LAST = """
import os, signal, sys
from nn import Trainer
from parallel.command import main
from parallel.trainer import DistributedTrainer

def asked_first(close):
    def asked(self):
        os.kill(os.getpid(), signal.SIGTERM)
        close(self)
    return asked

Trainer.close, DistributedTrainer.close = asked_first(Trainer.close), asked_first(DistributedTrainer.close)
sys.exit(main.main())
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_is_asked_to_end_as_ranks_part_has_written_all(tmp_path, ranks):
    program, out = tmp_path / "program.py", tmp_path / "run"
    program.write_text(ASKED_LAST)
    process = begin(program, *SMALL, "--epochs", "1", "--ranks", str(ranks), "--watch", "60", "--out", str(out))
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in said and "ended" not in said, said
    assert result(out)["epochs"] == 1


# Ranks that train nothing, and are asked to end as MPI ends.
ASKED_LATE = """
import os, signal, sys
from parallel.command import main, training_run

def train(*_):
    from mpi4py import MPI

    def finalize():
        end()
        os.kill(os.getpid(), signal.SIGTERM)

    end, MPI.Finalize = MPI.Finalize, finalize

training_run.train = train
sys.exit(main.main())
"""


def test_who_is_asked_to_end_when_all_is_written_ends_as_it_would(tmp_path):
    program, lines = tmp_path / "program.py", []
    program.write_text(ASKED_LATE)
    args, env = [program, *SMALL, "--out", str(tmp_path / "run")], os.environ | {"PYTHONPATH": str(ROOT)}
    assert launcher.run(args, 2, timeout=PATIENCE, stdout=lines.append, env=env) == 0 and not lines, "".join(lines)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, small):
    out = shutil.copytree(small[0], tmp_path / "run")
    before = result(out)
    last = sorted((out / "checkpoints").glob("step-*.npz"))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    said = train(*RESUME, out, "--ranks", "2")
    assert said.count("DAMAGED") == 1 and last.name in said and "UserWarning" not in said
    assert result(out)["steps"] == before["steps"]
    np.testing.assert_allclose(parameters(out), parameters(small[0]), rtol=1e-10, atol=1e-13)
    for file in (out / "checkpoints").glob("step-*.npz"):
        file.write_bytes(b"")
    said = train("--resume", out, status=1)
    assert said.count(last.name) == 1 and "no usable checkpoint" in said, "once, not as a warning too"


def test_a_resumed_run_keeps_what_made_its_result(tmp_path, small, refused):
    out = shutil.copytree(small[0], tmp_path / "run")
    assert "that run has --seed 0, given 1" in refused("--resume", out, "--seed", "1")
    assert f"given --out {tmp_path}" in refused("--resume", out, "--out", tmp_path)
    before = (out / "config.json").read_text()
    (out / "config.json").write_text(json.dumps(json.loads(before) | {"lr": 0.7}))
    assert "config.json has --lr 0.7, but that run was made with 0.01: put that back" in refused("--resume", out)
    (out / "config.json").write_text(before)
    train_here(*RESUME, out, "--epochs", "4", "--ranks", "2", "--overlap", "poke")
    assert result(out)["epochs"] == 4
    said = train_here(*RESUME, out, "--strategy", "zero2", "--unit", "2")
    assert "one process (without effect below --ranks 2: --strategy zero2, --unit 2.0)" in said
    said = train_here(*RESUME, out, "--epochs", "5", "--ranks", "2", "--strategy", "zero1")
    assert "ZeRO1" in said and result(out)["epochs"] == 5


def test_a_full_disk_is_one_clear_message(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a file can grow no larger

    said = train(*SMALL, "--out", tmp_path / "run", status=1, preexec_fn=limit)
    assert "error: " in said and "cannot write" in said and "best.npz" in said and "Traceback" not in said
    assert not list((tmp_path / "run").rglob("*.npz")) and not list((tmp_path / "run").rglob("*.tmp"))


def test_the_figure_is_of_the_test_data_and_of_the_epoch_that_validation_chose(tmp_path):
    """A rate so high that the epochs differ: the best one is not the last, on one process and on two ranks."""
    import nn

    args = ["--model", "mlp:64,16,10", "--lr", "1", "--momentum", "0.9", "--epochs", "6", "--no-pictures"]
    data = nn.data.load("digits", validation=0.1, seed=0)
    for name, more in (("one", []), ("two", ["--ranks", "2"])):
        said = train_here(*args, *more, "--out", tmp_path / name)
        assert "digits: 1,293 training, 144 validation and 360 test samples" in said
        found, best = result(tmp_path / name), tmp_path / name / "checkpoints" / "best.npz"
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        scores = [line["validation_accuracy"] for line in lines]
        chosen = scores.index(max(scores))
        assert found["chosen_epoch"] == chosen + 1 < 6 and found["epochs"] == 6 and found["steps"] == lines[-1]["step"]
        assert found["validation_accuracy"] == scores[chosen]
        assert f"after epoch {chosen + 1}, the best of 6 on the validation data" in said
        trainer = nn.Trainer(nn.models.build("mlp:64,16,10", data.in_shape, 10), nn.CrossEntropyLoss(), nn.SGD(1, 0.9))
        trainer.load_state_dict(nn.Checkpoints(best.parent).load("best")[0])
        for split, accuracy in ((data.validation, scores[chosen]), (data.test, found["accuracy"])):
            assert nn.evaluate(trainer, nn.Loader(split, 500, shuffle=False))["accuracy"] == accuracy
        assert trainer.digest() == found["parameters_sha256"]
    said = train_here(*RESUME, tmp_path / "two", "--ranks", "2")
    assert result(tmp_path / "two")["parameters_sha256"] == found["parameters_sha256"], "a look changes nothing"


def test_without_validation_data_the_last_epoch_counts(tmp_path):
    args = ["--model", "mlp:64,16,10", "--lr", "1", "--momentum", "0.9", "--epochs", "3", "--validation", "0"]
    said = train_here(*args, "--out", tmp_path / "run")
    assert "digits: 1,437 training and 360 test samples; no validation data, so the last epoch counts" in said
    assert "test accuracy" in said and "after 3 epochs" in said
    assert result(tmp_path / "run")["chosen_epoch"] == 3
    assert not (tmp_path / "run" / "checkpoints" / "best.npz").exists()
    keys = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]).keys()
    assert not [key for key in keys if "accuracy" in key or "validation" in key]


def test_a_run_begun_without_validation_data_goes_on_without(tmp_path, refused):
    """Its config.json does not know the option: nothing is held out of what it has trained on."""
    out = tmp_path / "run"
    train_here("--model", "mlp:64,16,10", "--validation", "0", "--epochs", "2", "--no-pictures", "--out", out)
    config = json.loads((out / "config.json").read_text())
    manifest = json.loads((out / "checkpoints" / "manifest.json").read_text())
    del config["validation"], manifest["facts"]["validation"]
    (out / "checkpoints" / "manifest.json").write_text(json.dumps(manifest))
    (out / "config.json").write_text(json.dumps(config | {"patience": 1}))
    said = train_here(*RESUME, out, "--epochs", "3")
    assert "1,437 training and 360 test samples; no validation data" in said and "continuing from" in said
    assert result(out)["chosen_epoch"] == result(out)["epochs"] == 3
    assert "that run has --validation 0.0, given 0.1" in refused("--resume", out, "--validation", "0.1")


def test_patience_and_the_rate_finder_look_at_validation_data(tmp_path):
    args = ["--model", "mlp:64,16,10", "--lr", "1", "--momentum", "0.9", "--limit", "100", "--no-pictures"]
    said = train_here(*args, "--ranks", "2", "--patience", "2", "--epochs", "30", "--out", tmp_path / "run")
    found = result(tmp_path / "run")
    assert found["epochs"] == found["chosen_epoch"] + 2 and f"the best of {found['epochs']} on" in said
    said = train_here(*args, "--ranks", "2", "--find-lr", "--out", tmp_path / "rate")
    assert "the validation loss falls fastest at" in said
    assert "the training loss falls" in train_here(*args, "--find-lr", "--validation", "0", "--out", tmp_path / "rate")


def test_values_are_learned_from_arrays(tmp_path, refused):
    """One value a sample, and no accuracy: the whole way from the file to the curves."""
    x = np.random.default_rng(0).standard_normal((80, 3))
    y = x @ [1.0, -2.0, 3.0]
    np.savez(tmp_path / "a.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    args = ["--data", tmp_path / "a.npz", "--model", "mlp:3,1", "--batch", "10", "--epochs", "20"]
    train_here(*args, "--loss", "mse", "--out", tmp_path / "run")
    assert result(tmp_path / "run")["loss"] < 1e-3 and "accuracy" not in result(tmp_path / "run")
    said = refused(*args, "--out", tmp_path / "other")
    assert "are values: use mse" in said and not (tmp_path / "other").exists()


def test_a_run_closes_its_trainer(tmp_path, monkeypatch):
    import nn
    from parallel.command import training_run
    from parallel.command.parsing import parse

    closed = []
    monkeypatch.setattr(nn.Trainer, "close", lambda trainer: closed.append(trainer.steps))
    training_run.train(parse([*SMALL, "--out", str(tmp_path / "run")]))
    training_run.train(parse([*SMALL, "--find-lr", "--out", str(tmp_path / "rate")]))
    assert closed == [12, 0]


def test_config_file_lies_below_the_flags(tmp_path):
    from parallel.command.parsing import parse

    config = tmp_path / "small.toml"
    config.write_text('model = "mlp:64,8,10"\nepochs = 2\nlimit = 50\nlr = 1\n')
    used = parse(["--config", str(config), "--epochs", "1"])
    assert (used.model, used.epochs, used.limit, used.lr) == ("mlp:64,8,10", 1, 50, 1.0)


# What is refused before anything runs (status 2), and what goes wrong while it runs (status 1).
WRONG = [
    (["--lr", "-1"], 2, "--lr must be above 0 and finite, given -1.0"),
    (["--epocs", "3"], 2, "no option '--epocs': did you mean --epochs?"),
    (["--epochs", "x"], 2, "invalid int value: 'x'"),
    (["--batch", "0"], 2, "--batch must be at least 1, given 0"),
    (["--momentum", "1"], 2, "--momentum must be at least 0 and below 1, given 1.0"),
    (["--resume", "nowhere"], 2, "--resume nowhere: "),
    (["--config", "nowhere.toml"], 2, "--config nowhere.toml: No such file"),
    (["--loss", "quadrat"], 2, "invalid choice: 'quadrat'"),
    (["--model", "mpl:64,10"], 2, "did you mean 'mlp'"),
    (["--model", "mlp:65,10"], 2, "expected 64"),
    (["--activation", "sigmoyd"], 2, "did you mean 'sigmoid'"),
    (["--allreduce", "rung"], 2, "no allreduce algorithm 'rung'"),
    (["--init", "hee"], 2, "did you mean 'he'"),
    (["--data", "mnist", "--data-dir", "nowhere"], 2, "get_data.py mnist --data-dir nowhere"),
    (["--lr", "1e30", "--limit", "64"], 1, "the first value that is not finite is in"),
    (["--momentum", "0.9", "--optimizer", "adam"], 2, "--momentum has no effect with --optimizer adam"),
    (["--label-smoothing", "0.1", "--loss", "mse"], 2, "--label-smoothing has no effect with --loss mse"),
    (
        ["--ranks", "2", "--overlap", "poke", "--node-memory", "on"],
        2,
        "--overlap poke has no effect with --node-memory on",
    ),
    (["--reproducible", "4", "--bucket", "1"], 2, "--bucket cannot be combined with --reproducible"),
    (["--allreduce", "ring", "--strategy", "fsdp"], 2, "--allreduce has no effect with --strategy fsdp"),
    (["--loss", "mse"], 2, "--loss mse: the targets of digits are classes: use cross-entropy"),
    (["--batch", "1", "--ranks", "2"], 2, "a global batch of 1 samples cannot be cut among 2 ranks"),
    (["--allreduce", "rung", "--ranks", "2"], 2, "no allreduce algorithm 'rung'"),
    (["--lr", "1e30", "--limit", "64", "--ranks", "2"], 1, "on rank 0"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What the program says to all of WRONG, one after the other in one process, and its exit statuses."""
    out = tmp_path_factory.mktemp("wrong")
    program = "import json, sys; from parallel.command.main import main; sys.argv = ['scripts/train.py']\n"
    program += "for args in json.load(sys.stdin): print(f'\\0{main(args)}\\0', end='', flush=True)"
    told = [
        args if args[0] == "--resume" else [*args, "--out", str(out / str(i))] for i, (args, *_) in enumerate(WRONG)
    ]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, input=json.dumps(told), text=True, timeout=PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert not list(out.rglob("*.tmp"))
    *said, last = done.stdout.split("\0")
    assert len(said) == 2 * len(WRONG) and not last, done.stdout
    return list(zip(said[::2], map(int, said[1::2]), strict=True))


@pytest.mark.parametrize("case", range(len(WRONG)), ids=[" ".join(args) for args, _, _ in WRONG])
def test_bad_input_is_one_clear_message(refusals, case):
    (_, status, message), (said, ended) = WRONG[case], refusals[case]
    assert ended == status, said
    assert said.count("error: ") == 1 and message in said, said
    assert "Traceback" not in said and "MPI_ABORT" not in said


def test_ranks_that_are_started_differently_are_told(tmp_path):
    """Each rank gets options of its own, as when hosts hold different files. One leaves late: mpiexec signals it."""
    from parallel.launch import launcher

    program = (
        "import os, sys, time; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']); "
        "leave = os._exit; os._exit = lambda status: (time.sleep(0.5 * rank), leave(status)); "
        "sys.argv = ['train.py', '--seed', str(rank), '--watch', str(600 + rank), "
        f"'--out', {str(tmp_path / 'run')!r}]; "
        "import parallel.command.main; sys.exit(parallel.command.main.main())"
    )
    lines = []
    status = launcher.run(["-c", program], 3, timeout=PATIENCE, cwd=ROOT, stdout=lines.append)
    said = "".join(lines)
    assert status != 0 and "ranks disagree on --seed: rank 0 has 0, rank 1 has 1" in said
    assert "SIGTERM" not in said and "MPI_Abort" not in said, "it has failed already, and has left MPI"


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=["one", "ranks"])
def test_output_that_cannot_be_written_is_one_line(tmp_path, ranks, nothing_left):
    """A log whose disk is full, or the terminal of a program in the background that was closed; and what is left."""
    command = [sys.executable, "scripts/train.py", "--model", "mlp:64,8,10", "--limit", "60", "--no-pictures", *ranks]
    command += ["--epochs", "100000", "--out"]
    main, terminal = os.openpty()
    os.close(main)
    for out, words in (
        (os.open("/dev/full", os.O_WRONLY), "No space left on device"),
        (terminal, "Input/output error"),
    ):
        run = [*command, tmp_path / str(out)]  # the first one may have begun to write its directory
        done = subprocess.run(run, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
        os.close(out)
        said = rf"error: the output cannot be written \({words}\): ended; to continue: .*\n"
        assert done.returncode == 1 and re.fullmatch(said, done.stderr), done.stderr


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=["one", "ranks"])
def test_a_program_whose_files_are_closed_trains(tmp_path, ranks, nothing_left):
    """As some daemons start others: no standard input, output, error."""
    command = [sys.executable, "scripts/train.py", "--model", "mlp:64,8,10", "--limit", "60", "--no-pictures", *ranks]
    command += ["--epochs", "1", "--out", str(tmp_path / "run")]
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=ROOT, timeout=PATIENCE).returncode == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_a_closed_terminal_saves_and_ends_unless_nohup_says_otherwise(tmp_path, nothing_left):
    out, deaf = tmp_path / "run", tmp_path / "deaf"
    command = [sys.executable, "scripts/train.py", "--model", "mlp:64,8,10", "--limit", "60", "--no-pictures"]
    both = []
    for directory, how in ((out, signal.SIG_DFL), (deaf, signal.SIG_IGN)):
        before = signal.signal(signal.SIGHUP, how)
        program = [*command, "--epochs", "1000000", "--out", directory]
        both.append(subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        signal.signal(signal.SIGHUP, before)
    with both[0], both[1]:
        for directory in (out, deaf):
            while not (directory / "checkpoints" / "manifest.json").exists():
                time.sleep(0.01)
        for process in reversed(both):
            process.send_signal(signal.SIGHUP)
        _, errors = both[0].communicate(timeout=PATIENCE)
        assert both[0].returncode == 143 and "is saved; to continue" in errors, errors
        assert both[1].poll() is None
        both[1].kill()


def test_a_job_that_fails_in_silence_says_so(tmp_path, monkeypatch, capsys):
    """As where mpiexec is hung up; and where the directory was renamed meanwhile, it is not made again."""
    options = parse(["--ranks", "2", "--out", str(tmp_path / "gone")])
    for said, errors in (("", "error: the ranks ended with exit status 1; to continue: .*\n"), ("error: why\n", "")):
        monkeypatch.setattr(launcher, "run", lambda *_, stdout, said=said, **how: stdout(said) or 1)
        assert main.start_ranks(options, []) == 1
        assert re.fullmatch(errors, capsys.readouterr().err)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=["one", "ranks"])
def test_a_rank_that_starts_a_run_is_told_that_it_cannot(tmp_path, ranks, nothing_left):
    """As in a cell of a notebook on ranks: the run would take the rank's variables for its own, and wait."""
    command = [sys.executable, "scripts/train.py", "--out", str(tmp_path / "run"), *ranks]
    code = f"from mpi4py import MPI; import subprocess; print(subprocess.run({command!r}).returncode, flush=True)"
    said = []
    assert launcher.run(["-c", code], 1, cwd=ROOT, stdout=said.append, timeout=PATIENCE) == 0
    words = r"error: process \d+, which has started this one, is rank 0 of an MPI job, .*\n2\n"
    assert re.fullmatch(words, "".join(said)) and not (tmp_path / "run").exists()
