"""Who is whose peer: the ranks of a run, and their axes data x expert x pipeline x context x tensor x space x branch.

Without a communicator there is one process, and what it asks all ranks it asks itself: so nothing else need know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nn.core.context import Group
from nn.core.memory_pool import MemoryPool
from parallel.axis import AXES, DIVIDE_ARRAYS, DIVIDE_NETWORK, SHARE_BATCH, conflict
from parallel.guesses import answer_keywords

OTHERS = tuple(axis for axis in AXES if axis != "data")


class ReplicaError(RuntimeError):
    """Ranks that should hold the same do not; the message says which and what."""


class Ranks(Group):
    """The ranks of a communicator, as layers see them."""

    def __init__(self, communicator):
        from mpi4py import MPI  # which one process does without

        self.communicator, self.rank, self.size = communicator, communicator.rank, communicator.size
        self.in_place, self.max = MPI.IN_PLACE, MPI.MAX
        self.memory = MemoryPool()

    def sum(self, array):
        self.communicator.Allreduce(self.in_place, array)

    def average(self, array: np.ndarray) -> None:
        """Replace an array by its mean over the members, in place."""
        self.sum(array)
        array /= self.size

    def maximum(self, array):
        self.communicator.Allreduce(self.in_place, array, self.max)

    def all_gather(self, array):
        out = self.memory.empty((self.size, *array.shape), array.dtype)
        self.communicator.Allgather(np.ascontiguousarray(array), out)
        return out

    def reduce_scatter(self, array):
        out = self.memory.empty(array.shape[1:], array.dtype)
        self.communicator.Reduce_scatter_block(np.ascontiguousarray(array), out)
        return out

    def all_to_all(self, array):
        out = self.memory.empty(array.shape, array.dtype)
        self.communicator.Alltoall(np.ascontiguousarray(array), out)
        return out


def sizes(ranks: int, data: int | None = None, *, servers: int = 0, **others: int) -> dict[str, int]:
    """Return the ranks of every axis, of `ranks` in all beside servers; "data" defaults to what the others leave.

    Raises
    ------
    ValueError
        They do not multiply to the ranks: which numbers would do.
    """
    given = dict.fromkeys(AXES, 1) | {"data": data} | others
    for axis, size in given.items():
        if size is not None and size < 1:
            raise ValueError(f"mesh: {axis} must have at least 1 rank, given {size}")
    model = math.prod(others.values())
    found = given | {"data": ranks // model if data is None else data}
    if found["data"] * model != ranks or not found["data"]:
        said = " x ".join(f"{axis} {size}" for axis, size in given.items() if size not in (None, 1)) or "data 1"
        fits = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"mesh: {said} does not make {ranks} ranks{f' beside {servers} that serve' * bool(servers)}: each axis "
            f"needs one of {', '.join(fits)} ranks, and all of them multiplied {ranks}; or start "
            f"{(data or 1) * model + servers} ranks"
        )
    return found


def with_collectives(communicator):
    """Return a communicator that has ringprop's collectives: one of mpi4py's is wrapped (collective)."""
    from mpi4py import MPI  # which one process does without

    from collectives import Communicator

    if isinstance(communicator, Communicator):
        return communicator
    if communicator == MPI.COMM_NULL:
        raise ValueError("mesh: this rank is not in the communicator (COMM_NULL): train on its ranks only")
    if isinstance(communicator, MPI.Intracomm):
        return Communicator(communicator)
    if isinstance(communicator, MPI.Comm) or not hasattr(communicator, "Allreduce"):
        raise TypeError(
            f"mesh: expected a communicator, such as Communicator(MPI.COMM_WORLD), given {communicator!r:.80}"
        )
    return communicator  # stands in for one: parallel.reports.traffic.Traffic


class Mesh:
    """The ranks of a run and their axes (collective).

    Who shares a global batch, and who has parts of one network, says the table of axes (axis.py). Neighbours on the
    last axis, who talk most, are neighbours in the communicator:

        rank = (((data * experts + expert) * pipelines + pipeline) * contexts + context) * tensors + tensor

    Parameters
    ----------
    communicator : collectives.Communicator, MPI.Intracomm or None
        One of mpi4py's is wrapped in a `Communicator`, which `close` releases.
    workers : sequence of int or None
        Those that compute gradients; None for all. Others serve, and are on no axis; where workers have other axes
        than "data", they are the first ranks.
    data : int or None
        Ranks along the axis "data"; None for what the other axes leave.
    expert, pipeline, context, tensor, space, branch : int
        Ranks along the other axes.

    Attributes
    ----------
    rank, size : int
        Of this process among all.
    sizes, places : dict
        By axis: how many ranks it has, and which of them this is.
    index, count : int
        The same of the axis "data"; the index of a rank that is not on it is None.
    shard : (int, int)
        Which share of every global batch this rank has, and how many there are.
    part : (int, int)
        Which part of its arrays this rank has, and how many there are.
    data : collectives.Communicator or None
        Of the ranks on that axis that have what this rank has of the network.
    expert, pipeline, context, tensor, space, branch : the same, None where there is one rank
    parts : the same, of the ranks that have the other parts of this one's arrays
    model : the same, of the ranks that have the parameters of one network together
    model_size : int
        How many these are, known to servers as well.
    data_group : Mesh
        Of the ranks that have the same of the network, and whose gradients are summed: what a sync sees.
    copies : int
        How many these are, known to servers as well.

    Raises
    ------
    TypeError
        What is no communicator, or one between two groups; an unknown keyword.
    ValueError
        Sizes that do not multiply to the ranks, or axes that cannot be combined; a rank that is not in the communicator
        (COMM_NULL).

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> mesh = parallel.Mesh(communicator, tensor=communicator.size)
    >>> mesh.size == communicator.size
    True
    """

    @answer_keywords
    def __init__(
        self,
        communicator=None,
        workers: Sequence[int] | None = None,
        *,
        data: int | None = None,
        expert: int = 1,
        pipeline: int = 1,
        context: int = 1,
        tensor: int = 1,
        space: int = 1,
        branch: int = 1,
    ):
        others = dict(expert=expert, pipeline=pipeline, context=context, tensor=tensor, space=space, branch=branch)
        self.made, self.wrapped = [], None
        if communicator is not None:
            given, communicator = communicator, with_collectives(communicator)
            self.wrapped = None if communicator is given else communicator
        self.communicator = communicator
        if communicator:
            from mpi4py.MPI import IN_PLACE  # which one process does without

            self.in_place = IN_PLACE
        self.rank, self.size = (communicator.rank, communicator.size) if communicator else (0, 1)
        self.model = self.parts = None
        self.part = 0, 1
        for axis in OTHERS:
            setattr(self, axis, None)
        workers = range(self.size) if workers is None else workers
        given = others | {"data": data, "workers": workers}
        self.agree({f"mesh: {name}": number for name, number in given.items()})
        self.sizes = sizes(len(workers), data, servers=self.size - len(workers), **others)
        if problem := conflict(self.sizes):
            raise ValueError(f"mesh: {problem}")
        self.model_size = model = math.prod(self.sizes[axis] for axis in DIVIDE_NETWORK)
        if self.sizes["data"] == len(workers):
            self.index, self.count = workers.index(self.rank) if self.rank in workers else None, len(workers)
            self.data = self.group(workers) if communicator else None
            self.places = dict.fromkeys(AXES, 0) | {"data": self.index}
            self.data_group, self.copies, self.shard = self, self.count, (self.index, self.count)
            return
        serves = dict.fromkeys(AXES, 0) | {"data": None}
        self.places = self.places_of(self.rank) if self.rank in workers else serves
        self.index, self.count = self.places["data"], self.sizes["data"]
        share, shares = self._place_along(SHARE_BATCH)
        self.shard, self.part = (None if self.index is None else share, shares), self._place_along(DIVIDE_ARRAYS)
        self.data = self._along("data")
        for axis in OTHERS:
            setattr(self, axis, self._along(axis) if self.sizes[axis] > 1 else None)
        divided = [axis for axis in DIVIDE_ARRAYS if self.sizes[axis] > 1]
        self.parts = self._along(*divided) if len(divided) > 1 else getattr(self, divided[0]) if divided else None
        self.model = self._along(*DIVIDE_NETWORK) if model > 1 else None
        alike = [axis for axis in AXES if axis not in DIVIDE_NETWORK]
        self.copies = math.prod(self.sizes[axis] for axis in alike)
        group = self._along(*alike) if self.copies > self.count else self.data
        self.data_group = Mesh(group) if self.count < len(workers) else self

    def _place_along(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return this rank's place among the ranks of some axes, and how many they are; 0 for a server."""
        place, ranks = 0, 1
        for axis in axes:
            place, ranks = place * self.sizes[axis] + (self.places[axis] or 0), ranks * self.sizes[axis]
        return place, ranks

    def places_of(self, rank: int) -> dict[str, int]:
        """Where a rank is on every axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return found

    def rank_at(self, **places: int) -> int:
        """The rank at these places; at this rank's own on axes that are not given."""
        rank = 0
        for axis in AXES:
            rank = rank * self.sizes[axis] + places.get(axis, self.places[axis])
        return rank

    def _along(self, *axes: str):
        """A communicator of the ranks that differ from this one in their places on these axes only; servers: None.

        A pipeline has one of its own: messages of a step that failed must not reach another trainer.
        """
        everyone = math.prod(self.sizes[axis] for axis in axes) == self.size
        if not self.communicator or (everyone and axes != ("pipeline",)):
            return self.communicator
        serves = self.index is None
        made = self.communicator.Split(self.size if serves else self.rank_at(**dict.fromkeys(axes, 0)), self.rank)
        self.made.append(made)
        return None if serves else made

    def group(self, ranks: Sequence[int]):
        """A communicator of these ranks, which goes with the mesh; None on the others (collective)."""
        if len(ranks) == self.size:
            return self.communicator
        made = self.communicator.Split(self.rank in ranks)
        self.made.append(made)
        return made if self.rank in ranks else None

    def sum(self, array: np.ndarray) -> None:
        """Sum an array over the ranks on the axis "data", in place."""
        if self.data:
            self.data.Allreduce(self.in_place, array)

    def sum_model(self, array: np.ndarray) -> None:
        """Sum an array over the ranks that have one network together, in place."""
        if self.model:
            self.model.Allreduce(self.in_place, array)

    def sum_parts(self, array: np.ndarray) -> None:
        """Sum an array over the ranks that have the other parts of this one's arrays, in place."""
        if self.parts:
            self.parts.Allreduce(self.in_place, array)

    def sum_all(self, array: np.ndarray) -> None:
        """Sum an array over all ranks, in place."""
        if self.communicator:
            self.communicator.Allreduce(self.in_place, array)

    def allgather(self, item) -> list:
        """What every rank has."""
        return self.communicator.allgather(item) if self.communicator else [item]

    def bcast(self, item):
        """What rank 0 has."""
        return self.communicator.bcast(item) if self.communicator else item

    def agree(self, mine: dict[str, object]) -> None:
        """Compare what every rank has been given, by name; see `agree`."""
        if self.communicator:
            agree(self.communicator, mine)

    def close(self) -> None:
        """Free the communicators that were made here (collective)."""
        for communicator in self.made:
            communicator.Free()
        self.made = []
        if self.wrapped is not None:
            self.wrapped.release()  # and not freed: its handle is the caller's
            self.wrapped = None


def agree(communicator, mine: dict[str, object]) -> None:
    """Compare what every rank has been given, by name (collective).

    Raises
    ------
    ReplicaError
        On every rank: what the ranks disagree on, and what two of them have.
    """
    everyone = communicator.allgather(mine)
    for key, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(key) != value:
                raise ReplicaError(f"ranks disagree on the {key}: rank 0: {value}, rank {rank}: {theirs.get(key)}")
