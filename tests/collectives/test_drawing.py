"""Drawings say what the schedule says: every message an arrow, in the colour of what it carries, at its time."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from collectives import ALGORITHMS, price
from collectives.drawing import animate, draw, draw_buffers, draw_timeline
from collectives.drawing_marks import INK, WHOLE, colour_at
from collectives.networks import ROUNDS
from collectives.replay import NOWHERE, Replay
from collectives.steps import Copy, Recv, RecvReduce, Send, part

RING = ALGORITHMS["allreduce"]["ring"]


def ring(rank, size, count):
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        give, take = part(count, size, (rank - k) % size), part(count, size, (rank - k - 1) % size)
        yield Send(right, "x", *give), RecvReduce(left, "x", *take)
    for k in range(size - 1):
        give, take = part(count, size, (rank + 1 - k) % size), part(count, size, (rank - k) % size)
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
    owner = [r for r in range(6) for _ in range(*part(20, 6, r))]
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


def test_time_is_what_the_clock_says():
    priced = price(ring, 6, 600_000, 4, "gpu-25g", trace=True)
    figure = draw(ring, 6, 600_000, network="gpu-25g")
    assert "time, ms" in figure.axes[0].get_ylabel()
    ends = {round(a[3], 9) for a in arrows(figure)}
    assert ends == {round(f.end * 1e3, 9) for f in priced.trace.flights}
    assert f"{priced.seconds * 1e3:.3g} ms" in " ".join(t.get_text() for t in figure.axes[0].texts)
    # Every message holds its ports for long here: a band for each, twice for those around the edge.
    around = sum(f.source == 5 for f in priced.trace.flights)
    assert len(figure.axes[0].patches) == len(priced.trace.flights) + around


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_every_algorithm_can_be_drawn(operation, tmp_path):
    for entry in ALGORITHMS[operation].values():
        for size in (1, 5):
            count = {"barrier": None, "alltoall": 10}.get(operation, 13)  # an alltoall has blocks of one length
            figure = draw(entry, size, count)
            names = " ".join(t.get_text() for t in figure.axes[0].texts)
            assert f"{entry.name} {operation}".replace("_", " ") in names
            draw_buffers(entry, size, count)
    figure.savefig(tmp_path / "last.png")
    assert (tmp_path / "last.png").stat().st_size > 5000


def test_into_given_axes_with_a_learners_own_generator():
    from matplotlib.figure import Figure

    left, right = Figure().subplots(1, 2)
    assert draw(partial(star, root=1), 3, 5, left, title="mine") is left.figure
    assert draw_buffers(partial(star, root=1), 3, 5, right) is left.figure
    assert any(t.get_text() == "mine" for t in left.texts) and len(arrows(left.figure)) == 2


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
    with pytest.raises(ValueError, match=r"ring\.mp4.*\.gif or \.html"):
        animate(tmp_path / "ring.mp4", ring, 2, 2)


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
        import collectives.drawing as drawing, collectives.algorithms.broadcast as broadcast
        assert "matplotlib" not in sys.modules, "imported too early"
        drawing.draw(broadcast.binomial, 4, 4)
        assert "matplotlib.pyplot" not in sys.modules, "pyplot keeps figures and may open windows"
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_colours_are_apart():
    """Sixteen places differ by eye: neighbours by at least 8% of the cube's side, and from ink and background."""
    colours = np.array([colour_at((i + 0.5) / 16) for i in range(16)])
    gaps = np.linalg.norm(np.diff(colours, axis=0), axis=1)
    assert gaps.min() > 0.08
    assert np.linalg.norm(colours - to_rgb(INK), axis=1).min() > 0.5
    assert np.linalg.norm(colours - 1.0, axis=1).min() > 0.4
