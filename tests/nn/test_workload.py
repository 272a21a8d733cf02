"""The workload report: counts by hand, the published table, the arithmetic, and that nothing is allocated."""

import runpy
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from conftest import PATIENCE

from nn.analysis.workload import count, report
from nn.core.network import Network
from nn.layers.activations import Tanh
from nn.models import build

SCRIPT = Path(__file__).parents[2] / "scripts" / "workload.py"
PUBLISHED, NOTES, agrees, comparison, connections_1998, totals, training_time = (
    runpy.run_path(str(SCRIPT))[name]
    for name in ("PUBLISHED", "NOTES", "agrees", "comparison", "connections_1998", "totals", "training_time")
)


def test_counts_by_hand():
    rows = {row.path: row for row in count(build("lenet5-1998", (28, 28, 1), 10))}
    first, second, fc = rows["0"], rows["3"], rows["7"]
    assert (first.weights, first.parameters, first.forward) == (150, 156, 28 * 28 * 150)
    assert first.backward == first.forward, "the gradient of the images is not needed"
    assert (second.weights, second.forward, second.backward) == (2400, 10 * 10 * 2400, 2 * 10 * 10 * 2400)
    assert (fc.weights, fc.parameters, fc.forward, fc.backward) == (48_000, 48_120, 48_000, 96_000)
    assert first.activation == 28 * 28 * 6 * 4 and rows["6"].activation == 0
    double = count(build("lenet5-1998", (28, 28, 1), 10, "float64"))
    assert double[0].activation == 2 * first.activation


def test_only_the_first_layer_saves_an_input_gradient():
    network = build("resnet20", (32, 32, 3), 10)
    saved = [row.path for row in count(network) if row.forward and row.backward == row.forward]
    assert saved == ["0"]
    forward, backward = (sum(getattr(row, way) for row in count(network)) for way in ("forward", "backward"))
    assert 1.95 * forward < backward < 2 * forward


def test_attention_and_tied_weights():
    rows = {row.path: row for row in count(build("transformer:8,2,1,1", (6,), 10))}
    attention = rows["2.0.body.1"]
    assert attention.forward == 4 * 6 * 8 * 8 + 2 * 6 * 6 * 8
    assert (attention.weights, attention.parameters) == (4 * 64, 4 * 64 + 4 * 8)
    assert (rows["4"].weights, rows["4"].parameters, rows["4"].forward) == (0, 0, 6 * 8 * 10)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_table(name):
    """Every figure agrees at its digits but those that NOTES explains, and those are exactly these."""
    spec, in_shape, classes, published = PUBLISHED[name]
    counted = totals(build(spec, in_shape, classes))
    differing = {i for i in range(6) if not agrees(counted[i], published[i])}
    expected = {"LeNet-5": {1, 4, 5}, "OverFeat fast": {3}, "VGG-16": {3}, "GoogLeNet v1": {1, 5}}
    assert differing == expected.get(name, set())
    assert bool(differing) == (name in NOTES)


def test_swapped_cells_are_each_others():
    rows = {name: totals(build(*PUBLISHED[name][:3])) for name in ("OverFeat fast", "VGG-16")}
    assert agrees(rows["VGG-16"][3], PUBLISHED["OverFeat fast"][3][3])
    assert agrees(rows["OverFeat fast"][3], PUBLISHED["VGG-16"][3][3])


def test_lenet_connections():
    counts = connections_1998()
    assert sum(counts.values()) == 340_908  # as the paper of 1998 states
    assert agrees(sum(counts.values()), "341k")
    assert agrees(counts["C5"] + counts["F6"], "58k")
    assert agrees(sum(counts.values()) - counts["C5"] - counts["F6"], "283k")


def test_agreement_is_at_the_published_digits():
    assert agrees(14_710_464, "14.7M") and agrees(724_406_816, "724M") and agrees(3_857_973_248, "3.9G")
    assert not agrees(14_810_464, "14.7M") and not agrees(357_600, "283k") and not agrees(2_801, "2.8M")


def test_comparison_marks_and_explains():
    text = comparison()
    assert text.count("124M *") == text.count("130M *") == 1
    for name in NOTES:
        assert f"* {name}: " in text
    assert max(map(len, text.splitlines())) <= 120


def test_training_time():
    lines = training_time().splitlines()
    assert "29,952 TFLOP an epoch" in lines[1] and "6.7 h" in lines[1]
    assert "11.5 GMAC" in lines[2]
    assert "79,067 s = 22 h" in lines[3]


def test_report_allocates_no_parameters():
    tracemalloc.start()
    text = report(build("vgg16", (224, 224, 3), 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20
    last = text.splitlines()[-1].split()
    assert last[:4] == ["in", "all", "1000", "138,344,128"] and last[5] == "15,470,264,320"


def test_report_of_a_single_layer():
    network = Network(Tanh(), (3,))
    assert "in all" in report(network)


def test_script():
    def run(*arguments):
        return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=PATIENCE)

    table = run()
    assert table.returncode == 0 and "VGG-16" in table.stdout and "22 h" in table.stdout
    layers = run("cnn", "--input", "8,8,1")
    assert layers.returncode == 0 and "Conv2d(1, " in layers.stdout


def test_wrong_words_are_refused_by_name(monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPT))
    for line, words in (
        ("vgg61", "did you mean 'vgg16'"),
        ("cnn --input x", "argument --input: expected whole numbers of at least 1, such as 8,8,1; given 'x'"),
        ("cnn --input 8,0,1", "argument --input: expected whole numbers of at least 1"),
        ("cnn --input 8,,1", "given '8,,1'"),
        ("cnn --classes 0", "argument --classes: expected a whole number from 1 to 1,073,741,824, given '0'"),
        ("cnn --classes 1.5", "given '1.5'"),
        ("--classes 5", "--classes needs a model: alexnet, "),
        ("--input x", "argument --input: "),
    ):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *line.split()])
        with pytest.raises(SystemExit, match="2"):
            script["main"]()
        assert words in " ".join(capsys.readouterr().err.split())
