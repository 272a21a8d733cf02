"""collectives.check tells a learner what is wrong, and how good what is right is."""

import itertools
import re

import numpy as np
import pytest

import collectives
from collectives import (
    ALGORITHMS,
    Barrier,
    Compute,
    Copy,
    Deadlock,
    Recv,
    RecvReduce,
    Send,
    Slice,
    check,
    check_algorithm,
    chunk,
)
from collectives.algorithms.registry import Need
from collectives.executor import program
from collectives.executor.program import live_rounds


def naive_ring(rank, size, count):
    """x goes around whole and is added up: right, but p-1 times n elements."""
    for k in range(size - 1):
        where = "x" if k == 0 else f"got {k - 1}"
        yield Send((rank + 1) % size, where, 0, count), Recv((rank - 1) % size, f"got {k}", 0, count)
    for k in range(size - 1):
        yield (collectives.Reduce("x", 0, count, f"got {k}", 0),)


def short_lap(rank, size, count):
    """A ring that stops one round too early."""
    for k in range(size - 2):
        give, take = chunk(count, size, (rank - k) % size), chunk(count, size, (rank - k - 1) % size)
        yield Send((rank + 1) % size, "x", *give), RecvReduce((rank - 1) % size, "x", *take)


def send_first(rank, size, count):
    """Exchanges with both neighbours of a pair in two rounds: hangs as soon as sends are synchronous."""
    if size == 2:
        yield (Send(1 - rank, "x", 0, count),)
        yield (RecvReduce(1 - rank, "x", 0, count),)


def test_right_with_rounds_and_elements_against_the_bounds():
    report = check(naive_ring, ranks=range(1, 6))
    assert report and report.right and len(report.cases) == 22
    text = str(report)
    assert text.startswith("right: allreduce of 1 ... 5 ranks in 22 cases")
    assert text.splitlines()[-1].split() == ["5", "11", "8", "(3)", "44", "(18)"]


def test_the_first_wrong_element_and_who_is_missing():
    report = check(short_lap)
    assert not report
    assert str(report) == "wrong: 2 ranks, 1 elements: rank 0, x[0]: the operands of ranks [1] are missing"
    assert "the operands of ranks [1, 2] are missing" in str(check(short_lap, ranks=[3]))


def test_who_waits_for_whom():
    report = check(send_first, ranks=[2])
    assert isinstance(report.error, Deadlock) and report.error.cycle == [0, 1, 0]
    assert "2 ranks, 1 elements (with eager sends it passes): 2 of 2 ranks wait for ever" in str(report)


def test_broken_rules_and_doubled_operands():
    def twice(rank, size, count):
        if size == 2:
            for _ in range(2):
                yield Send(1 - rank, "x", 0, count), RecvReduce(1 - rank, "x", 0, count)

    assert "those of ranks [0, 1] are in it more than once" in str(check(twice, ranks=[2]))

    def itself(rank, size, count):
        yield (Send(rank, "x", 0, count),)

    assert "round 0: Send(peer=0" in str(check(itself, ranks=[3]))


def test_order_where_it_is_asked_for():
    ring = ALGORITHMS["allreduce"]["ring"]
    assert check(ring, ranks=[1, 2, 3, 4])
    assert "out of rank order" in str(check(ring, ranks=[3], ordered=True))


def test_every_operation_and_roots():
    for operation, entries in ALGORITHMS.items():
        for entry in entries.values():
            assert check(entry, ranks=[1, 3, 4], operation=operation, ordered=entry.ordered), (operation, entry.name)

    def from_zero(rank, size, count):
        if rank:
            yield (Recv(0, "x", 0, count),)
        else:
            yield tuple(Send(peer, "x", 0, count) for peer in range(1, size))

    assert check(from_zero, operation="broadcast", ranks=range(1, 5))
    with pytest.raises(ValueError, match="no operation 'bcast'"):
        check(from_zero, operation="bcast")


def test_what_does_not_end_is_told_so_soon():
    def lap(rank, size, count):
        while size > 3:
            yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "got", 0, count)
        yield from ALGORITHMS["allreduce"]["ring"].rounds(rank, size, count)

    def nothing(rank, size, count):
        while rank == size - 1:
            yield ()

    def one_by_one(rank, size, count):
        """Every pair's element by element, one message at a time; the others have a round of nothing meanwhile."""
        for source, target in ((s, t) for s in range(size) for t in range(size) if s != t):
            for i in range(count):
                if rank == source:
                    yield (Send(target, "x", i, i + 1),)
                else:
                    yield (Recv(source, f"from {source}", i, i + 1),) if rank == target else ()
        for source in range(size):
            for i in range(count if source != rank else 0):
                yield (collectives.Reduce("x", i, i + 1, f"from {source}", i),)

    report = check(lap, ranks=[3, 17], counts=[35])
    assert str(report) == (
        "wrong: 17 ranks, 35 elements: rank 15 is in its round 2,548: the schedule does not end; 2,548 would be many"
    )
    report = check(nothing, ranks=[17], counts=[35])
    assert "rank 16 is in its round 43,316, of which 0 had steps with elements: it does not end" in str(report)
    assert check(one_by_one, ranks=[1, 2, 6])


def test_a_barrier_must_hear_of_everyone():
    def neighbours_only(rank, size):
        if size > 1:
            yield Send((rank + 1) % size, "x", 0, 1), Recv((rank - 1) % size, "tmp", 0, 1)

    assert "rank 0 leaves the barrier before it has heard of ranks [1]" in str(
        check(neighbours_only, ranks=[3], operation="barrier")
    )


def test_errors_of_the_algorithm_itself_come_through_with_the_case():
    def broken(rank, size, count):
        yield (Send([][rank], "x", 0, count),)

    with pytest.raises(IndexError) as told:
        check(broken, ranks=[2])
    assert told.value.__notes__ == ["raised by the algorithm for 2 ranks, 1 elements"]


def test_what_is_no_algorithm_and_no_number_of_ranks_is_refused():
    with pytest.raises(TypeError, match="generator"):
        collectives.check(lambda rank, size, count: None)
    for call in (collectives.check, collectives.draw, collectives.price):
        with pytest.raises(TypeError, match=r"an entry of ALGORITHMS such as .*\['ring'\]; given 'ring'"):
            call("ring", 4, *(() if call is collectives.check else (8,)))
    for ranks in ([], [0], 0):
        with pytest.raises(ValueError, match="ranks: expected numbers of ranks, each at least 1, given"):
            collectives.check(ALGORITHMS["allreduce"]["ring"], ranks)
    assert {case.size for case in collectives.check(ALGORITHMS["allreduce"]["ring"], 3).cases} == {3}
    for counts in ([], [3, -1]):
        with pytest.raises(ValueError, match="counts: expected numbers of elements, each at least 0, given"):
            collectives.check(ALGORITHMS["allreduce"]["ring"], 3, counts=counts)


def test_counts_that_can_be_read_once_hold_for_every_number_of_ranks():
    report = check(ALGORITHMS["allreduce"]["ring"], ranks=[1, 2, 3], counts=iter([5, 7]))
    assert [(case.size, case.count) for case in report.cases] == [(p, n) for p in (2, 3, 1) for n in (5, 7)]


def test_of_what_runs_in_memory_meetings_and_copies_are_told():
    text = str(check(ALGORITHMS["allreduce"]["shared_small"], ranks=[2, 4], counts=[8]))
    assert text.splitlines()[1:] == [
        "  ranks  elements  rounds  barriers  copied or added by a rank",
        "      2         8       6         1                         32",
        "      4         8       6         1                         48",
    ]


def from_one_to_the_next(rank, size, count):
    """A broadcast along a chain: no rank has more than two rounds."""
    if rank:
        yield (Recv(rank - 1, "x", 0, count),)
    if rank < size - 1:
        yield (Send(rank + 1, "x", 0, count),)


def test_rounds_are_counted_one_after_the_other():
    text = str(check(from_one_to_the_next, ranks=[2, 8], counts=[4], operation="broadcast"))
    assert text.splitlines()[2:] == [
        f"  {size:5}         4  {rounds:>17}             4 (4)" for size, rounds in ((2, "1 (1)"), (8, "7 (3)"))
    ]


def one_too_many(rank, size, count):
    """Receives an element more than is sent."""
    if size > 1:
        yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "got", 0, count + 1)


def test_the_first_words_are_about_the_mistake_and_not_about_no_elements():
    """Without elements nothing is sent, and ranks would wait for ever; so that case comes last."""
    said = "wrong: 2 ranks, 1 elements: rank 1, round 0: Recv(peer=0, buf='got', lo=0, hi=2) expects 2 elements"
    assert str(check(one_too_many, ranks=[1, 2, 3])).startswith(said)
    only_without = lambda r, p, n: one_too_many(r, p, 0) if n == 0 else naive_ring(r, p, n)
    assert str(check(only_without, ranks=[2])).startswith("wrong: 2 ranks, 0 elements: 2 of 2 ranks wait for ever")


def test_who_reads_what_another_has_not_written_is_told_of_the_meeting():
    def early(rank, size, count):
        yield (Copy("mine", 0, count, "x", 0),)
        yield tuple(collectives.Reduce("x", 0, count, "mine", 0, of=q) for q in range(size) if q != rank)

    said = "reads elements of mine of rank 1 that nothing wrote yet: a Barrier behind what writes them"
    assert said in str(check(early, ranks=[3]))


@pytest.mark.parametrize(
    "steps, said",
    [
        (None, "not None"),
        (Send(1, "x", 0, 4), r"a round is a tuple of steps, \(step,\) where there is one, not Send"),
        ((Send,), "is not a step"),
        ((Send(1, "x", 0, 2.0),), "hi is a whole number, not 2.0"),
        ((Send(None, "x", 0, 4),), "peer is a whole number, not None"),
        ((Recv(1, "x", (0, 4), None),), r"lo is a whole number, not \(0, 4\)"),
        ((Copy("x", 0, 4, "x", None),), "at is a whole number, not None"),
        ((Copy(0, 0, 4, "x", 0),), "buf is the name of a buffer, such as 'x', not 0"),
        ((Copy("y", 0, 4, 1, 0),), "src is the name of a buffer, such as 'x', not 1"),
        ((Copy("y", 0, 4, "x", 0, of="x"),), "of is a whole number, not 'x'"),
        ((Compute("step", Slice("x", 0, 4)),), "reads and writes are tuples of Slice, and 'x' is not a Slice"),
        ((Compute("step", 0.5),), "reads and writes are tuples of Slice, and 0.5 is not a Slice"),
        ((Compute("step", seconds="1"),), "seconds is a number >= 0, not '1'"),
        ((Compute("step", seconds=-1.0),), "seconds is a number >= 0, not -1.0"),
        ((Compute("step", (Slice("x", 0, 0.5),)),), "hi is a whole number, not 0.5"),
        ((Barrier(1),), "ranks is a tuple of them, or None for all"),
    ],
)
def test_every_reader_says_what_is_no_step(steps, said):
    """On rank 0, by check, price and program; and numbers of NumPy are numbers."""

    def mine(rank, size, count):
        yield ()
        yield (Copy("tmp", np.int64(0), np.int32(count), "x", 0),)
        yield steps

    said = f"rank 0, round 2: .*{said}"
    assert re.search(said, str(check(mine, ranks=2, counts=[4])))
    with pytest.raises(ValueError, match=said):
        collectives.price(mine, 2, 4)
    with pytest.raises(TypeError, match=said):
        live_rounds(mine(0, 2, 4), 0)


def test_a_function_without_yield_is_told_so_by_every_reader():
    forgot = lambda rank, size, count: None
    for reader in (check, lambda each: collectives.price(each, 2, 4), lambda each: live_rounds(each(0, 2, 4), 0)):
        with pytest.raises(TypeError, match="generator"):
            reader(forgot)


def test_what_does_not_end_is_not_compiled(monkeypatch):
    monkeypatch.setattr(program, "MOST_ROUNDS", 1000)
    assert len(live_rounds(itertools.repeat((), 1000), 0)) == 1000
    with pytest.raises(ValueError, match="rank 3 is in its round 1,000: the schedule does not end"):
        live_rounds(itertools.repeat(()), 3)


def test_a_report_draws():
    figure = check(naive_ring, ranks=range(1, 4)).draw()
    assert figure.axes
    said = [text.get_text() for text in check(short_lap, ranks=[3], counts=[3]).draw(network="gigabit").axes[0].texts]
    assert "short lap: wrong result" in said and "3 ranks, 3 elements" in said
    assert any("the operands of ranks [1, 2]" in text.replace("\n   ", "") for text in said)


def test_a_broadcast_without_a_root_takes_options_and_a_root_may_be_given():
    def flat(rank, size, count, segment=1):
        for lo in range(0, count, segment):
            hi = min(lo + segment, count)
            yield tuple(Send(q, "x", lo, hi) for q in range(1, size)) if rank == 0 else (Recv(0, "x", lo, hi),)

    assert check(flat, 3, "broadcast", segment=2)
    assert check(flat, 3, "broadcast", root=0)
    with pytest.raises(ValueError, match="no parameter root"):
        check(flat, 3, "broadcast", root=1)
    report = check(ALGORITHMS["broadcast"]["binomial"], 5, "broadcast", root=3)
    assert report and {case.root for case in report.cases} == {3}


def test_a_barrier_is_checked_once_for_each_number_of_ranks():
    assert len(check(ALGORITHMS["barrier"]["dissemination"], [2, 3], "barrier").cases) == 2


def test_algorithms_of_a_user_are_checked_as_those_of_the_registry():
    ring = ALGORITHMS["allreduce"]["ring"]
    assert check_algorithm(ring, ranks=[1, 2, 5]) and check_algorithm(ring.rounds, ranks=[3], needs=ring.needs)
    assert "out of rank order" in str(check_algorithm(ring.rounds, ranks=[3]))

    def packed(rank, size, count):  # as if blocks always lay one after another
        given = ALGORITHMS["allgather"]["ring"].rounds
        if not isinstance(count, int):
            ends = [0]
            for lo, hi in count:
                ends.append(ends[-1] + hi - lo)
            count = list(itertools.pairwise(ends))
        yield from given(rank, size, count)

    report = check_algorithm(packed, "allgather", [4])
    assert not report and "4 ranks, [(" in str(report), "blocks that lie apart"
    assert check_algorithm(packed, "allgather", [4], needs={Need.CONSECUTIVE})

    def short(rank, size, count, segment=1000):  # wrong where there are several segments
        yield from ring.rounds(rank, size, min(count, segment))

    assert "'segment': 1" in str(check_algorithm(short, "allreduce", [3], needs=ring.needs))
    for entries in ALGORITHMS.values():
        for entry in entries.values():
            report = check_algorithm(entry, ranks=[1, 3, 4])
            assert report, entry.name
            assert "1 ... 4 ranks" in str(report)


def test_a_sum_that_is_said_to_be_made_in_one_round_is_held_to_it():
    chain, direct = ALGORITHMS["scan"]["chain"], ALGORITHMS["reduce_scatter"]["direct"]
    assert direct.rounds_once and check_algorithm(direct, ranks=[2, 5])
    report = check_algorithm(chain._replace(rounds_once=True), "scan", ranks=[2, 3])
    assert "RecvReduce(peer=1, buf='x', lo=0, hi=7, operand_left=True) adds up a sum of an earlier round" in str(report)

    def in_two_rounds(rank, size, count):  # each operand is a rank's own, but they come one after the other
        if rank:
            yield (Send(0, "x", 0, count),)
        else:
            yield from ((RecvReduce(peer, "x", 0, count),) for peer in reversed(range(1, size)))

    flat = ALGORITHMS["reduce"]["flat"]._replace(rounds=in_two_rounds, rounds_once=True, needs={Need.COMMUTATIVE})
    assert check_algorithm(flat, "reduce", ranks=[2])
    assert "adds up a sum of an earlier round" in str(check_algorithm(flat, "reduce", ranks=[3]))
