"""Is a loss one that a trainer can rely on? See check_layer.py.

nn.check_loss(MyLoss(), (3,))
"""

from __future__ import annotations

import math
import pickle

import numpy as np

from nn.analysis.check_layer import importable
from nn.analysis.gradcheck import NoisePool, gradcheck
from nn.core.context import LayerContext, NetworkContext
from nn.core.layer import Shape
from nn.losses import Loss

BOUND, NEAR, SAMPLES = 1e-6, 1e-10, 6


def check_loss(loss: Loss, out_shape: Shape, target: np.ndarray | None = None, seed: int = 0) -> None:
    """Check a loss: its gradient, `total_weight`, dtypes, memory, batches without samples, sequences, NaN.

    Parameters
    ----------
    loss : Loss
        An instance.
    out_shape : tuple of int
        Shape of the network's output for one sample, such as (10,).
    target : array (N, ...) or None
        What the outputs are compared with; drawn as `loss.targets` says if not given.
    seed : int
        Seed of outputs, targets and directions.

    Raises
    ------
    AssertionError, TypeError
        What is wrong, in one sentence with the loss's name.

    Examples
    --------
    >>> import nn
    >>> nn.check_loss(nn.MSELoss(), (3,))
    """
    if not isinstance(loss, Loss):
        raise TypeError(f"check_loss takes a loss, given {loss!r:.80}: an instance of a class below nn.losses.Loss")
    rng = np.random.default_rng(seed)
    samples = SAMPLES if target is None else len(target)
    z = rng.standard_normal((samples, *out_shape))
    target = _targets(loss, z, rng) if target is None else np.asarray(target)
    _check_returns(loss, z, target)
    _check_total(loss, z, target)
    error = min(gradcheck(loss, z, seed=seed + i, target=target) for i in range(2))
    if not error < BOUND:
        raise AssertionError(
            f"{loss!r}: the gradient is not the derivative of the value: along a random direction they differ by "
            f"{error:.0e}, relatively"
        )
    _check_kinds(loss, z, target)
    _check_edges(loss, z, target)
    if len(out_shape) == 1 and loss.rows(out_shape) == 1:
        _check_sequences(loss, z, target)
    if importable(type(loss)) and _value(pickle.loads(pickle.dumps(loss)), z, target) != _value(loss, z, target):
        raise AssertionError(f"{loss!r}: a pickled one computes something else")


def _context(seed: int = 0) -> LayerContext:
    """Return a context whose memory holds noise, drawn by the seed."""
    return LayerContext(NetworkContext(NoisePool(np.random.default_rng(seed)), 0), None, "loss", (), None, 0)


def _value(loss: Loss, z: np.ndarray, target: np.ndarray, total: float | None = None) -> float:
    return float(loss(z, target, len(z) if total is None else total, _context())[0])


def _targets(loss: Loss, z: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw targets of the kind that the loss declares, or else accepts."""
    classes = rng.integers(0, z.shape[-1], z.shape[:-1])
    values = rng.random(z.shape)
    if loss.targets:
        return classes if loss.targets == "classes" else values
    try:
        loss(z, values, len(z), _context())
        return values
    except (TypeError, ValueError, IndexError):
        return classes


def _check_returns(loss: Loss, z: np.ndarray, target: np.ndarray) -> None:
    before = z.copy(), target.copy()
    result = loss(z, target, len(z), _context())
    if not np.array_equal(z, before[0]) or not np.array_equal(target, before[1]):
        raise AssertionError(
            f"{loss!r}: it writes into the outputs or the targets, which others need: z - t, not z -= t"
        )
    if not isinstance(result, tuple) or len(result) != 2:
        raise AssertionError(f"{loss!r}: it must return a pair, the value and its gradient, given {result!r:.80}")
    value, gz = result
    if not isinstance(value, float | np.floating):
        raise AssertionError(f"{loss!r}: the value must be one number, given {value!r:.80}: sum over all samples")
    if not isinstance(gz, np.ndarray) or gz.shape != z.shape:
        shape = gz.shape if isinstance(gz, np.ndarray) else f"{gz!r:.80}"
        raise AssertionError(f"{loss!r}: the gradient must have the shape of the outputs, {z.shape}, given {shape}")
    again, gz_again = loss(z, target, len(z), _context(1))
    if again != value or not np.array_equal(gz, gz_again):
        raise AssertionError(
            f"{loss!r}: another value or gradient the second time: does it read memory of ctx.empty or ctx.workspace "
            "before it writes there?"
        )


def _check_total(loss: Loss, z: np.ndarray, target: np.ndarray) -> None:
    """Value and gradient are divided by `total_weight`, whatever the number of samples here."""
    (value, gz), (half, g_half) = (loss(z, target, total, _context()) for total in (len(z), 2 * len(z)))
    for what, whole, part in (("value", value, half), ("gradient", gz, g_half)):
        if not np.allclose(whole, 2 * np.asarray(part), NEAR, NEAR):
            raise AssertionError(
                f"{loss!r}: the {what} must be divided by `total_weight`, the size of the whole global batch, and not "
                "by the number of samples that it is given"
            )


def _check_kinds(loss: Loss, z: np.ndarray, target: np.ndarray) -> None:
    """float32, outputs that are not contiguous or may not be written to."""
    value, gz = loss(z, target, len(z), _context())
    single = target.astype(np.float32) if target.dtype.kind == "f" else target
    value32, gz32 = loss(z.astype(np.float32), single, len(z), _context())
    if gz32.dtype != np.float32:
        raise AssertionError(f"{loss!r}: the gradient of float32 outputs is {gz32.dtype}: keep the dtype of z")
    if not np.allclose(value32, value, 1e-3, 1e-3) or not np.allclose(gz32, gz, 1e-3, 1e-4):
        raise AssertionError(f"{loss!r}: in float32 it computes something else than in float64")
    strided = np.repeat(z, 2, axis=-1)[..., ::2]
    strided.flags.writeable = False
    again, gz_again = loss(strided, target, len(z), _context())
    if not np.allclose(again, value, NEAR, NEAR) or not np.allclose(gz_again, gz, NEAR, NEAR):
        raise AssertionError(f"{loss!r}: of outputs that are not contiguous it computes something else")


def _check_edges(loss: Loss, z: np.ndarray, target: np.ndarray) -> None:
    """No samples, which a shard may have; and NaN, which must not be lost."""
    try:
        value, gz = loss(z[:0], target[:0], len(z), _context())
    except Exception as error:
        raise AssertionError(
            f"{loss!r}: a batch without samples, which a shard may have, raises {type(error).__name__} ({error})"
        ) from error
    if value != 0 or gz.shape != z[:0].shape:
        raise AssertionError(f"{loss!r}: of a batch without samples the value is {value}, and not 0")
    if loss.targets == "values":
        try:
            loss(z[..., :1], z[..., 0], len(z), _context())
        except (TypeError, ValueError):
            pass
        else:
            raise AssertionError(
                f"{loss!r}: targets {z.shape[:-1]} of outputs {(*z.shape[:-1], 1)} are not refused, and NumPy would "
                "broadcast them: call nn.losses.check_same(z, target) first"
            )
    bad = z.copy()
    bad[0] = np.nan
    with np.errstate(all="ignore"):
        if math.isfinite(_value(loss, bad, target)):
            raise AssertionError(f"{loss!r}: the value hides NaN in the outputs, which then would train unseen")


def _check_sequences(loss: Loss, z: np.ndarray, target: np.ndarray) -> None:
    """A loss that takes sequences is a mean over their positions, as `rows` says."""
    length = 3
    sequence, targets = np.stack([z] * length, axis=1), np.stack([target] * length, axis=1)
    try:
        value = _value(loss, sequence, targets, len(z) * loss.rows(sequence.shape[1:]))
    except (TypeError, ValueError, IndexError):
        return
    if not np.isclose(value, _value(loss, z, target), NEAR, NEAR):
        raise AssertionError(
            f"{loss!r}: {length} equal positions have the loss {value:.6g}, and one has {_value(loss, z, target):.6g}: "
            "divided by rows(out_shape), the loss of a sequence must be the mean over its positions"
        )
