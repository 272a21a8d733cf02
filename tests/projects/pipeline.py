"""Project 3, solved."""

import numpy as np
from network import Layer, cross_entropy

Action = tuple[str, int]


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        actions += [("F", ahead + i)] * (ahead + i < micro_batches) + [("I", i), ("W", i)]
    return actions


def zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ZB-H1: a W lags `rank` micro-batches behind its I, so that it fills the time in which 1F1B waits."""
    ahead = min(ranks - rank, micro_batches)
    actions = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        actions += [("I", i)] + [("W", i - rank)] * (i >= rank) + [("F", ahead + i)] * (ahead + i < micro_batches)
    return actions + [("W", i) for i in range(max(0, micro_batches - rank), micro_batches)]


def train_step(
    layers: list[Layer],
    w: np.ndarray,
    g: np.ndarray,
    actions: list[Action],
    micro_batches: list[np.ndarray],
    labels: list[np.ndarray],
    communicator,
) -> float:
    rank, last = communicator.rank, communicator.size - 1
    total, loss, sends = sum(map(len, labels)), 0.0, []
    arrays: dict[int, list[np.ndarray]] = {}  # of a micro-batch: the input and the output of every layer
    gradients: dict[int, list[np.ndarray]] = {}  # of a micro-batch: the gradient of the output of every layer

    def send(array: np.ndarray, peer: int) -> None:
        sends.append((communicator.Isend(array, peer), array))  # the array lives until the message has gone

    for kind, i in actions:
        if kind == "F":
            x = micro_batches[i]
            if rank:
                x = np.empty((len(micro_batches[i]), layers[0].inputs))
                communicator.Recv(x, rank - 1)
            arrays[i] = [x]
            for layer in layers:
                arrays[i].append(layer.forward(w, arrays[i][-1]))
            if rank < last:
                send(arrays[i][-1], rank + 1)
        elif kind == "I":
            if rank == last:
                part, gy = cross_entropy(arrays[i][-1], labels[i], total)
                loss += part
            else:
                gy = np.empty_like(arrays[i][-1])
                communicator.Recv(gy, rank + 1)
            gradients[i] = [gy]
            for k in reversed(range(len(layers))):
                if k or rank:
                    gradients[i].insert(0, layers[k].backward_input(w, arrays[i][k + 1], gradients[i][0]))
            if rank:
                send(gradients[i].pop(0), rank - 1)
        else:
            for k, (layer, gy) in enumerate(zip(layers, gradients.pop(i), strict=True)):
                layer.backward_weights(g, arrays[i][k], arrays[i][k + 1], gy)
            del arrays[i]
    told = np.array([loss])
    if rank < last:
        communicator.Recv(told, rank + 1)
    if rank:
        send(told, rank - 1)
    for request, _ in sends:
        request.Wait()
    return float(told[0])
