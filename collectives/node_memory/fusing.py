"""From a schedule in shared memory to calls of NumPy: between two meetings each slice is written once.

A text says what becomes of each slice, one operand after another:

    sum = slot of rank 0; sum = sum (+) slot of rank 1; sum = sum (+) own x; x = sum; own slot = sum

Carried out as it stands every line would read and write all of its slice. `fuse` follows which operands each slice is
made of at the end of a phase (what lies between two meetings), and so finds

    sum(slot of rank 0, slot of rank 1, own x) -> x, own slot

which reduction.py makes in blocks that stay in cache. What a phase leaves in scratch that nobody reads is not made.
"""

from collections.abc import Iterable
from typing import NamedTuple

from collectives.steps import Copy, Meet, Reduce, Round, Slice, is_live, overlap, reads, writes


class Fused(NamedTuple):
    """Every target becomes the sum of the operands, from left to right; one operand: a copy."""

    operands: tuple[Slice, ...]
    targets: tuple[Slice, ...]

    def without(self, buffers: set[str]) -> "Fused":
        """The same, less the targets in these buffers."""
        return self._replace(targets=tuple(target for target in self.targets if target.buf not in buffers))


Phase = list[Fused]


def phases(rounds: Iterable[Round], rank: int, private: Iterable[str] = ("sum",)) -> list[Phase]:
    """What a rank's schedule does before its first meeting, between any two, and after the last.

    Parameters
    ----------
    rounds : of this rank
    rank : int
    private : names of scratch that no other rank reads

    Raises
    ------
    TypeError
        A step that is no move in memory and no meeting; slices of one round that overlap without being the same.
    """
    found, now = [], Values(rank)
    for steps in rounds:
        steps = [s for s in steps if is_live(s)]
        if any(isinstance(s, Meet) for s in steps):
            found.append(now.end())
            now = Values(rank)
        else:
            now.follow(steps)
    found.append(now.end())
    read = {s.buf for phase in found for fused in phase for s in fused.operands if s.rank == rank}
    unread = set(private) - read
    return [[kept for fused in phase if (kept := fused.without(unread)).targets] for phase in found]


class Values:
    """Which operands every slice is the sum of that was written since the last meeting."""

    def __init__(self, rank: int):
        self.rank = rank
        self.sums: dict[Slice, tuple[Slice, ...]] = {}
        self.made: Phase = []

    def follow(self, steps: list[Copy | Reduce]) -> None:
        """A round: its steps read what was there before it."""
        for s in steps:
            if not isinstance(s, Copy | Reduce):
                raise TypeError(f"{s!r}: a schedule in shared memory copies, reduces and meets")
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
                held = self.sums.get(target, (target,))
                value = value + held if s.left else held + value
            self.sums[target] = value

    def make(self) -> None:
        """Write what is known so far, slices with the same operands together."""
        alike: dict[tuple[Slice, ...], list[Slice]] = {}
        for target, operands in self.sums.items():
            alike.setdefault(operands, []).append(target)
        sums = [Fused(operands, tuple(targets)) for operands, targets in alike.items()]
        kept: dict[Slice, Slice] = {}
        for i, fused in enumerate(sums):  # an operand that is written before it is read, or beside its place
            for s in fused.operands:
                before = any(overlap(s, target) for other in sums[:i] for target in other.targets)
                if before or any(overlap(s, target) and s != target for target in fused.targets):
                    kept[s] = Slice(f"(kept {len(self.made)})", 0, s.hi - s.lo, self.rank)
                    self.made.append(Fused((s,), (kept[s],)))
        self.made += [f._replace(operands=tuple(kept.get(s, s) for s in f.operands)) for f in sums]
        self.sums = {}

    def end(self) -> Phase:
        self.make()
        return self.made
