"""check_layer, check_loss, check_optimizer: all that is built in passes, each mistake gets its sentence."""

import numpy as np
import pytest
from test_gradcheck import LOSSES
from test_optimizers import OPTIMIZERS

import nn
from nn.losses import Loss
from nn.models.googlenet import Auxiliary, AuxiliaryLoss
from nn.models.resnet import Subsample
from nn.optim.optimizers import Optimizer

IMAGE, SEQUENCE = (5, 4, 4), (5, 4)


def linear(outputs=4):
    return nn.Linear(4, outputs)


LAYERS = {
    linear(3): (4,),
    nn.BatchNorm1d(4): (4,),
    nn.Dropout(0.3): SEQUENCE,
    nn.Embedding(7, 4, padding=0): (5,),
    nn.Conv2d(4, 6, 3, padding=1): IMAGE,
    nn.MaxPool2d(2): IMAGE,
    nn.Sigmoid(): (4,),
    nn.Residual(nn.Sequential(linear(), nn.Tanh())): (4,),
    nn.Recompute(nn.Sequential(linear(), nn.Dropout(0.5))): (4,),
    nn.Sequential(nn.Linear(4, 5, bias=False), nn.TiedLinear("0.W", 5, 4)): (4,),
    nn.MultiHeadAttention(4, 2, causal=True): SEQUENCE,
    nn.TransformerBlock(4, 2, dropout=0.2): SEQUENCE,
    nn.LearnedPositions(9, 4): SEQUENCE,
    nn.MixtureOfExperts(4, 3, hidden=5, auxiliary=0): SEQUENCE,
    nn.RotaryPositions(): SEQUENCE,
    nn.SinusoidalPositions(): SEQUENCE,
    nn.BatchNorm2d(4): IMAGE,
    nn.LayerNorm(4): (4,),
    nn.RMSNorm(4): SEQUENCE,
    nn.LocalResponseNorm(3): IMAGE,
    nn.Parallel(linear(2), nn.Sequential(linear(3), nn.Tanh()), nn.Tanh()): (4,),
    Auxiliary(linear(3), nn.Sequential(nn.Dropout(0.3), linear(3))): (4,),
    Subsample(2, 6): IMAGE,
    nn.AvgPool2d(2): IMAGE,
    nn.AdaptiveAvgPool2d(2): IMAGE,
    nn.GlobalAvgPool2d(): IMAGE,
    nn.GlobalMaxPool2d(): IMAGE,
    nn.RNN(4, 6): SEQUENCE,
    nn.LSTM(4, 6, last=True): SEQUENCE,
    nn.Flatten(): SEQUENCE,
    nn.Reshape(4, 5): SEQUENCE,
} | {getattr(nn, name)(): (4,) for name in ("GELU", "LeakyReLU", "LogSoftmax", "ReLU", "SiLU", "Softmax", "Tanh")}


@pytest.mark.parametrize(
    ("layer", "in_shape"),
    LAYERS.items(),
    ids=lambda value: repr(value) if isinstance(value, nn.Layer) else "",
)
def test_built_in_layers_pass(layer, in_shape):
    nn.check_layer(layer, in_shape, ids=7)


class Wrong(nn.Layer):
    """Multiplies by a number for each feature, with a mistake of choice."""

    def __init__(self, mistake=""):
        self.mistake, self.cache = mistake, {"calls": 0, "id": id(self)}
        if mistake == "lambda":
            self.cache["function"] = lambda x: x

    def specs(self, in_shape):
        if self.mistake == "index error" and in_shape != (6,):
            raise IndexError("tuple index out of range")
        self.cache["calls"] += self.mistake == "other specs"
        extra = {"t": nn.Spec((1,), nn.initializers.ones)} if self.cache["calls"] % 2 else {}
        return {"s": nn.Spec((6,), nn.initializers.ones)} | extra, in_shape

    def forward(self, p, x, ctx):
        if self.mistake == "batch":
            x = x - x.mean(axis=0)
        if self.mistake == "writes":
            x *= 1.5
        if self.mistake == "strides":  # those of a contiguous array
            x = np.lib.stride_tricks.as_strided(x, x.shape, (x.shape[1] * x.itemsize, x.itemsize))
        if (self.mistake == "float32" and x.dtype == np.float32) or (
            self.mistake == "copy" and self.cache["id"] != id(self)
        ):
            return 2 * x * p.s, x
        if self.mistake == "no samples" and not len(x):
            raise ValueError("cannot reshape")
        if self.mistake == "cached":
            self.cache["x"] = x
        if self.mistake == "declares too much":
            return x, x
        if self.mistake == "clips":
            return np.clip(x, -4, 4) * p.s, x
        return x * p.s, x

    def backward(self, p, gy, x, ctx):
        if self.mistake == "cached":
            x = self.cache["x"]
        if self.mistake == "declares too much":
            return gy, {"s": np.zeros(6, x.dtype)}
        gs = (gy * (np.clip(x, -4, 4) if self.mistake == "clips" else x)).sum(axis=0)
        if self.mistake == "derivative":
            gs = 2 * gs
        if self.mistake == "gradient of nothing" and not len(x):
            gs = np.ones(6)
        gx = gy * p.s
        return (gx - gx.mean(axis=0) if self.mistake == "batch" else gx), {"s": gs}


class DeclaresTooMuch(Wrong):
    output = gradient = "new"


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (Wrong("derivative"), "backward is not the derivative of forward"),
        (Wrong("clips"), "backward is not the derivative of forward: .* for 5 samples 10 times as large"),
        (Wrong("batch"), "depends on the others in its batch"),
        (Wrong("no samples"), "a batch without samples, which a shard may have, raises ValueError"),
        (Wrong("cached"), "after a forward of other samples, backward makes something else"),
        (Wrong("index error"), r"specs\(\(6, 3\)\) raises IndexError.*nn.ShapeError"),
        (Wrong("other specs"), "specs returns other arrays the second time"),
        (Wrong("writes"), "writes into x, which others may need"),
        (Wrong("strides"), "the output of samples that are not contiguous .* is not what it was"),
        (Wrong("float32"), "the output in float32 is not what it was"),
        (Wrong("gradient of nothing"), "of a batch without samples the gradients must be zero"),
        (Wrong("lambda"), "it cannot be pickled"),
        (Wrong("copy"), "a deep copy computes something else"),
        (DeclaresTooMuch("declares too much"), 'the output shares memory.*output = "new" does not hold'),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.mistake,
)
def test_each_mistake_of_a_layer_gets_its_sentence(layer, sentence):
    with pytest.raises(AssertionError, match=sentence):
        nn.check_layer(layer, (6,))


def test_a_layer_without_a_mistake_and_what_is_no_layer():
    nn.check_layer(Wrong(), (6,))
    with pytest.raises(TypeError, match="an instance, not the class"):
        nn.check_layer(Wrong, (6,))


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_built_in_losses_pass(loss):
    nn.check_loss(loss, (3, 4) if isinstance(loss, AuxiliaryLoss) else (4,), LOSSES[loss])


class Squares(Loss):
    """1/2 |z - y|^2 with a mistake of choice."""

    def __init__(self, mistake=""):
        self.mistake = mistake

    def __call__(self, z, target, total, ctx):
        d = z - target
        match self.mistake:
            case "own mean":
                total = len(z)
            case "a number for each sample":
                return 0.5 * (d * d).sum(axis=-1) / total, d / total
            case "only the value":
                return 0.5 * float((d * d).sum()) / total
            case "derivative":
                d = 2 * d
                return 0.125 * float((d * d).sum()) / total, d / total
            case "float64":
                return 0.5 * float((d * d).sum()) / total, (d / total).astype(np.float64)
            case "hides NaN":
                d = np.nan_to_num(d)
            case "no samples":
                d = d - d.min() + d.min()
            case "overwrites":
                z -= target
                d = z
            case "gradient of one output":
                return 0.5 * float((d * d).sum()) / total, d[..., :1] / total
            case "own mean of the gradient":
                return 0.5 * float((d * d).sum()) / total, d / len(z)
            case "old memory":
                gz = ctx.empty(z.shape, z.dtype)
                gz += d / total
                return 0.5 * float((d * d).sum()) / total, gz
            case "float32" if z.dtype == np.float32:
                d = 2 * d
            case "strides" if len(z):
                d = np.lib.stride_tricks.as_strided(z, z.shape, (z.shape[-1] * z.itemsize, z.itemsize)) - target
        return 0.5 * float((d * d).sum()) / total, d / total

    def rows(self, out_shape):
        return 1 if self.mistake == "rows" else super().rows(out_shape)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("own mean", "the value must be divided by `total_weight`"),
        ("a number for each sample", "the value must be one number"),
        ("only the value", "it must return a pair"),
        ("derivative", "the gradient is not the derivative of the value"),
        ("float64", "the gradient of float32 outputs is float64"),
        ("hides NaN", "hides NaN"),
        ("no samples", "a batch without samples"),
        ("rows", "must be the mean over its positions"),
        ("overwrites", "it writes into the outputs or the targets"),
        ("gradient of one output", "the gradient must have the shape of the outputs"),
        ("own mean of the gradient", "the gradient must be divided by `total_weight`"),
        ("old memory", "another value or gradient the second time"),
        ("float32", "in float32 it computes something else"),
        ("strides", "of outputs that are not contiguous it computes something else"),
    ],
)
def test_each_mistake_of_a_loss_gets_its_sentence(mistake, sentence):
    nn.check_loss(Squares(), (4,))
    with pytest.raises(AssertionError, match=sentence):
        nn.check_loss(Squares(mistake), (4,))


def test_a_loss_of_values_must_refuse_targets_of_another_shape():
    class Values(Squares):
        targets = "values"

    with pytest.raises(AssertionError, match=r"targets \(6,\) of outputs \(6, 1\) are not refused"):
        nn.check_loss(Values(), (4,))
    with pytest.raises(TypeError, match=r"in_shape is a tuple, the shape of one sample: \(6,\), given 6"):
        nn.check_layer(nn.Linear(6, 3), 6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_built_in_optimizers_pass(optimizer):
    nn.check_optimizer(optimizer)


class Descent(Optimizer):
    """SGD with momentum, and a mistake of choice."""

    mistake = ""

    def __init__(self, lr, mistake=""):
        super().__init__(lr)
        self.mistake, self.kept = mistake, {}

    def __repr__(self):
        return f"Descent({self.mistake!r})"

    @property
    def slots(self):
        return "velocity" if self.mistake == "slots" else ("velocity",)

    @np.errstate(invalid="ignore", divide="ignore")
    def apply(self, w, g, slots, step, region, sum_over_slices=None):
        if self.mistake == "norm":
            g /= np.linalg.norm(g)
        for place in [slice(None)] if self.mistake == "decays all" else region.decayed:
            if self.mistake != "no decay":
                g[place] += self.weight_decay * w[place]
        v = slots["velocity"]
        if self.mistake == "another slot":
            v = slots["momentum"]
        if self.mistake == "replaces":
            v = slots["velocity"] = v.copy()
        if self.mistake == "unused slot":
            v = v.copy()

        if self.mistake == "float32" and w.dtype == np.float32:
            g = 2 * g
        if self.mistake == "first moment":
            g = g / np.where(g == 0, 1, v)
        if self.mistake == "kept":
            v = self.kept.setdefault("v", np.zeros_like(w))
        v *= 0.9
        v += g
        if self.mistake == "norm of a slice":
            v *= 1 / (1 + np.linalg.norm(g))
        if self.mistake == "padding":
            v += 1e-3
        if self.mistake == "up":
            w += self.lr * v
        elif self.mistake == "another array":
            w = w - self.lr * v
        else:
            w -= self.lr * v


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("slots", "slots must be a tuple of names"),
        ("kept", "used for a second network it makes other updates"),
        ("padding", "padding of .* is no longer zero"),
        ("up", "end higher than they began"),
        ("another array", "leaves the parameters as they were"),
        ("decays all", "weight decay changes a bias"),
        ("no decay", "weight_decay does nothing"),
        ("norm of a slice", "updates of slices.*are not those of the whole"),
        ("another slot", "asks for slot 'momentum', which the class does not declare"),
        ("replaces", "slot 'velocity' is replaced: write into it"),
        ("unused slot", "slot 'velocity' is declared, and still zero"),
        ("first moment", "some parameters are not finite"),
        ("norm", "where gradients are 0 parameters become NaN"),
        ("float32", "in float32 it computes something else"),
    ],
)
def test_each_mistake_of_an_optimizer_gets_its_sentence(mistake, sentence):
    nn.check_optimizer(Descent(0.1))
    with pytest.raises(AssertionError, match=sentence):
        nn.check_optimizer(Descent(0.1, mistake))
