"""What project 3 is graded by."""

from itertools import product

import numpy as np
import pytest
from conftest import student

SHAPES = [(p, m) for p, m in product((1, 2, 3, 4, 8), (1, 2, 4, 8, 12)) if m >= p]
SIZES = (12, 16, 10, 8, 8, 5)
ALLOWED = ("Send", "Recv", "Isend", "Irecv")
SECONDS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0, "REDUCE_GRAD": 0.0}


def report(schedule, ranks, micro_batches):
    """Check a schedule and return what it costs; a schedule that cannot run raises PipelineError."""
    from parallel.strategies.pipeline.actions import Action
    from parallel.strategies.pipeline.checking import check

    rows = [[Action(rank, *each) for each in schedule(rank, ranks, micro_batches)] for rank in range(ranks)]
    return check(rows, micro_batches=micro_batches, seconds=SECONDS)


def each_shape(name):
    schedule = getattr(student("pipeline"), name)
    for ranks, micro_batches in SHAPES:
        yield ranks, micro_batches, report(schedule, ranks, micro_batches)


@pytest.mark.points(15, "both schedules can run, for all numbers of ranks and micro-batches")
@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble"])
def test_schedules_run(name):
    for ranks, micro_batches, found in each_shape(name):
        wanted = ranks * micro_batches
        assert all(found.counts[kind] == wanted for kind in "FIW"), f"{name}({ranks} ranks): {found.counts}"


@pytest.mark.points(20, "no rank keeps more micro-batches than there are ranks")
@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble"])
def test_memory(name):
    for ranks, micro_batches, found in each_shape(name):
        assert max(found.peaks) <= ranks, f"{name}({ranks} ranks, {micro_batches}): keeps {max(found.peaks)}"


@pytest.mark.points(15, "1F1B takes 3 (m + p - 1) seconds at most")
@pytest.mark.mpi(ranks=1)
def test_one_f_one_b_is_fast():
    for ranks, micro_batches, found in each_shape("one_f_one_b"):
        best = 3 * (micro_batches + ranks - 1)
        assert found.makespan <= best, f"{ranks} ranks, {micro_batches}: {found.makespan:g} s, expected {best}"


@pytest.mark.points(20, "zero bubble takes 3 m + p - 1 seconds at most")
@pytest.mark.mpi(ranks=1)
def test_zero_bubble_is_fast():
    for ranks, micro_batches, found in each_shape("zero_bubble"):
        best = 3 * micro_batches + ranks - 1
        assert found.makespan <= best, f"{ranks} ranks, {micro_batches}: {found.makespan:g} s, expected {best}"


@pytest.mark.points(30, "a step on ranks is that of one process, by both schedules")
@pytest.mark.mpi(ranks=[1, 2, 3, 4])
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble"])
def test_step(recording, name):
    course, project, communicator = student("network"), student("pipeline"), recording(*ALLOWED)
    rank, ranks = communicator.rank, communicator.size
    network, draw = course.Network(SIZES), np.random.default_rng(5)
    lengths = (3, 1, 4, 2, 3, 3)
    x = [draw.normal(size=(n, SIZES[0])) for n in lengths]
    labels = [draw.integers(0, SIZES[-1], n) for n in lengths]
    wanted, arrays = np.zeros_like(network.w), network.forward(np.concatenate(x))
    loss, gy = course.cross_entropy(arrays[-1], np.concatenate(labels), sum(lengths))
    list(network.backward(wanted, arrays, gy))
    cuts = np.linspace(0, len(network.layers), ranks + 1).astype(int)
    layers = network.layers[cuts[rank] : cuts[rank + 1]]
    actions, g = getattr(project, name)(rank, ranks, len(x)), np.zeros_like(network.w)
    told = project.train_step(layers, network.w, g, actions, x, labels, communicator)
    mine = slice(layers[0].lo, layers[-1].hi)
    worst = np.abs(g[mine] - wanted[mine]).max()
    assert worst < 1e-12, f"the gradient differs by {worst:.1e} from that of one process"
    assert abs(told - loss) < 1e-12, f"the loss is {told}, expected {loss} on every rank"
