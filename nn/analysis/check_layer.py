"""Is a layer one that the engine can rely on? All that is asked of the built-in ones, in one call.

    nn.check_layer(Scale(6), (6,))

The model is scikit-learn's check_estimator: whoever writes a layer calls it in a test.
"""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from nn.analysis.gradcheck import gradcheck
from nn.core.containers import buffers_of
from nn.core.context import LayerContext
from nn.core.layer import Layer, Shape, ShapeError
from nn.core.network import Network, all_layers
from nn.files.model import Model, load, save
from nn.files.onnx import export_onnx
from nn.registry import registered

BOUND = 1e-6  # of gradcheck
SAMPLES = 5
NEAR = {np.float32: 1e-3, np.float64: 1e-10}  # relative to the largest element


def check_layer(
    layer: Layer, in_shape: Shape, ids: int = 2, seed: int = 0, setup: Callable[[LayerContext], None] | None = None
) -> None:
    """Check a layer: gradients, shapes, dtypes, memory, micro-batches, threads, copies and files.

    Parameters
    ----------
    layer : Layer
        An instance.
    in_shape : tuple of int
        Shape of one sample, without the batch axis.
    ids : int
        Where the layer takes ids: they are 0 ... ids - 1.
    seed : int
        Seed of samples, parameters and directions.
    setup : callable (LayerContext) or None
        As for `gradcheck`.

    Raises
    ------
    AssertionError, TypeError, ShapeError
        What is wrong, in one sentence with the layer's name.

    Examples
    --------
    >>> import nn
    >>> nn.check_layer(nn.Linear(6, 3), (6,))
    """
    if not isinstance(layer, Layer):
        raise TypeError(
            f"check_layer takes a layer, given {layer!r:.80}: an instance, not the class, of a subclass of nn.Layer"
        )
    if isinstance(in_shape, int):
        raise TypeError(f"check_layer: in_shape is a tuple, the shape of one sample: ({in_shape},), given {in_shape}")
    case = _Case(layer, tuple(in_shape), ids, seed, setup)
    for check in (
        case.check_specs,
        case.check_gradients,
        case.check_strides,
        case.check_float32,
        case.check_micro_batches,
        case.check_no_samples,
        case.check_threads,
        case.check_copies,
        case.check_files,
        case.check_onnx,
    ):
        check()


class _Case:
    """A layer, and samples for it."""

    def __init__(self, layer: Layer, in_shape: Shape, ids: int, seed: int, setup: Callable | None):
        self.layer, self.in_shape, self.ids, self.seed, self.setup = layer, in_shape, ids, seed, setup
        self.rng = np.random.default_rng(seed)
        self.network = Network(layer, in_shape, np.float64)
        self.w = self.parameters(self.network)
        self.x = self.samples(SAMPLES)

    def samples(self, count: int) -> np.ndarray:
        shape = (count, *self.in_shape)
        if self.network.takes_ids:
            return self.rng.integers(0, self.ids, shape)
        return self.rng.standard_normal(shape)

    def parameters(self, network: Network) -> np.ndarray:
        """First values, and something that no initializer gives."""
        rng, w = np.random.default_rng(self.seed), network.layout.zeros(network.dtype)
        network.layout.initialize(w, self.seed)
        for _, array in network.layout.items(w):
            array += 0.1 * rng.standard_normal(array.shape)
        return w

    def context(self, network: Network, training: bool = True) -> LayerContext:
        ctx = network.context(seed=self.seed)
        ctx.network_context.input_gradient = not network.takes_ids
        if self.setup:
            self.setup(ctx)
        ctx.micro_batch.training = training and ctx.micro_batch.training
        return ctx

    def compute(self, network: Network, w: np.ndarray, x: np.ndarray, gy: np.ndarray | None = None):
        """Compute (y, gx, g) of a pass in training."""
        ctx, g = self.context(network), network.layout.zeros(network.dtype)
        p = network.layout.views(w)
        y, saved = network.forward(p, x, ctx)
        y = y.copy()
        gx = network.backward(p, network.layout.views(g), y if gy is None else gy, saved, ctx)
        return y, gx, g

    def fail(self, sentence: str) -> None:
        raise AssertionError(f"{self.layer!r}: {sentence}")

    def check_specs(self) -> None:
        """Check that specs names equal arrays every time, and raises ShapeError for samples that do not fit."""
        first, again = (_shapes(self.layer.specs(self.in_shape)[0]) for _ in range(2))
        if first != again:
            self.fail(f"specs returns other arrays the second time, {again}, and {first} before")
        for wrong in ((*self.in_shape, 3), self.in_shape[1:] if len(self.in_shape) > 1 else (self.in_shape[0] + 1,)):
            try:
                self.layer.specs(wrong)
            except ShapeError:
                pass
            except Exception as error:
                self.fail(
                    f"specs({wrong}) raises {type(error).__name__} ({error}): shapes that do not fit are refused by "
                    "nn.ShapeError, with what was expected and given"
                )

    def check_gradients(self) -> None:
        """Backward is the derivative of forward, of one sample and of large ones; near a kink another seed may help."""
        for count, scale in ((SAMPLES, 1), (1, 1)) + ((SAMPLES, 10),) * (not self.network.takes_ids):
            x = self.x[:count] * scale
            x.flags.writeable = False  # so that a layer that writes to it is noticed where it does
            try:
                error = self.error(x, self.seed)
                error = error if error < BOUND else min(error, *(self.error(x, self.seed + i) for i in (1, 2)))
            except ValueError as raised:
                if "read-only" in str(raised):
                    self.fail("forward or backward writes into x, which others may need: write to a new array")
                if count == 1 and _has_buffers(self.network):
                    continue  # of one sample there is no variance
                raise
            if not error < BOUND:
                self.fail(
                    f"backward is not the derivative of forward: along a random direction they differ by {error:.0e}, "
                    f"relatively, for {count} samples{f' {scale} times as large' * (scale > 1)}"
                )

    def error(self, x: np.ndarray, seed: int) -> float:
        return gradcheck(self.layer, x, seed=seed, directions=2, setup=self.setup)

    def check_strides(self) -> None:
        """Samples that are not contiguous give the same."""
        strided = np.repeat(self.x, 2, axis=-1)[..., ::2] if self.x.ndim > 1 else np.repeat(self.x, 2)[::2]
        self.compare(
            self.compute(self.network, self.w, self.x),
            self.compute(self.network, self.w, strided),
            np.float64,
            "of samples that are not contiguous (a slice with a step)",
        )

    def check_float32(self) -> None:
        """float32 stays float32, and is float64 rounded."""
        network = Network(self.layer, self.in_shape, np.float32)
        x = self.x if network.takes_ids else self.x.astype(np.float32)
        y, gx, g = self.compute(network, self.w.astype(np.float32), x)
        self.compare(self.compute(self.network, self.w, self.x), (y, gx, g), np.float32, "in float32")

    def compare(self, expected, actual, dtype, what: str) -> None:
        """Refuse outputs and gradients that differ."""
        for name, a, b in zip(("the output", "dLoss/dx", "the gradient of parameters"), expected, actual, strict=True):
            if isinstance(a, np.ndarray) and not _near(a, b, NEAR[dtype]):
                self.fail(f"{name} {what} is not what it was")

    def check_micro_batches(self) -> None:
        """Micro-batches, in flight together, give what the whole batch gives."""
        for training in (False, True):
            ctx, p = self.context(self.network, training), self.network.layout.views(self.w)
            buffers = [(array, array.copy()) for array in buffers_of(ctx)]
            y = self.network.forward(p, self.x, ctx)[0].copy()
            slices, batch = [slice(0, 2), slice(2, SAMPLES)], ctx.micro_batch
            batches = [replace(batch, start=batch.start + rows.start) for rows in slices]
            passes = []
            for rows, micro_batch in zip(slices, batches, strict=True):
                for array, value in buffers:
                    array[...] = value
                out, saved = self.network.forward(p, self.x[rows], ctx, micro_batch)
                passes.append((out.copy(), saved))
            alike = all(_near(y[rows], out, NEAR[np.float64]) for rows, (out, _) in zip(slices, passes, strict=True))
            if alike and training:
                self.check_sums(ctx, p, y, slices, batches, [saved for _, saved in passes])
            elif not alike and (not training or not _has_buffers(self.network)):
                self.fail(
                    f"in {'training' if training else 'evaluation'} the output of a sample depends on the others in "
                    "its batch, so micro-batches would compute something else. Statistics of a batch need "
                    "running ones for evaluation (Spec(buffer=True)); random numbers must come from ctx.random"
                )

    def check_sums(self, ctx, p, y, slices, batches, saved) -> None:
        """Gradients of micro-batches, the last one's first, add up to those of the batch."""
        _, gx, g = self.compute(self.network, self.w, self.x, y)
        total = self.network.layout.zeros(np.float64)
        for i in (1, 0):
            batches[i].accumulate = i == 0
            views = self.network.layout.views(total)
            gx_rows = self.network.backward(p, views, y[slices[i]].copy(), saved[i], ctx, batches[i])
            if gx is not None and not _near(gx[slices[i]], gx_rows, NEAR[np.float64]):
                self.fail("dLoss/dx of a micro-batch is not that of its samples in the whole batch")
        if not _near(g, total, NEAR[np.float64]):
            self.fail("gradients of micro-batches do not add up to those of the batch: sum over samples, not the mean")

    def check_no_samples(self) -> None:
        """A shard of a last batch may have no sample."""
        try:
            y, _, g = self.compute(self.network, self.w, self.x[:0])
        except Exception as error:
            self.fail(
                f"a batch without samples, which a shard may have, raises {type(error).__name__} ({error}): reshape to "
                "given sizes, not to -1, and divide by nothing"
            )
        if not np.isfinite(y).all() or g.any():
            self.fail("of a batch without samples the gradients must be zero")

    def check_threads(self) -> None:
        """Two threads with contexts of their own do not disturb each other."""
        inputs = [self.x, self.samples(SAMPLES)]
        expected = [self.compute(self.network, self.w, x) for x in inputs]
        wrong: list[int] = []

        def work(i: int) -> None:
            for _ in range(5):
                pairs = zip(expected[i], self.compute(self.network, self.w, inputs[i]), strict=True)
                wrong.extend([i] * any(isinstance(a, np.ndarray) and not np.array_equal(a, b) for a, b in pairs))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            self.fail("two threads that compute with it disturb each other: keep nothing on the layer, or in globals")

    def check_copies(self) -> None:
        """Copies, and pickles of a class that has a module, compute the same."""
        y = self.predict(self.network)
        copies = {"a deep copy": copy.deepcopy(self.layer)}
        if importable(type(self.layer)):
            try:
                copies["a pickled one"] = pickle.loads(pickle.dumps(self.layer))
            except Exception as error:
                self.fail(f"it cannot be pickled: {type(error).__name__} ({error})")
        for what, other in copies.items():
            if not np.array_equal(self.predict(Network(other, self.in_shape, np.float64)), y):
                self.fail(f"{what} computes something else: does its constructor keep all that it needs?")

    def predict(self, network: Network) -> np.ndarray:
        ctx = self.context(network, training=False)
        return network.forward(network.layout.views(self.w), self.x, ctx)[0].copy()

    def trained(self, network: Network) -> Model:
        buffers = network.buffer_layout.zeros(network.dtype)
        network.buffer_layout.initialize(buffers, self.seed)
        weights = {f"param/{name}": a for name, a in network.layout.items(self.w.astype(network.dtype))}
        return Model(network, weights | {f"state/{name}": a for name, a in network.buffer_layout.items(buffers)})

    def check_files(self) -> None:
        """Saved and loaded, it computes the same: its arguments are attributes."""
        layers = registered("layer")
        known = dict(layers)
        for kind in set(map(type, all_layers(self.layer))):
            layers.setdefault(kind.__name__, kind)
        try:
            with tempfile.TemporaryDirectory() as folder:
                before = self.trained(self.network)
                after = load(save(before, Path(folder) / "layer.npz"))
                if not np.array_equal(after.predict(self.x), before.predict(self.x), equal_nan=True):
                    self.fail("saved and loaded it computes something else: does it keep its arguments as they are?")
        finally:
            layers.clear()
            layers.update(known)

    def check_onnx(self) -> None:
        """Where forms in ONNX are known, for layers inside too, a file can be written."""
        if not all(type(layer) in registered("onnx") for layer in all_layers(self.layer)):
            return
        network = Network(self.layer, self.in_shape, np.float32)
        with tempfile.TemporaryDirectory() as folder:
            export_onnx(self.trained(network), Path(folder) / "layer.onnx")


def importable(kind: type) -> bool:
    """Return whether a class is found by its module and name, as pickle needs it."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _near(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    scale = max(1.0, float(np.nanmax(np.abs(a), initial=0)))
    return a.shape == b.shape and bool(np.allclose(a, b, bound, bound * scale, equal_nan=True))


def _has_buffers(network: Network) -> bool:
    return network.buffer_layout.count > 0


def _shapes(specs: dict) -> dict:
    return {name: _shapes(spec) if isinstance(spec, dict) else spec.shape for name, spec in specs.items()}
