"""Every layer in ONNX's operators, as it computes in evaluation.

A form is a function (layer, x, p, s, shape, graph) -> y: x and y are names of values in the graph, p and s the layer's
parameters and running statistics, `shape` that of a sample of x. `form` puts one of your own into the table:

    @form(MyLayer)
    def _(layer, x, p, s, shape, graph):
        return graph.node("Mul", x, layer.factor)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, Shape
from nn.files.onnx_graph import Graph
from nn.layers.activations import GELU, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from nn.layers.attention import MultiHeadAttention, TransformerBlock
from nn.layers.batch_normalization import BatchNorm, BatchNorm1d, BatchNorm2d
from nn.layers.blockwise import causal_mask
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear, TiedLinear
from nn.layers.dropout import Dropout
from nn.layers.embedding import (
    Embedding,
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    rotary_angles,
    sinusoids,
)
from nn.layers.experts import MixtureOfExperts
from nn.layers.normalization import LayerNorm, LocalResponseNorm, RMSNorm
from nn.layers.pooling import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, GlobalMaxPool2d, MaxPool2d
from nn.layers.recurrent import LSTM, RNN
from nn.layers.reshaping import Flatten, Reshape
from nn.models.googlenet import Auxiliary
from nn.models.resnet import Subsample
from nn.registry import register, registered

Form = Callable[[Layer, str, object, object, Shape, Graph], str]


def form(*kinds: type[Layer]) -> Callable[[Form], Form]:
    """Return a decorator: the function makes the nodes of layers of these classes."""

    def put(function: Form) -> Form:
        for kind in kinds:
            register("onnx", kind)(function)
        return function

    return put


def nodes_of(layer: Layer, x: str, p, s, shape: Shape, graph: Graph) -> str:
    """Add the nodes of a layer and of those inside to the graph; return the output's name.

    Raises
    ------
    TypeError
        A class without a form: which.
    """
    function = registered("onnx").get(type(layer))
    if function is None:
        raise TypeError(
            f"{layer!r:.80}: no form in ONNX is known for a {type(layer).__name__}; nn.files.onnx_layers.form(...) "
            "takes one"
        )
    return function(layer, x, p, s, shape, graph)


# ------------------------------------------------------------------------------------------------------- containers


@form(Sequential, TransformerBlock)
def _(layer, x, p, s, shape, graph):
    for child, pc, sc, inner in zip(layer.layers, p, s, layer.child_shapes(shape), strict=True):
        x = nodes_of(child, x, pc, sc, inner, graph)
    return x


@form(Residual)
def _(layer, x, p, s, shape, graph):
    y = nodes_of(layer.body, x, p[0], s[0], shape, graph)
    other = nodes_of(layer.shortcut, x, p[1], s[1], shape, graph) if layer.shortcut else x
    return graph.elementwise(lambda a, b: graph.node("Add", a, b), y, other)


@form(Parallel)
def _(layer, x, p, s, shape, graph):
    outputs = [nodes_of(child, x, pc, sc, shape, graph) for child, pc, sc in zip(layer.layers, p, s, strict=True)]
    return graph.node("Concat", *outputs, axis=-1)


@form(Recompute)
def _(layer, x, p, s, shape, graph):
    return nodes_of(layer.layer, x, p, s, shape, graph)


@form(Auxiliary)
def _(layer, x, p, s, shape, graph):
    return nodes_of(layer.rest, x, p[0], s[0], shape, graph)


@form(Dropout)
def _(layer, x, p, s, shape, graph):
    return x


# ------------------------------------------------------------------------------------------------- matrices, ids


@form(Linear)
def _(layer, x, p, s, shape, graph):
    y = graph.node("MatMul", x, p.W)
    return graph.node("Add", y, p.b) if layer.bias else y


@form(TiedLinear)
def _(layer, x, p, s, shape, graph):
    return graph.node("MatMul", x, graph.node("Transpose", p.W, perm=(1, 0)))


@form(Embedding)
def _(layer, x, p, s, shape, graph):
    if layer.padding is not None:
        graph.padding = graph.node("Equal", x, np.array(layer.padding))
    return graph.node("Gather", p.W, x, axis=0)


@form(LearnedPositions)
def _(layer, x, p, s, shape, graph):
    return graph.node("Add", x, p.W[: shape[0]])


@form(SinusoidalPositions)
def _(layer, x, p, s, shape, graph):
    return graph.node("Add", x, sinusoids(*shape, np.dtype(np.float32)))


@form(RotaryPositions)
def _(layer, x, p, s, shape, graph):
    return _rotated(x, np.arange(shape[0]), shape[1], graph)


def _rotated(x, positions, features: int, graph):
    """Rotate x (..., T, features) as nn.layers.embedding.rotate does; return the node."""
    cos, sin = (np.repeat(table, 2, axis=1) for table in rotary_angles(positions, features, np.dtype(np.float32)))
    swapped = graph.node("Gather", x, np.arange(features) ^ 1, axis=-1)  # 1 0 3 2 ...
    signs = np.where(np.arange(features) % 2, sin, -sin)
    return graph.node("Add", graph.node("Mul", x, cos), graph.node("Mul", swapped, signs))


@form(MultiHeadAttention)
def _(layer, x, p, s, shape, graph):
    (T, D), H = shape, layer.heads
    qkv = graph.node("MatMul", x, p.Wqkv)
    qkv = graph.node("Add", qkv, p.bqkv) if layer.bias else qkv
    heads = graph.node("Reshape", qkv, np.array([0, T, 3, H, D // H]))
    heads = graph.node("Transpose", heads, perm=(2, 0, 3, 1, 4))  # (3, N, H, T, D/H)
    q, k, v = (graph.node("Gather", heads, np.array(i), axis=0) for i in range(3))
    if layer.rotary:
        q, k = (_rotated(x, np.arange(T), D // H, graph) for x in (q, k))
    q = graph.node("Mul", q, 1 / math.sqrt(D // H))
    score = graph.node("MatMul", q, graph.node("Transpose", k, perm=(0, 1, 3, 2)))
    if layer.causal:
        score = graph.node("Add", score, causal_mask(T, T, 0, np.dtype(np.float32)))
    if graph.padding:
        score = graph.node("Where", graph.node("Unsqueeze", graph.padding, np.array([1, 2])), -math.inf, score)
    mixed = graph.node("MatMul", graph.node("Softmax", score, axis=-1), v)
    mixed = graph.node("Reshape", graph.node("Transpose", mixed, perm=(0, 2, 1, 3)), np.array([0, T, D]))
    y = graph.node("MatMul", mixed, p.Wo)
    return graph.node("Add", y, p.bo) if layer.bias else y


@form(MixtureOfExperts)
def _(layer, x, p, s, shape, graph):
    """Every expert computes every position, with a weight of 0 where it was not chosen."""
    experts, k = np.arange(layer.experts), layer.top
    scores = graph.node("MatMul", x, p.router)
    if layer.gate == "softmax":
        scores = wanted = graph.node("Softmax", scores, axis=-1)
    else:
        scores = graph.node("Sigmoid", scores)
        wanted = graph.node("Add", scores, s.bias)
    limit = math.ceil(layer.capacity * k * shape[0] / layer.experts) if layer.capacity and len(shape) == 2 else math.inf
    chosen, computed, taken = 0.0, 0.0, 0.0
    for _choice in range(k):
        best = graph.node("Equal", graph.node("ArgMax", wanted, axis=-1, keepdims=1), experts)
        wanted = graph.node("Where", best, -math.inf, wanted)
        one = graph.node("Cast", best, to=1)
        chosen = graph.node("Add", one, chosen)
        if limit < math.inf:
            queue = graph.node("Add", graph.node("CumSum", one, np.array(1)), taken)
            taken = graph.node("Add", graph.node("ReduceSum", one, np.array([1]), keepdims=1), taken)
            one = graph.node("Where", graph.node("Greater", queue, float(limit)), 0.0, one)
        computed = graph.node("Add", one, computed)
    weights = graph.node("Mul", scores, computed)
    if k > 1:
        total = graph.node("ReduceSum", graph.node("Mul", scores, chosen), np.array([-1]), keepdims=1)
        weights = graph.node("Div", weights, total)
    y = 0.0
    for expert in experts:
        hidden = nodes_of(layer.apply, graph.node("MatMul", x, p.A[expert]), None, None, shape, graph)
        weight = graph.node("Gather", weights, np.array([expert]), axis=-1)
        y = graph.node("Add", graph.node("Mul", graph.node("MatMul", hidden, p.B[expert]), weight), y)
    return y


# ------------------------------------------------------------------------------------------------------- recurrent


@form(RNN, LSTM)
def _(layer, x, p, s, shape, graph):
    H = layer.features
    order = (0, 3, 1, 2) if layer.blocks == 4 else (0,)  # i, o, f, g there

    def reordered(array):
        return np.concatenate([array[..., k * H : (k + 1) * H] for k in order], axis=-1)

    bias = [np.r_[reordered(p.b), np.zeros(layer.blocks * H)][None]] if layer.bias else [""]
    steps = graph.node("Transpose", x, perm=(1, 0, 2))
    inputs = [steps, reordered(p.W).T[None], reordered(p.U).T[None], *bias]
    if layer.learn_state:
        samples = graph.node("Gather", graph.node("Shape", x), np.array([0]), axis=0)
        size = graph.node("Concat", np.array([1]), samples, np.array([H]), axis=0)
        inputs += ["", *(graph.node("Expand", getattr(p, name)[None, None], size) for name in layer.states)]
    more = {"activations": [layer.activation.capitalize()]} if type(layer) is RNN else {}
    y = graph.node("LSTM" if layer.blocks == 4 else "RNN", *inputs, hidden_size=H, **more)
    y = graph.node("Squeeze", y, np.array([1]))  # (T, 1, N, H): of one direction
    if layer.last:
        return graph.node("Gather", y, np.array(shape[0] - 1), axis=0)
    return graph.node("Transpose", y, perm=(1, 0, 2))


# ---------------------------------------------------------------------------------------------------------- shapes


@form(Flatten)
def _(layer, x, p, s, shape, graph):
    return graph.node("Reshape", x, np.array([0, math.prod(shape)]))


@form(Reshape)
def _(layer, x, p, s, shape, graph):
    return graph.node("Reshape", x, np.array([0, *layer.shape]))


@form(Subsample)
def _(layer, x, p, s, shape, graph):
    ends, stride = np.array(shape[:2]), np.array([layer.stride] * 2)
    part = graph.node("Slice", x, np.array([0, 0]), ends, np.array([1, 2]), stride)
    front = (layer.channels - shape[2]) // 2
    behind = layer.channels - shape[2] - front
    return graph.node("Pad", part, np.array([0, 0, 0, front, 0, 0, 0, behind]), 0.0)


# ----------------------------------------------------------------------------------------------------- activations


def _operator(name: str, **attributes) -> Form:
    def operator(layer, x, p, s, shape, graph):
        return graph.elementwise(lambda v: graph.node(name, v, **attributes), x)

    return operator


for _kind, _name in ((Sigmoid, "Sigmoid"), (Tanh, "Tanh"), (ReLU, "Relu")):
    form(_kind)(_operator(_name))


@form(LeakyReLU)
def _(layer, x, p, s, shape, graph):
    return graph.elementwise(lambda v: graph.node("LeakyRelu", v, alpha=float(layer.slope)), x)


@form(SiLU)
def _(layer, x, p, s, shape, graph):
    return graph.elementwise(lambda v: graph.node("Mul", v, graph.node("Sigmoid", v)), x)


@form(GELU)
def _(layer, x, p, s, shape, graph):
    def exact(v):
        return graph.node("Erf", graph.node("Mul", v, math.sqrt(0.5)))

    def approximate(v):
        cube = graph.node("Mul", graph.node("Mul", v, v), graph.node("Mul", v, 0.044715))
        return graph.node("Tanh", graph.node("Mul", graph.node("Add", v, cube), math.sqrt(2 / math.pi)))

    def gelu(v):
        inner = approximate(v) if layer.approximate else exact(v)
        return graph.node("Mul", graph.node("Mul", v, 0.5), graph.node("Add", inner, 1.0))

    return graph.elementwise(gelu, x)


@form(Softmax)
def _(layer, x, p, s, shape, graph):
    return graph.node("Softmax", x, axis=-1)


@form(LogSoftmax)
def _(layer, x, p, s, shape, graph):
    return graph.node("LogSoftmax", x, axis=-1)


# --------------------------------------------------------------------------------------------------- normalisation


@form(BatchNorm1d, BatchNorm2d)
def _(layer: BatchNorm, x, p, s, shape, graph):
    def normal(v):
        return graph.node("BatchNormalization", v, p.gamma, p.beta, s.mean, s.var, epsilon=float(layer.eps))

    if len(shape) == 3:
        return graph.channels_last(normal(graph.channels_first(x)))
    if len(shape) == 1:
        return normal(x)
    swap = (0, 2, 1)
    return graph.node("Transpose", normal(graph.node("Transpose", x, perm=swap)), perm=swap)


@form(LayerNorm)
def _(layer, x, p, s, shape, graph):
    beta = [p.beta] if layer.bias else []
    return graph.node("LayerNormalization", x, p.gamma, *beta, axis=-1, epsilon=float(layer.eps))


@form(RMSNorm)
def _(layer, x, p, s, shape, graph):
    mean = graph.node("ReduceMean", graph.node("Mul", x, x), axes=(-1,), keepdims=1)
    root = graph.node("Sqrt", graph.node("Add", mean, float(layer.eps)))
    return graph.node("Mul", graph.node("Div", x, root), p.gamma)


@form(LocalResponseNorm)
def _(layer, x, p, s, shape, graph):
    numbers = {"alpha": float(layer.alpha), "beta": float(layer.beta), "bias": float(layer.k), "size": int(layer.size)}
    if len(shape) == 3 and layer.size % 2:  # an even window reaches further up in ONNX, and further down here
        return graph.channels_last(graph.node("LRN", graph.channels_first(x), **numbers))
    channel = np.arange(shape[-1])
    offset = channel[:, None] - channel + layer.size // 2  # of a row's channel in the window of a column's
    window = ((offset >= 0) & (offset < layer.size)).astype(np.float32)
    sums = graph.node("MatMul", graph.node("Mul", x, x), window)
    d = graph.node("Add", graph.node("Mul", sums, layer.alpha / layer.size), float(layer.k))
    return graph.node("Div", x, graph.node("Pow", d, float(layer.beta)))


# ------------------------------------------------------------------------------------------------ images


@form(Conv2d)
def _(layer, x, p, s, shape, graph):
    geometry = layer.geometry(shape[:2])
    (top, bottom), (left, right) = geometry.padding
    weights = [np.ascontiguousarray(p.W.transpose(3, 2, 0, 1)), *([p.b] if layer.bias else [])]
    y = graph.node(
        "Conv", graph.channels_first(x), *weights, kernel_shape=geometry.kernel, strides=geometry.stride,
        pads=(top, left, bottom, right), dilations=geometry.dilation, group=int(layer.groups),
    )  # fmt: skip
    return graph.channels_last(y)


def _window(layer, size) -> dict[str, tuple[int, ...]]:
    """Return kernel, strides and pads of a pool; the last window decides the pads at the end, as ceil_mode does."""
    ends = [
        max(0, (out - 1) * stride + kernel - n - pad)
        for out, stride, kernel, n, pad in zip(
            layer.out_size(size), layer.stride, layer.kernel_size, size, layer.padding, strict=True
        )
    ]
    return {"kernel_shape": layer.kernel_size, "strides": layer.stride, "pads": (*layer.padding, *ends)}


@form(MaxPool2d)
def _(layer, x, p, s, shape, graph):
    return graph.channels_last(graph.node("MaxPool", graph.channels_first(x), **_window(layer, shape[:2])))


@form(AvgPool2d)
def _(layer, x, p, s, shape, graph):
    window = _window(layer, shape[:2])
    if any(end > pad for end, pad in zip(window["pads"][2:], layer.padding, strict=True)):
        return _averages(layer, x, shape, graph)  # windows that stick out count fewer positions than ONNX says
    counted = int(layer.count_include_pad)
    y = graph.node("AveragePool", graph.channels_first(x), **window, count_include_pad=counted)
    return graph.channels_last(y)


@form(AdaptiveAvgPool2d)
def _(layer, x, p, s, shape, graph):
    return _averages(layer, x, shape, graph)


def _averages(layer, x, shape, graph) -> str:
    """R x C^T for every channel, as the layer computes it: ONNX has no operator for these windows."""
    rows, columns = layer.matrices(shape[:2], np.dtype(np.float32))
    y = graph.node("MatMul", graph.channels_first(x), np.ascontiguousarray(columns.T))
    return graph.channels_last(graph.node("MatMul", rows, y))


@form(GlobalAvgPool2d)
def _(layer, x, p, s, shape, graph):
    pooled = graph.node("GlobalAveragePool", graph.channels_first(x))
    return graph.node("Reshape", pooled, np.array([0, shape[2]]))


@form(GlobalMaxPool2d)
def _(layer, x, p, s, shape, graph):
    return graph.node("Reshape", graph.node("GlobalMaxPool", graph.channels_first(x)), np.array([0, shape[2]]))
