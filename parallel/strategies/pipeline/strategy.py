"""Training through a pipeline, or several side by side, of stages that several ranks compute.

    trainer = Pipeline(network, loss, optimizer, communicator, schedule="1f1b", micro_batches=8)
    loss = trainer.step(x, y, total)

The pass is a pipeline (executor.py). Along "tensor" ranks compute each layer of a stage together, along "context"
they have positions of the same sequences, and along "expert" other samples, and of a stage's experts some each. What a
rank holds is summed along the axes "data" and "context", each stage by itself, while earlier stages still compute; the
norm of the whole gradient and the loss travel along the others.
All ranks end a step together: the idle time that zero-bubble schedules save between steps is not saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from parallel.axis import combinable
from parallel.guesses import answer_keywords
from parallel.strategies import axes
from parallel.strategies.data_parallel import MessageOptions, bucketing
from parallel.strategies.declaration import ROUNDED, ROUNDING_ALIKE, UNIT_BYTES, Strategy, Supports
from parallel.strategies.pipeline.option import arguments as schedule_arguments
from parallel.strategies.zero import summed

if TYPE_CHECKING:
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.strategies.pipeline.actions import Rows
    from parallel.sync.compression import Compressor
    from parallel.trainer import DistributedTrainer


@answer_keywords
def Pipeline(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    schedule: str | Callable | Rows = "1f1b",
    micro_batches: int = 8,
    cuts: Iterable[int] | None = None,
    recompute: bool = False,
    data: int = 1,
    tensor: int = 1,
    way: str = "pairs",
    context: int = 1,
    attention: str = "ring",
    expert: int = 1,
    zero1: bool = False,
    bucketing: dict | None = None,
    unit_bytes: int = UNIT_BYTES,
    compressor: Compressor | None = None,
    limit: float = 300.0,
    **options,
) -> DistributedTrainer:
    """`Trainer` with the layers on many ranks, and perhaps several copies of that, which share every batch.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for DistributedDataParallel; the network's root is a Sequential.
    schedule : str, generator function or rows
        naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipev; or one's own, also from text (actions.read).
    micro_batches : int
        Into so many parts the samples of each pipeline are cut.
    cuts : numbers of the children with which the second stage begins, and all after it; None: even ones
    recompute : bool
        Keep a stage's inputs only, and compute its forward pass again.
    data : int
        Pipelines side by side.
    tensor : int
        How many ranks compute every layer of a stage together.
    way : {"pairs", "width", "sequence"}
        As for TensorParallel.
    context, attention
        How many ranks share the sequences of a stage, and how attention is computed: see ContextParallel.
    expert : int
        To how many pipelines with other samples the experts of a stage are dealt out: see ExpertParallel.
    zero1 : bool
        Shard the moments of each stage among them.
    bucketing : bucket, first_bucket, overlap of sync/messages.py, or None
        How their gradients are summed, without zero1.
    unit_bytes : int
        As for ZeRO1.
    compressor : Compressor or None
        Of gradients without zero1: fp16, where stages share no array.
    limit : float
        Seconds after which a rank gives up that waits for another one's message.
    **options
        Of the schedule: chunks of interleaved, the number of stages on each rank.

    Raises
    ------
    ValueError
        What cannot be: see `placement.place`; ranks that `data` does not divide.
    ReplicaError
        Ranks that were given different networks, losses, optimizers or schedules.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.Pipeline(network, loss, optimizer, communicator, schedule="1f1b", micro_batches=2)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.strategies.context.strategy import SequenceParts
    from parallel.strategies.gradient_sync import gradient_sync
    from parallel.strategies.pipeline.executor import PipelinePass
    from parallel.strategies.pipeline.placement import place, refuse_ties
    from parallel.strategies.pipeline.schedules import check_counts
    from parallel.trainer import DistributedTrainer

    check_counts(data=data, tensor=tensor, context=context, expert=expert)
    if schedule == "pipedream":
        raise ValueError("schedule: pipedream updates after each micro-batch, and has no flush: use parallel.PipeDream")
    stages = max(1, communicator.size // (data * expert * context * tensor))
    mesh = Mesh(communicator, data=data, expert=expert, pipeline=stages, context=context, tensor=tensor)
    sync = gradient_sync(mesh, int(zero1), compressor, node_memory="off", unit_bytes=unit_bytes, **(bucketing or {}))
    if compressor:
        refuse_ties(place(network, mesh.sizes["pipeline"], schedule, micro_batches, cuts, **options))
    positions = SequenceParts(attention)
    forward_backward = PipelinePass(schedule, micro_batches, cuts, recompute, limit, loss, way, positions, **options)
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, "Pipeline")


@answer_keywords
def PipeDream(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    mini_batches: int = 16,
    cuts: Iterable[int] | None = None,
    vertical_sync: bool = False,
    replicas: Sequence[int] = (),
    bucketing: dict | None = None,
    limit: float = 300.0,
) -> DistributedTrainer:
    """A stage on each rank, or on some, and an update after every mini-batch: see pipedream.py.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, cuts, limit
        As for Pipeline.
    mini_batches : int
        Into so many the batch of a step is cut; each is a batch of its own.
    vertical_sync : bool
        One version of the weights for all stages, instead of each stage's newest.
    replicas : numbers of ranks
        On how many each stage lies, in all as many as there are: (3, 1) has two stages. None given: a stage on each.
    bucketing : bucket, first_bucket, overlap of sync/messages.py, or None
        How the replicas of a stage sum their gradients; None: when all are there.

    Raises
    ------
    ValueError
        As for Pipeline; replicas that are not as many as the ranks; arrays that stages share; clipping by the global
        norm.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.PipeDream(network, loss, optimizer, communicator, mini_batches=2)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.strategies.pipeline.pipedream import PipeDreamPass
    from parallel.strategies.pipeline.schedules import check_counts
    from parallel.strategies.pipeline.weight_stashing import WeightStashing
    from parallel.sync.messages import BUCKETING, check_bucketing
    from parallel.trainer import DistributedTrainer

    check_counts(mini_batches=mini_batches)
    bucketing = BUCKETING | (bucketing or {})
    check_bucketing(**bucketing)
    mesh = Mesh(communicator, data=1, pipeline=communicator.size)
    mesh.agree(bucketing)
    forward_backward = PipeDreamPass(mini_batches, cuts, vertical_sync, limit, replicas)
    return DistributedTrainer(
        network, loss, optimizer, mesh, forward_backward, WeightStashing(bucketing), seed, "PipeDream"
    )


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Stages of the network on different ranks; several such pipelines share every batch."""
    sizes = axes.sizes(options, communicator.size)
    given, limit = schedule_arguments(options, sizes["data"] * sizes["expert"]), options.watch or math.inf
    arguments = network, loss, optimizer, communicator, options.seed
    if given["schedule"] == "pipedream":
        keys = {name: given[name] for name in ("cuts", "vertical_sync", "replicas") if name in given}
        return PipeDream(
            *arguments, mini_batches=given["micro_batches"], bucketing=bucketing(options), limit=limit, **keys
        )
    return Pipeline(
        *arguments,
        data=sizes["data"],
        tensor=sizes["tensor"],
        way=options.tensor,
        context=sizes["context"],
        attention=options.context,
        expert=sizes["expert"],
        zero1=options.strategy == "zero1",
        bucketing=bucketing(options),
        unit_bytes=int(options.unit * 2**20),
        compressor=summed(options)["compressor"],
        limit=limit,
        **given,
    )


# Also what ddp and zero1 support where the mesh has an axis "pipeline".
STRATEGY = Strategy(
    name="pipeline",
    title="Pipelines",
    sources=("Huang et al. 2019", "Narayanan et al. 2019", "Narayanan et al. 2021", "Qi et al. 2023"),
    build=build,
    supports=Supports(
        mixed=True,
        elastic=True,
        axes=combinable("pipeline"),
        parts=False,
        not_parts="a pipeline already divides batches into micro-batches; set their number by --pipeline NAME:micro=N",
        compress=ROUNDING_ALIKE,
        not_compressed=ROUNDED,
        reproducible=False,
        not_reproducible="stages add up micro-batches as they pass, not in the order of virtual shards",
    ),
    options=(MessageOptions,),
    public=("Pipeline", "PipeDream"),
    whole=0,
    summary="layers in stages on different ranks, micro-batches one after the other: `--pipeline 1f1b:micro=8`, or "
    "gpipe, interleaved, zero-bubble schedules, or one's own from a file",
    memory="16 Psi of its stages",
    traffic="what passes from stage to stage, forward and back",
)
