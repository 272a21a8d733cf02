# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16. Survive: kill a rank
#
# One machine rarely breaks. Of a thousand one breaks every other day, and most MPI libraries end the whole job with the
# first rank that dies. This notebook makes training that survives it:
#
# 1. how often to expect failures;
# 2. how often to save;
# 3. what a checkpoint must contain, so that a continued run equals an undisturbed one;
# 4. how to write a file so that a complete one always exists;
# 5. kill a rank of a real run, twice, and get the same bits;
# 6. go on without a restart;
# 7. survive without a disk: copies on other ranks.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from threadpoolctl import threadpool_limits

import checks
import exercises.survival as exercise
import nn
from checks import BLUE, GREEN, ORANGE, RED
from collectives import puzzles
from collectives.steps import Recv, Send
from parallel.elastic.supervisor import Supervisor
from parallel.launch import launcher

# %matplotlib inline
checks.style()
limits = threadpool_limits(1, user_api="blas")  # matrices as small as ours are multiplied fastest by one thread

# %% [markdown]
# ## 1. How often
#
# A good machine fails once in five years. If n of them fail independently, *one* of them fails n times as often: the
# time between two failures of the job is M = 5 years / n.

# %%
machines = 4.0 ** np.arange(0, 8)
hours = 5 * 365 * 24 / machines
exercise.draw_failures(machines, hours)
print(f"1,024 machines: a failure every {5 * 365 / 1024:.1f} days")

# %% [markdown]
# Independent failures occur at random: the probability that a machine lives through t hours is $e^{-t/m}$, if it fails
# once in m hours on average.
#
# **Exercise 1.** How likely is it that a job on n machines runs for `hours` without any failure?


# %%
def chance(n, m, hours):
    """The probability that none of n machines fails; each fails once in m hours."""
    # gap: all of them must live
    # return 1 - n * hours / m
    # solution
    return np.exp(-n * hours / m)
    # wrong: came through
    # return np.exp(-hours / m)
    # wrong: a probability lies between 0 and 1
    # return 1 - n * hours / m
    # end


# %%
exercise.check_chance(chance)
print(f"a day on 1,024 machines: {chance(1024, 5 * 365 * 24, 24):.0%}; a week: {chance(1024, 5 * 365 * 24, 168):.0%}")

# %% [markdown]
# ## 2. How often to save
#
# Saving takes C seconds, and is done after every T seconds of work. When something breaks, the work since the last
# save is lost: T/2 on average, once in M seconds. So the share of time that is wasted is about
#
# $$ \text{waste}(T) = \frac{C}{T} + \frac{T}{2M} : $$
#
# with frequent saves the saving dominates, with rare ones the lost work.
#
# **Exercise 2.** For which T is the waste smallest? Set the derivative to zero (Young 1974). (The starter code saves
# ten times between two failures, whatever a save costs.)


# %%
def my_interval(C, M):
    """Seconds of work between two checkpoints."""
    # gap: where the derivative of C/T + T/(2M) is 0
    # return M / 10
    # solution
    return np.sqrt(2 * C * M)
    # wrong: is wasted
    # return np.sqrt(C * M)
    # wrong: an interval is a positive number
    # return 0
    # end


# %%
exercise.check_interval(my_interval)

# %% [markdown]
# The valley is flat: half or twice the best interval costs little. (Far to the left the formula is too large: it
# divides the waste by the time of the work alone, without the time of the saves.)
#
# ## 3. The contents of a checkpoint
#
# The parameters, of course. But also everything else that the next step depends on: the optimizer's moments, the number
# of the step (for Adam's correction, schedules and random layers), and the position in the data: which samples of this
# epoch have been used. A test of a checkpoint is simple and strict: **stop, continue, and compare the bits.**

# %%
data = nn.data.load("digits", flat=True, normalise=True)


def new_trainer():
    layers = nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10)
    return nn.Trainer(
        nn.Network(nn.Sequential(*layers), (64,)), nn.CrossEntropyLoss(), nn.SGD(0.05, momentum=0.9), seed=1
    )


def steps(trainer, first, count):
    """Steps number first, first + 1, ... of the one order of the samples; parameters after each."""
    loader = nn.Loader(data.train, 50, seed=7)
    found = []
    for number in range(first, first + count):
        epoch, batch = divmod(number, len(loader))
        trainer.step(*next(iter(loader.epoch(epoch, batch))))
        found.append(trainer.flat_parameters.copy())
    return found


whole = new_trainer()
undisturbed = steps(whole, 0, 20)
kept = {name: array.copy() for name, array in whole.state_dict().items()}
undisturbed += steps(whole, 20, 60)
print("what a checkpoint holds:", ", ".join(kept))


def continued(leave_out=(), first=20):
    """How far the continued run is from the undisturbed one, step by step."""
    trainer = new_trainer()
    fresh = trainer.state_dict()
    state = {name: fresh[name] if any(word in name for word in leave_out) else array for name, array in kept.items()}
    trainer.load_state_dict(state)
    after = steps(trainer, first, 60)
    return [np.abs(a - b).max() for a, b in zip(after, undisturbed[20:], strict=True)]


cases = {
    "without the velocity": (continued(["velocity"]), ORANGE),
    "the samples from the beginning again": (continued(first=0), RED),
    "without the number of steps (dropout draws again)": (continued(["steps"]), GREEN),
    "with everything": (continued(), BLUE),
}
exercise.draw_continued(cases)
assert not any(cases["with everything"][0]), "the same bits"
assert all(far[-1] > 1e-4 for name, (far, _) in cases.items() if name != "with everything")

# %% [markdown]
# With everything the two runs are equal, *bit for bit*. (The others are valid training runs, but different ones: an
# error of one of them cannot be reproduced in another.)
#
# ## 4. A file that is always complete
#
# What if the machine dies *while* it saves? A file that is overwritten in place is incomplete for a while. Three steps
# help, in this order:
#
# - write to **another name**;
# - `fsync`: wait until it is on the disk (until then it is in a cache, which is lost with the machine);
# - `replace` the old name, which is atomic.
#
# **Exercise 3.** Here is a disk that dies after k operations, for every k. Save so that there is always a complete file
# called `name`: the old one or the new one. (The starter code writes in place.)


# %%
class Dead(Exception):
    """The machine has lost its power."""


class Disk:
    """A disk with a cache; it dies after `alive` operations."""

    def __init__(self, alive=10**6, **files):
        self.alive, self.on_disk, self.cache = alive, dict(files), {}

    def _operation(self):
        if self.alive == 0:
            raise Dead
        self.alive -= 1

    def write(self, name, data):
        """Write a file from the beginning: two operations; until fsync only in the cache."""
        self._operation()
        self.on_disk[name] = ""  # opened for writing: what was there is gone
        self._operation()
        self.cache[name] = data
        self.on_disk[name] = data[: len(data) // 2]  # what the disk may have of it by then

    def fsync(self, name):
        """Wait until the file is on the disk."""
        self._operation()
        self.on_disk[name] = self.cache.pop(name, self.on_disk.get(name, ""))

    def replace(self, old, new):
        """Give a file another name, in place of the one that has it: all at once."""
        self._operation()
        self.on_disk[new] = self.on_disk.pop(old)
        if old in self.cache:
            self.cache[new] = self.cache.pop(old)


def my_save(disk, name, data):
    """Save, so that `name` is whole at any moment."""
    # gap: another name, fsync, replace
    # disk.write(name, data)
    # disk.fsync(name)
    # solution
    disk.write(name + ".tmp", data)
    disk.fsync(name + ".tmp")
    disk.replace(name + ".tmp", name)
    # wrong: of the operations the file holds
    # disk.write(name + ".tmp", data)
    # disk.replace(name + ".tmp", name)
    # disk.fsync(name)
    # wrong: the file is still the old one
    # disk.write(name + ".tmp", data)
    # disk.fsync(name + ".tmp")
    # end


# %%
exercise.check_save(my_save, Disk, Dead)
plt.show()

# %% [markdown]
# Without the `fsync`, a crash may leave the new name with half of the content: the most common mistake. Try it. The
# library's checkpoints add a manifest with a checksum of each file, written last and in the same way; so a damaged file
# is detected, and the one before it is used.
#
# ## 5. Kill a rank
#
# This program trains on two ranks and saves every 20 steps. **Rank 1 kills itself, without a word, after step 57 and
# after step 131**, as if its machine lost power. `Supervisor` restarts the program whenever it ends too early, and the
# program continues from its last complete checkpoint.

# %%
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

from parallel.launch import launcher

out = Path(sys.argv[sys.argv.index("--out") + 1])
if not launcher.inside():
    sys.exit(launcher.run([__file__, *sys.argv[1:]], 2, timeout=100))  # this program again, on two ranks

from mpi4py import MPI
from threadpoolctl import threadpool_limits

import nn
from collectives import Communicator
from parallel import DistributedDataParallel

limits = threadpool_limits(1, user_api="blas")
comm = Communicator(MPI.COMM_WORLD)


class Die(nn.Callback):
    def on_step(self, training, loss):
        step = training.trainer.steps
        if comm.rank == 0:
            with open(out / "log", "a") as log:
                print(os.getpid(), time.time(), step, file=log)
        died = out / f"died-{step}"
        if comm.rank == 1 and step in (57, 131) and "--die" in sys.argv and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


out.mkdir(exist_ok=True)
network = nn.Network(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10)), (64,))
trainer = DistributedDataParallel(network, nn.CrossEntropyLoss(), nn.Adam(0.003), comm)
kept, progress = nn.Checkpoints(out / "checkpoints"), None
if "--resume" in sys.argv:
    state, progress, file = kept.load()
    trainer.load_state_dict(state)
loader = nn.Loader(nn.data.load("digits", flat=True).train, 50, shard=trainer.shard)
nn.fit(trainer, loader, 7, [nn.KeepCheckpoints(kept, steps=20), Die()], progress=progress)
digest = trainer.digest()
if comm.rank == 0:
    (out / "digest").write_text(digest)
trainer.close()
"""

work = Path(tempfile.mkdtemp(prefix="survive-"))
(work / "program.py").write_text(PROGRAM)


def supervised(name, *more):
    """Run the program until it has ended well; what the supervisor said, and the digest of the parameters."""
    said, out = [], work / name
    command = [sys.executable, str(work / "program.py"), "--out", str(out), *more]
    with open(work / f"{name}.txt", "w") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        status = Supervisor(command, pause=0.05, say=said.append, **options).run()
    assert status == 0, (work / f"{name}.txt").read_text()
    return said, (out / "digest").read_text()


_, quiet = supervised("quiet")
said, killed = supervised("killed", "--die")
print("\n".join(said))
print(f"\nundisturbed: {quiet[:24]}...\nkilled twice: {killed[:24]}...")
assert quiet == killed, "the same bits"
assert len(said) == 2

# %% [markdown]
# The digests of all parameters are equal: **a run with two deaths equals the undisturbed run**, dropout and Adam's
# moments included. The picture shows its cost: the steps that were made twice.

# %%
log = np.loadtxt(work / "killed" / "log")
exercise.draw_lives(log)
again = len(log) - len(set(log[:, 2]))
print(f"{again} of {len(log)} steps were made twice")
for path in sorted(work.rglob("*"), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()
os.rmdir(work)

# %% [markdown]
# The same with the training script, and with any number of ranks and hosts:
#
#     python scripts/supervise.py -- python scripts/train.py --ranks 2 --out runs/mine --checkpoint-steps 100
#
# `scripts/chaos.py` does it a hundred times, with nine kinds of faults at random moments (a killed or suspended
# process, a full disk, a damaged file, ...), and compares the bits.

# %% [markdown]
# ## 6. Without a restart
#
# A restart takes seconds on two ranks and minutes on a thousand. Open MPI 5 can notify the other ranks of a death
# instead of ending the job. Then the surviving ranks agree on the last step that all have finished, divide the dead
# rank's samples among them, and continue: `--elastic shrink`. (With `--elastic respawn` a new process takes its place.)
# Here rank 2 of three dies in step 7. An undisturbed run on one rank must have the same bits: `--reproducible 6` adds
# up gradients in an order that does not depend on the number of ranks.

# %%
ELASTIC = """
import os, signal, sys

from parallel.command import main
from parallel.launch import launcher

if launcher.inside():
    main.set_threads(1)
    from parallel.elastic import recovery
    from parallel.trainer import DistributedTrainer

    own = DistributedTrainer.update

    def update(trainer):
        members = recovery.current and recovery.current.members
        number = members.number if members else 0
        with open(os.path.join(os.environ["STEPS"], str(number)), "a") as log:
            print(trainer.steps, file=log)
        if members and (members.generation, number, trainer.steps) == (0, 2, 7):
            os.kill(os.getpid(), signal.SIGKILL)
        own(trainer)

    DistributedTrainer.update = update
sys.exit(main.main())
"""
OPTIONS = ["--model=mlp:64,8,10", "--limit=200", "--epochs=3", "--no-pictures", "--reproducible=6", "--watch=100"]
results, worked = {}, {}
with tempfile.TemporaryDirectory(prefix="elastic-") as work:
    program = Path(work) / "program.py"
    program.write_text(ELASTIC)
    cases = {"undisturbed": ["--ranks", "1"]}
    if not launcher.reason_all_end():
        cases["rank 2 dies"] = ["--ranks", "3", "--elastic", "shrink:min=1"]
    for name, more in cases.items():
        logs = Path(work) / f"steps {name}"
        logs.mkdir()
        out = Path(work) / name.replace(" ", "-")
        command = [sys.executable, str(program), *OPTIONS, *more, "--out", str(out)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=os.environ | {"STEPS": str(logs)}, timeout=110, check=False, **streams)
        assert done.returncode == 0, done.stdout
        results[name] = json.loads((out / "result.json").read_text())
        worked[name] = {int(file.name): np.loadtxt(file, ndmin=1) for file in logs.iterdir()}
        print(f"{name:12} {results[name]['parameters_sha256'][:24]}... on {results[name]['ranks']} ranks in the end")
        print("\n".join(line for line in done.stdout.splitlines() if "lost so far" in line))

# %%
if "rank 2 dies" in results:
    assert results["rank 2 dies"]["parameters_sha256"] == results["undisturbed"]["parameters_sha256"], "the same bits"
    assert results["rank 2 dies"]["elastic"]["lost"] == [2]
    exercise.draw_workers(worked["rank 2 dies"])
else:
    print(f"not on this MPI: {launcher.reason_all_end()}")

# %% [markdown]
# ## 7. Copies on other ranks
#
# A disk is slow, and on a large cluster behind a shared network. If only one rank is lost at a time, the memory of the
# others is enough: let every rank keep a copy of a neighbour's part.
#
# **Exercise 4** is a puzzle. The grader removes each rank in turn, and checks that the others still have all of its
# data.

# %%
print(puzzles.buddy)


# %%
def my_buddy(rank, size, count):
    """Rounds of one rank; x holds its own `count` elements."""
    # gap: x to one neighbour, the other neighbour's x into "copy"
    # yield Send((rank + 1) % size, "x", 0, count // 2), Recv((rank - 1) % size, "copy", 0, count // 2)
    # solution
    yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "copy", 0, count)
    # wrong: wrong
    # yield Send((rank + 1) % size, "x", 0, count - 1), Recv((rank - 1) % size, "copy", 0, count - 1)
    # end


# %%
grade = checks.call(puzzles.buddy.grade, my_buddy)
checks.graded(grade)
grade.draw()

# %% [markdown]
# That doubles the memory. Sums instead of copies need a third of that with four ranks, as disk arrays do (RAID 5): if
# $s = a + b + c$ is kept and b is lost, then $b = s - a - c$.
#
# Rank r's numbers are cut into p - 1 pieces. Piece k - 1 is added to the sum of the rank k places on, $(r + k) \bmod
# p$. So each rank's sum has one piece of every *other* rank.
#
# **Exercise 5.** Rank `lost` is gone, with its parts and its sum. Restore its pieces. (Which pieces are in the sum of
# rank h?)


# %%
def restore(parts, sums, lost):
    """(p - 1, n): the pieces of the lost rank; parts[r][k - 1] is rank r's piece for the rank k places on."""
    p = len(sums)
    again = np.zeros_like(parts[0])
    for k in range(1, p):
        holder = (lost + k) % p
        # gap: which other pieces are in the holder's sum
        # again[k - 1] = sums[holder]
        # solution
        others = [r for r in range(p) if r not in (lost, holder)]
        again[k - 1] = sums[holder] - sum(parts[r][(holder - r) % p - 1] for r in others)
        # wrong: something that only it had
        # others = [r for r in range(p) if r != holder]
        # again[k - 1] = sums[holder] - sum(parts[r][(holder - r) % p - 1] for r in others)
        # wrong: the pieces of rank 0 of 3
        # others = [r for r in range(p) if r not in (lost, holder)]
        # again[k - 1] = sums[holder] - sum(parts[r][k - 1] for r in others)
        # end
    return again


# %%
exercise.check_restore(restore)

# %% [markdown]
# Here is what four ranks keep:

# %%
rng = np.random.default_rng(0)
parts = rng.integers(0, 10, size=(4, 3, 2))  # rank r's x in three pieces, one for each other rank
kept_sums = np.zeros((4, 2), int)
for r in range(4):
    for k in range(1, 4):
        kept_sums[(r + k) % 4] += parts[r, k - 1]  # piece k - 1 of rank r goes to the rank k places on
lost = 2
again = restore(parts, kept_sums, lost)
assert np.array_equal(again, parts[lost])

exercise.draw_restored(lost, parts, kept_sums, again)

# %% [markdown]
# The puzzle `puzzles.parity` asks for it as a schedule: print it, and try.
#
# ## Try
#
# - In section 6 let rank 0 die. Who writes the result?
# - In section 5 leave out `progress=progress`. Which assertion fails, and why?
# - Save every 5 steps, and every 100. How many steps are made twice?
# - `python scripts/chaos.py --kills 5 -- --model mlp:64,16,10 --epochs 6 --checkpoint-steps 50 --ranks 2`
#
# *Sources: Young 1974 (the interval); Patterson, Gibson, Katz 1988 (RAID).*
#
# Next: `17_networks.py`. What happens when several messages need the same link at once?
#
# This system's page has commands and measurements: [Runs that survive](../docs/systems/survival.md).
