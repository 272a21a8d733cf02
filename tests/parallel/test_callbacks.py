"""Callbacks on ranks: what is kept is what was trained, and what comes back is the best epoch, with every strategy."""

import itertools

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED, dataset, mlp

import nn
from parallel import ShardedCheckpoints

STRATEGIES = {
    "in node memory": {},
    "by messages": {"node_memory": "off"},
    "compressed": {"compress": "topk:0.2"},
    "dp": {"strategy": "dp"},
    "ps": {"strategy": "ps"},
    "ps on workers": {"strategy": "ps", "servers": 2, "server_place": "workers"},
    "ps, compressed": {"strategy": "ps", "compress": "topk:0.2"},
    "zero1": {"strategy": "zero1", "unit": 1e-3},
    "zero2": {"strategy": "zero2", "unit": 1e-3},
    "fsdp": {"strategy": "fsdp", "unit": 1e-3},
    "ddp, reproducible": {"reproducible": 4},
    "ps, reproducible": {"strategy": "ps", "reproducible": 4},
    "fsdp, reproducible": {"strategy": "fsdp", "reproducible": 4},
}
AGAIN = "ps, compressed", "ddp, reproducible", "ps, reproducible"  # options and strategies that others have, too
CASES = [pytest.param(name, marks=pytest.mark.exhaustive if name in AGAIN else ()) for name in STRATEGIES]


def trainer(comm, optimizer="momentum", **options):
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    options = Options(seed=SEED, **options)
    rule = OPTIMIZERS[optimizer]()
    return build_trainer(options, mlp(), nn.CrossEntropyLoss(), rule, Communicator(comm))


class Scores(nn.Callback):
    """Accuracies as if measured, of which the second is the best; and what the parameters were."""

    def __init__(self):
        self.digests = []

    def on_epoch(self, training, record):
        record["validation_accuracy"] = [0.5, 0.9, 0.8, 0.7, 0.95][training.epoch - 1]
        self.digests.append(training.trainer.digest())


@pytest.mark.mpi(ranks=3, timeout=60)
@pytest.mark.parametrize("strategy", CASES)
def test_early_stopping_puts_the_best_back_and_leaves_the_last_checkpoint(comm, shared_tmp_path, strategy):
    def loader(many, shuffle=True):
        return nn.Loader(dataset("mlp"), 16, seed=1, shuffle=shuffle, shard=many.shard, dtype=np.float64)

    kept = ShardedCheckpoints(shared_tmp_path)
    many, scores = trainer(comm, **STRATEGIES[strategy]), Scores()
    hooks = [scores, nn.KeepCheckpoints(kept), nn.EarlyStopping(2, checkpoints=kept)]
    training = nn.fit(many, loader(many), 5, hooks, loader(many, shuffle=False))
    assert training.epoch == 4 and many.steps == 2 * 3
    assert many.digest() == scores.digests[1] or comm.rank
    many.check_replicas()
    comm.Barrier()
    for name, epoch in (None, 4), ("best", 2):
        state, progress, _ = kept.load(name)
        one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["momentum"]())
        one.load_state_dict({key: state[key] for key in one.state_dict()})
        digest = comm.bcast(scores.digests[epoch - 1])
        assert (one.digest(), one.steps, progress["epoch"]) == (digest, 3 * epoch, epoch), name

    # Resumed where nothing is left to do, the best epoch is the one before: its file is read.
    state, progress, _ = kept.load()
    again = trainer(comm, **STRATEGIES[strategy])
    again.load_state_dict(state)
    stop = nn.EarlyStopping(2, checkpoints=kept)
    nn.fit(again, loader(again), 4, [stop], progress=progress)
    assert again.digest() == scores.digests[1] or comm.rank

    # What was put back, what was read and what was never stopped train on alike: moments and memories came with it.
    straight = trainer(comm, **STRATEGIES[strategy])
    nn.fit(straight, loader(straight), 2)
    ends = []
    for each in (straight, many, again):
        for batch in [*loader(each).epoch(2)][:2]:
            each.step(*batch)
        ends.append(each.digest())
    assert len(set(ends)) == 1 or comm.rank


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize("strategy", ["in node memory", "dp", "ps", "fsdp"])
def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(comm, shared_tmp_path, strategy):
    """Wherever in it the disk is full; no rank waits for one that has given up, and all could go on."""

    class Full(ShardedCheckpoints):
        room = 0  # entries that there is room for

        def save(self, entries, *arguments):
            for _ in itertools.islice(entries, self.room):
                pass
            raise OSError(28, "No space left on device")

        def write_part(self, steps, number, place, fragments, progress=None):
            if place[0] == 0:
                self.save(fragments)
            return super().write_part(steps, number, place, fragments, progress)

    many, kept = trainer(comm, **STRATEGIES[strategy]), Full(shared_tmp_path)
    loader = nn.Loader(dataset("mlp"), 16, seed=1, shard=many.shard, dtype=np.float64)
    for kept.room in (0, 1, 3, 100):
        with pytest.raises(OSError, match="could not write a checkpoint" if comm.rank else "No space left on device"):
            nn.fit(many, loader, 1, [nn.KeepCheckpoints(kept)])
    assert many.steps == 4 * 3 and len(set(comm.allgather(many.steps))) == 1
    many.check_replicas()


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize("action", ["restore", "load_state_dict", "rescale"])
def test_memory_of_all_is_not_written_while_a_rank_reads_it(comm, action):
    """Rank 0 is amid a checkpoint until each of the others has begun to wait for it, or has not and is done."""
    many = trainer(comm, "lars")
    start, snapshot = many.state_dict(), many.snapshot()
    many.step(np.ones((2, 8, 8, 1)), np.zeros(2, int), 6)
    kept = many.state_dict()
    act = {
        "restore": lambda: many.restore(snapshot),
        "load_state_dict": lambda: many.load_state_dict(start),
        "rescale": lambda: many.rescale("velocity", 3.0),
    }[action]
    told, meet = [], many.sync.barrier

    def tell():
        if comm.rank and not told:
            told.append(comm.send(None, dest=0))

    many.sync.barrier = lambda what: (tell(), meet(what))
    comm.Barrier()
    if comm.rank == 0:
        entries = many.state_items()
        next(entries)
        for other in range(1, comm.size):
            comm.recv(source=other)
        for name, array in entries:
            assert np.array_equal(array, kept[name]), f"{name} has changed under the reader"
    act()
    tell()
    if action == "rescale":
        wanted = {name: array * (3 if "velocity" in name else 1) for name, array in kept.items()}
    else:
        wanted = start
    for name, array in many.state_items():
        assert np.array_equal(array, wanted[name]), name
    many.close()


@pytest.mark.mpi(ranks=2)
def test_ranks_compare_their_parameters_at_the_end_of_a_run(comm, shared_tmp_path, monkeypatch):
    """Once, also where nobody asks for it every so many steps."""
    from parallel.command.options import Options
    from parallel.command.training_run import train
    from parallel.trainer import DistributedTrainer

    compared = []
    monkeypatch.setattr(DistributedTrainer, "check_replicas", lambda self: compared.append(self.steps))
    given = {"model": "mlp:2,8,3", "data": "spirals", "limit": 90, "epochs": 1, "validation": 0, "batch": 30}
    options = Options(**given, pictures=False, out=str(shared_tmp_path))
    with np.errstate():
        train(options)
    assert compared == [3]
