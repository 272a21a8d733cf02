"""What arguments may be, when they are set again too, and the call as which an object prints."""

import math

import numpy as np
import pytest

import nn
from nn.arguments import Number, OneOf, Optional, SizePair, call_text

INSIDE_AND_OUTSIDE = [
    (Number(1, whole=True), [1, 7, np.int64(3)], [0, -1], "at least 1"),
    (Number(above=0), [1e-9, 3, math.inf], [0, -1.0, math.nan], "positive"),
    (Number(above=2), [3], [2], "above 2"),
    (Number(0, below=1), [0, 0.5, np.float32(0.5)], [1, -0.1, math.nan], r"in \[0, 1\)"),
    (Number(0, most=1), [0, 1], [1.1, -0.1], r"in \[0, 1\]"),
    (Number(above=0, below=math.inf), [1], [0, math.inf, math.nan], r"in \(0, inf\)"),
]


@pytest.mark.parametrize(("constraint", "inside", "outside", "words"), INSIDE_AND_OUTSIDE)
def test_numbers(constraint, inside, outside, words):
    assert all(constraint("x", value) == value for value in inside)
    for value in outside:
        with pytest.raises(ValueError, match=f"^x must be {words}, given {value}$"):
            constraint("x", value)
    for value in ("1", None, [1], 1 + 0j, *([2.0] if constraint.whole else [])):
        with pytest.raises(TypeError, match=r"^x "):
            constraint("x", value)


def test_pairs_texts_and_none():
    assert SizePair(0)("x", 0) == (0, 0) and SizePair(1)("x", [2, np.int8(3)]) == (2, 3)
    for value in (0, (1, 0), (1, 2, 3), 1.5, "2"):
        with pytest.raises(ValueError, match=r"^x must be one or two whole numbers, at least 1, given "):
            SizePair(1)("x", value)
    assert OneOf(("a", "b"))("x", "a") == "a" and Optional(OneOf("a"))("x", None) is None
    with pytest.raises(ValueError, match=r"^x must be 'a' or 'b', given 'c'$"):
        OneOf(("a", "b"))("x", "c")


@pytest.mark.parametrize(
    ("thing", "name", "value", "words"),
    [
        (nn.Dropout(0.5), "rate", 2, "Dropout: rate"),
        (nn.Conv2d(2, 2, 3), "stride", 0, "Conv2d: stride"),
        (nn.CrossEntropyLoss(), "label_smoothing", 1.0, "label_smoothing"),
        (nn.CrossEntropyLoss(), "class_weights", [-1], "class_weights must be one number, not negative"),
        (nn.Adam(), "beta1", 1, "Adam: beta1"),
        (nn.ClipNorm(1.0), "limit", 0, "ClipNorm: limit"),
        (nn.schedules.Plateau(0.1), "factor", 1, "Plateau: factor"),
        (nn.schedules.Plateau(0.1), "threshold", math.nan, "Plateau: threshold"),
    ],
)
def test_an_argument_that_is_set_again_is_checked_as_in_the_constructor(thing, name, value, words):
    with pytest.raises(ValueError, match=words):
        setattr(thing, name, value)


def test_an_argument_that_is_set_again_counts():
    loss, z, y = nn.CrossEntropyLoss(), np.array([[1.0, 2.0], [0.5, 0.0]]), np.array([0, 1])
    ctx = nn.Network(nn.ReLU(), (2,), np.float64).context()
    loss.label_smoothing = 0.1
    assert (
        loss(z, y, 2, ctx)[0]
        == nn.CrossEntropyLoss(label_smoothing=0.1)(z, y, 2, ctx)[0]
        != nn.CrossEntropyLoss()(z, y, 2, ctx)[0]
    )
    loss.class_weights = [1, 3]
    assert loss(z, y, 2, ctx)[0] == nn.CrossEntropyLoss(label_smoothing=0.1, class_weights=[1, 3])(z, y, 2, ctx)[0]


@pytest.mark.parametrize(
    ("thing", "name", "value", "words"),
    [
        (nn.MultiHeadAttention(8, 2), "heads", 3, "3 heads"),
        (nn.MultiHeadAttention(8, 2), "attention", "blocks:x", "attention"),
        (nn.MultiHeadAttention(6, 2), "rotary", True, "3 are odd"),
        (nn.Conv2d(4, 4, 3), "groups", 3, "groups=3"),
        (nn.Conv2d(4, 4, 3, stride=2), "padding", "same", "needs stride 1"),
        (nn.MaxPool2d(3, padding=1), "kernel_size", 1, "kernel"),
        (nn.Embedding(9, 4, padding=8), "vocabulary", 8, "padding"),
        (nn.MixtureOfExperts(4, 4, top=3), "experts", 2, "top"),
        (nn.SGD(0.1), "nesterov", True, "nesterov"),
        (nn.SGD(0.1, 0.9, nesterov=True), "momentum", 0.0, "nesterov"),
    ],
    ids=repr,
)
def test_arguments_that_do_not_go_together_are_refused_when_one_is_set_again(thing, name, value, words):
    before = getattr(thing, name)
    with pytest.raises(ValueError, match=words):
        setattr(thing, name, value)
    assert getattr(thing, name) == before


@pytest.mark.parametrize(
    ("thing", "name", "value"),
    [(nn.TransformerBlock(8, 2), "causal", True), (nn.MaskedCrossEntropyLoss(3), "masked", 2)],
    ids=repr,
)
def test_an_argument_of_which_others_were_made_cannot_be_set_again(thing, name, value):
    with pytest.raises(AttributeError, match=name):
        setattr(thing, name, value)


def test_scalars_of_numpy_become_numbers_of_python():
    """With a float64 scalar NumPy computes float32 arrays in float64, so the bits would be others."""
    assert repr(nn.Dropout(np.float64(0.25))) == "Dropout(rate=0.25)"
    assert repr(nn.schedules.Cosine(np.float64(0.1), np.int64(5))).startswith("Cosine(lr=0.1, steps=5,")
    x, y = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32), np.arange(30) % 3

    def digest(number, **options):
        optimizer = nn.SGD(number(0.1), number(0.9), weight_decay=number(0.01), **options)
        layers = nn.Linear(4, 8), nn.LeakyReLU(number(0.1)), nn.LayerNorm(8, number(1e-5)), nn.Linear(8, 3)
        trainer = nn.Trainer(nn.Network(nn.Sequential(*layers), (4,)), nn.CrossEntropyLoss(), optimizer)
        for _ in range(4):
            trainer.step(x, y)
        return trainer.digest()

    assert digest(np.float64) == digest(float)
    assert digest(np.float64, rates={"0": np.float64(0.3)}) == digest(float, rates={"0": 0.3})


def test_first_values_that_could_not_be_drawn_are_refused():
    for bound in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="truncated_normal: bound"):
            nn.initializers.truncated_normal(0.02, bound)
    with pytest.raises(ValueError, match="normal: std"):
        nn.initializers.normal(-1.0)


class Own(nn.Layer):
    def __init__(self, *sizes, table=None, name="x", init=np.zeros):
        self.sizes, self.table, self.name, self.init = sizes, table, name, init


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Own(), "Own()"),
        (Own(3, 3, 1, table=np.arange(3), name="y", init=np.ones), "Own(3, 3, 1, table=[0, 1, 2], name='y')"),
        (Own(table=np.zeros((9, 9))), "Own(table=an array (9, 9))"),
        (nn.Reshape(2, 2), "Reshape(2, 2)"),
        (nn.MaxPool2d(2), "MaxPool2d(2)"),
        (nn.TransformerBlock(8, 2, causal=True), "TransformerBlock(8, 2, causal=True)"),
        (nn.Residual(nn.ReLU(), nn.Tanh()), "Residual(ReLU(), shortcut=Tanh())"),
        (
            nn.Adam(clip=nn.ClipNorm(1.0), rates={"0": 0.1}),
            "Adam(lr=0.001, clip=ClipNorm(limit=1.0), rates={'0': 0.1})",
        ),
    ],
)
def test_an_object_prints_as_the_call_that_makes_it(value, text):
    assert repr(value) == text


def test_arguments_can_be_shown_always_or_never():
    assert call_text(nn.Dropout(0.5), always={"rate"}) == "Dropout(rate=0.5)"
    assert call_text(nn.Linear(2, 3), never={"in_features"}) == "Linear(3)"
