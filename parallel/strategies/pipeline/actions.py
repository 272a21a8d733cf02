"""Actions of a rank of a pipeline, and the text in which schedules are exchanged.

| text | kind | means |
|---|---|---|
| 2F0 | F | forward of micro-batch 0 through stage 2 |
| 2B0 | B | its backward: gradients of the stage's input and of its weights |
| 2I0, 2W0 | I, W | the halves of B: the input's gradient, for which others wait; the weights', for which nobody does |
| 2SEND_F0, 3RECV_F0 | SEND_F, RECV_F | the output of stage 2 leaves for stage 3, and arrives there |
| 3SEND_B0, 2RECV_B0 | SEND_B, RECV_B | the gradient of stage 3's input leaves for stage 2, and arrives there |
| (0F7;7B3)OVERLAP_F_B | Overlap | both at once |
| 2REDUCE_GRAD | the same | ranks that have the same stage sum its gradients |
| 2UNSHARD, 2RESHARD | the same | of stages whose weights are sharded; read and written, nothing more |

A schedule is a list of rows, a row for each rank; an empty cell means nothing. As text it is CSV, the one that
torch.distributed.pipelining (PyTorch) reads and writes.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


class PipelineError(ValueError):
    """A schedule that cannot run.

    Attributes
    ----------
    rank, column : int or None
        where, from 0; None where no one cell is to blame
    """

    def __init__(self, message: str, rank: int | None = None, column: int | None = None):
        super().__init__(message)
        self.rank, self.column = rank, column


class Action(NamedTuple):
    """One thing that a rank does; micro_batch is None for the SHARDING kinds."""

    stage: int
    kind: str
    micro_batch: int | None = None

    def __str__(self):
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


class Overlap(NamedTuple):
    """Actions of one rank that do not wait for each other: a forward, and a backward of another micro-batch."""

    actions: tuple[Action, ...]

    def __str__(self):
        return f"({';'.join(map(str, self.actions))})OVERLAP_F_B"


Row = Sequence[Action | Overlap | None]
Rows = Sequence[Row]

ACTION = re.compile(r"(\d+)(" + "|".join(MESSAGES + SHARDING + COMPUTE) + r")(\d+)?")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def parts(cell: Action | Overlap | None) -> tuple[Action, ...]:
    """The actions of a cell."""
    if cell is None:
        return ()
    return cell.actions if isinstance(cell, Overlap) else (cell,)


def parse(text: str) -> Action | Overlap | None:
    """The action that a cell of text stands for, None for an empty one.

    Raises
    ------
    ValueError
        What is wrong with the text.
    """
    text = text.strip()
    if not text:
        return None
    if match := OVERLAP.fullmatch(text):
        both = tuple(parse(part) for part in match[1].split(";"))
        if any(not isinstance(action, Action) or action.kind not in COMPUTE for action in both) or len(both) < 2:
            raise ValueError(f"{text!r:.80}: an overlap is of computations, such as (0F7;7B3)OVERLAP_F_B")
        return Overlap(both)
    match = ACTION.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r:.80} is no action: expected stage, kind, micro-batch, such as 2F0, 1I3, 3SEND_F1")
    stage, kind, micro_batch = match.groups()
    if (micro_batch is None) != (kind in SHARDING):
        raise ValueError(f"{text!r:.80}: {kind} goes {'without' if kind in SHARDING else 'with'} a micro-batch")
    return Action(int(stage), kind, None if micro_batch is None else int(micro_batch))


def read(text: str | Iterable[str]) -> list[list[Action | Overlap | None]]:
    """The rows of a schedule written as CSV.

    Parameters
    ----------
    text : str or lines
        the text itself, or an open file; lines of nothing at all are passed over

    Raises
    ------
    PipelineError
        at the first cell that is no action, with rank and column
    """
    try:
        table = [cells for cells in csv.reader(io.StringIO(text) if isinstance(text, str) else text) if cells]
    except csv.Error as error:
        raise PipelineError(f"a schedule is CSV, a row for each rank: {error}") from None
    if not table:
        raise PipelineError("a schedule has a row for each rank; this text has none")
    rows: list[list[Action | Overlap | None]] = []
    for rank, cells in enumerate(table):
        rows.append([])
        for column, cell in enumerate(cells):
            try:
                rows[rank].append(parse(cell))
            except ValueError as error:
                raise PipelineError(f"rank {rank}, column {column}: {error}", rank, column) from None
    return rows


def write(rows: Rows) -> str:
    """The schedule as CSV, a row a rank."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["" if c is None else str(c) for c in row] for row in rows])
    return text.getvalue()
