"""Schedules as GOAL and prices as Chrome trace events: what is written is read again."""

import json

import pytest
from trace_events import mistakes_in_trace

from collectives import ALGORITHMS, Send, draw_timeline, price
from collectives.algorithms.registry import by_messages
from collectives.pricing.networks import Network
from collectives.pricing.trace_formats import read_chrome_trace, read_goal, write_chrome_trace, write_goal
from collectives.steps import Compute, Copy, Reduce, is_live

NETWORK = Network.torus((2, 3), 1e9, 1e-6)


@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "reduce_scatter"])
def test_a_schedule_survives_goal(operation, tmp_path):
    written = 0
    for name, entry in by_messages(operation).items():
        count, right = 600, [list(entry.rounds(rank, 6, 600)) for rank in range(6)]
        if any(is_live(s) and type(s) in (Copy, Reduce) for rounds in right for steps in rounds for s in steps):
            continue  # GOAL has no words for these
        write_goal(tmp_path / "a.goal", entry, 6, count)
        again = read_goal(tmp_path / "a.goal")
        for rank in range(6):
            sizes = lambda rounds: [
                sorted((type(s) is Send, s.peer, s.hi - s.lo) for s in steps if is_live(s))
                for steps in rounds
                if any(map(is_live, steps))
            ]
            assert sizes(again(rank, 6)) == sizes(right[rank]), name
        assert price(again, 6, count, 4, NETWORK).seconds == price(entry.rounds, 6, count, 4, NETWORK).seconds
        written += 1
    assert written


def test_sums_become_computation(tmp_path):
    write_goal(tmp_path / "a.goal", ALGORITHMS["allreduce"]["doubling"], 2, 1000, 4, gamma=1e-9)
    rounds = list(read_goal(tmp_path / "a.goal")(0, 2))
    assert [type(step) for steps in rounds for step in steps][-1] is Compute
    assert rounds[-1][0].seconds == pytest.approx(4e-6)


def test_steps_without_a_word_are_refused(tmp_path):
    with pytest.raises(ValueError, match="GOAL has no word for"):
        write_goal(tmp_path / "a.goal", lambda rank, size, count: iter([(Copy("y", 0, 1, "x", 0),)]), 1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not begin with num_ranks"),
        ("num_ranks 2\nrank 2 {\n}", "line 2: no GOAL"),
        ("num_ranks 2\nrank 0 {\nl1: send 8b to 2 tag 0\n}", "line 3: there is no rank 2"),
        ("num_ranks 1\nrank 0 {\nl1: sleep 8\n}", "line 3: no GOAL: 'l1: sleep 8'"),
        ("num_ranks 1\nrank 0 {\nl1: calc 8\nl1 requires l2\n}", "l1 requires l2, which is not there"),
        ("num_ranks 1\nrank 0 {\nl1: calc 8\nl2: calc 1\nl1 requires l2\nl2 requires l1\n}", "requires itself"),
        ("num_ranks 1\nrank 0 {\nl1: calc 8\nl1 requires l1\n}", "requires itself"),
    ],
)
def test_files_that_are_no_goal_are_refused(text, words, tmp_path):
    (tmp_path / "wrong.goal").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_goal(tmp_path / "wrong.goal")


def test_a_price_survives_chrome_trace_events(tmp_path):
    priced = price(ALGORITHMS["allreduce"]["ring"], 6, 600, 4, NETWORK, trace=True)
    write_chrome_trace(tmp_path / "a.json", priced)
    events = read_chrome_trace(tmp_path / "a.json")
    assert sorted((e["rank"], e["start"], e["end"]) for e in events) == [
        pytest.approx(row) for row in sorted((s.rank, s.start, s.end) for s in priced.trace.rounds)
    ]
    assert draw_timeline(events).axes
    everything = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "s" for event in everything) == priced.messages == sum(e["ph"] == "f" for e in everything)
    with pytest.raises(ValueError, match="without a trace"):
        write_chrome_trace(tmp_path / "b.json", price(ALGORITHMS["allreduce"]["ring"], 2, 8, 4, NETWORK))
    (tmp_path / "wrong.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"wrong.json: no Chrome trace"):
        read_chrome_trace(tmp_path / "wrong.json")


@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "alltoall"])
def test_perfetto_finds_every_round_and_both_ends_of_every_message(operation, tmp_path):
    file = tmp_path / "a.json"
    for network in (Network.fat_tree(4, 4), Network.star(6, 1e9, 0), Network.hockney(1e-6, 1e-9)):
        for entry in by_messages(operation).values():
            priced = price(entry, 6, 600, 4, network, trace=True)
            write_chrome_trace(file, priced)
            fields = json.loads(file.read_text())
            assert not mistakes_in_trace(fields), entry.name
            rounds = {(e["pid"], e["name"]): e for e in fields["traceEvents"] if e["ph"] == "X"}
            ends = [e for e in fields["traceEvents"] if e["ph"] == "f"]
            for flight, end in zip(priced.trace.flights, ends, strict=True):  # in the round that received it
                of_round = rounds[flight.dest, f"round {flight.received_in}"]
                assert of_round["ts"] <= end["ts"] <= of_round["ts"] + max(0, of_round["dur"] - 1e-4), entry.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dur": -1.0}, "below zero"),
        ({"ph": "Z"}, "no kind of event"),
        ({"dur": 15.0}, "ends after the event"),
        ({"pid": "rank 0"}, "have numbers"),
        ({"dur": 0.0}, "ends in no event"),
    ],
)
def test_what_perfetto_would_draw_wrong_is_found(change, words, tmp_path):
    write_chrome_trace(
        tmp_path / "a.json", price(ALGORITHMS["allreduce"]["ring"], 2, 5000, 4, Network.hockney(1e-6, 1e-9), trace=True)
    )
    fields = json.loads((tmp_path / "a.json").read_text())
    first = next(event for event in fields["traceEvents"] if event["ph"] == "X")
    first.update(change)
    assert words in " ".join(mistakes_in_trace(fields))
