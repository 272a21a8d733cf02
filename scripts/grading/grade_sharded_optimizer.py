"""What project 2 is graded by."""

import gc

import numpy as np
import pytest
from conftest import student

N = 103  # divided by no number of ranks
ALLOWED = ("Reduce_scatter", "Allgatherv", "Allreduce", "Bcast")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def start(n=N):
    return np.random.default_rng(1).normal(size=n)


def gradients(ranks, steps, n=N, first=0):
    """Yield for each step the gradients of all ranks; their sum does not depend on how many there are."""
    for step in range(first, first + steps):
        whole = np.random.default_rng([2, step]).normal(size=n)
        parts = np.random.default_rng([3, step]).normal(size=(ranks - 1, n))
        yield [whole - parts.sum(axis=0), *parts]


def adam(steps, n=N, rate=0.01, b1=0.9, b2=0.999, eps=1e-8):
    """Return w, m, v of one process after the steps."""
    w, m, v = start(n), np.zeros(n), np.zeros(n)
    for t, (g,) in enumerate(gradients(1, steps, n), 1):
        m += (1 - b1) * (g - m)
        v += (1 - b2) * (g * g - v)
        w -= rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return w, m, v


def trained(communicator, stage, steps=4, n=N):
    optimizer = student("sharded_optimizer").ShardedAdam(start(n), communicator, stage)
    for parts in gradients(communicator.size, steps, n):
        optimizer.step(parts[communicator.rank].copy())
    return optimizer


def near(got, wanted, what):
    worst = np.abs(got - wanted).max()
    assert worst < 1e-12, f"{what} differ by {worst:.1e} from those of one process"


@pytest.mark.points(30, "equal to Adam of one process")
@pytest.mark.mpi(ranks=[1, 2, 3, 4])
@STAGES
def test_equal(recording, stage):
    near(trained(recording(*ALLOWED), stage).parameters(), adam(4)[0], "parameters")


@pytest.mark.points(5, "more ranks than parameters")
@pytest.mark.mpi(ranks=4)
@STAGES
def test_empty_slices(recording, stage):
    near(trained(recording(*ALLOWED), stage, n=3).parameters(), adam(4, n=3)[0], "parameters")


@pytest.mark.points(10, "all ranks have the same bits")
@pytest.mark.mpi(ranks=3)
@STAGES
def test_bits(recording, comm, stage):
    w = trained(recording(*ALLOWED), stage).parameters()
    assert len(set(comm.allgather(w.tobytes()))) == 1, "ranks have different parameters"


def kept(owner) -> int:
    """Return the bytes of the arrays that an object keeps, each memory counted once."""
    buffers, seen, todo = {}, set(), [owner]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type) or type(each).__name__ in ("module", "Recording", "function"):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray):
            base = each
            while isinstance(base.base, np.ndarray):
                base = base.base
            buffers[id(base)] = base.nbytes
        else:
            todo += gc.get_referents(each)
    return sum(buffers.values())


@pytest.mark.points(20, "a rank keeps what its stage allows, and no more")
@pytest.mark.mpi(ranks=[2, 4])
@STAGES
def test_bytes_kept(recording, stage):
    communicator, n = recording(*ALLOWED), 10_000
    optimizer = trained(communicator, stage, steps=1, n=n)
    optimizer.parameters()
    slice_bytes = 8 * (-(-n // communicator.size))
    allowed = {1: 8 * n + 3 * slice_bytes, 2: 8 * n + 3 * slice_bytes, 3: 4 * slice_bytes}[stage] + 1000
    assert kept(optimizer) <= allowed, f"stage {stage} keeps {kept(optimizer):,} bytes; {allowed:,} are allowed"


@pytest.mark.points(15, "a step sends no more than a reduce-scatter and an allgather")
@pytest.mark.mpi(ranks=3)
@STAGES
def test_bytes_sent(recording, stage):
    communicator = recording(*ALLOWED)
    trained(communicator, stage, steps=2)
    names = [name for name, size in communicator.events if size > 2]
    assert names.count("Reduce_scatter") == 2 and "Allreduce" not in names, f"two steps call {', '.join(names)}"
    assert names.count("Allgatherv") == (0 if stage == 3 else 2), f"two steps call {', '.join(names)}"


@pytest.mark.points(20, "state_dict goes on on any number of ranks, in any stage")
@pytest.mark.mpi(ranks=[1, 2, 3])
@STAGES
def test_state(recording, comm, stage):
    communicator = recording(*ALLOWED)
    state = trained(communicator, stage, steps=2).state_dict()
    for name, wanted in zip("wmv", adam(2), strict=True):
        near(state[name], wanted, f"state_dict()[{name!r}]")
    alone = 1 + (stage % 3)
    again = student("sharded_optimizer").ShardedAdam(np.zeros(N), communicator, alone)
    again.load_state_dict({name: np.array(value) for name, value in state.items()})
    for parts in gradients(communicator.size, 2, first=2):
        again.step(parts[communicator.rank].copy())
    near(again.parameters(), adam(4)[0], f"parameters that went on from stage {stage} in stage {alone}")
