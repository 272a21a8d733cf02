"""What a program has in flight at once never meets: no receive into elements that are still sent or received."""

import pytest

from collectives import ALGORITHMS, Recv, RecvReduce, Reduce, Send
from collectives.algorithms.registry import NODES, by_messages
from collectives.checking.definitions import OPERATIONS
from collectives.executor.fusing import SumInto
from collectives.executor.program import Program, Start, Wait
from collectives.steps import Slice, overlap, writes


def touched(step):
    """What a transfer reads or writes, what an instruction writes."""
    if isinstance(step, SumInto):
        return list(step.targets)
    return [Slice(step.buf, step.lo, step.hi, 0)] if hasattr(step, "sends") else writes(step, 0)


def overlaps(transfer, places):
    return any(overlap(touched(transfer)[0], place._replace(rank=0)) for place in places)


def conflicts(program):
    """Transfers and local steps that begin while another transfer of the same elements is in flight."""
    flying, found = [], []
    for instruction in program.instructions:
        if isinstance(instruction, Wait):
            flying.remove(program.transfers[instruction.transfer])
            continue
        step = program.transfers[instruction.transfer] if isinstance(instruction, Start) else instruction
        reads = isinstance(instruction, Start) and step.sends
        places = touched(step)
        found += [(other, step) for other in flying if overlaps(other, places) and not (reads and other.sends)]
        if isinstance(instruction, Start):
            flying.append(step)
    assert not flying, "a transfer that nobody waits for"
    return found


def place(program, instruction):
    """Where in the program it stands: a Start and a Wait of one transfer are equal as tuples."""
    return [repr(each) for each in program.instructions].index(repr(instruction))


def test_a_receive_ahead_waits_for_the_send_of_its_elements():
    send, other = Send(1, "x", 0, 8), Recv(1, "y", 0, 8)
    for step, ahead in ((Recv(1, "x", 4, 12), False), (Recv(1, "x", 8, 12), True), (Recv(1, "y", 7, 9), False)):
        program = Program([(send, other), (step,)])
        assert not conflicts(program)
        assert (place(program, Start(2)) < place(program, Wait(1))) == ahead, step
    earlier = Program([(send,), (other,), (Recv(1, "x", 4, 12),)])  # sent in the round before the last
    assert not conflicts(earlier)
    assert place(earlier, Wait(0)) < place(earlier, Start(2))
    assert not conflicts(Program([(send, RecvReduce(1, "x", 0, 8))]))


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_nothing_meets_in_any_algorithm(operation):
    for entry in by_messages(operation).values():
        for size in (1, 2, 3, 5, 8):
            for count in [()] if operation == "barrier" else [(size,), (3 * size,), (40 * size,)]:
                more = {"nodes": [rank // 2 for rank in range(size)]} if entry.needs == NODES else {}
                more |= {"segment": 4} if entry.pipelined else {}
                more |= {"root": size - 1} if OPERATIONS[operation].rooted else {}
                for rank in range(size):
                    program = Program(entry.rounds(rank, size, *count, **more))
                    assert not conflicts(program), (entry.name, size, count, rank)


@pytest.mark.parametrize("name", ["shared_two_level", "shared_two_level_arrays"])
def test_fused_programs_keep_messages_barriers_and_sums_in_order(name):
    """What runs over nodes is compiled from the schedule that is checked: not a message, a barrier or a sum is lost."""
    from collectives.executor.program import live_rounds
    from collectives.steps import Barrier, Send

    entry = ALGORITHMS["allreduce"][name]
    for size, count in ((3, 7), (5, 3000), (6, 100_000)):
        for rank in range(size):
            options = {"nodes": [r // 2 for r in range(size)], "segment": 500}
            rounds = live_rounds(entry.rounds(rank, size, count, **options), rank)
            program = Program(entry.rounds(rank, size, count, **options), rank, fused=True)
            steps = [s for one in rounds for s in one]
            for kind in (Barrier, Send):
                wanted = sum(isinstance(s, kind) for s in steps)
                assert wanted == (
                    sum(t.sends for t in program.transfers)
                    if kind is Send
                    else sum(isinstance(i, Barrier) for i in program.instructions)
                )
            summed = [s for s in program.instructions if isinstance(s, SumInto) and len(s.operands) > 1]
            assert bool(summed) == any(isinstance(s, Reduce) for s in steps)
