"""An axis expert beside data, pipeline, context and tensor: every mesh computes what one process computes."""

import numpy as np
import pytest
from test_expert import (
    MODELS,
    SEED,
    assert_same,
    assert_same_state,
    batches,
    loss,
    network,
    one_process,
    optimizer,
    train,
)

import nn
from parallel.command.options import Options

FREE = [model for model in MODELS if "capacity" not in model]  # with an axis context a capacity is refused
MESHES = {  # on four ranks: options beside --mesh
    "expert=2,context=2": ({}, {"context": "ulysses"}, {"strategy": "zero1"}, {"strategy": "fsdp"}),
    "expert=2,pipeline=2": (
        {"pipeline": "1f1b:micro=2"},
        {"pipeline": "zb-h1:micro=3"},
        {"pipeline": "gpipe:micro=2,recompute", "strategy": "zero1"},
        {"pipeline": "interleaved:micro=2"},
    ),
}
OF_EIGHT = {
    "data=2,expert=2,pipeline=2": ({"pipeline": "1f1b:micro=2"}, {"pipeline": "zb-h1:micro=2", "strategy": "zero1"}),
    "data=2,expert=2,context=2": ({"strategy": "fsdp"}, {"context": "ulysses"}),
    "expert=2,pipeline=2,context=2": ({"pipeline": "1f1b:micro=2"},),
    "expert=2,pipeline=2,tensor=2": ({"pipeline": "1f1b:micro=2", "tensor": "sequence"}, {"pipeline": "zb-h1:micro=2"}),
    "expert=2,context=2,tensor=2": ({}, {"tensor": "sequence", "strategy": "zero1"}),
    "expert=2,context=4": ({"context": "ring:2,ulysses:2"},),
}


def many_ranks(comm, mesh, model, strategy="ddp", **more):
    """What train.py makes of these options."""
    from collectives import Communicator
    from parallel.strategies import build_trainer

    options = Options(strategy=strategy, mesh=mesh, seed=SEED, batch=32, **more)
    return build_trainer(options, network(model), loss(), optimizer(), Communicator(comm))


def assert_meshes(comm, mesh, ways, models):
    for number, model in enumerate(models):
        assert_same(many_ranks(comm, mesh, model, **ways[number % len(ways)]), model)


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_compute_what_one_process_computes(comm, ranks, mesh):
    assert_meshes(comm, mesh, MESHES[mesh], FREE if "context" in mesh else MODELS)


@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=8)
@pytest.mark.parametrize("mesh", OF_EIGHT)
def test_meshes_of_three_axes_compute_what_one_process_computes(comm, ranks, mesh):
    models = FREE if "context" in mesh else [*MODELS]
    for ways in (OF_EIGHT[mesh], OF_EIGHT[mesh][::-1]):
        assert_meshes(comm, mesh, ways, models)


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_continues_on_other_meshes(comm, ranks, mesh):
    """Two steps on this mesh, then two in one process, and the other way round."""
    whole = [loss().weight(y) for _, y, _ in batches((0, 1))]

    def steps(trainer, which):
        given = list(zip(batches(trainer.shard), whole, strict=True))[which]
        return [trainer.step(*each, total_weight=weight) for each, weight in given]

    one, losses = one_process("balanced")
    want = one.state_dict()
    for first, then in ((mesh, None), (None, mesh)):
        trainers = [
            many_ranks(comm, where, "balanced", **MESHES[mesh][0])
            if where
            else nn.Trainer(network("balanced"), loss(), optimizer(), SEED)
            for where in (first, then)
        ]
        before, after = trainers
        assert steps(before, slice(2)) == pytest.approx(losses[:2], rel=1e-12)
        after.load_state_dict(comm.bcast(before.state_dict()))
        assert steps(after, slice(2, 4)) == pytest.approx(losses[2:], rel=1e-12)
        got = after.state_dict()
        if then is None or after.is_writer:
            assert_same_state(got, want, f"{first}, {then}")
        (after if then else before).close()


@pytest.mark.mpi(ranks=4)
def test_gradients_of_what_all_ranks_have_must_be_summed_over_the_axis(comm, ranks):
    """The control: without it the first loss is right, and the others are not."""
    losses = one_process("top 2")[1]
    for mesh, (more, *_) in MESHES.items():
        many = many_ranks(comm, mesh, "top 2", **more)
        if "pipeline" in mesh:
            many.forward_backward.summed.pop()  # along "expert"
        else:
            many.forward_backward.partial_gradients = [
                each
                for each in many.forward_backward.partial_gradients
                if each[1] is not many.forward_backward.everyone
            ]
        found = train(many)
        assert found[0] == pytest.approx(losses[0], rel=1e-12) and found[-1] != pytest.approx(losses[-1], rel=1e-9)
        many.close()


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_values_that_are_not_finite_are_refused_on_all_ranks(comm, ranks, mesh):
    many = many_ranks(comm, mesh, "top 2", **MESHES[mesh][0])
    train(many)
    state = many.state_dict()
    if many.is_writer:
        state["param/2.1.body.1.A"][3, 0, 0] = np.nan  # of the first two of eight experts' ranks
    many.load_state_dict(state)
    with pytest.raises(nn.NonFiniteLoss, match="parameter"):
        train(many)
    many.close()
