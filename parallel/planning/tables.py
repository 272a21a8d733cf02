"""Predictions as text, in columns: the cost of a step and of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nn.tables import text_table
from parallel.planning.job import Prediction


@dataclass(frozen=True)
class Scaled:
    """A prediction with its strong efficiency (the same global batch) and weak efficiency (the same batch per rank)."""

    prediction: Prediction
    strong: float
    weak: float


@dataclass(frozen=True)
class Run:
    """Samples of a whole training run, and the price of a rank per hour; 0 leaves the column out."""

    samples: float = 0.0
    price: float = 0.0

    def hours(self, prediction: Prediction, batch: int) -> float:
        return self.samples / batch * prediction.seconds / 3600

    def cost(self, prediction: Prediction, batch: int) -> float:
        return self.hours(prediction, batch) * prediction.ranks * self.price


def table(found: Sequence[Scaled], batch: int, run: Run = Run(), memory: float = float("inf")) -> str:
    """Return a table with a row for each prediction."""
    heads = ["ranks", "strategy", "step", "samples/s", "strong", "weak", "idle", "sent", "memory"]
    heads += ["run"] * bool(run.samples) + ["cost"] * bool(run.price and run.samples) + [""]
    lines = []
    for scaled in found:
        p = scaled.prediction
        line = [f"{p.ranks:,}", p.name, seconds(p.seconds), rate(batch / p.seconds), f"{scaled.strong:.1%}"]
        line += [f"{scaled.weak:.1%}", f"{p.idle_share:.1%}", nbytes(p.sent), nbytes(p.memory)]
        line += [seconds(3600 * run.hours(p, batch))] * bool(run.samples)
        line += [f"{run.cost(p, batch):,.2f}"] * bool(run.price and run.samples)
        lines.append([*line, p.note if p.memory <= memory else f"does not fit; {p.note}".rstrip("; ")])
    return text_table([heads, *lines], left=(1, len(heads) - 1))


def seconds(value: float) -> str:
    """Format seconds: 0.0012 is "1.2 ms"."""
    for unit, symbol in ((86400 * 2, "days"), (7200, "h"), (1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit:
            size = {"days": 86400, "h": 3600}.get(symbol, unit)
            return f"{value / size:,.4g} {symbol}"
    return f"{value * 1e9:.3g} ns"


def rate(value: float) -> str:
    """Format a rate: 0.527 is "0.53", 1234.5 is "1,234"."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def nbytes(value: float) -> str:
    """Format bytes: 2e6 is "2 MB"."""
    for unit, symbol in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * unit:  # what would be rounded to 1,000 of the next one
            return f"{value / unit:.3g} {symbol}"
    return f"{value:.0f} B"


def as_dict(scaled: Scaled) -> dict:
    """Return the row as a dictionary for JSON."""
    p = scaled.prediction
    return {
        "ranks": p.ranks,
        "strategy": p.strategy,
        "mesh": p.axes._asdict(),
        "seconds": p.seconds,
        "strong_efficiency": scaled.strong,
        "weak_efficiency": scaled.weak,
        "idle_share": p.idle_share,
        "bytes_sent": p.sent,
        "memory": p.memory,
        "parts": p.parts,
        "note": p.note,
    }
