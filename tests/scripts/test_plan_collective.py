"""The command that says which algorithm to take on a network (scripts/plan_collective.py)."""

import json
import sys
from pathlib import Path

import pytest

from collectives import ALGORITHMS, price
from collectives.choosing.selection import load
from collectives.drawing.networks import draw_channels, draw_network
from collectives.pricing.networks import Network, find_network

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import plan_collective


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch):
    monkeypatch.setattr(plan_collective, "SIZES", (1024, 1 << 20))
    monkeypatch.setattr(plan_collective, "MAP_SIZES", (1024, 1 << 20))


def test_it_says_the_fastest_and_writes_a_table(tmp_path, capsys):
    table, prices, folder = tmp_path / "tune.json", tmp_path / "prices.json", tmp_path / "pictures"
    files = ["--table", str(table), "--json", str(prices), "--pictures", str(folder)]
    found = plan_collective.main(["torus:dims=2x4", "--synthesize", "--map", *files])
    assert found == 0
    text = capsys.readouterr().out
    times = json.loads(prices.read_text())
    for nbytes in ("1024", str(1 << 20)):
        best = min(times, key=lambda name: times[name][nbytes])
        assert f"{int(nbytes):13,}  {best}" in text
        own = price(ALGORITHMS["allreduce"]["ring"], 8, int(nbytes) // 4, 4, "torus:dims=2x4").seconds
        assert times["ring"][nbytes] == own
    assert min(times, key=lambda name: times[name][str(1 << 20)]) == "synthesized"
    assert set(load(table)["network"]["allreduce"][-1][1:]) <= set(ALGORITHMS["allreduce"])
    assert {path.name for path in folder.iterdir()} == {"network.png", "channels.png"}
    assert "\n     2" in text and "\n     8" in text


def test_a_network_of_two_levels_has_no_channels_but_a_plan(capsys):
    assert plan_collective.main(["gigabit", "--ranks", "8", "--operation", "broadcast"]) == 0
    assert "broadcast on 8 ranks of gigabit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tree:k=4"], "no network named 'tree:k=4'"),
        (["star:4", "--ranks", "5"], "5 ranks do not fit on 4 hosts"),
        (["star:4", "--ranks", "1"], "needs at least 2"),
        (["star:4", "--synthesize", "--operation", "scan"], "--synthesize needs"),
        (["gigabit", "--pictures", "x"], "--pictures needs a network with a topology"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, words, capsys):
    assert plan_collective.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["star:4", "fat-tree:k=4", "torus:dims=3x3", "hypercube:d=3", "dragonfly:1,2,1"])
def test_networks_are_drawn(name):
    network = find_network(name)
    hosts = len(network.topology.hosts)
    priced = price(ALGORITHMS["allreduce"]["ring"], hosts, 100 * hosts, 4, network, trace=True)
    ax = draw_network(network, hosts, priced).axes[0]
    shown = {text.get_text() for text in ax.texts}
    assert set(map(str, range(hosts))) <= shown
    load = draw_channels(network, priced).axes[0].images[0].get_array()
    assert 0 < load.max() < 1 + 1e-6
    with pytest.raises(ValueError, match="no topology to draw"):
        draw_network(Network.hockney(1, 1))
    with pytest.raises(ValueError, match="without a trace"):
        draw_channels(network, price(ALGORITHMS["allreduce"]["ring"], 2, 8, 4, network))
