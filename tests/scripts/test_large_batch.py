"""The experiments: large batches, on the embedded digits, and --linear-scaling, which it uses; fewer bytes."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from nn.optim import optimizers
from nn.training.schedules import MomentumCorrection
from parallel.command import factory
from parallel.command.options import Options

SCRIPTS = Path(__file__).parents[2] / "scripts" / "experiments"


@pytest.fixture
def large_batch(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import large_batch

    return large_batch


def schedule(**given):
    """(rate of a step, callbacks) of options, with ten batches an epoch."""
    return factory.schedule(Options(lr=0.1, epochs=20, **given), range(10))


def test_one_flag_scales_the_rate_and_warms_up():
    rates, hooks = schedule(batch=256, linear_scaling=64)
    assert rates(0) == 0.1 and rates(50) == rates(199) == 0.4, "from eta to k eta over 5 epochs"
    assert all(math.isclose(rates(i + 1) - rates(i), 0.3 / 50) for i in range(50)), "in equal increments a step"
    assert not hooks
    rates, _ = schedule(batch=256, linear_scaling=64, schedule="cosine:warmup=2")
    assert rates(0) == 0.1 and rates(20) == 0.4 and rates(110) < 0.3 and rates(200) == 0
    rates, _ = schedule(batch=256, linear_scaling=64, schedule="multistep:at=10,warmup=0")
    assert rates(0) == 0.4 and math.isclose(rates(100), 0.04)
    assert schedule(batch=256) == (None, [])
    with pytest.raises(ValueError, match="what is 'base_batch=64'"):  # rules.py says it in better words
        schedule(linear_scaling=64, schedule="constant:base_batch=8")
    _, hooks = schedule(batch=256, linear_scaling=64, optimizer="lars")
    assert isinstance(hooks[0], MomentumCorrection) and optimizers.LARS.rate_inside


@pytest.mark.exhaustive
def test_the_experiment_can_be_done_in_pieces(large_batch, monkeypatch, tmp_path, capsys):
    short = dataclasses.replace(large_batch.QUICK, epochs=7, limit=300, schedule="multistep:at=6")
    monkeypatch.setattr(large_batch, "QUICK", short)
    out = tmp_path / "out"
    arguments = ["--quick", "--out", str(out)]
    large_batch.main([*arguments, "--seeds", "1", "--only", "small"])
    large_batch.main([*arguments, "--seeds", "1"])
    large_batch.main([*arguments, "--seeds", "2", "--only", "gradual"])
    runs = json.loads((out / "large_batch.json").read_text())["runs"]
    names = list(large_batch.cases(short))
    assert [(r["case"], r["seed"]) for r in runs] == [(name, 0) for name in names] + [("gradual warm-up", 1)]
    assert all(len(r["errors"]) == 7 and 0 <= min(r["errors"]) <= max(r["errors"]) <= 100 for r in runs)
    assert (out / "large_batch.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.count("small batch, seed 0: ") == 1, "what is done is not done again"
    assert f"{names[1]:18}     256" in said


def test_tables_and_warm_ups_are_what_they_say(large_batch):
    runs = [
        {"case": case, "seed": seed, "batch": 64, "errors": [50.0, *([last] * 3)], "seconds": 1.0}
        for case, lasts in (("small batch", (10.0, 11.0)), ("no warm-up", (12.0, 12.5)))
        for seed, last in enumerate(lasts)
    ]
    lines = large_batch.table(runs).splitlines()
    assert "10.50 +- 0.71" in lines[1] and "+0.00" in lines[1]
    assert "12.25 +- 0.35" in lines[2] and "+1.75" in lines[2]
    rates = large_batch.constant_at_first(lambda step: 3.2, 0.1, 5)
    assert [rates(step) for step in (0, 4, 5)] == [0.1, 0.1, 3.2]
    small, *large = large_batch.cases(large_batch.FULL).values()
    assert (small.batch, small.linear_scaling) == (64, None) and {o.batch for o in large} == {768}


def test_wrong_arguments_are_one_message(large_batch, tmp_path, capsys):
    def refused(*arguments) -> str:
        with pytest.raises(SystemExit) as end:
            large_batch.main([*map(str, arguments)])
        assert end.value.code
        return capsys.readouterr().err

    assert "argument --seeds: expected a whole number of at least 1" in refused("--seeds", 0)
    assert "no such case; there are small batch, " in refused("--only", "tiny")
    assert "is not in nowhere" in refused("--data-dir", "nowhere", "--out", tmp_path)
    content = json.dumps({"options": {"small batch": {"batch": 3}}, "runs": []})
    (tmp_path / "large_batch.json").write_text(content)
    assert "has runs with other options" in refused("--quick", "--out", tmp_path)
    assert (tmp_path / "large_batch.json").read_text() == content
    import fewer_bytes  # the experiment beside it

    for wrong, message in (
        (["--methods", "zip"], "unknown compressor 'zip'"),
        (["--model", "mpl:3"], "did you mean 'mlp'"),
        (["--batch", "1"], "cannot be cut among 2 ranks"),
        (["--epochs", "0"], "argument --epochs: expected a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            fewer_bytes.options(wrong)
        assert message in capsys.readouterr().err


def test_every_method_is_drawn_once_in_colour_and_named(monkeypatch):
    """Names of lines that end in the same place do not overlap."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fewer_bytes

    rows = [
        {
            "method": method,
            "bytes": 1000,
            "accuracy": 0.98,
            "spread": [0.975, 0.985],
            "sent": [1, 2],
            "losses": [1, 0.1],
        }
        for method in [*fewer_bytes.METHODS, fewer_bytes.CONTROL + fewer_bytes.FORGETS]
    ]
    chosen = vars(fewer_bytes.options([]))
    figure = fewer_bytes.draw(rows, chosen)
    figure.draw_without_rendering()
    assert sorted(text.get_text() for axes in figure.axes for text in axes.texts) == sorted(r["method"] for r in rows)
    for axes in figure.axes:
        assert sum(line.get_marker() != "None" for line in axes.lines) == len(axes.texts) < len(axes.lines)
        boxes = [text.get_window_extent() for text in axes.texts]
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i]), axes.texts[i].get_text()
            assert box.x1 <= figure.bbox.x1
    left, _ = fewer_bytes.draw_bytes(rows, chosen).axes
    assert [text.get_text() for text in left.get_yticklabels()] == [row["method"] for row in rows]
