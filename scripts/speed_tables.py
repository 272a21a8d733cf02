#!/usr/bin/env python3
"""The tables of speed in README.md and docs/comparison.md: several processors side by side.

    python scripts/bench.py engine --json docs/measured/speed_NAME.json      on each processor; also collectives, or all
    python scripts/speed_tables.py --write                                   each speed_*.json: rows of one processor

Where a case has several rows, as of two runs, a table has all times and the mean of the ratios. Ratios above 1, where
ours is slower, are bold.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

from page_tables import MEASURED, markdown, print_tables

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": False, "docs/comparison.md": True}  # whether with times
ENGINE = (
    *("mlp 784-30-10, batch 10", "mlp 784-128-10, batch 64", "lenet5, batch 64", "vgg-small, batch 32"),
    *("resnet20, batch 32", "transformer, batch 16", "lstm, batch 16", "geometric mean"),
)
TRAINING = (
    *("mlp 784-512-512-10, batch 64 a rank", "lenet5, batch 64 a rank", "vgg-small, batch 32 a rank"),
    *("resnet20, batch 32 a rank", "transformer, batch 16 a rank"),
)
ACCURACY = "lenet5, MNIST to 99%"
SIZES = ("4 B", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB")
KINDS = ("shared arrays", "private arrays")
FLOOR = re.compile(r"([\d.]+) of the peer's step")


class Processor:
    """What was measured on one: rows by (case, threads), those of collectives by case."""

    def __init__(self, file: Path):
        rows = json.loads(file.read_text())
        self.name = rows[0]["processor"]
        self.days = sorted({row["date"] for row in rows})
        self.rows: dict[tuple[str, int], list[dict]] = {}
        for row in rows:
            threads = 0 if row["case"].startswith("allreduce") else row["threads"]
            self.rows.setdefault((row["case"], threads), []).append(row)

    def ratio(self, case: str, threads: int = 0) -> str:
        """Return ours / the peer's: the mean of all rows; empty where there are none."""
        ratios = [row["ratio"] for row in self.rows.get((case, threads), []) if row["ratio"]]
        text = f"{mean(ratios):.2f}" if ratios else ""
        return f"**{text}**" if ratios and float(text) > 1 else text

    def times(self, case: str, side: str, threads: int = 0) -> str:
        """Return the costs of a side, of all rows."""
        costs = [row[side] for row in self.rows.get((case, threads), []) if row[side]]
        return ", ".join(f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}" for cost in costs)

    def floor(self, case: str) -> str:
        """Return what the products alone, and GELU's distribution, take of the peer's step."""
        found = [FLOOR.search(row["note"]) for row in self.rows.get((case, 1), [])]
        return next((match[1] for match in found if match), "")


def table(corner: str, cases: list[str], columns: list[tuple[str, str, list[str]]]) -> str:
    """Return a table of Markdown; columns are (processor, heading, cells). Columns and lines without a figure go."""
    columns = [column for column in columns if any(column[2])]
    firsts = [i for i, column in enumerate(columns) if not i or column[0] != columns[i - 1][0]]
    head = [f"{name}: {heading}" if i in firsts else heading for i, (name, heading, _) in enumerate(columns)]
    lines = [list(line) for line in zip(cases, *(cells for *_, cells in columns), strict=True)]
    return markdown([corner, *head], [line for line in lines if any(line[1:])])


def steps(processors: list[Processor], times: bool) -> str:
    """Return the table of training steps against PyTorch."""
    columns = []
    for one in processors:
        if times:
            columns += [(one.name, "ours, ms", [one.times(case, "ours", 1) for case in ENGINE])]
            columns += [(one.name, "PyTorch, ms", [one.times(case, "peer", 1) for case in ENGINE])]
        columns += [(one.name, "ratio", [one.ratio(case, 1) for case in ENGINE])]
        columns += [(one.name, "floor", [one.floor(case) for case in ENGINE])]
        columns += [(one.name, "two threads", [one.ratio(case, 2) for case in ENGINE])]
    return table("step of", list(ENGINE), columns)


def training(processors: list[Processor], times: bool) -> str:
    """Return the table of data-parallel steps on two ranks against PyTorch."""
    columns = []
    for one in processors:
        for peer, name in (("PyTorch", "DDP"), ("threads of PyTorch", "two threads")):
            cases = [f"{case}: ddp, {peer}" for case in TRAINING] + [ACCURACY] * (name == "DDP")
            pad = [""] * (len(TRAINING) + 1 - len(cases))
            if times:
                sides = (("ours, ms", "ours"),) * (name == "DDP") + ((f"PyTorch {name}, ms", "peer"),)
                columns += [
                    (one.name, text, [one.times(case, side, 1) for case in cases] + pad) for text, side in sides
                ]
            columns += [(one.name, f"{name}, ratio", [one.ratio(case, 1) for case in cases] + pad)]
    return table("step of", [*TRAINING, f"{ACCURACY}, in seconds"], columns)


def sums(processors: list[Processor], times: bool) -> str:
    """Return the table of allreduces on two ranks against the MPI library's own."""
    columns = []
    for one in processors:
        sides = [(kind, f"{kind}, us", "ours") for kind in KINDS]
        for kind, heading, side in sides + [(KINDS[0], "MPI library, us", "peer"), ("sums alone", "floor, us", "ours")]:
            cases = [f"allreduce, {size}, {kind}" for size in SIZES]
            columns += [(one.name, heading, [one.times(case, side) for case in cases])] * times
            if kind in KINDS and side == "ours":
                heading = f"{kind}, ratio" if times else kind
                columns += [(one.name, heading, [one.ratio(case) for case in cases])]
    return table("allreduce of", list(SIZES), columns)


def tables(times: bool) -> dict[str, Callable[[], str]]:
    """Return what makes each table of a page, and the line below it that says when was measured."""
    processors = [Processor(file) for file in sorted(MEASURED.glob("speed_*.json"))]
    makers = {"steps": steps, "sums": sums} | ({"training": training} if times else {})
    return {name: partial(dated, make, processors, times) for name, make in makers.items()}


def dated(make: Callable, processors: list[Processor], times: bool) -> str:
    """Return a table, and when its figures were measured on each processor."""
    text = make(processors, times)
    days = "; ".join(f"{one.name}: {', '.join(one.days)}" for one in processors if one.name in text)
    return f"{text}\n\nMeasured on {days}.\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the tables of speed in README.md and docs/comparison.md.")
    parser.add_argument("--write", action="store_true", help="put them into these pages, too")
    write = parser.parse_args(argv).write
    for page, times in PAGES.items():
        print_tables(ROOT / page, tables(times), write)


if __name__ == "__main__":
    main()
