"""Ranks and their axes: data x pipeline x tensor x space x branch x context x expert."""

import importlib
import inspect
import re

import numpy as np
import pytest

import nn
import parallel
from parallel.axis import AXES
from parallel.guesses import KEYWORDS, NAMES, refuse_keywords
from parallel.mesh import Mesh, sizes
from parallel.strategies.gradient_sync import gradient_sync


def factors(ranks):
    """All (data, pipeline, tensor) that multiply to so many ranks."""
    numbers = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(d, p, ranks // d // p) for d in numbers for p in numbers if ranks % (d * p) == 0]


def test_what_does_not_multiply_to_the_ranks_is_refused_with_what_would_do():
    ones = dict.fromkeys(AXES, 1)
    assert sizes(8, pipeline=2) == ones | {"data": 4, "pipeline": 2}
    assert sizes(8, space=4) == ones | {"data": 2, "space": 4}
    assert sizes(8, context=4) == ones | {"data": 2, "context": 4}
    assert sizes(8, expert=2, tensor=2) == ones | {"data": 2, "expert": 2, "tensor": 2}
    with pytest.raises(ValueError, match=r"data 2 x pipeline 3 does not make 8 ranks: each .* 1, 2, 4, 8 .* start 6"):
        sizes(8, 2, pipeline=3)
    with pytest.raises(ValueError, match="tensor must have at least 1 rank, given 0"):
        sizes(8, tensor=0)
    with pytest.raises(ValueError, match="pipeline 8 does not make 4 ranks"):
        sizes(4, pipeline=8)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries_are_answered_with_names_that_exist(name):
    with pytest.raises(AttributeError, match=f"parallel has no '{name}': ") as caught:
        getattr(parallel, name)
    module, _, own = str(caught.value).rpartition(": ")[2].partition("(")[0].partition(".")
    assert hasattr(importlib.import_module(module), own)


def test_a_name_that_is_nearly_right_is_recognised():
    with pytest.raises(AttributeError, match=r"did you mean parallel\.TensorParallel\?"):
        parallel.TensorParallelism  # noqa: B018


def keywords_of(function) -> set[str]:
    return set(inspect.signature(function).parameters)


PUBLIC = {name: getattr(parallel, name) for name in parallel.__all__ if name[0].isupper() and "Error" not in name}
TRAINERS = {name: made for name, made in PUBLIC.items() if "communicator" in keywords_of(made)}


def test_keywords_that_are_answered_with_ours_exist():
    ours = {"chunks"}.union(*map(keywords_of, TRAINERS.values()))  # chunks: an option of a schedule
    for given, answer in KEYWORDS.items():
        for name in re.findall(r"\b(\w+)=(?!\w)", answer.partition("(")[0]):
            assert name in ours, (given, answer)


@pytest.mark.parametrize(
    ("name", "keyword", "said"),
    [
        ("DistributedDataParallel", "bucket_cap_mb", r"takes no 'bucket_cap_mb': write bucket=, in MiB"),
        ("DistributedDataParallel", "find_unused_parameters", "leave it out: every layer"),
        ("DistributedDataParallel", "device_ids", "leave it out: everything is computed on processors"),
        ("DistributedDataParallel", "module", "write network=, the first argument"),
        ("FullyShardedDataParallel", "sharding_strategy", r"parallel\.ZeRO2 for SHARD_GRAD_OP"),
        ("FullyShardedDataParallel", "mixed_precision", r"nn\.Network\(layers, in_shape, mixed=True\)"),
        ("Pipeline", "n_microbatches", r"Pipeline takes no 'n_microbatches': write micro_batches="),
        ("SpatialParallel", "bucket_cap_mb", "write bucket="),
        ("LocalSGD", "period", "write every="),
        ("Mesh", "dp", r"^Mesh takes no 'dp': write data=$"),
        ("Mesh", "mesh_dim_names", r"Mesh\(communicator, data=2, tensor=2\)"),
        ("Mesh", "rows", "^Mesh takes no 'rows'; it takes communicator, workers, data, expert, pipeline"),
    ],
)
def test_keywords_of_other_libraries_are_answered(name, keyword, said):
    with pytest.raises(TypeError, match=said):
        PUBLIC[name](**{keyword: 2})


def test_a_mesh_has_a_keyword_for_each_axis_of_the_table():
    assert {"communicator", "workers", *AXES} == keywords_of(parallel.Mesh)


@pytest.mark.parametrize("name", ["SpatialParallel", "BranchParallel", "ContextParallel"])
def test_what_is_passed_on_to_the_sync_is_not_refused(name):
    refuse_keywords(PUBLIC[name], inspect.signature(gradient_sync).parameters.keys() - {"mesh"})


@pytest.mark.parametrize("name", sorted(TRAINERS.keys() - {"Mesh"}))
def test_every_trainer_answers_keywords(name):
    with pytest.raises(TypeError, match=f"^{name} takes no 'device_ids': leave it out"):
        TRAINERS[name](device_ids=[0])


@pytest.mark.parametrize("name", sorted(TRAINERS.keys() - {"Mesh", "Sandblaster"}))
def test_one_process_without_a_communicator_is_refused(name):
    network, answer = nn.Network(nn.Linear(4, 2), (4,)), r"use nn\.Trainer, or give a communicator"
    for given, named in ([None], {}), ([], {"communicator": None}):
        with pytest.raises(TypeError, match=answer):
            TRAINERS[name](network, nn.CrossEntropyLoss(), nn.SGD(0.1), *given, **named)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("name", ["DistributedDataParallel", "ZeRO1", "Pipeline", "TensorParallel", "ParameterServer"])
def test_a_communicator_of_mpi4py_is_wrapped(comm, name):
    """The same bits as with a Communicator; the caller's communicator goes on after close()."""
    from collectives import Communicator

    x, y = np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 3

    def trained(communicator):
        network = nn.Network(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,))
        trainer = TRAINERS[name](network, nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)
        nn.fit(trainer, (x, y), epochs=2, batch=4)
        digest = trainer.digest()
        trainer.close()
        return digest

    assert trained(comm) == trained(Communicator(comm))
    assert comm.allreduce(1) == 2


@pytest.mark.mpi(ranks=2)
def test_what_is_no_communicator_of_these_ranks_is_refused(comm):
    from mpi4py import MPI

    with pytest.raises(TypeError, match=r"expected a communicator, .*Communicator\(MPI.COMM_WORLD\), given 'nccl'"):
        Mesh("nccl")
    first = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    if comm.rank:
        with pytest.raises(ValueError, match=r"this rank is not in the communicator \(COMM_NULL\)"):
            Mesh(first)
    else:
        mesh = Mesh(first)
        assert (mesh.size, mesh.data.size) == (1, 1)
        mesh.close()


@pytest.mark.mpi(ranks=4)
def test_every_axis_has_its_ranks(comm):
    from collectives import Communicator

    world = Communicator(comm)
    for data, pipeline, tensor in factors(4):
        mesh = Mesh(world, data=data, pipeline=pipeline, tensor=tensor)
        d, p, t = (mesh.places[axis] for axis in ("data", "pipeline", "tensor"))
        assert comm.rank == (d * pipeline + p) * tensor + t == mesh.rank_at()
        assert (mesh.index, mesh.count) == (d, data)
        ranks = {
            "data": [(i * pipeline + p) * tensor + t for i in range(data)],
            "pipeline": [(d * pipeline + i) * tensor + t for i in range(pipeline)],
            "tensor": [(d * pipeline + p) * tensor + i for i in range(tensor)],
            "model": [r for r in range(4) if r // (pipeline * tensor) == d],
        }
        for axis, expected in ranks.items():
            communicator = getattr(mesh, axis)
            if axis != "data" and len(expected) == 1:
                assert communicator is None
            else:
                assert communicator.allgather(comm.rank) == expected, axis
        group = mesh.data_group
        assert (group.rank, group.size, group.index, group.count) == (d, data, d, data)
        array = np.array([1.0 + comm.rank])
        mesh.sum_model(array)
        assert array[0] == (sum(ranks["model"]) + len(ranks["model"]) if mesh.model else 1.0 + comm.rank)
        mesh.close()


@pytest.mark.mpi(ranks=4)
def test_ranks_of_an_axis_expert_share_the_samples(comm):
    from collectives import Communicator

    world = Communicator(comm)
    for data, expert, tensor in factors(4):
        mesh = Mesh(world, data=data, expert=expert, tensor=tensor)
        d, e, t = (mesh.places[axis] for axis in ("data", "expert", "tensor"))
        assert comm.rank == (d * expert + e) * tensor + t == mesh.rank_at()
        group = mesh.data_group
        assert mesh.shard == (d * expert + e, data * expert) and (group.index, group.count) == (d, data)
        ranks = {"expert": expert, "tensor": tensor, "parts": expert * tensor, "model": expert * tensor}
        for name, size in ranks.items():
            communicator = getattr(mesh, name)
            assert (communicator.size if communicator else 1) == size, name
        if mesh.parts:
            assert mesh.parts.rank == e * tensor + t
        mesh.close()


@pytest.mark.mpi(ranks=2)
def test_meshes_of_a_released_communicator_have_its_collectives(comm):
    from collectives import Communicator

    communicator = Communicator(comm)
    communicator.release()
    mesh = Mesh(communicator, data=1, tensor=2)
    assert isinstance(mesh.data, Communicator) and mesh.data.size == 1
    x = np.ones(4)
    mesh.sum_parts(x)
    assert (x == 2).all()
    mesh.close()
