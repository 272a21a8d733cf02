"""bench.py sequences: rows are there, and blocks need less memory where sequences are long."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_blocks_need_less_memory_than_whole_scores():
    import bench_sequences

    assert bench_sequences.peak_bytes("blocks:128", 1024, 1) < bench_sequences.peak_bytes("whole", 1024, 1) / 3
    time, memory = bench_sequences.rows(quick=True, only="by blocks, 256 ")
    assert time.unit == "ms" and 0.1 < time.ours < 1e4 and memory.unit == "MiB" and memory.ours < memory.peer


def test_a_sequence_on_two_ranks_stands_beside_one_process():
    import bench_sequences

    ring, ulysses = bench_sequences.rows(quick=True, only="a sequence of")
    for row in (ring, ulysses):
        assert row.ranks == 2 and row.peer_name == "one process" and row.ours > 0 and "times as fast" in row.note


def test_a_step_on_two_ranks_stands_beside_its_estimate():
    """Memory is more than the estimate, which leaves out what layers compute with; seconds are of a busy machine."""
    import bench_sequences

    step, memory = bench_sequences.rows(quick=True, only="length 1,024, 2 ")
    assert step.peer_name == memory.peer_name == "estimate" and step.ours > 0 < step.peer and memory.ranks == 2
    assert 1 < memory.ratio < 4


def test_an_alltoallv_of_experts_stands_beside_its_price():
    import bench_sequences

    short, long = bench_sequences.rows(quick=True, only="experts'")
    assert (short.peer_name, short.unit) == ("price", "us") and 0 < short.peer < long.peer and long.ours > 0


@pytest.mark.exhaustive
def test_the_lab_measures_attention_beside_prices():
    import bench_crossover
    import netlab

    if reason := netlab.reason_against():
        pytest.skip(reason)
    found = list(bench_crossover.rows(quick=True))
    names = [row.case for row in found]
    assert "2 hosts, 100 Mbit/s, 256 positions, 4 heads, ulysses" in names and len(found) == 4
    assert all(row.ours > 0 < row.peer for row in found)


def test_prices_of_a_layer_on_hosts():
    """A fast network leaves the computation alone; the ring hides what it can, and alltoalls do not."""
    import bench_crossover

    from collectives.pricing.networks import Network

    fast, slow = Network.hockney(0, 0), Network.hockney(1e-4, 1e-7)
    assert bench_crossover.priced(1024, "ring", 2, 30.0, 8.0, fast) == pytest.approx(15)
    around, dealt = (bench_crossover.priced(4096, way, 2, 800.0, 300.0, slow) for way in ("ring", "ulysses"))
    assert dealt > around > 400
