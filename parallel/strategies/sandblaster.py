"""Sandblaster: L-BFGS on many ranks, by a coordinator that holds no parameters.

Rank 0 runs the algorithm and sends commands of a few bytes (dot, axpy, copy, scale); parameters, gradients and the
history of L-BFGS lie in slices on shards, and are never all in one place; replicas compute gradients of small chunks of
the batch, a chunk whenever they are idle, so that a slow one does fewer of them and nobody waits for it. A step is a
direction and a line search along it, several evaluations of the whole batch.

Cost of an evaluation for n bytes of parameters, r replicas, s shards and c chunks: every replica pulls n, every chunk
pushes n, so (r + c) n / s at a shard; of an iteration beside that 4 m + 8 commands and 2 m + 6 answers, m the history.
Chunks are to be large enough that computing one takes longer than moving n bytes, and small enough that there are many
for each replica. Source: Dean et al. 2012, section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.settings import Keys, key
from parallel.strategies.declaration import LOCAL_UPDATE, Strategy
from parallel.strategies.parameter_server import ServerOptions

if TYPE_CHECKING:
    from nn.core.network import Network
    from nn.losses import Loss
    from parallel.sync.coordinator.quasi_newton import QuasiNewton
    from parallel.trainer import DistributedTrainer


@dataclass(frozen=True)
class SandblasterKeys(Keys):
    """What may stand behind --strategy sandblaster:."""

    name = "sandblaster"
    chunk: int = key(64, "samples of a chunk")
    history: int = key(10, "pairs of steps and gradient changes that L-BFGS keeps")


@answer_keywords
def Sandblaster(
    network: Network,
    loss: Loss,
    optimizer: QuasiNewton,
    communicator=None,
    seed: int = 0,
    servers: int = 1,
    place: str = "dedicated",
    *,
    chunk: int = 64,
    same_batch: bool | None = None,
    limit: float = 300.0,
) -> DistributedTrainer:
    """`Trainer` with L-BFGS, on a coordinator, replicas and shards; on one process all of them are there, too.

    `shard` is the whole batch on a replica, and nothing elsewhere. The sum of a gradient has the same bits for any
    number of replicas and shards; dot products depend on the number of shards, by rounding.

    Parameters
    ----------
    network, loss, communicator, seed
        As for DistributedDataParallel; without a communicator for one process.
    optimizer : QuasiNewton
    servers : int
        Shards, among which the parameters are cut, on bounds of 16 elements.
    place : {"dedicated", "workers"}
        Whether shards have ranks of their own, the last ones, or live on replicas.
    chunk : int
        Samples that a replica is given at once.
    same_batch : bool or None
        Whether all steps are given the same samples, in whatever order: then the loss and the gradient at the end of
        a step are those at the start of the next. Else every step begins with an evaluation of its batch. None: where
        an epoch is one step, if `set_epoch_steps` is called.
    limit : float
        Seconds that a rank waits for the others.

    Raises
    ------
    ValueError
        Another optimizer; a layer that is another function every time; shards that there are no ranks for.
    ReplicaError
        If ranks were given different networks, losses, optimizers or settings.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.Sandblaster(network, loss, parallel.QuasiNewton(), communicator, place="workers")
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.strategies.line_search import LineSearchTrainer

    more = {"chunk": chunk, "same_batch": same_batch, "limit": limit}
    return LineSearchTrainer(network, loss, optimizer, communicator, seed, servers, place, **more)


def check(options, ranks: int | None, network, optimizer) -> int:
    """Refuse roles that there are no ranks for, and networks that are not one function."""
    from parallel.strategies.line_search import refuse_changing
    from parallel.sync.coordinator.shards import assign_roles
    from parallel.sync.push_pull import server_slices

    assign_roles(max(1, ranks or 1), options.servers, options.server_place)
    server_slices(network.layout.size, options.servers)
    refuse_changing(network)
    return 1


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """L-BFGS, by a coordinator, shards and replicas; on one process, too."""
    arguments = network, loss, optimizer, communicator, options.seed, options.servers, options.server_place
    return Sandblaster(
        *arguments,
        chunk=SandblasterKeys.parse(options.strategy).chunk,
        same_batch=False if options.augment else None,
        limit=options.watch or math.inf,
    )


STRATEGY = Strategy(
    name="sandblaster",
    title="Sandblaster L-BFGS",
    sources=("Dean et al. 2012",),
    build=build,
    supports=replace(
        LOCAL_UPDATE,
        elastic=False,
        parts=False,
        not_parts="a batch is already divided into chunks; set their size by sandblaster:chunk=N",
        not_compressed="a line search needs exact gradients",
    ),
    options=(ServerOptions,),
    keys=SandblasterKeys,
    public=("Sandblaster",),
    check=check,
    serves=True,
    searches=True,
    summary="L-BFGS by a coordinator that holds no parameters; replicas compute gradients of chunks of the batch",
    memory="8 Psi for a replica; 8 (2 m + 4) Psi/N for a shard and m pairs",
    traffic="Psi for each evaluation and chunk",
)
