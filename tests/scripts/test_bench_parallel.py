"""The benchmark of pipelines and tensor parallelism: rows of what two ranks tell, and the telling itself."""

from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_a_step_stands_beside_the_clock_and_beside_pytorch():
    from bench_parallel import cases, shared_rows

    found = {
        "what": "a network",
        "ranks": 2,
        "torch": "PyTorch 2",
        "predicted": {"gpipe": [1e-3, 4e-3, 6e-3], "naive": [2e-3]},
        "seconds": {"gpipe": [2e-3, 4e-3, 9e-3], "naive": [2.2e-3], "torch gpipe": [8e-3]},
        "kinds": {"gpipe": [{"F": (1e-3, 1e-3), "B": (4e-3, 2e-3)}], "naive": [{"F": (1.1e-3, 1e-3)}]},
    }
    clock, torch, naive = shared_rows("2 ranks", found)
    assert clock.ours == 4 and clock.peer == pytest.approx(4)
    assert "the clock is +50% (+25% to +75% in the middle half of 3 rounds) off" in clock.note, "round by round"
    assert clock.note.endswith("ms (predicted): F 1 (1), B 4 (2); most of it lies in B")
    assert naive.note.endswith("ms (predicted): F 1.1 (1)"), "which is not far off"
    assert torch.ratio == 0.5 and torch.peer_name == "PyTorch 2"
    assert naive.ratio == pytest.approx(1.1), "which PyTorch has not"
    assert {row.case for row in (clock, torch, naive)} < set(cases("2 ranks"))
    assert {row.ranks for row in (clock, torch, naive)} == {2}


def test_the_plans_word_stands_beside_what_was_measured_round_by_round():
    from bench_parallel import planned_row

    seconds = {"plan": [1.0, 1.0, 1.0], "ddp": [2.0, 3.0, 4.0]}
    found = {"what": "a network", "words": "--strategy x", "predicted": {"plan": 1.0, "ddp": 3.0}, "seconds": seconds}
    (row,) = planned_row("case", found)
    assert row.ratio == pytest.approx(1 / 3)
    assert "3.00 times as fast, 3.00 were promised: +0% (-17% to +17% in the middle half of 3 rounds)" in row.note


def test_what_comes_next_and_how_long_it_takes_is_said_before(monkeypatch, capsys):
    """Of what is wanted only; and what fails is said in each of its rows."""
    import bench_parallel as suite

    def failing():
        raise RuntimeError("no ranks")
        yield

    def measured():
        yield from (suite.Row(case, 1.0) for case in ("a, here", "b, here"))

    pieces = [
        suite.Piece(["a, here", "b, here"], 70, measured),
        suite.Piece(["a, there", "b, there"], 30, failing),
        suite.Piece(["c"], 10, failing),
    ]
    monkeypatch.setattr(suite, "pieces", lambda quick: iter(pieces))
    found = list(suite.rows(only="a, "))
    assert [(row.case, row.ours, row.note) for row in found] == [
        ("a, here", 1.0, ""),
        ("a, there", None, "failed: no ranks"),
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "# a, here and 1 more: about 70 of 100 s that are left"
    assert said[1] == "# a, there and 1 more: about 30 of 30 s that are left" and len(said) == 2


def test_every_row_of_a_lab_that_cannot_be_says_why(monkeypatch):
    import bench_parallel as suite

    monkeypatch.setattr(suite.netlab, "reason_against", lambda: "needs root")
    found = list(suite.rows(quick=True, only="hosts, 100 Mbit/s"))
    assert {row.note for row in found} == {"needs root"} and all(row.ours is None for row in found)
    assert len({row.case for row in found}) == len(found) == 2 * 9 + 2


def test_what_takes_too_long_in_the_lab_is_said_in_its_row(monkeypatch):
    import bench_parallel as suite
    import benchmarking

    monkeypatch.setattr(suite.netlab, "reason_against", lambda: "")
    monkeypatch.setattr(benchmarking, "TIMEOUT", 0)
    (row,) = suite.rows(quick=True, only="other ranks hidden")
    assert row.ours is None and row.note == "failed: no result after 0 s"


def test_steps_with_hidden_rows_stand_beside_those_that_wait():
    from bench_parallel import halo_row

    (row,) = halo_row("case", {"what": "images", "seconds": {"hidden": [0.9, 1.8], "waited for": [1.0, 2.0]}})
    assert row.ratio == pytest.approx(0.9) and "a whole step takes -10% (-10% to -10%" in row.note


@pytest.mark.mpi(ranks=[2])
def test_a_step_either_way_of_rows_from_the_other_rank(comm, monkeypatch):
    """Hidden ones are computed beside: counted where layers look."""
    import bench_parallel as suite

    from collectives import Communicator
    from parallel.strategies.operators import rows, strategy

    monkeypatch.setattr(strategy, "nodes_of", lambda ranks: range(ranks.size))
    monkeypatch.setattr(suite, "IMAGE", 32)
    monkeypatch.setattr(rows, "HIDES", 0)
    calls, original = [], rows.WindowRows.forward_in_parts
    monkeypatch.setattr(rows.WindowRows, "forward_in_parts", lambda *given: (calls.append(1), original(*given))[1])
    found = suite.halo_steps(Communicator(comm), True)
    assert set(found["seconds"]) == {"hidden", "waited for"} and all(map(len, found["seconds"].values()))
    assert len(calls) == 2 * 2 * 3, "two steps of two rounds, and all convolutions but the first, whose rows are data"


@pytest.mark.mpi(ranks=[2])
def test_kinds_add_up_to_a_step_and_to_what_the_clock_says(comm):
    """Each kind that a schedule has is measured, and predicted, on the cuts that are run."""
    import bench_parallel as suite
    import numpy as np

    import nn
    from collectives import Communicator
    from collectives.pricing.networks import NETWORKS
    from parallel import Pipeline, TensorParallel
    from parallel.planning.job import Axes
    from parallel.strategies.estimate import estimate

    comm, network = Communicator(comm), lambda: nn.models.build("mlp:12,9,8,7,6,5", (12,), 5)
    x, y = np.ones((suite.BATCH, 12), np.float32), np.zeros(suite.BATCH, int)
    made = lambda: (network(), nn.CrossEntropyLoss(), nn.SGD(0.01), comm)
    small, whole = (suite.measured_job(comm, network, x, y, parts, 2) for parts in (suite.MICRO, 1))
    assert (small.samples, whole.samples, small.batch) == (suite.BATCH // suite.MICRO, suite.BATCH, suite.BATCH)
    for name, kinds in {
        "1f1b": {"F", "B", "update"},
        "zb-v": {"F", "I", "W", "update"},
        suite.TENSOR: {"computation", "update"},
    }.items():
        if name == suite.TENSOR:
            job, trainer = whole, TensorParallel(*made())
            told = estimate(job, "ddp", Axes(tensor=2), NETWORKS["workstation"])
        else:
            cuts = (1, 2, 3) if name == "zb-v" else (7,)
            job, trainer = small, Pipeline(*made(), schedule=name, micro_batches=suite.MICRO, cuts=cuts)
            told = estimate(job, name, Axes(pipeline=2), NETWORKS["workstation"], micro_batches=suite.MICRO, cuts=cuts)
        clock = suite.expected(job, trainer, NETWORKS["workstation"])
        seen = suite.Kinds(trainer).block(x, y, 3)
        assert set(seen) == set(clock) == kinds | {suite.WAITING}
        assert all(seconds > 0 for seconds in seen.values())
        assert sum(clock.values()) == pytest.approx(told.seconds)
        trainer.close()


@pytest.mark.exhaustive
def test_all_sides_take_turns_on_two_ranks():
    from bench_parallel import SCHEDULES, TENSOR, rows

    found = {row.case: row for row in rows(quick=True, only="2 ranks")}
    assert all(row.ours > 0 and row.peer > 0 for row in found.values())
    assert {f"{name}, 2 ranks, of the clock" for name in (*SCHEDULES, TENSOR)} <= set(found)
    assert ("tensor, 2 ranks, PyTorch" in found) == bool(find_spec("torch"))
