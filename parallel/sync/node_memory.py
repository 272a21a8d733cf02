"""Gradients summed in the memory that the ranks of a node share; parameters and moments are there once for all.

Every rank writes its gradients where the others can read them, and publishes how far they are finished: a growing
prefix of the layout. The layout is cut into blocks. Whoever has done its own backward pass claims the next block, waits
until all have finished its gradients, adds them up in rank order, and updates the block's parameters; then comes a
barrier. So each element is summed and updated once, with the same bits whoever does it; nothing is copied back; and a
rank that is early does the work of one that is late, instead of waiting for it.

    rank 0   forward, backward                | block 2 | block 4 | forward, backward ...
    rank 1   forward, backward | block 0 | block 1 | block 3      | forward, backward ...
                                                                 barrier

For wide layers ranks publish the factors of gradients, which the rank that claims a block multiplies
(gradient_factors.py). Where an update needs norms of whole tensors, or nodes have to sync sums, each rank has a share
instead, which it sums and updates between two barriers. Between nodes with equally many ranks the holders of the same
share add up what they have, in buckets (messages.py): one leaves as soon as all ranks of the node have finished its
gradients, while backprop goes on. So each gradient travels between nodes once. Cost of a step: 2 / p reads of all
ranks' gradients, and a barrier (a few microseconds). Source of the two levels: Jia et al. 2018.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from collectives.failures.revocation import register, unregister
from collectives.node_memory.flags import Word
from collectives.node_memory.reduction import operation
from collectives.node_memory.window import SharedWindow
from collectives.steps import chunk
from nn.core.layout import ALIGN, Region
from nn.core.network import Network
from nn.optim.optimizers import Optimizer
from parallel.state.placed import in_transit
from parallel.sync.base import GradientSync
from parallel.sync.gradient_factors import Factors, WideWeight, wide_layers
from parallel.sync.messages import Buckets
from parallel.sync.step_result import StepMessage
from parallel.sync.undo_log import UndoLog


def reason_against(nodes: list[int]) -> str:
    """Return why ranks on these nodes do not share memory; empty where they can."""
    sizes = Counter(nodes)
    if max(sizes.values()) == 1:
        return "one rank a node" if len(nodes) > 1 else "one rank"
    if len(set(sizes.values())) > 1:
        return f"nodes with different numbers of ranks ({', '.join(map(str, sizes.values()))})"
    return ""


# Words of the window's flags: how far gradients are finished; of which step the message is written; from which sample
# to which the rank has factors, NONE where it made gradients.
FINISHED, MESSAGES, FIRST, LAST = range(Word.USER, Word.USER + 4)
NONE = -1
# Bytes of a block: those that are worth a claim; those of which a cache holds what is read and written.
SUMS = 1 << 14, 1 << 18
PRODUCTS = 1 << 18, 1 << 19  # BLAS copies gy for each


@dataclass
class Block:
    """A part of the layout that one rank sums and updates at a time."""

    number: int  # among those of a step, of all ranks
    place: slice
    wide: WideWeight | None  # the weight whose rows these are, given by factors
    gradients: list[np.ndarray]  # of each rank
    calls: list[Callable[[], None]]  # add them into `sums`
    sums: np.ndarray
    parameters: np.ndarray
    moments: dict[str, np.ndarray]
    region: Region

    def add(self, announced: list[slice | None]) -> None:
        """Sum what all ranks have computed: gradients, or factors of these samples."""
        if not self.wide or announced.count(None) == len(announced):
            for call in self.calls:
                call()
            return
        sums = self.sums.reshape(-1, self.wide.shape[1])
        samples, *more = merged(announced)
        self.wide.multiply(samples, self.place, sums)
        for samples in more:
            self.wide.multiply(samples, self.place, product := np.empty_like(sums))
            sums += product
        for gradient, own in zip(self.gradients, announced, strict=True):
            if own is None:
                self.sums += gradient

    def update(self, optimizer: Optimizer, step: int, sum_small=None) -> None:
        """Clip and apply the sums; `sum_small` as in Optimizer.update."""
        sys.audit("ringprop.update_block", step, self.parameters)
        optimizer.update(self.parameters, self.sums, self.moments, step, self.region, sum_small)


def merged(slices: list[slice | None]) -> list[slice]:
    """Return the slices, merged where one begins at the end of another."""
    found: list[slice] = []
    for each in slices:
        if each and found and found[-1].stop == each.start:
            each = slice(found.pop().start, each.stop)
        found += [each] if each else []
    return found


def shrinking_blocks(
    network: Network, wide: tuple[WideWeight, ...], ranks: int
) -> Iterator[tuple[slice, WideWeight | None]]:
    """Return the blocks of the layout; those of a wide layer's weight are whole rows.

    Each is a part of what is left, so that ranks are done at nearly the same time: guided self-scheduling
    (Polychronopoulos and Kuck 1987).
    """
    size, itemsize = network.layout.size, network.dtype.itemsize
    starts = {layer.place.start: layer for layer in wide}
    at = 0
    while at < size:
        layer = starts.get(at)
        end = layer.place.stop if layer else min((start for start in starts if start > at), default=size)
        unit = layer.shape[1] if layer else ALIGN
        while at < end:
            least, most = PRODUCTS if layer else SUMS
            elements = min(most, max(least, (size - at) * itemsize // (2 * ranks))) // itemsize
            stop = min(end, at + max(1, elements // unit) * unit)
            yield slice(at, stop), layer
            at = stop


class NodeMemory(GradientSync):
    """The shared arrays of one trainer, and how gradients in them become one sum.

    Parameters
    ----------
    nodes : list of int
        The node of each rank, as `collectives.failures.launch_check.nodes_of` gives it; `reason_against` must be empty.
    bucketing : bucket, first_bucket, overlap
        How sums travel between nodes, as for Buckets.
    limit : float
        Seconds after which a rank that waits for others gives up.
    survives : bool
        Whether ranks go on where one dies.

    Attributes
    ----------
    share : slice
        What of the layout this rank updates, where each has a share.
    """

    sends = "2 by messages, none in the memory of a node"
    notes = "ranks of a node share one copy of parameters and moments, which is counted here for each"
    phases = (*GradientSync.phases, ("wait", "sync.wait_for", False), ("communicate", "sync.barrier", True))

    def __init__(self, nodes: list[int], bucketing: dict, limit: float = 300.0, survives: bool = False):
        self.nodes, self.bucketing, self.limit, self.survives = nodes, bucketing, limit, survives

    def allocate(self):
        """Make parameters and moments once for the node, and for each rank gradients and messages that others read."""
        communicator, nodes, network, optimizer = self.mesh.communicator, self.nodes, self.network, self.optimizer
        rank, size, dtype = self.mesh.rank, self.layout.size, self.dtype
        behind = StepMessage.elements(network, self.addends)
        here = [other for other, place in enumerate(nodes) if place == nodes[rank]]
        node = register(MPI.Intracomm(communicator.Create_group(communicator.Get_group().Incl(here))))
        self.window = SharedWindow(node, self.limit, communicator.calls)
        unregister(node).Free()
        self.count = self.window.size
        self.between = None  # the ranks that hold the same share on all nodes, in the order of the nodes
        if len(set(nodes)) > 1:
            self.between = communicator.Split(self.window.rank, sorted(set(nodes)).index(nodes[rank]))
        self.parameters = self.window.empty_common(size, dtype)
        self.flat_buffer = self.window.empty(size + behind, dtype)
        parts = self.window.peers(self.flat_buffer).parts
        self.gradients, self.message = self.flat_buffer[:size], StepMessage.of(self.flat_buffer[size:], self.addends)
        self._refuse_aliases(parts)

        cuts = (chunk(-(-size // ALIGN), self.count, peer) for peer in range(self.count))
        self.shares = [slice(*(min(ALIGN * cut, size) for cut in found)) for found in cuts]
        self.share = self.shares[self.window.rank]
        lo, hi = self.share.start, self.share.stop
        self.claims = not (self.between or optimizer.clip or optimizer.norms)
        self.factors = Factors(
            self.window, wide_layers(network) if self.claims and self.forward_backward.by_samples else ()
        )
        widest = max((layer.shape[1] for layer in self.factors.layers), default=0)
        room = min(size, max(PRODUCTS[1] // dtype.itemsize, widest)) if self.claims else hi - lo
        self.sums = np.zeros(room + behind, dtype)  # the sums side by side: one message between nodes
        self.summed = StepMessage.of(self.sums[room:], self.addends)
        self._parts, (_, self._adding) = parts, operation(MPI.SUM, dtype)
        self._sum_messages = self._adding([each[size:] for each in parts], [self.sums[room:]])
        self._plans: dict[tuple[WideWeight, ...], list[Block]] = {}  # by what is given by factors
        self.steps = self.numbers = 0  # begun, failed ones too; claimed in earlier ones
        self.last_change = nodes[rank], 0
        self.changing: list[slice] = []  # the blocks of the step that has begun
        self.rescaled: tuple[str, float] | None = None  # what is done instead of a step
        self._small: dict[int, tuple] = {}  # elements -> (array, plan of its sum)
        self.buckets, self._filling = None, []  # what travels between nodes; the calls that sum each
        if self.between:
            ends = (end - lo for end in network.layout.ends.values() if lo < end < hi)
            self.buckets = Buckets(self.between, self.sums, ends, room, **self.bucketing)
            for start, stop in pairwise([0, *self.buckets.stops[:-1], room]):
                operands = [each[lo + start : lo + stop] for each in parts]
                self._filling.append(self._adding(operands, [self.sums[start:stop]]))
            self._filling[-1] += self._sum_messages
        self.slots = {name: self.window.empty_common(size, dtype) for name in optimizer.slots}
        self.undo_log = self._undo_log() if self.survives else None
        self.first_values()

    def _undo_log(self) -> UndoLog:
        """Make room for what an update overwrites, with factors of any layers."""
        blocks = self.count
        if self.claims:
            layers = self.factors.layers
            blocks = sum(
                len(list(shrinking_blocks(self.network, wide, self.count))) + len(layers) for wide in ((), layers)
            )
        return UndoLog(self.window, {"": self.parameters, **self.slots}, blocks)

    def _refuse_aliases(self, parts: list[np.ndarray]) -> None:
        """Sign this rank's arrays, and look for all signatures: memory that two ranks share by mistake is found."""
        flags, me = self.window.flags, self.window.rank
        signed = parts[me], self.gradients, self.flat_buffer[len(self.gradients) :]
        for array in signed:
            array[:1], array[-1:] = me + 1, me + 1
        signers = min(self.count, len(self.parameters))
        places = [r * (len(self.parameters) - 1) // max(1, signers - 1) for r in range(signers)]
        self.parameters[places[me : me + 1]] = -1 - me
        flags.barrier("signing memory")
        wrong = [r for r, array in enumerate(parts) if array[0] != r + 1 or array[-1] != r + 1]
        wrong += [me for array in signed if (array[:1] != me + 1).any()]
        unseen = [r for r, place in enumerate(places) if self.parameters[place] != -1 - r]
        flags.barrier("reading signatures")
        if wrong or unseen:
            raise RuntimeError(
                f"rank {me} of this node: the gradients of rank {wrong[0]} are not in memory of their own"
                if wrong
                else f"rank {me} of this node does not see the parameters that rank {unseen[0]} writes"
            )
        for array in (*signed, self.parameters):
            array[...] = 0
        flags.barrier("clearing memory")

    def _cut(self, wide: tuple[WideWeight, ...]) -> list[Block]:
        """Return the blocks of a step; made once for each choice of layers whose factors are shared."""
        if wide not in self._plans:
            places = enumerate(shrinking_blocks(self.network, wide, self.count))
            if not self.claims:
                places = [(self.window.rank, (self.share, None))]
            self._plans[wide] = [self._block(number, place, layer) for number, (place, layer) in places]
        return self._plans[wide]

    def _block(self, number: int, place: slice, wide: WideWeight | None) -> Block:
        gradients = [each[place] for each in self._parts]
        sums = self.sums[: place.stop - place.start]
        return Block(
            number,
            place,
            wide,
            gradients,
            self._adding(gradients, [sums]),
            sums,
            self.parameters[place],
            {name: slot[place] for name, slot in self.slots.items()},
            self.network.layout.region(place.start, place.stop),
        )

    def first_values(self):
        """Take the parameters and statistics of the first rank of the first node."""
        layout = self.layout
        if self.window.rank == 0:
            layout.initialize(self.parameters, self.seed)
        self.p, self.g, self.region = layout.views(self.parameters), layout.views(self.gradients), layout.region()
        self.window.broadcast(self.buffers)()
        self.barrier("the first parameters")
        if self.between:
            self.between.Bcast(self.parameters[self.share], root=0)
            self.between.Bcast(self.buffers, root=0)
            self.barrier("the first parameters of all nodes")

    def begin_step(self, step, samples, total, parts):
        """Gradients that are `ready` from now on are final; of samples in parts there are no factors."""
        self.step, place = step, self.forward_backward.contiguous_slice(samples, total, parts)
        self.steps += 1
        self.before = self.steps * (len(self.parameters) + 1)  # what FINISHED counts from
        if self.buckets:
            self.filled = 0
            self.buckets.begin_step()
        wide = self.factors.begin_step(self.steps, total)
        self._blocks = self._cut(wide)
        self.changing = [block.place for block in self._blocks] if self.claims else self.shares
        first, last = (place.start, place.stop) if place else (NONE, NONE)
        self.window.flags.publish(FIRST, first)
        self.window.flags.publish(LAST, last)
        return self.factors.hooks(wide, place)

    def begin_pass(self, micro):
        return self.ready if micro and micro.addend is not None else None

    def ready(self, end: int) -> None:
        """Announce that the gradients up to `end` are finished."""
        self.window.flags.publish(FINISHED, self.before + end)
        if self.buckets and self.buckets.early:
            self._fill(wait=False)

    def set_loss(self, loss, total):
        super().set_loss(loss, total)
        if not self.network.mixed:
            self.window.flags.publish(MESSAGES, self.steps)

    def end_addend(self):
        if self.network.mixed:  # only now it is known whether a number was too large
            self.window.flags.publish(MESSAGES, self.steps)

    def finish_step(self):
        """Sum the messages; and the gradients, unless that is left to who updates them."""
        flags = self.window.flags
        self.ready(len(self.parameters))
        flags.wait_until(MESSAGES, self.steps, "the loss")
        if self.buckets:
            self._fill(wait=True)
            if news := self.buckets.sum():
                self.say(news)
            return super().finish_step()
        for add in self._sum_messages:
            add()
        if not self.claims:
            self.wait_for(len(self.parameters))
            self._blocks[0].add([])
        return super().finish_step()

    def _fill(self, wait: bool) -> None:
        """Sum this rank's share, bucket by bucket, so far as all ranks of the node have finished it."""
        flags, stops = self.window.flags, self.buckets.stops
        while self.filled < len(stops):
            last = self.filled == len(stops) - 1  # with the messages
            stop = self.share.stop if last else self.share.start + stops[self.filled]
            late = min(flags.read_all(FINISHED)) < self.before + stop or (
                last and min(flags.read_all(MESSAGES)) < self.steps
            )
            if late and not wait:
                break
            self.wait_for(stop)
            for add in self._filling[self.filled]:
                add()
            self.buckets.ready(stops[self.filled])
            self.filled += 1
        self.buckets.ready(0)  # moves those that have left

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

    def update(self):
        """Update together with the other ranks of the node."""
        if self.claims:
            for block in self._claimed():
                self.wait_for(block.place.stop)
                block.add(self._announced() if block.wide else [])
                self._copy_for_undo(block.number, block.place)
                block.update(self.optimizer, self.step)
        else:
            self._copy_for_undo(self._blocks[0].number, self.share)
            self._blocks[0].update(self.optimizer, self.step, self.sum_small)
        self.barrier("the update")
        self.last_change = self.nodes[self.mesh.rank], self.steps

    def _copy_for_undo(self, block: int, place: slice) -> None:
        """Keep a copy of what is about to be changed, where changes may have to be undone."""
        if self.undo_log:
            self.undo_log.keep(block, place, self.steps)

    def rescale(self, slot, factor):
        """Multiply a slot of the optimizer: each rank its share."""
        self.steps += 1  # a change, as that of a step is
        self.changing, self.rescaled = self.shares, (slot, factor)
        self.barrier("what was there before a slot is rescaled")
        if slot in self.slots:
            self._copy_for_undo(self.window.rank, self.share)
            self.slots[slot][self.share] *= factor
        self.barrier("the slot that was rescaled")
        self.last_change, self.rescaled = (self.nodes[self.mesh.rank], self.steps), None

    def detach(self, changes):
        """Whoever is in a change that is not whole for anyone has what was before it; a rescaling is then made here."""
        here, _ = self.last_change
        undone = self.steps > max(change for node, change in changes if node == here)
        found = self.undo_log.before(self.steps, self.changing if undone else ())
        self.parameters, self.slots = found.pop(""), found
        if undone and self.rescaled and self.rescaled[0] in self.slots:
            slot, factor = self.rescaled
            self.slots[slot] *= factor

    def wait_for(self, stop: int) -> None:
        """Return when all ranks of the node have finished their gradients up to `stop`."""
        self.window.flags.wait_until(FINISHED, self.before + stop, "the sum of gradients")

    def _claimed(self) -> Iterator[Block]:
        """Yield the blocks that this rank claims; each rank ends with a number that is no block's."""
        blocks, first = self._blocks, self.numbers
        while (number := self.window.flags.claim() - first) < len(blocks):
            yield blocks[number]
        self.numbers += len(blocks) + self.count

    def _announced(self) -> list[slice | None]:
        """Return for each rank the samples whose factors it has announced, or None."""
        flags = self.window.flags
        pairs = zip(flags.read_all(FIRST), flags.read_all(LAST), strict=True)
        return [None if first == NONE else slice(first, last) for first, last in pairs]

    def barrier(self, what: str) -> None:
        """Return when all ranks of the node have come: then they can read what each of them wrote."""
        self.window.flags.barrier(what)

    def placed(self):
        yield from super().placed()
        yield from in_transit(*self.factors.arrays, *(self.undo_log.copies.values() if self.undo_log else ()))

    def describe(self):
        here = f"gradients summed in the memory that the {self.count} ranks of a node share, parameters there once"
        if self.factors.layers:
            here += "; of wide layers their factors, where that is less"
        if self.buckets:
            here += f", sums exchanged between {self.between.size} nodes in {self.buckets.describe()}"
        return here + "; what an update overwrites is kept until it is whole" * self.survives

    def close(self):
        if self.buckets:
            self.buckets.close()
            self.between.Free()
        self.window.free()
