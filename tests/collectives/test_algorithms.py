"""Every algorithm of the registry computes what its operation defines, and every mutation of it is caught."""

import inspect
import itertools

import pytest

from collectives import ALGORITHMS
from collectives.algorithms import shared
from collectives.algorithms.registry import CONSECUTIVE, SHARED_MEMORY
from collectives.algorithms.trees import two_trees
from collectives.checking.definitions import OPERATIONS, prove
from collectives.checking.simulator import Race, ScheduleError, simulate
from collectives.steps import Barrier, Copy, Recv, RecvReduce, Reduce, Send, is_live

ENTRIES = [(op, entry) for op, entries in ALGORITHMS.items() for entry in entries.values()]
exhaustive = pytest.mark.exhaustive
everyone = pytest.mark.parametrize("operation, entry", ENTRIES, ids=[f"{op}-{e.name}" for op, e in ENTRIES])


def cases(operation, size):
    """(count, root): many counts and every root of few ranks, one odd case of many."""
    rooted = OPERATIONS[operation].rooted
    counts = sorted({0, 1, size - 1, size, 2 * size + 1}) if size <= 9 else [2 * size + 1]
    if operation == "alltoall":
        counts = [size * c for c in ((0, 1, 3) if size <= 9 else (1,))]
    roots = range(size) if size <= 6 else (size // 3,)
    return itertools.product(counts, roots if rooted else [0])


@everyone
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([*range(1, 9), 13], id="some"),
        pytest.param([size for size in range(9, 34) if size != 13], id="others", marks=exhaustive),
    ],
)
def test_right_for_any_size_count_and_root(operation, entry, sizes):
    """With synchronous sends, which implies eager ones (simulator.py); eager ones are tried for small sizes as well."""
    for size in sizes:
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
@pytest.mark.parametrize(
    "sizes", [pytest.param(range(1, 10), id="some"), pytest.param(range(10, 18), id="others", marks=exhaustive)]
)
def test_right_with_many_segments(operation, name, segment, sizes):
    entry = ALGORITHMS[operation][name]
    for size in sizes:
        for count in (0, 1, 5, 2 * size + 5):
            for root in range(size) if OPERATIONS[operation].rooted and size < 5 else [0]:
                prove(operation, entry.rounds, size, count, root, ordered=entry.ordered, segment=segment)


@pytest.mark.parametrize(
    "nodes", ["a", "ab", "aab", "aabb", "abab", "aaab", "aabbb", "abbcccc", "aaabbbccc", "abcabcab"]
)
def test_two_level_on_nodes_of_any_size(nodes):
    for name in ("two_level", "shared_two_level", "shared_two_level_arrays"):
        entry = ALGORITHMS["allreduce"][name]
        for count, segment in ((0, 1), (1, 1), (2, 1), (7, 3), (40, 3), (40, 1000)):
            options = {"nodes": nodes, "segment": segment}
            prove("allreduce", entry.rounds, len(nodes), count, ordered=False, **options)
            if name == "shared_two_level":  # in many turns
                prove("allreduce", entry.rounds, len(nodes), count, ordered=False, **options, slot=len(nodes), line=1)


def test_two_level_sends_each_part_of_x_once_around_the_nodes():
    """Between M nodes of g ranks a rank sends 2 (M-1)/M n/g, in messages no longer than a segment."""
    entry, nodes, count = ALGORITHMS["allreduce"]["two_level"], "aaaabbbbcccc", 120
    for rank in range(12):
        between = [
            s.hi - s.lo
            for steps in entry.rounds(rank, 12, count, nodes=nodes, segment=4)
            for s in steps
            if isinstance(s, Send) and nodes[s.peer] != nodes[rank]
        ]
        assert sum(between) == 2 * (3 - 1) / 3 * count / 4 and max(between) <= 4


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
            blocks = consecutive if CONSECUTIVE in entry.needs else apart
            for root in range(size) if OPERATIONS[operation].rooted else [0]:
                prove(operation, entry.rounds, size, blocks, root, ordered=entry.ordered)


OTHER = {"even": "odd", "odd": "even"}
WAYS = [(op, entry) for op, entry in ENTRIES if entry.needs == {SHARED_MEMORY}]


def calls_in_a_row(calls, size, count, changes=()):
    """rank -> rounds of these (operation, entry), one after another as Plan makes them: slots alternate.

    `changes`: (place of a call, what is made of its rounds).
    """

    def program(rank):
        epoch = 0
        for place, (operation, entry) in enumerate(calls):
            options = small_pieces(entry, size)
            if "epoch" in inspect.signature(entry.rounds).parameters:
                options["epoch"] = epoch
            arguments = () if operation == "barrier" else (count,)
            rounds = list(entry.rounds(rank, size, *arguments, **options))
            used = [s.buf for steps in rounds for s in steps if isinstance(s, Copy | Reduce) and s.buf in shared.SLOTS]
            used += [s.src for steps in rounds for s in steps if isinstance(s, Copy | Reduce) and s.src in shared.SLOTS]
            epoch += shared.SLOTS.index(used[-1]) + 1 + epoch % 2 if used else 0
            yield from dict(changes).get(place, list)(rounds)
            yield (Copy("x", 0, count, "mine", 0),)  # in between the array is the caller's

    return program


def run_in_a_row(calls, size, count, changes=()):
    simulate(
        calls_in_a_row(calls, size, count, changes), [{"x": [0] * count, "mine": [0] * count} for _ in range(size)]
    )


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=exhaustive)])
def test_calls_in_shared_memory_follow_each_other_without_a_race(size):
    """Slots alternate from call to call: every way behind every other, and a third call behind both."""
    for first, second in itertools.product(WAYS, WAYS):
        run_in_a_row([first, second, first], size, 2 * size + 1)


@pytest.mark.parametrize(
    "operation, entry", [way for way in WAYS if way[0] != "barrier"], ids=lambda way: getattr(way, "name", way)
)
def test_no_meeting_in_shared_memory_can_be_left_out(operation, entry):
    """Without any one of the barriers of a call, on all ranks, something races: in it, or with the calls beside it."""
    size, count = 3, 7
    rounds = entry.rounds(0, size, count, **small_pieces(entry, size))
    barriers = sum(isinstance(s, Barrier) for steps in rounds for s in steps)
    writers = [
        (op, e) for op, e in WAYS if (op, e.name) in (("allreduce", "shared_small"), ("allreduce", "shared_arrays"))
    ]
    for k in range(barriers):

        def without(rounds, k=k):
            at = [i for i, steps in enumerate(rounds) if any(isinstance(s, Barrier) for s in steps)][k]
            return rounds[:at] + rounds[at + 1 :]

        caught = 0
        for beside in writers:
            try:
                run_in_a_row([beside, (operation, entry), beside], size, count, [(1, without)])
            except ScheduleError:
                caught += 1
        assert caught


@pytest.mark.parametrize(
    "operation, entry",
    [way for way in WAYS if "epoch" in inspect.signature(way[1].rounds).parameters],
    ids=lambda way: getattr(way, "name", way),
)
def test_no_slot_can_be_used_a_turn_too_early(operation, entry):
    """Who takes the slot of the epoch before, of the same call or of another, races with those that still read it."""
    before = ("allreduce", ALGORITHMS["allreduce"]["shared_small"])
    run_in_a_row([before, (operation, entry)], 3, 7)
    caught = 0
    for slots in (OTHER, {"even": "odd"}, {"odd": "even"}):

        def early(rounds, slots=slots):
            moved = lambda s: s._replace(buf=slots.get(s.buf, s.buf), src=slots.get(s.src, s.src))
            return [tuple(moved(s) if isinstance(s, Copy | Reduce) else s for s in steps) for steps in rounds]

        try:
            run_in_a_row([before, (operation, entry)], 3, 7, [(1, early)])
        except Race:
            caught += 1
    assert caught


def mutants(rank, rounds):
    """All schedules that differ from this rank's rounds by one small mistake, with its name."""
    for k, steps in enumerate(rounds):
        if not any(map(is_live, steps)):
            continue
        yield "a round is missing", rounds[:k] + rounds[k + 1 :]
        for i, step in enumerate(steps):

            def put(*changed, k=k, i=i, steps=steps):
                return rounds[:k] + [(*steps[:i], *changed, *steps[i + 1 :])] + rounds[k + 1 :]

            if not is_live(step):
                continue
            yield f"{step} is missing", put()
            if isinstance(step, Barrier):
                continue
            yield f"{step} begins one too late", put(step._replace(lo=step.lo + 1))
            yield f"{step} ends one too early", put(step._replace(hi=step.hi - 1))
            if not isinstance(step, Copy | Reduce) or step.buf == "x":  # of scratch nobody looks at what is behind
                yield f"{step} ends one too late", put(step._replace(hi=step.hi + 1))
            yield f"{step} is one further", put(step._replace(lo=step.lo + 1, hi=step.hi + 1))
            if isinstance(step, Copy | Reduce):
                yield f"{step} reads one further", put(step._replace(at=step.at + 1))
                for name, slot in [("buf", step.buf), ("src", step.src)]:
                    if slot in shared.SLOTS:
                        yield f"{step}, with the other {name}", put(step._replace(**{name: OTHER[slot]}))
                if step.of not in (None, rank):
                    yield f"{step} reads its own", put(step._replace(of=None))
                if step.to not in (None, rank):
                    yield f"{step} writes its own", put(step._replace(to=None))
            else:
                yield f"{step} has another peer", put(step._replace(peer=step.peer ^ 1))
            if isinstance(step, RecvReduce):
                yield f"{step} overwrites", put(Recv(*step[:4]))
            if isinstance(step, Recv):
                yield f"{step} adds", put(RecvReduce(*step))
            if isinstance(step, RecvReduce | Reduce):
                yield f"{step} adds on the other side", put(step._replace(operand_left=not step.operand_left))
            if isinstance(step, Send | Recv | RecvReduce):
                yield f"{step} is there twice", put(step, step)
            if isinstance(step, Reduce):
                yield f"{step} is there twice", put(step, step)
                yield f"{step} overwrites", put(Copy(*step[:5], of=step.of, to=step.to))


def small_pieces(entry, size):
    """Options with which 11 elements on 5 ranks are several segments."""
    small = {"segment": 2, "slot": size, "line": 1}
    return {name: n for name, n in small.items() if name in inspect.signature(entry.rounds).parameters}


def equivalent(operation, entry, mutation):
    """Whether a mutation changes nothing that matters."""
    if operation == "barrier":  # only that a message comes is used, not what is in it
        return not mutation.endswith(("missing", "peer", "twice"))
    if operation == "reduce_scatter" and mutation.startswith("Copy(buf='x'") and mutation.endswith("ends one too late"):
        return True  # beside its block the rest of x is used up
    return not entry.ordered and mutation.endswith("other side")


@everyone
@pytest.mark.parametrize(
    "victims", [pytest.param([2], id="some"), pytest.param([0, 1, 3, 4], id="others", marks=exhaustive)]
)
def test_every_mutation_is_caught(operation, entry, victims):
    size, count = 5, 15 if operation == "alltoall" else 11
    options = {"root": 2} if OPERATIONS[operation].rooted else {}
    arguments = () if operation == "barrier" else (count,)
    options |= small_pieces(entry, size)
    tried, survived = 0, []
    right = [list(entry.rounds(rank, size, *arguments, **options)) for rank in range(size)]
    for victim in victims:
        for name, wrong in mutants(victim, right[victim]):
            if equivalent(operation, entry, name):
                continue

            def mutated(rank, *_, victim=victim, wrong=wrong, **__):
                return iter(wrong if rank == victim else right[rank])

            tried += 1
            try:
                prove(operation, mutated, size, count, **({"root": 0} | options), ordered=entry.ordered)
                survived.append((victim, name))
            except ScheduleError:
                pass
    assert tried >= 2 * len(victims) and not survived
