"""Frozen layers and rates by layer compute on ranks what they compute on one process, on every strategy."""

import numpy as np
import pytest

import nn
from parallel.command.options import Options

SIZES = 7, 8, 1, 2, 8, 5  # of batches: uneven, and empty for some ranks
CASES = [
    *({"strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp", "dp", "ps", "tensor", "owt", "pipeline")),
    {"strategy": "ddp", "node_memory": "off"},
    {"strategy": "fsdp", "unit": 1e-4},  # units end inside of layers
    {"strategy": "ps", "server_place": "workers"},
    {"strategy": "pipeline", "pipeline": "zb-h1:micro=4"},
]
OPTIMIZERS = {
    "sgd": lambda: nn.SGD(0.1, 0.9, clip=nn.ClipGlobalNorm(0.5), weight_decay=0.01, rates={"0": 0.1, "8.W": 0.3}),
    "adam": lambda: nn.Adam(0.01, clip=nn.ClipNorm(0.1), frozen=("5.b", "10"), rates={"1": 0}),
    "lamb": lambda: nn.LAMB(0.02, weight_decay=0.1, rates={"": 0.5, "5": 0}, frozen=("6",)),
    "lars": lambda: nn.LARS(1.0, weight_decay=0.01, rates={"8": 0}),
}


def network():
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)]
    return nn.Network(nn.Sequential(*layers), (8, 8, 1), np.float64)


def train(trainer, frozen="0"):
    """Losses of steps between which layers are frozen, and trained again."""
    rng, losses, (index, count) = np.random.default_rng(0), [], trainer.shard[:2]
    for step, n in enumerate(SIZES):
        x, y = rng.standard_normal((n, 8, 8, 1)), rng.integers(0, 5, n)
        if step == 2:
            trainer.freeze(frozen, "10.W")
        if step == 3:
            trainer.unfreeze("10")
        if step == 4:
            trainer.unfreeze()
        mine = slice(0, 0) if index is None else slice(index * n // count, (index + 1) * n // count)
        losses.append(trainer.step(x[mine], y[mine], n))
    return losses


def difference(state, other) -> float:
    return max(np.abs(array - other[name]).max() / (1e-3 + np.abs(array).max()) for name, array in state.items())


@pytest.mark.mpi(ranks=[3], more=[1, 2, 4], timeout=120)
def test_equals_one_process(comm, thorough):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    for i, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        one, control = (nn.Trainer(network(), nn.CrossEntropyLoss(), optimizer()) for _ in range(2))
        expected = train(one)
        train(control, frozen="5")
        assert difference(one.state_dict(), control.state_dict()) > 1e-4, "frozen elsewhere it is another network"
        for case in CASES if thorough or name == "sgd" else CASES[i :: len(OPTIMIZERS) - 1]:
            options, communicator = Options(**case, batch=8), Communicator(comm)
            if case["strategy"] == "ps" and comm.size == 1 and "server_place" not in case:
                continue
            made = network(), nn.CrossEntropyLoss(), optimizer(), communicator
            many = build_trainer(options, *made)
            np.testing.assert_allclose(train(many), expected, rtol=1e-10, err_msg=str((name, case)))
            state = many.state_dict()
            if comm.rank == 0:
                assert difference(one.state_dict(), state) < 1e-11, (name, case)
            many.close()
            communicator.release()
