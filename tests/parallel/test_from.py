"""scripts/train.py --from, --freeze and --rates: a saved network is fine-tuned."""

import numpy as np
import pytest

import nn
from parallel.command import factory
from parallel.command.parsing import parse
from parallel.command.training_run import make_trainer, start_from
from parallel.settings import OptionError


def saved(folder, model="mlp:64,12,10"):
    trainer = nn.Trainer(nn.models.build(model, (8, 8, 1), 10), nn.CrossEntropyLoss(), nn.SGD(), seed=9)
    return nn.save(trainer, folder / "network.npz"), dict(trainer.named_parameters())


def started(*words):
    options = parse(["--epochs", "1", *words])
    said = []
    trainer = make_trainer(options, factory.prepare(options), None)
    start_from(options, trainer, said.append)
    return trainer, said


def test_weights_are_taken_over_and_layers_frozen(tmp_path):
    file, before = saved(tmp_path)
    words = ["--model", "mlp:64,12,10", "--from", str(file), "--freeze", "1", "--rates", "3=0.5,3.b=2"]
    trainer, said = started(*words)
    assert said == [f"weights of {file}"]
    assert all(np.array_equal(array, before[name]) for name, array in trainer.named_parameters())
    assert trainer.frozen == ["1"] and trainer.optimizer.rate_of("3.W") == 0.5 and trainer.optimizer.rate_of("3.b") == 2
    x, y = nn.data.load("digits").train.batch(slice(0, 32))
    trainer.step(x, y)
    changed = [name for name, array in trainer.named_parameters() if not np.array_equal(array, before[name])]
    assert changed == ["3.W", "3.b"] or changed == ["3.b", "3.W"]


def test_a_line_search_starts_from_weights(tmp_path):
    file, before = saved(tmp_path)
    trainer, _ = started(
        "--model", "mlp:64,12,10", "--from", str(file), "--strategy", "sandblaster", "--optimizer", "lbfgs"
    )
    x, y = nn.data.load("digits").train.batch(slice(0, 32))
    state = trainer.state_dict()
    assert all(np.array_equal(state[f"param/{name}"], array) for name, array in before.items())
    first = trainer.step(x, y)
    assert trainer.step(x, y) < first
    trainer.load_weights(state)  # in the middle of a search, too
    assert trainer.step(x, y) == first


def test_a_new_head_is_drawn_and_a_file_of_options_has_the_key(tmp_path):
    file, before = saved(tmp_path, "mlp:64,12,7,10")
    (tmp_path / "o.toml").write_text(f'from = "{file}"\nmodel = "mlp:64,12,10"\n')
    trainer, said = started("--config", str(tmp_path / "o.toml"))
    assert said == [f"weights of {file}; drawn anew: 3.W, 3.b"] or said == [f"weights of {file}; drawn anew: 3.b, 3.W"]
    assert np.array_equal(dict(trainer.named_parameters())["1.W"], before["1.W"])


@pytest.mark.parametrize(
    "words, said",
    [
        (["--from", "nowhere.npz"], "No such file"),
        (["--freeze", "77"], "'77'"),
        (["--rates", "0"], "--rates 0: expected LAYER=FACTOR"),
        (["--rates", "0=-1"], "rates are factors of lr"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(words, said):
    with pytest.raises(OptionError, match=said):
        started(*words)


def test_weights_of_another_network_are_refused_before_ranks_start(tmp_path):
    file, _ = saved(tmp_path, "mlp:64,5,10")
    with pytest.raises(OptionError, match="name and shape"):
        started("--model", "mlp:64,12,8,3,10", "--from", str(file))
