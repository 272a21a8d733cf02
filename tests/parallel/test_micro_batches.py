"""A step in parts is the step: every strategy adds up the gradients of micro-batches, some ranks' parts empty."""

import numpy as np
import pytest
from equality import BATCH, CLIPS, OPTIMIZERS, SEED, batches, difference, mlp, train

import nn
from nn.core.layer import Sequential
from parallel.command.options import Options

EVERYTHING = [
    *({"strategy": name} for name in ("ddp", "dp", "ps", "zero1", "zero2", "fsdp")),
    {"strategy": "ddp", "node_memory": "off"},
    {"strategy": "ps", "servers": 2, "server_place": "workers"},
    {"strategy": "fsdp", "unit": 1e-6, "prefetch": 1},
    {"strategy": "ddp", "compress": "topk:1"},
    {"strategy": "ps", "compress": "topk:1"},
]


def network():
    """What is dropped depends on the place of a sample in the global batch, so on that of its part."""
    layers = nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Dropout(0.3), nn.Linear(24, 10)
    return nn.Network(Sequential(*layers), (8, 8, 1), np.float64)


@pytest.mark.mpi(ranks=4)
def test_every_strategy(comm):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    one = nn.Trainer(network(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](CLIPS[1]), SEED)
    losses = train(one, "mlp")
    for given in EVERYTHING:
        options = Options(batch=BATCH, seed=SEED, **given)
        optimizer = OPTIMIZERS["adam"](one.optimizer.clip)
        many = build_trainer(options, network(), nn.CrossEntropyLoss(), optimizer, Communicator(comm))
        found = [many.step(*batch, accumulate=3) for batch in batches("mlp", many.shard)]
        assert found == pytest.approx(losses, rel=1e-12), given
        alone = many.alone()
        assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12, given
        assert (alone is None) == (comm.rank > 0)
        many.close()
        many.communicator.release()


def test_control_a_forgotten_part_is_seen():
    batch = batches("mlp", (0, 1))[0]
    whole, forgetful = (nn.Trainer(mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED) for _ in range(2))
    whole.step(*batch)
    wrapped = forgetful.compute_gradients
    forgetful.compute_gradients = lambda x, y, total, first, adds: wrapped(x, y, total, first)
    forgetful.step(*batch, accumulate=3)
    assert difference(forgetful.flat_parameters, whole.flat_parameters) > 1e-6
