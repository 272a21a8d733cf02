"""The simulator finds each kind of mistake, and says which rank and round it is in."""

import pytest

from collectives.checking.simulator import (
    Deadlock,
    LengthMismatch,
    RuleBroken,
    UnreceivedMessages,
    find_cycle,
    simulate,
)
from collectives.steps import Barrier, Copy, Recv, RecvReduce, Reduce, Send


def run(*programs, n=4, synchronous=True, **buffers):
    """Run one list of rounds a rank, each rank with x of n elements."""
    held = [
        {"x": [((r, i),) for i in range(n)], **{k: list(v) for k, v in buffers.items()}} for r in range(len(programs))
    ]
    stats = simulate(lambda rank: iter(programs[rank]), held, synchronous)
    return held, stats


def test_a_round_is_a_simultaneous_assignment():
    """Two ranks swap their x: each sends what it held before the round, and reductions add to it."""
    swap = lambda peer: [
        (Send(peer, "x", 0, 2), Recv(peer, "x", 2, 4)),
        (Send(peer, "x", 0, 2), RecvReduce(peer, "x", 0, 2)),
    ]
    held, stats = run(swap(1), swap(0))
    assert held[0]["x"] == [((1, 0), (0, 0)), ((1, 1), (0, 1)), ((1, 0),), ((1, 1),)]
    assert held[1]["x"] == [((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 0),), ((0, 1),)]
    assert stats.rounds == [2, 2] and stats.messages == [2, 2] and stats.sent == [4, 4] and stats.reduced == [2, 2]
    assert stats.moved == 4


def test_reductions_of_a_round_apply_in_listed_order():
    receives = [
        (
            RecvReduce(2, "x", 0, 1, operand_left=False),
            RecvReduce(1, "x", 0, 1, operand_left=False),
            Reduce("x", 0, 1, "y", 0),
        )
    ]
    sends = [(Send(0, "x", 0, 1),)]
    held, _ = run(receives, sends, sends, y=[((9, 9),)])
    assert held[0]["x"][0] == ((9, 9), (0, 0), (2, 0), (1, 0))


def test_messages_of_a_pair_match_in_listed_order():
    held, _ = run(
        [(Send(1, "x", 0, 1), Send(1, "x", 1, 2))], [(Recv(0, "x", 3, 4),), (Recv(0, "x", 2, 3),)], synchronous=False
    )
    assert held[1]["x"][2:] == [((0, 1),), ((0, 0),)]


def test_steps_without_elements_are_dropped():
    _, stats = run([(Send(1, "x", 2, 2),)], [(Recv(0, "x", 4, 4),)])
    assert stats.messages == [0, 0]


def test_scratch_grows_as_the_steps_reach():
    held, _ = run([(Copy("tmp", 5, 7, "x", 0),), (Copy("x", 2, 4, "tmp", 5),)])
    assert held[0]["x"] == [((0, 0),), ((0, 1),), ((0, 0),), ((0, 1),)]


def ring_of_sends(size):
    """Everyone sends before it receives: passes with eager sends, hangs with synchronous ones."""
    return [[(Send((r + 1) % size, "x", 0, 1),), (Recv((r - 1) % size, "x", 1, 2),)] for r in range(size)]


def test_deadlock_of_synchronous_sends_is_told_with_its_cycle():
    run(*ring_of_sends(3), synchronous=False)
    with pytest.raises(Deadlock) as told:
        run(*ring_of_sends(3))
    assert told.value.waits == {0: [1], 1: [2], 2: [0]}
    assert told.value.cycle == [0, 1, 2, 0]
    assert "rank 1, round 0: waits for its message to be taken by rank 2 (in round 0)" in str(told.value)
    assert "cycle: 0 -> 1 -> 2 -> 0" in str(told.value)


def test_a_wait_for_a_finished_rank_is_told_without_a_cycle():
    with pytest.raises(Deadlock) as told:
        run([], [(Recv(0, "x", 0, 1),)], [(Recv(1, "x", 0, 1),)])
    assert told.value.waits == {1: [0], 2: [1]} and told.value.cycle == []
    assert "rank 1, round 0: waits to receive from rank 0 (finished)" in str(told.value)


def test_find_cycle_looks_past_ranks_that_only_wait_for_the_cycle():
    assert find_cycle({0: [3], 3: [4, 1], 1: [2], 2: [3], 5: [0]}) == [3, 1, 2, 3]
    assert find_cycle({0: [1], 1: [2], 2: []}) == []


def test_left_over_messages():
    with pytest.raises(UnreceivedMessages, match="to rank 1: Send"):
        run([(Send(1, "x", 0, 1),)], [], synchronous=False)


def test_length_mismatch_names_both_sides():
    with pytest.raises(LengthMismatch, match=r"rank 1, round 0: Recv.* expects 2 .* rank 0 sends 3 in its round 0"):
        run([(Send(1, "x", 0, 3),)], [(Recv(0, "x", 0, 2),)])


@pytest.mark.parametrize(
    "steps, said",
    [
        ((Copy("x", 0, 2, "y", 0), Copy("x", 1, 3, "y", 0)), "write the same elements"),
        ((Copy("x", 0, 2, "y", 0), Reduce("x", 1, 3, "y", 0)), "write the same elements"),
        ((Send(1, "x", 0, 2), Copy("x", 1, 3, "y", 0)), "writes elements that Send"),
        ((Copy("x", 0, 2, "y", 0), Copy("y", 0, 1, "x", 3)), "writes elements that Copy"),
        ((Copy("x", 0, 2, "x", 1),), "writes elements that Copy"),
        ((Reduce("x", 0, 2, "y", 0), Reduce("y", 1, 2, "x", 3)), "writes elements that Reduce"),
        ((Send(1, "x", 2, 5),), "reaches outside x, which has 4 elements"),
        ((Copy("x", -1, 1, "y", 0),), "reaches outside x"),
        ((Send(0, "x", 0, 1),), "names rank 0, which must be another rank of 0 ... 1"),
        ((Send(2, "x", 0, 1),), "names rank 2"),
        ((Send(1, "tmp", 0, 1),), "reads elements of tmp that nothing wrote"),
        ((Reduce("tmp", 0, 1, "x", 0),), "reads elements of tmp that nothing wrote"),
        ((Barrier((0, 1, 0)),), "must name ranks of 0 ... 1, each once and this one among them"),
        ((Barrier((1,)),), "must name ranks of 0 ... 1, each once and this one among them"),
        (("send", 1), "is not a step"),
        (Send(1, "x", 0, 1), "a round is a tuple of steps"),
    ],
)
def test_broken_rules_are_named_with_rank_and_round(steps, said):
    with pytest.raises(RuleBroken, match=r"rank 0, round 1: .*" + said):
        run([(Copy("x", 0, 1, "y", 1),), steps], [], synchronous=False, y=[((7, 7),)] * 3)


def test_reductions_may_share_a_target_and_write_what_is_sent():
    programs = [
        [(Send(1, "x", 0, 2), RecvReduce(1, "x", 0, 2), Reduce("x", 1, 3, "y", 0))],
        [(Send(0, "x", 0, 2), RecvReduce(0, "x", 0, 2))],
    ]
    held, _ = run(*programs, y=[((7, 7),)] * 2)
    assert held[1]["x"][1] == ((0, 1), (1, 1)), "the message carries the value from before the round"
    assert held[0]["x"][1] == ((7, 7), (1, 1), (0, 1))
