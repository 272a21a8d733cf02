"""Images cut in height at the edge of what can be, and what is around a step: evaluation, checkpoints, bad values."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from equality import OPTIMIZERS, SEED
from test_spatial import assert_same, exchange_of, inception, loss_of, one_process, residual, together

import nn
from nn.core.layer import Sequential

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import netlab


def thin():
    """A row for each of four ranks, kernels that reach over several parts, strides that jump over some."""
    layers = [
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 3, (7, 1), padding=(3, 0)), nn.Tanh(), nn.Conv2d(3, 4, (2, 1), (1, 2), (4, 0)), nn.ReLU()),
        *(nn.MaxPool2d((5, 1), (3, 1), (2, 0), ceil_mode=True), nn.BatchNorm2d(4), nn.Dropout(0.2)),
        *(nn.AvgPool2d((4, 1), 1, (2, 0), ceil_mode=True), nn.Flatten(), nn.Linear(48, 5)),
    ]
    return nn.Network(Sequential(*layers), (4, 3, 2), np.float64, "thin")


def high():
    """One column of single rows after the first layer: a value of a sample in a channel on each rank."""
    layers = [nn.Conv2d(2, 4, (5, 3), (5, 1), bias=False), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Conv2d(4, 3, (4, 1))]
    return nn.Network(Sequential(*layers, nn.Flatten(), nn.Linear(3, 5)), (20, 3, 2), np.float64, "high")


def images():
    """The outputs are an image, cut to the last layer: of each place its class."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, (3, 1), (2, 1), (1, 0)), nn.LayerNorm(5)]
    return nn.Network(Sequential(*layers, nn.GlobalMaxPool2d()), (9, 3, 2), np.float64, "images")


@pytest.mark.mpi(ranks=4, more=[2, 3])
def test_thin_parts_and_large_kernels(comm, ranks):
    hidden = {"stage": 2, "unit_bytes": 300}
    for make in thin, high, images:
        for optimizer, sync in (("sgd", {}), ("adam", hidden), ("adam", {"compressor": "none"})):
            one, losses = one_process(make, optimizer)
            many = together(comm, make, optimizer, sync=exchange_of(sync))
            assert_same(many, one, losses)
            many.close()


@pytest.mark.mpi(ranks=2)
def test_a_value_that_is_not_finite_on_one_rank_only(comm):
    """In some rows, or in a branch: it is named, all ranks raise, and none waits for ever."""
    sharded = {"stage": 3, "unit_bytes": 400}
    for make, kind, sync, names, words in (
        (residual, "SpatialParallel", {}, ["0.W"], r"layer 0 .* on rank 1 \(samples \[2\]"),
        (residual, "SpatialParallel", sharded, ["0.W"], r"layer 0 .* on rank 1 \(samples \[2\]"),
        (inception, "BranchParallel", {}, ["2.1.0.W", "2.1.2.W"], r"layer 2\.1\.2 .* on rank [01]"),
        (inception, "BranchParallel", sharded, ["2.1.0.W", "2.1.2.W"], r"layer 2\.1\.2 .* on rank [01]"),
        (inception, "BranchParallel", {}, ["2.2.1.W", "3.rest.0.W"], r"layer 3\.rest\.0 .* on rank [01]"),
    ):
        many = together(comm, make, kind=kind, sync=sync)
        state = comm.bcast(many.state_dict())
        for name in names:
            state["param/" + name] = state["param/" + name] * 1e200
        many.load_state_dict(state)
        x = np.zeros((4, *many.network.in_shape))
        x[2, -1] = 1e160 * np.random.default_rng(0).standard_normal(x.shape[2:])  # the last row: the last rank's
        with pytest.raises(nn.NonFiniteLoss, match=f"output of {words}"):
            many.step(x, np.zeros(4, int), 4)
        many.close()


@pytest.mark.mpi(ranks=4)
def test_what_one_mesh_has_trained_goes_on_on_another(comm):
    """States, also of what a method keeps, and of shards; evaluation with fewer samples than groups."""
    hows = (
        ("SpatialParallel", {"space": 2}, {"stage": 2, "unit_bytes": 400}),
        ("SpatialParallel", {"space": 4}, {"compressor": "topk:1"}),
        ("BranchParallel", {"branch": 2}, {"compressor": "topk:1"}),
        ("BranchParallel", {"branch": 4}, {"stage": 3}),
        ("SpatialParallel", {"space": 2}, {}),
    )
    make, more = inception, {"synchronized": True}
    one = nn.Trainer(make(**more), loss_of(make), OPTIMIZERS["adam"](), SEED)
    state, left = one.state_dict(), {}
    rng = np.random.default_rng(5)
    for kind, ranks, sync in hows:
        many = together(comm, make, kind=kind, sync=exchange_of(sync), more=more, **ranks)
        many.load_state_dict({**state, **left} if sync.get("compressor") else state)
        for n in (5, 1):
            x, y = rng.standard_normal((n, *one.network.in_shape)), rng.integers(0, 5, n)
            index, count = many.shard
            mine = slice(n * index // count, n * (index + 1) // count)
            np.testing.assert_allclose(many.step(x[mine], y[mine], n), one.step(x, y, n), rtol=1e-11)
            found = many.sum(many.sum_scores(x[mine], y[mine]))
            np.testing.assert_allclose(found, one.sum_scores(x, y), rtol=1e-10, err_msg=f"{kind}, {ranks}, {n}")
            np.testing.assert_allclose(many.predict(x), one.predict(x), rtol=1e-9, atol=1e-12)
        everything = comm.bcast(many.state_dict())
        left = {name: array for name, array in everything.items() if name.startswith("compress/")} or left
        state = {name: array for name, array in everything.items() if name not in left}
        for name, array in one.state_dict().items():
            np.testing.assert_allclose(state[name], array, rtol=0, atol=1e-11 * max(1e-3, np.abs(array).max(initial=0)))
        many.close()


ACROSS_HOSTS = """
    import sys
    sys.path[:0] = sys.argv[1:]
    from mpi4py import MPI
    from parallel.sync import messages
    from parallel.strategies.operators import rows
    from test_spatial import assert_same, convolutions, one_process, together

    rows.HIDES, messages.ROUNDS = 0, 2
    for sync in ({}, {"stage": 3, "unit_bytes": 400, "prefetch": 1}):
        one, losses = one_process(convolutions)
        many, said = together(MPI.COMM_WORLD, convolutions, sync=sync), []
        many.say = said.append
        assert_same(many, one, losses)
        many.close()
        print(MPI.COMM_WORLD.rank, *said, flush=True)
"""


@pytest.mark.skipif(bool(netlab.reason_against()), reason=str(netlab.reason_against()))
def test_between_hosts_rows_are_hidden_or_waited_for_as_is_faster(disk_path):
    """Equal to one process, either way; all ranks are told what was found."""
    program, here = disk_path / "program.py", Path(__file__).parent
    program.write_text(textwrap.dedent(ACROSS_HOSTS))
    python = [sys.executable, "-m", "mpi4py", program, here.parents[1], here, here.parent]  # tests/nn is not nn
    ranks = [Path(sys.executable).with_name("mpiexec"), "-n", 2, *python]
    command = [sys.executable, netlab.__file__, "run", "--hosts", 2, "--slots", 1, "--", *ranks]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "rows of other ranks" in line]
    assert len(told) == 4 and all("hidden" in line and "waited for" in line for line in told), done.stdout
