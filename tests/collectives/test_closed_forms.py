"""The closed form of every algorithm is what the simulation finds, for 1 to 33 ranks on a network of one level."""

import dataclasses
import inspect

import pytest

from collectives import ALGORITHMS
from collectives.algorithms.registry import NODES, SHARED_MEMORY, Cost
from collectives.pricing.networks import Network
from collectives.pricing.price import price

ALPHA, BETA, GAMMA, COPY, MEET = 3e-6, 1e-9, 2e-10, 5e-10, 7e-7
ITEM = 8

# Exact for a power of two and no gamma. Otherwise bounds: lowest and highest time over closed form.
# Folding: a rank that folds no one sends while its partner still receives, and the two messages share a port.
FOLDED = {
    ("allgather", "doubling"): (1, 1.1),
    ("allreduce", "rabenseifner"): (1, 1.2),
    ("reduce", "halving_gather"): (1, 1.2),
    ("reduce_scatter", "halving"): (0.97, 1.1),
    ("allreduce", "swing"): (1, 1.22),
    # Some subtrees are larger than half of the ranks; some rounds of PAT need several slices.
    ("scatter", "bine"): (1, 1.06),
    ("gather", "bine"): (1, 1.06),
    ("allgather", "pat"): (1, 1.39),
    ("reduce_scatter", "pat"): (1, 1.39),
}
# Additions: the closed form counts them one after another, but some ranks make theirs while others send.
OVERLAPPING = {
    ("reduce", "binomial"): (0.9, 1),
    ("reduce", "bine"): (0.87, 1),
    ("allreduce", "bine"): (0.89, 1),
    ("reduce", "direct_gather"): (0.98, 1),
    ("allreduce", "reduce_broadcast"): (0.94, 1),
    ("allreduce", "doubling"): (0.89, 1),
    ("reduce_scatter", "doubling"): (0.89, 1),
    ("scan", "doubling"): (0.89, 1),
    ("exscan", "doubling"): (0.88, 1),
}
# Pipelining: segments of the two trees delay each other.
PIPELINED = {("allreduce", "double_tree"): (0.8, 1.25)}
# Nodes of two ranks: a rank alone on its node has no barrier; arrays that a node sees need fewer copies.
TWO_LEVELS = {
    ("allreduce", "shared_two_level"): (0.99, 1.13),
    ("allreduce", "shared_two_level_arrays"): (0.87, 1.03),
}

FEW = [*range(1, 10), 12, 13, 16, 17]
OTHERS = [p for p in range(10, 34) if p not in FEW]
FORMS = [(operation, name) for operation in ALGORITHMS for name in ALGORITHMS[operation]]


def bounds(operation, name, p, gamma):
    """Lowest and highest time over closed form; None where they are equal."""
    key, power = (operation, name), p & (p - 1) == 0
    if key in PIPELINED and p > 1:
        return PIPELINED[key]
    if key in TWO_LEVELS and p > 1:
        return TWO_LEVELS[key]
    if key in FOLDED and not power:
        return FOLDED[key]
    if key in OVERLAPPING and gamma and (not power or name == "direct_gather"):
        return OVERLAPPING[key]
    return None


def both(operation, name, p, gamma, count, **options):
    """Seconds by simulation, and by the closed form."""
    entry, network = ALGORITHMS[operation][name], Network.hockney(ALPHA, BETA, gamma)
    in_bytes = ITEM * BETA, ITEM * gamma
    if SHARED_MEMORY in entry.needs:
        barriers, here = ((2, MEET), (33, 32 * MEET)), 2 if NODES in entry.needs else p
        network = dataclasses.replace(network, copy=COPY, barriers=barriers, ranks_per_node=here)
        in_bytes += (here - 1) * MEET, ITEM * COPY
    if operation == "barrier":  # no vector; a message is one element
        count, cost = None, Cost(*entry.cost(p, 0))
    else:
        known = inspect.signature(entry.cost).parameters
        cost = entry.cost(p, count, **{name: value for name, value in options.items() if name in known})
    return price(entry, p, count, ITEM, network, **options).seconds, cost.seconds(ALPHA, *in_bytes)


@pytest.mark.parametrize(("operation", "name"), FORMS)
@pytest.mark.parametrize(
    "ranks", [pytest.param(FEW, id="some"), pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive)]
)
def test_closed_form(operation, name, ranks):
    met = set()
    for p in ranks:
        for gamma in (0.0, GAMMA):
            simulated, closed = both(operation, name, p, gamma, 64 * p)
            if limits := bounds(operation, name, p, gamma):
                assert limits[0] * closed * (1 - 1e-9) <= simulated <= limits[1] * closed * (1 + 1e-9), (p, gamma)
                met.add(simulated == pytest.approx(closed, rel=1e-9))
            else:
                assert simulated == pytest.approx(closed, rel=1e-12, abs=1e-18), (p, gamma)
    assert met != {True}, "a bound that is always met exactly is no bound: say that it is exact"


@pytest.mark.parametrize("name", ["chain", "segmented_ring", "double_tree"])
def test_many_segments(name):
    """As many bytes as make from 2 to 32 segments; smaller segments would show the same and take longer to simulate."""
    segment = 96
    operation = "broadcast" if name == "chain" else "allreduce"
    for p in (2, 3, 4, 8, 31):
        for k in (2, 5, 32):
            whole = segment * k * {"chain": 1, "segmented_ring": p, "double_tree": 2}[name]
            simulated, closed = both(operation, name, p, GAMMA, whole, segment=segment)
            if name == "double_tree":
                assert 0.8 * closed <= simulated <= 1.25 * closed, (p, k, simulated / closed)
            else:
                assert simulated == pytest.approx(closed, rel=1e-12), (p, k)


SHARED = [(operation, name) for operation, name in FORMS if ALGORITHMS[operation][name].needs == {SHARED_MEMORY}]


@pytest.mark.parametrize(("operation", "name"), [form for form in SHARED if form[1] == "shared_slots"])
def test_many_turns(operation, name, monkeypatch):
    """One turn, two, and more, of short slots."""
    from collectives.algorithms import shared

    monkeypatch.setattr(shared, "SLOT_SIZE", 1024)
    for p in (2, 3, 4, 8):
        whole = p * shared.share_of_slot(shared.SLOT_SIZE, p, shared.LINE_SIZE)
        for k in (1, 2, 5):
            simulated, closed = both(operation, name, p, GAMMA, k * whole, slot=shared.SLOT_SIZE)
            assert simulated == pytest.approx(closed, rel=1e-12), (p, k)


@pytest.mark.parametrize(("operation", "name"), SHARED)
def test_closed_form_of_node_memory_where_there_are_too_many_steps(operation, name, monkeypatch):
    from collectives.pricing import price as pricing

    walked = both(operation, name, 4, GAMMA, 256)[0]
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 0)
    monkeypatch.setattr(pricing, "messages_if_alike", lambda *arguments: None)
    assert both(operation, name, 4, GAMMA, 256)[0] == pytest.approx(walked)


def test_large_vectors_are_priced_by_the_closed_form_in_elements(monkeypatch):
    """Segments are of so many elements, whatever their length in bytes."""
    from collectives.pricing import price as pricing

    network = Network.hockney(ALPHA, BETA, GAMMA)
    entry, p, count = ALGORITHMS["broadcast"]["chain"], 7, 1 << 20
    walked = price(entry, p, count, ITEM, network)
    monkeypatch.setattr(pricing, "SIMULATED_AT_MOST", 20)
    closed = price(entry, p, count, ITEM, network)
    assert (walked.method, closed.method) == ("simulation", "closed form")
    assert closed.seconds == pytest.approx(walked.seconds)


def test_a_closed_form_goes_by_the_segment_that_is_asked_for():
    network = Network.hockney(1e-6, 1e-9)
    tree = ALGORITHMS["allreduce"]["double_tree"]
    many = [price(tree, 2**14, 2**22, 4, network, segment=segment) for segment in (2**10, 2**14)]
    assert [price.method for price in many] == ["closed form"] * 2
    costs = [tree.cost(2**14, 2**22, segment=segment).seconds(1e-6, 4e-9) for segment in (2**10, 2**14)]
    assert [price.seconds for price in many] == pytest.approx(costs) and costs[0] != costs[1]
