"""Schedules that a caller wrote: run in the simulator first, so that wrong ones are refused before anything is sent.

Two ways in: a generator function, which every rank calls for all ranks and so proves for itself (`compile_function`),
and a rank's own rounds, which the ranks send each other (`compile_rounds`). Both find out which buffers ranks name of
each other's: these lie where all ranks of the node see them.
"""

from functools import partial
from inspect import signature
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms.registry import SEGMENT_BYTES
from collectives.checking.definitions import prove
from collectives.checking.simulator import ScheduleError, simulate_lengths
from collectives.executor.plan import Plan
from collectives.executor.program import Program, live_rounds
from collectives.running.buffers import incoming, same_type
from collectives.steps import Barrier, Compute, Step, blocks, mistake_in, reads, rounds_of, writes

MOST_RANKS = 64  # of which each rank simulates a schedule
MOST_STEPS = 20_000  # of all ranks together, likewise


def compile_function(planner, operation, function, count, itemsize, float16, ordered, options) -> Program:
    """This rank's program of a generator function that the caller gave, when every rank has proven it for itself.

    It is proven on symbols with few elements. Then it runs with all elements but without values: so messages match,
    all ranks end and nothing races in this very call.
    """
    title = f"{operation} by {getattr(function, '__name__', function)}, {planner.size} ranks"
    if planner.size > MOST_RANKS:
        raise ValueError(f"{title}: more than {MOST_RANKS}: compile the rounds of each rank")
    parameters = signature(function).parameters
    if options.get("root") and "root" not in parameters:
        raise ValueError(f"{title}: root {options['root']}, but the algorithm has no parameter root: it is rank 0")
    offered = options | {"nodes": planner.nodes, "segment": max(1, SEGMENT_BYTES // itemsize)}
    passed = {name: value for name, value in offered.items() if name in parameters}
    few = 2 * planner.size + (operation != "alltoall")

    def rounds(rank, size, *count, **more):
        more = {name: value for name, value in more.items() if name in parameters}
        for steps in rounds_of(rank, function(rank, size, *count, **(passed | more))):
            if computed := [] if mistake_in(steps) else [s for s in steps if isinstance(s, Compute)]:
                raise ValueError(
                    f"{title}: {computed[0]} needs a function: compile(..., computations={{name: function}})"
                )
            yield steps

    try:
        small = {"into": blocks_of(few, planner.size)} if "into" in parameters else {}
        prove(operation, partial(rounds, **small), planner.size, few, options.get("root", 0), ordered=ordered)
        rounds_of_ranks = [live_rounds(rounds(r, planner.size, *count), r) for r in range(planner.size)]
        elements = max((blocks(n, planner.size)(r)[1] for n in count for r in range(planner.size)), default=0)
        simulate_lengths(rounds_of_ranks, [{"x": elements, "y": elements} if count else {}] * planner.size)
    except ScheduleError as error:
        error.add_note(f"found before anything was sent: {title}")
        raise
    named = named_by_others(rounds_of_ranks, planner.nodes)
    live = (
        rounds_of_ranks[planner.rank]
        if named is None
        else between_barriers(rounds_of_ranks[planner.rank], planner.node_ranks)
    )
    program = Program(live, planner.rank, round_once=float16, shared=named is not None)
    if named is not None:
        root = f", root {options['root']}" if "root" in options else ""
        call = f"{' of '.join([operation, *map(str, count)])}{root}, by a schedule of the caller's own"
        program.named = named._replace(call=call)
    return program


def compile_rounds(planner, rounds, op, buffers, computations) -> Plan:
    """Return a schedule of the caller's own on named arrays (collective): wrong ones are refused on all ranks."""
    mistake, live, counts, program = None, [], {}, None
    try:
        live = live_rounds(rounds, planner.rank)
        if not buffers:
            raise ValueError("compile: give at least one array by its name in the schedule, such as x=array")
        messages = {name: incoming(array) for name, array in buffers.items()}
        first = next(iter(messages.values()))
        for message in messages.values():
            same_type(first, message)
        counts = {name: message.count for name, message in messages.items()}
        program = Program(live, planner.rank, round_once=first.float16)
        check_schedule(planner, live, program, counts, computations)
    except Exception as error:  # sent to the others, who would wait for this rank
        mistake = error
    exchanged = sum(map(len, live)) * planner.size <= MOST_STEPS
    shares = any(shares_memory(step, planner.rank) for steps in live for step in steps)
    mistake_text = f"{type(mistake).__name__}: {mistake}" if mistake else ""  # str() of a bare assert is empty
    planner.exchange(np.array(0))  # with a limit; then all ranks have come, and objects follow
    answers = planner.comm.allgather((mistake_text, live if exchanged else None, counts, shares))
    if mistake:
        raise mistake
    for rank, (message, *_) in enumerate(answers):
        if message:
            raise ValueError(f"compile: rank {rank} has a mistake in its schedule: {message}")
    rounds_of_ranks, lengths = [each[1] for each in answers], [each[2] for each in answers]
    own = None
    if None not in rounds_of_ranks:
        simulate_lengths(rounds_of_ranks, lengths)
        program.named = named_by_others(rounds_of_ranks, planner.nodes)
    elif sharing := [rank for rank, (*_, shares) in enumerate(answers) if shares]:
        raise ValueError(
            f"compile: rank {sharing[0]} has a Barrier or names others' buffers, in a schedule of more than "
            f"{MOST_STEPS:,} steps: too long to see that nothing races. Compile it in parts, or send messages"
        )
    if program.named is not None:
        named = program.named
        live = between_barriers(live, planner.node_ranks)
        program = Program(live, planner.rank, round_once=first.float16, shared=True)
        longest = {name: max(n, *(counts.get(name, 0) for counts in lengths)) for name, n in named.lengths.items()}
        program.named = named._replace(lengths=longest)
        own = memory_for(planner, longest, {name: buffers.get(name) for name in longest}, first)
    memory = {name: message.bytes(0, message.count) for name, message in messages.items()}
    return planner.plan(program, memory, message=first, op=op, computations=computations, own=own)


def check_schedule(planner, rounds, program, counts, computations) -> None:
    """Refuse what this rank alone can see to be wrong."""
    for name, count in counts.items():
        if (needed := program.lengths.get(name, 0)) > count:
            raise ValueError(
                f"compile: rank {planner.rank}'s schedule needs {needed} elements of {name}, which has {count}"
            )
    for number, steps in enumerate(rounds):
        for s in steps:
            if isinstance(s, Compute) and s.name not in computations:
                raise ValueError(
                    f"compile: rank {planner.rank}, round {number}: there is no computation {s.name!r} among "
                    f"{sorted(computations)}: compile(..., computations={{{s.name!r}: function}})"
                )


def memory_for(planner, lengths, arrays, message) -> dict[str, dict[int, MPI.buffer]]:
    """Memory for what ranks name of each other's buffers: the arrays themselves where all ranks see those."""
    if planner.made_window is None and not planner.shares():
        raise OSError(f"compile: the schedule is for shared memory, and there is none: {planner.selection.refused}")
    peers = {name: x is not None and planner.window.peers(np.asarray(x)) for name, x in arrays.items()}
    places = planner.comm.allgather({name: parts and parts.place for name, parts in peers.items()})
    shared = {name for name in lengths if peers[name] and all(place[name] == places[0][name] for place in places)}
    new = planner.allocate_shared({name: n * message.itemsize for name, n in lengths.items() if name not in shared})
    return new | {name: planner.by_rank(peers[name]) for name in shared}


def between_barriers(rounds: list[list[Step]], ranks: list[int]) -> list[list[Step]]:
    """The rounds of one of these ranks, behind and before a Barrier of all: what they copy for each other is there."""
    barrier: list[Step] = [Barrier(tuple(ranks))]
    return [barrier, *rounds, barrier]


class Named(NamedTuple):
    """What ranks name of each other's buffers.

    lengths : name -> elements that any rank names
    written : which (name, owner) are written
    call : what the ranks run, in words: they compare it before it touches memory
    """

    lengths: dict[str, int]
    written: set[tuple[str, int]]
    call: str = "a plan of compile"


def named_by_others(rounds_of_ranks, nodes) -> Named | None:
    """Return what ranks name of each other's buffers; None for a schedule without shared memory.

    Parameters
    ----------
    rounds_of_ranks : the rounds of each rank
    nodes : the node of each rank

    Raises
    ------
    ValueError
        Ranks on different nodes, which share no memory.
    """
    lengths: dict[str, int] = {}
    named, written, barriers = set(), set(), False
    for rank, rounds in enumerate(rounds_of_ranks):
        for number, steps in enumerate(rounds):
            for s in steps:
                places, barriers = reads(s, rank) + writes(s, rank), barriers or isinstance(s, Barrier)
                others = {place.rank for place in places}
                if isinstance(s, Barrier):
                    others = set(range(len(nodes)) if s.ranks is None else s.ranks)
                if far := [other for other in others if nodes[other] != nodes[rank]]:
                    raise ValueError(
                        f"rank {rank}, round {number}: {s} names rank {far[0]}, which is on another node: those share "
                        f"no memory, send messages"
                    )
                written |= {(place.buf, place.rank) for place in writes(s, rank)}
                for place in places:
                    lengths[place.buf] = max(lengths.get(place.buf, 0), place.hi)
                    if place.rank != rank:
                        named.add(place.buf)
    return Named({name: lengths[name] for name in named}, written) if named or barriers else None


def shares_memory(step, rank) -> bool:
    """Return whether a step is a Barrier or names other ranks' buffers."""
    return isinstance(step, Barrier) or any(place.rank != rank for place in reads(step, rank) + writes(step, rank))


def blocks_of(count, n) -> list[tuple[int, int]]:
    """(lo, hi) of each of n nearly equal blocks."""
    return [blocks(count, n)(i) for i in range(n)]
