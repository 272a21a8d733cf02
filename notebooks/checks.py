"""What the exercises of the course are checked with: each check says in a sentence what is wrong, and draws it.

| | |
|---|---|
| `style()` | one look for all pictures |
| `call(f, ...)` | call the learner's function; what it raises becomes a sentence |
| `several(n, f, ...)` | the same, of a function that returns n things |
| `arrays(shapes, f, ...)` | the same, of a function that returns an array of each of these shapes |
| `numbers(f, ...)` | the same, of a function that returns a number or an array of a given shape |
| `change(f, ...)` | the same, of a function that changes arrays in place and returns nothing |
| `same(got, want, name)` | numbers and arrays: where they differ, by how much, and both of them drawn |
| `expect(ok, sentence, draw)` | anything else |
| `show(figure)` | a figure of the library's, or those of pyplot |
| `explain_errors` | a decorator of checks: what the learner's functions raise becomes a sentence |
| `graded(grade)` | a puzzle of `collectives.puzzles`, or a report of `collectives.check` |
| `right(sentence)` | what is said when all is well |

The checks and pictures of a notebook are a module of the folder `exercises`.
"""

import functools
import linecache
import traceback
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from IPython import get_ipython

import collectives
from collectives.drawing.marks import GREY, INK
from collectives.drawing.timeline import PALETTE

# Colours that differ for every kind of colour blindness, and in grey (Okabe, Ito 2008): those of the library's figures.
BLUE, ORANGE, GREEN, PINK, SKY, RED = PALETTE[:6]
PALE = "#dfe3ea"
PACKAGES = tuple(str(Path(collectives.__file__).parents[1] / package) for package in ("nn", "collectives", "parallel"))
NOT_LEARNERS = (__file__, str(Path(__file__).parent / "exercises"), *PACKAGES)  # files in which no learner's line is


class NotYet(AssertionError):
    """An exercise that is not solved yet. The notebook shows the sentence, and no traceback."""

    def _render_traceback_(self):
        return [f"Not yet. {self}"]


def style() -> None:
    """The look of all pictures in the course: large enough for a projector, no ink that says nothing."""
    plt.rcParams.update(
        {
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, PINK, SKY, RED]),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "xtick.color": GREY,
            "ytick.color": GREY,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 1.8,
            "image.cmap": "gray_r",
        }
    )
    if (shell := get_ipython()) is not None:
        shell.set_custom_exc((Exception,), show_error)


def show_error(shell, kind, error, trace, tb_offset=None) -> None:
    """Show what a cell raises: as ever, but as a sentence where a cell that checks has called the learner's code."""
    frames = learners_frames(error)
    ours = isinstance(error, NotYet)
    if not ours and len(frames) > 1 and "check" in "".join(linecache.getlines(frames[0].filename)):
        error._render_traceback_ = explained(error, frames[1].name)._render_traceback_
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def right(sentence: str) -> None:
    """Say that an exercise is solved."""
    print(f"Right: {sentence}")


def expect(ok: bool, sentence: str, draw=None) -> None:
    """Unless `ok`: draw, and raise NotYet with the sentence. What `draw` returns, if a figure, is shown."""
    if not ok:
        if draw is not None:
            show(draw())
        raise NotYet(sentence)


def show(figure=None) -> None:
    """A figure of the library's, which pyplot does not know; else those of pyplot."""
    if hasattr(figure, "savefig") and not plt.fignum_exists(getattr(figure, "number", -1)):
        from IPython.display import display

        display(figure)
    plt.show()


def call(function, *arguments, **named):
    """What the learner's function returns.

    Raises
    ------
    NotYet
        It returns nothing or `...`, or raises.
    """
    value = change(function, *arguments, **named)
    written(value, f"`{function.__name__}`")
    return value


def several(count: int, function, *arguments) -> tuple:
    """What the learner's function returns, which must have `count` parts.

    Raises
    ------
    NotYet
        As of `call`; or it returns one thing, or another number of them.
    """
    value = call(function, *arguments)
    stacked = isinstance(value, np.ndarray) and value.ndim > 1 and len(value) == count
    values = tuple(value) if stacked or isinstance(value, tuple | list) else (value,)
    if len(values) != count:
        told = f"returns {len(values)} value{'s' * (len(values) > 1)}, and {count} are expected"
        raise NotYet(f"`{function.__name__}` {told}.")
    return values


def numbers(function, *arguments, shape: tuple[int, ...] = ()):
    """What the learner's function returns, as an array of this shape; `()` is one number.

    Raises
    ------
    NotYet
        As of `call`; or it returns anything else.
    """
    return as_array(call(function, *arguments), shape, f"`{function.__name__}` returns")


def arrays(shapes, function, *arguments) -> tuple:
    """What the learner's function returns, as an array of each of these shapes.

    Raises
    ------
    NotYet
        As of `several`; or one of them is anything else.
    """
    values = several(len(shapes), function, *arguments)
    names = [f"`{function.__name__}` returns, as value {i} of {len(shapes)}," for i in range(1, len(shapes) + 1)]
    return tuple(map(as_array, values, shapes, names))


def as_array(value, shape: tuple[int, ...], said: str) -> np.ndarray:
    """The value as an array of this shape; raises NotYet, which begins with `said`, where it is none."""
    try:
        found = np.asarray(value, float)
    except (TypeError, ValueError):
        found = None
    if found is None or found.shape != shape:
        wanted = f"an array of the shape {shape}" if shape else "a number"
        large = found is not None and found.size > 6
        told = f"an array of the shape {found.shape}" if large else repr(value)
        raise NotYet(f"{said} {told}, and {wanted} is expected.")
    return found


def change(function, *arguments, **named):
    """As `call`, of a function that need not return anything: it changes its arguments.

    Raises
    ------
    NotYet
        It raises: with the line where it does.
    """
    try:
        return function(*arguments, **named)
    except NotYet:
        raise
    except Exception as error:
        raise explained(error, function.__name__) from None


def explain_errors(check):
    """Decorate a check: what the learner's functions raise becomes a sentence, an error of the check does not."""

    @functools.wraps(check)
    def explaining(*arguments, **named):
        try:
            return check(*arguments, **named)
        except NotYet:
            raise
        except Exception as error:
            if not (own := learners_frames(error)):
                raise
            raise explained(error, own[0].name) from None

    return explaining


def learners_frames(error: Exception) -> list:
    """The frames of a traceback that are the learner's, not those of a library that complains about them."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f for f in frames if f.line and not f.filename.startswith(NOT_LEARNERS) and "site-packages" not in f.filename
    ]


def explained(error: Exception, name: str) -> NotYet:
    """What the learner's function `name` has raised, with the line where it does, as a sentence."""
    own = learners_frames(error)
    where = f", at `{own[-1].line}`" if own else ""
    hint = " Make a new array: w = w - ..., not w -= ..." if "read-only" in str(error) else ""
    return NotYet(f"`{name}` raises {type(error).__name__}: {error}{where}.{hint}")


def written(value, name: str) -> None:
    """Raise NotYet where a value is None or `...`: what is to be written is not."""
    parts = value if isinstance(value, tuple | list) else [value]
    if any(part is None or part is ... for part in parts):
        raise NotYet(f"{name} gives {value}: write it where the cell says `Your turn`.")


def same(got, want, name: str, *, tolerance: float = 1e-9, draw=None) -> None:
    """Compare numbers or arrays, and where they differ draw both; raises NotYet.

    Parameters
    ----------
    got, want : array-like
    name : str
        Of what is compared, for the sentence.
    tolerance : float
        Of a difference, in units of the largest wanted value.
    draw : callable, optional
        Of (got, want): another picture than `draw_both`.
    """
    written(got, name)
    want = np.asarray(want)
    try:
        got = np.asarray(got, dtype=np.result_type(want, float))
    except (TypeError, ValueError):
        raise NotYet(f"{name} is {type(got).__name__}, and an array of numbers is expected.") from None
    if got.shape != want.shape:
        raise NotYet(f"{name} has the shape {got.shape}, and {want.shape} is expected.")
    off = np.abs(got - want)
    bound = tolerance * max(float(np.abs(want).max(initial=0)), 1e-300)
    if (off <= bound).all():  # nan is not
        return
    show((draw or draw_both)(got, want))
    raise NotYet(f"{name}: {difference(got, want, off, bound)}")


def difference(got, want, off, bound) -> str:
    """How two arrays differ, in a sentence: by a factor, in the sign, or where."""
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} of {got.size} values are not finite."
    largest = float(np.abs(want).max())
    if off.max() < 1e-5 * largest:
        much = f"{off.max() / largest:.0e} of the largest value"
        return f"it is right but for {much}: an epsilon missing or elsewhere, a value from after the step, float32?"
    wrong = off > bound
    large = np.abs(want) > 1e-6 * np.abs(want).max()
    ratios = got[large] / want[large]
    if got.size > 1 and ratios.size and np.ptp(ratios) <= 1e-6 * abs(ratios.mean()) and not got[~large].any():
        if not got.any():
            return "it is 0 everywhere."
        if np.isclose(ratios.mean(), -1):
            return "it has the wrong sign, everywhere."
        return f"it is {ratios.mean():.4g} times what is wanted, everywhere."
    if got.shape == ():
        return f"yours is {got:.6g}, and {want:.6g} is wanted."
    worst = np.unravel_index(off.argmax(), off.shape)
    at = ", ".join(map(str, worst))
    much = "all values are" if wrong.all() else f"{wrong.sum()} of {wrong.size} values are"
    return f"{much} wrong; the worst is [{at}]: yours is {got[worst]:.6g}, and {want[worst]:.6g} is wanted."


def draw_both(got, want) -> None:
    """What is there and what is wanted, side by side."""
    if want.ndim >= 2 and min(want.shape[-2:]) > 1:
        got, want = (a.reshape(-1, a.shape[-1]) for a in (got, want))
        most = float(np.abs(np.nan_to_num(want)).max()) or 1.0
        _, axes = plt.subplots(1, 3, figsize=(9, 3))
        for ax, image, title in zip(axes, (got, want, got - want), ("yours", "wanted", "yours - wanted"), strict=True):
            shown = ax.imshow(image, cmap="RdBu", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
            ax.set_title(title)
        plt.colorbar(shown, ax=axes, shrink=0.9)
        return
    got, want = np.ravel(got), np.ravel(want)
    _, ax = plt.subplots(figsize=(7, 2.8))
    places = np.arange(len(want))
    if len(want) > 40:
        ax.plot(places, want, color=GREY, lw=4, alpha=0.5, label="wanted")
        ax.plot(places, got, color=RED, label="yours")
    else:
        ax.bar(places - 0.2, want, 0.4, color=GREY, label="wanted")
        ax.bar(places + 0.2, got, 0.4, color=RED, label="yours")
    ax.axhline(0, color=GREY, lw=0.8)
    ax.legend()


def graded(grade) -> None:
    """Print what the grader of a puzzle, or `collectives.check`, says. Not right: draw it, and raise NotYet."""
    if not grade:
        show(grade.draw())
        raise NotYet(str(grade).removesuffix("\ngrade.draw() shows where."))
    print(grade)
