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
# # Data parallelism: who waits for whom
#
# The gradient of a batch is a sum over its samples. So several ranks can each take some samples, and somebody must add
# up what they find. *Who adds, and who has the parameters*, makes three families:
#
# 1. **master and workers**: one rank has everything and deals out work (`--strategy dp`),
# 2. **parameter servers**: some ranks keep the parameters, the others compute (`--strategy ps`),
# 3. **decentralised**: everybody has the parameters, and all add up together (`--strategy ddp`).
#
# All three compute what one process computes. Here we run each on four ranks, look at who waits for whom, and count
# what the busiest rank has to move.

# %%
# %load_ext parallel.launch.notebook
# %matplotlib inline

# %%
import matplotlib.pyplot as plt
import numpy as np

import collectives
import nn
from collectives import price
from collectives.algorithms import allreduce, broadcast, reduce
from collectives import draw_timeline
from collectives.pricing.networks import Network
from nn.core.layer import Sequential
from parallel.exchange.push_pull import pull, push
from parallel.reports.timeline import excerpt

# %% [markdown]
# ## The work, in one process
#
# A network of two hidden layers, and batches of 512 handwritten digits, in float64 so that rounding is far away.


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


one = nn.Serial(*work())
losses = train(one)
w_one = one.parameters.copy()
print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, {one.network.layout.count:,} parameters")

# %% [markdown]
# ## 1. Master and workers
#
# Rank 0 is the master: it alone reads data, and it alone has an optimizer. In every step it
# **scatters** the batch, **broadcasts** the parameters; all compute their outputs; it **gathers** the outputs, computes
# the **loss** and **scatters its gradient**; all backpropagate; it **reduces** (adds up) the gradients and **updates**.
#
# `Timeline` notes what every rank does and when. Grey is waiting.

# %%
# %%mpi -n 4 --with work,train,nn,np,Sequential -o w_dp,events
from mpi4py import MPI

from collectives import Communicator
from parallel import DataParallel
from parallel.reports.timeline import Timeline

communicator = Communicator(MPI.COMM_WORLD)
trainer = DataParallel(*work(), communicator)
timeline = Timeline(communicator)
timeline.watch(trainer)
train(trainer)
events, w_dp = timeline.merge(), trainer.parameters

# %%
assert np.abs(w_dp[0] - w_one).max() < 1e-12, "the master has the parameters of one process"
draw_timeline(excerpt(events[0], steps=2), title="master and workers: two steps")

# %% [markdown]
# While the master reads, computes the loss or updates, all others stand still; and in every step *all* parameters leave
# it, and *all* gradients come back. (Four ranks on a laptop share its cores, so bars are longer than they would be on
# four machines; the order of things is the same.)
#
# ## 2. Parameter servers
#
# The master's two jobs are separated. **Workers** read their own part of the batch and compute; a **server** has
# the parameters and the optimizer. In every step workers **push** gradients, the server adds them up in worker order
# and updates, and the workers **pull** parameters. Push and pull are schedules like the ring of the last notebook; the
# very text that runs is drawn here, one after the other, with three workers and one server, rank 3. Every arrow is a
# whole vector:


# %%
def step(rank, size, count, **servers):
    """Gradients to the servers in round 1, parameters to the workers in round 2."""
    yield from push(rank, size, count, **servers)
    yield from pull(rank, size, count, **servers)


collectives.draw(step, 4, 12, title="push to one server, then pull", servers=1)

# %%
# %%mpi -n 4 --with work,train,nn,np,Sequential -o w_ps,events
from mpi4py import MPI

from collectives import Communicator
from parallel import ParameterServer
from parallel.reports.timeline import Timeline

communicator = Communicator(MPI.COMM_WORLD)
trainer = ParameterServer(*work(), communicator, servers=1)
timeline = Timeline(communicator)
timeline.watch(trainer)
train(trainer)
events, w_ps = timeline.merge(), trainer.parameters

# %%
assert all(np.abs(w - w_one).max() < 1e-12 for w in w_ps), "workers and server have the parameters of one process"
assert np.array_equal(w_ps[0], w_ps[1]), "the workers have the same bits"
draw_timeline(excerpt(events[0], steps=3), title="one parameter server, rank 3")

# %% [markdown]
# Now workers wait for the server, and the server for the workers. And everything passes through **one** rank: with w
# workers it receives w vectors, and sends w.
#
# The way out is to **cut the parameters among many servers**: on the left two of them, ranks 2 and 3, each with half.
# They may live on the workers too, so that no rank stands idle: on the right each worker serves a quarter. A colour is
# a place in the vector.

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 5.2))
fig.subplots_adjust(left=0.06, right=0.97, bottom=0.28, top=0.79)
collectives.draw(step, 4, 12, axes[0], title="two workers, two servers", servers=2)
collectives.draw(step, 4, 12, axes[1], title="a server on every worker", servers=4, place="workers")
plt.show()

# %% [markdown]
# Follow one colour on the right: in round 1 all that there is of it is added up on one rank, in round 2 it goes out to
# all. So after the push each rank has the sum of one quarter, and after the pull everybody has everything. That
# is a **reduce-scatter** and an **allgather**, and both together are an allreduce. With as many servers as workers the
# parameter server has turned into:
#
# ## 3. Nobody is special
#
# Every rank has all parameters and an optimizer. Gradients are summed by an allreduce, and everybody makes the same
# update.

# %%
# %%mpi -n 4 --with work,train,nn,np,Sequential -o w_ddp,events
from mpi4py import MPI

from collectives import Communicator
from parallel import DistributedDataParallel
from parallel.reports.timeline import Timeline

communicator = Communicator(MPI.COMM_WORLD, allreduce="ring")
trainer = DistributedDataParallel(*work(), communicator, node_memory="off", overlap="none")  # as between machines
timeline = Timeline(communicator)
timeline.watch(trainer)
train(trainer)
events, w_ddp = timeline.merge(), trainer.parameters.copy()
trainer.close()

# %%
assert all(np.array_equal(w, w_ddp[0]) for w in w_ddp), "all ranks have the same bits"
assert np.abs(w_ddp[0] - w_one).max() < 1e-12, "and the parameters of one process"
draw_timeline(excerpt(events[0], steps=4), title="decentralised: four steps")

# %% [markdown]
# ## What the busiest rank moves
#
# A picture of four ranks on one machine says little about forty. But schedules can be counted for any number of ranks:
# in every message of a step, how much does each rank send, and how much receive? Take the larger of the two for the
# busiest rank, in units of n, the size of the parameters.

# %%
N = 60_000  # elements of a vector that stands for n: parts of it differ by one at most


def busiest(size, *schedules, **options):
    """The most that a rank sends, or receives, in these schedules together, in units of n."""
    sent, received = np.zeros(size), np.zeros(size)
    for schedule in schedules:
        for flight in price(schedule, size, N, trace=True, **options).trace.flights:
            sent[flight.source] += flight.send.hi - flight.send.lo
            received[flight.dest] += flight.send.hi - flight.send.lo
    return max(sent.max(), received.max()) / N


ranks = range(2, 33, 2)
families = {
    "master and workers (binomial trees)": [busiest(p, broadcast.binomial, reduce.binomial) for p in ranks],
    "one parameter server": [busiest(p, push, pull, servers=1) for p in ranks],
    "as many servers as workers": [busiest(p, push, pull, servers=p // 2) for p in ranks],
    "a server on every worker": [busiest(p, push, pull, servers=p, place="workers") for p in ranks],
    "ring allreduce": [busiest(p, allreduce.ring) for p in ranks],
}
fig, ax = plt.subplots(figsize=(7, 3.6))
for name, moved in families.items():
    ax.plot(ranks, moved, label=name, linestyle="--" if name == "ring allreduce" else "-")
ax.set(xlabel="ranks", ylabel="moved by the busiest rank, in n", ylim=(0, 12))
ax.legend(fontsize=8)
fig.tight_layout()

assert families["one parameter server"][-1] == 31, "31 workers: 31 vectors in, and 31 out"
assert np.allclose(families["as many servers as workers"], 1, rtol=0, atol=32 / N)
assert np.allclose(families["a server on every worker"], families["ring allreduce"], rtol=0, atol=2 * 32 / N)

# %% [markdown]
# One server: a line without end. The binomial trees of the master: a logarithm (and the batch and the outputs on top,
# and the waiting). As many servers as workers: n, but only half of the ranks compute. A server on every worker moves
# exactly what a ring does, **2 (p - 1)/p n**: less than 2 n, however many ranks there are. Both send 2 (p - 1) messages
# a rank; only their order differs: twice p - 1 at once and all to different ranks, against one after another.
#
# In seconds, for 25 million parameters in float32 on a network of 10 Gbit/s and 20 us:

# %%
network = Network.hockney(20e-6, 8e-10)
count, sizes = 25_000_000, [2, 4, 8, 16, 32]
segment = {"segment": 1 << 20}
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
fig, ax = plt.subplots(figsize=(7, 3.2))
for name, each in seconds.items():
    ax.plot(sizes, each, "o--" if name == "ring allreduce" else "o-", label=name)
ax.set(xlabel="ranks", ylabel="seconds a step", xscale="log", yscale="log")
ax.set_xticks(sizes, sizes)
ax.set_xticks([], minor=True)
ax.legend(fontsize=8)
fig.tight_layout()

assert seconds["one parameter server"][-1] > 10 * seconds["ring allreduce"][-1]

# %% [markdown]
# ## Try
#
# - Give the parameter server two servers (`servers=2`) and draw its timeline. Why do two servers and two workers not
#   compute as fast as three workers and one?
# - `place="workers", servers=1`: what does the busiest rank move? Is it better than a server of its own?
# - Let one rank be slow: `import time`, and sleep in `trainer.compute_gradients` on rank 1. Who waits in each of the
#   three families? (All of them. Synchronous training goes at the pace of the slowest.)
#
# The same from the command line, with the picture in `timeline.png`:
#
#     python scripts/train.py --strategy dp  --ranks 4 --timeline
#     python scripts/train.py --strategy ps  --ranks 4 --servers 2 --timeline
#     python scripts/train.py --strategy ddp --ranks 4 --timeline
