"""A trainer that is closed and let go is gone at once, and its shared memory: it does not wait for the collector."""

import gc
import weakref
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from equality import CHOOSY, MODELS, batches

import nn
from parallel.command.options import Options


@contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def shared_memory() -> int:
    """Mappings of anonymous files that this process has."""
    with open("/proc/self/maps") as maps:
        return sum("/memfd:" in line for line in maps)


def closed_calls(trainer, batch) -> list:
    """Return what a closed trainer refuses: most of it would ask MPI for what was freed."""
    x, y, _ = batch
    return [
        lambda: trainer.step(*batch),
        lambda: trainer.predict(x),
        lambda: trainer.sum_scores(x, y),
        trainer.state_dict,
        trainer.snapshot,
        trainer.digest,
        trainer.check_replicas,
        lambda: trainer.synchronize(0.0),
        lambda: trainer.load_state_dict({}),
        lambda: trainer.restore({}),
        lambda: trainer.rescale("velocity", 0.5),
    ]


@pytest.mark.mpi(ranks=2)
def test_nothing_refers_to_a_closed_trainer(comm):
    from collectives import Communicator
    from parallel.reports.traffic import Traffic
    from parallel.strategies import STRATEGIES, build_trainer

    ways = [{}, {"reproducible": 4}], [name for name in STRATEGIES if name not in CHOOSY]
    cases = [
        options | {"strategy": name}
        for options, name in product(*ways)
        if STRATEGIES[name].supports.reproducible or not options
    ]
    cases += [{"strategy": "ps", "consistency": "async"}, {"strategy": "ddp", "consistency": "stale:1"}]
    cases += [{"strategy": "ddp", "overlap": way} for way in ("poke", "thread")]
    cases += [{"strategy": name, "compress": "topk:0.1"} for name in ("ddp", "ps")]
    with no_collector():
        before, most = shared_memory(), 0  # without what tests before this one have left to the collector
        for case in cases:
            communicator = Communicator(comm)
            made = MODELS["mlp"](), nn.CrossEntropyLoss(), nn.SGD(0.1), Traffic(communicator)
            trainer = build_trainer(Options(**case, batch=16), *made)
            trainer.set_epoch_steps(3)
            for batch in batches("mlp", trainer.shard, 2):
                trainer.step(*batch)
            assert bool(trainer.bytes_sent()) == ("compress" in case), case
            most = max(most, shared_memory())
            there = weakref.ref(trainer)
            trainer.close()
            trainer.close()  # once is enough
            for last in closed_calls(trainer, batch):
                with pytest.raises(RuntimeError, match=f"{trainer.name} is closed"):
                    last()
            communicator.release()
            del made, trainer, communicator, last
            assert there() is None, f"{case}: {gc.get_referrers(there())}"
            assert shared_memory() == before, case
    assert most > before, "control: there was some"


@pytest.mark.mpi(ranks=2)
def test_all_is_closed_where_the_last_update_has_failed(comm):
    from parallel import ParameterServer
    from parallel.sync.mailbox import MAILBOXES

    network = MODELS["mlp"]()
    many = ParameterServer(network, nn.CrossEntropyLoss(), nn.SGD(0.1), comm, consistency="async")  # which it wraps
    many.step(*batches("mlp", many.shard)[0])
    synchronize = many.sync.synchronize

    def fail():
        synchronize()
        raise FloatingPointError("the norm of the gradient is inf")

    closed, mailbox, wrapped = [], many.sync.mailbox, many.mesh.wrapped
    many.sync.synchronize, many.forward_backward.close = fail, lambda: closed.append("pass")
    with pytest.raises(FloatingPointError, match="norm"):
        many.close()
    assert closed == ["pass"] and mailbox not in MAILBOXES
    assert wrapped.planner is None and many.mesh.wrapped is None


@pytest.mark.mpi(ranks=2)
def test_a_rank_whose_own_error_ends_close_waits_for_nobody(comm, monkeypatch):
    from parallel import DistributedDataParallel

    many = DistributedDataParallel(MODELS["mlp"](), nn.CrossEntropyLoss(), nn.SGD(0.1), comm)
    if comm.rank == 0:

        def fail():
            raise OSError("here alone")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="here alone"):
            patch.setattr(many.sync, "close", fail)
            many.close()
        many.sync.close()
        many.mesh.close()
    else:
        many.close()  # waits for rank 0


@pytest.mark.mpi(ranks=2)
def test_a_message_outlives_the_trainer_that_sent_it(comm):
    """A worker that lets its trainer go after the last step has pushed: the server still receives that."""
    from collectives import Communicator
    from parallel.sync.mailbox import Mailbox, Message

    communicator = Communicator(comm)
    sender, receiver = ("worker", 0), ("server", 1)
    mailbox, received = Mailbox(communicator, {sender: 0, receiver: 1}, ("push",)), []
    if comm.rank == 0:
        mailbox.send(Message("push", sender, receiver, array=np.full(10**6, 3.0)))
        memory = weakref.ref(mailbox.buffers[1])
        del mailbox
        gc.collect()
        assert memory() is not None
        comm.Barrier()
    else:
        mailbox.handlers[receiver] = lambda message: received.append(message.array.view(float))
        comm.Barrier()
        mailbox.wait(lambda: received)
        assert (received[0] == 3.0).all()
    communicator.release()
