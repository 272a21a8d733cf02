"""Losses against PyTorch in float64, against central differences, and against bad targets."""

import math

import numpy as np
import pytest

from nn.core.network import Network
from nn.layers.dense import Linear
from nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    MAELoss,
    MSELoss,
    NLLLoss,
    QuadraticLoss,
)
from nn.registry import registered

RUN = Network(Linear(1, 1), (1,), np.float64).context()
WEIGHTS = np.array([0.5, 2.0, 0.0, 1.0, 3.0])


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def batch(shape=(6, 5), seed=0):
    rng = np.random.default_rng(seed)
    return 3 * rng.standard_normal(shape), rng.integers(0, shape[-1], shape[:-1])


def dense_targets(loss, shape, seed=1):
    rng = np.random.default_rng(seed)
    return rng.random(shape) if isinstance(loss, BCEWithLogitsLoss) else 2 * rng.standard_normal(shape)


DENSE = [QuadraticLoss(), MSELoss(), MAELoss(), HuberLoss(), HuberLoss(0.3), BCEWithLogitsLoss()]
CLASSES = [
    CrossEntropyLoss(),
    CrossEntropyLoss(label_smoothing=0.1),
    CrossEntropyLoss(class_weights=WEIGHTS),
    CrossEntropyLoss(ignore_index=-100),
    CrossEntropyLoss(ignore_index=2),
    CrossEntropyLoss(label_smoothing=0.2, class_weights=WEIGHTS, ignore_index=-100),
    NLLLoss(),
    NLLLoss(WEIGHTS, ignore_index=-100),
]


@pytest.mark.parametrize("shape", [(1, 1), (6, 5), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("loss", DENSE, ids=repr)
def test_losses_on_arrays_equal_pytorch(loss, shape):
    torch = pytest.importorskip("torch")
    reference = {
        "QuadraticLoss": lambda z, y: 0.5 * ((z - y) ** 2).sum() / math.prod(shape[:-1]),
        "MSELoss": torch.nn.MSELoss(),
        "MAELoss": torch.nn.L1Loss(),
        "HuberLoss": torch.nn.HuberLoss(delta=getattr(loss, "delta", 1.0)),
        "BCEWithLogitsLoss": torch.nn.BCEWithLogitsLoss(),
    }[type(loss).__name__]
    z, target = batch(shape)[0], dense_targets(loss, shape)
    value, gz = loss(z, target, math.prod(shape[:-1]), RUN)
    zt = torch.tensor(z, requires_grad=True)
    theirs = reference(zt, torch.tensor(target))
    theirs.backward()
    close(value, theirs.item())
    close(gz, zt.grad)


@pytest.mark.parametrize("shape", [(6, 5), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("loss", CLASSES, ids=repr)
def test_losses_on_classes_equal_pytorch(loss, shape):
    """Divided by the sum of `count`, the value is PyTorch's mean; by the number of rows, its sum over rows."""
    torch = pytest.importorskip("torch")
    z, target = batch(shape)
    if loss.ignore_index is not None:
        target.reshape(-1)[[1, 4]] = loss.ignore_index
    options = {"ignore_index": -1000 if loss.ignore_index is None else loss.ignore_index}
    if loss.class_weights is not None:
        options["weight"] = torch.tensor(loss.class_weights)
    if isinstance(loss, CrossEntropyLoss):
        kind, options["label_smoothing"] = torch.nn.CrossEntropyLoss, loss.label_smoothing
    else:
        kind = torch.nn.NLLLoss
    for reduction, total in (("mean", loss.weight(target)), ("sum", 1)):
        zt = torch.tensor(z, requires_grad=True)
        theirs = kind(reduction=reduction, **options)(zt.reshape(-1, 5), torch.tensor(target.reshape(-1)))
        theirs.backward()
        value, gz = loss(z, target, total, RUN)
        close(value, theirs.item())
        close(gz, zt.grad)


@pytest.mark.parametrize("loss", DENSE + CLASSES, ids=repr)
def test_gradient_is_the_derivative_of_the_value(loss):
    z, classes = batch((4, 5), seed=2)
    target = classes if loss in CLASSES else dense_targets(loss, z.shape)
    direction = np.random.default_rng(3).standard_normal(z.shape)
    eps = 1e-6
    numerical = (loss(z + eps * direction, target, 7, RUN)[0] - loss(z - eps * direction, target, 7, RUN)[0]) / (
        2 * eps
    )
    analytic = float((loss(z, target, 7, RUN)[1] * direction).sum())
    assert abs(numerical - analytic) <= 1e-7 * max(1, abs(analytic))


@pytest.mark.parametrize("loss", DENSE + CLASSES, ids=repr)
def test_parts_of_a_batch_add_up(loss):
    z, classes = batch((7, 5))
    target = classes if loss in CLASSES else dense_targets(loss, z.shape)
    value, gz = loss(z, target, 7, RUN)
    parts = [loss(z[a:b], target[a:b], 7, RUN) for a, b in ((0, 0), (0, 1), (1, 5), (5, 7))]
    close(sum(part[0] for part in parts), value)
    close(np.concatenate([part[1] for part in parts]), gz)


@pytest.mark.parametrize("loss", DENSE + CLASSES, ids=repr)
def test_dtype_is_kept_and_nothing_is_overwritten(loss):
    z, classes = batch((300, 5))
    target = classes if loss in CLASSES else dense_targets(loss, z.shape)
    z32 = z.astype(np.float32)
    given, wanted = z32.copy(), target.copy()
    value, gz = loss(z32, target, np.float64(300), RUN)
    exact, exact_gz = loss(z, target, 300, RUN)
    assert gz.dtype == np.float32 and isinstance(value, float)
    assert abs(value - exact) <= 1e-5 * abs(exact)
    np.testing.assert_allclose(gz, exact_gz, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(z32, given)
    np.testing.assert_array_equal(target, wanted)
    again = loss(z[::-1], target[::-1], 300, RUN)  # not contiguous
    close(again[1][::-1], exact_gz)
    one, two = loss(z32, target, 300, RUN)[1], loss(z32, target, 300, RUN)[1]
    assert not np.shares_memory(one, two), "each gradient is an array of its own"


def test_quadratic_takes_classes_for_one_hot_rows():
    z, classes = batch((6, 5))
    value, gz = QuadraticLoss()(z, classes, 6, RUN)
    expected, expected_gz = QuadraticLoss()(z, np.eye(5)[classes], 6, RUN)
    close(value, expected)
    close(gz, expected_gz)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    z = np.array([[1000.0, 0.0], [-1000.0, 0.0]])
    with np.errstate(all="raise", under="ignore"):
        value, gz = CrossEntropyLoss()(z, np.array([1, 0]), 2, RUN)
        assert value == 1000.0
        np.testing.assert_array_equal(gz, [[0.5, -0.5], [-0.5, 0.5]])
        value, gz = BCEWithLogitsLoss()(z[:, :1], np.array([[0.0], [1.0]]), 2, RUN)
        assert value == 1000.0
        np.testing.assert_array_equal(gz, [[0.5], [-0.5]])


def test_ignored_rows_have_no_loss_and_no_gradient():
    z, target = batch((6, 5))
    loss = CrossEntropyLoss(label_smoothing=0.1, ignore_index=-1)
    before = loss(z[1:], target[1:], 6, RUN)
    target[0] = -1
    value, gz = loss(z, target, 6, RUN)
    close(value, before[0])
    assert not gz[0].any() and loss.weight(target) == 5


@pytest.mark.parametrize(
    "dtype, bad", [(np.int64, -1), (np.int64, 5), (np.int8, -1), (np.int32, 100), (np.uint8, 5), (np.int64, 2**40)]
)
def test_classes_out_of_range_are_named(dtype, bad):
    z, target = batch((6, 5))
    target = target.astype(dtype)
    target[3] = bad
    for loss in (CrossEntropyLoss(), CrossEntropyLoss(ignore_index=-7), NLLLoss(), QuadraticLoss()):
        with pytest.raises(ValueError, match=rf"targets: {bad} of sample 3 .*5 outputs, 0 to 4"):
            loss(z, target, 6, RUN)


def test_targets_of_the_wrong_kind_are_refused():
    z, target = batch((3, 4, 5))
    with pytest.raises(TypeError, match="integer class indices, given dtype float64"):
        CrossEntropyLoss()(z, target.astype(float), 12, RUN)
    with pytest.raises(ValueError, match=r"expected shape \(3, 4\), .* given \(12,\)"):
        CrossEntropyLoss()(z, target.reshape(-1), 12, RUN)
    with pytest.raises(ValueError, match="5 outputs"):
        CrossEntropyLoss()(z, target + 2, 12, RUN)
    with pytest.raises(ValueError, match="3 class weights, but 5 outputs"):
        NLLLoss(class_weights=[1, 2, 3])(z, target, 12, RUN)
    for loss in DENSE:
        with pytest.raises(ValueError, match=r"expected the outputs' shape \(6, 5\), given \(6, 4\)"):
            loss(z[0, 0] + np.zeros((6, 1)), np.zeros((6, 4)), 6, RUN)


@pytest.mark.parametrize("loss", DENSE, ids=repr)
def test_targets_that_are_no_numbers_are_named(loss):
    z, target = batch((6, 5))[0], dense_targets(loss, (6, 5))
    target[2, 3] = math.nan
    with pytest.raises(ValueError, match=r"targets: nan of sample 2, position \(3,\)"):
        loss(z, target, 6, RUN)
    bad_z = np.full((6, 5), math.nan)  # the outputs' own fault is not the targets'
    assert math.isnan(loss(bad_z, dense_targets(loss, (6, 5)), 6, RUN)[0])


def test_binary_targets_outside_0_1_and_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"targets: 1\.5 of sample 1, position \(0,\) must be between 0 and 1"):
        BCEWithLogitsLoss()(np.zeros((2, 1)), np.array([[1.0], [1.5]]), 2, RUN)
    for make in (
        lambda: HuberLoss(0),
        lambda: CrossEntropyLoss(label_smoothing=1.0),
        lambda: CrossEntropyLoss(class_weights=[1, -1]),
    ):
        with pytest.raises(ValueError, match="Loss: "):
            make()


def test_names():
    assert all(repr(kind()).endswith("Loss()") or kind is HuberLoss for kind in registered("loss").values())
    assert repr(CrossEntropyLoss(label_smoothing=0.1, class_weights=[1, 2], ignore_index=-1)) == (
        "CrossEntropyLoss(label_smoothing=0.1, class_weights=[1.0, 2.0], ignore_index=-1)"
    )


@pytest.mark.parametrize(
    "loss", [NLLLoss(ignore_index=-1), CrossEntropyLoss(ignore_index=-1), CrossEntropyLoss(class_weights=[0, 1, 1])]
)
def test_minus_infinity_in_a_row_without_weight_counts_nothing(loss):
    z, target = np.log([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]), np.array([1, 0 if loss.ignore_index is None else -1])
    expected, gradient = loss(z.copy(), target, 1.0, RUN)
    gradient = gradient.copy()
    z[1, 0] = -np.inf
    value, gz = loss(z, target, 1.0, RUN)
    assert value == pytest.approx(expected, rel=1e-12) and np.isfinite(gz).all()
    np.testing.assert_allclose(gz[0], gradient[0], rtol=1e-12)
    z[1] = np.nan
    assert np.isnan(loss(z, target, 1.0, RUN)[0]), "control: NaN is still noticed"


def test_smoothing_leaves_out_minus_infinity_of_ignored_rows():
    z, target = np.array([[1.0, 2.0, 3.0], [-np.inf, 0.0, 0.0]]), np.array([1, -1])
    loss = CrossEntropyLoss(label_smoothing=0.1, ignore_index=-1)
    assert loss(z, target, 1.0, RUN)[0] == pytest.approx(loss(z[:1], target[:1], 1.0, RUN)[0], rel=1e-12)


def test_class_weights_are_a_copy():
    weights = np.ones(3)
    loss = CrossEntropyLoss(class_weights=weights)
    weights[:] = -1
    assert (loss.class_weights == 1).all()
