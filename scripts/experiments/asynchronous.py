"""Accuracy against time, with a worker that is slow and without: who waits, and what not waiting costs.

    python scripts/experiments/asynchronous.py            # the embedded digits, two workers and a server: four minutes
    python scripts/experiments/asynchronous.py --quick    # shows the script, not the claim

The claim, in shape (Dean et al. 2012, figure 4; Ho et al. 2013): with a slow worker synchronous training goes at its
pace, and asynchronous training keeps most of its own; late gradients cost accuracy, with Adagrad little.

Every worker trains on its own part of each batch, for the same time, and goes on to the next epoch by itself; where the
ways wait for each other is what they are. So that the figure does not depend on how busy this machine is, a step of a
worker takes at least --pause milliseconds, that of the slow one --slow times as many, and that of one process, which
has all samples of the batch, as many as all workers' together. Accuracy is that of worker 0's copy on the test data,
looked at after the run, by nothing chosen; Sandblaster's is that of its shards, after each line search over all
samples, of which a worker computes a chunk at a time.

Throughput is that of all workers; "kept" is what of it is left with the slow one: of two workers, one of which takes
three times as long, a third where all wait, two thirds where nobody does. Writes asynchronous.json and its picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from collectives.drawing.marks import LINE  # noqa: E402 - found beside this file
from collectives.drawing.timeline import PALETTE  # noqa: E402
from parallel.command.arguments import Parser, new_directory, number, whole  # noqa: E402
from parallel.command.options import Options  # noqa: E402
from parallel.launch import launcher  # noqa: E402
from parallel.settings import OptionError, name_of  # noqa: E402

ONE = "one process"
# name -> options, as of scripts/train.py: ways in which ranks wait for the slowest, and ways in which none does
WAITING = {
    "ddp": {"node_memory": "off"},
    "ddp, stale:1": {"consistency": "stale:1"},
    "ps, ssp:3": {"strategy": "ps", "consistency": "ssp:3"},
    "local SGD": {"strategy": "local-sgd:16"},
    "EASGD": {"strategy": "easgd:8"},
}
INDEPENDENT = {
    "ps, async": {"strategy": "ps", "consistency": "async"},
    "ps, compensated": {"strategy": "ps", "consistency": "async", "delay_compensation": True},
    "Downpour": {"strategy": "downpour:push=4,fetch=4"},
    "Downpour, Adagrad": {"strategy": "downpour:push=4,fetch=4,warm=10", "optimizer": "adagrad"},
    "Sandblaster": {"strategy": "sandblaster:chunk=16", "optimizer": "lbfgs", "server_place": "workers"},
}
WAYS = {ONE: {}, **WAITING, **INDEPENDENT}
RATE = {"sgd": 0.2, "adagrad": 0.03, "lbfgs": Options.lr}  # the last one searches for it
LOOKS = 40  # at the parameters, in a run
ERRORS, LEAST_ERROR = (50, 20, 10, 5, 3), 2.5  # percent, of the axis


def options(argv: list[str] | None) -> argparse.Namespace:
    """What was asked for; what cannot be is one message, before any rank is started."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp:64,64,10", help="as of scripts/train.py (default: mlp:64,64,10)")
    parser.add_argument("--data", default="digits", help="as of scripts/train.py (default: digits, embedded)")
    parser.add_argument("--workers", type=whole(2), default=2, help="(default: 2)")
    parser.add_argument("--batch", type=whole(2), default=32, help="samples of a step, over all workers (default: 32)")
    parser.add_argument("--seconds", type=number(1e-3, 1e6), default=10.0, help="of each run (default: 10)")
    parser.add_argument(
        "--pause", type=number(0, 1e6), default=40.0, help="milliseconds of a worker's step (default: 40)"
    )
    parser.add_argument("--slow", type=number(1, 1e6), default=3.0, help="times, of the slow worker (default: 3)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="three ways, a quarter of a second each")
    parser.add_argument(
        "--out", type=new_directory, default="runs/asynchronous", help="directory (default: runs/asynchronous)"
    )
    chosen = parser.parse_args(argv)
    if chosen.quick:
        chosen.seconds, chosen.pause, chosen.ways = 0.25, 2.0, [ONE, "ddp", "Downpour, Adagrad"]
    if chosen.batch < chosen.workers:
        parser.error(f"--batch must be at least the {chosen.workers} of --workers, given {chosen.batch}")
    if unknown := [way for way in chosen.ways if way not in WAYS]:
        parser.error(f"--ways: no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    if not launcher.inside():
        from parallel.command import factory

        try:
            factory.make(base(chosen))
        except (ValueError, TypeError, OSError, OptionError) as error:
            parser.error(str(error))
    return chosen


def base(chosen: argparse.Namespace, **more) -> Options:
    """The options of a run."""
    found = {"model": chosen.model, "data": chosen.data, "batch": chosen.batch, "validation": 0.0, **more}
    if found.get("optimizer") == "lbfgs":
        found["servers"] = chosen.workers  # shards, on all workers
    return Options(**found, lr=RATE[found.get("optimizer", "sgd")])


def main(argv: list[str] | None = None) -> int:
    chosen = options(argv)
    if launcher.inside():
        measure(chosen)
        return 0
    rows: list[dict] = []

    def take(line: str) -> None:
        if not line.startswith("{"):
            sys.stderr.write(line)
            return
        rows.append(json.loads(line))
        print(f"{rows[-1]['way']}{', one slow' * rows[-1]['slow']}: {rows[-1]['accuracy'][-1]:.1%}", flush=True)

    arguments = [__file__, *(sys.argv[1:] if argv is None else argv)]
    if status := launcher.run(arguments, chosen.workers + 1, timeout=900, stdout=take):
        print(launcher.ending(status), file=sys.stderr)
        return status
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "asynchronous.json").write_text(text(rows, vars(chosen)))
    draw(rows, vars(chosen)).savefig(out / "asynchronous.png", dpi=120)
    print(f"\n{table(rows)}\n{out}/asynchronous.json and {out}/asynchronous.png")
    return 0


# --------------------------------------------------------------------------------------------------- on the ranks


def measure(chosen: argparse.Namespace) -> None:
    """Train in every way, undisturbed and with a slow worker; rank 0 prints a line of JSON for each (collective)."""
    from mpi4py import MPI

    from parallel.command import factory

    world = MPI.COMM_WORLD
    parts = factory.make(base(chosen))
    for way, slow in itertools.product(chosen.ways, (False, True)):
        given = WAYS[way]
        served = name_of(given.get("strategy", "ddp")) in ("ps", "downpour", "sandblaster")
        size = 1 if way == ONE else chosen.workers + served
        ranks = world.Split(world.rank < size)
        if world.rank < size and not (way == ONE and slow):
            row = train(chosen, base(chosen, **given), parts, ranks, slow)
            if world.rank == 0:
                print(json.dumps({"way": way, "slow": slow, **row}), flush=True)
        world.Barrier()
        ranks.Free()


def train(chosen: argparse.Namespace, asked: Options, parts, ranks, slow: bool) -> dict:
    """One run: seconds and accuracies, throughput, mean staleness (collective)."""
    import nn
    from collectives import Communicator
    from parallel.command import factory
    from parallel.strategies import build_trainer

    data, one = parts.data, ranks.size == 1
    made = factory.network(asked, data), parts.loss, factory.optimizer(asked)
    trainer = nn.Trainer(*made) if one else build_trainer(asked, *made, Communicator(ranks))
    chunks = asked.strategy_name == "sandblaster"  # a step is a line search over all samples, dealt out in chunks
    works = one or chunks or trainer.mesh.index is not None
    apart = not one and name_of(asked.strategy) in ("ps", "downpour")
    pause = 1e-3 * chosen.pause * (chosen.workers if one else chosen.slow if slow and ranks.rank == 1 else 1)
    compute, seen = trainer.compute_gradients, 0

    def paced(x, *arguments):
        nonlocal seen
        part = len(x) * chosen.workers / chosen.batch if chunks else 1  # of what a worker computes in another's step
        end = time.perf_counter() + pause * part
        result = compute(x, *arguments)
        time.sleep(max(0.0, end - time.perf_counter()))
        seen += len(x)
        return result

    trainer.compute_gradients = paced
    loader = nn.Loader(data.train, len(data.train) if chunks else chosen.batch, shard=trainer.shard)
    seconds, copies, wait = [], [], chosen.seconds / LOOKS
    ranks.Barrier()
    start = time.perf_counter()
    if works:
        for x, y, total in itertools.chain.from_iterable(map(loader.epoch, itertools.count())):
            now = time.perf_counter() - start
            parameters = whole_parameters(trainer) if chunks else trainer.flat_parameters
            if ranks.rank == 0 and now >= wait * len(copies):
                seconds.append(now)
                copies.append(parameters.copy())
            over = now >= chosen.seconds
            if over if apart or one else ranks.bcast(over):  # who waits for others makes as many steps as they
                break
            trainer.step(x, y, total)
    else:
        trainer.sync.begin_step(0, 0, chosen.batch, 1)  # and serves until all have finished
    spent = time.perf_counter() - start
    late = {}
    if not one:
        trainer.synchronize()
        late = trainer.epoch_record().get("staleness", {})
    rates = ranks.allgather(seen / max(spent, 1e-9))
    found = {}
    if ranks.rank == 0:
        found = {"seconds": seconds, "accuracy": accuracies(made, data, copies), "images_per_second": sum(rates)}
        found["staleness"] = late.get("mean")
    if not one:
        trainer.close()
        trainer.communicator.release()
    return found


def whole_parameters(trainer):
    """All parameters as one flat array, on rank 0 (collective)."""
    layout = trainer.network.layout
    found = layout.zeros(trainer.network.dtype)
    for name, array in trainer.table.items("param/"):
        if trainer.is_writer:
            found[layout.slices[name.removeprefix("param/")]] = array.reshape(-1)
    return found


def accuracies(made, data, copies: list) -> list[float]:
    """Of parameters on the test data."""
    import nn

    trainer = nn.Trainer(*made[:2], nn.SGD(0.1))  # which makes no step
    test = nn.Loader(data.test, 500, shuffle=False)
    found = []
    for parameters in copies:
        trainer.flat_parameters[:] = parameters
        found.append(nn.evaluate(trainer, test)["accuracy"])
    return found


# ------------------------------------------------------------------------------------------------------- results


def until(row: dict, level: float) -> float:
    """Seconds until that accuracy is reached and not left again for more than a look; infinity where it is not."""
    for i, accuracy in enumerate(row["accuracy"]):
        if accuracy >= level and (i + 1 == len(row["accuracy"]) or row["accuracy"][i + 1] >= level):
            return row["seconds"][i]
    return float("inf")


def table(rows: list[dict], level: float = 0.9) -> str:
    """Throughput, undisturbed and with a slow worker, accuracy in the end, seconds to 90%, staleness."""
    cases = {(row["way"], row["slow"]): row for row in rows}
    lines = [
        "| | images/s | one slow | kept | accuracy | one slow | s to 90% | one slow | staleness |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(row["way"] for row in rows):
        pair = [cases[way, slow] for slow in (False, True) if (way, slow) in cases]
        rate = [f"{row['images_per_second']:,.0f}" for row in pair]
        kept = f"{pair[1]['images_per_second'] / pair[0]['images_per_second']:.0%}" if len(pair) > 1 else ""
        score = [f"{row['accuracy'][-1]:.1%}" for row in pair]
        reached = (until(row, level) for row in pair)
        times = [f"{seconds:.1f}" if seconds < float("inf") else "" for seconds in reached]
        late = f"{pair[-1]['staleness']:.1f}" if pair[-1].get("staleness") is not None else ""
        both = lambda cells: " | ".join([*cells, ""][:2])
        lines.append(f"| {way} | {both(rate)} | {kept} | {both(score)} | {both(times)} | {late} |")
    return "\n".join(lines)


def text(rows: list[dict], chosen: Mapping) -> str:
    """The content of asynchronous.json: options, and a line for each run, with four digits of each number."""
    short = lambda value: [round(each, 4) for each in value] if isinstance(value, list) else value
    lines = [json.dumps({key: short(value) for key, value in row.items()}) for row in rows]
    return f'{{"options": {json.dumps(dict(chosen))},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def draw(rows: list[dict], chosen: Mapping):
    """Accuracy over time, a panel for each way, undisturbed and with a slow worker; below, seconds until it is 90%."""
    from matplotlib.figure import Figure

    groups = {
        "ranks wait for the slowest": [way for way in WAITING if way in chosen["ways"]],
        "no rank waits": [way for way in INDEPENDENT if way in chosen["ways"]],
    }
    groups = {title: ways for title, ways in groups.items() if ways} or {"": [ONE]}
    columns = max(map(len, groups.values()))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    heights = [1.9] * len(groups) + [0.8 + 0.22 * len(ways)]
    figure = Figure(figsize=(8, 0.3 + sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights)
    for part, (title, names) in zip(parts, groups.items(), strict=False):
        part.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        panels = part.subplots(1, columns, sharex=True, sharey=True, squeeze=False)[0]
        for axes, way in itertools.zip_longest(panels, names):
            draw_way(rows, way, chosen, axes)
        panels[0].set_ylabel("test accuracy (%)", fontsize=9)
    axes = parts[-1].subplots()
    draw_until(rows, ways, axes)
    names = {False: f"{chosen['workers']} workers", True: f"one takes {chosen['slow']:g} times as long"}
    handles = [axes.plot([], [], ms=5, label=name, **look(slow))[0] for slow, name in names.items()]
    handles += axes.plot([], [], color=LINE, lw=2, label=ONE)
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_way(rows: list[dict], way: str | None, chosen: Mapping, axes) -> None:
    """Accuracy over time of one way, and of one process; the scale is the error's. Empty axes for no way."""
    if way is None:
        axes.axis("off")
        return
    for row in rows:
        if row["way"] in (way, ONE):
            errors = [max(LEAST_ERROR, 100 - 100 * a) for a in smooth(row["accuracy"])]
            style = {"color": LINE, "lw": 2} if row["way"] == ONE else look(row["slow"]) | {"marker": ""}
            axes.plot(row["seconds"], errors, zorder=1 if row["way"] == ONE else 2, **style)
    axes.set(yscale="log", ylim=(60, LEAST_ERROR), xlim=(0, 1.03 * chosen["seconds"]))
    axes.set_yticks(ERRORS, [f"{100 - error:g}" for error in ERRORS])
    axes.minorticks_off()
    axes.set_title(way, fontsize=9)
    axes.set_xlabel("seconds", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_until(rows: list[dict], ways: list[str], axes, level: float = 0.9) -> None:
    """Seconds to an accuracy: filled where no worker is slow, hollow where one is; none where it is not reached."""
    for at, way in enumerate(ways):
        found = [(until(row, level), row["slow"]) for row in rows if row["way"] == way]
        reached = [seconds for seconds, _ in found if seconds < float("inf")]
        axes.plot(reached, [at] * len(reached), color=LINE, lw=2)
        for seconds, slow in found:
            if seconds < float("inf"):
                axes.plot(seconds, at, **look(slow), ms=7, zorder=3)
                left = seconds < max(reached) or (not slow and min(reached) == max(reached))
                words = {"textcoords": "offset points", "va": "center", "fontsize": 8}
                words |= {"xytext": (-8, 0), "ha": "right"} if left else {"xytext": (8, 0), "ha": "left"}
                axes.annotate(f"{seconds:.1f}", (seconds, at), **words)
        if not reached:
            axes.annotate(" not reached", (0, at), va="center", fontsize=8)
    axes.set_yticks(range(len(ways)), ways, fontsize=9)
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.set(xlabel="seconds", xlim=(0, None))
    axes.set_title(f"seconds until {level:.0%} of the test data are right", loc="left", fontsize=10, fontweight="bold")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def look(slow: bool) -> dict:
    """Colour and marker of a run: blue and filled, or, with a slow worker, orange and hollow."""
    return {"marker": "o"} | ({"color": PALETTE[5], "ls": "--", "mfc": "white"} if slow else {"color": PALETTE[0]})


def smooth(values: list[float]) -> list[float]:
    """The median of each and its two neighbours on either side."""
    return [median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]


if __name__ == "__main__":
    raise SystemExit(main())
