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

    ring, ulysses = bench_sequences.rows(quick=True, only="ranks")
    for row in (ring, ulysses):
        assert row.ranks == 2 and row.peer_name == "one process" and row.ours > 0 and "times as fast" in row.note
