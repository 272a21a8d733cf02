"""The command that says which algorithm to take on a network (scripts/plan_collective.py)."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Annotation
from PIL import Image

from collectives import ALGORITHMS, price, synthesize
from collectives.choosing.selection import load
from collectives.drawing.networks import (
    animate_flows,
    draw_channels,
    draw_critical_path,
    draw_network,
    draw_trees,
)
from collectives.pricing.critical_path import critical_path
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
        (["star:4", "--ranks", "1"], "at least 2 ranks, given 1"),
        (["star:4", "--synthesize", "--operation", "scan"], "--synthesize needs"),
        (["gigabit", "--pictures", "x"], "--pictures needs a network with a topology"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan_collective.main(arguments)
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
    path = draw_critical_path(network, priced).axes[0]
    messages = [stretch.flight for stretch in critical_path(priced) if stretch.kind == "message"]
    channels = sum(len(network.topology.route(flight.source, flight.dest).channels) for flight in messages)
    assert sum(isinstance(child, Annotation) and child.arrow_patch is not None for child in path.texts) == channels > 0
    with pytest.raises(ValueError, match="no topology to draw"):
        draw_network(Network.hockney(1, 1))
    with pytest.raises(ValueError, match="without a trace"):
        draw_channels(network, price(ALGORITHMS["allreduce"]["ring"], 2, 8, 4, network))


def test_the_critical_path_is_a_chain_in_time_that_ends_last():
    network = find_network("fat-tree:k=4,oversubscription=4")
    for name in ("ring", "doubling", "rabenseifner", "double_tree"):
        priced = price(ALGORITHMS["allreduce"][name], 16, 16_000, 4, network, trace=True)
        path = critical_path(priced)
        assert path[0].start == 0 and path[-1].end == priced.seconds
        assert all(a.end == pytest.approx(b.start) for a, b in pairwise(path))


@pytest.mark.parametrize("operation", ["allgather", "reduce_scatter", "allreduce"])
def test_found_trees_span_all_ranks_and_are_drawn(operation):
    network = find_network("torus:dims=3x3")
    found = synthesize(operation, network)
    trees = found.trees()
    assert len(trees) == found.pieces * (1 if operation == "allreduce" else 9)
    for tree in trees:
        edges = [(source, dest) for source, dest, _ in tree]
        children = [source if operation == "reduce_scatter" else dest for source, dest in edges]
        assert len(edges) == 8 and len(set(children)) == 8, "every rank but the root has one parent"
    figure = draw_trees(network, found, pieces=(0, 3))
    assert sum(len(ax.texts) >= 9 for ax in figure.axes) == 2
    with pytest.raises(ValueError, match="no piece 999"):
        draw_trees(network, found, pieces=(999,))


def test_flows_are_filmed(tmp_path):
    network = find_network("star:4")
    priced = price(ALGORITHMS["allreduce"]["ring"], 4, 4_000_000, 4, network, trace=True)
    file = animate_flows(tmp_path / "flows.gif", network, priced, frames=8, fps=4)
    with Image.open(file) as film:
        assert film.n_frames >= 8
        film.seek(2)
        colours = np.asarray(film.convert("RGB")).reshape(-1, 3).astype(int)
    assert (colours.max(axis=1) - colours.min(axis=1) > 100).any(), "channels that are in use have a colour"
    with pytest.raises(ValueError, match="end in"):
        animate_flows(tmp_path / "flows.txt", network, priced)
    with pytest.raises(ValueError, match="without a trace"):
        animate_flows(tmp_path / "a.gif", network, price(ALGORITHMS["allreduce"]["ring"], 4, 40, 4, network))
