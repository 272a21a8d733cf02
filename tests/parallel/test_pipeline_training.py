"""Stages on different ranks compute what one process computes, after every schedule and on every mesh."""

import weakref
from functools import partial

import numpy as np
import pytest
from pipelines import (
    NETWORKS,
    OF_NORMS,
    OPTIMIZERS,
    SCHEDULES,
    SEED,
    batches,
    cnn,
    difference,
    mlp,
    one_process,
    pipeline,
    resnet,
    train,
    transformer,
)

import nn
from nn.core.layer import Layer, Sequential
from nn.training.trainer import NonFiniteLoss


def world(comm):
    from collectives import Communicator

    return Communicator(comm)


@pytest.mark.mpi(ranks=[3], more=[1, 2])
def test_every_schedule_computes_what_one_process_computes(comm, thorough):
    ranks = world(comm)
    for i, build in enumerate((cnn, transformer)):
        one, losses = one_process(build(), OPTIMIZERS["sgd"](), 5)
        for schedule in SCHEDULES if thorough else SCHEDULES[i::2]:
            many = pipeline(ranks, build(), schedule=schedule, micro_batches=5)
            np.testing.assert_allclose(train(many), losses, rtol=1e-12, err_msg=f"{build.__name__}, {schedule}")
            state = many.state_dict()
            assert comm.rank or difference(state, one.state_dict()) < 1e-12, (build.__name__, schedule)
            many.close()


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4])
def test_every_mesh_computes_what_one_process_computes(comm, thorough):
    """Of networks with batch normalisation over the micro-batches of all pipelines: what data parallelism computes."""
    from parallel import DistributedDataParallel

    ranks, number = world(comm), 0
    for data in (n for n in range(1, comm.size + 1) if comm.size % n == 0):
        peers = ranks.Split(comm.rank % (comm.size // data), comm.rank)
        for i, (name, build) in enumerate(NETWORKS.items()):
            for j, (kind, optimizer) in enumerate(OPTIMIZERS.items()):
                if not thorough and (i + j + comm.size) % 2:  # two ranks and three have the halves
                    continue
                sizes, make = (10, 10, 3), build
                if data > 1 and build in (cnn, resnet):
                    sizes, make = (10, 10, 9), partial(build, True) if build is cnn else build  # of 3 some have none
                    one = DistributedDataParallel(
                        make(), nn.CrossEntropyLoss(), optimizer(), peers, SEED, node_memory="off"
                    )
                    losses = train(one, 3, sizes)
                else:
                    one, losses = one_process(build(), optimizer(), 3)
                schedule, number = SCHEDULES[number % len(SCHEDULES)], number + 1
                many = pipeline(ranks, make(), optimizer(), schedule=schedule, micro_batches=3, data=data)
                case = f"{name}, {kind}, data={data}, {schedule}"
                np.testing.assert_allclose(train(many, sizes=sizes), losses, rtol=1e-12, err_msg=case)
                many.check_replicas()
                state = many.state_dict()
                assert comm.rank or difference(state, one.state_dict()) < 1e-12, case
                many.close()
                one.close()


@pytest.mark.mpi(ranks=2)
def test_micro_batches_of_which_no_rank_has_a_sample_count_for_nothing(comm):
    """Of a network whose ranks meet for statistics, cut in any way."""
    from parallel import DistributedDataParallel, SpatialParallel

    ranks, found, loss = world(comm), [], nn.CrossEntropyLoss()
    for more in 0, 3:  # micro-batches than the most samples of a rank
        makers = [
            (1, lambda network, more=more: pipeline(ranks, network, micro_batches=2 + more, data=2)),
            (2 + more, lambda network: DistributedDataParallel(network, loss, OPTIMIZERS["sgd"](), ranks, SEED)),
            (4 + more, lambda network: SpatialParallel(network, loss, OPTIMIZERS["sgd"](), ranks, SEED)),
        ]
        for parts, make in makers:
            many = make(cnn(True))
            found.append((train(many, parts, (4, 3)), many.digest(), many.buffers.tobytes()))
            many.close()
    assert found[:3] == found[3:]


@pytest.mark.mpi(ranks=4)
def test_norms_are_those_of_the_whole_network(comm, thorough):
    """Clipping, LARS and LAMB; with moments in shards, too. A tied array counts once."""
    ranks = world(comm)
    both = {"data": 2, "zero1": True}, {"data": 1, "schedule": "zb-h1"}
    for i, optimizer in enumerate(OF_NORMS):
        one, losses = one_process(transformer(), optimizer(), 3)
        for more in both if thorough else both[i % 2 :][:1]:
            many = pipeline(ranks, transformer(), optimizer(), micro_batches=3, **more)
            np.testing.assert_allclose(train(many), losses, rtol=1e-12, err_msg=f"{optimizer()}, {more}")
            state = many.state_dict()
            assert comm.rank or difference(state, one.state_dict()) < 1e-12, (optimizer(), more)
            many.close()


@pytest.mark.mpi(ranks=4)
def test_buckets_leave_while_earlier_stages_still_compute(comm):
    """And never before they are finished: many small ones, under schedules with several stages, halves, ties."""
    early = {"bucket": 1e-4, "first_bucket": 1e-4, "overlap": "poke"}
    for build, schedules in (mlp, ("1f1b", "zb-v")), (transformer, ("interleaved", "zb-h1")):
        one, losses = one_process(build(), OPTIMIZERS["adam"](), 3)
        for schedule in schedules:
            options = {"schedule": schedule, "micro_batches": 3, "data": 2, "bucketing": early}
            many = pipeline(world(comm), build(), OPTIMIZERS["adam"](), **options)
            told, ready = [], many.sync.buckets.ready
            many.sync.buckets.ready = lambda end, told=told, ready=ready: (told.append(end), ready(end))
            np.testing.assert_allclose(train(many), losses, rtol=1e-12, err_msg=f"{build.__name__}, {schedule}")
            state = many.state_dict()
            assert comm.rank or difference(state, one.state_dict()) < 1e-12, (build.__name__, schedule)
            size = many.local_network.layout.size
            assert told[-1] == size and any(0 < end < size for end in told), "in pieces"
            many.close()


@pytest.mark.mpi(ranks=2)
def test_one_buffer_for_all_micro_batches_is_not_equal(comm, monkeypatch):
    """The control: where every input is received into the same slot, weights' gradients are silently wrong."""
    from parallel.strategies.pipeline import executor, step

    one, _ = one_process(mlp(), OPTIMIZERS["sgd"](), 5)

    class Aliased(step.PipelinePlan):
        def memory(self, step):
            return self.slots["input1"][: step.hi - step.lo] if step.buf == "input1" else super().memory(step)

    for plan, equal in (step.PipelinePlan, True), (Aliased, False):
        monkeypatch.setattr(executor, "PipelinePlan", plan)
        many = pipeline(world(comm), mlp(), schedule="gpipe", micro_batches=5)
        train(many)
        state = many.state_dict()
        assert comm.rank or (difference(state, one.state_dict()) < 1e-12) == equal
        many.close()


@pytest.mark.mpi(ranks=2)
def test_a_gradient_that_is_not_summed_over_the_stages_is_not_equal(comm):
    """The control of tied arrays."""
    _, losses = one_process(transformer(), OPTIMIZERS["sgd"](), 3)
    many = pipeline(world(comm), transformer(), micro_batches=3)
    assert list(many.forward_backward.ties) == ["0.W"]
    many.forward_backward.ties = {}
    assert not np.allclose(train(many), losses, rtol=1e-9)
    many.close()


@pytest.mark.mpi(ranks=3)
def test_nobody_waits_for_ever_where_a_send_ends_only_when_it_is_received(comm, monkeypatch):
    from mpi4py import MPI

    from collectives import Communicator

    monkeypatch.setattr(Communicator, "Isend", lambda self, *given: MPI.Intracomm.Issend(self, *given), raising=False)
    one, losses = one_process(mlp(), OPTIMIZERS["sgd"](), 7)
    for schedule in SCHEDULES:
        many = pipeline(world(comm), mlp(), schedule=schedule, micro_batches=7)
        np.testing.assert_allclose(train(many), losses, rtol=1e-12, err_msg=schedule)
        state = many.state_dict()
        assert comm.rank or difference(state, one.state_dict()) < 1e-12, schedule
        many.close()


@pytest.mark.mpi(ranks=2)
def test_a_rank_that_waits_in_vain_says_for_whom(comm):
    many = pipeline(world(comm), mlp(), micro_batches=2, limit=0.2)
    x, y, total = next(batches(mlp()))
    if comm.rank == 1:
        with pytest.raises(TimeoutError, match=r"rank 0 for the input of network \(stage 1 of 2\)"):
            many.step(x, y, total)
    comm.Barrier()


@pytest.mark.mpi(ranks=2)
def test_samples_that_one_stage_cannot_take_are_refused_on_every_rank(comm):
    """So nobody waits for the rank that finds it; nothing has been sent, and the next step is as it would have been."""
    from parallel import PipeDream

    x, y, total = next(batches(mlp()))
    wrong = [
        (x[:, :5], y, r"expects batches of shape \(N, 12\), given \(10, 5\)"),
        (x.astype(np.float32), y, "computes in float64, given float32"),
        (x.tolist(), y, "expects an array of samples, given a list"),
        (x, y[:7], "7 targets"),
    ]
    make = lambda: pipeline(world(comm), mlp(), micro_batches=2)
    dream = lambda: PipeDream(mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), world(comm), SEED, mini_batches=2)
    for build in make, dream:
        many, other = build(), build()
        for samples, targets, why in wrong:
            with pytest.raises((ValueError, TypeError), match=why):
                many.step(samples, targets, total)
        with pytest.raises(ValueError, match="shape"):
            many.predict(x[:, :5])
        assert many.step(x, y, total) == other.step(x, y, total)
        assert many.digest() == other.digest()
        many.close()
        other.close()


@pytest.mark.mpi(ranks=2)
def test_messages_of_a_step_that_failed_reach_no_other_trainer(comm):
    """The last stage refuses the targets when inputs are on their way to it already."""
    ranks = world(comm)
    x, y, total = next(batches(mlp()))
    first = pipeline(ranks, mlp(), schedule="gpipe", micro_batches=5, limit=0.3)
    with pytest.raises((ValueError, TimeoutError)):
        first.step(x, np.full(len(y), 9), total)
    for call in (lambda: first.step(x, y, total)), (lambda: first.predict(x)):
        with pytest.raises(RuntimeError, match=r"a step .* of this pipeline has failed, .* make a new trainer"):
            call()
    one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](), SEED)
    second = pipeline(ranks, mlp(), schedule="gpipe", micro_batches=5, limit=10)
    assert second.step(x, y, total) == pytest.approx(one.step(x, y, total, 5), rel=1e-12)


@pytest.mark.mpi(ranks=2)
def test_zero_bubble_and_1f1b_have_the_same_bits(comm):
    ranks = world(comm)
    first = pipeline(ranks, transformer(), micro_batches=5)
    expected = train(first)
    for schedule in "zb-h1", "zb-h2":
        many = pipeline(ranks, transformer(), schedule=schedule, micro_batches=5)
        assert train(many) == expected
        assert many.digest() == first.digest()
        many.close()
    first.close()


@pytest.mark.mpi(ranks=3)
def test_recompute_changes_nothing(comm):
    ranks = world(comm)
    for schedule in "gpipe", "zb-h1":
        found = []
        for recompute in False, True:
            many = pipeline(ranks, cnn(), schedule=schedule, micro_batches=4, recompute=recompute)
            found.append((train(many), many.digest(), many.buffers.tobytes()))
            many.close()
        assert found[0] == found[1]


class Witness(Layer):
    """Keeps something from forward until the weights' gradients are made, and counts how many of these there are."""

    output = gradient = "view"

    def __init__(self, alive):
        self.alive = alive

    def __repr__(self):
        return "Witness()"

    def forward(self, p, x, ctx):
        kept = Kept()
        self.alive.add(kept)
        self.alive.most = max(self.alive.most, len(self.alive))
        return x, kept

    def backward(self, p, gy, saved, ctx):
        ctx.defer(id, saved)
        return gy, {}


class Kept:
    """What a micro-batch keeps in a stage."""


class Alive(weakref.WeakSet):
    most = 0


@pytest.mark.mpi(ranks=3)
def test_measured_peaks_of_activations_are_the_predicted_ones(comm):
    """Of every schedule: from F until B or W, as long as the executor holds them, and no longer."""
    ranks = world(comm)
    x, y, total = next(batches(mlp()))
    for schedule in SCHEDULES:
        stages = comm.size * (2 if schedule in ("interleaved", "zb-v", "dualpipev") else 1)
        alive = Alive()
        layers = [layer for _ in range(stages) for layer in (nn.Linear(12, 12), Witness(alive))]
        network = nn.Network(Sequential(*layers), (12,), np.float64)
        many = pipeline(ranks, network, schedule=schedule, micro_batches=7, cuts=range(2, 2 * stages, 2))
        for _ in range(2):
            many.step(x, y % 4, total)
            assert alive.most == many.forward_backward.placement.report.peaks[comm.rank], schedule
            assert not alive, "and nothing is left behind"
        many.close()


@pytest.mark.mpi(ranks=2)
def test_a_schedule_from_text_and_any_cut(comm):
    from parallel.strategies.pipeline.actions import read

    text = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"
    _, losses = one_process(mlp(), OPTIMIZERS["sgd"](), 2)
    for cut in 1, 7, np.int64(15):
        many = pipeline(world(comm), mlp(), schedule=read(text), micro_batches=2, cuts=[cut])
        np.testing.assert_allclose(train(many), losses, rtol=1e-12)
        many.close()


@pytest.mark.mpi(ranks=4)
def test_every_checkpoint_continues_on_every_mesh(comm):
    """Also that of one process, and of other strategies; evaluation and outputs are those of one process."""
    from parallel import FullyShardedDataParallel

    ranks = world(comm)
    x, y, total = list(batches(transformer()))[1]
    one = nn.Trainer(transformer(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
    makers = [
        lambda: pipeline(ranks, transformer(), OPTIMIZERS["adam"](), schedule="interleaved", micro_batches=3, data=2),
        lambda: pipeline(ranks, transformer(), OPTIMIZERS["adam"](), schedule="zb-h1", micro_batches=2),
        lambda: FullyShardedDataParallel(transformer(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), ranks, SEED),
        lambda: pipeline(ranks, transformer(), OPTIMIZERS["adam"](), micro_batches=3, data=2, zero1=True),
        lambda: pipeline(ranks, transformer(), OPTIMIZERS["adam"](), micro_batches=3),
    ]
    state = one.state_dict()
    for make in makers:
        many = make()
        many.load_state_dict(state if comm.rank == 0 else {})
        shard = list(batches(transformer(), many.shard))[1]
        np.testing.assert_allclose(many.step(*shard), one.step(x, y, total, 1), rtol=1e-12)
        snapshot, digest = many.snapshot(), many.digest()
        many.step(*shard)
        assert many.digest() != digest
        many.restore(snapshot)
        assert many.digest() == digest
        state = many.state_dict()
        if comm.rank == 0:
            assert difference(state, one.state_dict()) < 1e-12, many.name
            back = nn.Trainer(transformer(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
            back.load_state_dict(state)
            assert back.digest() == digest
        np.testing.assert_allclose(many.predict(x), one.predict(x), rtol=1e-9)
        sums = many.sum(many.sum_scores(shard[0], shard[1]))
        np.testing.assert_allclose(sums, one.sum_scores(x, y), rtol=1e-9)
        alone = many.alone()
        assert alone is None or alone.digest() == digest
        many.close()
    with pytest.raises(ValueError, match=r"param/0\.W"):
        makers[1]().load_state_dict({name: array for name, array in one.state_dict().items() if name != "param/0.W"})


@pytest.mark.mpi(ranks=3)
def test_a_bad_step_is_told_on_every_rank_and_changes_nothing(comm):
    ranks = world(comm)
    x, y, total = next(batches(mlp()))
    many = pipeline(ranks, cnn(), micro_batches=3)
    images = np.random.default_rng(1).random((10, 4, 4, 1))
    many.step(images, y, total)
    before, buffers = many.digest(), many.buffers.copy()
    images[7, 1, 2, 0] = np.nan
    with pytest.raises(NonFiniteLoss, match=r"input.*rank 0.*\[7\]"):
        many.step(images, y, total)
    assert many.digest() == before and np.array_equal(many.buffers, buffers)
    many.close()

    many = pipeline(ranks, mlp(), micro_batches=3)
    for name, array in many.local_network.layout.items(many.flat_parameters):
        if name == "9.W":
            array[0, 0] = np.inf
    with pytest.raises(NonFiniteLoss, match=r"parameter 9\.W"):
        many.step(x, y, total)
    many.close()

    many = pipeline(ranks, cnn(), micro_batches=3)
    for name, array in many.local_network.layout.items(many.flat_parameters):
        if name == "8.W":
            array[...] = 1e308
    images[7] = 0.5
    with pytest.raises(NonFiniteLoss, match=r"layer 8 .* rank 2"):
        many.step(images, y, total)
    many.close()


@pytest.mark.mpi(ranks=2)
def test_what_cannot_run_is_refused_on_every_rank(comm):
    from parallel.mesh import ReplicaError
    from parallel.strategies.pipeline.actions import read

    ranks = world(comm)

    def refused(why, network=None, kind=ValueError, **options):
        with pytest.raises(kind, match=why):
            pipeline(ranks, network or mlp(), **{"micro_batches": 2} | options)

    refused("18 stages", schedule="interleaved", chunks=9)
    refused("the schedule has 2 stages, the network is cut into 3", cuts=[2, 4])
    refused("1 to 15", cuts=[16])
    refused(r"cuts: expected numbers of children of .*'s root, given \[1\.5\]", cuts=[1.5])
    refused(r"cuts: expected numbers of children of .*'s root, given \['3'\]", cuts="3")
    refused("1B1 cannot run", schedule=read("0F0,0F1,0B1,0B0\n1F0,1B1,1F1,1B0"))
    refused("several ranks", schedule=read("0F0,0B0\n0F1,0B1"), cuts=[])
    refused("pipeline 1f1b: it has no chunks: leave that out; micro_batches= says", chunks=2)
    refused("micro_batches", micro_batches=2.5)
    refused("chunks", schedule="interleaved", chunks=1.5)
    refused("pipedream updates after each micro-batch, and has no flush: use parallel.PipeDream", schedule="pipedream")
    refused("overlap 'x': expected one of auto", bucketing={"overlap": "x"})
    refused("data:", data=0)
    refused("tensor:", tensor=-2)
    refused("expected a name, a generator function, or rows of actions, given 3", schedule=3)
    refused("2 ranks", data=3)
    refused("rank 1 has no stage", schedule=read("0F0,0F1,0B1,0B0\n,"))
    refused("the cuts", kind=ReplicaError, cuts=[3 + comm.rank])
    padded = nn.Network(Sequential(nn.Embedding(9, 8, padding=0), nn.TransformerBlock(8, 2)), (6,), np.float64)
    refused("marks padding, which later stages are not told of", padded)
    many = pipeline(ranks, mlp(), micro_batches=2)
    x, y, total = next(batches(mlp()))
    with pytest.raises(ValueError, match="leave out to accumulate 3 parts"):
        many.step(x, y, total, 3)
    with pytest.raises(ValueError, match=r"global batch.*10.*11"):
        many.step(x, y, total + comm.rank)
    many.close()


@pytest.mark.mpi(ranks=2)
def test_a_pipeline_is_ready_for_a_bounded_number_of_lengths(comm):
    """Each length needs memory for what arrives; those that were used last stay, and the numbers are the same."""
    sizes = (*range(3, 40), 10, 10, 3)
    one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](), SEED)
    many = pipeline(comm, mlp(), micro_batches=2)
    losses = train(many, sizes=sizes)
    np.testing.assert_allclose(losses, [one.step(*batch, 2) for batch in batches(one.network, sizes=sizes)], 1e-12)
    assert len(many.forward_backward.plans) == 8 and list(many.forward_backward.plans)[-2:] == [10, 3]
    many.close()
