"""Servers whose workers are ranks that have a network together, by layers or stages: each is one of a single rank."""

import itertools
import json
import math

import numpy as np
import pytest
from conftest import PATIENCE
from equality import CLIPS, EPS, MODELS, OPTIMIZERS, SEED, batches, cnn, dataset, difference, mlp
from test_tensor_parallel import language_model

import nn
from parallel.command.options import Options
from parallel.command.parsing import parse
from parallel.mesh import ReplicaError
from parallel.settings import OptionError

TENSOR, PIPELINE = {"tensor": 2}, {"pipeline": 2, "micro_batches": 4}  # what two ranks of a replica do


def make(comm, name="Downpour", optimizer=None, network=mlp, servers=1, **options):
    import parallel
    from collectives import Communicator

    arguments = network(), nn.CrossEntropyLoss(), optimizer or nn.SGD(0.1), Communicator(comm), SEED, servers
    together = {} if "pipeline" in options else TENSOR
    return getattr(parallel, name)(*arguments, **{"limit": PATIENCE} | together | options)


def free(trainer):
    trainer.close()
    trainer.communicator.release()


def alone():
    return cnn(synchronized=False)


def adagrad():
    return nn.Adagrad(0.05, eps=EPS)


def assert_state(comm, trainer, want, case):
    """What a trainer gathers is what one process has: parameters, moments, statistics."""
    found = trainer.state_dict()
    for name, array in want.state_dict().items() if comm.rank == 0 else ():
        if array.ndim and array.size:
            assert found[name].shape == array.shape, (case, name)
            assert np.abs(found[name] - array).max() < 1e-12 * (np.abs(array).max() or 1), (case, name)


def shared(trainer, vector):
    """What of a vector of this rank's is the same on every rank of its replica: what is not cut, or is tied."""
    pieces = trainer.sync.replica.pieces
    common = set.intersection(*({piece.name for piece in each if piece.split is None} for each in pieces))
    return np.concatenate(
        [array.ravel() for name, array in trainer.local_network.layout.items(vector) if name in common]
    )


@pytest.mark.mpi(ranks=4)
def test_one_replica_of_several_ranks_is_one_process(comm):
    """With reads that wait: Adagrad's sequential training, on one server and two; statistics, norms, micro-batches."""
    three = comm.Split(comm.rank < 3)
    cases = [("mlp", adagrad, "pairs"), ("transformer", adagrad, "sequence"), ("cnn", OPTIMIZERS["adam"], "width")]
    of_norms = [("mlp", lambda: OPTIMIZERS["momentum"](CLIPS[1]), "pairs"), ("mlp", OPTIMIZERS["lamb"], "pairs")]
    for ranks, servers in (three, 1), (comm, 2):
        if ranks is three and comm.rank == 3:
            continue
        for model, rule, way in cases + (of_norms if servers == 1 else []):
            network = alone if model == "cnn" else MODELS[model]
            one = nn.Trainer(network(), nn.CrossEntropyLoss(), rule(), SEED)
            served = [("Downpour", {}, 1), ("ParameterServer", {"consistency": "async"}, 1 if model == "cnn" else 2)]
            losses = [one.step(*batch) for batch in batches(model, (0, 1))]
            for name, more, parts in served:
                many = make(ranks, name, rule(), network, servers, way=way, **more)
                found = [many.step(*batch, parts) for batch in batches(model, many.shard)]
                many.synchronize()
                if many.sync.is_worker:
                    np.testing.assert_allclose(found, losses, rtol=1e-12)
                many.check_replicas()
                assert_state(ranks, many, one, (name, model, rule(), servers))
                free(many)


def assert_pipeline_is_one_process(comm, case, together, servers=1, name="Downpour", **options):
    """(model, optimizer) of a case; all samples go through one replica. Returns the parameters of one process."""
    model, rule = case
    network = {"cnn": alone, "tied": language_model}.get(model) or MODELS[model]
    data = "transformer" if model == "tied" else model
    one = nn.Trainer(network(), nn.CrossEntropyLoss(), rule(), SEED)
    losses = [one.step(*batch, min(len(batch[0]), together["micro_batches"])) for batch in batches(data, (0, 1))]
    many = make(comm, name, rule(), network, servers, **together, **options)
    found = [many.step(*batch) for batch in batches(data, many.shard)]
    many.synchronize()
    if many.sync.is_worker:
        np.testing.assert_allclose(found, losses, rtol=1e-12)
    many.check_replicas()
    assert_state(comm, many, one, (case, together, name))
    free(many)


@pytest.mark.mpi(ranks=4, more=[5])
def test_one_replica_that_is_a_pipeline_is_one_process(comm):
    """With reads that wait: kinds of schedules; arrays that stages share; statistics, which a stage has; norms."""
    servers = comm.size - 2
    if comm.size == 5:
        together = PIPELINE | {"tensor": 2}
        for case in ("mlp", adagrad), ("tied", OPTIMIZERS["adam"]):
            assert_pipeline_is_one_process(comm, case, together, 1)
            assert_pipeline_is_one_process(comm, case, together, 1, "ParameterServer", consistency="async")
        return
    for case, schedule, options in (
        (("mlp", adagrad), "gpipe", {"recompute": True}),
        (("mlp", OPTIMIZERS["sgd"]), "interleaved", {"chunks": 2}),
        (("cnn", OPTIMIZERS["adam"]), "1f1b", {}),
        (("tied", adagrad), "zb-h1", {}),
    ):
        together = PIPELINE | {"schedule": schedule, **options}
        assert_pipeline_is_one_process(comm, case, together, servers)
        assert_pipeline_is_one_process(comm, case, together, servers, "ParameterServer", consistency="async")
    three = comm.Split(comm.rank < 3)
    for rule in (lambda: OPTIMIZERS["momentum"](CLIPS[1]), OPTIMIZERS["lamb"]) if comm.rank < 3 else ():
        assert_pipeline_is_one_process(three, ("mlp", rule), PIPELINE)


@pytest.mark.mpi(ranks=3)
def test_without_a_stage_a_pipeline_is_not_one_process(comm, monkeypatch):
    """The control: what the first rank pushes is its own stage, and zeros."""
    from parallel.sync.asynchronous.replica import ReplicaRanks

    pairs = ReplicaRanks.pairs

    def own_only(self, whole, part, index):
        return ((piece._replace(is_pushed=index == 0), *arrays) for piece, *arrays in pairs(self, whole, part, index))

    monkeypatch.setattr(ReplicaRanks, "pairs", own_only)
    many = make(comm, optimizer=adagrad(), **PIPELINE)
    first = comm.bcast(many.sync.server.parameters.copy() if many.sync.is_server else None, root=2)
    for batch in batches("mlp", many.shard):
        many.step(*batch)
    many.synchronize()
    if comm.rank == 2:
        changed = {name for name, array in many.network.layout.items(many.flat_parameters - first) if array.any()}
        assert 0 < len(changed) < len(many.network.layout.specs), "control: the second stage stays as it was"
    free(many)


@pytest.mark.mpi(ranks=5)
def test_in_step_two_replicas_make_the_step_of_data_parallelism(comm):
    one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    for batch in batches("mlp", (0, 1)):
        one.step(*batch)
    for (name, options), together in itertools.product(
        (("ParameterServer", {"consistency": "ssp:0"}), ("Downpour", {"warm": 5, "push": 3, "fetch": 2})),
        (TENSOR, PIPELINE),
    ):
        many = make(comm, name, **options, **together)
        for batch in batches("mlp", many.shard):
            many.step(*batch)
        many.check_replicas()
        assert_state(comm, many, one, name)
        assert many.synchronize(1.0) == 1.0
        free(many)


@pytest.mark.mpi(ranks=5)
def test_what_is_applied_is_what_two_replicas_pushed(comm):
    """With SGD the way from the first parameters to the last is the sum of all pushes, however late, once each."""
    from parallel.sync import compression

    for name, options in (
        ("ParameterServer", {"consistency": "async:ahead=1"}),
        ("ParameterServer", {"consistency": "async:ahead=1"} | PIPELINE),
        ("Downpour", {"push": 3, "fetch": 2}),
        ("Downpour", {"push": 2, "fetch": 4, "ahead": True, "warm": 2}),
        ("Downpour", {"push": 2, "fetch": 4, "ahead": True, "warm": 2} | PIPELINE),
        ("Downpour", {"push": 2, "compressor": compression.parse("topk:0.1")}),
        ("Downpour", {"push": 2, "compressor": compression.parse("topk:0.1")} | PIPELINE),
    ):
        many = make(comm, name, **options)
        sync, sent = many.sync, []
        if replica := sync.replica:
            start, join = replica.gather(many.flat_parameters).copy(), replica.gather

            def noted(mine, join=join, sent=sent):
                found = join(mine)
                sent.append(found.copy())
                return found

            replica.gather = noted
        loader = nn.Loader(dataset("mlp"), 16, seed=1, shard=many.shard, dtype=np.float64)
        history = nn.fit(many, loader, 2).history
        assert len(history) == 2 and many.steps == 6 and all(math.isfinite(record["loss"]) for record in history)
        many.synchronize()
        leads = comm.rank in sync.workers
        assert leads == (comm.rank in (0, 2))
        if replica:
            replica.gather = join
        mine = sum(sent, np.zeros(sync.layout.size)) if leads else np.zeros(sync.layout.size)
        if leads and sync.memories:
            mine -= sum(sync.memories.flat.values())
        total, pushes = sum(comm.allgather(mine)), sum(comm.allgather(len(sent) if leads else 0))
        assert sum(many.epoch_record()["staleness"]["updates"]) == pushes
        last = sync.parameters
        if sync.is_worker and sync.replica:
            last = sync.replica.gather(last)
        if comm.rank == 0:
            way = (start - last) / 0.1
            assert difference(way, total) < 1e-12, (name, options)
            assert difference(way, total - sent[0]) > 1e-6, "control: one push less"
        many.check_replicas()
        free(many)


@pytest.mark.mpi(ranks=5)
@pytest.mark.parametrize("together", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_all_ranks_of_a_replica_use_one_read(comm, together):
    """What came is used from the same step on by all, and what they have in common is alike on all, in every step."""
    many = make(comm, "Downpour", nn.Adagrad(0.05), language_model, push=1, fetch=2, ahead=True, **together)
    used, taken = [], []
    if replica := many.sync.replica:
        deal = replica.scatter

        def noted(mine):
            taken.append(many.sync.worker.clock)
            deal(mine)

        replica.scatter = noted
    for _ in range(3):
        for batch in batches("transformer", many.shard):
            many.step(*batch)
            if replica:
                used.append(shared(many, many.flat_parameters).copy())
    if replica:
        theirs = replica.ranks.allgather((taken, np.array(used)))
        assert taken and theirs[0][0] == theirs[1][0]
        np.testing.assert_array_equal(theirs[0][1], theirs[1][1])
    many.check_replicas()
    free(many)


@pytest.mark.mpi(ranks=3)
def test_what_is_not_cut_would_drift_apart_if_it_were_not_dealt(comm):
    """The check can fail: a rank that takes its part of what was read, and of the rest keeps its own."""
    many = make(comm, optimizer=nn.Adagrad(0.05))
    if comm.rank == 1:
        replica, deal = many.sync.replica, many.sync.replica.scatter

        def cut_only(mine):
            before = mine.copy()
            deal(mine)
            for piece in replica.pieces[1]:
                if piece.split is None:
                    place = many.local_network.layout.slices[piece.name]
                    mine[place] = before[place]

        replica.scatter = cut_only
    for batch in batches("mlp", many.shard):
        many.step(*batch)
    if comm.rank < 2:
        with pytest.raises(ReplicaError, match=r"parameter.*\[1\]"):
            many.check_replicas()
    else:
        many.check_replicas()
    free(many)


@pytest.mark.mpi(ranks=5)
def test_a_loss_that_is_not_finite_ends_all_ranks(comm):
    for options in (
        {"fetch": 1},
        {"push": 3, "fetch": 3, "ahead": True},
        {"fetch": 1} | PIPELINE,
        {"push": 3} | PIPELINE,
    ):
        many = make(comm, **options)
        with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 2"):
            for i, (x, y, total) in enumerate(batches("mlp", many.shard)):
                if comm.rank in (2, 3) and i == 2:
                    x[0] = np.nan
                many.step(x, y, total)
            many.synchronize()
        many.synchronize()
        many.check_replicas()
        assert not many.sync.is_worker or np.isfinite(many.flat_parameters).all()
        free(many)


@pytest.mark.mpi(ranks=5)
@pytest.mark.parametrize("together", [TENSOR | {"way": "width"}, PIPELINE], ids=["tensor", "pipeline"])
def test_a_state_continues_with_statistics_in_parts_and_on_one_process(comm, together):
    """In step, so that all is determined: stopped and continued is the same, bit for bit."""

    def again():
        return make(comm, "ParameterServer", OPTIMIZERS["adam"](), alone, consistency="ssp:0", **together)

    straight, first = again(), again()
    if "tensor" in together:
        assert not straight.mesh.model or any(each.split for each in straight.table.replicated())
    history = batches("cnn", straight.shard)
    for batch in history[:3]:
        straight.step(*batch)
        first.step(*batch)
    kept = comm.bcast(first.state_dict())
    straight.synchronize()
    second = again()
    second.load_state_dict(kept)
    before = second.snapshot()
    second.step(*history[4])
    second.restore(before)
    for batch in history[3:]:
        straight.step(*batch)
        second.step(*batch)
    want, found = straight.state_dict(), second.state_dict()
    for name in want:
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    assert straight.digest() == second.digest() != first.digest()
    digest = second.digest()
    if comm.rank == 0:
        one = nn.Trainer(alone(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
        one.load_state_dict({name: want[name] for name in one.state_dict()})
        assert one.digest() == digest
    for each in straight, first, second:
        free(each)


@pytest.mark.mpi(ranks=5)
@pytest.mark.parametrize(
    "together",
    [
        "pipeline=2,tensor=2",
        pytest.param("data=2,tensor=2", marks=pytest.mark.exhaustive),
        pytest.param("data=2,pipeline=2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_is_continued_on_another_mesh_and_by_another_strategy(comm, shared_tmp_path, together):
    """By the options: metrics, evaluation, checkpoints in parts."""
    from parallel.command.training_run import train as run

    out = shared_tmp_path / "run"
    common = {"model": "mlp:64,8,10", "limit": 200, "out": str(out), "pictures": False, "watch": PATIENCE}
    common |= {"optimizer": "adagrad", "lr": 0.05}
    mesh, replicas = {"strategy": "downpour:push=2", "mesh": together}, 2 if "data" in together else 1
    result = run(Options(epochs=2, **mesh, **common))
    assert len({json.dumps(each) for each in comm.allgather((result["loss"], result["accuracy"]))}) == 1
    if comm.rank == 0:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = math.ceil(200 / 32)
        assert [record["step"] for record in records] == [steps, 2 * steps]
        for record in records:
            updates = sum(record["staleness"]["updates"])
            assert updates == replicas * math.ceil(steps / 2), "each replica, every second step"
    other = mesh | {"mesh": "data=2,tensor=2" if "pipeline" in together else "data=1,pipeline=2,tensor=2"}
    again = run(Options(epochs=3, resume=str(out), **other, **common))
    assert again["epochs"] == 3 and again["steps"] == 3 * math.ceil(200 / 32)
    last = run(Options(epochs=4, resume=str(out), strategy="ddp", **common))
    assert last["epochs"] == 4 and math.isfinite(last["loss"])


@pytest.mark.mpi(ranks=4)
def test_workers_that_cannot_be_are_refused(comm):
    for name, options, words in (
        ("Downpour", {"place": "workers"}, "place 'dedicated'"),
        ("Downpour", {}, "beside 1 that serve"),
        ("ParameterServer", {"servers": 2}, "workers of 2 ranks: .* use consistency 'async'"),
        ("ParameterServer", {"servers": 2} | PIPELINE, "workers of 2 ranks: .* use consistency 'async'"),
        ("Downpour", {"place": "workers"} | PIPELINE, "place 'dedicated'"),
        ("Downpour", {"servers": 2, "schedule": "pipedream"} | PIPELINE, "pipedream"),
        ("Downpour", {"servers": 2, "schedule": "interleaved", "chunks": 3} | PIPELINE, "6 stages"),
    ):
        with pytest.raises(ValueError, match=words):
            make(comm, name, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ("downpour --mesh data=2,tensor=2 --server-place workers", "--server-place dedicated"),
        ("downpour --mesh data=2,tensor=2 --servers 2", "beside 2"),
        ("downpour --mesh tensor=3", "beside 1"),
        ("downpour --mesh data=3", "data 3"),
        ("ps --mesh data=2,tensor=2", "schedules of whole vectors.*: use --consistency async, or ssp:S"),
        (
            "downpour --mesh data=2,pipeline=2 --server-place workers",
            "--server-place dedicated",
        ),
        ("downpour --mesh data=2,pipeline=2 --servers 2", "beside 2"),
        (
            "downpour --mesh data=2,pipeline=2 --elastic shrink",
            "--elastic cannot be combined with --mesh .* beside servers",
        ),
        (
            "downpour --mesh data=2,pipeline=2 --pipeline pipedream",
            "so a step has no gradient: use --pipeline 1f1b",
        ),
        ("downpour --mesh data=2,pipeline=2 --accumulate 2", "--accumulate cannot be combined with stages .*micro=N"),
        ("downpour --pipeline interleaved:chunks=9", "36 stages"),
        ("downpour --pipeline gpipe:micro=99", "99 micro-batches"),
        ("ps --mesh data=2,pipeline=2", "schedules of whole vectors.*: use --consistency async, or ssp:S"),
        ("ps --pipeline gpipe", "--pipeline gpipe with --strategy ps: .*: use --consistency async, or ssp:S"),
        ("sandblaster --optimizer lbfgs --mesh pipeline=2", "has no stages on different ranks: use .*downpour, local"),
        ("downpour --mesh data=2,space=2", "--strategy downpour has no axis space"),
        ("easgd --mesh data=2,space=2", "--strategy easgd has no axis space"),
        ("diloco --mesh pipeline=2 --pipeline pipedream", "so a step has no gradient: use --pipeline 1f1b"),
        (
            "downpour --mesh data=2,tensor=2 --elastic shrink",
            "--elastic cannot be combined with --mesh .* beside servers",
        ),
        ("downpour --tensor width", "--tensor width needs an axis"),
    ],
)
def test_what_cannot_be_is_refused_before_there_are_ranks(options, words):
    from parallel.command.factory import prepare

    with pytest.raises(OptionError, match=words):
        prepare(parse(["--strategy", *options.split(), "--ranks", "5", "--limit", "100"]))


def test_what_can_be_is_not_refused():
    from parallel.command.factory import prepare

    for options in (
        "downpour --mesh data=2,tensor=2",
        "downpour --mesh tensor=2 --servers 3 --tensor width",
        "ps --consistency ssp:1 --mesh tensor=2 --compress topk:0.1",
        "downpour --mesh data=4",
        "downpour --mesh data=2,pipeline=2 --compress topk:0.1 --servers 1",
        "downpour --mesh pipeline=2,tensor=2 --pipeline gpipe:micro=4",
        "downpour --servers 3 --pipeline interleaved:chunks=2",
        "ps --consistency ssp:1 --mesh data=2,pipeline=2 --delay-compensation",
    ):
        prepare(parse(["--strategy", *options.split(), "--ranks", "5", "--limit", "100"]))
