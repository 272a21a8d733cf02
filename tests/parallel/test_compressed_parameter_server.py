"""Parameter servers with compressed gradients: exact where nothing is left out; what is left out is kept."""

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED, batches, cnn, dataset, mlp, one_process

import nn


def make(comm, network, method, optimizer="sgd", servers=1, place="dedicated"):
    from collectives import Communicator
    from parallel import ParameterServer
    from parallel.sync import compression

    rule = OPTIMIZERS[optimizer]()
    arguments = network(), nn.CrossEntropyLoss(), rule, Communicator(comm), SEED, servers, place
    return ParameterServer(*arguments, compressor=compression.parse(method))


LAYOUTS = [(1, "dedicated"), (2, "dedicated"), (2, "workers"), (3, "workers")]


@pytest.mark.mpi(ranks=3)
def test_a_ratio_of_1_is_exact(comm):
    for servers, place in LAYOUTS:
        for model, network in (("mlp", mlp), ("cnn", cnn)):
            one, losses = one_process(model, "adam")
            many = make(comm, network, "topk:1", "adam", servers, place)
            found = [many.step(*batch) for batch in batches(model, many.shard)]
            assert found == pytest.approx(losses, rel=1e-12)
            many.check_replicas()
            state = many.state_dict()
            if comm.rank == 0:
                for name, array in one.state_dict().items():
                    np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.mpi(ranks=3)
def test_every_method_learns_sends_less_and_continues_with_the_same_bits(comm):
    for method, least in [("qsgd:15", 6), ("terngrad", 15), ("signsgd", 20), ("topk:0.05", 8), ("dgc:0.05", 1)]:
        for servers, place in LAYOUTS[1:3]:
            many = make(comm, mlp, method, servers=servers, place=place)
            many.set_epoch_steps(3)
            history = batches("mlp", many.shard)
            losses = [many.step(*batch) for batch in history[:3]]
            assert np.isfinite(losses).all()
            counted = many.bytes_sent()
            assert counted["bytes_sent"] * least < counted["bytes_dense"], (method, counted)
            kept = many.state_dict()  # on rank 0, and there alone
            assert bool(kept) == (comm.rank == 0)
            ends = []
            for trainer in (many, make(comm, mlp, method, servers=servers, place=place)):
                trainer.set_epoch_steps(3)
                if ends:  # the first one goes on as if nothing had been
                    trainer.load_state_dict(kept)
                for batch in history[3:]:
                    trainer.step(*batch)
                trainer.check_replicas()
                ends.append(comm.bcast(trainer.flat_parameters.tobytes()))
            assert ends[0] == ends[1], method


@pytest.mark.mpi(ranks=3)
def test_what_is_not_sent_is_kept_and_dealt_to_other_workers(comm):
    many = make(comm, mlp, "topk:0.1", servers=2, place="workers")
    x, y, total = batches("mlp", many.shard)[0]
    gradient = np.zeros_like(many.gradients)
    taken = many.sync.push

    def push():
        gradient[:] = many.gradients
        taken()

    many.sync.push = push
    many.step(x, y, total)
    everything, sums = comm.allreduce(gradient), np.zeros_like(gradient)
    if many.sync.is_server:
        sums[many.sync.own_slice] = many.sync.sums[: many.sync.own_slice.stop - many.sync.own_slice.start]
    left = comm.allreduce(many.sync.memories.flat["error"])
    np.testing.assert_allclose(comm.allreduce(sums) + left, everything, rtol=0, atol=1e-14)
    assert np.abs(left).max() > 1e-6
    state, alone = many.state_dict(), many.alone()
    assert alone is None if comm.rank else np.array_equal(alone.flat_parameters, many.flat_parameters)
    assert many.memory()["moments"] == many.flat_parameters.nbytes, "of SGD none, and the error"
    fewer = make(comm, mlp, "topk:0.1", servers=1, place="dedicated")
    fewer.load_state_dict(state)
    kept = lambda: fewer.sync.memories.flat["error"] if fewer.sync.is_worker else 0 * left
    np.testing.assert_allclose(comm.allreduce(kept()), left, atol=1e-15)
    fewer.load_state_dict({key: array for key, array in state.items() if not key.startswith("compress/")})
    assert not kept().any(), "nothing is left of a state without memories"


@pytest.mark.mpi(ranks=3)
def test_nan_leaves_everything_as_it_is_and_bad_methods_are_refused(comm):
    many = make(comm, mlp, "topk:0.1")
    n = 4 if many.sync.is_worker else 0
    x, y = dataset("mlp").batch(np.arange(n))
    many.step(x, y, 8)
    kept = lambda: {name: [each.array.copy() for each in found] for name, found in many.table.held().items()}
    before = kept()
    x = x.copy()
    x[1:2] = np.nan if comm.rank == 1 else 0
    with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 1"):
        many.step(x, y, 8)
    after = kept()
    assert comm.rank or "compress/error/1.W" in before
    assert all((a == b).all() for name in before for a, b in zip(before[name], after[name], strict=True))
    with pytest.raises(ValueError, match=r"PowerSGD.* does not work with parameter servers"):
        make(comm, mlp, "powersgd:1")
