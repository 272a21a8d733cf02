"""Wide layers tell their factors: the same sums, whoever tells what, for batches that grow and shrink."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
from equality import SEED, difference

import nn
from nn.core.layer import Sequential
from parallel.sync.gradient_factors import wide_layers
from parallel.sync.node_memory import merged, shrinking_blocks


def network(dtype=np.float64):
    """Positions, a layer on each; one on all; one that is not wide."""
    layers = nn.Linear(40, 48), nn.Tanh(), nn.Flatten(), nn.Linear(96, 64, bias=False), nn.Tanh(), nn.Linear(64, 3)
    return nn.Network(Sequential(*layers), (2, 40), dtype)


def batch(samples: int):
    rng = np.random.default_rng(samples)
    return rng.standard_normal((samples, 2, 40)), rng.integers(0, 3, samples)


def test_a_layer_tells_factors_where_they_are_smaller_than_the_gradient():
    found = list(wide_layers(network()))
    assert [layer.name for layer in found] == ["5.W", "3.W", "0.W"], "in the order of the layout"
    most = [max(n for n in range(200) if layer.pays(n)) for layer in found]
    assert most == [64 * 3 // (64 + 3), 96 * 64 // (96 + 64), 40 * 48 // (40 + 48) // 2]


def test_a_matrix_that_two_layers_use_tells_gradients():
    layers = nn.Linear(12, 8, bias=False), nn.Tanh(), nn.TiedLinear("0.W", 8, 12), nn.Linear(12, 2)
    assert [layer.name for layer in wide_layers(nn.Network(Sequential(*layers), (12,)))] == ["3.W"]


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_blocks_cover_the_layout_in_whole_rows_and_shrink(ranks, monkeypatch):
    from parallel.sync import node_memory

    monkeypatch.setattr(node_memory, "SUMS", (256, 2048))
    monkeypatch.setattr(node_memory, "PRODUCTS", (1024, 8192))
    net = network()
    wide = tuple(wide_layers(net))
    blocks = list(shrinking_blocks(net, wide, ranks))
    assert [at for place, _ in blocks for at in range(place.start, place.stop)] == list(range(net.layout.size))
    for place, layer in blocks:
        if layer:
            assert layer.place.start <= place.start and place.stop <= layer.place.stop
            assert (
                (place.start - layer.place.start) % layer.shape[1] == 0 == (place.stop - place.start) % layer.shape[1]
            )
    assert {layer for _, layer in blocks} == {None, *wide}
    sizes = [place.stop - place.start for place, layer in blocks if layer and layer.name == "0.W"]
    assert sizes == sorted(sizes, reverse=True)


def test_neighbours_are_multiplied_at_once():
    assert merged([slice(0, 4), slice(4, 4), slice(4, 9)]) == [slice(0, 9)]
    assert merged([slice(0, 4), None, slice(6, 9), slice(9, 10)]) == [slice(0, 4), slice(6, 10)]


def distributed(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    return DistributedDataParallel(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9), Communicator(comm), SEED)


@contextmanager
def telling_gradients(trainer, ranks):
    """These ranks make gradients, although factors would be smaller."""
    place = trainer.forward_backward.contiguous_slice
    if trainer.shard[0] in ranks:
        trainer.forward_backward.contiguous_slice = lambda samples, total, parts: None
    yield
    trainer.forward_backward.contiguous_slice = place


def steps(comm, trainer, sizes, gradients_of=()):
    """Train on batches of these sizes; the difference to one process."""
    from collectives.steps import chunk

    one = nn.Trainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9), SEED)
    for size in sizes:
        x, y = batch(size)
        mine = slice(*chunk(size, comm.size, comm.rank))
        with telling_gradients(trainer, gradients_of):
            loss = trainer.step(x[mine], y[mine], size)
        assert math.isclose(loss, one.step(x, y), rel_tol=1e-12)
    return difference(trainer.flat_parameters, one.flat_parameters)


@pytest.mark.mpi(ranks=[2, 3], more=[5])
def test_equals_one_process_whoever_tells_what(comm):
    """Sizes for which all layers tell factors, some, none; ranks without samples; some or all make gradients."""
    sizes = (2, 20, 1, 38, 60, 20, 3, 41)
    for gradients_of in (), (0,), (1,), (0, comm.size - 1), range(comm.size):
        trainer = distributed(comm)
        assert "their factors" in trainer.describe()
        assert steps(comm, trainer, sizes, gradients_of) < 1e-12, gradients_of
        trainer.close()


@pytest.mark.mpi(ranks=2)
def test_factors_are_told_instead_of_gradients_and_left_out_ones_are_missed(comm):
    trainer = distributed(comm)
    weight = dict(trainer.network.layout.items(trainer.gradients))["3.W"]
    weight[:] = 7
    assert steps(comm, trainer, [20]) < 1e-12 and (weight == 7).all()
    assert trainer.memory()["in transit"] > 0
    trainer.close()

    trainer = distributed(comm)
    if comm.rank == 1:
        for layer in trainer.sync.factors.layers:
            layer.keep = lambda x, gy: None
    assert steps(comm, trainer, [20]) > 1e-6, "rank 1's samples do not count"
    trainer.close()


@pytest.mark.mpi(ranks=3)
def test_ranks_that_disagree_on_the_size_of_the_batch_are_told(comm):
    trainer = distributed(comm)
    x, y = batch(6)
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)

    def refused(*totals):
        before = trainer.flat_parameters.copy()
        with pytest.raises(ValueError, match=f"size of the global batch: .*{totals[2]} on rank"):
            trainer.step(x[mine], y[mine], totals[comm.rank])
        assert (trainer.flat_parameters == before).all()

    refused(6, 6, 7)  # all need room for factors
    steps(comm, trainer, [6])
    refused(6, 6, 99)  # no factors are told there
    refused(6, 6, 8)  # only there is too little room
    refused(9, 6, 7)
    assert np.isfinite(trainer.step(x[mine], y[mine], 6))
    assert np.isfinite(trainer.step(x[mine], y[mine], 12)), "all need more room"
