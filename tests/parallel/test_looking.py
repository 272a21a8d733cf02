"""Whoever looks (evaluation, state, digest, comparison of replicas) changes no bit of training, on any strategy."""

import numpy as np
import pytest
from equality import dataset

import nn
from parallel.command.options import Options

CASES = [
    {"strategy": "ddp"},
    {"strategy": "ddp", "compress": "topk:0.1"},
    {"strategy": "ddp", "consistency": "stale:2"},
    *({"strategy": name} for name in ("zero1", "zero2", "fsdp", "dp", "tensor", "owt", "pipeline")),
    {"strategy": "ps", "server_place": "workers"},
    {"strategy": "ps", "consistency": "async"},  # one worker: the order of pushes is its own
    {"strategy": "ps", "consistency": "async", "delay_compensation": True},
    {"strategy": "ps", "consistency": "ssp:0", "server_place": "workers"},
    {"strategy": "ps", "consistency": "async", "compress": "topk:0.1"},
    {"strategy": "downpour:push=2,fetch=3"},
    {"strategy": "downpour:push=3,fetch=2,warm=2"},
    {"strategy": "local-sgd:3"},
    {"strategy": "diloco:3"},
    {"strategy": "easgd:3"},
    {"strategy": "pipeline", "pipeline": "pipedream:micro=4"},
    {"strategy": "pipeline", "pipeline": "pipedream:micro=3,replicas=2"},
]


def network():
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, synchronized=False), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)
    return nn.Network(nn.Sequential(*layers, nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 10)), (8, 8, 1), np.float64)


def train(comm, case: dict, looks):
    """(state when all have met, what was counted, what the log says, losses of the steps)"""
    from collectives import Communicator
    from parallel.strategies import build_trainer
    from parallel.strategies.check_strategy import overwriting

    communicator, options, said = Communicator(comm), Options(**case, batch=8), []
    made = network(), nn.CrossEntropyLoss(), overwriting(nn.Adam(0.01)), communicator
    trainer = build_trainer(options, *made)
    trainer.say, trainer.set_epoch_steps = said.append, lambda steps: None
    data = dataset("mlp")
    index, count = trainer.shard[:2]
    losses = []
    for step in range(7):
        n = 3 if step == 4 else 8  # uneven, and empty for some
        rows = np.arange(5 * step, 5 * step + n) % len(data)
        mine = rows[:0] if index is None else rows[index * n // count : (index + 1) * n // count]
        x, y = data.batch(mine)
        losses.append(trainer.step(x, y, n))
        if step in looks:
            trainer.sum_scores(x, y)
            trainer.predict(x)
            before = trainer.digest(), trainer.state_dict()
            trainer.check_replicas()
            trainer.snapshot()
            with pytest.raises(ValueError, match="lacks"):
                trainer.load_state_dict({})
            after = trainer.digest(), trainer.state_dict()
            assert before[0] == after[0] and all(
                np.array_equal(array, after[1][name]) for name, array in before[1].items()
            ), case
    trainer.synchronize(0.0)
    found = trainer.state_dict(), trainer.epoch_record(), said, losses
    trainer.close()
    communicator.release()
    return found


@pytest.mark.mpi(ranks=2)
def test_looking_changes_no_bit(comm, thorough):
    for case in CASES:
        (state, counted, quiet, losses), (seen, counted_too, said, same_losses) = (
            train(comm, case, looks) for looks in ((), range(7) if thorough else (1, 4, 5))
        )
        writes = comm.rank == 0  # workers of a master have no state of their own
        same = not writes or all(np.array_equal(array, seen[name]) for name, array in state.items())
        assert len(state) == len(seen) and same and losses == same_losses, case
        assert counted == counted_too and not quiet and not said, case


@pytest.mark.mpi(ranks=2)
def test_ranks_with_unlike_numbers_of_samples_predict_in_batches(comm):
    """Those with fewer take part in the batches of the others; the workers of a master have no outputs."""
    from collectives import Communicator
    from parallel.strategies import build_trainer

    x, _ = dataset("mlp").batch(np.arange(5))
    expected = nn.Trainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1)).predict(x)
    for strategy, cut in ("ddp", 4), ("fsdp", 4), ("dp", 5):
        communicator, options = Communicator(comm), Options(strategy=strategy, batch=8)
        trainer = build_trainer(options, network(), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)
        mine = slice(cut, 5) if comm.rank else slice(0, cut)
        found = trainer.predict(x[mine], batch=2)
        if strategy == "dp" and comm.rank:
            assert found is None
        else:
            np.testing.assert_allclose(found, expected[mine], rtol=1e-12)
        with pytest.raises(ValueError, match="predict: batch"):
            trainer.predict(x[mine], batch=0)
        trainer.close()
        communicator.release()
