"""Ranks of one node are killed while they write into memory that all have together: the others go on from before it."""

from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from deadly import assert_as_if_nothing_had_been, needs_survivors, run_to_death, run_undisturbed

import nn
from collectives import Communicator
from parallel import DistributedDataParallel
from parallel.elastic.chaos import result

MODEL = "--model", "mlp:64,64,10"
ADAM = *MODEL, "--optimizer", "adam", "--lr", "0.01"
LARS = *MODEL, "--optimizer", "lars", "--lr", "0.1"  # norms: each rank updates a share
RANKS = 3


@pytest.fixture
def survive(tmp_path, nothing_left):
    """`run_to_death` in a directory of its own."""
    return partial(run_to_death, tmp_path)


@pytest.fixture(
    scope="module", params=[ADAM, pytest.param(LARS, marks=pytest.mark.exhaustive)], ids=["blocks", "shares"]
)
def job(request, tmp_path_factory):
    """(options, result.json of an undisturbed run on as many ranks)."""
    out = tmp_path_factory.mktemp("undisturbed")
    return request.param, run_undisturbed(out, *request.param, "--ranks", str(RANKS))


@needs_survivors
def test_others_come_in_the_place_of_who_dies_in_an_update(survive, job):
    """When a block is half written; when an update begins; between two; each time all bits are those of before."""
    options, undisturbed = job
    faults = (
        (0, 1, "block of step 4", "tears"),
        (1, 0, "update of step 6"),
        (2, 2, "sum of step 9"),
        (3, 0, "block of step 12", "tears"),
    )
    done = survive(RANKS, "respawn", *faults, options=options)
    found = assert_as_if_nothing_had_been(done, undisturbed, [1, 0, 2, 0])
    assert "gradients summed in the memory that the 3 ranks of a node share" in done[1], done[1]
    assert "from step 4\n" in done[1] and "from step 12\n" in done[1]
    assert found["ranks"] == RANKS


@needs_survivors
@pytest.mark.exhaustive
def test_the_others_go_on_in_less_memory(survive, tmp_path):
    """In float64, as sums of two and of three ranks are rounded otherwise; a checkpoint, an evaluation, the start."""
    options = *ADAM, "--dtype", "float64"
    undisturbed = run_undisturbed(tmp_path, *options, "--ranks", "3")
    faults = (0, 3, "start"), (1, 0, "block of step 5", "tears"), (2, 1, "evaluation after step 14")
    status, said, out = survive(4, "shrink:min=1", *faults, options=options)
    assert status == 0, said
    found = result(out)
    assert found["loss"] == pytest.approx(undisturbed["loss"], rel=1e-9), said
    assert (found["ranks"], found["elastic"]["lost"]) == (1, [3, 0, 1])
    assert found["elastic"]["ledger"] == {"epochs": 3, "samples": 600}


@needs_survivors
def test_control_without_copies_what_is_half_written_is_trained_on(survive, job):
    options, undisturbed = job
    status, said, out = survive(
        RANKS, "respawn", (0, 1, "block of step 4", "tears"), options=options, **{"KEEPS_NOTHING": "1"}
    )
    assert status or result(out)["parameters_sha256"] != undisturbed["parameters_sha256"], said


class Died(Exception):
    """Instead of what MPI says."""


@pytest.mark.mpi(ranks=[3], more=[2])
@pytest.mark.parametrize("optimizer", [nn.Adam(0.01), nn.LARS(0.1, momentum=0.9)], ids=["blocks", "shares"])
def test_the_state_is_that_before_what_is_not_whole(comm, optimizer):
    """A step, and a rescaling, which are made and not met after; one that some have met after counts for all."""
    network = nn.Network(nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90), nn.ReLU(), nn.Linear(90, 3)), (70,))
    communicator = Communicator(comm)

    def made():
        trainer = DistributedDataParallel(
            network, nn.CrossEntropyLoss(), optimizer, communicator, node_memory="on", survives=True
        )
        for _ in range(3):
            step(trainer)
        return trainer

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 70)).astype("f4"), rng.integers(0, 3, 12)

    def step(trainer):
        trainer.step(x[comm.rank :: comm.size], y[comm.rank :: comm.size], 12)

    def until(meetings):
        def meet(what):
            nonlocal meetings
            comm.Barrier()
            meetings -= 1
            if meetings < 0:
                raise Died

        return meet

    def same(one, other):
        return all(np.array_equal(one[name], other[name]) for name in other)

    for met in (False, True):
        trainer = made()
        before = trainer.state_dict()
        trainer.sync.barrier = until(1 if met and comm.rank == 0 else 0)  # then the first rank alone knows
        with suppress(Died):
            step(trainer)
        assert trainer.steps == 3 + (met and comm.rank == 0)
        assert not same(trainer.state_dict(), before), "what ranks have together was changed"
        trainer.sync.detach(comm.allgather(trainer.sync.last_change))
        if not met:
            assert same(trainer.state_dict(), before)
        elif comm.rank == 0:
            assert not same(trainer.state_dict(), before)
        comm.Barrier()
        trainer.close()

    for meetings, first_knows in ((0, False), (1, False), (1, True)):
        trainer = made()
        slot = next(iter(trainer.sync.slots))
        want = {name: array * (0.5 if f"/{slot}/" in name else 1) for name, array in trainer.state_dict().items()}
        trainer.sync.barrier = until(2 if first_knows and comm.rank == 0 else meetings)
        with suppress(Died):
            trainer.rescale(slot, 0.5)
        comm.Barrier()
        trainer.sync.detach(comm.allgather(trainer.sync.last_change))
        assert same(trainer.state_dict(), want), f"{meetings} meetings, {first_knows}"
        comm.Barrier()
        trainer.close()
    communicator.release()
