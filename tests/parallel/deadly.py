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

PLAN = json.loads(os.environ["PLAN"])

def come_to(place):
    members = recovery.current and recovery.current.members
    for generation, number, where, what in PLAN if members else ():
        if (generation, number, where) == (members.generation, members.number, place):
            if what.endswith(", once") and not os.path.exists(was := os.environ["ONCE"] + str(number)):
                open(was, "w").close()
                what = what.removesuffix(", once")
            if what == "dies two steps later":  # of a thread that writes
                trainer = recovery.current.tracker.training.trainer
                end = trainer.steps + 2
                while trainer.steps < end:
                    time.sleep(0.001)
                what = "dies"
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            while what == "loops":
                pass
            if what == "all are asked to end":
                processes.send(processes.find(os.environ[processes.JOB], only_ranks=True), signal.SIGTERM)
                return
            if what == "is asked to end":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if what.endswith(", once"):
                return
            raise KeyError("a mistake of one rank alone")

def before(owner, name, place):
    own = getattr(owner, name)
    def method(*args, **kwargs):
        come_to(place(args[0]) if callable(place) else place)
        return own(*args, **kwargs)
    setattr(owner, name, method)

def tearing(update):
    # Before a block of that step is updated half of it is overwritten; others let this rank come to a block.
    def torn(block, optimizer, step, sum_small=None):
        members = recovery.current.members
        for generation, number, where, what in PLAN:
            if what == "tears" and (generation, where) == (members.generation, step):
                if number == members.number:
                    block.parameters[::2] = math.nan
                    open(os.environ["TORN"] + str(generation), "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                while not os.path.exists(os.environ["TORN"] + str(generation)):
                    time.sleep(0.001)
        update(block, optimizer, step, sum_small)
    return torn

def wrong(share):
    def skewed(*args):
        point, trained = share(*args)
        point.progress["batch"] += int(os.environ["SKEW"])
        return point, trained
    return skewed

if launcher.rank_from_environment() == 1 and (early := os.environ.get("EARLY")) and not os.path.exists(early):
    open(early, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
def joining(place):
    # Whoever takes another one's place dies there, once for each file.
    if launcher.is_replacement() and os.environ.get("JOINING") == place and not os.path.exists(os.environ["TORN"]):
        open(os.environ["TORN"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

joining("before MPI starts")
if launcher.inside():
    main.set_threads(1)
    main.start_mpi(15.0, True)  # as it does itself: whoever waits there for a rank that has died ends
    main.start_mpi = lambda *_: None  # --watch may be short
    from mpi4py import MPI
    joining("before it says so")
    from nn.training import callbacks, checkpoints
    from parallel.command import training_run
    from parallel.elastic import replacements, recovery
    from parallel.trainer import DistributedTrainer
    before(recovery.ElasticContext, "communicator", "start")
    before(DistributedTrainer, "compute_gradients", lambda trainer: f"step {{trainer.steps}}")
    before(DistributedTrainer, "read", lambda trainer: f"sum of step {{trainer.steps}}")
    before(DistributedTrainer, "update", lambda trainer: f"update of step {{trainer.steps}}")
    before(DistributedTrainer, "sum_scores", lambda trainer: f"evaluation after step {{trainer.steps}}")
    before(checkpoints.Checkpoints, "_write_manifest", "checkpoint")
    before(checkpoints.Checkpoints, "_content", "another best")
    before(callbacks.RestoreBest, "on_end", "end")
    before(training_run, "leave_network", "result")
    before(training_run, "what_next", "last lines")
    before(DistributedTrainer, "close", "close")
    before(recovery.Membership, "agree", "agreement")
    before(recovery.Membership, "recover", "recovery")
    before(recovery.Membership, "_refill", "others are brought in")
    before(recovery.recovery_points, "share", "state")
    if launcher.is_replacement():
        class Parent(MPI.Intercomm):
            def Send(self, *args):
                joining("before it says so")
                super().Send(*args)
            def recv(self, *args, **named):
                port = super().recv(*args, **named)
                joining("when all take it in")
                return port
        class Library:
            class Comm:
                Get_parent = staticmethod(lambda: Parent(MPI.Comm.Get_parent()))
            def __getattr__(self, name):
                return getattr(MPI, name)
        replacements.MPI, connect = Library(), replacements.connect
        def has_come():
            merged = connect()
            joining("after it was taken in")
            return merged
        replacements.connect = has_come
    from parallel.sync import node_memory
    node_memory.Block.update = tearing(node_memory.Block.update)
    if "KEEPS_NOTHING" in os.environ:
        node_memory.UndoLog.keep = lambda *_: None
    recovery.AGAIN = int(os.environ.get("AGAIN", recovery.AGAIN))
    if "SKEW" in os.environ:
        recovery.recovery_points.share = wrong(recovery.recovery_points.share)
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
