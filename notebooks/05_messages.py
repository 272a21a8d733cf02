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
# # 5. Messages: ranks, and how they wait for each other
#
# From here on several processes share the work. Each has a memory of its own, and they can only **send messages** to
# each other. All of parallel training is built on messages, and so are its typical errors.
#
# 1. ranks;
# 2. one rank sends, another receives;
# 3. a token that goes round;
# 4. the classic mistake: **deadlock**, and why small tests do not show it;
# 5. the cost of a message: two numbers, $\alpha$ and $\beta$.
#
# You need no cluster. The ranks are ordinary processes of your own machine.

# %%
# %load_ext parallel.launch.notebook
# %matplotlib inline

# %%
import matplotlib.pyplot as plt
import numpy as np

import checks
import exercises.messages as exercise
from collectives import Recv, Send
from collectives.checking.definitions import Operation, held
from collectives.puzzles import Puzzle

checks.style()

# %% [markdown]
# ## A rank
#
# An MPI program is **one program that runs several times at once**. Each running copy is a process and has a number,
# its **rank**, counted from 0; `size` is the number of copies. They share no variables: a rank learns something from
# another one only by a message.
#
# A cell that begins with `%%mpi -n 3` runs on three ranks instead of in the notebook. They start when the cell starts
# and are gone when it ends. Their output is shown side by side, with the value of the last line in blue. (`%mpi?` lists
# the options.)

# %%
# %%mpi -n 3
import os

from mpi4py import MPI

comm = MPI.COMM_WORLD  # all the ranks that were started together
rank, size = comm.Get_rank(), comm.Get_size()
print(f"I am rank {rank} of {size}")
os.getpid()

# %% [markdown]
# How does one program do different work on each rank? It asks for its rank. Rank r takes every third sample, beginning
# with r. `-o` brings a variable back into the notebook: a list with one value a rank.

# %%
# %%mpi -n 3 -o mine
from mpi4py import MPI

comm = MPI.COMM_WORLD
mine = list(range(20))[comm.Get_rank() :: comm.Get_size()]

# %%
exercise.draw_dealt(mine)
assert sorted(sample for samples in mine for sample in samples) == list(range(20)), "every sample has one rank"

# %% [markdown]
# Often a rank needs samples that lie *side by side*: rank 0 the first ones, rank 1 the next, and so on.
#
# **Exercise 1.** Where does the share of a rank begin and end? If `count` is no multiple of `size`, the shares of two
# ranks may differ by one sample at most.


# %%
def share(rank, size, count):
    """(lo, hi): this rank has the samples lo, lo + 1, ..., hi - 1."""
    # gap: spread the remainder
    # return rank * (count // size), (rank + 1) * (count // size)
    # solution
    return rank * count // size, (rank + 1) * count // size
    # wrong: spread the remainder
    # each = count // size
    # return rank * each, (rank + 1) * each if rank < size - 1 else count
    # wrong: must begin and end with whole numbers
    # return rank * count / size, (rank + 1) * count / size
    # wrong: do not follow each other
    # each = -(-count // size)
    # return rank * each, (rank + 1) * each
    # end


# %%
exercise.check_share(share)

# %% [markdown]
# ## Send and receive
#
# `Send(array, dest)` and `Recv(array, source)` belong together: one rank sends, the other receives into an array that
# it has made ready, of the **same size and type**.

# %%
# %%mpi -n 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.Get_rank() == 0:
    x = np.array([1.0, 2.0, 3.0])
    comm.Send(x, dest=1)
else:
    x = np.empty(3)  # its values do not matter: they are about to be overwritten
    comm.Recv(x, source=0)
x

# %% [markdown]
# MPI moves bytes and does not check their type. Here a `float64` goes out and two `float32` come in: nonsense, without
# a word of warning. (`Communicator` of this project compares size and type first.)

# %%
# %%mpi -n 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.Get_rank() == 0:
    x = np.array([1.0, 2.0, 3.0])
    comm.Send(x, dest=1)
else:
    x = np.empty(6, np.float32)
    comm.Recv(x, source=0)
x

# %% [markdown]
# ## A token
#
# Four ranks sit in a circle. Rank 0 holds a token with the number 100. It goes round once: every rank receives it from
# its left neighbour, adds its own rank, and sends it to its right one; rank 0 begins, and is the last to receive.
#
# **Exercise 2.** Rank 0 is done below. Write what the others do, with `comm.Recv` and `comm.Send`.

# %%
# %%mpi -n 4 -o token,path -t 30
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size
token, path = np.zeros(1), []

if rank == 0:
    token[0] = 100
    comm.Send(token, dest=right)
    comm.Recv(token, source=left)
else:
    # gap: receive from the left, add the rank, send to the right (the starter code adds nothing)
    # comm.Recv(token, source=left)
    # comm.Send(token, dest=right)
    # solution
    comm.Recv(token, source=left)
    token += rank
    comm.Send(token, dest=right)
    # wrong: the token of ranks 0 to 3
    # comm.Recv(token, source=left)
    # comm.Send(token, dest=right)
    # token += rank
    # wrong: the token of ranks 0 to 3
    # comm.Recv(token, source=left)
    # token += 1
    # comm.Send(token, dest=right)
    # end


# %%
got = np.array([np.ravel(t)[0] for t in token])  # of a number, too
checks.same(got, [106, 101, 103, 106], "the token of ranks 0 to 3 in the end", draw=exercise.draw_tokens)
checks.right("the token comes back with 100 + 1 + 2 + 3")
exercise.draw_tokens(got, got)
plt.show()

# %% [markdown]
# Correct, and slow: at any time one rank works, and three wait. Remember it as the opposite of what we want.
#
# ## Deadlock
#
# Two ranks that both receive first wait for each other for ever: a **deadlock**. Nothing crashes and no error appears;
# the ranks wait and keep their cores busy. That is why every `%%mpi` cell has a time limit (`-t`, by default 60
# seconds). When it is over, the notebook shows the line at which each rank waited, and ends all of them.
#
# The next cell is wrong, and ends with an error after two seconds.

# %% tags=["raises-exception"]
# %%mpi -n 2 -t 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
other = 1 - comm.Get_rank()
got = np.empty(3)
comm.Recv(got, source=other)
comm.Send(np.ones(3), dest=other)

# %% [markdown]
# So both should send first? Worse: that *works*, as long as messages are small. A small message is put into the
# receiver's mailbox, and `Send` returns at once. A large one (here from 4 KB on) has to wait for its receiver. The same
# program, with 10 numbers and with a million:

# %% tags=["raises-exception"]
# %%mpi -n 2 -t 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
other = 1 - comm.Get_rank()
for count in (10, 1_000_000):
    got = np.empty(count)
    comm.Send(np.ones(count), dest=other)
    comm.Recv(got, source=other)
    print(f"{count:,} numbers: done", flush=True)

# %% [markdown]
# This error passes every small test, and hangs on the cluster in the first large run. A program is right only if it is
# right when **every send waits for its receiver**.
#
# That can be checked without running anything. In `collectives` a program of messages is a small generator: it yields
# what its rank sends and receives, **a round** at a time: a tuple of steps, here of one. The two programs of above, for
# any number of ranks in a circle:


# %%
def receive_first(rank, size, count):
    yield (Recv((rank - 1) % size, "y", 0, count),)  # from the left, into elements 0 to count of y
    yield (Send((rank + 1) % size, "x", 0, count),)  # to the right, from x


def send_first(rank, size, count):
    yield (Send((rank + 1) % size, "x", 0, count),)
    yield (Recv((rank - 1) % size, "y", 0, count),)


def one_at_a_time(stats):
    """A rank that sends or receives does nothing else meanwhile."""
    for rank, rounds in enumerate(stats.history):
        for k, steps in enumerate(rounds):
            if len(steps) > 1:
                return f"rank {rank}, round {k}: {len(steps)} things at once; here a rank does one after the other"
    return ""


shift = Puzzle(
    "to the right",
    """Every rank sends its x to its right neighbour, and receives that of its left one in y. One thing at a time.""",
    6,
    3,
    Operation(
        before=lambda r, p, n, root: {"x": held(r, 0, n), "y": [((-1, i),) for i in range(n)]},
        after=lambda r, p, n, root: ("y", 0, held((r - 1) % p, 0, n)),
    ),
    limits={"rounds": 2},
    record={"rounds": 2},
    others=((2, 1), (3, 2), (5, 4)),
    rule=one_at_a_time,
)
for program in (receive_first, send_first):
    print(shift.grade(program), "\n")
shift.grade(send_first).draw()

# %% [markdown]
# The checker plays all ranks in one process, once with sends that return at once and once with sends that wait. Red:
# who waits for whom. The arrows close a circle, and no rank in it can go on.
#
# **Exercise 3.** The circle breaks if some of its ranks receive first. Which ones?


# %%
def to_the_right(rank, size, count):
    send = Send((rank + 1) % size, "x", 0, count)
    recv = Recv((rank - 1) % size, "y", 0, count)
    # gap: not all ranks begin with the same step
    # yield (send,)
    # yield (recv,)
    # solution
    if rank % 2:
        yield (recv,)
        yield (send,)
    else:
        yield (send,)
        yield (recv,)
    # wrong: it takes 6 steps: one message after the other
    # if rank == 0:
    #     yield (recv,)
    #     yield (send,)
    # else:
    #     yield (send,)
    #     yield (recv,)
    # wrong: here a rank does one after the other
    # yield (send, recv)
    # end


# %%
exercise.check_shift(to_the_right, shift)
shift.grade(to_the_right).draw()

# %% [markdown]
# Even ranks send while odd ones receive, then the other way round: two rounds. With an odd number of ranks two even
# ones sit side by side (the last one and rank 0). It works, since one neighbour is still different, but where every
# send waits for its receiver the last rank is done after three.
#
# A program that hangs can be asked for whom each rank waits. Then the question is: do the arrows close a circle?
#
# **Exercise 4.** `waits[r]` is the rank for which rank r waits; ranks that do not wait are not in it. Return the ranks
# of the circle, or an empty list. A rank that waits for a circle without being in it does not belong to it.


# %%
def circle(waits):
    """The ranks that wait for each other in a circle, in any order."""
    # gap: from each rank follow the arrows
    # return list(waits)
    # solution
    for first in waits:
        way = [first]
        while way[-1] in waits:
            if waits[way[-1]] in way:
                return way[way.index(waits[way[-1]]) :]
            way.append(waits[way[-1]])
    return []
    # wrong: yours says [0, 1, 2, 3]
    # for first in waits:
    #     way = [first]
    #     while way[-1] in waits:
    #         if waits[way[-1]] in way:
    #             return way
    #         way.append(waits[way[-1]])
    # return []
    # wrong: yours says []
    # return [rank for rank in waits if waits.get(waits[rank]) == rank]
    # end


# %%
exercise.check_circle(circle)

# %% [markdown]
# Links carry messages in both directions at once, so ranks need not do one thing at a time. `Sendrecv` does both
# *together*, and cannot deadlock here; in `collectives` that is one round with two steps: `yield send, recv`. It takes
# half the time, and all algorithms of the next notebooks are made of such rounds.

# %%
# %%mpi -n 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
x, y = np.full(100_000, float(rank)), np.empty(100_000)
comm.Sendrecv(x, dest=(rank + 1) % size, recvbuf=y, source=(rank - 1) % size)
print(f"I have {y[0]:g}, from the left")

# %% [markdown]
# A computation on a line that is divided among ranks needs such exchanges: the numbers at the ends of a share have a
# neighbour on another rank.
#
# **Exercise 5.** Each of four ranks has four numbers of a line that is closed to a ring (rank 3's last number stands
# before rank 0's first). Replace every number by the mean of itself and its two neighbours on the line. `sendrecv`
# moves Python objects: `a = comm.sendrecv(x[-1], dest=right, source=left)` sends my last number to the right and gives
# me the left neighbour's last one. (The starter code takes both ends from the rank's own numbers.)

# %%
# %%mpi -n 4 -o start,smooth -t 30
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size
x = np.random.default_rng(rank).random(4)
start = x.copy()

# gap: two messages: one comes from the left, one from the right
# before, behind = x[-1], x[0]
# solution
before = comm.sendrecv(x[-1], dest=right, source=left)
behind = comm.sendrecv(x[0], dest=left, source=right)
# wrong: which neighbour's number stands next to which end
# before = comm.sendrecv(x[0], dest=left, source=right)
# behind = comm.sendrecv(x[-1], dest=right, source=left)
# wrong: which neighbour's number stands next to which end
# before = comm.sendrecv(x[0], dest=right, source=left)
# behind = comm.sendrecv(x[-1], dest=left, source=right)
# end
line = np.array([before, *x, behind])
smooth = (line[:-2] + line[1:-1] + line[2:]) / 3

# %%
exercise.check_line(smooth, start)

# %% [markdown]
# ## What a message costs
#
# Two ranks play ping-pong: a message goes there and comes back, and half of that time is the time of a message. Short
# and long ones:

# %%
# %%mpi -n 2 -o sizes,seconds
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
other, first = 1 - comm.Get_rank(), comm.Get_rank() == 0
sizes = [8 * 4**k for k in range(11)]  # bytes
seconds = []
for nbytes in sizes:
    x, best = np.zeros(nbytes // 8), 1.0
    for _ in range(200 if nbytes < 1e5 else 20):
        begin = time.perf_counter()
        if first:
            comm.Send(x, dest=other)
            comm.Recv(x, source=other)
        else:
            comm.Recv(x, source=other)
            comm.Send(x, dest=other)
        best = min(best, (time.perf_counter() - begin) / 2)
    seconds.append(best)

# %% [markdown]
# Two numbers describe it well (Hockney 1994): a message of $n$ bytes takes
#
# $$ t(n) = \alpha + \beta n, $$
#
# $\alpha$ seconds to get it on its way, whatever it carries, and $\beta$ seconds for each byte.
#
# **Exercise 6.** Fit them. A fit by least squares of $\alpha + \beta n = t$ would look at the longest message only,
# whose time is the largest. Divide each equation by its $t$: then an error of a tenth counts the same everywhere,
# $\alpha\, \frac1t + \beta\, \frac nt = 1$.


# %%
def fit(n, t):
    """(alpha, beta) for which alpha/t + beta n/t is as near to 1 as can be, over all messages."""
    n, t = np.asarray(n, float), np.asarray(t, float)
    # gap: `np.linalg.lstsq(matrix, right side, rcond=None)[0]`; the matrix has a row a message
    # alpha, beta = t[0], t[-1] / n[-1]
    # solution
    alpha, beta = np.linalg.lstsq(np.column_stack([1 / t, n / t]), np.ones(len(t)), rcond=None)[0]
    # wrong: (alpha, beta)
    # alpha, beta = np.linalg.lstsq(np.column_stack([np.ones(len(t)), n]), t, rcond=None)[0]
    # end
    return alpha, beta


# %%
n, t = np.array(sizes[0], float), np.array(seconds[0])
alpha, beta = exercise.check_fit(fit, n, t)

# %%
if alpha <= 0 or t[0] > 20e-6:
    print("This machine is busy with other work, which is what was measured. Run the ping-pong again when it is quiet.")
    alpha = abs(alpha)
exercise.draw_messages(n, t, alpha, beta)

# %% [markdown]
# Below $n_{1/2} = \alpha/\beta$ bytes the start takes most of the time: a thousand small messages cost a thousand
# $\alpha$, one message with all of their bytes a single one. Above, the bytes take most of it. Every algorithm of the
# next two notebooks is a compromise between few messages and few bytes.
#
# Typical numbers: between ranks of one machine 1 µs and 10 GB/s; 10 Gbit/s Ethernet 20 µs and 1.2 GB/s; InfiniBand 1.5
# µs and 25 GB/s; between continents 100 ms, which the speed of light sets.
#
# **To try further.** Give the token more than one round. Let rank 1 be slow (`%%mpi -n 4 --slow 1:5`): who waits in the
# ring of `Sendrecv`? Put `comm.Barrier()` before and after.
#
# Next: `06_collectives`, where all ranks communicate at once, in patterns that have names.
#
# *Sources: the MPI standard 4.1 (blocking and its modes); Hockney 1994; Coffman, Elphick, Shoshani 1971 (deadlock).*
