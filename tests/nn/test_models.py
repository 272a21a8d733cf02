"""Models: sizes as published, names of the command line, errors, and whole training runs beside PyTorch."""

import tracemalloc

import numpy as np
import pytest
from passes import SMALL, check_contract, check_micro_batches, one_pass
from threadpoolctl import threadpool_limits

from nn import models
from nn.analysis.gradcheck import gradcheck
from nn.core.layer import Sequential, ShapeError
from nn.core.network import Network
from nn.layers.activations import ReLU, Tanh
from nn.layers.dense import Linear
from nn.layers.reshaping import Reshape
from nn.losses import CrossEntropyLoss, QuadraticLoss
from nn.models import build
from nn.models.googlenet import Auxiliary, AuxiliaryLoss
from nn.models.resnet import Subsample
from nn.optim.optimizers import SGD
from nn.registry import registered
from nn.training.trainer import Trainer

IMAGENET = (224, 224, 3), 1000
SIZES = {  # parameters, from the papers or, where they do not say, from the tables of other implementations
    "mlp:784,30,10": ((28, 28, 1), 10, 23_860),
    "lenet5": ((28, 28, 1), 10, 431_080),
    "lenet5-1998": ((28, 28, 1), 10, 61_706),
    "alexnet": ((227, 227, 3), 1000, 60_965_224),
    "overfeat-fast": ((231, 231, 3), 1000, 145_920_872),
    "vgg16": (*IMAGENET, 138_357_544),
    "googlenet:0": (*IMAGENET, 6_998_552),
    "resnet50": (*IMAGENET, 25_557_032),
    "resnet20": ((32, 32, 3), 10, 269_722),
    "vgg-small": ((32, 32, 3), 10, 1_186_378),
    "transformer": ((64,), 256, 470_528),
    "lstm": ((64,), 256, 256 * 128 + 2 * (256 * 512 + 512) + 129 * 256),
}


@pytest.mark.parametrize("spec", SIZES)
def test_sizes(spec):
    in_shape, classes, parameters = SIZES[spec]
    tracemalloc.start()
    network = build(spec, in_shape, classes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert network.layout.count == parameters
    assert network.out_shape[-1] == classes
    assert peak < 5 << 20, "building allocates no parameters"


@pytest.mark.parametrize("spec", SMALL)
def test_gradients_of_all_parameters(spec):
    """Finite, and every one written. The largest are only put together: their layers' shapes are checked by that."""
    in_shape = SMALL[spec]
    network = build(spec, in_shape, 5)
    if network.layout.count > 15e6:
        assert network.out_shape == (5,)
        return
    rng = np.random.default_rng(0)
    ids = spec.startswith(("transformer", "encoder", "lstm"))
    x = rng.integers(1, 5, (2, *in_shape)) if ids else rng.random((2, *in_shape), np.float32)
    buffer = rng.standard_normal(network.layout.size, np.float32)  # real first values take seconds to draw
    buffer *= 0.02
    gradients = np.full_like(buffer, np.nan)
    p, ctx = network.layout.views(buffer), network.context()
    y, saved = network.forward(p, x, ctx)
    target = rng.integers(0, 5, (2, *network.out_shape[:-1]))
    loss = AuxiliaryLoss(CrossEntropyLoss()) if spec == "googlenet" else CrossEntropyLoss()
    value, gy = loss(y, target, 2, ctx)
    network.backward(p, network.layout.views(gradients), gy, saved, ctx)
    assert np.isfinite(value)
    for name, array in network.layout.items(gradients):
        assert np.isfinite(array).all(), name
    ctx.micro_batch.training = False
    assert network.forward(p, x, ctx)[0].shape == (2, *network.out_shape)


def test_all_models_are_tested():
    assert {spec.partition(":")[0] for spec in SMALL} == set(registered("model"))


def test_command_line_names():
    network = build("mlp:784,30,10", (28, 28, 1), 10, np.float64, "sigmoid", "normal", "sigmoid")
    kinds = ["Flatten()", "Linear(784, 30)", "Sigmoid()", "Linear(30, 10)", "Sigmoid()"]
    assert [repr(layer) for layer in network.root.layers] == kinds
    buffer = network.layout.zeros(np.float64)
    network.layout.initialize(buffer, 0)
    for name, array in network.layout.items(buffer):
        if array.size > 20:
            assert 0.5 < array.std() < 1.5, name  # biases too
        assert (array != 0).all()
    assert network.dtype == np.float64 and network.name == "mlp:784,30,10"
    assert repr(build("mlp", (784,), 10).root.layers[0]) == "Linear(784, 128)"
    orthogonal = build("cnn", (8, 8, 1), 10, init="orthogonal")
    buffer = orthogonal.layout.zeros(np.float32)
    orthogonal.layout.initialize(buffer, 0)
    W = dict(orthogonal.layout.items(buffer))["7.W"]
    np.testing.assert_allclose(W.T @ W, np.eye(128), atol=1e-5)
    assert (dict(orthogonal.layout.items(buffer))["7.b"] == 0).all()
    assert (
        sum("Tanh()" in repr(layer) for layer in build("lenet5", (28, 28, 1), 10, activation="tanh").root.layers) == 3
    )
    assert build("cnn:4,5,6", (8, 8, 1), 10).layout.count == 4 * 9 + 4 + 5 * 36 + 5 + 20 * 6 + 6 + 60 + 10


@pytest.mark.parametrize(
    "call, words",
    [
        (("mpl", (4,), 3), r"unknown model 'mpl': did you mean 'mlp'\? known are alexnet, cnn"),
        (("zzz", (4,), 3), "unknown model 'zzz': known are"),
        (("mlp:4,x", (4,), 3), "expected whole numbers after the colon, given '4,x'"),
        (("mlp:5,3", (4,), 3), "expected 4 .* first and 3 classes last"),
        (("mlp:4", (4,), 3), "sizes go from the input to the output"),
        (("resnet20:1,2", (32, 32, 3), 10), "2 numbers are too many; resnet20 takes zero_gamma=0"),
        (("cnn", (784,), 10), r"cnn takes images .* given samples of shape \(784,\)"),
        (("vgg16", (16, 16, 3), 10), "vgg16 takes images .* at least 32x32"),
        (("transformer", (28, 28, 1), 10), "transformer takes sequences of ids"),
        (("transformer:10,3", (8,), 10), "3 heads"),
        (("mlp", (4,), 3, "f4", "rleu"), r"unknown activation 'rleu': did you mean 'relu'\?"),
        (("resnet20", (32, 32, 3), 10, "f4", "relu"), "resnet20: its activations are part of it"),
        (("mlp", (4,), 3, "f4", None, "norml"), r"unknown initializer 'norml': did you mean 'normal'\?"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        build(*call)


def test_zero_gamma_makes_blocks_start_as_identities():
    for spec, number in (("resnet20:1", 9), ("resnet50:1", 16)):
        layout = build(spec, (32, 32, 3), 10).layout
        zero = [name for name, s in layout.specs.items() if name.endswith("gamma") and s.init(None, (1,))[0] == 0]
        assert len(zero) == number
        assert all(name.endswith((".body.4.gamma", ".body.7.gamma")) for name in zero)


def test_subsample():
    x = np.random.default_rng(0).standard_normal((2, 5, 4, 3))
    result = one_pass(Subsample(2, 8), x)
    assert result.y.shape == (2, 3, 2, 8)
    assert np.array_equal(result.y[..., 2:5], x[:, ::2, ::2])
    assert (result.y[..., :2] == 0).all() and (result.y[..., 5:] == 0).all()
    assert gradcheck(Subsample(2, 8), x) < 1e-6
    check_contract(Subsample(2, 8), x)
    with pytest.raises(ShapeError, match="at most 2 channels"):
        Network(Sequential(Subsample(2, 2)), (4, 4, 3))


def test_auxiliary_heads():
    x = np.random.default_rng(0).standard_normal((4, 3))
    inner = Auxiliary(Sequential(Tanh(), Linear(5, 2)), Linear(5, 2))
    layer = Sequential(Linear(3, 5), Auxiliary(Sequential(ReLU(), inner), Sequential(Tanh(), Linear(5, 2))))
    result = one_pass(layer, x)
    assert result.y.shape == (4, 3, 2)
    assert result.network.out_shape == (2,) and result.network.training_shape == (3, 2)
    w = result.w
    h = x @ w["0.W"] + w["0.b"]
    rest = np.maximum(h, 0)
    expected = [
        np.tanh(rest) @ w["1.rest.1.rest.1.W"] + w["1.rest.1.rest.1.b"],
        rest @ w["1.rest.1.head.W"] + w["1.rest.1.head.b"],
        np.tanh(h) @ w["1.head.1.W"] + w["1.head.1.b"],
    ]
    np.testing.assert_allclose(result.y, np.stack(expected, axis=1), rtol=1e-12)
    assert gradcheck(layer, x) < 1e-6
    check_contract(layer, x)
    check_micro_batches(layer, x)

    def evaluate(ctx):
        ctx.micro_batch.training = False

    alone = one_pass(layer, x, setup=evaluate)
    assert alone.y.shape == (4, 2)
    assert all((g == 0).all() for name, g in alone.g.items() if "head" in name)
    assert gradcheck(layer, x, setup=evaluate) < 1e-6
    with pytest.raises(ShapeError, match=r"layer 0 .*the main one makes \(2,\), the auxiliary \(3,\)"):
        Network(Sequential(Auxiliary(Linear(3, 2), Linear(3, 3))), (3,))
    with pytest.raises(ShapeError, match=r"layer 1 .*cannot give samples of shape \(2, 2\)"):  # fits in evaluation only
        Network(Sequential(Auxiliary(Linear(3, 2), Linear(3, 2)), Reshape(2, 1)), (3,))


def test_auxiliary_loss():
    rng = np.random.default_rng(0)
    z, target = rng.standard_normal((4, 3, 5)), rng.integers(0, 5, 4)
    ctx = Network(Linear(1, 1), (1,), np.float64).context()
    value, gz = AuxiliaryLoss(CrossEntropyLoss(), 0.3)(z, target, 8, ctx)
    parts = [CrossEntropyLoss()(z[:, k].copy(), target, 8, ctx) for k in range(3)]
    assert value == pytest.approx(parts[0][0] + 0.3 * parts[1][0] + 0.3 * parts[2][0], rel=1e-12)
    for k, weight in enumerate((1.0, 0.3, 0.3)):
        np.testing.assert_allclose(gz[:, k], weight * parts[k][1], rtol=1e-12)
    plain = AuxiliaryLoss(CrossEntropyLoss())(z[:, 0], target, 8, ctx)
    assert plain[0] == parts[0][0]
    with pytest.raises(ValueError, match="targets"):
        CrossEntropyLoss()(z, target, 8, ctx)


# Whole runs beside PyTorch: the same first weights, the same batches, 20 steps of SGD with momentum in float64.


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    with threadpool_limits(1):  # small work: threads would only wait for each other
        yield module


def follow(torch, network, forward, batches, lr=0.05, momentum=0.9, loss=None):
    """The largest relative difference of a parameter after the last batch."""
    trainer = Trainer(network, CrossEntropyLoss(), SGD(lr, momentum), seed=1)
    theirs = {k: torch.from_numpy(v.copy()).requires_grad_() for k, v in network.layout.items(trainer.flat_parameters)}
    optimizer = torch.optim.SGD(list(theirs.values()), lr=lr, momentum=momentum)
    first = {name: w.detach().numpy().copy() for name, w in theirs.items()}
    for x, y in batches:
        ours = trainer.step(x, y)
        optimizer.zero_grad()
        z = forward(theirs, torch.from_numpy(x))
        value = torch.nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), torch.from_numpy(y).reshape(-1))
        value.backward()
        optimizer.step()
        assert ours == pytest.approx(value.item(), rel=1e-9)
    worst = 0.0
    for name, array in network.layout.items(trainer.flat_parameters):
        end = theirs[name].detach().numpy()
        assert np.abs(end - first[name]).max() > 1e-4, f"{name} did not move"
        worst = max(worst, np.abs(array - end).max() / np.abs(end).max())
    return worst


def test_lenet_follows_pytorch(torch):
    F = torch.nn.functional

    def forward(w, x):
        x = x.permute(0, 3, 1, 2)
        for i in ("0", "3"):
            x = F.max_pool2d(F.relu(F.conv2d(x, w[f"{i}.W"].permute(3, 2, 0, 1), w[f"{i}.b"])), 2)
        x = F.relu(x.permute(0, 2, 3, 1).flatten(1) @ w["7.W"] + w["7.b"])
        return x @ w["9.W"] + w["9.b"]

    rng = np.random.default_rng(0)
    batches = [(rng.random((4, 28, 28, 1)), rng.integers(0, 10, 4)) for _ in range(20)]
    assert follow(torch, build("lenet5", (28, 28, 1), 10, np.float64), forward, batches) < 1e-9


@pytest.mark.parametrize("tied", [0, 1])
def test_transformer_follows_pytorch(torch, tied):
    F = torch.nn.functional

    def norm(w, path, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{path}.gamma"], w[f"{path}.beta"])

    def attention(w, path, x, heads=4):
        q, k, v = (x @ w[f"{path}.Wqkv"] + w[f"{path}.bqkv"]).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2) @ w[f"{path}.Wo"] + w[f"{path}.bo"]

    def forward(w, ids):
        x = w["0.W"][ids] + w["1.W"]
        for b in ("2", "3"):
            x = x + attention(w, f"{b}.0.body.1", norm(w, f"{b}.0.body.0", x))
            h = F.gelu(norm(w, f"{b}.1.body.0", x) @ w[f"{b}.1.body.1.W"] + w[f"{b}.1.body.1.b"])
            x = x + h @ w[f"{b}.1.body.3.W"] + w[f"{b}.1.body.3.b"]
        return norm(w, "4", x) @ (w["0.W"].T if tied else w["5.W"])

    rng = np.random.default_rng(0)
    text = [rng.integers(0, 30, (6, 17)) for _ in range(20)]
    batches = [(t[:, :-1].copy(), t[:, 1:].copy()) for t in text]
    network = build(f"transformer:32,4,2,{tied}", (16,), 30, np.float64)
    assert follow(torch, network, forward, batches) < 1e-9


def test_resnet_follows_pytorch(torch):
    F = torch.nn.functional

    def convolve(w, i, x, stride=1):
        padding = w[f"{i}.W"].shape[0] // 2
        x = F.conv2d(x, w[f"{i}.W"].permute(3, 2, 0, 1), None, stride, padding)
        path, _, last = i.rpartition(".")
        norm = f"{path}.{int(last) + 1}" if path else str(int(last) + 1)
        return F.batch_norm(x, None, None, w[f"{norm}.gamma"], w[f"{norm}.beta"], training=True)

    def forward(w, x):
        x = F.relu(convolve(w, "0", x.permute(0, 3, 1, 2)))
        for block in range(9):
            i, stride = 3 + 2 * block, 2 if block in (3, 6) else 1
            h = convolve(w, f"{i}.body.3", F.relu(convolve(w, f"{i}.body.0", x, stride)))
            if stride == 2:
                pad = x.shape[1] // 2
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, pad, pad))
            x = F.relu(h + x)
        return x.mean((2, 3)) @ w["22.W"] + w["22.b"]

    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((4, 8, 8, 3)), rng.integers(0, 10, 4)) for _ in range(5)]
    network = build("resnet20", (8, 8, 3), 10, np.float64)
    assert follow(torch, network, forward, batches, lr=0.01) < 1e-7  # 19 batch normalisations of 4 samples amplify


def test_the_classical_experiment_learns():
    """784-30-10, sigmoid on both layers, quadratic cost: one step is the four equations written out."""
    network = build("mlp:6,4,3", (6,), 3, np.float64, "sigmoid", "normal", "sigmoid")
    trainer = Trainer(network, QuadraticLoss(), SGD(lr=3.0), seed=2)
    W1, b1, W2, b2 = (
        dict(network.layout.items(trainer.flat_parameters))[n].copy() for n in ("0.W", "0.b", "2.W", "2.b")
    )
    rng = np.random.default_rng(0)
    x, y = rng.random((5, 6)), rng.integers(0, 3, 5)
    trainer.step(x, y)
    a1 = 1 / (1 + np.exp(-(x @ W1 + b1)))
    a2 = 1 / (1 + np.exp(-(a1 @ W2 + b2)))
    delta2 = (a2 - np.eye(3)[y]) * a2 * (1 - a2)
    delta1 = delta2 @ W2.T * a1 * (1 - a1)
    expected = {
        "2.W": W2 - 3.0 / 5 * a1.T @ delta2,
        "2.b": b2 - 3.0 / 5 * delta2.sum(0),
        "0.W": W1 - 3.0 / 5 * x.T @ delta1,
        "0.b": b1 - 3.0 / 5 * delta1.sum(0),
    }
    for name, array in network.layout.items(trainer.flat_parameters):
        np.testing.assert_allclose(array, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        ("transformer:16,4,-1", (8,), "model 'transformer:16,4,-1': blocks"),
        ("transformer:16,4,0", (8,), "blocks"),
        ("transformer:0", (8,), "features"),
        ("transformer:16,0", (8,), "heads"),
        ("transformer:16,4,1,2", (8,), "tied"),
        ("transformer:16,4,1,experts=-2", (8,), "experts"),
        ("transformer:16,4,1,experts=2,top=0", (8,), "top"),
        ("transformer:16,4,1,dropout=-0.1", (8,), "dropout"),
        ("lstm:16,0", (8,), "layers"),
        ("lstm:16,1,-3", (8,), "truncate"),
        ("mlp:64,0,10", (64,), "sizes"),
        ("mlp:64,-3,10", (64,), "sizes"),
        ("lenet5:20,-50,500", (28, 28, 1), "widths"),
        ("cnn:0", (8, 8, 1), "first"),
        ("resnet20:2", (32, 32, 3), "zero_gamma"),
        ("googlenet:-1", (64, 64, 3), "auxiliary"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(spec, shape, words):
    with pytest.raises(ValueError, match=words):
        build(spec, shape, 10)


def test_switches_are_0_and_1_in_names():
    one = models.transformer((8,), 10, 16, 4, 1, tied=True)
    assert one.name == "transformer:16,4,1,tied=1" and one.layout.count == build(one.name, (8,), 10).layout.count


def test_auxiliary_loss_of_a_weighted_loss_trains():
    """Its own factor and the weight of targets have different names."""
    network = Network(Auxiliary(Linear(4, 3), Linear(4, 3)), (4,), np.float64)
    x, y = np.random.default_rng(0).standard_normal((5, 4)), np.array([0, 1, -1, 2, 0])
    loss = AuxiliaryLoss(CrossEntropyLoss(ignore_index=-1))
    one, kept = Trainer(network, loss, SGD(0.1)), y >= 0
    other = Trainer(network, AuxiliaryLoss(CrossEntropyLoss()), SGD(0.1))
    assert loss.weight(y) == 4
    assert one.step(x, y) == pytest.approx(other.step(x[kept], y[kept]), rel=1e-12)
