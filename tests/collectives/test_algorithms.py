"""Every algorithm of the registry computes what its operation defines, and every mutation of it is caught."""

import itertools

import pytest

from collectives import ALGORITHMS, price
from collectives.checking import OPERATIONS, prove
from collectives.networks import Network
from collectives.simulator import ScheduleError
from collectives.steps import Copy, Recv, RecvReduce, Reduce, Send

ENTRIES = [(op, entry) for op, entries in ALGORITHMS.items() for entry in entries.values()]
everyone = pytest.mark.parametrize("operation, entry", ENTRIES, ids=[f"{op}-{e.name}" for op, e in ENTRIES])

UNIT_NETWORKS = [Network.hockney(1, 0), Network.hockney(0, 1), Network.hockney(0, 0, 1)]


def cases(operation, size):
    """(count, root): every root of up to 6 ranks, then some."""
    roots = range(size) if size <= 6 else (0, size // 3, size - 1)
    rooted = operation != "barrier" and OPERATIONS[operation].rooted
    counts = sorted({0, 1, size - 1, size, 2 * size + 1}) if size <= 9 else (1, 2 * size + 1)
    return itertools.product(counts, roots if rooted else [0])


@everyone
def test_right_for_any_size_count_and_root(operation, entry):
    """With synchronous sends, which implies eager ones (simulator.py); eager ones are tried for small sizes as well."""
    for size in range(1, 34):
        for count, root in cases(operation, size):
            prove(operation, entry.rounds, size, count, root, ordered=entry.ordered)
            if size <= 6:
                prove(operation, entry.rounds, size, count, root, ordered=entry.ordered, synchronous=False)


@pytest.mark.parametrize("operation", [op for op, define in OPERATIONS.items() if define.blocked])
def test_blocks_may_be_uneven_empty_apart_and_out_of_order(operation):
    for size in (1, 2, 3, 5, 8):
        lengths = [(3 * r) % 4 for r in range(size)]
        ends, at = [], 1
        for r in reversed(range(size)):  # the last rank's block first, a gap before each
            ends.append((at, at + lengths[r]))
            at += lengths[r] + 2
        for entry in ALGORITHMS[operation].values():
            for root in range(size) if OPERATIONS[operation].rooted else [0]:
                prove(operation, entry.rounds, size, ends[::-1], root, ordered=entry.ordered)


@everyone
def test_closed_forms_are_those_of_the_clock(operation, entry):
    """One count at a time: only messages cost, only moved bytes, only reduced bytes."""
    for size in (1, 2, 3, 4, 5, 8, 12, 16):
        power = size & (size - 1) == 0
        count = None if operation == "barrier" else 48 * size
        cost = entry.cost(size, count or 1)
        for network, expected in zip(UNIT_NETWORKS, cost, strict=True):
            seconds = price(entry, size, count, 1, network).seconds
            assert seconds == pytest.approx(expected) if power else seconds <= expected * (1 + 1e-9), (size, network)


def mutants(rounds):
    """All schedules that differ from one rank's rounds by one small mistake, with its name."""
    for k, steps in enumerate(rounds):
        yield "a round is missing", rounds[:k] + rounds[k + 1 :]
        for i, step in enumerate(steps):

            def put(*changed, k=k, i=i, steps=steps):
                return rounds[:k] + [(*steps[:i], *changed, *steps[i + 1 :])] + rounds[k + 1 :]

            if step.hi <= step.lo:
                continue
            yield f"{step} is missing", put()
            yield f"{step} begins one too late", put(step._replace(lo=step.lo + 1))
            yield f"{step} ends one too early", put(step._replace(hi=step.hi - 1))
            yield f"{step} is one further", put(step._replace(lo=step.lo + 1, hi=step.hi + 1))
            if isinstance(step, Copy | Reduce):
                yield f"{step} reads one further", put(step._replace(at=step.at + 1))
            else:
                yield f"{step} has another peer", put(step._replace(peer=step.peer ^ 1))
            if isinstance(step, RecvReduce):
                yield f"{step} overwrites", put(Recv(*step[:4]))
            if isinstance(step, Recv):
                yield f"{step} adds", put(RecvReduce(*step))
            if isinstance(step, RecvReduce | Reduce):
                yield f"{step} adds on the other side", put(step._replace(left=not step.left))
            if isinstance(step, Send | Recv | RecvReduce):
                yield f"{step} is there twice", put(step, step)
            if isinstance(step, Reduce):
                yield f"{step} is there twice", put(step, step)
                yield f"{step} overwrites", put(Copy(*step[:5]))


def equivalent(operation, entry, mutation):
    """Whether a mutation changes nothing that matters."""
    if operation == "barrier":  # only that a message comes is used, not what is in it
        return not mutation.endswith(("missing", "peer", "twice"))
    return not entry.ordered and mutation.endswith("other side")


@everyone
def test_every_mutation_is_caught(operation, entry):
    size, count = 5, 11
    options = {"root": 2} if operation != "barrier" and OPERATIONS[operation].rooted else {}
    arguments = () if operation == "barrier" else (count,)
    tried, survived = 0, []
    for victim in range(size):
        right = list(entry.rounds(victim, size, *arguments, **options))
        for name, wrong in mutants(right):
            if equivalent(operation, entry, name):
                continue

            def mutated(rank, *args, victim=victim, wrong=wrong, **kwargs):
                return iter(wrong) if rank == victim else entry.rounds(rank, *args, **kwargs)

            tried += 1
            try:
                prove(operation, mutated, size, count, options.get("root", 0), ordered=entry.ordered)
                survived.append((victim, name))
            except ScheduleError:
                pass
    assert tried >= 20 and not survived
