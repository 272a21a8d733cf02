"""A step whose loss is not finite changes nothing: parameters, moments and running statistics are those before it."""

from itertools import product

import numpy as np
import pytest
from equality import BATCH, CLIPS, OPTIMIZERS, batches, cnn

import nn
from collectives.steps import chunk
from nn.core.layer import Sequential
from parallel.command.options import Options

EVERYTHING = [
    *({"strategy": name} for name in ("ddp", "dp", "ps", "zero1", "zero2", "fsdp")),
    *({"strategy": name, "reproducible": 4} for name in ("ddp", "dp", "ps", "zero1", "zero2", "fsdp")),
    {"node_memory": "off"},
    *({"strategy": name, "compress": "topk:0.1"} for name in ("ddp", "ps")),
    {"strategy": "tensor"},
    *({"strategy": "owt", "owt": scheme} for scheme in ("all", "turns")),
]


def kept(trainer) -> dict[str, np.ndarray]:
    """Copies of the state: all ranks take part, rank 0's counts."""
    found = {name: np.array(array) for name, array in trainer.state_items()}
    return found if trainer.is_writer else {}


def assert_a_bad_step_changes_nothing(trainer, parts: int) -> None:
    good, (x, y, total) = batches("cnn", trainer.shard, 2)
    start = kept(trainer)
    trainer.step(*good, accumulate=parts)
    before = kept(trainer)
    x = x.copy()
    x[:1] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match="input"):
        trainer.step(x, y, total, accumulate=parts)
    after = kept(trainer)
    if not trainer.is_writer:
        return
    moved = [name for name in before if not np.array_equal(before[name], start[name])]
    assert any(name.startswith("state/") for name in moved), "control: a good step does change them"
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize("parts", [1, 2])
def test_one_process(parts):
    assert_a_bad_step_changes_nothing(nn.Trainer(cnn(False), nn.CrossEntropyLoss(), nn.Adam(0.01)), parts)


@pytest.mark.mpi(ranks=3)
def test_every_strategy(comm):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    for given in EVERYTHING:
        options = Options(batch=BATCH, **given)
        alone = "reproducible" in given  # synchronised statistics need all shards at once
        for synchronized, parts in ((False, 1),) if alone else ((False, 2), (True, 1)):
            make = build_trainer
            network = cnn(synchronized)
            trainer = make(options, network, nn.CrossEntropyLoss(), nn.Adam(0.01), Communicator(comm))
            try:
                assert_a_bad_step_changes_nothing(trainer, parts)
            except (AssertionError, ValueError) as error:
                raise AssertionError(f"{given}, synchronized={synchronized}, {parts} parts: {error}") from error
            trainer.close()


def test_a_clip_that_finds_no_finite_norm_leaves_running_statistics():
    trainer = nn.Trainer(cnn(synchronized=False), nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](CLIPS[1]))
    before, parameters = trainer.buffers.copy(), trainer.flat_parameters.copy()

    backward = trainer.compute_gradients

    def overflow(*given):
        loss = backward(*given)
        trainer.gradients[0] = np.inf
        return loss

    trainer.compute_gradients = overflow
    with pytest.raises(FloatingPointError, match="norm"):
        trainer.step(*batches("cnn", trainer.shard)[0])
    assert (trainer.buffers == before).all() and (trainer.flat_parameters == parameters).all()


@pytest.mark.mpi(ranks=3)
def test_such_a_clip_is_told_by_all_ranks(comm):
    """One layer's gradient is finite and its square is not: no rank goes on alone, or waits for one that does not."""
    from collectives import Communicator
    from parallel.strategies import build_trainer

    workers = {"strategy": "ps", "servers": 2, "server_place": "workers"}
    for given, clip in product([*EVERYTHING[:6], {"node_memory": "off"}, workers, {"strategy": "tensor"}], CLIPS[1:]):
        network = nn.Network(Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5)), (40,), np.float64)
        options = Options(**{"batch": 6, "strategy": "ddp"} | given)
        rule = nn.SGD(0.1, 0.9, clip=clip)
        many = build_trainer(options, network, nn.CrossEntropyLoss(), rule, Communicator(comm))
        before = kept(many)
        mine = slice(*chunk(6, many.shard[1], many.shard[0])) if many.shard[0] is not None else slice(0)
        x, y = np.random.default_rng(0).random((6, 40))[mine], (np.arange(6) % 5)[mine]
        with pytest.raises(FloatingPointError, match=r"not finite|the norm of the gradient.* is inf"):
            many.step(1e180 * x, y, 6)
        after = kept(many)
        assert all(np.array_equal(after[name], array) for name, array in before.items()), given
        assert np.isfinite(many.step(x, y, 6)), "training goes on"
        loss = many.loss  # which nobody may set
        object.__setattr__(many, "loss", lambda *given: (-np.inf, loss(*given)[1]))  # noqa: B023
        with pytest.raises(nn.NonFiniteLoss, match="loss"):
            many.step(x, y, 6)
        many.close()
