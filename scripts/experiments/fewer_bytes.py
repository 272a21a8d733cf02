"""Every method of --compress on one task: accuracy against bytes on the wire, on ranks of this machine.

    python scripts/experiments/fewer_bytes.py                          digits, a small CNN, 2 ranks: one to four minutes
    python scripts/experiments/fewer_bytes.py --model mlp:64,64,10 --ranks 4 --seeds 1
    python scripts/experiments/fewer_bytes.py --quick                  shows the script, not the methods

All methods train with the same rate, batches and momentum 0.9 (that of dgc is its own). Bytes are counted, per rank
and step, over the whole run: dgc sends more in its first four epochs, a quarter of the gradients in the first one.
Accuracy is the median of the seeds; milliseconds are the least, of a step and of what compressing and sending takes of
it, on one machine, where sending is cheap. Writes compression.json and compression.png. The last line is a control:
top-k whose error memory is emptied after every step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from parallel.command.arguments import Parser, new_directory, number, whole  # noqa: E402 - found beside this file
from parallel.launch import launcher  # noqa: E402

METHODS = (
    "none", "fp16", "qsgd:7", "qsgd:3", "terngrad", "onebit", "signsgd", "topk:0.1", "topk:0.01", "topk:0.001",
    "threshold:0.005", "dgc:0.01", "dgc:0.001", "powersgd:4", "powersgd:1",
)  # fmt: skip
CONTROL = "topk:0.001"
FORGETS = " without memory"
# color -> methods: gradients as they are, rounded at random, signs, the largest, low rank; the control. They differ for
# every kind of colour blindness (Okabe, Ito 2008).
CONTROLS = "#d55e00"
FAMILIES = {
    "black": ("none", "fp16"), "#0072b2": ("qsgd", "terngrad"), "#009e73": ("onebit", "signsgd"),
    "#e69f00": ("topk", "threshold", "dgc"), "#cc79a7": ("powersgd",), CONTROLS: (),
}  # fmt: skip
MARKERS = "os^Dvp"
LEAST_ERROR, ERRORS = (
    0.1,
    (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50),
)  # percent: axis of the picture, whose scale is the error's


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
    (out / "compression.json").write_text(json.dumps({"options": vars(chosen), "rows": rows}, indent=1) + "\n")
    draw(rows, chosen).savefig(out / "compression.png", dpi=120)
    print(f"{out}/compression.json and {out}/compression.png")
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


def draw(rows: list[dict], chosen: argparse.Namespace):
    """Accuracy against bytes of a step, and the loss of each epoch against the bytes sent until then."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_bytes(rows, left)
    for row, look in zip(rows, looks(rows), strict=True):
        right.plot(row["sent"], row["losses"], markersize=3, label=row["method"], **look)
    right.set(xscale="log", yscale="log", xlabel="MB that a rank has sent", ylabel="training loss, epoch by epoch")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right", frameon=False, fontsize=8)
    title = f"{chosen.model} on {chosen.data}, {chosen.ranks} ranks, {chosen.epochs} epochs"
    title += f"; bars: the worst and the best of {chosen.seeds} seeds" if chosen.seeds > 1 else ""
    figure.suptitle(title, fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def looks(rows: list[dict]) -> list[dict]:
    """Colour and marker of each method."""
    drawn, found = dict.fromkeys(FAMILIES, 0), []
    for row in rows:
        family = row["method"].partition(":")[0] if not row["method"].endswith(FORGETS) else FORGETS
        color = next((color for color, members in FAMILIES.items() if family in members), CONTROLS)
        found.append({"color": color, "marker": MARKERS[drawn[color] % len(MARKERS)]})
        drawn[color] += 1
    return found


def draw_bytes(rows: list[dict], axes) -> None:
    """Accuracy against bytes of a step, each method named at its point; with a bar where the spread is known."""
    for row, look in zip(rows, looks(rows), strict=True):
        middle, worst, best = (
            max(LEAST_ERROR, 100 - 100 * a) for a in (row["accuracy"], *row.get("spread", 2 * [row["accuracy"]]))
        )
        axes.errorbar(row["bytes"], middle, [[middle - best], [worst - middle]], capsize=2, **look)
    axes.set(xscale="log", yscale="log", xlabel="bytes a rank and step, counted", ylabel="test accuracy (%)")
    axes.set_yticks(ERRORS, [f"{100 - error:g}" for error in ERRORS])
    axes.minorticks_off()
    axes.margins(x=0.25)
    accuracies = [a for row in rows for a in row.get("spread", [row["accuracy"]])]
    reached = [max(LEAST_ERROR, 100 - 100 * accuracy) for accuracy in accuracies]
    axes.set_ylim(1.6 * max(reached), 0.35 * min(reached))
    name_points(rows, axes)


def name_points(rows: list[dict], axes) -> None:
    """Each method's name above or below its point, as near as no other name or point is in its way."""
    scale = axes.figure.dpi / 72  # pixels of a point, the unit of letters
    place = lambda nbytes, accuracy: axes.transData.transform((nbytes, max(LEAST_ERROR, 100 - 100 * accuracy))) / scale
    points = [(row["bytes"], max(LEAST_ERROR, 100 - 100 * row["accuracy"])) for row in rows]
    at = [place(row["bytes"], row["accuracy"]) for row in rows]
    taken = [(x - 5, x + 5, y - 5, y + 5) for x, y in at]
    bars = ([place(row["bytes"], accuracy) for accuracy in row.get("spread", ())] for row in rows)
    taken += [(low[0] - 2, low[0] + 2, low[1], high[1]) for low, high in filter(None, bars)]
    for row, point, (x, y) in sorted(zip(rows, points, at, strict=True), key=lambda each: each[1]):
        half = 2.4 * len(row["method"]) + 2
        for up in sorted(range(-160, 161, 4), key=abs):
            box = (x - half, x + half, y + up - 6, y + up + 6)
            clear = all(box[1] < a or box[0] > b or box[3] < low or box[2] > high for a, b, low, high in taken)
            if abs(up) >= 12 and clear:
                break
        taken.append(box)
        words = {"fontsize": 8, "ha": "center", "va": "center"}
        words["arrowprops"] = {"arrowstyle": "-", "color": "#8a8f99", "lw": 0.5}
        axes.annotate(row["method"], point, (0, up), textcoords="offset points", **words)


if __name__ == "__main__":
    sys.exit(main())
