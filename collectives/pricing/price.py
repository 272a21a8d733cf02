"""What an algorithm costs on a network of any size, by event-driven simulation of its own steps.

    >>> price(ring_allreduce, size=1024, count=25_000_000, itemsize=4, network="gpu-100g").seconds

Every rank goes through its rounds under LogGP (Alexandrov et al. 1995) with two levels; see networks.py for the
parameters, event_simulation.py for the simulation. A message is sent in overhead seconds of the sender's processor,
waits until its port is free, holds it for the gap and n beta, reaches the receiver's port a latency later, waits for
that, holds it as long, and takes overhead seconds of the receiver's processor; a reduction then takes n gamma, a copy n
copy. Ports serve first come, first served; the ranks of a node share the node's. On Network.hockney the result is the
closed form of the literature, messages alpha + moved beta + reduced gamma (test_closed_forms.py).

In node memory, copies and reductions cost the same whoever's buffer they name, unless somebody has measured what it
takes to fetch another rank's, and to write into a slot that others have read; and the ranks of a node share what its
memory can carry, if the network says what that is. The ranks of a barrier leave it together, some time after the last
has come. A Compute keeps its rank busy for its seconds, while the messages of its round travel.

On a measured network all of this depends on the length of the message (parameterised LogP, Kielmann 2000), and so do
copies and reductions; a send above the eager limit leaves when its receive is there, one below it frees its sender at
once; both directions at once are slower, and a port that has rested lets its first bytes through (networks.py).

Cost: about 5 us a message, so 16,384 ranks of a logarithmic algorithm take a few seconds. A ring of so many ranks
sends 500 million messages: there one node stands for all, as every node does the same with its neighbours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from inspect import signature

import numpy as np

from collectives.algorithms import ALGORITHMS, Algorithm
from collectives.algorithms.registry import DIMS, NODES
from collectives.pricing.event_simulation import EventSimulation
from collectives.pricing.networks import Network, find_network
from collectives.pricing.symmetry import Symmetry, messages_if_alike, shift, smallest_block
from collectives.pricing.trace import Trace
from collectives.steps import (
    Blocks,
    Round,
    mistake_in,
    rounds_of,
)

SIMULATED_AT_MOST = 4_000_000  # steps; about 10 s
SIMULATED_ON_TOPOLOGY_AT_MOST = 12_000_000  # steps; about a minute
SYMMETRIC_FROM = 200_000  # steps on a topology; about a second
MOST_STEPS = 4_000_000  # steps of one rank
LONG = 1 << 20  # bytes


@dataclass(frozen=True)
class Price:
    """What an algorithm costs.

    Attributes
    ----------
    seconds : float
        Until the last rank has finished.
    finish : ndarray (size,)
        Seconds until each rank has finished.
    rounds : int
        Most rounds of any rank.
    messages, bytes : int
        Sent by all ranks together.
    bytes_between : int
        Those of them that left a node.
    busiest : int
        Most bytes that one rank sent.
    barriers : int
        Most barriers of any rank.
    copied : int
        Bytes that Copy and Reduce wrote, on all ranks together.
    traffic : tuple of int
        Bytes that each channel of the topology carried; empty where the network has none.
    method : str
        "simulation" (of every rank), "one node for all" or "one block for all" (shift symmetry), or "closed form".
    trace : Trace or None
        Every round, message and piece of work, if requested.
    """

    seconds: float
    finish: np.ndarray
    rounds: int
    messages: int
    bytes: int
    bytes_between: int
    busiest: int
    method: str
    trace: Trace | None = None
    barriers: int = 0
    copied: int = 0
    traffic: tuple[int, ...] = ()

    def __str__(self):
        words = [f"{self.seconds * 1e6:,.1f} us, {self.rounds:,} rounds"]
        if self.barriers:
            words.append(f"{self.barriers:,} barriers, {self.copied:,} bytes copied or added in memory")
        if self.messages or not self.barriers:
            words.append(f"{self.messages:,} messages, {self.bytes:,} bytes ({self.bytes_between:,} between nodes)")
        return ", ".join([*words, f"by {self.method}"])


def price(
    algorithm: Algorithm | Callable[..., Iterable[Round]],
    size: int,
    count: Blocks,
    itemsize: int = 4,
    network: Network | str = "workstation",
    trace: bool = False,
    **options,
) -> Price:
    """What `algorithm` costs on `size` ranks of `network`.

    Where all ranks together have more than four million steps, one node is simulated for all of them, if a sample of
    the others does the same with its neighbours (`count` is then rounded up to a multiple of `size`); failing that, the
    closed form of the registry is taken, on one level: the network's, or the node's where all ranks share one.
    On a topology a block of ranks stands for all from 200,000 steps on, where a shift by it maps routes to routes.

    Parameters
    ----------
    algorithm : generator function or entry of ALGORITHMS
        algorithm(rank, size, count, **options) yields rounds (steps.py).
    size, count, itemsize : int
        Ranks; elements of the vector, or a list of blocks; bytes of an element.
    network : Network or str
        Or the name of one in NETWORKS.
    trace : bool
        Keep every round and message (the drawings read them); every rank is simulated then.
    **options
        For the algorithm: root, segment and the like. An entry of the registry that asks for `nodes` gets those of the
        network, filled one after the other, where they are not given.

    Raises
    ------
    TypeError
        An algorithm that is no generator of rounds.
    ValueError
        What is no round or no step; a rank that waits for ever, a message that nobody receives or of another length
        than its receive (ask `collectives.check`), ranks of different nodes that would share memory, an unknown
        network, or too many steps and neither symmetry nor a closed form.

    Examples
    --------
    >>> import collectives
    >>> ring = collectives.ALGORITHMS["allreduce"]["ring"]
    >>> price = collectives.price(ring, size=4, count=1000, network="gigabit")
    >>> price.messages
    24
    """
    if isinstance(network, str):
        network = find_network(network)
    if size < 1 or itemsize < 1:
        raise ValueError(f"need size >= 1 and itemsize >= 1, not {size} and {itemsize}")
    name, rounds, closed_form = read(algorithm)
    if isinstance(algorithm, Algorithm) and NODES in algorithm.needs:
        options.setdefault("nodes", network.nodes_of(size))
    if isinstance(algorithm, Algorithm) and DIMS in algorithm.needs:
        options.setdefault("dims", network.dims_of(size))

    def program_of(count):
        return partial(_rounds_of, rounds, size, count, options)

    def simulate(count, symmetry=None):
        part = symmetry.block / size if symmetry else 1.0
        program = program_of(count)
        return EventSimulation(program, name, size, itemsize, network, trace, symmetry, expected_steps=steps * part)

    steps, longest = _steps_in_all(program_of(count), size, trace, name)
    if longest > MOST_STEPS and not closed_form:
        raise ValueError(
            f"a rank of {name} takes more than {MOST_STEPS:,} steps, if it ends at all: collectives.check says whether"
        )
    most = SIMULATED_ON_TOPOLOGY_AT_MOST if network.topology else SIMULATED_AT_MOST
    rounded = -(-count // size) * size if isinstance(count, int) else count
    if network.topology and steps > SYMMETRIC_FROM and not trace:
        exactly = count if steps <= most else rounded
        if found := smallest_block(program_of(exactly), size, network, int(size * most / steps)):
            return as_price(simulate(exactly, found), "one block for all")
    if trace or steps <= most:
        return as_price(simulate(count), "simulation")
    if network.topology:
        segmented = "segment" in signature(rounds).parameters
        raise ValueError(
            f"{size} ranks of {name} take about {steps:,.0f} steps, more than {most:,} on a topology, and no small "
            f"block of ranks stands for all: price fewer ranks, {'larger segments, ' if segmented else ''}or a network "
            f"where all nodes have as many ranks, such as nodes:nodes={-(-size // 8)},ranks=8"
        )
    node = network.ranks_per_node if network.ranks_per_node < size else 1  # in one node all ranks are alike
    may_be_alike = size % node == 0 and network.placement is None
    if may_be_alike and messages_if_alike(program_of(rounded), size, node, shift(size)) is not None:
        return as_price(simulate(rounded, Symmetry(node, shift(size))), "one node for all")
    if closed_form:
        elements = count or 0 if isinstance(count, int | None) else max(hi for _, hi in count)
        link = network.inside if network.ranks_per_node >= size else network.between
        known = signature(closed_form).parameters
        if unknown := sorted(set(options) - {"nodes", "root", *known}):
            raise ValueError(
                f"the closed form of {name} knows no {', '.join(unknown)}, and more steps than "
                f"{SIMULATED_AT_MOST:,} are not simulated: price fewer ranks or leave it out"
            )
        cost = closed_form(size, elements, **{key: value for key, value in options.items() if key in known})
        if cost.barriers and size > network.ranks_per_node:
            raise ValueError(f"{name}: {size} ranks share no memory, with {network.ranks_per_node} a node")
        copy = network.copying(LONG) / LONG  # seconds a byte, as gamma is
        in_memory = network.gamma * itemsize, network.barrier_seconds(size), copy * itemsize
        seconds = cost.seconds(link.alpha, link.beta * itemsize, *in_memory)
        return Price(seconds, np.full(size, seconds), 0, 0, 0, 0, 0, "closed form")
    raise ValueError(
        f"{size} ranks of {name} take more than {SIMULATED_AT_MOST:,} steps, the nodes differ from each other, and "
        "it has no closed form: price fewer ranks or larger segments"
    )


def read(algorithm) -> tuple[str, Callable, Callable | None]:
    """(name in words, generator function, closed form or None) of an entry of the registry or a generator function.

    Raises
    ------
    TypeError
        it is neither
    """
    if isinstance(algorithm, Algorithm):
        algorithm = algorithm.rounds
    if not callable(algorithm):
        raise TypeError(
            "an algorithm is a generator function of (rank, size, count), or an entry of ALGORITHMS such as "
            f"collectives.ALGORITHMS['allreduce']['ring']; given {algorithm!r:.80}"
        )
    function = algorithm
    while isinstance(function, partial):
        function = function.func
    for operation, entries in ALGORITHMS.items():
        for entry in entries.values():
            if entry.rounds is function:
                name = f"{entry.name} {operation}".replace("_", " ")
                return name, algorithm, entry.cost if function is algorithm else None
    return getattr(function, "__name__", type(function).__name__).replace("_", " "), algorithm, None


def _rounds_of(rounds, size, count, options, rank):
    vector = () if count is None else (count,)  # a barrier has none
    return rounds_of(rank, rounds(rank, size, *vector, **options))


def _steps_in_all(program, size, exactly, name) -> tuple[float, int]:
    """Steps of all ranks, and of the longest; if not `exactly`, estimated from a few.

    The first and the longest count once, the median stands for all others.
    """
    sample = range(size) if exactly else sorted({0, 1 % size, size // 3, size // 2, size - 1})
    steps = [_length(program(rank), f"{name}: rank {rank}") for rank in sample]
    return max(steps) + steps[0] + float(np.median(steps)) * size, max(steps)


def _length(rounds, whose) -> int:
    total = 0
    for number, steps in enumerate(rounds):
        if wrong := mistake_in(steps):
            raise ValueError(f"{whose}, round {number}: {wrong}")
        total += len(steps) or 1  # a schedule may also yield nothing without end
        if total > MOST_STEPS:
            break
    return total


def as_price(simulation: EventSimulation, method: str) -> Price:
    """What a simulation found."""
    copies = simulation.size // simulation.simulated
    itemsize, elements = simulation.itemsize, simulation.elements
    sent = [(inside + between) * itemsize for inside, between in zip(*elements, strict=True)]
    return Price(
        seconds=float(simulation.finish.max()),
        finish=np.tile(simulation.finish, copies),
        rounds=max(simulation.rounds),
        messages=simulation.messages * copies,
        bytes=sum(sent) * copies,
        bytes_between=sum(elements[True]) * itemsize * copies,
        busiest=max(sent),
        barriers=max(simulation.barriers),
        copied=sum(simulation.copied) * itemsize * copies,
        method=method,
        trace=simulation.trace,
        traffic=tuple(simulation.flows.carried()) if simulation.network.topology else (),
    )
