"""Across hosts an allreduce takes what the cable takes; two levels beat a flat ring by the bytes that they save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, longer

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import bench_hosts  # noqa: E402
import benchmarking  # noqa: E402
import netlab  # noqa: E402

MPIEXEC = Path(sys.executable).with_name("mpiexec")
RATE, NBYTES = 25, 1 << 19  # Mbit/s, bytes: so slow that a busy machine keeps up
pytestmark = [
    pytest.mark.skipif(bool(netlab.reason_against()), reason=str(netlab.reason_against())),
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python"),
]


def measure(hosts, slots, dealt, calls, *names):
    """(milliseconds of each call, bytes that a host sends in one) of these sides, and the least that cables allow."""
    options = ["--map-by", dealt]
    found = benchmarking.in_lab(bench_hosts.__file__, [NBYTES, calls, *names], hosts, RATE, slots, options)
    assert all(len(times) == calls for times in found["times"].values())
    return found["times"], found["sent"], bench_hosts.least(hosts, NBYTES, RATE)


def test_a_segmented_ring_fills_the_cables():
    """The quickest of some calls: a busy machine is late in others."""
    for calls in longer(2):
        times, _, least = measure(4, 1, "slot", calls, "segmented_ring")
        if least / min(times["segmented_ring"]) >= 0.9:
            break
    assert least / min(times["segmented_ring"]) >= 0.9, times


def test_two_levels_save_bytes_on_the_cables():
    """Dealt out by node every link of the flat ring is a cable between nodes: it carries three times as much."""
    times, sent, least = measure(2, 2, "node", 1, "ring", "two_level", "auto", bench_hosts.SHARED)
    assert sent["ring"] > 2.9 * sent["two_level"], sent
    for name in "two_level", "auto", bench_hosts.SHARED:
        assert 1 <= sent[name] / NBYTES < 1.1, "half of x twice, headers and acknowledgements, no more"
    assert min(times["ring"]) >= 2.8 * least


IN_THE_LAB = """
import json, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
import nn
from bench_compression import card_bytes
from collectives import Communicator
from collectives.steps import chunk
from parallel import DistributedDataParallel, FullyShardedDataParallel
from collectives.failures.launch_check import nodes_of

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
communicator = Communicator(world, allreduce="two_level")
nodes = nodes_of(world)
for count in (0, 1, size - 1, 1001, 1 << 18):
    for start in ("own", "in place"):
        x = np.random.default_rng([count, rank]).integers(-99, 99, count).astype("f4")
        y = x.copy() if start == "in place" else np.empty_like(x)
        world.Barrier()
        before = card_bytes()
        communicator.Allreduce(MPI.IN_PLACE if start == "in place" else x, y)
        world.Barrier()
        sent = card_bytes() - before
        want = sum(np.random.default_rng([count, r]).integers(-99, 99, count).astype("f4") for r in range(size))
        assert np.array_equal(y, want), (count, start, rank)

x, y = np.random.default_rng(1).standard_normal((2, 13, 6, 6, 1)), np.random.default_rng(2).integers(0, 4, (2, 13))
def train(kind, *more, **options):
    layers = nn.Flatten(), nn.Linear(36, 40), nn.Sigmoid(), nn.Linear(40, 4)
    network = nn.Network(nn.Sequential(*layers), (6, 6, 1), np.float64)
    trainer = kind(network, nn.CrossEntropyLoss(), nn.SGD(0.1, momentum=0.9), *more, **options)
    mine = slice(*chunk(13, *trainer.shard[::-1]))
    for step in range(4):
        trainer.step(x[step % 2][mine], y[step % 2][mine], 13)
    return trainer.state_dict(), trainer
want, _ = train(nn.Trainer)
how = {}
for kind, options in ((DistributedDataParallel, {}), (FullyShardedDataParallel, {"unit_bytes": 1000})):
    got, trainer = train(kind, communicator, **options)
    if rank == 0:
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-12, atol=1e-15, err_msg=f"{kind.__name__} {name}")
    how[kind.__name__] = trainer.describe()
    trainer.close()
sent = world.gather(sent)
if rank == 0:
    print(json.dumps({"nodes": nodes, "sent": dict(zip(nodes, sent)), "how": how}))
"""


@pytest.mark.parametrize(
    ("layout", "summed"),
    [
        pytest.param("2+2", "between 2 nodes", marks=pytest.mark.exhaustive),
        pytest.param("3+1", "different numbers of ranks (3, 1)", marks=pytest.mark.exhaustive),
        ("2+1+1", "(2, 1, 1)"),
    ],
)
def test_nodes_of_any_size(layout, summed, disk_path):
    """Two levels sum right, and no more crosses a cable than must; strategies compute what one process computes."""
    slots = [int(count) for count in layout.split("+")]
    (disk_path / "program.py").write_text(IN_THE_LAB)
    lab = [sys.executable, SCRIPTS / "netlab.py", "run", "--hosts", len(slots), "--slots", max(slots), "--"]
    hosts = ",".join(f"h{i}:{count}" for i, count in enumerate(slots, 1))
    ranks = [MPIEXEC, "--host", hosts, "-n", sum(slots), sys.executable, "-m", "mpi4py", disk_path / "program.py"]
    path = {"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent}"}
    done = subprocess.run(
        [*map(str, lab + ranks)], capture_output=True, text=True, timeout=PATIENCE, env=os.environ | path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found["nodes"].count(node) for node in dict.fromkeys(found["nodes"])] == slots
    m, nbytes = len(slots), 4 << 18
    for sent in found["sent"].values():
        assert 1 <= sent / (2 * (m - 1) / m * nbytes) < 1.1, "headers and acknowledgements, no more"
    assert summed in found["how"]["DistributedDataParallel"]
