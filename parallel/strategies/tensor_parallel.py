"""Tensor parallelism: ranks compute every layer together, each with a part of its parameters (Megatron).

All ranks of the axis "tensor" are given the same samples. Of every matrix each has some columns or rows, of attention
some heads; between them activations are summed or gathered (rewriting.py). So a rank has 1/t of the parameters, of
their gradients and moments, and of the arithmetic, and no gradient has to be summed over these ranks. Cost of a step
over one process's: 4 allreduces of N T D activations for each block of a transformer, two on the way forward, two on
the way back. Along the axis "data" the gradients of each part are summed as in data parallelism.

Source: Shoeybi et al. 2019; Korthikanti et al. 2022 (activations cut along the places).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.axis import combinable
from parallel.guesses import answer_keywords
from parallel.strategies import axes
from parallel.strategies.data_parallel import MessageOptions
from parallel.strategies.declaration import ROUNDED, ROUNDING_ALIKE, TREE, UNIT_BYTES, Strategy, Supports
from parallel.strategies.zero import group_sync_arguments

if TYPE_CHECKING:
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.sync.compression import Compressor
    from parallel.trainer import DistributedTrainer


@answer_keywords
def TensorParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    tensor: int | None = None,
    way: str = "pairs",
    context: int = 1,
    attention: str = "ring",
    stage: int = 0,
    bucketing: dict | None = None,
    unit_bytes: int = UNIT_BYTES,
    prefetch: int | None = None,
    compressor: Compressor | None = None,
) -> DistributedTrainer:
    """`Trainer` on many ranks, which compute every layer together.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks.
    communicator : collectives.Communicator
    tensor : int or None
        How many ranks share a layer; None for all. Those of one group are neighbours, and are given the same samples;
        groups share every global batch.
    way : {"pairs", "width", "sequence"}
        How layers are shared: two linear layers by columns and rows, so that only the second sends; or each by its
        outputs, as convolutions are; or as the first, with activations cut along the places of sequences where ranks
        would do the same with all of them.
    context, attention
        How many groups of them share a sequence, and how its attention is computed: see ContextParallel.
    stage : {0, 1, 2, 3}
        Of ZeRO: what groups keep in shards; 0 for nothing.
    bucketing, unit_bytes, prefetch, compressor
        How groups sum their gradients: see gradient_sync.py.

    Raises
    ------
    ValueError
        Heads that cannot be dealt out, or nothing that can be shared: which numbers of ranks would do.
    ReplicaError
        If ranks were given different networks, losses or optimizers.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.TensorParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.strategies.context.strategy import SequenceParts
    from parallel.strategies.gradient_sync import gradient_sync
    from parallel.strategies.tensor.shared_pass import SharedPass
    from parallel.trainer import DistributedTrainer

    mesh = Mesh(communicator, context=context, tensor=tensor or communicator.size // context)
    units = {"unit_bytes": unit_bytes, "prefetch": prefetch}
    sync = gradient_sync(mesh, stage, compressor, node_memory="off", **units, **(bucketing or {}))
    forward_backward = SharedPass(loss, way, SequenceParts(attention))
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, "TensorParallel")


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Ranks compute every layer together; several such groups share every batch."""
    sizes = axes.sizes(options, communicator.size)
    return TensorParallel(
        network,
        loss,
        optimizer,
        communicator,
        options.seed,
        tensor=sizes["tensor"],
        way=options.tensor,
        context=sizes["context"],
        attention=options.context,
        **group_sync_arguments(options),
    )


# Also what ddp, zero1, zero2 and fsdp support where the mesh has an axis "tensor".
STRATEGY = Strategy(
    name="tensor",
    title="Tensor parallelism",
    sources=("Shoeybi et al. 2019", "Korthikanti et al. 2022"),
    build=build,
    supports=Supports(
        mixed=True,
        elastic=True,
        axes=combinable("tensor"),
        compress=ROUNDING_ALIKE,
        not_compressed=ROUNDED,
        reproducible=False,
        not_reproducible=TREE,
    ),
    options=(MessageOptions,),
    public=("TensorParallel",),
    whole=0,
    summary="every rank of a group has the same samples and a part of every layer: columns or rows of matrices, heads, "
    "channels, ids; activations are summed in between, and no gradients (`parallel/strategies/tensor/rewriting.py`)",
    memory="16 Psi/N and biases, norms",
    traffic="8 B T D a transformer block of B sequences",
)
