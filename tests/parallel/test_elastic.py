"""Runs that end too early are started again, and runs that are broken on purpose end as if nothing had been."""

import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from deadly import needs_survivors

from nn.training.checkpoints import Checkpoints
from parallel import ShardedCheckpoints
from parallel.elastic.chaos import FAULTS, SMALL, Broken, Chaos, epochs_done, result
from parallel.elastic.supervisor import Supervisor, directory_of, last_step, next_command
from parallel.state.fragments import Fragment

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "scripts" / "train.py")]
OPTIONS = ["--model", "mlp:64,8,10", "--limit", "200", "--epochs", "4", "--checkpoint-steps", "5", "--no-pictures"]

# A training program of a kind: each call saves a checkpoint where a file says so, and ends with the next status there.
PROGRAM = """
import subprocess, sys, time
from pathlib import Path
import numpy as np
from nn.training.checkpoints import Checkpoints

out = Path(sys.argv[sys.argv.index("--out") + 1])
calls = out / "calls"
out.mkdir(exist_ok=True)
with open(calls, "a") as file:
    print(*sys.argv[1:], file=file)
made = len(calls.read_text().splitlines())
saves, status = (out.with_suffix(".plan")).read_text().split()[made - 1].split(":")
if saves == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
if saves != "own":
    (out / "config.json").touch()
if saves in ("save", "own"):
    Checkpoints(out / "checkpoints").save({"steps": np.array(10 * made)}, {})
if status == "0" and saves not in ("lost", "own"):
    (out / "result.json").touch()
if status == "wait":
    (out / "waits").touch()
    time.sleep(1000)
sys.exit(int(status))
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function: what each call does -> (exit status, what the supervisor said, how it was called)."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = tmp_path / "run"

    def run(*plan, meanwhile=None, **options):
        out.with_suffix(".plan").write_text(" ".join(plan))
        command, said = [sys.executable, str(program), "--out", str(out)], []
        if meanwhile:
            threading.Thread(target=meanwhile, args=(out,), daemon=True).start()
        status = Supervisor(command, pause=0.01, say=said.append, **options).run()
        return status, said, (out / "calls").read_text().splitlines()

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return run


def test_a_program_of_ones_own_need_not_leave_a_result(planned, nothing_left):
    status, said, calls = planned("own:0")
    assert (status, said, len(calls)) == (0, [], 1)


def test_what_ends_too_early_goes_on_from_its_last_checkpoint(planned, nothing_left):
    status, said, calls = planned("none:1", "save:139", "child:1", "none:0")
    assert status == 0
    assert ["--resume" in call for call in calls] == [False, False, True, True]
    assert said[0].endswith("from the beginning (nothing was saved yet)")
    assert "exit status 1; restart 1 of 10 in 0.01 s" in said[0]
    assert "ended by SIGSEGV" in said[1] and said[1].endswith("from step 20")


def test_what_gets_nowhere_is_given_up(planned):
    status, said, calls = planned("none:7", "save:7", "none:7", "none:7", restarts=2)
    assert status == 7 and len(calls) == 4, "a new checkpoint begins the count anew"
    assert said[-1] == "supervise: the run ended with exit status 7; no new checkpoint in 3 tries: given up"


def test_an_exit_status_of_0_proves_nothing(planned):
    """Open MPI's of a job of which a host was lost."""
    status, said, calls = planned("save:1", "lost:0", "none:0")
    assert status == 0 and len(calls) == 3, said
    assert "the run ended without a result; restart 2 of 10" in said[1]


def test_a_wrong_option_is_not_tried_twice(planned):
    status, said, calls = planned("none:2")
    assert (status, said, len(calls)) == (2, [], 1)


def test_who_asks_for_the_end_gets_it(planned, nothing_left):
    def ask(out):
        while not (out / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    status, said, calls = planned("save:wait", meanwhile=ask)
    assert (status, said, len(calls)) == (143, [], 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_runs_ends_with_its_supervisor(tmp_path, nothing_left):
    """However that ends: whoever starts it again would have two runs in one directory."""
    program, begun = tmp_path / "program.py", tmp_path / "begun"
    program.write_text(f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)")
    command = [sys.executable, "scripts/supervise.py", "--", sys.executable, str(program), "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as supervisor:
        end = time.monotonic() + PATIENCE
        while not (begun.exists() and begun.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        supervisor.kill()
    stat = Path("/proc", begun.read_text(), "stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "it runs on"
        time.sleep(0.01)


def test_a_command_of_several_programs_goes_on_with_each(tmp_path):
    """As mpirun starts them on hosts of several kinds."""
    command = ["mpirun", "-n", "1", "a", "--out", "r", ":", "-n", "1", "b", "--out=r", ":", "-n", "1", "c"]
    assert next_command(command, tmp_path) == command
    Checkpoints(tmp_path / "checkpoints").save({"steps": np.array(3)}, {})
    resume = ["--resume", str(tmp_path)]
    assert next_command(command, tmp_path) == [*command[:6], *resume, *command[6:11], *resume, *command[11:]]
    assert next_command([*command[:6], "--resume", "r"], tmp_path) == [*command[:6], "--resume", "r"]


def test_commands(tmp_path):
    assert directory_of(["x", "--out", "a"]) == directory_of(["x", "--resume=a"]) == Path("a")
    assert directory_of(["x", "--resume", "b", "--out", "a"]) == Path("a")
    assert directory_of(["x", "--out"]) is None and directory_of(["x", "--out", "a", "--no-out"]) is None
    assert directory_of(["x", "--out", "a", "--out=b"]) == Path("b"), "as argparse has it"
    assert directory_of(["x", "--out=~/a"]) == Path.home() / "a", "which no shell expands"
    assert last_step(tmp_path) == -1 and next_command(["x"], tmp_path) == ["x"]
    with pytest.raises(ValueError, match="add --out DIR"):
        Supervisor(["x"])
    for restarts, pause in ((-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)):
        with pytest.raises(ValueError, match=f"must be at least 0, and finite, given {restarts} and {pause}"):
            Supervisor(["true", "--out", "x"], restarts, pause)
    for words, status, expected in (
        (["--help"], 0, "started again|start it again"),
        ([], 2, "give the command to run after --"),
        (["--", "x"], 2, "add --out DIR"),
        (["--", "no-such-program", "--out", "a"], 2, "no-such-program cannot be started"),
    ):
        done = subprocess.run(
            [sys.executable, "scripts/supervise.py", *words], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE
        )
        assert done.returncode == status and re.search(expected, done.stdout + done.stderr), done


# Two ranks of training; where it is not a continued run, one of them is killed when so many steps are made.
KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import nn
from parallel.command import main
from parallel.launch import launcher

class Killed(nn.Callback):
    def on_step(self, training, loss):
        if training.trainer.steps == 13 and launcher.rank_from_environment() in (None, 1):
            os.kill(os.getpid(), signal.SIGKILL)

fit = nn.fit
def killing(trainer, train, epochs, callbacks=(), *more):
    return fit(trainer, train, epochs, [*callbacks, Killed()], *more)

if "--resume" not in sys.argv:
    nn.fit = killing
sys.exit(main.main())
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_killed_run_ends_as_if_nothing_had_been(tmp_path, ranks, nothing_left):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    ranked = ["--ranks", str(ranks)] if ranks > 1 else []
    undisturbed = subprocess.run(
        [sys.executable, "scripts/train.py", *OPTIONS, *ranked, "--out", str(tmp_path / "whole")],
        cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    command = [sys.executable, str(program), *OPTIONS, *ranked, "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "scripts/supervise.py", "--pause", "0", "--", *command],
        cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended by SIGKILL; restart 1 of 10 in 0 s, from step" in done.stderr
    whole, run = (result(tmp_path / name) for name in ("whole", "run"))
    assert run["parameters_sha256"] == whole["parameters_sha256"] and run["steps"] == whole["steps"]


def test_what_a_process_that_was_killed_has_half_written_goes(tmp_path):
    torn = tmp_path / ".result.json.1.tmp"
    torn.write_text("{")
    command = [sys.executable, "scripts/train.py", *OPTIONS, "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    assert result(tmp_path)["epochs"] == 4 and not torn.exists()


def test_a_drawn_sample_of_faults(tmp_path, nothing_left):
    chaos = Chaos(OPTIONS, tmp_path, seed=4, program=TRAIN)
    chaos.undisturbed()
    for number, kind in enumerate(("damage", "full disk", "interrupt", "torn manifest")):
        chaos.kinds = (kind,)
        chaos.run(number, 2)
    assert chaos.injected.total() + chaos.missed.total() >= 4 and chaos.recovery


@needs_survivors
@pytest.mark.exhaustive
def test_a_run_that_goes_on_gets_several_faults(tmp_path, nothing_left):
    options = [*OPTIONS, "--epochs", "60", "--reproducible", "4", "--ranks", "2", "--elastic", "respawn:min=1"]
    chaos = Chaos(options, tmp_path, seed=3, kinds=["kill a rank", "kill two ranks"], program=TRAIN)
    chaos.undisturbed()
    chaos.run(0, 4)
    assert chaos.injected.total() + chaos.missed.total() == 4 and chaos.injected


@pytest.mark.exhaustive
def test_fifty_faults_on_two_ranks(tmp_path, nothing_left):
    chaos = Chaos([*OPTIONS, "--ranks", "2"], tmp_path, seed=5, program=TRAIN)
    chaos.undisturbed()
    number = 0
    while chaos.injected.total() < 50:
        chaos.run(number, 3)
        number += 1


# A program that does not survive: continued, it goes on from parameters that are not those that were saved. Where it is
# told to, it stands still once something was saved; or leaves a process behind.
WRONG = f"""
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import nn
from parallel.command import main, training_run

class Waits(nn.Callback):
    def __init__(self, callbacks):
        (self.termination,) = (each.termination for each in callbacks if isinstance(each, nn.KeepCheckpoints))
    def on_step(self, training, loss):
        while training.trainer.steps == 7 and not self.termination.requested:
            time.sleep(0.01)

resume, fit = training_run.resume, nn.fit
def wrong(options, trainer, *more):
    progress = resume(options, trainer, *more)
    if progress:
        trainer.flat_parameters[0] += 1e-7
    return progress
def waiting(trainer, train, epochs, callbacks=(), *more):
    return fit(trainer, train, epochs, [*callbacks, Waits(callbacks)], *more)
training_run.resume = wrong
if Path(__file__).with_name("wait").exists() and "--resume" not in sys.argv:
    nn.fit = waiting
if Path(__file__).with_name("leave").exists():
    subprocess.Popen(["sleep", "1000"])
sys.exit(main.main())
"""


def test_control_what_does_not_survive_is_found(tmp_path, monkeypatch, nothing_left):
    monkeypatch.chdir(ROOT)
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    made = partial(Chaos, OPTIONS, tmp_path / "runs", 1, ["terminate"], program=[sys.executable, str(program)])
    chaos = made()
    chaos.undisturbed()
    (tmp_path / "wait").touch()
    fault = chaos.inject

    def once_saved(kind, process):
        while last_step(tmp_path / "runs" / "run0") < 0:
            time.sleep(0.01)
        return fault(kind, process)

    chaos.inject = once_saved
    with pytest.raises(Broken, match=r"parameters_sha256 is .*, undisturbed .* \(terminate\)"):
        chaos.run(0, 1)
    (tmp_path / "wait").unlink()
    (tmp_path / "leave").touch()
    monkeypatch.setattr("parallel.elastic.chaos.LEFT", 0.2)
    with pytest.raises(Broken, match=r"processes \[[0-9]+\] are left"):
        made().undisturbed()


# Writes its epochs as a run does, ever slower; ends when it was told to.
SLOWER = """
import sys, time
from pathlib import Path
out, slow = Path(sys.argv[-1]), Path(sys.argv[1])
out.mkdir(parents=True)
for epoch in range(5):
    time.sleep(0.3 if slow.exists() else 0.02)
    with open(out / "metrics.jsonl", "a") as metrics:
        metrics.write("{}\\n")
while slow.exists():
    time.sleep(0.01)
(out / "result.json").write_text('{"parameters_sha256": "0", "steps": 5, "epochs": 5}')
"""


def test_faults_come_where_the_undisturbed_run_was(tmp_path, nothing_left):
    """However slow the machine is by then."""
    program, slow, found = tmp_path / "slower.py", tmp_path / "slow", []
    program.write_text(SLOWER)
    options = [str(slow), "--elastic", "respawn"]
    chaos = Chaos(options, tmp_path / "runs", 2, ["slow a rank"], program=[sys.executable, str(program)])
    chaos.undisturbed()
    slow.touch()
    drawn, draw = [], chaos.draw_moments

    def moments(out, number):
        drawn.extend(draw(out, number))
        return drawn

    def fault(kind, process):
        found.append(epochs_done(tmp_path / "runs" / "run0"))
        if len(found) == len(drawn):
            slow.unlink()
        return set()

    chaos.draw_moments, chaos.inject = moments, fault
    chaos.run(0, 6)
    epochs = [epoch for epoch, _ in drawn]
    assert len(epochs) == chaos.injected.total() == 6 and max(epochs) > 1
    assert all(at >= epoch for at, epoch in zip(found, epochs, strict=True))


def test_disks_are_full_from_the_fault_on(tmp_path, nothing_left):
    """Not before, when MPI starts."""
    program = tmp_path / "waits.py"
    program.write_text("import time\ntime.sleep(1000)")
    chaos = Chaos(OPTIONS, tmp_path, program=[sys.executable, str(program)])
    process = chaos.start(tmp_path / "run")
    try:
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        chaos.inject("full disk", process)
        after = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    finally:
        process.kill()
        process.wait()
    assert before == resource.getrlimit(resource.RLIMIT_FSIZE) != after == (SMALL, SMALL)


def test_the_only_checkpoint_is_not_damaged(tmp_path):
    """However many files it has: nobody could go on from it."""
    kept, arrays = ShardedCheckpoints(tmp_path / "checkpoints"), [Fragment("a", np.zeros(9))]
    chaos = Chaos(OPTIONS, tmp_path, program=TRAIN)
    for steps in 5, 10:
        number = kept.begin_parts(steps)
        parts = [
            kept.write_part(steps, number, (i, 2), arrays if i else (), None if i else {"steps": steps})
            for i in range(2)
        ]
        kept.list_parts(steps, parts)
        chaos.damage("damage", tmp_path)
        with contextlib.nullcontext() if steps == 5 else pytest.warns(UserWarning, match="step-00000010"):
            assert kept.load()[1] == {"steps": 5}


def test_faults_are_gathered_from_several_calls(tmp_path, monkeypatch, capsys):
    """Of one seed: no run is made twice, and each gets what its number draws."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import chaos

    made, alone = [], []

    def run(self, number, faults):
        assert self.ends == [0.5, 1.0] and self.want["steps"] == 9
        made.append((number, faults))
        self.injected["kill a rank"] += faults

    def undisturbed(self):
        alone.append(self)
        assert Path(self.program[1]).is_file(), "wherever it is called"
        self.ends, self.want = [0.5, 1.0], {"parameters_sha256": "0", "steps": 9, "epochs": 1}

    monkeypatch.setattr(Chaos, "run", run)
    monkeypatch.setattr(Chaos, "undisturbed", undisturbed)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "chaos.json"

    def call(kills, *more):
        monkeypatch.setattr(
            sys, "argv", ["chaos.py", "--kills", str(kills), *more, "--json", str(file), "--", *OPTIONS]
        )
        return chaos.main()

    assert call(5) == call(12) == 0 and len(alone) == 1
    found, (numbers, faults) = json.loads(file.read_text()), zip(*made, strict=True)
    assert (
        numbers == tuple(range(found["runs"])) and found["hits"] == {"kill a rank": sum(faults)} and sum(faults) >= 12
    )
    file.unlink()
    before, made[:] = list(made), []
    assert call(12) == 0 and made == before
    with pytest.raises(SystemExit):
        call(20, "--seed", "1")
    assert "has other options, --seed or --most: give another file" in capsys.readouterr().err


def test_bad_input_of_chaos(tmp_path):
    with pytest.raises(ValueError, match=f"fault 'bribe': expected one of {next(iter(FAULTS))}"):
        Chaos(OPTIONS, tmp_path, kinds=["bribe"], program=TRAIN)
    with pytest.raises(ValueError, match=r"compared bit by bit.*give --reproducible N"):
        Chaos([*OPTIONS, "--elastic=shrink:min=1"], tmp_path, program=TRAIN)
    with pytest.raises(ValueError, match="leave out --out and --resume"):
        Chaos(["--out", "a"], tmp_path, program=TRAIN)
