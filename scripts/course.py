#!/usr/bin/env python3
"""Run the course, and make it: notebooks with solutions, and the students' with gaps, both from one source.

python scripts/course.py                   run every notebook, and write nothing (what `make notebooks` does)
python scripts/course.py 01 07             only these
python scripts/course.py --save            and write notebooks/NAME.ipynb, with what the cells show, and
                                           notebooks/student/NAME.ipynb, with gaps
python scripts/course.py --print 01        the student's version of one, as text
python scripts/course.py --slides DIR 07   write DIR/NAME.html: slides of the pictures that were saved; prints as pages

A gap in a notebook's source, notebooks/NN_name.py in jupytext's percent format:

    # gap: a step against the gradient       what is to be done
    # return ...                             what the student's version begins with; may be left out
    # solution
    return w - rate * gradient               what only the solution has
    # wrong: the wrong sign                  a part of what the check must say to the next lines
    # return w + rate * gradient             an answer that is wrong; neither version has it
    # end

It is checked in the first cell, from there on, that calls something of `checks` (notebooks/checks.py) or `exercise` (a
module of notebooks/exercises). Each notebook is run once, in one kernel: a cell with a gap first as a student finds it,
then with each wrong answer, and each time its check must fail with a sentence (`NotYet`); then solved, and its check
must pass.
"""

from __future__ import annotations

import argparse
import base64
import copy
import html
import io
import json
import re
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = "[0-9][0-9]*_*.py"  # 04b_training.py comes behind 04_convolution.py
GAP = re.compile(
    r"^(?P<indent>[ ]*)# gap: (?P<task>.*)\n(?P<start>(?:[ ]*#.*\n)*?)[ ]*# solution\n(?P<lines>(?:.*\n)*?)"
    r"(?P<wrong>(?:[ ]*# wrong: .*\n(?:[ ]*#(?! wrong: | end\n).*\n)*)*)[ ]*# end\n",
    re.MULTILINE,
)
WRONG = re.compile(r"^ *# wrong: (?P<said>.*)\n(?P<lines>(?: *#(?! wrong: ).*\n)*)", re.MULTILINE)
MARK = re.compile(r"^ *# (gap: |solution$|wrong: |end$)", re.MULTILINE)
CHECK = re.compile(r"\b(?:checks\.(?!style\b)|exercise\.(?!draw))")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LIMIT = 120  # seconds of a cell, on a machine that is busy with other work


def student(text: str) -> str:
    """The source with gaps: each begins with "Your turn" and what the author has left there; links from student/."""

    def gap(found: re.Match) -> str:
        indent = found["indent"]
        return f"{indent}# Your turn: {found['task']}\n" + uncommented(found["start"], indent)

    return whole(GAP.sub(gap, text)).replace("](../docs/", "](../../docs/")


def solution(text: str) -> str:
    """The source with solutions, and nothing of what the student begins with."""
    return whole(GAP.sub(lambda found: f"{found['indent']}# Solution: {found['task']}\n{found['lines']}", text))


def wrong_answers(text: str) -> list[tuple[str, str]]:
    """For each wrong answer (the source with it in its gap, all other gaps solved, and what its check must say)."""
    return [
        (
            solution(text[: gap.start()]) + uncommented(wrong["lines"], gap["indent"]) + solution(text[gap.end() :]),
            wrong["said"],
        )
        for gap in GAP.finditer(text)
        for wrong in WRONG.finditer(gap["wrong"])
    ]


def uncommented(text: str, indent: str) -> str:
    """Lines of comments as lines of code."""
    return "".join(re.sub(r"^ *# ?", indent, line).rstrip() + "\n" for line in text.splitlines())


def whole(text: str) -> str:
    """The text; raises ValueError where a mark is left, as one without its others is."""
    if left := MARK.search(text):
        line = text[: left.start()].count("\n") + 1
        raise ValueError(f"line {line}: `{left[0].strip()}` alone; a gap is `# gap: ...`, `# solution`, `# end`")
    return text


def sources(names: list[str]) -> list[Path]:
    """The notebooks whose names begin with one of these; of none: all. Raises SystemExit where there is none."""
    begins = tuple(f"{int(name):02}_" if name.isdigit() else name for name in names) or ""
    found = [path for path in sorted(FOLDER.glob(SOURCES)) if path.name.startswith(begins)]
    if not found and not FOLDER.is_dir():
        sys.exit(f"error: there is no {FOLDER}: the course is in the source tree, not in an installed package")
    if not found:
        have = ", ".join(path.stem for path in sorted(FOLDER.glob(SOURCES)))
        sys.exit(f"error: no notebook begins with {' or '.join(names)}; there are {have}")
    return found


def notebooks(path: Path) -> tuple:
    """(solved, with gaps) of a source. Raises ValueError with the file's name."""
    import jupytext

    text = path.read_text()
    try:
        made = tuple(jupytext.reads(form(text), fmt="py:percent") for form in (solution, student))
    except ValueError as error:
        raise ValueError(f"{path.name}, {error}") from None
    if len(made[0].cells) != len(made[1].cells):
        raise ValueError(f"{path.name}: a gap reaches over the border of a cell")
    return made


def wrong_cells(path: Path, solved) -> list[tuple]:
    """(place, cell, what its check must say) of every wrong answer in a source."""
    import jupytext

    found = []
    for text, said in wrong_answers(path.read_text()):
        cells = jupytext.reads(text, fmt="py:percent").cells
        (place,) = [
            i for i, pair in enumerate(zip(cells, solved.cells, strict=True)) if pair[0].source != pair[1].source
        ]
        found.append((place, cells[place], said))
    return found


def write(path: Path, solved, gaps) -> None:
    """NAME.ipynb beside the source, and student/NAME.ipynb with the checks beside it, without times and paths."""
    import nbformat

    into = FOLDER / "student"
    into.mkdir(exist_ok=True)
    for name in ("checks.py", "exercises"):
        if not (into / name).is_symlink():
            (into / name).symlink_to(f"../{name}")
    for notebook, folder in ((solved, FOLDER), (gaps, into)):
        nbformat.write(without_traces(notebook), folder / f"{path.stem}.ipynb")


def without_traces(notebook):
    """A copy with cells numbered in order, no times, and no path of the machine that ran it."""
    clean = copy.deepcopy(notebook)
    clean.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for i, cell in enumerate(clean.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = {}
            for holder in (output, output.get("data", {})):
                holder.update({key: without_paths(holder[key]) for key in ("text", "text/plain") if key in holder})
                holder.update({key: fewer_colours(holder[key]) for key in ("image/png",) if key in holder})
    return clean


def without_paths(text: str) -> str:
    for path, instead in ((FOLDER.parent, "."), (tempfile.gettempdir(), "TEMPORARY"), (Path.home(), "~")):
        text = text.replace(f"{path}/", f"{instead}/")
    return text


def fewer_colours(png: str) -> str:
    """A picture in base64, as notebooks hold it, with 128 colours: a third of the bytes, and it looks the same."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        palette = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    written = io.BytesIO()
    palette.save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


# A slide fills the window; Space and Page Down go on, and printing makes a page of each.
SLIDES = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>
html {{ scroll-snap-type: y mandatory; font: min(4vh, 3vw)/1.3 sans-serif; color: #1f2430 }}
body {{ margin: 0 }}
section {{ height: 100vh; padding: 3vh 4vw; box-sizing: border-box; display: flex; flex-direction: column;
  justify-content: center; scroll-snap-align: start; break-after: page }}
h1, h2 {{ margin: 0 0 2vh; font-size: 1.6rem }}
img {{ flex: 1; min-height: 0; object-fit: contain }}
@page {{ size: 32cm 18cm; margin: 0 }}
</style>
{slides}
</html>
"""


def slides(notebook: dict) -> str:
    """A page of slides: the title, and each picture below its heading."""
    headings, made = [], []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            found = re.findall(r"^#+ (.*)", "".join(cell["source"]), re.MULTILINE)
            headings += [html.escape(heading.replace("`", "")) for heading in found]
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                picture = f'<img alt="" src="data:image/png;base64,{"".join(png).strip()}">'
                made.append(f"<section><h2>{headings[-1]}</h2>{picture}</section>")
    title = headings[0]
    return SLIDES.format(title=title, slides="\n".join([f"<section><h1>{title}</h1></section>", *made]))


class Wrong(Exception):
    """What a notebook does is not what it should: with the cell and the output."""


def run(solved, gaps, wrong: list[tuple] = ()) -> None:
    """Run a notebook, every gap first as a student finds it, then with its `wrong` answers; outputs stay in `solved`.

    Raises
    ------
    Wrong
        A cell fails, or a check passes an exercise that is not solved, or says something else than it must.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    client = NotebookClient(solved, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": FOLDER}})

    def execute(number: int, cell) -> str:
        """Run a cell in place `number`; what it says where its exercise is not solved."""
        client.nb.cells[number] = cell
        try:
            client.execute_cell(cell, number)
        except CellExecutionError as error:
            if said := error.traceback.partition("\nNot yet. ")[2]:
                return said.strip()
            raise Wrong(f"cell {number}:\n" + COLOUR.sub("", error.traceback)) from None
        except CellTimeoutError:
            raise Wrong(f"cell {number} takes more than {LIMIT} s:\n{cell.source}") from None
        return ""

    with client.setup_kernel():
        for i, (cell, gap) in enumerate(zip(list(solved.cells), gaps.cells, strict=True)):
            if cell.cell_type != "code":
                continue
            if gap.source != cell.source:
                said = try_answer(i, gap, solved, execute)
                print(f"    as a student finds it: {said.splitlines()[0]}", flush=True)
            for _, answer, wanted in (entry for entry in wrong if entry[0] == i):
                said = try_answer(i, answer, solved, execute)
                if wanted not in said:
                    raise Wrong(f"cell {i}: the check says {said!r}, not {wanted!r}, to\n{answer.source}")
                print(f"    to a wrong answer: {said.splitlines()[0]}", flush=True)
            if said := execute(i, cell):
                raise Wrong(f"cell {i}: the solution is not right: {said}")


def try_answer(i: int, answer, solved, execute) -> str:
    """Run a cell whose answer is missing or wrong, and those up to its check; what the check says."""
    for j in range(i, len(solved.cells)):
        cell = answer if j == i else solved.cells[j]
        if cell.cell_type != "code":
            continue
        cell = type(cell)(cell, outputs=[])  # what the student's version prints is not the notebook's
        kept = solved.cells[j]
        try:
            said = execute(j, cell)
        finally:
            solved.cells[j] = kept
        if said:
            return said
        if CHECK.search(cell.source):
            break
    raise Wrong(f"cell {i}: nothing says that the exercise is not solved:\n{answer.source}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NN", help="only notebooks whose names begin so")
    parser.add_argument("--save", action="store_true", help="write what was run: solved, with outputs, and with gaps")
    parser.add_argument("--print", action="store_true", help="print the students' versions, and write nothing")
    parser.add_argument("--slides", type=Path, metavar="DIR", help="write slides of the pictures of saved notebooks")
    asked = parser.parse_args(argv)
    failed = []
    for path in sources(asked.names):
        if asked.slides:
            asked.slides.mkdir(parents=True, exist_ok=True)
            into = asked.slides / f"{path.stem}.html"
            into.write_text(slides(json.loads(path.with_suffix(".ipynb").read_text())))
            print(into)
            continue
        if asked.print:
            print(student(path.read_text()), end="")
            continue
        solved, gaps = notebooks(path)
        begin = time.monotonic()
        print(path.stem, flush=True)
        try:
            run(solved, gaps, wrong_cells(path, solved))
        except Wrong as error:
            failed.append(path.stem)
            print(f"{path.name}, {error}", file=sys.stderr)
            continue
        if asked.save:
            write(path, solved, gaps)
        number = len(GAP.findall(path.read_text()))
        print(f"    {number} exercises, {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        print(f"error: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
