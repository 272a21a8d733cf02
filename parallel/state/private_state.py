"""Entries of a state that one strategy, or one method of compression, keeps for itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nn.training.state import kind_of

OWN = "exchange/"  # begins the names of what a strategy keeps for itself


class UsableState(Mapping):
    """A state without those private entries that a strategy cannot go on with.

    The one rule for what a strategy keeps for itself alone (residuals of compression, an outer momentum, replicas):
    names begin with one of nn.training.trainer.PRIVATE. The strategy that knows such entries takes them over, if all of
    their kind are there in the expected shapes; else it begins anew. All others ignore them. They are never a reason to
    refuse a state.

    Parameters
    ----------
    private : dict
        Name -> (shape, dtype) of what the strategy knows.
    state : mapping
        Name -> array.
    """

    def __init__(self, private: Mapping[str, tuple], state: Mapping[str, np.ndarray]):
        kind = lambda name: name.split("/")[1]
        unusable = {kind(name) for name in private if name not in state or kind_of(state, name) != private[name]}
        self.state, self.hidden = state, {name for name in private if kind(name) in unusable}

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.hidden:
            raise KeyError(name)
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.state if name not in self.hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)
