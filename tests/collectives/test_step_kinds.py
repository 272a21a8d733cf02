"""A kind of step that is new is refused by every tool by its name, until that tool has been taught it."""

from typing import NamedTuple

import pytest

import collectives
from collectives import steps
from collectives.executor.program import Program


class Swap(NamedTuple):
    """A kind of step as a test may add it: exchange buf[lo:hi] with `peer`."""

    peer: int
    buf: str
    lo: int
    hi: int


def swapping(rank, size, count):
    yield (Swap((rank + 1) % size, "x", 0, count),)


TOOLS = {
    "run": lambda: Program(swapping(0, 2, 4)),
    "run in node memory": lambda: Program(swapping(0, 2, 4), fused=True),
    "check": lambda: collectives.check(swapping, 2),
    "price": lambda: collectives.price(swapping, 2, 4),
    "price one node for all": lambda: collectives.price(swapping, 1 << 22, 4),
    "draw": lambda: collectives.draw(swapping, 2, 4),
    "draw without trying it first": lambda: collectives.draw(swapping, 2, 1 << 17),
    "draw buffers": lambda: collectives.draw_buffers(swapping, 2, 4),
    "draw a race": lambda: collectives.draw_race({"swapping": swapping}, 2, [64]),
    "relabel ranks": lambda: list(steps.relabel_ranks(swapping(0, 2, 4), [1, 0])),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_an_unknown_kind_of_step_is_refused_by_name(tool, monkeypatch):
    monkeypatch.setattr(steps, "KINDS", steps.KINDS | {Swap})
    for table in (steps.NUMBERS, steps.NAMES):
        monkeypatch.setitem(table, Swap, table[steps.Send])
    with pytest.raises((TypeError, ValueError), match=r"Swap\(peer=1.* is (not a step|a step that)"):
        TOOLS[tool]()
