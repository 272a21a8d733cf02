"""Momentum correction acts once on each element, wherever a strategy keeps the optimizer's moments."""

import numpy as np
import pytest
from equality import CHOOSY

import nn
from nn.core.layer import Sequential
from nn.optim.learning_rates import Step, Warmup
from nn.training.schedules import MomentumCorrection
from parallel.command.options import Options


def train(make, corrected=True):
    """The trainer after two epochs of warm-up and steps, with LARS."""
    rng = np.random.default_rng(0)
    data = nn.data.Dataset(rng.random((40, 6)), rng.integers(0, 3, 40), dtype=np.float64)
    layers = nn.Linear(6, 30), nn.Sigmoid(), nn.Linear(30, 3)
    trainer = make(nn.Network(Sequential(*layers), (6,), np.float64), nn.CrossEntropyLoss(), nn.LARS(20.0))
    schedule = Warmup(Step(20.0, 5, 0.5), 3, 1.0)
    hooks = [MomentumCorrection(schedule)] if corrected else []
    nn.fit(trainer, nn.Loader(data, 10, shard=trainer.shard), 2, hooks, schedule=schedule)
    return trainer


@pytest.mark.mpi(ranks=[2, 3])
def test_every_strategy_corrects_as_one_process_does(comm):
    from collectives import Communicator
    from parallel.strategies import AS_ONE, build_trainer

    communicator = Communicator(comm)
    one = dict(train(nn.Trainer).state_items())
    plain = train(nn.Trainer, corrected=False)
    assert max(np.abs(array - one[name]).max() for name, array in plain.state_items()) > 1e-3, "control: without it"
    for name, more in [(name, {}) for name in AS_ONE if name not in CHOOSY] + [("ddp", {"node_memory": "off"})]:
        options = Options(strategy=name, batch=10, seed=0, **more)
        many = train(lambda *given, o=options: build_trainer(o, *given, communicator))
        for entry, array in many.state_items():
            if comm.rank == 0:
                np.testing.assert_allclose(array, one[entry], rtol=1e-12, atol=1e-14, err_msg=f"{name}: {entry}")
