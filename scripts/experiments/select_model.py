"""Choose options by validation data, in a grid or at random, and look at the test data once.

    python scripts/experiments/select_model.py lr=0.01,0.03,0.1 momentum=0,0.9 --epochs 10
    python scripts/experiments/select_model.py lr=0.001..1 batch=16,32,64 --random 12 --ranks 2
    python scripts/experiments/select_model.py "model=mlp:64,30,10;mlp:64,100,10" lr=0.1,0.3

NAME=V1,V2,... is an option of scripts/train.py and the values to try (with semicolons where a value has commas); with
--random N also NAME=LOW..HIGH, drawn evenly on a logarithmic scale. All other options are those of scripts/train.py,
the same in every trial. A trial trains on one process; trials are dealt to the ranks (--ranks, or mpirun).

The best epoch of a trial counts, and the best trial is chosen: by accuracy on the validation data (equal ones by loss),
by loss where there are no classes. Only that one's parameters are then tried on the test data: the best of many
validation figures is too good, as whatever has chosen. Writes selection.json, selection.png and the chosen parameters,
best.npz. Source of the random search: Bergstra and Bengio 2012.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - what follows is found beside this file, installed or not

import nn  # noqa: E402
from nn.tables import text_table  # noqa: E402
from nn.training.checkpoints import write_atomically  # noqa: E402
from parallel.command import factory  # noqa: E402
from parallel.command.arguments import Parser, new_directory, whole  # noqa: E402
from parallel.command.options import FIELDS, TYPES, Options, names_of  # noqa: E402
from parallel.command.parsing import nearest, parse  # noqa: E402
from parallel.launch import launcher  # noqa: E402
from parallel.settings import OptionError, changed, flag  # noqa: E402

NAMES = [name for topic in ("data", "network", "learning") for name in names_of(topic)]
ALIKE = ("data", "data_dir", "limit", "length", "mask", "validation", "seed")  # they say what all trials are judged by
VALUES = re.compile(r"([a-z][a-z_-]*)=(.*)")


@dataclasses.dataclass
class Search:
    """What to try: each trial by the values that it has of its own, and as options."""

    values: list[dict[str, str]]
    options: list[Options]
    base: list[str]  # options that all have, as on the command line
    ranks: int
    out: Path


def asked(argv: list[str]) -> Search:
    """What the command line asks for; raises OptionError where that makes no sense."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.usage = "%(prog)s NAME=VALUES ... [--random N] [--ranks N] [--out DIR] [options of scripts/train.py]"
    parser.add_argument("--random", type=whole(), metavar="N", help="draw so many trials, by --seed (default: all)")
    parser.add_argument("--ranks", type=whole(), default=1, help="processes to start here (default: 1)")
    parser.add_argument(
        "--out", type=new_directory, default="runs/selection", help="directory (default: runs/selection)"
    )
    chosen, base = parser.parse_known_args([word for word in argv if not VALUES.fullmatch(word)])
    common = parse(base)
    for name in changed(common, FIELDS.keys() - NAMES):
        raise OptionError(f"{flag(name)} has no effect here, where each trial trains on one process: leave it out")
    if not common.validation:
        raise OptionError("--validation 0: without validation data nothing can be chosen; leave it out")
    choices = dict(filter(None, (values_of(word) for word in argv)))
    if not choices:
        raise OptionError("nothing to choose from: give an option and its values, such as lr=0.01,0.1")
    trials = grid(choices) if chosen.random is None else drawn(choices, chosen.random, common.seed)
    return Search(trials, [parse(base + flags(trial)) for trial in trials], base, chosen.ranks, Path(chosen.out))


def values_of(word: str) -> tuple[str, list[str]] | None:
    """(name, values) of a word such as lr=0.1,0.3; None of any other word."""
    found = VALUES.fullmatch(word)
    if not found:
        return None
    name, text = found[1].replace("-", "_"), found[2]
    if name not in NAMES:
        why = " says how a run is done, not what is learned" if name in FIELDS else ""
        raise OptionError(
            f"{word}: " + (f"{flag(name)}{why}" if why else f"no option {nearest(name, map(flag, NAMES))}")
        )
    if name in ALIKE:
        raise OptionError(f"{word}: all trials must be judged by the same samples: give {flag(name)} once, for all")
    values = [value for value in re.split(";" if ";" in text else ",", text) if value]
    if not values or len(set(values)) < len(values):
        raise OptionError(f"{word}: expected values that differ, such as {name}=V1,V2")
    if TYPES[name] is bool and not {"true", "false"}.issuperset(values):
        raise OptionError(f"{word}: {name} is true or false")
    return name, values


def flags(trial: dict[str, str]) -> list[str]:
    """As on the command line of scripts/train.py."""
    return [
        flag(name) if TYPES[name] is bool else f"{flag(name)}={value}"
        for name, value in trial.items()
        if value != "false"
    ]


def grid(choices: dict[str, list[str]]) -> list[dict[str, str]]:
    """Each value with each."""
    if spans := [f"{name}={value}" for name, values in choices.items() for value in values if ".." in value]:
        raise OptionError(f"{spans[0]}: a range needs --random N")
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def drawn(choices: dict[str, list[str]], count: int, seed: int) -> list[dict[str, str]]:
    """So many of them at random: some of the grid, or with numbers from ranges."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, *b"selection"]))
    spans = {name: span(name, values) for name, values in choices.items() if any(".." in value for value in values)}
    if not spans:
        everything = grid(choices)
        return [everything[i] for i in sorted(rng.permutation(len(everything))[:count])]

    def draw(name: str) -> str:
        if name not in spans:
            return choices[name][rng.integers(len(choices[name]))]
        number = math.exp(rng.uniform(*map(math.log, spans[name])))
        return str(round(number)) if TYPES[name] is int else f"{number:.3g}"

    return [{name: draw(name) for name in choices} for _ in range(count)]


def span(name: str, values: list[str]) -> tuple[float, float]:
    """The two ends of a range."""
    try:
        (only,) = values
        low, high = map(float, only.split(".."))
        fits = 0 < low < high < math.inf and TYPES[name] in (int, float)
    except ValueError:
        fits = False
    if not fits:
        raise OptionError(f"{name}={','.join(values)}: expected LOW..HIGH, two numbers with 0 < LOW < HIGH")
    return low, high


# --------------------------------------------------------------------------------------------------------- a trial


@dataclasses.dataclass
class Candidate:
    """What one trial trains with."""

    data: nn.data.Data
    trainer: nn.Trainer
    loaders: factory.Loaders


def prepared(options: Options) -> Candidate:
    """Refuses what cannot be."""
    data, network, loss, optimizer = factory.prepare(options, one_process=True)
    trainer = nn.Trainer(network, loss, optimizer, options.seed)
    return Candidate(data, trainer, factory.loaders(options, data, trainer.shard))


def train(options: Options) -> tuple[dict, Candidate]:
    """Scores of every epoch and of the best one, whose parameters the trainer then has. The test data are not read."""
    trial, started = prepared(options), time.perf_counter()
    metric = factory.metric(trial.data)
    schedule, hooks = factory.schedule(options, trial.loaders.train)
    best = nn.EarlyStopping(options.patience or max(1, options.epochs), metric)
    row = {"metric": metric, "epoch": None, "score": None, "validation_loss": None, "curve": []}
    try:
        history = nn.fit(
            trial.trainer, trial.loaders.train, options.epochs, [*hooks, best], trial.loaders.validation, schedule,
            accumulate=options.accumulate,
        ).history  # fmt: skip
        record = history[best.epoch - 1]
        row |= {"epoch": record["epoch"], "score": record[metric], "validation_loss": record["validation_loss"]}
        row["curve"] = [record[metric] for record in history]
    except nn.NonFiniteLoss as error:
        row["failed"] = str(error)
    return row | {"seconds": time.perf_counter() - started}, trial


def order(row: dict) -> tuple:
    """The smaller, the better: by score, then by loss; those that failed last."""
    if row["score"] is None or not math.isfinite(row["score"]):
        return (1,)
    return 0, row["score"] if row["metric"].endswith("loss") else -row["score"], row["validation_loss"], row["trial"]


def share(search: Search, rank: int, size: int) -> tuple[list[dict], Candidate | None]:
    """This rank's trials, and what the best of them has trained."""
    np.seterr(all="ignore")  # a loss that is not finite is an error of its own
    rows, kept = [], None
    for i in range(rank, len(search.options), size):
        row, trial = train(search.options[i])
        rows.append({"trial": i + 1, "values": search.values[i], **row})
        if min(rows, key=order) is rows[-1]:
            kept = trial
        print(f"trial {i + 1} of {len(search.options)}: {named(rows[-1])}: {told(rows[-1])}", flush=True)
    return rows, kept


def named(row: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in row["values"].items())


def told(row: dict) -> str:
    """The score, in words."""
    if row["score"] is None:
        return "failed: the loss is not finite"
    if row["metric"].endswith("loss"):
        return f"validation loss {row['score']:.4g} after epoch {row['epoch']}"
    return f"validation accuracy {row['score']:.2%} after epoch {row['epoch']}"


# ------------------------------------------------------------------------------------------------------ the choice


def select(search: Search) -> int:
    """Try all, on this process or on the ranks that it is one of, and report (rank 0)."""
    world, rank, size = None, 0, 1
    if launcher.inside():
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank, size = world.rank, world.size
    mine, kept = share(search, rank, size)
    everyone = world.allgather(mine) if world else [mine]
    rows = sorted(itertools.chain(*everyone), key=lambda row: row["trial"])
    best = min(rows, key=order)
    if best["score"] is None:
        raise ValueError("every trial failed: the loss was never finite; try lower learning rates")
    search.out.mkdir(parents=True, exist_ok=True)
    test = None
    if best in mine:  # the one look at the test data
        test = nn.evaluate(kept.trainer, kept.loaders.test)
        nn.Checkpoints(search.out).save(kept.trainer.state_dict(), {"epoch": best["epoch"], **best["values"]}, "best")
    if world:
        test = next(filter(None, world.allgather(test)))
    if rank == 0:
        report(search, rows, best, test)
    return 0


def report(search: Search, rows: list[dict], best: dict, test: dict[str, float]) -> None:
    """Table and picture of all trials; of the chosen one, the figure of the test data."""
    columns = list(search.values[0])
    cells = [["trial", *columns, best["metric"].replace("_", " "), "epoch", "seconds", ""]]
    for row in sorted(rows, key=order):
        score = "failed" if row["score"] is None else f"{row['score']:.4g}"
        mark = "<- chosen" if row is best else ""
        cells.append(
            [str(row["trial"]), *(row["values"][name] for name in columns), score, str(row["epoch"] or "")]
            + [f"{row['seconds']:.1f}", mark]
        )
    print("\n" + text_table(cells))
    words = [*search.base, *flags(best["values"])]
    content = {"trials": rows, "chosen": best["trial"], "test": test, "options": words}
    write_atomically(search.out / "selection.json", (json.dumps(content, indent=1) + "\n").encode())
    draw(rows, best).savefig(search.out / "selection.png", dpi=120)
    figure = f"accuracy {test['accuracy']:.2%}" if "accuracy" in test else f"loss {test['loss']:.4g}"
    print(f"\nchosen: trial {best['trial']}, {named(best)}, {told(best)}")
    print(f"test {figure}, looked at once, with these parameters")
    print(f"everything is in {search.out}/: selection.json, selection.png, best.npz")


def draw(rows: list[dict], best: dict):
    """The best score of every trial, sorted, and the scores of all epochs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    done = [row for row in sorted(rows, key=order, reverse=True) if row["score"] is not None]
    percent = 1 if best["metric"].endswith("loss") else 100
    axis = "validation loss" if percent == 1 else "validation accuracy (%)"
    figure = Figure(figsize=(10, max(3.2, 0.22 * len(done) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, row in enumerate(done):
        style = {"color": "black", "zorder": 3} if row is best else {"color": "C0", "alpha": 0.5}
        left.plot(percent * row["score"], place, "o", **style)
        right.plot(range(1, len(row["curve"]) + 1), [percent * score for score in row["curve"]], **style)
    left.set_yticks(range(len(done)), [named(row) for row in done], fontsize=8)
    left.set(xlabel=axis, title="best epoch of every trial (black: chosen)")
    right.set(xlabel="epoch", ylabel=axis)
    right.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        search = asked(argv)
        if not launcher.inside():
            for i, options in enumerate(search.options):
                try:
                    prepared(options)
                except (ValueError, TypeError, OSError) as error:
                    raise OptionError(f"{' '.join(flags(search.values[i]))}: {error}") from error
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if search.ranks > 1 and not launcher.inside():
        return launcher.run([__file__, *argv], search.ranks)
    try:
        return select(search)
    except (ValueError, OSError) as error:
        if launcher.inside():
            raise  # ends all ranks
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
