"""The ranks that cells of %%mpi run on: for one cell, or for many (a session), where variables stay.

The ranks (notebook_rank.py) and the notebook share a directory. Rank r learns of cell k from a line in its pipe `r.go`;
what belongs to the cell is in `k/`: cell.py, definitions.py, request.json, in.json and in.npz; and of each rank
r.out (what it prints), r.*.png (figures), r.value (the last line's), then r.json and r.npz (what it brings back), or
r.error (its traceback). A rank that is ended leaves in r.stack where it was.
"""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from parallel.launch import launcher, notebook_rank, processes
from parallel.launch.notebook_output import Output

START = 60.0  # seconds that ranks get to begin
GRACE = 1.0  # seconds that the other ranks get to fail too before all are ended
SLICE = 0.01  # seconds that a slowed rank runs at a time


class RankError(RuntimeError):
    """A cell failed on some rank; shown without the notebook's own frames, which say nothing."""

    def _render_traceback_(self):
        return str(self).splitlines()


@dataclass
class Cell:
    """A cell to run: source, names to bring back, values that ranks start with; ranks to slow down or kill."""

    source: str
    out: list[str]
    definitions: str
    values: dict
    timeout: float
    slow: dict[int, float] = field(default_factory=dict)
    kill: dict[int, float] = field(default_factory=dict)


def check(values: dict) -> None:
    """Raise TypeError, with the name, for a value that cannot go to the ranks."""
    notebook_rank.encoded(values)


class Session:
    """Some ranks, started with the first cell. Where they do not stay, they end with it.

    Attributes
    ----------
    ranks : int
    cells : int
        Run so far.
    running : bool
        Whether there are ranks that could run another cell.
    """

    def __init__(self, ranks: int, stays: bool):
        self.ranks, self.stays, self.cells, self.running = ranks, stays, 0, False
        self._ends = contextlib.ExitStack()
        self._pipes: list[int] = []
        self._say = lambda text: None

    def _start(self) -> None:
        self._directory = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="mpi-cell-")))
        for rank in range(self.ranks):
            os.mkfifo(self._directory / f"{rank}.go")
            self._pipes.append(os.open(self._directory / f"{rank}.go", os.O_RDWR))  # does not wait for the rank
            self._ends.callback(os.close, self._pipes[-1])
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "agg"}  # not the notebook's own backend
        program = ["-m", "parallel.launch.notebook_rank", str(self._directory)]
        job = launcher.Job(program, self.ranks, env=environment, stdout=lambda line: self._say(line))
        self._job, self.running = self._ends.enter_context(job), True

    def run(self, cell: Cell, output: Output) -> list[dict]:
        """Run a cell on all ranks; return the values of each. Raises RankError, mostly after the ranks have ended."""
        began = self.running
        try:
            if not began:
                self._start()
            place = self._directory / str(self.cells)
            place.mkdir()
            (place / "cell.py").write_text(cell.source)
            (place / "definitions.py").write_text(cell.definitions)
            (place / "request.json").write_text(json.dumps(cell.out))
            notebook_rank.save(place / "in", cell.values)
            for pipe in self._pipes:
                os.write(pipe, f"{self.cells}\n".encode())
            self.cells += 1
            self._wait(place, cell, output)
            return [notebook_rank.load(place / str(rank)) for rank in range(self.ranks)]
        except RankError:
            raise
        except BaseException:
            self.end(politely=False)
            raise

    def _wait(self, place: Path, cell: Cell, output: Output) -> None:
        """Show the output until every rank is done."""
        self._say = output.say
        begun = lambda rank: (place / f"{rank}.out").exists()
        ends, running, failed_at, status = time.monotonic() + START, False, None, None
        with contextlib.ExitStack() as disturbing:
            while True:
                status = self._job.wait(0.02 if running else 0.05)
                output.read(place)
                now = time.monotonic()
                failed = {rank for rank in range(self.ranks) if (place / f"{rank}.error").exists()}
                done = {rank for rank in range(self.ranks) if (place / f"{rank}.json").exists()}
                failed_at = failed_at or (now if failed else None)
                if not running and all(map(begun, range(self.ranks))):
                    began, ends, running = now, now + cell.timeout, True
                    for rank, factor in cell.slow.items():
                        disturbing.enter_context(slowed(self._pid(rank), factor))
                if running:
                    for rank in [r for r, after in cell.kill.items() if now > began + after]:
                        del cell.kill[rank]
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(self._pid(rank), signal.SIGKILL)
                if len(failed | done) == self.ranks or status is not None:
                    break
                if (failed and now > failed_at + GRACE) or now > ends:
                    break
        finished = len(failed | done) == self.ranks
        self._say = lambda text: None  # what mpiexec says about being ended is no news
        if not finished and status is None:
            self._job.show_stacks()
            self._job.wait(GRACE)
        output.read(place, end=True)
        if not self.stays and finished and not failed:
            self._send_end()
            status = self._job.wait(processes.GRACE)
            finished = status in (0, None)
        if finished and not failed:
            return
        late = f"no end within {cell.timeout:g} s" if running else f"the ranks did not begin within {START:g} s"
        text = self._explain(place, None if finished else status, late)
        if self.stays and not finished:
            text += "\nthe session has ended"
        if not (self.stays and finished):
            self.end(politely=False)
        raise RankError(text)

    def _pid(self, rank: int) -> int:
        return int((self._directory / f"{rank}.pid").read_text())

    def _send_end(self) -> None:
        for pipe in self._pipes:
            os.write(pipe, b"end\n")

    def end(self, politely: bool = True) -> None:
        """End the ranks."""
        if self.running:
            self.running = False
            if politely:
                self._send_end()
                self._job.wait(processes.GRACE)
        self._pipes.clear()
        self._ends.close()

    def _explain(self, place: Path, status: int | None, late: str) -> str:
        """Return the error of each rank, or the line at which it was."""
        ranks = range(self.ranks)
        errors = {rank: path.read_text() for rank in ranks if (path := place / f"{rank}.error").exists()}
        by_text: dict[str, list[int]] = {}
        for rank, text in errors.items():
            by_text.setdefault(text, []).append(rank)
        parts = [f"rank {', '.join(map(str, those))} of {self.ranks}: {text}" for text, those in by_text.items()]
        if not errors:
            parts = [late if status is None else launcher.ending(status)]
        for rank in ranks:
            frames = launcher.read_stack(self._directory / f"{rank}.stack")
            inside = [frame for frame in frames if frame[0] == str(place / "cell.py")]
            if rank not in errors and inside:
                line = inside[0][1]
                source = (place / "cell.py").read_text().splitlines()[line - 1].strip()
                parts.append(f"rank {rank} of {self.ranks} was at line {line} of the cell: {source}")
        text = re.sub(f'"{re.escape(str(place))}/(cell|definitions).py"', r"the \1", "\n".join(parts))
        return re.sub(f'"{re.escape(str(self._directory))}/(\\d+)/cell.py"', r"cell \1 of the session", text)


def slowed(pid: int, factor: float) -> contextlib.AbstractContextManager[None]:
    """In this block a process runs a `factor`-th of the time: alternating SIGSTOP and SIGCONT."""

    def stop_and_go(over):
        with contextlib.suppress(ProcessLookupError):
            try:
                while not over.wait(SLICE):
                    os.kill(pid, signal.SIGSTOP)
                    over.wait((factor - 1) * SLICE)
                    os.kill(pid, signal.SIGCONT)
            finally:
                os.kill(pid, signal.SIGCONT)

    return processes.meanwhile(stop_and_go, "slowed")
