"""Data x pipeline x tensor: every factorisation of the ranks computes what one process computes."""

import json
from dataclasses import replace
from functools import cache, partial
from itertools import product

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
    one_process,
    resnet,
    train,
)

import nn
from nn.core.layer import Sequential
from nn.models.transformer import transformer as layers_of
from nn.optim import clipping
from nn.training.trainer import NonFiniteLoss
from parallel.command.options import Options

MICRO = 3  # which divides none of the batches' shares


def transformer(blocks=3):
    """Tied embeddings on the first and the last stage; a head for each of 1, 2, 3, 4, 6, 8 ranks; nine ids."""
    return layers_of((6,), 9, 24, 24, blocks, 1, dropout=0.2, dtype=np.float64)


MODELS = NETWORKS | {"transformer": transformer}


@cache
def reference(name, kind, sizes=(10, 10, 3)):
    """(trainer, losses) of one process."""
    one = nn.Trainer(MODELS[name](), nn.CrossEntropyLoss(), OPTIMIZERS[kind](), SEED)
    return one, train(one, MICRO, sizes)


def schedule_of(number, mesh):
    """One after the other; of many ranks those with one stage on each, of which a network has enough."""
    names = SCHEDULES if mesh[1] <= 4 else ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
    return names[number % len(names)]


def meshes(ranks):
    """Every (data, pipeline, tensor) that makes so many ranks."""
    sizes = range(1, ranks + 1)
    return [(d, p, ranks // (d * p)) for d, p in product(sizes, sizes) if ranks % (d * p) == 0]


def world(comm):
    from collectives import Communicator

    return Communicator(comm)


def trainer(ranks, mesh, network, optimizer, schedule="1f1b", strategy="ddp", **more):
    """What train.py makes of --mesh data=D,pipeline=P,tensor=T."""
    from parallel.strategies import build_trainer

    text = ",".join(f"{axis}={size}" for axis, size in zip(("data", "pipeline", "tensor"), mesh, strict=True))
    line = f"{schedule}:micro={MICRO}" if mesh[1] > 1 else None
    options = Options(strategy=strategy, mesh=text, pipeline=line, seed=SEED, batch=32, **more)
    return build_trainer(options, network, nn.CrossEntropyLoss(), optimizer, ranks)


def steps(many, mesh, sizes=(10, 10, 3)):
    return train(many, 1 if mesh[1] > 1 else MICRO, sizes)


def assert_as_one_process(ranks, mesh, name, kind, schedule="1f1b", **more):
    """Losses, parameters, moments and statistics; with batch normalisation, those of data parallelism alone."""
    from parallel import DistributedDataParallel

    build, optimizer = MODELS[name], OPTIMIZERS[kind]
    sizes = (10, 10, 3) if ranks.size <= 4 else (32, 32, 25)
    if mesh[0] > 1 and build in (cnn, resnet):
        sizes = (*sizes[:2], max(9, sizes[2]))  # of 3 some have none
        build = partial(cnn, True) if build is cnn else build
        peers = ranks.Split(ranks.rank % (mesh[1] * mesh[2]), ranks.rank)
        one = DistributedDataParallel(build(), nn.CrossEntropyLoss(), optimizer(), peers, SEED, node_memory="off")
        losses = train(one, MICRO, sizes)
    else:
        one, losses = reference(name, kind, sizes)
    many = trainer(ranks, mesh, build(), optimizer(), schedule, **more)
    case = f"{name}, {kind}, data x pipeline x tensor {mesh}, {schedule}, {more}"
    np.testing.assert_allclose(steps(many, mesh, sizes), losses, rtol=1e-12, err_msg=case)
    many.check_replicas()
    state = many.state_dict()
    assert ranks.rank or difference(state, one.state_dict()) < 1e-12, case
    many.close()
    one.close()


@pytest.mark.mpi(ranks=4)
def test_meshes_compute_what_one_process_computes(comm):
    """Each network and each optimizer on some of the meshes; the next test has all."""
    ranks, cases = world(comm), list(product(MODELS, OPTIMIZERS))
    for number, mesh in enumerate(meshes(comm.size)):
        for i, (name, kind) in enumerate(cases[number % 4 :: 4]):
            assert_as_one_process(ranks, mesh, name, kind, schedule_of(number + i, mesh))


@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=[1, 2, 3, 4, 6, 8])
def test_every_factorisation_computes_what_one_process_computes(comm):
    ranks, number = world(comm), 0
    for mesh in meshes(comm.size):
        for name, kind in product(MODELS, OPTIMIZERS):
            narrow = name in ("cnn", "resnet") and mesh[2] > 4  # with fewer channels than that
            if not narrow and (comm.size <= 4 or number % 3 == 0):
                assert_as_one_process(ranks, mesh, name, kind, schedule_of(number, mesh))
            number += 1


@pytest.mark.mpi(ranks=4)
def test_norms_are_those_of_whole_tensors_and_of_the_whole_network(comm):
    """Clipping, LARS, LAMB: what is cut, what is tied to another stage and what is whole on both count once."""
    ranks = world(comm)
    for optimizer, way in zip(OF_NORMS, ("pairs", "sequence", "sequence", "width"), strict=True):
        one, losses = one_process(transformer(1), optimizer(), MICRO)
        many = trainer(ranks, (1, 2, 2), transformer(1), optimizer(), tensor=way)
        np.testing.assert_allclose(train(many), losses, rtol=1e-12, err_msg=f"{optimizer()}, {way}")
        state = many.state_dict()
        assert comm.rank or difference(state, one.state_dict()) < 1e-12, (optimizer(), way)
        many.close()


@pytest.mark.mpi(ranks=4, more=[8])
def test_shards_along_the_axis_data(comm):
    """Moments, gradients, parameters of what a rank has of each layer; norms are still those of whole tensors."""
    ranks, global_norm = world(comm), clipping.ClipGlobalNorm(0.1)
    for strategy, way, optimizer in (
        ("zero1", "pairs", lambda: nn.LAMB(0.01, eps=1e-4, clip=global_norm)),
        ("zero2", "sequence", lambda: nn.LARS(0.5, weight_decay=1e-3)),
        ("fsdp", "sequence", lambda: nn.Adam(0.01, eps=1e-4, clip=clipping.ClipNorm(0.05))),
    ):
        one, losses = one_process(transformer(1), optimizer(), MICRO)
        for mesh in [(2, 1, 2)] if comm.size == 4 else [(2, 2, 2)] * (strategy == "zero1") + [(4, 1, 2)]:
            many = trainer(ranks, mesh, transformer(1), optimizer(), strategy=strategy, tensor=way, unit=1e-3)
            case = f"{strategy}, {way}, {mesh}"
            np.testing.assert_allclose(steps(many, mesh), losses, rtol=1e-12, err_msg=case)
            many.check_replicas()
            state = many.state_dict()
            assert comm.rank or difference(state, one.state_dict()) < 1e-12, case
            assert many.formula()["moments"] < 0.7 / mesh[0] * one.formula()["moments"], case
            digest = many.digest()
            many.load_state_dict(state)
            assert many.digest() == digest, case
            many.close()


@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=4)
def test_fewer_bytes_along_the_axis_data(comm):
    """What is whole on several ranks stays alike, bit for bit; where nothing is left out, it is one process's."""
    ranks = world(comm)
    for mesh, name in ((2, 1, 2), "transformer"), ((2, 2, 1), "mlp"):
        assert_as_one_process(ranks, mesh, name, "adam", compress="none")
        _, losses = reference(name, "adam")
        many = trainer(ranks, mesh, MODELS[name](), OPTIMIZERS["adam"](), compress="fp16")
        found = steps(many, mesh)
        np.testing.assert_allclose(found, losses, rtol=0.02)
        assert found[1:] != losses[1:], "control: something is left out"
        many.check_replicas()
        sent = many.bytes_sent()
        assert 3.5 * sent["bytes_sent"] < sent["bytes_dense"]
        assert comm.bcast(sent) == sent
        many.close()
    with pytest.raises(ValueError, match=r"0\.W: stages share it, and would round its gradient"):
        trainer(ranks, (2, 2, 1), transformer(), OPTIMIZERS["adam"](), compress="fp16")


@pytest.mark.mpi(ranks=4)
def test_what_is_left_out_is_seen(comm):
    """The controls: the sum over the axis data, of terms on the axis tensor, of an array that two stages share."""
    ranks = world(comm)
    _, losses = reference("transformer", "sgd")

    def no_data(many):
        many.sync.buckets.buckets = [
            many.sync.flat_buffer[many.local_network.layout.size :]
        ]  # loss and statistics only
        many.sync.buckets.plan()

    def no_terms(many):
        many.forward_backward.summed = {}

    def no_ties(many):
        many.forward_backward.ties = {}

    for mesh, change in ((2, 2, 1), no_data), ((1, 2, 2), no_terms), ((1, 2, 2), no_ties):
        many = trainer(ranks, mesh, transformer(), OPTIMIZERS["sgd"](), tensor="sequence" if mesh[2] > 1 else "pairs")
        change(many)
        found = train(many)
        assert found[0] == pytest.approx(losses[0], rel=1e-12)
        assert not np.allclose(found[1:], losses[1:], rtol=1e-9), change.__name__
        many.close()


@pytest.mark.mpi(ranks=4)
def test_every_checkpoint_continues_on_every_mesh(comm):
    """Evaluation and outputs, too, are those of one process."""
    ranks = world(comm)
    x, y, total = list(batches(transformer(1)))[1]
    one = nn.Trainer(transformer(1), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
    state = one.state_dict()
    for mesh in (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4), (1, 4, 1), (4, 1, 1), (1, 2, 2):
        schedule = "interleaved" if mesh[1] == 2 else "zb-h1"
        many = trainer(ranks, mesh, transformer(1), OPTIMIZERS["adam"](), schedule)
        many.load_state_dict(state if comm.rank == 0 or mesh[0] == 4 else {})
        shard = list(batches(transformer(1), many.shard))[1]
        np.testing.assert_allclose(many.step(*shard), one.step(x, y, total, 1), rtol=1e-12, err_msg=f"{mesh}")
        state = comm.bcast(many.state_dict())
        assert difference(state, one.state_dict()) < 1e-12, mesh
        digest = many.digest()
        back = nn.Trainer(transformer(1), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
        back.load_state_dict(state)
        assert back.digest() == digest, mesh
        snapshot = many.snapshot()
        many.step(*shard)
        many.restore(snapshot)
        assert many.digest() == digest, mesh
        np.testing.assert_allclose(many.predict(x), one.predict(x), rtol=1e-9)
        np.testing.assert_allclose(many.sum(many.sum_scores(*shard[:2])), one.sum_scores(x, y), rtol=1e-9)
        many.close()


@pytest.mark.mpi(ranks=4)
def test_a_bad_step_is_told_on_every_rank_and_changes_nothing(comm):
    """Also where one rank's part of what a stage is given is bad, and another's is not."""
    layers = nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)
    network = lambda: nn.Network(Sequential(*layers), (12,), np.float64)
    x, y, total = next(batches(network()))
    many = trainer(world(comm), (1, 2, 2), network(), OPTIMIZERS["adam"]())
    assert many.forward_backward.placement.cuts == [1] and many.forward_backward.placement.shape(1) == (4,), (
        "a part of the activations"
    )
    many.step(x, y, total)
    before = many.digest()
    with pytest.raises(NonFiniteLoss, match=r"input.*rank 0.*\[7\]"):
        many.step(np.where(np.arange(10)[:, None] == 7, np.nan, x), y, total)
    assert many.digest() == before
    for name, array in many.local_network.layout.items(many.flat_parameters):
        if name == "0.W" and many.mesh.places["tensor"]:
            array[:, 1] = 1e308
    with pytest.raises(NonFiniteLoss, match=r"output.*layer 0.*rank 1"):
        many.step(10 * x, y, total)
    for name, array in many.local_network.layout.items(many.flat_parameters):
        if name == "2.W" and many.mesh.places["tensor"]:
            array[1, 0] = np.inf
    with pytest.raises(NonFiniteLoss, match=r"parameter 2\.W"):
        many.step(x, y, total)
    many.close()


@pytest.mark.mpi(ranks=4)
def test_text_is_sampled_from_a_run_on_any_mesh(comm, shared_tmp_path, capsys, thorough):
    """The same losses, and the same text: a run leaves the whole network, wherever its parts were, and is resumed."""
    from parallel.command import sample
    from parallel.command.parsing import resumed
    from parallel.command.training_run import train as run

    text = shared_tmp_path / "said.txt"
    if comm.rank == 0:
        text.write_text("the cat sat on the mat. the dog sat on the log. " * 12)
    comm.Barrier()
    common = {"data": f"text:{text}", "length": 8, "model": "transformer:16,4,2,1", "dtype": "float64", "batch": 10}
    common |= {"optimizer": "adam", "lr": 0.01, "epochs": 1, "limit": 50, "pictures": False, "validation": 0}
    first, said = None, set()
    meshes = ["data=4", "pipeline=2,tensor=2", *(["pipeline=4", "tensor=4", "data=2,pipeline=2"] if thorough else [])]
    for mesh in meshes:
        line = f"1f1b:micro={MICRO}" if "pipeline" in mesh else None
        out = shared_tmp_path / mesh
        with np.errstate():
            result = run(Options(**common, mesh=mesh, pipeline=line, out=str(out)))
        found = {name: result[name] for name in ("loss", "accuracy", "steps")}
        first = first or found
        assert found == pytest.approx(first, rel=1e-10), mesh
        comm.Barrier()
        losses = [json.loads(row)["loss"] for row in (out / "metrics.jsonl").read_text().splitlines()]
        assert losses and np.isfinite(losses).all()
        capsys.readouterr()
        if comm.rank == 0:
            assert sample.main([str(out), "--prompt", "the ", "--length", "12", "--temperature", "0"]) == 0
            told = capsys.readouterr().out
            assert told.startswith("the ") and len(told) > 12
            said.add((told, f"{losses[-1]:.9g}"))
    assert comm.rank or len(said) == 1, said
    second = None
    resumed_on = [
        ("pipeline=2,tensor=2", "data=2,tensor=2", "zero1"),
        ("pipeline=2,tensor=2", "data=2,pipeline=2", "zero1"),  # epoch 3, of shards of parts
        ("data=4", "pipeline=2,tensor=2", "pipeline"),
        ("data=4", "data=2,tensor=2", "fsdp"),
    ]
    for before, mesh, strategy in resumed_on[: 4 if thorough else 3]:
        given = {"resume": str(shared_tmp_path / before), "mesh": mesh, "strategy": strategy}
        options = Options(**resumed(given))
        options = replace(options, epochs=options.epochs + 1)
        with np.errstate():
            result = run(options)
        comm.Barrier()
        found = {name: result[name] for name in ("loss", "steps")}
        second = second or {}
        assert found == pytest.approx(second.setdefault(result["epochs"], found), rel=1e-10), (before, mesh)
    assert sorted(second) == [2, 3]
