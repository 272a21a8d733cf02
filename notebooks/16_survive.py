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
# On one machine nothing ever breaks. On a thousand something breaks every day, and most MPI libraries end the whole job
# with the first rank that dies. This notebook makes training that does not mind:
#
# 1. how often must one expect it;
# 2. how often should one save;
# 3. what belongs into a checkpoint, so that a run that was continued *is* the run that was not stopped;
# 4. how to write a file so that there is always a whole one;
# 5. kill a rank of a real run, twice, and get the same bits;
# 6. go on without a restart;
# 7. survive without a disk: what the neighbours know.

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
from checks import BLUE, GREEN, GREY, INK, ORANGE, RED
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
_, ax = plt.subplots(figsize=(7, 3))
ax.loglog(machines, hours, "o-", color=BLUE)
for name, value in (("a year", 365 * 24), ("a week", 168), ("a day", 24)):
    ax.axhline(value, color=GREY, ls=":", lw=1)
    ax.text(1, value * 1.1, name, fontsize=8, color=GREY)
ax.set(xlabel="machines", ylabel="hours between failures", title="5 years for each machine")
ax.set_xticks(machines, [f"{int(m):,}" for m in machines])
ax.set_xticks([], minor=True)
plt.show()
print(f"1,024 machines: a failure every {5 * 365 / 1024:.1f} days")

# %% [markdown]
# Failures that do not wait for each other come at random: the probability that a machine lives through t hours is
# $e^{-t/m}$, if it fails once in m hours on average.
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
# save too often, and you only save; too seldom, and you lose too much.
#
# **Exercise 2.** For which T is the waste smallest? Set the derivative to zero (Young 1974). (What is there saves ten
# times between two failures, whatever it costs.)


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
def simulated_waste(T, C, M, work=1.0, tries=20, seed=0):
    """The share of time that is wasted, by failures at random moments; `work` in units of 50 M."""
    rng, wasted = np.random.default_rng(seed), []
    for _ in range(tries):
        done, time, fails = 0.0, 0.0, rng.exponential(M)
        while done < 50 * M * work:
            if time + T + C <= fails:  # a piece of work, and its checkpoint
                time, done = time + T + C, done + T
            else:
                time = fails  # lost: all since the last one
                fails = time + rng.exponential(M)
        wasted.append(1 - done / time)
    return float(np.mean(wasted))


def draw_waste(got=None, want=None):
    """Waste against the interval, formula and simulation."""
    _, ax = plt.subplots(figsize=(7, 3.2))
    T = 60 * 2.0 ** np.arange(0, 9)
    ax.plot(T / 60, 100 * (C / T + T / (2 * M)), color=GREY, lw=4, alpha=0.5, label="C/T + T/(2M)")
    ax.plot(T / 60, [100 * simulated_waste(t, C, M) for t in T], "o", color=BLUE, label="simulated failures")
    ax.axvline(mine / 60, color=RED, label=f"yours: {mine / 60:.1f} min")
    ax.set(xscale="log", xlabel="minutes between checkpoints", ylabel="time wasted (%)", ylim=(0, 60))
    ax.set_title("a checkpoint takes 30 s, a failure every 12 hours")
    ax.set_xticks(T / 60, [f"{t / 60:g}" for t in T])
    ax.set_xticks([], minor=True)
    ax.legend()


C, M = 30.0, 12 * 3600.0
mine = float(checks.numbers(my_interval, C, M))
checks.expect(mine > 0, f"an interval is a positive number of seconds; yours is {mine:g}")
grid = np.geomspace(60, M, 4000)
best = grid[np.argmin(C / grid + grid / (2 * M))]
said = f"with {mine / 60:.3g} minutes {C / mine + mine / (2 * M):.1%} is wasted, and with another interval only"
checks.expect(abs(mine / best - 1) < 0.01, f"{said} {C / best + best / (2 * M):.1%}", draw_waste)
longer = float(checks.numbers(my_interval, 4 * C, M))
checks.expect(abs(longer / mine - 2) < 0.02, "if saving takes four times as long, the interval should be twice as long")
checks.right(f"{mine / 60:.0f} minutes; {C / mine + mine / (2 * M):.1%} is wasted, half of it for saving")
draw_waste()

# %% [markdown]
# The valley is flat: half or twice the best interval costs little. (Far to the left the formula says too much: it
# measures what is wasted against the work, and there saving is a good part of the time.)
#
# ## 3. What belongs into a checkpoint
#
# The parameters, of course. But also all else that the next step depends on: what the optimizer remembers, the number
# of the step (Adam corrects by it, schedules and random layers need it), and the place in the data: which samples of
# this epoch have been used. A test of a checkpoint is simple and strict: **stop, continue, and compare the bits.**

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


_, ax = plt.subplots(figsize=(7.4, 3.4))
cases = {
    "without the velocity": (continued(["velocity"]), ORANGE),
    "the samples from the beginning again": (continued(first=0), RED),
    "without the number of steps (dropout draws again)": (continued(["steps"]), GREEN),
    "with everything": (continued(), BLUE),
}
for name, (far, colour) in cases.items():
    ax.plot(range(21, 81), np.maximum(far, 1e-9), color=colour, label=f"{name}: {far[-1]:.1g}")
ax.set(
    xlabel="step",
    ylabel="farthest parameter",
    title="Continued after step 20, against undisturbed",
    yscale="log",
    ylim=(5e-10, 30),
)
ax.set_yticks([1e-9, 1e-6, 1e-3, 1], ["0", "1e-6", "1e-3", "1"])
ax.legend(fontsize=8, loc="center right")
plt.show()
assert not any(cases["with everything"][0]), "the same bits"
assert all(far[-1] > 1e-4 for name, (far, _) in cases.items() if name != "with everything")

# %% [markdown]
# With everything the two runs are the same, *bit for bit*. (Not so the others: they are training runs, too, but other
# ones, and whoever looks for a bug in one of them will not find it in the other.)
#
# ## 4. A file that is always whole
#
# And if the machine dies *while* it saves? A file that is written in place is neither the old one nor the new one for a
# while. Three things help, in the right order:
#
# - write to **another name**;
# - `fsync`: wait until it is really on the disk (before, it is in a cache, which dies with the machine);
# - `replace` the old name: that happens all at once.
#
# **Exercise 3.** Here is a disk that dies after k operations, for every k. Save so that afterwards there is always a
# whole file called `name`: the old one or the new one. (What is there writes in place.)


# %%
class Dead(Exception):
    """The machine has lost its power."""


class Disk:
    """A disk with a cache; it dies after so many operations."""

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
# Forget the `fsync`, and the crash may leave the new name with half of the content: the most popular mistake. Try it.
# The library's checkpoints add a manifest with a checksum of each file, written last and in the same way; so a file
# that has been damaged since is found, and the one before it is used.
#
# ## 5. Kill a rank
#
# Now in earnest. This program trains on two ranks and saves every 20 steps. **Rank 1 kills itself, without a word,
# after step 57 and after step 131**, the way a machine loses its power. `Supervisor` starts the program again as
# often as it ends too early, and it goes on from its last whole checkpoint.

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
# The two digests are those of all parameters, and the same: **a run with two deaths is the run without**, dropout and
# Adam's moments included. What it cost is in this picture: the steps that were made twice.

# %%
log = np.loadtxt(work / "killed" / "log")
_, ax = plt.subplots(figsize=(8, 3.4))
zero, lives = log[0, 1], list(dict.fromkeys(log[:, 0]))
for life, (pid, colour) in enumerate(zip(lives, (BLUE, ORANGE, GREEN), strict=True)):
    mine = log[log[:, 0] == pid]
    ax.plot(
        mine[:, 1] - zero,
        mine[:, 2],
        ".-",
        ms=3,
        color=colour,
        label=f"start {life + 1}: steps {mine[0, 2]:.0f} to {mine[-1, 2]:.0f}",
    )
    if life < 2:
        ax.plot(mine[-1, 1] - zero, mine[-1, 2], "X", ms=12, color=RED)
        ax.annotate(
            "rank 1 dies", (mine[-1, 1] - zero, mine[-1, 2]), xytext=(8, -3), textcoords="offset points", color=RED
        )
for step in range(0, int(log[:, 2].max()), 20):
    ax.axhline(step, color=GREY, lw=0.5, ls=":")
ax.set(xlabel="seconds", ylabel="step", title="Two deaths; dotted: checkpoints")
ax.legend()
plt.show()
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
# `scripts/chaos.py` does it a hundred times, with blows of nine kinds at random moments (killed, stopped, a full
# disk, a damaged file), and compares the bits.

# %% [markdown]
# ## 6. Without a restart
#
# Starting again takes seconds on two ranks and minutes on a thousand. Open MPI 5 can tell the others that a rank has
# died, in place of ending the job. Then those that live can agree on the last step that all have finished, share out
# the dead one's samples, and go on: `--elastic shrink`. (With `--elastic respawn` a new process takes its place.)
# Here rank 2 of three dies in step 7. A run on one rank that nobody disturbs is to have the same bits;
# `--reproducible 6` adds up gradients in an order that does not depend on the number of ranks.

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
    if not launcher.why_all_end():
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
    _, ax = plt.subplots(figsize=(8, 2.2))
    for rank, at in sorted(worked["rank 2 dies"].items()):
        ax.plot(at, [rank] * len(at), "s", ms=9, color=(BLUE, GREEN, ORANGE)[rank])
    ax.plot(7, 2, "X", ms=14, color=RED)
    ax.annotate("dies", (7, 2), xytext=(10, -4), textcoords="offset points", color=RED)
    ax.set_yticks(range(3), [f"rank {rank}" for rank in range(3)])
    ax.set_xticks(range(0, 21, 2))
    ax.set(xlabel="step", title="Who has worked in which step", ylim=(2.6, -0.6))
    plt.show()
else:
    print(f"not on this MPI: {launcher.why_all_end()}")

# %% [markdown]
# ## 7. What the neighbours know
#
# A disk is slow, and on a large cluster far away. If only one rank is lost at a time, memory of the others will do: let
# every rank keep a copy of a neighbour's part.
#
# **Exercise 4** is a puzzle. The grader takes away each rank in turn, and asks whether all that it had is still there.

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
# That doubles the memory. It can be done with a third of it, by sums instead of copies, as disks do (RAID 5): if
# $s = a + b + c$ is kept and b is lost, then $b = s - a - c$.
#
# Rank r's numbers are cut into p - 1 pieces. Piece k - 1 is added to the sum of the rank k places on, $(r + k) \bmod
# p$. So each rank's sum has one piece of every *other* rank.
#
# **Exercise 5.** Rank `lost` is gone, with its parts and its sum. Make its pieces again. (Which pieces are in the sum
# of rank h?)


# %%
def restore(parts, sums, lost):
    """(p - 1, n): the pieces of the lost rank; parts[r][k - 1] is rank r's piece for the rank k places on."""
    p = len(sums)
    again = np.zeros_like(parts[0])
    for k in range(1, p):
        holder = (lost + k) % p
        # gap: what is in the holder's sum beside the piece that is sought
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
# With four ranks, what is kept and what it costs:

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

_, ax = plt.subplots(figsize=(8, 2.8))
ax.set_title("What was lost, from the sums that the others keep")
for r in range(4):
    for piece in range(3):
        text = " ".join(map(str, parts[r, piece]))
        ax.add_patch(
            plt.Rectangle(
                (r + 0.05, 2.2 - 0.5 * piece),
                0.9,
                0.45,
                fc=GREY if r == lost else BLUE,
                alpha=0.4 if r == lost else 0.85,
            )
        )
        ax.text(r + 0.5, 2.42 - 0.5 * piece, text, ha="center", va="center", color="white")
    ax.add_patch(
        plt.Rectangle((r + 0.05, 0.45), 0.9, 0.45, fc=GREY if r == lost else ORANGE, alpha=0.4 if r == lost else 0.9)
    )
    ax.text(r + 0.5, 0.67, " ".join(map(str, kept_sums[r])), ha="center", va="center", color=INK)
    ax.text(
        r + 0.5, 2.85, f"rank {r}" + (" is lost" if r == lost else ""), ha="center", color=RED if r == lost else INK
    )
ax.text(-0.1, 1.9, "its own", ha="right", va="center")
ax.text(-0.1, 0.67, "sum of others'", ha="right", va="center")
ax.text(
    2,
    0.05,
    f"from the sums of the others: {' | '.join(' '.join(map(str, p)) for p in again)}",
    ha="center",
    color=GREEN,
)
ax.set(xlim=(-1.2, 4), ylim=(-0.1, 3.1))
ax.axis("off")
plt.show()

# %% [markdown]
# To write that as a schedule is the puzzle `puzzles.parity`: print it, and try.
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
# Next: `17_networks.py`. What do the links under all this do when several messages need them at once?
#
# This system's page has commands and measurements: [Runs that survive](../docs/systems/survival.md).
