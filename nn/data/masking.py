"""Hidden ids: what an encoder learns from (masked language model). Source: Devlin et al. 2018 (BERT).

In every sample the same number of positions is chosen; of these 80% show the id MASK, 10% a random id and 10% the right
one, so that the network cannot tell which positions it will be asked for. Targets are the right ids there, and -1
elsewhere. The choice is drawn once: as in BERT, a sample hides the same ids in every epoch.
"""

from __future__ import annotations

import copy

import numpy as np

from .dataset import DataError, Dataset

MASK = 1  # a byte that texts do not contain; 0 is padding
SHOWN, RANDOM = 0.1, 0.1


def hidden(share: float, length: int) -> int:
    """Positions to hide in a sample."""
    return max(1, round(share * length))


def masked(dataset: Dataset, share: float = 0.15, seed: int = 0) -> Dataset:
    """A data set of ids (n, T) with `share` of each sample's positions hidden, and these as its targets.

    Raises
    ------
    DataError
        Samples that are no sequences of ids, or a share outside (0, 1).
    """
    ids = np.asarray(dataset.x)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or dataset.scale is not None:
        raise DataError(
            f"{dataset.name}: only sequences of ids can be masked, "
            f"such as --data stdlib for an encoder; given {ids.dtype}{ids.shape[1:]}"
        )
    if not 0 < share < 1:
        raise DataError(f"{dataset.name}: the share of hidden ids must be between 0 and 1, given {share}")
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    count = hidden(share, ids.shape[1])
    at = rng.random(ids.shape, np.float32).argpartition(count - 1, axis=1)[:, :count]
    some = copy.copy(dataset)
    some.x, some.y, some.mapped = ids.copy(), np.full(ids.shape, -1, np.int16), False
    right = np.take_along_axis(ids, at, axis=1)
    np.put_along_axis(some.y, at, right.astype(np.int16), axis=1)
    chance = rng.random(at.shape, np.float32)
    shown = np.where(chance < SHOWN + RANDOM, rng.integers(2, dataset.classes, at.shape), MASK)
    np.put_along_axis(some.x, at, np.where(chance < SHOWN, right, shown).astype(ids.dtype), axis=1)
    return some
