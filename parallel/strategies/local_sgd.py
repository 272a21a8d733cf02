"""Local-update replicas without a server: local SGD, DiLoCo, EASGD. See sync/replicas.py.

What they cost in accuracy for what they save in messages: scripts/experiments/asynchronous.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.settings import Keys, key
from parallel.strategies.consistency import check_local_updates
from parallel.strategies.declaration import LOCAL_UPDATE, REPLICA_AXES, Strategy
from parallel.strategies.pipeline.option import replica_sizes

if TYPE_CHECKING:
    from collectives.pricing.networks import Network as CostNetwork
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.planning.job import Axes, Job, Prediction
    from parallel.sync.replicas import Replicas
    from parallel.trainer import DistributedTrainer


@dataclass(frozen=True)
class LocalSGDKeys(Keys):
    """What may stand behind --strategy local-sgd:."""

    name = "local-sgd"
    every: int = key(8, "steps between averages")
    drift: float = key(
        0.0, "also average where a replica is further from the last average, relatively; 0: never", least=0
    )


@dataclass(frozen=True)
class DiLoCoKeys(Keys):
    """What may stand behind --strategy diloco:."""

    name = "diloco"
    every: int = key(500, "inner steps of a round")
    outer: float = key(0.7, "learning rate of the outer optimizer", least=0)
    momentum: float = key(0.9, "momentum of the outer optimizer", least=0, most=1)
    nesterov: bool = key(True, "whether the momentum is Nesterov's")


@dataclass(frozen=True)
class EASGDKeys(Keys):
    """What may stand behind --strategy easgd:."""

    name = "easgd"
    every: int = key(10, "steps between averages with the centre")
    alpha: float = key(0.0, "how far replica and centre move towards each other; 0: 0.9 / ranks", least=0, most=1)


@answer_keywords
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
        They also average when one is farther from the last average than `drift` times its norm; 0 for never.
    pipeline, tensor, **how
        As for Downpour, with its way, limit and schedule: so many neighbouring ranks are one replica, and each
        averages with those that have the same of it.

    Raises
    ------
    ValueError
        Less than a step, a drift below 0, or statistics over all ranks; ranks, layers or stages that cannot be dealt
        out so; a schedule that is never flushed.
    ReplicaError
        If ranks were given different networks, losses, optimizers or settings.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.LocalSGD(network, loss, optimizer, communicator, every=2)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.sync.replicas import Averaged

    keys = LocalSGDKeys(every, drift)
    parts = network, loss, optimizer, communicator, seed
    return _replicas("LocalSGD", *parts, Averaged(every, drift), keys, pipeline, tensor, **how)


@answer_keywords
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

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.DiLoCo(network, loss, optimizer, communicator, every=2)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from nn.optim.optimizers import SGD
    from parallel.sync.replicas import Outer

    keys = DiLoCoKeys(every, outer, momentum, nesterov)
    sync = Outer(every, SGD(outer, momentum, nesterov=nesterov and bool(momentum)))
    return _replicas("DiLoCo", network, loss, optimizer, communicator, seed, sync, keys, pipeline, tensor, **how)


@answer_keywords
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
        Steps between averages.
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

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.EASGD(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.sync.replicas import Elastic

    keys, sync = EASGDKeys(every, alpha), Elastic(every, alpha)
    return _replicas("EASGD", network, loss, optimizer, communicator, seed, sync, keys, pipeline, tensor, **how)


def _replicas(
    name: str,
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int,
    sync: Replicas,
    keys: Keys,
    pipeline: int = 1,
    tensor: int = 1,
    **how,
) -> DistributedTrainer:
    from parallel.mesh import Mesh
    from parallel.strategies.replica_pass import replica_pass
    from parallel.trainer import DistributedTrainer

    check_local_updates(network)
    forward_backward = replica_pass(loss, pipeline, tensor, **how)
    mesh = Mesh(communicator, pipeline=pipeline, tensor=tensor)
    mesh.agree({"how replicas average": repr(keys)})
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, name)


KEYS = {keys.name: keys for keys in (LocalSGDKeys, DiLoCoKeys, EASGDKeys)}
COPIES = {"local-sgd": 0, "diloco": 2, "easgd": 1}  # of all parameters, beside a replica's own


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Replicas that average now and then, by the name of the strategy."""
    make = {"local-sgd": LocalSGD, "diloco": DiLoCo, "easgd": EASGD}[options.strategy_name]
    keys = KEYS[options.strategy_name]
    several = replica_sizes(options, communicator.size)
    limit = {"limit": options.watch or math.inf} if several else {}
    arguments = network, loss, optimizer, communicator, options.seed
    return make(*arguments, **vars(keys.parse(options.strategy)), **several, **limit)


def cost(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """F, B, U of a rank, and every so many steps the mean of all; nobody waits for the slowest in between.

    Of parameters a rank keeps 2 + k, DiLoCo two and EASGD one more, for k moments.
    """
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of

    keys = KEYS[text.partition(":")[0]].parse(text)
    mine, group, copies = part_of(job, axes, network), axes.group("data", job.node_memory), COPIES[keys.name]
    computation = mine.computation + job.loss(mine.samples)
    moved = network.copying((1 + copies) * job.parameters) if copies else 0.0  # what is moved, and what it moves to
    averaging = group.allreduce(job.parameters, network) + moved
    parts = {"computation": computation, "update": job.update, "averaging": averaging / keys.every}
    memory = (2 + job.moments + copies) * job.parameters + mine.saved
    computing = mine.workers * (computation + job.update)
    return Prediction(text, axes, parts, computing, 2 * group.sent(job.parameters) / keys.every, memory)


LOCAL_SGD = Strategy(
    name="local-sgd",
    title="Local SGD",
    sources=("Stich 2019", "Kamp et al. 2018 (by drift)"),
    build=build,
    supports=replace(LOCAL_UPDATE, axes=REPLICA_AXES, not_compressed="replicas average parameters, not gradients"),
    keys=LocalSGDKeys,
    public=("LocalSGD",),
    cost=cost,
    summary="replicas average their parameters every `every` steps",
    memory="16 Psi",
    traffic="2 Psi a round",
)
DILOCO = replace(
    LOCAL_SGD,
    name="diloco",
    title="DiLoCo",
    sources=("Douillard et al. 2023",),
    keys=DiLoCoKeys,
    public=("DiLoCo",),
    summary="rounds of inner steps, then a step of an outer optimizer along the mean difference",
    memory="24 Psi",
)
ELASTIC_AVERAGING = replace(
    LOCAL_SGD,
    name="easgd",
    title="Elastic averaging SGD",
    sources=("Zhang et al. 2015",),
    keys=EASGDKeys,
    public=("EASGD",),
    summary="replicas and a centre move towards each other every `every` steps",
    memory="20 Psi",
)
