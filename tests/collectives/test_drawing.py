"""Drawings say what the schedule says: every message an arrow, in the colour of what it carries, at its time."""

import subprocess
import sys
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from conftest import PATIENCE
from matplotlib.colors import to_rgb
from PIL import Image

from collectives import ALGORITHMS, animate, check, draw, draw_buffers, draw_race, draw_timeline, price
from collectives.drawing.arrows import DASHES
from collectives.drawing.contents import NOWHERE, Replay
from collectives.drawing.diagrams import Scene
from collectives.drawing.marks import INK, RED, WHOLE, colour_at
from collectives.pricing.lower_bounds import lower_bound
from collectives.pricing.networks import ROUNDS, Network
from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Send, Slice, chunk

RING = ALGORITHMS["allreduce"]["ring"]


def ring(rank, size, count):
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        give, take = chunk(count, size, (rank - k) % size), chunk(count, size, (rank - k - 1) % size)
        yield Send(right, "x", *give), RecvReduce(left, "x", *take)
    for k in range(size - 1):
        give, take = chunk(count, size, (rank + 1 - k) % size), chunk(count, size, (rank - k) % size)
        yield Send(right, "x", *give), Recv(left, "x", *take)


def bruck(rank, size, count):
    """Allgather through rotated scratch: what is where is no longer where it was."""
    block = count // size
    yield (Copy("tmp", 0, block, "x", rank * block),)
    have = 1
    while have < size:
        more = min(have, size - have)
        recv = Recv((rank + have) % size, "tmp", have * block, (have + more) * block)
        yield Send((rank - have) % size, "tmp", 0, more * block), recv
        have += more
    yield Copy("x", rank * block, count, "tmp", 0), Copy("x", 0, rank * block, "tmp", (size - rank) * block)


def star(rank, size, count, root=0):
    if rank == root:
        yield tuple(Send(peer, "x", 0, count) for peer in range(size) if peer != root)
    else:
        yield (Recv(root, "x", 0, count),)


def replayed(algorithm, size, count, **options):
    trace = price(algorithm, size, count, 1, ROUNDS, trace=True, **options).trace
    return trace, Replay(trace, size, count)


def arrows(figure):
    """(tail x, tail y, head x, head y, colour) of every arrow."""
    found = []
    for text in figure.axes[0].texts:
        if (arrow := getattr(text, "arrow_patch", None)) is not None:
            found.append((*text.xyann, *text.xy, to_rgb(arrow.get_edgecolor())))
    return found


# ------------------------------------------------------------------------------------------------ who has what


def elements(replay, name, contents):
    """(who, where) of every element of a buffer."""
    lengths = np.diff(replay.bounds[name])
    starts = np.repeat(contents.where, lengths)
    within = np.concatenate([np.arange(length) for length in lengths])
    return np.repeat(contents.who, lengths), np.where(starts == NOWHERE, NOWHERE, starts + within)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_replay_of_a_ring(size):
    _, replay = replayed(ring, size, 3 * size)
    for rank in range(size):
        assert len(replay.states[rank]) == 2 * size - 1
        for k, state in enumerate(replay.states[rank][:size]):
            who, _ = elements(replay, "x", state["x"])
            for piece in range(size):
                # In round k, from 1, rank r adds its own to piece r - k, which has come from the k ranks to its left.
                behind = (rank - piece) % size
                added = behind if 1 <= behind <= k else 0
                expected = sum(1 << (rank - i) % size for i in range(added + 1))
                assert set(who[3 * piece : 3 * piece + 3]) == {expected}, (rank, k, piece)
        who, where = elements(replay, "x", replay.states[rank][-1]["x"])
        assert set(who) == {2**size - 1}
        assert list(where) == list(range(3 * size))
    assert list(replay.pieces) == list(range(0, 3 * size + 1, 3))


def test_replay_follows_elements_through_scratch():
    trace, replay = replayed(bruck, 5, 10)
    for flight, (origins, lengths) in zip(trace.flights, replay.carried, strict=True):
        places = [
            place for start, length in zip(origins, lengths, strict=True) for place in range(start, start + length)
        ]
        assert places == [(2 * flight.source + i) % 10 for i in range(flight.send.hi)]
    for rank in range(5):
        who, where = elements(replay, "x", replay.states[rank][-1]["x"])
        assert list(where) == list(range(10))
        assert [ranks.bit_length() - 1 for ranks in who] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        first, _ = elements(replay, "x", replay.states[rank][0]["x"])  # what will be overwritten unread is left out
        assert [i for i, ranks in enumerate(first) if ranks] == [2 * rank, 2 * rank + 1]


def test_replay_of_blocks_and_of_many_ranks():
    gather = ALGORITHMS["gather"]["binomial"]
    _, replay = replayed(gather, 6, 20, root=2)
    who, where = elements(replay, "y", replay.states[2][-1]["y"])
    owner = [r for r in range(6) for _ in range(*chunk(20, 6, r))]
    assert [ranks.bit_length() - 1 for ranks in who] == owner
    assert list(where) == list(range(20))
    _, replay = replayed(ALGORITHMS["reduce"]["binomial"], 70, 1)  # more ranks than an integer has bits
    assert replay.states[0][-1]["x"].who[0] == 2**70 - 1


def test_replay_does_not_depend_on_the_number_of_elements():
    for algorithm, cells in ((ring, 6), (bruck, 6)):
        _, replay = replayed(algorithm, 6, 6 * 10**12)
        assert len(replay.bounds["x"]) - 1 == cells
        assert replay.states[1][-1]["x"].where[3] == 3 * 10**12


def test_unwritten_scratch_has_no_origin():
    def careless(rank, size, count):
        peer = 1 - rank
        yield Send(peer, "tmp", 0, count), Recv(peer, "y", 0, count)

    def answered(rank, size, count):
        yield (
            (Send(0, "y", 0, count // 2), Send(1, "y", 0, count // 2))
            if rank > 1
            else (
                Recv(2, "x", 0, count // 2),
                Recv(3, "x", count // 2, count),
            )
        )

    _, replay = replayed(answered, 4, 4)
    assert sorted(origins.tolist() for origins, _ in replay.carried) == [[0, 1], [0, 1], [2, 3], [2, 3]], (
        "where it lands in x"
    )
    _, replay = replayed(careless, 2, 4)
    assert set(replay.carried[0][0]) == {NOWHERE}
    assert set(replay.states[0][-1]["y"].who) == {0}


# ------------------------------------------------------------------------------------------------ pictures


def test_every_message_is_an_arrow_of_its_colour():
    figure = draw(ring, 5, 10)
    found = arrows(figure)
    around = [a for a in found if abs(a[0] - a[2]) != 1 or not (0 <= a[0] <= 4 and 0 <= a[2] <= 4)]
    # 5 messages in each of 8 rounds; the one from rank 4 to rank 0 is drawn at both edges.
    assert len(found) == 5 * 8 + 8 and len(around) == 2 * 8
    for tail, start, head, end, colour in found:
        assert head - tail == 1 and end - start == 1
        round_, rank = round(start), round(tail) % 5
        piece = (rank - round_) % 5 if round_ < 4 else (rank + 1 - (round_ - 4)) % 5
        assert colour == pytest.approx(colour_at((piece + 0.5) / 5), abs=1e-6)
    signs = [line for line in figure.axes[0].lines if line.get_marker() == "+"]
    assert len(signs) == 5 * 4 and max(line.get_ydata()[0] for line in signs) == 4


def test_long_arrows_go_across_where_there_is_no_circle():
    found = arrows(draw(star, 6, 4, root=5))
    assert sorted(a[2] for a in found) == [0, 1, 2, 3, 4] and {a[0] for a in found} == {5}
    assert all(colour == pytest.approx(to_rgb(WHOLE)) for *_, colour in found)


def test_time_is_what_the_simulation_says():
    priced = price(ring, 6, 600_000, 4, "gpu-25g", trace=True)
    figure = draw(ring, 6, 600_000, network="gpu-25g")
    assert "time, ms" in figure.axes[0].get_ylabel()
    ends = {round(a[3], 9) for a in arrows(figure)}
    assert ends == {round(f.end * 1e3, 9) for f in priced.trace.flights}
    assert f"{priced.seconds * 1e3:.3g} ms" in " ".join(t.get_text() for t in figure.axes[0].texts)
    # Every message holds its ports for long here: a band for each, twice for those around the edge.
    around = sum(f.source == 5 for f in priced.trace.flights)
    assert len(figure.axes[0].patches) == len(priced.trace.flights) + around


@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((2, 5), marks=pytest.mark.exhaustive)], ids=max)
@pytest.mark.parametrize("operation", ALGORITHMS)
def test_every_algorithm_can_be_drawn(operation, sizes, tmp_path):
    for entry in ALGORITHMS[operation].values():
        for size in sizes:
            count = {"barrier": None, "alltoall": 2 * size}.get(operation, 13)  # an alltoall has blocks of one length
            figure = draw(entry, size, count)
            names = " ".join(t.get_text() for t in figure.axes[0].texts)
            assert f"{entry.name} {operation}".replace("_", " ") in names
            draw_buffers(entry, size, count)
    figure.savefig(tmp_path / "last.png")
    assert (tmp_path / "last.png").stat().st_size > 5000


def meant(figure):
    """What the legend says."""
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_shared_memory_is_drawn_as_dashed_arrows_and_bars():
    figure = draw(ALGORITHMS["allreduce"]["shared_arrays"], 3, 48)
    found = [text.arrow_patch for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    # Each rank reads two others' slices, and writes its own into two others.
    assert len(found) == 3 * 2 + 3 * 2 and all(patch.get_linestyle() == DASHES for patch in found)
    written = [a for a in arrows(figure) if a[1] == 3]
    assert sorted((tail, head) for tail, _, head, *_ in written) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    for tail, *_, colour in written:
        assert colour == pytest.approx(colour_at((tail + 0.5) / 3), abs=1e-6)
    bars = [line for line in figure.axes[0].lines if line.get_linewidth() > 3]
    assert [line.get_ydata()[0] for line in bars] == [0.5, 4.5]
    assert {min(bar.get_xdata()) for bar in bars} == {-0.12} and {max(bar.get_xdata()) for bar in bars} == {2.12}
    assert meant(figure) == [
        "copied between ranks' memory",
        "read from there, and added",
        "copied or added within the rank",
        "barrier: all wait for the last",
    ]


def test_a_meeting_of_some_reaches_no_further():
    def pairs(rank, size, count):
        yield (Barrier((rank, rank ^ 1)),)
        yield (Copy("y", 0, count, "x", 0, of=rank ^ 1),)

    figure = draw(pairs, 4, 2)
    bars = [line for line in figure.axes[0].lines if line.get_linewidth() > 3]
    assert sorted((min(bar.get_xdata()), max(bar.get_xdata())) for bar in bars) == [(-0.12, 1.12), (1.88, 3.12)]


def test_replay_follows_elements_through_memory_of_others():
    _, replay = replayed(ALGORITHMS["allreduce"]["shared_slots"], 3, 96, slot=48)
    for rank in range(3):
        who, where = elements(replay, "x", replay.states[rank][-1]["x"])
        assert set(who) == {7} and list(where) == list(range(96))
        assert replay.times[rank] == sorted(replay.times[rank])
    _, replay = replayed(ALGORITHMS["broadcast"]["shared_arrays"], 3, 5, root=1)
    assert set(replay.states[2][-1]["x"].who) == {2} and set(replay.states[2][0]["x"].who) == {0}


def test_computation_is_a_block_with_its_name():
    def twice(rank, size, count):
        yield Compute("double", (Slice("x", 0, count),), (Slice("y", 0, count),), 3.0), Send(1 - rank, "x", 0, count)
        yield (Recv(1 - rank, "z", 0, count),)

    figure = draw(twice, 2, 4)
    blocks = [patch.get_bbox() for patch in figure.axes[0].patches if hasattr(patch, "get_boxstyle")]
    assert [round((box.x0 + box.x1) / 2, 6) for box in blocks] == [0, 1]
    assert [text.get_text() for text in figure.axes[0].texts].count("double") == 2
    assert "computes double" in meant(figure)
    _, replay = replayed(twice, 2, 4)
    who, where = elements(replay, "y", replay.states[1][-1]["y"])
    assert set(who) == {2} and list(where) == [0, 1, 2, 3]  # of rank 1's data, in the places that they had


def test_what_the_picture_shows_is_explained_in_it():
    figure = draw(ring, 8, 1 << 16, network="gpu-25g")
    assert meant(figure)[2:] == [
        "leaves on one side, comes in on the other",
        "its data is on the wire",
        "border of a node",
    ]
    said = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "on gpu-25g, 2 nodes" in said and "each sends at most 1.75 n" in said and "n: elements of the vector" in said
    borders = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [3.5, 3.5]]
    assert len(borders) == 1
    assert meant(draw(star, 3, 4)) == ["message: replaces what is there"]
    two_level = draw(ALGORITHMS["allreduce"]["two_level"], 6, 6)
    assert "border of a node" in meant(two_level) and "place in the vector" in [
        text.get_text() for text in two_level.axes[0].texts
    ]


# ------------------------------------------------------------------------------------------------ what is wrong


def in_red(figure):
    """(tail, head, width) of the arrows that say who waits for whom."""
    return [
        (text.xyann[0], text.xy[0], text.arrow_patch.get_linewidth())
        for text in figure.axes[0].texts
        if getattr(text, "arrow_patch", None) and to_rgb(text.arrow_patch.get_edgecolor()) == to_rgb(RED)
    ]


def frames(figure):
    """(rank, row) of the red frames."""
    boxes = [patch for patch in figure.axes[0].patches if to_rgb(patch.get_edgecolor()) == to_rgb(RED)]
    return sorted((round(box.get_x() + box.get_width() / 2), int(box.get_y())) for box in boxes)


def test_rounds_have_the_numbers_that_reports_give_them():
    def late(rank, size, count):
        yield Send((rank + 1) % size, "x", 0, 1), Recv((rank - 1) % size, "y", 0, 1)
        yield (Send(rank, "x", 0, 1),)

    figure = draw(late, 3, 2)
    rounds = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rounds == ["0", "1"] and any("round 1: " in text.get_text() for text in figure.axes[0].texts)
    rows = [text.get_text() for text in draw_buffers(RING, 3, 3).axes[0].texts]
    assert [row for row in rows if row.startswith(("start", "round"))] == ["start", *(f"round {k}" for k in range(4))]


def test_a_deadlock_is_drawn_with_what_ran_before_and_its_circle():
    def stuck(rank, size, count):
        yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "y", 0, count)
        if rank < 3:
            yield (Recv((rank + 1) % 3, "y", 0, count),)
        else:
            yield (Recv(0, "y", 0, count),)

    figure = draw(stuck, 4, 2)
    black = [a for a in arrows(figure) if a[-1] != pytest.approx(to_rgb(RED))]
    assert len(black) == 4 + 1 and {a[1] for a in black} == {0}
    thick = max(width for *_, width in in_red(figure))
    assert sorted(in_red(figure)) == [(0, 1, thick), (1, 2, thick), (2, 0, thick), (3, 0, pytest.approx(thick / 2))]
    assert frames(figure) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    said = "\n".join(text.get_text() for text in figure.axes[0].texts)
    assert "stuck: ranks wait for ever" in said and "cycle: 0 -> 1 -> 2 -> 0" in said
    assert meant(figure)[-2:] == ["fails in this round", "waits for; thick: in a circle"]


def test_a_deadlock_of_sends_that_wait_is_drawn_by_the_report():
    def head_on(rank, size, count):
        yield (Send(1 - rank, "x", 0, count),)
        yield (RecvReduce(1 - rank, "x", 0, count),)

    report = check(head_on, ranks=2, counts=[1])
    assert "with eager sends it passes" in str(report)
    figure = report.draw()
    assert sorted((a, b) for a, b, _ in in_red(figure)) == [(0, 1), (1, 0)] and frames(figure) == [(0, 0), (1, 0)]


def test_who_does_not_come_to_a_meeting_is_waited_for():
    def absent(rank, size, count):
        if rank != 1:
            yield (Barrier(),)

    figure = draw(absent, 3, 2)
    assert sorted((a, b) for a, b, _ in in_red(figure)) == [(0, 1), (2, 1)] and frames(figure) == [(0, 0), (2, 0)]


def test_the_round_that_breaks_a_rule_is_marked_and_so_are_both_that_race():
    def twice(rank, size, count):
        yield (Send(1 - rank, "x", 0, count), Recv(1 - rank, "y", 0, count))
        if rank:
            yield (Send(1 - rank, "x", 0, count + 3),)

    figure = draw(twice, 2, 4)
    assert frames(figure) == [(1, 1)] and len(arrows(figure)) == 2
    said = "\n".join(text.get_text() for text in figure.axes[0].texts)
    assert "twice: breaks a rule" in said and "outside x, which has 4 elements" in said

    def race(rank, size, count):
        yield (Barrier(),)
        yield (Reduce("x", 0, count, "x", 0, of=1 - rank),)

    figure = draw(race, 2, 4)
    assert frames(figure) == [(0, 1), (1, 1)] and meant(figure)[-1] == "fails in this round"


def test_messages_that_nobody_receives_end_in_a_cross():
    def left(rank, size, count):
        yield (Send((rank + 1) % size, "x", 0, count),)
        if rank:
            yield (Recv(rank - 1, "x", 0, count),)

    figure = draw(left, 3, 4)
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [pytest.approx(0.8)]  # most of the way from rank 2 to rank 0
    assert meant(figure)[-1] == "message that nobody receives" and not frames(figure)

    def shorter(rank, size, count):
        yield (Send(1, "x", 0, count) if rank == 0 else Recv(0, "x", 0, count - 1),)

    figure = draw(shorter, 2, 4)
    assert frames(figure) == [(1, 0)]
    assert "shorter: wrong length" in [text.get_text() for text in figure.axes[0].texts]


def test_a_wrong_result_is_marked_at_the_end_of_its_rank():
    def shared(rank, size, count):
        if rank:
            yield (Send(0, "x", 0, count),)
        else:
            yield tuple(RecvReduce(peer, "x", 0, count) for peer in range(1, size))

    figure = check(shared, ranks=3, counts=[2]).draw()
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (1, 1) and meant(figure)[-1] == "ends with a wrong result"


def test_of_what_does_not_end_the_first_rounds_are_drawn():
    def lap(rank, size, count):
        while True:
            yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "y", 0, count)

    figure = check(lap, ranks=3, counts=[2]).draw()
    assert len([a for a in arrows(figure) if 0 <= a[2] <= 2]) == 12 * 3
    assert any("does not end" in text.get_text() for text in figure.axes[0].texts)


def test_of_what_fails_late_it_is_said_which_rounds_are_not_drawn():
    def late(rank, size, count):
        for _ in range(70):
            yield Send((rank + 1) % size, "x", 0, count), Recv((rank - 1) % size, "y", 0, count)
        yield (Recv((rank - 1) % size, "y", 0, count),)

    ax = check(late, ranks=3, counts=[2]).draw().axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [*map(str, range(12)), "70"]
    assert "3 ranks, 2 elements; rounds 12 to 69 are not drawn" in [text.get_text() for text in ax.texts]


def test_into_given_axes_with_a_learners_own_generator():
    from matplotlib.figure import Figure

    left, right = Figure().subplots(1, 2)
    assert draw(partial(star, root=1), 3, 5, left, title="mine") is left.figure
    assert draw_buffers(partial(star, root=1), 3, 5, right) is left.figure
    assert any(t.get_text() == "mine" for t in left.texts) and len(arrows(left.figure)) == 2


def test_buffers_of_a_rank_stand_together_below_its_number():
    """Rank 0 has x and y, the others x, and those that collect a buffer of their own: nobody a hole between them."""
    from collectives.puzzles.solutions import gather

    figure = draw_buffers(gather, 4, 8)
    spots = sorted({(image.get_extent()[0], image.get_extent()[1]) for image in figure.axes[0].images})
    apart = [round(after[0] - before[1], 2) for before, after in pairwise(spots)]
    assert len(spots) == 6 and sorted(apart)[:2] == [0.08, 0.08] and sorted(apart)[2] > 0.2
    heads = {text.get_text(): text.xy[0] for text in figure.axes[0].texts if text.get_text() in ("0", "1", "2", "3")}
    middle = [np.mean([spots[i][0], spots[j][1]]) for i, j in ((0, 1), (2, 2), (3, 4), (5, 5))]
    assert [heads[str(rank)] for rank in range(4)] == pytest.approx(middle)


def test_buffers_are_pictured_as_they_are():
    figure = draw_buffers(ring, 3, 3)
    images = figure.axes[0].images
    assert len(images) == 3 * 5  # start and 4 rounds
    start, end = np.array(images[0].get_array()), np.array(images[-1].get_array())
    filled = lambda image: np.ptp(image, axis=2) > 0.05
    assert filled(start).tolist() == [[True] * 3, [False] * 3, [False] * 3]
    assert filled(end).all()
    np.testing.assert_allclose(end[0], [colour_at((i + 0.5) / 3) for i in range(3)])
    assert (start[0] > end[0]).any()  # paler until it is final


def test_animation(tmp_path):
    gif = animate(tmp_path / "ring.gif", ring, 3, 3, frames_per_round=2, fps=2)
    film = Image.open(gif)
    seen = set()
    for frame in range(film.n_frames):
        film.seek(frame)
        seen.add(film.convert("RGB").tobytes())
    assert len(seen) >= 8  # 4 rounds of 2 frames move
    html = animate(tmp_path / "ring.html", ring, 2, 2, frames_per_round=1, fps=1)
    assert html.read_text().count("data:image/png;base64") >= 3
    assert not list(tmp_path.glob("*frames*"))
    shared = Image.open(animate(tmp_path / "shared.gif", ALGORITHMS["allreduce"]["shared_arrays"], 2, 32, fps=2))
    assert shared.n_frames > 10
    with pytest.raises(ValueError, match=r"ring\.mp4.*\.gif or \.html"):
        animate(tmp_path / "ring.mp4", ring, 2, 2)
    for none in ({"fps": 0}, {"frames_per_round": 0}):
        with pytest.raises(ValueError, match="frames_per_round and fps are at least 1, given"):
            animate(tmp_path / "ring.gif", ring, 2, 2, **none)


def test_of_a_film_what_stands_still_is_drawn_once(tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn, draw_all = [], FigureCanvasAgg.draw
    monkeypatch.setattr(FigureCanvasAgg, "draw", lambda canvas: drawn.append(canvas) or draw_all(canvas))
    animate(tmp_path / "ring.gif", ring, 3, 3, frames_per_round=4)
    assert len(drawn) == 1


def test_names_with_numbers_have_one_colour():
    names = ["forward 3", "forward 12", "0F1", "1F2", "F3", "2B0", "2I0", "update"]
    figure = draw_timeline([dict(rank=0, name=name, start=i, end=i + 1) for i, name in enumerate(names)])
    said = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert said == ["forward", "backward", "input gradients", "update"]
    assert [text.get_text() for text in figure.axes[0].texts[:7]] == ["3", "12", "1", "2", "3", "0", "0"]
    colours = [patch.get_facecolor() for patch in figure.axes[0].get_legend().get_patches()]
    assert len(set(colours)) == 4


def test_timeline_of_what_was_priced_looks_like_what_was_measured():
    def stages(rank, size, count):
        if rank:
            yield (Recv(0, "y", 0, count),)
        yield (Compute(f"F{rank}", seconds=2.0),)
        if rank == 0:
            yield (Send(1, "x", 0, count),)

    priced = draw_timeline(price(stages, 2, 3, network=ROUNDS, trace=True))
    measured = draw_timeline(
        [
            dict(rank=0, name="F0", start=5.0, end=6.0),
            dict(rank=0, name="wait", start=6.0, end=7.0),
            dict(rank=1, name="wait", start=5.0, end=7.0),
            dict(rank=1, name="F1", start=7.0, end=8.0),
        ]
    )

    def seen(figure):
        ax = figure.axes[0]
        bars = [
            (tuple(path.get_extents().bounds), c.get_facecolor()[0][:3])
            for c in ax.collections
            for path in c.get_paths()
        ]
        return sorted((tuple(np.round(bounds, 6)), tuple(colour)) for bounds, colour in bars)

    assert seen(priced) == seen(measured)
    assert [text.get_text() for text in priced.axes[0].texts[:2]] == ["0", "1"]  # the number of each
    assert [text.get_text() for text in priced.axes[0].get_legend().get_texts()] == ["forward", "wait"]
    with pytest.raises(ValueError, match="trace=True"):
        draw_timeline(price(stages, 2, 3))


def test_timeline():
    events = [
        dict(rank=0, name="forward", start=10.0, end=10.2),
        dict(rank=0, name="backward", start=10.2, end=10.6),
        dict(rank=2, name="forward", start=10.1, end=10.4),
    ]
    figure = draw_timeline(reversed(events), title="measured")
    ax = figure.axes[0]
    bars = sorted(tuple(np.round(path.get_extents().bounds, 6)) for c in ax.collections for path in c.get_paths())
    assert [(x, width) for x, _, width, _ in bars] == [(0, 200), (100, 300), (200, 400)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 2"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["forward", "backward"]
    with pytest.raises(ValueError, match="no events"):
        draw_timeline([])
    with pytest.raises(ValueError, match=r"ends before it starts.*forward"):
        draw_timeline([dict(rank=0, name="forward", start=2.0, end=1.0)])


def test_no_window_and_no_import_before_the_first_drawing():
    code = """if True:
        import sys
        import collectives.drawing.diagrams as drawing, collectives.algorithms.broadcast as broadcast
        assert "matplotlib" not in sys.modules, "imported too early"
        drawing.draw(broadcast.binomial, 4, 4)
        assert "matplotlib.pyplot" not in sys.modules, "pyplot keeps figures and may open windows"
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_colours_are_apart():
    """Sixteen places differ by eye: neighbours by at least 8% of the cube's side, and from ink and background."""
    colours = np.array([colour_at((i + 0.5) / 16) for i in range(16)])
    gaps = np.linalg.norm(np.diff(colours, axis=0), axis=1)
    assert gaps.min() > 0.08
    assert np.diff(gaps).max() < 0.02  # equal steps look equal
    assert np.linalg.norm(colours - to_rgb(INK), axis=1).min() > 0.5
    assert np.linalg.norm(colours - 1.0, axis=1).min() > 0.4


# What light does to eyes that lack one kind of cone, on linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
BLIND = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("cone", BLIND)
def test_colours_are_apart_for_the_colour_blind(cone):
    for places, least in ((4, 0.2), (8, 0.07)):
        colours = np.array([colour_at((i + 0.5) / places) for i in range(places)])
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        seen = np.clip(linear @ np.array(BLIND[cone]).T, 0, 1)
        seen = np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)
        gaps = np.linalg.norm(seen[:, None] - seen[None], axis=2)
        assert gaps[~np.eye(places, dtype=bool)].min() > least


def test_race():
    """Lines are what the simulation says, or what was measured; with priced ones the lower bound."""
    network, sizes = Network.hockney(1.0, 0.5), [4, 16, 64]
    figure = draw_race({"mine": ring, "theirs": RING, "run": [1.0, 2.0, 3.0]}, 4, sizes, network=network, title="sum")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines) == ["mine", "theirs", "run", "lower bound"]
    want = [price(ring, 4, n, 1, network).seconds for n in sizes]
    np.testing.assert_allclose(lines["mine"].get_ydata(), want)
    np.testing.assert_allclose(lines["theirs"].get_ydata(), want)
    assert list(lines["run"].get_ydata()) == [1, 2, 3] and lines["run"].get_linestyle() == ":"
    bound = [lower_bound("allreduce", 4, n, network) for n in sizes]
    np.testing.assert_allclose(lines["lower bound"].get_ydata(), bound)
    only = draw_race({"run": [1.0, 2.0, 3.0]}, 4, sizes)
    assert [line.get_label() for line in only.axes[0].lines] == ["run"]
    for wrong, said in (({}, "needs runners"), ({"run": [1.0]}, "run: 1 measurements for 3 sizes")):
        with pytest.raises(ValueError, match=said):
            draw_race(wrong, 4, sizes)
    with pytest.raises(ValueError, match="'moon'"):
        draw_race({"mine": ring}, 4, sizes, network="moon")


def test_schedules_of_two_levels_are_drawn_on_two_nodes():
    for name in ("two_level", "shared_two_level", "shared_two_level_arrays"):
        scene = Scene.of(ALGORITHMS["allreduce"][name], 4, 8, None, 4, {})
        assert scene.nodes == [0, 0, 1, 1], name


def test_topologies_are_drawn_by_their_words_and_placements_by_their_hosts():
    """As `price` takes them; a network that there is not is refused in its own words."""
    assert draw(RING, 4, 4, network="torus:dims=2x2") is not None
    assert draw_race({"ring": RING}, 4, [16], network="torus:dims=2x2") is not None
    for call in (
        lambda: draw(RING, 4, 4, network="tokenring"),
        lambda: draw_race({"ring": RING}, 4, network="tokenring"),
    ):
        with pytest.raises(ValueError, match="tokenring"):
            call()
    network = Network.fat_tree(4).place_ranks([3, 2, 1, 0])
    assert Scene.of(RING, 4, 4, network, 4, {}).nodes == [3, 2, 1, 0]
