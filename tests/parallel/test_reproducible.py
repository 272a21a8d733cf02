"""The same bits on any number of ranks: the tree, its schedule, and sha256 of whole trainings."""

import copy
import gc
import hashlib
import pickle
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import nn
from collectives.checking.simulator import simulate
from collectives.steps import chunk
from nn.core.layer import Sequential
from parallel.passes.forward_backward import UnevenTotal
from parallel.sync.fixed_tree import TreeSum, allreduce, cover, dealt, halves, reduce_scatter

SHARDS = 8


def alone(network, loss, optimizer, seed=0, shards=8):
    """One process that computes what any number of ranks compute, without MPI."""
    from parallel import DistributedDataParallel

    return DistributedDataParallel(network, loss, optimizer, None, seed, shards=shards)


class Sum:
    """A value of the simulator that keeps how it was parenthesised."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Sum(f"({self.text}+{other.text})")


def parenthesised(lo, hi):
    if hi - lo == 1:
        return str(lo)
    (a, b), (c, d) = halves((lo, hi))
    return f"({parenthesised(a, b)}+{parenthesised(c, d)})"


def test_the_tree_is_the_textbooks():
    assert parenthesised(0, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert parenthesised(0, 5) == "(((0+1)+(2+3))+4)"
    assert cover(8, (3, 8)) == [(3, 4), (4, 8)] and cover(8, (0, 8)) == [(0, 8)] and cover(7, (1, 6)) == [
        (1, 2), (2, 4), (4, 6),
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", [reduce_scatter, allreduce])
def test_schedule_adds_in_the_trees_order_with_every_number_of_ranks(schedule):
    for leaves in (1, 2, 5, 7, 8, 12):
        for size in range(1, leaves + 1):
            for count in (1, 3, 2 * size + 1):
                held = [cover(leaves, chunk(leaves, size, r)) for r in range(size)]
                given = [
                    {"x": [Sum(parenthesised(*node)) for node in held[r] for _ in range(count)]} for r in range(size)
                ]
                stats = simulate(lambda r, n=count, s=size, v=leaves: schedule(r, s, n, v), given)
                for rank in range(size):
                    lo, hi = chunk(count, size, rank) if schedule is reduce_scatter else (0, count)
                    assert {v.text for v in given[rank]["x"][lo:hi]} <= {parenthesised(0, leaves)}
                if schedule is reduce_scatter and count % size == 0 and all(len(nodes) == 1 for nodes in held):
                    assert stats.moved == count * (size - 1) // size, "as many as a ring"


def test_ranks_without_leaves_can_have_the_sum():
    """As parameter servers have it: all leaves on the first ranks, slices of the sum on others, some of them empty."""
    leaves, count = 8, 10
    for size, holders in ((2, 1), (5, 3), (6, 5)):
        for cuts in ([(0, 0)] * (size - 2) + [(0, 4), (4, 10)], [(0, 10)] + [(10, 10)] * (size - 1)):
            given = []
            for rank in range(size):
                nodes = cover(leaves, dealt(leaves, holders, rank))
                given.append({"x": [Sum(parenthesised(*node)) for node in nodes or [(0, 1)] for _ in range(count)]})
            simulate(lambda r, s=size, h=holders, c=cuts: reduce_scatter(r, s, c, leaves, h), given)
            for rank, (lo, hi) in enumerate(cuts):
                assert {v.text for v in given[rank]["x"][lo:hi]} == ({parenthesised(0, leaves)} if lo < hi else set())


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8, 11])
def test_one_rank_adds_as_the_tree_says_with_few_arrays(leaves):
    rng = np.random.default_rng(leaves)
    values = rng.standard_normal((leaves, 33)).astype(np.float32)

    def recursive(lo, hi):
        if hi - lo == 1:
            return values[lo]
        (a, b), (c, d) = halves((lo, hi))
        return recursive(a, b) + recursive(c, d)

    tree = TreeSum(leaves, 33, np.float32)
    for _ in range(2):  # and again
        for value in values:
            tree.add(value)
        assert np.array_equal(tree.allreduce(), recursive(0, leaves))
    assert len(tree.sums) <= max(1, (leaves - 1).bit_length())
    if leaves > 5:
        assert not np.array_equal(values.sum(axis=0), recursive(0, leaves)), "control: another order, other bits"


def test_a_sum_without_all_leaves_is_refused():
    tree = TreeSum(3, 4, np.float32)
    for given in ([], [(0, 1)], [(0, 2)]):
        with pytest.raises(
            RuntimeError, match=re.escape(f"holds the leaves (0, 3), and was given those of {given} so")
        ):
            tree.allreduce()
        tree.add(np.ones(4, np.float32))
    assert (tree.allreduce() == 3).all()
    tree.add(np.ones(4, np.float32))  # of the next sum, before the others
    with pytest.raises(RuntimeError, match="was given those of"):
        tree.reduce_scatter()


def test_training_goes_on_after_a_step_that_was_refused():
    """A label that is no class, in the second virtual shard: by then the tree has the first one's gradient."""
    x, y = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32), np.arange(8) % 3
    found = []
    for refused in (False, True):
        trainer = alone(nn.Network(nn.Linear(5, 3), (5,)), nn.CrossEntropyLoss(), nn.SGD(0.1), shards=4)
        trainer.step(x, y)
        if refused:
            with pytest.raises(ValueError, match="out of range"):
                trainer.step(x, np.where(np.arange(8) == 3, 3, y))
        found.append((trainer.step(x, y), trainer.digest()))
        trainer.close()
    assert found[0] == found[1]


def mlp():
    layers = nn.Flatten(), nn.Linear(64, 50), nn.Sigmoid(), nn.Linear(50, 10)
    return nn.Network(Sequential(*layers), (8, 8, 1))


def cnn():
    layers = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()
    return nn.Network(Sequential(*layers, nn.Dropout(0.3), nn.Linear(384, 10)), (8, 8, 1))


def transformer():
    return nn.models.build("transformer:16,2,1", (8,), 32, "float32")


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
OPTIMIZERS = {
    "sgd": lambda: nn.SGD(0.1, weight_decay=1e-3),
    "momentum": lambda: nn.SGD(0.1, 0.9),
    "adam": lambda: nn.Adam(0.01),
    "clipped": lambda: nn.SGD(0.1, 0.9, clip=nn.ClipGlobalNorm(0.5)),
    "lars": lambda: nn.LARS(0.5, weight_decay=1e-3),
    "lamb": lambda: nn.LAMB(0.01, clip=nn.ClipNorm(0.1)),
}

SOME = (
    ("mlp", "sgd"), ("mlp", "lars"), ("cnn", "adam"), ("cnn", "lamb"), ("transformer", "clipped"),
    ("transformer", "momentum"),
)  # fmt: skip


def dataset(model):
    rng = np.random.default_rng(3)
    if model == "transformer":
        ids = rng.integers(0, 32, (69, 9))
        return nn.data.Dataset(ids[:, :-1], ids[:, 1:], classes=32)
    return nn.data.Dataset(rng.random((69, 8, 8, 1)), rng.integers(0, 10, 69), classes=10)


def fingerprint(trainer, model, epochs=1):
    """(losses and accuracies; on rank 0 sha256 of parameters, moments and statistics, elsewhere '')."""
    data = dataset(model)  # batches of 32, 32, and 5: three shards without a sample
    losses, test = [], nn.Loader(data, 20, shuffle=False, shard=trainer.shard)
    for epoch in range(epochs):
        losses += [trainer.step(*batch) for batch in nn.Loader(data, 32, 1, shard=trainer.shard).epoch(epoch)]
        losses += nn.evaluate(trainer, test).values()
    state = {name: np.array(array) for name, array in trainer.state_items()}
    sha = hashlib.sha256(b"".join(array.tobytes() for _, array in sorted(state.items())))
    return losses, sha.hexdigest() if trainer.is_writer else ""


@cache
def one_process(model, optimizer):
    return fingerprint(alone(MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), 5, SHARDS), model)


def expected(comm, model, optimizer):
    """What every rank must find: the hash is known to rank 0."""
    losses, sha = comm.bcast(one_process(model, optimizer) if comm.rank == 0 else None)
    return losses, sha if comm.rank == 0 else ""


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4, 5, 8])
def test_bits_do_not_depend_on_the_number_of_ranks(comm, thorough):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    communicator, cases = Communicator(comm), list(product(MODELS, OPTIMIZERS)) if comm.size <= 3 else SOME
    for model, optimizer in cases if thorough else cases[comm.size % 2 :: 2]:  # two ranks and three have the halves
        many = DistributedDataParallel(
            MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), communicator, 5, shards=SHARDS
        )
        assert fingerprint(many, model) == expected(comm, model, optimizer), f"{model}, {optimizer}"
        many.check_replicas()
        many.close()


@pytest.mark.mpi(ranks=[2, 3], more=[5])
def test_nor_on_what_is_sharded(comm, thorough):
    from collectives import Communicator
    from parallel import FullyShardedDataParallel, ZeRO1, ZeRO2

    communicator = Communicator(comm)
    stages = [ZeRO1, ZeRO2, FullyShardedDataParallel] * 2
    for i, (model, optimizer) in enumerate([("mlp", "momentum"), ("cnn", "adam"), ("transformer", "sgd")], comm.size):
        want = expected(comm, model, optimizer)
        for stage in stages[:3] if thorough else stages[i % 3 :][:2]:
            arguments = MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), communicator, 5
            many = stage(*arguments, unit_bytes=2000, shards=SHARDS)
            assert len(many.sync.trees) > 2, "of units, and the tail's"
            assert many.memory()["in transit"] > many.network.layout.count * 4, "sums are whole"
            assert fingerprint(many, model) == want, f"{many.name}, {model}, {optimizer}"
            many.close()
    for refused in (nn.LARS(0.1), nn.LAMB(0.1), nn.SGD(0.1, clip=nn.ClipNorm(1.0))):
        with pytest.raises(ValueError, match=r"(LARS|LAMB|ClipNorm).*needs norms of whole tensors"):
            ZeRO1(mlp(), nn.CrossEntropyLoss(), refused, communicator, shards=SHARDS)


@pytest.mark.mpi(ranks=2)
def test_nor_without_parameters(comm):
    """There are no units; the losses of all shards are summed all the same."""
    from collectives import Communicator
    from parallel import ZeRO1

    rng, losses = np.random.default_rng(1), []
    x, y = rng.random((19, 6)), rng.integers(0, 6, 19)
    for make, more in (alone, ()), (ZeRO1, (Communicator(comm),)):
        trainer = make(nn.Network(nn.Tanh(), (6,)), nn.CrossEntropyLoss(), nn.SGD(0.1), *more, 5, shards=SHARDS)
        index, count, _ = trainer.shard
        shards = chunk(SHARDS, count, index)
        lo, hi = (chunk(19, SHARDS, shard)[i] for i, shard in enumerate((shards[0], shards[1] - 1)))
        losses.append(trainer.step(x[lo:hi].astype(np.float32), y[lo:hi], 19))
        trainer.close()
    assert losses[0] == losses[1]


@pytest.mark.mpi(ranks=[3], more=[5])
def test_nor_on_workers_and_servers(comm):
    from collectives import Communicator
    from parallel import ParameterServer

    communicator, p = Communicator(comm), comm.size
    places = [(s, "workers") for s in {1, p - 1, p} if s] + [(s, "dedicated") for s in {1, p - 1} if 0 < s < p]
    for model, optimizer in (("mlp", "momentum"), ("cnn", "adam"), ("transformer", "clipped")):
        want = expected(comm, model, optimizer)
        for servers, place in places:
            arguments = MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), communicator, 5
            if optimizer == "clipped" and servers > 1:
                with pytest.raises(ValueError, match="ClipGlobalNorm"):
                    ParameterServer(*arguments, servers, place, shards=SHARDS)
                continue
            many = ParameterServer(*arguments, servers, place, shards=SHARDS)
            losses, sha = fingerprint(many, model)
            assert losses == want[0], f"{model}, {optimizer}, {servers} servers on {place}"
            assert comm.rank or sha == want[1], f"{model}, {optimizer}, {servers} servers on {place}"
            many.close()


@pytest.mark.mpi(ranks=[3], more=[2, 5])
def test_nor_on_the_masters_workers(comm):
    from collectives import Communicator
    from parallel import DataParallel

    communicator = Communicator(comm)
    for model, optimizer in SOME:
        arguments = MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), communicator, 5
        many = DataParallel(*arguments, shards=SHARDS)
        losses, sha = fingerprint(many, model)
        many.close()
        assert (losses, sha if comm.rank == 0 else "") == expected(comm, model, optimizer), f"{model}, {optimizer}"


@pytest.mark.mpi(ranks=3)
def test_a_run_goes_on_with_the_same_bits_on_another_number_of_ranks_under_any_strategy(comm):
    """An epoch of one process, then one of three ranks, are two epochs of one process."""
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import STRATEGIES, build_trainer

    communicator, model, optimizer = Communicator(comm), "cnn", OPTIMIZERS["adam"]
    one = alone(MODELS[model](), nn.CrossEntropyLoss(), optimizer(), 5, SHARDS)
    fingerprint(one, model)
    kept = one.state_dict()
    want = fingerprint(one, model)
    for name in (name for name, strategy in STRATEGIES.items() if strategy.supports.reproducible):
        options = Options(strategy=name, reproducible=SHARDS, seed=5)
        many = build_trainer(options, MODELS[model](), nn.CrossEntropyLoss(), optimizer(), communicator)
        many.load_state_dict(kept)
        losses, sha = fingerprint(many, model)
        assert losses == want[0] and (comm.rank or sha == want[1]), name
        many.close()


@pytest.mark.mpi(ranks=2)
def test_control_without_it_bits_differ_but_little(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    loss, (_, sha) = nn.CrossEntropyLoss(), one_process("mlp", "adam")
    many = DistributedDataParallel(mlp(), loss, OPTIMIZERS["adam"](), Communicator(comm), 5)
    assert fingerprint(many, "mlp")[1] != sha
    one = nn.Trainer(mlp(), loss, OPTIMIZERS["adam"](), 5)
    assert fingerprint(one, "mlp")[1] != sha
    shards = alone(mlp(), loss, OPTIMIZERS["adam"](), 5, SHARDS)
    fingerprint(shards, "mlp")
    assert np.abs(shards.flat_parameters - one.flat_parameters).max() < 1e-5
    assert np.abs(many.flat_parameters - one.flat_parameters).max() < 1e-5


def test_float64_equals_serial():
    """What is computed is the gradient of the batch: only its rounding is fixed."""

    def network():
        return nn.Network(Sequential(nn.Flatten(), nn.Linear(64, 10)), (8, 8, 1), np.float64)

    x, y = np.random.default_rng(0).random((21, 8, 8, 1)), np.arange(21) % 10
    one = nn.Trainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9))
    for shards in (1, 3, 8, 30):  # 30: more shards than samples
        many = alone(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9), shards=shards)
        one.load_state_dict({k: v.copy() for k, v in many.state_dict().items()})
        for _ in range(3):
            assert abs(one.step(x, y) - many.step(x, y)) < 1e-13
        np.testing.assert_allclose(many.flat_parameters, one.flat_parameters, atol=1e-14)
        assert np.allclose(many.sum_scores(x, y), one.sum_scores(x, y), rtol=1e-6)


def test_blas_has_its_threads_again_when_the_last_of_them_is_closed_or_deleted():
    def threads():
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    def make():
        network = nn.Network(nn.Linear(6, 3), (6,))
        return alone(network, nn.CrossEntropyLoss(), nn.SGD(0.1), shards=4)

    gc.collect()  # trainers of other tests
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        first, second = make(), make()
        assert threads() == {1}
        first.close()
        first.close()
        assert threads() == {1}, "the second one needs it"
        del second
        gc.collect()
        assert threads() == before != {1}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_trainers_of_ranks_are_not_copied(copied):
    trainer = alone(nn.Network(nn.Linear(6, 3), (6,)), nn.CrossEntropyLoss(), nn.SGD(0.1), shards=4)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\).*load_state_dict.*alone\(\)"):
        copied(trainer)
    copied(trainer.alone())


def test_what_cannot_be_is_refused_with_its_reason():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, synchronized=True), nn.Flatten(), nn.Linear(144, 10)
    network = nn.Network(Sequential(*layers), (8, 8, 1))
    with pytest.raises(ValueError, match=r"layer 1 \(BatchNorm2d.*needs the statistics of all at once"):
        alone(network, nn.CrossEntropyLoss(), nn.SGD(0.1))
    one = alone(mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1))
    with pytest.raises(ValueError, match="8 virtual shards, each a micro-batch"):
        one.step(np.zeros((2, 8, 8, 1), np.float32), np.zeros(2, int), 2, 2)
    with pytest.raises(ValueError, match="`join`"):
        one.step(np.zeros((2, 8, 8, 1), np.float32), np.zeros(2, int), UnevenTotal(2, 0))

    class Five:
        rank, size = 0, 5

    with pytest.raises(ValueError, match="4 virtual shards for 5 ranks: 1 would have nothing to do"):
        TreeSum(4, 10, np.float32, Five)


@pytest.mark.mpi(ranks=2)
def test_ranks_that_disagree_on_the_shards_are_told(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel, ReplicaError

    with pytest.raises(ReplicaError, match=r"virtual shards: .*8.*4"):
        arguments = mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm)
        DistributedDataParallel(*arguments, shards=[8, 4][comm.rank])
