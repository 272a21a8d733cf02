"""Read run directories for a report. A missing or broken file becomes a note in the report, not an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collectives.pricing.trace_formats import events_of
from nn.reading import TABLE, TRACE, parse_json, read_json, read_text
from parallel.reports.breakdown import PARTS

MOST_RECORDS = 100_000  # epochs of a run that are read
SHOWN = 5  # lines that are named
PICTURES = ("confusion", "misclassified", "weights", "activations", "gradients", "regions")  # of --inspect


@dataclass
class RunFiles:
    """One run.

    Attributes
    ----------
    name : str
        Of the directory.
    config, environment, result : dict
        Empty where the file is not there.
    history : list of dict
        A record an epoch.
    events : list of dict
        What ranks did when, as Timeline has it; empty without --timeline.
    pictures : dict of path
        Those of --inspect, by name.
    problems : list of str
        What could not be read, in words.
    """

    name: str
    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return (epochs, values) of the epoch records that hold a finite number under `key`."""
        pairs = [(r.get("epoch"), r.get(key)) for r in self.history]
        valid = [(e, v) for e, v in pairs if type(e) is int and isinstance(v, (int, float)) and np.isfinite(v)]
        return [e for e, _ in valid], [v for _, v in valid]

    def breakdown(self) -> np.ndarray | None:
        """Return (ranks, parts) seconds per step, or None if the run has no valid breakdown."""
        given = self.result.get("breakdown")
        try:
            table = np.array([given[part] for part in PARTS], float).T
        except (TypeError, KeyError, ValueError):
            return None
        return table if table.ndim == 2 and table.size and np.isfinite(table).all() and table.sum() > 0 else None


def read_run(directory: str | Path) -> RunFiles:
    """Read the directory of a run.

    Raises
    ------
    ValueError
        It is not the directory of a run.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ValueError(f"{directory} is not the directory of a run: there is no config.json")
    run = RunFiles(path.resolve().name, path)
    run.config, run.environment = (_object(run, name) for name in ("config.json", "environment.json"))
    run.history = _lines(run)
    run.result = _object(run, "result.json") if (path / "result.json").exists() else {}
    if not run.result:
        run.problems.append(f"not finished: {len(run.history)} of {run.config.get('epochs', '?')} epochs are there")
    run.events = _events(run)
    found = {name: path / "inspection" / f"{name}.png" for name in PICTURES}
    run.pictures = {name: picture for name, picture in found.items() if picture.is_file()}
    return run


def _object(run: RunFiles, name: str, limit: int = TABLE) -> dict[str, Any]:
    """Read a JSON file that holds an object; otherwise return {} and add a note to the run's problems."""
    try:
        found = read_json(run.directory / name, limit)
        if isinstance(found, dict):
            return found
        run.problems.append(f"{name} holds no object")
    except OSError as error:
        run.problems.append(f"{name} cannot be read ({error.strerror})")
    except ValueError as error:
        run.problems.append(f"{name} is not JSON ({error})")
    return {}


def _lines(run: RunFiles) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without an incomplete last line."""
    try:
        text = read_text(run.directory / "metrics.jsonl", TABLE)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        run.problems.append(f"metrics.jsonl cannot be read ({getattr(error, 'strerror', None) or error})")
        return []
    records: list[dict[str, Any]] = []
    wrong = []
    lines = text.removesuffix("\n").split("\n", MOST_RECORDS)
    if len(lines) > MOST_RECORDS:
        run.problems.append(f"metrics.jsonl has more than {MOST_RECORDS:,} lines, of which the first are read")
        del lines[MOST_RECORDS:]
    for number, line in enumerate(lines if text else [], 1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            wrong.append(number)
    run.problems += [f"metrics.jsonl: line {number} is no record" for number in wrong[:SHOWN]]
    run.problems += [f"metrics.jsonl: {len(wrong) - SHOWN:,} other lines are no records"] * (len(wrong) > SHOWN)
    return records


def _events(run: RunFiles) -> list[dict[str, Any]]:
    """trace.json as the events that it was made of."""
    if not (run.directory / "trace.json").exists():
        return []
    try:
        return events_of({"traceEvents": []} | _object(run, "trace.json", TRACE))
    except (KeyError, TypeError, ValueError):
        run.problems.append("trace.json does not hold the events of a timeline")
        return []
