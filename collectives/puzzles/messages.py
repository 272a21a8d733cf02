"""Puzzles of messages, and of memory that ranks share."""

from collectives.checking.definitions import OPERATIONS
from collectives.checking.simulator import Stats
from collectives.pricing.networks import Network
from collectives.pricing.topology import nodes
from collectives.puzzles.puzzle import Puzzle
from collectives.steps import Recv, RecvReduce, Send, writes


def only_neighbours(stats: Stats) -> str:
    """Messages go to the next rank on a ring, or to the one before."""
    size = len(stats.buffers)
    for rank, rounds in enumerate(stats.history):
        for step in (s for steps in rounds for s in steps if isinstance(s, Send)):
            if (step.peer - rank) % size not in (1, size - 1):
                return f"rank {rank} sends to rank {step.peer}: only neighbours on the ring have a wire"
    return ""


def one_port(stats: Stats) -> str:
    """A rank sends one message in a round, and receives one."""
    for rank, rounds in enumerate(stats.history):
        for k, steps in enumerate(rounds):
            sends = sum(isinstance(s, Send) for s in steps)
            receives = sum(isinstance(s, Recv | RecvReduce) for s in steps)
            if max(sends, receives) > 1:
                return f"rank {rank}, round {k}: {sends} sends and {receives} receives, where there is a port for each"
    return ""


def in_memory(stats: Stats) -> str:
    """All is done in memory, and in the end a rank knows that what others write into its buffers has been written."""
    if any(stats.messages):
        return "there are no messages here: Copy, Reduce and Barrier only"
    for writer, rounds in enumerate(stats.history):
        for k, steps in enumerate(rounds):
            for place in (place for step in steps for place in writes(step, writer)):
                if place.rank != writer and stats.heard[place.rank][writer] < k + 1:
                    return f"rank {place.rank} ends without a Barrier after rank {writer} has written {place.buf} there"
    return ""


broadcast = Puzzle(
    "broadcast to 8",
    """Rank 0 has x; bring it to all ranks. A rank sends one message in a round and receives one.

    In the first round only rank 0 can send. How many ranks can send in the second?""",
    8,
    4,
    OPERATIONS["broadcast"],
    {"rounds": 3, "moved": 12},
    {"rounds": 3, "moved": 12},
    ((1, 2), (2, 3), (5, 4), (7, 3)),
    rule=one_port,
)

gather = Puzzle(
    "gather to one",
    """Every rank has its block of a vector in x; rank 0 is to have all of them in y, in order (its own too). A rank
    sends one message in a round and receives one.

    If blocks travel one by one, rank 0 needs seven rounds. Who could carry several?""",
    8,
    16,
    OPERATIONS["gather"],
    {"rounds": 4, "moved": 14},
    {"rounds": 3, "moved": 14},
    ((1, 3), (2, 5), (4, 8)),
    rule=one_port,
)

scan = Puzzle(
    "running sums",
    """Every rank is to have in x the sum of its own x and those of all ranks before it.

    One after the other that takes seven rounds. After k rounds, of how many ranks can a rank know the sum?""",
    8,
    3,
    OPERATIONS["scan"],
    {"rounds": 3, "moved": 9},
    {"rounds": 3, "moved": 9},
    ((1, 2), (2, 2), (5, 3), (7, 4)),
    rule=one_port,
)

doubling = Puzzle(
    "sum on 8 in three rounds",
    """All ranks are to have the sum of all x, in as few rounds as there can be. Long vectors are no concern here.""",
    8,
    4,
    OPERATIONS["allreduce"],
    {"rounds": 3, "moved": 12},
    {"rounds": 3, "moved": 12},
    ((2, 4), (4, 4)),
    rule=one_port,
)

reduce_scatter = Puzzle(
    "each a part of the sum",
    """Five ranks in a ring, each with a wire to the next and to the one before. Rank r is to have part r of the sum of
    all x in its place in x (`chunk(count, size, r)`); the rest of x may be anything.

    What has been added up on its way need not be sent twice. (The record keeps both wires busy at once.)""",
    5,
    20,
    OPERATIONS["reduce_scatter"],
    {"rounds": 4, "moved": 16},
    {"rounds": 2, "moved": 16},
    ((2, 5), (3, 7), (4, 3)),
    rule=only_neighbours,
)

ring = Puzzle(
    "ring allreduce",
    """The same five ranks: now all of them are to have all of the sum. No rank may send more than 2 (p-1)/p of a
    vector: what each rank sends then hardly grows with the number of ranks, and that is why gradients are summed
    like this.""",
    5,
    20,
    OPERATIONS["allreduce"],
    {"rounds": 8, "moved": 32},
    {"rounds": 4, "moved": 32},
    ((2, 5), (3, 7), (4, 3), (1, 2)),
    rule=only_neighbours,
)

halving = Puzzle(
    "few rounds and few bytes",
    """Eight ranks, any of which has a wire to any other: the sum of all x on all ranks, with as few elements as a ring
    moves and in six rounds instead of fourteen.""",
    8,
    64,
    OPERATIONS["allreduce"],
    {"rounds": 6, "moved": 112},
    {"rounds": 6, "moved": 112},
    ((2, 6), (4, 8)),
    rule=one_port,
)

alltoall = Puzzle(
    "everyone to everyone",
    """Rank r has a block for each rank q in x (`chunk(count, size, q)`); q is to have the blocks that are meant for it
    in y, in the order of those who sent them, its own among them. A rank sends one message in a round and receives
    one: in every round all have something to do.""",
    6,
    36,
    OPERATIONS["alltoall"],
    {"rounds": 5, "moved": 30},
    {"rounds": 5, "moved": 30},
    ((1, 2), (2, 4), (3, 9), (5, 10)),
    rule=one_port,
)

chain = Puzzle(
    "a long vector in pieces",
    """Rank 0 has 32 elements for the three others. A message takes one unit of time and one for every element; a rank
    sends one at a time and receives one at a time, both at once if it likes. A tree takes 66.

    If the vector goes in pieces, all can be busy.""",
    4,
    32,
    OPERATIONS["broadcast"],
    {"seconds": 55},
    {"seconds": 50},
    ((1, 3), (2, 8), (3, 5)),
    Network.hockney(1.0, 1.0),
)

memory = Puzzle(
    "sum in shared memory",
    """Four ranks of a node: `Copy` and `Reduce` may name another rank's buffer (`of=q` reads it, `to=q` writes it),
    and `Barrier()`, alone in its round, waits until all have come. All are to have the sum of all x, without messages.

    Two ranks that touch one element, one of them writing, without a barrier between them, race: the checker finds
    it. Who adds what, so that nobody adds more than its share?""",
    4,
    16,
    OPERATIONS["allreduce"],
    {"rounds": 5, "copied": 32},
    {"rounds": 4, "copied": 32},
    ((1, 2), (2, 5), (3, 7)),
    rule=in_memory,
    memory=True,
)

torus = Puzzle(
    "sum on a torus",
    """Sixteen ranks on a torus of 4 x 4: rank 4 i + j has a link to the ranks above and below and to the left and
    right of it, and all ends are joined. A link carries an element in a unit of time in each direction, and a message
    takes a unit longer. All ranks are to have the sum of all x. One ring through all ranks takes 638 units, and leaves
    three links of every rank idle.

    A rank may send over all of its links in one round. Four sums at once, each of a quarter of the vector?""",
    16,
    320,
    OPERATIONS["allreduce"],
    {"seconds": 200},
    {"seconds": 158},
    ((16, 37), (16, 4)),
    Network.torus((4, 4), 1.0, 1.0),
)

thin_link = Puzzle(
    "sum over a thin link",
    """Two nodes of four ranks: 0 to 3 and 4 to 7. Inside a node every rank has a link to a switch that carries ten
    elements in a unit of time, but all that leaves a node goes over one link that carries one. All ranks are to have
    the sum of all x. A ring through all ranks takes 562 units: over the thin link go 1.75 vectors each way.

    How much of its vector does a node have to send at least, and which rank sends what of it?""",
    8,
    320,
    OPERATIONS["allreduce"],
    {"seconds": 400},
    {"seconds": 372},
    ((8, 37), (8, 4)),
    Network.on(nodes(2, 4, 1.0, 1.0, 10.0, 0.0)),
)
