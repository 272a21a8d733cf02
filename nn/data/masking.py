"""Hidden ids: what an encoder learns from (masked language model). Source: Devlin et al. 2018 (BERT).

In every sample the same number of positions is chosen; of these 80% show the id MASK, 10% a random id and 10% the right
one, so that the network cannot know which positions it will be asked for. Targets are the right ids there, and -1
elsewhere. The choice is drawn once: as in BERT, a sample hides the same ids in every epoch.
"""

from __future__ import annotations

import copy

import numpy as np

from .dataset import DataError, Dataset

MASK = 1  # a byte that texts do not contain; 0 is padding
UNCHANGED, RANDOM = 0.1, 0.1


def masked_count(fraction: float, length: int) -> int:
    """Positions to hide in a sample."""
    return max(1, round(fraction * length))


def masked(dataset: Dataset, fraction: float = 0.15, seed: int = 0) -> Dataset:
    """Return a data set of ids (n, T) with `fraction` of each sample's positions hidden, which are its targets.

    Raises
    ------
    DataError
        Samples that are no sequences of ids, too few ids, or a fraction outside (0, 1).
    """
    ids = np.asarray(dataset.x)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or dataset.scale is not None:
        raise DataError(
            f"{dataset.name}: only sequences of ids can be masked, "
            f"such as --data stdlib for an encoder; given {ids.dtype}{ids.shape[1:]}"
        )
    if not 0 < fraction < 1:
        raise DataError(f"{dataset.name}: the fraction of hidden ids must be between 0 and 1, given {fraction}")
    if dataset.classes <= MASK + 1:
        raise DataError(
            f"{dataset.name}: ids 0 and {MASK} stand for padding and hidden ids, so a vocabulary needs more than "
            f"{MASK + 1}, given {dataset.classes}"
        )
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    count = masked_count(fraction, ids.shape[1])
    at = rng.random(ids.shape, np.float32).argpartition(count - 1, axis=1)[:, :count]
    result = copy.copy(dataset)
    kind = np.int16 if ids.dtype.itemsize == 1 else np.int64  # it holds -1 and every id
    result.x, result.y, result.mapped = ids.copy(), np.full(ids.shape, -1, kind), False
    right = np.take_along_axis(ids, at, axis=1)
    np.put_along_axis(result.y, at, right.astype(kind), axis=1)
    chance = rng.random(at.shape, np.float32)
    shown = np.where(chance < UNCHANGED + RANDOM, rng.integers(2, dataset.classes, at.shape), MASK)
    np.put_along_axis(result.x, at, np.where(chance < UNCHANGED, right, shown).astype(ids.dtype), axis=1)
    return result
