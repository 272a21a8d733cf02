"""What onnxruntime makes of an exported network is what the network makes; onnx itself finds nothing wrong with it."""

import numpy as np
import pytest
from test_saving import EXAMPLES, learn, samples, small, trained

import nn
from nn.core.layer import Layer
from nn.files.onnx_layers import form
from nn.models import build
from nn.models.googlenet import Auxiliary
from nn.registry import registered

MODELS = {
    "cnn": (8, 8, 1),
    "encoder:8,2,1": (6,),
    "lenet5-1998": (28, 28, 1),
    "lstm:8,2": (6,),
    "resnet20": (9, 9, 3),
    "transformer:8,2,1,1": (6,),
}
MORE = [
    (Auxiliary(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Linear(8, 3)), (8,)),
    (nn.AvgPool2d(2), (6, 6, 3)),
    (nn.AvgPool2d(3, 2, 1), (7, 8, 3)),
    (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (7, 8, 3)),
    (nn.BatchNorm1d(8), (8,)),
    (nn.Conv2d(3, 4, 4, padding="same"), (6, 7, 3)),
    (nn.GELU(), (4, 8)),
    (nn.LocalResponseNorm(4, alpha=0.1), (7, 9, 6)),
    (nn.LocalResponseNorm(5, alpha=0.1), (12,)),
    (nn.LSTM(8, 3, last=True), (4, 8)),
    (nn.MaxPool2d((2, 3), (2, 1), (0, 1)), (7, 8, 3)),
    (nn.RNN(8, 3, learn_state=True), (4, 8)),
    (nn.Residual(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 1)), (5, 5, 4)),
    (nn.Sequential(nn.Linear(8, 3)), (8,)),
]


def through_onnx(model, file, x):
    """The outputs that another program computes."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    nn.export_onnx(model, file)
    onnx.checker.check_model(str(file), full_check=True)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})[0]


def test_every_layer_has_a_form():
    assert set(registered("onnx")) == set(registered("layer").values())


def test_every_layer_is_the_same_there(tmp_path):
    for layer, in_shape in [*EXAMPLES.values(), *MORE]:
        network = nn.Network(layer, in_shape)
        model = trained(network)
        x = samples(network, 3)
        y = through_onnx(model, tmp_path / "x.onnx", x)
        np.testing.assert_allclose(y, model.predict(x), rtol=2e-4, atol=2e-5, err_msg=repr(layer))
        if network.layout.count:
            other = trained(network, seed=5).predict(x)
            assert not np.allclose(y, other, rtol=2e-4, atol=2e-5), f"control: {layer!r}"


@pytest.mark.parametrize("spec", MODELS)
def test_models_are_the_same_there(spec, tmp_path):
    network = build(spec, MODELS[spec], 5, dtype=np.float64)  # written in float32 all the same
    rng = np.random.default_rng(0)
    w, s = network.layout.zeros(np.float64), network.buffer_layout.zeros(np.float64)
    w[:] = 0.05 * rng.standard_normal(len(w))
    network.buffer_layout.initialize(s, 0)
    arrays = {f"param/{name}": array for name, array in network.layout.items(w)}
    model = nn.Model(network, arrays | {f"state/{name}": array for name, array in network.buffer_layout.items(s)})
    x = samples(network, 2)
    y = through_onnx(model, tmp_path / "x.onnx", x if network.takes_ids else x.astype(np.float32))
    np.testing.assert_allclose(y, model.predict(x), rtol=1e-3, atol=1e-4)


def test_padding_is_not_looked_at(tmp_path):
    network = build("encoder:8,2,1", (6,), 5)
    model = trained(network)
    x = np.array([[1, 2, 3, 0, 0, 0], [4, 1, 1, 2, 3, 0]])
    y = through_onnx(model, tmp_path / "x.onnx", x)
    np.testing.assert_allclose(y, model.predict(x), rtol=2e-4, atol=2e-5)


def test_no_transpose_is_left_between_layers_of_images(tmp_path):
    onnx = pytest.importorskip("onnx")
    network = build("cnn", (8, 8, 1), 5)
    file = nn.export_onnx(trained(network), tmp_path / "x.onnx", {"data": "digits", "classes": 5, 0: "zero"})
    found = onnx.load(file)
    operators = [node.op_type for node in found.graph.node]
    assert operators.count("Transpose") == 2, "one at the beginning, one before Flatten"
    assert operators.count("Conv") == operators.count("MaxPool") == 2
    assert {entry.key: entry.value for entry in found.metadata_props} == {"data": "digits", "classes": "5", "0": "zero"}
    tied = build("transformer:8,2,1,1", (6,), 50)
    weights = onnx.load(nn.export_onnx(trained(tied), tmp_path / "t.onnx")).graph.initializer
    assert sum(tuple(tensor.dims) == (50, 8) for tensor in weights) == 1, "a tied matrix is there once"


def test_a_trainer_is_exported_and_layers_of_ones_own_are(tmp_path):
    network, trainer = small()
    x = samples(network)
    y = through_onnx(learn(trainer), tmp_path / "x.onnx", x)
    np.testing.assert_allclose(y, trainer.predict(x), rtol=2e-4, atol=2e-5)

    class Triple(Layer):
        def forward(self, p, x, ctx):
            return 3 * x, None

    network = nn.Network(Triple(), (4,))
    with pytest.raises(TypeError, match=r"no form in ONNX is known for a Triple; nn\.files\.onnx_layers\.form"):
        nn.export_onnx(nn.Model(network, network.layout.zeros(np.float32)), tmp_path / "y.onnx")
    assert not (tmp_path / "y.onnx").exists()
    try:
        form(Triple)(lambda layer, x, p, s, shape, graph: graph.node("Mul", x, 3.0))
        x = samples(network)
        model = nn.Model(network, network.layout.zeros(np.float32))
        np.testing.assert_allclose(through_onnx(model, tmp_path / "y.onnx", x), 3 * x, rtol=1e-6)
    finally:
        registered("onnx").pop(Triple, None)
