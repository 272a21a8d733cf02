"""The tables of docs/systems/sequences.md are what scripts/experiments/long_sequences.py makes."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "experiments" / "long_sequences.py"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("long_sequences", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_that_the_command_makes(module):
    page = module.PAGE.read_text()
    assert module.written(page) == page, "run python scripts/experiments/long_sequences.py --write"
    with pytest.raises(ValueError, match="no marks for the table length"):
        module.written("")


def test_a_ring_wins_where_it_hides_and_alltoalls_where_it_does_not(module):
    assert module.crossover("workstation") < module.crossover("gigabit") < module.crossover("gpu-100g")
    assert module.crossover("gpu-100g") < module.crossover("gpu-25g"), "a slower network hides later"
    network, flops = module.network_of("gpu-25g"), module.MACHINES["gpu-25g"]
    short, long = (
        [module.layer_seconds(length, *how, network, flops) for how in ((8, 1), (1, 8))] for length in (4096, 1 << 21)
    )
    assert short[1] < short[0] / 4 and long[0] < long[1]
