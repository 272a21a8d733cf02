"""Across hosts an allreduce takes what the cable takes; two levels beat a flat ring by the bytes that they save."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import bench_hosts  # noqa: E402
import netlab  # noqa: E402

MPIEXEC = Path(sys.executable).with_name("mpiexec")
RATE, NBYTES = 100, 4 << 20  # Mbit/s, bytes
pytestmark = [
    pytest.mark.skipif(bool(netlab.why_not()), reason=str(netlab.why_not())),
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python"),
]


def measure(hosts, slots, dealt):
    """Milliseconds of each algorithm, and the least that the cables allow."""
    lab = [sys.executable, SCRIPTS / "netlab.py", "run", "--hosts", hosts, "--slots", slots, "--rate", f"{RATE}mbit"]
    ranks = [MPIEXEC, "-n", hosts * slots, "--map-by", dealt, sys.executable, "-m", "mpi4py", bench_hosts.__file__]
    done = subprocess.run([*map(str, [*lab, "--", *ranks, NBYTES, 2])], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), bench_hosts.least(hosts, NBYTES, RATE)


def test_a_segmented_ring_fills_the_cables():
    times, least = measure(4, 1, "slot")
    assert least / times["segmented_ring"] >= 0.9, times


def test_two_levels_save_bytes_on_the_cables():
    """Dealt out by node every link of the flat ring is a cable between nodes: it carries three times as much."""
    times, least = measure(2, 2, "node")
    assert times["ring"] >= 1.5 * times["two_level"], times
    assert times["ring"] >= 2.8 * least
