"""Training through a pipeline, or several side by side, of stages that several ranks compute: data x pipeline x tensor.

    trainer = Pipeline(network, loss, optimizer, communicator, schedule="1f1b", micro_batches=8)
    loss = trainer.step(x, y, total)

The pass is a pipeline (executor.py). Along "tensor" ranks compute each layer of a stage together. What a rank holds is
summed along the axis "data", each stage by itself, while earlier stages still compute; the norm of the whole gradient
and the loss travel along the other two. Ranks meet after every step: the idle time that zero-bubble schedules would
save by not doing so is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.exchange.compression import Compressor
from parallel.mesh import Mesh
from parallel.strategies.along_data import exchange_along
from parallel.strategies.pipeline.actions import Rows
from parallel.strategies.pipeline.executor import PipelinePass
from parallel.strategies.pipeline.placement import place, refuse_ties
from parallel.strategies.pipeline.schedules import check_counts
from parallel.trainer import DistributedTrainer


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
    zero1: bool = False,
    bucketing: dict | None = None,
    unit_bytes: int = 1 << 20,
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
    zero1 : bool
        Shard the moments of each stage among them.
    bucketing : bucket, first, overlap of exchange/messages.py, or None
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
    """
    check_counts(data=data, tensor=tensor)
    if schedule == "pipedream":
        raise ValueError("schedule: pipedream updates after each micro-batch, and has no flush: use parallel.PipeDream")
    mesh = Mesh(communicator, data=data, pipeline=max(1, communicator.size // (data * tensor)), tensor=tensor)
    exchange = exchange_along(mesh, int(zero1), bucketing, unit_bytes, compressor=compressor)
    if compressor:
        refuse_ties(place(network, mesh.sizes["pipeline"], schedule, micro_batches, cuts, **options))
    pass_ = PipelinePass(schedule, micro_batches, cuts, recompute, limit, loss, way, **options)
    return DistributedTrainer(network, loss, optimizer, mesh, pass_, exchange, seed, "Pipeline")
