"""A saved network is the network: it predicts the same bits, without loss, optimizer or the program that made it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import PATIENCE

import nn
from nn import registry
from nn.core.layer import Layer
from nn.files.description import describe, make_layer
from nn.initializers import lecun
from nn.models import build
from nn.registry import registered

SEQUENCE, IMAGE = (4, 8), (7, 9, 4)
# Every kind of layer, with arguments that are not its defaults, and what it takes.
EXAMPLES = {
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d((3, 2)), IMAGE),
    "AvgPool2d": (nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    "BatchNorm1d": (nn.BatchNorm1d(8, eps=1e-3, momentum=0.2), SEQUENCE),
    "BatchNorm2d": (nn.BatchNorm2d(4, synchronized=True), IMAGE),
    "Parallel": (nn.Parallel(nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 3), nn.Tanh())), SEQUENCE),
    "Conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False), IMAGE),
    "Dropout": (nn.Dropout(0.25), SEQUENCE),
    "Embedding": (nn.Embedding(11, 8, padding=0), (5,)),
    "Flatten": (nn.Flatten(), IMAGE),
    "GELU": (nn.GELU(approximate=True), SEQUENCE),
    "GlobalAvgPool2d": (nn.GlobalAvgPool2d(), IMAGE),
    "GlobalMaxPool2d": (nn.GlobalMaxPool2d(), IMAGE),
    "LSTM": (nn.LSTM(8, 3, bias=False, truncate=2, learn_state=True, forget_bias=0.5), SEQUENCE),
    "LayerNorm": (nn.LayerNorm(8, eps=1e-3, bias=False), SEQUENCE),
    "LeakyReLU": (nn.LeakyReLU(0.2), SEQUENCE),
    "LearnedPositions": (nn.LearnedPositions(6, 8), SEQUENCE),
    "Linear": (nn.Linear(8, 3, bias=False), SEQUENCE),
    "LocalResponseNorm": (nn.LocalResponseNorm(3, alpha=0.1, beta=0.5, k=2.0), IMAGE),
    "LogSoftmax": (nn.LogSoftmax(), SEQUENCE),
    "MaxPool2d": (nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), IMAGE),
    "MixtureOfExperts": (
        nn.MixtureOfExperts(8, 4, 3, hidden=5, gate="sigmoid", capacity=1.5, auxiliary=0.0, activation="silu"),
        SEQUENCE,
    ),
    "MultiHeadAttention": (
        nn.MultiHeadAttention(8, 2, causal=True, bias=False, attention="blocks:2", rotary=True),
        SEQUENCE,
    ),
    "RMSNorm": (nn.RMSNorm(8, eps=1e-3), SEQUENCE),
    "ReLU": (nn.ReLU(), SEQUENCE),
    "RNN": (nn.RNN(8, 3, activation="relu", last=True, init=lecun), SEQUENCE),
    "Recompute": (nn.Recompute(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), SEQUENCE),
    "Reshape": (nn.Reshape(2, 16), SEQUENCE),
    "Residual": (nn.Residual(nn.Linear(8, 3), nn.Linear(8, 3, bias=False)), SEQUENCE),
    "RotaryPositions": (nn.RotaryPositions(), SEQUENCE),
    "Sequential": (nn.Sequential(nn.Linear(8, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), first=4), SEQUENCE),
    "SiLU": (nn.SiLU(), SEQUENCE),
    "Sigmoid": (nn.Sigmoid(), SEQUENCE),
    "SinusoidalPositions": (nn.SinusoidalPositions(), SEQUENCE),
    "Softmax": (nn.Softmax(), SEQUENCE),
    "Tanh": (nn.Tanh(), SEQUENCE),
    "TransformerBlock": (nn.TransformerBlock(8, 2, causal=True, pre_norm=False, hidden=12, dropout=0.1), SEQUENCE),
}


# Bases of others; and what a process of a pipeline holds of a network, which is saved whole.
NOT_SAVED = "Activation", "BatchNorm", "Smooth", "Several", "Wrapper"


def every_kind(of=Layer):
    """Every class of layers that the engine has, and that computes something itself."""
    for kind in of.__subclasses__():
        if kind.__module__.startswith("nn.") and kind.__name__ not in NOT_SAVED:
            yield from [] if kind.__name__.startswith("_") else [kind.__name__]
        yield from every_kind(kind)


def trained(network, seed=0):
    """All parameters and statistics something that no initializer gives."""
    rng = np.random.default_rng(seed)
    w, buffers = network.layout.zeros(network.dtype), network.buffer_layout.zeros(network.dtype)
    for layout, buffer in ((network.layout, w), (network.buffer_layout, buffers)):
        for _, array in layout.items(buffer):
            array[...] = rng.uniform(0.1, 0.5, array.shape)
    arrays = {f"param/{name}": array for name, array in network.layout.items(w)}
    return nn.Model(network, arrays | {f"state/{n}": a for n, a in network.buffer_layout.items(buffers)})


def samples(network, count=5):
    rng = np.random.default_rng(1)
    if network.takes_ids:
        return rng.integers(1, 5, (count, *network.in_shape))
    return rng.standard_normal((count, *network.in_shape)).astype(network.dtype)


def test_every_kind_of_layer_is_known():
    assert set(every_kind()) == set(registered("layer"))
    assert set(registered("layer")) - set(EXAMPLES) == {"Auxiliary", "Subsample", "TiedLinear"}, (
        "those are in the models below"
    )


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_every_layer_comes_back_the_same(suffix, tmp_path):
    for name, (layer, in_shape) in EXAMPLES.items():
        network = nn.Network(layer, in_shape, np.float64, name=f"one {name}")
        before = trained(network)
        x = samples(network)
        after = nn.load(nn.save(before, tmp_path / f"x.{suffix}", about={"names": ["a", "b"]}))
        assert describe(after.network.root) == describe(layer)
        assert repr(after.network.root) == repr(layer) and after.network.name == f"one {name}"
        assert after.network.dtype == np.float64 and after.about == {"names": ["a", "b"]}
        np.testing.assert_array_equal(after.predict(x), before.predict(x), err_msg=name)
        assert not np.array_equal(trained(network, seed=2).predict(x), before.predict(x)) or not network.layout.count


def test_files_with_the_names_of_before_are_read():
    for old, name in (("Branches", "Parallel"), ("Recurrent", "RNN")):
        told = describe(EXAMPLES[name][0])
        assert told["layer"] == name
        assert repr(make_layer(told | {"layer": old})) == repr(EXAMPLES[name][0])
    told = describe(nn.Linear(3, 2))
    assert repr(make_layer(told | {"arguments": told["arguments"] | {"split": "rows"}})) == "Linear(3, 2)"


def test_every_model_comes_back_the_same():
    shapes = {
        "encoder": (6,),
        "lstm": (6,),
        "transformer": (6,),
        "mlp": (5, 5, 1),
        "alexnet": (227, 227, 3),
        "cnn": (8, 8, 1),
        "lenet5-1998": (28, 28, 1),
    }
    specs = {"encoder": "encoder:8,2,1", "lstm": "lstm:8,2", "transformer": "transformer:8,2,1,1"}
    for name in registered("model"):
        network = build(specs.get(name, name), shapes.get(name, (71, 71, 3)), 5)
        again = make_layer(json.loads(json.dumps(describe(network.root))))
        assert repr(again) == repr(network.root)
        assert nn.Network(again, network.in_shape).layout.specs.keys() == network.layout.specs.keys()


def small(seed=0):
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    network = nn.Network(layers, (3,), name="small")
    return network, nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(lr=0.01), seed)


def learn(trainer, steps=3):
    rng = np.random.default_rng(7)
    for _ in range(steps):
        trainer.step(rng.standard_normal((6, 3)).astype(np.float32), rng.integers(0, 2, 6))
    return trainer


def test_what_weights_may_come_from(tmp_path):
    network, trainer = small()
    learn(trainer)
    x, file = samples(network), tmp_path / "x.npz"
    expected = trainer.predict(x).copy()
    kept = nn.Checkpoints(tmp_path)
    kept.save(trainer.state_dict(), {})
    for weights in (trainer, trainer.state_dict(), kept.load()[0], nn.load(nn.save(trainer, file))):
        np.testing.assert_array_equal(nn.load(nn.save(nn.Model(network, weights), file)).predict(x), expected)
    with pytest.raises(ValueError, match=r"small has running statistics, such as 1\.mean: give a trainer"):
        nn.save(nn.Model(network, trainer.flat_parameters), file)
    bare = nn.Network(nn.Linear(3, 2), (3,))
    w = bare.layout.zeros(np.float32)
    bare.layout.initialize(w, seed=3)
    assert (nn.load(nn.save(nn.Model(bare, w), file)).flat_parameters == w).all() and w.any()


def test_training_goes_on_from_a_saved_network(tmp_path):
    network, trainer = small()
    after = nn.load(nn.save(learn(trainer), tmp_path / "x.npz"))
    other = nn.Trainer(after.network, nn.CrossEntropyLoss(), nn.Adam(lr=0.01), seed=5)
    other.load_weights(after)
    np.testing.assert_array_equal(other.predict(samples(network)), trainer.predict(samples(network)))
    assert other.steps == 0 and not any(slot.any() for slot in other.slots.values())


def test_sizes_may_be_numbers_of_numpy(tmp_path):
    network = nn.Network(nn.Linear(np.int64(3), np.int32(2)), (np.int64(3),))
    again = nn.load(nn.save(nn.Model(network, network.layout.zeros(np.float32)), tmp_path / "a.npz")).network
    assert again.in_shape == (3,) and again.out_shape == (2,)


def test_mixed_precision_comes_back(tmp_path):
    network = nn.Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,), mixed=True)
    trainer = learn(nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(lr=0.01)))
    after = nn.load(nn.save(trainer, tmp_path / "x.npz"))
    assert after.network.mixed and not small()[0].mixed
    np.testing.assert_array_equal(after.predict(samples(network)), trainer.predict(samples(network)))
    other = nn.Trainer(after.network, nn.CrossEntropyLoss(), nn.Adam(lr=0.01))
    other.load_weights(after)
    assert (
        learn(other).flat_parameters != trainer.flat_parameters
    ).any() and other.loss_scale.scale == trainer.loss_scale.scale


def test_the_program_is_not_needed(tmp_path):
    """Another process, which has never heard of the network, predicts the same."""
    network, trainer = small()
    nn.save(learn(trainer), tmp_path / "x.npz")
    x = samples(network)
    np.save(tmp_path / "in.npy", x)
    code = "import nn, numpy as np, sys; np.save(sys.argv[3], nn.load(sys.argv[1]).predict(np.load(sys.argv[2])))"
    files = [str(tmp_path / name) for name in ("x.npz", "in.npy", "out.npy")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=PATIENCE)
    np.testing.assert_allclose(np.load(files[2]), trainer.predict(x), rtol=1e-6)


class Scale(Layer):
    """y = a factor x, registered by the test."""

    def __init__(self, factor, inner=None):
        self.factor, self.inner = factor, inner

    def forward(self, p, x, ctx):
        return x * x.dtype.type(self.factor), None


def test_layers_of_ones_own(tmp_path, monkeypatch):
    known = dict(registered("layer"))
    monkeypatch.setitem(registry._REGISTERED, "layer", known)
    network, file = nn.Network(nn.Sequential(nn.Linear(3, 2), Scale(2.5)), (3,)), tmp_path / "x.npz"
    w = np.ones(network.layout.size, np.float32)
    with pytest.raises(TypeError, match=r"files do not know this kind of layer; call nn\.register\(Scale\)"):
        nn.save(nn.Model(network, w), file)
    assert not file.exists()
    assert nn.register(Scale) is Scale
    after = nn.load(nn.save(nn.Model(network, w), file))
    assert isinstance(after.network.root.layers[1], Scale) and after.network.root.layers[1].factor == 2.5
    nn.register(Scale)  # a cell that is run again
    del known["Scale"]
    with pytest.raises(nn.FileError, match="'Scale'"):
        nn.load(file)

    class Other(Layer):
        def __init__(self, factor):
            self.twice = 2 * factor

    nn.register(Other)
    with pytest.raises(TypeError, match=r"Other takes 'factor' and does not keep it.*self\.factor = factor"):
        describe(Other(1))

    class Named(nn.ReLU):
        def __init__(self, **named):
            super().__init__()

    nn.register(Named)
    with pytest.raises(TypeError, match=r"Named takes arguments of any name, and files would leave them out"):
        describe(Named(factor=2))
    nn.register(Scale)
    with pytest.raises(TypeError, match=r"Scale: factor is array.*files hold numbers"):
        describe(Scale(np.ones(3)))
    with pytest.raises(TypeError, match="factor"):
        describe(Scale(nn.ReLU))
    with pytest.raises(TypeError, match=r"given Linear\(2, 2\): the class itself, not an instance"):
        nn.register(nn.Linear(2, 2))

    class Linear(Layer):
        pass

    with pytest.raises(ValueError, match=r"there is a Linear already, that of nn\.layers\.dense"):
        nn.register(Linear)


def test_a_network_changed_by_hand_is_refused(tmp_path):
    block = nn.TransformerBlock(8, 2)
    block.layers = block.layers[:1]
    network = nn.Network(block, (4, 8))
    with pytest.raises(ValueError, match="param/1"):
        nn.save(nn.Model(network, network.layout.zeros(np.float32)), tmp_path / "x.npz")
    whole = nn.Network(nn.Sequential(nn.Embedding(4, 3), nn.TiedLinear("0.W", 3, 4)), (2,))
    part = nn.Network(nn.Sequential(nn.TiedLinear("0.W", 3, 4), first=1), (2, 3), whole=whole.layout)
    with pytest.raises(ValueError, match="is a part of a network: save the whole one"):
        nn.save(nn.Model(part, part.layout.zeros(np.float32)), tmp_path / "x.npz")


def test_wrong_arguments_are_told_in_a_sentence(tmp_path):
    network, trainer = small()
    other = nn.Network(nn.Linear(3, 2), (3,), name="other")
    for call, kind, said in (
        (
            lambda: nn.save(network.root, "x.npz"),
            TypeError,
            r"save: expected a trainer or a nn\.Model first, given Sequen",
        ),
        (
            lambda: nn.save(network, "x.npz"),
            TypeError,
            r"save: a Network has no weights: give the trainer, or nn\.Model",
        ),
        (lambda: nn.Model(network.root, trainer), TypeError, r"expected a Network first, given Sequential"),
        (lambda: nn.Model(network, "x.npz"), TypeError, "expected a trainer.*, given 'x.npz'"),
        (lambda: nn.save(trainer, tmp_path / "x"), ValueError, r"must end in \.npz or \.safetensors"),
        (lambda: nn.Model(other, trainer), ValueError, "not those of other: it lacks param/W"),
        (lambda: nn.save(trainer, tmp_path / "x.npz", {"a": network}), TypeError, "what JSON can"),
    ):
        with pytest.raises(kind, match=said):
            call()
    (tmp_path / "plain.npz").write_bytes(b"")
    np.savez(tmp_path / "plain.npz", x=np.ones(3))
    with pytest.raises(nn.FileError, match=r"plain\.npz"):
        nn.load(tmp_path / "plain.npz")


def test_predict_says_what_x_is_not(tmp_path):
    network = nn.Network(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GlobalAvgPool2d()), (5, 5, 1), name="net")
    model = trained(network)
    x = np.zeros((3, 5, 5, 1))
    assert model.predict(x).shape == (3, 2) and model.predict(x).dtype == np.float32  # float64 is converted
    assert model.predict(x[:0]).shape == (0, 2)
    np.testing.assert_array_equal(model.predict(x.tolist()), model.predict(x))
    for wrong, kind, said in (
        (x[..., 0], nn.ShapeError, r"given \(3, 5, 5\): x\[\.\.\., None\] adds the axis of channels"),
        (x[0], nn.ShapeError, r"single sample\? x\[None\] is a batch of one"),
        (x[0, ..., 0], nn.ShapeError, "is it a single sample"),
        (np.moveaxis(x, -1, 1), nn.ShapeError, r"channels come last here: np\.moveaxis\(x, 1, -1\)"),
        (x.reshape(3, 25), nn.ShapeError, r"x\.reshape\(len\(x\), 5, 5, 1\) has that shape"),
        (np.zeros((3, 5, 5, 1), np.uint8), TypeError, r"given uint8: convert the data.*x / 255"),
        (nn.data.Dataset(x, np.zeros(3, int)), TypeError, r"given a Dataset: .*data\.batch\(\)\[0\]"),
    ):
        with pytest.raises(kind, match=said):
            model.predict(wrong)


def test_predictions_come_in_batches_of_any_size():
    network, trainer = small()
    model = nn.Model(network, learn(trainer))
    x = samples(network, 11)
    np.testing.assert_allclose(model.predict(x, batch=4), trainer.predict(x), rtol=1e-6)


def test_a_layer_that_changes_its_arguments_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._REGISTERED, "layer", dict(registered("layer")))

    @nn.register
    class Percent(Layer):
        def __init__(self, percent):
            self.percent = percent / 100

    for layer in (Percent(50), nn.Residual(nn.Sequential(nn.Tanh(), Percent(50)))):
        net = nn.Network(nn.Sequential(nn.Linear(4, 4), layer), (4,))
        with pytest.raises(ValueError, match=r"Percent: percent is 0\.5, of which the constructor makes 0\.005"):
            nn.save(nn.Model(net, net.layout.zeros(np.float32)), tmp_path / "net.npz")
    assert not (tmp_path / "net.npz").exists()


def test_outputs_of_another_shape_are_not_repeated():
    class Mean(Layer):  # without specs
        def forward(self, p, x, ctx):
            return x.mean(-1, keepdims=True), None

    net = nn.Network(nn.Sequential(nn.Linear(4, 3), Mean()), (4,))
    with pytest.raises(nn.ShapeError, match=r"layer 1.*\(2, 3\).*\(2, 1\)"):
        nn.Model(net, net.layout.zeros(np.float32)).predict(np.zeros((2, 4)))
