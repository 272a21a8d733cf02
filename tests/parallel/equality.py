"""The first test of every strategy: it computes what one process computes.

    assert_equals_one_process(lambda network, loss, optimizer: Strategy(network, loss, optimizer, communicator, SEED))

Five steps in float64 over uneven batches, for every model and optimizer: parameters and running statistics differ from
one process's by less than 1e-12 relative.
"""

from functools import cache

import numpy as np
import pytest

import nn
from nn.core.layer import Sequential
from nn.optim import clipping

SEED, STEPS, BATCH = 5, 5, 16
CHOOSY = ("pipeline", "owt", "sandblaster")  # strategies that do not take every network, or every optimizer
SAMPLES = 35  # of which batches of 16 leave 3: uneven parts, and none at all for some of 4 or 5 ranks

EPS = 1e-4  # the gradient of the bias of attention's keys is rounding alone, about 1e-17: 1/eps must not magnify it

OPTIMIZERS = {
    "sgd": lambda clip=None: nn.SGD(0.1, weight_decay=1e-3, clip=clip),
    "momentum": lambda clip=None: nn.SGD(0.1, 0.9, weight_decay=1e-3, clip=clip),
    "nesterov": lambda clip=None: nn.SGD(0.1, 0.9, nesterov=True, clip=clip),
    "adam": lambda clip=None: nn.Adam(0.01, eps=EPS, clip=clip),
    "lars": lambda clip=None: nn.LARS(0.5, weight_decay=1e-3, clip=clip),
    "lamb": lambda clip=None: nn.LAMB(0.01, eps=EPS, clip=clip),
}
CLIPS = (None, clipping.ClipGlobalNorm(0.5), clipping.ClipNorm(0.1))


def mlp():
    layers = nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 10)
    return nn.Network(Sequential(*layers), (8, 8, 1), np.float64)


def cnn(synchronized: bool = True):
    # Without a bias: before a normalisation its gradient would be rounding and nothing else.
    convolution = nn.Conv2d(1, 4, 3, padding=1, bias=False)
    layers = convolution, nn.BatchNorm2d(4, synchronized=synchronized), nn.ReLU(), nn.Flatten()
    return nn.Network(Sequential(*layers, nn.Dropout(0.3), nn.Linear(256, 10)), (8, 8, 1), np.float64)


def transformer():
    return nn.models.build("transformer:16,2,1", (8,), 32, "float64")


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def dataset(model: str):
    rng = np.random.default_rng(3)
    if model == "transformer":
        ids = rng.integers(0, 32, (SAMPLES, 9))
        return nn.data.Dataset(ids[:, :-1], ids[:, 1:], classes=32, dtype=np.float64)
    return nn.data.Dataset(rng.random((SAMPLES, 8, 8, 1)), rng.integers(0, 10, SAMPLES), classes=10, dtype=np.float64)


def batches(model: str, shard: tuple[int, int], steps: int = STEPS) -> list:
    """The first steps' (x, y, total), cut for a shard: two epochs of 16, 16 and 3 samples."""
    loader = nn.Loader(dataset(model), BATCH, seed=1, shard=shard, dtype=np.float64)
    return [batch for epoch in range(steps // 3 + 1) for batch in loader.epoch(epoch)][:steps]


def train(trainer, model: str, steps: int = STEPS) -> list[float]:
    """Make the steps; returns the losses."""
    return [trainer.step(*batch) for batch in batches(model, trainer.shard, steps)]


@cache
def one_process(model: str, optimizer: str, clip: int = 0, steps: int = STEPS):
    """(trainer after the steps, losses) of nn.Trainer."""
    trainer = nn.Trainer(MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]), seed=SEED)
    return trainer, train(trainer, model, steps)


def pairs(first, second, times: int = 1) -> list:
    """Return parameters (a, b), every a with every b; all but a few are exhaustive.

    The few hold each a and each b `times` times or more: further pairs repeat the proof.
    """
    first, second = list(first), list(second)
    steps = max(len(first), len(second))
    kept = {(i % len(first), (i + k) % len(second)) for i in range(steps) for k in range(times)}
    every = [(i, j) for i in range(len(first)) for j in range(len(second))]
    marks = {True: (), False: pytest.mark.exhaustive}
    return [
        pytest.param(first[i], second[j], marks=marks[(i, j) in kept], id=f"{first[i]}-{second[j]}") for i, j in every
    ]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference relative to the largest entry of b."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def assert_equals_one_process(make, models=tuple(MODELS), optimizers=tuple(OPTIMIZERS), clips=(0, 1, 2), thorough=True):
    """`make(network, loss, optimizer)` -> a trainer; called on every rank of its communicator.

    If it is not `thorough`, each model and optimizer takes one clip, in turn. Compares the losses on every rank, and on
    rank 0 what `trainer.state_dict()` gives (a sharded strategy gathers there).
    """
    for i, model in enumerate(models):
        for j, optimizer in enumerate(optimizers):
            for clip in clips if thorough else [clips[(i + j) % len(clips)]]:
                one, losses = one_process(model, optimizer, clip)
                many = make(MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]))
                case = f"{many.name}, {model}, {optimizer}, {CLIPS[clip]}"
                np.testing.assert_allclose(train(many, model), losses, rtol=1e-12, atol=0, err_msg=case)
                want, got = one.state_dict(), many.state_dict()
                if many.is_writer:
                    assert want.keys() == dict(got).keys(), case
                    for name, array in want.items():
                        if array.ndim and array.size:
                            scale = np.abs(array).max() or 1.0
                            worst = float(np.abs(np.asarray(got[name]) - array).max() / scale)
                            assert worst < 1e-12, f"{case}: {name} differs by {worst}"
                many.communicator.release()
