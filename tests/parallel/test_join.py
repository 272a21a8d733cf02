"""Ranks with data of their own, one with none: under every strategy every sample counts once, or the reason is told."""

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED, cnn, mlp

import nn
from parallel.command.options import Options

ON_WORKERS = {"strategy": "ps", "servers": 2, "server_place": "workers"}
EVERYTHING = [
    {"strategy": "ddp"},
    {"strategy": "ddp", "node_memory": "off"},
    ON_WORKERS,
    *({"strategy": name} for name in ("zero1", "zero2", "fsdp")),
    {"strategy": "fsdp", "unit": 1e-5, "prefetch": 1},
    {"strategy": "ddp", "compress": "topk:1"},
    ON_WORKERS | {"compress": "topk:1"},
]
COUNTS = ([], [3], [4, 1, 0, 2, 5])  # of samples in the batches of each rank


def data():
    rng = np.random.default_rng(4)
    return [[(rng.random((n, 8, 8, 1)), rng.integers(0, 10, n)) for n in each] for each in COUNTS]


def make(comm, options, network):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    options, rule = Options(**options, batch=16, seed=SEED), OPTIMIZERS["momentum"]()
    return build_trainer(options, network, nn.CrossEntropyLoss(), rule, Communicator(comm))


@pytest.mark.mpi(ranks=3)
def test_every_strategy(comm):
    """Synchronised statistics and dropout included."""
    from parallel import join

    one = nn.Trainer(cnn(), nn.CrossEntropyLoss(), OPTIMIZERS["momentum"](), SEED)
    losses = []
    for batch in range(max(map(len, COUNTS))):
        here = [each[batch] for each in data() if len(each) > batch and len(each[batch][0])]
        losses += [one.step(*map(np.concatenate, zip(*here, strict=True)))] if here else []
    for given in EVERYTHING:
        many = make(comm, given, cnn())
        found = [many.step(x, y, total) for x, y, total in join(data()[comm.rank], comm)]
        assert found == pytest.approx(losses, rel=1e-12), given
        state = many.state_dict()
        for name, array in one.state_dict().items() if comm.rank == 0 else ():
            np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-12, err_msg=f"{given} {name}")
        many.close()
        many.communicator.release()


@pytest.mark.mpi(ranks=2)
def test_ranks_that_disagree_are_named(comm):
    """The sizes of uneven batches travel between them as others do."""
    from parallel import join

    many = make(comm, {"strategy": "ddp"}, mlp())
    many.optimizer.lr = 0.1 + comm.rank
    batch = np.zeros((1 + comm.rank, 8, 8, 1)), np.zeros(1 + comm.rank, int)
    for x, y, total in join([batch], comm):
        with pytest.raises(ValueError, match=r"ranks disagree on the optimizer: .*on rank 0; .*on rank 1"):
            many.step(x, y, total)
    many.close()
    many.communicator.release()


@pytest.mark.mpi(ranks=3)
def test_where_ranks_cannot_have_their_own(comm):
    """Neither the master's workers, nor virtual shards, nor servers on workers that do not wait, nor a mere server."""
    from parallel import join

    for given, reason in [
        ({"strategy": "dp"}, "the master reads for all ranks"),
        ({"strategy": "dp", "reproducible": 4}, "the master reads for all ranks"),
        ({"strategy": "zero2", "reproducible": 4}, "reproducible training cuts one data set by a Loader"),
        ({"strategy": "ps", "server_place": "workers", "consistency": "async"}, "answers nobody meanwhile"),
        ({"strategy": "downpour", "server_place": "workers"}, "answers nobody meanwhile"),
    ]:
        many = make(comm, given, mlp())
        for x, y, total in join(data()[comm.rank], comm):
            with pytest.raises(ValueError, match=reason):
                many.step(x, y, total)
        many.close()
    x, y = data()[2][0]
    for strategy, reason in (
        ("ps", "only serves, and was given 4 samples"),
        ("dp", "is a worker of the master, and was"),
    ):
        many = make(comm, {"strategy": strategy}, mlp())
        if comm.rank == 2:
            with pytest.raises(ValueError, match=f"rank 2 {reason}"):
                many.step(x, y, 12)
        many.close()
