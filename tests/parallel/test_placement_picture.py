"""The picture of who holds what: the elements of each rank, of strategies that replicate, shard, serve and split."""

import math
from itertools import pairwise

import numpy as np
import pytest

import nn
import parallel
from parallel.state.placement_picture import DRAWN, draw_placement, held_by_ranks

BIASES = 8 + 2  # of the linear layers whose inputs are divided: added after a sum, each rank of "tensor" has them


def network():
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    return nn.Network(layers, (6,), np.float64)


def trainers(communicator):
    """(trainer, how often all ranks together hold each element of parameters, gradients, moments)."""
    arguments, p = (network(), nn.CrossEntropyLoss(), nn.Adam(0.01), communicator), communicator.size
    yield parallel.DistributedDataParallel(*arguments), (p, p, p)
    yield parallel.ZeRO1(*arguments), (p, p, 1)
    yield parallel.ZeRO2(*arguments), (p, 1, 1)
    yield parallel.FullyShardedDataParallel(*arguments), (1, 1, 1)
    yield parallel.Pipeline(*arguments), (1, 1, 1)
    yield parallel.ParameterServer(*arguments, servers=p - 1), (2, 2, 1)
    yield parallel.TensorParallel(*arguments, tensor=p), (1, 1, 1)


def overlap(ranges):
    """Elements that are there twice."""
    return sum(max(0.0, lo + n - after) for (lo, n), (after, _) in pairwise(sorted(ranges)))


@pytest.mark.mpi(ranks=[2])
def test_every_element_is_held_as_often_as_the_strategy_says(comm, ranks):
    from collectives import Communicator

    for trainer, times in trainers(Communicator(comm)):
        count, everyone = trainer.network.layout.count, held_by_ranks(trainer.table)
        assert len(everyone) == ranks
        for kind, often in zip(DRAWN, times, strict=True):
            per_rank = [held[kind].ranges if kind in held else [] for held in everyone]
            together = [each for ranges in per_rank for each in ranges]
            more = BIASES * (ranks - 1) if trainer.name == "TensorParallel" else 0
            assert math.fsum(n for _, n in together) == pytest.approx(often * count + more), (trainer.name, kind)
            assert all(overlap(ranges) < 1e-9 for ranges in per_rank), (trainer.name, kind)
            assert often > 1 or overlap(together) == pytest.approx(more, abs=1e-9), (trainer.name, kind)
            assert min(lo for lo, _ in together) == 0 and max(sum(each) for each in together) == pytest.approx(count)
        figure = draw_placement(everyone, trainer.name, count)
        assert [axes.get_title(loc="left").partition(" ")[0] for axes in figure.axes] == list(DRAWN)
        trainer.close()
