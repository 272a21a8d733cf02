"""A pass of the compiler for schedules in memory that ranks share: between two barriers each slice is written once.

A schedule says what becomes of each slice, one operand after another:

    sum = slot of rank 0; sum = sum (+) slot of rank 1; sum = sum (+) own x; x = sum; own slot = sum

Carried out as it stands every line would read and write all of its slice. `fuse` follows which operands each slice is
made of at the end of a phase (a run of rounds that only copy and reduce), and so finds

    SumInto((slot of rank 0, slot of rank 1, own x), (x, own slot))

which node_memory/reduction.py makes in blocks that stay in cache. What a phase leaves in scratch that nothing reads is
not made.
"""

from collections.abc import Iterable
from typing import NamedTuple

from collectives.steps import Copy, Reduce, Slice, Step, overlap, reads, writes


class SumInto(NamedTuple):
    """Every target becomes the sum of the operands, from left to right; one operand: a copy."""

    operands: tuple[Slice, ...]
    targets: tuple[Slice, ...]


def fuse(rounds: list[list[Step]], rank: int, private: Iterable[str] = ("sum",)) -> list[list[Step | SumInto]]:
    """Return a rank's rounds, in which those that only copy and reduce have become sums, made one after another.

    Parameters
    ----------
    rounds : of this rank, without steps that do nothing
    rank : int
    private : names of scratch that no other rank reads

    Raises
    ------
    TypeError
        Slices that are written in one round and overlap without being the same.
    """
    fused, values = [], Values(rank)
    for steps in rounds:
        if all(isinstance(s, Copy | Reduce) for s in steps):
            values.follow(steps)
        else:
            fused += [values.end(), steps]
    fused.append(values.end())
    read = {place.buf for steps in fused for s in steps for place in operands_of(s, rank) if place.rank == rank}
    unread = set(private) - read
    kept = [[s for s in steps if not isinstance(s, SumInto)] or [*without(steps, unread)] for steps in fused]
    return [steps for steps in kept if steps]


def operands_of(s: Step | SumInto, rank: int) -> Iterable[Slice]:
    """Return what an instruction reads."""
    return s.operands if isinstance(s, SumInto) else reads(s, rank)


def without(sums: list[SumInto], buffers: set[str]) -> Iterable[SumInto]:
    """Yield the sums, less the targets in these buffers."""
    for s in sums:
        if targets := tuple(target for target in s.targets if target.buf not in buffers):
            yield SumInto(s.operands, targets)


class Values:
    """Which operands every slice is the sum of that was written since the phase began."""

    def __init__(self, rank: int):
        self.rank = rank
        self.sums: dict[Slice, tuple[Slice, ...]] = {}
        self.made: list[SumInto] = []
        self.copies = 0  # of operands, in all phases

    def follow(self, steps: list[Copy | Reduce]) -> None:
        """Follow a round: its steps read what was there before it."""
        sources, targets = ([place for s in steps for place in of(s, self.rank)] for of in (reads, writes))
        if any(overlap(a, b) and a != b for a in [*sources, *targets] for b in self.sums):
            self.make()
        if any(overlap(a, b) and a != b for i, a in enumerate(targets) for b in targets[:i]):
            raise TypeError(
                f"{steps}: slices that are written in one round must be the same, or have nothing in common"
            )
        values = [self.sums.get(source, (source,)) for source in sources]
        for s, target, value in zip(steps, targets, values, strict=True):
            if isinstance(s, Reduce):
                before = self.sums.get(target, (target,))
                value = value + before if s.operand_left else before + value
            self.sums[target] = value

    def make(self) -> None:
        """Write what is known so far, slices with the same operands together."""
        alike: dict[tuple[Slice, ...], list[Slice]] = {}
        for target, operands in self.sums.items():
            alike.setdefault(operands, []).append(target)
        sums = [SumInto(operands, tuple(targets)) for operands, targets in alike.items()]
        kept: dict[Slice, Slice] = {}
        for i, fused in enumerate(sums):  # an operand that is written before it is read, or beside its place
            for s in fused.operands:
                before = any(overlap(s, target) for other in sums[:i] for target in other.targets)
                if before or any(overlap(s, target) and s != target for target in fused.targets):
                    kept[s] = Slice(f"(kept {self.copies})", 0, s.hi - s.lo, self.rank)
                    self.made.append(SumInto((s,), (kept[s],)))
                    self.copies += 1
        self.made += [SumInto(tuple(kept.get(s, s) for s in f.operands), f.targets) for f in sums]
        self.sums = {}

    def end(self) -> list[SumInto]:
        """End the phase: return the sums that it makes."""
        self.make()
        made, self.made = self.made, []
        return made
