"""--strategy auto: what is chosen of what was measured, what other options leave, and a run that goes on with it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import nn
from collectives.pricing.networks import NETWORKS
from nn.optim import clipping
from parallel.command import auto, sizes
from parallel.command.factory import Parts, prepare
from parallel.command.options import Options
from parallel.command.parsing import parse, resumed
from parallel.planning.choice import options_of
from parallel.planning.job import Job
from parallel.planning.profile import LayerProfile, count_layers
from parallel.settings import OptionError
from parallel.strategies.estimate import ranking

SLOW = NETWORKS["gigabit"].with_ranks_per_node(1)


def parts(model="mlp:64,12,12,12,10"):
    network = nn.models.build(model, (8, 8, 1), 10)
    return Parts(None, network, nn.CrossEntropyLoss(), nn.SGD(0.1))


def job(given, parameters, output=1e5):
    """Of layers that take alike long, with so many bytes of parameters and of activations each."""
    layers = [LayerProfile(path, 1e-3, 2e-3, output, parameters, 1e-3, output, 0.5) for path in "01234567"]
    return Job(layers[: len(given.network.root.layers)], 8, 32)


def chosen(job, ranks=4, network=SLOW, given=None, **options):
    given = given or parts()
    return auto.choose(Options(strategy="auto", batch=32, **options), given, job, network, ranks)


def test_the_fastest_that_fits_is_taken():
    given = parts()
    small, large = job(given, 1e3), job(given, 1e9)
    found, lines = chosen(small)
    assert found == {"strategy": "ddp", "mesh": None, "pipeline": None}
    assert "use ddp: " in "\n".join(lines) and " times as fast as " in lines[-1]
    found, lines = chosen(large)  # a gigabyte of gradients a layer, on a cable of a gigabit
    assert found["strategy"] == "pipeline" and found["mesh"] == "pipeline=4" and "cuts=" in found["pipeline"]
    best = next(p for p in ranking(large, 4, SLOW, stale=False) if p.axes.pipeline > 1)
    found, lines = chosen(large, memory_limit=f"{best.memory * 0.99:.0f}")
    assert found is None or found["mesh"] != "pipeline=4"
    found, lines = chosen(large, memory_limit="1MB")
    assert found is None and lines[-1].startswith("nothing fits into 1 MB a rank: the least is ")
    for found in chosen(small)[0], chosen(large)[0]:
        words = [word for name, value in found.items() if value for word in (f"--{name}", value)]
        parse([*words, "--ranks", "4"])


def test_a_model_of_which_only_a_part_fits_gets_several_axes():
    given = parts()
    whole = ranking(job(given, 1e6), 4, SLOW, stale=False)
    least = min(p.memory for p in whole if sum(size > 1 for size in p.axes) > 1)
    assert least < min(p.memory for p in whole if p.strategy == "ddp" and p.axes.data == 4)
    found, lines = chosen(job(given, 1e6), memory_limit=str(least * 1.01))
    assert found["mesh"], lines
    assert any(line.startswith("ddp does not fit: ") for line in lines)


def test_every_mesh_with_experts_that_is_tried_can_be_run():
    network = nn.models.build("transformer:16,4,1,experts=8,top=1", (16,), 9)
    given = Parts(None, network, nn.CrossEntropyLoss(), nn.SGD(0.1))
    found = [p for p in ranking(Job(count_layers(network, 8, 1e9, 1e-9), 8, 32), 8, SLOW) if p.axes.expert > 1]
    for prediction in found:
        options = auto.with_defaults(options_of(prediction, network))
        assert f"expert={prediction.axes.expert}" in options["mesh"]
        auto.check(Options(batch=32, **options), 8, given)
    assert {(p.strategy, p.axes.context > 1) for p in found} >= {("ddp", True), ("zero1", False), ("fsdp", False)}


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"reproducible": 4}, {"compress": "topk"}])
def test_other_options_leave_less(options):
    found, _ = chosen(job(parts(), 1e9), **options)
    assert found["strategy"] != "pipeline" and (found["mesh"] is None or "accumulate" in options)
    limit = {"memory_limit": "9.5GB"}  # a pipeline's ranks would have room
    without, _ = chosen(job(parts(), 1e9), **limit)
    assert without["mesh"]
    if "compress" in options:  # which only ddp has of the method, and ddp does not fit
        found, lines = chosen(job(parts(), 1e9), **options, **limit)
        assert found is None and lines[-1].startswith("of what fits nothing can be: ")


@pytest.mark.parametrize(
    ("words", "why"),
    {
        "--mesh data=2": "--mesh is for --strategy auto to choose: leave one of them out",
        "--pipeline 1f1b": "--pipeline is for",
        "--tensor width": "--tensor is for",
        "--owt turns": "--owt is for",
        "--consistency async": "--consistency is for",
        "--memory-limit much": "--memory-limit",
    }.items(),
)
def test_what_is_chosen_is_not_said_beside_it(words, why):
    with pytest.raises(OptionError, match=why):
        parse(["--strategy", "auto", *words.split()])


def test_a_limit_is_for_the_plan_only():
    with pytest.raises(OptionError, match="--memory-limit"):
        parse(["--memory-limit", "1GB"])
    read = sizes.read_bytes
    assert [read("16GiB"), read("2e9"), read("2e+09"), read("1.5 MB"), read("7")] == [2**34, 2e9, 2e9, 1.5e6, 7]
    for text in "", "GB", "0", "-1", "1XB", "1e999":
        with pytest.raises(ValueError, match="expected a number of bytes above 0"):
            read(text)


@pytest.mark.mpi(ranks=2)
def test_a_run_takes_the_plans_word_and_goes_on_with_it(comm, shared_tmp_path, monkeypatch, capsys):
    from collectives.pricing import measure
    from parallel.command.training_run import train

    monkeypatch.setattr(measure, "measure_network", lambda *given: NETWORKS["workstation"])
    common = {"model": "mlp:2,40,40,3", "data": "spirals", "batch": 30, "limit": 90, "pictures": False}
    for limit, expected in (None, None), ("18kB", "stages"), ("1kB", "nothing"):
        out = shared_tmp_path / str(limit)
        options = Options(**common, epochs=1, strategy="auto", memory_limit=limit, out=str(out))
        with np.errstate():
            if expected == "nothing":
                with pytest.raises(OptionError, match="nothing fits into 1 kB a rank: the least is "):
                    train(options)
                continue
            train(options)
            comm.Barrier()
            told = json.loads((out / "config.json").read_text())
            assert told["strategy"] != "auto"
            if expected:
                assert "=2" in told["mesh"]
            again = Options(**resumed({"resume": str(out), "epochs": 2}))
            assert [getattr(again, name) for name in ("strategy", "mesh", "pipeline")] == [
                told[name] for name in ("strategy", "mesh", "pipeline")
            ]
            assert train(again)["epochs"] == 2
    said = capsys.readouterr().out
    assert comm.rank or ("the plan for 2 ranks, 15 samples each:" in said and "\nuse " in said)
    assert comm.rank or "layers are counted, not measured" in said


def heavy_end(given, samples=8, batch=32):
    """Layers that take long and give much, and a last one with a gigabyte of weights: two stages, the first on all
    ranks but one."""
    there = len(given.network.root.layers) - 1
    layers = [LayerProfile(str(i), 20e-3, 40e-3, 2e6, 1e3, 20e-3, 1e5, 0.5) for i in range(there)]
    layers[-1] = layers[-1]._replace(output=1e4)
    return Job([*layers, LayerProfile("end", 1e-3, 2e-3, 1e4, 1e9, 1e-3, 1e4, 0.5)], samples, batch)


def test_stale_weights_only_where_they_are_asked_for():
    given = parts("mlp:64,12,10")
    found, _ = chosen(heavy_end(given), given=given)
    assert "pipedream" not in str(found)
    options = Options(strategy="auto:stale=1", batch=32)
    found, lines = auto.choose(options, given, heavy_end(given), SLOW, 4)
    last = len(given.network.root.layers) - 1
    assert found == {"strategy": "pipeline", "mesh": None, "pipeline": f"pipedream:micro=4,replicas=3/1,cuts={last}"}
    assert "use pipedream: " in "\n".join(lines)
    clipped = given._replace(optimizer=nn.SGD(0.1, clip=clipping.ClipGlobalNorm(1.0)))
    found, _ = auto.choose(options, clipped, heavy_end(given), SLOW, 4)
    assert "pipedream" not in str(found), "whose stages never know the whole gradient's norm"
    with pytest.raises(OptionError, match="fast=1"):
        prepare(Options(strategy="auto:fast=1"))


@pytest.mark.mpi(ranks=3)
def test_a_run_on_the_replicas_that_the_plan_says(comm, shared_tmp_path, monkeypatch):
    from collectives.pricing import measure
    from parallel.command.training_run import train

    monkeypatch.setattr(measure, "measure_network", lambda *given: SLOW)
    monkeypatch.setattr(auto, "measured_job", lambda options, parts, *given: heavy_end(parts, 10, options.batch))
    common = {"model": "mlp:2,40,40,3", "data": "spirals", "batch": 30, "limit": 90, "pictures": False}
    out = shared_tmp_path / "stale"
    train(Options(**common, epochs=1, strategy="auto:stale=1", out=str(out)))
    comm.Barrier()
    told = json.loads((out / "config.json").read_text())
    assert told["strategy"] == "pipeline" and told["pipeline"].startswith("pipedream:micro=3,replicas=2/1,cuts=")
    assert train(Options(**resumed({"resume": str(out), "epochs": 2})))["epochs"] == 2


def test_one_process_has_no_choice(tmp_path):
    from parallel.command import training_run

    options = Options(strategy="auto")
    assert training_run.choose_strategy(options, parts(), None, print).strategy == "ddp"
    assert auto.chosen(options, parts(), SimpleNamespace(size=1), print).strategy == "ddp"
    assert options.strategy == "auto", "which nothing changes"
