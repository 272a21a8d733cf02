"""The state of a trainer as a mapping of names to arrays: which entries it has, and whether a given one fits.

param/2.W                   a parameter
optimizer/velocity/2.W      a slot of the optimizer
state/1.mean                running statistics
loss_scale, steps           the loss scale of mixed precision, the number of steps
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nn.core.network import Network
from nn.optim.optimizers import Optimizer
from nn.training.loss_scale import LossScale
from nn.training.state_files import LazyState

LARGEST_COUNT = 1 << 53  # of steps, epochs, samples, seconds: a float64 counts exactly up to here
PRIVATE = "exchange/", "compress/"  # prefixes of entries that only the kind of trainer that wrote them reads


def state_kinds(network: Network, slots: Iterable[str]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return name -> (shape, dtype) of the entries of a state, for this network and these slots of the optimizer."""
    kinds = {"steps": ((), np.dtype(int))}
    if network.mixed:
        kinds["loss_scale"] = (3,), np.dtype(np.float64)
    layouts = {"param": network.layout, "state": network.buffer_layout}
    for prefix, layout in (layouts | {f"optimizer/{slot}": network.layout for slot in slots}).items():
        kinds |= {f"{prefix}/{name}": (spec.shape, network.dtype) for name, spec in layout.specs.items()}
    return kinds


def check_state(expected: dict[str, tuple[tuple[int, ...], np.dtype]], state: Mapping[str, np.ndarray]) -> str:
    """Return why a state does not fit the expected shapes and dtypes, as a sentence; '' if it fits.

    Private entries of another kind of trainer (PRIVATE) are ignored.
    """
    if not isinstance(state, Mapping):
        return f"a state is a dict of arrays by name, as state_dict() returns it; given {state!r:.80}"
    if missing := sorted(expected.keys() - state.keys()):
        return f"the checkpoint lacks {', '.join(missing[:5])}: another network or optimizer?"
    if foreign := sorted(name for name in state.keys() - expected.keys() if not name.startswith(PRIVATE)):
        return f"the checkpoint has {', '.join(foreign[:5])}, unknown here: another network or optimizer?"
    for name, (shape, dtype) in expected.items():
        if (kind := kind_of(state, name)) is None:
            return f"checkpoint entry {name}: expected an array, given {state[name]!r:.80}"
        other, its = kind
        if kind != (shape, dtype):
            return f"checkpoint entry {name}: expected {dtype}{shape}, given {its}{other}"
    if "steps" in expected and not 0 <= int(state["steps"]) <= LARGEST_COUNT:
        return f"checkpoint entry steps: expected the number of steps made, given {int(state['steps'])}"
    return ""


def kind_of(state: Mapping[str, np.ndarray], name: str) -> tuple[tuple[int, ...], np.dtype] | None:
    """Return (shape, dtype) of an entry of a state; None if it is no array."""
    if isinstance(state, LazyState):  # the shape is known before the array is read
        return state.kind(name)
    array = state[name]
    return (array.shape, array.dtype) if hasattr(array, "dtype") else None


def fitting_weights(
    network: Network, weights: Any, optimizer: Optimizer, seed: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return (state to start from, names of newly drawn parameters): see `Trainer.load_weights`."""
    if isinstance(weights, str | os.PathLike):
        raise TypeError(f"load_weights takes weights, given a path: load_weights(nn.load({str(weights)!r}))")
    arrays = weights if isinstance(weights, Mapping) else weights.state_dict()
    state, new = {}, []
    for name, (shape, dtype) in state_kinds(network, optimizer.slots).items():
        prefix, _, array = name.partition("/")
        if prefix in ("param", "state") and name in arrays and arrays[name].shape == shape:
            state[name] = arrays[name].astype(dtype)
        elif prefix in ("param", "state"):
            layout = network.layout if prefix == "param" else network.buffer_layout
            state[name] = np.broadcast_to(layout.draw(array, seed), shape).astype(dtype)
            new += [array] if prefix == "param" else []
        else:
            state[name] = LossScale().array if name == "loss_scale" else np.zeros(shape, dtype)
    if len(new) == len(network.layout.specs):
        raise ValueError(
            f"no parameter of {network.name} has the name and shape of one of these weights, which have "
            f"{', '.join(key[6:] for key in arrays if key.startswith('param/'))[:200]}"
        )
    return state, new
