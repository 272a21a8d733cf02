"""Project 3: your own pipeline.

Rank r has stage r of the network. A micro-batch i goes through the actions

| action | needs | time |
|---|---|---|
| ("F", i) | F of the stage before | 1 |
| ("I", i) | F of this stage, and I of the stage behind it | 1 |
| ("W", i) | I of this stage | 1 |

I is the gradient of the input: the stage before waits for it. W is the gradient of the weights: no stage waits for it.
A rank does its actions in the order of your list. It keeps the activations of a micro-batch from F until W.

1. `one_f_one_b`: at most `ranks` micro-batches in memory, 3 (m + p - 1) seconds.
2. `zero_bubble`: the same memory, and shorter. The record of ZB-H1 (Qi et al. 2023) is 3 m + p - 1 seconds.
3. `train_step`: run a schedule with messages between neighbours.

Allowed: NumPy, and of the communicator Send, Recv, Isend, Irecv.
README.md in this folder says what is graded.
"""

import numpy as np
from network import Layer

Action = tuple[str, int]


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank, in order."""
    # Your turn. This is GPipe: right, but it keeps all micro-batches in memory.
    forward = [("F", i) for i in range(micro_batches)]
    return forward + [(kind, i) for i in range(micro_batches) for kind in ("I", "W")]


def zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank, in order."""
    return one_f_one_b(rank, ranks, micro_batches)  # Your turn


def train_step(
    layers: list[Layer],
    w: np.ndarray,
    g: np.ndarray,
    actions: list[Action],
    micro_batches: list[np.ndarray],
    labels: list[np.ndarray],
    communicator,
) -> float:
    """Add the gradient of a step into g, and return the loss (the same on every rank).

    Parameters
    ----------
    layers : of this rank's stage, first to last
    w, g : the parameters and the gradient of the whole network; a stage uses its layers' slices only
    actions : of this rank
    micro_batches : x of each micro-batch, for the first stage
    labels : of each micro-batch, for the last stage; the loss is the mean over the samples of all of them
    communicator : with Send, Recv, Isend, Irecv for NumPy arrays
    """
    raise NotImplementedError("Your turn")
