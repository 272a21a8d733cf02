"""What train.py tells beside the result: profile, rate finder, inspection, timeline, memory, all in one process."""

import json

import numpy as np

import nn
from parallel.command.options import Options
from parallel.command.training_run import train
from parallel.reports import inspection, memory_report
from parallel.run_trainer import RunTrainer


def test_profile_inspection_and_timeline_of_a_run(tmp_path, capsys):
    options = Options(
        model="mlp:2,16,3", data="spirals", limit=200, epochs=1, optimizer="adam", lr=0.01,
        profile=True, inspect=True, timeline=True, out=str(tmp_path / "run"),
    )  # fmt: skip
    with np.errstate():
        train(options)
    said = capsys.readouterr().out
    assert "forward ms" in said and "optimizer" in said and "recall" in said
    inspected = {path.name for path in (tmp_path / "run" / "inspection").iterdir()}
    assert inspected == {"activations.png", "confusion.png", "distributions.txt", "gradients.png", "regions.png"}
    assert json.loads((tmp_path / "run" / "trace.json").read_text())
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 1000


def test_forty_misclassified_samples_are_drawn(tmp_path, monkeypatch):
    data = nn.data.load("digits")
    network = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (8, 8, 1))
    drawn = {}
    monkeypatch.setattr(inspection, "write_figure", lambda figure, file: drawn.update({file.name: figure}))
    inspection.inspect(nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1)), data, tmp_path)
    assert sum(bool(ax.images) for ax in drawn["misclassified.png"].axes) == inspection.MISCLASSIFIED == 40


def test_the_finder_draws_and_leaves_no_run_behind(tmp_path, capsys):
    with np.errstate():
        found = train(
            Options(model="mlp:2,16,3", data="spirals", limit=200, find_lr=True, out=str(tmp_path / "new" / "run"))
        )
    assert found == {} and "falls fastest at a learning rate of" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["learning_rates.png"]


def test_resident_memory_is_what_the_process_has_grown_by(monkeypatch):
    trainer = RunTrainer(nn.Network(nn.Sequential(nn.Linear(3, 2)), (3,)), nn.CrossEntropyLoss(), nn.SGD(0.1))
    monkeypatch.setattr(memory_report, "resident", lambda: 9 << 20)
    _, heads, row, *_ = memory_report.MemoryReport(trainer, None, 6 << 20).report().splitlines()
    assert heads.split()[-1] == "resident" and row.split()[-1] == "3072.00"  # KiB
