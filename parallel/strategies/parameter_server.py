"""Parameter servers: workers push gradients, servers update, workers pull parameters; all together, or each by itself.

The parameters are cut into slices, one for each server, on ranks that do nothing else (place "dedicated") or on the
workers themselves (place "workers"). A server holds its slice and the optimizer's moments for it; a worker holds a copy
of all parameters and no moments. Servers add in worker order: the sum has the same bits for any number of servers.

Cost of a step over one process's for n bytes, w workers and s servers, push and pull each:
dedicated      w n / s beta at every server: one server is the bottleneck, and as many servers as workers are none
on the workers max((w-1) n / s, n) beta: with s = w as much as a ring allreduce moves, 2 (p-1)/p n in all
and alpha for each pair of worker and server. A server has room for w segments of what arrives.

sync   servers add up the gradients of all workers, then update once: what one process computes
ssp:S  servers apply each worker's gradients when they come; no worker is more than S steps ahead of the slowest
async  no worker waits for another one

Sources: Smola and Narayanamurthy 2010; Dean et al. 2012; Ho et al. 2013; Li et al. 2014.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.settings import OptionError, option, refuse
from parallel.strategies import axes
from parallel.strategies.consistency import Consistency, ConsistencyOptions, check_local_updates
from parallel.strategies.declaration import LOCAL_UPDATE, PER_RANK_MESSAGES, REPLICA_AXES, Strategy, Supports
from parallel.strategies.pipeline.option import replica_sizes

if TYPE_CHECKING:
    from collectives.pricing.networks import Network as CostNetwork
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.mesh import Mesh
    from parallel.passes.forward_backward import ForwardBackward
    from parallel.planning.job import Axes, Job, Prediction
    from parallel.sync.compression.base import Compressor
    from parallel.sync.server_roles import ServerRoles
    from parallel.trainer import DistributedTrainer

CONSISTENCIES = ("sync", "ssp", "async")
NO_FACTORS = "powersgd: its factors are sums over all ranks; use --strategy ddp, or another method"
# Why there are no workers of several ranks beside servers.
NOT_ON_WORKERS = "a server on a worker does not answer while its rank waits for the other ranks of the worker"
NOT_ELASTIC = "after a loss the remaining ranks become servers, and workers of one rank each"
NOT_SYNC = "synchronous push and pull are schedules of whole vectors, and these ranks have parts of them"


@dataclass(frozen=True)
class ServerOptions:
    """How many servers, and where."""

    servers: int = option(1, "number of servers, among which the parameters are divided")
    server_place: str = option(
        "dedicated", "whether servers have ranks of their own, or run on workers", ("dedicated", "workers")
    )


@dataclass(frozen=True)
class CompensationOptions:
    """What is done about late gradients."""

    delay_compensation: bool = option(
        False, "with ssp or async: correct gradients for updates made since they were computed (DC-ASGD)", planned=True
    )


@answer_keywords
def ParameterServer(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    servers: int = 1,
    place: str = "dedicated",
    *,
    compressor: Compressor | None = None,
    shards: int = 0,
    consistency: str = "sync",
    delay_compensation: bool = False,
    limit: float = 300.0,
    pipeline: int = 1,
    tensor: int = 1,
    way: str = "pairs",
    **schedule,
) -> DistributedTrainer:
    """`Trainer` on many ranks with parameter servers.

    `shard` is a worker's part of every batch; a rank that only serves has index None, and no samples.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    servers : int
        Among which the parameters are cut, on bounds of 16 elements.
    place : {"dedicated", "workers"}
        Whether servers have ranks of their own, the last ones, or live on workers.
    compressor : Compressor or None
        Of what is pushed; not attached yet, one with messages of single ranks.
    shards : int
        The same bits on any number of ranks: into how many virtual shards every batch is cut; 0 for none.
    consistency : str
        "sync", "ssp:S" or "async"; see consistency.py.
    delay_compensation : bool
        Not synchronous: correct gradients for what has changed since they were computed (DC-ASGD).
    limit : float
        Not synchronous: seconds after which a rank gives up to which nothing comes.
    pipeline, tensor, way, **schedule
        Not synchronous: as for Downpour, whose replicas are workers here.

    Raises
    ------
    ValueError
        Servers that there are no ranks or no parameters for; a method of compression that has no such messages, not
        for so many servers, or cannot work with this optimizer. With virtual shards: more workers than shards,
        synchronised statistics. With these, or not synchronous, on several servers: LARS, LAMB or clipping by norms.
        A consistency that is none, compensation where nothing is delayed; not synchronous: virtual shards,
        statistics over all ranks. Workers of several ranks: synchronous, beside servers on workers; ranks, layers or
        stages that cannot be dealt out so; a schedule that is never flushed.
    ReplicaError
        If ranks were given different networks, losses, optimizers, servers or methods.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.ParameterServer(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import agree
    from parallel.passes.virtual_shards import VirtualShards
    from parallel.sync.asynchronous.served import Asynchronous
    from parallel.sync.served import Served
    from parallel.trainer import DistributedTrainer

    facts = f"{servers} on {place}, {consistency}{', compensated' * delay_compensation}"
    agree(communicator, {"parameter servers": facts, "number of virtual shards": shards})
    arguments = communicator.size, servers, place, compressor
    how = Consistency.parse(consistency, "ps", CONSISTENCIES)
    if how.name == "sync":
        refuse(delay_compensation, "delay compensation: synchronous gradients have no delay")
        ranks = pipeline * tensor
        refuse(ranks > 1, f"workers of {ranks} ranks: {NOT_SYNC}: use consistency 'async', or 'ssp:S'")
        sync = Served(*arguments)
    else:
        check_local_updates(network, shards)
        more = {"compensate": delay_compensation, "limit": limit}
        sync = Asynchronous(*arguments, bound=how.bound, ahead=how.ahead, **more)
    mesh, forward_backward = served_mesh(communicator, sync, loss, pipeline, tensor, way=way, limit=limit, **schedule)
    forward_backward = VirtualShards(shards) if shards else forward_backward
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, "ParameterServer")


def served_mesh(
    communicator, sync: ServerRoles, loss: Loss, pipeline: int, tensor: int, **how
) -> tuple[Mesh, ForwardBackward]:
    """Who computes beside servers, and how: workers of one rank, or of several that have a network together."""
    from parallel.mesh import Mesh
    from parallel.strategies.replica_pass import replica_pass

    ranks = pipeline * tensor
    refuse(
        ranks > 1 and sync.place != "dedicated", f"workers of {ranks} ranks: {NOT_ON_WORKERS}: use place 'dedicated'"
    )
    forward_backward = replica_pass(loss, pipeline, tensor, **how)
    return Mesh(communicator, sync.workers, pipeline=pipeline, tensor=tensor), forward_backward


def check_options(options) -> None:
    """Refuse compensation where nothing is late, and workers of several ranks where there are none."""
    if options.delay_compensation and not options.late:
        raise OptionError("--delay-compensation: with --consistency sync nothing is late: use ssp:S or async")
    if not options.late and (axes.is_tensor(options) or axes.is_pipeline(options)):
        raise OptionError(f"{axes.shown(options)} with --strategy ps: {NOT_SYNC}: use --consistency async, or ssp:S")
    check_workers(options)


def check_workers(options) -> None:
    """Refuse workers of several ranks with what they do not go."""
    if not (axes.is_pipeline(options) or axes.is_tensor(options)):
        return
    if options.server_place != "dedicated":
        raise OptionError(
            f"{axes.shown(options)} cannot be combined with --server-place {options.server_place}: "
            f"{NOT_ON_WORKERS}: use --server-place dedicated"
        )
    if options.elastic:
        raise OptionError(
            f"--elastic cannot be combined with {axes.shown(options)} beside servers: "
            f"{NOT_ELASTIC}: leave one of them out"
        )


def check(options, ranks: int | None, network, optimizer) -> int | None:
    """Refuse servers that there are no ranks or no parameters for, and norms of slices; returns the workers."""
    from parallel.passes import virtual_shards
    from parallel.sync import compression
    from parallel.sync.push_pull import roles, server_slices

    if options.compress:
        compression.parse(options.compress).check_messages(options.servers)
    if not ranks:
        return None
    workers, servers = roles(ranks, options.servers, options.server_place)
    server_slices(network.layout.size + network.buffer_layout.size, len(servers))
    if len(servers) > 1 and (options.late or options.reproducible or axes.supported(options).local_update):
        virtual_shards.refuse_norms(optimizer)
    return len(workers)


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Workers and parameter servers."""
    from parallel.sync import compression

    return ParameterServer(
        network,
        loss,
        optimizer,
        communicator,
        options.seed,
        options.servers,
        options.server_place,
        compressor=compression.parse(options.compress) if options.compress else None,
        shards=options.reproducible or 0,
        consistency=options.consistency,
        delay_compensation=options.delay_compensation,
        limit=options.watch or math.inf,
        **replica_sizes(options, communicator.size),
    )


def cost(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """Workers push gradients and pull parameters; servers, on ranks of their own, sum and update their slice."""
    from parallel.planning.group_costs import Group, message
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of
    from parallel.planning.topology_costs import server_seconds

    workers = axes.ranks - servers
    if not 1 <= servers < axes.ranks:
        raise ValueError(f"ps: {servers} servers leave no worker of {axes.ranks} ranks: use 1 to {axes.ranks - 1}")
    mine, group, piece = part_of(job, axes, network, workers), Group(axes.ranks), job.parameters / servers
    far = group.nodes(network) > 1
    if network.topology and far:
        push, pull = server_seconds(servers, piece, network)
    else:
        link = network.between if far else network.inside
        crowd = min(servers, network.ranks_per_node) if far else 1  # servers that share a node's port
        push = pull = max(message(link, piece, workers * crowd), message(link, piece, servers))
    computation = mine.computation + job.loss(mine.samples)
    parts = {
        "computation": computation,
        "push": push + workers * network.reducing(piece),
        "update": job.update / servers,
        "pull": pull,
    }
    memory = max(2 * job.parameters + mine.saved, (2 + job.moments + workers) * piece)
    computing = mine.workers * computation + servers * parts["update"]
    return Prediction("ps", axes, parts, computing, max(job.parameters, workers * piece), memory)


SERVED_LOCAL_UPDATE = replace(LOCAL_UPDATE, axes=REPLICA_AXES, compress=PER_RANK_MESSAGES, not_compressed=NO_FACTORS)
STRATEGY = Strategy(
    name="ps",
    title="Parameter servers",
    sources=("Smola and Narayanamurthy 2010", "Ho et al. 2013", "Li et al. 2014"),
    build=build,
    supports=Supports(
        mixed=True,
        elastic=True,
        compress=PER_RANK_MESSAGES,
        not_compressed=NO_FACTORS,
        norms="on several servers no LARS, LAMB or clipping by norms",
    ),
    options=(ConsistencyOptions, CompensationOptions, ServerOptions),
    consistencies=CONSISTENCIES,
    late=SERVED_LOCAL_UPDATE,
    late_values="ssp:S, async",
    public=("ParameterServer",),
    check_options=check_options,
    check=check,
    cost=cost,
    serves=True,
    summary="one or several parameter servers (`--servers`), on ranks of their own or on workers",
    memory="8 Psi for a worker",
    traffic="2 Psi for a worker, 2 Psi times the workers over the servers for a server",
)
