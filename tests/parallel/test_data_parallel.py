"""Data parallelism computes what one process computes: to 1e-12 after 5 steps, bit-equal on all ranks."""

import numpy as np
import pytest

import nn
from nn.layer import Sequential

SAMPLES = 37  # of which batches of 16 leave 5: uneven parts, and none at all for some ranks


def mlp():
    return nn.Network(
        Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10)), (8, 8, 1), np.float64
    )


def cnn():
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    return nn.Network(Sequential(*layers), (8, 8, 1), np.float64)


def normalised(synchronized: bool = True):
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, synchronized=synchronized), nn.ReLU(), nn.Flatten()
    return nn.Network(Sequential(*layers, nn.Dropout(0.3), nn.Linear(256, 10)), (8, 8, 1), np.float64)


def dataset():
    rng = np.random.default_rng(3)
    return nn.data.Dataset(rng.random((SAMPLES, 8, 8, 1)), rng.integers(0, 10, SAMPLES), classes=10, dtype=np.float64)


def train(trainer, steps: int = 5) -> list[float]:
    loader = nn.Loader(dataset(), 16, seed=1, shard=trainer.shard, dtype=np.float64)
    batches = [batch for epoch in range(2) for batch in loader.epoch(epoch)]
    return [trainer.step(*batch) for batch in batches[:steps]]


def serial(network, momentum):
    trainer = nn.Serial(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, momentum, weight_decay=1e-3), seed=5)
    return trainer, train(trainer)


def distributed(comm, network, momentum, **options):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    communicator = Communicator(comm, **options)
    optimizer = nn.SGD(0.1, momentum, weight_decay=1e-3)
    return DistributedDataParallel(network(), nn.CrossEntropyLoss(), optimizer, communicator, seed=5)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.mpi(ranks=[1, 2, 3, 4, 5])
def test_equals_one_process(comm):
    for network in (mlp, cnn, normalised):
        for momentum in (0.0, 0.9):
            for allreduce in ("ring", "doubling", "native"):
                one, losses = serial(network, momentum)
                many = distributed(comm, network, momentum, allreduce=allreduce)
                assert np.allclose(train(many), losses, rtol=1e-12, atol=0)
                assert difference(many.parameters, one.parameters) < 1e-12
                np.testing.assert_allclose(many.statistics, one.statistics, rtol=1e-12, atol=1e-14)
                many.check_replicas()
                everyone = comm.allgather(many.parameters.tobytes() + many.statistics.tobytes())
                assert all(theirs == everyone[0] for theirs in everyone)
                many.communicator.release()


@pytest.mark.mpi(ranks=3)
def test_control_without_communication_differs(comm):
    """The comparison above can fail: ranks that keep their gradients to themselves do not pass it."""
    one, _ = serial(mlp, 0.9)
    many = distributed(comm, mlp, 0.9)
    many.combine = lambda loss: loss
    train(many)
    assert difference(many.parameters, one.parameters) > 1e-6


@pytest.mark.mpi(ranks=3)
def test_control_statistics_of_each_rank_alone_differ(comm):
    one, _ = serial(lambda: normalised(False), 0.9)
    many = distributed(comm, lambda: normalised(False), 0.9)
    train(many, 2)  # a rank alone cannot normalise one sample
    assert difference(many.parameters, one.parameters) > 1e-6
    assert len(set(comm.allgather(many.statistics.tobytes()))) == 1, "replicas keep the same running statistics"


@pytest.mark.mpi(ranks=3)
def test_initial_parameters_are_rank_0s_and_a_changed_replica_is_found(comm):
    from parallel import ReplicaError

    many = distributed(comm, mlp, 0.9)
    many.check_replicas()
    name, array = next((n, a) for n, a in many.network.layout.items(many.parameters) if n == "3.W")
    if comm.rank == 2:
        array[0, 0] = np.nextafter(array[0, 0], 1)  # a single bit
    with pytest.raises(ReplicaError, match=rf"{name} on ranks \[2\]"):
        many.check_replicas()


@pytest.mark.mpi(ranks=2)
def test_ranks_that_disagree_are_told_what_on(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel, ReplicaError

    communicator = Communicator(comm)
    with pytest.raises(ReplicaError, match=r"disagree on the optimizer: rank 0: SGD\(lr=0.1"):
        DistributedDataParallel(mlp(), nn.CrossEntropyLoss(), nn.SGD([0.1, 0.2][comm.rank]), communicator)
    with pytest.raises(ReplicaError, match="disagree on the network"):
        DistributedDataParallel([mlp, cnn][comm.rank](), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)


@pytest.mark.mpi(ranks=3)
def test_nan_on_one_rank_is_told_by_all_before_the_update(comm):
    many = distributed(comm, mlp, 0.9)
    before = many.parameters.copy()
    x, y = np.zeros((4, 8, 8, 1)), np.zeros(4, int)
    if comm.rank == 1:
        x[2] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match=r"step 0.*the input on rank 1 \(samples \[6\] of the batch\)"):
        many.step(x, y, 12)
    assert (many.parameters == before).all()


@pytest.mark.mpi(ranks=3)
def test_evaluation_is_exact_for_uneven_shards(comm):
    one, _ = serial(mlp, 0.0)
    many = distributed(comm, mlp, 0.0)
    train(many)
    loader = [nn.Loader(dataset(), 16, shuffle=False, shard=t.shard, dtype=np.float64) for t in (one, many)]
    a, b = nn.evaluate(one, loader[0]), nn.evaluate(many, loader[1])
    assert a["accuracy"] == b["accuracy"] and abs(a["test_loss"] - b["test_loss"]) < 1e-12
