"""What README.md and CONTRIBUTING.md say is true of the tree: examples run, and what they name exists.

python tests/test_readme.py      write the options table of README.md from parallel/options.py
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import collectives
from parallel import launch
from parallel.options import GROUPS, Options, parser, shown_default

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
TABLE = re.compile(r"(<!-- options: [^\n]* -->\n\n)(.*?)(\n<!-- end of options -->)", re.DOTALL)
# First words of paths; what a document names in backticks below one of these must be there.
ROOMS = ("nn/", "collectives/", "parallel/", "scripts/", "notebooks/", "tests/", "docs/")


def read(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", read(document), re.DOTALL | re.MULTILINE)


def examples() -> list[str]:
    """README's Python blocks, without the schedule: that is compared with its source."""
    return [text for language, text in blocks("README.md") if language == "python" and not text.startswith("def ring")]


def options_table() -> str:
    """A row for every option, from the dataclass that the command line is made of."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(Options):
        if field.name in GROUPS:
            rows.append(f"| **{GROUPS[field.name]}** | | |")
        choices = field.metadata["choices"]
        choices = f" (one of {', '.join(choices)})" if choices and len(choices) > 1 else ""
        default = f"`{shown}`" if (shown := shown_default(field)) else ""
        rows.append(f"| `--{field.name.replace('_', '-')}` | {default} | {field.metadata['help']}{choices} |")
    return "\n".join(rows) + "\n"


def test_options_table_is_that_of_the_dataclass():
    assert TABLE.search(read("README.md"))[2] == options_table(), "run: python tests/test_readme.py"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    links = re.findall(r'\]\(([^)#]+)|(?:src|href)="([^"]+)"', read(document))
    targets = [a or b for a, b in links]
    assert targets
    assert [t for t in targets if not t.startswith("https://") and not (ROOT / t).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_backticks_exist(document):
    named = [path for path in re.findall(r"`([\w./-]+)`", read(document)) if path.startswith(ROOMS)]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


OF_MPIRUN = {"--oversubscribe", "--allow-run-as-root"}


@functools.cache
def flags_of(script: str) -> set[str]:
    """The flags in a script's own --help."""
    if script == "scripts/train.py":
        return {flag for action in parser()._actions for flag in action.option_strings}
    done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_exist(document):
    """A flag behind the name of a script is one of its own; any other belongs to scripts/train.py."""
    unknown = []
    for line in read(document).splitlines():
        script = "scripts/train.py"
        for word in re.findall(r"scripts/\w+\.py|(?<![\w-])--[a-z][a-z-]*", line):
            if word.startswith("--"):
                unknown += [word] if word not in flags_of(script) | OF_MPIRUN else []
            else:
                script = word
    assert unknown == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", read(document), re.MULTILINE))
    assert named
    assert named - targets == set()


def test_the_schedule_shown_is_the_one_that_runs():
    shown = next(text for _, text in blocks("README.md") if text.startswith("def ring"))
    source = inspect.getsource(collectives.ALGORITHMS["allreduce"]["ring"].rounds)
    source = re.sub(r'    """.*?"""\n', "", source[source.index("def ") :], count=1, flags=re.DOTALL)
    assert shown == source


def test_examples_of_collectives_run_and_print_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = 0
    for (language, text), (after, output) in itertools.pairwise([*blocks("README.md"), ("", "")]):
        if language == "python" and "import collectives" in text:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(text, {})
            if after == "text":
                shown += 1
                assert said.getvalue() == output
    assert shown


def test_examples_of_the_api_train_the_same_network(tmp_path):
    """Both forms run as programs, on one process and on two ranks: the same parameters to rounding."""
    serial = next(text for text in examples() if "nn.Serial(" in text)
    *imports, line = next(text for text in examples() if "DistributedDataParallel(" in text).strip().splitlines()
    lines = [line if old.startswith("trainer = ") else old for old in serial.splitlines()]
    assert lines != serial.splitlines()
    keep = "import numpy\nnumpy.save(f'{}-{trainer.shard[0]}.npy', trainer.parameters)\n"
    (tmp_path / "serial.py").write_text(f"{serial}\n{keep.replace('{}', 'serial')}")
    (tmp_path / "ranks.py").write_text("\n".join([*imports, *lines, keep.replace("{}", "ranks")]))
    subprocess.run([sys.executable, "serial.py"], cwd=tmp_path, check=True, timeout=60, stdout=subprocess.DEVNULL)
    with open(tmp_path / "said", "w") as said:
        status = launch.run(["ranks.py"], 2, timeout=60, cwd=tmp_path, stdout=said)
    assert status == 0, (tmp_path / "said").read_text()
    one, first, second = (np.load(tmp_path / f"{name}.npy") for name in ("serial-0", "ranks-0", "ranks-1"))
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, one, rtol=0, atol=1e-5)
    assert np.abs(one).max() > 0.1


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
    text, count = TABLE.subn(lambda found: found[1] + options_table() + found[3], read("README.md"))
    assert count == 1, "README.md has no place for the table"
    (ROOT / "README.md").write_text(text)
