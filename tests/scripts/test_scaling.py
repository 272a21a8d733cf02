"""scripts/experiments/scaling.py: what ranks measure, and what is told of it: prediction, laws, picture."""

import json
import sys
from pathlib import Path

import pytest

from collectives import Communicator
from collectives.pricing.networks import NETWORKS
from parallel.planning.laws import amdahl

EXPERIMENTS = Path(__file__).parents[2] / "scripts" / "experiments"
TASK = {"model": "mlp:12,9,9,5", "input": [12], "classes": 5, "batch": 16, "steps": 4}


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


@pytest.mark.mpi(ranks=[2])
def test_ranks_measure_a_point_of_each_kind(comm, ranks):
    """And what is predicted of it is of the same stages and micro-batches as what ran."""
    scaling, world = load(), Communicator(comm)
    for strategy in ("ddp", "dp", "ps", "tensor", "1f1b", "interleaved", "pipedream"):
        points = scaling.measure(world, TASK | {"strategy": strategy})
        assert bool(points) == (comm.rank == 0)
        for point, mode in zip(points, ("strong", "weak"), strict=bool(points)):
            assert (point["mode"], point["ranks"]) == (mode, ranks)
            assert point["batch"] == 16 * (ranks if mode == "weak" else 1)
            stages = {"1f1b": 2, "interleaved": 4, "pipedream": 2}.get(strategy, 1)
            assert len(point["cuts"]) == stages - 1
            parts = {"1f1b": 8, "interleaved": 8, "ps": 1, "tensor": 1}.get(strategy, ranks)
            assert point["samples"] == point["batch"] / parts, "of a micro-batch, a rank, or a step"
            assert len(point["turns"]) == 2 and all(turn["seconds"] > 0 <= turn["head"] for turn in point["turns"])
            assert all(len(turn["profile"]) == 5 and len(turn["profile"][0]) == 3 for turn in point["turns"])
            told = scaling.predicted(point, TASK, NETWORKS["workstation"])
            computed = min(sum(sum(row[:2]) for row in turn["profile"]) for turn in point["turns"])
            assert told["predicted"] >= computed / 2 and told["parts"]
    world.release()


@pytest.mark.mpi(ranks=[2])
def test_layers_and_steps_are_told_by_one_statistic(comm, ranks, monkeypatch):
    """By a clock that only layers move, now faster, now slower: what is predicted from them is what was measured."""
    import nn

    scaling, world, calls = load(), Communicator(comm), 0
    seconds, forward = 0.0, nn.Linear.forward
    scaling.TURNS = 2

    def slow(self, *given):
        nonlocal calls, seconds
        seconds += (1.0, 2.0, 2.0, 3.0)[calls // 3 % 4]  # three layers of a step, four kinds of steps
        calls += 1
        return forward(self, *given)

    monkeypatch.setattr(nn.Linear, "forward", slow)
    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    for point in scaling.measure(world, TASK | {"strategy": "ddp", "steps": 16}):
        told = scaling.predicted(point, TASK, NETWORKS["workstation"])
        assert [turn["seconds"] for turn in point["turns"]] == [6.0, 6.0], "of the slowest rank"
        assert all(turn["head"] == 0 for turn in point["turns"]), "there is nothing but layers"
        assert told["apart"] == pytest.approx(0, abs=0.01)
    world.release()


def test_every_strategy_that_is_predicted_can_be_measured(scaling):
    """But those whose steps differ, as ranks meet now and then only."""
    from parallel.strategies.estimate import LOCAL_UPDATE, NAMES
    from parallel.strategies.pipeline import option

    assert set(scaling.STRATEGIES) == {*NAMES, "tensor"} - {*LOCAL_UPDATE}
    assert set(scaling.PIPELINES) == set(option.NAMES)


def test_what_is_told_is_the_median_of_turns_and_their_span(scaling):
    (point, _) = points_of([2])
    turns = [point["turns"][0] | {"seconds": seconds} for seconds in (5e-3, 1e-3, 2e-3)]
    told = scaling.predicted(point | {"turns": turns}, TASK, NETWORKS["workstation"])
    said = told["predicted"]
    assert told["seconds"] == 2e-3
    assert (told["least"], told["apart"], told["most"]) == pytest.approx(
        (said / 5e-3 - 1, said / 2e-3 - 1, said / 1e-3 - 1)
    )


def points_of(ranks, strategy="ddp"):
    """As they would be measured where a fifth of the work is serial."""
    profile = [[1e-3, 2e-3, 1e-3]] * 5
    for count in ranks:
        for mode in ("strong", "weak"):
            seconds = 9e-3 / amdahl(count, 0.8) * (count if mode == "weak" else 1)
            yield {
                "mode": mode, "strategy": strategy, "ranks": count, "batch": 16, "samples": 16, "micro": 0, "cuts": [],
                "turns": [{"seconds": seconds, "profile": profile, "update": 1e-4, "head": 0.0}],
                "ranks_per_node": count, "crowded": count > 4,
            }  # fmt: skip


def test_what_is_told(scaling, tmp_path, capsys, monkeypatch):
    file = tmp_path / "network.json"
    NETWORKS["workstation"].save(file)
    given = ["--model", TASK["model"], "--input", "12", "--classes", "5", "--batch", "16", "--network", str(file)]
    given += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(scaling, "measured_on", lambda count, task: list(points_of([count], task["strategy"])))
    assert scaling.main([*given, "--ranks", "1,2"]) == 0
    assert scaling.main([*given, "--ranks", "4,8", "--strategy", "ddp,zero1"]) == 0
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert len(content["points"]) == 12, "points of the first call are kept"
    assert all(p["apart"] == p["predicted"] / p["seconds"] - 1 for p in content["points"]), "of a single turn"
    assert "ddp, strong: Amdahl: serial share 20.00%, never faster than 5 times" in said
    assert "Karp-Flatt 2: 20.0%, 4: 20.0%" in said and "more ranks than cores" in said
    assert "predictions are within 15% of what was measured" in said
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    for other, told in ((["--batch", "8"], "'batch': 8, 'lab': None"), (["--lab", "100"], "'batch': 16, 'lab': 100")):
        with pytest.raises(SystemExit):
            scaling.main([*given, "--ranks", "2", *other])
        words = f"given {{'model': 'mlp:12,9,9,5', 'input': [12], 'classes': 5, {told}}}: give another --out"
        assert words in capsys.readouterr().err


def test_what_is_faster_than_its_share_is_in_the_picture(scaling):
    points = [scaling.predicted(point, TASK, NETWORKS["workstation"]) for point in points_of([1, 2])]
    quick = [point | {"seconds": point["seconds"] / point["ranks"] ** 3} for point in points]
    for axes in scaling.draw(quick, "quick").axes:
        assert max(max(line.get_ydata(), default=0) for line in axes.lines) <= axes.get_ylim()[1] > 200


def test_a_row_that_is_far_off_says_of_what_it_is_made_and_whether_turns_agree(scaling):
    point = {"apart": 0.14, "least": -0.5, "most": 0.5, "crowded": False, "predicted": 2.0}
    point["parts"] = {"computation": 1.5, "push": 0.49, "pull": 0.01}
    assert scaling.marks(point) == []
    assert scaling.marks(point | {"crowded": True, "apart": -0.2, "least": -0.25, "most": -0.15}) == [
        "more ranks than cores", "beyond 15%: computation 1.5 s, push 490 ms",
    ]  # fmt: skip
    off = "turns differ by 60%, as where other work wants the cores"
    assert scaling.marks(point | {"apart": 0.2, "least": -0.3, "most": 0.3})[1:] == [off]


def test_what_has_too_few_layers_is_left_out(scaling, tmp_path, capsys, monkeypatch):
    """And the others are measured."""
    NETWORKS["workstation"].save(tmp_path / "network.json")
    monkeypatch.setattr(scaling, "measured_on", lambda count, task: list(points_of([count], task["strategy"])))
    given = ["--model", TASK["model"], "--input", "12", "--classes", "5", "--batch", "16", "--out", str(tmp_path)]
    assert scaling.main([*given, "--ranks", "4", "--strategy", "interleaved,ddp"]) == 0
    assert (
        "interleaved on 4 ranks\nleft out: mlp:12,9,9,5 has 5 layers, too few for 8 stages" in capsys.readouterr().out
    )
    assert {p["strategy"] for p in json.loads((tmp_path / "scaling.json").read_text())["points"]} == {"ddp"}


@pytest.mark.parametrize(("file", "status"), [("scaling.json", 2), ("network.json", 1)])
def test_files_of_results_that_lie_are_named(scaling, tmp_path, capsys, file, status):
    for text in ("", "[]", '{"task": 3}'):
        (tmp_path / file).write_text(text)
        with pytest.raises(SystemExit) as end:
            scaling.main(["--out", str(tmp_path)])
        assert end.value.code == status and f"error: {tmp_path / file}" in capsys.readouterr().err


def test_ranks_that_fail_say_why(scaling):
    with pytest.raises(RuntimeError, match=r"(?s)ddp on 1 ranks: .*unknown model 'none'"):
        scaling.measured_on(1, TASK | {"strategy": "ddp", "model": "none", "lab": None})


def test_what_makes_no_sense_is_one_message(scaling, capsys):
    for wrong, message in (
        (["--strategy", "ddpp"], "--strategy ddpp: expected all, or one or several of ddp, dp, ps, zero1, zero2, fsdp"),
        (["--model", "vgg17"], "unknown model 'vgg17'"),
        (["--ranks", "0"], "ranks are numbers from 1 to"),
        (["--lab", "100", "--ranks", "1,2"], "--lab: give --ranks of 2 and more"),
        (["--network", "nope"], "--network nope: no network named"),
    ):
        with pytest.raises(SystemExit) as end:
            scaling.main(wrong)
        assert end.value.code == 2 and message in capsys.readouterr().err
