"""Downpour SGD: replicas, each with its own part of the samples, and a sharded server that nobody waits for.

A replica reads the parameters every `fetch` steps, moves its copy by its own gradients in between, and every `push`
steps sends what it has gathered. The servers apply each push once, with the optimizer: with Adagrad every parameter has
a rate of its own, which keeps it stable. See exchange/asynchronous/served.py.

    w -= lr g, gathered += g                  a replica's step
    G += d^2;  w -= lr d / sqrt(G)            a server, with what was pushed

Gradients are divided by the global batch, as everywhere: the pushes of all replicas for one batch together are one step
of data parallelism. A warm start makes the first steps in step, all replicas at the same parameters (in the paper one
replica trains at first; here all share its batch, so every sample of the epoch is trained). Source: Dean et al. 2012.
"""

from __future__ import annotations

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.exchange.asynchronous.served import LIMIT, Asynchronous
from parallel.exchange.compression.base import Compressor
from parallel.strategies import settings
from parallel.strategies.parameter_server import served_mesh
from parallel.trainer import DistributedTrainer


def Downpour(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    servers: int = 1,
    place: str = "own",
    *,
    push: int = 1,
    fetch: int = 1,
    ahead: bool = False,
    warm: int = 0,
    compressor: Compressor | None = None,
    limit: float = LIMIT,
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
    """
    found = settings.Downpour(push, fetch, ahead, warm)
    settings.check_apart(network)
    how = {"push_every": push, "fetch_every": fetch, "ahead": ahead, "warm": warm, "local": True, "limit": limit}
    exchange = Asynchronous(communicator.size, servers, place, compressor, **how)
    mesh, pass_ = served_mesh(communicator, exchange, loss, pipeline, tensor, way=way, limit=limit, **schedule)
    mesh.agree({"Downpour": f"{servers} on {place}, {found!r}"})
    return DistributedTrainer(network, loss, optimizer, mesh, pass_, exchange, seed, "Downpour")
