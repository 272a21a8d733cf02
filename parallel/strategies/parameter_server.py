"""Parameter servers, synchronous: workers push gradients, servers add them up and update, workers pull parameters.

The parameters are cut into slices, one for each server, on ranks that do nothing else (place "own") or on the workers
themselves (place "workers"). A server holds its slice and the optimizer's moments for it; a worker holds a copy of all
parameters and no moments. Servers add in worker order, so the sum has the same bits for any number of servers.

Cost of a step over one process's for n bytes, w workers and s servers, push and pull each:
own ranks      w n / s beta at every server: one server is the bottleneck, and as many servers as workers are none
on the workers max((w-1) n / s, n) beta: with s = w as much as a ring allreduce moves, 2 (p-1)/p n in all
and alpha for each pair of worker and server. A server has room for w segments of what arrives.
Sources: Smola and Narayanamurthy 2010; Dean et al. 2012; Li et al. 2014.
"""

from __future__ import annotations

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.exchange.compression.base import Compressor
from parallel.exchange.served import Served
from parallel.mesh import Mesh, agree
from parallel.passes.virtual_shards import VirtualShards
from parallel.passes.whole import Whole
from parallel.trainer import Trainer


def ParameterServer(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    servers: int = 1,
    place: str = "own",
    *,
    compressor: Compressor | None = None,
    shards: int = 0,
) -> Trainer:
    """`Serial` on many ranks with synchronous parameter servers.

    `shard` is a worker's part of every batch; a rank that only serves has index None, and no samples.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    servers : int
        Among which the parameters are cut, on bounds of 16 elements.
    place : {"own", "workers"}
        Whether servers have ranks of their own, the last ones, or live on workers.
    compressor : Compressor or None
        Of what is pushed; not attached yet, one with messages of single ranks.
    shards : int
        The same bits on any number of ranks: into how many virtual shards every batch is cut; 0 for none.

    Raises
    ------
    ValueError
        Servers that there are no ranks or no parameters for; a method of compression that has no such messages, not
        for so many servers, or cannot work with this optimizer. With virtual shards: more workers than shards,
        synchronised statistics, on several servers LARS, LAMB or clipping by norms.
    ReplicaError
        If ranks were given different networks, losses, optimizers, servers or methods.
    """
    agree(communicator, {"parameter servers": f"{servers} on {place}"})
    exchange = Served(communicator.size, servers, place, compressor)
    pass_ = VirtualShards(shards) if shards else Whole()
    name = f"{'Compressed' * bool(compressor)}{'Reproducible' * bool(shards)}ParameterServer"
    return Trainer(network, loss, optimizer, Mesh(communicator, exchange.workers), pass_, exchange, seed, name)


def CompressedParameterServer(*arguments, compressor: Compressor, **options) -> Trainer:
    """`ParameterServer` with compressed gradients."""
    return ParameterServer(*arguments, compressor=compressor, **options)


def ReproducibleParameterServer(*arguments, shards: int = 8, **options) -> Trainer:
    """`ParameterServer`, the same bits on any number of ranks."""
    return ParameterServer(*arguments, shards=shards, **options)
