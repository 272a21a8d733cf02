"""Random changes to training images: the same for a sample in any shard and after any resume.

Random numbers come from a hash of (seed, epoch, sample index) and not from a generator that steps from sample
to sample: SplitMix64 (Steele, Lea, Flood 2014), a few array operations for a whole batch. A transform is a
callable (x, keys) -> x: x (n, H, W, C) as stored and freshly gathered, so that it may be changed in-place;
keys (n,) uint64.
"""

from __future__ import annotations

import numpy as np

from nn.arguments import COUNT

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_keys(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """Return one random 64-bit key for each sample index: (n,) uint64."""
    base = np.random.SeedSequence(seed, spawn_key=(1, epoch)).generate_state(1, np.uint64)
    return _mix(base + _mix(indices.astype(np.uint64)))


def draw(keys: np.ndarray, number: int, high: int) -> np.ndarray:
    """Draw `number` of each key: (n,) int64, uniform on 0 .. high - 1 (high at most 2**32)."""
    bits = _mix(keys ^ _mix(np.array([number], np.uint64))) >> np.uint64(32)
    return (bits * np.uint64(high) >> np.uint64(32)).astype(np.int64)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class RandomCrop:
    """Pad by `padding` zeros on each side, cut the old size out at a random position (He et al. 2015: 4).

    Examples
    --------
    >>> import nn
    >>> data = nn.data.load("digits", limit=32)
    >>> next(iter(nn.Loader(data.train, batch=8, transform=nn.data.RandomCrop(2))))[0].shape
    (8, 8, 8, 1)
    """

    def __init__(self, padding: int):
        self.padding = COUNT("RandomCrop: padding", padding)

    def __call__(self, x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        n, h, w, c = _image_shape("RandomCrop", x)
        p = self.padding
        padded = np.zeros((n, h + 2 * p, w + 2 * p, c), x.dtype)
        padded[:, p : p + h, p : p + w] = x
        rows = padded.reshape(n, h + 2 * p, (w + 2 * p) * c)
        windows = np.lib.stride_tricks.sliding_window_view(rows, (h, w * c), axis=(1, 2))
        top, left = draw(keys, 0, 2 * p + 1), draw(keys, 1, 2 * p + 1)
        return windows[np.arange(n), top, left * c].reshape(x.shape)


class RandomFlip:
    """Mirror left and right with probability one half.

    Examples
    --------
    >>> import nn
    >>> data = nn.data.load("digits", limit=32)
    >>> next(iter(nn.Loader(data.train, batch=8, transform=nn.data.RandomFlip())))[0].shape
    (8, 8, 8, 1)
    """

    def __call__(self, x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        flipped = np.flatnonzero(draw(keys, 0, 2))
        mirror = np.arange(_image_shape("RandomFlip", x)[2])[::-1]
        x[flipped] = x[flipped].take(mirror, axis=2)  # twice as fast as reversed strides
        return x


def _image_shape(transform: str, x: np.ndarray) -> tuple[int, ...]:
    if x.ndim != 4:
        raise ValueError(f"{transform}: expects images (height, width, channels), given samples of shape {x.shape[1:]}")
    return x.shape
