"""docs/: what its how-tos show is run, and its pages are built without a warning."""

import contextlib
import importlib.util
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE

from nn import registry
from parallel.launch import launcher

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block of a page."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


SYSTEMS = sorted(page.name for page in (ROOT / "docs" / "systems").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", SYSTEMS)
def test_a_system_has_all_that_its_page_promises(page):
    """What it is, where it comes from, its picture, the command, where the code is, what was measured."""
    text = (ROOT / "docs" / "systems" / page).read_text()
    about = text.partition("\n## ")[0]
    assert len(about.split()) > 40 or "python" in about, "what it is"
    assert re.search(r"\b(19|20)\d\d\b", text), "a source, with its year"
    assert re.search(r"^!\[.{20,}\]\(", text, re.MULTILINE), "a picture, with words for those who do not see it"
    assert re.search(r"^```sh\n(.*\n)*?python scripts/", text, re.MULTILINE), "a command"
    for heading in ("Where the code is", "What was measured here"):
        assert f"\n## {heading}\n" in text, heading


def test_every_strategy_has_a_page_and_a_command_there():
    from parallel.command.options import FIELDS

    index = (ROOT / "docs" / "systems" / "index.md").read_text()
    pages = re.findall(r"^\| \[[^\]]*\]\(([a-z_]+\.md)\) \| ([^|]*) \|", index, re.MULTILINE)
    for strategy in FIELDS["strategy"].metadata["choices"]:
        told = [page for page, names in pages if f"`{strategy}`" in names]
        assert told, f"{strategy}: no row of docs/systems/index.md names it"
        default = strategy == FIELDS["strategy"].default
        command = r"train\.py --ranks" if default else rf"train\.py .*--strategy {strategy}(?![\w-])"
        texts = [(ROOT / "docs" / "systems" / page).read_text() for page in told]
        assert any(re.search(command, text) for text in texts), f"{strategy}: no command on {', '.join(told)}"


def test_the_layer_of_the_how_to_is_right_trains_and_is_loaded(tmp_path, monkeypatch):
    """The blocks of docs/howto/layer.md, one after another in one program; each prints what stands behind it."""
    monkeypatch.chdir(tmp_path)

    known = dict(registry.registered("layer"))
    monkeypatch.setitem(registry._REGISTERED, "layer", known)  # what the page registers is forgotten again
    assert run_page("howto/layer.md") == 2


def run_page(page: str) -> int:
    """Run a page's blocks as one program; each prints what stands behind it. Return how many print something."""
    names, shown = {"__name__": "howto"}, 0
    for (language, text), (after, output) in itertools.pairwise([*blocks(page), ("", "")]):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(text, names)
            if after == "text":
                shown += 1
                assert said.getvalue() == output
    return shown


def test_the_page_for_users_of_other_libraries_runs_and_names_what_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_page("howto/from_pytorch.md") == 3
    import nn
    import parallel

    text = (ROOT / "docs/howto/from_pytorch.md").read_text()
    ours = "\n".join(line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| "))
    network = nn.Network(nn.Sequential(nn.Linear(3, 2)), (3,))
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1))
    found = re.findall(r"\b(nn|parallel|trainer)\.([\w.]+)", ours)
    assert len(found) > 20
    for package, name in found:
        place = {"nn": nn, "parallel": parallel, "trainer": trainer}[package]
        for part in name.strip(".").split("."):
            if (package, part) == ("nn", "npz"):
                break
            place = getattr(place, part)


def test_the_program_for_ranks_of_that_page_runs(tmp_path):
    code, output = next(
        (text, shown)
        for (language, text), (_, shown) in itertools.pairwise(blocks("howto/from_pytorch.md"))
        if language == "py"
    )
    (tmp_path / "ddp.py").write_text(code)
    start = (
        f"import sys; from parallel.launch import launcher; sys.exit(launcher.run([{str(tmp_path / 'ddp.py')!r}], 2))"
    )
    command = [sys.executable, "-c", start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_the_gradient_check_of_the_how_to_sees_a_wrong_layer():
    """The control: without the mask in backward the layer of the page is refused."""
    import nn

    least, text = [text for language, text in blocks("howto/layer.md") if language == "python"][:2]
    wrong = text.replace("gu = gy * passed", "gu = gy")
    assert wrong != text
    assert least.partition("class ")[2].partition("\n\n\n")[0].count("\n") < 15, "a layer is short"
    names = {"__name__": "howto"}
    exec(least + wrong, names)
    assert nn.gradcheck(names["SoftThreshold"](6), np.random.default_rng(0).normal(size=(5, 7, 6))) > 1e-3


@pytest.mark.parametrize("right", [True, False], ids=["as shown", "without the sum"])
def test_the_strategy_of_the_how_to_equals_one_process(tmp_path, right):
    """Its blocks as one program on three ranks; the control leaves the sum out, and must fail."""
    text = "\n".join(text for language, text in blocks("howto/strategy.md") if language == "python")
    if not right:
        changed = re.sub(r"^ +self\.mesh\.communicator\.Allreduce\(.*\n", "", text, count=1, flags=re.MULTILINE)
        assert changed != text
        text = changed
    (tmp_path / "strategy.py").write_text(text)
    with open(tmp_path / "said", "w") as said:
        status = launcher.run(["strategy.py"], 3, timeout=PATIENCE, cwd=tmp_path, stdout=said)
    (_, output) = next(block for block in blocks("howto/strategy.md") if block[0] == "text")
    assert (status == 0) is right
    assert (output in (tmp_path / "said").read_text()) is right


def configuration():
    """docs/conf.py, as a module."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


def test_formulas_in_docstrings_are_no_markup():
    lines = ["(N, *shape), r = |w| / |u|", "w *= 1 - lr", "*options : int", "**more", "what is *late* stays"]
    configuration().plain(None, "", "", None, None, lines)
    assert lines == [
        *(r"(N, \*shape), r = \|w\| / \|u\|", r"w \*= 1 - lr", r"\*options : int", r"\*\*more"),
        "what is *late* stays",
    ]


def test_attributes_of_several_names_have_a_field_each():
    conf = configuration()
    given = [":ivar rank, round: where", "    it fails", ":vartype rank, round: int", "", ":ivar done: x, y: z"]
    assert conf.a_field_each(given) == [
        *(":ivar rank: where", "    it fails", ":ivar round: where", "    it fails"),
        *(":vartype rank: int", ":vartype round: int", "", ":ivar done: x, y: z"),
    ]


def test_the_schedule_of_the_how_to_is_right():
    import collectives

    text = next(text for language, text in blocks("howto/strategy.md") if "def line" in text)
    names = {"__name__": "howto"}
    exec(text, names)
    assert "right" in str(collectives.check(names["line"], ranks=[1, 2, 3, 5]))


def test_every_picture_of_the_gallery_is_kept_and_shown():
    """docs/pictures has each that scripts/gallery.py draws, and no other; a page shows it."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import gallery
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
    assert [name for name in gallery.PICTURES if f"pictures/{name}" not in text] == []
    kept = {file.name: file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()}
    assert sorted(kept) == sorted(gallery.PICTURES), "run: make gallery"
    assert sum(kept.values()) < 6 << 20
    ends = {name: gallery.pipeline(name).axes[0].get_xlim()[1] for name in ("gpipe", "interleaved", "zb-v")}
    assert 24 <= ends["zb-v"] < ends["interleaved"] < ends["gpipe"] < 34, "the same work in each"


def test_the_table_and_the_pictures_of_compression_are_of_one_measurement():
    rows = json.loads((ROOT / "docs/measured/fewer_bytes.json").read_text())["rows"]
    table = {f"| {row['method']} | {row['bytes']:,.0f} | {100 * row['accuracy']:.1f} % |" for row in rows}
    page = (ROOT / "docs/systems/compression.md").read_text()
    shown = re.findall(r"^\| [a-z].* \| [\d,]+ \| [\d.]+ % \|$", page, re.MULTILINE)
    assert len(shown) > 8 and set(shown) <= table


# ------------------------------------------------------------------------------------------------- pages, built


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "furo", "myst_nb", "latex2mathml")),
    reason="no Sphinx here: pip install -e '.[docs]', as `make docs` does",
)
@pytest.mark.parametrize("api", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["pages", "and the API"])
def test_pages_are_built_without_a_warning(tmp_path, api):
    """From a copy of docs/; what is built asks the network for nothing."""
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("_build", "*.rst"))
    for name in (*configuration().FOLDERS, "setup.cfg"):
        (tmp_path / name).symlink_to(ROOT / name)
    if not api:
        without_api(docs)
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", docs, tmp_path / "html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pipelines = (tmp_path / "html" / "systems" / "pipeline.html").read_text()
    assert re.search(r'href="../_downloads/\w+/schedules.py"', pipelines), "names of files are links"
    assert "../_images/pipeline_zb-v.svg" in pipelines and 'href="../notebooks/13_pipelines.html"' in pipelines
    descent = (tmp_path / "html" / "notebooks" / "01_gradient_descent.html").read_text()
    assert descent.count("<math ") > 20 and "\\frac" not in re.sub(r"<annotation.*?</annotation>", "", descent)
    fetched = r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"'
    files = (tmp_path / "html").rglob("*.html")
    assert [(file.name, link) for file in files for link in re.findall(fetched, file.read_text())] == []
    if api:
        page = (tmp_path / "html" / "api" / "nn.html").read_text()
        assert 'id="nn.Linear"' in page and 'id="nn.schedules.Cosine"' in page
        page_of_ranks = (tmp_path / "html" / "api" / "collectives.html").read_text()
        assert '<span class="n"><span class="pre">watch</span></span>' in page_of_ranks, "the keywords of Communicator"
        assert "problematic" not in page, "text that is taken for markup"


def without_api(docs: Path) -> None:
    """Pages with a heading in the place of those of the API, which take most of the time."""
    text = (docs / "conf.py").read_text()
    plain = re.sub(r"^extensions = .*$", 'extensions = ["myst_nb"]', text, flags=re.MULTILINE)
    plain = plain.replace('    app.connect("builder-inited", write_api)\n', "    pass\n")
    assert plain != text
    (docs / "conf.py").write_text(plain)
    for name in ("nn", "collectives", "parallel"):
        (docs / "api" / f"{name}.rst").write_text(f"{name}\n{'=' * len(name)}\n")
