"""Attention by blocks of keys: the softmax of a row is computed piece by piece, and no (T, T) array is ever made.

For scores S = q k^T and values v, attention is sum_j exp(S_j) v_j / sum_j exp(S_j). Both sums can be taken over one
block of keys after the other if all exponents have the same offset. It is the largest score so far, m; when a larger
one comes, the sums are multiplied by exp(m_old - m_new). So only the scores of one block are in memory, and a block of
keys may come from anywhere. Sources: Milakov and Gimelshein 2018, Rabe and Staats 2021, Dao et al. 2022.

Backward computes the scores of each block again: P = exp(S - m) / l, where m and l, the sum of exp(S - m), are those of
the whole row. (A block's own would normalise each block alone, and nothing would crash.) m and l are saved separately:
exp(S - (m + log l)) has an error of about eps |m|. With `delta` = sum over features of gy y,

    gv = P^T gy        gS = P (gy v^T - delta)        gq = gS k        gk = gS^T q

Axes: samples N, heads H, positions T, features of a head d. Queries come scaled by 1 / sqrt(d).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nn.core.memory_pool import MemoryPool


class Block(NamedTuple):
    """Some rows of an array along T, and the position of the first one in the whole sequence; the others follow it."""

    rows: slice
    position: int

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start


def blocks(positions: Sequence[int] | np.ndarray, size: int) -> list[Block]:
    """Return blocks of at most `size` rows whose positions follow one another.

    Parameters
    ----------
    positions : sequence of int
        Position of each row in the whole sequence, ascending.
    size : int

    Examples
    --------
    >>> for block in blocks([0, 1, 2, 6, 7], 2):
    ...     print(block.rows, block.position)
    slice(0, 2, None) 0
    slice(2, 3, None) 2
    slice(3, 5, None) 6
    """
    positions = np.asarray(positions)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    consecutive = []
    for start, stop in zip([0, *breaks], [*breaks, len(positions)], strict=True):
        for row in range(start, stop, size):
            consecutive.append(Block(slice(int(row), int(min(row + size, stop))), int(positions[row])))
    return consecutive


class BlockwiseAttention:
    """Attention of queries that see one block of keys after the other, forward and backward.

    Parameters
    ----------
    queries : (N, H, T, d) array
        Scaled by 1 / sqrt(d).
    positions : sequence of int
        Positions of the queries in the whole sequence, ascending.
    causal : bool
        A query sees no key of a larger position.
    size : int
        Rows of a block.
    pool : MemoryPool
    """

    def __init__(self, queries: np.ndarray, positions, causal: bool, size: int, pool: MemoryPool):
        self.queries, self.causal, self.size, self.pool = queries, causal, size, pool
        self.blocks = blocks(positions, size)

    # ------------------------------------------------------------------------------------------------- forward

    def start(self, out: np.ndarray) -> None:
        """Begin the sums, in `out` (N, H, T, d): no key has been seen."""
        rows = (*self.queries.shape[:3], 1)
        self.sums = out
        self.largest, self.total = (self.pool.empty(rows, out.dtype) for _ in range(2))
        self.sums[...], self.largest[...], self.total[...] = 0, -np.inf, 0

    def add(self, keys: np.ndarray, values: np.ndarray, positions, padding: np.ndarray | None = None) -> None:
        """Let all queries see these keys and values, (N, H, keys, d); padding (N, keys) marks those to be ignored."""
        for key_block in blocks(positions, self.size):
            for block in self.blocks:
                scores = self._scores(block, keys, key_block, padding)
                if scores is None:
                    continue
                rows = block.rows
                largest, total, sums = self.largest[:, :, rows], self.total[:, :, rows], self.sums[:, :, rows]
                new = np.maximum(largest, scores.max(axis=-1, keepdims=True))
                offset = np.where(new == -np.inf, 0, new)  # a row that has seen nothing: exp(-inf - 0) is 0, not nan
                scores -= offset
                np.exp(scores, scores)
                shrink = np.exp(largest - offset)
                total *= shrink
                total += scores.sum(axis=-1, keepdims=True)
                sums *= shrink
                sums += np.matmul(
                    scores, values[:, :, key_block.rows], self.pool.workspace("block sums", sums.shape, sums.dtype)
                )
                largest[...] = new

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Divide the sums by their weights; return (largest, total), (N, H, T, 1), which backward needs.

        A query that has seen no key has a total of 0: refuse padding that leaves one nothing to see before.
        """
        self.sums /= self.total
        return self.largest, self.total

    # ------------------------------------------------------------------------------------------------- backward

    def start_backward(self, largest: np.ndarray, total: np.ndarray, y: np.ndarray, gy: np.ndarray) -> None:
        """Begin backward: what `finish` returned, the result y, and the gradient gy of it, (N, H, T, d)."""
        self.largest, self.total, self.gy = largest, total, gy
        self.delta = np.einsum("nhtd,nhtd->nht", gy, y)[..., None]

    def add_backward(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        gradients: tuple[np.ndarray, np.ndarray, np.ndarray],
        positions,
        padding: np.ndarray | None = None,
    ) -> None:
        """Add to the gradients of (queries, keys, values) what these keys and values, as in `add`, contribute."""
        gq, gk, gv = gradients
        for key_block in blocks(positions, self.size):
            k, v = keys[:, :, key_block.rows], values[:, :, key_block.rows]
            for block in self.blocks:
                scores = self._scores(block, keys, key_block, padding)
                if scores is None:
                    continue
                rows = block.rows
                gy, q = self.gy[:, :, rows], self.queries[:, :, rows]
                scores -= self.largest[:, :, rows]
                probabilities = np.exp(scores, scores)
                probabilities /= self.total[:, :, rows]
                self._add_product(gv[:, :, key_block.rows], probabilities.swapaxes(2, 3), gy)
                gscores = self.pool.workspace("block gradient", scores.shape, scores.dtype)
                np.matmul(gy, v.swapaxes(2, 3), gscores)
                gscores -= self.delta[:, :, rows]
                gscores *= probabilities
                self._add_product(gq[:, :, rows], gscores, k)
                self._add_product(gk[:, :, key_block.rows], gscores.swapaxes(2, 3), q)

    # ------------------------------------------------------------------------------------------------- both

    def _scores(
        self, block: Block, keys: np.ndarray, key_block: Block, padding: np.ndarray | None
    ) -> np.ndarray | None:
        """Scores of a block of queries and one of keys, minus infinity where a key is hidden; None: all are."""
        distance = block.position - key_block.position
        if self.causal and distance + len(block) <= 0:
            return None
        q, k = self.queries[:, :, block.rows], keys[:, :, key_block.rows]
        scores = self.pool.workspace("block scores", (*q.shape[:3], len(key_block)), q.dtype)
        np.matmul(q, k.swapaxes(2, 3), scores)
        if self.causal and distance < len(key_block) - 1:
            scores += causal_mask(len(block), len(key_block), distance, q.dtype)
        if padding is not None:
            np.copyto(scores, -np.inf, where=padding[:, None, None, key_block.rows])
        return scores

    def _add_product(self, array: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        array += np.matmul(a, b, self.pool.workspace("block product", array.shape, array.dtype))


@functools.lru_cache(maxsize=16)
def causal_mask(queries: int, keys: int, distance: int, dtype: np.dtype) -> np.ndarray:
    """Minus infinity where key j comes after query i, else 0; `distance`: of the first query behind the first key."""
    table = np.triu(np.full((queries, keys), -np.inf, dtype), distance + 1)
    table.flags.writeable = False
    return table
