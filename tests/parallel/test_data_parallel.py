"""Data parallelism computes what one process computes: to 1e-12 after 5 steps, bit-equal on all ranks."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from equality import (
    MODELS,
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

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import netlab  # noqa: E402

TINY = {"bucket": 0.002, "first_bucket": 0.001}  # MiB: many buckets
MESSAGES = {"node_memory": "off", **TINY}


def distributed(comm, network, optimizer=None, allreduce="auto", **options):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    communicator = Communicator(comm, allreduce=allreduce)
    optimizer = optimizer or OPTIMIZERS["momentum"]()
    return DistributedDataParallel(network, nn.CrossEntropyLoss(), optimizer, communicator, SEED, **options)


def strategy(comm, **options):
    """The trainer that these options of the command line ask for."""
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    options = Options(seed=SEED, **options)
    network, optimizer = mlp(), OPTIMIZERS["momentum"]()
    return build_trainer(options, network, nn.CrossEntropyLoss(), optimizer, Communicator(comm))


def maker(comm, allreduce="auto", **options):
    """What assert_equals_one_process makes its trainers with; when it makes the next, ranks must agree on the last."""
    before = []

    def make(network, loss, optimizer):
        trainer = distributed(comm, network, optimizer, allreduce, **options)
        if before:
            alike(comm, before.pop())
        before.append(trainer)
        return trainer

    return make


def alike(comm, trainer):
    """All ranks hold the same bits."""
    mine = trainer.flat_parameters.tobytes() + trainer.buffers.tobytes()
    assert len(set(comm.allgather(mine))) == 1
    trainer.close()


@pytest.fixture
def nodes(monkeypatch):
    """Let ranks believe that they are on such nodes."""
    from parallel.strategies import data_parallel, gradient_sync

    def set_nodes(places):
        for module in data_parallel, gradient_sync:
            monkeypatch.setattr(module, "nodes_of", lambda communicator: places)

    return set_nodes


# ------------------------------------------------------------------------------------ equal to one process


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4, 5], timeout=120)
def test_equals_one_process_in_node_memory(comm, thorough):
    everything = {} if comm.size == 3 else {"clips": (0,)}
    assert_equals_one_process(maker(comm), thorough=thorough, **everything)


@pytest.mark.mpi(ranks=[2, 3], more=[5], timeout=120)
def test_equals_one_process_by_messages(comm):
    """Every way of overlapping with every kind of algorithm; what is updated with the sum does not depend on it."""
    ways = {"thread": "ring", "poke": "doubling", "none": "native"}
    for overlap, allreduce in ways.items():
        make = maker(comm, allreduce, overlap=overlap, **MESSAGES)
        assert_equals_one_process(make, optimizers=("momentum",), clips=(0,))
    assert_equals_one_process(maker(comm, overlap="poke", **MESSAGES), models=("mlp",), clips=(1,))


@pytest.mark.mpi(ranks=[3], more=[4])
def test_several_nodes(comm, nodes):
    """Two levels where nodes have equally many ranks, whatever the order of ranks; else messages."""
    for places in {4: ([0, 0, 2, 2], [0, 1, 0, 1]), 3: ([0, 0, 2],)}[comm.size]:
        nodes(places)
        ways = {"auto": "thread", "ring": "poke", "two_level": "none", "shared": "poke", "native": "none"}
        for allreduce, overlap in ways.items():
            make = maker(comm, allreduce, overlap=overlap, **TINY)
            optimizers = ("momentum", "lamb") if allreduce == "auto" else ("sgd",)
            assert_equals_one_process(make, models=("cnn",), optimizers=optimizers, clips=(1,))
        many = distributed(comm, mlp())
        how = many.describe()
        assert "between 2 nodes" in how if comm.size == 4 else "nodes with different numbers of ranks (2, 1)" in how
        many.close()


@pytest.mark.mpi(ranks=4)
def test_a_bucket_leaves_for_other_nodes_when_all_ranks_here_have_finished_it(comm, nodes):
    """Not before, though this rank has; the last one with the messages. A rank that does not wait sends wrong sums."""
    nodes([0, 0, 2, 2])
    sums = distributed(comm, mlp(), OPTIMIZERS["sgd"](), overlap="poke", **TINY).sync
    buckets, size = sums.buckets, len(sums.gradients)
    gradients = np.arange(size) + 1.0
    half = comm.allgather(sums.share.start + buckets.stops[0])[1]  # to the end of the second rank's first bucket
    assert len(buckets.stops) > 2 and half < size

    def say(*ends):
        """The first ranks of the nodes have finished so much, then the second ones; all look again."""
        for turn, end in enumerate(ends):
            if sums.window.rank == turn:
                sums.ready(end)
            comm.Barrier()
        sums.ready(ends[sums.window.rank])
        comm.Barrier()

    for early in False, True:
        sums.begin_step(0, 2, 8, 2)
        sums.gradients[:], sums.flat_buffer[size:] = gradients * 10**comm.rank, comm.rank
        if early:  # the control
            sums.window.flags.read_all = lambda word: [10**9] * sums.count
            sums.window.flags.wait_until = lambda *_: None
            sums.gradients[:half] = 0
            sums.ready(size)
            comm.Barrier()
            sums.gradients[:half] = gradients[:half] * 10**comm.rank
        else:
            say(size, 0)
            assert buckets.launched == 0, "the second rank has finished nothing"
            say(size, half)
            assert 0 < buckets.launched < len(buckets.stops) and (sums.window.rank == 0 or buckets.launched == 1)
            sums.set_loss(comm.rank, 8)
            say(size, size)
            assert buckets.launched == len(buckets.stops), "all has left before the end"
            sums.finish_step()
            assert sums.summed.result()[:2] == (0 + 1 + 2 + 3, True)
        if early:
            buckets.sum()
        right = (sums.sums[: sums.share.stop - sums.share.start] == 1111 * gradients[sums.share]).all()
        assert right != early
    comm.Barrier()


def test_overlap_must_be_shown_to_be_faster():
    """By more than the noise of the steps; the first of each way does not count."""
    from parallel.sync.messages import ROUNDS, OverlapTrial

    def choice(**times):
        trial = OverlapTrial([*times])
        ends = [trial.add(times[trial.next()][i // len(times)]) for i in range(ROUNDS * len(times))]
        assert ends.index(True) == len(ends) - 1
        return trial.best()

    plain = [9.0, *(1.0 + 0.1 * (-1) ** i for i in range(ROUNDS - 1))]
    less = [0.0, *(t - 0.05 for t in plain[1:])]
    once_more = [*less[:-1], 2.0]
    assert choice(thread=less, poke=plain, none=plain) == "thread"
    assert choice(thread=once_more, poke=[t - 0.01 for t in less], none=plain) == "poke"
    assert choice(poke=once_more, none=plain) == "poke"
    assert choice(poke=[*less[:-2], 2.0, 2.0], none=plain) == "none"
    assert choice(thread=[0.0, *plain[2:], 0.9], poke=plain, none=plain) == "none", "as often slower as faster"


@pytest.mark.mpi(ranks=2)
def test_overlap_auto_tries_all_ways_tells_and_changes_no_bit(comm, nodes):
    assert "overlap none" in distributed(comm, mlp(), overlap="auto", **MESSAGES).describe(), "ranks share cores"
    nodes([0, 1])
    said = []
    many = distributed(comm, mlp(), overlap="auto", **MESSAGES)
    plain = distributed(comm, mlp(), overlap="poke", **MESSAGES)
    many.say = said.append
    assert "overlap measured in the first steps" in many.describe() and len(many.sync.buckets.buckets) > 3
    for _ in range(6):
        for batch in batches("mlp", many.shard):
            assert many.step(*batch) == plain.step(*batch)
    assert len(said) == 1 and all(way in said[0] for way in ("overlap ", "thread ", "poke ", "none ", " ms"))
    assert len(set(comm.allgather(many.sync.buckets.overlap))) == 1, "rank 0 decides for all"
    assert (many.flat_parameters == plain.flat_parameters).all()


@pytest.mark.mpi(ranks=2)
def test_ranks_that_measured_differently_overlap_alike(comm, nodes):
    """What each finds fastest is another way; all take rank 0's, and go on."""
    nodes([0, 1])
    many = distributed(comm, mlp(), overlap="auto", **MESSAGES)
    trial = many.sync.buckets.trial
    trial.best = lambda: ["poke", "thread"][comm.rank]
    batch = batches("mlp", many.shard)[0]
    while many.sync.buckets.trial:
        many.step(*batch)
    assert many.sync.buckets.overlap == "poke" and many.sync.buckets.communicators.keys() == {"poke"}
    many.step(*batch)
    many.check_replicas()
    many.close()


@pytest.mark.parametrize("model", [*MODELS, "resnet20"])
def test_gradients_that_are_ready_are_final(model):
    """What is sent during backprop is not written any more."""
    network = MODELS[model]() if model in MODELS else nn.models.build(model, (8, 8, 1), 10, "float64")
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    sent = []
    trainer.ctx.network_context.on_gradients_ready = lambda end: sent.append((end, trainer.gradients[:end].copy()))
    x, y, total = batches(model if model in MODELS else "cnn", (0, 1))[0]
    trainer.compute_gradients(x, y, total)
    assert len(sent) > 2 and max(end for end, _ in sent) == network.layout.size
    for end, gradients in sent:
        np.testing.assert_array_equal(gradients, trainer.gradients[:end])


def test_buckets_end_with_layers_and_cover_all():
    from parallel.sync.messages import bucket_slices

    assert bucket_slices([4, 6, 30, 36, 40], 40, first=5, rest=10) == [
        slice(0, 6),
        *(slice(*s) for s in ((6, 18), (18, 30), (30, 40))),
    ]
    assert bucket_slices([40], 40, 100, 100) == [slice(0, 40)]
    for first, rest in ((1, 1), (3, 7), (16, 5)):
        buckets = bucket_slices([5, 16, 16, 30], 33, first, rest)
        assert [b.start for b in buckets[1:]] == [b.stop for b in buckets[:-1]]
        assert buckets[0].start == 0 and buckets[-1].stop == 33


# ------------------------------------------------------------------------------------ controls that must fail


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize("options", [{}, MESSAGES], ids=["memory", "messages"])
def test_control_without_communication_differs(comm, options):
    one, _ = one_process("mlp", "lars")
    many = distributed(comm, mlp(), OPTIMIZERS["lars"](), **options)

    def keep_to_myself():
        sync = many.sync
        if not options:
            sync.sums[: sync.share.stop - sync.share.start] = many.gradients[sync.share]
        return sync.message.result()._replace(agreed=True)  # as if nothing were wrong

    many.sync.finish_step = keep_to_myself
    train(many, "mlp")
    assert difference(many.flat_parameters, one.flat_parameters) > 1e-6


@pytest.mark.mpi(ranks=3)
def test_control_statistics_of_each_rank_alone_differ(comm):
    one, _ = one_process("cnn", "momentum", steps=2)
    for options in {}, MESSAGES:
        many = distributed(comm, cnn(synchronized=False), **options)
        train(many, "cnn", 2)  # a rank alone cannot normalise one sample
        assert difference(many.flat_parameters, one.flat_parameters) > 1e-6
        assert len(set(comm.allgather(many.buffers.tobytes()))) == 1, "replicas keep the same running statistics"


@pytest.mark.mpi(ranks=2)
def test_aliased_buffers_are_caught(comm, monkeypatch):
    """Ranks that write gradients into the same memory are refused; a bucket that overlaps another gives wrong sums.

    Where there are no parameters, none are missed.
    """
    from collectives import Communicator
    from collectives.node_memory.window import SharedWindow

    many = distributed(comm, mlp(), overlap="poke", **MESSAGES)
    buckets = many.sync.buckets.buckets
    bucket, second = buckets[:2]
    buckets[1] = bucket.base[len(bucket) - 8 : len(bucket) + len(second)]
    many.sync.buckets.plan()
    train(many, "mlp")
    assert difference(many.flat_parameters, one_process("mlp", "momentum")[0].flat_parameters) > 1e-6

    first = lambda window, x: type("Peers", (), {"parts": [window.aliased] * window.size})

    def aliased(window, shape, dtype=float):
        window.aliased = window.empty_common(shape, dtype)
        return window.aliased

    monkeypatch.setattr(SharedWindow, "empty", aliased)
    monkeypatch.setattr(SharedWindow, "peers", first)
    with pytest.raises(RuntimeError, match=r"the gradients of rank \d are not in memory of their own"):
        distributed(comm, mlp())
    monkeypatch.undo()
    monkeypatch.setattr(SharedWindow, "empty_common", lambda window, shape, dtype=float: np.zeros(shape, dtype))
    with pytest.raises(RuntimeError, match="parameters"):
        distributed(comm, mlp())
    monkeypatch.undo()
    nothing = nn.Network(nn.Tanh(), (3,), np.float64)
    assert distributed(comm, nothing).step(np.zeros((1, 3)), np.zeros(1, int), comm.size) == pytest.approx(np.log(3))
    Communicator(comm).Barrier()


def test_replicas_are_compared_after_at_least_one_step():
    from parallel import CheckReplicas

    with pytest.raises(ValueError, match=r"CheckReplicas: steps .*at least 1, given 0"):
        CheckReplicas(0)


@pytest.mark.mpi(ranks=3)
def test_a_changed_replica_is_found_and_named(comm):
    from parallel import CheckReplicas, ReplicaError

    many = distributed(comm, cnn(), **MESSAGES)
    loader = nn.Loader(dataset("cnn"), 16, shard=many.shard, dtype=np.float64)
    nn.fit(many, loader, 1, [CheckReplicas(2)])
    name, array = next((n, a) for n, a in many.network.layout.items(many.flat_parameters) if n == "5.W")
    if comm.rank == 2:
        array[0, 0] = np.nextafter(array[0, 0], 1)  # a single bit
    with pytest.raises(ReplicaError, match=rf"{name} on ranks \[2\]"):
        many.check_replicas()
    with pytest.raises(ReplicaError, match="step 4"):
        nn.fit(many, loader, 1, [CheckReplicas(2)])


@pytest.mark.mpi(ranks=2)
def test_in_node_memory_there_is_one_array_of_parameters_and_moments(comm):
    from parallel import ReplicaError

    many = distributed(comm, cnn(), OPTIMIZERS["adam"]())
    size = many.network.layout.size
    share = many.sync.share
    assert share.stop - share.start <= -(-size // 32) * 16
    assert sum(comm.allgather(share.stop - share.start)) == size
    many.sync.begin_step(0, 0, 1, 2)
    many.gradients[:] = 1
    many.sync.set_loss(0.0, 1)
    many.sync.finish_step()
    many.update()
    moved = np.flatnonzero(many.slots["mean"])
    assert set(moved) == set(range(size)), "every block of one array was updated, by one rank or the other"
    for array in many.flat_parameters, many.slots["mean"]:
        if comm.rank == 1:
            array[3] = 7
        comm.Barrier()
        assert array[3] == 7
        comm.Barrier()
    many.check_replicas()
    many.buffers[0] = comm.rank
    with pytest.raises(ReplicaError, match=r"state/1\.mean"):
        many.check_replicas()


# ------------------------------------------------------------------------------------ micro-batches, join, resume


@pytest.mark.mpi(ranks=[1, 3])
def test_accumulated_parts_equal_one_large_batch(comm):
    for options in {}, {"overlap": "thread", **MESSAGES}:
        one, _ = one_process("mlp", "adam", steps=3)
        many = distributed(comm, mlp(), OPTIMIZERS["adam"](), **options)
        loader = nn.Loader(dataset("mlp"), 16, seed=1, shard=many.shard, dtype=np.float64)
        nn.fit(many, loader, 1, accumulate=4)  # of the last batch a rank has 1 or 2 samples: empty parts
        assert many.steps == 3 and difference(many.flat_parameters, one.flat_parameters) < 1e-12


@pytest.mark.mpi(ranks=3)
def test_join_ranks_with_0_1_and_5_batches(comm):
    """Every sample counts once: the same as one process with each round's samples together, dropout included."""
    from parallel import join

    rng = np.random.default_rng(4)
    counts = ([], [3], [4, 1, 0, 2, 5])  # of samples in the batches of each rank
    data = [[(rng.random((n, 8, 8, 1)), rng.integers(0, 10, n)) for n in each] for each in counts]
    one = nn.Trainer(cnn(), nn.CrossEntropyLoss(), OPTIMIZERS["momentum"](), SEED)
    losses = []
    for batch in range(5):
        here = [each[batch] for each in data if len(each) > batch and len(each[batch][0])]
        if here:
            losses.append(one.step(*(np.concatenate(arrays) for arrays in zip(*here, strict=True))))
    for options in {}, {"overlap": "poke", **MESSAGES}:
        many = distributed(comm, cnn(), **options)
        seen = [(many.step(x, y, total), total) for x, y, total in join(data[comm.rank], comm)]
        np.testing.assert_allclose([loss for loss, _ in seen], losses, rtol=1e-12)
        assert [total for _, total in seen] == [7, 1, 2, 5]
        assert difference(many.flat_parameters, one.flat_parameters) < 1e-12
    assert list(join([], comm)) == []


@pytest.mark.mpi(ranks=2)
def test_join_refuses_unlike_batches_on_all_ranks(comm):
    from parallel import join

    x, y = np.zeros((2, 3)), np.zeros(2, int)
    unlike = [(x, y), (x.astype("f4"), y)]
    with pytest.raises(ValueError, match=r"join: rank 1 has samples and targets of .*<f4.*expected .*<f8"):
        list(join([unlike[comm.rank]], comm))
    with pytest.raises(ValueError, match="join: rank 1 has samples and targets of "):
        list(join([(x, np.zeros((2, 3 + comm.rank)))], comm))
    later = [[(x, y), (x, y)], [(x, y), (x[:1], y)]]
    with pytest.raises(ValueError, match="join: rank 1 has 1 samples and 2 targets in a batch"):
        list(join(later[comm.rank], comm))


@pytest.mark.mpi(ranks=[2, 3])
def test_resume_is_bit_exact_and_portable(comm):
    """A checkpoint goes on as if nothing had been, in either way of summing, and on one process."""
    for options in {}, {"overlap": "poke", **MESSAGES}:
        first, again = (distributed(comm, cnn(), OPTIMIZERS["lamb"](), **options) for _ in range(2))
        train(first, "cnn", 3)
        state = {name: array.copy() for name, array in first.state_dict().items()}
        one = nn.Trainer(cnn(), nn.CrossEntropyLoss(), OPTIMIZERS["lamb"](), SEED)
        one.load_state_dict(state)
        for trainer in first, again, one:
            if trainer is again:
                again.load_state_dict(state)
            for batch in batches("cnn", trainer.shard)[3:]:
                trainer.step(*batch)
        assert first.flat_parameters.tobytes() == again.flat_parameters.tobytes()
        assert first.buffers.tobytes() == again.buffers.tobytes()
        assert difference(first.flat_parameters, one.flat_parameters) < 1e-12
        for name, array in one.state_dict().items():
            np.testing.assert_allclose(again.state_dict()[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.mpi(ranks=2)
def test_rank_0_can_look_into_the_network_alone(comm):
    """Layers that take statistics over all ranks do not wait for them, and shared memory stays as it is."""
    many = distributed(comm, cnn())
    train(many, "cnn", 2)
    before = many.flat_parameters.copy()
    one = many.alone()
    assert (one is None) == (comm.rank == 1)
    if one:
        assert (one.flat_parameters == before).all()
        train(one, "cnn", 1)
        assert (one.flat_parameters != before).any()
    comm.Barrier()
    assert (many.flat_parameters == before).all()


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.mpi(ranks=2)
def test_ranks_that_disagree_are_told_what_on(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel, ReplicaError
    from parallel.trainer import agree, data_facts

    communicator = Communicator(comm)
    with pytest.raises(ReplicaError, match="optimizer"):
        DistributedDataParallel(mlp(), nn.CrossEntropyLoss(), nn.SGD([0.1, 0.2][comm.rank]), communicator)
    with pytest.raises(ReplicaError, match="network"):
        DistributedDataParallel([mlp, cnn][comm.rank](), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)
    data = nn.data.Data(dataset("mlp"), dataset("mlp"), "noise")
    agree(communicator, data_facts(data))
    for name, change in (("targets of the test data", "y"), ("samples of the test data", "x")):
        data = nn.data.Data(dataset("mlp"), dataset("mlp"), "noise")
        values = getattr(data.test, change)
        values[0] = values[0] + comm.rank
        with pytest.raises(ReplicaError, match=f"disagree on the {name}: rank 0: SHA-256"):
            agree(communicator, data_facts(data))
    many = nn.data.Dataset(np.zeros((300, 2)), np.arange(300) % 2, classes=2)
    many.y[1] = comm.rank  # of all targets, not of those of some samples
    with pytest.raises(ReplicaError, match="targets of the train data"):
        agree(communicator, data_facts(nn.data.Data(many, many.head(1), "many")))


@pytest.mark.mpi(ranks=2)
def test_ranks_with_other_layers_are_told_which(comm):
    """Also where all parameters have the same shapes."""
    from parallel import ReplicaError

    for ours, theirs, says in (
        (nn.Tanh(), nn.ReLU(), "layer 1: rank 0: Tanh(), rank 1: ReLU()"),
        (nn.Dropout(0.5), nn.Dropout(0.1), "layer 1: rank 0: Dropout(), rank 1: Dropout(rate=0.1)"),
        (nn.BatchNorm1d(4, eps=0.1), nn.BatchNorm1d(4), "layer 1: rank 0: BatchNorm1d(4, eps=0.1), rank 1"),
    ):
        network = nn.Network(nn.Sequential(nn.Linear(3, 4), ours if comm.rank == 0 else theirs), (3,), np.float64)
        with pytest.raises(ReplicaError) as error:
            distributed(comm, network)
        assert f"ranks disagree on the {says}" in str(error.value)


@pytest.mark.mpi(ranks=2)
def test_the_size_of_the_global_batch_must_be_given_and_alike(comm, nodes):
    """Else a gradient would be summed over ranks that divide by different numbers."""
    x, y, total = batches("mlp", (comm.rank, 2))[0]
    for places, options in ([0, 0], {}), ([0, 0], MESSAGES), ([0, 1], {}):
        nodes(places)
        many = distributed(comm, mlp(), **options)
        before = many.flat_parameters.copy()
        with pytest.raises(ValueError, match=r"step 0 on 2 ranks: step\(x, y, total\) needs the number of samples"):
            many.step(x, y)
        with pytest.raises(ValueError, match="global batch"):
            many.step(x, y, total + comm.rank)
        assert (many.flat_parameters == before).all()
        many.step(x, y, total)
        many.close()
    nodes([0, 0])
    ps = {"strategy": "ps", "server_place": "workers"}
    for options in (
        {"strategy": "zero1"},
        {"strategy": "fsdp", "reproducible": 4},
        {"reproducible": 4},
        {"compress": "topk:0.1"},
        ps,
        ps | {"servers": 2, "reproducible": 4},
        ps | {"servers": 2, "compress": "topk:0.1"},
    ):
        many = strategy(comm, **options)
        before = many.flat_parameters.copy()
        with pytest.raises(ValueError, match=r"step 0.* 16.* 17"):
            many.step(x, y, total + comm.rank)
        assert (many.flat_parameters == before).all(), options
        many.step(x, y, total)
        assert not (many.flat_parameters == before).all(), options
        many.close()


@pytest.mark.mpi(ranks=2)
def test_what_cannot_be_is_refused(comm, nodes):
    with pytest.raises(ValueError, match="node_memory 'yes': expected one of auto, on, off"):
        distributed(comm, mlp(), node_memory="yes")
    for node_memory in "on", "off":
        with pytest.raises(ValueError, match="overlap 'late'"):
            distributed(comm, mlp(), node_memory=node_memory, overlap="late")
        with pytest.raises(ValueError, match="buckets must hold more than 0 MiB, given 0 and 1"):
            distributed(comm, mlp(), node_memory=node_memory, bucket=0)
    nodes([0, 1])
    with pytest.raises(ValueError, match="cannot be summed in node-shared memory: one rank a node"):
        distributed(comm, mlp(), node_memory="on")
    with pytest.raises(nn.data.BatchTooSmall):
        nn.Loader(dataset("mlp"), 1, shard=(comm.rank, 2))


WRONG_KINDS = {
    ("DistributedDataParallel", "shards"): (-1, 2.5),
    ("DistributedDataParallel", "bucket"): ("25", math.inf),
    ("DistributedDataParallel", "compressor"): ("topk:0.1",),
    ("ParameterServer", "compressor"): ("topk:0.1",),
    ("ZeRO1", "unit_bytes"): ("1MiB", -1),
    ("FullyShardedDataParallel", "prefetch"): (-1, 1.5),
    ("StaleDataParallel", "delay"): (-1, 1.5),
    ("LocalSGD", "every"): ("8", 1.5, True),
    ("Downpour", "push"): (0, 1.5),
    ("OneWeirdTrick", "bucketing"): ({"bucket": 0},),
}


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("strategy_name, argument", WRONG_KINDS)
def test_what_is_no_such_number_is_refused_by_the_argument_s_name(comm, strategy_name, argument):
    import parallel
    from collectives import Communicator

    for value in WRONG_KINDS[strategy_name, argument]:
        given = mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](), Communicator(comm)
        with pytest.raises((TypeError, ValueError), match=f"{argument.removesuffix('ing')}.* must .*given"):
            getattr(parallel, strategy_name)(*given, **{argument: value})


UNLIKE = {  # what ranks 0 and 1 are given
    ("DistributedDataParallel", "bucket"): (1.0, 25.0),
    ("DistributedDataParallel", "compressor"): (None, "topk:0.1"),
    ("DistributedDataParallel", "node_memory"): ("on", "off"),
    ("DistributedDataParallel", "overlap"): ("none", "thread"),
    ("DistributedDataParallel", "shards"): (0, 4),
    ("DataParallel", "shards"): (0, 4),
    ("ZeRO1", "unit_bytes"): (1, 1 << 22),
    ("FullyShardedDataParallel", "prefetch"): (0, 2),
    ("TensorParallel", "stage"): (0, 1),
    ("TensorParallel", "tensor"): (1, 2),
    ("ParameterServer", "compressor"): (None, "topk:0.1"),
    ("ParameterServer", "shards"): (0, 4),
    ("Downpour", "compressor"): (None, "topk:0.1"),
    ("OneWeirdTrick", "scheme"): ("all", "turns"),
    ("PipeDream", "bucketing"): ({"bucket": 1.0}, None),
}


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("strategy_name, argument", UNLIKE)
def test_ranks_that_were_given_other_arguments_are_told_which(comm, strategy_name, argument):
    """Else they would wait for each other in different collectives."""
    import parallel
    from collectives import Communicator
    from parallel.sync.compression import parse

    value = UNLIKE[strategy_name, argument][comm.rank]
    value = parse(value) if argument == "compressor" and value else value
    given = mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](), Communicator(comm, watch=PATIENCE)
    with pytest.raises(parallel.ReplicaError, match=f"disagree on .*{argument[:6]}.*: rank 0: .*, rank 1: "):
        getattr(parallel, strategy_name)(*given, **{argument: value})


@pytest.mark.mpi(ranks=3)
def test_a_nan_is_told_by_all_before_the_update(comm):
    """Which rank, which layer, which samples of the batch and of the data set."""
    for options in {}, {"overlap": "thread", **MESSAGES}:
        for parts in 1, 3:
            many = distributed(comm, cnn(), **options)
            before = many.flat_parameters.copy()
            data = dataset("cnn")
            loader = nn.Loader(data, 16, seed=1, shard=many.shard, dtype=np.float64)
            bad = int(loader.order(0)[16 + 8])  # the ninth sample of the second batch: rank 1's
            data.x[bad] = np.nan
            text = rf"step 1: .*the input on rank 1 \(samples \[8\] of the batch\).*In the data set: samples \[{bad}\]"
            with pytest.raises(nn.NonFiniteLoss, match=text) as error:
                nn.fit(many, loader, 1, accumulate=parts)
            assert error.value.samples == [8] and many.steps == 1
            after = many.flat_parameters.copy()
            many.flat_parameters[:] = 1e308  # overflows in the first layer
            with pytest.raises(nn.NonFiniteLoss, match=r"output.*layer \d.*rank \d"):
                many.step(*batches("cnn", many.shard)[0])
            assert (many.flat_parameters == 1e308).all() and (after != before).any()


@pytest.mark.mpi(ranks=2)
def test_a_norm_that_is_not_finite_stops_all_ranks(comm):
    """Also the rank whose slice is fine."""
    many = distributed(comm, mlp(), nn.SGD(0.1, clip=nn.optim.clipping.ClipNorm(0.1)))
    whole = many.sync.finish_step

    def overflow():
        summed = whole()
        if comm.rank == 0:
            many.sync.sums[0] = np.inf
        return summed

    many.sync.finish_step = overflow
    with pytest.raises(FloatingPointError, match="not finite"):
        many.step(*batches("mlp", many.shard)[0])


@pytest.mark.mpi(ranks=3)
def test_evaluation_is_exact_for_uneven_shards(comm):
    one, _ = one_process("mlp", "sgd")
    many = distributed(comm, mlp(), OPTIMIZERS["sgd"]())
    train(many, "mlp")
    loader = [nn.Loader(dataset("mlp"), 16, shuffle=False, shard=t.shard, dtype=np.float64) for t in (one, many)]
    a, b = nn.evaluate(one, loader[0]), nn.evaluate(many, loader[1])
    assert a["accuracy"] == b["accuracy"] and abs(a["loss"] - b["loss"]) < 1e-12


# ------------------------------------------------------------------------------------ across hosts


@pytest.mark.skipif(bool(netlab.reason_against()), reason=str(netlab.reason_against()))
@pytest.mark.parametrize("hosts, slots, says", [(2, 2, "between 2 nodes"), (2, 1, "one rank a node")])
def test_across_hosts(hosts, slots, says):
    """In the lab of several hosts: two levels, and messages."""
    script = f"""
import sys; sys.path[:0] = [{str(ROOT / "tests" / "parallel")!r}, {str(ROOT / "tests")!r}, {str(ROOT)!r}]
from mpi4py import MPI
from test_data_parallel import TINY, alike, distributed
from equality import difference, cnn, one_process, train, OPTIMIZERS
many = distributed(MPI.COMM_WORLD, cnn(), OPTIMIZERS["lamb"](), **TINY)
assert {says!r} in many.describe(), many.describe()
train(many, "cnn")
assert difference(many.flat_parameters, one_process("cnn", "lamb")[0].flat_parameters) < 1e-12
alike(MPI.COMM_WORLD, many)
print("as one process", flush=True)
"""
    mpiexec = [
        Path(sys.executable).with_name("mpiexec"),
        "-n",
        hosts * slots,
        sys.executable,
        "-m",
        "mpi4py",
        "-c",
        script,
    ]
    lab = [sys.executable, ROOT / "scripts" / "netlab.py", "run", "--hosts", hosts, "--slots", slots, "--", *mpiexec]
    done = subprocess.run(list(map(str, lab)), capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("as one process") == hosts * slots, done.stderr[-2000:]
