"""The input of many ranks: sharded, read ahead, from memory-mapped files; evaluation is exact for uneven shards."""

import numpy as np
import pytest

import nn
from nn.core.layer import Sequential


def network():
    layers = nn.Flatten(), nn.Linear(36, 10), nn.BatchNorm1d(10), nn.Sigmoid(), nn.Linear(10, 4)
    return nn.Network(Sequential(*layers), (6, 6, 1), np.float64)


def mapped(directory, samples):
    """A data set whose sample i is made of i, in files."""
    numbers = np.arange(samples, dtype=float).reshape(-1, 1, 1, 1)
    np.save(directory / "x.npy", np.broadcast_to(numbers, (samples, 6, 6, 1)))
    x = np.load(directory / "x.npy", mmap_mode="r")
    return nn.data.Dataset(x, np.arange(samples) % 4, classes=4, scale=1 / samples, dtype=np.float64)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4, 5])
def test_evaluation_is_exact_for_uneven_shards(comm, tmp_path):
    """Last batches of all sizes, of fewer samples than ranks too, and data sets of fewer samples than ranks."""
    from collectives import Communicator
    from parallel import DistributedDataParallel

    communicator, loss = Communicator(comm), nn.CrossEntropyLoss()
    one = nn.Trainer(network(), loss, nn.SGD(0.1))
    many = (
        DistributedDataParallel(network(), loss, nn.SGD(0.1), communicator),
        DistributedDataParallel(network(), loss, nn.SGD(0.1), communicator, shards=7),
    )
    for samples, batch in ((37, 16), (33, 16), (20, 5), (18, 8), (2, 5), (1, 6)):
        data = mapped(tmp_path, samples)
        want = nn.evaluate(one, nn.Loader(data, batch, shuffle=False))
        for trainer in many:
            got = nn.evaluate(trainer, nn.Loader(data, batch, shuffle=False, shard=trainer.shard))
            assert got["accuracy"] == want["accuracy"], (samples, batch)
            # Reproducible sums are rounded to 2^-24 for each virtual shard.
            limit = 1e-12 if trainer is many[0] else 1e-6
            assert abs(got["loss"] - want["loss"]) < limit, (samples, batch)
            assert len(set(comm.allgather(tuple(got.items())))) == 1


@pytest.mark.mpi(ranks=[3], more=[5])
def test_ranks_read_each_sample_once_from_a_memory_map_and_ahead(comm, tmp_path, monkeypatch):
    monkeypatch.setattr(nn.data.loader, "BLOCK_BYTES", 50_000)  # several blocks in little data
    samples, batch, depth = 5000, 600, 2
    data = mapped(tmp_path, samples)
    told = []
    loader = nn.Loader(data, batch, 3, shard=(comm.rank, comm.size), timeline=lambda *event: told.append(event))
    assert data.mapped and loader.prefetch == depth, "reading from files goes on behind the back of the training"
    seen = []
    for x, y, total in loader.epoch(0):
        numbers = np.rint(x[:, 0, 0, 0] * samples).astype(int)
        assert np.array_equal(numbers % 4, y) and abs(len(x) - total / comm.size) < 1
        seen.extend(numbers.tolist())
    reads = [name for name, _, _ in told].count("read")
    assert reads == [name for name, _, _ in told].count("wait") > depth
    everyone = comm.allgather(seen)
    assert sorted(number for numbers in everyone for number in numbers) == list(range(samples))
    assert max(map(len, everyone)) - min(map(len, everyone)) <= len(loader)
