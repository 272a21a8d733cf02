"""Puzzles: write a schedule, and have it graded.

    from collectives import puzzles

    print(puzzles.ring)                       the task, its limits and the record
    grade = puzzles.ring.grade(my_allreduce)  right? and in how many rounds, elements, seconds
    grade.draw()                              a picture: of what is wrong, the round where it goes wrong

| file | holds |
|---|---|
| puzzle.py | what a puzzle is, and how an answer is graded |
| messages.py | broadcast, gather, sums: puzzles of messages, of links that they share, and of memory |
| stages.py | layers in shards, experts, pipelines, ring attention: puzzles with computation |
| survival.py | what is left when a rank is lost |
| solutions.py | answers: one for each puzzle; do not look |
"""

from collectives.puzzles.messages import (
    alltoall,
    broadcast,
    chain,
    doubling,
    gather,
    halving,
    memory,
    reduce_scatter,
    ring,
    scan,
    thin_link,
    torus,
)
from collectives.puzzles.puzzle import Grade, Puzzle
from collectives.puzzles.stages import Stage, experts, fsdp, gpipe, one_f_one_b, ring_attention, zero_bubble
from collectives.puzzles.survival import buddy, parity

ALL = (
    broadcast, gather, scan, doubling, reduce_scatter, ring, halving, alltoall, chain, memory, torus, thin_link,
    fsdp, experts, gpipe, one_f_one_b, zero_bubble, ring_attention, buddy, parity,
)  # fmt: skip

__all__ = [
    "ALL",
    "Grade",
    "Puzzle",
    "Stage",
    "alltoall",
    "broadcast",
    "buddy",
    "chain",
    "doubling",
    "experts",
    "fsdp",
    "gather",
    "gpipe",
    "halving",
    "memory",
    "one_f_one_b",
    "parity",
    "reduce_scatter",
    "ring",
    "ring_attention",
    "scan",
    "thin_link",
    "torus",
    "zero_bubble",
]
