"""The table of algorithms on networks is what the simulation says."""

from collectives.choosing.derive import derive, tables
from collectives.choosing.selection import ANY, TABLE
from collectives.pricing.networks import Link, Network


def test_the_default_table_is_derived():
    for place, derived in tables("infiniband").items():
        assert TABLE[place] == derived


def test_long_latencies_and_narrow_cables_choose_otherwise():
    far, narrow = Link(1.0, 1e-9, gap=1.0), Link(1e-9, 1e-6, gap=1e-9)
    sizes = 1 << 10, 1 << 16
    for link, chosen in ((far, "doubling"), (narrow, "ring")):
        assert derive(Network(link, link), 1, sizes)["allreduce"] == [(ANY, chosen)]
