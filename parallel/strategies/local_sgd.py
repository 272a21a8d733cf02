"""Replicas that train apart, without a server: local SGD, DiLoCo, EASGD. See exchange/replicas.py.

What they cost in accuracy for what they save in messages: scripts/experiments/asynchronous.py.
"""

from __future__ import annotations

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import SGD, Optimizer
from parallel.exchange.replicas import Averaged, Elastic, Outer, Replicas
from parallel.mesh import Mesh
from parallel.strategies import settings
from parallel.strategies.replica_pass import replica_pass
from parallel.trainer import DistributedTrainer


def LocalSGD(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    every: int = 8,
    drift: float = 0.0,
    *,
    pipeline: int = 1,
    tensor: int = 1,
    **how,
) -> DistributedTrainer:
    """Replicas that take their mean every so many steps; each step, with any optimizer but LARS and LAMB, is data
    parallelism's where that is 1 and the optimizer SGD.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    every : int
        Steps between averages.
    drift : float
        They also meet when one is farther from the last average than so many times its norm; 0 for never.
    pipeline, tensor, **how
        As for Downpour, with its way, limit and schedule: so many neighbouring ranks are one replica, and each meets
        those that have the same of it.

    Raises
    ------
    ValueError
        Less than a step, a drift below 0, or statistics over all ranks; ranks, layers or stages that cannot be dealt
        out so; a schedule that is never flushed.
    ReplicaError
        If ranks were given different networks, losses, optimizers or settings.
    """
    found = settings.LocalSGD(every, drift)
    parts = network, loss, optimizer, communicator, seed
    return _replicas("LocalSGD", *parts, Averaged(every, drift), found, pipeline, tensor, **how)


def DiLoCo(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    every: int = 500,
    outer: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    *,
    pipeline: int = 1,
    tensor: int = 1,
    **how,
) -> DistributedTrainer:
    """Rounds of inner steps, then a step of an outer SGD along the mean difference.

    Parameters
    ----------
    network, loss, communicator, seed
        As for DistributedDataParallel.
    optimizer : Optimizer
        The inner one; AdamW in the paper.
    every : int
        Inner steps of a round.
    outer, momentum, nesterov
        Of the outer optimizer; without momentum there is no Nesterov's.
    pipeline, tensor, **how
        As for LocalSGD.

    Raises
    ------
    ValueError, ReplicaError
        As for LocalSGD.
    """
    found = settings.DiLoCo(every, outer, momentum, nesterov)
    exchange = Outer(every, SGD(outer, momentum, nesterov and bool(momentum)))
    return _replicas("DiLoCo", network, loss, optimizer, communicator, seed, exchange, found, pipeline, tensor, **how)


def EASGD(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    every: int = 10,
    alpha: float = 0.0,
    *,
    pipeline: int = 1,
    tensor: int = 1,
    **how,
) -> DistributedTrainer:
    """Replicas and a centre that move towards each other every so many steps; the centre is what is evaluated and kept.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    every : int
        Steps between meetings.
    alpha : float
        How far of the way; 0 for 0.9 / replicas.
    pipeline, tensor, **how
        As for LocalSGD.

    Raises
    ------
    ValueError
        As for LocalSGD; replicas and centre that would overshoot each other.
    ReplicaError
        As for LocalSGD.
    """
    found, exchange = settings.EASGD(every, alpha), Elastic(every, alpha)
    return _replicas("EASGD", network, loss, optimizer, communicator, seed, exchange, found, pipeline, tensor, **how)


def _replicas(
    name: str,
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int,
    exchange: Replicas,
    found: settings.Keyed,
    pipeline: int = 1,
    tensor: int = 1,
    **how,
) -> DistributedTrainer:
    settings.check_apart(network)
    pass_ = replica_pass(loss, pipeline, tensor, **how)
    mesh = Mesh(communicator, pipeline=pipeline, tensor=tensor)
    mesh.agree({"how replicas meet": repr(found)})
    return DistributedTrainer(network, loss, optimizer, mesh, pass_, exchange, seed, name)
