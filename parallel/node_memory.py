"""Gradients summed in the memory that the ranks of a node share; parameters and moments are there once for all.

Every rank writes its gradients where the others can read them, and tells how far they are finished: a growing prefix of
the layout. The layout is cut into blocks. Whoever has done its own backward pass claims the next block, waits until all
have finished its gradients, adds them up in rank order, and updates the block's parameters; then all **meet**. So each
element is summed and updated once, with the same bits whoever does it; nothing is copied back; and a rank that is early
does the work of one that is late, instead of waiting for it.

    rank 0   forward, backward                | block 2 | block 4 | forward, backward ...
    rank 1   forward, backward | block 0 | block 1 | block 3      | forward, backward ...
                                                                 meet

Where an update needs norms of whole tensors, or nodes have to exchange sums, each rank has a share instead: meet; sum
the share, and between nodes with equally many ranks add up what holders of the same share have; update it; meet. So the
cables carry each gradient once. Cost of a step: 2 / p reads of all ranks' gradients, and a meeting (a few
microseconds). Source of the two levels: Jia et al. 2018.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from collectives.shared import operation
from collectives.steps import part
from collectives.window import SharedWindow
from nn.layout import ALIGN, Layout, Region
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


FINISHED, TOLD = 3, 4  # words of the window's flags: how far gradients are finished; of which step the tail is written
LEAST, MOST = 1 << 14, 1 << 18  # bytes of gradients that are worth a claim; of which a cache holds what a block needs


def claimed_at_once(size: int, ranks: int, itemsize: int) -> int:
    """Elements of a block: some blocks for each rank, which fit into the cache with what is read and written there."""
    nbytes = min(MOST, max(LEAST, size * itemsize // (4 * ranks)))
    return nbytes // itemsize // ALIGN * ALIGN


@dataclass
class Block:
    """A part of the layout that one rank sums and updates at a time."""

    place: slice
    calls: list[Callable[[], None]]  # add the gradients of all ranks into `sums`
    sums: np.ndarray
    parameters: np.ndarray
    region: Region

    def update(self, optimizer: Optimizer, moments: dict[str, np.ndarray], step: int, sum_small=None) -> None:
        optimizer.update(self.parameters, self.sums, moments, step, self.region, sum_small)


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
        What of the layout this rank updates, where each has a share.
    summed_tail : array
        The sum of all ranks' tails, after `sum`.
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
        self.claims = not (self.between or optimizer.clip or optimizer.norms)
        step = claimed_at_once(size, self.count, np.dtype(dtype).itemsize) if self.claims else max(1, hi - lo)
        room = min(step, size)
        self.wire = np.zeros(room + tail, dtype)  # the sums side by side: one message between nodes
        summed, self.summed_tail = self.wire[:room], self.wire[room:]
        _, adding = operation(MPI.SUM, np.dtype(dtype))
        self._sum_tails = adding([each[size:] for each in parts], [self.summed_tail])
        self._blocks = []
        for a in range(0, size, step) if self.claims else [lo]:  # a rank with an empty share takes part in norms
            place = slice(a, min(a + step, size)) if self.claims else self.share
            sums = summed[: place.stop - place.start]
            calls = adding([each[place] for each in parts], [sums])
            self._blocks.append(Block(place, calls, sums, self.parameters[place], layout.region(a, place.stop)))
        self.steps = self.updates = 0  # begun, and ended
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
        """Moments of the optimizer: arrays for the whole layout, of which there is one a node (collective)."""
        slots = {name: self.window.common(len(self.parameters), self.wire.dtype) for name in names}
        self._moments = [{name: slot[block.place] for name, slot in slots.items()} for block in self._blocks]
        return slots

    def start(self, statistics: np.ndarray) -> None:
        """Parameters and statistics are those of the first node."""
        self.meet("the first parameters")
        if self.between:
            self.between.Bcast(self.parameters[self.share], root=0)
            self.between.Bcast(statistics, root=0)
            self.meet("the first parameters of all nodes")

    def begin(self) -> None:
        """A step begins: gradients that are `ready` from now on are final."""
        self.steps += 1
        self.before = self.steps * (len(self.parameters) + 1)  # what FINISHED counts from

    def ready(self, end: int) -> None:
        """The gradients up to `end` are finished."""
        self.window.flags.tell(FINISHED, self.before + end)

    def told(self) -> None:
        """`tail` is written."""
        self.window.flags.tell(TOLD, self.steps)

    def sum(self) -> None:
        """Sum what all ranks have written into `tail`; and the gradients, unless that is left to who updates them."""
        flags = self.window.flags
        self.ready(len(self.parameters))
        flags.until(TOLD, self.steps, "the loss")
        for add in self._sum_tails:
            add()
        if self.claims:
            return
        flags.until(FINISHED, self.before + len(self.parameters), "the sum of gradients")
        for add in self._blocks[0].calls:
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

    def update(self, optimizer: Optimizer, step: int) -> None:
        """Update the parameters, together with the other ranks of the node."""
        if self.claims:
            for number in self._claimed():
                block = self._blocks[number]
                self.window.flags.until(FINISHED, self.before + block.place.stop, "the sum of gradients")
                for add in block.calls:
                    add()
                block.update(optimizer, self._moments[number], step)
        else:
            self._blocks[0].update(optimizer, self._moments[0], step, self.sum_small)
        self.updates += 1
        self.meet("the update")

    def _claimed(self) -> Iterator[int]:
        """Numbers of blocks that no other rank has; each rank ends with a number that is none."""
        blocks = len(self._blocks)
        first = self.updates * (blocks + self.count)
        while (number := self.window.flags.claim() - first) < blocks:
            yield number

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
