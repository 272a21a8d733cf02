"""An axis context beside data, pipeline and tensor: every mesh computes what one process computes."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_context import CLASSES, SEED, assert_same, loss, network, optimizer, train

import nn
from nn.core.layer import Sequential
from parallel.command.options import Options

LENGTH = 9  # which no number of ranks here divides
MESHES = {  # on four ranks: options beside --mesh
    "context=2,tensor=2": ({}, {"tensor": "sequence"}, {"tensor": "width"}, {"strategy": "zero1"}),
    "pipeline=2,context=2": (
        {"pipeline": "1f1b:micro=3"},
        {"pipeline": "zb-h1:micro=2"},
        {"pipeline": "gpipe:micro=3,recompute", "strategy": "zero1"},
    ),
}
OF_EIGHT = {
    "data=2,context=2,tensor=2": ({"tensor": "sequence"}, {"strategy": "fsdp"}),
    "data=2,pipeline=2,context=2": ({"pipeline": "1f1b:micro=2"}, {"pipeline": "1f1b:micro=2", "strategy": "zero1"}),
    "pipeline=2,context=2,tensor=2": (
        {"pipeline": "1f1b:micro=2", "tensor": "sequence"},
        {"pipeline": "zb-h1:micro=2"},
    ),
    "context=4,tensor=2": ({}, {"tensor": "sequence"}),
    "pipeline=2,context=4": ({"pipeline": "interleaved:micro=2"},),
}


def all_see_all(length):
    """No mask and no padding, which stages are not told of."""
    layers = [nn.Embedding(CLASSES, 8), nn.LearnedPositions(length, 8)]
    layers += [nn.TransformerBlock(8, 4, dropout=0.1) for _ in range(2)]
    return nn.Network(Sequential(*layers, nn.Linear(8, CLASSES)), (length,), np.float64)


def build(model):
    return all_see_all(LENGTH) if model == "all see all" else network(model, LENGTH)


@cache
def one_process(model):
    one = nn.Trainer(build(model), loss(), optimizer(), SEED)
    return one, train(one, LENGTH)


def many_ranks(communicator, mesh, model, attention="ring", strategy="ddp", **more):
    """What train.py makes of these options."""
    from parallel.strategies import build_trainer

    options = Options(strategy=strategy, mesh=mesh, context=attention, seed=SEED, batch=32, **more)
    return build_trainer(options, build(model), loss(), optimizer(), communicator)


def assert_meshes(comm, meshes, thorough=True):
    from collectives import Communicator

    communicator = Communicator(comm)
    for mesh, ways in meshes.items():
        contexts = int(mesh.partition("context=")[2][0])
        shared = contexts if "tensor" not in mesh else min(contexts, 2)  # of the four heads, two a rank of "tensor"
        attentions = ["ring", "ulysses"] if shared == contexts else ["ring"]
        attentions += ["ring:2,ulysses:2"] if contexts == 4 else []
        for number, model in enumerate(("causal", "tied, rotary, dropout", "sinusoidal, by blocks", "all see all")):
            for i, attention in enumerate(attentions):
                if not thorough and i != number % len(attentions):
                    continue
                more = ways[(number + i) % len(ways)]
                many = many_ranks(communicator, mesh, model, attention, **more)
                assert_same(many, *one_process(model), LENGTH)
                many.close()


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_compute_what_one_process_computes(comm, ranks, mesh, thorough):
    assert_meshes(comm, {mesh: MESHES[mesh]}, thorough)


@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=8)
@pytest.mark.parametrize("mesh", OF_EIGHT)
def test_meshes_of_three_axes_compute_what_one_process_computes(comm, ranks, mesh):
    assert_meshes(comm, {mesh: OF_EIGHT[mesh]})


@pytest.mark.mpi(ranks=4)
def test_checkpoints_continue_on_other_meshes(comm, ranks):
    """One process, then every mesh after the other: each goes on from the state of the one before."""
    from collectives import Communicator

    communicator = Communicator(comm)
    one = nn.Trainer(build("causal"), loss(), optimizer(), SEED)
    train(one, LENGTH)
    state = one.state_dict()
    for mesh, more in (
        ("context=4", {"strategy": "zero1"}),
        ("pipeline=2,context=2", {"pipeline": "1f1b:micro=2"}),
        ("data=2,context=2", {"strategy": "fsdp"}),
        ("context=2,tensor=2", {"tensor": "sequence"}),
        ("data=2,tensor=2", {}),
    ):
        many = many_ranks(communicator, mesh, "causal", **more)
        many.load_state_dict(state)
        assert_same(many, one, train(one, LENGTH), LENGTH)
        state = communicator.bcast(many.state_dict())  # gathered on rank 0
        many.close()


@pytest.mark.mpi(ranks=4)
def test_gradients_that_were_not_summed_over_the_positions_would_differ(comm, ranks, monkeypatch):
    """The control: of the ranks that have one network together, each pipeline or group by itself."""
    from collectives import Communicator
    from parallel.mesh import Mesh

    made = Mesh.__init__

    def apart(self, *arguments, **sizes):
        made(self, *arguments, **sizes)
        if self.model:
            self.data_group, self.copies = Mesh(self.data), self.count

    monkeypatch.setattr(Mesh, "__init__", apart)
    _, losses = one_process("causal")
    for mesh, (more, *_) in MESHES.items():
        many = many_ranks(Communicator(comm), mesh, "causal", **more)
        found = train(many, LENGTH)
        assert abs(found[-1] / losses[-1] - 1) > 1e-6, mesh
        many.close()


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_values_that_are_not_finite_are_traced_on_all_ranks(comm, ranks, mesh):
    from collectives import Communicator

    many = many_ranks(Communicator(comm), mesh, "causal", **MESHES[mesh][0])
    _, losses = one_process("causal")
    assert train(many, LENGTH)[0] == pytest.approx(losses[0], rel=1e-12)
    state = many.state_dict()
    if many.is_writer:
        state[max(name for name in state if name.startswith("param/"))][...] = np.nan
    many.load_state_dict(state)
    with pytest.raises(nn.NonFiniteLoss, match="parameter"):
        train(many, LENGTH)
    many.close()


@pytest.mark.skipif(
    not (Path(os.environ.get("RINGPROP_DATA") or "data") / "tinyshakespeare").is_dir(),
    reason="needs tinyshakespeare in $RINGPROP_DATA (scripts/get_data.py tinyshakespeare)",
)
@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=4)
def test_a_character_model_of_long_sequences_has_one_processs_losses(comm, ranks):
    """Tiny Shakespeare, 1,024 positions, four ranks: the same losses, to 1e-12."""
    from collectives import Communicator
    from parallel import ContextParallel

    data = nn.data.load("tinyshakespeare", length=1024, limit=8, dtype="float64")
    model = "transformer:16,4,2,positions=rotary,attention=blocks:128"
    build = lambda: nn.models.build(model, data.in_shape, data.classes, np.float64)
    given = nn.CrossEntropyLoss(), nn.Adam(0.01)
    steps = [each for epoch in range(2) for each in nn.Loader(data.train, 2, seed=1).epoch(epoch)]
    one, communicator = nn.Trainer(build(), *given, SEED), Communicator(comm)
    losses = [one.step(*each) for each in steps]
    assert losses[-1] < losses[0] - 0.3
    for attention in ("ring", "ulysses", "ring:2,ulysses:2"):
        many = ContextParallel(build(), *given, communicator, SEED, attention=attention)
        np.testing.assert_allclose([many.step(*each) for each in steps], losses, rtol=1e-12)
        many.close()
