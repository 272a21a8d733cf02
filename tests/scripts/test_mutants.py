"""Mutation testing: which tests a line is tried with, what is no mutant, and that what runs is the changed text."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import mutants  # noqa: E402
import mutants_running  # noqa: E402
from mutants_drawing import Mutant, behaviour, describe, draw  # noqa: E402
from mutants_lines import Measured, covering, measure, statement  # noqa: E402
from mutants_running import Copy  # noqa: E402

CODE = """
import math

@decorated
def area(r,
         scale=1):
    if r < 0:
        raise ValueError("r")
    return (
        math.pi
        * r**2)
"""


def test_the_lines_of_a_statement():
    """Of one with a body only what comes before it."""
    spans = {number: statement(CODE, number) for number in (2, 4, 5, 6, 7, 8, 9, 10, 11)}
    assert spans[2] == range(2, 3)
    assert spans[4] == spans[5] == spans[6] == range(4, 7)
    assert spans[7] == range(7, 8) and spans[8] == range(8, 9)
    assert spans[9] == spans[10] == spans[11] == range(9, 12)


def test_files_that_run_a_line_come_in_the_order_in_which_they_are_likely_to_tell():
    everything, header = [2, 4, 5, 6, 7, 8, 9, 11], [2, 4, 5, 6]
    imports = Measured("tests/test_quick.py", [], 1.0, "", {"area.py": header})
    tests = Measured("tests/test_area.py", [], 3.0, "", {"area.py": everything})
    slow = Measured("tests/test_all.py", [], 60.0, "", {"area.py": everything})
    other = Measured("tests/test_other.py", [], 0.1, "", {"other.py": [1]})
    choose = lambda line: [one.test for one in covering([slow, imports, other, tests], "area.py", CODE, line)]
    assert choose(8) == ["tests/test_area.py", "tests/test_all.py"]
    assert choose(10) == ["tests/test_area.py", "tests/test_all.py"]  # a line without code of its own
    assert choose(6) == ["tests/test_quick.py", "tests/test_area.py", "tests/test_all.py"]
    assert choose(3) == []


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        ("def f(x: int | None): pass", "def f(x: int + None): pass"),
        ("x: int | str = 1", "x: int & str = 1"),
        ("raise ValueError(f'{n + 1} too many')", "raise ValueError(f'{n - 1} too many')"),
        ("raise ValueError('a') from error", "raise ValueError('b') from error"),
        ("print(1)", "print(2)"),
        ("warnings.warn('a', stacklevel=2)", "warnings.warn('a', stacklevel=3)"),
        ("assert x, 1", "assert x, 2"),
        ("zip(a, b, strict=True)", "zip(a, b, strict=False)"),
        ("ax.plot(x, y, lw=1.5)", "ax.plot(x, y, lw=2.5)"),
        ("@functools.lru_cache(8)\ndef f(): pass", "def f(): pass"),
        ("if TYPE_CHECKING:\n    import a", "if not TYPE_CHECKING:\n    import a"),
        ("if __name__ == '__main__':\n    main()", "if __name__ != '__main__':\n    main()"),
    ],
)
def test_what_no_mutant_changes(plain, changed):
    assert ast.dump(ast.parse(plain)) != ast.dump(ast.parse(changed))
    assert behaviour(plain) == behaviour(changed) != ""


def test_what_mutants_change():
    texts = ["x = 1", "x = 2", "f(1)", "assert x", "assert y", "raise A(x)", "raise B(x)", "@property\ndef f(): 1"]
    assert len({behaviour(text) for text in texts}) == len(texts)
    assert behaviour("x = = 1") == ""


def test_a_mutant_is_named_by_what_it_changes():
    text = "a = 1\nfor i in x:\n    a = 1\n"
    first, second = describe("a.py", 1, text, text.replace("a", "b", 1)), describe("a.py", 3, text, text[:-2] + "2\n")
    assert first.key == ("a.py", "- a = 1\n+ b = 1", 0)
    assert second.key == ("a.py", "- a = 1\n+ a = 2", 0)  # indented: another line than the first
    assert describe("a.py", 3, "a = 1\n" * 3, "a = 1\n" * 2 + "a = 2\n").twin == 2


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package of one line and a test that asks a process of its own what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mutants_running, "load_libraries", lambda: None)
    for name in ("nn/__init__.py", "nn/answer.py", "nn/idle.py", "tests/test_answer.py"):
        Path(name).parent.mkdir(exist_ok=True)
    Path("nn/__init__.py").touch()
    Path("nn/answer.py").write_text("def answer():\n    return 7\n\n\ndef unasked():\n    return 2\n")
    Path("nn/idle.py").write_text("import time\n\nwhile False:\n    time.sleep(0.01)\n")
    Path("tests/test_answer.py").write_text(
        "import subprocess, sys\n\ndef test_it():\n"
        "    code = 'from nn import answer, idle; raise SystemExit(answer.answer())'\n"
        "    assert subprocess.run([sys.executable, '-c', code], cwd='/').returncode == 7\n"
    )
    tracked = [str(path) for path in Path().rglob("*.py")]
    return Copy(tracked, str(tmp_path / "copy"))


@pytest.mark.exhaustive
def test_processes_run_the_changed_text_and_end(project, nothing_left):
    """Changed and changed back within a second, with texts of the same length, which compiled files cannot tell."""
    known = Measured("tests/test_answer.py", [], 0.0, "", {})
    plain = Path("nn/answer.py").read_text()
    assert project.run(known.test, 60).status == 0
    for text, outcome in ((plain.replace("7", "2"), "killed"), (plain.replace("2", "7"), "survived")):
        found = mutants.try_mutant(Mutant("nn/answer.py", 2, "", 0, text), [known], project, 60, {})
        assert found["outcome"] == outcome and found["tried"] == [[known.test, ""]]
    assert (project.path / "nn/answer.py").read_text() == plain == Path("nn/answer.py").read_text()
    hanging = Mutant("nn/idle.py", 3, "", 0, Path("nn/idle.py").read_text().replace("while", "while not"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "LEAST", 1)
        patch.setattr(mutants, "PATIENCE", 1)
        assert mutants.try_mutant(hanging, [known], project, 60, {})["outcome"] == "timeout"


def test_a_line_that_no_test_runs_is_told_so(project):
    assert mutants.try_mutant(Mutant("nn/answer.py", 6, "", 0, ""), [], project, 60, {})["outcome"] == "not run"


def test_what_is_known_is_not_tried_again(project):
    mutant, one = Mutant("nn/answer.py", 2, "", 0, ""), Measured("tests/test_answer.py", [], 1.0, "7", {})
    known = {"seconds": 5.0, "tried": [["tests/test_answer.py", "7"]]}
    assert mutants.try_mutant(mutant, [one], project, 60, known | {"outcome": "killed"}) is None
    assert mutants.try_mutant(mutant, [one], project, 60, known | {"outcome": "survived"}) is None
    one.digest = "8"
    assert mutants.try_mutant(mutant, [one], project, 5, known | {"outcome": "survived"}) is None  # the cap
    assert mutants.try_mutant(mutant, [one], project, 60, known | {"outcome": "survived"})["outcome"] == "killed"


def test_lines_of_processes_are_counted(project, tmp_path):
    pytest.importorskip("coverage")
    (found,) = measure(project, ["tests/test_answer.py"], ("nn",), tmp_path / "kept")
    assert found.failing == [] and found.lines["nn/answer.py"] == [1, 2, 5] and found.lines["nn/idle.py"] == [1, 3]
    assert measure(project, ["tests/test_answer.py"], ("nn",), tmp_path / "kept") == [found]  # from the file
    project.write("nn/answer.py", "def answer():\n    return 2\n")
    (found,) = measure(project, ["tests/test_answer.py"], ("nn",), tmp_path / "kept")
    assert found.failing == ["tests/test_answer.py::test_it"]  # which is left out, for it fails with any mutant
    assert mutants.try_mutant(Mutant("nn/idle.py", 1, "", 0, ""), [found], project, 60, {})["outcome"] == "survived"


def test_the_draw_is_the_same_after_a_change_elsewhere(project):
    pytest.importorskip("cosmic_ray")
    text = Path("nn/answer.py").read_text()
    keys = lambda seed: [mutant.key for mutant in draw(["nn/answer.py"], seed)]
    before = keys(0)
    Path("nn/answer.py").write_text("import os\n\n\n" + text)
    assert before == keys(0) and len(before) == 2
    assert any(before != keys(seed) for seed in range(1, 9))
