"""Downpour SGD: replicas, each with its own part of the samples, and a sharded server that nobody waits for.

A replica reads the parameters every `fetch` steps, moves its copy by its own gradients in between, and every `push`
steps sends what it has gathered. The servers apply each push once, with the optimizer: with Adagrad every parameter has
a rate of its own, which keeps it stable. See sync/asynchronous/served.py.

    w -= lr g, gathered += g                  a replica's step
    G += d^2;  w -= lr d / sqrt(G)            a server, with what was pushed

Gradients are divided by the global batch, as everywhere: the pushes of all replicas for one batch together are one step
of data parallelism. A warm start makes the first steps in step, all replicas at the same parameters (in the paper one
replica trains at first; here all share its batch, so every sample of the epoch is trained). Source: Dean et al. 2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.settings import Keys, key
from parallel.strategies.consistency import check_local_updates
from parallel.strategies.declaration import Strategy
from parallel.strategies.parameter_server import SERVED_LOCAL_UPDATE, ServerOptions, check, check_workers, served_mesh
from parallel.strategies.pipeline.option import replica_sizes

if TYPE_CHECKING:
    from collectives.pricing.networks import Network as CostNetwork
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.planning.job import Axes, Job, Prediction
    from parallel.sync.compression.base import Compressor
    from parallel.trainer import DistributedTrainer


@dataclass(frozen=True)
class DownpourKeys(Keys):
    """What may stand behind --strategy downpour:."""

    name = "downpour"
    push: int = key(1, "steps between pushes")
    fetch: int = key(1, "steps between reads")
    ahead: bool = key(False, "whether parameters are read while the next steps compute")
    warm: int = key(0, "number of first steps that are synchronous", least=0)


@answer_keywords
def Downpour(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    servers: int = 1,
    place: str = "dedicated",
    *,
    push: int = 1,
    fetch: int = 1,
    ahead: bool = False,
    warm: int = 0,
    compressor: Compressor | None = None,
    limit: float = 300.0,
    pipeline: int = 1,
    tensor: int = 1,
    way: str = "pairs",
    **schedule,
) -> DistributedTrainer:
    """`Trainer` on many ranks, asynchronously.

    Parameters
    ----------
    network, loss, communicator, seed, servers, place, compressor, limit
        As for ParameterServer.
    optimizer : Optimizer
        The servers'; Adagrad in the paper.
    push, fetch : int
        Steps between pushes, and between reads.
    ahead : bool
        Parameters come while the next steps compute.
    warm : int
        So many steps are made at first in which no replica is ahead of another.
    pipeline, tensor, way, **schedule
        So many neighbouring ranks, their product, are one replica: a pipeline of so many stages (as for Pipeline:
        schedule, micro_batches, cuts, recompute, and the schedule's own), whose layers so many compute together (as
        for TensorParallel). Servers, on ranks of their own, know the first of them.

    Raises
    ------
    ValueError
        Servers that there are no ranks or no parameters for; steps below 1; statistics over all ranks; a method of
        compression that has no messages of single ranks. Replicas of several ranks beside servers on workers; ranks,
        layers or stages that cannot be dealt out so; a schedule that is never flushed.
    ReplicaError
        If ranks were given different networks, losses, optimizers or settings.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.Downpour(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.sync.asynchronous.served import Asynchronous
    from parallel.trainer import DistributedTrainer

    keys = DownpourKeys(push, fetch, ahead, warm)
    check_local_updates(network)
    how = {"push_every": push, "fetch_every": fetch, "ahead": ahead, "warm": warm, "local": True, "limit": limit}
    sync = Asynchronous(communicator.size, servers, place, compressor, **how)
    mesh, forward_backward = served_mesh(communicator, sync, loss, pipeline, tensor, way=way, limit=limit, **schedule)
    mesh.agree({"Downpour": f"{servers} on {place}, {keys!r}"})
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, "Downpour")


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Replicas and servers, each at a step of its own."""
    from parallel.sync import compression

    arguments = network, loss, optimizer, communicator, options.seed, options.servers, options.server_place
    keys = vars(DownpourKeys.parse(options.strategy)) | replica_sizes(options, communicator.size)
    compressor = compression.parse(options.compress) if options.compress else None
    return Downpour(*arguments, **keys, compressor=compressor, limit=options.watch or math.inf)


def cost(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """Workers push and fetch now and then; servers update with what comes, one after the other.

    A server takes each worker's push by itself; where that takes longer than the workers' steps, it sets the pace.
    """
    from parallel.planning.group_costs import Group, message
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of
    from parallel.planning.topology_costs import server_seconds

    keys, workers = DownpourKeys.parse(text), axes.ranks - servers
    if not 1 <= servers < axes.ranks:
        raise ValueError(f"{text}: {servers} servers leave no worker of {axes.ranks} ranks: use 1 to {axes.ranks - 1}")
    mine, piece = part_of(job, axes, network, workers), job.parameters / servers
    far = Group(axes.ranks).nodes(network) > 1
    link = network.between if far else network.inside
    computation = mine.computation + job.loss(mine.samples)
    often = 1 / keys.push + 1 / keys.fetch
    own = {"computation": computation, "update": job.update, "push, fetch": often * message(link, piece, servers)}
    moving = workers * often * link.cost(piece).held  # of a server, or of the channels to it, for a step of all
    if network.topology and far:
        push, pull = server_seconds(servers, piece, network)
        moving = push / keys.push + pull / keys.fetch
    busy = moving + workers * job.update / servers / keys.push
    parts = own | {"servers": max(0.0, busy - sum(own.values()))}
    memory = max(2 * job.parameters + mine.saved, (1 + job.moments + workers) * piece)
    computing = mine.workers * (computation + job.update) + workers * job.update / keys.push
    sent = max(job.parameters / keys.push, workers * piece / keys.fetch)
    return Prediction(text, axes, parts, computing, sent, memory)


STRATEGY = Strategy(
    name="downpour",
    title="Downpour SGD",
    sources=("Dean et al. 2012",),
    build=build,
    supports=SERVED_LOCAL_UPDATE,
    options=(ServerOptions,),
    keys=DownpourKeys,
    public=("Downpour",),
    check_options=check_workers,
    check=check,
    cost=cost,
    serves=True,
    summary="replicas push to servers, and read from them, without waiting for each other",
    memory="8 Psi for a worker",
    traffic="2 Psi for a worker, at pushes and reads",
)
