"""Sphinx: `make docs` writes docs/_build/html, which needs no network, neither to be built nor to be read."""

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "ringprop"
author = copyright = "the ringprop authors"
version = release = re.search(r"^version = (.*)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)[1]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ringprop {version}"
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
html_static_path, html_css_files = ["static"], ["wide.css"]
html_show_sourcelink = False
html_math_renderer = "mathml"  # browsers draw it themselves; MathJax would come over the network

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks that are kept have what their cells show
nb_merge_streams = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_typehints = "none"  # numpydoc says more
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
toc_object_entries = False
pygments_style, pygments_dark_style = "friendly", "github-dark"
viewcode_follow_imported_members = False  # else mpi4py, whose source there is not, is listed as well
smartquotes_action = "q"  # no dashes: --ranks is a flag
suppress_warnings = ["myst.header"]

# The pages of the API, and the modules whose public names are on each.
PACKAGES = {
    "nn": ("nn", "nn.callbacks", "nn.data", "nn.metrics", "nn.models", "nn.schedules"),
    "collectives": ("collectives",),
    "parallel": ("parallel",),
}
FOLDERS = ("nn", "collectives", "parallel", "scripts", "tests", "notebooks")  # of files that pages name


def public_names(package: str) -> list[tuple[str, str, object]]:
    """(module, name, object) of each public class and function of a package, each once."""
    found, seen = [], set()
    for place in PACKAGES[package]:
        module = importlib.import_module(place)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                found.append((place, name, value))
    return found


def api_of(package: str) -> str:
    """A page with all public names of a package, under these names, by the file that holds each."""
    by_file: dict[str, list[str]] = {}
    for place, name, value in public_names(package):
        file = value.__module__.replace(".", "/") + ".py"
        kind = "class" if isinstance(value, type) else "function"
        error = kind == "class" and issubclass(value, BaseException)
        lines = [f".. auto{'exception' if error else kind}:: {place}.{name}"]
        by_file.setdefault(file, []).extend([*lines, *["   :members:"] * (kind == "class"), ""])
    page = [package, "=" * len(package), "", f".. currentmodule:: {package}", ""]
    for file, lines in sorted(by_file.items()):
        page += [file, "-" * len(file), "", *lines]
    return "\n".join(page) + "\n"


def write_api(app) -> None:
    """docs/api/PACKAGE.rst; a file that would stay as it is is left alone, so that Sphinx need not read it again."""
    for package in PACKAGES:
        file, text = Path(app.srcdir) / "api" / f"{package}.rst", api_of(package)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def copy_notebooks(app) -> None:
    """Copy the solved notebooks and the projects to docs/notebooks, below what Sphinx reads: they become pages."""
    source, into = Path(app.srcdir).parent / "notebooks", Path(app.srcdir) / "notebooks"
    files = {path.relative_to(source): path for path in [*source.glob("*.ipynb"), *source.glob("projects/*.*")]}
    for old in [path for path in into.rglob("*.*") if path.relative_to(into) not in files]:
        old.unlink()
    for name, path in files.items():
        copy = into / name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


def link_notebooks(app, page: str, text: list[str]) -> None:
    """Links to notebooks and from them, which are right in the source tree, lead to the copies and from them."""
    text[0] = re.sub(r"\]\((?:\.\./)+notebooks/", "](" + "../" * page.count("/") + "notebooks/", text[0])
    if page.startswith("notebooks/"):
        text[0] = text[0].replace("](../docs/", "](../")


def link_files(app, page: str, text: list[str]) -> None:
    """Names of files in backticks lead to the files; in blocks of code they stay as they are."""
    name = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.\w+)`")

    def link(found: re.Match) -> str:
        exists = (Path(app.srcdir).parent / found[1]).is_file()
        return f"{{download}}`{found[1]} </../{found[1]}>`" if exists else found[0]

    if page.startswith("notebooks/"):
        return
    parts = re.split(r"(^```.*?^```$)", text[0], flags=re.DOTALL | re.MULTILINE)
    text[0] = "".join(part if part.startswith("```") else name.sub(link, part) for part in parts)


def a_field_each(lines: list[str]) -> list[str]:
    """Of the attributes "a, b : int" a field for each name: in one for both, Sphinx takes "a," for the type of b."""
    found, names = [], []
    for line in lines:
        field = re.match(r":(ivar|vartype) (\w+(?:, \w+)+):(.*)", line)
        if field:
            names = field[2].split(", ")
            blocks = [[f":{field[1]} {name}:{field[3]}"] for name in names]
            found += blocks
        elif names and line.startswith(" "):  # the field goes on
            for block in found[-len(names) :]:
                block.append(line)
        else:
            names = []
            found.append([line])
    return [line for block in found for line in block]


def plain(app, what, name, of, options, lines) -> None:
    """(N, *shape) and |w| are what they look like, and no markup; *one* word may be emphasized."""
    lines[:] = [
        re.sub(r"(?<![\w*])\*\w+\*(?![\w*])|([*|])", lambda m: "\\" * bool(m[1]) + m[0], line) for line in lines
    ]


def split_fields(app, what, name, of, options, lines) -> None:
    lines[:] = a_field_each(lines)


def write_formula(writer, node) -> None:
    """Write a formula as MathML."""
    from docutils.nodes import SkipNode
    from latex2mathml.converter import convert

    display = "block" if node.tagname == "math_block" else "inline"
    formula = convert(node.astext(), display=display)
    writer.body.append(f'<div class="math">{formula}</div>' if display == "block" else formula)
    raise SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("builder-inited", write_api)
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", link_notebooks)
    app.connect("source-read", link_files)
    if "sphinx.ext.autodoc" in app.extensions:  # pages can be built without the API
        app.connect("autodoc-process-docstring", plain, priority=100)  # before napoleon
        app.connect("autodoc-process-docstring", split_fields, priority=900)  # behind it
