"""Text from a language model, a token at a time: what it holds likely to come next is drawn, and read again.

Temperature T divides the logits: below 1 the likely becomes likelier, at 0 the likeliest is taken. Top-k keeps the k
likeliest (Fan et al. 2018). A token costs a forward pass over as many positions as the network has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nn.arguments import SIZE, Number, Optional


def generate(
    predict: Callable[[np.ndarray], np.ndarray],
    prompt: Sequence[int],
    positions: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Iterate over ids that come after the prompt, without end.

    Parameters
    ----------
    predict : callable (1, positions) int64 -> (1, positions, V)
        Logits of the id behind every position, which depend on that position and those before it: `Model.predict`.
    prompt : ids
        At least one; of a longer one than the network has positions, the last count.
    positions : int
        How many ids the network sees.
    temperature : float
    top_k : int or None
        None for all.
    seed : int
        Seed of the draws.

    Raises
    ------
    ValueError
        No prompt, or numbers that make no sense.
    """
    if not len(prompt):
        raise ValueError("a prompt must have at least one id: what comes next depends on what was before")
    Number(0, below=np.inf)("generate: temperature", temperature)
    Optional(SIZE)("generate: top_k", top_k)
    SIZE("generate: positions", positions)
    return _sample(predict, list(prompt), positions, temperature, top_k, np.random.default_rng(seed))


def _sample(predict, ids: list[int], positions: int, temperature, top_k, rng) -> Iterator[int]:
    while True:
        ids = ids[-positions:]
        window = np.zeros((1, positions), np.int64)  # what lies behind the last id is not seen by it
        window[0, : len(ids)] = ids
        chosen = draw(predict(window)[0, len(ids) - 1].astype(np.float64), temperature, top_k, rng)
        yield chosen
        ids.append(chosen)


def draw(logits: np.ndarray, temperature: float, top_k: int | None, rng: np.random.Generator) -> int:
    """Draw an id by its logits (V,)."""
    if temperature == 0 or top_k == 1:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < len(logits):
        logits[np.argsort(-logits, kind="stable")[top_k:]] = -np.inf
    probability = np.exp(logits - logits.max())
    return int(rng.choice(len(logits), p=probability / probability.sum()))
