"""Suites collectives and network of bench.py: what is timed is right, disturbed samples do not count, files load."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.mpi(ranks=2)
def test_every_call_that_is_timed_is_right_and_a_wrong_one_is_refused(comm):
    import bench_collectives as bench

    for operation in bench.TUNED:
        for nbytes in (8, 16 * KIB, 64 * KIB):
            result = bench.run(comm, None, 0.001, operation, nbytes, bench.OURS)
            assert result["times"].keys() == {"native", *bench.OURS} and result["chosen"].keys() == bench.OURS.keys()
            for side in result["times"].values():
                assert side["seconds"] > 0 and 0 <= side["calm"] <= side["all"]
        x = bench.aligned(1000)
        _, y = bench.mpi_call(comm, operation, x)
        # The root of a broadcast has the result before, and only the root of a reduction gets one.
        unaware = {"broadcast": 0, "reduce": 1}.get(operation) == comm.Get_rank()
        refused = pytest.raises(ArithmeticError, match=f"{operation} of 1000 float32 by nobody is wrong")
        with nullcontext() if unaware else refused:
            bench.check(comm, operation, "nobody", x, lambda: None, y)


class Alone:
    """A world of one rank."""

    Get_rank = staticmethod(lambda: 0)
    Barrier = staticmethod(lambda: None)
    allreduce = bcast = staticmethod(lambda value: value)
    allgather = staticmethod(lambda value: [value])


@pytest.mark.parametrize("disturbed, seconds", [(2, 1.0), (12, 9.0)])
def test_disturbed_samples_count_only_where_others_are_too_few(monkeypatch, disturbed, seconds):
    import bench_collectives as bench

    taken = iter([(1.0, 0)] * 4 + [(9.0, 3)] * disturbed + [(1.0, 0)] * (15 - disturbed))  # the first set the repeats
    monkeypatch.setattr(bench, "sample", lambda *_: next(taken))
    clock = iter([0.0] + [math.inf] * 100)
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    result = bench.take_turns(Alone, {"native": (None, None)}, None, 0.2)
    assert result == {"native": {"seconds": seconds, "calm": 15 - disturbed, "all": 15}}


def test_each_timed_call_finds_the_array_rewritten():
    import bench_collectives as bench

    x, seen = bench.aligned(3), []

    def call():
        seen.append(x.tolist())
        x[:] = 7

    spent, lost = bench.sample(x, call, 2.0, 4, lambda: seen.append("barrier"))
    assert seen == ["barrier", [2.0] * 3] * 5 and spent > 0 and lost >= 0
    assert x.ctypes.data % 4096 == 0


def test_goals():
    from bench_collectives import goal, length, verdict

    shared, private = "shared arrays", "private arrays"
    assert goal("allreduce", 64 * KIB, shared) == goal("allreduce", 32 * MIB, shared) == 1 / 3
    assert goal("allreduce", 64 * MIB, shared) == 1 / 1.5
    assert goal("allreduce", 16 * KIB, shared) == goal("allreduce", 16 * KIB, private) == 1.1
    assert goal("allreduce", 16 * KIB + 1, private) == 1.0
    assert goal("allreduce", 4, f"{private}, doubling") == 2.0
    assert goal("allreduce", MIB, f"{private}, ring") is None and goal("broadcast", MIB, shared) is None
    assert verdict(1 / 3, 0.32) == "goal 0.33: met" and verdict(1.0, 1.001) == "goal 1.00: MISSED"
    assert verdict(None, 5) == ""
    assert [length(n) for n in (4, KIB, 128 * MIB)] == ["4 B", "1 KiB", "128 MiB"]


def test_rows_of_a_case(monkeypatch):
    import bench_collectives as bench

    monkeypatch.setattr(bench.launcher, "cores", lambda: 1)
    side = lambda seconds: {"seconds": seconds, "calm": 8, "all": 9}
    result = {"operation": "allreduce", "nbytes": MIB, "sides": bench.OURS, "ranks": 2, "library": "Some MPI 1.0"}
    result |= {"chosen": {"shared arrays": "shared"}, "gloo": "gloo has no allreduce", "gloo_name": "gloo"}
    result["times"] = {"native": side(4e-6), "shared arrays": side(1e-6), "private arrays": side(5e-6)}
    first, second = bench.compare(result)
    assert (first.case, first.peer_name, first.unit) == ("allreduce, 1 MiB, shared arrays", "Some MPI 1.0", "us")
    assert math.isclose(first.ours, 1) and math.isclose(first.peer, 4)
    assert first.note == "shared; goal 0.33: met; calm samples 8/9, peer 8/9; 2 ranks on 1 cores"
    assert "goal 1.00: MISSED" in second.note
    for row in bench.compare_gloo(result):
        assert row.peer is None and row.ratio is None and row.note.startswith("gloo has no allreduce")
    result["times"]["sums alone"] = side(2e-6)
    first, second, floor, *_ = bench.compare(result)
    assert "goal 0.33, below the floor of 0.50: met" in first.note and "goal 1.00: MISSED" in second.note
    assert floor.case == "allreduce, 1 MiB, sums alone" and math.isclose(floor.ours, 2)


def test_a_job_of_its_own_whose_malloc_keeps_memory(nothing_left):
    import bench_collectives as bench

    shared, private, floor = bench.rows(quick=True, only="control")
    names = ("shared arrays", "private arrays", "sums alone")
    assert (shared.case, private.case, floor.case) == tuple(f"control, 1 MiB, {name}" for name in names)
    assert shared.peer == private.peer > 0 and shared.ours > 0 and shared.ranks == 2
    assert list(bench.rows(quick=True, only="no such case")) == []


def test_without_pytorch_a_row_says_so(monkeypatch, nothing_left):
    import bench_collectives as bench

    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    *ours, gloo = bench.rows(quick=True, only="broadcast")
    assert len(ours) == 2 and gloo.ours is None and gloo.note == "PyTorch is not installed"
    assert list(bench.rows(quick=True, only="no such case")) == []


def test_gloo_in_a_job_of_its_own(nothing_left):
    pytest.importorskip("torch")
    import bench_collectives as bench

    measured = list(bench.rows(quick=True, only="broadcast"))
    assert [row.case.rpartition(", ")[2] for row in measured] == [
        *bench.OURS,
        *(f"{name}: gloo" for name in bench.OURS),
    ]
    assert all(row.peer > 0 for row in measured) and measured[3].peer_name.startswith("gloo, PyTorch ")


def test_a_tuned_table_is_one_that_the_selection_reads(tmp_path, monkeypatch, nothing_left):
    import bench

    from collectives.choosing.selection import Selection

    file = tmp_path / "table.json"
    arguments = ["collectives", "--quick", "--only", "reduce_scatter", "--tune", str(file)]
    assert bench.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 3 and all(0 < row["ratio"] <= 1 for row in rows), "the fastest is no slower than the default"
    assert list(json.loads(file.read_text())["node"]) == ["reduce_scatter"]
    monkeypatch.setenv("RINGPROP_TUNE", str(file))
    chosen = Selection({}, [0, 0]).measured["node"]["reduce_scatter"][-1][1]
    assert chosen in json.dumps(rows)
    monkeypatch.delenv("RINGPROP_TUNE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bench.main([*arguments[:-1], "--json", str(tmp_path / "rows.json")]) == 0
    (cached,) = (tmp_path / "ringprop").iterdir()
    assert list(json.loads(cached.read_text())["node"]) == ["reduce_scatter"]


def test_what_the_sums_take_is_no_algorithm_of_a_tuned_table(tmp_path, monkeypatch):
    import bench_collectives as bench

    from collectives.choosing.selection import load

    side = lambda seconds: {"seconds": seconds, "calm": 8, "all": 9}
    times = {"ring": side(5e-6), "shared": side(3e-6), bench.FLOOR: side(1e-6)}
    result = {"operation": "allreduce", "nbytes": MIB, "ranks": 2, "place": "node", "library": "Some MPI 1.0"}
    result |= {"default": {"private arrays": "ring"}, "cache": ""}
    monkeypatch.setattr(bench, "measure", lambda cases, seconds: iter([result | {"times": times}]))
    (row,) = bench.rows(only="allreduce", tune=tmp_path / "table.json")
    assert row.case == "allreduce, 1 MiB: shared" and math.isclose(row.ours, 3)
    assert load(tmp_path / "table.json") == {"node": {"allreduce": [(math.inf, "shared")]}}


def test_what_is_chosen_is_compared_with_the_best_that_its_arrays_can_run(monkeypatch, capsys):
    import bench_collectives as bench

    side = lambda seconds: {"seconds": seconds, "calm": 8, "all": 9}
    times = {"ring": side(5e-6), "shared": side(5.2e-6), "native": side(6e-6), "shared_arrays": side(1e-6)}
    result = {"operation": "allreduce", "nbytes": MIB, "ranks": 2, "library": "Some MPI 1.0"}
    result |= {"default": {"private arrays": "shared", "shared arrays": "shared"}}
    given = []
    monkeypatch.setattr(
        bench, "measure", lambda cases, seconds: given.extend(cases) or iter([result | {"times": dict(times)}])
    )
    private, shared = bench.rows(only="allreduce, 1 MiB", all_algorithms=True)
    assert [(case["operation"], case["nbytes"]) for case in given] == [("allreduce", MIB)]
    assert {"shared", "shared_arrays", "ring", "swing"} < given[0]["sides"].keys() and "two_level" not in given[0][
        "sides"
    ]
    assert (private.case, private.peer_name) == ("allreduce, 1 MiB, private arrays: shared", "ring")
    assert math.isclose(private.ratio, 1.04) and private.note.startswith("goal 1.05: met")
    assert (shared.case, shared.ratio) == ("allreduce, 1 MiB, shared arrays: shared_arrays", 1)
    result["default"]["private arrays"] = "native"
    missed, _ = bench.rows(only="allreduce, 1 MiB", all_algorithms=True)
    assert math.isclose(missed.ratio, 1.2) and "goal 1.05: MISSED" in missed.note
    assert "within 5% of the best algorithm: 1 of 2 rows" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_measured_network_is_one_that_the_clock_reads(tmp_path, nothing_left):
    import bench

    from collectives import ALGORITHMS
    from collectives.algorithms.registry import SHARED_MEMORY
    from collectives.pricing.networks import Network
    from collectives.pricing.price import price

    assert bench.main(["network", "--quick", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    network = Network.load(tmp_path / "network.json")
    assert network.ranks_per_node == 2 and network.gamma > 0
    case = {row["case"]: row for row in rows}
    first = case["message inside, 12 B"]
    assert first is rows[0] and first["ours"] > 0
    assert math.isclose(first["peer"], 1e6 * network.inside.cost(12).seconds)
    reduction, copy = case["reduction in memory, 1 MiB"], case["copy in memory, 1 MiB"]
    assert math.isclose(reduction["ours"], 1e6 * network.reducing(MIB)) and copy["peer"] is None
    assert math.isclose(case["barrier of 2 ranks in memory"]["ours"], 1e6 * network.barriers[0][1])
    priced = {name: row for name, row in case.items() if row["peer_name"] == "price"}
    by_messages = [
        entry for entries in ALGORITHMS.values() for entry in entries.values() if SHARED_MEMORY not in entry.needs
    ]
    sent = {name for name in priced if " shared" not in name}
    assert len(sent) == 2 * (len(by_messages) - 1) + 1  # of a barrier one
    short = {
        "allreduce": "small",
        "reduce": "small",
        "reduce_scatter": "slots",
        "allgather": "slots",
        "broadcast": "slots",
    }
    shared = {f"2 ranks, {operation} shared_{way}, 4 KiB" for operation, way in short.items()}
    shared |= {f"2 ranks, {operation} shared_{way}, 256 KiB" for operation in short for way in ("slots", "arrays")}
    assert set(priced) - sent == shared | {"2 ranks, barrier shared"}
    ring = priced["2 ranks, allreduce ring, 256 KiB"]
    said = price(ALGORITHMS["allreduce"]["ring"], 2, 64 << 10, 4, network).seconds
    assert math.isclose(ring["peer"], 1e6 * said) and math.isclose(ring["ratio"], ring["ours"] / ring["peer"])


def test_files_belong_to_their_suites(capsys):
    import bench

    with pytest.raises(SystemExit):
        bench.main(["network", "--tune", "x"])
    assert "--tune is for the suite collectives" in capsys.readouterr().err
