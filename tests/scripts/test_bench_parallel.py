"""The benchmark of pipelines and tensor parallelism: rows of what two ranks tell, and the telling itself."""

from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_a_step_stands_beside_the_clock_and_beside_pytorch():
    from bench_parallel import cases, shared_rows

    found = {
        "what": "a network",
        "torch": "PyTorch 2",
        "predicted": {"gpipe": 3e-3, "naive": 2e-3},
        "seconds": {"gpipe": [2e-3, 4e-3, 9e-3], "naive": [2.2e-3], "torch gpipe": [8e-3]},
    }
    clock, torch, naive = shared_rows("2 ranks", found)
    assert clock.ours == 4 and clock.peer == pytest.approx(3) and clock.note == "a network; the clock is +33% off"
    assert torch.ratio == 0.5 and torch.peer_name == "PyTorch 2"
    assert naive.ratio == pytest.approx(1.1), "which PyTorch has not"
    assert {row.case for row in (clock, torch, naive)} < set(cases("2 ranks"))
    assert [row.case for row in shared_rows("2 ranks", found, "naive")] == [naive.case]


@pytest.mark.exhaustive
def test_all_sides_take_turns_on_two_ranks():
    from bench_parallel import SCHEDULES, TENSOR, rows

    found = {row.case: row for row in rows(quick=True, only="2 ranks")}
    assert all(row.ours > 0 and row.peer > 0 for row in found.values())
    assert {f"{name}, 2 ranks, of the clock" for name in (*SCHEDULES, TENSOR)} <= set(found)
    assert ("tensor, 2 ranks, PyTorch" in found) == bool(find_spec("torch"))
