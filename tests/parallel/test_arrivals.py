"""Every order of arrival of small cases: bounds hold, nothing is lost or done twice; wrong servers are found."""

import math

import pytest

from parallel.sync.asynchronous.checking import Broken, Symbolic, explore
from parallel.sync.asynchronous.clock import ClockTable, allowed
from parallel.sync.asynchronous.worker import Worker

CASES = [
    ({"workers": 2, "servers": 1, "steps": 3, "bound": 0}, 0),
    ({"workers": 2, "servers": 1, "steps": 3, "bound": 1}, 1),
    ({"workers": 2, "servers": 1, "steps": 3}, 2),
    ({"workers": 2, "servers": 2, "steps": 2, "bound": 0}, 0),
    ({"workers": 3, "servers": 1, "steps": 2, "bound": 0}, 0),
    ({"workers": 3, "servers": 1, "steps": 1, "bound": 1}, 0),
    ({"workers": 2, "servers": 1, "steps": 2, "bound": 1, "ahead": True}, 1),
    ({"workers": 2, "servers": 1, "steps": 4, "push_every": 2, "fetch_every": 2, "warm": 1}, 3),
    ({"workers": 2, "servers": 1, "steps": 3, "push_every": 2, "fetch_every": 2, "warm": 1, "ahead": True}, 2),
]


@pytest.mark.parametrize(("case", "ahead"), CASES, ids=str)
def test_no_order_of_arrival_breaks_a_rule(case, ahead):
    """And the bound is reached on some: it forbids no more than it says."""
    found = explore(**case)
    assert found.states > 50 and found.ahead >= min(ahead, 1) and found.ahead <= case.get("bound", math.inf)


LOOKING = {"workers": 2, "servers": 1, "steps": 3, "looks": 1}
FAILING = {"workers": 2, "servers": 1, "steps": 3, "fails": 1}


@pytest.mark.parametrize("case", [LOOKING, FAILING], ids=str)
@pytest.mark.parametrize("bound", [0, 1, math.inf])
@pytest.mark.parametrize("ahead", [False, True])
def test_looks_and_bad_losses_break_no_rule(case, bound, ahead):
    assert explore(**case, bound=bound, ahead=ahead and bound > 0).states > 50


@pytest.mark.parametrize(
    ("kind", "name", "case", "words"),
    [
        (ClockTable, "restore", LOOKING | {"bound": 0}, r"computes at clock 2 without \[\(., 1\)\] of server 0"),
        (Symbolic, "resume", LOOKING | {"bound": 1}, "does not serve again after a look"),
        (Worker, "resume", LOOKING | {"bound": 1}, "waits for ever|too old|without"),
        (Worker, "fail", FAILING | {"bound": 1}, "does not know of a bad loss"),
    ],
)
def test_a_wrong_look_or_bad_loss_is_found(kind, name, case, words, monkeypatch):
    monkeypatch.setattr(kind, name, lambda self, *arguments: None)
    with pytest.raises(Broken, match=words):
        explore(**case)


@pytest.mark.parametrize("bound", [0, 1, math.inf])
def test_who_dies_holds_nobody_back(bound):
    """At whatever moment: what it had sent counts, once, and the others come to their end."""
    assert explore(workers=2, servers=1, steps=2, bound=bound, deaths=1).states > 300


class Eager(Symbolic):
    """Answers at once."""

    def apply_and_answer(self):
        for worker in self.clock_table.pop_readable(True):
            self.answer(worker)


class OffByOne(Symbolic):
    """Lets workers be one step further apart than it should."""

    def apply_and_answer(self):
        right, self.clock_table.bound = self.clock_table.bound, self.clock_table.bound + 1
        super().apply_and_answer()
        self.clock_table.bound = right


class Overwriting(Symbolic):
    """Forgets the pushes of a clock that came while it waited for others."""

    def handle(self, message):
        if message.kind == "push" and self.pushes_in_step:
            self.pushes_in_step.clear()
        super().handle(message)


class Twice(Symbolic):
    """Applies a push once more when somebody waits for an answer."""

    def apply(self, worker, *push):
        super().apply(worker, *push)
        if self.clock_table.waiting:
            super().apply(worker, *push)


class Attached(Symbolic):
    """Waits for who has finished."""

    def handle(self, message):
        reached = dict(self.clock_table.reached)
        super().handle(message)
        if message.kind == "done" and not self.sent:
            worker = message.sender[1]
            self.clock_table.clocks[worker] = reached[worker]


class Deaf(Symbolic):
    """Goes on waiting for the dead."""

    def handle(self, message):
        if message.kind == "death":
            self.clock_table.waiting.pop(message.sender[1], None)
        else:
            super().handle(message)


@pytest.mark.parametrize(
    ("wrong", "case", "words"),
    [
        (Eager, {"bound": 1}, r"reads at clock 2, .* too old"),
        (Eager, {"bound": 0}, r"computes at clock 1 without \[\(0, 0\)\] of server 0"),
        (OffByOne, {"bound": 1}, r"reads at clock 2, .* too old"),
        (Overwriting, {"bound": 0}, r"computes at clock 1 without \[\(., 0\)\] of server 0"),
        (Twice, {}, r"server 0 has applied \[\(., .\), \(., .\)"),
        (Attached, {"bound": 1}, "waits for ever"),
        (Deaf, {"bound": 1, "deaths": 1}, "waits for ever"),
    ],
)
def test_a_wrong_server_is_found_with_its_schedule(wrong, case, words):
    with pytest.raises(Broken, match=words) as error:
        explore(workers=2, servers=1, steps=3, server=wrong, **case)
    lines = str(error.value).splitlines()
    assert lines[1].startswith("  worker 0 goes on") and any("server 0 takes worker" in line for line in lines)


def test_a_case_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="more than 100 states: explore a smaller one"):
        explore(workers=3, servers=2, steps=3, most=100)


def test_the_rule_of_clocks():
    """Ho et al. 2013: a worker may start clock c only if c - min <= s; who has left is not in the minimum."""
    assert [allowed(clock, 3, 2) for clock in range(3, 8)] == [True, True, True, False, False]
    assert allowed(7, 3, math.inf) and not allowed(math.inf, 3, math.inf), "in the end all must have left"
    assert allowed(4, 4, 9, warm=4) and not allowed(4, 3, 9, warm=4) and allowed(5, 3, 9, warm=4)
    clock_table = ClockTable(range(3), 1)
    for worker, clock in ((0, 2), (1, 1), (2, 0)):
        clock_table.record_push(worker, clock)
    clock_table.add_read(0, 2)
    assert clock_table.pop_readable() == [] and clock_table.waiting == {0: 2}
    clock_table.remove(2)
    assert clock_table.pop_readable() == [0] and not clock_table.waiting and not clock_table.ended_early(1)
    for worker in (0, 1):
        clock_table.remove(worker)
    assert clock_table.ended_early(1) and not clock_table.ended_early(0) and clock_table.least == math.inf
    clock_table.remove(0, pauses=True)
    clock_table.remove(0)
    assert not clock_table.pausing, "one that dies while it pauses does not return"
    clock_table.open(5)
    assert clock_table.least == 5 and clock_table.reached == {0: 5, 1: 5, 2: 5}
