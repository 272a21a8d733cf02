"""The tables of docs/systems/sequences.md: where a ring is faster than Ulysses, predicted, and what was measured.

python scripts/experiments/long_sequences.py                  print them
python scripts/experiments/long_sequences.py --write          put them into the page, between its marks
python scripts/experiments/long_sequences.py --draw FILE      draw the first one for all lengths

One layer of attention is predicted, forward and backward, on sequences of which all ranks have a part: what is computed
and what is waited for (parallel/planning/context_costs.py, whose closed forms a test compares with the simulated
schedules). Measurements are rows of docs/measured, which are written by

python scripts/bench.py sequences --json docs/measured/sequences.json
python scripts/bench.py crossover --json docs/measured/crossover.json         in the lab, as root
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from page_tables import markdown, measured, print_tables  # noqa: E402

from collectives.pricing.networks import NETWORKS, Network  # noqa: E402
from parallel.planning.context_costs import BACKWARD, ring, ulysses  # noqa: E402
from parallel.planning.group_costs import Group  # noqa: E402
from parallel.planning.tables import seconds as in_words  # noqa: E402

PAGE = ROOT / "docs" / "systems" / "sequences.md"
FEATURES, HEADS, RANKS, ITEM = 1024, 16, 8, 4
# Network and operations a second of a rank: cores, and GPUs at a third of their peak.
MACHINES = {"workstation": 2e10, "gigabit": 2e10, "infiniband": 2e10, "gpu-25g": 1e14, "gpu-100g": 1e14}
LENGTHS = [1 << k for k in range(10, 21, 2)]


def layer_seconds(length: int, ring_ranks: int, head_ranks: int, network: Network, flops: float) -> float:
    """Return seconds of a layer's attention, forward and backward: computed, and waited for.

    Neighbours share the heads, and `ring_ranks` such groups are a ring (docs/systems/sequences.md).
    """
    keys, attention = 2 * ITEM * length * FEATURES, 4 * length**2 * FEATURES / flops
    ranks = ring_ranks * head_ranks
    around = ring(keys / head_ranks, attention / head_ranks, Group(ring_ranks, head_ranks), network)
    dealt = ulysses(keys / ring_ranks, Group(head_ranks), network)
    return (1 + BACKWARD) * attention / ranks + around.seconds + dealt.seconds


def network_of(name: str) -> Network:
    """Return a network of one rank a node, but for the workstation, which is a node."""
    network = NETWORKS[name]
    return network if name == "workstation" else network.with_ranks_per_node(1)


def length_table() -> str:
    """How much longer Ulysses takes than a ring, by length and network; below 1 it is faster."""
    lines = [f"| positions | {' | '.join(MACHINES)} |", "|---:|" + "---:|" * len(MACHINES)]
    for length in LENGTHS:
        cells = []
        for name, flops in MACHINES.items():
            around, dealt = (layer_seconds(length, *how, network_of(name), flops) for how in ((RANKS, 1), (1, RANKS)))
            cells.append(f"{in_words(around)}, {in_words(dealt)}: {dealt / around:.2f}")
        lines.append(f"| {length:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def crossover(name: str) -> int | None:
    """Return the shortest length, a power of two, from which a ring is not slower than Ulysses on a network."""
    network, flops = network_of(name), MACHINES[name]
    slower = [
        length
        for length in (1 << k for k in range(6, 27))
        if layer_seconds(length, RANKS, 1, network, flops) > layer_seconds(length, 1, RANKS, network, flops)
    ]
    return 2 * slower[-1] if slower else 64


def heads_table(length: int = 1 << 14, ranks: int = 16, inside: int = 8) -> str:
    """The fastest way by heads: of 16 ranks on two nodes no more than the heads can share them."""
    lines = ["| heads | ring:16 | ring:8,ulysses:2 | ring:4,ulysses:4 | ring:2,ulysses:8 | ulysses:16 |"]
    lines.append("|---:|" + "---:|" * 5)
    network = NETWORKS["gpu-100g"].with_ranks_per_node(inside)
    for heads in (1, 2, 4, 8, 16):
        cells = [
            in_words(layer_seconds(length, ranks // n, n, network, 1e14)) if heads % n == 0 else "no"
            for n in (1, 2, 4, 8, 16)
        ]
        lines.append(f"| {heads} | {' | '.join(cells)} |")
    return "\n".join(lines)


def crossovers() -> str:
    """The lengths from which a ring is not slower, in a sentence."""
    found = [f"{name} {length:,}" for name in MACHINES if (length := crossover(name))]
    return f"A ring is at least as fast as Ulysses from this number of positions on: {', '.join(found)}."


def picture():
    """Seconds of a layer on each network over the length, a ring and Ulysses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = [1 << k for k in range(8, 21)]
    for i, (name, flops) in enumerate(MACHINES.items()):
        for how, style in (((RANKS, 1), "-"), ((1, RANKS), "--")):
            times = [layer_seconds(length, *how, network_of(name), flops) for length in lengths]
            axes.loglog(lengths, times, style, color=f"C{i}", lw=1.4, label=name if style == "-" else None)
    axes.set_xlabel("positions of a sequence, on 8 ranks")
    axes.set_ylabel("seconds of a layer's attention")
    axes.set_title("ring (lines) and Ulysses (dashed), predicted", loc="left", fontsize=10, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def times_of(row: dict) -> str:
    """Measured milliseconds, and the estimate in parentheses."""
    return f"{in_words(1e-3 * row['ours'])} ({in_words(1e-3 * row['peer'])})"


def blocks_table() -> str:
    """Attention by blocks beside whole scores, one process."""
    rows = measured("sequences")
    lines = []
    for case, row in rows.items():
        if found := re.fullmatch(r"attention by blocks, ([\d,]+) positions, time", case):
            memory = rows[case.replace("time", "memory")]
            samples = row["note"].split()[0]
            times = [in_words(1e-3 * row[side]) for side in ("peer", "ours")]
            sizes = [f"{memory[side]:,.0f} MiB" for side in ("peer", "ours")]
            lines.append([f"{found[1]} x {samples}", *times, *sizes])
    return markdown(["positions x samples", "whole", "blocks of 128", "memory, whole", "memory, blocks"], lines)


def ranks_table() -> str:
    """Seconds and bytes of a step by length and ranks, beside what is estimated; and how much faster several are."""
    rows = measured("sequences")
    lines = []
    for case, row in rows.items():
        if found := re.fullmatch(r"length ([\d,]+), (\d) ranks?, step", case):
            memory = rows[case.replace("step", "memory")]
            one = rows[f"length {found[1]}, 1 rank, step"]
            sizes = [f"{memory[side]:.1f} MiB" for side in ("ours", "peer")]
            lines.append([found[1], found[2], times_of(row), f"{one['ours'] / row['ours']:.2f}", *sizes])
    return markdown(["positions", "ranks", "a step (estimate)", "times as fast", "memory", "estimate"], lines, words=0)


def step_table() -> str:
    """A step on two ranks beside one process that takes turns with them."""
    lines = []
    for case, row in measured("sequences").items():
        if case.startswith("a sequence of"):
            lines.append([case, *(in_words(1e-3 * row[side]) for side in ("ours", "peer")), f"{1 / row['ratio']:.2f}"])
    return markdown(["a step", "measured", "one process", "times as fast"], lines)


def crossover_table() -> str:
    """A layer's attention in the lab, in a ring, by Ulysses and by both, and which is the fastest."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for case, row in measured("crossover").items():
        if match := re.fullmatch(r"(.*bit/s), ([\d,]+ positions, \d) heads?, (.*)", case):
            found.setdefault((match[1], match[2].replace(" positions", "")), {})[match[3]] = row
    lines = []
    for (place, sizes), ways in found.items():
        both = next((row for way, row in ways.items() if "," in way), None)
        cells = [times_of(row) if row else "no" for row in (ways["ring"], ways.get("ulysses"), both)]
        lines.append([place, sizes, *cells, *(fastest(ways, side) for side in ("ours", "peer"))])
    heads = ["network", "positions, heads", "ring", "Ulysses", "both", "fastest, measured", "fastest, estimated"]
    return markdown(heads, lines, words=2)


def fastest(ways: dict[str, dict], side: str) -> str:
    """The fastest way; those within 5% of it beside it."""
    least = min(row[side] for row in ways.values())
    near = ["both" if "," in way else way for way, row in ways.items() if row[side] < 1.05 * least]
    return "all" if len(near) == len(ways) > 1 else ", ".join(near)


TABLES = {
    "length": lambda: f"{length_table()}\n\n{crossovers()}",
    "heads": heads_table,
    "crossover": crossover_table,
    "step": step_table,
    "blocks": blocks_table,
    "ranks": ranks_table,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/systems/sequences.md")
    parser.add_argument("--draw", metavar="FILE", help="draw the first one")
    options = parser.parse_args(argv)
    print_tables(PAGE, TABLES, options.write)
    if options.draw:
        picture().savefig(options.draw)


if __name__ == "__main__":
    main()
