"""Master and workers compute what one process computes; the master alone reads, judges and updates."""

import numpy as np
import pytest
from conftest import longer
from equality import (
    OPTIMIZERS,
    SEED,
    assert_equals_one_process,
    batches,
    cnn,
    dataset,
    difference,
    mlp,
    one_process,
    train,
)

import nn


def make(comm, network, optimizer="momentum"):
    from collectives import Communicator
    from parallel import DataParallel

    return DataParallel(network(), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), Communicator(comm), SEED)


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4, 5], timeout=120)
def test_equals_one_process(comm, ranks, thorough):
    from collectives import Communicator
    from parallel import DataParallel

    def strategy(network, loss, optimizer):
        return DataParallel(network, loss, optimizer, Communicator(comm), SEED)

    assert_equals_one_process(strategy, clips=(0, 1, 2) if ranks == 3 else (ranks % 3,), thorough=thorough)


def unsummed(comm, many):
    """Return the master's message on all ranks, with nothing summed."""
    many.sync.message.head[:] = comm.bcast(many.sync.message.head)
    return many.sync.message.result()._replace(agreed=True)


@pytest.mark.mpi(ranks=3)
def test_controls_differ(comm):
    """The comparison above can fail: without the sum, without the broadcast, without synchronised statistics."""
    one, _ = one_process("mlp", "momentum")
    for method in ("finish_step", "broadcast"):
        many = make(comm, mlp)
        setattr(many.sync, method, lambda many=many: unsummed(comm, many))
        train(many, "mlp")
        assert comm.bcast(difference(many.flat_parameters, one.flat_parameters)) > 1e-6, method
    one, _ = one_process("cnn", "momentum")
    many = make(comm, lambda: cnn(synchronized=False))
    train(many, "cnn", steps=2)
    many.check_replicas()
    assert np.abs(many.buffers - one.buffers).max() > 1e-6
    assert len(set(comm.allgather(many.buffers.tobytes()))) == 1


@pytest.mark.mpi(ranks=3)
def test_replicas_evaluation_micro_batches_and_resuming(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    one, losses = one_process("cnn", "adam")
    many = make(comm, cnn, "adam")
    cut = [many.step(*batch, accumulate=2) for batch in batches("cnn", many.shard, 1)]
    assert abs(cut[0] - losses[0]) > 1e-9, "batch statistics are of a micro-batch"
    many = make(comm, mlp, "adam")
    assert [many.step(*batch, accumulate=3) for batch in batches("mlp", many.shard)] == pytest.approx(
        one_process("mlp", "adam")[1], rel=1e-12
    )

    many = make(comm, cnn, "adam")
    history = batches("cnn", many.shard)
    for batch in history[:3]:
        many.step(*batch)
    kept = comm.bcast({name: array.copy() for name, array in many.state_dict().items()})
    ends = []
    for trainer in (many, make(comm, cnn, "adam")):
        trainer.load_state_dict(kept)
        assert [trainer.step(*batch) for batch in history[3:]] == pytest.approx(losses[3:], rel=1e-12)
        trainer.check_replicas()
        ends.append(trainer.flat_parameters.tobytes())
    assert ends[0] == ends[1]
    assert len(set(comm.allgather(ends[0]))) == 1
    other = DistributedDataParallel(
        cnn(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), Communicator(comm), SEED, node_memory="off"
    )
    other.load_state_dict(kept)
    assert [other.step(*b) for b in batches("cnn", other.shard)[3:]] == pytest.approx(losses[3:], rel=1e-12)
    other.close()

    loaders = [nn.Loader(dataset("cnn"), 16, shuffle=False, shard=t.shard, dtype=np.float64) for t in (one, many)]
    a, b = nn.evaluate(one, loaders[0]), nn.evaluate(many, loaders[1])
    assert a["accuracy"] == b["accuracy"] and abs(a["loss"] - b["loss"]) < 1e-12
    assert not many.sum_scores(np.zeros((0, *many.network.in_shape)), np.zeros(0, int)).any(), "the workers do not wait"
    alone = many.alone()
    assert (alone is None) == (comm.rank != 0)
    if alone:
        assert (alone.flat_parameters == many.flat_parameters).all() and alone.steps == many.steps


@pytest.mark.mpi(ranks=2)
def test_only_the_master_has_moments(comm):
    """Memory is what the formula says; a snapshot, and a state that lacks something, are the same to all ranks."""
    many = make(comm, mlp, "adam")
    found, psi = many.memory(), many.network.layout.count * 8
    assert all(found[kind] == pytest.approx(size, abs=1000) for kind, size in many.formula().items())
    assert sum(found.values()) == pytest.approx((2 if comm.rank else 4) * psi, rel=0.1)

    history = batches("mlp", many.shard)
    before = many.snapshot()
    first = many.step(*history[0])
    many.restore(before)
    assert many.steps == 0 and many.step(*history[0]) == first
    kept = comm.bcast({name: array.copy() for name, array in many.state_dict().items() if not name.endswith("1.W")})
    with pytest.raises(ValueError, match="lacks"):
        many.load_state_dict(kept)


@pytest.mark.mpi(ranks=3)
def test_nan_is_told_by_all_before_the_update(comm):
    for network in (mlp, cnn):
        many = make(comm, network)
        x, y = (
            np.zeros((12 if many.forward_backward.master else 0, 8, 8, 1)),
            np.zeros(12 if many.forward_backward.master else 0, int),
        )
        x[5:6] = np.nan  # of rank 1
        before = many.flat_parameters.copy()
        with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 1") as caught:
            many.step(x, y, 12)
        assert list(caught.value.samples) == [5]
        assert (many.flat_parameters == before).all()


@pytest.mark.mpi(ranks=3)
def test_a_batch_that_is_too_small_is_refused(comm):
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    options = Options(strategy="dp", batch=2, seed=SEED)
    with pytest.raises(ValueError, match="--batch 2 cannot be cut among 3 ranks: use a batch of at least 3"):
        build_trainer(options, mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm))


@pytest.mark.mpi(ranks=3)
def test_the_timeline_shows_every_phase_and_the_workers_waiting(comm):
    import time

    from parallel.reports.timeline import Timeline

    for seconds in longer(0.05):
        many = make(comm, mlp)
        timeline = Timeline(many.communicator)
        loss = many.forward_backward.compute_loss

        def slow(*arguments, many=many, loss=loss, seconds=seconds):
            if many.forward_backward.master:
                time.sleep(seconds)
            return loss(*arguments)

        many.forward_backward.compute_loss = slow
        timeline.watch(many)
        train(many, "mlp", steps=2)
        events = comm.bcast(timeline.merge())
        names = {name for name, _, _ in many.phases}
        for rank in range(3):
            assert names <= {e["name"] for e in events if e["rank"] == rank}
        waited = [sum(e["end"] - e["start"] for e in events if (e["rank"], e["name"]) == (r, "wait")) for r in range(3)]
        if min(waited[1:]) > 1.8 * seconds:
            break
    assert min(waited[1:]) > 1.8 * seconds, "workers wait while the master computes the loss"


@pytest.mark.mpi(ranks=2)
def test_the_state_is_the_masters(comm):
    """Workers return none of it, and need none: they would have no moments, and the parameters of a step before."""
    many = make(comm, mlp)
    train(many, "mlp")
    state = many.state_dict()
    assert bool(state) == (comm.rank == 0)
    again = make(comm, mlp)
    again.load_state_dict(state)
    assert again.digest() == many.digest()
    for trainer in many, again:
        train(trainer, "mlp", steps=2)
    assert again.digest() == many.digest() and again.steps == many.steps
    with pytest.raises(ValueError, match="lacks"):
        again.load_state_dict({})
