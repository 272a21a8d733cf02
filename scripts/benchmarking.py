"""What the benchmark suites share: a row of results, geometric means, what runs in a lab of several hosts.

A suite is a file bench_NAME.py beside this one, with a function

    def rows(quick: bool, only: str) -> Iterator[Row]      # quick: a smoke test; only: cases whose name has this text

and `bench.py NAME` finds it. Measure costs (seconds, bytes), not speeds: a ratio below 1 is better for us.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import netlab

from collectives.choosing.selection import processor

TIMEOUT = 300  # seconds of what runs in a lab
# Options of mpiexec, as docs/cluster.md gives them for Ethernet: messages move outside of MPI calls too, so that none
# waits for its receiver's next call. Up to the eager limit, headers included, and as far as socket buffers go; above it
# an exchange goes partly in one direction at a time.
ETHERNET = [
    *("--mca", "btl_tcp_eager_limit", "4194304"),
    *("--mca", "btl_tcp_rndv_eager_limit", "4194304"),
    *("--mca", "btl_tcp_sndbuf", "4194304"),
    *("--mca", "btl_tcp_rcvbuf", "4194304"),
]


def arguments(about: str) -> list[str]:
    """What this suite's processes were started with; who starts a suite by hand is told what it is, and how to."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(f"{about}\nStart it with: python scripts/bench.py {Path(sys.argv[0]).stem.removeprefix('bench_')}")
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    return sys.argv[1:]


def in_lab(
    suite: str, given: Sequence, hosts: int, rate: int, slots: int = 1, options: Sequence = (), trunk: int | None = None
) -> dict:
    """What a suite's file tells when it is started with `given` on the hosts of a lab (netlab.py), `slots` ranks each.

    It tells it as JSON, in its last line. `rate` is that of the cables in Mbit/s, `trunk` that of one between two
    switches; `options` are mpiexec's.

    Raises
    ------
    RuntimeError
        What it said when it failed; that it took longer than `TIMEOUT`.
    """
    lab = [sys.executable, netlab.__file__, "run", "--hosts", hosts, "--slots", slots, "--rate", f"{rate}mbit", "--"]
    if trunk:
        lab[-1:] = ["--trunk", f"{trunk}mbit", "--"]
    mpiexec = [Path(sys.executable).with_name("mpiexec"), "-n", hosts * slots, *options]
    command = [*lab, *mpiexec, sys.executable, "-m", "mpi4py", Path(suite).resolve(), *given]
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result after {TIMEOUT} s") from None
    if done.returncode:
        said = done.stderr.splitlines()
        raise RuntimeError(" ".join([line for line in said if "rror" in line] or said)[:300])
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes
    ----------
    case : str
        What was measured.
    ours, peer : float or None
        Costs in `unit`; None where there is none, and then the note says why.
    peer_name : str
        With version.
    ranks, threads : int
        Processes, and BLAS threads of each.
    note : str
        Conditions, and what helps to read the figure.
    """

    case: str
    ours: float | None
    peer: float | None = None
    peer_name: str = ""
    unit: str = "ms"
    ranks: int = 1
    threads: int = 1
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """ours / peer."""
        return self.ours / self.peer if self.ours is not None and self.peer else None

    def __str__(self):
        ours, peer, ratio = (("-" if v is None else f"{v:.4g}") for v in (self.ours, self.peer, self.ratio))
        where = f"{self.ranks} x {self.threads}"
        costs = f"{ours:>9} {self.unit:6} {peer:>9} {self.peer_name:16} ratio {ratio:>8}"
        return f"{self.case:44} {where:6} {costs}  {self.note}".rstrip()


def geometric_mean(case: str, rows: Iterable[Row]) -> Row:
    """The geometric means of rows that have a peer, of ours and of the peer's: so its ratio is that of the ratios."""
    rows = [row for row in rows if row.ratio]
    if not rows:
        return Row(case, None, note="nothing to compare with")
    ours = math.exp(sum(math.log(row.ours) for row in rows) / len(rows))
    peer = math.exp(sum(math.log(row.peer) for row in rows) / len(rows))
    first = rows[0]
    return Row(case, ours, peer, first.peer_name, first.unit, first.ranks, first.threads, f"of {len(rows)} cases")


def to_json(rows: Iterable[Row]) -> str:
    """A list of objects {case, ours, peer, peer_name, ratio, unit, ranks, threads, note, processor, date}."""
    machine = {"processor": processor_name(), "date": time.strftime("%Y-%m-%d")}
    return json.dumps([asdict(row) | {"ratio": row.ratio} | machine for row in rows], indent=1) + "\n"


def processor_name(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The processor's name; with family and model where the name has no number, as "AMD EPYC" of a virtual machine."""
    name, file = processor(cpuinfo), Path(cpuinfo)
    numbers = re.findall(r"^(?:cpu family|model)\s*: (\d+)", file.read_text() if file.exists() else "", re.MULTILINE)
    return name if re.search(r"\d", name) or not numbers else f"{name} (family {numbers[0]}, model {numbers[1]})"
