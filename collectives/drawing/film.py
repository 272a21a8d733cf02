"""Films: messages travel down the space-time diagram, while the buffers above it fill.

What stands still is drawn once; of each frame only what moves is drawn, on a copy of that.
"""

import base64
import io
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

import numpy as np

from collectives.drawing import arrows, marks
from collectives.drawing.diagrams import Scene, draw_scene
from collectives.pricing.networks import Network
from collectives.pricing.price import read
from collectives.steps import Barrier, Blocks, Compute, reads, writes

DPI = 80
PALETTE_FRAMES = 8  # whose colours all frames have
PLAYER = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<body style="font-family:sans-serif;text-align:center"><img id="frame" style="max-width:100%"><br>
<button id="play">pause</button> <input id="at" type="range" min="0" max="{last}" value="0" style="width:60%">
<script>
const frames = [{frames}];
const [frame, at, play] = ["frame", "at", "play"].map(id => document.getElementById(id));
let running = true;
function show(k) {{ at.value = k; frame.src = frames[k]; }}
at.oninput = () => {{ running = false; play.textContent = "play"; show(+at.value); }};
play.onclick = () => {{ running = !running; play.textContent = running ? "pause" : "play"; }};
setInterval(() => {{ if (running) show((+at.value + 1) % frames.length); }}, {pause});
show(0);
</script></body>
"""


def animate(
    file: str | Path,
    algorithm: Callable,
    size: int,
    count: Blocks,
    *,
    network: Network | str | None = None,
    itemsize: int = 4,
    frames_per_round: int = 12,
    fps: int = 15,
    title: str | None = None,
    **options,
) -> Path:
    """Draw the algorithm as a film: messages travel down the space-time diagram while the buffers above them fill.

    Parameters
    ----------
    file : str or Path
        Ends in .gif (needs Pillow, which comes with matplotlib) or .html (a player, all in this one file).
    frames_per_round, fps : int
        Smoothness and speed.
    algorithm, size, count, network, itemsize, title, **options
        As for `draw`.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        Another ending of the file name, no frames, or a schedule that does not come to its end (`draw` shows where).

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import collectives
    >>> ring = collectives.ALGORITHMS["allreduce"]["ring"]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     file = pathlib.Path(directory, "ring.gif")
    ...     collectives.animate(file, ring, 2, 4).exists()
    True
    """
    if min(frames_per_round, fps) < 1:
        raise ValueError(f"frames_per_round and fps are at least 1, given {frames_per_round} and {fps}")
    scene = Scene.of(algorithm, size, count, network, itemsize, options)
    title = title or read(algorithm)[0]
    frames = max(1, scene.priced.rounds) * frames_per_round
    return save_film(file, film(scene, title, np.linspace(0, scene.priced.seconds, frames + 1)), fps, title)


def save_film(file: str | Path, pictures: Iterable, fps: int, title: str) -> Path:
    """Write pictures (of Pillow) as .gif, or as a page with a player; the last one stays for a second."""
    file = Path(file)
    if file.suffix not in (".gif", ".html"):
        raise ValueError(f"{file}: the name must end in .gif or .html")
    from PIL import Image

    pictures = list(pictures)
    pictures += [pictures[-1]] * fps  # a second to look at the end
    if file.suffix == ".gif":
        some = pictures[:: max(1, len(pictures) // PALETTE_FRAMES)]
        together = Image.fromarray(np.concatenate(list(map(np.asarray, some))))
        colours = together.quantize(256, Image.Quantize.FASTOCTREE, dither=0)  # median cut would see the grey alone
        first, *others = [picture.quantize(palette=colours, dither=0) for picture in pictures]
        first.save(file, save_all=True, append_images=others, duration=1000 / fps, loop=0)
    else:
        text = PLAYER.format(
            title=escape(title), frames=", ".join(map(as_data_url, pictures)), last=len(pictures) - 1, pause=1000 / fps
        )
        file.write_text(text)
    return file


def as_data_url(picture) -> str:
    """Return a picture as text, for a page."""
    held = io.BytesIO()
    picture.save(held, "png")
    return f'"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"'


def film(scene, title, times):
    """A picture for each time."""
    from PIL import Image

    replay, size, names = scene.replay, scene.size, scene.buffers()
    wide, deep = marks.width_of(size), marks.depth_of(scene.priced, scene.network)
    side = min(0.86 / len(names), 0.8)  # of a square, in lanes
    high = wide / size * side
    figure = marks.new_figure(marks.LEFT + wide + marks.RIGHT, marks.TOP + high + 0.25 + deep + 0.2)
    figure.set_dpi(DPI)
    below = marks.add_axes(figure, wide, deep, 0.2)
    above = marks.add_axes(figure, wide, high, 0.2 + deep + 0.25)
    above.set(xlim=(-0.5, size - 0.5), ylim=(1, 0))
    above.axis("off")
    own = [scene.buffers(rank) for rank in range(size)]
    lefts = [rank - side * (marks.SQUARE * len(own[rank]) - 0.08) / 2 for rank in range(size)]
    squares = [
        marks.draw_squares(above, replay, own[rank], rank, 0.0, left, 0, side) for rank, left in enumerate(lefts)
    ]
    above.set_aspect("auto")
    marks.rank_heads(above, range(size), 12 if names[1:] else 4)
    for rank, left in enumerate(lefts if names[1:] else ()):
        marks.buffer_heads(above, own[rank], left + side / 2, marks.SQUARE * side)
    marks.headline(above, title, scene.summary())
    draw_scene(below, scene, alpha=0.22)

    unit, _ = marks.unit_of(scene.priced.seconds, scene.network)
    travels = journeys(scene)
    packets = below.scatter([], [], s=75, zorder=6, edgecolors="white", linewidths=1.2)
    cursor = below.axhline(0, color=marks.INK, lw=1, alpha=0.6, zorder=5)
    moving = [image for images in squares for image in images.values()] + [*above.patches, cursor, packets]
    for artist in moving:
        artist.set_animated(True)
    canvas, shown = figure.canvas, {}
    canvas.draw()
    still = canvas.copy_from_bbox(figure.bbox)
    for time in times:
        cursor.set_ydata([time / unit] * 2)
        flying = [journey for journey in travels if journey[0] <= time < journey[1]]
        packets.set_offsets(np.reshape([where(journey, time, size, unit) for journey in flying], (-1, 2)))
        packets.set_facecolors([colour for *_, colour in flying])
        for rank, images in enumerate(squares):
            state = np.searchsorted(replay.times[rank], time, side="right")
            if shown.get(rank) != state:
                shown[rank] = state
                for name, image in images.items():
                    image.set_data(marks.image_of(replay, name, rank, time))
        canvas.restore_region(still)
        for artist in moving:
            artist.axes.draw_artist(artist)
        yield Image.fromarray(np.array(canvas.buffer_rgba())[..., :3])


def journeys(scene) -> list[tuple]:
    """(start, end, from, to, colour) of what travels: messages, and what is copied between ranks' memory."""
    replay, trace = scene.replay, scene.priced.trace
    travels = [
        (f.start, f.end, *arrows.ends_of(f, scene.size, around), marks.colour_of(replay, replay.carried[number]))
        for number, f, around in arrows.wrapping(scene.priced, scene.size)
    ]
    for number, work in enumerate(trace.works):
        if type(work.step) not in (Barrier, Compute):
            source, target = reads(work.step, work.rank)[0].rank, writes(work.step, work.rank)[0].rank
            if source != target:
                travels.append((work.start, work.end, source, target, marks.colour_of(replay, replay.moved[number])))
    return travels


def where(journey, time, size, unit):
    """Where something that travels is at a time."""
    start, end, source, target, _ = journey
    done = (time - start) / (end - start)
    return (source + done * (target - source) + 0.5) % size - 0.5, time / unit
