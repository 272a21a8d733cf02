"""Experts against the dense network of the same work for each position: Tiny Shakespeare, three seeds.

    python scripts/experiments/experts.py                    # some minutes
    python scripts/experiments/experts.py --limit 640 --seeds 1

The claim (Shazeer et al. 2017; Fedus et al. 2022): with the same multiply-accumulates for each position, more experts
reach a lower loss in as many steps, as they have more parameters. All else is alike: data, order, steps, rate. With
top=1 a position passes one expert as large as the dense network's two layers; the router's products come on top.

Every run trains on batches of random windows, and is measured once, in the end, on the whole of the test text. Nothing
is chosen by that loss.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean, stdev

import nn
from nn.training.checkpoints import write_atomically

LENGTH, BATCH, RATE = 64, 32, 0.003
BASE = "transformer:64,4,2"
CASES = {
    "dense": BASE,
    "8 experts, top 1": f"{BASE},experts=8,top=1",
    "8 experts, top 1, sigmoid gate with a bias": f"{BASE},experts=8,top=1,gate=sigmoid,auxiliary=0",
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


def table(found: dict[str, list[dict]]) -> str:
    """A row for each network, in Markdown."""
    lines = [
        "| network | parameters | MACs a position | test loss, mean | seeds | busiest expert |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        losses = [each["loss"] for each in runs]
        spread = f" +- {stdev(losses):.4f}" if len(losses) > 1 else ""
        listed = ", ".join(f"{loss:.4f}" for loss in losses)
        busiest = f"{max(each['busiest'] for each in runs):.1f} of 8" if runs[0]["busiest"] else ""
        cells = f"{runs[0]['parameters']:,}", f"{runs[0]['macs']:,.0f}", f"{mean(losses):.4f}{spread}", listed, busiest
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, help="use only so many windows of each split")
    parser.add_argument("--data-dir", default=os.environ.get("RINGPROP_DATA", "data"), help="where data sets are")
    parser.add_argument("--out", type=Path, default=Path("runs/experts"), help="directory for experts.json")
    options = parser.parse_args()
    data = nn.data.load("tinyshakespeare", options.data_dir, length=LENGTH, limit=options.limit)
    found: dict[str, list[dict]] = {name: [] for name in CASES}
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for name, model in CASES.items():
            found[name].append(run(model, data, seed, options.epochs))
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
            write_atomically(options.out / "experts.json", (json.dumps(found, indent=1) + "\n").encode())
    steps = options.epochs * -(-len(data.train) // BATCH)
    print(f"\n{steps} steps of {BATCH} windows of {LENGTH} characters:\n\n{table(found)}")


if __name__ == "__main__":
    main()
