"""Every algorithm of the registry computes what its operation defines, and every mutation of it is caught."""

import inspect
import itertools

import pytest

from collectives import ALGORITHMS
from collectives.algorithms.registry import CONSECUTIVE
from collectives.algorithms.trees import two_trees
from collectives.checking import OPERATIONS, prove
from collectives.simulator import ScheduleError
from collectives.steps import Copy, Recv, RecvReduce, Reduce, Send

ENTRIES = [(op, entry) for op, entries in ALGORITHMS.items() for entry in entries.values()]
everyone = pytest.mark.parametrize("operation, entry", ENTRIES, ids=[f"{op}-{e.name}" for op, e in ENTRIES])


def cases(operation, size):
    """(count, root): many counts and every root of few ranks, one odd case of many."""
    rooted = operation != "barrier" and OPERATIONS[operation].rooted
    counts = sorted({0, 1, size - 1, size, 2 * size + 1}) if size <= 9 else [2 * size + 1]
    if operation == "alltoall":
        counts = [size * c for c in ((0, 1, 3) if size <= 9 else (1,))]
    roots = range(size) if size <= 6 else (size // 3,)
    return itertools.product(counts, roots if rooted else [0])


@everyone
def test_right_for_any_size_count_and_root(operation, entry):
    """With synchronous sends, which implies eager ones (simulator.py); eager ones are tried for small sizes as well."""
    for size in range(1, 34):
        for count, root in cases(operation, size):
            prove(operation, entry.rounds, size, count, root, ordered=entry.ordered)
            if size <= 6:
                prove(operation, entry.rounds, size, count, root, ordered=entry.ordered, synchronous=False)


@pytest.mark.parametrize(
    "operation, name, segment",
    [
        (operation, name, segment)
        for operation, name in (("broadcast", "chain"), ("allreduce", "segmented_ring"), ("allreduce", "double_tree"))
        for segment in (1, 3)
    ],
)
def test_right_with_many_segments(operation, name, segment):
    entry = ALGORITHMS[operation][name]
    for size in range(1, 18):
        for count in (0, 1, 5, 2 * size + 5):
            for root in range(size) if OPERATIONS[operation].rooted and size < 5 else [0]:
                prove(operation, entry.rounds, size, count, root, ordered=entry.ordered, segment=segment)


@pytest.mark.parametrize(
    "nodes", ["a", "ab", "aab", "aabb", "abab", "aaab", "aabbb", "abbcccc", "aaabbbccc", "abcabcab"]
)
def test_two_level_on_nodes_of_any_size(nodes):
    entry = ALGORITHMS["allreduce"]["two_level"]
    for count in (0, 1, 2, 7, 40):
        prove("allreduce", entry.rounds, len(nodes), count, ordered=False, nodes=nodes)


def test_two_level_sends_each_part_of_x_once_around_the_nodes():
    """Between M nodes of g ranks a rank sends 2 (M-1)/M n/g."""
    entry, nodes, count = ALGORITHMS["allreduce"]["two_level"], "aaaabbbbcccc", 120
    for rank in range(12):
        between = sum(
            s.hi - s.lo
            for steps in entry.rounds(rank, 12, count, nodes=nodes)
            for s in steps
            if isinstance(s, Send) and nodes[s.peer] != nodes[rank]
        )
        assert between == 2 * (3 - 1) / 3 * count / 4


def test_the_two_trees_share_no_inner_rank_but_one():
    for size in range(2, 200):
        first, second = two_trees(size)
        both = [r for r in range(size) if first.children[r] and second.children[r]]
        assert len(both) <= size % 2
        for tree in (first, second):
            assert max(map(len, tree.children)) <= 2 and tree.parent.count(None) == 1
            assert tree.height[tree.root] <= (size - 1).bit_length()


@pytest.mark.parametrize("operation", [op for op, define in OPERATIONS.items() if define.blocked])
def test_blocks_may_be_uneven_empty_apart_and_out_of_order(operation):
    for size in (1, 2, 3, 5, 8):
        lengths = [(3 * r) % 4 for r in range(size)]
        apart, at = [(0, 0)] * size, 1
        for r in reversed(range(size)):  # the last rank's block first, a gap before each
            apart[r] = at, at + lengths[r]
            at += lengths[r] + 2
        ends = [0, *itertools.accumulate(lengths)]
        consecutive = list(itertools.pairwise(ends))
        for entry in ALGORITHMS[operation].values():
            blocks = consecutive if entry.requires == CONSECUTIVE else apart
            for root in range(size) if OPERATIONS[operation].rooted else [0]:
                prove(operation, entry.rounds, size, blocks, root, ordered=entry.ordered)


def mutants(rounds):
    """All schedules that differ from one rank's rounds by one small mistake, with its name."""
    for k, steps in enumerate(rounds):
        if not any(s.hi > s.lo for s in steps):
            continue
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
    size, count = 5, 15 if operation == "alltoall" else 11
    options = {"root": 2} if operation != "barrier" and OPERATIONS[operation].rooted else {}
    arguments = () if operation == "barrier" else (count,)
    if "segment" in inspect.signature(entry.rounds).parameters:
        options["segment"] = 2
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
                prove(operation, mutated, size, count, **({"root": 0} | options), ordered=entry.ordered)
                survived.append((victim, name))
            except ScheduleError:
                pass
    assert tried >= 20 and not survived
