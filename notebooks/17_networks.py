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
# # 17. Networks: who shares which link
#
# So far every message had its link to itself. In a cluster messages meet: in the cables between racks, in the one cable
# of a node, in the wires of a torus. Then the question "which allreduce is the fastest?" has another answer on every
# network, and this notebook asks it:
#
# 1. what a message gets of a link that others use too: **max-min fairness**;
# 2. a **fat tree**, and why the order of a ring on it matters;
# 3. a **torus**, with four cables at each rank;
# 4. a **thin link** between two nodes;
# 5. what **no schedule can beat**, by cuts through the network and by its parts;
# 6. a schedule that nobody has written: **found by search**.
#
# All of it is simulated: a message takes what its share of every link gives it, from its first byte to its last. The
# simulation agrees with SimGrid's to a millionth (docs/systems/networks.md).

# %%
# %matplotlib inline

# %%
from itertools import zip_longest

import matplotlib.pyplot as plt
import numpy as np

import checks
import collectives
from checks import BLUE, GREY, ORANGE
from collectives import ALGORITHMS, Recv, RecvReduce, Send, chunk, price, puzzles
from collectives.drawing.networks import draw_channels, draw_critical_path, draw_network, draw_trees
from collectives.pricing.flows import max_min_rates
from collectives.pricing.lower_bounds import bandwidth_bound, lower_bound
from collectives.pricing.networks import Network

checks.style()

# %% [markdown]
# ## 1. Sharing
#
# Link A carries 10 bytes a second, link B 12. One message crosses both, one only A, two only B. Who gets how much?
#
# Networks come near to *max-min fairness*: no message can be faster without making slower one that is no faster. One
# finds it by **progressive filling**: all messages grow together, until a link is full. Those that cross it stay at
# that rate. The others grow on, until all stand.
#
# The link that is full first is the one with the smallest `left / how many of those that still grow cross it`.
#
# **Exercise 1.** Freeze the messages of the fullest link, and subtract what they take from *all* links that they cross.


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
routes, capacities = ["AB", "A", "B", "B"], {"A": 10, "B": 12}


def draw_shares(got, want):
    """Bars of what each message gets."""
    _, ax = plt.subplots(figsize=(6, 2.6))
    places = np.arange(len(want))
    ax.bar(places - 0.2, want, 0.4, color=GREY, label="wanted")
    ax.bar(places + 0.2, got, 0.4, color=BLUE, label="yours")
    ax.set_xticks(places, [f"over {' and '.join(route)}" for route in routes])
    ax.set(title="Rates of four messages on two links", ylabel="bytes a second")
    ax.legend()


got = checks.numbers(my_rates, routes, capacities, shape=(4,))
want = [rate for rate, _ in max_min_rates(routes, capacities, [np.inf] * 4)]
checks.same(got, want, "the rates of messages over A and B, A, B, B", draw=draw_shares)
checks.right("4, 6, 4 and 4: link B is full first, and what its message leaves of A goes to the other one")
draw_shares(got, want)

# %% [markdown]
# (An equal share of every link, and the least of those, would give 4, 5, 4, 4, and leave one byte a second of A to
# nobody.)
#
# ## 2. A fat tree, and the order of a ring
#
# Sixteen hosts, two on each switch at the bottom; the cables above carry a quarter of a host's cable. Clusters are
# built like this, because full cables all the way up are expensive.

# %%
tree = Network.fat_tree(4, oversubscription=4)
draw_network(tree, 16)

# %% [markdown]
# The ring of notebook 7 sends from every rank to the next. In order, one rank of each switch sends to its neighbour on
# the same switch, and the other one upwards. Now give the ranks to the hosts at random, as a scheduler does that fills
# the holes that others have left:

# %%
ring = ALGORITHMS["allreduce"]["ring"]
count = 1 << 20
in_order = price(ring, 16, count, 4, tree, trace=True)
scattered = tree.place_ranks("random", seed=3)
at_random = price(ring, 16, count, 4, scattered, trace=True)
print(f"in order {1e3 * in_order.seconds:.2f} ms, at random {1e3 * at_random.seconds:.2f} ms")
draw_network(scattered, 16, at_random, title="a ring on hosts at random")

# %% [markdown]
# The cables in the middle are always busy (orange). Over time, each row a channel:

# %%
draw_channels(scattered, at_random, title="a ring on hosts at random")

# %% [markdown]
# **Exercise 2.** You cannot choose the hosts: they are what the scheduler gave. But you choose which rank is where.
# Host h hangs on switch h // 2, in the pod h // 4. Put the hosts in an order in which the ring is as fast as it can be.

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
order = checks.call(my_order, given)
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
# Other algorithms have other far partners. What are the fastest on this tree, for short and for long vectors?

# %%
names = ("ring", "doubling", "rabenseifner", "double_tree", "bine")
sizes = 4 ** np.arange(3, 13)
_, ax = plt.subplots(figsize=(7, 3.4))
for name in names:
    times = [price(ALGORITHMS["allreduce"][name], 16, int(n) // 4, 4, tree).seconds for n in sizes]
    ax.loglog(sizes, 1e6 * np.array(times), "o-", ms=3, label=name)
ax.set(title="Allreduce on a fat tree with 4:1", xlabel="bytes", ylabel="microseconds")
ax.legend()
plt.show()

# %% [markdown]
# `python scripts/plan_collective.py fat-tree:k=4,oversubscription=4` prints this as a table, and writes one that the
# library reads.
#
# ## 3. A torus
#
# No switches: every rank has four cables to neighbours, and all of them can be busy at once.

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
# (`chunk(count, 4, i)`): both orders of the axes, both ways. A round of yours is one round of each of the four, all
# steps in one tuple; `zip_longest` or `zip` puts them side by side.


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
# cables far. Real machines that are tori: Google's TPU pods, Fugaku.
#
# ## 4. A thin link
#
# Two nodes of four. Inside, a switch that is ten times as fast as the cable that leads out.

# %%
print(puzzles.thin_link)

# %% [markdown]
# **Exercise 4.** Sum inside the nodes first (a ring over four: after it each rank has a quarter of its node's sum).
# Over the link each rank then has to do with *its* quarter alone, and with its partner in the other node,
# `(rank + 4) % 8`: exchange halves of the quarter and add, exchange the sums. Then an allgather inside.


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
# ## 5. What nobody can beat
#
# Draw a line around some vertices of the network: hosts, switches. If there are ranks on both sides, an allreduce of n
# bytes has to bring n bytes out (the sum of what is inside) and n bytes in. So no schedule takes less than n over the
# bandwidth of all channels that lead out. The best line gives the best bound.
#
# **Exercise 5.** Seconds a byte that a cut proves.


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
pod = {"h0", "h1", "h2", "h3", "edge0", "edge1", "aggregation0", "aggregation1"}
cases = [(tree, {"h0"}), (tree, {"h0", "h1", "edge0"}), (tree, pod), (torus, {f"h{i}" for i in range(8)})]
got = np.array([checks.numbers(my_cut, network.topology, inside) for network, inside in cases])
want = np.array([1 / 12.5e9, 1 / (2 * 3.125e9), 1 / (4 * 3.125e9), 1 / (8 * 12.5e9)])
checks.same(got, want, "a byte's seconds by cuts around a host, a switch, a pod, half of the torus")
checks.right("a switch with its two hosts is the narrowest place of this tree")

# %% [markdown]
# A cut has two sides. More sides may prove more: k groups of ranks have to send at least 2 (k - 1) n together, as k
# people who telephone, one talking and one listening, need 2 (k - 1) calls until each knows all (Harary and Schwenk
# 1974). Below this tree's narrow cables there are eight groups, the edge switches with their hosts, and 16 channels
# lead out: 14 n over the bandwidth of 16 is nearly twice what the cut around one of them proves. `bandwidth_bound` is
# the worst of all cuts and of such groups, in seconds a byte. `lower_bound` is for a vector: a short one takes as long
# as a message to the farthest rank.

# %%
for name, network in (("fat tree", tree), ("torus", torus)):
    least = [1e6 * lower_bound("allreduce", 16, nbytes, network) for nbytes in (1 << 10, 1 << 30)]
    per_byte = 1e9 * bandwidth_bound(network, "allreduce")
    print(f"{name}: {per_byte:.3g} ns a byte; 1 KiB takes {least[0]:.3g} us or more, 1 GiB {1e-3 * least[1]:.3g} ms")

# %% [markdown]
# ## 6. Found by search
#
# Nobody has to think of a schedule. `collectives.synthesize` searches in three ways, and keeps the fastest schedule:
#
# - it *matches* pieces of the vector with free links, step after step, many times by chance;
# - it sends blocks *round a ring of equal parts*, such as the eight groups above, and copies them inside each part;
# - it *packs spanning trees*, along which segments of the vector follow each other.
#
# It says how near the bound the result is. On the fat tree of section 2, for long vectors:

# %%
found = collectives.synthesize("allreduce", tree)
nbytes, others = 256 << 20, {name: ALGORITHMS["allreduce"][name] for name in ("rabenseifner", "ring")}
for name, algorithm in ({"found": found} | others).items():
    seconds = price(algorithm, 16, nbytes // 4, 4, tree).seconds
    print(f"{name}: {1e3 * seconds:.3g} ms, {100 * nbytes * found.bound / seconds:.0f}% of the bound")

# %% [markdown]
# Now a network that no paper has an algorithm for: a ring of eight, one cable of which is slow, and a chord.

# %%
edges = [(i, (i + 1) % 8, 2e9 if i else 1e9) for i in range(8)] + [(0, 4, 2e9)]
odd = Network.from_edges(edges)
found = collectives.synthesize("allreduce", odd)
print(f"{len(found.steps)} steps, {100 * found.share_of_bound:.0f}% of the bound")
draw_trees(odd, found, pieces=range(3), title="trees that were found")

# %% [markdown]
# It is a schedule as any other: checked, priced, drawn, run (`communicator.Allreduce(x, y, algorithm=found)`), saved.

# %%
print(collectives.check(found, ranks=8, operation="allreduce"))
nbytes = 64 << 20
times = {name: price(ALGORITHMS["allreduce"][name], 8, nbytes // 4, 4, odd).seconds for name in names}
times["found"] = price(found, 8, nbytes // 4, 4, odd).seconds
_, ax = plt.subplots(figsize=(7, 2.8))
ax.barh(list(times), [1e3 * t for t in times.values()], color=[BLUE] * len(names) + [ORANGE])
ax.axvline(1e3 * nbytes * found.bound, color=GREY, ls="--")
ax.set(title="64 MiB on a ring with a slow cable and a chord (dashed: the bound)", xlabel="milliseconds")
plt.show()

# %% [markdown]
# So many steps are for long vectors: each costs the latency of a message. With `nbytes` the search prices what it finds
# for a vector of that length, and cuts it into fewer pieces.

# %%
short = collectives.synthesize("allreduce", odd, nbytes=16 << 10)
for name, schedule in (("for long vectors", found), ("for 16 KiB", short)):
    print(f"{name}: {len(schedule.steps)} steps, {1e6 * price(schedule, 8, 4 << 10, 4, odd).seconds:.3g} us for 16 KiB")

# %% [markdown]
# Before you believe any of it: measure. `python scripts/bench.py trunk` builds a network of four hosts with a trunk on
# this computer (root on Linux), runs these schedules there, and compares them with their prices.
#
# Next: `18_experts.py`; and `19_long_sequences.py` cuts sequences over ranks. `docs/` has the architecture;
# `scripts/train.py --help` has all that you have learned behind one command; and every schedule that you can write in a
# dozen lines, the tools can check.
#
# This system's page has commands and measurements: [Networks](../docs/systems/networks.md).
