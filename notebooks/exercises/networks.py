"""The checks and pictures of 17_networks.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, ORANGE
from collectives import ALGORITHMS, price
from collectives.pricing.flows import max_min_rates


def draw_on_tree(names, tree, sizes):
    """Microseconds of allreduces on the fat tree."""
    _, ax = plt.subplots(figsize=(7, 3.4))
    for name in names:
        times = [price(ALGORITHMS["allreduce"][name], 16, int(n) // 4, 4, tree).seconds for n in sizes]
        ax.loglog(sizes, 1e6 * np.array(times), "o-", ms=3, label=name)
    ax.set(title="Allreduce on a fat tree with 4:1", xlabel="bytes", ylabel="microseconds")
    ax.legend()
    plt.show()


def draw_found(times, names, nbytes, found):
    """Milliseconds of algorithms, and of the schedule that was found."""
    _, ax = plt.subplots(figsize=(7, 2.8))
    ax.barh(list(times), [1e3 * t for t in times.values()], color=[BLUE] * len(names) + [ORANGE])
    ax.axvline(1e3 * nbytes * found.bound, color=GREY, ls="--")
    ax.set(title="64 MiB on a ring with a slow cable and a chord (dashed: the bound)", xlabel="milliseconds")
    plt.show()


@checks.explain_errors
def check_rates(rates):
    routes, capacities = ["AB", "A", "B", "B"], {"A": 10, "B": 12}

    def draw(got, want):
        _, ax = plt.subplots(figsize=(6, 2.6))
        places = np.arange(len(want))
        ax.bar(places - 0.2, want, 0.4, color=GREY, label="wanted")
        ax.bar(places + 0.2, got, 0.4, color=BLUE, label="yours")
        ax.set_xticks(places, [f"over {' and '.join(route)}" for route in routes])
        ax.set(title="Rates of four messages on two links", ylabel="bytes a second")
        ax.legend()

    got = checks.numbers(rates, routes, capacities, shape=(4,))
    want = [rate for rate, _ in max_min_rates(routes, capacities, [np.inf] * 4)]
    checks.same(got, want, "the rates of messages over A and B, A, B, B", draw=draw)
    checks.right("4, 6, 4 and 4: link B is full first, and what its message leaves of A goes to the other one")
    draw(got, want)


@checks.explain_errors
def check_cut(cut, tree, torus):
    pod = {"h0", "h1", "h2", "h3", "edge0", "edge1", "aggregation0", "aggregation1"}
    cases = [(tree, {"h0"}), (tree, {"h0", "h1", "edge0"}), (tree, pod), (torus, {f"h{i}" for i in range(8)})]
    got = np.array([checks.numbers(cut, network.topology, inside) for network, inside in cases])
    want = np.array([1 / 12.5e9, 1 / (2 * 3.125e9), 1 / (4 * 3.125e9), 1 / (8 * 12.5e9)])
    checks.same(got, want, "a byte's seconds by cuts around a host, a switch, a pod, half of the torus")
    checks.right("a switch with its two hosts is the narrowest place of this tree")
