"""One report of a test from those of its ranks: each one's traceback, and where the others were meanwhile."""

import linecache
import re
from itertools import takewhile
from pathlib import Path

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from parallel.launch import launcher


def failure(item, trouble, phases=(), positions=None, output="", seconds=0.0):
    """Return the report that a test has failed.

    Parameters
    ----------
    item : pytest.Item
    trouble : str
        What is wrong, if no rank's own report says it.
    phases : sequence of dict
        For each rank, its reports by phase (setup, call, teardown).
    positions : dict of int to str
        Where each rank was that did not report a failure.
    output : str
        What mpiexec and the ranks wrote, shown where no rank's own report names the cause.
    """
    failed, sections = {}, []
    for rank, of_rank in enumerate(phases):
        for report in (phase for phase in of_rank.values() if phase.failed):
            text = re.sub("0x[0-9a-f]+", "", str(report.longrepr))  # equal but for addresses: shown once
            failed.setdefault(text, (report, []))[1].append(rank)
            sections += [(f"{title}, rank {rank}/{len(phases)}", text) for title, text in report.sections]
    tracebacks = [(_named(ranks, len(phases)), report) for report, ranks in failed.values()]
    by_text = {}
    for rank, text in (positions or {}).items():
        by_text.setdefault(text, []).append(rank)
    order = lambda text: (text.startswith("had "), text.startswith("was "))  # first those that died: the likely cause
    absent = []
    for text in sorted(by_text, key=order):
        plural = text.replace("was ", "were ", 1) if len(by_text[text]) > 1 and text.startswith("was ") else text
        absent.append(f"{_named(by_text[text], len(phases))} {plural}")
    if tracebacks:
        name, first = tracebacks[0]
        crash = getattr(first.longrepr, "reprcrash", None)
        when, summary = first.when, f"{name}: {crash.message if crash else first.longrepr}"
        absent = absent and ["Meanwhile", *absent]
    else:
        when, summary = "call", "; ".join([trouble, *(text.splitlines()[0] for text in absent)])
        absent = [trouble, *absent]
        sections += [("Output of the ranks", output)] if output else []
    path, line, _ = item.location
    longrepr = RanksRepr(tracebacks, absent, ReprFileLocation(path, (line or 0) + 1, summary))
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, "failed", longrepr, when, sections, seconds)


def position(stack: Path, begun: bool) -> str:
    """Return where a rank was when it was ended, from what its faulthandler wrote."""
    text = stack.read_text(errors="replace") if stack.exists() else ""
    place = "in the test" if begun else "before the test"
    if not text:
        return f"died {place} without a word (killed, or left by os._exit)"
    crash = re.search("Fatal Python error: (?!Aborted)(.+)", text)  # Aborted: the parent asked for the stack
    frames = list(takewhile(lambda frame: "_pytest" not in Path(frame[0]).parts, launcher.read_stack(stack)))
    verdict = f"crashed ({crash[1]})" if crash else "was"
    if not frames:
        return f"{verdict} {place}, in pytest itself:\n{text}"
    lines = [f"    {path}:{line} in {name}: {linecache.getline(path, line).strip()}" for path, line, name in frames]
    return "\n".join([f"{verdict} {place}, at {Path(frames[0][0]).name}:{frames[0][1]}", *lines])


class RanksRepr(TerminalRepr):
    """How pytest shows it. `reprcrash.message` is in pytest's summary; from a worker of xdist the first line is."""

    def __init__(self, tracebacks, absent, reprcrash):
        self.tracebacks, self.absent, self.reprcrash = tracebacks, absent, reprcrash

    def __str__(self):
        return "{}\n{}".format(self.reprcrash.message.partition("\n")[0], super().__str__())

    def toterminal(self, tw):
        for name, report in self.tracebacks:
            tw.sep("_", f"{name}, {report.when}", bold=True)
            report.toterminal(tw)
        for text in self.absent:
            tw.line(text)


def _named(ranks, size) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}/{size}"
