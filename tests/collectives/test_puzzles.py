"""Puzzles: every one can be solved within its limits, and answers that are wrong, slow or greedy are told so."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from collectives import ALGORITHMS, Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, Slice, chunk, puzzles
from collectives.algorithms import allreduce
from collectives.puzzles.puzzle import UNITS
from collectives.puzzles.solutions import ANSWERS


@pytest.mark.parametrize("name", ANSWERS)
def test_each_has_an_answer_that_holds_the_record(name):
    puzzle = getattr(puzzles, name)
    grade = puzzle.grade(ANSWERS[name])
    assert grade, grade
    assert not grade.records and grade.measured.keys() == puzzle.limits.keys() == puzzle.record.keys()
    tied = {limit for limit, value in grade.measured.items() if value == puzzle.record[limit]}
    assert tied or name == "gpipe", "the record is what has been done"
    assert all(puzzle.record[limit] <= puzzle.limits[limit] for limit in puzzle.limits) and set(puzzle.limits) <= {
        *UNITS
    }
    assert puzzle.task.count("\n\n") >= 0 and str(puzzle).startswith(f"{puzzle.name}: {puzzle.size} ranks")
    assert "solved" in str(grade)


def test_all_are_listed():
    assert {id(getattr(puzzles, name)) for name in ANSWERS} == {id(puzzle) for puzzle in puzzles.ALL}
    assert len(puzzles.ALL) >= 12


def nothing(rank, size, count):
    """An answer that does nothing at all."""
    yield ()


@pytest.mark.parametrize("name", ["reduce_scatter", "ring"])
def test_one_way_round_the_ring_is_within_the_limits(name):
    grade = getattr(puzzles, name).grade(ALGORITHMS["allreduce" if name == "ring" else name]["ring"].rounds)
    assert grade and grade.measured["rounds"] == puzzles.ring.limits["rounds"] / (1 if name == "ring" else 2)


@pytest.mark.parametrize(("name", "seconds"), [("torus", 638), ("thin_link", 562)])
def test_a_ring_through_all_ranks_is_over_the_limit_of_links(name, seconds):
    grade = getattr(puzzles, name).grade(ALGORITHMS["allreduce"]["ring"].rounds)
    assert grade.right and grade.over == ["seconds"] and grade.measured["seconds"] == pytest.approx(seconds)


def attend(rank, size, owner, here, count):
    return Compute(f"A{owner}", (Slice(here, 0, count),), (Slice("y", owner, owner + 1),), 4.0)


def keys_when_attended(rank, size, count):
    """A ring that sends keys on when a rank has attended to them."""
    for step, here in enumerate(["x", "a", "b", "c", "d"][:size]):
        there = ["a", "b", "c", "d", ""][step]
        yield (attend(rank, size, (rank - step) % size, here, count),)
        if step < size - 1:
            yield Send((rank + 1) % size, here, 0, count), Recv((rank - 1) % size, there, 0, count)


def keys_from_whom_they_are(rank, size, count):
    """All keys straight from their rank."""
    yield (attend(rank, size, rank, "x", count),)
    for k in range(1, size):
        source = (rank - k) % size
        yield Send((rank + k) % size, "x", 0, count), Recv(source, "a", 0, count)
        yield (attend(rank, size, source, "a", count),)


def test_a_ring_that_does_not_overlap_is_over_the_limit_and_one_over_other_wires_is_refused():
    grade = puzzles.ring_attention.grade(keys_when_attended)
    assert grade.right and grade.over == ["seconds"] and grade.measured["seconds"] == 19
    assert "only to the next rank on the ring there is a wire" in str(
        puzzles.ring_attention.grade(keys_from_whom_they_are)
    )


@pytest.mark.parametrize("name", ANSWERS)
def test_doing_nothing_is_wrong_everywhere(name):
    grade = getattr(puzzles, name).grade(nothing)
    assert not grade and "wrong" in str(grade)


def one_by_one(rank, size, count):
    """A broadcast that takes seven rounds."""
    for q in range(1, size):
        yield (Send(q, "x", 0, count),) if rank == 0 else (Recv(0, "x", 0, count),) if rank == q else ()


def from_one_to_the_next(rank, size, count):
    """A broadcast, too: no rank has more than two rounds, and the last one has its vector after seven."""
    if rank:
        yield (Recv(rank - 1, "x", 0, count),)
    if rank < size - 1:
        yield (Send(rank + 1, "x", 0, count),)


def sum_from_one_to_the_next(rank, size, count):
    for steps in from_one_to_the_next(rank, size, count):
        yield tuple(RecvReduce(*s) if isinstance(s, Recv) else s for s in steps)


def far_away(rank, size, count):
    yield (Copy("t", 10**12, 10**12 + 1, "x", 0),)


def much_at_once(rank, size, count):
    yield (Copy("t", 0, 1, "x", 0),) * 1000


def of_a_buffer_with_a_strange_name(rank, size, count):
    yield (Send((rank + 1) % size, "$x_{", 0, count),)


def many_at_once(rank, size, count):
    yield tuple(Send(q, "x", 0, count) for q in range(1, size)) if rank == 0 else (Recv(0, "x", 0, count),)


def whole_vectors(rank, size, count):
    """A ring that sends all of a vector each time."""
    yield (Copy("went", 0, count, "x", 0),)
    for _ in range(size - 1):
        yield Send((rank + 1) % size, "went", 0, count), Recv((rank - 1) % size, "came", 0, count)
        yield Reduce("x", 0, count, "came", 0), Copy("went", 0, count, "came", 0)


def all_waiting(rank, size, count):
    """Sends before it receives, in rounds of their own."""
    yield (Send((rank + 1) % size, "x", 0, count),)
    yield (RecvReduce((rank - 1) % size, "x", 0, count),)


def without_a_meeting(rank, size, count):
    lo, hi = chunk(count, size, rank)
    yield (Copy("sum", 0, hi - lo, "x", lo, of=0),)
    yield tuple(Reduce("sum", 0, hi - lo, "x", lo, operand_left=False, of=q) for q in range(1, size))
    yield tuple(Copy("x", lo, hi, "sum", 0, to=q) for q in range(size))


def reads_what_is_written(rank, size, count):
    """Adds to x of all others what x is, at once."""
    yield tuple(Reduce("x", 0, count, "x", 0, to=q) for q in range(size) if q != rank)
    yield (Barrier(),)


def everyone_adds_all(rank, size, count):
    yield (Barrier(),)
    yield (Copy("sum", 0, count, "x", 0, of=0),)
    yield tuple(Reduce("sum", 0, count, "x", 0, operand_left=False, of=q) for q in range(1, size))
    yield (Barrier(),)
    yield (Copy("x", 0, count, "sum", 0),)


def forgets_a_backward(rank, size, count):
    order = [("F", i) for i in range(count)] + [("B", i) for i in range(count - 1)]
    yield from puzzles.Stage(rank, size).rounds(order)


def mixes_micro_batches(rank, size, count):
    """The first stage begins with the second micro-batch, and the others do not."""
    forward = [("F", i) for i in range(count)]
    if rank == 0:
        forward[:2] = reversed(forward[:2])
    yield from puzzles.Stage(rank, size).rounds([*forward, *(("B", i) for i in range(count))])


def too_far_ahead(rank, size, count):
    """Gathers all layers before it computes one."""
    everything = [steps for steps in ANSWERS["fsdp"](rank, size, count)]
    flat = [s for steps in everything for s in steps if type(s).__name__ != "Compute"]
    work = [s for steps in everything for s in steps if type(s).__name__ == "Compute"]

    def place(i, s):
        layer = i // (2 * size - 1)
        return (
            s if isinstance(s, Send) else s._replace(lo=layer * size + s.lo % size, hi=layer * size + s.lo % size + 1)
        )

    yield tuple(place(i, s) for i, s in enumerate(flat))
    for i, step in enumerate(work):
        (full,) = step.reads
        yield (step._replace(reads=(full._replace(lo=i * size, hi=(i + 1) * size),)),)


def copies_for_nobody(rank, size, count):
    """Half of x is copied."""
    yield Send((rank + 1) % size, "x", 0, count // 2), Recv((rank - 1) % size, "copy", 0, count // 2)


def fails_later(rank, size, count):
    yield Send((rank + 1) % size, "x", 0, 1), Recv((rank - 1) % size, "y", 0, 1)
    yield (Send([0, 0][rank], "x", 0, 1),) if rank else ()


def from_memory(rank, size, count):
    """Nothing is sent: all read x of rank 0."""
    yield (Copy("x", 0, count, "x", 0, of=0),) if rank else ()


def work(**other):
    """An answer to fsdp whose computations differ in these fields."""

    def answer(rank, size, count):
        for steps in ANSWERS["fsdp"](rank, size, count):
            yield tuple(s._replace(**other) if isinstance(s, Compute) else s for s in steps)

    return answer


def all_at_once(name, seconds):
    """An answer to gpipe that neither waits for others nor reads anything."""
    return lambda rank, size, count: (
        (Compute(name.format(i), (), (Slice("done", i, i + 1),), seconds),) for i in range(count)
    )


def in_three_phases(**changed):
    """An alltoall, all computations, an alltoall back; the computations differ in these fields."""

    def answer(rank, size, count):
        def exchange(src, buf):
            yield (Copy(buf, rank * count, (rank + 1) * count, src, rank * count),)
            for k in range(1, size):
                to, source = (rank + k) % size, (rank - k) % size
                yield (
                    Send(to, src, to * count, (to + 1) * count),
                    Recv(source, buf, source * count, (source + 1) * count),
                )

        yield from exchange("x", "in")
        for r in range(size):
            at = r * count, (r + 1) * count
            yield (Compute(f"E{r}", (Slice("in", *at),), (Slice("out", *at),), 2.0)._replace(**changed),)
        yield from exchange("out", "y")

    return answer


def test_experts_one_thing_after_the_other_are_right_and_too_slow():
    grade = puzzles.experts.grade(in_three_phases())
    assert grade.right and grade.over == ["seconds"] and grade.measured["seconds"] == 14


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("broadcast", from_memory, "rank 1, round 0: .*of=0.*: there is no shared memory here, use messages"),
        ("chain", from_memory, "rank 1, round 0: .*of=0.*: there is no shared memory here, use messages"),
        ("experts", in_three_phases(seconds=1.0), r"expected Compute.f.E{r}., reads, writes, 2.0. of a rank r"),
        ("experts", in_three_phases(name="E0"), r"reads .* and writes .*: expected what rank 0 has for expert"),
        ("fsdp", work(seconds=0.0), r"seconds=0.0.: expected Compute.f.L{l}., reads, writes, 4.0. of a layer l"),
        ("fsdp", work(name="L{l}"), r"name='L{l}'.*: expected Compute.f.L{l}., reads, writes, 4.0. of a layer l"),
        ("gpipe", all_at_once("B{}", 2.0), r"rank 0: Compute.name='B0', reads=\(\), .*: expected .*buf='kept'"),
        ("gpipe", all_at_once("B", 2.0), "rank 0 computes 'B': expected F or B and a micro-batch"),
        ("gpipe", all_at_once("", 2.0), "rank 0 computes '': expected F or B and a micro-batch"),
        ("gpipe", ANSWERS["zero_bubble"], "rank 3 computes 'I0': expected F or B and a micro-batch"),
        ("broadcast", one_by_one, "too many       7 of 3"),
        ("broadcast", from_one_to_the_next, "(?s)too many       7 of 3.*\n  ok             4 of 12"),
        ("scan", sum_from_one_to_the_next, "too many       7 of 3"),
        ("broadcast", far_away, "rank 0, round 0: .* reaches to element 1,000,000,000,001 of t: 1,000,000 are many"),
        ("broadcast", much_at_once, "rank 0, round 0: 1,000 steps at once; 260 would be many"),
        ("broadcast", of_a_buffer_with_a_strange_name, r"reads elements of \$x_\{ that nothing wrote"),
        ("broadcast", many_at_once, "rank 0, round 0: 7 sends and 0 receives, where there is a port for each"),
        ("ring", whole_vectors, "too many      80 of 32"),
        ("ring", all_waiting, r"with eager sends it passes\)|are missing"),
        ("ring", allreduce.doubling, "only neighbours on the ring have a wire"),
        ("reduce_scatter", ANSWERS["ring"], "too many      32 of 16"),
        ("memory", without_a_meeting, "rank [0-9] ends without a Barrier after rank [0-9] has written x there"),
        ("memory", reads_what_is_written, "(?s)race|nothing says|no Barrier"),
        ("memory", everyone_adds_all, "too many      80 of 32"),
        ("memory", ANSWERS["doubling"], "there are no messages here"),
        ("gpipe", forgets_a_backward, r"done\[7\] was never written"),
        ("gpipe", mixes_micro_batches, "rank 1, F0 reads in.0.: it holds what F0 made of micro-batch 1, expected"),
        ("one_f_one_b", ANSWERS["gpipe"], "too many      10 of 6"),
        ("zero_bubble", ANSWERS["one_f_one_b"], "too many      33 of 27"),
        ("fsdp", too_far_ahead, "too many      32 of 8"),
        ("buddy", copies_for_nobody, r"if rank 0 is lost, nothing that is left tells what its x\[3\] was"),
        ("parity", ANSWERS["buddy"], "too many       6 of 2"),
        ("ring", lambda rank, size, count: None, "rank 0: it returns None; a generator of rounds has a `yield`"),
        ("ring", lambda rank, size: [], "rank 0, round 0: it raises TypeError: .* takes 2 positional arguments"),
        ("ring", fails_later, "rank 2, round 1: it raises IndexError: list index out of range, at `yield .*rank.*`"),
        ("doubling", ANSWERS["gpipe"], "here elements are only moved and added"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_over_a_limit_is_said(name, answer, words):
    import re

    grade = getattr(puzzles, name).grade(answer)
    assert not grade and re.search(words, str(grade)), grade
    figure = grade.draw()
    figure.canvas.draw()
    assert figure.axes
    plt.close(figure)


@pytest.mark.parametrize("answer", [fails_later, ANSWERS["gpipe"]])
def test_what_has_another_mistake_is_not_called_a_wrong_length(answer):
    figure = puzzles.ring.grade(answer).draw()
    heads = [text.get_text() for text in [*figure.texts, *figure.axes[0].texts]]
    assert "ring allreduce: wrong step" in heads
    plt.close(figure)


def test_numbers_may_be_numpys():
    def chain(rank, size, count):
        for steps in ANSWERS["chain"](*map(np.int64, (rank, size, count))):
            yield tuple(s._replace(peer=np.int32(s.peer), hi=np.int64(s.hi)) for s in steps)

    grade = puzzles.chain.grade(chain)
    assert grade and grade.measured == puzzles.chain.record
    plt.close(grade.draw())


def test_a_solved_one_is_drawn_too():
    for name in ("ring", "zero_bubble"):
        figure = getattr(puzzles, name).grade(ANSWERS[name]).draw()
        assert figure.axes[0].get_title() or figure.texts or figure.axes[0].texts
        plt.close(figure)


def test_layers_are_drawn_as_what_they_are():
    figure = puzzles.fsdp.grade(ANSWERS["fsdp"]).draw()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["wait", "compute"]
    assert figure.axes[0].get_xlabel() == "time, units"
