"""Context parallelism: ranks have some positions of the same sequences, and each has all parameters.

Activations are cut along the sequence in every layer, so a sequence that is too long for one rank's memory fits
several. Only attention asks other ranks (attention.py). A gradient is a term on each rank, of its positions, so the
gradients of **all** ranks are summed, as in data parallelism: by the same syncs, in shards (ZeRO) or compressed,
too. The loss is a sum over positions, divided by that of the whole global batch: ranks may have unequal numbers of rows
that count, and none. Along the axis "data" such groups share every global batch.

Sources: Liu et al. 2023 (ring attention), Jacobs et al. 2023 (Ulysses), Fang and Zhao 2024 (both), Korthikanti et al.
2022 (cutting a sequence), Llama Team 2024 (zigzag order).
"""

from __future__ import annotations

import math

from nn import option_strings
from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.guesses import answer_keywords
from parallel.mesh import Mesh, Ranks
from parallel.passes.forward_backward import ForwardBackward
from parallel.strategies.context.attention import ContextGroups
from parallel.strategies.context.cutting import Beside, cut
from parallel.strategies.context.layers import ContextLoss
from parallel.strategies.context.positions import ContextDegrees
from parallel.strategies.gradient_sync import gradient_sync
from parallel.trainer import DistributedTrainer


class SequenceParts:
    """What an axis "context" makes of a network, beside whatever else ranks share of it; nothing without that axis.

    Parameters
    ----------
    attention : str
        As of `ContextParallel`.
    """

    def __init__(self, attention: str = "ring"):
        self.attention = attention

    def cut(self, network: Network, mesh: Mesh, sequence: bool = False) -> Network:
        """Return what this rank has of a network.

        Parameters
        ----------
        sequence : bool
            Whether the ranks of the axis "tensor" cut positions, too.
        """
        self.mesh, self.degrees = mesh, context_degrees(self.attention, mesh.sizes["context"])
        self.groups = ContextGroups(self.degrees, mesh.places["context"])
        self.length = network.in_shape[0]
        return cut(network, self.groups, Beside(mesh.sizes["tensor"], sequence))

    def loss(self, loss: Loss) -> Loss:
        """Return the loss of the outputs of this rank's positions."""
        return ContextLoss(loss, self.length, self.groups) if self.degrees.size > 1 else loss

    def connect(self) -> None:
        """Make the communicators of attention (collective)."""
        if self.mesh.context:
            self.groups.connect(self.mesh.context, Ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of messages."""
        return self.groups.ring.nbytes if self.groups.ring else 0

    def close(self) -> None:
        self.groups.close()

    def describe(self) -> str:
        """How attention is shared, for the log; empty without the axis."""
        ring, heads = self.degrees
        if self.degrees.size == 1:
            return ""
        how = " and ".join(filter(None, [f"in rings of {ring}" * (ring > 1), f"by heads of {heads}" * (heads > 1)]))
        return f"{self.degrees.size} ranks have some positions of each sequence, attention {how}"


class ContextPass(ForwardBackward):
    """A step of which each rank of the axis "context" computes some positions of every sequence.

    Parameters
    ----------
    loss : Loss
        Of whole outputs.
    positions : SequenceParts
    """

    def __init__(self, loss: Loss, positions: SequenceParts):
        self.whole_loss, self.positions = loss, positions

    def make_local_network(self, network, mesh):
        return self.positions.cut(network, mesh)

    def bind(self, trainer):
        self.positions.connect()
        trainer.loss = self.positions.loss(self.whole_loss)

    def in_transit(self):
        return self.positions.nbytes

    def close(self):
        self.positions.close()

    def describe(self):
        return self.positions.describe()


def context_degrees(attention: str, ranks: int) -> ContextDegrees:
    """Return how many ranks form a ring and how many share heads.

    Parameters
    ----------
    attention : str
        "ring", "ulysses", or "ring:N,ulysses:M" with N M ranks in all; where one number is missing, it is what is left.
    ranks : int

    Raises
    ------
    ValueError
        Another text, or numbers that do not multiply to the ranks.

    Examples
    --------
    >>> context_degrees("ring", 4), context_degrees("ring:2,ulysses:2", 4)
    (ContextDegrees(ring=4, heads=1), ContextDegrees(ring=2, heads=2))
    """
    given: dict[str, int | None] = {}
    for text in attention.split(","):
        name, parts = option_strings.split(text)
        if name not in ("ring", "ulysses") or name in given or len(parts) > 1 or not all(p.isdecimal() for p in parts):
            raise ValueError(
                f'context attention is "ring", "ulysses", or both as "ring:2,ulysses:2", given {attention!r}'
            )
        given[name] = int(parts[0]) if parts else None
    known = math.prod(number for number in given.values() if number is not None)
    rest = ranks // max(1, known)  # the share of one without a number; of two without, all for the first
    for name, number in given.items():
        if number is None:
            given[name], rest = rest, 1
    degrees = ContextDegrees(given.get("ring", 1), given.get("ulysses", 1))
    if degrees.size != ranks:
        pairs = ", ".join(f"ring:{n},ulysses:{ranks // n}" for n in range(1, ranks + 1) if ranks % n == 0)
        raise ValueError(
            f"context attention {attention!r} is for {degrees.size} ranks, and the axis context has {ranks}: use "
            f"{pairs}"
        )
    return degrees


@answer_keywords
def ContextParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    context: int = 0,
    attention: str = "ring",
    stage: int = 0,
    **sync,
) -> DistributedTrainer:
    """`Trainer` on many ranks, each of which has some positions of every sequence.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks. The network takes sequences and puts out something at every position.
    communicator : collectives.Communicator
    context : int
        How many ranks share a sequence; 0 for all. Those of one group are neighbours, and are given the same samples;
        groups share every global batch.
    attention : str
        "ring": keys and values travel; "ulysses": heads are dealt out; "ring:2,ulysses:2": both.
    stage, **sync
        As for SpatialParallel.

    Raises
    ------
    ValueError
        A network that cannot be cut so: which layer, and what would do. A compressor that keeps something, with shards.
    ReplicaError
        If ranks were given different networks, losses or optimizers.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> ids = np.zeros((4, 8), int)
    >>> network = nn.models.build("transformer:16,2,1", (8,), 32)
    >>> trainer = parallel.ContextParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (ids, ids), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    mesh = Mesh(communicator, context=context or communicator.size)
    sync = gradient_sync(mesh, stage, **sync)
    forward_backward = ContextPass(loss, SequenceParts(attention))
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, sync, seed, "ContextParallel")
