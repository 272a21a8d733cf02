"""What the strategies declare holds: what they can is what one process computes, what they cannot is refused."""

import dataclasses
import os
from functools import cache

import numpy as np
import pytest
from equality import BATCH, CLIPS, MODELS, OPTIMIZERS, SEED, batches, cnn, difference

import nn
from parallel.command.options import Options
from parallel.command.parsing import parse
from parallel.settings import OptionError
from parallel.strategies import AS_ONE, STRATEGIES, build_trainer
from parallel.strategies.declaration import ALL, NEVER_TOGETHER, Supports

DRAWN = 8 * int(os.environ.get("RINGPROP_FUZZ", 1))
EXACT = {
    "none": "none",
    "topk": "topk:1",
    "threshold": "threshold:0",
    "dgc": "dgc:1,momentum=0",
    "powersgd": "powersgd:64",
}


def train(comm, options, network, optimizer, steps=3):
    """(trainer after some steps, losses) as the options say."""
    from collectives import Communicator

    make = build_trainer
    many = make(options, network, nn.CrossEntropyLoss(), optimizer, Communicator(comm))
    return many, [many.step(*batch, accumulate=options.accumulate) for batch in batches("mlp", many.shard, steps)]


def convolutional():
    """Without normalisation, so that it may be computed in parts."""
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(108, 16), nn.ReLU()
    return nn.Network(nn.Sequential(*layers, nn.Linear(16, 10)), (8, 8, 1), np.float64)


def branches():
    """Two of them, for three ranks."""
    two = nn.Parallel(nn.Conv2d(1, 3, 3), nn.Conv2d(1, 2, 3))
    return nn.Network(nn.Sequential(two, nn.ReLU(), nn.Flatten(), nn.Linear(180, 10)), (8, 8, 1), np.float64)


@cache
def one_process(model, optimizer, clip):
    """(parameters, losses) of the steps in one process."""
    build = MODELS[model] if isinstance(model, str) else model
    one = nn.Trainer(build(), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]), SEED)
    losses = [one.step(*batch) for batch in batches("mlp", (0, 1), 3)]
    return one.flat_parameters, losses


def assert_as_one_process(comm, given, model="mlp", optimizer="adam", clip=0):
    if given["strategy"] == "owt" and model == "mlp":
        model = convolutional
    build = MODELS[model] if isinstance(model, str) else model
    options = Options(batch=BATCH, seed=SEED, **given)
    parameters, losses = one_process(model, optimizer, clip)
    many, found = train(comm, options, build(), OPTIMIZERS[optimizer](CLIPS[clip]))
    case = f"{given}, {optimizer}, {CLIPS[clip]}"
    np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=case)
    many.check_replicas()
    alone = many.alone()
    assert alone is None or difference(alone.flat_parameters, parameters) < 1e-12, case
    many.close()
    many.communicator.release()


@pytest.mark.mpi(ranks=3)
def test_every_declared_combination_is_what_one_process_computes(comm):
    for strategy in AS_ONE:
        can = STRATEGIES[strategy].supports
        for method in (name for name in can.compress if name in EXACT):
            for more in ({}, {"accumulate": 3}) if can.parts else ({},):
                optimizer = "sgd" if method == "dgc" else "adam"
                assert_as_one_process(comm, {"strategy": strategy, "compress": EXACT[method], **more}, "mlp", optimizer)
        if can.reproducible:
            assert_as_one_process(comm, {"strategy": strategy, "reproducible": 5})
        if can.parts:
            assert_as_one_process(comm, {"strategy": strategy, "accumulate": 3})
        for mesh in ("pipeline=3", "data=3,pipeline=1") if "pipeline" in can.axes else ():
            assert_as_one_process(comm, {"strategy": strategy, "mesh": mesh})
        if "tensor" in can.axes:
            assert_as_one_process(comm, {"strategy": strategy, "mesh": "tensor=3"})
        for mesh, model in ("space=3", cnn), ("branch=3", branches):
            if mesh.partition("=")[0] in can.axes:
                assert_as_one_process(comm, {"strategy": strategy, "mesh": mesh}, model)
                how = {"compress": "none", "accumulate": 1 if model is cnn else 3}
                assert_as_one_process(comm, {"strategy": strategy, "mesh": mesh, **how}, model)
        if can.synchronized and can.parts:  # else over micro-batches
            assert_as_one_process(comm, {"strategy": strategy}, cnn)


@pytest.mark.mpi(ranks=3)
def test_methods_that_leave_something_out_keep_ranks_alike_and_send_less(comm):
    for strategy in ("zero1", "zero2", "fsdp"):
        for method, least in ("fp16", 3.5), ("qsgd:7", 10), ("terngrad", 20):
            options = Options(batch=BATCH, seed=SEED, strategy=strategy, compress=method, unit=0.004)
            one = nn.Trainer(MODELS["mlp"](), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
            losses = [one.step(*batch) for batch in batches("mlp", (0, 1), 3)]
            many, found = train(comm, options, MODELS["mlp"](), nn.SGD(0.1))
            np.testing.assert_allclose(found, losses, rtol=0.1)
            assert found[1:] != losses[1:], "control: something is left out"
            many.check_replicas()
            sent = many.bytes_sent()
            assert sent["bytes_sent"] * least < sent["bytes_dense"], (strategy, method, sent)
            many.close()


@pytest.mark.mpi(ranks=3)
def test_drawn_combinations_are_what_one_process_computes(comm):
    rng = np.random.default_rng(int(os.environ.get("RINGPROP_FUZZ", 1)))
    for _ in range(DRAWN):
        strategy = str(rng.choice(AS_ONE))
        given, can = {"strategy": strategy}, STRATEGIES[strategy].supports
        ways = ["plain", "compress", *(["reproducible"] if can.reproducible else [])]
        way = rng.choice(ways) if can.parts else "pipeline"
        optimizer, clip = str(rng.choice(["momentum", "nesterov", "adam", "lars", "lamb"])), int(rng.integers(3))
        if way == "reproducible":
            given["reproducible"] = int(rng.integers(3, 10))
            clip, optimizer = (0, "adam") if can.norms else (clip, optimizer)
        elif way == "pipeline":
            given["pipeline"] = f"{rng.choice(['gpipe:recompute', '1f1b:', 'zb-h1:'])},micro={rng.integers(1, 6)}"
        else:
            given["accumulate"] = int(rng.integers(1, 4))
        if way == "compress" and "none" in can.compress:
            given["compress"] = "none"
        if strategy == "ps":
            given["server_place"] = str(rng.choice(["dedicated", "workers"]))
            given["servers"] = int(rng.integers(1, 3))
        if strategy == "tensor":
            given["tensor"] = str(rng.choice(["pairs", "width", "sequence"]))
        if strategy == "owt":
            given["owt"] = str(rng.choice(["all", "turns", "shares", "features"]))
        if strategy in ("zero1", "zero2", "fsdp"):
            given["unit"] = float(rng.choice([1e-6, 0.005, 1.0]))
        if strategy == "ddp" and way == "plain":
            given["node_memory"] = str(rng.choice(["on", "off"]))
        assert_as_one_process(comm, given, "mlp", optimizer, clip)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_not_declared_is_refused_with_its_reason(strategy):
    """On the command line, in time; as the declaration says."""
    from parallel.command.factory import prepare

    fitting = ["--strategy", strategy, *(["--optimizer", "lbfgs"] if strategy == "sandblaster" else [])]
    halves = {"pipeline": "data=2,pipeline=2", "tensor": "data=2,tensor=2"}  # where two ranks have the same part
    ranks = ["--ranks", "4", "--mesh", halves[strategy]] if strategy in halves else ["--ranks", "3"]
    for method in ALL:
        options = [*fitting, "--compress", method, *ranks, "--limit", "60", "--model", "mlp:64,9,9,10"]
        why = STRATEGIES[strategy].supports.reason_against(method)
        assert bool(why) == (method not in STRATEGIES[strategy].supports.compress)
        if why:
            with pytest.raises(OptionError, match="compress") as error:
                prepare(parse(options))
            assert why in str(error.value)
        else:
            prepare(parse(options))
    asked = {
        "accumulate": ("--accumulate", "2"),
        "reproducible": ("--reproducible", "4"),
        "sync_batch_norm": ("--sync-batch-norm",),
        "mixed": ("--dtype", "mixed"),
        "elastic": ("--elastic", "shrink:min=1"),
    }
    for name, words in asked.items():
        if why := STRATEGIES[strategy].supports.reason_against(None, name):
            with pytest.raises(OptionError) as error:
                prepare(parse([*fitting, *words, "--ranks", "3", "--limit", "60", "--model", "mlp:64,9,9,10"]))
            assert why in str(error.value), (strategy, name)
    values = {"accumulate": ["2"], "reproducible": ["4"], "sync_batch_norm": [], "compress": ["none"]}
    for pair, why in NEVER_TOGETHER.items():
        flags = [word for name in pair for word in ["--" + name.replace("_", "-"), *values[name]]]
        with pytest.raises(OptionError) as error:
            parse([*fitting, *flags])
        assert why in str(error.value)


def test_mixed_precision_is_refused_where_no_strategy_declares_it(monkeypatch):
    from parallel.command.factory import prepare

    options = ["--dtype", "mixed", "--limit", "60", "--ranks", "2", "--strategy", "zero1"]
    prepare(parse(options))
    monkeypatch.setitem(STRATEGIES, "zero1", dataclasses.replace(STRATEGIES["zero1"], supports=Supports()))
    with pytest.raises(
        OptionError,
        match="--dtype mixed cannot be combined with --strategy zero1: ranks cannot agree to skip an overflowed step",
    ):
        prepare(parse(options))
