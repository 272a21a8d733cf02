"""What README.md, CONTRIBUTING.md and the pages of docs/ say is true of the tree: examples run, names exist.

python tests/test_readme.py      write the tables of docs/options.md from the options and declarations
"""

import contextlib
import functools
import inspect
import io
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from forks import run_program

import collectives
from parallel.command import factory
from parallel.command.commands import COMMANDS
from parallel.command.options import FIELDS, TOPICS, help_of, names_of, shown_default, title_of
from parallel.command.parsing import parse, parser
from parallel.launch import launcher
from parallel.settings import flag
from parallel.strategies import STRATEGIES
from parallel.strategies.table import matrix, summaries

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
OPTIONS, USING, ALGORITHM = "docs/options.md", "docs/using.md", "docs/howto/algorithm.md"
TABLE = re.compile(r"(<!-- options: [^\n]* -->\n\n)(.*?)(\n<!-- end of options -->)", re.DOTALL)
MATRIX = re.compile(r"(<!-- strategies: [^\n]* -->\n\n)(.*?)(\n<!-- end of strategies -->)", re.DOTALL)
SUMMARIES = re.compile(r"(<!-- summaries: [^\n]* -->\n\n)(.*?)(\n<!-- end of summaries -->)", re.DOTALL)
# First words of paths; what a document names in backticks below one of these must be there.
ROOMS = ("nn/", "collectives/", "parallel/", "scripts/", "notebooks/", "tests/", "docs/")


def read(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", read(document), re.DOTALL | re.MULTILINE)


def examples() -> list[str]:
    """The Python blocks of the page on the API."""
    return [text for language, text in blocks(USING) if language == "python"]


def options_table() -> str:
    """A row for every option, by topic, from the dataclasses that the command line is made of."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for topic in TOPICS:
        rows.append(f"| **`--help {topic}`: {title_of(topic)}** | | |")
        for name in names_of(topic):
            metadata, shown = FIELDS[name].metadata, shown_default(name)
            choices = f" (one of {', '.join(metadata['choices'])})" if metadata["choices"] else ""
            default = f"`{shown}`" if shown else ""
            rows.append(f"| `{flag(name)}` | {default} | {help_of(name)}{choices} |")
    return "\n".join(rows) + "\n"


def test_options_table_is_that_of_the_dataclasses():
    assert TABLE.search(read(OPTIONS))[2] == options_table(), "run: python tests/test_readme.py"


def test_matrix_is_that_of_the_strategies():
    assert MATRIX.search(read(OPTIONS))[2] == matrix(), "run: python tests/test_readme.py"
    assert SUMMARIES.search(read(OPTIONS))[2] == summaries(), "run: python tests/test_readme.py"


def test_every_cell_that_is_refused_says_why():
    table, _, below = matrix().partition("What is refused, and why:")
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line]
    reasons = [line.removeprefix("- ").partition(": ") for line in below.splitlines() if line]
    assert all(why for _, _, why in reasons) and len(rows) > len(STRATEGIES)
    for strategy, _, *cells in rows:
        for option, cell in zip(head[2:], cells, strict=True):
            told = [why for what, _, why in reasons if what.startswith(f"{option} with ") and strategy in what]
            allowed = cell.startswith("yes") or cell == "all methods"
            assert len(told) == (not allowed), (strategy, option, told)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    links = re.findall(r'\]\(([^)#]+)|(?:src|href)="([^"]+)"', read(document))
    targets = [a or b for a, b in links]
    folder, lost = (ROOT / document).parent, []
    for target in targets:
        place = (folder / target).resolve()
        lost += [] if target.startswith("https://") or place.exists() else [target]
    assert lost == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Sphinx and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_into_pages_name_a_heading(document):
    links = re.findall(r"\]\(((?!https:)[^)#]*)#([^)]+)\)", read(document))
    pages = [((ROOT / document).parent / target if target else ROOT / document, anchor) for target, anchor in links]
    assert [f"{page.name}#{anchor}" for page, anchor in pages if anchor not in anchors(page)] == []


@pytest.mark.parametrize("document", [page for page in PAGES if page.startswith("docs/systems/")])
def test_papers_are_links(document):
    """Where a page first names a paper, it leads to it."""
    text = re.sub(r"^(```.*?^```|#.*|!\[.*)$", "", read(document), flags=re.DOTALL | re.MULTILINE)
    papers = set(re.findall(r"[A-Z][\w-]+ et al\. (?:19|20)\d\d", text))
    linked = set(re.findall(r"([A-Z][\w-]+ et al\.\s(?:19|20)\d\d)\]\(https://", text))
    assert papers <= {paper.replace("\n", " ") for paper in linked}


def test_the_page_of_a_system_leads_to_its_notebook_and_back():
    rows = re.findall(
        r"\(\.\./notebooks/(\w+)\.ipynb\).*\]\((systems/\w+\.md)\) \|$", read("docs/course.md"), re.MULTILINE
    )
    assert len(rows) > 10
    assert [row for row in rows if f"(../../notebooks/{row[0]}.ipynb)" not in read(f"docs/{row[1]}")] == []
    for folder, up in (("notebooks", ".."), ("notebooks/student", "../..")):
        assert [row for row in rows if f"({up}/docs/{row[1]})" not in read(f"{folder}/{row[0]}.ipynb")] == []


def test_every_page_is_reached_from_the_first():
    """By the trees of contents, as Sphinx follows them."""
    reached, waiting = set(), ["docs/index.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for tree in re.findall(r"^```{toctree}\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            found = [str(Path(page).parent / f"{name}.md") for name in names]
            waiting += [page for page in found if page not in reached and page in PAGES]
    assert sorted(reached) == PAGES


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_backticks_exist(document):
    named = [path for path in re.findall(r"`([\w./-]+)`", read(document)) if path.startswith(ROOMS)]
    assert [path for path in named if not (ROOT / path).exists() and path != "docs/pictures/"] == []


@functools.cache
def flags_of(script: str) -> set[str]:
    """The flags in a script's own --help."""
    if script == "scripts/train.py":
        return {flag for action in parser()._actions for flag in action.option_strings}
    status, out, errors = run_program(ROOT / script, "--help")
    assert status == 0, errors
    return set(re.findall(r"--[a-z][a-z-]*", out))


# Programs of others, whose flags we do not know: what follows one of them up to the name of a script.
OTHERS = (
    "git archive|mpirun|torchrun|mpiexec|srun|sbatch|docker|apptainer|pip|pytest|ulfm|a container|tensorboard|twine"
    "|jupyter"
)
OF_OTHERS = {
    "--mca",
    "--oversubscribe",
    "--allow-run-as-root",
    "--shm-size",
    "--report-bindings",
    "--cpu-bind",
    "--bind-to",
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_exist(document):
    """A flag behind the name of a script is one of its own; any other belongs to scripts/train.py."""
    unknown = []
    for line in read(document).splitlines():
        script = "scripts/train.py"
        for word in re.findall(
            rf"scripts/[\w/]+\.py|ringprop (?:grade|doctor)|\b(?:{OTHERS})\b|(?<![\w-])--[a-z][a-z-]*", line
        ):
            if not word.startswith("--"):
                script = re.sub(r"ringprop (\w+)", r"scripts/\1.py", word)
            elif script.startswith("scripts/") and word not in flags_of(script) | OF_OTHERS:
                unknown.append(word)
    assert unknown == []


def commands(document: str) -> list[list[str]]:
    """Every command line of a document that runs one of our scripts: of shell blocks, and in backticks."""
    text = read(document)
    shell = "\n".join(block for language, block in blocks(document) if language == "sh")
    lines = shell.replace("\\\n", " ").splitlines() + re.findall(r"`((?:python|mpirun|sbatch|ringprop) [^`]*)`", text)
    return [words for line in lines if (words := shlex.split(line, comments=True)) and not line.startswith("#")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_could_run(document):
    """The files that a command names are there, and the options of scripts/train.py are ones that it takes."""
    for words in commands(document):
        named = [word for word in words if word.startswith(("scripts/", "notebooks/", "tests/"))]
        assert [word for word in named if not (ROOT / word).exists()] == [], words
        if words[0] == "ringprop" and len(words) > 1:
            assert words[1] in COMMANDS, words
        for script in ("scripts/train.py", "scripts/slurm/one_node.sbatch", "scripts/slurm/many_nodes.sbatch"):
            rest = words[words.index(script) + 1 :] if script in words else []
            if rest and not {"--resume", "--help", "OPTIONS"} & set(rest):
                options = parse(rest)  # refuses what it does not know, and what makes no sense together
                if options.data == "digits":  # and what does not fit them; other data must be fetched
                    factory.make(options)


def test_a_wrong_command_is_seen(monkeypatch):
    """The control of the test above."""
    wrong = "```sh\npython scripts/train.py --ranks 2 --strategy zero9\n```\n"
    monkeypatch.setitem(globals(), "read", lambda document: wrong.replace("strategy zero9", "model lenet5"))
    with pytest.raises(ValueError, match="16x16"):
        test_commands_could_run("x")
    monkeypatch.setitem(globals(), "read", lambda document: wrong)
    assert commands("x") == [["python", "scripts/train.py", "--ranks", "2", "--strategy", "zero9"]]
    with pytest.raises(ValueError, match="zero9"):
        test_commands_could_run("x")


def test_the_messages_of_the_cluster_guide_are_said():
    """What its last table has in backticks in the first column stands in the code."""
    table = read("docs/cluster.md").partition("| message, or what is seen")[2]
    said = [text for row in table.splitlines()[2:] for text in re.findall(r"`([^`]*)`", row.split("|")[1])]
    code = "".join(file.read_text() for room in ROOMS[:4] for file in sorted((ROOT / room).rglob("*.py")))
    code = re.sub(r'"\s*f?"|{package.__name__}', lambda found: "nn" if found[0][0] == "{" else "", code)
    assert len(said) >= 6
    assert [text for text in said if text not in code] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", read(document), re.MULTILINE))
    assert named - targets == set()


@pytest.mark.parametrize(("name", "function"), [("ring", "def ring"), ("shared_arrays", "def arrays")])
def test_the_schedules_shown_are_those_that_run(name, function):
    shown = [
        text for name in ("README.md", "docs/architecture.md") for _, text in blocks(name) if text.startswith(function)
    ]
    source = inspect.getsource(collectives.ALGORITHMS["allreduce"][name].rounds)
    source = re.sub(r'    """.*?"""\n', "", source[source.index("def ") :], count=1, flags=re.DOTALL)
    assert shown
    assert set(shown) == {source}


def test_examples_of_collectives_run_and_print_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = 0
    for (language, text), (after, output) in itertools.pairwise([*blocks(ALGORITHM), ("", "")]):
        if language == "python" and "import collectives" in text:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(text, {})
            if after == "text":
                shown += 1
                assert said.getvalue() == output
    assert shown


def test_examples_of_the_api_train_the_same_network(tmp_path):
    """Both forms run as programs, on one process and on two ranks: the same parameters to rounding."""
    serial = next(text for text in examples() if "nn.Trainer(" in text)
    *imports, line = next(text for text in examples() if "DistributedDataParallel(" in text).strip().splitlines()
    lines = [line if old.startswith("trainer = ") else old for old in serial.splitlines()]
    assert lines != serial.splitlines()
    keep = "import numpy\nnumpy.save(f'{}-{trainer.shard[0]}.npy', trainer.flat_parameters)\n"
    (tmp_path / "serial.py").write_text(f"{serial}\n{keep.replace('{}', 'serial')}")
    (tmp_path / "ranks.py").write_text("\n".join([*imports, *lines, keep.replace("{}", "ranks")]))
    subprocess.run([sys.executable, "serial.py"], cwd=tmp_path, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
    with open(tmp_path / "said", "w") as said:
        status = launcher.run(["ranks.py"], 2, timeout=PATIENCE, cwd=tmp_path, stdout=said)
    assert status == 0, (tmp_path / "said").read_text()
    one, first, second = (np.load(tmp_path / f"{name}.npy") for name in ("serial-0", "ranks-0", "ranks-1"))
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, one, rtol=0, atol=1e-5)
    assert np.abs(one).max() > 0.1


def test_examples_of_using_a_network_run(tmp_path):
    """What was saved and loaded predicts the digits."""
    serial, using = (next(text for text in examples() if word in text) for word in ("nn.Trainer(", "nn.save("))
    check = "assert (trained.predict(x).argmax(axis=1) == y).mean() > 0.5\n"
    (tmp_path / "using.py").write_text(f"{serial}\n{using}\n{check}")
    subprocess.run([sys.executable, "using.py"], cwd=tmp_path, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
    assert {"digits.npz", "digits.safetensors", "digits.onnx"} <= {path.name for path in tmp_path.iterdir()}


def test_pictures_are_those_of_the_code(tmp_path):
    """docs/ holds what scripts/make_pictures.py draws; numbers may differ in the last digits between machines."""
    import matplotlib

    command = [sys.executable, ROOT / "scripts/make_pictures.py", "--out", tmp_path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    number = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
    for file in drawn:
        ours, kept = file.read_text(), (ROOT / "docs" / file.name).read_text()
        if f"v{matplotlib.__version__}," not in kept:
            pytest.skip(f"docs/{file.name} was drawn by another version of matplotlib than {matplotlib.__version__}")
        assert number.sub("#", ours) == number.sub("#", kept), "run: python scripts/make_pictures.py"
        np.testing.assert_allclose(*(np.array(number.findall(text), float) for text in (ours, kept)), atol=1e-3)


def test_citation_is_complete():
    import yaml

    citation = yaml.safe_load(read("CITATION.cff"))
    assert re.search(r"^version = (.*)$", read("setup.cfg"), re.MULTILINE)[1] == citation["version"]
    assert citation["cff-version"] == "1.2.0"
    references = citation["references"]
    assert all({"type", "title", "authors", "year"} <= set(entry) for entry in [citation | {"year": 0}, *references])
    assert len({entry["title"].lower() for entry in references}) == len(references)


if __name__ == "__main__":
    text = read(OPTIONS)
    for place, table in (TABLE, options_table()), (MATRIX, matrix()), (SUMMARIES, summaries()):
        text, count = place.subn(lambda found, table=table: found[1] + table + found[3], text)
        assert count == 1, f"{OPTIONS} has no place for a table"
    (ROOT / OPTIONS).write_text(text)
