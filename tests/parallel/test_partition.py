"""PipeDream's partition: published cases, and every plan of small networks tried out."""

import os
import random
from functools import cache
from math import inf, prod
from pathlib import Path

import pytest

from parallel.planning.partition import partition
from parallel.planning.profile import LayerProfile, read_profile
from parallel.strategies.pipeline.checking import check

FIVE = [
    LayerProfile(str(i), t / 3, 2 * t / 3, a, w)
    for i, (t, a, w) in enumerate(zip([4, 4, 4, 1, 1], [8, 6, 2, 1, 1], [0.1, 0.2, 0.3, 20, 10], strict=True))
]


def profile(name):
    path = Path(os.environ.get("RINGPROP_DATA", "")) / "profiles" / f"{name}.csv"
    if not path.is_file():
        pytest.skip(f"needs profiles/{name}.csv in the directory that RINGPROP_DATA names")
    return read_profile(path)


def test_five_layers():
    eight = partition(FIVE, 8, 10.0)
    assert eight.seconds == 2.0 and eight.data_parallel == pytest.approx(5.355)
    assert [stage[:3] for stage in eight.stages] == [(0, 2, 7), (3, 4, 1)]
    assert str(eight) == (
        "2 stages on 8 workers, 7-1: layers 0-2 on 7, layers 3-4 on 1; 2 s a mini-batch, 2.68 times data parallelism"
    )
    four = partition(FIVE, 4, 10.0)
    assert four.seconds == 4.0 and four.data_parallel == pytest.approx(4.59)


@pytest.mark.parametrize("gigabytes", [1.0, 1.25, 3.1])
def test_vgg16_on_eight_workers(gigabytes):
    """Published: seven ranks for the convolutions, one for the fully connected layers."""
    assert partition(profile("vgg16"), 8, gigabytes * 1e9).replicas == (7, 1)


@pytest.mark.parametrize(
    "name, workers, bandwidth, replicas",
    [("vgg16", 4, 1e9, (3, 1)), ("alexnet", 16, 1.25e9, (15, 1)), ("vgg16", 16, 1.25e9, (13, 2, 1))],
)
def test_published_program(name, workers, bandwidth, replicas):
    """What the authors' program answers; for VGG-16 on 16 workers 15-1 is published."""
    plan = partition(profile(name), workers, bandwidth, counting="program")
    assert plan.replicas == replicas
    if workers == 4:
        assert round(plan.seconds, 4) == 0.2055 and round(plan.data_parallel / plan.seconds, 2) == 2.84
        assert plan.stages[1].first == 17  # the program's node 19: it counts from 1, and the input first


def test_published_program_on_two_levels():
    """Machines within a node send their parts of the gradients at the same time."""
    plan = partition(profile("vgg16"), (4, 4), (10e9, 1.25e9), counting="program")
    assert round(plan.seconds, 4) == 0.0671 and plan.replicas == (12, 1, 2, 1)
    assert round(plan.data_parallel, 4) == 0.1354


# ------------------------------------------------------------------ every plan tried out


def cuts(n, m):
    """Every way to cut n layers into stages and to give m units to them: [(end, units), ...]."""
    for end in range(1, n):
        for units in range(1, m):
            for rest in cuts(n - end, m - units):
                yield [(end, units)] + [(end + e, u) for e, u in rest]
    yield [(n, m)]


def best_of_all(layers, sizes, speeds, memory, counting):
    """The formulas written out for each plan there is."""
    ranks = prod(sizes)

    @cache
    def unit(level, i, j, before, copies):
        """Seconds of layers i ... j-1 on one unit."""
        if level == 0:
            versions = (ranks - 1 - before) // copies + 1
            inputs = layers[i - 1].output if i else 0
            need = versions * (inputs + sum(layer.output + layer.parameters for layer in layers[i:j]))
            return sum(layer.forward + layer.backward for layer in layers[i:j]) if need <= memory else inf
        return min(slowest(level - 1, i, j, plan, before, copies) for plan in cuts(j - i, sizes[level - 1]))

    def slowest(level, i, j, plan, before, copies):
        below, speed = prod(sizes[:level]), speeds[level]
        worst, begin, used = 0.0, i, 0
        for end, m in plan:
            end += i
            seconds = unit(level, begin, end, before + copies * used * below, copies * m)
            weights = sum(layer.parameters for layer in layers[begin:end])
            if counting == "paper":
                worst = max(worst, seconds / m, 2 * (m - 1) * weights / speed / m)
                worst = max(worst, 2 * layers[begin - 1].output / speed if begin > i else 0)
            else:
                within = sizes[level - 1] if level and begin == i else 1
                worst = max(worst, (seconds + 4 * (m - 1) * weights / speed / m / within) / m)
                if begin > i:
                    worst = max(worst, 2 * layers[begin - 1].output / speed / m)
                    worst = max(worst, 2 * layers[end - 1].output / speed / m if end < len(layers) else 0)
            begin, used = end, used + m
        return worst

    return unit(len(sizes), 0, len(layers), 0, 1)


@pytest.mark.parametrize("counting", ["paper", "program"])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 1, 2)])
def test_no_plan_is_better(sizes, counting):
    draw = random.Random(str((sizes, counting)))
    for _ in range(12):
        number = lambda: draw.choice([0, draw.random(), 10 * draw.random()])
        layers = [LayerProfile("", number(), number(), number(), number()) for _ in range(draw.randint(1, 5))]
        speeds = [draw.choice([0.5, 2.0, 20.0]) for _ in sizes]
        memory = draw.choice([inf, 60.0 * draw.random()])
        best = best_of_all(layers, sizes, speeds, memory, counting)
        if best == inf:
            with pytest.raises(ValueError, match="fits into"):
                partition(layers, sizes, speeds, memory, counting)
            continue
        plan = partition(layers, sizes, speeds, memory, counting)
        assert plan.seconds == pytest.approx(best, rel=1e-12)
        assert sum(plan.replicas) == prod(sizes) and all(stage.bytes <= memory for stage in plan.stages)
        ends = [-1] + [stage.last for stage in plan.stages]
        assert [stage.first for stage in plan.stages] == [end + 1 for end in ends[:-1]] and ends[-1] == len(layers) - 1
        unlimited = partition(layers, sizes, speeds, counting=counting).seconds
        assert unlimited <= plan.seconds * (1 + 1e-12) and unlimited <= plan.data_parallel * (1 + 1e-12)


def test_a_memory_limit_costs_speed_and_is_kept():
    """Two workers: all layers on both need 48.6 bytes; with less there are two stages, slower; with 33 nothing."""
    assert [stage.bytes for stage in partition(FIVE, 2, 10.0, memory=48.6).stages] == [pytest.approx(48.6)]
    less = partition(FIVE, 2, 10.0, memory=48.5)
    assert (less.replicas, less.seconds) == ((1, 1), 8.0) and less.data_parallel == 7.0
    assert [stage.versions for stage in less.stages] == [2, 1]
    assert [stage.bytes for stage in less.stages] == pytest.approx([2 * (0.3 + 14), 6 + 30.3 + 4])
    with pytest.raises(ValueError, match="no plan for 5 layers on 2 workers fits into 33 bytes a worker"):
        partition(FIVE, 2, 10.0, memory=33.0)


def test_two_hundred_layers_on_sixteen_workers():
    """Flat, and four nodes of four; a work of seconds at most, which the suite's own time shows."""
    draw = random.Random(1)
    layers = [LayerProfile("", draw.random(), draw.random(), draw.random(), draw.random()) for _ in range(200)]
    total = sum(layer.forward + layer.backward for layer in layers)
    for sizes, speeds in ((16, 1e9), ((4, 4), (1e9, 1e9))):
        assert partition(layers, sizes, speeds).seconds == pytest.approx(total / 16, rel=1e-6)


def test_the_schedule_keeps_what_the_plan_promises():
    """Where nothing is sent a full pipeline takes the planned seconds a mini-batch, on the replicas planned."""
    layers = [LayerProfile("", 1.0, 2.0, 0, 1e9) for _ in range(4)]
    plan = partition(layers, 4, 1.0)
    assert plan.replicas == (1, 1, 1, 1)
    plan = partition([layer._replace(parameters=0.0) for layer in layers[:3]] + layers[3:], 4, 1.0)
    seconds = lambda a: (
        sum(layers[i][{"F": 1, "B": 2}[a.kind]] for i in range(plan.stages[a.stage][0], plan.stages[a.stage][1] + 1))
        if a.kind in "FB"
        else 0.0
    )
    spans = [check("pipedream", 4, m, seconds, replicas=plan.replicas).makespan for m in (48, 96)]
    assert (spans[1] - spans[0]) / 48 == pytest.approx(plan.seconds)
    peaks = check("pipedream", 4, 48, seconds, replicas=plan.replicas).peaks
    assert peaks == [stage.versions for stage in plan.stages for _ in range(stage.replicas)]


# ------------------------------------------------------------------ mistakes


HEAD = "layer,forward_ms,backward_ms,output_bytes,parameter_bytes\n"


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "expected columns layer, forward_ms, backward_ms, output_bytes, parameter_bytes; layer, "),
        ("layer,forward_ms,backward_ms,output_bytes\n", "; parameter_bytes not there"),
        (HEAD, "no layers"),
        (HEAD + "a,1,2,3,4\nb,1,two,3,4\n", "line 3: backward_ms must be a number, given 'two'"),
        (HEAD + "a,1,2,3\n", "line 2: parameter_bytes must be a number, given None"),
        (HEAD + "a,1,2,-3,4\n", r"layer 0 \(a\): output must be at least 0, given -3.0"),
        (HEAD + "a,nan,2,3,4\n", r"layer 0 \(a\): forward must be at least 0, given nan"),
        (HEAD + "a,0,0,3,4\nb,0,0,3,4\n", "expected layers that take some time, given 0 ms for all"),
        (HEAD + "a" * 200_000 + ",1,2,3,4\n", "expected a table in CSV, as UTF-8: field larger than"),
        (HEAD + "\udcff,1,2,3,4\n", "expected a table in CSV, as UTF-8: .* can't decode byte 0xff"),
    ],
)
def test_a_wrong_profile_is_refused_with_file_and_line(tmp_path, text, why):
    path = tmp_path / "layers.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=f"layers.csv.*{why}"):
        read_profile(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "of a spreadsheet"])
def test_a_profile_is_read(tmp_path, mark):
    path = tmp_path / "layers.csv"
    path.write_text(mark + HEAD + '"conv, 3 x 3",1.5,2,30,40\n')
    assert read_profile(path) == [
        LayerProfile("conv, 3 x 3", 0.0015, 0.002, 30.0, 40.0, weight_gradient=0.001, saved=30.0, tensor_sums=0.5)
    ]


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="workers: expected numbers of at least 1, given 0"):
        partition(FIVE, 0, 1.0)
    with pytest.raises(ValueError, match="bandwidth: expected a number above 0 for each of 2 levels, given 1"):
        partition(FIVE, (2, 2), 1.0)
    with pytest.raises(ValueError, match="counting: expected one of paper, program, given 'book'"):
        partition(FIVE, 2, 1.0, counting="book")
    with pytest.raises(ValueError, match="3 bytes"):
        partition(FIVE, 2, 1.0, memory=3)
