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
# # 8. Data parallelism: master, parameter server, allreduce
#
# The gradient of a batch is a **sum over its samples**. So several ranks can each take some samples, and their
# gradients are added up. That is data parallelism. Its variants differ in *which ranks add, and which have the
# parameters*:
#
# 1. on paper: why it is exact, and the one mistake;
# 2. **parameter servers**: some ranks keep the parameters, the others compute. You write one;
# 3. **master and workers**: one rank has everything, and hands out work;
# 4. **decentralised**: every rank has the parameters, and all add up together;
# 5. the traffic of the busiest rank: why the third variant won;
# 6. one slow rank, and the ranks that wait for it.
#
# All of them compute what one process computes. That is checked, every time.

# %%
# %load_ext parallel.launch.notebook
# %matplotlib inline

# %%
import matplotlib.pyplot as plt
import numpy as np

import checks
import collectives
import exercises.data_parallel as exercise
import nn
from collectives import Compute, draw_timeline, price
from collectives.algorithms import allreduce, broadcast, gather, reduce, scatter
from collectives.pricing.networks import Network
from nn.core.layer import Sequential
from parallel.sync.push_pull import pull, push
from parallel.reports.timeline import excerpt

checks.style()

# %% [markdown]
# ## On paper
#
# A linear model with three weights, and the mean of the squared errors over all B samples as its cost:
#
# $$ C(w) = \frac{1}{2B} \sum_{i=1}^{B} (x_i \cdot w - y_i)^2, \qquad
#    \nabla C = \frac{1}{B} \sum_{i=1}^{B} (x_i \cdot w - y_i)\, x_i. $$
#
# Half of the samples can be summed on one rank, half on another, and the two sums added. But each rank must divide by
# B, the number of samples of *all* ranks, not by its own number. Then the result is also right for uneven shares.

# %%
rng = np.random.default_rng(0)
B = 101  # odd, so that two ranks get different numbers of samples
w_true = np.array([2.0, -1.0, 0.5])
X = rng.standard_normal((B, 3))
y = X @ w_true + 0.1 * rng.standard_normal(B)


def gradient(w, X, y, total):
    """This share of the samples' part of the gradient; total is the number of samples of all ranks together."""
    return X.T @ (X @ w - y) / total


w, path_alone = np.zeros(3), []
for _ in range(40):
    w = w - 0.2 * gradient(w, X, y, len(X))
    path_alone.append(w)
path_alone = np.array(path_alone)
print("one process:", path_alone[-1])

# %% [markdown]
# Now on two ranks. The ranks do not know this notebook; `--with` gives them what they need: `gradient` as source, `X`
# and `y` as arrays.
#
# **Exercise 1.** One line is missing, so the two ranks train separately: add it. `comm.Allreduce(MPI.IN_PLACE, g)`
# replaces g by the sum of all ranks' g. And check what the gradient is divided by.
#
# (A wrong sum raises no error: compare the paths.)

# %%
# %%mpi -n 2 --with gradient,X,y -o path,count
import numpy as np
from mpi4py import MPI

from collectives import Communicator

comm = Communicator(MPI.COMM_WORLD)
rank, size = comm.Get_rank(), comm.Get_size()
mine, targets = X[rank::size], y[rank::size]  # this rank's share
count = len(mine)

w, path = np.zeros(3), []
for _ in range(40):
    # gap: this rank's part of the gradient of all samples, then the sum
    # g = gradient(w, mine, targets, len(mine))
    # solution
    g = gradient(w, mine, targets, len(X))
    comm.Allreduce(MPI.IN_PLACE, g)
    # wrong: 2 such means are summed
    # g = gradient(w, mine, targets, len(mine))
    # comm.Allreduce(MPI.IN_PLACE, g)
    # wrong: most of the gradient is missing
    # g = gradient(w, mine, targets, len(X))
    # wrong: the mean of the ranks' means is not the mean
    # g = gradient(w, mine, targets, len(mine))
    # comm.Allreduce(MPI.IN_PLACE, g)
    # g /= size
    # end
    w -= 0.2 * g
    path.append(w.copy())


# %%
print("samples:", count)
exercise.check_ranks(path, path_alone, X, y)
exercise.draw_paths(path, path_alone)
plt.show()

# %% [markdown]
# Without the sum there are two different models, each from half of the data. With the sum, but divided by the rank's
# own number of samples, the step is about twice too long: a mistake that real programs contain. (With uneven shares the
# result is not even the gradient.)
#
# Many programs do it differently: each rank computes its *mean* gradient, and the means are combined. That is right
# only if each mean is weighted by its number of samples.
#
# **Exercise 2.** Compute the gradient over all samples from the means of the ranks and their numbers of samples.


# %%
def combine(means, counts):
    """The mean over all samples; means is a list of arrays."""
    # gap: weighted by the samples
    # return np.mean(means, axis=0)
    # solution
    return sum(n * g for n, g in zip(counts, means, strict=True)) / sum(counts)
    # wrong: the mean over all samples
    # return sum(n * g for n, g in zip(counts, means, strict=True)) / len(counts)
    # end


# %%
exercise.check_combine(combine)

# %% [markdown]
# ## A parameter server
#
# In the first systems for large networks (DistBelief, 2012) the parameters lived on **servers**. In every step workers
# *push* gradients, the server adds them up and makes the step, and the workers *pull* the new parameters.
#
# **Exercise 3.** Rank 3 serves three workers. Write its step. It adds in the order of the ranks, whichever gradient
# arrives first, so that every run gives the same bits. (Worker 0 is late here, on purpose.)

# %%
# %%mpi -n 4 --with gradient,X,y -o path -t 30
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
server, workers = size - 1, range(size - 1)
w, path, got = np.zeros(3), [], np.empty(3)
for _ in range(40):
    if rank in workers:
        mine, targets = X[rank :: size - 1], y[rank :: size - 1]
        time.sleep(0.005 if rank == 0 else 0)
        comm.Send(gradient(w, mine, targets, len(X)), dest=server)  # push
        comm.Recv(w, source=server)  # pull
    else:
        # gap: add up what all workers send, one step of rate 0.2, and the new w to all
        # for worker in workers:
        #     comm.Recv(got, source=worker)
        # w -= 0.2 * got
        # solution
        total = np.zeros(3)
        for worker in workers:
            comm.Recv(got, source=worker)
            total += got
        w -= 0.2 * total
        # wrong: in the order in which gradients came
        # total = np.zeros(3)
        # for worker in workers:
        #     comm.Recv(got, source=MPI.ANY_SOURCE)
        #     total += got
        # w -= 0.2 * total
        # wrong: its path
        # total = np.zeros(3)
        # for worker in workers:
        #     comm.Recv(got, source=worker)
        #     total += got
        # w -= 0.2 * total / len(workers)
        # end
        for worker in workers:
            comm.Send(w, dest=worker)
    path.append(w.copy())

# %%
exercise.check_server(path, path_alone, X, y, gradient)

# %% [markdown]
# ## A real network
#
# From here on two hidden layers, and batches of 512 handwritten digits, in float64 so that rounding is far away. First
# in one process. Then each family on the same four ranks: a **session** (`--session team`), whose ranks stay from cell
# to cell with all that they have imported.


# %%
def work():
    """(network, loss, optimizer): the same in every process."""
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Network(Sequential(*layers), (64,), np.float64), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9)


def train(trainer, epochs=4):
    """Train on the trainer's part of every batch; returns the losses."""
    data = nn.data.load("digits", flat=True, dtype=np.float64)
    loader = nn.Loader(data.train, 512, shard=trainer.shard)
    return [trainer.step(*batch) for epoch in range(epochs) for batch in loader.epoch(epoch)]


one = nn.Trainer(*work())
losses = train(one)
w_one = one.flat_parameters.copy()
print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, {one.network.layout.count:,} parameters")

# %% [markdown]
# What would it look like on four machines? Schedules can contain computation: `Compute(name, ..., seconds)`. So each
# family is a schedule, and the simulator draws its timeline. Forward takes 3 units of time, backward 6 and the update
# 1, for a quarter of the batch; the parameters are 12 elements of 0.25 units each, and a message takes 0.2 units to
# start.

# %%
PARAMETERS, four = 12, Network.hockney(0.2, 0.25)


def compute(name, seconds):
    return (Compute(name, (), (), seconds),)


def master_workers(rank, size, count):
    """Rank 0 deals out samples and parameters, gathers outputs, scatters the loss's gradient, sums, and updates."""
    for _ in range(2):
        yield from scatter.flat(rank, size, 8)
        yield from broadcast.binomial(rank, size, count)
        yield compute("forward", 3.0)
        yield from gather.flat(rank, size, 4)
        if rank == 0:
            yield compute("loss", 0.5)
        yield from scatter.flat(rank, size, 4)
        yield compute("backward", 6.0)
        yield from reduce.binomial(rank, size, count)
        if rank == 0:
            yield compute("update", 1.0)


def server_step(rank, size, count):
    """Three workers, and a server on rank 3."""
    for _ in range(2):
        if rank < size - 1:
            yield compute("forward", 4.0)
            yield compute("backward", 8.0)
        yield from push(rank, size, count, servers=1)
        if rank == size - 1:
            yield compute("update", 1.0)
        yield from pull(rank, size, count, servers=1)


def decentralised(rank, size, count):
    """All compute, all sum, all update."""
    for _ in range(2):
        yield compute("forward", 3.0)
        yield compute("backward", 6.0)
        yield from allreduce.ring(rank, size, count)
        yield compute("update", 1.0)


families = {"master and workers": master_workers, "one parameter server": server_step, "allreduce": decentralised}
figure, axes = plt.subplots(3, 1, figsize=(10, 8.5), layout="none", sharex=True)
plt.subplots_adjust(left=0.08, right=0.98, top=0.92, bottom=0.1, hspace=0.85)
for ax, (name, family) in zip(axes, families.items(), strict=True):
    draw_timeline(price(family, 4, PARAMETERS, 1, four, trace=True), ax, title=f"{name}: two steps", counted_in="units")
    ax.set_xlim(0, 60)
plt.show()

# %% [markdown]
# Grey is waiting, for messages or for other ranks. The workers of the master are idle while it hands out samples,
# computes the loss and updates. The server is idle while workers compute, and they are idle while it receives one
# vector after the other through its one port. At the bottom all ranks do the same.
#
# ## Master and workers
#
# The real one, as in `--strategy dp`. `Timeline` records what every rank does and when.

# %%
# %%mpi --session team -n 4 --with work,train,nn,np,Sequential -o w_dp,events
from mpi4py import MPI

from collectives import Communicator
from parallel import DataParallel, DistributedDataParallel, ParameterServer
from parallel.reports.timeline import Timeline

communicator = Communicator(MPI.COMM_WORLD)
trainer = DataParallel(*work(), communicator)
timeline = Timeline(communicator)
timeline.watch(trainer)
train(trainer)
events, w_dp = timeline.merge(), trainer.flat_parameters

# %%
assert np.abs(w_dp[0] - w_one).max() < 1e-12, "the master has the parameters of one process"
draw_timeline(excerpt(events[0], steps=2), title="master and workers: two steps, measured")

# %% [markdown]
# (Four ranks on a laptop share its cores, so bars are longer than on four machines, and include waiting for a core. The
# picture above shows four machines; the order of events is the same.)
#
# ## The parameter server
#
# Yours had one server for three numbers. The library divides the parameters among any number of servers. Push and pull
# are schedules like all others, and the code that runs is drawn here: on the left two workers, ranks 0 and 1, and two
# servers with half of the parameters each; on the right a server on every worker, with a quarter each.


# %%
def step(rank, size, count, **servers):
    """Gradients to the servers in round 0, parameters to the workers in round 1."""
    yield from push(rank, size, count, **servers)
    yield from pull(rank, size, count, **servers)


figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), layout="none")
figure.subplots_adjust(left=0.06, right=0.97, bottom=0.28, top=0.79)
collectives.draw(step, 4, 12, axes[0], title="two workers, two servers", servers=2)
collectives.draw(step, 4, 12, axes[1], title="a server on every worker", servers=4, place="workers")
plt.show()

# %%
# %%mpi --session team -o w_ps,events
trainer = ParameterServer(*work(), communicator, servers=1)
timeline = Timeline(communicator)
timeline.watch(trainer)
train(trainer)
events, w_ps = timeline.merge(), trainer.flat_parameters

# %%
assert all(np.abs(w - w_one).max() < 1e-12 for w in w_ps), "workers and server have the parameters of one process"
assert np.array_equal(w_ps[0], w_ps[1]), "the workers have the same bits"
draw_timeline(excerpt(events[0], steps=3), title="one parameter server, rank 3, measured")

# %% [markdown]
# Look at the right-hand picture of the servers once more, and follow one colour: in round 0 it is added up on one rank,
# in round 1 it goes to all ranks. After the push each rank has the sum of one quarter, after the pull every rank has
# all of it. That is a **reduce-scatter** and an **allgather**: with as many servers as workers the parameter server
# *has become* an allreduce.
#
# ## All ranks are equal
#
# Every rank has all parameters and an optimizer. Gradients are summed by an allreduce, and all make the same update.

# %%
# %%mpi --session team -o w_ddp,events
ring = Communicator(MPI.COMM_WORLD, allreduce="ring")
trainer = DistributedDataParallel(*work(), ring, node_memory="off", overlap="none")  # as between machines
timeline = Timeline(ring)
timeline.watch(trainer)
train(trainer)
events, w_ddp = timeline.merge(), trainer.flat_parameters.copy()
trainer.close()

# %%
assert all(np.array_equal(w, w_ddp[0]) for w in w_ddp), "all ranks have the same bits"
assert np.abs(w_ddp[0] - w_one).max() < 1e-12, "and the parameters of one process"
draw_timeline(excerpt(events[0], steps=4), title="decentralised: four steps, measured")

# %% [markdown]
# Here all gradients are summed after backward. But the last layer's gradients are ready long before the first layer's,
# and can be sent while backward goes on. A message for every layer would cost many starts (notebook 5), so layers are
# combined into **buckets** of a few megabytes, in the order in which backward finishes them.
#
# **Exercise 4.** `sizes[l]` are the bytes of layer l's gradients. Fill buckets from the last layer to the first, each
# as full as `limit` allows; a layer that is larger than the limit has a bucket of its own.


# %%
def buckets(sizes, limit):
    """A list of buckets, in the order in which they are ready; each is a list of layer numbers."""
    found = []
    # gap: into the last bucket if it fits, else into a new one
    # for layer in range(len(sizes)):
    #     found.append([layer])
    # solution
    for layer in reversed(range(len(sizes))):
        if found and sum(sizes[l] for l in found[-1]) + sizes[layer] <= limit:
            found[-1].append(layer)
        else:
            found.append([layer])
    # wrong: would fit into the bucket before it
    # found = [[layer] for layer in reversed(range(len(sizes)))]
    # wrong: the bucket of layers
    # for layer in reversed(range(len(sizes))):
    #     if found and sum(sizes[l] for l in found[-1]) < limit:
    #         found[-1].append(layer)
    #     else:
    #         found.append([layer])
    # end
    return found


# %%
exercise.check_buckets(buckets)

# %% [markdown]
# **Exercise 5.** How long is a step then? Forward runs, then backward, bucket after bucket. The sum of a bucket starts
# when its gradients are ready *and* the sum of the bucket before is done. The update waits for the last sum; it takes
# no time here.


# %%
def step_seconds(forward, backward, sums):
    """Seconds of a step; backward[k] is what backward computes until bucket k is full, sums[k] what its sum takes."""
    # gap: when is bucket k full, and when is the network free for it
    # return forward + max(sum(backward), sum(sums))
    # solution
    ready = free = forward
    for computing, summing in zip(backward, sums, strict=True):
        ready += computing
        free = max(ready, free) + summing
    return free
    # wrong: everything one after the other
    # return forward + sum(backward) + sum(sums)
    # wrong: the last one leaves when backward is over
    # return forward + max(sum(backward), backward[0] + sum(sums))
    # end


# %%
exercise.check_overlap(step_seconds)

# %%
exercise.draw_overlap(step_seconds)

# %% [markdown]
# More buckets leave earlier, and cost more starts. PyTorch's default is 25 MB.
#
# ## What the busiest rank carries
#
# A picture of four ranks says little about forty. So count: how many vectors of n parameters does the busiest rank
# receive in a step, with s servers on ranks of their own and w workers?
#
# **Exercise 6.** What does a server receive from each worker? And what does a worker receive?


# %%
def busiest(workers, servers):
    """Vectors of n that the busiest rank receives in a step."""
    # gap: the larger of what a server receives and what a worker receives
    # return workers
    # solution
    return max(workers / servers, 1.0)
    # wrong: vectors for (workers, servers)
    # return workers / servers
    # wrong: vectors for (workers, servers)
    # return max(workers // servers, 1.0)
    # wrong: vectors for (workers, servers)
    # return max(workers / servers, servers)
    # end


# %%
def counted(size, *schedules, **options):
    """The same from the schedules themselves: the most that a rank sends, or receives, in units of n."""
    N = 60_000
    sent, received = np.zeros(size), np.zeros(size)
    for schedule in schedules:
        for flight in price(schedule, size, N, trace=True, **options).trace.flights:
            sent[flight.source] += flight.send.hi - flight.send.lo
            received[flight.dest] += flight.send.hi - flight.send.lo
    return max(sent.max(), received.max()) / N


cases = [(1, 1), (4, 1), (12, 1), (6, 2), (5, 2), (12, 4), (8, 8), (3, 6)]
want = [counted(w + s, push, pull, servers=s) for w, s in cases]
checks.same(
    [checks.call(busiest, w, s) for w, s in cases],
    want,
    "vectors for (workers, servers) in " + ", ".join(f"({w}, {s})" for w, s in cases),
    tolerance=1e-3,
)
checks.right("as counted in every message of push and pull")

# %%
ranks = range(2, 33, 2)
moved = {
    "master and workers (trees)": [counted(p, broadcast.binomial, reduce.binomial) for p in ranks],
    "one parameter server": [busiest(p - 1, 1) for p in ranks],
    "as many servers as workers": [busiest(p // 2, p // 2) for p in ranks],
    "a server on every worker": [counted(p, push, pull, servers=p, place="workers") for p in ranks],
    "ring allreduce": [counted(p, allreduce.ring) for p in ranks],
}
network = Network.hockney(20e-6, 8e-10)  # 10 Gbit/s, 20 us
count, sizes, segment = 25_000_000, [2, 4, 8, 16, 32], {"segment": 1 << 20}
seconds = {
    "one parameter server": [
        sum(price(s, p, count, network=network, servers=1, **segment).seconds for s in (push, pull)) for p in sizes
    ],
    "a server on every worker": [
        sum(price(s, p, count, network=network, servers=p, place="workers", **segment).seconds for s in (push, pull))
        for p in sizes
    ],
    "ring allreduce": [price(allreduce.ring, p, count, network=network).seconds for p in sizes],
}
exercise.draw_busiest(moved, ranks, seconds, sizes)
assert seconds["one parameter server"][-1] > 10 * seconds["ring allreduce"][-1]

# %% [markdown]
# With one server the traffic grows linearly. With the master's trees it grows with the logarithm (plus the batch, the
# outputs, and waiting). With as many servers as workers it is n, but only half of the ranks compute. A server on every
# worker carries exactly what a ring does, **2 (p - 1)/p n**: less than 2 n, however many ranks there are.
#
# ## One slow rank
#
# Synchronous training runs at the pace of the slowest rank. Here rank 1 takes 30 ms longer in every step. See what the
# *other* ranks do in that time.

# %%
# %%mpi --session team -o events
import time


class Late(nn.CrossEntropyLoss):
    def __call__(self, *arguments):
        time.sleep(0.03 if ring.rank == 1 else 0)
        return super().__call__(*arguments)


network, _, optimizer = work()
trainer = DistributedDataParallel(network, Late(), optimizer, ring, node_memory="off", overlap="none")
timeline = Timeline(ring)
timeline.watch(trainer)
train(trainer, epochs=2)
events = timeline.merge()
trainer.close()

# %%
# %mpi --end team

# %%
draw_timeline(excerpt(events[0], steps=3), title="rank 1 is slow, measured")

# %% [markdown]
# Rank 1 computes for most of the time; the others' bars are grey: they wait for it. On four machines, simulated:


# %%
def one_slow(rank, size, count):
    for _ in range(2):
        yield compute("forward", 3.0 * (5 if rank == 1 else 1))
        yield compute("backward", 6.0 * (5 if rank == 1 else 1))
        yield from allreduce.ring(rank, size, count)
        yield compute("update", 1.0)


draw_timeline(
    price(one_slow, 4, PARAMETERS, 1, four, trace=True), title="rank 1 takes five times as long", counted_in="units"
)

# %% [markdown]
# There are two remedies: do not wait for it (notebook 10), or go on without it (notebook 16).
#
# **To try further.** Give the parameter server two servers (`servers=2`) and draw its timeline. Why do two servers and
# two workers not compute as fast as three workers and one? `place="workers", servers=1`: what does the busiest rank
# carry?
#
# The same from the command line, with the picture in `timeline.png`:
#
#     python scripts/train.py --strategy dp  --ranks 4 --timeline
#     python scripts/train.py --strategy ps  --ranks 4 --servers 2 --timeline
#     python scripts/train.py --strategy ddp --ranks 4 --timeline
#
# Next: `09_large_batches`: with more ranks the batch grows. How large may it be?
#
# *Sources: Dean et al. 2012 (DistBelief); Li et al. 2014 (parameter servers); Patarasuk, Yuan 2009; Li et al. 2020
# (PyTorch's data parallelism).*
#
# This system's page has commands and measurements: [Data parallelism](../docs/systems/data_parallel.md).
