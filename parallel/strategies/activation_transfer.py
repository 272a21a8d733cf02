"""Activations between ranks: in mixed precision they travel as the float16 numbers that they are kept as.

What is moved and not summed (a gather, a swap, a message of a pipeline) takes half the bytes that way, and many ranks
compute what one does. Terms of a sum travel in the network's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nn.core.context import LayerContext, NetworkContext
from nn.registry import registered
from parallel.axis import AXES, IN_LAYERS

# What is divided among the ranks that a layer may ask for by ctx.group, beside "data".
registered("group").update({name: AXES[name].summary for name in IN_LAYERS if name != "data"})


def transfer_dtype(context: NetworkContext, dtype) -> np.dtype:
    """Return the dtype with which an activation of `dtype` travels."""
    return np.dtype(np.float16 if context.mixed_precision and context.micro_batch.training else dtype)


def pack(context: NetworkContext, array: np.ndarray, gradient: bool = False) -> np.ndarray:
    """Return an activation, or the gradient of one, as it travels."""
    mixed = context.mixed_precision
    if transfer_dtype(context, array.dtype) == array.dtype:
        return array
    return mixed.pack(array, mixed.scale if gradient else 1.0)


def unpack(context: NetworkContext, array: np.ndarray, dtype, gradient: bool = False) -> np.ndarray:
    """Return an array of `dtype` from one that a rank has packed."""
    if array.dtype != np.float16:
        return array
    mixed = context.mixed_precision
    return mixed.unpack(array, dtype, mixed.scale if gradient else 1.0)


def transfer(
    ctx: LayerContext, move: Callable[[np.ndarray], np.ndarray], array: np.ndarray, gradient: bool = False
) -> np.ndarray:
    """Return what `move`, a group's gather or swap, makes of an activation, or of the gradient of one."""
    context = ctx.network_context
    return unpack(context, move(pack(context, array, gradient)), array.dtype, gradient)
