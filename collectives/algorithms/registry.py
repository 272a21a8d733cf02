"""The registry: ALGORITHMS[operation][name] says what an algorithm needs, keeps and costs.

Each file of this package holds one operation. In all of them "x" is the caller's buffer, and

| operation | before | after |
|---|---|---|
| broadcast(count, root) | the root's x | the same x everywhere |
| reduce(count, root) | every rank's x | the root's x is the sum; the x of others is used up |
| allreduce(count) | every rank's x | x is the sum everywhere |
| scatter(blocks, root) | the root's x: all blocks | y: this rank's block |
| gather(blocks, root) | x: this rank's block | the root's y: all blocks |
| allgather(blocks) | block `rank` of x | all blocks of x everywhere |
| reduce_scatter(blocks) | every rank's x | block `rank` of x is its sum; the rest of x is used up |
| alltoall(blocks, into) | x: block q for rank q | y: block q from rank q |
| scan(count) | every rank's x | x is the sum over ranks 0 ... rank |
| exscan(count) | every rank's x | x is the sum over ranks 0 ... rank - 1; rank 0 keeps its own |
| barrier() | | every rank has entered before any rank leaves |

`blocks` is a number of elements, cut by `steps.chunk`, or a list with the (lo, hi) of every rank's block. In an
alltoall it says where the blocks lie in x, `into` where they lie in y; as a number it is a multiple of the number of
ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import lru_cache
from inspect import signature
from typing import NamedTuple

from collectives.steps import Round, chunk

SEGMENT = 1 << 16  # elements of x that a pipelined algorithm keeps in flight, where the caller does not say
# What the communicator says: from 64 KiB on Open MPI's TCP asks the receiver before it sends, which takes longer.
SEGMENT_BYTES = 60_000


class Need(Enum):
    """What an algorithm needs beyond any number of ranks, root and count: a call that has it not runs another."""

    COMMUTATIVE = "an operation that commutes, as operands are not combined in rank order"
    CONSECUTIVE = "blocks of a list that follow each other in rank order without gaps"
    DIMS = "the sides of a torus, or of levels, as its parameter `dims`; without them a ring"
    EQUAL_BLOCKS = "blocks of one length"
    NODES = "the node of each rank, as its parameter `nodes`"
    SHARED_MEMORY = "memory that ranks share: their slots, or x itself (algorithms/shared.py)"


COMMUTATIVE, CONSECUTIVE, DIMS, EQUAL_BLOCKS, NODES, SHARED_MEMORY = Need


class Cost(NamedTuple):
    """Counts along the critical path, of which `seconds` makes a time.

    messages are counted one after another; moved, reduced and copied are in elements (beta, gamma and copy seconds an
    element). What can be added while the next message is on its way is not counted: gamma <= beta. For root 0.
    """

    messages: float = 0.0
    moved: float = 0.0
    reduced: float = 0.0
    barriers: float = 0.0
    copied: float = 0.0

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0, barrier: float = 0.0, copy: float = 0.0) -> float:
        moving = self.messages * alpha + self.moved * beta + self.reduced * gamma
        return moving + self.barriers * barrier + self.copied * copy


class Algorithm(NamedTuple):
    """One entry of the registry.

    Attributes
    ----------
    name : str
    rounds : generator function (rank, size, count, ...) -> rounds of steps of that rank
    cost : function (size, count) -> Cost; closed form, count in elements over all blocks. It is what is
        simulated on a network of one level (tests/collectives/test_closed_forms.py has the few that are bounds where
        p is no power of two)
    needs : frozenset of Need
    pipelined : whether x is cut into segments: the function takes `segment`, their greatest length in elements
    rounds_once : whether all operands of an element are added in one round, so that float16 is rounded only once. Only
        such algorithms are chosen for float16; another one, if requested, rounds after every round that adds.
        `check_algorithm` checks the claim
    """

    name: str
    rounds: Callable[..., Iterator[Round]]
    cost: Callable[[int, int], Cost]
    needs: frozenset[Need] = frozenset()
    pipelined: bool = False
    rounds_once: bool = False

    @property
    def ordered(self) -> bool:
        """Whether operands are combined in rank order."""
        return COMMUTATIVE not in self.needs


RESERVED = "auto", "schedule", "messages", "native"  # what a call may request other than the name of an algorithm


class Collective(NamedTuple):
    """What all algorithms of an operation have in common.

    Attributes
    ----------
    traffic : function (units, outside) -> factor of n beta that some unit must at least send or receive, n being the
        whole vector (Chan, Heimlich, Purkayastha, van de Geijn 2007, table 1). Units are ranks, or nodes; `outside` is
        the share of the ranks outside of one unit
    parameters : of the schedules after rank, size and count or blocks (a barrier has neither)
    """

    traffic: Callable[[int, float], float]
    parameters: tuple[str, ...] = ()


COLLECTIVES = {
    "allgather": Collective(lambda units, outside: outside),
    "allreduce": Collective(lambda units, outside: 2 * (units - 1) / units),
    "alltoall": Collective(lambda units, outside: outside, ("into",)),
    "barrier": Collective(lambda units, outside: 0.0),
    "broadcast": Collective(lambda units, outside: 1.0, ("root",)),
    "exscan": Collective(lambda units, outside: 1.0),
    "gather": Collective(lambda units, outside: outside, ("root",)),
    "reduce": Collective(lambda units, outside: 1.0, ("root",)),
    "reduce_scatter": Collective(lambda units, outside: outside),
    "scan": Collective(lambda units, outside: 1.0),
    "scatter": Collective(lambda units, outside: outside, ("root",)),
}
ALGORITHMS: dict[str, dict[str, Algorithm]] = {operation: {} for operation in COLLECTIVES}


def algorithm(
    operation: str,
    cost: Callable[[int, int], Cost],
    *,
    name: str = "",
    needs: Iterable[Need] = (),
    rounds_once: bool = False,
):
    """Decorate a generator function of rounds: enter it in the registry under its own name, or the one given.

    Raises
    ------
    ValueError
        An operation that there is not; a name that is taken.
    TypeError
        Needs that are none; a function without a parameter that every call gives it, or that its needs name.
    """
    if operation not in COLLECTIVES:
        raise ValueError(f"no operation {operation!r}: expected one of {', '.join(COLLECTIVES)}")
    needs = frozenset((needs,) if isinstance(needs, str | Need) else needs)
    if wrong := [need for need in needs if not isinstance(need, Need)]:
        raise TypeError(f"needs: expected values of Need, such as {{Need.COMMUTATIVE}}, not {wrong[0]!r}")

    def enter(rounds, name=name):
        name = name or rounds.__name__
        if name in RESERVED:
            raise ValueError(f"{operation}: the name {name!r} is taken by what a table stands for; choose another")
        entries, parameters = ALGORITHMS[operation], signature(rounds).parameters
        if name in entries:
            raise ValueError(f"{operation} already has an algorithm {name!r}; choose another name")
        by_need = (word for need, word in ((NODES, "nodes"), (DIMS, "dims")) if need in needs)
        needed = *COLLECTIVES[operation].parameters, *by_need
        if missing := [word for word in needed if word not in parameters]:
            raise TypeError(
                f"{operation}, {name}: expected a parameter {missing[0]!r} after {', '.join(parameters)}: calls of "
                f"{operation} pass it; add it to the function"
            )
        pipelined = "segment" in parameters
        entries[name] = Algorithm(name, rounds, cost, needs, pipelined, rounds_once)
        return rounds

    return enter


def by_messages(operation: str) -> dict[str, Algorithm]:
    """The algorithms of an operation that need no shared memory, by name: those that a caller can ask for.

    Of the others `shared` runs the one that fits the call.
    """
    return {name: entry for name, entry in ALGORITHMS[operation].items() if SHARED_MEMORY not in entry.needs}


def log2(n: int) -> int:
    """The smallest k with 2**k >= n: how many times n ranks can be halved."""
    return (n - 1).bit_length()


def subtree(place: int, size: int) -> int:
    """The places that hang from one in the binomial tree over 0 ... size - 1, itself included, were it full.

    That is the lowest set bit of the place; of the root, place 0, the smallest power of two that is at least `size`.
    """
    return place & -place or 1 << log2(size)


def how_many(count: int, segment: int) -> int:
    """The number of segments, at least one, none longer than `segment`, that `count` elements are cut into."""
    return max(1, -(-count // segment))


@lru_cache(maxsize=8)  # all ranks of a tree have the same, and a thousand copies fill no cache
def segments(lo: int, hi: int, k: int) -> tuple[tuple[int, int], ...]:
    """Cut lo ... hi into k nearly equal segments."""
    return tuple((lo + a, lo + b) for a, b in (chunk(hi - lo, k, i) for i in range(k)))
