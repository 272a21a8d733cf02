"""What a run writes, and removes, in a directory where others have files, too."""

import os

import pytest
from matplotlib.figure import Figure

from nn.training.checkpoints import write_atomically
from parallel.command.run_directory import remove_unfinished
from parallel.reports.figures import write_figure


def test_only_files_that_a_run_has_left_are_removed(tmp_path):
    """--out may name a directory with other things in it: the user's home, say."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "work").mkdir()
    torn = [".result.json.71.tmp", "checkpoints/.step-00000003.npz.7.tmp"]
    others = [".mine.tmp", ".config.json.tmp", "x.7.tmp", "work/.result.json.7.tmp", "checkpoints/.notes.tmp"]
    for name in torn + others:
        (tmp_path / name).write_text("something")
    remove_unfinished(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(others)
    remove_unfinished(tmp_path / "nowhere")


def test_a_picture_is_not_written_through_a_link(tmp_path):
    (victim := tmp_path / "victim").write_text("mine")
    (tmp_path / "curves.png").symlink_to(victim)
    write_figure(Figure(), tmp_path / "curves.png")
    assert victim.read_text() == "mine" and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["device", "FIFO"])
def test_no_file_takes_the_place_of_a_device(tmp_path, kind):
    """`--out /dev/stdout` and the like, as root: it would be a file from then on, for everybody."""
    file = tmp_path / "page.html"
    file.symlink_to("/dev/null") if kind == "device" else os.mkfifo(file)
    before = file.lstat()
    with pytest.raises(OSError, match=f"page.html .there is a {kind}, which no file can take the place of"):
        write_atomically(file, b"text")
    assert file.lstat() == before and os.listdir(tmp_path) == ["page.html"]
