"""The busiest rank's work in a step: its samples, its shard of every layer, its waits for other ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from collectives.pricing.networks import Network
from parallel.planning.context_costs import Exposed, attention_ways
from parallel.planning.group_costs import Group
from parallel.planning.job import Axes, Job
from parallel.planning.profile import LayerProfile


class RankWork(NamedTuple):
    """Work of the busiest rank in a step.

    Attributes
    ----------
    samples : int
    layers : tuple of LayerProfile
        for these samples, split on the axes "tensor" and "context"
    sums, sent : float
        seconds that the layers wait on these axes; bytes that they send there, those of `routing` included
    routing : float
        seconds of the four alltoalls of a layer whose experts are on several ranks, at an even load
    workers : int
        ranks that have samples
    """

    samples: int
    layers: tuple[LayerProfile, ...]
    sums: float
    sent: float
    workers: int
    routing: float = 0.0

    @property
    def parameters(self) -> float:
        """Bytes."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def replicated(self) -> float:
        """Bytes of the parameters that all ranks of the axis "expert" have."""
        return self.parameters - sum(layer.experts for layer in self.layers)

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
def part_of(job: Job, axes: Axes, network: Network, readers: int = 0, waiting: bool = False) -> RankWork:
    """Return the work of the busiest rank among `readers` replicas; 0 stands for those of "data" and "expert".

    With `waiting` the seconds of the layers include what they wait for on the axes "tensor" and "context", because a
    pipeline waits for them.
    """
    readers = readers or axes.data * axes.expert
    share, t, c, e = job.share(readers), axes.tensor, axes.context, axes.expert
    workers = min(readers, -(-job.batch // share)) * t * c
    layers, group = job.of(share), axes.group("tensor", job.node_memory)
    everyone = Group(e * t, axes.pipeline * c)
    parts = e * t if e > 1 else 1  # without an axis "expert" ranks of "tensor" have all experts
    found, seconds, routing, nbytes, how = [], 0.0, 0.0, 0.0, attention_of(job, axes, network)
    for layer in layers:
        summed = (layer.summed or layer.output) / c
        each = layer.tensor_sums * group.allreduce(summed, network)
        waits = exposed(layer, axes, network)[how] if layer.keys and c > 1 else Exposed(0.0, 0.0, 0.0)
        seconds += 2 * each + waits.seconds
        nbytes += 4 * layer.tensor_sums * group.sent(summed) + waits.sent
        cut = {name: getattr(layer, name) / t / c for name in ("forward", "backward", "weight_gradient", "saved")}
        cut |= {"parameters": (layer.parameters - layer.experts) / t + layer.experts / parts}
        cut |= {"output": layer.output / c, "experts": layer.experts / parts}
        if e > 1:
            routing += 4 * everyone.alltoall(layer.routed / t / c, network)
            nbytes += 4 * everyone.sent(layer.routed / t / c)
        if waiting:
            cut |= {
                "forward": cut["forward"] + each + waits.forward,
                "backward": cut["backward"] + each + waits.backward,
            }
        found.append(layer._replace(**cut))
    return RankWork(share, tuple(found), seconds, nbytes, workers, routing)


def sum_over_experts(mine: RankWork, axes: Axes, network: Network) -> tuple[float, float]:
    """Return seconds and bytes of the sum, along the axis "expert", of the gradients that all its ranks have.

    Raises
    ------
    ValueError
        A network without experts.
    """
    if axes.expert == 1:
        return 0.0, 0.0
    if mine.replicated == mine.parameters:
        raise ValueError(f"an axis expert={axes.expert} needs a network with experts: leave it out")
    group = axes.group("expert", False)
    return group.allreduce(mine.replicated, network), 2 * group.sent(mine.replicated)


def exposed(layer: LayerProfile, axes: Axes, network: Network) -> dict[str, Exposed]:
    """What every way of attention costs on the axis "context", where "tensor" has some of the heads on each rank."""
    t, group = axes.tensor, axes.group("context", False)
    heads = layer.heads // t if layer.heads % t == 0 else 0
    return attention_ways(layer.keys / t, layer.attention / t, heads, group, network)


def attention_of(job: Job, axes: Axes, network: Network) -> str:
    """Return how ranks that share sequences compute attention in least time: "ring" or "ulysses"; "" if none do."""
    found = [exposed(layer, axes, network) for layer in job.of(job.share(axes.data * axes.expert)) if layer.keys]
    if axes.context == 1 or not found:
        return ""
    ways = [way for way in found[0] if all(way in each for each in found)]
    return min(ways, key=lambda way: sum(each[way].seconds for each in found))
