"""The tables of docs/systems/networks.md: which allreduce on a torus, and what papers claim, recomputed.

python scripts/experiments/networks.py              print them
python scripts/experiments/networks.py --write      put them into the page, between its marks

All is priced by simulation, on one core in half a minute; nothing is measured.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

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


TABLES = {"torus": torus_table, "ring": ring_table, "tori": tori_table, "speed": speed_table, "bine": bine_table}


def put(page: str, name: str, table: str) -> str:
    """The page with a table between its marks; ValueError where there are none."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise ValueError(f"the page has no <!-- {name} --> ... <!-- end -->")
    return marks.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/systems/networks.md")
    options = parser.parse_args(argv)
    page = PAGE.read_text()
    for name, table in TABLES.items():
        text = table()
        print(f"{text}\n")
        page = put(page, name, text)
    if options.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
