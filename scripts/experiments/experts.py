"""Experts against dense networks, of the same work and of the same parameters: Tiny Shakespeare, three seeds.

    python scripts/experiments/experts.py                    # some 20 minutes on one core
    python scripts/experiments/experts.py --runs 1           # one run, which the next call continues behind
    python scripts/experiments/experts.py --limit 640 --seeds 1 --out runs/short
    python scripts/experiments/experts.py --write            # nothing is run: tables of docs/measured into the page

The claim (Shazeer et al. 2017; Fedus et al. 2022): with the same multiply-accumulates for each position, more experts
reach a lower loss in as many steps, as they have more parameters. All else is alike: data, order, steps, rate. With
top=1 a position passes one expert as large as the dense network's two layers; with top=2 two that are half as wide
(DeepSeek-AI 2024). The router's products come on top. A dense network with as many parameters as eight experts have
is the bound: it computes all of them for every position.

Every run sees each window of the training text once an epoch, in the order of its seed, and is measured once, in the
end, on the whole of the test text. Nothing is chosen by that loss. Runs that experts.json has with the same settings
are not made again. The page docs/systems/experts.md has those of docs/measured/experts.json, and what an alltoallv of
positions took, from sequences.json and crossover.json there (`bench.py SUITE --json`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from page_tables import MEASURED, markdown, measured, print_tables  # noqa: E402

import nn  # noqa: E402
from nn.training.checkpoints import write_atomically  # noqa: E402
from parallel.command.arguments import Parser, new_directory, whole  # noqa: E402

PAGE = ROOT / "docs" / "systems" / "experts.md"
LENGTH, BATCH, RATE = 64, 16, 0.003
BASE = "transformer:64,4,2"
CASES = {
    "dense, the same work": BASE,
    "8 experts, top 1": f"{BASE},experts=8,top=1",
    "8 experts, top 2, half as wide": f"{BASE},experts=8,top=2,hidden=128",
    "dense, as many parameters": f"{BASE},hidden=2048",
}


def run(model: str, data: nn.data.Data, seed: int, epochs: int) -> dict:
    """Train once: the test loss, the load of the busiest expert in the last steps, parameters, MACs of a position."""
    network = nn.models.build(model, data.in_shape, data.classes)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(RATE), seed)
    train, test = nn.Loader(data.train, BATCH, seed), nn.Loader(data.test, 500, shuffle=False)
    schedule, _ = nn.schedules.parse("cosine", RATE, epochs, len(train), BATCH)
    started = time.perf_counter()
    history = nn.fit(trainer, train, epochs, [nn.callbacks.ExpertLoad()], schedule=schedule).history
    seconds = time.perf_counter() - started
    macs = sum(layer.macs(shape) for _, layer, shape, _ in network.layers()) / LENGTH
    busiest = [max(layer["load"][-1]) for layer in history[-1].get("experts", {}).values()]
    found = {"loss": nn.evaluate(trainer, test)["loss"], "train": history[-1]["loss"], "seconds": seconds}
    return found | {"busiest": max(busiest, default=0.0), "parameters": network.layout.count, "macs": macs}


def table(record: dict) -> str:
    """How long all networks trained, and a row for each; differences are of the same seed."""
    found = {name: list(by_seed.values()) for name, by_seed in record["runs"].items() if by_seed}
    dense, rows = next(iter(found.values())), []
    for name, runs in found.items():
        losses = [each["loss"] for each in runs]
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        less = ", ".join(f"{other['loss'] - each['loss']:+.4f}" for other, each in zip(dense, runs, strict=False))
        busiest = f"{max(each['busiest'] for each in runs):.1f} times its share" if runs[0]["busiest"] else ""
        numbers = f"{runs[0]['parameters']:,}", f"{runs[0]['macs']:,.0f}", f"{mean(losses):.4f}{spread}"
        rows.append([name, *numbers, "" if runs is dense else less, busiest])
    heads = ["network", "parameters", "MACs a position", "test loss", "less than dense, by seed", "busiest expert"]
    batch, epochs = record["settings"]["batch"], record["settings"]["epochs"]
    steps = epochs * -(-record["settings"]["windows"] // batch)
    return f"{steps} steps of {batch} windows of {LENGTH} characters:\n\n{markdown(heads, rows)}"


def alltoallv_table() -> str:
    """One of the four alltoallv of a layer beside its estimate: two ranks of one node, then hosts of the lab."""
    cells: dict[str, list[str]] = {}
    counts = {}
    for suite in ("sequences", "crossover"):
        for case, row in measured(suite).items():
            if match := re.fullmatch(r"(?:(.*bit/s), )?experts' alltoallv, .*positions a rank", case):
                place, scale = match[1] or "one node, 2 ranks", 1e-3 if row["unit"] == "us" else 1.0
                cells.setdefault(place, []).append(f"{scale * row['ours']:.3g} ms ({scale * row['peer']:.3g})")
                counts[place] = row["note"].partition("counts before it ")[2]
    heads = ["hosts, network", "256 positions a rank", "4,096 positions a rank", "the counts before it"]
    return markdown(heads, [[place, *cells[place], counts[place]] for place in cells])


TABLES = {"alltoallv": alltoallv_table, "runs": lambda: table(json.loads((MEASURED / "experts.json").read_text()))}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=whole(1), default=3)
    parser.add_argument("--epochs", type=whole(1), default=1)
    parser.add_argument("--limit", type=whole(1), help="use only so many windows of each split")
    parser.add_argument("--runs", type=whole(1), help="make at most so many runs that experts.json lacks")
    parser.add_argument("--data-dir", default=os.environ.get("RINGPROP_DATA", "data"), help="where data sets are")
    parser.add_argument("--out", type=new_directory, default="runs/experts", help="directory for experts.json")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/systems/experts.md; run nothing")
    options = parser.parse_args()
    if options.write:
        return print_tables(PAGE, TABLES, write=True)
    data = nn.data.load("tinyshakespeare", options.data_dir, length=LENGTH, limit=options.limit)
    settings = {"epochs": options.epochs, "windows": len(data.train), "batch": BATCH, "rate": RATE}
    file = Path(options.out) / "experts.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    runs = record["runs"] if record.get("settings") == settings else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    missing = [
        (seed, name) for seed in range(options.seeds) for name in CASES if str(seed) not in runs.setdefault(name, {})
    ]
    for seed, name in missing[: options.runs]:
        runs[name][str(seed)] = run(CASES[name], data, seed, options.epochs)
        print(f"seed {seed}, {name}: {runs[name][str(seed)]}", flush=True)
        write_atomically(file, (json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n").encode())
    print(f"\n{table({'settings': settings, 'runs': runs})}")


if __name__ == "__main__":
    main()
