"""A kind of step that is new is refused by every tool by its name, until that tool has been taught it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
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


FILL = '''
class Fill(NamedTuple):
    """Set buf[lo:hi] to the neutral element."""

    buf: str
    lo: int
    hi: int


'''
# What docs/howto/algorithm.md says of steps.py, and nothing else: (text of the file, what takes its place).
IN_STEPS = (
    ("class Barrier(NamedTuple):", FILL.lstrip() + "class Barrier(NamedTuple):"),
    ("Step = Send |", "Step = Fill | Send |"),
    ("case Recv() | RecvReduce() | Barrier():", "case Recv() | RecvReduce() | Barrier() | Fill():"),
    ("case Recv() | RecvReduce():", "case Recv() | RecvReduce() | Fill():"),
    (
        "            case Barrier():",
        "            case Fill():\n                return moved(step)\n            case Barrier():",
    ),
)
USE = """
import sys
import collectives
from collectives.executor.program import Program
from collectives.pricing.trace_formats import write_goal
from collectives.steps import Fill, relabel_ranks

def filling(rank, size, count):
    yield (Fill("y", 0, count),)

list(relabel_ranks(filling(0, 2, 4), [1, 0]))
tools = dict(
    run=lambda: Program(filling(0, 2, 4)),
    fused=lambda: Program(filling(0, 2, 4), fused=True),
    check=lambda: collectives.check(filling, 2),
    price=lambda: collectives.price(filling, 2, 4),
    price_alike=lambda: collectives.price(filling, 1 << 22, 4),
    draw=lambda: collectives.draw(filling, 2, 4),
    draw_untried=lambda: collectives.draw(filling, 2, 1 << 17),
    draw_buffers=lambda: collectives.draw_buffers(filling, 2, 4),
    goal=lambda: write_goal("f.goal", filling, 2, 4),
)
for name, tool in tools.items():
    try:
        tool()
    except (TypeError, ValueError) as error:
        print("refused" if "Fill(buf='y'" in str(error) else f"{name}: {error!r}")
    else:
        print(f"{name} did not refuse it")
"""


def test_a_kind_that_only_steps_knows_is_refused_by_name(tmp_path):
    """As whoever adds one meets it: steps.py has been taught, and every tool says that it has not."""
    package = Path(collectives.__file__).parent
    shutil.copytree(package, tmp_path / "collectives", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "collectives" / "steps.py"
    text = file.read_text()
    for old, new in IN_STEPS:
        assert text.count(old) >= 1, f"docs/howto/algorithm.md and this test name {old!r}"
        text = text.replace(old, new, 1)
    file.write_text(text)
    (tmp_path / "use.py").write_text(USE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * 9, done.stdout + done.stderr
