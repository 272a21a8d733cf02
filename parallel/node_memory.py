"""Gradients summed in the memory that the ranks of a node share; parameters and moments are there once for all.

A step has two meetings. Every rank writes its gradients into an array that the others can read; **meet**; rank r sums
slice r over all ranks' arrays and updates slice r of the parameters; **meet**. So each element is summed by one rank,
in rank order, and updated once: parameters cannot differ between ranks, nothing is copied back, and a rank makes a p-th
of the update with a p-th of the moments.

    rank 0   forward, backward | sum and update slice 0 | forward, backward ...
    rank 1   forward, backward | sum and update slice 1 | forward, backward ...
                              meet                     meet

Across nodes with equally many ranks each there are two levels: the slice sums of a node go through an allreduce between
the ranks that hold the same slice on every node, and the nodes' cables carry each gradient once. Cost of a step: 2 / p
reads of all ranks' gradients, and the two meetings (a few microseconds). Source of the two levels: Jia et al. 2018.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from mpi4py import MPI

from collectives.shared import BLOCK, operation
from collectives.steps import part
from collectives.window import SharedWindow
from nn.layout import ALIGN, Layout
from nn.optimizers import Optimizer


def nodes_of(communicator: MPI.Intracomm) -> list[int]:
    """For each rank the first rank on its node (collective)."""
    node = MPI.Intracomm(communicator.Split_type(MPI.COMM_TYPE_SHARED))
    first = node.bcast(communicator.rank)
    node.Free()
    return communicator.allgather(first)


def why_not(nodes: list[int]) -> str:
    """Why ranks on these nodes do not share memory; empty where they can."""
    sizes = Counter(nodes)
    if max(sizes.values()) == 1:
        return "one rank a node" if len(nodes) > 1 else "one rank"
    if len(set(sizes.values())) > 1:
        return f"nodes with different numbers of ranks ({', '.join(map(str, sizes.values()))})"
    return ""


class NodeMemory:
    """The shared arrays of one trainer, and how gradients in them become one sum (collective).

    Parameters
    ----------
    communicator : collectives.Communicator
    nodes : list of int
        The node of each rank, as `nodes_of` gives it; `why_not` must be empty.
    layout : Layout
        Of the parameters.
    optimizer : Optimizer
    tail : int
        Elements that are summed with the gradients and wanted by every rank.
    dtype : NumPy dtype
    limit : float
        Seconds after which a rank that waits for others gives up.

    Attributes
    ----------
    parameters : flat array, one for the node
    gradients, tail : this rank's arrays, which the others read
    share : slice
        What of the layout this rank sums and updates.
    summed, summed_tail : arrays
        Of the share, and of the tail: sums over all ranks, after `sum`. Where the update of a block needs nothing of
        the others, a block is summed right before, while it is in the cache, and `summed` has room for one.
    """

    def __init__(
        self,
        communicator,
        nodes: list[int],
        layout: Layout,
        optimizer: Optimizer,
        tail: int,
        dtype,
        limit: float = 300.0,
    ):
        rank, size = communicator.rank, layout.size
        here = [other for other, place in enumerate(nodes) if place == nodes[rank]]
        node = MPI.Intracomm(communicator.Create_group(communicator.Get_group().Incl(here)))
        self.window = SharedWindow(node, limit)
        node.Free()
        self.count = self.window.size
        self.between = None  # the ranks that hold the same share on all nodes, in the order of the nodes
        if len(set(nodes)) > 1:
            self.between = communicator.Split(self.window.rank, sorted(set(nodes)).index(nodes[rank]))
        self.parameters = self.window.common(size, dtype)
        message = self.window.empty(size + tail, dtype)
        parts = self.window.peers(message).parts
        self.gradients, self.tail = message[:size], message[size:]
        self._refuse_aliases(parts)

        lo, hi = (min(ALIGN * cut, size) for cut in part(-(-size // ALIGN), self.count, self.window.rank))
        self.share = slice(lo, hi)
        whole = bool(self.between or optimizer.clip or optimizer.norms)  # else block by block
        step = max(1, hi - lo) if whole else BLOCK // np.dtype(dtype).itemsize
        room = min(step, hi - lo)
        self.wire = np.zeros(room + tail, dtype)  # the sums side by side: one message between nodes
        self.summed, self.summed_tail = self.wire[:room], self.wire[room:]
        _, adding = operation(MPI.SUM, np.dtype(dtype))
        self._sums = adding([each[size:] for each in parts], [self.summed_tail])
        self._blocks = []  # (calls that sum, place in the layout, sums, parameters, Region)
        for a in range(lo, hi, step):
            b = min(a + step, hi)
            sums, calls = self.summed[: b - a], adding([each[a:b] for each in parts], [self.summed[: b - a]])
            if whole:
                self._sums, calls = self._sums + calls, []
            self._blocks.append((calls, slice(a, b), sums, self.parameters[a:b], layout.region(a, b)))
        if whole and not self._blocks:  # a rank without a share takes part in norms
            self._blocks = [([], self.share, self.summed, self.parameters[lo:hi], layout.region(lo, hi))]
        self._small: dict[int, tuple] = {}  # elements -> (array, plan of its sum)

    def _refuse_aliases(self, parts: list[np.ndarray]) -> None:
        """Every rank signs its arrays, and looks for all signatures: memory that two share by mistake is found."""
        flags, me = self.window.flags, self.window.rank
        signed = parts[me], self.gradients, self.tail
        for array in signed:
            array[:1], array[-1:] = me + 1, me + 1
        self.parameters[me * (len(self.parameters) - 1) // max(1, self.count - 1)] = -1 - me
        flags.together("signing memory")
        wrong = [r for r, array in enumerate(parts) if array[0] != r + 1 or array[-1] != r + 1]
        wrong += [me for array in signed if array[0] != me + 1]
        places = {r * (len(self.parameters) - 1) // max(1, self.count - 1): r for r in range(self.count)}
        apart = [r for place, r in places.items() if self.parameters[place] != -1 - r]
        flags.together("reading signatures")
        if wrong or apart:
            raise RuntimeError(
                f"rank {me} of this node: the gradients of rank {wrong[0]} are not in memory of their own"
                if wrong
                else f"rank {me} of this node does not see the parameters that rank {apart[0]} writes"
            )
        for array in (*signed, self.parameters):
            array[...] = 0
        flags.together("clearing memory")

    def slots(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Moments of the optimizer: whole arrays, of which each rank writes its share (collective)."""
        return {name: self.window.common(len(self.parameters), self.wire.dtype) for name in names}

    def start(self, statistics: np.ndarray) -> None:
        """Parameters and statistics are those of the first node."""
        self.meet("the first parameters")
        if self.between:
            self.between.Bcast(self.parameters[self.share], root=0)
            self.between.Bcast(statistics, root=0)
            self.meet("the first parameters of all nodes")

    def sum(self) -> None:
        """Sum what all ranks have written into `tail`, and into `gradients` where that is not left to `update`."""
        self.window.flags.together("the sum of gradients")
        for add in self._sums:
            add()
        if self.between:
            self.between.Allreduce(MPI.IN_PLACE, self.wire)

    def sum_small(self, array: np.ndarray) -> None:
        """Sum a small array over the shares, in place: the part of a norm that each holds.

        Raises
        ------
        FloatingPointError
            On every rank alike, where a sum is not finite.
        """
        if array.size not in self._small:
            mine = np.empty(array.size, array.dtype)
            self._small[array.size] = mine, self.window.allreduce(None, mine)
        mine, plan = self._small[array.size]
        mine[:] = array.reshape(-1)
        plan()
        if not np.isfinite(mine).all():
            raise FloatingPointError(
                "the norm of a gradient or parameter is not finite; the parameters were not updated. "
                "A lower learning rate or float64 may help."
            )
        array[...] = mine.reshape(array.shape)

    def update(self, optimizer: Optimizer, slots: dict[str, np.ndarray], step: int) -> None:
        """Update this rank's share of the parameters with the sums; then all have theirs."""
        for calls, place, sums, parameters, region in self._blocks:
            for add in calls:
                add()
            moments = {name: slot[place] for name, slot in slots.items()}
            optimizer.update(parameters, sums, moments, step, region, self.sum_small)
        self.meet("the update")

    def meet(self, what: str) -> None:
        """Return when all ranks of the node have come: then they can read what each of them wrote."""
        self.window.flags.together(what)

    def describe(self) -> str:
        """Where gradients are summed, in words."""
        here = f"gradients summed in the memory that the {self.count} ranks of a node share, parameters there once"
        return here if self.between is None else f"{here}, sums exchanged between {self.between.size} nodes"

    def close(self) -> None:
        """Free the window and the communicator between nodes (collective)."""
        if self.between:
            self.between.Free()
        self.window.free()
