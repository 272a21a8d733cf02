"""Schedules that are found: right, within a tenth of the bound, and ordinary schedules to every tool."""

import random
import time
from itertools import combinations

import numpy as np
import pytest

from collectives import check, draw, price, synthesize
from collectives.algorithms.registry import by_messages
from collectives.pricing.lower_bounds import bandwidth_bound, lower_bound
from collectives.pricing.networks import Network, find_network
from collectives.pricing.topology import from_edges
from collectives.synthesis import Schedule

G = 1e9
CLIQUES = [*combinations(range(4), 2), *combinations(range(4, 8), 2), (3, 4)]
# The hybrid cube mesh of eight GPUs: two rings of double links and single ones.
DGX = "01 02 03 03 04 04 12 12 13 15 15 23 23 26 26 37 45 46 46 47 47 56 56 57 67 67"
NAMED = {
    "star": Network.star(8, G, 0),
    "ring": Network.torus((8,), G, 0),
    "torus": Network.torus((4, 4), G, 0),
    "mesh": Network.mesh((3, 3), G, 0),
    "hypercube": Network.hypercube(3, G, 0),
    "thin link": Network.nodes(2, 4, G, 0),
    "fat tree": Network.fat_tree(4, 4, G, 0),
    "cliques": Network.from_edges([(a, b, G, 0) for a, b in CLIQUES]),
    "dgx": Network.from_edges(
        [(int(pair[0]), int(pair[1]), DGX.split().count(pair) * G, 0) for pair in sorted(set(DGX.split()))]
    ),
}


def any_graph(seed):
    """A connected graph of four to nine hosts with cables of one or two units."""
    rng = random.Random(seed)
    p = rng.randint(4, 9)
    edges = {(rng.randrange(i), i) for i in range(1, p)}
    edges |= {tuple(sorted(rng.sample(range(p), 2))) for _ in range(rng.randint(0, p))}
    return Network.from_edges([(a, b, rng.choice([1, 2]) * G, 0) for a, b in sorted(edges)])


def proven(operation, network, **options):
    found = synthesize(operation, network, **options)
    report = check(found, ranks=found.size, operation=operation, counts=[0, 3, 2 * found.size + 1])
    assert report, report.said
    return found


def share_as_priced(found, network):
    """The bound over what a schedule costs for a long vector."""
    count = 1_000_000 * found.pieces * (1 if found.operation == "allreduce" else found.size)
    return found.bound * 4 * count / price(found, found.size, count, 4, network).seconds


LARGER = {"mesh", "fat tree", "cliques", "hypercube"}  # the same proof on more networks


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in LARGER else name for name in NAMED]
)
def test_what_is_found_is_right_and_near_the_bound(name):
    network = NAMED[name]
    for operation in ("allgather", "reduce_scatter", "allreduce"):
        found = proven(operation, network, tries=30)
        assert 0.9 < found.share_of_bound < 1 + 1e-9, operation
        assert 0.9 < share_as_priced(found, network) < 1 + 1e-9, operation  # where ranks may run ahead of a step


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 20))]
)
def test_on_any_graph_too(seed):
    network = any_graph(seed)
    for operation, tries in (("allgather", 30), ("allreduce", 5)):
        found = proven(operation, network, tries=tries)
        assert found.share_of_bound > 0.9 and share_as_priced(found, network) > 0.9, operation


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["torus:dims=8x8", "star:64", "hypercube:6", "nodes:nodes=8,ranks=8"])
def test_sixty_four_ranks_take_less_than_a_minute(name):
    network = find_network(f"{name},latency=0")
    begin = time.process_time()
    found = synthesize("allreduce", network)
    assert time.process_time() - begin < 60
    assert found.share_of_bound > 0.9 and share_as_priced(found, network) > 0.9


def test_bounds_are_those_of_the_literature():
    """Blocks over one link, for unit links: of the allgather (lambda in ForestColl) and the allreduce."""
    per_block = lambda name, operation, p: bandwidth_bound(NAMED[name], operation) * G * p
    gather = {"star": 7, "ring": 3.5, "torus": 3.75, "mesh": 4, "hypercube": 7 / 3, "cliques": 4}
    reduce = {"star": 14, "ring": 7, "torus": 7.5, "mesh": 6, "hypercube": 14 / 3, "cliques": 8}
    for name, expected in gather.items():
        p = len(NAMED[name].topology.hosts)
        assert per_block(name, "allgather", p) == pytest.approx(expected, rel=1e-6), name
        assert per_block(name, "reduce_scatter", p) == pytest.approx(expected, rel=1e-6), name
        assert per_block(name, "allreduce", p) == pytest.approx(reduce[name], rel=1e-6), name


def test_the_bound_is_that_of_the_worst_cut():
    """All sets of vertices of small graphs, tried one by one."""
    for seed in range(6):
        topology = any_graph(seed).topology
        p, worst = len(topology.hosts), 0.0
        for number in range(1, p):
            for inside in map(set, combinations(topology.hosts, number)):
                width = sum(c.bandwidth for c in topology.channels if c.source in inside and c.target not in inside)
                worst = max(worst, number / width)
        assert bandwidth_bound(Network.on(topology), "allgather") == pytest.approx(worst / p, rel=1e-6)


def test_no_algorithm_of_the_registry_beats_the_bound_of_a_topology():
    from collectives import ALGORITHMS

    for name in ("torus", "mesh", "thin link"):
        network, p = NAMED[name], len(NAMED[name].topology.hosts)
        for operation in ("allgather", "reduce_scatter", "allreduce", "broadcast", "scatter", "alltoall"):
            least = lower_bound(operation, p, 4 * 720 * p, network)
            for entry in ALGORITHMS[operation].values():
                if not entry.name.startswith("shared") and not (entry.name == "swing" and name == "mesh"):
                    seconds = price(entry, p, 720 * p, 4, network).seconds
                    assert seconds > least * (1 - 1e-9), (name, operation, entry.name)


def test_an_unequal_link_is_used_better_than_by_a_ring():
    from collectives import ALGORITHMS

    network = NAMED["cliques"]
    found = synthesize("allreduce", network, tries=10)
    ring = price(ALGORITHMS["allreduce"]["ring"], 8, 10**6, 4, network).seconds
    assert price(found, 8, 10**6, 4, network).seconds < 0.8 * ring


def test_short_vectors_are_cut_into_fewer_pieces():
    """Each message takes 50 us of a processor, so more of them cost more than a narrow channel that stands empty."""
    edges = [(host, f"switch{host // 2}", 25e6, 0) for host in range(4)] + [("switch0", "switch1", 12.5e6, 0)]
    network = Network.on(from_edges(edges, range(4)), overhead=50e-6)
    seconds = lambda found, nbytes: price(found, 4, nbytes // 4, 4, network).seconds
    endless = synthesize("allreduce", network, tries=10)
    short, long = (proven("allreduce", network, tries=10, nbytes=nbytes) for nbytes in (1 << 18, 1 << 24))
    assert short.pieces < long.pieces
    assert seconds(short, 1 << 18) < 0.9 * seconds(endless, 1 << 18)
    assert seconds(short, 1 << 18) < 1.15 * (1 << 18) * short.bound
    assert seconds(long, 1 << 24) <= seconds(endless, 1 << 24) and seconds(long, 1 << 24) < seconds(short, 1 << 24)


def test_it_is_saved_printed_and_drawn(tmp_path):
    found = synthesize("allreduce", "torus:dims=2x3", tries=5)
    found.save(tmp_path / "found.json")
    again = Schedule.load(tmp_path / "found.json")
    assert all(list(again(r, 6, 13)) == list(found(r, 6, 13)) for r in range(6))
    assert (again.bound, again.seconds_per_byte) == (found.bound, found.seconds_per_byte)
    for operation in ("allreduce", "allgather", "reduce_scatter"):
        schedule = synthesize(operation, "torus:dims=2x3", tries=5)
        names = {}
        exec(compile(schedule.as_python(), "found.py", "exec"), names)
        assert check(names[operation], ranks=6, operation=operation)
    assert draw(found, 6, 12).axes
    assert list(synthesize("allreduce", "star:1")(0, 1, 5)) == []


@pytest.mark.parametrize(
    "text",
    ["{}", "[", '{"operation": "allreduce", "size": 2, "pieces": 1, "steps": [[[0, 1, 5, false]]]}',
     '{"operation": "allreduce", "size": 2, "pieces": 1, "steps": [[[0, 2, 0, false]]]}',
     '{"operation": "allreduce", "size": 2, "pieces": 1, "steps": [[[0, 1, 0, 1]]]}',
     '{"operation": "sort", "size": 2, "pieces": 1, "steps": []}'],
)  # fmt: skip
def test_files_that_hold_no_schedule_are_refused(tmp_path, text):
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(ValueError, match=r"wrong.json: not a schedule"):
        Schedule.load(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: synthesize("sort", "star:4"), "operation 'sort'; there are allgather"),
        (lambda: synthesize("allreduce", "gigabit"), "needs a network with a topology"),
        (lambda: synthesize("allreduce", "star:4", chunks=0), "chunks must be a whole number"),
        (lambda: synthesize("allreduce", "star:4", nbytes=-1), "nbytes must be a whole number"),
        (lambda: synthesize("allreduce", "star:129"), "129 ranks; up to 128"),
        (lambda: synthesize("allreduce", Network.on(NAMED["star"].topology, 2)), "one rank on each host"),
        (lambda: list(synthesize("allreduce", "star:3", tries=1)(0, 4, 4)), "found for 3 ranks, not 4"),
        (lambda: bandwidth_bound("gigabit"), "needs a network with a topology"),
        (lambda: bandwidth_bound("star:4", "scan"), "operation 'scan'"),
    ],
)
def test_what_cannot_be_searched_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("oversubscription", "seconds"), [(4, 14 / 4), (2, 2 * 15 / 16), (1, 2 * 15 / 16)])
def test_edge_switches_of_a_fat_tree_bound_an_allreduce(oversubscription, seconds):
    """Eight edge switches send 14 vectors in all, over two links each, or the hosts' own links bound it."""
    network = Network.fat_tree(4, oversubscription, G, 0)
    assert bandwidth_bound(network, "allreduce") * G == pytest.approx(seconds)
    count = 1 << 20
    times = [
        price(entry, 16, count, 4, network).seconds
        for name, entry in by_messages("allreduce").items()
        if name not in ("direct", "reduce_broadcast")  # slow
    ]
    assert min(times) >= 4 * count * seconds / G * (1 - 1e-9)


@pytest.mark.mpi(ranks=[2, 3], more=[4])
def test_what_is_found_runs(comm, ranks):
    from collectives import Communicator

    communicator, network = Communicator(comm), Network.torus((ranks,), G, 0)
    count = 3 * ranks * ranks
    x = np.arange(count, dtype=float) + comm.rank
    total = ranks * np.arange(count) + sum(range(ranks))
    block = slice(count // ranks * comm.rank, count // ranks * (comm.rank + 1))
    y = np.empty_like(x)
    communicator.Allreduce(x, y, algorithm=synthesize("allreduce", network, tries=3))
    np.testing.assert_array_equal(y, total)
    part = np.empty(count // ranks)
    communicator.Reduce_scatter_block(x, part, algorithm=synthesize("reduce_scatter", network, tries=3))
    np.testing.assert_array_equal(part, total[block])
    communicator.Allgather(part, y, algorithm=synthesize("allgather", network, tries=3))
    np.testing.assert_array_equal(y, total)
