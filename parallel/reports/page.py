"""report.html: one or several runs on a self-contained page; a comparison, then a section for each run.

Pictures are drawn as vectors from the files of the runs, and embedded. The page has no script and fetches nothing.
"""

from __future__ import annotations

import base64
import html
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.drawing.timeline import PALETTE
from nn.analysis import pictures
from nn.reading import TABLE, read_bytes
from parallel.reports.breakdown import PARTS, draw_breakdown
from parallel.reports.runs import RunFiles
from parallel.reports.timeline import excerpt

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, *_ = PALETTE
COLOURS = (BLUE, RED, GREEN, PURPLE, SKY, ORANGE, "#000000", "#7a7a7a")
STYLES = ("-", "--", "-.", ":")  # in print, and where equal curves lie on each other
COLUMNS: tuple[tuple[str, Callable[[RunFiles], Any], str, int], ...] = (
    # what is compared: title, where it is, how it is written, and whether more (1) or less (-1) is better
    ("test accuracy", lambda run: run.result.get("accuracy"), "{:.2%}", 1),
    ("test loss", lambda run: run.result.get("loss"), "{:.4g}", -1),
    ("validation accuracy", lambda run: run.result.get("validation_accuracy"), "{:.2%}", 1),
    ("chosen epoch", lambda run: run.result.get("chosen_epoch"), "{}", 0),
    ("epochs", lambda run: run.result.get("epochs", len(run.history)), "{}", 0),
    ("training time", lambda run: run.result.get("seconds"), "{:,.1f} s", -1),
    ("samples/s", lambda run: run.result.get("images_per_second"), "{:,.0f}", 1),
    ("ranks", lambda run: run.result.get("ranks", run.environment.get("ranks")), "{}", 0),
)
CURVES = (
    ("loss", "training loss", "loss", 1),
    ("validation_loss", "validation loss", "loss", 1),
    ("validation_accuracy", "validation accuracy", "accuracy (%)", 100),
    ("images_per_second", "speed", "samples/s", 1),
)
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1e21; background: #fff; max-width: 1080px; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { margin-top: 2.4rem; border-top: 2px solid #e3e6ea; padding-top: 1rem; overflow-wrap: anywhere; }
h3 { margin: 1.4rem 0 .4rem; font-size: 1.05rem; } p.quiet, .quiet { color: #5b6470; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e3e6ea; vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; } td.best { font-weight: 700; }
td.text { overflow-wrap: anywhere; min-width: 7em; }
img { max-width: 100%; max-height: 560px; height: auto; }
figure { margin: 1rem 0; } figcaption { color: #5b6470; font-size: .9rem; }
.note { background: #fff4e0; border-left: 4px solid #e69f00; padding: .4rem .8rem; margin: .6rem 0; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 0 2.5rem; }
details summary { cursor: pointer; color: #0057a3; margin: .5rem 0; }
code { font-size: .92em; overflow-wrap: anywhere; }
@media print { details { display: none; } h2 { break-before: page; } }
"""


def page(runs: Sequence[RunFiles], topics: Mapping[str, Mapping[str, Any]], made_by: str = "") -> str:
    """Return the page as text.

    Parameters
    ----------
    runs : RunFiles
        At least one.
    topics : dict of dict
        Options and their defaults, by topic: what differs from these is shown first.
    made_by : str
        Which program, in words.
    """
    many = len(runs) > 1
    title = f"{len(runs)} runs compared" if many else runs[0].name
    body = [f"<h1>{escaped(title)}</h1>"]
    body.append(f'<p class="quiet">{escaped(made_by)}{", " * bool(made_by)}{time.strftime("%Y-%m-%d %H:%M")}</p>')
    body += [table_of_results(runs)]
    if many:
        body += differences(runs, topics)
    body += curves(runs)
    for i, run in enumerate(runs):
        body += of_one(run, topics, f"<h2>{key(i)}{escaped(run.name)}</h2>" if many else "")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def escaped(value: Any) -> str:
    """Return a value as text with HTML's characters escaped."""
    return html.escape(str(value))


def literal(name: str) -> str:
    """Return a name as a Matplotlib label, so that "$" starts no formula and a leading "_" hides no legend entry."""
    return " " * name.startswith("_") + name.replace("$", r"\$")


def key(i: int) -> str:
    """Return a square in the colour of a run."""
    return f'<span class="key" style="background:{COLOURS[i % len(COLOURS)]}"></span>'


def table_of_results(runs: Sequence[RunFiles]) -> str:
    """Return a table with a row for each run; the best value of each column is bold."""
    columns = [c for c in COLUMNS if any(isinstance(c[1](run), (int, float)) for run in runs)]
    head = "".join(f'<th class="number">{escaped(title)}</th>' for title, *_ in columns)
    rows = []
    best = {}
    for title, of, _, better in columns:
        numbers = [of(run) for run in runs if isinstance(of(run), (int, float))]
        best[title] = max(numbers, key=lambda v: better * v) if better and len(set(numbers)) > 1 else None
    for i, run in enumerate(runs):
        cells = []
        for title, of, form, _ in columns:
            value = of(run)
            known = isinstance(value, (int, float))
            mark = " best" if known and value == best[title] else ""
            cells.append(f'<td class="number{mark}">{form.format(value) if known else "&ndash;"}</td>')
        what = f"{run.config.get('model', '?')} on {run.config.get('data', '?')}"
        name = f"{key(i)}{escaped(run.name)}<br>" if len(runs) > 1 else ""
        rows.append(f'<tr><td class="text">{name}<span class="quiet">{escaped(what)}</span></td>{"".join(cells)}</tr>')
    return f'<div class="wide"><table><tr><th>run</th>{head}</tr>{"".join(rows)}</table></div>'


def differences(runs: Sequence[RunFiles], topics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the options and environments in which the runs differ."""
    directories = {"out", "resume"}  # differ in every run
    options = [name for names in topics.values() for name in names if name not in directories]
    rows = [(name.replace("_", "-"), [run.config.get(name) for run in runs]) for name in options]
    own = {"command", "started", "ranks"}
    surroundings = dict.fromkeys(name for run in runs for name in run.environment if name not in own)
    named = {name: f"{name} used" if name in options else name for name in surroundings}  # what was asked for is above
    rows += [(label, [run.environment.get(name) for run in runs]) for name, label in named.items()]
    rows = [(name, values) for name, values in rows if len({repr(value) for value in values}) > 1]
    if not rows:
        return ["<h3>What differs</h3><p>Neither options nor surroundings.</p>"]
    head = "".join(f"<th>{key(i)}{escaped(run.name)}</th>" for i, run in enumerate(runs))
    body = ""
    for name, values in rows:
        cells = "".join(f'<td class="text">{shown(value)}</td>' for value in values)
        body += f"<tr><th>{escaped(name)}</th>{cells}</tr>"
    return ["<h3>What differs</h3>", f'<div class="wide"><table><tr><th></th>{head}</tr>{body}</table></div>']


def shown(value: Any) -> str:
    """Format the value of an option as HTML."""
    if value is None or value is False:
        return '<span class="quiet">&ndash;</span>'
    text = ", ".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)
    return escaped(text if len(text) < 400 else text[:400] + "...")


def curves(runs: Sequence[RunFiles]) -> list[str]:
    """Draw loss, accuracy and speed by epoch, all runs in one picture; the chosen epoch is marked."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = [curve for curve in CURVES if any(run.series(curve[0])[0] for run in runs)]
    if not drawn:
        return ["<p>No epoch is finished: there are no curves yet.</p>"]
    rows = (len(drawn) + 1) // 2
    figure = Figure(figsize=(11, 3.1 * rows), layout="constrained")
    figure.get_layout_engine().set(hspace=0.1)
    places = figure.subplots(rows, 2, squeeze=False).flat
    for axes, (name, title, unit, factor) in zip(places, drawn, strict=False):
        for i, run in enumerate(runs):
            epochs, values = run.series(name)
            values = [factor * value for value in values]
            colour, style = COLOURS[i % len(COLOURS)], STYLES[(i + i // len(COLOURS)) % len(STYLES)]
            marker = "." if len(epochs) < 20 else None
            axes.plot(epochs, values, style, color=colour, label=literal(run.name), marker=marker)
            chosen = run.result.get("chosen_epoch")
            if name.startswith("validation") and chosen in epochs:
                best = values[epochs.index(chosen)]
                text = f"{best:.2f}%" if factor == 100 else f"{best:.3g}"
                axes.plot([chosen], [best], "o", ms=9, mfc="none", mec=colour, mew=1.5, label=text)
                if len(runs) < 5:
                    rings = [line for line in axes.lines if line.get_marker() == "o"]
                    axes.legend(handles=rings, frameon=False, fontsize=8)
        logarithmic = unit == "loss" and min((v for run in runs for v in run.series(name)[1]), default=0) > 0
        axes.set(title=title, xlabel="epoch", ylabel=unit, yscale="log" if logarithmic else "linear")
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e3e6ea")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in list(places)[len(drawn) :]:
        axes.set_visible(False)
    if len(drawn) % 2:
        figure.axes[-1].set_visible(False)
    if 1 < len(runs) <= 12:
        figure.axes[0].legend(frameon=False, fontsize=8)
    return ["<h3>Curves</h3>", picture(figure, "curves over the epochs", "A ring marks the epoch that was chosen.")]


def of_one(run: RunFiles, topics: Mapping[str, Mapping[str, Any]], heading: str) -> list[str]:
    """Return the section of one run."""
    body = [heading] if heading else []
    body += [f'<p class="note">{escaped(problem)}</p>' for problem in run.problems]
    if run.environment.get("command"):
        body.append(f"<p><code>{escaped(run.environment['command'])}</code></p>")
    body += breakdown(run) + expert_load(run) + timeline(run)
    changed = [
        (name, run.config[name])
        for names in topics.values()
        for name, default in names.items()
        if name in run.config and run.config[name] != default
    ]
    body.append('<div class="columns"><div><h3>Options that were given</h3>')
    body.append(_pairs(changed) if changed else "<p>None: all have their defaults.</p>")
    body.append("<details><summary>all options</summary>")
    for topic, names in topics.items():
        body.append(f"<h3>{escaped(topic)}</h3>" + _pairs((name, run.config.get(name)) for name in names))
    body.append("</details></div><div><h3>Environment</h3>")
    body.append(_pairs((name, value) for name, value in run.environment.items() if name != "command"))
    if digest := run.result.get("parameters_sha256"):
        body.append(f'<p class="quiet">parameters: sha256 <code>{escaped(str(digest)[:16])}</code>...</p>')
    return [*body, "</div></div>", *inspected(run)]


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f'<tr><th>{escaped(n.replace("_", "-"))}</th><td class="text">{shown(v)}</td></tr>' for n, v in pairs
    )
    return f"<table>{rows}</table>"


def breakdown(run: RunFiles) -> list[str]:
    """Return the picture of a step's time, and percentages over all ranks."""
    table = run.breakdown()
    if table is None:
        return []
    shares = table.sum(axis=0) / table.sum()
    listed = ", ".join(f"{part} {share:.1%}" for part, share in zip(PARTS, shares, strict=True) if share >= 0.0005)
    figure = draw_breakdown(table)
    figure.axes[0].set_title("", loc="left")  # the page has a heading
    return ["<h3>Where the time of a step goes</h3>", picture(figure, "breakdown of a step", f"All ranks: {listed}.")]


def expert_load(run: RunFiles) -> list[str]:
    """The load of every expert, of a network that has some."""
    if not any(record.get("experts") for record in run.history):
        return []
    return ["<h3>Load of experts</h3>", picture(pictures.expert_load(run.history), "load of experts by layer and step")]


def timeline(run: RunFiles) -> list[str]:
    """Return the timeline of some steps in the middle of the run."""
    if not run.events:
        return []
    from collectives import draw_timeline

    figure = draw_timeline(excerpt(run.events), title="some steps from the middle of the run")
    return ["<h3>Timeline</h3>", picture(figure, "timeline of all ranks", "All of it: trace.json, in Perfetto.")]


def inspected(run: RunFiles) -> list[str]:
    """Return the pictures that --inspect wrote."""
    if not run.pictures:
        return []
    shown = [embedded(read_bytes(path, TABLE), "png", name, name) for name, path in run.pictures.items()]
    return ["<h3>Inspection</h3>", *shown]


def picture(figure, alt: str, caption: str = "") -> str:
    """Return a matplotlib figure embedded as SVG."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    return embedded(out.getvalue(), "svg+xml", alt, caption)


def embedded(content: bytes, kind: str, alt: str, caption: str) -> str:
    """Return an embedded image."""
    data = base64.b64encode(content).decode()
    text = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{escaped(alt)}" src="data:image/{kind};base64,{data}">{text}</figure>'


def write_page(text: str, file: Path) -> None:
    """Write the page atomically."""
    from nn.training.checkpoints import write_atomically

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode(errors="backslashreplace"))  # a name of a file may be no text
