"""What a run writes, and removes, in a directory where others have files, too."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE
from matplotlib.figure import Figure

import nn
from nn.training.checkpoints import write_atomically
from parallel.command.options import Options
from parallel.command.parsing import parse
from parallel.command.resuming import check_overwritten
from parallel.command.run_directory import remove_unfinished
from parallel.command.training_run import not_finite, train
from parallel.reports.figures import write_figure
from parallel.settings import OptionError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_a_directory_that_is_renamed_while_a_run_trains_in_it(tmp_path, monkeypatch, capsys):
    """What follows is in a new one, which can be continued, too."""

    def rename_once(self, training, record):
        on_epoch(self, training, record)
        if training.epoch == 1:
            (tmp_path / "run").rename(tmp_path / "other")

    on_epoch = nn.KeepCheckpoints.on_epoch
    monkeypatch.setattr(nn.KeepCheckpoints, "on_epoch", rename_once)
    small = ["--model", "mlp:64,8,10", "--limit", "100", "--no-pictures", "--checkpoint", "sync"]
    train(parse([*small, "--epochs", "2", "--out", str(tmp_path / "run")]))
    assert f"warning: {tmp_path / 'run'}/ was renamed or removed" in capsys.readouterr().out
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    for name in "run", "other":
        train(parse(["--resume", str(tmp_path / name), "--epochs", "3"]))
    run, other = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "other"))
    assert run["parameters_sha256"] == other["parameters_sha256"]


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
    with pytest.raises(OSError, match=f"page.html .there is a {kind}, which is not replaced by a file"):
        write_atomically(file, b"text")
    assert file.lstat() == before and os.listdir(tmp_path) == ["page.html"]


def test_a_loss_of_samples_that_are_not_there_any_more_is_warned_of(tmp_path):
    """--resume RUN --validation 0: the records tell of validation data that this run has not."""
    data = nn.data.load("spirals")
    result = {"loss": 0.5, "validation_loss": math.nan}
    assert not_finite(result, data) == ["warning: the validation loss is nan: outputs of the network are not finite"]
    data.test.x[7] = math.inf
    assert not_finite(result | {"loss": math.inf}, data)[0] == (
        "warning: the test loss is inf: test sample 7 holds a value that is not finite"
    )
    assert not_finite({"loss": 0.5}, data) == not_finite({}, data) == []


def test_files_that_no_run_has_left_are_not_overwritten(tmp_path):
    """--out may name a directory with other things in it: a config.json, or a network that nn.save wrote."""

    def check():
        check_overwritten(tmp_path)

    check()
    (tmp_path / "notes.txt").write_text("mine")
    check()
    for name, content in ("config.json", '{"port": 80}'), ("network.npz", "weights"), ("result.json", "{}"):
        (tmp_path / name).write_text(content)
        with pytest.raises(OptionError, match=f"{name} was not left by a run, and would be overwritten"):
            check()
        (tmp_path / name).unlink()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(Options())))
    check()


def test_names_of_files_that_cannot_be_printed_end_no_run(tmp_path):
    """Outside of UTF-8, or no text at all."""
    out = os.fsencode(tmp_path) + b"/\xe2\x98\x83\xff"
    env = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    train = [sys.executable, SCRIPTS / "train.py", "--model", "mlp", "--epochs", "1", "--no-pictures", "--out", out]
    for command in (train, [sys.executable, SCRIPTS / "report.py", out]):
        done = subprocess.run(command, env=env, timeout=PATIENCE, capture_output=True, check=False)
        assert done.returncode == 0 and rb"/\u2603\udcff" in done.stdout, done
