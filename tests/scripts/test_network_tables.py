"""The tables of docs/systems/networks.md are what scripts/experiments/networks.py makes."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "experiments" / "networks.py"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("network_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["ring", "tori", "bine", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("torus", "speed"))]
)
def test_the_page_has_the_table_that_the_command_makes(tables, name):
    page = tables.PAGE.read_text()
    assert tables.put(page, name, tables.TABLES[name]()) == page, (
        f"run python {SCRIPT.relative_to(SCRIPT.parents[2])} --write"
    )
    assert tables.put(page, name, "| nothing |") != page
    with pytest.raises(ValueError, match="no <!-- nowhere -->"):
        tables.put(page, "nowhere", "")


def test_ours_are_the_published_figures(tables):
    for size, published in tables.PUBLISHED.items():
        assert tables.congestion("swing", (size,)) == pytest.approx(published, abs=5e-4)
