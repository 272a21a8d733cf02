"""Groups of ranks as layers see them: of a trainer, of some ranks of a server, of one process."""

import numpy as np
import pytest

import nn
from nn.core.context import Group


def check(group, rank, size):
    assert (group.rank, group.size) == (rank, size)
    array = np.arange(6.0).reshape(2, 3) * (-1) ** rank + rank
    everyone = [np.arange(6.0).reshape(2, 3) * (-1) ** r + r for r in range(size)]
    total, most = array.copy(), array.copy()
    group.sum(total)
    group.maximum(most)
    np.testing.assert_allclose(total, sum(everyone))
    assert np.array_equal(most, np.max(everyone, axis=0))
    gathered = group.all_gather(array.T)  # not contiguous
    assert np.array_equal(gathered, [one.T for one in everyone])


def network():
    return nn.Network(nn.Sequential(nn.Linear(3, 2)), (3,), np.float64)


def test_a_rank_by_itself():
    import parallel.strategies.activation_transfer  # noqa: F401  registers what groups of ranks share

    check(Group(), 0, 1)
    ctx = network().context()
    assert ctx.group("data").size == ctx.group("tensor").size == 1
    with pytest.raises(ValueError, match="'date'"):
        ctx.group("date")


@pytest.mark.mpi(ranks=[1, 2, 3])
def test_the_ranks_that_share_a_batch(comm):
    import parallel.strategies.activation_transfer  # noqa: F401  registers what groups of ranks share
    from collectives import Communicator
    from parallel import DistributedDataParallel

    trainer = DistributedDataParallel(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm))
    check(trainer.ctx.group("data"), comm.rank, comm.size)
    check(trainer.ctx.group("tensor"), 0, 1)
    trainer.close()


@pytest.mark.mpi(ranks=[3])
def test_servers_have_no_samples(comm):
    from collectives import Communicator
    from parallel import ParameterServer

    trainer = ParameterServer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm), servers=1)
    if trainer.sync.is_worker:
        check(trainer.ctx.group("data"), trainer.sync.workers.index(comm.rank), 2)
    trainer.close()
