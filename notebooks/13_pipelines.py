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
# # 13. Pipelines
#
# A network that does not fit on one rank can be cut between its layers: rank 0 has the first ones, rank 1 the next, and
# so on. These are **stages**. Activations go from stage to stage, and gradients come back the same way. But while one
# stage works, all others wait. This notebook removes the waiting in four steps, for which the field took five years,
# and then adds what a real pipeline needs:
#
# 1. one batch at a time: the naive way;
# 2. **GPipe**: many micro-batches, all forwards, then all backwards;
# 3. **1F1B**: as fast, with less memory;
# 4. **zero bubble**: backward cut in two;
# 5. schedules as text, and how wrong ones are found;
# 6. **the plan**: where to cut, and on how many ranks to put a stage;
# 7. a pipeline on real ranks, beside its schedule.

# %%
# %load_ext parallel.launch.notebook

# %%
from functools import wraps
from itertools import combinations, islice, pairwise, product

import numpy as np

import checks
import exercises.pipelines as exercise
import nn
from collectives import puzzles
from collectives.puzzles import Stage
from parallel.planning.partition import partition
from parallel.planning.profile import LayerProfile
from parallel.strategies.pipeline.actions import Action, PipelineError, read, write
from parallel.strategies.pipeline.checking import check
from parallel.strategies.pipeline.picture import compare, draw, measured
from parallel.strategies.pipeline.schedules import rows

# %matplotlib inline
checks.style()

# %% [markdown]
# ## 1. One at a time
#
# A stage has two things to do for each micro-batch i: **F** (forward), and later **B** (backward), which takes about
# twice as long: it computes the gradient of the input and that of the weights. F of a stage waits for F of the stage
# before it, B for B of the stage behind it. A **schedule** is the order of each rank's actions. In this project it is a
# generator of actions, one for each rank:


# %%
def one_at_a_time(rank, ranks, micro_batches):
    for i in range(micro_batches):
        yield Action(rank, "F", i)
        yield Action(rank, "B", i)


report = check(one_at_a_time, ranks=4, micro_batches=4)
print(report)
draw(report.spans, title="one at a time")

# %% [markdown]
# `check` has verified that all actions can run. It computed the time (F takes 1 unit, B 2, messages none), and the
# largest number of micro-batches whose activations a rank keeps at once, from F until B (*peak*). A rank works a
# quarter of the time: one rank would be as fast.
#
# ## 2. GPipe
#
# While micro-batch 0 is on stage 1, stage 0 can work on micro-batch 1. Do all forwards, then all backwards, and then
# update once: gradients of micro-batches add up, so this is the same step as before (Huang et al. 2019).
#
# **Exercise 1.** Write it. (The starter code is the naive schedule. In the checker's messages, 2F0 is the forward of
# micro-batch 0 on stage 2.)


# %%
def my_gpipe(rank, ranks, micro_batches):
    """Actions of a rank, which is the stage of the same number."""
    # gap: all forwards, then all backwards
    # for i in range(micro_batches):
    #     yield Action(rank, "F", i)
    #     yield Action(rank, "B", i)
    # solution
    for i in range(micro_batches):
        yield Action(rank, "F", i)
    for i in range(micro_batches):
        yield Action(rank, "B", i)
    # wrong: takes
    # for i in range(micro_batches // 2):
    #     yield Action(rank, "F", i)
    # for i in range(micro_batches // 2):
    #     yield Action(rank, "B", i)
    # for i in range(micro_batches // 2, micro_batches):
    #     yield Action(rank, "F", i)
    # for i in range(micro_batches // 2, micro_batches):
    #     yield Action(rank, "B", i)
    # wrong: cannot run
    # for i in range(micro_batches):
    #     yield Action(rank, "B", i)
    # for i in range(micro_batches):
    #     yield Action(rank, "F", i)
    # end


# %%
def look_at(schedule, ranks=4, micro_batches=8):
    """The report on a schedule; one that cannot run is explained and drawn."""
    made = [checks.call(schedule, r, ranks, micro_batches) for r in range(ranks)]
    actions = [checks.call(wraps(schedule)(lambda row=row: list(islice(row, 1000)))) for row in made]
    try:
        return check(actions, micro_batches=micro_batches)
    except PipelineError as error:
        exercise.draw_rows(actions, error)
        raise checks.NotYet(str(error)) from None


report = look_at(my_gpipe)
said = f"it is right, but takes {report.makespan:g} units, and GPipe takes 33: who waits for whom?"
checks.expect(report.makespan == 33, said, lambda: draw(report.spans, title="yours"))
checks.right("8 micro-batches on 4 stages in 33 units, where one at a time takes 96")
draw(report.spans, title="GPipe")

# %% [markdown]
# The grey triangles at the beginning and the end are the **bubble**: stages wait until the first micro-batch arrives,
# and at the end until the last one has passed. Each rank waits for p - 1 forwards and p - 1 backwards, so with m
# micro-batches
#
# $$ \text{makespan} = (m + p - 1)(t_F + t_B), \qquad \text{idle share} = \frac{p-1}{m+p-1} . $$
#
# More micro-batches make the bubble smaller. Here is the formula, with the checker's results:

# %%
micro = np.array([1, 2, 4, 8, 16, 32, 64])
exercise.draw_bubble(micro)

# %% [markdown]
# On the right is the price: the activations of all micro-batches are kept at once. (GPipe keeps of each stage only its
# input and computes the rest again: a third more work.)
#
# ## 3. 1F1B
#
# The activations of F can be freed as soon as B has used them. So run each backward as early as possible: a few
# forwards to warm up, then alternately one forward and one backward, then the remaining backwards (Narayanan et al.
# 2019). How many forwards to warm up? The last stage needs none: its backward can follow its forward at once. The stage
# before it needs one. So stage s of p needs p - 1 - s.
#
# **Exercise 2** is a puzzle. In puzzles a stage's order is a list of ("F", i) and ("B", i); `Stage(...).rounds(order)`
# adds the messages. Your schedule is checked with them, with sends that wait for the receiver, too.

# %%
print(puzzles.one_f_one_b)


# %%
def my_1f1b(rank, size, count):
    """Rounds of stage `rank` of `size`, `count` micro-batches."""
    # gap: warm up, then alternate, then the rest
    # order = [("F", i) for i in range(count)] + [("B", i) for i in range(count)]
    # solution
    ahead = min(size - 1 - rank, count)
    order = [("F", i) for i in range(ahead)]
    for i in range(count):
        if ahead + i < count:
            order.append(("F", ahead + i))
        order.append(("B", i))
    # wrong: over the limit
    # ahead = min(size, count)
    # order = [("F", i) for i in range(ahead)]
    # for i in range(count):
    #     order.append(("B", i))
    #     if ahead + i < count:
    #         order.append(("F", ahead + i))
    # end
    yield from Stage(rank, size).rounds(order)


# %%
grade = checks.call(puzzles.one_f_one_b.grade, my_1f1b)
checks.graded(grade)
grade.draw()

# %% [markdown]
# The bubble is as large as GPipe's, but stage s keeps at most p - s micro-batches, however many there are. That is why
# 1F1B is the usual schedule.

# %%
exercise.draw_peaks(micro)

# %% [markdown]
# ## 4. Zero bubble
#
# B does two things: **I**, the gradient of the stage's input, and **W**, the gradient of its weights. The stage before
# waits for I. *No* stage waits for W before the update. So W can be done at any time, for example when a rank would be
# idle (Qi et al. 2023). In code each is one line of the chain rule:

# %%
rng = np.random.default_rng(0)
x, W, gy = rng.standard_normal((5, 3)), rng.standard_normal((3, 4)), rng.standard_normal((5, 4))
gx = gy @ W.T  # I: the stage before waits for this
gW = x.T @ gy  # W: needs x and gy, and is needed only for the update

exercise.draw_halves()

# %%
print(puzzles.zero_bubble)

# %% [markdown]
# **Exercise 3.** An order of ("F", i), ("I", i), ("W", i). (The starter code is 1F1B with I and W one after the other:
# it is right, and takes 30.) Hints: warm up with one forward more than 1F1B, p - s; then repeat I, *an older* W, F. The
# first stage does not wait at the beginning, the last one waits longest: so on stage s let W lag behind I by s
# micro-batches.


# %%
def my_zero_bubble(rank, size, count):
    """Rounds of stage `rank` of `size`, `count` micro-batches."""
    # gap: let W come later than its I
    # ahead = min(size - 1 - rank, count)
    # order = [("F", i) for i in range(ahead)]
    # for i in range(count):
    #     order += [("F", ahead + i)] * (ahead + i < count) + [("I", i), ("W", i)]
    # solution
    ahead = min(size - rank, count)
    order = [("F", i) for i in range(ahead)]
    for i in range(count):
        order += [("I", i)] + [("W", i - rank)] * (i >= rank) + [("F", ahead + i)] * (ahead + i < count)
    order += [("W", i) for i in range(max(0, count - rank), count)]
    # wrong: over the limit
    # ahead = min(size - rank, count)
    # order = [("F", i) for i in range(ahead)]
    # for i in range(count):
    #     order += [("I", i), ("W", i)] + [("F", ahead + i)] * (ahead + i < count)
    # end
    yield from Stage(rank, size).rounds(order)


# %%
grade = checks.call(puzzles.zero_bubble.grade, my_zero_bubble)
checks.graded(grade)
grade.draw()

# %% [markdown]
# Can it be shorter? ZB-V folds the pipeline into a V: every rank has *two* stages, one on the way down and one on the
# way up, so the last stage lies on rank 0, which can begin its backwards early. Here are all of them, for 4 ranks and 8
# micro-batches. F, I and W take one unit each (half a unit where a rank has two stages):

# %%
names = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
table = {}
print("schedule      makespan   idle   peak a rank")
for name in names:
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    seconds = {kind: value / chunks for kind, value in {"F": 1, "B": 2, "I": 1, "W": 1}.items()}
    report = check(name, 4, 8, seconds)
    table[name] = report.makespan, max(report.idle_share), max(report.peaks) / chunks
    print(f"{name:12} {report.makespan:9g} {table[name][1]:6.0%}   {table[name][2]:g}")

exercise.draw_table(table, names)
assert table["gpipe"][0] == table["1f1b"][0] == 33 and table["zb-h1"][0] == 27 and table["zb-v"][1] == 0

# %%
draw(check("zb-v", 4, 8, {"F": 0.5, "B": 1, "I": 0.5, "W": 0.5}).spans, title="ZB-V: no bubble")

# %% [markdown]
# "Idle" is within a rank's own span, from its first action to its last. ZB-H2 has none, though its makespan is that of
# ZB-H1: ranks begin and end at different times. It is faster where ranks do not synchronize between steps.
#
# ## 5. Schedules as text, and wrong ones
#
# A schedule can be written as text, a row of CSV for each rank; PyTorch reads and writes the same format. `2F0` is
# forward of micro-batch 0 on stage 2.

# %%
text = write(rows("1f1b", 3, 3))
print(text)
assert check(read(text)).makespan == 15
draw(check(read(text)).spans, title="read from text")

# %% [markdown]
# What does the checker say about a wrong one? Here rank 0's backward comes before the last stage's forward. The ranks
# wait for each other in a circle; on a cluster such a job hangs until its time limit:

# %%
wrong = [
    [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
    [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
]
try:
    check(wrong)
    raise AssertionError("it should have been refused")
except PipelineError as error:
    print(error)
    done = [wrong[0][:1], wrong[1][:1]]  # what ran before

exercise.draw_standstill(wrong, done)

# %% [markdown]
# **Exercise 4.** Write the core of the checker: when is the last action done? `orders[s]` is the list of ("F", i) and
# ("B", i) of stage s, of as many stages as there are lists. F takes 1 and B takes 2, messages nothing. F of micro-batch
# i waits for F of i on the stage before; B for B of i on the stage behind, and on the last stage for its own F. If the
# stages wait for each other for ever, return `np.inf`.


# %%
def my_finish(orders):
    """When the last action of all is done."""
    done, at, now = {}, [0] * len(orders), [0.0] * len(orders)  # done[kind, i, stage]: when
    # gap: as long as some stage can run its next action, run it: when does it begin?
    # return max(sum(1 if kind == "F" else 2 for kind, _ in order) for order in orders)
    # solution
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(orders):
            while at[s] < len(order):
                kind, i = order[at[s]]
                before = (kind, i, s - 1 if kind == "F" else s + 1)
                if kind == "B" and s == len(orders) - 1:
                    before = ("F", i, s)
                first = kind == "F" and s == 0
                if not first and before not in done:
                    break
                now[s] = max(now[s], 0 if first else done[before]) + (1 if kind == "F" else 2)
                done[kind, i, s] = now[s]
                at[s] += 1
                moved = True
    return max(now) if all(a == len(order) for a, order in zip(at, orders, strict=True)) else np.inf
    # wrong: infinity (np.inf) is expected
    # for _ in range(sum(map(len, orders))):
    #     for s, order in enumerate(orders):
    #         while at[s] < len(order):
    #             kind, i = order[at[s]]
    #             before = (kind, i, s - 1 if kind == "F" else s + 1)
    #             if kind == "B" and s == len(orders) - 1:
    #                 before = ("F", i, s)
    #             first = kind == "F" and s == 0
    #             if not first and before not in done:
    #                 break
    #             now[s] = max(now[s], 0 if first else done[before]) + (1 if kind == "F" else 2)
    #             done[kind, i, s] = now[s]
    #             at[s] += 1
    # return max(now)
    # end


# %%
exercise.check_finish(my_finish)

# %% [markdown]
# ## 6. The plan
#
# Where should the network be cut? A pipeline is as fast as its slowest stage.
#
# **Exercise 5.** Cut layers that take `seconds[l]` into p consecutive stages, so that the slowest stage is as fast as
# possible. (There are few layers: `combinations(range(1, len(seconds)), p - 1)` yields all ways to cut.)


# %%
def my_cuts(seconds, p):
    """p - 1 cuts in order: cut c lies before layer c."""

    # gap: of all cuts those with the fastest slowest stage
    # return [round(k * len(seconds) / p) for k in range(1, p)]
    # solution
    def slowest(cuts):
        ends = [0, *cuts, len(seconds)]
        return max(sum(seconds[a:b]) for a, b in pairwise(ends))

    return min(combinations(range(1, len(seconds)), p - 1), key=slowest)
    # wrong: is possible
    # cuts, total = [], 0
    # for l, t in enumerate(seconds):
    #     if l and len(cuts) < p - 1 and total >= sum(seconds) / p:
    #         cuts.append(l)
    #         total = 0
    #     total += t
    # return (cuts + [c for c in range(1, len(seconds)) if c not in cuts])[: p - 1] and sorted(
    #     (cuts + [c for c in range(1, len(seconds)) if c not in cuts])[: p - 1]
    # )
    # end


# %%
exercise.check_cuts(my_cuts)

# %% [markdown]
# A stage that is too slow can be put on several ranks, which take micro-batches in turn (and sum their gradients).
# PipeDream (Harlap et al. 2018) finds the best plan with a dynamic programme. Layers i ... j on m ranks take, for each
# mini-batch, with weights of w bytes and bandwidth B,
#
# $$ T(i, j, m) = \frac1m \max\Big( \sum_{l=i}^{j} T_l,\; \frac{2 (m-1) \sum_l w_l}{B} \Big), $$
#
# and the best plan for the first j layers on m ranks either is one stage, or has a last stage of layers s + 1 ... j on
# m' ranks:
#
# $$ A(j, m) = \min\Big( T(0, j, m),\; \min_{s,\,m'} \max\big( A(s, m-m'),\; 2 a_s / B,\; T(s+1, j, m') \big) \Big) . $$
#
# Take five layers: three with much computation and few weights (convolutions), two with many weights.

# %%
T, a, w, B = [4, 4, 4, 1, 1], [8, 6, 2, 1, 1], [0.1, 0.2, 0.3, 20, 10], 10.0
exercise.draw_layers(T, a, w)

# %% [markdown]
# **Exercise 6.** Write A(j, m) by recursion; the first j layers are those with numbers 0 ... j - 1, and `stage(i, j,
# m)` is T(i, ..., j - 1; m). So a last stage of the layers s ... j - 1 on n ranks leaves the first s layers for m - n
# ranks, and the link before it carries a[s - 1]. (The starter code has only one stage: data parallelism.)


# %%
def stage(i, j, m):
    """Seconds a mini-batch of layers i ... j-1 on m ranks."""
    return max(sum(T[i:j]), 2 * (m - 1) * sum(w[i:j]) / B) / m


def my_plan(j, m):
    """Seconds a mini-batch, at best, of the first j layers on m ranks."""
    # gap: the best of one stage and of all last stages
    # return stage(0, j, m)
    # solution
    best = stage(0, j, m)
    for s, n in product(range(1, j), range(1, m)):
        best = min(best, max(my_plan(s, m - n), 2 * a[s - 1] / B, stage(s, j, n)))
    return best
    # wrong: bandwidth 1
    # best = stage(0, j, m)
    # for s, n in product(range(1, j), range(1, m)):
    #     best = min(best, max(my_plan(s, m - n), stage(s, j, n)))
    # return best
    # wrong: seconds of the best plan
    # best = stage(0, j, m)
    # for s in range(1, j):
    #     if m > 1:
    #         best = min(best, max(my_plan(s, m - 1), 2 * a[s - 1] / B, stage(s, j, 1)))
    # return best
    # end


# %%
ranks = range(1, 9)

# first with a slow link, which must be counted; then the layers the other way round
networks = (1.0, T, a, w), (10.0, T[::-1], a[::-1], w[::-1]), (10.0, T, a, w)
draw_plans = exercise.plans_of(ranks, stage)
for B, T, a, w in networks:
    layers = [
        LayerProfile(str(i), t / 3, 2 * t / 3, out, weights)
        for i, (t, out, weights) in enumerate(zip(T, a, w, strict=True))
    ]
    mine = np.array([checks.numbers(my_plan, 5, m) for m in ranks])
    wanted = np.array([partition(layers, m, B).seconds for m in ranks])
    checks.same(
        mine,
        wanted,
        f"seconds of the best plan on 1, 2, ... ranks, bandwidth {B:g}",
        draw=exercise.plans_of(ranks, stage),
    )
checks.right("as parallel.planning.partition, for 1 to 8 ranks")
draw_plans(mine, wanted)
plan = partition(layers, 8, B)
print(plan)

# %% [markdown]
# Eight ranks: the three convolution layers on seven of them, the two layers with most of the weights on one, 2.0
# seconds. Data parallelism over all eight takes 5.36, because it has to sum the gradients of many weights that need
# little computation. For VGG-16 on 8 machines the published plan has the same shape, 7-1, and 95% less communication
# (Harlap et al. 2018). Time of each stage, and of the link, for both:

# %%
exercise.draw_plan(plan, stage, a, B)

# %% [markdown]
# ## 7. On real ranks
#
# `parallel.Pipeline` trains with any of these schedules, yours too, and computes what one process computes. Two ranks,
# 1F1B with 4 micro-batches, in float64:


# %%
def work():
    """(network, loss, optimizer): the same in every process."""
    layers = [nn.Linear(64, 400), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(400, 400), nn.ReLU()]
    layers += [nn.Linear(400, 10)]
    return nn.Network(nn.Sequential(*layers), (64,), np.float64), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9)


def steps(trainer, count=8):
    """Losses on batches of 256 samples."""
    data = nn.data.load("digits", flat=True, dtype=np.float64)
    batches = [batch for epoch in (0, 1) for batch in nn.Loader(data.train, 256, shard=trainer.shard).epoch(epoch)]
    return [trainer.step(*batch) for batch in batches[:count]]


one = nn.Trainer(*work())
losses_one = steps(one)
alone = one.state_dict()

# %%
# %%mpi -n 2 --with work,steps,np,nn -o losses,state,events
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives import Communicator
from parallel import Pipeline
from parallel.reports.timeline import Timeline

limits = threadpool_limits(1, user_api="blas")
communicator = Communicator(MPI.COMM_WORLD)
trainer = Pipeline(*work(), communicator, schedule="1f1b", micro_batches=4, cuts=[5])
timeline = Timeline(communicator)
timeline.watch(trainer)
losses = steps(trainer)
events = timeline.merge()
state = {name: array for name, array in trainer.state_dict().items() if name.startswith("param/")}
trainer.close()

# %%
far = max(np.abs(state[0][name] - alone[name]).max() for name in state[0])
print(
    f"losses of one process and of two stages: {losses_one[-1]:.6f}, {losses[0][-1]:.6f}; parameters apart by {far:.1e}"
)
assert far < 1e-12 and np.allclose(losses[0], losses_one, rtol=1e-12)
schedule = rows("1f1b", 2, 4)
compare(measured(events[0], schedule), check(schedule).spans)

# %% [markdown]
# Above is a measured step; below is its schedule, with messages that take no time. Real stages differ a little in
# length, and other programs may use the cores.
#
# ## Try
#
# - Give your own generator to `Pipeline(..., schedule=my_gpipe)`.
# - A stage whose backward takes three times its forward: `check("1f1b", 4, 8, {"F": 1, "B": 3})`. And one slow stage:
#   `seconds` may be a function of the action.
# - `python scripts/train.py --ranks 2 --strategy pipeline --pipeline zb-h1:micro=8 --timeline`
# - `python scripts/estimate.py mlp:784,1024,1024,10 --ranks 4 --measure` measures the layers here and plans.
#
# *Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (PipeDream, 1F1B); Narayanan et al. 2021 (interleaved);
# Qi et al. 2023, 2024 (zero bubble, V); Harlap et al. 2018 (the plan).*
#
# Next: `14_tensor_parallelism.py`, which cuts the layers themselves.
#
# This system's page has commands and measurements: [Pipelines](../docs/systems/pipeline.md).
