"""Training of which ranks die, or are stopped, at places that a test has chosen; and what must hold at its end."""

import json
import os
import subprocess
import sys

import pytest
from calling import ROOT, call
from conftest import PATIENCE

from parallel.elastic.chaos import result
from parallel.launch import launcher

OPTIONS = [
    "--model",
    "mlp:64,8,10",
    "--limit",
    "200",
    "--epochs",
    "3",
    "--lr",
    "0.1",
    "--checkpoint-steps",
    "5",
    "--no-pictures",
]
OPTIONS += ["--watch", str(PATIENCE)]
needs_survivors = pytest.mark.skipif(bool(launcher.reason_all_end()), reason=launcher.reason_all_end())

# Training, of which the ranks in PLAN are hit when they come to a place: [generation, number, place, what happens].
PROGRAM = f"""
import json, math, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from parallel.command import main
from parallel.launch import launcher, processes
from parallel.testing import faults

PLAN = json.loads(os.environ["PLAN"])
PLACES = {{
    "ringprop.make_communicator": "start",
    "ringprop.compute_gradients": "step {{.steps}}",
    "ringprop.read_sums": "sum of step {{.steps}}",
    "ringprop.update": "update of step {{.steps}}",
    "ringprop.update_block": "block of step {{}}",
    "ringprop.sum_scores": "evaluation after step {{.steps}}",
    "ringprop.end_training": "end",
    "ringprop.leave_network": "result",
    "ringprop.say_what_next": "last lines",
    "ringprop.close": "close",
    "ringprop.agree": "agreement",
    "ringprop.recover": "recovery",
    "ringprop.replace_ranks": "others are brought in",
    "ringprop.come": "before it says so",
    "ringprop.connect": "when all take it in",
    "ringprop.join": "after it was taken in",
}}

def place_of(event, arguments):
    if event == "open" and os.path.basename(str(arguments[0])).startswith(".manifest.json."):
        replaces_best = any(name.startswith(".best.npz.") for name in os.listdir(os.path.dirname(arguments[0])))
        return "another best" if replaces_best else "checkpoint"
    return event in PLACES and PLACES[event].format(*arguments)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def once(file):
    if os.path.exists(file):
        return False
    open(file, "w").close()
    return True

def come_to(event, *arguments):
    if not (place := place_of(event, arguments)):
        return
    if place == os.environ.get("JOINING") and once(os.environ["TORN"]):  # whoever takes another one's place
        die()
    members = recovery.current and recovery.current.members
    if place == "start" and members.generation and "SKEW" in os.environ:
        recovery.current.tracker.point.progress["batch"] += int(os.environ["SKEW"])
    for generation, number, where, what in PLAN if members else ():
        if (generation, where) != (members.generation, place):
            continue
        if what == "tears":  # half of a block is overwritten; others let this rank come to a block
            torn = os.environ["TORN"] + str(generation)
            if number == members.number:
                arguments[1][::2] = math.nan
                open(torn, "w").close()
                die()
            while not os.path.exists(torn):
                time.sleep(0.001)
        if number != members.number:
            continue
        if what.endswith(", once") and once(os.environ["ONCE"] + str(number)):
            what = what.removesuffix(", once")
        if what == "dies two steps later":  # of a thread that writes
            trainer = recovery.current.tracker.training.trainer
            end = trainer.steps + 2
            while trainer.steps < end:
                time.sleep(0.001)
            what = "dies"
        if what == "dies":
            die()
        if what == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        while what == "loops":
            pass
        if what == "all are asked to end":
            processes.send(processes.find(os.environ[processes.JOB], only_ranks=True), signal.SIGTERM)
        if what == "is asked to end":
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "errs":
            raise KeyError("a mistake of one rank alone")

if launcher.rank_from_environment() == 1 and (early := os.environ.get("EARLY")) and once(early):
    die()
if launcher.is_replacement() and os.environ.get("JOINING") == "before MPI starts" and once(os.environ["TORN"]):
    die()
main.set_threads(1)
main.start_mpi(15.0, True)  # as it does itself, and again: whoever waits there ends, and --watch may be short
from parallel.elastic import recovery
from parallel.sync import undo_log
recovery.AGAIN = int(os.environ.get("AGAIN", recovery.AGAIN))
if "KEEPS_NOTHING" in os.environ:
    undo_log.UndoLog.keep = lambda *_: None
with faults.inject(come_to):
    sys.exit(main.main())
"""


def run_to_death(directory, ranks, elastic, *plan, options=("--reproducible", "6"), hosts=False, **environment):
    """(exit status, what was said, directory of the run), of so many ranks of which those in the plan are hit.

    `hosts`: each rank on a host of its own, of the lab.
    """
    program, out = directory / "deadly.py", directory / "run"
    program.write_text(PROGRAM)
    plan = [(*fault, "dies")[:4] for fault in plan]
    given = [*OPTIONS, *options, "--elastic", elastic, "--ranks", str(ranks), "--out", str(out)]
    environment |= {"PLAN": json.dumps(plan), "TORN": str(directory / "torn")}
    if not hosts:
        return *call(*given, program=program, timeout=2 * PATIENCE, **environment), out
    lab = [sys.executable, ROOT / "scripts" / "netlab.py", "run", "--hosts", ranks, "--slots", 1, "--"]
    mpiexec = [launcher.find_mpiexec(), "--with-ft", "ulfm", "--mca", "coll", "^han", "-n", ranks]
    done = subprocess.run(
        list(map(str, [*lab, *mpiexec, sys.executable, "-m", "mpi4py", program, *given])),
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=2 * PATIENCE,
    )
    return done.returncode, done.stdout, out


def run_undisturbed(directory, *options):
    """result.json of a run that nothing happens to."""
    status, said = call(*OPTIONS, *options, "--out", str(directory / "undisturbed"))
    assert status == 0, said
    return result(directory / "undisturbed")


def assert_as_if_nothing_had_been(done, undisturbed, lost):
    status, said, out = done
    assert status == 0 and (out / "result.json").exists(), said
    found = result(out)
    assert found["parameters_sha256"] == undisturbed["parameters_sha256"], said
    assert (found["steps"], found["elastic"]["lost"]) == (undisturbed["steps"], lost), said
    assert found["elastic"]["ledger"] == {"epochs": 3, "samples": 600}
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert not list(out.rglob("*.tmp")) and not (out / "ledger").exists() and not (out / "beats").exists()
    return found
