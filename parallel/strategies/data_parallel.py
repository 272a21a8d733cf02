"""Data parallelism: every rank holds the whole network and takes its part of every batch.

The gradients of all ranks are summed and every parameter is updated once with the sum, so a step computes what one
process computes with the whole batch, up to rounding. How they are summed:

sync/node_memory.py  in the memory that the ranks of a node share, on one or several nodes: where it is possible
sync/messages.py     by messages that travel while backprop goes on: for one rank a node, or unlike numbers
sync/compression/    by messages that are shorter, at the price of noise or delay
sync/stale.py        by messages that travel while the next steps compute, and applied some steps late
sync/fixed_tree.py   in one fixed tree of virtual shards: the same bits on any number of ranks

Cost of a step over one process's: see there. Source: Li et al. 2020 (PyTorch DistributedDataParallel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from collectives.failures.launch_check import nodes_of
from parallel.axis import AXES
from parallel.guesses import answer_keywords
from parallel.settings import OptionError, changed, flag, option, refuse
from parallel.strategies import axes
from parallel.strategies.consistency import Consistency, ConsistencyOptions, check_local_updates
from parallel.strategies.declaration import LOCAL_UPDATE, NODE_MEMORY, Strategy, Supports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectives.pricing.networks import Network as CostNetwork
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.planning.group_costs import Group
    from parallel.planning.job import Axes, Job, Prediction
    from parallel.planning.profile import LayerProfile
    from parallel.sync.compression.base import Compressor
    from parallel.trainer import DistributedTrainer

CONSISTENCIES = ("sync", "stale")


@dataclass(frozen=True)
class NodeMemoryOptions:
    """Whether gradients are summed in shared memory."""

    node_memory: str = option(
        "auto", "sum gradients in the memory that ranks of a node share (auto: unless an option of messages is given)",
        NODE_MEMORY,
    )  # fmt: skip


@dataclass(frozen=True)
class MessageOptions:
    """How messages sum gradients, are cut, and move."""

    allreduce: str = option("auto", "algorithm that sums gradients: auto, ring, doubling, ..., native")
    overlap: str = option(
        "auto", "what advances messages during backprop (auto: none, unless another is measured to be faster)",
        ("auto", "thread", "poke", "none"),
    )  # fmt: skip
    bucket: float = option(25.0, "MiB of gradients in a message", metavar="MIB", above=0)
    first_bucket: float = option(1.0, "MiB of gradients in the first message", metavar="MIB", above=0)


@answer_keywords
def DistributedDataParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator=None,
    seed: int = 0,
    *,
    node_memory: str = "auto",
    overlap: str = "auto",
    bucket: float = 25.0,
    first_bucket: float = 1.0,
    limit: float = 300.0,
    survives: bool = False,
    compressor: Compressor | None = None,
    shards: int = 0,
) -> DistributedTrainer:
    """`Trainer` on many ranks; one line of a program differs.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks.
    communicator : collectives.Communicator or MPI.Intracomm
        Its ranks share every global batch. One of mpi4py's is wrapped.
    node_memory : {"auto", "on", "off"}
        Sum gradients in the memory that the ranks of a node share; auto: where all nodes have equally many ranks, and
        more than one.
    overlap : {"auto", "thread", "poke", "none"}
        What moves messages while backprop goes on; see sync/messages.py. auto: none where all ranks share a node,
        and cores.
    bucket, first_bucket : float
        MiB of gradients that make a message, and the first one.
    limit : float
        Seconds after which a rank gives up that waits for others in shared memory.
    survives : bool
        In shared memory, keep what an update overwrites: where a rank dies in it, the others have what was before it.
    compressor : Compressor or None
        Fewer bytes: gradients are the sum of what each rank's message stands for, with the same bits on all ranks. Not
        attached yet.
    shards : int
        The same bits on any number of ranks: into how many virtual shards every batch is cut, at least as many as
        ranks (passes/virtual_shards.py); 0 for none. Powers of two move least bytes. `communicator` may be None, for
        one process.

    Raises
    ------
    TypeError
        One process, without `shards`.
    ValueError
        node_memory="on" where it is not possible; the message says why. Buckets or an overlap that cannot be. A method
        of compression that cannot work with this optimizer, or beside virtual shards. With these: more ranks than
        shards, synchronised statistics.
    OSError
        Too little memory that ranks of a node can share.
    ReplicaError
        If ranks were given different networks, losses, optimizers or other arguments.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import nn, parallel
    >>> from collectives import Communicator
    >>> communicator = Communicator(MPI.COMM_WORLD)
    >>> network = nn.Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (4,))
    >>> loss, optimizer = nn.CrossEntropyLoss(), nn.SGD(lr=0.1)
    >>> x, y = np.eye(4), np.array([0, 1, 0, 1])
    >>> trainer = parallel.DistributedDataParallel(network, loss, optimizer, communicator)
    >>> training = nn.fit(trainer, (x, y), epochs=2, batch=4)
    >>> len(training.history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.passes.forward_backward import ForwardBackward
    from parallel.passes.virtual_shards import VirtualShards
    from parallel.strategies.gradient_sync import gradient_sync
    from parallel.trainer import DistributedTrainer

    how = {"node_memory": node_memory, "overlap": overlap, "bucket": bucket, "first_bucket": first_bucket}
    mesh, forward_backward = Mesh(communicator), VirtualShards(shards) if shards else ForwardBackward()
    sync = gradient_sync(mesh, 0, compressor, shards, **how, limit=limit, survives=survives)
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, "DistributedDataParallel")


@answer_keywords
def StaleDataParallel(
    network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0, *, delay: int = 1, **options
) -> DistributedTrainer:
    """Data parallelism whose sums of gradients are applied some steps late, while the next steps compute.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel.
    delay : int
        Steps; 0 is DistributedDataParallel, which takes the other options.

    Raises
    ------
    ValueError
        A delay below 0; statistics over all ranks; options of DistributedDataParallel where there is a delay.
    ReplicaError
        If ranks were given different networks, losses, optimizers or delays.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.StaleDataParallel(network, loss, optimizer, communicator, delay=1)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from nn.arguments import COUNT
    from parallel.mesh import Mesh
    from parallel.passes.forward_backward import ForwardBackward
    from parallel.sync.stale import Stale
    from parallel.trainer import DistributedTrainer

    COUNT("delay", delay)
    mesh = Mesh(communicator)
    mesh.agree({"delay": delay})
    if not delay:
        mesh.close()
        return DistributedDataParallel(network, loss, optimizer, communicator, seed, **options)
    refuse(bool(options), f"{', '.join(options)}: late gradients are summed by messages")
    check_local_updates(network)
    return DistributedTrainer(
        network, loss, optimizer, mesh, ForwardBackward(), Stale(delay), seed, "StaleDataParallel"
    )


def check_options(options) -> None:
    """Refuse what says how messages are cut, where the gradients of a step travel as one."""
    names = ("node_memory", "overlap", "bucket", "first_bucket")
    if options.late and (given := changed(options, names)):
        raise OptionError(
            f"{flag(given[0])} has no effect with --consistency {options.consistency}: the gradients of a step travel "
            "as one message; leave it out"
        )


def check(options, ranks: int | None, network, optimizer) -> None:
    """Refuse what has no effect where all ranks share a node, as they do that --ranks starts."""
    from parallel.launch import launcher

    if ranks and not launcher.inside() and not axes.divides_network(options):  # else gradients travel as messages
        check_one_node(options)


def check_one_node(options) -> None:
    """Refuse what has no effect where all ranks share a node."""
    if options.node_memory == "on" and (given := message_flags(options)):
        raise OptionError(
            f"{given[0]} has no effect with --node-memory on where all ranks share a node: "
            "gradients are summed in its memory, without messages; leave one of them out"
        )


def message_flags(options) -> list[str]:
    """Return the flags that say how messages sum, are cut, and move, as on the command line."""
    names = changed(options, ("overlap", "bucket", "first_bucket"))
    if options.allreduce not in ("auto", "shared"):
        names.append("allreduce")
    return [f"{flag(name)} {getattr(options, name)}" for name in names]


def summing_arguments(options, communicator) -> dict:
    """Return the arguments of `gradient_sync` for gradients as they are."""

    # On one node there is nothing in node memory that an allreduce could do; between nodes there is.
    if one_node := len(set(nodes_of(communicator))) == 1:
        check_one_node(options)
    messages = one_node and message_flags(options)
    return {
        "node_memory": "off" if options.node_memory == "auto" and messages else options.node_memory,
        "overlap": options.overlap,
        "bucket": options.bucket,
        "first_bucket": options.first_bucket,
        "limit": options.watch or math.inf,
        "survives": options.elastic is not None,
    }


def bucketing(options) -> dict:
    """Return how gradients that are summed by messages are cut and moved."""
    overlap = "none" if options.overlap == "auto" else options.overlap
    return {"bucket": options.bucket, "first_bucket": options.first_bucket, "overlap": overlap}


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Gradients are summed in node memory or by messages, dense, compressed, late, or in a fixed order."""
    arguments = network, loss, optimizer, communicator, options.seed
    if options.late and (delay := Consistency.parse(options.consistency, "ddp", CONSISTENCIES).bound):
        return StaleDataParallel(*arguments, delay=delay)
    if options.compress:
        from parallel.sync import compression

        return DistributedDataParallel(*arguments, compressor=compression.parse(options.compress))
    if options.reproducible:
        return DistributedDataParallel(*arguments, shards=options.reproducible)
    return DistributedDataParallel(*arguments, **summing_arguments(options, communicator))


def cost(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """F, B with buckets that leave as they fill, U; in a node's memory F, B, sum and U / N (strategies/estimate.py)."""
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of, sum_over_experts

    mine, group = part_of(job, axes, network), axes.group("data", job.node_memory and axes.expert == 1)
    gradients, update = mine.parameters, job.updating(mine.parameters)
    experts, along = sum_over_experts(mine, axes, network)
    if group.in_memory(network) and axes.tensor * axes.context == 1:  # who has finished sums and updates the next block
        update /= group.count
        exchange = network.barrier_seconds(group.count) + group.adding(gradients, network)
    else:
        exchange = after_backprop(job, mine.layers, group, network)
    computation = mine.computation + job.loss(mine.samples)
    parts = {"computation": computation, "update": update, "gradients": exchange + experts, "activations": mine.sums}
    parts |= {"experts": mine.routing} if axes.expert > 1 else {}
    memory = (2 + job.moments) * gradients + mine.saved
    computing = mine.workers * computation + axes.ranks * update
    return Prediction("ddp", axes, parts, computing, 2 * group.sent(gradients) + along + mine.sent, memory)


def after_backprop(job: Job, layers: Sequence[LayerProfile], group: Group, network: CostNetwork) -> float:
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


STRATEGY = Strategy(
    name="ddp",
    title="Data parallelism",
    sources=("Li et al. 2020", "Ho et al. 2013 (stale)"),
    build=build,
    supports=Supports(axes=tuple(AXES), mixed=True, elastic=True),
    options=(ConsistencyOptions, NodeMemoryOptions, MessageOptions),
    consistencies=CONSISTENCIES,
    late=replace(
        LOCAL_UPDATE, not_compressed="sums in flight cannot be compressed; use --strategy ps --consistency async"
    ),
    late_values="stale:S",
    public=("DistributedDataParallel", "StaleDataParallel"),
    check_options=check_options,
    check=check,
    cost=cost,
    summary="every rank computes its part of the batch, gradients are summed: in the memory that the ranks of a node "
    "share, with one shared copy of the parameters (of wide `Linear` layers ranks share the inputs "
    "x and the gradients gy of "
    "the outputs instead, where these are smaller), then between nodes by messages, in buckets, which can travel "
    "during backprop",
    memory="16 Psi; on one node 4 Psi + 12 Psi/N",
    traffic="2 Psi; on one node none",
)
