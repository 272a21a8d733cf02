"""Spatial and branch parallelism: ranks compute the same samples together, and each has all parameters.

Along the axis "space" each rank has some rows of every image, from the first convolution to where the images become
features: so one image that is too large for a rank's memory fits several, and a batch may be smaller than the ranks.
Along the axis "branch" each computes some of the branches of every module that has them. What cannot be shared all do
alike. Along the axis "data" such groups share every global batch.

Each rank has a partial gradient, of its rows or of its branches, so the gradients of **all** ranks are summed, as in
data parallelism: by the same syncs, with shards on all ranks (ZeRO) or compressed, too. Cost of a step over that of
data parallelism, for each layer: halos of 2 rows a 3x3 convolution and direction (space), an allgather of what the
branches make and an allreduce of the gradient of what they take (branch). Gradients travel the same, and between more
ranks.

Sources: Dryden et al. 2019 (space); Szegedy et al. 2014 (inception modules), Dean et al. 2012 (parts of a model).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from collectives.failures.launch_check import nodes_of
from nn.core.network import Network
from nn.losses import Loss
from nn.optim.optimizers import Optimizer
from parallel.guesses import answer_keywords
from parallel.mesh import Mesh, Ranks
from parallel.passes.forward_backward import ForwardBackward
from parallel.strategies.gradient_sync import gradient_sync
from parallel.strategies.operators import branches, space
from parallel.strategies.operators.rows import halos
from parallel.sync.messages import OverlapTrial
from parallel.trainer import DistributedTrainer

REWRITTEN: dict[str, Callable[[Network, int, int], Network]] = {"space": space.cut, "branch": branches.deal}


class OperatorPass(ForwardBackward):
    """A step of which each rank of an axis computes some rows of the images, or some branches.

    Parameters
    ----------
    axis : {"space", "branch"}
    """

    def __init__(self, axis: str):
        self.axis = axis

    def make_local_network(self, network, mesh):
        self.owns_loss = mesh.places[self.axis] == 0
        return REWRITTEN[self.axis](network, mesh.places[self.axis], mesh.sizes[self.axis])

    def bind(self, trainer):
        network = trainer.local_network
        self.root, self.beside, self.trial = network.root, None, None
        if self.mesh.space and len(set(nodes_of(self.mesh.space))) > 1 and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            self.beside, self.trial = self.mesh.space.Dup(progress=True), OverlapTrial(["hidden", "waited for"])
            for halo in halos(self.root):
                halo.beside = self.beside
        if trainer.communicator:
            trainer.ctx.network_context.groups["everyone"] = Ranks(trainer.communicator)
        self.counted = None
        branches_ = dict(branches.elsewhere(network.root))
        if network.buffer_layout.size and branches_:  # statistics are those of whoever has the branch
            self.counted = np.full_like(trainer.buffers, self.owns_loss)
            for name, array in network.buffer_layout.items(self.counted):
                inside = [away for path, away in branches_.items() if name.startswith(path + ".")]
                if inside:
                    array[...] = not inside[0]

    def compute(self, trainer, x, y, total, micro, before=0.0):
        """As for ForwardBackward. Between nodes the first steps show whether hiding the rows' messages pays."""
        trial = self.trial
        if not trial or not len(x):
            return super().compute(trainer, x, y, total, micro, before)
        self.hide(trial.next())
        start = time.perf_counter()
        loss = super().compute(trainer, x, y, total, micro, before)
        if trial.add(time.perf_counter() - start):
            self.hide(way := self.beside.bcast(trial.best()))
            trainer.say(f"rows of other ranks {way}: {trial.describe()}")
            self.trial = None
        return loss

    def hide(self, way: str) -> None:
        """Whether rows of other nodes are "hidden" behind what needs none of them, or "waited for"."""
        for halo in halos(self.root):
            halo.hides = way == "hidden"

    def loss(self, trainer, z, y, total):
        """All ranks of the axis have the outputs; one returns the loss."""
        loss, gz = super().loss(trainer, z, y, total)
        if self.counted is not None:
            trainer.buffers *= self.counted
            trainer.ctx.group(self.axis).sum(trainer.buffers)
        return loss if self.owns_loss else 0.0, gz

    def in_transit(self):
        return sum(halo.nbytes for halo in halos(self.root))

    def close(self):
        for halo in halos(self.root):
            halo.close()
        if self.beside:
            self.beside.Free()

    def describe(self):
        what = {"space": "some rows of every image", "branch": "some branches of every module"}
        return f"{self.mesh.sizes[self.axis]} ranks compute the same samples, each {what[self.axis]}"


@answer_keywords
def SpatialParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    space: int = 0,
    stage: int = 0,
    **sync,
) -> DistributedTrainer:
    """`Trainer` on many ranks, each of which has some rows of every image.

    Parameters
    ----------
    network, loss, optimizer, seed
        As for Trainer, alike on all ranks.
    communicator : collectives.Communicator
    space : int
        How many ranks share an image; 0 for all. Those of one group are neighbours, and are given the same samples;
        groups share every global batch.
    stage : {0, 1, 2, 3}
        Of ZeRO: what is in shards; 0 for nothing.
    **sync
        How the gradients of all ranks are summed: arguments of `gradient_sync` (strategies/gradient_sync.py), such as a
        `compressor`.

    Raises
    ------
    ValueError
        A network of which nothing can be cut in height into so many parts: why. A compressor that keeps something,
        with shards.
    ReplicaError
        If ranks were given different networks, losses or optimizers.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> images = np.zeros((4, 8, 8, 1), np.float32)
    >>> layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GlobalAvgPool2d(), nn.Linear(4, 2))
    >>> network = nn.Network(layers, (8, 8, 1))
    >>> trainer = parallel.SpatialParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (images, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    given = network, loss, optimizer, communicator, seed
    return _make_trainer("space", "SpatialParallel", *given, space, stage, **sync)


@answer_keywords
def BranchParallel(
    network: Network,
    loss: Loss,
    optimizer: Optimizer,
    communicator,
    seed: int = 0,
    *,
    branch: int = 0,
    stage: int = 0,
    **sync,
) -> DistributedTrainer:
    """`Trainer` on many ranks, each of which computes some of the branches of every module that has them.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed, stage, **sync
        As for SpatialParallel.
    branch : int
        How many ranks share the branches; 0 for all.

    Raises
    ------
    ValueError
        A network without branches. A compressor that keeps something, with shards.
    ReplicaError
        If ranks were given different networks, losses or optimizers.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> images = np.zeros((4, 8, 8, 1), np.float32)
    >>> branches = nn.Parallel(nn.Conv2d(1, 2, 1), nn.Conv2d(1, 2, 3, padding=1))
    >>> network = nn.Network(nn.Sequential(branches, nn.GlobalAvgPool2d(), nn.Linear(4, 2)), (8, 8, 1))
    >>> trainer = parallel.BranchParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (images, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    given = network, loss, optimizer, communicator, seed
    return _make_trainer("branch", "BranchParallel", *given, branch, stage, **sync)


def _make_trainer(axis, name, network, loss, optimizer, communicator, seed, ranks, stage, **sync) -> DistributedTrainer:
    mesh = Mesh(communicator, **{axis: ranks or communicator.size})
    sync = gradient_sync(mesh, stage, **sync)
    return DistributedTrainer(network, loss, optimizer, mesh, OperatorPass(axis), sync, seed, name)
