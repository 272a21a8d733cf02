"""scripts/estimate.py on one number of ranks: layers measured, strategies priced, one named with its command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nn
from collectives.pricing.networks import NETWORKS
from parallel.command.parsing import parse
from parallel.planning.job import Axes, Job
from parallel.planning.layer_times import STEP, measure_layers, random_batch, typical
from parallel.planning.profile import LayerProfile, read_profile, write_profile
from parallel.strategies import axes
from parallel.strategies.estimate import estimate
from parallel.strategies.pipeline.option import arguments, schedule

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import estimate

    return estimate


@pytest.fixture
def profile(tmp_path):
    """Two convolutions that take long, and a layer with a gigabyte of weights that takes none."""
    layers = [
        LayerProfile("conv", 1.0, 2.0, 1e9, 1e6, 1.0, 1e6, 0.5),
        LayerProfile("conv", 1.0, 2.0, 1e6, 1e6, 1.0, 1e6, 0.5),
    ]
    layers += [LayerProfile("linear", 0.01, 0.02, 4e3, 1e9, 0.01, 4e3, 0.5)]
    path = tmp_path / "profile.csv"
    path.write_text(write_profile(layers))
    return path


@pytest.mark.parametrize("spec", ["mlp:12,9,5", "cnn", "transformer:8,2,1,1", "resnet20"])
def test_layers_are_measured(spec):
    """Every child of the root, both halves of backward; the trainer is as before, and the sum is a step's."""
    shape, classes = {"transformer:8,2,1,1": ((6,), 11), "cnn": ((8, 8, 1), 4), "resnet20": ((8, 8, 3), 4)}.get(
        spec, ((12,), 5)
    )
    network = nn.models.build(spec, shape, classes)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1, momentum=0.9))
    before = trainer.digest()
    times = measure_layers(trainer, *random_batch(network, 4), repeats=2)
    assert trainer.digest() == before
    assert len(times.layers) == len(network.root.children())
    assert sum(layer.parameters for layer in times.layers) == network.layout.count * 4
    for layer in times.layers:
        assert layer.forward > 0 and 0 <= layer.weight_gradient <= layer.backward
        assert layer.weight_gradient == 0 or layer.parameters
    assert times.update > 0 and times.head >= 0
    x, y = random_batch(network, 4)
    assert np.isfinite(trainer.step(x, y)), "layers are their own again"


def test_parts_of_a_step_add_up_to_what_it_usually_takes():
    """The fastest of each would leave 6 of 10 seconds to nothing; the slowest and the fastest step do not count."""
    one, other = {STEP: 10.0, ("0", "forward"): 6.0, ("1", "forward"): 2.0}, {STEP: 10.0, ("0", "forward"): 2.0}
    other["1", "forward"] = 6.0
    slow, fast = ({STEP: seconds, ("0", "forward"): 1.0, ("1", "forward"): 1.0} for seconds in (99.0, 3.0))
    found = typical([{STEP: 500.0}, slow, one, other, fast])
    assert found == {STEP: 10.0, ("0", "forward"): 4.0, ("1", "forward"): 4.0}


def test_micro_batches_are_measured_as_they_add_up(monkeypatch):
    """Of three in a step the figures of one, but for the update; backward in two halves adds up gradients, too."""
    from parallel.planning import layer_times

    now, whole, halved = [0.0], [], []

    def ticks():
        now[0] += 1.0
        return now[0]

    class Watched(nn.Trainer):
        def step(self, x, y, total=None, accumulate=1):
            loss = super().step(x, y, total, accumulate)
            whole.append((accumulate, self.gradients.copy()))
            return loss

    def watched(trainer, x, y, terms, parts):
        original(trainer, x, y, terms, parts)
        halved.append(trainer.gradients.copy())

    original = layer_times.halves
    monkeypatch.setattr(layer_times, "halves", watched)
    monkeypatch.setattr(layer_times.time, "perf_counter", ticks)
    network = nn.models.build("mlp:12,9,5", (12,), 5)
    trainer = Watched(network, nn.CrossEntropyLoss(), nn.SGD(0.0))
    times = measure_layers(trainer, *random_batch(network, 6), 1, 3)
    assert [parts for parts, _ in whole] == [3, 3]
    assert np.allclose(halved[-1], whole[-1][1], rtol=1e-5) and np.abs(halved[-1]).max() > 0
    assert [layer.forward for layer in times.layers] == [1.0] * 3, "a tick a call, three calls a step"
    assert times.update == 1.0 and times.head > 0
    assert times.layers[0].output == 2 * 9 * 4, "bytes of one micro-batch"


def test_a_plan_from_a_profile(plan, profile, tmp_path, capsys):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    given = ["mlp:784,30,10", "--ranks", "4", "--network", "gigabit", "--ranks-per-node", "1", "--batch", "64"]
    more = ["--profile", str(profile), "--profile-batch", "16", "--json", str(out), "--draw", str(picture)]
    assert plan.main([*given, *more]) == 0
    said = capsys.readouterr().out
    told = json.loads(out.read_text())
    assert "stages without flush: 2 stages on 4 workers, 3-1: layers 0-1 on 3, layers 2-2 on 1" in said
    assert told["predictions"][0]["strategy"] == "pipedream", "it sends no gigabyte"
    assert {row["strategy"] for row in told["predictions"]} >= {"ddp", "zero1", "fsdp", "dp", "ps", "1f1b"}
    weak = {row["strategy"]: row["weak_efficiency"] for row in told["predictions"]}
    assert weak["ddp"] < 0.3 < 0.6 < weak["pipedream"] == max(weak.values()), "each row has its own"
    assert told["best"] in said and " times as fast as " in said
    words = told["best"].split()
    options = parse(words[2:])
    assert (options.ranks, options.batch, options.model) == (4, 64, "mlp:784,30,10")
    assert "<svg" in picture.read_text()


def test_memory_decides(plan, profile, capsys):
    given = ["mlp:7,30,10", "--ranks", "8", "--network", "infiniband", "--profile", str(profile), "--batch", "64"]
    given += ["--input", "7"]
    assert plan.main([*given, "--memory", "1.6GB", "--optimizer", "adam", "--profile-batch", "8"]) == 0
    said = capsys.readouterr().out
    assert "add --data, of samples of shape (7,) and 10 classes" in said
    assert "ddp does not fit: it would take 4" in said and "--strategy fsdp --optimizer adam" not in said
    assert plan.main([*given, "--memory", "1MB"]) == 1
    assert "nothing fits into 1 MB a rank: the least is " in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_network_is_measured_here(plan):
    network = plan.measured_network(2, seconds=1e-4)
    assert network.ranks_per_node == 2 and network.inside.points and network.barriers


def test_a_plan_of_what_is_measured_here(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "measured_network", lambda ranks: NETWORKS["workstation"])
    file = tmp_path / "measured.csv"
    given = [
        "mlp:784,30,10",
        "--ranks",
        "2",
        "--batch",
        "32",
        "--measure",
        "--repeats",
        "2",
        "--save-profile",
        str(file),
    ]
    assert plan.main(given) == 0
    said = capsys.readouterr().out
    assert "network: measured here, " in said
    assert "python scripts/train.py --model mlp:784,30,10 --data mnist --batch 32 --ranks 2 --strategy " in said
    assert [layer.name for layer in read_profile(file)][1] == "1 Linear(784 30)"


def test_the_command_is_what_train_py_takes(plan):
    options = plan.parser().parse_args(["mlp:784,30,20,10", "--ranks", "4", "--batch", "64"])
    layers = [LayerProfile(str(i), 1.0, 2.0, 10.0, 10.0, 1.0, 10.0, 0.5) for i in range(6)]
    job, network = Job(layers, 16, 64), NETWORKS["workstation"]
    for strategy, mesh, words in (
        ("ddp", Axes(4), "--strategy ddp"),
        ("ddp", Axes(2, 1, 2), "--strategy ddp --mesh data=2,tensor=2"),
        ("1f1b", Axes(2, 2), "--strategy pipeline --pipeline 1f1b:micro=8,cuts=3 --mesh data=2,pipeline=2"),
        ("fsdp", Axes(2, 1, 2), "--strategy fsdp --mesh data=2,tensor=2"),
        ("1f1b", Axes(1, 2, 2), "--pipeline 1f1b:micro=8,cuts=3 --mesh pipeline=2,tensor=2"),
        ("gpipe", Axes(1, 4), "--pipeline gpipe:micro=16,recompute,cuts="),
        ("interleaved", Axes(2, 2), "--pipeline interleaved:micro=8,chunks=2,cuts="),
    ):
        found = estimate(job, strategy, mesh, network, recompute=strategy == "gpipe")
        said = plan.command(found, options)
        assert plan.trainable(found, options) and words in said
        given = parse(said.split()[2:])
        if mesh.pipeline > 1:
            sizes = axes.sizes(given, 4)
            assert (sizes["data"], sizes["pipeline"]) == (mesh.data, mesh.pipeline)
            assert schedule(given).cuts == list(found.cuts)
    halved = plan.parser().parse_args(["mlp:784,30,20,10", "--ranks", "4", "--batch", "64", "--dtype", "mixed"])
    found = estimate(job, "ddp", Axes(4), network)
    assert plan.trainable(found, halved) and parse(plan.command(found, halved).split()[2:]).dtype == "mixed"
    end = LayerProfile("6", 0.01, 0.02, 10.0, 1e11, 0.01, 10.0, 0.5)
    found = estimate(Job([*layers[:3], end], 16, 64), "pipedream", Axes(4), network)
    said = plan.command(found, options)
    assert (
        plan.trainable(found, options)
        and "--strategy pipeline --pipeline pipedream:micro=4,replicas=3/1,cuts=3" in said
    )
    assert arguments(parse(said.split()[2:]), 1)["replicas"] == list(found.replicas)
    assert not plan.trainable(found, halved), "stages that are never flushed do not skip a step together"


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("mlp:64,9,10", ["--input", "8,8,1"], "--data digits"),
        ("lenet5", ["--optimizer", "adam"], "--data mnist"),
        ("vgg-small", ["--classes", "100"], "--data cifar100"),
        ("vgg-small", ["--input", "16,8,3", "--classes", "1000"], "--data synthetic:16x8x3"),
        ("transformer:32,2,1", ["--input", "16"], "--data stdlib --length 16"),
    ],
)
def test_the_command_names_data_that_the_network_takes(plan, model, more, words):
    """And not those of train.py's default, which have another shape; Adam has a rate of its own."""
    options = plan.parser().parse_args([model, *more, "--ranks", "2", "--node-memory", "off"])
    shape, classes = plan.samples_of(options)
    job = Job([LayerProfile("", 1.0, 2.0, 10.0, 10.0)] * 2, 1, 64)
    said = plan.command(estimate(job, "ddp", Axes(2), NETWORKS["workstation"]), options)
    assert f"{words} --batch" in said and said.count("--lr 0.001") == ("adam" in more)
    given = parse(said.split()[2:])
    assert given.node_memory == "off"
    if words.startswith(("--data digits", "--data synthetic", "--data stdlib")):  # there without a file
        data = nn.data.load(given.data, length=given.length)
        assert (data.in_shape, data.classes) == (shape, classes)


def test_what_makes_no_sense_is_one_message(plan, capsys):
    for wrong, message in (
        (["vgg17", "--ranks", "2"], "unknown model 'vgg17': did you mean 'vgg16'?"),
        (["vgg16", "--save-profile", "x"], "--save-profile writes what --measure measures: add --measure"),
        (["vgg16", "--measure", "--profile", "x"], "--profile says what --measure would measure"),
        (["mlp:784,10", "--ranks", "2", "--network", "nope", "--profile", "x"], "nope"),
    ):
        with pytest.raises(SystemExit) as end:
            plan.main(wrong)
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_tilde_in_a_flag_is_the_home_directory(tmp_path):
    """A shell expands it in --json ~/file, and leaves it in --json=~/file."""
    options = "mlp:12,9,5", "--input=12", "--classes=5", "--ranks=2", "--network=workstation", "--json=~/told.json"
    command = [sys.executable, str(SCRIPTS / "estimate.py"), *options]
    made = subprocess.run(command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "told.json").exists()
