"""Rows that count differently (ignored ones, class weights): every strategy's mean is that of one process."""

import numpy as np
import pytest
from equality import difference

import nn
from parallel.command.options import Options

SEED, SAMPLES, BATCH = 5, 35, 8  # the last batch has 3 samples
EVERYTHING = [
    *({"strategy": name} for name in ("ddp", "dp", "ps", "zero1", "zero2", "fsdp", "tensor")),
    {"strategy": "ddp", "node_memory": "off"},
    {"strategy": "pipeline", "pipeline": "1f1b:micro=3"},
    {"strategy": "ddp", "reproducible": 4},
    {"strategy": "dp", "reproducible": 4},
]


def network():
    """What is dropped depends on the place of a sample in the global batch."""
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 4)
    return nn.Network(nn.Sequential(*layers), (6,), np.float64)


def dataset():
    rng = np.random.default_rng(3)
    y = rng.integers(0, 4, SAMPLES)
    y[: SAMPLES // 2] = np.where(rng.random(SAMPLES // 2) < 0.7, -100, y[: SAMPLES // 2])
    return nn.data.Dataset(rng.standard_normal((SAMPLES, 6)), y, ignore_index=-100, dtype=np.float64)


def loss():
    return nn.CrossEntropyLoss(class_weights=[0.2, 1.5, 0.1, 0.7], ignore_index=-100)  # a mean weight below 1


@pytest.mark.mpi(ranks=2)
def test_every_strategy(comm):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    one = nn.Trainer(network(), loss(), nn.SGD(0.3), SEED)
    data, loader = dataset(), nn.Loader(dataset(), BATCH, SEED, dtype=np.float64)
    want = nn.fit(one, loader, 2, validation=data)
    for given in EVERYTHING:
        options = Options(batch=BATCH, seed=SEED, **given)
        many = build_trainer(options, network(), loss(), nn.SGD(0.3), Communicator(comm))
        loader = nn.Loader(data, BATCH, SEED, shard=many.shard, dtype=np.float64)
        scores = nn.Loader(data, 500, shuffle=False, shard=many.shard, dtype=np.float64)
        found = nn.fit(many, loader, 2, validation=scores)
        rough = {"rel": 1e-6} if options.reproducible else {"rel": 1e-12}  # evaluation is rounded to 2^-24
        for mine, other in zip(found.history, want.history, strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-12), given
            assert mine["validation_loss"] == pytest.approx(other["validation_loss"], **rough), given
            assert mine["validation_accuracy"] == other["validation_accuracy"], given
        alone = many.alone()
        assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12, given
        if many.shard[1] == 2:
            refuse_wrong_weights(comm, many, data)
        many.close()
        many.communicator.release()


def refuse_wrong_weights(comm, many, data):
    """On all ranks, before anything is changed."""
    before = many.digest()
    x, y = data.batch(slice(0, 4) if comm.rank == 0 else slice(4, 8), np.float64)
    with pytest.raises(ValueError, match="total_weight"):
        many.step(x, y, 8)
    with pytest.raises(ValueError, match=r"total_weight differs: 3\.0 on rank 0, 4\.0 on rank 1"):
        many.step(x, y, 8, total_weight=3.0 + comm.rank)
    with pytest.raises(ValueError if comm.rank == 0 else TypeError, match="total_weight is the sum"):
        many.step(x, y, 8, total_weight="4" if comm.rank else 4.0)
    assert many.digest() == before


def test_control_rows_of_each_shard_alone_are_another_mean():
    """What dividing by a shard's own weight, or by its rows, would give."""
    data, found = dataset(), []
    for wrong in (lambda y: loss().weight(y), lambda y: loss().weight(y[:4]) * 2, len):
        one = nn.Trainer(network(), loss(), nn.SGD(0.3), SEED)
        x, y = data.batch(slice(0, 8), np.float64)
        found.append(one.step(x, y, total_weight=wrong(y)))
    assert abs(found[1] / found[0] - 1) > 0.01 and abs(found[2] / found[0] - 1) > 0.01
