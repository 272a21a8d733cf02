"""Strategies that share the samples of a batch: what a step of ddp, zero1, zero2, fsdp, dp and ps costs.

`predict.py` has the formulas in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from collectives.pricing.networks import Network
from parallel.planning.group_costs import Group, message
from parallel.planning.job import Axes, Job, Prediction
from parallel.planning.profile import LayerProfile


class Part(NamedTuple):
    """What the busiest rank has of a step.

    Attributes
    ----------
    samples : int
    layers : tuple of LayerProfile
        for these samples, cut on the axis "tensor"
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
    """What the busiest rank has, of `readers` replicas; 0: those of the axis "data".

    Where `waiting`, the sums on the axis "tensor" are in the layers' seconds, as a pipeline waits for them.
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


def ddp(job: Job, axes: Axes, network: Network) -> Prediction:
    """Gradients are summed, and every rank updates."""
    mine, group = part_of(job, axes, network), axes.group("data", job.node_memory)
    gradients, update = job.parameters / axes.tensor, job.update / axes.tensor
    if group.in_memory(network) and axes.tensor == 1:  # who has finished sums and updates the next block
        update /= group.count
        exchange = network.barrier_seconds(group.count) + group.adding(gradients, network)
    else:
        exchange = after_backprop(job, mine.layers, group, network)
    computation = mine.computation + job.loss(mine.samples)
    parts = {"computation": computation, "update": update, "gradients": exchange, "activations": mine.sums}
    memory = (2 + job.moments) * gradients + mine.saved
    computing = mine.workers * computation + axes.ranks * update
    return Prediction("ddp", axes, parts, computing, 2 * group.sent(gradients) + mine.sent, memory)


def after_backprop(job: Job, layers: Sequence[LayerProfile], group: Group, network: Network) -> float:
    """Seconds that ranks wait for gradients once backprop is done, summed in buckets as they fill."""
    if group.count == 1:
        return 0.0
    now = end = size = 0.0
    limit = job.first_bucket
    for i, layer in enumerate(reversed(layers)):
        now += layer.backward
        size += layer.parameters
        if size and (size >= limit or i == len(layers) - 1):
            end = max(end, now if job.overlap else 0.0) + group.allreduce(size, network)
            size, limit = 0.0, job.bucket
    return max(0.0, end - now) if job.overlap else end


def zero1(job: Job, axes: Axes, network: Network) -> Prediction:
    """Moments in shards: reduce-scatter, update of a shard, allgather."""
    return zero(job, axes, network, 1)


def zero2(job: Job, axes: Axes, network: Network) -> Prediction:
    """And gradients: a unit's are reduced as soon as they are there."""
    return zero(job, axes, network, 2)


def zero(job: Job, axes: Axes, network: Network, stage: int) -> Prediction:
    """Moments, and in stage 2 gradients, in shards."""
    mine, group = part_of(job, axes, network), axes.group("data", job.node_memory)
    whole, n, k = job.parameters / axes.tensor, axes.data, job.moments
    if stage == 2 and job.overlap and not group.in_memory(network):
        lines = Lines()
        for unit in reversed(units(job, mine.layers)):
            lines.compute(sum(layer.backward for layer in unit))
            lines.send(group.reduce_scatter(sum(layer.parameters for layer in unit), network))
        exchange = max(0.0, lines.sent - lines.now)
    else:
        exchange = group.reduce_scatter(whole, network)
    computation, update = mine.computation + job.loss(mine.samples), job.update / axes.tensor / n
    parts = {
        "computation": computation,
        "update": update,
        "gradients": exchange,
        "parameters": group.allgather(whole, network),
        "activations": mine.sums,
    }
    memory = (2 + k / n, 1 + (1 + k) / n)[stage - 1] * whole + mine.saved
    computing = mine.workers * computation + axes.ranks * update
    return Prediction(f"zero{stage}", axes, parts, computing, 2 * group.sent(whole) + mine.sent, memory)


def fsdp(job: Job, axes: Axes, network: Network) -> Prediction:
    """And parameters: a unit is gathered before it is used, forward and backward."""
    mine, group = part_of(job, axes, network), axes.group("data", job.node_memory)
    whole, n = job.parameters / axes.tensor, axes.data
    found = units(job, mine.layers)
    size = [sum(layer.parameters for layer in unit) for unit in found]
    there = 1 if group.in_memory(network) else 2  # units at once: one more where the next is gathered ahead
    lines = Lines(ahead=job.overlap and there > 1)
    for unit, nbytes in zip(found, size, strict=True):
        lines.gather_and_compute(group.allgather(nbytes, network), sum(layer.forward for layer in unit))
    for i, (unit, nbytes) in enumerate(zip(reversed(found), reversed(size), strict=True)):
        again = group.allgather(nbytes, network) if i >= there else 0.0  # the last ones still are
        lines.gather_and_compute(again, sum(layer.backward for layer in unit))
        lines.send(group.reduce_scatter(nbytes, network))
    computation, update = mine.computation + job.loss(mine.samples), job.update / axes.tensor / n
    parts = {
        "computation": computation,
        "update": update,
        "units": max(0.0, max(lines.now, lines.sent) - mine.computation),
        "activations": mine.sums,
    }
    memory = (2 + job.moments) * whole / n + 2 * max(size) + mine.saved
    computing = mine.workers * computation + axes.ranks * update
    sent = 3 * group.sent(whole) - group.sent(sum(size[-there:])) + mine.sent
    return Prediction("fsdp", axes, parts, computing, sent, memory)


class Lines:
    """Two lines of work of a rank: computation, and messages one after the other."""

    def __init__(self, ahead: bool = True):
        self.now = self.sent = self.before = 0.0
        self.ahead = ahead

    def compute(self, seconds: float) -> None:
        self.before, self.now = self.now, self.now + seconds

    def send(self, seconds: float) -> None:
        """As soon as what has been computed by now may leave."""
        self.sent = max(self.sent, self.now) + seconds

    def gather_and_compute(self, gathering: float, seconds: float) -> None:
        """A unit is gathered while the one before computes (`ahead`), or after it; then it computes."""
        self.sent = max(self.sent, self.before if self.ahead else self.now) + gathering
        self.now = max(self.now, self.sent)
        self.compute(seconds)


def units(job: Job, layers: Sequence[LayerProfile]) -> list[list[LayerProfile]]:
    """Neighbouring layers, until they have `job.unit` bytes of parameters."""
    found: list[list[LayerProfile]] = [[]]
    for layer in layers:
        if sum(each.parameters for each in found[-1]) >= job.unit:
            found.append([])
        found[-1].append(layer)
    return found


def dp(job: Job, axes: Axes, network: Network) -> Prediction:
    """One master hands out samples and parameters, computes the loss, and updates."""
    mine, group = part_of(job, axes, network), axes.group("data", False)
    samples, answers = job.batch * job.sample_bytes, job.batch * job.answer_bytes
    parts = {
        "computation": mine.computation,
        "samples": group.scatter(samples, network),
        "parameters": group.broadcast(job.parameters, network),
        "outputs": group.gather(answers, network) + group.scatter(answers, network),
        "loss": job.loss(job.batch),
        "gradients": group.reduce(job.parameters, network),
        "update": job.update,
    }
    memory = (2 + job.moments) * job.parameters + mine.saved + samples + answers
    computing = mine.workers * mine.computation + parts["loss"] + parts["update"]
    return Prediction("dp", axes, parts, computing, job.parameters + group.sent(samples + answers), memory)


def ps(job: Job, axes: Axes, network: Network, servers: int = 1) -> Prediction:
    """Workers push gradients and pull parameters; servers, on ranks of their own, sum and update their slice."""
    workers = axes.ranks - servers
    if not 1 <= servers < axes.ranks:
        raise ValueError(f"ps: {servers} servers leave no worker of {axes.ranks} ranks: use 1 to {axes.ranks - 1}")
    mine, group, piece = part_of(job, axes, network, workers), Group(axes.ranks), job.parameters / servers
    far = group.nodes(network) > 1
    link = network.between if far else network.inside
    crowd = min(servers, network.ranks_per_node) if far else 1  # servers that share a node's port
    move = max(message(link, piece, workers * crowd), message(link, piece, servers))
    computation = mine.computation + job.loss(mine.samples)
    parts = {
        "computation": computation,
        "push": move + workers * network.reducing(piece),
        "update": job.update / servers,
        "pull": move,
    }
    memory = max(2 * job.parameters + mine.saved, (2 + job.moments + workers) * piece)
    computing = mine.workers * computation + servers * parts["update"]
    return Prediction("ps", axes, parts, computing, max(job.parameters, workers * piece), memory)
