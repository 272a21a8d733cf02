"""The course: a student's version with gaps and a solution from one source, and checks that find an unsolved gap."""

import ast
import contextlib
import io
import json
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import nn
from collectives.algorithms import allreduce
from collectives.checking.definitions import prove

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "notebooks")]
course = pytest.importorskip("course")
NOTEBOOKS = sorted((ROOT / "notebooks").glob(course.SOURCES))

STEP = """\
# %%
import checks

# %%
def step(w, g):
    before = w
    # gap: against the gradient,
    # # half as far
    # return ...
    # solution
    return w - 0.5 * g
    # wrong: yours is 1.5
    # return w + 0.5 * g
    # wrong: yours is 0
    # g = w
    # return w - g
    # end


# %% [markdown]
# Half.

# %%
checks.same(checks.call(step, 1.0, 1.0), 0.5, "the step")
checks.right("half")
"""


def test_two_versions_of_one_source():
    student, solution = course.student(STEP), course.solution(STEP)
    assert "    # Your turn: against the gradient,\n    # half as far\n    return ...\n" in student
    assert "0.5 * g" not in student
    assert "    # Solution: against the gradient,\n    return w - 0.5 * g\n" in solution
    assert "..." not in solution
    for text in student, solution:
        ast.parse(text)
        assert "before = w" in text and "# gap" not in text and "# end" not in text and "wrong" not in text
    answers = course.wrong_answers(STEP)
    assert [said for _, said in answers] == ["yours is 1.5", "yours is 0"]
    assert "    before = w\n    g = w\n    return w - g\n\n\n" in answers[1][0]


def test_a_gap_needs_no_start_and_may_be_at_the_left():
    text = "# gap: three\n# solution\nx = 3\n# end\n"
    assert course.student(text) == "# Your turn: three\n"
    assert course.solution(text) == "# Solution: three\nx = 3\n"


def test_slides_show_each_picture_under_its_heading(tmp_path):
    """In a file that asks the network for nothing."""
    assert course.main(["--slides", str(tmp_path), "07"]) == 0
    notebook = json.loads((ROOT / "notebooks/07_allreduce.ipynb").read_text())
    pictures = sum(
        "image/png" in output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", [])
    )
    page = (tmp_path / "07_allreduce.html").read_text()
    first, *others = re.findall(r"<section><h\d>(.*?)</h\d>(<img [^>]*>)?</section>", page)
    assert first == ("7. Allreduce: the sum on every rank", "") and len(others) == pictures > 10
    assert all(heading and picture for heading, picture in others)
    assert "http" not in page


def test_a_notebook_is_found_by_its_number():
    for name in ("6", "06", "06_coll"):
        assert [path.name for path in course.sources([name])] == ["06_collectives.py"]
    assert [path.name[:2] for path in course.sources(["1", "16"])] == ["01", "16"]
    assert [path.name for path in course.sources(["4"])] == ["04_convolution.py"]
    assert [path.name for path in course.sources(["04b"])] == ["04b_training.py"]
    assert course.sources([]) == NOTEBOOKS
    with pytest.raises(SystemExit, match="no notebook begins with 99; there are 01_gradient_descent"):
        course.sources(["99"])


@pytest.mark.parametrize("mark", ["    # end\n", "    # solution\n", "    # gap: against the gradient,\n"])
def test_a_mark_without_its_others_is_named(mark):
    with pytest.raises(ValueError, match=r"line \d+: `# (gap:|solution|end)"):
        course.student(STEP.replace(mark, ""))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A course of one notebook: folder(source) -> its path."""
    pytest.importorskip("jupytext")
    pytest.importorskip("nbclient")
    monkeypatch.setattr(course, "FOLDER", tmp_path)
    for name in ("checks.py", "exercises"):
        (tmp_path / name).symlink_to(ROOT / "notebooks" / name)

    def make(text):
        (tmp_path / "01_step.py").write_text(text)
        return tmp_path

    return make


def test_a_gap_over_the_border_of_a_cell_is_refused(folder):
    source = folder("# gap: one\n# solution\nx = 1\n\n# %%\ny = 1\n# end\n") / "01_step.py"
    with pytest.raises(ValueError, match=r"01_step\.py: a gap reaches over the border"):
        course.notebooks(source)


def test_a_check_that_calls_the_learners_function_itself_shows_no_traceback(folder, capsys):
    """What a cell without a check raises is shown with its traceback."""
    text = STEP.replace("checks.call(step, 1.0, 1.0)", "step(1.0, 1.0)").replace(
        "import checks", "import checks\nchecks.style()"
    )
    folder(
        text.replace(
            "yours is 1.5", "`step` raises ZeroDivisionError: float division by zero, at `return w / 0`"
        ).replace("w + 0.5 * g", "w / 0")
    )
    assert course.main([]) == 0
    folder(text + "\n# %%\nstep(1.0, None)\n")
    assert course.main([]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said and "unsupported operand" in said


def test_each_gap_is_tried_as_a_student_finds_it_and_then_solved(folder, capsys):
    made = folder(STEP)
    assert course.main([]) == 0
    assert not (made / "01_step.ipynb").exists(), "running writes nothing"
    assert course.main(["--save"]) == 0
    said = capsys.readouterr().out
    assert "as a student finds it: `step` gives Ellipsis: write it where the cell says `Your turn`." in said
    assert "to a wrong answer: the step: yours is 1.5, and 0.5 is wanted." in said and "1 exercises" in said
    assert "Your turn" in (made / "student" / "01_step.ipynb").read_text()
    solved = (made / "01_step.ipynb").read_text()
    assert "Your turn" not in solved and "Right: half" in solved and "NotYet" not in solved
    assert (made / "student" / "checks.py").exists()


@pytest.mark.exhaustive
def test_a_check_that_passes_what_is_wrong_and_a_wrong_solution_are_found(folder, capsys):
    """The control: no check, a wrong answer that is right, one to which another thing is said, and a wrong solution."""
    folder(STEP.replace("checks.same(", "print(").replace("checks.call(step, 1.0, 1.0)", "step(1.0, 1.0)"))
    assert course.main([]) == 1
    assert "nothing says that the exercise is not solved" in capsys.readouterr().err
    folder(STEP.replace("return w + 0.5 * g", "return 0.5"))
    assert course.main([]) == 1
    assert "nothing says that the exercise is not solved" in capsys.readouterr().err
    folder(STEP.replace("yours is 1.5", "yours is 2.5"))
    assert course.main([]) == 1
    assert "the check says 'the step: yours is 1.5, and 0.5 is wanted.', not 'yours is 2.5'" in capsys.readouterr().err
    folder(STEP.replace("w - 0.5 * g", "w - 0.25 * g"))
    assert course.main([]) == 1
    assert "the solution is not right: the step: yours is 0.75, and 0.5 is wanted" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_kept_notebooks_are_of_their_sources(path):
    """Cell by cell, solved with outputs and with gaps; and no path of the machine that ran them is left in one."""
    pytest.importorskip("jupytext")
    nbformat = pytest.importorskip("nbformat")
    made = course.notebooks(path)
    for fresh, folder in zip(made, (path.parent, path.parent / "student"), strict=True):
        kept = nbformat.read(folder / f"{path.stem}.ipynb", as_version=4)
        assert [(cell.cell_type, cell.source) for cell in kept.cells] == [
            (cell.cell_type, cell.source) for cell in fresh.cells
        ], "run: python scripts/course.py --save"
        assert str(ROOT) not in nbformat.writes(kept)
    solved = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert any("image/png" in output.get("data", {}) for cell in solved.cells for output in cell.get("outputs", []))
    for name in ("checks.py", "exercises"):
        assert (path.parent / "student" / name).resolve() == (path.parent / name).resolve()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_two_exercises_at_least_in_python_for_both(path):
    text = path.read_text()
    for form in course.student, course.solution:
        ast.parse(form(text))
    assert len(course.GAP.findall(text)) >= 2 and len(course.CHECK.findall(text)) >= 2
    assert [gap["task"] for gap in course.GAP.finditer(text) if not gap["wrong"]] == [], (
        "each has an answer to be refused"
    )


def test_the_course_has_110_exercises():
    assert sum(len(course.GAP.findall(path.read_text())) for path in NOTEBOOKS) >= 110


PICTURES = {  # functions of the exercises' modules that draw
    f"{path.stem}.{node.name}": ast.unparse(node)
    for path in sorted((ROOT / "notebooks" / "exercises").glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("draw_") and "plt.subplots(" in ast.unparse(node)
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_of_the_course_has_a_title(name):
    assert re.search(r"title|draw_\w+\(", PICTURES[name].partition("\n")[2])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_show_the_idea_and_leave_drawing_to_the_modules(path):
    drawing = re.findall(r"^[^#\n]*\b(?:plt|ax|axes\[\d\]|figure|left|right)\.[a-z].*$", path.read_text(), re.MULTILINE)
    assert len(drawing) <= 8, drawing


# ---------------------------------------------------------------------------------------------- checks


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    drawn = []
    module = __import__("checks")
    monkeypatch.setattr(module.plt, "show", lambda: drawn.append(len(module.plt.get_fignums())))
    yield module, drawn
    module.plt.close("all")


@pytest.mark.parametrize(
    "got, want, said",
    [
        (None, 1.0, "v gives None: write it where the cell says `Your turn`"),
        ([1.0, ...], [1.0, 2.0], "v gives [1.0, Ellipsis]"),
        ("text", 1.0, "v is str, and an array of numbers is expected"),
        (np.ones(3), np.ones(4), "v has the shape (3,), and (4,) is expected"),
        (2.5, 1.0, "v: yours is 2.5, and 1 is wanted"),
        (np.nan, 1.0, "v: 1 of 1 values are not finite"),
        (-np.arange(5.0), np.arange(5.0), "v: it has the wrong sign, everywhere"),
        (3 * np.arange(60.0), np.arange(60.0), "v: it is 3 times what is wanted, everywhere"),
        (np.eye(3), np.ones((3, 3)), "v: 6 of 9 values are wrong; the worst is [0, 1]: yours is 0, and 1 is wanted"),
        (np.zeros((2, 3, 4)), np.ones((2, 3, 4)), "v: it is 0 everywhere"),
        (np.float32([1 / 3, 1]), [1 / 3, 1], "v: it is right but for 1e-08 of the largest value: an epsilon"),
    ],
)
def test_what_differs_is_said_and_drawn(checks, got, want, said):
    module, drawn = checks
    with pytest.raises(module.NotYet) as error:
        module.same(got, want, "v")
    assert str(error.value).startswith(said)
    assert bool(drawn) == said.startswith("v:"), "of what can be compared there is a picture"


def test_what_is_the_same_passes(checks):
    module, drawn = checks
    module.same(1.0 + 1e-12, 1.0, "v")
    module.same(np.zeros(0), np.zeros(0), "v")
    module.same(np.zeros(3), np.zeros(3), "v")
    module.expect(True, "no")
    assert not drawn
    with pytest.raises(module.NotYet, match="no"):
        module.expect(False, "no", lambda: module.plt.figure())
    assert drawn


def test_who_writes_into_what_was_given_is_told_what_to_do(checks):
    module, _ = checks
    w = np.ones(2)
    w.flags.writeable = False

    def step(w):
        w -= 1
        return w

    with pytest.raises(module.NotYet, match=r"`step` raises .* read-only.* Make a new array: w = w - "):
        module.call(step, w)
    with pytest.raises(module.NotYet) as error:
        module.call(lambda: 1 / 0)
    assert "new array" not in str(error.value)


def test_what_the_learner_raises_is_told_with_its_line(checks):
    module, _ = checks

    def divide(x):
        return x / 0

    with pytest.raises(module.NotYet, match=r"`divide` raises ZeroDivisionError: .*, at `return x / 0`"):
        module.call(divide, 1)
    with pytest.raises(module.NotYet, match="`divide` raises"):
        module.change(divide, 1)
    assert module.change(list) == [] and module.change(print) is None, "what changes its arguments need not return"

    def multiply(x):
        return np.matmul(x, x.reshape(1, -1)[:, :1, None].sum(axis=3))

    with pytest.raises(module.NotYet, match=r"`multiply` raises AxisError: .*, at `return np\.matmul"):
        module.call(multiply, np.ones(3))  # raised within NumPy: the learner's line is told
    assert module.NotYet("why")._render_traceback_() == ["Not yet. why"]


def test_the_line_of_what_is_raised_is_never_the_librarys(checks):
    module, _ = checks

    class Wrong(nn.ReLU):
        def backward(self, p, gy, saved, ctx):
            return [0.0] if saved is None else gy.nothing

    x = np.ones((2, 3))
    with pytest.raises(
        module.NotYet, match=r"AttributeError: .*, at `return \[0.0\] if saved is None else gy.nothing`"
    ):
        module.call(nn.gradcheck, Wrong(), x)
    Wrong.backward = lambda self, p, gy, saved, ctx: ([0.0], {})
    with pytest.raises(module.NotYet, match=r"must return dLoss/dx, float64\(2, 3\), given \[0.0\]\.$"):
        module.call(nn.gradcheck, Wrong(), x)


def test_of_several_values_too_many_or_few_are_told(checks):
    module, _ = checks
    for two in ([1, 2], (1, 2), np.ones((2, 3))):
        assert len(module.several(2, lambda two=two: two)) == 2
    for other, found in (
        (1, "1 value"),
        (np.ones(2), "1 value"),
        (np.ones((3, 2)), "1 value"),
        ([1, 2, 3], "3 values"),
    ):
        with pytest.raises(module.NotYet, match=f"returns {found}, and 2 are expected"):
            module.several(2, lambda other=other: other)


def test_what_is_no_number_is_told(checks):
    module, _ = checks
    assert module.numbers(lambda: 2) == 2.0 and module.numbers(lambda: [1, 2], shape=(2,)).tolist() == [1, 2]
    for wrong in ("two", [1, 2], (1, [2, 3])):
        with pytest.raises(module.NotYet, match=r"returns .*, and a number is expected"):
            module.numbers(lambda wrong=wrong: wrong)
    with pytest.raises(module.NotYet, match=r"and an array of the shape \(2,\) is expected"):
        module.numbers(lambda: 1.0, shape=(2,))


def section(name: str, task: str, answer: str) -> list[str]:
    """The code of a notebook that an exercise needs, an answer in its gap: imports, and its section to its check."""
    text = next(path for path in NOTEBOOKS if path.name.startswith(name)).read_text()
    gap = next(found for found in course.GAP.finditer(text) if found["task"].startswith(task))
    begin = text.rindex("\n# ## ", 0, gap.start())
    answered = textwrap.indent(answer, gap["indent"])
    here = text[begin : gap.start()] + answered + text[gap.end() :]
    imports, code = (
        [c for c in re.split(r"^# %%.*\n", part, flags=re.M)[1:] if ast.parse(c).body] for part in (text[:begin], here)
    )
    mine = next(i for i, cell in enumerate(code) if answered in cell)
    last = next(i for i, cell in enumerate(code) if i > mine and course.CHECK.search(cell))
    return [next(cell for cell in imports if "import checks\n" in cell), *code[: last + 1]]


@pytest.mark.parametrize(
    "name, task, answer, said",
    [
        ("03", "normal", "return rng.normal(0, outputs**-0.5, (inputs, outputs))\n", "the scatter after each layer"),
        (
            "10",
            "fetch perhaps",
            "if step % fetch == 0:\n    w[:] = server.fetch()\ng = gradient(w)\ngathered += g\nw -= rate * g\n"
            "if step % push:\n    server.push(gathered)\n    gathered[:] = 0\n",
            "wanted are fetch in step 0, push in step 2",
        ),
        ("07", "the n for", "return 0.0\n", "you say 0 bytes; at least one for each rank is expected"),
        ("07", "the n for", "return (alpha * rounds - 2 * (p - 1)) / beta\n", "at least one for each rank is expected"),
        ("10", "fetch perhaps", "w = server.fetch()\nserver.push(gathered)\n", "wanted are fetch in step 0, push in"),
        (
            "10",
            "fetch perhaps",
            "if step % fetch == 0:\n    w = server.fetch()\nif (step + 1) % push == 0:\n    server.push(gathered)\n",
            r"change it in place, w\[:\] = ",
        ),
        ("13", "all forwards", 'while True:\n    yield Action(rank, "F", 0)\n', "column 1: 0F0 cannot run: "),
        ("13", "all forwards", "yield from [Action(rank, kind, 0) for kind in 'BF']\n", "0B0 cannot run: it needs 0F0"),
        (
            "13",
            "the best of one",
            "ways = [max(my_plan(s, m - n), stage(s, j, n)) for s, n in product(range(1, j), range(1, m))]\n"
            "return min([stage(0, j, m), *ways])\n",
            "bandwidth 1: ",
        ),
        ("15", "forward, then", "return max(COMPUTE, sum_seconds(M))\n", "nodes, 1,024 and 2,048: 2 of 10 values"),
        (
            "17",
            "all messages of the f",
            "rates[min(crossing[fullest])] = shares[fullest]\ngrowing.clear()\n",
            "3 of 4 values",
        ),
        ("19", "multiply totals", "return top, total1 * np.exp(top1), sums1\n", "values"),
        ("19", "an early one", "return rank, rank + size\n", "your ranks have"),
        ("17", "neighbours of", "return hosts[::-1]\n", "are possible"),
        ("16", "where the der", "return 0\n", "a positive number of seconds"),
        ("16", "another name", 'disk.write("new", data)\n', "all is done, and the file is still the old one"),
    ],
)
def test_answers_that_are_nearly_right_are_told_why_and_drawn(checks, name, task, answer, said):
    module, drawn = checks
    names = {"__name__": "notebook"}
    with (  # of the process all is as before, behind it
        module.plt.rc_context(),
        threadpool_limits(),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(module.NotYet, match=said),
    ):
        for code in section(name, task, answer):
            exec(code, names)
    assert drawn or module.plt.get_fignums() or "positive" in said or "at least one" in said


@pytest.mark.parametrize(
    "name, task, answer, given, said",
    [
        (
            "01",
            "one step",
            "P -= Y\nW -= 0.5 * batch.T @ P / 32\nb -= 0.5 * P.mean(axis=0)\nreturn W, b\n",
            {"images": np.eye(32, 64), "labels": np.arange(32) % 10},
            "",
        ),
        (
            "02",
            "the derivative of both",
            "return np.array([max(-1.0, min(1.0, each)) for each in e])\n",
            {"rng": np.random.default_rng(0), "network": nn.Network(nn.ReLU(), in_shape=(3,))},
            "`huber_gradient`",
        ),
        (
            "03",
            "remember",
            "if costs[epoch] < costs[:epoch].min(initial=9):\n    best = epoch\n"
            "if epoch - best == patience:\n    return best, epoch\n",
            {"validation_cost": np.array([2.0, 1.0, 3.0])},
            "",
        ),
        ("03", "remember", "best = costs.index(min(costs))\n", {}, "`early_stop`"),
        ("03", "which are wrong", "yield 1\n", {}, "6 of the 12"),
        ("03", "which are wrong", "return range(100, 106)\n", {}, "surest first"),
    ],
)
def test_answers_of_another_form_are_right_or_told_in_a_sentence(checks, name, task, answer, given, said):
    module, _ = checks
    imports, *_, own, check = section(name, task, answer)
    names = given | {"__name__": "notebook"}
    with module.plt.rc_context(), threadpool_limits(), contextlib.redirect_stdout(io.StringIO()) as printed:
        for code in (imports, own):
            exec(code, names)
        if said:
            with pytest.raises(module.NotYet, match=said):
                exec(check, names)
            return
        exec(check, names)
        exec(check, names)  # who runs the cell again is told the same
    assert printed.getvalue().count("Right") == 2


def test_what_the_busiest_rank_sends_is_drawn_as_it_is_counted(checks):
    module, _ = checks
    __import__("exercises.patterns").patterns.draw_vectors_sent()
    _, tree, ring = module.plt.gca().lines
    for line, schedule in ((tree, allreduce.reduce_broadcast), (ring, allreduce.ring)):
        for p in (2, 5, 8):
            counted = prove("allreduce", schedule, p, 20 * p, ordered=False).moved / (20 * p)
            assert dict(zip(*line.get_data(), strict=True))[p] == pytest.approx(counted)
