"""The graders of the course's projects: solutions have all points, and each mistake costs those of its criterion."""

import configparser
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE

from parallel.testing.grade import Collector, Criterion, page, reason

ROOT = Path(__file__).parents[2]
GRADERS = ROOT / "scripts" / "grading"
SOLUTIONS, STARTERS = ROOT / "tests" / "projects", ROOT / "notebooks" / "projects"
PROJECTS = ("data_parallel", "sharded_optimizer", "pipeline")

# project, what a solution says, what a student writes instead, and which criteria lose points by it
MISTAKES = {
    "each rank begins with its own parameters": (
        "data_parallel", "        communicator.Bcast(network.w, root=0)\n", "",
        {"parts of equal length", "parts of different length", "same bits", "the loss is"},
    ),
    "the mean of the ranks' means": (
        "data_parallel", "loss, gy = cross_entropy(arrays[-1], labels, int(total[0]))",
        "loss, gy = cross_entropy(arrays[-1], labels, max(1, len(x)) * self.communicator.size)",
        {"parts of different length", "the loss is"},
    ),
    "all buckets after backward": (
        "data_parallel", "for lo, _ in self.network.backward(self.g, arrays, gy):",
        "for lo, _ in list(self.network.backward(self.g, arrays, gy)):", {"overlap"},
    ),
    "stage 3 keeps all parameters": (
        "sharded_optimizer", "        return self.whole(self.w) if self.stage == 3 else self.w\n",
        "        self.all = self.whole(self.w) if self.stage == 3 else self.w\n        return self.all\n",
        {"a rank keeps"},
    ),
    "moments of a step are not corrected": (
        "sharded_optimizer", "self.m / (1 - self.b1**self.t)", "self.m",
        {"equal to Adam", "more ranks than parameters", "state_dict"},
    ),
    "zero bubble is 1F1B": (
        "pipeline", "    ahead = min(ranks - rank, micro_batches)\n",
        "    return one_f_one_b(rank, ranks, micro_batches)\n",
        {"zero bubble takes"},
    ),
    "gradients of the weights of one micro-batch": (
        "pipeline", "                layer.backward_weights(g,", "                g[layer.lo : layer.hi] = 0\n"
        "                layer.backward_weights(g,", {"a step on ranks"},
    ),
}  # fmt: skip


def graded(project: str, folder: Path, tmp_path: Path) -> dict[str, tuple[float, float]]:
    """Return (given, possible) points by criterion."""
    out = tmp_path / "points.json"
    command = [
        sys.executable,
        ROOT / "scripts" / "grade.py",
        project,
        folder,
        "--json",
        out,
        "--page",
        tmp_path / "page.md",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=clean())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "page.md").read_text() in done.stdout
    return {row["criterion"]: (row["given"], row["points"]) for row in json.loads(out.read_text())["criteria"]}


def clean() -> dict[str, str]:
    """The environment without what this pytest has told its own children."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.mark.parametrize(
    "project", ["pipeline", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in PROJECTS[:2])]
)
def test_a_solution_has_all_points(project, tmp_path):
    points = graded(project, SOLUTIONS, tmp_path)
    assert all(given == possible for given, possible in points.values()), points
    assert points == {text: (possible, possible) for text, possible in criteria(project).items()}


def test_solutions_pass_all_cases():
    """Of the projects that the test above leaves out: in one pytest, whose cases share ranks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "parallel.testing.plugin"]
    command += ["-o", "addopts=", "--rootdir", GRADERS, *(GRADERS / f"grade_{project}.py" for project in PROJECTS[:2])]
    environment = clean() | {"RINGPROP_PROJECT": str(SOLUTIONS)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=environment)
    assert done.returncode == 0 and re.fullmatch(r"\d+ passed in .*", done.stdout.splitlines()[-1]), done.stdout


def criteria(project: str) -> dict[str, float]:
    """Return the points of each criterion, by the marks of the grader's tests."""
    text = (GRADERS / f"grade_{project}.py").read_text()
    return {text: float(points) for points, text in re.findall(r'@pytest\.mark\.points\((\d+), "(.*)"\)', text)}


@pytest.mark.parametrize("project", PROJECTS)
def test_criteria_have_100_points_together_as_the_table_has(project):
    points = criteria(project)
    assert sum(points.values()) == 100
    table = (STARTERS / "README.md").read_text()
    for criterion, possible in points.items():
        words = " ".join(criterion.split()[:2]).rstrip(",:")
        assert f"| {possible:g} | {words}" in table, f"README.md lacks: {criterion}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("project", PROJECTS)
def test_a_starter_has_few_points(project, tmp_path):
    given = sum(given for given, _ in graded(project, STARTERS, tmp_path).values())
    assert given <= 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_the_points_of_its_criteria(mistake, tmp_path):
    project, right, wrong, lost = MISTAKES[mistake]
    text = (SOLUTIONS / f"{project}.py").read_text()
    assert text.count(right) == 1
    (tmp_path / f"{project}.py").write_text(text.replace(right, wrong))
    points = graded(project, tmp_path, tmp_path)
    for criterion, (given, possible) in points.items():
        assert (given < possible) == any(words in criterion for words in lost), (criterion, given, possible)


def test_a_folder_without_the_file_is_refused(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "grade.py", "pipeline", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert f"{tmp_path}: expected the folder that holds pipeline.py" in done.stderr


@pytest.mark.exhaustive
def test_a_submission_does_not_run_in_the_process_that_gives_points(tmp_path):
    (tmp_path / "pipeline.py").write_text("import os\n\nos._exit(0)\n")
    assert sum(given for given, _ in graded("pipeline", tmp_path, tmp_path).values()) == 0


@pytest.mark.exhaustive
def test_a_submission_that_hangs_is_stopped_and_its_cases_are_named(tmp_path):
    (tmp_path / "pipeline.py").write_text("while True:\n    pass\n")
    out = tmp_path / "points.json"
    command = [sys.executable, ROOT / "scripts" / "grade.py", "pipeline", tmp_path]
    command += ["--case-seconds", "2", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=clean())
    result = json.loads(out.read_text())
    cases = [case for row in result["criteria"] for case in row["cases"].items()]
    names = [name for name, why in cases if why.startswith("no end within")]
    assert result["stopped"] == f"stopped: the first cases hang ({', '.join(names)})" and len(names) == 3
    assert "at pipeline.py:" in next(iter(result["criteria"][0]["cases"].values())), "where it hangs"
    assert f"**{result['stopped']}**" in done.stdout


def reported(collector, name, text):
    """Report a case of `collector` as failed with this text; "" for passed."""
    collector.owner.setdefault(name, collector.criteria.setdefault("all", Criterion("all", 10)))
    outcome = {"passed": not text, "failed": bool(text), "when": "call", "longrepr": text, "nodeid": name}
    collector.pytest_runtest_logreport(SimpleNamespace(**outcome))


HANG = "no end within 20 s; ranks 0, 1/2 were in the test, at pipeline.py:33\nsome traceback\nits last line"


def test_a_case_that_hangs_after_others_passed_does_not_end_the_grading():
    collector = Collector()
    collector.session = SimpleNamespace(shouldstop="")
    for name in "abcd":
        reported(collector, name, HANG if name != "a" else "")
    assert not collector.session.shouldstop and collector.hung == ["b", "c", "d"]
    assert collector.criteria["all"].cases["b"] == HANG.splitlines()[0]
    collector.end = 0.0
    reported(collector, "e", "")
    assert collector.stopped == "stopped: the time for all cases is over; hung have b, c, d"
    assert f"**{collector.stopped}**" in page("pipeline", list(collector.criteria.values()), collector.stopped)


def test_cases_have_less_time_after_one_that_hangs():
    collector, mark = Collector(), SimpleNamespace(kwargs={})
    item = SimpleNamespace(nodeid="a", get_closest_marker=lambda name: mark)
    collector.session = SimpleNamespace(shouldstop="", items=[item])
    collector.pytest_runtest_logstart("a")
    assert mark.kwargs["timeout"] == 20.0
    reported(collector, "a", HANG)
    collector.pytest_runtest_logstart("a")
    assert mark.kwargs["timeout"] == 5.0


def test_what_graders_need_is_installed_with_the_course():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "pytest>=8" in setup["options.extras_require"]["course"].split()


def test_the_reason_is_the_error_not_where_it_is():
    said = 'E     File "pipeline.py", line 1\nE       def f(:\nE   SyntaxError: invalid syntax'
    assert reason(SimpleNamespace(longrepr=said)) == "SyntaxError: invalid syntax"
    assert reason(SimpleNamespace(longrepr="E   assert 3 == 4\nE   where 3 = f()")) == "assert 3 == 4"


def test_each_case_says_why_a_file_cannot_be_imported(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("grading", GRADERS / "conftest.py")
    grading = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grading)
    (tmp_path / "pipeline.py").write_text("import no_such_module\n")
    monkeypatch.setenv("RINGPROP_PROJECT", str(tmp_path))
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            grading.student("pipeline")
    sys.modules.pop("network")
