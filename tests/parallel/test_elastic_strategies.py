"""Ranks are killed that have a part of the network, or serve: the others have it from a neighbour, or a checkpoint."""

from functools import partial

import numpy as np
import pytest
from deadly import assert_as_if_nothing_had_been, needs_survivors, run_to_death, run_undisturbed

import nn
from collectives import Communicator
from parallel import ExpertParallel, Pipeline, TensorParallel
from parallel.command.parsing import parse
from parallel.elastic.chaos import result
from parallel.elastic.partner_checkpoints import PartnerCheckpoints, RankFragments
from parallel.settings import OptionError
from parallel.state.fragments import Fragment
from parallel.strategies.axes import fitting

DEEP = "--model", "mlp:64,16,16,10"
TEXT = "--data", "stdlib", "--length", "8", "--model", "transformer:8,2,1"
EXPERTS = *TEXT[:-1], "transformer:8,2,1,experts=4,top=2"
ADAM = "--optimizer", "adam", "--lr", "0.01"
more = partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.fixture
def survive(tmp_path, nothing_left):
    """`run_to_death` in a directory of its own."""
    return partial(run_to_death, tmp_path)


@needs_survivors
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        more(3, ["--strategy", "ps", *ADAM]),
        more(3, ["--strategy", "ps", "--servers", "2", "--server-place", "workers", *ADAM]),
        more(2, ["--strategy", "pipeline", *DEEP, *ADAM]),
        more(2, ["--mesh", "pipeline=2", "--strategy", "zero1", *DEEP, *ADAM]),
        more(2, ["--strategy", "tensor", *DEEP, *ADAM]),
        more(2, ["--mesh", "context=2", "--strategy", "zero1", *TEXT, *ADAM]),
        more(4, ["--mesh", "context=2,pipeline=2", *TEXT, *ADAM]),
        more(2, ["--mesh", "expert=2", *EXPERTS, *ADAM]),
        more(4, ["--mesh", "data=2,expert=2", "--strategy", "zero1", *EXPERTS, *ADAM]),
    ],
    ids=lambda value: "-".join(value[:4]).replace("--", "") if isinstance(value, list) else str(value),
)
def test_others_come_in_the_place_of_who_has_a_part(survive, tmp_path, ranks, options):
    """The first rank, then the last one, three and four steps after copies were made: the same bits."""
    undisturbed = run_undisturbed(tmp_path, *options, "--ranks", str(ranks))
    faults = (0, 0, "update of step 13"), (1, ranks - 1, "evaluation after step 14")
    done = survive(ranks, "respawn:min=1", *faults, options=options)
    found = assert_as_if_nothing_had_been(done, undisturbed, [0, ranks - 1])
    assert done[1].count("from step 10\n") == 2, done[1]
    assert found["ranks"] == ranks


@needs_survivors
@pytest.mark.parametrize(
    ("ranks", "fault", "options", "left"),
    [
        (4, 1, ["--mesh", "data=2,pipeline=2", *DEEP], 2),
        more(4, 3, ["--mesh", "data=2,tensor=2", *DEEP], 2),
        more(4, 0, ["--mesh", "space=2", "--model", "cnn"], 2),
        more(4, 1, ["--mesh", "data=2,context=2", *TEXT], 2),
        more(4, 1, ["--mesh", "data=2,expert=2", *EXPERTS], 2),
        more(3, 1, ["--strategy", "pipeline", *DEEP], 2),
        more(3, 0, ["--strategy", "ps"], 2),
        more(3, 2, ["--strategy", "ps", "--servers", "2"], 2),
    ],
    ids=lambda value: "-".join(value[:2]).replace("--", "") if isinstance(value, list) else str(value),
)
def test_the_others_go_on_with_a_mesh_that_fits(survive, tmp_path, ranks, fault, options, left):
    """In float64, as other numbers of ranks add in other orders; who is one too many waits, and sees another death."""
    options = [*options, *ADAM, "--dtype", "float64"]
    undisturbed = run_undisturbed(tmp_path, *options, "--ranks", str(ranks))
    status, said, out = survive(ranks, "shrink", (0, fault, "sum of step 13"), options=options)
    assert status == 0, said
    found = result(out)
    assert found["loss"] == pytest.approx(undisturbed["loss"], rel=1e-9), said
    assert (found["ranks"], found["elastic"]["lost"]) == (left, [fault])
    assert found["elastic"]["ledger"] == {"epochs": 3, "samples": 600}


@needs_survivors
def test_the_last_rank_is_worker_and_server(survive, tmp_path):
    """As ranks of their own two servers have less and less room."""
    options = ["--strategy", "ps", "--servers", "2", *ADAM, "--reproducible", "6"]
    undisturbed = run_undisturbed(tmp_path, *options, "--ranks", "3")
    faults = (0, 1, "update of step 13"), (1, 0, "update of step 15")
    found = assert_as_if_nothing_had_been(survive(3, "shrink:min=1", *faults, options=options), undisturbed, [1, 0])
    assert found["ranks"] == 1


@needs_survivors
@pytest.mark.parametrize(
    "options",
    [
        more(["--strategy", "local-sgd"]),
        more(["--strategy", "local-sgd", "--mesh", "data=2,pipeline=2", *DEEP]),
        more(["--strategy", "downpour"]),
        ["--strategy", "ps", "--consistency", "ssp:2"],
        more(["--strategy", "ps", "--consistency", "async"]),
        more(["--consistency", "stale:1"]),
    ],
    ids=lambda options: "-".join(options).replace("--", ""),
)
def test_who_train_apart_go_on_from_the_last_checkpoint(survive, options):
    """Each sample once, of steps that count."""
    status, said, out = survive(4 if "--mesh" in options else 3, "shrink", (0, 0, "step 12"), options=options)
    assert status == 0, said
    assert "2 ranks go on" in said and "from the last checkpoint\ncontinuing from" in said
    found = result(out)
    assert found["elastic"]["ledger"] == {"epochs": 3, "samples": 600}
    assert (found["ranks"], found["epochs"], found["elastic"]["lost"]) == (2, 3, [0])


@pytest.mark.mpi(ranks=4)
def test_copies_make_the_state_of_a_mesh_whole(comm):
    """Of stages, of parts of tensors, and of experts, of any three of four ranks."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)).astype("f4"), rng.integers(0, 4, 8)
    communicator = Communicator(comm)
    meshes = (
        (Pipeline, {"data": 2, "micro_batches": 2}),
        (TensorParallel, {"tensor": 2}),
        (ExpertParallel, {"expert": 2}),
    )
    for make, arguments in meshes:
        middle = nn.Linear(8, 8) if make is not ExpertParallel else nn.Residual(nn.MixtureOfExperts(8, 4))
        layers = nn.Linear(6, 8), nn.ReLU(), middle, nn.ReLU(), nn.Linear(8, 4)
        network = nn.Network(nn.Sequential(*layers), (6,))
        trainer = make(network, nn.CrossEntropyLoss(), nn.Adam(0.01), communicator, **arguments)
        partners, (index, count) = PartnerCheckpoints(1), trainer.shard
        for step in range(3):
            trainer.step(x[index::count], y[index::count], 8)
            partners.copy(nn.Training(trainer, None, 1), {"batch": step + 1}, 0)
        want = communicator.bcast(trainer.state_dict())
        for lost in range(4):
            living = comm.Split(comm.rank == lost, comm.rank)
            found = partners.latest(living)
            if comm.rank != lost:
                whole = living.bcast(found.state())
                assert found.step == 3 and whole.keys() == want.keys()
                assert all(np.array_equal(want[name], whole[name]) for name in want)
            living.Free()
        trainer.close()
    communicator.release()


def test_fragments_are_copied():
    """Scalars, other types of numbers, nothing at all; the copy stays as it was."""
    arrays = {"steps": np.array(7), "param/W": np.arange(6, dtype="f4").reshape(2, 3), "none": np.empty((0, 2))}
    part = RankFragments.of(Fragment(name, array) for name, array in arrays.items())
    arrays["param/W"][:] = 0
    found = {fragment.name: fragment for fragment in part.fragments()}
    assert found["steps"].array.tolist() == [7] and found["steps"].shape == ()
    assert found["param/W"].array.tolist() == [0, 1, 2, 3, 4, 5] and found["param/W"].array.dtype == "f4"
    assert found["none"].array.size == 0 and found["none"].shape == (0, 2)
    assert not list(RankFragments.of(()).fragments())


def test_the_mesh_of_fewer_ranks():
    mesh = ["--mesh", "data=3,pipeline=2"]
    assert fitting(parse(mesh), 5) == (4, "pipeline=2") and fitting(parse(mesh), 2) == (2, "pipeline=2")
    assert fitting(parse([]), 3) == (3, None)
    with pytest.raises(OptionError, match="1 ranks are left, and the network is on 2: start more"):
        fitting(parse(mesh), 1)
