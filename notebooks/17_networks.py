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
# # 17. Networks: messages that share links
#
# So far every message had a link of its own. In a cluster messages share links: the cables between racks, the one cable
# of a node, the links of a torus. Then the fastest allreduce depends on the network. This notebook shows how:
#
# 1. how messages share a link: **max-min fairness**;
# 2. a **fat tree**, and why the order of a ring on it matters;
# 3. a **torus**, with four cables at each rank;
# 4. a **thin link** between two nodes;
# 5. **lower bounds** for all schedules, from cuts through the network and from its parts;
# 6. a schedule **found by search**.
#
# All of it is simulated: at any time a message gets its share of every link that it crosses. The simulation agrees with
# SimGrid's to a millionth (docs/systems/networks.md).

# %%
# %matplotlib inline

# %%
from itertools import zip_longest

import numpy as np

import checks
import collectives
import exercises.networks as exercise
from collectives import ALGORITHMS, Recv, RecvReduce, Send, chunk, price, puzzles
from collectives.drawing.networks import draw_channels, draw_critical_path, draw_network, draw_trees
from collectives.pricing.lower_bounds import bandwidth_bound, lower_bound
from collectives.pricing.networks import Network

checks.style()

# %% [markdown]
# ## 1. Sharing
#
# Link A carries 10 bytes a second, link B 12. One message crosses both, one only A, two only B. How fast is each?
#
# Networks approximate *max-min fairness*: no message can become faster without slowing down another one that is not
# faster than it. **Progressive filling** computes it: the rates of all messages grow together until a link is full.
# Messages that cross it keep that rate. The others grow on, until all rates are fixed.
#
# The first link to be full is the one with the smallest free bandwidth per growing message that crosses it.
#
# **Exercise 1.** Fix the rates of the messages on the fullest link, and subtract them from *all* links that these
# messages cross.


# %%
def my_rates(routes, capacities):
    """The rate of each message; `routes` are the links that it crosses, such as "AB"."""
    rates, left = [0.0] * len(routes), dict(capacities)
    growing = set(range(len(routes)))
    while growing:
        crossing = {link: [i for i in growing if link in routes[i]] for link in left}
        shares = {link: left[link] / len(users) for link, users in crossing.items() if users}
        fullest = min(shares, key=shares.get)
        # gap: all messages of the fullest link stay at its share
        # return [min(capacities[link] / sum(link in r for r in routes) for link in route) for route in routes]
        # solution
        for i in crossing[fullest]:
            rates[i] = shares[fullest]
            growing.remove(i)
            for link in routes[i]:
                left[link] -= shares[fullest]
        # wrong: the rates of messages
        # for i in crossing[fullest]:
        #     rates[i] = shares[fullest]
        #     growing.remove(i)
        #     left[fullest] -= shares[fullest]
        # left[fullest] = 0
        # end
    return rates


# %%
exercise.check_rates(my_rates)

# %% [markdown]
# (If each message got the smallest of its equal shares, the rates would be 4, 5, 4, 4, and one byte a second of A would
# stay unused.)
#
# ## 2. A fat tree, and the order of a ring
#
# Sixteen hosts, two on each switch at the bottom; the cables above carry a quarter of a host's cable. Clusters are
# built like this because full bandwidth at all levels is expensive.

# %%
tree = Network.fat_tree(4, oversubscription=4)
draw_network(tree, 16)

# %% [markdown]
# The ring of notebook 7 sends from every rank to the next. In order, one rank of each switch sends to its neighbour on
# the same switch, and the other one to the next switch. Now place the ranks on the hosts at random, as a scheduler may
# do:

# %%
ring = ALGORITHMS["allreduce"]["ring"]
count = 1 << 20
in_order = price(ring, 16, count, 4, tree, trace=True)
scattered = tree.place_ranks("random", seed=3)
at_random = price(ring, 16, count, 4, scattered, trace=True)
print(f"in order {1e3 * in_order.seconds:.2f} ms, at random {1e3 * at_random.seconds:.2f} ms")
draw_network(scattered, 16, at_random, title="a ring on hosts at random")

# %% [markdown]
# The cables in the middle are always busy (orange). Here are the channels over time, one in each row:

# %%
draw_channels(scattered, at_random, title="a ring on hosts at random")

# %% [markdown]
# **Exercise 2.** The scheduler has chosen the hosts, but you choose the rank of each. Host h is connected to switch h
# // 2, in pod h // 4. Order the hosts so that the ring is as fast as possible.

# %%
given = list(scattered.placement)


# %%
def my_order(hosts):
    """The same hosts: first that of rank 0, then that of rank 1, and so on."""
    # gap: neighbours of the ring on one switch
    # return hosts
    # solution
    return sorted(hosts)
    # wrong: are possible
    # return hosts[::-1]
    # wrong: each of the given hosts
    # return [hosts[0]] * len(hosts)
    # end


# %%
order = np.ravel(checks.call(my_order, given)).tolist()
checks.expect(sorted(order) == sorted(given), "each of the given hosts has one rank, and no other host has any")
mine = tree.place_ranks(order)
priced = price(ring, 16, count, 4, mine, trace=True)
checks.expect(
    priced.seconds < 1.01 * in_order.seconds,
    f"the ring takes {1e3 * priced.seconds:.2f} ms, and {1e3 * in_order.seconds:.2f} are possible",
    lambda: draw_network(mine, 16, priced, title="your order"),
)
checks.right(f"{1e3 * priced.seconds:.2f} ms instead of {1e3 * at_random.seconds:.2f}, with the same hosts")
draw_critical_path(mine, priced, title="what the last rank waits for, in your order")

# %% [markdown]
# Other algorithms have other distant partners. Which are the fastest on this tree, for short and for long vectors?

# %%
names = ("ring", "doubling", "rabenseifner", "double_tree", "bine")
sizes = 4 ** np.arange(3, 13)
exercise.draw_on_tree(names, tree, sizes)

# %% [markdown]
# `python scripts/plan_collective.py fat-tree:k=4,oversubscription=4` prints this as a table, and writes one that the
# library reads.
#
# ## 3. A torus
#
# There are no switches: every rank has four cables to neighbours, and all of them can be busy at once.

# %%
torus = Network.torus((4, 4))
draw_network(torus, 16)

# %% [markdown]
# A *bucket* sums along the rows first: a ring in each row, after which every rank of a row has a quarter of the row's
# sum. Then along the columns, with these quarters; then back. Each message goes to a neighbour, so no two share a
# cable. Here it is, for the part `lo:hi` of the vector, the first axis first, up (`way` 1) or down (-1):


# %%
def bucket(rank, lo, hi, axes, way):
    """Sum x[lo:hi] over a torus of 4 x 4, along one axis (0: columns, 1: rows) after the other."""
    place, rings = divmod(rank, 4), []
    for axis in axes:
        at = way * place[axis]

        def neighbour(by, axis=axis):
            row, column = (p + by * (i == axis) for i, p in enumerate(place))
            return 4 * (row % 4) + column % 4

        def piece(i, lo=lo, hi=hi):
            return tuple(lo + end for end in chunk(hi - lo, 4, i % 4))

        for k in range(3):
            yield Send(neighbour(way), "x", *piece(at - k)), RecvReduce(neighbour(-way), "x", *piece(at - k - 1))
        rings.append((at, neighbour, piece))
        lo, hi = piece(at + 1)
    for at, neighbour, piece in reversed(rings):
        for k in range(3):
            yield Send(neighbour(way), "x", *piece(at + 1 - k)), Recv(neighbour(-way), "x", *piece(at - k))


# %%
print(puzzles.torus)

# %% [markdown]
# One bucket uses one of four cables at a time. **Exercise 3.** Run four at once, each on a quarter of the vector
# (`chunk(count, 4, i)`): both orders of the axes, both directions. A round of yours is one round of each of the four,
# all steps in one tuple; `zip_longest` or `zip` puts them side by side.


# %%
def torus_allreduce(rank, size, count):
    # gap: four buckets side by side
    # yield from bucket(rank, 0, count, (0, 1), 1)
    # solution
    ways = [(axes, way) for axes in ((0, 1), (1, 0)) for way in (1, -1)]
    four = [bucket(rank, *chunk(count, 4, i), axes, way) for i, (axes, way) in enumerate(ways)]
    for rounds in zip_longest(*four, fillvalue=()):
        yield tuple(step for steps in rounds for step in steps)
    # wrong: over the limit
    # two = bucket(rank, *chunk(count, 2, 0), (0, 1), 1), bucket(rank, *chunk(count, 2, 1), (1, 0), 1)
    # for rounds in zip_longest(*two, fillvalue=()):
    #     yield tuple(step for steps in rounds for step in steps)
    # end


# %%
checks.graded(puzzles.torus.grade(torus_allreduce))

# %% [markdown]
# Swing (De Sensi et al. 2024) is a little faster still: it has 8 rounds instead of 12, and its messages go at most two
# cables far. Google's TPU pods and Fugaku are tori.
#
# ## 4. A thin link
#
# Here are two nodes of four ranks. The switch inside a node is ten times as fast as the cable between the nodes.

# %%
print(puzzles.thin_link)

# %% [markdown]
# **Exercise 4.** Sum inside the nodes first (a ring over four: after it each rank has a quarter of its node's sum).
# Over the link each rank then exchanges only *its* quarter, with its partner in the other node, `(rank + 4) % 8`:
# exchange halves of the quarter and add, exchange the sums. Then an allgather inside.


# %%
def thin_allreduce(rank, size, count):
    # gap: a quarter of the vector over the thin link, in each direction, by each rank
    # yield from ALGORITHMS["allreduce"]["ring"].rounds(rank, size, count)
    # solution
    node, place = divmod(rank, 4)

    def neighbour(by):
        return 4 * node + (place + by) % 4

    def piece(i):
        return chunk(count, 4, i % 4)

    for k in range(3):
        yield Send(neighbour(1), "x", *piece(place - k)), RecvReduce(neighbour(-1), "x", *piece(place - k - 1))
    lo, hi = piece(place + 1)
    middle, partner = (lo + hi) // 2, (rank + 4) % 8
    own, other = ((lo, middle), (middle, hi))[:: -1 if node else 1]
    yield Send(partner, "x", *other), RecvReduce(partner, "x", *own)
    yield Send(partner, "x", *own), Recv(partner, "x", *other)
    for k in range(3):
        yield Send(neighbour(1), "x", *piece(place + 1 - k)), Recv(neighbour(-1), "x", *piece(place - k))
    # wrong: over the limit
    # yield from ALGORITHMS["allreduce"]["doubling"].rounds(rank, size, count)
    # end


# %%
checks.graded(puzzles.thin_link.grade(thin_allreduce))

# %% [markdown]
# ## 5. A lower bound
#
# Draw a line around some vertices (hosts, switches) of the network. With ranks on both sides, an allreduce of n bytes
# has to send at least n bytes out (the sum of the ranks inside) and n bytes in. So no schedule takes less than n
# divided by the bandwidth of all channels that lead out. The best line gives the best bound.
#
# **Exercise 5.** Compute the bound of a cut, in seconds a byte.


# %%
def my_cut(topology, inside):
    """No allreduce of n bytes takes less than n times this; `inside` are vertices."""
    # gap: the channels that lead out of `inside`
    # return 1 / sum(channel.bandwidth for channel in topology.channels)
    # solution
    return 1 / sum(c.bandwidth for c in topology.channels if c.source in inside and c.target not in inside)
    # wrong: a byte's seconds
    # return 1 / sum(c.bandwidth for c in topology.channels if c.source in inside or c.target in inside)
    # wrong: a byte's seconds
    # return 1 / min(c.bandwidth for c in topology.channels if c.source in inside and c.target not in inside)
    # end


# %%
exercise.check_cut(my_cut, tree, torus)

# %% [markdown]
# A cut has two sides. More parts may give a better bound: k groups of ranks have to send at least 2 (k - 1) n together,
# just as k people who telephone in pairs, one talking and one listening, need 2 (k - 1) calls until each of them knows
# everything (Harary and Schwenk 1974). Below this tree's narrow cables there are eight groups, the edge switches with
# their hosts, and 16 channels lead out: 14 n over the bandwidth of 16 channels is nearly twice the bound of the cut
# around one group. `bandwidth_bound` is the best bound of all cuts and of such groups, in seconds a byte. `lower_bound`
# is for one vector: a short vector takes at least as long as a message to the farthest rank.

# %%
for name, network in (("fat tree", tree), ("torus", torus)):
    least = [1e6 * lower_bound("allreduce", 16, nbytes, network) for nbytes in (1 << 10, 1 << 30)]
    per_byte = 1e9 * bandwidth_bound(network, "allreduce")
    print(f"{name}: {per_byte:.3g} ns a byte; 1 KiB takes {least[0]:.3g} us or more, 1 GiB {1e-3 * least[1]:.3g} ms")

# %% [markdown]
# ## 6. Found by search
#
# A program can find a schedule. `collectives.synthesize` searches in three ways, and keeps the fastest schedule:
#
# - it *matches* pieces of the vector with free links, step after step, in many random tries;
# - it sends blocks *round a ring of equal parts*, such as the eight groups above, and copies them inside each part;
# - it *packs spanning trees*, along which segments of the vector follow each other.
#
# It reports how near the result is to the bound. On the fat tree of section 2, for long vectors:

# %%
found = collectives.synthesize("allreduce", tree)
nbytes, others = 256 << 20, {name: ALGORITHMS["allreduce"][name] for name in ("rabenseifner", "ring")}
for name, algorithm in ({"found": found} | others).items():
    seconds = price(algorithm, 16, nbytes // 4, 4, tree).seconds
    print(f"{name}: {1e3 * seconds:.3g} ms, {100 * nbytes * found.bound / seconds:.0f}% of the bound")

# %% [markdown]
# Now an irregular network: a ring of eight with one slow cable, and a chord.

# %%
edges = [(i, (i + 1) % 8, 2e9 if i else 1e9) for i in range(8)] + [(0, 4, 2e9)]
odd = Network.from_edges(edges)
found = collectives.synthesize("allreduce", odd)
print(f"{len(found.steps)} steps, {100 * found.share_of_bound:.0f}% of the bound")
draw_trees(odd, found, pieces=range(3), title="trees that were found")

# %% [markdown]
# It is a schedule like any other: checked, priced, drawn, run (`communicator.Allreduce(x, y, algorithm=found)`), saved.

# %%
print(collectives.check(found, ranks=8, operation="allreduce"))
nbytes = 64 << 20
times = {name: price(ALGORITHMS["allreduce"][name], 8, nbytes // 4, 4, odd).seconds for name in names}
times["found"] = price(found, 8, nbytes // 4, 4, odd).seconds
exercise.draw_found(times, names, nbytes, found)

# %% [markdown]
# Many steps suit long vectors only: each costs the latency of a message. With `nbytes` the search prices schedules for
# a vector of that length, and cuts it into fewer pieces.

# %%
short = collectives.synthesize("allreduce", odd, nbytes=16 << 10)
for name, schedule in (("for long vectors", found), ("for 16 KiB", short)):
    print(f"{name}: {len(schedule.steps)} steps, {1e6 * price(schedule, 8, 4 << 10, 4, odd).seconds:.3g} us for 16 KiB")

# %% [markdown]
# Before you rely on it, measure. `python scripts/bench.py trunk` builds a network of four hosts with a trunk on this
# computer (root on Linux), runs these schedules there, and compares them with their prices.
#
# Next: `18_experts.py`; and `19_long_sequences.py` cuts sequences over ranks. `docs/` has the architecture;
# `scripts/train.py --help` has all that you have learned behind one command; and every schedule that you can write in a
# dozen lines, the tools can check.
#
# This system's page has commands and measurements: [Networks](../docs/systems/networks.md).
