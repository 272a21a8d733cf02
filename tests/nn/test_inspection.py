"""Reports on small networks whose answers are known, and pictures of them."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from nn.analysis import inspection, pictures
from nn.core.context import LayerContext
from nn.core.layer import Layer, Sequential
from nn.core.network import Network
from nn.layers.activations import ReLU, Tanh
from nn.layers.dense import Linear
from nn.layers.reshaping import Flatten
from nn.losses import CrossEntropyLoss
from nn.optim.optimizers import SGD
from nn.training.trainer import Trainer

PNG = b"\x89PNG"


def make_trainer(root=None, inputs=2, momentum=0.9):
    root = root or Sequential(Linear(inputs, 8), ReLU(), Sequential(Linear(8, 8), Tanh()), Linear(8, 2))
    return Trainer(Network(root, (inputs,)), CrossEntropyLoss(), SGD(0.1, momentum))


def data(n=64, inputs=2):
    x = np.random.default_rng(0).standard_normal((n, inputs)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def saved(figure, path):
    figure.savefig(path)
    return path.read_bytes()[:4] == PNG


def test_confusion_matrix_counts(tmp_path):
    target, predicted = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 2, 1, 1, 2])
    matrix = inspection.confusion_matrix(predicted, target, 4)
    np.testing.assert_array_equal(matrix, [[2, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    text = inspection.confusion_table(matrix, ["cat", "dog", "cow", "hen"])
    assert re.search(r"^cat +2 +0 +1 +0 +66\.7%$", text, re.MULTILINE)
    assert re.search(r"^precision +100\.0% +50\.0% +50\.0% +0\.0% +66\.7%$", text, re.MULTILINE)
    assert saved(pictures.confusion(matrix), tmp_path / "a.png")
    many = pictures.confusion(np.eye(1000, dtype=int))  # without a name and a count for each
    assert max(many.get_size_inches()) < 25 and not many.axes[0].texts
    with pytest.raises(ValueError, match="targets from 0 to 2, for 2 classes"):
        inspection.confusion_matrix(np.zeros(6, int), target, 2)
    with pytest.raises(ValueError, match=r"\(5,\) predictions for \(6,\) targets"):
        inspection.confusion_matrix(predicted[:5], target, 4)


def test_misclassified_samples_come_surest_first(tmp_path):
    z = np.array([[2.0, 1.0], [0.0, 9.0], [1.0, 2.0], [5.0, 0.0]])
    target = np.array([0, 0, 0, 1])
    found = inspection.misclassified(z, target)
    assert found.tolist() == [1, 3, 2]
    for images in (np.random.rand(3, 4, 4, 1), np.random.rand(3, 4, 4, 3), np.random.rand(3, 16)):
        assert saved(pictures.samples(images, target[found], z[found].argmax(axis=1)), tmp_path / "b.png")
    with pytest.raises(ValueError, match="no square images"):
        pictures.samples(np.zeros((1, 15)), target, target)
    told = pictures.samples(np.zeros((3, 16)), target[found], z[found].argmax(axis=1), confidence=[0.99, 0.5, 0.731])
    assert [ax.get_title() for ax in told.axes] == ["0 > 1, 99%", "1 > 0, 50%", "0 > 1, 73%"]


def test_weights_are_shown_by_unit_in_one_scale(tmp_path):
    convolution = np.arange(3 * 3 * 2 * 5, dtype=float).reshape(3, 3, 2, 5)
    figure = pictures.units(convolution, most=4, title="weights of 0")
    images = [ax.images[0] for ax in figure.axes if ax.images]
    assert len(images) == 4 and "4 of 5 units" in figure.get_suptitle()
    np.testing.assert_array_equal(images[1].get_array(), convolution[:, :, :, 1].mean(axis=2))
    assert {image.get_clim() for image in images} == {(-images[-1].get_array().max(), images[-1].get_array().max())}
    linear = np.random.rand(16, 3)
    figure = pictures.units(linear)
    np.testing.assert_array_equal(figure.axes[2].images[0].get_array(), linear[:, 2].reshape(4, 4))
    assert saved(figure, tmp_path / "f.png")
    for wrong in (np.zeros((15, 3)), np.zeros(4)):
        with pytest.raises(ValueError, match="units: "):
            pictures.units(wrong)


def test_predictions_in_batches_are_those_of_one():
    trainer, (x, _) = make_trainer(), data(101)
    np.testing.assert_allclose(trainer.predict(x, 7), trainer.predict(x), atol=1e-6)
    assert trainer.predict(x[:0]).shape == (0, 2)


def test_pixels_that_are_always_black_are_no_dead_units():
    """Flatten shows them as units, but they are the data's."""
    layers = Sequential(Flatten(), Linear(6, 4), ReLU())
    trainer = Trainer(Network(layers, (2, 3, 1)), CrossEntropyLoss(), SGD(0.1))
    trainer.p[1].b[:] = 1
    x = np.zeros((5, 2, 3, 1), np.float32)
    assert inspection.dead_units(trainer, x) == {}
    assert [d.name for d in inspection.activations(trainer, x)] == ["1 Linear(6, 4)", "2 ReLU()"]


def test_activations_and_dead_units(tmp_path):
    trainer, x = make_trainer(), data()[0]
    trainer.p[0].W[:, [1, 4, 5]] = 0
    trainer.p[0].b[[1, 4]] = -1  # never above 0
    trainer.p[0].b[5] = 1  # constant, but not 0
    found = inspection.activations(trainer, x)
    assert [d.name for d in found] == ["0 Linear(2, 8)", "1 ReLU()", "2.0 Linear(8, 8)", "2.1 Tanh()", "3 Linear(8, 2)"]
    assert inspection.dead_units(trainer, x) == {"1 ReLU()": (2, 8)}
    z = np.maximum(x @ trainer.p[0].W + trainer.p[0].b, 0)
    relu = found[1]
    assert math.isclose(relu.mean, z.mean(), rel_tol=1e-5) and math.isclose(relu.std, z.std(), rel_tol=1e-5)
    assert relu.least == 0 and math.isclose(relu.most, z.max(), rel_tol=1e-5) and relu.zeros == np.mean(z == 0)
    assert relu.counts.sum() == z.size and "2 of 8" in inspection.distribution_table(found)
    assert trainer.ctx.network_context.after_forward is None
    assert saved(pictures.histograms(found), tmp_path / "c.png")


def test_gradients_of_every_parameter():
    trainer, (x, y) = make_trainer(), data()
    before = {name: array.copy() for name, array in trainer.state_dict().items()}
    found = inspection.gradients(trainer, x, y)
    assert [d.name for d in found] == ["0.W", "0.b", "2.0.W", "2.0.b", "3.W", "3.b"]
    named = dict(trainer.network.layout.items(trainer.gradients))
    for d in found:
        assert math.isclose(d.mean, named[d.name].mean(dtype=np.float64), rel_tol=1e-6, abs_tol=1e-12)
    assert all(np.array_equal(before[name], array) for name, array in trainer.state_dict().items())


def test_decision_regions_are_the_networks_answers(tmp_path):
    root = Linear(2, 2)
    trainer = make_trainer(root)
    trainer.p.W[...], trainer.p.b[...] = [[0, 1], [0, 0]], 0  # class 1 right of x = 0
    xs, ys, classes = inspection.decision_regions(trainer, (-1, -2), (1, 2), 20)
    assert classes.shape == (20, 20) and (classes == (xs > 0)[None, :]).all()
    assert (ys[0], ys[-1]) == (-2, 2)
    assert saved(pictures.regions(xs, ys, classes, *data()), tmp_path / "d.png")
    with pytest.raises(ValueError, match="2 inputs"):
        inspection.decision_regions(make_trainer(inputs=3), (-1, -1), (1, 1))


class Slow(Layer):
    """Takes 3 seconds forward and 5 backward, on the clock of the test."""

    now = 0.0

    def forward(self, p, x, ctx):
        Slow.now += 3
        return x.copy(), None

    def backward(self, p, gy, saved, ctx):
        Slow.now += 5
        return gy.copy(), {}

    def __repr__(self):
        return "Slow()"


def test_profile_times_each_layer_alone_and_leaves_no_clock_behind(monkeypatch):
    monkeypatch.setattr(inspection, "time", SimpleNamespace(perf_counter=lambda: Slow.now))
    trainer, (x, y) = make_trainer(Sequential(Linear(2, 8), Sequential(Slow(), Slow()), Slow())), data()
    before = {name: array.copy() for name, array in trainer.state_dict().items()}
    rows = inspection.profile(trainer, x, y, repeats=3)
    assert [row.path for row in rows] == ["", "0", "1", "1.0", "1.1", "2", "loss", "optimizer"]
    for row in rows:  # a container's own time leaves its layers' out
        assert (row.forward, row.backward) == ((3.0, 5.0) if row.layer == "Slow()" else (0.0, 0.0)), row
    text = inspection.profile_table(rows)
    assert re.search(r"^1\.0 +Slow\(\) +3000\.000 +5000\.000 +33\.3%$", text, re.MULTILINE)
    assert all(np.array_equal(before[name], array) for name, array in trainer.state_dict().items())
    assert type(trainer.ctx) is type(trainer.ctx.children[1].children[0]) is LayerContext
    assert isinstance(trainer.loss, CrossEntropyLoss) and "apply" not in vars(trainer.optimizer)


def test_a_call_of_backward_has_written_the_layers_gradients():
    """Time and memory of weight gradients are their layer's: the engine makes them after the layer described them."""
    trainer, (x, y) = make_trainer(Sequential(Linear(2, 8), Tanh(), Linear(8, 2))), data()
    seen = {}

    def around(path, name, kind, call):
        if not name.startswith("Linear") or kind == "forward":
            return call()
        trainer.gradients[:] = math.nan
        result = call()
        seen[path] = [key for key, g in trainer.network.layout.items(trainer.gradients) if np.isfinite(g).all()]
        return result

    with inspection.calls(trainer, around):
        trainer.step(x, y)
    assert {path: sorted(written) for path, written in seen.items()} == {"2": ["2.W", "2.b"], "0": ["0.W", "0.b"]}


def test_learning_rate_finder_stops_when_the_loss_blows_up(tmp_path):
    trainer, (x, y) = make_trainer(momentum=0.0), data()
    before = {name: array.copy() for name, array in trainer.state_dict().items()}
    batches = itertools.repeat((x, y, len(x)))
    search = inspection.find_learning_rate(trainer, batches, 1e-4, 1e5, steps=150, smoothing=0.5)
    assert 10 < len(search.rates) < 150, "it must have stopped early"
    np.testing.assert_allclose(search.rates[1:] / search.rates[:-1], (1e9) ** (1 / 149))
    assert 1e-2 < search.suggestion < search.rates[-1] and search.losses[-1] > 4 * search.losses.min()
    assert trainer.optimizer.lr == 0.1 and trainer.steps == 0
    assert all(np.array_equal(before[name], array) for name, array in trainer.state_dict().items())
    assert saved(pictures.rate_search(search), tmp_path / "e.png")
    with pytest.raises(ValueError, match="only 1 steps"):
        inspection.find_learning_rate(trainer, [(x, y, len(x))])


def test_the_learning_rate_is_not_looked_for_behind_a_blow_up():
    """A loss that explodes and comes back falls fastest there."""
    losses = np.concatenate([np.linspace(2.3, 1.7, 60), np.linspace(1.7, 5, 20), np.linspace(5, 2, 20)])

    class Scripted:
        optimizer = SimpleNamespace(lr=0.1)
        step = lambda self, x, y, total: x
        synchronize = lambda self, loss: loss
        snapshot = restore = lambda self, *_: None

    batches = [(loss, None, None) for loss in losses]
    search = inspection.find_learning_rate(Scripted(), batches, 1e-4, 1e1, steps=100, smoothing=0.5)
    assert len(search.losses) == 100 and search.suggestion < search.rates[60]


def test_pictures_of_filters_and_of_im2col(tmp_path):
    weight = np.random.default_rng(0).standard_normal((3, 2, 2, 5))
    figure = pictures.filters(weight)
    assert saved(figure, tmp_path / "f.png") and len(figure.axes) == 10
    np.testing.assert_array_equal(figure.axes[7].images[0].get_array(), weight[:, :, 1, 2])
    figure = pictures.im2col(np.arange(12.0).reshape(3, 4), (2, 3), row=3)
    assert saved(figure, tmp_path / "g.png")
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert texts[:6] == ["0", "1", "2", "4", "5", "6"] and len(texts) == 4 * 6
    assert [patch.get_xy() for ax in figure.axes for patch in ax.patches] == [(0.5, 0.5), (-0.5, 2.5)]
    with pytest.raises(ValueError, match=r"filters: expected weights \(KH, KW, C, K\), given \(3, 3\)"):
        pictures.filters(np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"im2col: expected an image \(H, W\) of at least \(3, 3\), given \(2, 5\)"):
        pictures.im2col(np.zeros((2, 5)), (3, 3))


def test_nothing_to_show_or_to_repeat(tmp_path):
    with pytest.raises(ValueError, match="histograms: there are none to show"):
        pictures.histograms([])
    axis, classes = np.linspace(0, 1, 5), np.zeros((5, 5), int)
    assert saved(pictures.regions(axis, axis, classes, np.zeros((0, 2)), np.zeros(0, int)), tmp_path / "g.png")
    with pytest.raises(ValueError, match="profile: repeats"):
        inspection.profile(make_trainer(), *data(), repeats=0)
