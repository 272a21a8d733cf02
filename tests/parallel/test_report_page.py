"""scripts/report.py: one page that needs nothing else and says what runs have left, whole or not."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import PATIENCE

from parallel.command import report, version
from parallel.command.options import Options
from parallel.reports.breakdown import PARTS
from parallel.reports.page import curves
from parallel.reports.runs import MOST_RECORDS, read_run

CONFIG = vars(Options(model="mlp:64,10", epochs=3, lr=0.25))


def make(directory, accuracy=0.9, **changed):
    """The files of a finished run."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changed))
    environment = {"ringprop": "0.1.0", "commit": "c" * 40, "numpy": "2.0", "cores": 2, "command": "train.py --lr 0.25"}
    (directory / "environment.json").write_text(json.dumps(environment))
    lines = [
        {
            "epoch": e,
            "loss": 1 / e,
            "validation_loss": 1.2 / e,
            "validation_accuracy": 0.3 * e,
            "images_per_second": 1e4,
        }
        for e in (1, 2, 3)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"accuracy": accuracy, "loss": 0.4, "validation_accuracy": 0.88, "chosen_epoch": 3, "epochs": 3}
    result |= {"seconds": 12.5, "images_per_second": 10000, "ranks": 2, "parameters_sha256": "ab" * 32}
    result["breakdown"] = {part: [0.01 * (i + 1), 0.02] for i, part in enumerate(PARTS)}
    (directory / "result.json").write_text(json.dumps(result))
    event = {"ph": "X", "tid": "main", "dur": 40.0}
    events = [
        event | {"name": name, "pid": rank, "ts": 100.0 * step + 50 * i}
        for rank in (0, 1) for step in range(8) for i, name in enumerate(("compute", "communicate"))
    ]  # fmt: skip
    (directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return directory


class Page(HTMLParser):
    """Tags must be closed as they were opened; what they hold is kept."""

    VOID = ("meta", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.text, self.wrong = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append((tag, self.getpos()))

    def handle_data(self, data):
        self.text.append(data)


def written(out, *runs):
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    text = out.read_text()
    page = Page(text)
    assert not page.wrong and not page.open
    return text, page, re.sub(r"\s+", " ", " ".join(page.text))


def test_runs_are_compared(tmp_path):
    one, other = make(tmp_path / "one"), make(tmp_path / "other", 0.95, lr=0.5, momentum=0.9, threads=1)
    for directory, threads in (one, 2), (other, 1):
        environment = json.loads((directory / "environment.json").read_text())
        (directory / "environment.json").write_text(json.dumps(environment | {"threads": threads}))
    text, page, said = written(tmp_path / "report.html", one, other)
    assert "2 runs compared" in said and "90.00%" in said and "95.00%" in said and "12.5 s" in said
    assert re.search(r"ringprop [\w.]+(, commit \w+)?, \d{4}-\d\d-\d\d", said), "made by what, and when"
    assert text.count('best">95.00%') == 1 and 'best">90.00%' not in text
    differs = said[said.index("What differs") : said.index("Curves")]
    assert "threads \u2013 1" in differs and "threads used 2 1" in differs, "what was asked for, and what was had"
    assert "lr 0.25 0.5" in differs and "momentum 0.0 0.9" in differs and "epochs" not in differs
    assert [image["alt"] for image in page.images].count("timeline of all ranks") == 2
    assert len(page.images) == 5, "curves, and breakdown and timeline of each"
    shares = np.array([[0.01 * (i + 1), 0.02] for i in range(5)]).sum(axis=1)
    assert f"compute {shares[0] / shares.sum():.1%}, wait {shares[1] / shares.sum():.1%}" in said


def test_values_of_runs_that_chose_the_same_epoch_do_not_lie_on_each_other(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("parallel.reports.page.picture", lambda figure, *_: figures.append(figure) or "")
    runs = [read_run(make(tmp_path / name)) for name in ("one", "same", "more")]
    curves(runs)
    loss, validation, accuracy, _ = figures[0].axes
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["90.00%"] * 3
    assert [text.get_text() for text in validation.get_legend().get_texts()] == ["0.4"] * 3
    assert not validation.texts and not accuracy.texts
    assert len({line.get_linestyle() for line in loss.lines}) == 3, "equal curves are seen through each other"


def test_the_page_needs_nothing_else_and_names_are_no_html(tmp_path):
    run = make(tmp_path / "<b>bold & <script>", model="<i>x</i>")
    (run / "inspection").mkdir()
    (run / "inspection" / "confusion.png").write_bytes(b"\x89PNG")
    text, page, said = written(tmp_path / "report.html", run)
    assert page.images and all(image["src"].startswith("data:image/") and image["alt"] for image in page.images)
    assert page.images[-1]["alt"] == "confusion"
    assert "<link" not in text and not re.search(r'(src|href)="(?!data:)', text)
    assert "0.1.0" in said and "c" * 40 in said and "lr 0.25" in said and "train.py --lr 0.25" in said
    assert "What differs" not in said
    assert "<b>bold & <script>" in said and "<i>x</i>" in said
    assert "<b>" not in text and "<script" not in text and "<i>" not in text


def test_names_in_pictures_are_no_formulas_and_none_is_hidden(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("parallel.reports.page.picture", lambda figure, *_: figures.append(figure) or "")
    curves([read_run(make(tmp_path / name)) for name in ("a$_$b", "_base", "lr")])
    (figure,) = figures
    figure.canvas.draw()
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["a\\$_\\$b", " _base", "lr"]


def test_runs_that_are_not_whole(tmp_path):
    run, broken = make(tmp_path / "stopped"), make(tmp_path / "broken")
    (run / "result.json").unlink()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-20])
    for name in ("result.json", "environment.json", "trace.json"):
        (broken / name).write_text("{" if name != "trace.json" else '{"traceEvents": [{"ph": "X"}]}')
    (broken / "metrics.jsonl").write_text('{"epoch": "x", "loss": [1]}\n[]\n{"epoch": 1, "loss": NaN}\n')
    _, _, said = written(tmp_path / "report.html", run, broken)
    assert "not finished: 2 of 3 epochs are there" in said and "metrics.jsonl: line 3 is no record" in said
    assert "result.json is not JSON" in said and "environment.json is not JSON" in said
    assert "trace.json does not hold the events of a timeline" in said and "line 2 is no record" in said
    vast = make(tmp_path / "vast", accuracy=10**400)
    with (vast / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 4, "loss": 10**400}) + "\n")
    _, _, said = written(tmp_path / "report.html", vast)
    assert "result.json is not JSON (a number of 401 digits)" in said and "metrics.jsonl: line 4 is no record" in said
    (vast / "metrics.jsonl").write_text('{"epoch": 1}\n' + "\n" * (MOST_RECORDS + 50))
    problems = read_run(vast).problems
    assert "metrics.jsonl has more than 100,000 lines, of which the first are read" in problems
    assert "metrics.jsonl: line 2 is no record" in problems
    assert "metrics.jsonl: 99,994 other lines are no records" in problems and len(problems) < 10
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    _, _, said = written(tmp_path / "report.html", bare)
    assert "No epoch is finished" in said and "environment.json cannot be read" in said


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 1
    assert "is not the directory of a run: there is no config.json" in capsys.readouterr().err


def test_the_commit_is_read_from_files(tmp_path):
    first, other = "a" * 40, "b" * 40
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{other} refs/heads/older\n{first} refs/heads/main\n")
    assert version.commit(tmp_path) == first
    (git / "refs" / "heads" / "main").write_text(f"{other}\n")
    assert version.commit(tmp_path) == other
    (git / "HEAD").write_text(f"{first}\n")
    assert version.commit(tmp_path) == first
    worktree = git / "worktrees" / "w"
    worktree.mkdir(parents=True)
    (worktree / "HEAD").write_text("ref: refs/heads/main\n")
    (worktree / "commondir").write_text("../..\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {worktree}\n")
    assert version.commit(tmp_path / "w") == other
    for text in ("", "ref: nowhere", "\0"):
        (git / "HEAD").write_text(text)
        assert version.commit(tmp_path) != other
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", version.version())


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>addEventListener("load", () => {
    const images = [...document.images], drawn = images.filter(i => i.complete && i.naturalWidth > 50);
    const narrow = document.documentElement.scrollWidth <= innerWidth;
    document.title = ["looked", images.length, drawn.length, narrow ? "fits" : "too wide"].join(" ");
});</script></body>"""


def looked_at(page, place):
    """The title that PROBE gives a page in headless chromium: images, those drawn, whether it fits the window."""
    file = place / "probe.html"
    file.write_text(page.replace("</body>", PROBE))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"]
    options += [f"--user-data-dir={place / 'browser'}", "--no-first-run", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, file.as_uri()], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return re.search("<title>([^<]*)</title>", done.stdout)[1]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: no browser looks at the page")
def test_a_browser_draws_all_of_the_page(tmp_path):
    """Its pictures are drawn, and it is not wider than the window; a broken picture and a wide line are seen."""
    text, page, _ = written(tmp_path / "report.html", make(tmp_path / "one"), make(tmp_path / "other", lr=0.5))
    count = len(page.images)
    assert count >= 3
    assert looked_at(text, tmp_path) == f"looked {count} {count} fits"
    broken = text.replace("svg+xml;base64,", "svg+xml;base64,AAAA", 1).replace(
        "</body>", f"<pre>{'x' * 999}</pre></body>"
    )
    assert looked_at(broken, tmp_path) == f"looked {count} {count - 1} too wide"
