"""The benchmark of training: rows are well-formed, also where a peer, the data or the lab is absent."""

import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MLP, LENET = "mlp 784-512-512-10, batch 64 a rank", "lenet5, batch 64 a rank"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_all_sides_take_turns_on_two_ranks():
    from bench_training import run, speed_rows

    result = run({"case": MLP, "quick": True})
    sides = {"one", "control", "ddp"} | ({"torch", "threads"} if "torch" in result else set())
    assert set(result["seconds"]) == sides and set(result["notes"]) == sides - {"one", "control", "ddp"}
    assert all(len(blocks) == 2 and min(map(min, blocks)) > 0 for blocks in result["seconds"].values())
    rows = list(speed_rows(MLP, result))
    assert rows[-1].case.endswith("threads of PyTorch") == ("torch" in result)
    for row in rows:
        assert row.case.startswith(f"{MLP}: ddp") and row.ours > 0 and (row.ranks, row.threads) == (2, 1)


def test_shares_are_of_images_per_second():
    """Twice the time is half the images."""
    from bench_training import speed_rows

    seconds = {"one": [(2e-3, 4e-3)], "control": [(2e-3, 3e-3)], "ddp": [(4e-3, 4e-3)], "torch": [(8e-3, 8e-3)]}
    seconds["threads"] = [(5e-3, 16e-3)]
    found = {"torch": "PyTorch 2", "notes": {"torch": "fast", "threads": "channels first"}}
    one, control, torch, threads = speed_rows(MLP, {"seconds": seconds, "lockstep": [3e-3]} | found)
    assert (one.ours, one.peer, one.unit) == (4, 2, "ms")
    assert "32,000 samples/s, 50.0% (by means 100.0%) of twice one process's" in one.note
    assert "50.0% (by means 75.0%) of two independent processes'; 75.0% of theirs if" in control.note
    assert torch.ratio == 0.5 and "25.0% (by means 37.5%) of our control; fast" in torch.note
    assert threads.ratio == 0.8 and "one global batch of 128" in threads.note
    assert threads.note.endswith("by means 0.25; channels first")
    del seconds["torch"]
    assert list(speed_rows(MLP, {"seconds": seconds, "lockstep": [1]}))[-1].note == "PyTorch is not installed"


@pytest.mark.exhaustive
def test_time_to_accuracy(capsys):
    """The whole way, on little data to an accuracy that is soon there."""
    import bench_training

    if not (Path(os.environ.get("RINGPROP_DATA", "")) / "mnist").is_dir():
        pytest.skip("needs mnist in $RINGPROP_DATA (scripts/get_data.py mnist)")
    row = bench_training.accuracy_row(target=0.2, limit=2000, every=10, seeds=2)
    assert row.ours > 0 and row.unit == "s" and "ddp " in row.note
    assert (row.peer is None) == (find_spec("torch") is None)
    assert "ddp: step 10, " in capsys.readouterr().err, "it tells how far it is"


def test_accuracy_is_a_median_of_seeds(monkeypatch):
    """Half of them or more must have reached it."""
    import bench_training

    def row(*seconds):
        ends = [{"ddp": {"accuracy": 0.99 if s else 0.98, "seconds": s, "steps": 100}} for s in seconds]
        for end in ends:
            end["torch"] = {"accuracy": 0.99, "seconds": 8.0, "steps": 200}
        monkeypatch.setattr(bench_training, "run", lambda task, timeout: ends[task["seed"]])
        return bench_training.accuracy_row(limit=100, seeds=len(seconds))

    monkeypatch.setattr(bench_training, "load_mnist", lambda limit: None)
    assert (row(3.0, 2.0, 9.0).ours, row(3.0, 2.0, 9.0).peer) == (3.0, 8.0)
    assert row(3.0, 0, 9.0).ours == 9.0 and "100 (inf s)" in row(3.0, 0, 9.0).note
    assert row(0, 0, 9.0).ours is None and row(0, 0, 9.0).peer is None


def test_what_is_absent_is_told(monkeypatch, tmp_path):
    import bench_training

    monkeypatch.setenv("RINGPROP_DATA", str(tmp_path))
    row = bench_training.accuracy_row()
    assert row.ours is None and row.note.startswith("no data: ")
    monkeypatch.setattr(bench_training.netlab, "reason_against", lambda: "needs root")
    (row,) = bench_training.rows(quick=True, only="overlap")
    assert (row.ours, row.note) == (None, "needs root")


def test_peers_have_the_same_models():
    pytest.importorskip("torch")
    import torch_models
    from bench_training import CASES

    from nn import models

    for name, case in CASES.items():
        theirs = torch_models.build(name)[0]
        ours = models.build(case.model, case.in_shape, case.classes).layout
        assert sum(map(math.prod, (p.shape for p in theirs.parameters()))) == ours.count
