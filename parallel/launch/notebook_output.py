"""Show the output and figures of a cell's ranks side by side.

In a notebook a column a rank, which grows while they print; figures and the value of the last line below. In a terminal
lines as they come, with the rank in front.
"""

import base64
import codecs
import html
import re
import time
from itertools import zip_longest
from pathlib import Path

MOST = 20_000  # characters of a rank that are shown: the last ones; and of its value: the first ones
LEFT_OUT = "[... what it printed before is left out]\n"
OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\r\n])")  # of a line, as progress bars do
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OFTEN = 0.2  # seconds between two looks of a page that is drawn again
WIDTH = 120  # characters across, in text


class Output:
    """The output of one cell: `read` what is new, and show it."""

    def __init__(self, ranks: int, live: bool):
        self.live = live
        self.text, self.values = [""] * ranks, [""] * ranks
        self.figures: list[list[bytes]] = [[] for _ in range(ranks)]
        self._files: list = [None] * ranks
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]
        self._partial = [""] * ranks
        self._shown, self._handle, self._told = 0.0, None, ""

    def say(self, line: str) -> None:
        """Show a line of the MPI library."""
        self._told += line
        if not self.live:
            print(line, end="", flush=True)

    def read(self, place: Path, end: bool = False) -> None:
        """Read what the ranks have written into a cell's directory since the last time; at the end, all the rest."""
        new = False
        for rank in range(len(self.text)):
            if self._files[rank] is None:
                if not (place / f"{rank}.out").exists():
                    continue
                self._files[rank] = open(place / f"{rank}.out", "rb")  # noqa: SIM115 - closed at the end
            text = self._decoders[rank].decode(self._files[rank].read())
            new |= bool(text)
            self.text[rank] = latest(as_seen(self.text[rank] + text))
            if not self.live:
                self._print(rank, text, end)
            if end:
                self._files[rank].close()
        if end:
            for rank in range(len(self.text)):
                self.figures[rank] = [path.read_bytes() for path in sorted(place.glob(f"{rank}.*.png"))]
                if (place / f"{rank}.value").exists():
                    value = (place / f"{rank}.value").read_text()
                    self.values[rank] = (
                        value if len(value) <= MOST else f"{value[:MOST]} ... ({len(value):,} characters)"
                    )
        if self.live and (end or (new and time.monotonic() > self._shown + OFTEN)):
            self.show()
        elif end:
            for rank, value in enumerate(self.values):
                if value or self.figures[rank]:
                    drawn = f"{len(self.figures[rank])} figures" if self.figures[rank] else ""
                    print(f"[rank {rank}] = {' '.join(filter(None, [value, drawn]))}")

    def _print(self, rank: int, text: str, end: bool) -> None:
        """Print whole lines, with the rank in front."""
        *lines, self._partial[rank] = (self._partial[rank] + text).split("\n")
        for line in lines + [self._partial[rank]] * bool(end and self._partial[rank]):
            print(f"[rank {rank}] {line}", flush=True)

    def show(self) -> None:
        from IPython.display import display

        self._shown = time.monotonic()
        if not (any(self.text) or any(self.values) or any(self.figures) or self._told):
            return
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        columns = []
        for rank, (text, value, figures) in enumerate(zip(self.text, self.values, self.figures, strict=True)):
            parts = [f'<div style="color:#5d6675;font-size:85%;border-bottom:1px solid #c9ced7">rank {rank}</div>']
            if text:
                parts.append(f"<pre style='margin:.3em 0;overflow:auto;max-height:30em'>{html.escape(text)}</pre>")
            if value:
                parts.append(f"<pre style='margin:.3em 0;color:#0072b2;overflow:auto'>{html.escape(value)}</pre>")
            for png in figures:
                encoded = base64.b64encode(png).decode()
                parts.append(f'<img style="max-width:100%" alt="figure" src="data:image/png;base64,{encoded}">')
            columns.append(f'<div style="flex:1 1 10em;min-width:10em;text-align:left">{"".join(parts)}</div>')
        told = f"<pre>{html.escape(self._told)}</pre>" if self._told else ""
        return f'<div style="display:flex;flex-wrap:wrap;gap:1.2em">{"".join(columns)}</div>{told}'

    def __repr__(self):
        """Return columns of text; one rank below the other if they are too wide."""
        columns = []
        for rank, (text, value, figures) in enumerate(zip(self.text, self.values, self.figures, strict=True)):
            drawn = [f"({len(figures)} figures)"] if figures else []
            columns.append([f"rank {rank}", *text.splitlines(), *value.splitlines(), *drawn])
        widths = [max(map(len, column)) for column in columns]
        if sum(widths) + 3 * len(widths) > WIDTH:
            return "\n".join([*(line for column in columns for line in column), self._told]).rstrip("\n")
        rows = zip_longest(*columns, fillvalue="")
        lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self._told]).rstrip("\n")


def latest(text: str) -> str:
    """Return the last lines of a rank's output, and a note if there were others."""
    if len(text) <= MOST:
        return text
    begin = text.find("\n", len(text) - MOST, len(text) - MOST // 2) + 1  # of a line, unless lines are very long
    return LEFT_OUT + text[begin or -MOST :]


def as_seen(text: str) -> str:
    """Return text as a terminal shows it: without colours, and with the last state of a line that was overwritten."""
    return OVERWRITTEN.sub("", COLOURS.sub("", text))
