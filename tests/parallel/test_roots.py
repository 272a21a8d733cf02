"""Networks whose root is no Sequential, and containers within: every strategy computes what one process does."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from equality import SEED, difference

import nn
from collectives.steps import chunk
from nn.core.layer import Sequential
from nn.models.googlenet import Auxiliary, AuxiliaryLoss

FEATURES, CLASSES = 6, 6
ROOTS = {
    "linear": lambda: nn.Linear(6, 6),
    "residual": lambda: nn.Residual(nn.Linear(6, 6), nn.Linear(6, 6)),
    "residual of several": lambda: nn.Residual(Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))),
    "branches": lambda: nn.Parallel(nn.Linear(6, 2), Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 4))),
    "recompute": lambda: nn.Recompute(
        Sequential(nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7, synchronized=True), nn.Tanh(), nn.Linear(7, 6))
    ),
    "all of them within": lambda: Sequential(
        nn.Linear(6, 6),
        nn.Recompute(nn.Residual(Sequential(nn.Linear(6, 5), nn.Recompute(nn.Tanh()), nn.Linear(5, 6)))),
        nn.Parallel(nn.Recompute(nn.Residual(nn.Linear(6, 6))), nn.Linear(6, 3)),
        nn.Residual(nn.Parallel(nn.Linear(9, 4), nn.Linear(9, 5)), nn.Recompute(nn.Linear(9, 9))),
        nn.Linear(9, 6),
    ),
    "auxiliary": lambda: Auxiliary(Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), nn.Linear(6, 6)),
    "no parameters": lambda: nn.Tanh(),
}
STRATEGIES = {
    "ddp": [{"node_memory": "auto"}, {"node_memory": "off", "bucket": 1e-4, "first_bucket": 1e-4}],
    "dp": [{}],
    "ps": [{"server_place": "workers"}],
    "zero1": [{"unit": 1e-6}],
    "zero2": [{"unit": 1e-6}],
    "tensor": [{"tensor": "pairs"}, {"tensor": "width"}],
    "fsdp": [{"unit": 1e-6}, {"unit": 1.0, "prefetch": 1}, {"unit": 1e-6, "prefetch": 2}],
}
SIZES = 7, 7, 2  # of the batches: uneven parts, and none for one of three ranks


def steps(trainer) -> list[float]:
    """The losses of a step with each batch, of which the trainer gets its part; then those of an evaluation."""
    rng, (index, count), losses = np.random.default_rng(2), trainer.shard, []
    for size in SIZES:
        x, y = rng.standard_normal((size, FEATURES)), rng.integers(0, CLASSES, size)
        lo, hi = chunk(size, count, index) if index is not None else (0, 0)
        losses.append(trainer.step(x[lo:hi], y[lo:hi], size))
        losses.append(float(trainer.sum(trainer.sum_scores(x[lo:hi], y[lo:hi]))[0]))
    return losses


def made(root):
    loss = AuxiliaryLoss(nn.CrossEntropyLoss()) if isinstance(root, Auxiliary) else nn.CrossEntropyLoss()
    return nn.Network(root, (FEATURES,), np.float64), loss, nn.Adam(0.01, eps=1e-4)


@cache
def one_process(name):
    """(state, losses) of one process."""
    one = nn.Trainer(*made(ROOTS[name]()), SEED)
    losses = steps(one)
    return one.state_dict(), losses


@pytest.mark.mpi(ranks=[3], more=[2], timeout=60)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_one_process(comm, strategy):
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    for (name, root), options in product(ROOTS.items(), STRATEGIES[strategy]):
        case = f"{name}, {options}"
        if strategy in ("ps", "tensor") and name == "no parameters":
            continue  # nothing to serve, or to share: refused
        want, losses = one_process(name)
        options = Options(strategy=strategy, seed=SEED, **options)
        many = build_trainer(options, *made(root()), Communicator(comm))
        np.testing.assert_allclose(steps(many), losses, rtol=1e-12, err_msg=case)
        state = many.state_dict()
        if comm.rank == 0:
            assert state.keys() == want.keys(), case
            for key, array in want.items():
                assert difference(state[key], array) < 1e-12 if array.ndim else state[key] == array, (case, key)
        alone = many.alone()
        assert (alone is None) == (comm.rank > 0)
        many.close()
        many.communicator.release()
