"""One weird trick: convolutions are data-parallel, fully-connected layers model-parallel (Krizhevsky 2014).

Convolutions have most of the arithmetic and few parameters: every rank has all of them, and computes its samples.
Fully-connected layers have most of the parameters and little arithmetic: every rank has a part of each (the layers are
rewritten by tensor/rewriting.py), and computes all samples. Between the two, activations move by one of these schemes
(A, B, C of the paper, and one more); r ranks have b samples each:

all      (A) the samples of all ranks at once: one pass through the fully-connected layers, of r b samples.
turns    (B) one rank's samples after the other's: r passes of b samples; the next travel while one pass computes.
shares   (C) 1/r of every rank's samples at a time: r passes of b samples, and all ranks send equally much.
features all samples at once, but each rank gets only the features whose rows of the first layer it has: an alltoall in
         place of an allgather, and one more sum, of that layer's outputs.

The loss of a pass is needed before its backward, and turns and shares free a pass's activations before the next one: so
the rounds are a part of the pass (weird_trick_pass.py), and no layer that moves activations.

The gradients of the activations go back the way they came, summed. Then the convolutions' gradients are summed over the
ranks, as in data parallelism; the others are nobody else's. Bytes that a rank sends in a step, for c of convolutions'
parameters, n of a rank's activations and o of the first fully-connected layer's outputs for all samples: 2 (r-1)/r c,
and 2 (r-1) n with all, turns (on average) and shares, or 2 (r-1)/r n + 2 (r-1)/r o with features; data parallelism
would send 2 (r-1)/r of all parameters. Memory for gathered activations: r b samples' with all and features, 2 b with
the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.settings import option
from parallel.strategies.data_parallel import MessageOptions, bucketing
from parallel.strategies.declaration import TREE, Strategy, Supports

if TYPE_CHECKING:
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.trainer import DistributedTrainer


@dataclass(frozen=True)
class SchemeOptions:
    """How activations move between convolutions and linear layers."""

    owt: str = option(
        "all",
        "how activations move from convolutions to linear layers: all samples at once (scheme A of the paper), one "
        "rank's at a time (B), a share of every rank's at a time (C), or by features",
        ("all", "turns", "shares", "features"),
        planned=True,
    )


@answer_keywords
def OneWeirdTrick(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    scheme: str = "all",
    bucketing: dict | None = None,
) -> DistributedTrainer:
    """`Trainer` on many ranks: convolutions data-parallel, fully-connected layers model-parallel.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks; the network a Sequential of convolutions and then linear layers.
    communicator : collectives.Communicator
    scheme : {"all", "turns", "shares", "features"}
        How activations move from the ones to the others; see above.
    bucketing : bucket, first_bucket, overlap of sync/messages.py, or None
        How the convolutions' gradients are summed.

    Raises
    ------
    ValueError
        A network without two such parts, or whose linear layers cannot be shared by so many ranks.
    ReplicaError
        If ranks were given different networks, losses or optimizers.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> images = np.zeros((4, 8, 8, 1), np.float32)
    >>> layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    >>> network = nn.Network(layers, (8, 8, 1))
    >>> trainer = parallel.OneWeirdTrick(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (images, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.strategies.weird_trick_pass import WeirdTrick
    from parallel.sync.base import GradientSync
    from parallel.sync.messages import BUCKETING, check_bucketing
    from parallel.trainer import DistributedTrainer

    bucketing = BUCKETING | (bucketing or {})
    check_bucketing(**bucketing)
    mesh, forward_backward = Mesh(communicator, tensor=communicator.size), WeirdTrick(loss, scheme, bucketing)
    mesh.agree({"scheme": scheme} | bucketing)
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, GradientSync(), seed, "OneWeirdTrick")


def check(options, ranks: int | None, network, optimizer) -> None:
    """Refuse a network without two such parts, or that so many ranks cannot share."""
    if ranks:
        from nn.losses import Loss
        from parallel.strategies.tensor import boundary

        boundary.split(network, Loss(), ranks, options.owt)


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Convolutions data-parallel, linear layers model-parallel."""
    arguments = network, loss, optimizer, communicator, options.seed
    return OneWeirdTrick(*arguments, scheme=options.owt, bucketing=bucketing(options))


STRATEGY = Strategy(
    name="owt",
    title="One weird trick",
    sources=("Krizhevsky 2014",),
    build=build,
    supports=Supports(
        axes=(),
        mixed=True,
        compress=(),
        not_compressed="only the gradients of convolutions are sent",
        reproducible=False,
        not_reproducible=TREE,
    ),
    options=(MessageOptions, SchemeOptions),
    public=("OneWeirdTrick",),
    check=check,
    whole=0,
    summary="one weird trick: convolutions as `ddp`, linear layers as `tensor`; `--owt` says how activations go from "
    "the ones to the others (`parallel/strategies/one_weird_trick.py`)",
    memory="16 of the convolutions' parameters, 16/N of the others'",
    traffic="2 of the convolutions' parameters, and twice the activations between the two",
)
