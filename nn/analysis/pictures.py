"""Pictures of what inspection.py finds: matplotlib Figures, for a notebook to show or `.savefig(path)` to write."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nn.analysis.inspection import Distribution, RateSearch

LEGIBLE = 40  # classes that a confusion matrix can name
# Okabe and Ito 2008: they differ for every kind of colour blindness, and in print by their lightness.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8f99")
MARKERS = "os^Dv*Ph"


def confusion(matrix: np.ndarray, names: Sequence[str] | None = None):
    """Draw a confusion matrix in colour, fractions of each true class; with names and counts where they fit."""
    names = [str(i) for i in range(len(matrix))] if names is None else list(names)
    side = 0.5 * min(len(names), LEGIBLE)
    figure, ax = _figure(side + 2, side + 1.5)
    fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    ax.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= LEGIBLE:
        for i, j in np.argwhere(matrix):
            colour = "white" if fractions[i, j] > 0.5 else "black"
            ax.text(j, i, str(matrix[i, j]), ha="center", va="center", color=colour, size=8)
        ax.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) > 3 else 0)
        ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="predicted class", ylabel="true class")
    right, total = int(np.trace(matrix)), int(matrix.sum())
    _title(ax, f"confusion: {right:,} of {total:,} samples right, {right / max(1, total):.2%}")
    bar = figure.colorbar(ax.images[0], ax=ax, shrink=0.7, label="fraction of the true class (%)")
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
    return figure


def samples(
    x: np.ndarray,
    target: np.ndarray,
    predicted: np.ndarray,
    names: Sequence[str] | None = None,
    columns: int = 8,
    confidence: np.ndarray | None = None,
):
    """Images (N, H, W, 1 or 3), or square ones laid flat (N, H*H), each titled "true > predicted".

    With `confidence` (N), the probability of the prediction, it is shown as well.
    """
    if not len(x):
        raise ValueError("samples: there are none to show")
    if x.ndim == 2:
        side = math.isqrt(x.shape[1])
        if side * side != x.shape[1]:
            raise ValueError(f"samples: rows of {x.shape[1]} values are no square images")
        x = x.reshape(len(x), side, side, 1)
    if x.ndim != 4 or x.shape[-1] not in (1, 3):
        raise ValueError(f"samples: expected images (N, H, W, 1 or 3), given {x.shape}")
    rows = -(-len(x) // columns)
    figure, axes = _figure(columns, 1.25 * rows, rows, min(columns, len(x)))
    name = (lambda i: str(i)) if names is None else (lambda i: names[i])
    for i, ax in enumerate(np.atleast_1d(axes).reshape(-1)):
        ax.set_axis_off()
        if i < len(x):
            image = (x[i] - x[i].min()) / max(float(np.ptp(x[i])), 1e-12)
            ax.imshow(image[..., 0] if image.shape[-1] == 1 else image, cmap="gray_r")
            sure = "" if confidence is None else f", {confidence[i]:.0%}"
            ax.set_title(f"{name(int(target[i]))} > {name(int(predicted[i]))}{sure}", size=8)
    title = "true > predicted" + ("" if confidence is None else ", and how sure the network is")
    figure.suptitle(title, size=10, weight="bold")
    return figure


def units(weights: np.ndarray, most: int = 64, columns: int = 8, title: str = "weights"):
    """Draw the weights of a first layer's units as pixels: blue where ink raises the output, red where it lowers it.

    Parameters
    ----------
    weights : (KH, KW, C, F) of a convolution, or (H*W, F) of a linear layer on square images laid flat
        The mean over several channels is shown, all in one scale.
    most : int
        Units that are shown, the first ones.
    """
    if weights.ndim == 2:
        side = math.isqrt(len(weights))
        if side * side != len(weights):
            raise ValueError(f"units: {len(weights)} inputs are no square image")
        weights = weights.reshape(side, side, 1, -1)
    if weights.ndim != 4:
        raise ValueError(f"units: expected (KH, KW, C, F) or (H*W, F), given {weights.shape}")
    shown = weights.mean(axis=2)[..., :most]
    count, limit = shown.shape[-1], float(np.abs(shown).max()) or 1.0
    rows = -(-count // columns)
    figure, axes = _figure(0.75 * min(columns, count) + 1, 0.75 * rows + 0.6, rows, min(columns, count))
    cells = np.atleast_1d(axes).reshape(-1)
    for i, ax in enumerate(cells):
        ax.set_axis_off()
        if i < count:
            image = ax.imshow(shown[..., i], cmap="RdBu", vmin=-limit, vmax=limit)
    more = f", {count} of {weights.shape[-1]} units" if count < weights.shape[-1] else f", {count} units"
    figure.suptitle(title + more, size=10, weight="bold")
    figure.colorbar(image, ax=list(cells), shrink=0.8, label="weight")
    return figure


def histograms(distributions: Sequence[Distribution], columns: int = 4, title: str = "distributions"):
    """Draw a histogram for each layer or parameter."""
    if not distributions:
        raise ValueError("histograms: there are none to show")
    rows = -(-len(distributions) // columns)
    figure, axes = _figure(2.2 * columns, 1.5 * rows, rows, min(columns, len(distributions)))
    for i, ax in enumerate(np.atleast_1d(axes).reshape(-1)):
        if i >= len(distributions):
            ax.set_axis_off()
            continue
        d = distributions[i]
        ax.stairs(d.counts, d.edges, fill=True, color=COLOURS[0])
        ax.set_title(d.name if len(d.name) < 34 else d.name[:31] + "...", size=8)
        ax.set_yticks([])
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.locator_params(axis="x", nbins=4)
        ax.tick_params(labelsize=7)
    figure.suptitle(f"{title}: values across, how many up", size=10, weight="bold")
    return figure


def regions(xs: np.ndarray, ys: np.ndarray, classes: np.ndarray, x: np.ndarray, target: np.ndarray):
    """Decision regions of a network of two inputs (inspection.decision_regions), with samples (N, 2) on top."""
    from matplotlib.colors import ListedColormap

    figure, ax = _figure(5.4, 4.6)
    last, shades = max(int(classes.max()), int(target.max(initial=0))), len(COLOURS)
    colours = {"cmap": ListedColormap([COLOURS[i % shades] for i in range(last + 1)]), "vmin": -0.5, "vmax": last + 0.5}
    ax.imshow(classes, extent=(xs[0], xs[-1], ys[0], ys[-1]), origin="lower", alpha=0.35, aspect="auto", **colours)
    for i in range(last + 1):
        members, look = target == i, {"color": COLOURS[i % shades], "marker": MARKERS[i % len(MARKERS)]}
        if members.any():
            ax.scatter(*x[members].T, s=16, edgecolors="white", linewidths=0.4, label=f"class {i}", **look)
    ax.set(xlabel="first input", ylabel="second input")
    ax.locator_params(nbins=6)
    if len(target):
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    _title(ax, "decision regions: what the network says, and samples")
    return figure


def filters(weight: np.ndarray, columns: int = 12):
    """Kernels of a convolution, weight (KH, KW, C, K): a row of images a filter's channel; blue for it, red against."""
    if weight.ndim != 4:
        raise ValueError(f"filters: expected weights (KH, KW, C, K), given {weight.shape}")
    _, _, channels, count = weight.shape
    shown, most = min(count, columns), float(np.abs(weight).max()) or 1.0
    figure, axes = _figure(0.9 * shown + 0.5, 0.95 * min(channels, 8) + 0.4, min(channels, 8), shown)
    for (c, k), ax in np.ndenumerate(np.atleast_1d(axes).reshape(min(channels, 8), shown)):
        ax.imshow(weight[:, :, c, k], cmap="RdBu", vmin=-most, vmax=most)
        ax.set(xticks=[], yticks=[])
        if c == 0:
            ax.set_title(f"{k}", size=8)
        if k == 0 and channels > 1:
            ax.set_ylabel(f"channel {c}", size=8)
    return figure


def im2col(image: np.ndarray, kernel: tuple[int, int], row: int = 0):
    """Draw an image (H, W), and its patches of `kernel` as rows of a matrix; patch `row` is framed in both.

    Readable up to some 8 x 8 pixels: every value is written into its cell.
    """
    from matplotlib.patches import Rectangle

    if image.ndim != 2 or any(k > n for k, n in zip(kernel, image.shape, strict=True)):
        raise ValueError(f"im2col: expected an image (H, W) of at least {kernel}, given {image.shape}")
    patches = np.lib.stride_tricks.sliding_window_view(image, kernel)
    across, matrix = patches.shape[1], patches.reshape(-1, kernel[0] * kernel[1])
    figure, axes = _figure(
        0.42 * (image.shape[1] + matrix.shape[1]) + 1.5, 0.42 * max(len(matrix), len(image)) + 0.6, 1, 2
    )
    low, high = image.min(), image.max()
    for ax, values, title in ((axes[0], image, "image"), (axes[1], matrix, "patches, a row each")):
        ax.imshow(values, vmin=low, vmax=high, cmap="viridis")
        for (i, j), value in np.ndenumerate(values):
            colour = "white" if value < (low + 2 * high) / 3 else "black"
            ax.text(j, i, f"{value:g}", ha="center", va="center", size=8, color=colour)
        ax.set_title(title, size=10)
        ax.set_axis_off()
    top, left = divmod(row, across)
    for ax, corner, size in ((axes[0], (left, top), kernel[::-1]), (axes[1], (0, row), (matrix.shape[1], 1))):
        ax.add_patch(Rectangle((corner[0] - 0.5, corner[1] - 0.5), *size, fill=False, ec="#d55e00", lw=3))
    return figure


def expert_load(history: Sequence[dict]):
    """Draw the load of every expert over the steps, an image a layer, of records that `ExpertLoad` has completed.

    Raises
    ------
    ValueError
        No record has them.
    """
    records = [record["experts"] for record in history if record.get("experts")]
    if not records:
        raise ValueError(
            'expert_load: no record has "experts": train a network with nn.MixtureOfExperts, and give fit '
            "callbacks=[nn.callbacks.ExpertLoad()]"
        )
    layers = list(records[-1])
    figure, axes = _figure(7.5, 0.6 + 1.6 * len(layers), len(layers))
    for ax, path in zip(np.atleast_1d(axes), layers, strict=True):
        steps = [step for record in records for step in record[path]["step"]]
        load = np.array([row for record in records for row in record[path]["load"]]).T
        dropped = [fraction for record in records for fraction in record[path]["dropped"]]
        edges = np.array([0, *steps]), np.arange(len(load) + 1) - 0.5
        mesh = ax.pcolormesh(*edges, load, cmap="PuOr_r", vmin=0, vmax=2, rasterized=True)
        lost = f", {np.mean(dropped):.1%} dropped" if any(dropped) else ""
        ends = f"{load[:, -1].min():.2g} to {load[:, -1].max():.2g}"
        _title(ax, f"layer {path}: load {load.min():.2g} to {load.max():.2g}, in the end {ends}{lost}")
        ax.set(ylabel="expert")
        figure.colorbar(mesh, ax=ax, label="load, 1 = even")
    np.atleast_1d(axes)[-1].set(xlabel="step")
    return figure


def rate_search(search: RateSearch):
    """Loss against learning rate, with the suggested one."""
    figure, ax = _figure(6, 3.5)
    ax.semilogx(search.rates, search.losses, color=COLOURS[0])
    ax.axvline(search.suggestion, color=COLOURS[5], linestyle=":", label=f"falls fastest: {search.suggestion:.2g}")
    ax.set(xlabel="learning rate", ylabel="smoothed loss")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    _title(ax, "learning rates that were tried")
    return figure


def _title(ax, text: str) -> None:
    ax.set_title(text, loc="left", size=10, weight="bold")


def _figure(width: float, height: float, rows: int = 1, columns: int = 1):
    """(figure, axes) drawn without a display: matplotlib takes half a second to import, so it is not imported above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)
