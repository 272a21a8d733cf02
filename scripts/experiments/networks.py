"""The tables of docs/systems/networks.md: which allreduce on a torus, what papers claim, recomputed, what was measured.

python scripts/experiments/networks.py              print them
python scripts/experiments/networks.py --write      put them into the page, between its marks

Prices are simulated, on one core in half a minute. Measurements are rows of docs/measured, which are written by

python scripts/bench.py trunk --json docs/measured/trunk.json          in the lab, as root
python scripts/bench.py network --only model --network /tmp/network.json --json docs/measured/refinements.json
python tests/collectives/test_simgrid.py 4,8,16 4,1024,65536           with SimGrid; ranks, KiB
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from page_tables import MEASURED, markdown, measured, print_tables  # noqa: E402
from plan_collective import in_words, prices  # noqa: E402

from collectives import ALGORITHMS, price, synthesize  # noqa: E402
from collectives.algorithms.bucket import multiport_bucket  # noqa: E402
from collectives.algorithms.swing import multiport_swing  # noqa: E402
from collectives.pricing.lower_bounds import lower_bound  # noqa: E402
from collectives.pricing.networks import Network  # noqa: E402
from collectives.steps import Send  # noqa: E402
from parallel.command.arguments import Parser  # noqa: E402

PAGE = ROOT / "docs" / "systems" / "networks.md"
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 24, 1 << 30)
SWING_SIZES = (1 << 7, 1 << 13, 1 << 17, 1 << 21, 1 << 25)
# Of a reduce-scatter on a ring of p: the sum over steps of |rho(s)| / 2^(s+1) blocks (De Sensi et al. 2024).
PUBLISHED = {8: 1.0, 16: 1.1875, 32: 1.375, 64: 1.547}


def torus_table() -> str:
    """The fastest allreduce on a torus of 4 x 4, its bound, and how much longer the next two take."""
    network = Network.torus((4, 4))
    times = prices(network, "allreduce", 16, SIZES, {"synthesized": synthesize("allreduce", network)})
    lines = ["| bytes | fastest | time | bound | next |", "|---:|---|---:|---:|---|"]
    for nbytes in SIZES:
        best, *others = sorted((name for name in times if nbytes in times[name]), key=lambda name: times[name][nbytes])
        after = ", ".join(f"{name} {times[name][nbytes] / times[best][nbytes]:.2f}x" for name in others[:2])
        bound = in_words(lower_bound("allreduce", 16, nbytes, network)).strip()
        lines.append(f"| {nbytes:,} | {best} | {in_words(times[best][nbytes]).strip()} | {bound} | {after} |")
    return "\n".join(lines)


def congestion(name: str, dims: tuple[int, ...]) -> float:
    """Of a reduce-scatter, half of an allreduce, on a ring: seconds over those of the vector on one channel."""
    network, size = Network.torus(dims, 1.0, 0.0), dims[0]
    return price(ALGORITHMS["allreduce"][name], size, 64 * size, 1, network).seconds / 2 / (64 * size)


def ring_table() -> str:
    """Congestion on rings, published and ours."""
    lines = ["| ranks | Swing, published | ours | halving, ours | ring, ours |", "|---:|---:|---:|---:|---:|"]
    for size, published in PUBLISHED.items():
        ours = [f"{congestion(name, (size,)):.4g}" for name in ("swing", "rabenseifner", "ring")]
        lines.append(f"| {size} | {published:.4g} | {' | '.join(ours)} |")
    return "\n".join(lines)


def tori_table() -> str:
    """All directions of a torus at once: what the whole allreduce takes, over the vector on one channel."""
    lines = [
        "| torus | Swing | bucket | Swing / bucket | published limit |",
        "|---|---:|---:|---:|---:|",
    ]
    for dims, published in (((8, 8), "1.19"), ((4, 4, 4), "1.03")):
        size = 64
        network, count = Network.torus(dims, 1.0, 0.0), 64 * 6 * size
        swing, bucket = (
            price(algorithm, size, count, 1, network, dims=dims).seconds / count
            for algorithm in (multiport_swing, multiport_bucket)
        )
        name = " x ".join(map(str, dims))
        lines.append(f"| {name} | {swing:.3f} | {bucket:.3f} | {swing / bucket:.3f} | {published} |")
    return "\n".join(lines)


def speed_table() -> str:
    """Swing in all directions of a torus, against buckets in all directions and what uses one at a time."""
    lines = [
        "| torus | bytes | Swing | bucket | rabenseifner | doubling | fastest other / Swing |",
        "|---|" + "---:|" * 6,
    ]
    for dims in ((8, 8), (4, 4, 4)):
        size, network = math.prod(dims), Network.torus(dims)
        for nbytes in SWING_SIZES:
            count = nbytes // 4
            swing, *others = (
                price(algorithm, size, count, 4, network, **options).seconds
                for algorithm, options in (
                    (multiport_swing, {"dims": dims}),
                    (multiport_bucket, {"dims": dims}),
                    (ALGORITHMS["allreduce"]["rabenseifner"], {}),
                    (ALGORITHMS["allreduce"]["doubling"], {}),
                )
            )
            times = " | ".join(in_words(seconds).strip() for seconds in (swing, *others))
            lines.append(f"| {' x '.join(map(str, dims))} | {nbytes:,} | {times} | {min(others) / swing:.2f} |")
    return "\n".join(lines)


def leaving(name: str, operation: str, size: int, group: int) -> float:
    """Bytes that leave their group of neighbouring ranks, mean over all roots, over the bytes of the vector."""
    rounds, total = ALGORITHMS[operation][name].rounds, 0
    for root, rank in product(range(size), repeat=2):
        sends = (step for steps in rounds(rank, size, size, root=root) for step in steps if type(step) is Send)
        total += sum(send.hi - send.lo for send in sends if send.peer // group != rank // group)
    return total / size / size


def bine_table() -> str:
    """What Bine and binomial trees of 64 ranks send between groups of neighbours."""
    lines = ["| operation | ranks of a group | binomial | Bine | Bine / binomial | published |", "|---|" + "---:|" * 5]
    for operation, group in product(("broadcast", "reduce", "gather", "scatter"), (9, 16)):
        binomial, bine = (leaving(name, operation, 64, group) for name in ("binomial", "bine"))
        lines.append(f"| {operation} | {group} | {binomial:.2f} | {bine:.2f} | {bine / binomial:.2f} | down to 0.67 |")
    return "\n".join(lines)


# Cases of bench_trunk.py in words.
TRUNK_CASES = {
    "synthesized": "found by search",
    "auto": "the default",
    "pipedream in order": "PipeDream, four stages in a row",
    "pipedream dealt out": "PipeDream, stages placed so that every message crosses the trunk",
    "1f1b in order": "1F1B, two stages, two replicas, pipelines in their racks",
    "1f1b dealt out": "1F1B, two stages, two replicas, pipelines over the trunk",
}


def trunk_table() -> str:
    """What schedules over a trunk took in the lab, and their prices; how much faster those found by search are."""
    rows = measured("trunk")
    lines = []
    for case, row in rows.items():
        name = case.removeprefix("allreduce ")
        for old, new in TRUNK_CASES.items():
            name = name.replace(old, new)
        times = [in_words(1e-6 * float(f"{row[side]:.3g}")).strip() for side in ("ours", "peer")]
        lines.append([name, *times, f"{row['peer'] / row['ours'] - 1:+.0%}"])
    sentences = [near_prices(rows)]
    for length, measured_gain, priced_gain in gains(rows):
        sentences.append(
            f"At {length} the schedule that was found is {measured_gain:.2f} times as fast as the default, and "
            f"{priced_gain:.2f} was predicted."
        )
    return markdown(["schedule", "measured", "price", ""], lines) + "\n\n" + "\n".join(sentences)


def near_prices(rows: dict[str, dict]) -> str:
    """How many rows are within 15% of their prices, in a sentence that names the others."""
    far = far_from_prices(rows)
    others = f", all but {', '.join(far)}" if far else ""
    return f"{len(rows) - len(far)} of {len(rows)} prices are within 15% of what was measured{others}."


def far_from_prices(rows: dict[str, dict]) -> list[str]:
    """The cases whose price is not within 15% of what was measured."""
    return [case for case, row in rows.items() if abs(row["peer"] / row["ours"] - 1) > 0.15]


def gains(rows: dict[str, dict]) -> list[tuple[str, float, float]]:
    """Of each length how much faster the schedule found by search is than the default: (length, measured, priced)."""
    found = []
    for case, row in rows.items():
        name, _, length = case.partition(", ")
        if name == "allreduce synthesized":
            default = next(rows[c] for c in rows if c.startswith("allreduce auto") and c.endswith(f", {length}"))
            found.append((length, *(default[side] / row[side] for side in ("ours", "peer"))))
    return found


# Refinements of the model by what bench_network.py calls prices without them, and what each says.
REFINEMENTS = {
    "model with all refinements": "",
    "model without credit": "a rested port sends at once what its token bucket holds; a stream goes at the rate",
    "model with each message at the rate of a stream": "the same; this is the other way to leave it out",
    "model without both directions": "a port that sends and receives at once is slower",
    "model with partners as a ring": "an exchange differs from a ring",
    "model of a straight line": "protocols change with the length",
    "model without both directions inside a node": "the same inside, where it was measured",
}


def refinements_table() -> str:
    """How near prices are in the lab with all refinements of the model and without one of them."""
    rows = measured("refinements")
    places = [
        place for case in rows for place, _, name in [case.partition(", ")] if name == "model with all refinements"
    ]
    lines = []
    for name, meaning in REFINEMENTS.items():
        found = [rows[f"{place}, {name}"] for place in places]
        cells = [f"{row['note'].split()[0]}, {row['ours']:.2f}" for row in found]
        lines.append([name, meaning, *cells])
    return markdown(["prices", "the refinement", *places], lines, words=2)


def simgrid_table() -> str:
    """The largest deviation of prices from SimGrid's times, by network and number of ranks."""
    found = json.loads((MEASURED / "simgrid.json").read_text())
    networks = list(dict.fromkeys(row["network"] for row in found))
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in found):
        lengths = sorted({row["bytes"] >> 10 for row in found if row["ranks"] == ranks})
        cells = [", ".join(map(str, lengths))]
        for network in networks:
            rows = [row for row in found if (row["network"], row["ranks"]) == (network, ranks)]
            cells.append(f"{max(row['deviation'] for row in rows):.0e}" if rows else "")
        lines.append([f"{ranks}", *cells])
    cases, off = sum(row["cases"] for row in found), [case for row in found for case in row["off"]]
    listed = "".join(f"\n- {case}: {deviation:.1e}, and {itself:.1e}" for case, deviation, itself in off)
    return (
        markdown(["ranks", "KiB", *networks], lines, words=0)
        + f"\n\n{cases - len(off):,} of {cases:,} prices agree to 1e-6. Of the others, the deviation, and how far the "
        f"price itself changes where all bandwidths\ndiffer by 1e-10 and less:\n{listed}"
    )


TABLES = {
    "torus": torus_table,
    "ring": ring_table,
    "tori": tori_table,
    "speed": speed_table,
    "bine": bine_table,
    "simgrid": simgrid_table,
    "trunk": trunk_table,
    "refinements": refinements_table,
}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/systems/networks.md")
    print_tables(PAGE, TABLES, parser.parse_args(argv).write)


if __name__ == "__main__":
    main()
