"""ZeRO: every rank keeps the optimizer's state, the gradients, the parameters of a shard only.

| strategy | sharded | elements a rank keeps, Adam | elements on the wire a step |
|---|---|---|---|
| DistributedDataParallel | nothing | 4 Psi | 2 Psi |
| ZeRO1 | moments | 2 Psi + 2 Psi/N | 2 Psi |
| ZeRO2 | and gradients | Psi + 3 Psi/N | 2 Psi |
| FullyShardedDataParallel (ZeRO-3) | and parameters | 4 Psi/N | 3 Psi |

for Psi parameters on N ranks: sync/sharded.py and sync/unit_buffered.py say how.

Milliseconds a step on 2 ranks of one node with Adam, 64 samples each, replicated and stages 1 to 3 (measured, median):
MLP 784-512-512-10 7.7, 8.0, 7.7, 8.1; eight layers of 1024 x 1024 85, 85, 87, 97.

Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallel.axis import AXES
from parallel.guesses import answer_keywords
from parallel.settings import option
from parallel.strategies.data_parallel import bucketing
from parallel.strategies.declaration import (
    NOT_COMPRESSED_IN_SHARDS,
    NOT_STAGES,
    STATELESS,
    UNIT_BYTES,
    Strategy,
    Supports,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectives.pricing.networks import Network as CostNetwork
    from parallel.planning.job import Axes, Job, Prediction
    from parallel.planning.profile import LayerProfile
    from parallel.trainer import DistributedTrainer

STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}


@dataclass(frozen=True)
class ShardOptions:
    """How ZeRO cuts a network, and where shards lie."""

    unit: float = option(
        1.0, "MiB of parameters of neighbouring layers that are gathered together", metavar="MIB", above=0
    )
    offload: str | None = option(
        None, "keep the shards in memory-mapped files in DIR, which are removed at the end", metavar="DIR"
    )


@dataclass(frozen=True)
class PrefetchOptions:
    """How far ahead parameters are gathered."""

    prefetch: int | None = option(
        None, "units gathered ahead while others compute (default: 1 between nodes, 0 on one)", metavar="N", least=0
    )


@answer_keywords
def ZeRO1(
    network, loss, optimizer, communicator, seed=0, unit_bytes=UNIT_BYTES, offload=None, *, compressor=None, shards=0
) -> DistributedTrainer:
    """The optimizer's state is sharded; parameters and gradients are whole on every rank.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    unit_bytes : int
        Neighbouring layers travel together until they have so many bytes of parameters.
    offload : path or None
        A directory in which the shards lie, in memory-mapped files; None for memory.
    compressor : Compressor or None
        Of the gradients, not attached yet; one that keeps nothing.
    shards : int
        The same bits on any number of ranks: into how many virtual shards every batch is cut; 0 for none.

    Raises
    ------
    ValueError
        A compressor that keeps something. With virtual shards: more ranks than shards, synchronised statistics, LARS,
        LAMB or clipping by norms.
    OSError
        On all ranks, if the directory has too little room on one.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.ZeRO1(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    given = network, loss, optimizer, communicator, seed
    return _zero(1, "ZeRO1", *given, compressor, shards, unit_bytes, offload, None)


@answer_keywords
def ZeRO2(
    network, loss, optimizer, communicator, seed=0, unit_bytes=UNIT_BYTES, offload=None, *, compressor=None, shards=0
) -> DistributedTrainer:
    """Gradients are sharded too: a unit's are reduced as soon as they are finished, then its memory serves the next.

    Between nodes a unit's are on their way while the next one computes. Parameters are those of ZeRO1.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.ZeRO2(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    given = network, loss, optimizer, communicator, seed
    return _zero(2, "ZeRO2", *given, compressor, shards, unit_bytes, offload, None)


@answer_keywords
def FullyShardedDataParallel(
    network,
    loss,
    optimizer,
    communicator,
    seed=0,
    unit_bytes=UNIT_BYTES,
    offload=None,
    prefetch=None,
    *,
    compressor=None,
    shards=0,
) -> DistributedTrainer:
    """Parameters are sharded too: a unit's are gathered before its forward and again before its backward.

    With virtual shards they are gathered for each: use no more of them than ranks where messages are dear.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, unit_bytes, offload, compressor, shards
        As for ZeRO1.
    prefetch : int or None
        How many units are gathered ahead, while others compute; None for 1 between nodes, and 0 on a node, where the
        cores that would copy are busy computing. Memory for prefetch + 1 units is needed. A unit that is still there
        when backward begins is not gathered again.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.FullyShardedDataParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    given = network, loss, optimizer, communicator, seed
    return _zero(3, "FullyShardedDataParallel", *given, compressor, shards, unit_bytes, offload, prefetch)


def _zero(stage, name, network, loss, optimizer, communicator, seed, compressor, shards, *cut) -> DistributedTrainer:
    from parallel.mesh import Mesh
    from parallel.passes.forward_backward import ForwardBackward
    from parallel.passes.virtual_shards import VirtualShards
    from parallel.strategies.gradient_sync import gradient_sync
    from parallel.trainer import DistributedTrainer

    mesh, (unit_bytes, offload, prefetch) = Mesh(communicator), cut
    how = {"unit_bytes": unit_bytes, "offload": offload, "prefetch": prefetch}
    sync = gradient_sync(mesh, stage, compressor, shards, **how)
    forward_backward = VirtualShards(shards) if shards else ForwardBackward()
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, name)


def check(options, ranks: int | None, network, optimizer) -> None:
    """Refuse norms of whole tensors beside virtual shards."""
    if options.reproducible:
        from parallel.passes import virtual_shards

        virtual_shards.refuse_norms(optimizer)


def shard_arguments(options) -> dict:
    """Return how the network is cut, and where shards lie."""
    more = {"prefetch": options.prefetch} if options.strategy_name == "fsdp" else {}
    return {"unit_bytes": int(options.unit * 2**20), "offload": options.offload, **more}


def summed(options) -> dict:
    """Return how gradients are summed, where it is not the usual way."""
    from parallel.sync import compression

    compressor = compression.parse(options.compress) if options.compress else None
    return {"compressor": compressor, "shards": options.reproducible or 0}


def group_sync_arguments(options) -> dict:
    """Return how groups of ranks that share a network sum their gradients: arguments of Tensor- and ExpertParallel."""
    return {
        "stage": STAGES.get(options.strategy_name, 0),
        "bucketing": bucketing(options),
        "unit_bytes": int(options.unit * 2**20),
        "prefetch": options.prefetch,
        "compressor": summed(options)["compressor"],
    }


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Moments, gradients, parameters in shards, by the name of the strategy."""
    make = {"zero1": ZeRO1, "zero2": ZeRO2, "fsdp": FullyShardedDataParallel}[options.strategy_name]
    arguments = network, loss, optimizer, communicator, options.seed
    return make(*arguments, **shard_arguments(options), **summed(options))


def cost(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """F, B, reduce-scatter, U / N, allgather; in stage 2 reduced in units while B goes on (strategies/estimate.py)."""
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of, sum_over_experts

    stage = STAGES[text]
    mine, group = part_of(job, axes, network), axes.group("data", job.node_memory and axes.expert == 1)
    whole, n, k = mine.parameters, group.count, job.moments
    experts, along = sum_over_experts(mine, axes, network)
    if stage == 2 and job.overlap and not group.in_memory(network):
        streams = Streams()
        for unit in reversed(units(job, mine.layers)):
            streams.compute(sum(layer.backward for layer in unit))
            streams.send(group.reduce_scatter(sum(layer.parameters for layer in unit), network))
        exchange = max(0.0, streams.sent - streams.now)
    else:
        exchange = group.reduce_scatter(whole, network)
    computation, update = mine.computation + job.loss(mine.samples), job.updating(whole) / n
    parts = {
        "computation": computation,
        "update": update,
        "gradients": exchange + experts,
        "parameters": group.allgather(whole, network),
        "activations": mine.sums,
    }
    parts |= {"experts": mine.routing} if axes.expert > 1 else {}
    memory = (2 + k / n, 1 + (1 + k) / n)[stage - 1] * whole + mine.saved
    computing = mine.workers * computation + axes.ranks * update
    return Prediction(text, axes, parts, computing, 2 * group.sent(whole) + along + mine.sent, memory)


def cost_of_fsdp(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """A unit is gathered before its F and its B, one ahead where it travels, and reduced after."""
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of, sum_over_experts

    mine, group = part_of(job, axes, network), axes.group("data", job.node_memory and axes.expert == 1)
    whole, n = mine.parameters, group.count
    experts, along = sum_over_experts(mine, axes, network)
    found = units(job, mine.layers)
    size = [sum(layer.parameters for layer in unit) for unit in found]
    there = 1 if group.in_memory(network) else 2  # units at once: one more where the next is gathered ahead
    streams = Streams(ahead=job.overlap and there > 1)
    for unit, nbytes in zip(found, size, strict=True):
        streams.gather_and_compute(group.allgather(nbytes, network), sum(layer.forward for layer in unit))
    for i, (unit, nbytes) in enumerate(zip(reversed(found), reversed(size), strict=True)):
        again = group.allgather(nbytes, network) if i >= there else 0.0  # the last ones still are
        streams.gather_and_compute(again, sum(layer.backward for layer in unit))
        streams.send(group.reduce_scatter(nbytes, network))
    computation, update = mine.computation + job.loss(mine.samples), job.updating(whole) / n
    parts = {
        "computation": computation,
        "update": update,
        "units": max(0.0, max(streams.now, streams.sent) - mine.computation),
        "activations": mine.sums,
    }
    parts |= {"gradients": experts, "experts": mine.routing} if axes.expert > 1 else {}
    memory = (2 + job.moments) * whole / n + 2 * max(size) + mine.saved
    computing = mine.workers * computation + axes.ranks * update
    sent = 3 * group.sent(whole) - group.sent(sum(size[-there:])) + along + mine.sent
    return Prediction("fsdp", axes, parts, computing, sent, memory)


class Streams:
    """Two streams of a rank: computation, and messages one after the other."""

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


SHARDED = Supports(
    axes=tuple(axis for axis in AXES if axis != "pipeline"),
    not_stages=NOT_STAGES,
    mixed=True,
    elastic=True,
    compress=STATELESS,
    not_compressed=NOT_COMPRESSED_IN_SHARDS,
    norms="no LARS, LAMB or clipping by norms",
)
ZERO1 = Strategy(
    name="zero1",
    title="ZeRO stage 1",
    sources=("Rajbhandari et al. 2020",),
    build=build,
    supports=replace(SHARDED, axes=tuple(AXES), not_stages=""),
    options=(ShardOptions,),
    public=("ZeRO1",),
    check=check,
    cost=cost,
    summary="the optimizer's state in shards",
    memory="8 Psi + 8 Psi/N",
    traffic="2 Psi",
)
ZERO2 = replace(
    ZERO1,
    name="zero2",
    title="ZeRO stage 2",
    supports=SHARDED,
    public=("ZeRO2",),
    whole=1,
    summary="and the gradients",
    memory="4 Psi + 12 Psi/N",
)
FSDP = replace(
    ZERO2,
    name="fsdp",
    aliases=("zero3",),
    title="Fully sharded data parallelism (ZeRO stage 3)",
    sources=("Rajbhandari et al. 2020", "Zhao et al. 2023"),
    options=(ShardOptions, PrefetchOptions),
    public=("FullyShardedDataParallel",),
    whole=0,
    cost=cost_of_fsdp,
    summary="and the parameters (ZeRO-3): gathered layer by layer, freed after use",
    memory="16 Psi/N",
    traffic="3 Psi",
)
