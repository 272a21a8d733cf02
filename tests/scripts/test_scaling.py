"""scripts/experiments/scaling.py: what ranks measure, and what is told of it: prediction, laws, picture."""

import json
import sys
from pathlib import Path

import pytest

from collectives import Communicator
from collectives.pricing.networks import NETWORKS
from parallel.planning.laws import amdahl

EXPERIMENTS = Path(__file__).parents[2] / "scripts" / "experiments"
TASK = {"model": "mlp:12,9,5", "input": [12], "classes": 5, "batch": 7, "steps": 8}


def load():
    before = list(sys.path)
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import scaling
    finally:
        sys.path[:] = before
    return scaling


@pytest.fixture
def scaling():
    return load()


@pytest.mark.mpi(ranks=[1, 2])
def test_ranks_measure_a_point_of_each_kind(comm, ranks):
    scaling, world = load(), Communicator(comm)
    for strategy in ("ddp", "dp", "zero1", "zero2", "fsdp", *(["ps"] if ranks > 1 else [])):
        points = scaling.measure(world, TASK | {"strategy": strategy})
        assert bool(points) == (comm.rank == 0)
        for point, mode in zip(points, ("strong", "weak"), strict=bool(points)):
            assert (point["mode"], point["ranks"]) == (mode, ranks)
            assert point["batch"] == 7 * (ranks if mode == "weak" else 1)
            assert point["seconds"] > 0 and point["alone"] > 0 and point["head"] >= 0
            assert len(point["profile"]) == 3 and all(len(row) == 3 for row in point["profile"])
            told = scaling.predicted(point, TASK, NETWORKS["workstation"])
            computed = sum(sum(row[:2]) for row in point["profile"])
            assert told["predicted"] >= computed / 2 and told["parts"]
    world.release()


def points_of(ranks, strategy="ddp"):
    """As they would be measured where a fifth of the work is serial."""
    profile = [[1e-3, 2e-3, 1e-3]] * 3
    for count in ranks:
        for mode in ("strong", "weak"):
            seconds = 9e-3 / amdahl(count, 0.8) * (count if mode == "weak" else 1)
            yield {
                "mode": mode, "strategy": strategy, "ranks": count, "batch": 7, "samples": 7, "seconds": seconds,
                "alone": 9e-3, "profile": profile, "update": 1e-4, "head": 0.0, "ranks_per_node": count,
                "crowded": count > 4,
            }  # fmt: skip


def test_what_is_told(scaling, tmp_path, capsys, monkeypatch):
    file = tmp_path / "network.json"
    NETWORKS["workstation"].save(file)
    given = ["--model", TASK["model"], "--input", "12", "--classes", "5", "--batch", "7", "--network", str(file)]
    given += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(scaling, "measured_on", lambda count, task: list(points_of([count], task["strategy"])))
    assert scaling.main([*given, "--ranks", "1,2"]) == 0
    assert scaling.main([*given, "--ranks", "4,8", "--strategy", "ddp,zero1"]) == 0
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert len(content["points"]) == 12, "points of the first call are kept"
    assert all(p["apart"] == p["predicted"] / p["seconds"] - 1 for p in content["points"])
    assert "ddp, strong: Amdahl: serial share 20.00%, never faster than 5 times" in said
    assert "Karp-Flatt 2: 20.0%, 4: 20.0%" in said and "more ranks than cores" in said
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        scaling.main([*given, "--batch", "8"])
    assert "given {'model': 'mlp:12,9,5', 'batch': 8}: give another --out" in capsys.readouterr().err


def test_ranks_that_fail_say_why(scaling):
    with pytest.raises(RuntimeError, match=r"(?s)ddp on 1 ranks: .*unknown model 'none'"):
        scaling.measured_on(1, TASK | {"strategy": "ddp", "model": "none"})


def test_what_makes_no_sense_is_one_message(scaling, capsys):
    for wrong, message in (
        (["--strategy", "ddpp"], "--strategy ddpp: expected one or several of ddp, dp, ps, zero1, zero2, fsdp"),
        (["--model", "vgg17"], "unknown model 'vgg17'"),
        (["--ranks", "0"], "ranks are numbers from 1 to"),
        (["--network", "nope"], "--network nope: neither a file nor one of"),
    ):
        with pytest.raises(SystemExit) as end:
            scaling.main(wrong)
        assert end.value.code == 2 and message in capsys.readouterr().err
