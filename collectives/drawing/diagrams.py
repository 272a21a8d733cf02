"""Drawings: who sends what to whom and when, who has what, and what was measured.

    draw(allreduce.ring, 4, 4)                              space-time diagram: ranks across, rounds down
    draw(allreduce.ring, 8, 1 << 20, network="gpu-25g")     the same, with time as the simulation prices it
    draw_buffers(allreduce.ring, 4, 4)                      what every rank's buffers hold after every round
    animate("ring.gif", allreduce.ring, 4, 4)               both, moving; a .gif or .html file (film.py)
    draw_timeline(events)                                   what ranks did when, measured or priced (timeline.py)

An algorithm is any generator function of steps.py, or an entry of ALGORITHMS. The simulation reads it, on a network
where every message takes one unit of time unless another is given. A colour is a place in the vector: a message has the
colour of the place where its elements stood at first, whatever scratch they have passed through since.

A schedule that breaks a rule, hangs or leaves a message behind is drawn up to and with the round where it fails, with
who waits for whom in red; what an operation should compute is known to `collectives.check(...).draw()` only.

Each returns a Figure that belongs to no window: a notebook shows it, `figure.savefig(file)` writes it. Matplotlib is
imported when something is first drawn.
"""

import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from collectives.algorithms.registry import NODES
from collectives.checking.simulator import (
    Deadlock,
    LengthMismatch,
    Race,
    RuleBroken,
    ScheduleError,
    UnreceivedMessages,
    simulate,
)
from collectives.drawing import arrows, marks
from collectives.drawing.contents import Replay
from collectives.pricing.event_simulation import EventSimulation
from collectives.pricing.networks import ROUNDS, Network, find_network
from collectives.pricing.price import as_price, price, read
from collectives.steps import Blocks, reads, writes

SIMULATED = 1 << 16  # elements of all ranks together, up to which a schedule is tried before it is drawn
MOST_ROUNDS = 12  # of a schedule that fails very late, or never ends: the first ones, and the one where it does


def draw(
    algorithm: Callable,
    size: int,
    count: Blocks,
    ax=None,
    *,
    network: Network | str | None = None,
    itemsize: int = 4,
    title: str | None = None,
    **options,
):
    """Space-time diagram of an algorithm: an arrow for every message. Readable up to 16 ranks.

    Parameters
    ----------
    algorithm : generator function or entry of ALGORITHMS
    size, count : int
        Ranks and elements of the vector (or a list of blocks).
    ax : matplotlib Axes, optional
        Where to draw; else a figure is made.
    network : Network or str, optional
        Draw time as priced on it; without it a message takes one unit and time is rounds.
    itemsize : int
        Bytes of an element, for the simulation.
    title : str, optional
        In place of the algorithm's name.
    **options
        For the algorithm: root, segment and the like.

    Returns
    -------
    matplotlib Figure

    Examples
    --------
    >>> import collectives
    >>> ring = collectives.ALGORITHMS["allreduce"]["ring"]
    >>> figure = collectives.draw(ring, 4, 8)
    >>> type(figure).__name__
    'Figure'
    """
    if (error := failure(algorithm, size, count, options)) is not None:
        return draw_failure(algorithm, size, count, error, ax, title=title)
    scene = Scene.of(algorithm, size, count, network, itemsize, options)
    if ax is None:
        below = arrows.inches_below(scene.key())
        ax = marks.new_axes(marks.width_of(size), marks.depth_of(scene.priced, scene.network), below)
    draw_scene(ax, scene)
    marks.rank_heads(ax, range(size))
    marks.headline(ax, title or read(algorithm)[0], scene.summary())
    arrows.legend(ax, scene.replay, scene.key())
    return ax.figure


def draw_scene(ax, scene, alpha=1.0):
    """All but heading and legend."""
    arrows.time_space(ax, scene.size, scene.priced, scene.network)
    arrows.borders(ax, scene.nodes)
    arrows.draw_messages(ax, scene.priced, scene.replay, scene.network, scene.itemsize, alpha)
    arrows.draw_works(ax, scene.priced, scene.replay, scene.network, alpha)


def draw_failure(algorithm: Callable, size: int, count: Blocks, error: ScheduleError, ax=None, *, title=None):
    """Space-time diagram of a schedule that fails: the rounds that ran before, and where and why it does.

    Parameters
    ----------
    algorithm, size, count, ax, title
        As for `draw`.
    error : ScheduleError
        What `simulate` or `prove` raised for it.

    Returns
    -------
    matplotlib Figure
    """
    done = [[tuple(steps) for steps in rounds] for rounds in error.done]
    longest = max(map(len, done))
    dropped = longest - MOST_ROUNDS if longest > 4 * MOST_ROUNDS else 0
    if dropped:
        done = [rounds[:MOST_ROUNDS] for rounds in done]
    begun = [tuple(steps) for steps in error.begun]
    programs = [rounds + [steps] * bool(steps) for rounds, steps in zip(done, begun, strict=True)]
    name = read(algorithm)[0]
    simulation = EventSimulation(programs.__getitem__, name, size, 1, ROUNDS, True, unfinished=True)
    priced = as_price(simulation, "simulation")
    spans = {(span.rank, span.index): span for span in priced.trace.rounds}
    # A rank is stuck when it has finished all rounds that it could.
    stuck = [
        spans[rank, len(rounds)].start if begun[rank] else float(priced.finish[rank])
        for rank, rounds in enumerate(done)
    ]
    failed = {} if error.round is None else {error.rank: stuck[error.rank]}
    if isinstance(error, Deadlock):
        failed = {rank: stuck[rank] for rank in error.waits}
    if isinstance(error, Race) and error.other in spans:
        other = spans[error.other]
        failed.setdefault(other.rank, other.start)
    priced = replace(priced, seconds=max([priced.seconds, *(start + 1 for start in failed.values())]))
    scene = Scene(priced, Replay(priced.trace, size, total_of(count)), ROUNDS, 1, [0] * size)
    signs = {
        "failed": failed,
        "waits": isinstance(error, Deadlock),
        "lost": priced.trace.lost,
        "result": error.rank is not None and not failed,
    }
    key = scene.key([sign for sign, there in signs.items() if there])
    message = said_briefly(error, marks.width_of(size))
    if ax is None:
        below = arrows.inches_below(key) + 0.16 * len(message) + 0.1
        ax = marks.new_axes(marks.width_of(size), marks.depth_of(priced, ROUNDS), below)
    draw_scene(ax, scene)
    marks.rank_heads(ax, range(size))
    for rank, start in failed.items():
        arrows.frame(ax, rank, start, start + 1)
    if isinstance(error, Deadlock):
        circle = set(zip(error.cycle, error.cycle[1:], strict=False))
        for rank, others in error.waits.items():
            for other in others:
                arrows.waits_for(ax, rank, other, stuck[rank] + 0.5, (rank, other) in circle)
    for flight in priced.trace.lost:
        arrows.lost_message(ax, flight, 1.0)
    if signs["result"]:
        arrows.cross(ax, error.rank, priced.seconds)
    heading = f"{title or read(algorithm)[0]}: {kind_of(error)}"
    case = f"{marks.plural(size, 'rank')}, {marks.plural(total_of(count), 'element')}"
    if dropped:
        case += f"; rounds {MOST_ROUNDS} to {longest - 1:,} are not drawn"
        rows = [int(y) for y in ax.get_yticks()]
        ax.set_yticks(ax.get_yticks(), [f"{row + dropped * (row >= MOST_ROUNDS):,}" for row in rows])
    marks.headline(ax, heading, case)
    arrows.legend(ax, scene.replay, key)
    words = dict(va="top", color=marks.RED, fontsize=8.5, linespacing=1.3, parse_math=False)
    ax.annotate("\n".join(message), (0, 0), (0, -72 * arrows.inches_below(key)), **words, **marks.points_off())
    return ax.figure


def kind_of(error) -> str:
    """Return what is wrong, in two words."""
    for kind, words in (
        (Deadlock, "ranks wait for ever"),
        (UnreceivedMessages, "messages that no rank received"),
        (Race, "two ranks race"),
        (RuleBroken, "breaks a rule"),
        (LengthMismatch, "wrong length"),
    ):
        if isinstance(error, kind):
            return words
    return "wrong step" if error.round is not None else "wrong result"


def said_briefly(error, inches) -> list[str]:
    """Return the message of an error in lines for below a picture, at most eight."""
    message = str(error).splitlines()
    if isinstance(error, Deadlock) and len(message) > 4:  # the picture shows who waits for whom
        message = [message[0], *(["cycle: " + " -> ".join(map(str, error.cycle))] if error.cycle else message[1:3])]
    lines = [line for text in message for line in textwrap.wrap(text, int(14.5 * inches), subsequent_indent="    ")]
    return lines if len(lines) <= 8 else [*lines[:7], "..."]


def draw_buffers(algorithm: Callable, size: int, count: Blocks, ax=None, *, title: str | None = None, **options):
    """Draw what the buffers of every rank hold: ranks across, rounds down.

    Each square is one buffer: across it the vector, down it the ranks. A filled cell says that this rank's data is in
    this element; a column takes its full colour once it is as it will be at the end.

    Parameters
    ----------
    algorithm, size, count, ax, title, **options
        As for `draw`.

    Returns
    -------
    matplotlib Figure

    Examples
    --------
    >>> import collectives
    >>> ring = collectives.ALGORITHMS["allreduce"]["ring"]
    >>> type(collectives.draw_buffers(ring, 4, 8)).__name__
    'Figure'
    """
    scene = Scene.of(algorithm, size, count, None, 1, options)
    replay, names = scene.replay, scene.buffers()
    times = np.unique([time for rank in replay.times for time in rank])
    pitch, down = marks.SQUARE * len(names) + 0.14, 1.2
    wide, deep = size * pitch - 0.14, len(times) * down
    # In the middle below the number of the rank: a rank that lacks a buffer has no hole in its place.
    lefts = [rank * pitch + marks.SQUARE * (len(names) - len(scene.buffers(rank))) / 2 for rank in range(size)]
    if ax is None:
        side = 0.66 if size <= 8 else 0.5
        ax = marks.new_axes(max(wide * side, 3.2), deep * side)
    for row, time in enumerate(times):
        for rank, left in enumerate(lefts):
            marks.draw_squares(ax, replay, scene.buffers(rank), rank, time, left, row * down)
        ax.text(-0.2, row * down + 0.5, _when(times, row), ha="right", va="center", color=marks.GREY, fontsize=9)
    ax.set(xlim=(-0.05, wide), ylim=(deep - 0.1, -0.1), aspect="equal", anchor="NW")
    ax.axis("off")
    marks.rank_heads(
        ax, [rank * pitch + (marks.SQUARE * len(names) - 0.08) / 2 for rank in range(size)], 12 if names[1:] else 4
    )
    for rank, left in enumerate(lefts if names[1:] else ()):
        marks.buffer_heads(ax, scene.buffers(rank), left + 0.5, marks.SQUARE)
    marks.headline(ax, title or read(algorithm)[0], scene.summary(), 35 if names[1:] else 26)
    below = "Across a square: the vector. Down: a row for each rank\nwhose data is in it. Full colour: as it will stay."
    ax.annotate(below, (0, 0), (0, -8), va="top", color=marks.GREY, fontsize=8.5, linespacing=1.5, **marks.points_off())
    return ax.figure


# ---------------------------------------------------------------------------------------------- what is drawn


class Scene:
    """One run of an algorithm, priced with its trace, and what every buffer held.

    Parameters
    ----------
    priced : Price
    replay : Replay
    network : Network
    itemsize : int
    nodes : list of int
        The node of each rank.
    place : str
        The network in words; empty for rounds.
    vector : bool
        Whether there is one: a barrier has none.
    """

    def __init__(self, priced, replay, network, itemsize, nodes, place="", vector=True):
        self.vector = vector
        self.priced, self.replay, self.network, self.itemsize = priced, replay, network, itemsize
        self.nodes, self.size, self.place = nodes, len(priced.finish), place

    @classmethod
    def of(cls, algorithm, size, count, network, itemsize, options):
        place = network if isinstance(network, str) else "" if network is None else "the network given"
        if isinstance(network, str):
            network = find_network(network)
        network = ROUNDS if network is None else network
        options = with_nodes(algorithm, size, options) if network is ROUNDS else options
        priced = price(algorithm, size, count, itemsize, network, trace=True, **options)
        nodes = options.get("nodes") or network.nodes_of(size)
        replay = Replay(priced.trace, size, 1 if count is None else count)
        return cls(priced, replay, network, itemsize, nodes, place, count is not None and replay.total > 0)

    def buffers(self, rank: int | None = None) -> list[str]:
        """x, y, then scratch: those of a rank, or all that any rank has."""
        states = self.replay.states if rank is None else [self.replay.states[rank]]
        names = {name for each in states for name in each[-1]}
        return sorted(names, key=lambda name: ("xy".find(name) % 3, name))

    def key(self, wrong=()):
        return arrows.key_of(self.priced, self.nodes, self.network, wrong)

    def summary(self) -> str:
        """Return what stands below the title: numbers, and what they are."""
        priced, total = self.priced, self.replay.total
        in_rounds = self.network is ROUNDS
        rounds = int(priced.seconds) if in_rounds else priced.rounds  # local moves alone are no round of a drawing
        words, meaning = [marks.plural(self.size, "rank"), marks.plural(rounds, "round")], []
        if priced.barriers:
            words.append(marks.plural(priced.barriers, "barrier"))
        if self.vector and priced.messages:
            words.append(f"each sends at most {priced.busiest / (total * self.itemsize):.3g} n")
        elif self.vector and priced.copied:
            words.append(f"each writes at most {self.most_copied() / total:.3g} n")
        if self.vector and (priced.messages or priced.copied):
            meaning.append("n: elements of the vector")
        if not in_rounds:
            unit, symbol = marks.unit_of(priced.seconds)
            place = f"on {self.place}, {marks.plural(len(set(self.nodes)), 'node')}"
            meaning.insert(0, f"{priced.seconds / unit:.3g} {symbol} {place}")
        return "\n".join(filter(None, (" · ".join(words), "; ".join(meaning))))

    def most_copied(self) -> int:
        """Return the most elements that a rank wrote in memory, its own or others'."""
        written = [0] * self.size
        for work in self.priced.trace.works:
            for place in reads(work.step, work.rank) and writes(work.step, work.rank):
                written[work.rank] += place.hi - place.lo
        return max(written)


def with_nodes(algorithm, size, options) -> dict:
    """Two nodes, where an algorithm asks for nodes and nobody says which."""
    if NODES in getattr(algorithm, "needs", ()) and "nodes" not in options:
        return options | {"nodes": [2 * rank // size for rank in range(size)]}
    return options


def total_of(count: Blocks | None) -> int:
    """Elements of the vector; a barrier has none, but one is drawn."""
    return 1 if count is None else count if isinstance(count, int) else max(hi for _, hi in count)


def failure(algorithm, size, count, options) -> ScheduleError | None:
    """Return what a simulation finds, of a vector that is short enough to simulate."""
    total = total_of(count)
    if size * total > SIMULATED:
        return None
    rounds, options = read(algorithm)[1], with_nodes(algorithm, size, options)
    called = partial(rounds, **options) if count is None else lambda rank, size: rounds(rank, size, count, **options)
    values = lambda rank: [((rank, i),) for i in range(total)]
    try:
        simulate(lambda rank: called(rank, size), [{"x": values(r), "y": values(r)} for r in range(size)], False)
    except ScheduleError as error:
        return error
    return None


def _when(times, row):
    if row == 0:
        return "start"
    return f"round {row - 1}" if (times == np.arange(len(times))).all() else f"t = {times[row]:g}"
