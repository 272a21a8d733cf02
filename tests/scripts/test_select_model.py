"""Choosing options: what is tried, who chooses, and that the test data are looked at once."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "experiments"
SMALL = ["--model", "mlp:64,16,10", "--epochs", "3", "--limit", "200"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import select_model

    return select_model


def test_no_script_here_hides_a_module_of_python():
    """The directory of a program comes first where modules are looked for, before Python's own."""
    assert not {path.stem for path in SCRIPTS.glob("*.py")} & sys.stdlib_module_names


def test_a_grid_is_each_value_with_each(script):
    search = script.asked(
        ["lr=0.1,0.3", *SMALL, "nesterov=true,false", "model=mlp:64,8,10;mlp:64,10", "--momentum=0.9"]
    )
    assert [trial["lr"] for trial in search.values] == ["0.1"] * 4 + ["0.3"] * 4
    tried = [(o.lr, o.nesterov, o.model, o.momentum, o.epochs) for o in search.options]
    assert tried[0] == (0.1, True, "mlp:64,8,10", 0.9, 3) and tried[-1] == (0.3, False, "mlp:64,10", 0.9, 3)
    assert len(set(tried)) == 8


def test_a_random_search_is_drawn_by_the_seed(script):
    words = ["lr=0.001..1", "batch=8..64", "momentum=0,0.9", "--random", "200"]
    search = script.asked(words)
    rates = np.array([o.lr for o in search.options])
    assert len(rates) == 200 and 0.001 <= rates.min() < rates.max() <= 1
    assert 0.3 < (rates < 0.0316).mean() < 0.7, "evenly on a logarithmic scale"
    assert {o.momentum for o in search.options} == {0, 0.9} and min(o.batch for o in search.options) >= 8
    assert script.asked(words).values == search.values != script.asked([*words, "--seed", "1"]).values
    some = script.asked(["lr=0.1,0.2,0.3", "momentum=0,0.9", "--random", "4"]).values
    assert len({tuple(trial.values()) for trial in some}) == 4, "of a grid each at most once"


@pytest.mark.parametrize(
    "words, message",
    [
        (["lr"], "no option 'lr'"),
        ([], "nothing to choose from"),
        (["lrr=1,2"], "lrr=1,2: no option 'lrr': did you mean --lr?"),
        (["lr=1,1"], "expected values that differ"),
        (["lr=1,x"], "invalid float value: 'x'"),
        (["lr=0.1..1"], "lr=0.1..1: a range needs --random N"),
        (["lr=1..0.1", "--random", "2"], "expected LOW..HIGH"),
        (["optimizer=1..2", "--random", "2"], "expected LOW..HIGH"),
        (["seed=0,1"], "seed=0,1: all trials must be judged by the same samples"),
        (["ranks=1,2"], "ranks=1,2: --ranks says how a run is done"),
        (["nesterov=yes,no"], "nesterov is true or false"),
        (["lr=1,2", "--strategy", "fsdp"], "--strategy has no effect here"),
        (["lr=1,2", "--validation", "0"], "without validation data nothing can be chosen"),
        (["lr=1,2", "--random", "0"], "argument --random: expected a whole number of at least 1"),
        (["optimizer=sgd,adam", "--momentum", "0.9"], "--momentum has no effect with --optimizer adam"),
        (["model=mlp,mpl"], "--model=mpl: unknown model"),
        (["batch=16,32", "--out", "setup.cfg"], "setup.cfg is a file, no directory"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is(script, words, message, capsys):
    try:
        status = script.main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out and said.err.count("\n") == 1, said.err


def test_validation_chooses_and_the_test_data_are_looked_at_once(script, tmp_path, monkeypatch, capsys):
    import nn

    looked = []
    evaluate = nn.training.fit.evaluate

    def seen(trainer, loader):
        looked.append(loader.dataset)
        return evaluate(trainer, loader)

    monkeypatch.setattr(nn.training.fit, "evaluate", seen)  # of fit
    monkeypatch.setattr(nn, "evaluate", seen)
    words = ["lr=0.001,0.3,1e30", *SMALL, "--out", str(tmp_path / "one")]
    assert script.main(words) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "one" / "selection.json").read_text())
    scores = [row["score"] for row in found["trials"]]
    assert found["chosen"] == 2 and scores[1] > scores[0] and "trial 2, lr=0.3, validation accuracy" in said
    assert scores[2] is None and "lr=1e30: failed" in said
    assert f"test accuracy {found['test']['accuracy']:.2%}, looked at once" in said
    data = nn.data.load("digits", validation=0.1, limit=200)
    assert [np.array_equal(dataset.x, data.test.x) for dataset in looked].count(True) == 1
    assert np.array_equal(looked[-1].x, data.test.x), "after all else"
    trainer = nn.Trainer(nn.models.build("mlp:64,16,10", data.in_shape, 10), nn.CrossEntropyLoss(), nn.SGD(0.1))
    trainer.load_state_dict(nn.Checkpoints(tmp_path / "one").load("best")[0])
    assert evaluate(trainer, nn.Loader(data.test, 500, shuffle=False)) == found["test"]
    assert (tmp_path / "one" / "selection.png").read_bytes().startswith(b"\x89PNG")
    assert script.main([*words[:-1], str(tmp_path / "two"), "--ranks", "2"]) == 0
    again = json.loads((tmp_path / "two" / "selection.json").read_text())
    assert [row["score"] for row in again["trials"]] == scores and again["chosen"] == 2
    assert again["test"] == found["test"]
