"""Schedules as CSV: what PyTorch's pipelining reads and writes; mistakes are told with rank and column."""

import random

import pytest

from parallel.strategies.pipeline.actions import Action, Overlap, PipelineError, parse, read, write
from parallel.strategies.pipeline.checking import check
from parallel.strategies.pipeline.schedules import SCHEDULES, rows


@pytest.mark.parametrize(
    "text, action",
    [
        ("2F0", Action(2, "F", 0)),
        ("1I3", Action(1, "I", 3)),
        ("0W3", Action(0, "W", 3)),
        ("1B2", Action(1, "B", 2)),
        ("3SEND_F1", Action(3, "SEND_F", 1)),
        ("4RECV_F1", Action(4, "RECV_F", 1)),
        ("12SEND_B10", Action(12, "SEND_B", 10)),
        ("11RECV_B10", Action(11, "RECV_B", 10)),
        ("2UNSHARD", Action(2, "UNSHARD")),
        ("(0F7;7B3)OVERLAP_F_B", Overlap((Action(0, "F", 7), Action(7, "B", 3)))),
        (" 2F0 ", Action(2, "F", 0)),
        ("", None),
    ],
)
def test_an_action_is_read_and_written(text, action):
    assert parse(text) == action
    assert ("" if action is None else str(action)) == text.strip()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_comes_back_as_it_was_written(name):
    given = rows(name, 4, 9)
    assert read(write(given)) == given
    assert read(write(given).splitlines(keepends=True)) == given  # as lines of a file


def test_two_ranks_in_text():
    assert write(rows("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


EXPECTED = ": expected stage, kind, micro-batch, such as 2F0, 1I3, 3SEND_F1"
OVERLAP = ": an overlap is of computations, such as (0F7;7B3)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text, why",
    [
        ("0F0,0X0", "rank 0, column 1: '0X0' is no action" + EXPECTED),
        ("0F0\n1F", "rank 1, column 0: '1F': F goes with a micro-batch"),
        ("0UNSHARD3", "rank 0, column 0: '0UNSHARD3': UNSHARD goes without a micro-batch"),
        ("0F0;0B0", "rank 0, column 0: '0F0;0B0' is no action" + EXPECTED),
        ("(0F1)OVERLAP_F_B", "rank 0, column 0: '(0F1)OVERLAP_F_B'" + OVERLAP),
        ("(0F1;0SEND_F0)OVERLAP_F_B", "rank 0, column 0: '(0F1;0SEND_F0)OVERLAP_F_B'" + OVERLAP),
        ("", "a schedule has a row for each rank; this text has none"),
        ("0" * 200_000, "a schedule is CSV, a row for each rank: field larger than field limit (131072)"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, why):
    with pytest.raises(PipelineError) as told:
        read(text)
    assert str(told.value) == why


def test_rubbish_is_refused_by_name_and_nothing_else_happens():
    draw = random.Random(8)
    text = write(rows("dualpipev", 2, 4))
    for _ in range(300):
        rubbish = list(text)
        for _ in range(draw.randint(1, 4)):
            rubbish[draw.randrange(len(rubbish))] = draw.choice('0123FBIW;,()_\n "SENDRECV')
        try:
            check(read("".join(rubbish)))
        except PipelineError as error:
            assert str(error)


LOWERED = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


def test_messages_in_the_text_are_waited_for():
    """By the computation that needs them; a receive that is posted early does not hold up what comes before its use."""
    assert check(read(LOWERED)).makespan == 9
    early = LOWERED.replace("0RECV_B1,", "").replace("0F0,", "0RECV_B1,0F0,")
    assert check(read(early)).makespan == 9
    with pytest.raises(PipelineError, match=r"1F0.*1RECV_F0"):
        check(read(LOWERED.replace("1RECV_F0,1F0", "1F0,1RECV_F0")))


@pytest.mark.parametrize(
    "old, new, where, why",
    [
        ("0SEND_F0,", "", "rank 1, column 1: 1F0", "it needs 0SEND_F0, which no rank does"),
        ("1RECV_F0,", "", "rank 1, column 0: 1F0", "it needs 1RECV_F0, which no rank does"),
        ("0RECV_B1,", "", "rank 0, column 6: 0B1", "it needs 0RECV_B1, which no rank does"),
        ("1SEND_B0,", "", "rank 0, column 5: 0B0", "it needs 1SEND_B0, which no rank does"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0, column 0: 0SEND_F0", "it needs 0F0, which comes later on this rank"),
        ("0F1,0SEND_F1", "0SEND_F0,0F1", "rank 0, column 2: 0SEND_F0", "0SEND_F0 on rank 0, column 1 has done that"),
        ("0SEND_F1", "1SEND_F1", "rank 0, column 3: 1SEND_F1", "it needs what 1F1 left on rank 1"),
        (",1SEND_B1", ",1SEND_B1,1SEND_F1", "rank 1, column 8", "nobody receives what 1SEND_F1 sends"),
        (",1SEND_B1", ",1SEND_B1,1RECV_B1", "rank 1, column 8", "nobody sends what 1RECV_B1 receives"),
    ],
)
def test_a_message_that_is_wrong_is_told_with_its_place(old, new, where, why):
    with pytest.raises(PipelineError) as told:
        check(read(LOWERED.replace(old, new)))
    assert str(told.value).startswith(where) and why in str(told.value)


def torch_schedule(name, p, m):
    """The rows that PyTorch makes, from its own generator of one rank's actions."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="compares with PyTorch")
    made = object.__new__(
        {"interleaved": schedules.ScheduleInterleaved1F1B, "dualpipev": schedules.ScheduleDualPipeV}[name]
    )
    made.pp_group_size, made._n_microbatches, made.n_local_stages = p, m, 2
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    return [",".join("" if a is None else str(a) for a in made._calculate_single_rank_operations(r)) for r in range(p)]


@pytest.mark.parametrize("name", ["interleaved", "dualpipev"])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 24)])
def test_ours_are_the_schedules_of_pytorch(name, p, m):
    """Where PyTorch makes idle cells they are left out: ours waits for what it needs, not for a column."""
    theirs = [[cell for cell in row if cell] for row in read("\n".join(torch_schedule(name, p, m)))]
    assert theirs == rows(name, p, m)


def test_pytorch_reads_what_is_written():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="compares with PyTorch")
    for name in SCHEDULES:
        for row in write(rows(name, 3, 7)).splitlines():
            for cell in row.split(","):
                assert str(schedules._Action.from_str(cell)) == cell
    for row in LOWERED.splitlines():
        assert ",".join(str(schedules._Action.from_str(cell)) for cell in row.split(",")) == row


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_messages_of_pytorch_are_understood(name):
    """Its program adds sends and receives to a schedule of ours; that runs, and takes as long."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="compares with PyTorch")
    given = rows(name, 3, 7)
    report = check(given)
    home = {a.stage: span.rank for row in report.spans for span in row for a in span.actions}
    actions = {r: [schedules._Action.from_str(str(cell)) for cell in row] for r, row in enumerate(given)}
    theirs = schedules._add_send_recv(actions, home.__getitem__, report.stages)
    text = "\n".join(",".join(map(str, theirs[rank])) for rank in range(3))
    assert "SEND_F" in text and "RECV_B" in text
    assert check(read(text)).makespan == report.makespan
    assert write(read(text)) == text + "\n"
