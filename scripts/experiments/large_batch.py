"""Large batches: k times the batch, k times the learning rate, and a gradual warm-up (Goyal et al. 2017).

    python scripts/experiments/large_batch.py            # Fashion-MNIST, about 7 minutes on one core
    python scripts/experiments/large_batch.py --quick    # the embedded digits, seconds

The claim: with linear scaling and warm-up a large batch ends within 0.3 points of the small batch's error, and clearly
worse without warm-up. (Published, ImageNet, batch 8192 against 256: 23.60% small, 23.74 gradual warm-up, 25.88 constant
warm-up, 24.84 none.) Beside it LARS (You et al. 2017) and LAMB (You et al. 2020), whose rates are set by norms.

Measured here, Fashion-MNIST, batch 768 against 64, three seeds (docs/large_batch.png): 10.43% small; 10.64 gradual
warm-up (+0.21), 11.94 constant warm-up (+1.51), 11.51 none (+1.08); LARS 10.53, LAMB 10.71, both with warm-up and the
rate that was best for seed 0 of four (LARS) and three (LAMB). At batch 1024 gradual warm-up was 0.33 worse than small,
in two seeds.

Nothing here chooses by the error of an epoch, so nothing is held out for validation: all samples train, and the curves
show the test error. The rates of LARS and LAMB were chosen by it, which flatters these two, if anything.

How many ranks share the batch plays no part: each strategy computes what one process computes, as done here. A rerun
with the same --out keeps what is there, so the experiment may be done in pieces; large_batch.json and .png are
written after every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from statistics import mean, stdev

import numpy as np

import nn
from nn.training.checkpoints import write_atomically
from parallel.command import factory
from parallel.command.arguments import Parser, new_directory, whole
from parallel.command.options import Options

SMALL = "small batch"
FULL = Options(
    model="mlp:784,128,64,10", data="fashion-mnist", normalise=True, batch=768, epochs=30, lr=0.015, momentum=0.9,
    weight_decay=1e-4, schedule="multistep:at=10/20/27", linear_scaling=64, validation=0.0,
)  # fmt: skip
QUICK = dataclasses.replace(
    FULL, model="mlp:64,128,64,10", data="digits", batch=256, epochs=15, schedule="multistep:at=8/12", linear_scaling=16
)


def cases(base: Options) -> dict[str, Options]:
    """What is compared: the options of every curve."""
    schedule, small = base.schedule, base.linear_scaling
    warm = f"{schedule},warmup=5"
    adaptive = {"linear_scaling": None, "schedule": warm}
    return {
        SMALL: dataclasses.replace(base, batch=small, linear_scaling=None),
        "gradual warm-up": base,
        "constant warm-up": dataclasses.replace(base, schedule=f"{schedule},warmup=0"),
        "no warm-up": dataclasses.replace(base, schedule=f"{schedule},warmup=0"),
        "rate not scaled": dataclasses.replace(base, linear_scaling=None),
        "LARS": dataclasses.replace(base, **adaptive, optimizer="lars", lr=7.0),
        "LAMB": dataclasses.replace(base, **adaptive, optimizer="lamb", lr=0.01, momentum=0.0, weight_decay=0.01),
    }


def run(name: str, options: Options, data: nn.data.Data, seed: int) -> dict:
    """Train once; the test error in percent after every epoch."""
    options = dataclasses.replace(options, seed=seed)
    network = factory.network(options, data)
    trainer = nn.Trainer(network, factory.loss(options, data), factory.optimizer(options), seed)
    train, _, test = factory.loaders(options, data, trainer.shard)
    schedule, hooks = factory.schedule(options, train)
    if name == "constant warm-up":
        schedule = constant_at_first(schedule, options.lr, 5 * len(train))
    errors, started = [], time.perf_counter()
    try:
        # `fit` knows what it looks at every epoch as validation data, and so do its records.
        history = nn.fit(trainer, train, options.epochs, hooks, test, schedule).history
        errors = [100 * (1 - record["validation_accuracy"]) for record in history]
    except nn.NonFiniteLoss:  # it may: what then counts is chance
        errors = [100 * (1 - 1 / data.classes)] * options.epochs
    return {
        "case": name,
        "seed": seed,
        "batch": options.batch,
        "errors": errors,
        "seconds": time.perf_counter() - started,
    }


def constant_at_first(schedule, lr: float, steps: int):
    """The warm-up that the paper advises against: the small batch's rate for five epochs, then all at once."""
    return lambda step: lr if step < steps else schedule(step)


def final(runs: list[dict], name: str) -> list[float]:
    """The error after the last epoch of every seed; the median of the last three epochs, which varies less."""
    return [float(np.median(r["errors"][-3:])) for r in runs if r["case"] == name]


def table(runs: list[dict]) -> str:
    """Error of every case over its seeds, and how far it is from the small batch's."""
    found = {name: errors for name in dict.fromkeys(r["case"] for r in runs) if (errors := final(runs, name))}
    small = mean(found[SMALL]) if SMALL in found else float("nan")
    batch = {r["case"]: r["batch"] for r in runs}
    lines = ["                     batch   error, %       against the small batch   seeds"]
    for name, errors in found.items():
        spread = f" +- {stdev(errors):.2f}" if len(errors) > 1 else ""
        apart = mean(errors) - small
        lines.append(f"{name:18}  {batch[name]:6}   {mean(errors):5.2f}{spread:9}  {apart:+20.2f}   {len(errors):8}")
    return "\n".join(lines)


def draw(runs: list[dict], title: str):
    """Error over epochs, the mean over seeds, and the range that they span."""
    from matplotlib.figure import Figure

    from parallel.planning.pictures import COLOURS, MARKERS

    axes = Figure(figsize=(7.5, 4.2), layout="constrained").subplots()
    for i, name in enumerate(dict.fromkeys(r["case"] for r in runs)):
        errors = np.array([r["errors"] for r in runs if r["case"] == name])
        epochs = np.arange(1, errors.shape[1] + 1)
        style = (
            {"color": "black", "lw": 2}
            if name == SMALL
            else {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "ms": 3, "markevery": 3}
        )
        last = mean(final(runs, name))
        axes.plot(epochs, errors.mean(axis=0), label=f"{name}: {last:.2f}%", **style)
        axes.fill_between(epochs, errors.min(axis=0), errors.max(axis=0), color=style["color"], alpha=0.15, lw=0)
    best = min(min(r["errors"]) for r in runs)
    axes.set(xlabel="epoch", ylabel="test error (%)", title=title, ylim=(0.95 * best, 2.5 * best))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return axes.figure


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_directory, default="runs/large-batch", help="directory of results")
    parser.add_argument("--seeds", type=whole(), default=3, help="runs of each case (default: 3)")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument(
        "--quick", action="store_true", help="the embedded digits, 15 epochs: shows the script, not the claim"
    )
    parser.add_argument("--data-dir", help="where Fashion-MNIST lies (default: $RINGPROP_DATA, else ./data)")
    given = parser.parse_args(argv)
    given.out = Path(given.out)
    np.seterr(all="ignore")  # a loss that is not finite ends a run
    base = dataclasses.replace(QUICK if given.quick else FULL, data_dir=given.data_dir)
    compared = {name: options for name, options in cases(base).items() if (given.only or "") in name}
    if not compared:
        parser.error(f"--only {given.only}: no such case; there are {', '.join(cases(base))}")
    try:
        data = factory.datasets(base)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "large_batch.json"
    settings = {name: vars(options) | {"data_dir": None} for name, options in cases(base).items()}
    before = json.loads(file.read_text()) if file.exists() else {"options": settings, "runs": []}
    if before["options"] != settings:
        parser.error(f"{file} has runs with other options: give another --out")
    runs = before["runs"]
    done = {(r["case"], r["seed"]) for r in runs}
    for seed in range(given.seeds):
        for name, options in compared.items():
            if (name, seed) in done:
                continue
            runs.append(run(name, options, data, seed))
            last = runs[-1]
            print(f"{name}, seed {seed}: {last['errors'][-1]:.2f}% after {last['seconds']:.0f} s", flush=True)
            content = {"data": data.name, "options": settings, "runs": runs}
            write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())
            title = f"{data.name}, {base.model}: batch {base.batch} against {base.linear_scaling}"
            draw(runs, title).savefig(given.out / "large_batch.png", dpi=120)
    print(table(runs))
    print(f"{file} and large_batch.png beside it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
