"""Pictures of schedules: a block for each action, where and when it is."""

import pytest

from parallel.strategies.pipeline.checking import check
from parallel.strategies.pipeline.picture import draw
from parallel.strategies.pipeline.schedules import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_block_for_each_action(name):
    report = check(name, 3, 6)
    ax = draw(report.spans, title=name).axes[0]
    actions = [action for row in report.spans for span in row for action in span.actions]
    numbers = [text for text in ax.texts if text.get_text().isdigit()]
    assert len(numbers) == len(actions) == len([c for c in ax.collections])
    assert sorted(int(text.get_text()) for text in numbers) == sorted(action.micro_batch for action in actions)
    middles = {(round(text.get_position()[1]), text.get_position()[0]) for text in numbers}
    assert middles == {(rank, (s.start + s.end) / 2) for rank, row in enumerate(report.spans) for s in row}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert ax.get_xlim() == (0, report.makespan)
    kinds = [text.get_text()[0] for text in ax.get_legend().get_texts()]
    assert kinds == [kind for kind, count in report.counts.items() if count]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no actions to draw"):
        draw([[], []])
