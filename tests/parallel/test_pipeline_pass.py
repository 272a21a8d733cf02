"""Stages on different ranks compute what one process computes, after every schedule."""

import numpy as np
import pytest

import nn
from nn.core.layer import Sequential

SEED = 5


def mlp():
    layers = []
    for n, m in ((12, 10), (10, 9), (9, 8), (8, 7), (7, 6)):
        layers += [nn.Linear(n, m), nn.Sigmoid(), nn.Dropout(0.2)]
    return nn.Network(Sequential(*layers, nn.Linear(6, 4)), (12,), np.float64)


def cnn():
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Residual(nn.Conv2d(4, 4, 1))]
    layers += [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 4)]
    return nn.Network(Sequential(*layers), (4, 4, 1), np.float64)


def transformer():
    layers = [nn.Embedding(9, 8), nn.LearnedPositions(6, 8)]
    layers += [nn.TransformerBlock(8, 2, causal=True, dropout=0.2) for _ in range(4)]
    return nn.Network(Sequential(*layers, nn.LayerNorm(8), nn.Linear(8, 9)), (6,), np.float64)


def batches(network, sizes=(10, 10, 3)):
    """Batches that micro-batches do not divide; of the last one some are empty."""
    rng = np.random.default_rng(1)
    for n in sizes:
        if network.takes_ids:
            yield rng.integers(0, 9, (n, 6)), rng.integers(0, 9, (n, 6))
        else:
            yield rng.random((n, *network.in_shape)), rng.integers(0, 4, n)


def one_process(network, micro_batches):
    """The same micro-batches, one after the other."""
    trainer = nn.Serial(network, nn.CrossEntropyLoss(), nn.SGD(0.3, 0.9), SEED)
    losses = [trainer.step(x, y, len(x), micro_batches) for x, y in batches(network)]
    return losses, trainer


def train(comm, network, schedule, micro_batches, **options):
    from parallel.passes.pipeline import PipelinePass

    line = PipelinePass(network, nn.CrossEntropyLoss(), comm, schedule, micro_batches, seed=SEED, **options)
    optimizer = nn.SGD(0.3, 0.9)
    slots = {s: {k: np.zeros_like(own.parameters) for k in optimizer.slots} for s, own in line.stages.items()}
    losses = []
    for step, (x, y) in enumerate(batches(network)):
        losses.append(line.compute_gradients(x, y, len(x)))
        for s, own in line.stages.items():
            optimizer.update(own.parameters, own.gradients, slots[s], step, own.network.layout.region())
    return losses, line


def assert_equal(line, trainer):
    """Parameters and statistics of this rank's stages are those of one process."""
    for layouts, whole in (("layout", trainer.parameters), ("state_layout", trainer.statistics)):
        expected = dict(getattr(trainer.network, layouts).items(whole))
        for own in line.stages.values():
            flat = own.parameters if layouts == "layout" else own.statistics
            for name, array in getattr(own.network, layouts).items(flat):
                assert np.abs(array - expected[name]).max() <= 1e-12 * max(1, np.abs(expected[name]).max()), name


SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev"]


@pytest.mark.mpi(ranks=[1, 2, 3])
def test_every_schedule_computes_what_one_process_computes(comm):
    for build in (mlp, cnn, transformer):
        losses, trainer = one_process(build(), 5)
        for schedule in SCHEDULES:
            found, line = train(comm, build(), schedule, 5)
            assert found == pytest.approx(losses, rel=1e-12), (build.__name__, schedule)
            assert_equal(line, trainer)


class OneSlot:
    """A buffer of which every slot is the first."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, place):
        return self.array[: place.stop - place.start]


@pytest.mark.mpi(ranks=2)
def test_one_buffer_for_all_micro_batches_is_not_equal(comm, monkeypatch):
    """The control: where every input is received into the same slot, weights' gradients are silently wrong."""
    from parallel.passes import pipeline

    losses, trainer = one_process(mlp(), 5)
    found, line = train(comm, mlp(), "gpipe", 5)
    assert found == pytest.approx(losses, rel=1e-12)
    begin = pipeline.Program.__init__

    def aliased(self, *arguments):
        begin(self, *arguments)
        self.slots |= {"input1": OneSlot(self.slots["input1"])} if "input1" in self.slots else {}

    monkeypatch.setattr(pipeline.Program, "__init__", aliased)
    _, line = train(comm, mlp(), "gpipe", 5)
    if 1 in line.stages:
        with pytest.raises(AssertionError):
            assert_equal(line, trainer)


@pytest.mark.mpi(ranks=3)
def test_nobody_waits_for_ever_where_a_send_ends_only_when_it_is_received(comm):
    from mpi4py import MPI

    from collectives import Communicator

    class Synchronous(Communicator):
        def Isend(self, *arguments):
            return MPI.Intracomm.Issend(self, *arguments)

    losses, trainer = one_process(mlp(), 7)
    for schedule in SCHEDULES:
        found, line = train(Synchronous(comm), mlp(), schedule, 7)
        assert found == pytest.approx(losses, rel=1e-12)
        assert_equal(line, trainer)


@pytest.mark.mpi(ranks=2)
def test_zero_bubble_and_1f1b_have_the_same_bits(comm):
    expected, line = train(comm, transformer(), "1f1b", 5)
    for schedule in ("zb-h1", "zb-h2"):
        found, other = train(comm, transformer(), schedule, 5)
        assert found == expected
        for s, own in other.stages.items():
            assert np.array_equal(own.parameters, line.stages[s].parameters)


@pytest.mark.mpi(ranks=3)
def test_recompute_changes_nothing(comm):
    for schedule in ("gpipe", "zb-h1"):
        expected, line = train(comm, cnn(), schedule, 4)
        found, other = train(comm, cnn(), schedule, 4, recompute=True)
        assert found == expected
        for s, own in other.stages.items():
            assert np.array_equal(own.parameters, line.stages[s].parameters)
            assert np.array_equal(own.statistics, line.stages[s].statistics)


@pytest.mark.mpi(ranks=2)
def test_a_schedule_from_text_and_any_cut(comm):
    from parallel.strategies.pipeline.actions import read

    text = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"
    losses, trainer = one_process(mlp(), 2)
    for cut in (1, 7, 15):
        found, line = train(comm, mlp(), read(text), 2, at=[cut])
        assert found == pytest.approx(losses, rel=1e-12)
        assert_equal(line, trainer)


@pytest.mark.mpi(ranks=2)
def test_what_cannot_run_is_refused_on_every_rank(comm):
    from parallel.strategies.pipeline.actions import read

    def refused(why, network=None, schedule="1f1b", **options):
        with pytest.raises(ValueError, match=why):
            train(comm, network or mlp(), schedule, 2, **options)

    refused("has 16 layers, too few for 18 stages", schedule="interleaved", chunks=9)
    refused("the schedule has 2 stages, the network is cut into 3", at=[2, 4])
    refused("it can be cut before 1 to 15", at=[16])
    refused("1B1 cannot run: it needs 1F1", schedule=read("0F0,0F1,0B1,0B0\n1F0,1B1,1F1,1B0"))
    refused("several ranks", schedule=read("0F0,0B0\n0F1,0B1"), at=[])
    tied = nn.Network(Sequential(nn.Embedding(9, 8), nn.ReLU(), nn.TiedLinear("0.W", 8, 9)), (6,), np.float64)
    refused("shares 0.W with an earlier stage", tied)
    padded = nn.Network(Sequential(nn.Embedding(9, 8, padding=0), nn.TransformerBlock(8, 2)), (6,), np.float64)
    refused("marks padding, which later stages are not told of", padded)
