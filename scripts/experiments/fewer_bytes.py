"""Every method of --compress on one task: accuracy against bytes on the wire, on ranks of this machine.

    python scripts/experiments/fewer_bytes.py                          digits, a small CNN, 2 ranks: one to four minutes
    python scripts/experiments/fewer_bytes.py --model mlp:64,64,10 --ranks 4 --seeds 1
    python scripts/experiments/fewer_bytes.py --quick                  shows the script, not the methods

All methods train with the same rate, batches and momentum 0.9 (that of dgc is its own). Bytes are counted, per rank
and step, over the whole run: dgc sends more in its first four epochs, a quarter of the gradients in the first one.
Accuracy is the median of the seeds; milliseconds are the least, of a step and of what compressing and sending takes of
it, on one machine, where sending is cheap. Writes compression.json, compression.png and bytes.png. The last line is a
control: top-k whose error memory is emptied after every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from collectives.drawing.marks import INK, LINE, label_ends  # noqa: E402 - found beside this file
from collectives.drawing.timeline import PALETTE  # noqa: E402
from parallel.command.arguments import Parser, new_directory, number, whole  # noqa: E402
from parallel.launch import launcher  # noqa: E402

METHODS = (
    "none", "fp16", "qsgd:7", "qsgd:3", "terngrad", "onebit", "signsgd", "topk:0.1", "topk:0.01", "topk:0.001",
    "threshold:0.005", "dgc:0.01", "dgc:0.001", "powersgd:4", "powersgd:1",
)  # fmt: skip
CONTROL = "topk:0.001"
FORGETS = " without memory"
# family -> first words of its methods; a panel and a colour for each
FAMILIES = {
    "all elements": ("none", "fp16"),
    "rounded at random": ("qsgd", "terngrad"),
    "signs": ("onebit", "signsgd"),
    "the largest": ("topk",),
    "above a threshold": ("threshold", "dgc"),
    "low rank": ("powersgd",),
}
COLORS = dict(zip(FAMILIES, (INK, *PALETTE[:4], PALETTE[5]), strict=True))
MARKERS = "os^D"
LEAST_ERROR, ERRORS = 0.1, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)  # percent: an axis of a picture


def options(argv: list[str] | None) -> argparse.Namespace:
    """What was asked for; what cannot be is one message, before any rank is started."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn", help="as of scripts/train.py (default: cnn)")
    parser.add_argument("--data", default="digits", help="as of scripts/train.py (default: digits, embedded)")
    parser.add_argument("--ranks", type=whole(), default=2, help="(default: 2)")
    parser.add_argument("--epochs", type=whole(), default=10, help="(default: 10)")
    parser.add_argument("--batch", type=whole(), default=32, help="samples of a step, over all ranks (default: 32)")
    parser.add_argument("--lr", type=number(), default=0.02, help="(default: 0.02)")
    parser.add_argument(
        "--seeds", type=whole(), default=3, help="runs of each method, whose median is shown (default: 3)"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="as of --compress (default: all)")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, three methods")
    parser.add_argument(
        "--out", type=new_directory, default="runs/compression", help="directory (default: runs/compression)"
    )
    chosen = parser.parse_args(argv)
    if chosen.quick:
        chosen.seeds, chosen.epochs, chosen.methods = 1, 1, ["none", "topk:0.1", "powersgd:1"]
    if not launcher.inside():
        try:
            check(chosen)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    return chosen


def check(chosen: argparse.Namespace) -> None:
    """Refuse what the ranks could not do."""
    import nn
    from parallel.sync.compression import parse

    data = nn.data.load(chosen.data)
    nn.models.build(chosen.model, data.in_shape, data.classes)
    nn.Loader(data.train, chosen.batch, shard=(0, chosen.ranks))
    for method in chosen.methods:
        parse(method)


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
        print(text(rows[-1]), flush=True)

    print(f"{'method':26} {'bytes':>9} {'of dense':>9} {'accuracy':>9} {'step ms':>8} {'in messages':>12}", flush=True)
    status = launcher.run([__file__, *(sys.argv[1:] if argv is None else argv)], chosen.ranks, timeout=900, stdout=take)
    if status:
        print(launcher.ending(status), file=sys.stderr)
        return status
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    (out / "compression.json").write_text(f'{{"options": {json.dumps(vars(chosen))},\n"rows": [\n{lines}\n]}}\n')
    draw(rows, vars(chosen)).savefig(out / "compression.png", dpi=120)
    draw_bytes(rows, vars(chosen)).savefig(out / "bytes.png", dpi=120)
    print(f"{out}/compression.json, {out}/compression.png and {out}/bytes.png")
    return 0


def text(row: dict) -> str:
    return (
        f"{row['method']:26} {row['bytes']:>9,.0f} {row['bytes'] / row['dense']:>9.2%} {row['accuracy']:>9.2%} "
        f"{row['step_ms']:>8.2f} {row['sending_ms']:>12.2f}"
    )


# --------------------------------------------------------------------------------------------------- on the ranks


def measure(chosen: argparse.Namespace) -> None:
    """Train with every method; rank 0 prints a line of JSON for each (collective)."""
    from mpi4py import MPI

    import nn
    from collectives import Communicator

    communicator = Communicator(MPI.COMM_WORLD)
    data = nn.data.load(chosen.data)
    for method in [*chosen.methods, CONTROL + FORGETS]:
        runs = [train(chosen, method, seed, communicator, data) for seed in range(chosen.seeds)]
        if communicator.rank == 0:
            row = sorted(runs, key=lambda run: run["accuracy"])[(len(runs) - 1) // 2]
            spread = [min(run["accuracy"] for run in runs), max(run["accuracy"] for run in runs)]
            fastest = {key: min(run[key] for run in runs) for key in ("step_ms", "sending_ms")}
            print(json.dumps({"method": method, **row, **fastest, "spread": spread}), flush=True)


def train(chosen: argparse.Namespace, method: str, seed: int, communicator, data) -> dict:
    """One run: bytes of a rank and step, accuracy, milliseconds, losses of the epochs."""
    import nn
    from parallel import DistributedDataParallel
    from parallel.sync.compression import parse

    name = method.removesuffix(FORGETS)
    network = nn.models.build(chosen.model, data.in_shape, data.classes)
    optimizer = nn.SGD(chosen.lr, momentum=0.0 if name.startswith("dgc") else 0.9)
    trainer = DistributedDataParallel(
        network, nn.CrossEntropyLoss(), optimizer, communicator, seed, compressor=parse(name)
    )
    loader = nn.Loader(data.train, chosen.batch, seed, shard=trainer.shard)
    test = nn.Loader(data.test, 500, shuffle=False, shard=trainer.shard)
    trainer.set_epoch_steps(len(loader))
    if method.endswith(FORGETS):
        forget(trainer)
    seconds, whole = [0.0], trainer.sync.finish_step

    def timed():
        start = time.perf_counter()
        summed = whole()
        seconds[0] += time.perf_counter() - start
        return summed

    trainer.sync.finish_step = timed
    sent: list[float] = []  # MB, at the end of each epoch

    class Count(nn.Callback):
        def on_epoch(self, training, record):
            sent.append(trainer.sync.wire.traffic.total / 1e6)

    training = nn.fit(trainer, loader, chosen.epochs, [Count()], test=test)
    trainer.check_replicas()
    return {
        "bytes": trainer.bytes_sent()["bytes_sent"],
        "dense": trainer.bytes_sent()["bytes_dense"],
        "accuracy": training.result["accuracy"],
        "step_ms": 1e3 * training.seconds / trainer.steps,
        "sending_ms": 1e3 * seconds[0] / trainer.steps,
        "sent": sent,
        "losses": [record["loss"] for record in training.history],
    }


def forget(trainer) -> None:
    """Empty the memories after every step."""
    reduce = trainer.sync.compressor.reduce

    def forgetful(*given) -> None:
        reduce(*given)
        for memory in trainer.sync.compressor.memory.values():
            memory[:] = 0

    trainer.sync.compressor.reduce = forgetful


def title(chosen: Mapping) -> str:
    """Return what was trained, on what."""
    return f"{chosen['model']} on {chosen['data']}, {chosen['ranks']} ranks, {chosen['epochs']} epochs"


def family(method: str) -> str:
    """Return which of FAMILIES a method belongs to."""
    return next(name for name, members in FAMILIES.items() if method.partition(":")[0] in members)


def draw(rows: list[dict], chosen: Mapping):
    """Draw each epoch's loss against the bytes sent until then: a panel for each family, the others' lines grey."""
    from matplotlib.figure import Figure

    names = [name for name in FAMILIES if any(family(row["method"]) == name for row in rows)]
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(8, 0.4 + 2.5 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    labels = {}
    for axes, name in itertools.zip_longest(panels.flat, names):
        if name is None:
            axes.axis("off")
            continue
        own = {}
        for row in rows:
            mine = family(row["method"]) == name
            style = {"color": COLORS[name], "marker": MARKERS[len(own) % len(MARKERS)]} if mine else {"color": LINE}
            (line,) = axes.plot(row["sent"], row["losses"], lw=1.4, ms=3, zorder=1 + mine, **style)
            if mine:
                own[line] = row["method"]
        labels[axes] = own
        axes.set_title(name, fontsize=10, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels[0, 0].set(xscale="log", yscale="log")
    panels[0, 0].set_xlim(right=30 * max(row["sent"][-1] for row in rows))  # room for the names
    panels[0, 0].set_ylim(bottom=0.4 * min(min(row["losses"]) for row in rows))
    figure.supxlabel("MB that a rank has sent", fontsize=9)
    figure.supylabel("training loss, epoch by epoch", fontsize=9)
    figure.suptitle(title(chosen), fontsize=10)
    label_ends(labels, 8)
    return figure


def draw_bytes(rows: list[dict], chosen: Mapping):
    """Draw a line for each method, the most bytes on top: left its bytes of a step, right its accuracy over seeds."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: -row["bytes"])
    figure = Figure(figsize=(8, 1.0 + 0.24 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for at, row in enumerate(rows):
        error, worst, best = (max(LEAST_ERROR, 100 - 100 * a) for a in (row["accuracy"], *row["spread"]))
        style = {"color": COLORS[family(row["method"])], "marker": "o", "ms": 5}
        left.plot(row["bytes"], at, **style)
        words = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        left.annotate(f"{row['bytes']:,.0f}", (row["bytes"], at), (7, 0), **words)
        right.errorbar(error, at, xerr=[[error - best], [worst - error]], capsize=2, **style)
    left.set(xscale="log", xlim=(min(row["bytes"] for row in rows) / 2, 6 * rows[0]["bytes"]))
    left.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=9)
    left.set_ylim(len(rows) - 0.4, -0.6)
    errors = [max(LEAST_ERROR, 100 - 100 * accuracy) for row in rows for accuracy in row["spread"]]
    right.set_xscale("log")
    right.set_xticks(ERRORS, [f"{100 - error:g}" for error in ERRORS])
    right.set_xlim(1.3 * max(errors), 0.8 * min(errors))
    right.minorticks_off()
    left.set_title("bytes a rank and step, counted", fontsize=10, loc="left", fontweight="bold")
    right.set_title("test accuracy (%), range over seeds", fontsize=10, loc="left", fontweight="bold")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(alpha=0.25)
    figure.suptitle(title(chosen), fontsize=10)
    return figure


if __name__ == "__main__":
    sys.exit(main())
