"""A race: how long several algorithms take, priced or measured, over the bytes of the vector."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from collectives.algorithms.registry import Algorithm
from collectives.drawing import marks
from collectives.drawing.timeline import PALETTE
from collectives.pricing.lower_bounds import lower_bound
from collectives.pricing.networks import Network, find_network
from collectives.pricing.price import price
from collectives.steps import Round

MARKS = "os^Dvp<X"
SIZES = tuple(4**k for k in range(1, 14))  # bytes, to 64 MiB


def draw_race(
    runners: Mapping[str, Callable[..., Iterable[Round]] | list[float]],
    size: int,
    sizes: Sequence[int] = SIZES,
    ax=None,
    *,
    network: Network | str = "workstation",
    operation: str | None = "allreduce",
    title: str | None = None,
):
    """Draw the seconds of each algorithm against bytes, and what none can go below; in one call.

    Parameters
    ----------
    runners : dict of name -> algorithm or list of float
        Algorithms are priced; a list has the seconds measured for each of `sizes`.
    size : int
        Ranks.
    sizes : sequence of int
        Bytes of the vector.
    ax, title
        As for `draw`.
    network : Network or str
        That algorithms are priced on.
    operation : str, optional
        Whose lower bound is drawn; none where nothing is priced, or where it is None.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        No runners, or a list of measurements that is not as long as `sizes`.

    Examples
    --------
    >>> import collectives
    >>> runners = {name: collectives.ALGORITHMS["allreduce"][name] for name in ("ring", "doubling")}
    >>> type(collectives.draw_race(runners, 4, network="gigabit")).__name__
    'Figure'
    """
    if not runners or not isinstance(runners, dict):
        raise ValueError(f"a race needs runners: {{name: algorithm, or seconds measured}}, given {runners!r:.80}")
    network = find_network(network) if isinstance(network, str) else network
    if ax is None:
        ax = marks.new_axes(7.5, 3.6)
    for i, (name, runner) in enumerate(runners.items()):
        priced = is_algorithm(runner)
        seconds = [price(runner, size, n, 1, network).seconds for n in sizes] if priced else list(runner)
        if len(seconds) != len(sizes):
            raise ValueError(f"{name}: {len(seconds)} measurements for {len(sizes)} sizes")
        look = dict(color=PALETTE[i % len(PALETTE)], marker=MARKS[i % len(MARKS)], ms=5, lw=1.8)
        ax.plot(sizes, seconds, ls="-" if priced else ":", label=name, **look)
    if operation and any(map(is_algorithm, runners.values())):
        bound = [lower_bound(operation, size, n, network) for n in sizes]
        ax.plot(sizes, bound, "--", color=marks.INK, lw=1.4, label="lower bound")
    ax.set(xscale="log", yscale="log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(colors=marks.GREY, labelsize=9)
    ax.set_xlabel("bytes", color=marks.GREY, fontsize=9)
    ax.set_ylabel("seconds", color=marks.GREY, fontsize=9)
    marks.plain_key(ax.legend())
    marks.headline(ax, title or operation or "race", f"{size} ranks · lower is faster", 8)
    return ax.figure


def is_algorithm(runner) -> bool:
    """Return whether it is to be priced: a generator function, or an entry of the registry."""
    return callable(runner) or isinstance(runner, Algorithm)
