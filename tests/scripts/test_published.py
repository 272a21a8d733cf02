"""Published figures beside predicted ones: golden numbers, how near the models come, and the page in docs."""

import os
from pathlib import Path

import pytest

from parallel.planning.transformer import A100, Transformer, step, training_days

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def published():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts" / "experiments"))
        import published

        yield published


@pytest.fixture(scope="module")
def rows(published):
    return {(row.source.split(",")[0], row.what): row for row in published.everything(None)}


def value(rows, what):
    (found,) = [row for (_, name), row in rows.items() if name == what]
    return found.predicted


def test_golden_numbers(rows):
    for stages, speedup in ((2, 1.94), (4, 3.66), (8, 6.56)):  # K M / (M + K - 1), M = 32
        assert value(rows, f"speedup of a transformer, K = {stages}, M = 32") == pytest.approx(speedup, abs=0.005)
    assert value(rows, "seconds of a step, 1008 G, 3,072 GPUs") == pytest.approx(102.4, abs=0.05)
    assert value(rows, "seconds of a step, 145.6 G, 1,536 GPUs") == pytest.approx(24.8, abs=0.05)
    assert value(rows, "GPT-3, 175 G, 300 G tokens, 1,024 GPUs") == pytest.approx(33.9, abs=0.05)
    assert value(rows, "1 T, 450 G tokens, 3,072 GPUs") == pytest.approx(83.9, abs=0.05)
    assert value(rows, "idle share, 1F1B") == pytest.approx(0.2431, abs=5e-5)
    assert value(rows, "idle share, ZB-1p") == pytest.approx(0.1585, abs=5e-5)


def test_how_near_the_models_come(rows):
    """A change of a model that moves it away from what was published is seen."""
    apart = {row.what: row.difference for row in rows.values() if row.difference is not None}
    far = {what: difference for what, difference in apart.items() if abs(difference) > 0.16}
    assert far.keys() <= {
        "90 epochs on 256 P100",
        "idle share, ZB-2p",
        "with 64-way data parallelism",
    }, far
    assert all(row.note for row in rows.values()), "every row says what it rests on"
    assert len(apart) > 30


def test_formulas_of_transformers():
    model = Transformer(96, 12_288, 96)  # GPT-3
    assert model.parameters == pytest.approx(175e9, rel=0.005)
    s, b, h, a, t = 2048, 1, 12_288, 96, 8
    assert model.activations(b) == s * b * h * (34 + 5 * a * s / h)
    assert model.activations(b, t) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert model.activations(b, t, sequence=True) == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    assert model.activations(b, t, sequence=True, selective=True) == 34 * s * b * h / t
    full, less = (step(model, A100, 64, 1, 8, 8, 3, selective) for selective in (False, True))
    assert less.seconds < full.seconds and full.bubble == pytest.approx(
        (full.seconds - full.update) / (1 + 64 * 3 / 7), rel=0.02
    )
    assert step(model, A100, 64).sums == 0
    assert training_days(1e9, 1e9, 1, 8e18 / 86_400) == pytest.approx(1.0)


@pytest.mark.exhaustive
def test_the_page_is_what_the_command_writes(published, tmp_path, capsys):
    data = os.environ.get("RINGPROP_DATA", "")
    if not (Path(data) / "profiles" / "vgg16.csv").is_file():
        pytest.skip("needs profiles in the directory that RINGPROP_DATA names")
    assert published.main(["--out", str(tmp_path)]) == 0
    text = (tmp_path / "published.md").read_text()
    assert text == (ROOT / "docs" / "published.md").read_text(), "run: python scripts/experiments/published.py"
    assert "<svg" in (tmp_path / "published.svg").read_text() and "7-1" in capsys.readouterr().out


def test_without_profiles_rows_are_left_out_and_told(published, tmp_path):
    (row,) = published.plans(tmp_path)
    assert row.note == "left out: no profiles of vgg16, alexnet in the data" and row.note in published.markdown(
        [row, published.Row("a", "b", 1.0, 1.1, "s", "c")]
    )
