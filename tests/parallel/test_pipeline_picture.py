"""Pictures of schedules: a block for each action, where and when it is."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from collectives.drawing.timeline import draw_timeline
from parallel.strategies.pipeline.actions import Action
from parallel.strategies.pipeline.checking import Span, check
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
    (figure := draw(check(name, 2, 2).spans).axes[0].figure).canvas.draw()  # as narrow as it gets
    key, axes = figure.axes[0].get_legend().get_window_extent(), figure.axes[0]
    assert key.x1 <= figure.bbox.x1 and not key.overlaps(axes.xaxis.label.get_window_extent())


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no actions to draw"):
        draw([[], []])


def test_a_measured_step_is_found_among_events_and_drawn_beside_its_schedule():
    """Steps with fewer micro-batches are passed over; times count from the step's first action."""
    from parallel.strategies.pipeline.picture import compare, measured

    report = check("zb-h1", 2, 3)
    rows = [[action for span in row for action in span.actions] for row in report.spans]
    events = []
    for step in range(5):
        for rank, row in enumerate(report.spans):
            for span in row:
                if step == 3 and span.actions[0].micro_batch == 0:
                    continue  # no samples
                event = {"rank": rank, "name": str(span.actions[0])}
                events.append(event | {"start": 100 * step + span.start, "end": 100 * step + span.end})
            events.append({"rank": rank, "name": "compute", "start": 100 * step, "end": 100 * step + 50})
    found = measured(events, rows)
    assert found == [list(row) for row in report.spans]
    assert measured([event for event in events if event["start"] >= 300 and event["end"] < 400], rows) == []
    assert len(compare(found, report.spans).axes) == 2


def test_numbers_for_which_there_is_no_room_are_left_out():
    """A measured step may have gaps a hundred times as long as an action: numbers would lie on each other."""
    spans = check("1f1b", 2, 12).spans
    stretched = [[*row[:-1], row[-1]._replace(start=2000, end=2400)] for row in spans]
    for given, expected in (spans, 48), (stretched, 2):
        figure = draw(given)
        figure.canvas.draw()
        boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text().isdigit()]
        assert len(boxes) == expected
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_timelines_and_pipelines_have_one_colour_for_each_kind():
    """The halves of backward differ from forward also where a second stage of a rank is paler."""

    def key_of(figure):
        key = figure.axes[0].get_legend()
        return {
            text.get_text(): to_hex(patch.get_facecolor())
            for text, patch in zip(key.texts, key.get_patches(), strict=True)
        }

    events = [{"rank": 0, "name": f"{kind}0", "start": i, "end": i + 1} for i, kind in enumerate("FBIW")]
    spans = [Span(0, i, (Action(0, kind, 0),), i, i + 1) for i, kind in enumerate("FBIW")]
    colours = [*key_of(draw([spans])).values()]
    assert [*key_of(draw_timeline(events)).values()] == colours
    shades = [
        np.array(to_rgb(colour)) * share + 1 - share for colour in np.take(colours, [0, 2, 3]) for share in (1, 0.6)
    ]
    assert min(np.abs(one - two).max() for one, two in combinations(shades, 2)) > 0.2
