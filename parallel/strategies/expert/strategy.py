"""Expert parallelism: ranks with different samples have some of the experts each (GShard, DeepSpeed-MoE).

The axis "expert" is a part of data parallelism: its ranks share every global batch, as those of "data" do, and all have
the router, attention and whatever is no expert. Of each `MixtureOfExperts` with E experts a rank has E / p. Positions
travel to the ranks that have the experts they chose, and back (dispatch.py): 4 alltoallv a layer and step. So an
expert's gradient is made of the positions of all p ranks, and is summed along "data" only; all other gradients are
partial, summed along both. On data x expert ranks there are as many copies of an expert as ranks on "data".

With an axis "tensor" ranks have parts of attention together, and experts are dealt out to all expert x tensor ranks.
With an axis "context" ranks have other positions of the same samples, and the same experts, whose gradients are summed
along it as along "data". In a pipeline (strategies/pipeline) the ranks that have a stage deal out its experts.

Sources: Lepikhin et al. 2020 (GShard), Fedus et al. 2022 (Switch), Rajbhandari et al. 2022 (DeepSpeed-MoE), Liu et al.
2025 (experts over the axes of the other layers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.strategies import axes
from parallel.strategies.declaration import UNIT_BYTES
from parallel.strategies.zero import group_sync_arguments

if TYPE_CHECKING:
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.trainer import DistributedTrainer


@answer_keywords
def ExpertParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    expert: int = 0,
    tensor: int = 1,
    way: str = "pairs",
    context: int = 1,
    attention: str = "ring",
    stage: int = 0,
    bucketing: dict | None = None,
    unit_bytes: int = UNIT_BYTES,
    prefetch: int | None = None,
    compressor=None,
) -> DistributedTrainer:
    """`Trainer` on many ranks, each of which has some of the experts.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks. The network has layers `nn.MixtureOfExperts`.
    communicator : collectives.Communicator
    expert : int
        To how many ranks experts are dealt out; 0 for all. Those of one group are neighbours. All ranks, of all groups,
        share every global batch.
    tensor : int
        How many ranks compute the other layers together, for the same samples; they have experts, too.
    way, context, attention, stage, bucketing, unit_bytes, prefetch, compressor
        As for TensorParallel.

    Raises
    ------
    ValueError
        A network without experts, or numbers of them that the ranks do not divide: which would do.
    ReplicaError
        If ranks were given different networks, losses or optimizers.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> ids = np.zeros((4, 8), int)
    >>> network = nn.models.build("transformer:16,2,1,experts=2", (8,), 32)
    >>> trainer = parallel.ExpertParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (ids, ids), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.strategies.context.strategy import SequenceParts
    from parallel.strategies.expert.expert_pass import ExpertPass
    from parallel.strategies.gradient_sync import gradient_sync
    from parallel.trainer import DistributedTrainer

    mesh = Mesh(communicator, expert=expert or communicator.size // (tensor * context), tensor=tensor, context=context)
    units = {"unit_bytes": unit_bytes, "prefetch": prefetch}
    sync = gradient_sync(mesh, stage, compressor, node_memory="off", **units, **(bucketing or {}))
    pass_ = ExpertPass(loss, way, SequenceParts(attention))
    return DistributedTrainer(network, loss, optimizer, mesh, pass_, sync, seed, "ExpertParallel")


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Ranks have some of the experts each; several such groups share every batch."""
    sizes = axes.sizes(options, communicator.size)
    return ExpertParallel(
        network,
        loss,
        optimizer,
        communicator,
        options.seed,
        expert=sizes["expert"],
        tensor=sizes["tensor"],
        way=options.tensor,
        context=sizes["context"],
        attention=options.context,
        **group_sync_arguments(options),
    )
