"""scripts/estimate.py: tables, pictures, JSON, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.pricing.networks import NETWORKS

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def estimate(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import estimate

    return estimate


def test_help_needs_nothing_heavy():
    """NumPy is not imported for it: it answers at once."""
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import estimate
try:
    estimate.main(["--help"])
except SystemExit as end:
    assert not end.code
assert "numpy" not in sys.modules and "matplotlib" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--strategy" in done.stdout and "--ranks" in done.stdout


def test_a_strategy_on_65536_ranks(estimate, tmp_path, capsys):
    out, picture = tmp_path / "found.json", tmp_path / "scaling.svg"
    given = ["resnet50", "--strategy", "ddp", "--ranks", "1..65536", "--network", "gpu-100g", "--flops", "10T"]
    more = ["--batch", "64", "--samples", "115M", "--price", "2", "--json", str(out), "--draw", str(picture)]
    assert estimate.main([*given, *more]) == 0
    told = json.loads(out.read_text())
    rows = told["predictions"]
    assert [row["ranks"] for row in rows] == [2**k for k in range(17)]
    assert rows[0]["strong_efficiency"] == 1 and rows[-1]["strong_efficiency"] < 0.01
    assert all(row["weak_efficiency"] > 0.9 for row in rows), "100 Gbit/s and 64 images hide a ResNet's gradients"
    assert "65,536  ddp" in capsys.readouterr().out and "<svg" in picture.read_text()


@pytest.mark.parametrize("strategy", ["interleaved", "zb-v", "dualpipev", "pipedream"])
def test_pipelines_on_65536_ranks_have_no_more_stages_than_the_network(estimate, strategy, capsys):
    given = ["lenet5", "--strategy", strategy, "--ranks", "1,34,65536", "--network", "gigabit"]
    assert estimate.main(given) == 0
    said = capsys.readouterr().out
    assert f"65,536  {strategy} " in said and "1 micro-batches" not in said


def test_a_few_samples_a_second_are_not_rounded_away(estimate, capsys):
    assert estimate.main(["vgg16", "--strategy", "ddp", "--ranks", "1,2"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[4] for line in said.splitlines()[-2:]] == ["0.53", "1.1"]
    assert "all ranks on one node" in said and "1,048,576" not in said


def test_ranks_are_placed_on_a_topology(estimate, capsys):
    def step(*more):
        words = ["mlp:784,1024,10", "--mesh", "data=2,pipeline=2", "--flops", "1T", "--batch", "64"]
        words += ["--strategy", "1f1b", "--network", "nodes:nodes=2,ranks=2,bandwidth=1e8"]
        assert estimate.main([*words, *more]) == 0
        said = capsys.readouterr().out
        assert "network: 4 hosts" in said
        return float(said.splitlines()[-1].split()[3])

    assert step() > 1.3 * step("--placement", "0,2,1,3")  # pipelines over the thin cables, replicas in a node
    with pytest.raises(SystemExit):
        estimate.main(["mlp:784,10", "--ranks", "4", "--flops", "1T", "--network", "torus:dims=nowhere"])
    assert "is no number, nor sides" in capsys.readouterr().err


def test_all_strategies_of_one_number_of_ranks(estimate, tmp_path, capsys):
    file = tmp_path / "network.json"
    NETWORKS["gigabit"].save(file)
    assert estimate.main(["mlp:784,512,10", "--ranks", "6", "--network", str(file), "--memory", "1MiB"]) == 0
    said = capsys.readouterr().out
    for name in ("ddp", "zero1", "zero2", "fsdp", "dp", "ps", "ddp data=3,tensor=2"):
        assert f"    6  {name} " in said
    assert "does not fit" in said and " pipeline=" in said
    assert estimate.main(["mlp:784,512,10", "--strategy", "gpipe", "--mesh", "pipeline=2", "--recompute"]) == 0
    said = capsys.readouterr().out
    assert "gpipe:recompute pipeline=2" in said and "   16  gpipe:recompute data=8,pipeline=2" in said


def test_strategies_that_are_meshes(estimate, capsys):
    given = ["mlp:784,512,512,10", "--network", "gigabit", "--ranks", "1,8"]
    for strategy, words in (("zero3", "fsdp  "), ("tensor", "ddp tensor=8"), ("hybrid", "=2")):
        assert estimate.main([*given, "--strategy", strategy]) == 0
        one, eight = capsys.readouterr().out.splitlines()[-2:]
        assert " serial " in one and words in eight


def test_a_picture_has_all_points_that_fit_and_no_others(estimate, tmp_path, monkeypatch):
    """Where ranks share the update, too, the weak efficiency is above 100%."""
    from parallel.planning import pictures

    drawn, draw = [], pictures.draw_scaling
    monkeypatch.setattr(pictures, "draw_scaling", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    given = ["mlp:784,30,10", "--strategy", "ddp", "--ranks", "1,4,16", "--batch", "8"]
    given += ["--draw", str(tmp_path / "of.svg")]
    assert estimate.main(given) == 0
    for axes in drawn[0].axes[1:]:
        assert max(axes.lines[0].get_ydata()) <= axes.get_ylim()[1]
    assert max(drawn[0].axes[2].lines[0].get_ydata()) > 105
    assert estimate.main([*given, "--memory", "192kB"]) == 0
    assert list(drawn[1].axes[0].lines[0].get_xdata()) == [4, 16]
    with pytest.raises(SystemExit):
        estimate.main([*given, "--memory", "9kB"])
    assert len(drawn) == 2


def test_a_map_has_no_strategy_where_nothing_fits(estimate, tmp_path, monkeypatch):
    from parallel.planning import pictures

    drawn, draw = [], pictures.draw_map
    monkeypatch.setattr(pictures, "draw_map", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    given = ["mlp:784,30,10", "--ranks", "1,4", "--batch", "64", "--memory", "195kB"]
    assert estimate.main([*given, "--map", str(tmp_path / "map.svg")]) == 0
    (axes,) = drawn[0].axes
    texts = [text.get_text() for text in axes.texts[:-1]]
    assert texts[0::2] == ["serial"] * 2 + [""] * 5, "one rank keeps a few samples only"
    assert texts[1::2] == ["ddp\n1x1x4"] * 6 + [""], "and four do not keep 4,096"
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "nothing fits"


def test_the_map(estimate, tmp_path, capsys):
    picture = tmp_path / "map.png"
    assert estimate.main(["mlp:784,512,10", "--ranks", "1,8,64", "--map", str(picture), "--network", "gigabit"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "map in" in capsys.readouterr().out


def test_what_makes_no_sense_is_one_message(estimate, tmp_path, capsys):
    lies = tmp_path / "lies.json"
    NETWORKS["gigabit"].save(lies)
    fields = json.loads(lies.read_text())
    lies.write_text(json.dumps(fields | {"gamma": -1.0}))
    for wrong, message in (
        (["vgg17"], "unknown model 'vgg17': did you mean 'vgg16'?"),
        (["vgg16", "--ranks", "0"], "ranks are numbers from 1 to 16,777,216"),
        (["vgg16", "--ranks", "8..2"], "given '8..2'"),
        (["vgg16", "--network", "nope"], "--network nope: no network named 'nope'"),
        (["vgg16", "--network", str(lies)], f"{lies}: not a network description (ValueError: Network("),
        (["vgg16", "--strategy", "foo"], "--strategy foo: expected one of all, ddp"),
        (["vgg16", "--mesh", "pipeline=2"], "is for one --strategy"),
        (["vgg16", "--strategy", "ddp", "--mesh", "pipeline=2"], "ddp has no stages"),
        (["vgg16", "--strategy", "1f1b", "--mesh", "pipeline=3", "--ranks", "4"], "does not multiply to 4 ranks"),
        (["vgg16", "--strategy", "ddp", "--mesh", "data=2", "--ranks", "4"], "data=2 does not multiply to 4 ranks"),
        (["vgg16", "--recompute"], "--recompute is of pipelines: name one with --strategy, such as 1f1b, not all"),
        (["vgg16", "--strategy", "ps", "--servers", "9", "--ranks", "4"], "9 servers leave no worker of 4 ranks"),
        (["vgg16", "--memory", "much"], "expected a number of bytes above 0, such as 16GiB, given 'much'"),
        (["vgg16", "--flops", "0"], "--flops: expected a number above 0, such as 115M or 2e9, given '0'"),
        (["vgg16", "--samples", "x"], "--samples: expected a number above 0"),
        (["vgg16", "--map", "map"], "--map: expected a file that ends in .png, .svg or .pdf, given 'map'"),
        (["vgg16", "--draw", str(tmp_path / "no" / "x.png")], f"there is no directory {tmp_path / 'no'} for x.png"),
        (["vgg16", "--price", "3"], "--price needs --samples"),
        (["vgg16", "--profile", "missing.csv"], "missing.csv"),
        (["vgg16", "--batch", "0"], "expected a whole number from 1 to 1,073,741,824, given '0'"),
    ):
        with pytest.raises(SystemExit) as end:
            estimate.main(wrong)
        said = capsys.readouterr().err
        assert end.value.code == 2 and message in said, said
