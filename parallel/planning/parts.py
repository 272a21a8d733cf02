"""The busiest rank's work in a step: its samples, its shard of every layer, its sums on the axis "tensor"."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from collectives.pricing.networks import Network
from parallel.planning.job import Axes, Job
from parallel.planning.profile import LayerProfile


class Part(NamedTuple):
    """Work of the busiest rank in a step.

    Attributes
    ----------
    samples : int
    layers : tuple of LayerProfile
        for these samples, split on the axis "tensor"
    sums, sent : float
        seconds and bytes of the layers' sums on that axis
    workers : int
        ranks that have samples
    """

    samples: int
    layers: tuple[LayerProfile, ...]
    sums: float
    sent: float
    workers: int

    @property
    def backward(self) -> float:
        return sum(layer.backward for layer in self.layers)

    @property
    def computation(self) -> float:
        return sum(layer.forward for layer in self.layers) + self.backward

    @property
    def saved(self) -> float:
        return sum(layer.saved for layer in self.layers)


@lru_cache(256)
def part_of(job: Job, axes: Axes, network: Network, readers: int = 0, waiting: bool = False) -> Part:
    """Return the work of the busiest rank among `readers` replicas; 0 stands for those of the axis "data".

    With `waiting` the seconds of the layers include the sums on the axis "tensor", because a pipeline waits for them.
    """
    readers = readers or axes.data
    share, t = job.share(readers), axes.tensor
    workers = min(readers, -(-job.batch // share)) * t
    layers, group = job.of(share), axes.group("tensor", job.node_memory)
    found, seconds, nbytes = [], 0.0, 0.0
    for layer in layers:
        summed = layer.summed or layer.output
        each = layer.tensor_sums * group.allreduce(summed, network)
        seconds += 2 * each
        nbytes += 4 * layer.tensor_sums * group.sent(summed)
        cut = {name: getattr(layer, name) / t for name in ("forward", "backward", "weight_gradient", "saved")}
        cut["parameters"] = layer.parameters / t
        if waiting:
            cut |= {name: cut[name] + each for name in ("forward", "backward")}
        found.append(layer._replace(**cut))
    return Part(share, tuple(found), seconds, nbytes, workers)
