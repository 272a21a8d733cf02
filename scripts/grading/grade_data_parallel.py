"""What project 1 is graded by."""

import numpy as np
import pytest
from conftest import student

SIZES = (12, 32, 16, 8, 5)
ALLOWED = ("Allreduce", "Iallreduce", "Bcast")
EVEN, UNEVEN, EMPTY = (4, 4, 4, 4), (5, 1, 3, 2), (6, 0, 1, 0)


def batches(lengths, ranks, steps=5):
    """Yield for each step the whole batch, and each rank's part."""
    draw = np.random.default_rng(7)
    for _ in range(steps):
        parts = [(draw.normal(size=(n, SIZES[0])), draw.integers(0, SIZES[-1], n)) for n in lengths[:ranks]]
        yield tuple(np.concatenate(each) for each in zip(*parts, strict=True)), parts


def one_process(lengths, ranks, rate=0.1):
    """Return the parameters after the steps, and the losses, of one process with the whole batches."""
    course = student("network")
    network, losses = course.Network(SIZES, seed=0), []
    for (x, labels), _ in batches(lengths, ranks):
        g, arrays = np.zeros_like(network.w), network.forward(x)
        loss, gy = course.cross_entropy(arrays[-1], labels, len(x))
        list(network.backward(g, arrays, gy))
        network.w -= rate * g
        losses.append(loss)
    return network.w, losses


def train(recording, lengths, bucket=1000):
    """Return parameters, losses, and the recording of this rank after the steps."""
    course, communicator = student("network"), recording(*ALLOWED)
    network = course.Network(SIZES, seed=communicator.rank)  # rank 0 has those of one process
    trainer = student("data_parallel").DataParallel(network, communicator, rate=0.1, bucket=bucket)
    communicator.events.clear()
    losses = [trainer.step(*parts[communicator.rank]) for _, parts in batches(lengths, communicator.size)]
    return network.w, losses, communicator


def compare(recording, lengths):
    w, _, communicator = train(recording, lengths)
    wanted, _ = one_process(lengths, communicator.size)
    worst = np.abs(w - wanted).max()
    assert worst < 1e-12, f"parameters differ by {worst:.1e} from those of one process with the whole batch"


@pytest.mark.points(25, "equal to one process, parts of equal length")
@pytest.mark.mpi(ranks=[1, 2, 3])
def test_even(recording):
    compare(recording, EVEN)


@pytest.mark.points(20, "equal to one process, parts of different length, some of them empty")
@pytest.mark.mpi(ranks=[2, 3, 4])
@pytest.mark.parametrize("lengths", [UNEVEN, EMPTY], ids=["uneven", "empty"])
def test_uneven(recording, lengths):
    compare(recording, lengths)


@pytest.mark.points(10, "all ranks have the same bits")
@pytest.mark.mpi(ranks=3)
def test_bits(recording, comm):
    w, *_ = train(recording, UNEVEN)
    assert len(set(comm.allgather(w.tobytes()))) == 1, "ranks have different parameters"


@pytest.mark.points(10, "the loss is the mean over the samples of all ranks")
@pytest.mark.mpi(ranks=[2, 3])
def test_loss(recording):
    _, losses, communicator = train(recording, UNEVEN)
    wanted = one_process(UNEVEN, communicator.size)[1]
    assert np.allclose(losses, wanted, rtol=1e-12), f"the first step returns {losses[0]:.6g}, expected {wanted[0]:.6g}"


@pytest.mark.points(15, "buckets: neighbouring layers share a message until it is large enough")
@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("bucket", [1, 500, 10**6])
def test_buckets(recording, bucket):
    _, _, communicator = train(recording, EVEN, bucket)
    course, wanted, size = student("network"), [], 0
    for layer in reversed(course.Network(SIZES).layers):
        size += layer.hi - layer.lo
        if size >= bucket or not layer.lo:
            wanted.append(size)
            size = 0
    sent = [n for _, n in communicator.events if n > 2]  # counts of samples and losses are no gradients
    assert sent[: len(wanted)] == wanted, f"a step sends messages of {sent[: len(wanted)]} elements; expected {wanted}"


@pytest.mark.points(20, "overlap: a bucket leaves while backward goes on with earlier layers")
@pytest.mark.mpi(ranks=2)
def test_overlap(recording, monkeypatch):
    course, communicator = student("network"), recording(*ALLOWED)
    backward_weights = course.Layer.backward_weights

    def recorded(layer, *arguments):
        communicator.events.append(("backward", layer.lo))
        backward_weights(layer, *arguments)

    monkeypatch.setattr(course.Layer, "backward_weights", recorded)
    network = course.Network(SIZES, seed=0)
    trainer = student("data_parallel").DataParallel(network, communicator, bucket=1)
    communicator.events.clear()
    _, parts = next(batches(EVEN, 2))
    trainer.step(*parts[communicator.rank])
    names = [name for name, size in communicator.events if name == "backward" or size > 2]
    first = names.index("Iallreduce") if "Iallreduce" in names else len(names)
    assert names[first:].count("backward") >= 2, f"the order of a step is {', '.join(names)}"
