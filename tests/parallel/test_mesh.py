"""Ranks and their axes: data x pipeline x tensor x space x branch x context x expert."""

import importlib

import numpy as np
import pytest

import parallel
from parallel.mesh import AXES, Mesh, sizes


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
        sizes(8, 2, 3)
    with pytest.raises(ValueError, match="tensor must have at least 1 rank, given 0"):
        sizes(8, tensor=0)
    with pytest.raises(ValueError, match="pipeline 8 does not make 4 ranks"):
        sizes(4, pipeline=8)


@pytest.mark.parametrize("name", parallel._INSTEAD)
def test_names_of_other_libraries_are_answered_with_names_that_exist(name):
    with pytest.raises(AttributeError, match="has no attribute") as caught:
        getattr(parallel, name)
    module, _, own = str(caught.value).rpartition(": ")[2].partition("(")[0].partition(".")
    assert hasattr(importlib.import_module(module), own)


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
