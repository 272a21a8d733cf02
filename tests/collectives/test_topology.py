"""Topologies: counts, diameters and routes of the literature; what is no network is refused by name."""

import itertools
import json

import pytest

from collectives import ALGORITHMS, price
from collectives.pricing.networks import Network, find_network
from collectives.pricing.topology import Topology, breadth_first, from_edges, load_topology, named_topology


def diameter(topology):
    neighbours = {}
    for channel in topology.channels:
        neighbours.setdefault(channel.source, []).append(channel.target)
    return max(breadth_first(host, neighbours)[other] for host in topology.hosts for other in topology.hosts)


@pytest.mark.parametrize(
    ("name", "hosts", "switches", "cables", "longest"),
    [
        ("star:hosts=5", 5, 1, 5, 2),
        ("nodes:nodes=3,ranks=4", 12, 4, 15, 4),
        ("fat-tree:k=4", 16, 20, 48, 6),
        ("fat-tree:k=8", 128, 80, 384, 6),
        ("torus:dims=4x4", 16, 0, 32, 4),
        ("torus:4x4x4", 64, 0, 192, 6),
        ("torus:dims=2x4", 8, 0, 12, 3),
        ("mesh:dims=3x3", 9, 0, 12, 4),
        ("hypercube:d=4", 16, 0, 32, 4),
        ("dragonfly:p=2,a=4,h=2", 72, 36, 162, 5),
        ("dragonfly:p=1,a=3,h=1", 12, 12, 30, 5),
    ],
)
def test_counts_and_diameters(name, hosts, switches, cables, longest):
    topology = named_topology(name)
    vertices = {channel.source for channel in topology.channels}
    assert (len(topology.hosts), len(vertices) - hosts, len(topology.channels) / 2) == (hosts, switches, cables)
    assert diameter(topology) == longest
    for source in range(0, hosts, 7):
        for dest in range(hosts):
            route = topology.route(source, dest)
            channels = [topology.channels[i] for i in route.channels]
            assert len(set(route.channels)) == len(channels) <= longest
            if source != dest:
                assert channels[0].source == topology.hosts[source] and channels[-1].target == topology.hosts[dest]
                assert all(a.target == b.source for a, b in itertools.pairwise(channels))


def loads(topology, pairs):
    count = [0] * len(topology.channels)
    for source, dest in pairs:
        for channel in topology.route(source, dest).channels:
            count[channel] += 1
    return count


def test_routes_spread_over_what_is_there():
    """A shift of a fat tree's hosts loads no channel twice (Zahavi 2012)."""
    for k in (4, 8):
        tree = named_topology(f"fat-tree:k={k}")
        hosts = len(tree.hosts)
        for shift in range(1, hosts, 5):
            assert max(loads(tree, [(i, (i + shift) % hosts) for i in range(hosts)])) == 1
    ring = named_topology("torus:dims=8")
    assert set(loads(ring, [(i, (i + 4) % 8) for i in range(8)])) == {2}
    assert set(loads(named_topology("torus:dims=4"), [(i, (i + 2) % 4) for i in range(4)])) == {1}


def test_oversubscription_narrows_what_is_above_the_edge():
    tree = named_topology("fat-tree:k=4,oversubscription=4,bandwidth=8e9")
    widths = [tree.channels[i].bandwidth for i in tree.route(0, 15).channels]
    assert widths == [8e9, 2e9, 2e9, 2e9, 2e9, 8e9]


def test_a_graph_is_routed_by_the_fewest_channels():
    square = from_edges([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("c", "e", 1e9, 0)], hosts="abce")
    for source in range(4):
        for dest in range(4):
            expected = {"ab": 1, "ac": 2, "ae": 3, "bc": 1, "be": 2, "ce": 1}
            pair = "".join(sorted("abce"[source] + "abce"[dest]))
            assert len(square.route(source, dest).channels) == expected.get(pair, 0)
    assert square.route(0, 3).bandwidth == 1e9
    assert square.route(0, 3).latency == pytest.approx(1e-6)


def test_topologies_survive_a_file(tmp_path):
    for topology in (named_topology("torus:dims=3x4"), from_edges([("a", "b", 1e9), ("b", "c", 2e9, 1e-6)])):
        network = Network.on(topology, ranks_per_host=2, overhead=1e-7).place_ranks("round robin")
        network.save(tmp_path / "network.json")
        assert Network.load(tmp_path / "network.json") == network == find_network(str(tmp_path / "network.json"))
    (tmp_path / "edges.json").write_text(json.dumps({"edges": [[0, 1], [1, 2, 1e9]]}))
    assert len(find_network(str(tmp_path / "edges.json")).topology.hosts) == 3
    (tmp_path / "short.json").write_text(json.dumps({"kind": "mesh", "options": {"dims": [2, 2]}}))
    assert load_topology(tmp_path / "short.json") == named_topology("mesh:dims=2x2")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: from_edges([("a", "b"), ("c", "d")]), "not connected.*c cannot be reached from a"),
        (lambda: from_edges([("a", "b")], directed=True), "a cannot be reached from b"),
        (lambda: from_edges([("a", "b", 0.0)]), "from a to b has bandwidth 0.0"),
        (lambda: from_edges([("a", "b", 1e9, -1.0)]), "from a to b has latency -1.0"),
        (lambda: from_edges([("a", "b"), ("a", "b")]), "two channels from a to b"),
        (lambda: from_edges([("a",)]), "an edge is"),
        (lambda: Topology([], []), "at least one host"),
        (lambda: Topology(["a", "a"], []), "named twice"),
        (lambda: named_topology("tree:k=4"), "no topology 'tree': there are star, nodes"),
        (lambda: named_topology("fat-tree:k=5"), "even number of ports"),
        (lambda: named_topology("fat-tree:k=4,oversubscription=0"), "oversubscription=0"),
        (lambda: named_topology("fat-tree"), "needs k: for example fat-tree:k=8"),
        (lambda: named_topology("fat-tree:ports=4"), "no option 'ports'"),
        (lambda: named_topology("torus:dims=4xa"), "no number"),
        (lambda: named_topology("star:hosts=0"), "hosts must be a whole number >= 1"),
        (lambda: named_topology("star:1,2,3,4"), "takes at most 3 options"),
        (lambda: find_network("ethernet"), "no network named 'ethernet': give a name .workstation"),
        (lambda: Network.star(4).nodes_of(5), "5 ranks do not fit on 4 hosts with 1 each.*ranks_per_host=2"),
        (lambda: Network.star(4).place_ranks([0, 1, 9]), "no host 9"),
        (lambda: Network.star(4).place_ranks([0, 1]).nodes_of(3), "names the hosts of 2"),
        (lambda: Network.star(4).place_ranks("backwards"), "not 'backwards'"),
        (lambda: Network.hockney(1, 1).place_ranks("random"), "has none"),
        (lambda: price(ALGORITHMS["allreduce"]["ring"], 9, 9, 4, "torus:dims=2x4"), "9 ranks do not fit on 8 hosts"),
    ],
)
def test_what_is_no_network_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_where_ranks_are_placed_decides_what_they_share():
    """A ring in order leaves each node once; with its ranks dealt out, every message does, over one cable a node."""
    network = Network.nodes(4, 4)
    ring = ALGORITHMS["allreduce"]["ring"]
    in_order = price(ring, 16, 10**6, 4, network)
    dealt = price(ring, 16, 10**6, 4, network.place_ranks([4 * (r % 4) + r // 4 for r in range(16)]))
    assert dealt.seconds > 3.5 * in_order.seconds
    assert sum(dealt.traffic) == 16 * 30 * 4 * 250_000 > sum(in_order.traffic)
    assert network.place_ranks("random", 3).placement != network.place_ranks("random", 4).placement
    both = Network.on(named_topology("star:4"), ranks_per_host=2)
    assert both.nodes_of(8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert both.place_ranks("round robin").nodes_of(8) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert price(ring, 8, 1000, 4, both).bytes_between == price(ring, 8, 1000, 4, both).bytes / 2
    dealt = both.place_ranks("round robin")
    assert price(ring, 8, 1000, 4, dealt).bytes_between == price(ring, 8, 1000, 4, dealt).bytes
    two_level = ALGORITHMS["allreduce"]["two_level"]
    assert price(two_level, 8, 8000, 4, dealt).bytes_between == price(two_level, 8, 8000, 4, both).bytes_between


@pytest.mark.parametrize("name", ["star:hosts=5", "nodes:nodes=3,ranks=4", "nodes:nodes=1,ranks=3", "backbone:hosts=5"])
def test_the_one_way_there_is_needs_no_search(name):
    """A breadth-first search for every destination is quadratic in the hosts."""
    topology = named_topology(name)
    searched = Topology(topology.hosts, topology.channels)
    for source, dest in itertools.product(range(len(topology.hosts)), repeat=2):
        assert topology.route(source, dest) == searched.route(source, dest)
    assert searched.distances and not topology.distances


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "name"), [("star:hosts=65536", "ring"), ("torus:dims=256x256", "bucket")])
def test_a_block_stands_for_65536_ranks(shape, name):
    network, size, itemsize = find_network(f"{shape},bandwidth=1e9,latency=1e-6"), 1 << 16, 4
    got = price(ALGORITHMS["allreduce"][name], size, size, itemsize, network)
    rounds, blocks = (2 * (size - 1), 2 * (size - 1)) if name == "ring" else (4 * 255, 2 * (size - 1))
    latency = network.topology.route(0, 1).latency
    assert got.method == "one block for all"
    assert got.seconds == pytest.approx(rounds * latency + blocks * itemsize / 1e9, rel=1e-9)


@pytest.mark.exhaustive
def test_too_large_a_block_is_refused_before_its_schedules_are_read():
    """1,024 ranks of a pod with 131,070 rounds: comparing those takes many minutes."""
    with pytest.raises(ValueError, match="no small block of ranks stands for all"):
        price(ALGORITHMS["allreduce"]["ring"], 1 << 16, 1 << 16, 4, Network.fat_tree(64))
