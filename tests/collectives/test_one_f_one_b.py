"""A pipeline is a text of the same language: one forward, one backward (Narayanan et al. 2019), checked, priced, drawn.

x holds m micro-batches, one element each. Stage r of p gets the activations of the stage before into "in", and keeps
them until backward has used them; gradients come back the same way.
"""

import pytest

from collectives import Compute, Deadlock, Recv, Send, Slice, draw, draw_timeline, price, simulate
from collectives.pricing.networks import Link, Network

FORWARD, BACKWARD = 1.0, 2.0
FREE = Network(Link(0.0, 0.0), Link(0.0, 0.0))  # messages take no time
CASES = [(1, 3), (2, 1), (2, 6), (4, 2), (4, 4), (4, 8), (5, 9)]


def one_forward_one_backward(rank, size, m, forward=FORWARD, backward=BACKWARD):
    """p - r - 1 forwards first, then a forward and a backward in turn, then the backwards that are left.

    What goes on and what comes back travel in one round: one after the other would wait for each other.
    """
    first, last = rank == 0, rank == size - 1
    source = "x" if first else "in"

    def compute(i, kind, reads, writes, seconds):
        reads, writes = (tuple(Slice(name, i, i + 1) for name in names) for names in (reads, writes))
        return (Compute(f"{kind}{i}", reads, writes, seconds),)

    def forth(i):
        return compute(i, "F", [source], ["out"], forward)

    def back(i):  # the last stage begins with its own output
        return compute(i, "B", ["out" if last else "gradient", source], ["back"], backward)

    def get(i):
        return [] if first else [Recv(rank - 1, "in", i, i + 1)]

    def give(i):
        return [] if last else [Send(rank + 1, "out", i, i + 1)]

    def get_back(i):
        return [] if last else [Recv(rank + 1, "gradient", i, i + 1)]

    def give_back(i):
        return [] if first else [Send(rank - 1, "back", i, i + 1)]

    ahead = min(size - rank - 1, m)
    for i in range(ahead):
        yield tuple(get(i))
        yield forth(i)
        yield tuple(give(i))
    for i in range(m - ahead):
        if i == 0:
            yield tuple(get(ahead))
        yield forth(ahead + i)
        yield *give(ahead + i), *get_back(i)
        yield back(i)
        yield *give_back(i), *(get(ahead + i + 1) if ahead + i + 1 < m else [])
    for i in range(m - ahead, m):
        yield tuple(get_back(i))
        yield back(i)
        yield tuple(give_back(i))


def given(m):
    """Before: every stage sees the micro-batches; the first uses them."""
    return {"x": [((0, i),) for i in range(m)]}


@pytest.mark.parametrize(("p", "m"), CASES)
def test_it_is_right_with_sends_that_wait_and_with_sends_that_do_not(p, m):
    for synchronous in (False, True):
        stats = simulate(lambda rank: one_forward_one_backward(rank, p, m), [given(m) for _ in range(p)], synchronous)
        assert stats.messages == [m * ((rank > 0) + (rank < p - 1)) for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), CASES)
def test_a_stage_holds_so_many_activations_as_it_is_forwards_ahead(p, m):
    stats = simulate(lambda rank: one_forward_one_backward(rank, p, m), [given(m) for _ in range(p)])
    # One more element while something is computed or has just come: an output, or a gradient.
    for rank in range(1, p):
        activations = most_at_once(stats.history[rank], "in")
        assert activations == min(p - rank, m), rank
        assert activations <= stats.live[rank] <= activations + 2, rank


def most_at_once(rounds, name):
    """The most elements of a buffer between what writes them and what reads them last."""
    writes, reads = {}, {}
    for k, steps in enumerate(rounds):
        for step in steps:
            if isinstance(step, Recv) and step.buf == name:
                writes[step.lo] = k
            if isinstance(step, Compute):
                reads |= {s.lo: k for s in step.reads if s.buf == name}
    return max(sum(writes[i] <= k <= reads[i] for i in writes) for k in range(len(rounds)))


@pytest.mark.parametrize(("p", "m"), CASES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0)])
def test_it_takes_as_long_as_the_closed_form_says(p, m, forward, backward):
    priced = price(one_forward_one_backward, p, m, network=FREE, forward=forward, backward=backward)
    assert priced.seconds == pytest.approx((m + p - 1) * (forward + backward))


def test_a_slow_network_is_waited_for():
    slow = Network(Link(0.5, 0.0), Link(0.5, 0.0))
    free, waited = (price(one_forward_one_backward, 4, 8, network=network).seconds for network in (FREE, slow))
    assert free + 2 * 3 * 0.5 <= waited <= free + 8 * 4 * 2 * 0.5


def test_what_travels_one_after_the_other_hangs():
    """A stage that sends its output before it asks for the gradient waits for one that does the same."""

    def one_by_one(rank, size, m):
        for steps in one_forward_one_backward(rank, size, m):
            yield from ((step,) for step in steps)

    with pytest.raises(Deadlock):
        simulate(lambda rank: one_by_one(rank, 4, 8), [given(8) for _ in range(4)])


def test_it_is_drawn_with_and_without_its_messages():
    p, m = 3, 4
    priced = price(one_forward_one_backward, p, m, network=FREE, trace=True)
    names = [work.step.name for work in priced.trace.works]
    assert sorted(names) == sorted(f"{kind}{i}" for kind in "FB" for i in range(m) for _ in range(p))
    timeline = draw_timeline(priced, title="1F1B").axes[0]
    numbers = [text.get_text() for text in timeline.texts if text.get_text().isdigit()]
    assert len(numbers) == 2 * p * m
    assert [text.get_text() for text in timeline.get_legend().get_texts()] == ["forward", "wait", "backward"]
    space_time = draw(one_forward_one_backward, p, m, network=FREE).axes[0]
    assert [text.get_text() for text in space_time.texts].count("F0") == p
    arrows = [text for text in space_time.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 2 * m * (p - 1) == priced.messages
