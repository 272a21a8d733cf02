"""bench.py: suites are found, rows are well-formed, nothing breaks where PyTorch is absent."""

import json
import math
import os
import re
import signal
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
KEYS = ["case", "ours", "peer", "peer_name", "unit", "ranks", "threads", "note", "ratio", "processor", "date"]
MLP = "mlp 784-30-10, batch 10"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_without_pytorch_the_peer_is_null(monkeypatch):
    import bench_engine

    monkeypatch.setattr(bench_engine, "find_spec", lambda name: None)
    time, memory, allocations = bench_engine.compare(MLP, threads=1, quick=True)
    assert (time.case, time.unit, time.threads, time.peer, time.ratio) == (MLP, "ms", 1, None, None)
    assert 0.01 < time.ours < 1000 and "PyTorch is not installed" in time.note and "GEMM floor" in time.note
    products = float(re.search(r"products alone ([\d.e+-]+) ms", time.note)[1])
    assert 0 < products < 1000 and "of the peer's step" not in time.note
    assert memory.unit == "MiB" and memory.peer is None and 0 <= memory.ours < 100
    assert allocations.ours == 0, allocations.note


def test_ctrl_c_is_not_for_those_who_measure():
    """Who has started them ends them, whatever they are at; on their own they would end in tracebacks."""
    import bench_engine

    worker = bench_engine.Worker("ours", MLP, 1)
    assert os.getpgid(worker.process.pid) != os.getpgrp()
    worker.close()
    assert worker.process.returncode == -signal.SIGKILL


def test_with_pytorch_both_sides_are_measured():
    pytest.importorskip("torch")
    import bench_engine

    time, memory, _ = bench_engine.compare(MLP, threads=1, quick=True)
    assert time.peer_name.startswith("PyTorch ") and time.peer > 0 and memory.peer > 0
    assert math.isclose(time.ratio, time.ours / time.peer)
    assert re.search(r"products alone \S+ ms, \S+ of them small ones; \S+ of the peer's step", time.note), time.note


def test_floor_of_a_transformer_is_its_products_and_the_normal_distribution():
    import bench_engine
    import numpy as np

    from nn.layers import activations

    before = np.dot, np.matmul, activations.distribution
    for taken in bench_engine.Ours("transformer, batch 16").floors(2):
        assert 0 < taken["small"] < taken["products"] and taken["distribution"] > 0
    assert (np.dot, np.matmul, activations.distribution) == before
    note = bench_engine.floor_note({"products": 30.0, "small": 2.5, "distribution": 6.0}, 40.0)
    assert note == "products alone 30 ms, 2.5 of them small ones; normal distribution 6 ms; 0.90 of the peer's step"
    assert bench_engine.floor_note(dict.fromkeys(taken, 0.0), None) == "products alone 0 ms"


def test_passes_over_memory_are_counted():
    """Of a sigmoid, the bytes that its four functions read and write; afterwards the trainer computes as before."""
    import bench_engine
    import numpy as np
    from engine_passes import passes_of_a_step

    runner, other = bench_engine.Ours(MLP), bench_engine.Ours(MLP)
    seconds, passes = passes_of_a_step(runner.trainer, runner.batches, steps=2)
    forward = {
        function: entry for (layer, kind, function), entry in passes.items() if (layer, kind) == ("Sigmoid", "forward")
    }
    assert seconds > 0 and set(forward) == {"multiply", "tanh", "add"}
    entries = 4 * 10 * (30 + 10)  # bytes of both activations
    assert forward["tanh"].nbytes == 2 * entries and forward["tanh"].calls == 2
    assert forward["multiply"].nbytes == 4 * entries and forward["multiply"].calls == 4
    for x, y in runner.batches[:1] + 2 * runner.batches + runner.batches[:1] + runner.batches[:2]:
        other.trainer.step(x, y)
    assert np.array_equal(runner.trainer.flat_parameters, other.trainer.flat_parameters)
    rows = bench_engine.Ours(MLP).passes(1, least=0)
    assert rows[0]["case"] == MLP and rows[1]["case"].strip() == "passes"
    assert {"  Sigmoid forward tanh", "  QuadraticLoss forward subtract"} <= {row["case"] for row in rows}


def test_both_sides_have_the_same_models():
    pytest.importorskip("torch")
    import torch_models
    from bench_engine import CASES

    from nn import models

    for name, case in CASES.items():
        ours = models.build(case.model, case.in_shape, case.classes).layout
        theirs = torch_models.build(name)[0]
        shapes = lambda arrays: sorted(math.prod(shape) for shape in arrays)
        # PyTorch adds two biases to the same sums of an LSTM.
        expected = shapes(p.shape for key, p in theirs.named_parameters() if "bias_hh" not in key)
        if name.startswith("transformer"):  # we may cut Q, K, V apart: only the sum is the same
            assert ours.count == sum(expected), name
        else:
            assert shapes(spec.shape for spec in ours.specs.values()) == expected, name


def test_allocations_are_counted():
    """Negative control: a layer that makes a large array is named; so is none of its neighbours."""
    import bench_engine
    import numpy as np

    class Wasteful(bench_engine.Ours):
        def build(self):
            super().build()
            layer = self.trainer.network.root.layers[1]
            kind = type(layer)

            class Greedy(kind):
                def forward(self, p, x, ctx):
                    np.zeros(1 << 18).sum()
                    return super().forward(p, x, ctx)

            layer.__class__ = Greedy

    (found,) = Wasteful(MLP).allocating_calls()
    assert found.startswith("1 Greedy() forward 20")


def test_a_worker_that_dies_is_named():
    from bench_engine import Worker

    worker = Worker("ours", MLP, 1)
    worker.process.kill()
    with pytest.raises(RuntimeError, match=r"mlp 784-30-10, batch 10 \(ours, 1 threads\) was killed by signal 9"):
        worker.ask({"seconds": 0})
    worker.close()


def test_a_suite_is_a_file(tmp_path, monkeypatch, capsys):
    import bench

    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "bench_good_suite.py").write_text(
        "from benchmarking import Row\n"
        "def rows(quick, only):\n"
        "    assert quick and only == 'x'\n"
        "    yield Row('a', 1.0, 2.0, 'peer 1.0', threads=2)\n"
        "    yield Row('b', 3.0, note='no peer')\n"
    )
    (tmp_path / "bench_bad_suite.py").write_text("def rows(quick, only):\n    raise OSError('no network')\n    yield\n")
    out = tmp_path / "rows.json"
    assert bench.main(["good_suite", "--json", str(out), "--quick", "--only", "x"]) == 0
    rows = json.loads(out.read_text())
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert rows[0]["ratio"] == 0.5 and rows[0]["threads"] == 2
    assert rows[1]["peer"] is None and rows[1]["ratio"] is None
    assert bench.main(["all", "--json", str(out), "--quick", "--only", "x"]) == 1, "a failing suite is told"
    assert len(json.loads(out.read_text())) == 2, "and the others are kept"
    printed = capsys.readouterr()
    assert "no network" in printed.err and "failed: bad_suite" in printed.err
    with pytest.raises(SystemExit):
        bench.main(["unknown"])
    assert "bad_suite" in capsys.readouterr().err
    sys.modules.pop("bench_good_suite"), sys.modules.pop("bench_bad_suite")


def test_the_mean_of_ratios_is_the_ratio_of_means():
    from benchmarking import Row, geometric_mean

    rows = [Row("a", 1.0, 4.0, "p"), Row("b", 30.0, 30.0, "p"), Row("c", 5.0)]
    mean = geometric_mean("mean", rows)
    assert math.isclose(mean.ratio, 0.5) and mean.note == "of 2 cases"
    assert geometric_mean("mean", rows[2:]).ratio is None


def test_a_guarded_step_is_compared_with_a_bare_one():
    import bench_faults

    seconds = {"bare": [0.010, 0.012, 0.011], "guarded": [0.0101, 0.0120, 0.0112], "at once": [0.02] * 3}
    seconds["elastic"] = [0.0102, 0.0120, 0.0114]
    save = {"guarded": [0.001, 0.002, 0.003], "at once": [0.008] * 3}
    own = {"guarded": [2e-5, 1e-5, 3e-5], "elastic": [4e-5, 3e-5, 9e-5]}
    found = {"steps": 100, "seconds": seconds, "own": own, "copying": [3e-5, 2e-5, 8e-5], "save": save}
    guarded, elastic, pause = bench_faults.step_rows(found)
    assert math.isclose(guarded.ratio, 11.2 / 11) and "quotients +1.00%" in guarded.note and "0.18%" in guarded.note
    assert math.isclose(elastic.ratio, 11.4 / 11) and "0.36%" in elastic.note
    assert "0.030 ms copy" in elastic.note and "all else is 0.09%" in elastic.note
    assert math.isclose(pause.ours, 2) and math.isclose(pause.ratio, 0.25)


def test_a_price_that_is_off_says_by_what_and_whether_that_is_noise():
    from dataclasses import asdict

    import bench_network

    from collectives.pricing.networks import Network

    network = Network.hockney(1e-6, 1e-9)  # a ring of 4 ranks with 4 KiB: 6 messages of 1 KiB, 2.024 us each

    def note_of(measured, lower, upper):
        rows = [("allreduce", "ring", 4096, measured, 5, 6, lower, upper)]
        result = {"ranks": 4, "nodes": [0, 1, 2, 3], "networks": [asdict(network)], "schedules": [rows]}
        (row,) = bench_network.prices(result, network, "4 hosts x 1")
        assert row.case == "4 hosts x 1, allreduce ring, 4 KiB" and row.peer == pytest.approx(6 * 2.024)
        return row.note

    assert note_of(12e-6, 11e-6, 15e-6) == "5 of 6 runs calm, half of them in 11-15 us"
    chain = "of 12.14 us 12.1 us messages (6 of 1,024 bytes)"
    off = note_of(8e-6, 7e-6, 15e-6)
    assert off == f"5 of 6 runs calm, half of them in 7-15 us; priced +52%, within what runs differ by: {chain}"
    assert f"priced -39%, beyond what runs differ by: {chain}" in note_of(20e-6, 18e-6, 21e-6)


def test_prices_without_a_refinement_stand_beside_those_with_all():
    """On a network whose ports save up sending, and where both directions at once are slower: measured is its price."""
    import bench_network

    from collectives import ALGORITHMS, price
    from collectives.pricing.networks import Link, Network, Point

    time = lambda n: 1e-4 + 1e-8 * max(0, n - 20_000)
    points = [Point(n, time(n), 0.0, 0.0, 1e-8 * n, 2 * time(n), 1.5 * time(n)) for n in (1, 10_000, 40_000, 160_000)]
    link = Link(1e-4, 1e-8, points=tuple(points))
    network = Network(link, link)
    rows = []
    for name in ("ring", "doubling", "double_tree", "rabenseifner"):
        count, options = bench_network.call("allreduce", name, 400_000, [0, 1, 2, 3])
        seconds = price(ALGORITHMS["allreduce"][name], 4, count, 4, network, **options).seconds
        rows.append(("allreduce", name, 400_000, seconds))
    result = {"ranks": 4, "nodes": [0, 1, 2, 3], "schedules": [rows]}
    found = {row.case.partition(", ")[2]: row for row in bench_network.refinements(result, network, "4 hosts x 1")}
    whole = found.pop("model with all refinements")
    for name in (
        "model without credit",
        "model with each message at the rate of a stream",
        "model without both directions",
        "model of a straight line",
    ):
        assert found[name].ours > 0.01, name
    assert (
        found["model without both directions inside a node"].ours
        == whole.ours
        == found["model of a straight line"].peer
        == 0
    )
    assert whole.note == "100% of 4 prices within 15% of what was measured"


def test_the_tables_of_speed_are_those_of_the_files():
    import page_tables
    import speed_tables

    for page, times in speed_tables.PAGES.items():
        text = (SCRIPTS.parent / page).read_text()
        for name, table in speed_tables.tables(times).items():
            assert page_tables.put(text, name, table()) == text, "run python scripts/speed_tables.py --write"


def test_a_table_of_speed_has_the_mean_of_runs_and_marks_what_is_slower(tmp_path):
    from benchmarking import Row, to_json
    from speed_tables import Processor, steps, sums

    case, allreduce = "lstm, batch 16", "allreduce, 4 B, private arrays"
    rows = [Row(case, 3.0, 2.0, "PyTorch", note="0.87 of the peer's step"), Row(case, 3.0, 4.0, "PyTorch", threads=2)]
    rows += [Row(allreduce, ours, 1.0, "MPI", "us") for ours in (1.0, 2.0)]
    (tmp_path / "rows.json").write_text(to_json(rows))
    one = Processor(tmp_path / "rows.json")
    assert steps([one], True).splitlines()[-1] == "| lstm, batch 16 | 3 | 2 | **1.50** | 0.87 | 0.75 |"
    assert sums([one], True).splitlines()[-1] == "| 4 B | 1, 2 | **1.50** |"
    assert steps([one], True).startswith(f"| step of | {one.name}: ours, ms | PyTorch, ms | ratio | floor |")


def test_a_processor_without_a_number_is_named_by_family_and_model(tmp_path):
    from benchmarking import processor_name

    file = tmp_path / "cpuinfo"
    file.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n")
    assert processor_name(str(file)) == "AMD EPYC (family 25, model 17)"
    file.write_text("cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Platinum 8488C\n")
    assert processor_name(str(file)) == "Intel(R) Xeon(R) Platinum 8488C"


def test_growth_has_a_row_for_each_size_and_a_picture(tmp_path):
    import bench_growth

    rows = list(bench_growth.rows(quick=True, only="layers", draw=str(tmp_path / "growth.png")))
    assert [row.case for row in rows] == ["layers 1", "layers 2", "layers 4"]
    assert rows[2].peer > rows[1].peer > rows[0].peer and "steps/s" in rows[0].note
    assert (tmp_path / "growth.png").stat().st_size > 10_000
