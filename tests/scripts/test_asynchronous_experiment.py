"""The experiment on asynchrony: a short run of it, and what it makes of results."""

import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "experiments"


@pytest.fixture
def asynchronous(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import asynchronous

    return asynchronous


@pytest.mark.exhaustive
def test_a_short_run_measures_ways_and_draws(asynchronous, tmp_path, capsys):
    assert asynchronous.main(["--quick", "--seconds", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "asynchronous.json").read_text())["rows"]
    ways = [(row["way"], row["slow"]) for row in rows]
    quick = ["one process", "ddp", "Downpour, Adagrad"]
    assert ways == [(quick[0], False), *((way, slow) for way in quick[1:] for slow in (False, True))]
    for row in rows:
        assert len(row["seconds"]) == len(row["accuracy"]) >= 1 and row["images_per_second"] > 0
        assert all(0 <= accuracy <= 1 for accuracy in row["accuracy"])
        assert (row["staleness"] is not None) == row["way"].startswith("Downpour")
    assert (tmp_path / "asynchronous.png").read_bytes().startswith(b"\x89PNG")
    assert "| Downpour, Adagrad |" in capsys.readouterr().out


def test_the_table_says_what_is_kept(asynchronous):
    def row(way, slow, rate, accuracy, late=None):
        found = {"way": way, "slow": slow, "images_per_second": rate, "seconds": [0.0, 1.0, 2.0, 3.0]}
        return found | {"accuracy": accuracy, "staleness": late}

    rows = [
        row("one process", False, 500.0, [0.1, 0.92, 0.8, 0.95]),
        row("ps, async", False, 1000.0, [0.1, 0.91, 0.92, 0.95], 1.0),
        row("ps, async", True, 660.0, [0.1, 0.5, 0.8, 0.9], 2.25),
        row("EASGD", False, 900.0, [0.1, 0.2, 0.3, 0.4]),
    ]
    lines = asynchronous.table(rows).splitlines()
    assert lines[2] == "| one process | 500 |  |  | 95.0% |  | 3.0 |  |  |"
    assert lines[3] == "| ps, async | 1,000 | 660 | 66% | 95.0% | 90.0% | 1.0 | 3.0 | 2.2 |"
    assert lines[4] == "| EASGD | 900 |  |  | 40.0% |  |  |  |  |"


def test_every_way_has_a_panel_among_those_that_wait_or_not(asynchronous):
    """And a way that does not reach the level has no point among the seconds until it is reached."""
    rows = [
        {"way": way, "slow": slow, "seconds": [0.0, 1.0, 2.0], "accuracy": [0.1, *2 * [0.45 + 0.5 * (way != "EASGD")]]}
        for way in asynchronous.WAYS for slow in (False, True) if not (slow and way == asynchronous.ONE)
    ]  # fmt: skip
    figure = asynchronous.draw(rows, vars(asynchronous.options([])))
    waiting, independent, until = figure.subfigs
    for part, ways in ((waiting, asynchronous.WAITING), (independent, asynchronous.INDEPENDENT)):
        assert [axes.get_title() for axes in part.axes] == list(ways)
        for axes in part.axes:
            assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 3
    texts = until.axes[0].texts
    assert len(texts) == 1 + 2 * 9 + 1 and {text.get_text() for text in texts} == {"1.0", " not reached"}
    assert asynchronous.smooth([1.0, 9.0, 2.0, 3.0, 4.0]) == [2.0, 2.5, 3.0, 3.5, 3.0]
    kept = json.loads(asynchronous.text(rows, {"workers": 2}))
    assert kept == {"options": {"workers": 2}, "rows": rows}


def test_wrong_arguments_are_one_message(asynchronous, capsys):
    for wrong, message in (
        (["--workers", "1"], "argument --workers: expected a whole number of at least 2, given '1'"),
        (["--slow", "0.5"], "argument --slow: expected a number from 1 to 1e+06, given '0.5'"),
        (["--ways", "fast"], "no way 'fast'; there are one process, ddp"),
        (["--model", "mpl:3"], "did you mean 'mlp'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            asynchronous.options(wrong)
        assert message in capsys.readouterr().err
