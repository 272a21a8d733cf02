"""The best epoch's weights are put back on every rank, whatever the strategy holds where."""

from functools import cache

import numpy as np
import pytest
from equality import CHOOSY, pairs

import nn
from parallel import ShardedCheckpoints
from parallel.command.options import Options
from parallel.strategies import AS_ONE, build_trainer

SIMPLE = [name for name in AS_ONE if name not in CHOOSY]


def network():
    return nn.Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), (6,), np.float64)


def data(n=40):
    x = np.random.default_rng(0).standard_normal((n, 6))
    return nn.data.Dataset(x, (x[:, 0] > 0).astype(int), classes=2, dtype=np.float64)


class Best(nn.Callback):
    """The second of four epochs scores best, as if measured."""

    def on_epoch(self, training, record):
        record["validation_accuracy"] = [0.5, 0.9, 0.8, 0.7][training.epoch - 1]


def train(trainer, directory, epochs, said=None):
    kept = ShardedCheckpoints(directory)
    hooks = [Best(), nn.KeepCheckpoints(kept), nn.RestoreBest(kept, say=(said or []).append)]
    train, look = (nn.Loader(data(), 8, shuffle=shuffle, shard=trainer.shard) for shuffle in (True, False))
    return hooks[-1], nn.fit(trainer, train, epochs, hooks, look, test=look)


@cache
def two_epochs_alone():
    """(state, scores) of one process after the two epochs of which the second is the best."""
    alone = nn.Trainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.3, 0.9))
    nn.fit(alone, nn.Loader(data(), 8), 2)
    return alone.state_dict(), nn.evaluate(alone, nn.Loader(data(), 8, shuffle=False))


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize(
    ("strategy", "reproducible"), pairs([name for name in AS_ONE if name not in CHOOSY], [None, 4])
)
def test_the_best_epoch_is_put_back_on_all_ranks(comm, strategy, reproducible, tmp_path_factory):
    from collectives import Communicator

    communicator = Communicator(comm)
    directory = comm.bcast(str(tmp_path_factory.mktemp("best")))
    options = Options(strategy=strategy, reproducible=reproducible, dtype="float64")
    trainer = build_trainer(options, network(), nn.CrossEntropyLoss(), nn.SGD(0.3, 0.9), communicator)
    best, training = train(trainer, directory, 4)
    assert best.epoch == 2 and training.epoch == 4
    trainer.check_replicas()
    state, (wanted, want) = trainer.state_dict(), two_epochs_alone()
    for name, array in wanted.items():
        if name.startswith("param/") and comm.rank == 0:
            np.testing.assert_allclose(state[name], array, rtol=1e-10, atol=1e-13)
    assert training.result["accuracy"] == want["accuracy"]
    assert training.result["loss"] == pytest.approx(want["loss"], rel=1e-7), "--reproducible adds in fixed point"
    trainer.close()


@pytest.mark.mpi(ranks=2)
def test_where_one_rank_cannot_read_it_all_keep_the_last_epoch(comm, tmp_path_factory):
    """As where each host has a disk of its own: what rank 0 has written the other does not find."""
    from collectives import Communicator
    from parallel import DistributedDataParallel

    own = tmp_path_factory.mktemp("own")
    trainer = DistributedDataParallel(
        network(), nn.CrossEntropyLoss(), nn.SGD(0.3, 0.9), Communicator(comm), node_memory="off"
    )
    said = []
    kept = ShardedCheckpoints(own / str(comm.rank))
    hooks = [Best(), nn.KeepCheckpoints(kept), best := nn.RestoreBest(kept, say=said.append)]
    loaders = [nn.Loader(data(), 8, shuffle=shuffle, shard=trainer.shard) for shuffle in (True, False)]
    training = nn.fit(trainer, loaders[0], 4, hooks, loaders[1], test=loaders[1])
    assert best.epoch == 4
    trainer.check_replicas()
    assert training.result == nn.evaluate(trainer, loaders[1])
    assert said == (
        [
            "warning: the best epoch, 2, cannot be put back, so the last one counts: 1 other processes cannot read it: "
            f"is {kept.directory} on one host only?"
        ]
        if comm.rank == 0
        else []
    )
    trainer.close()
