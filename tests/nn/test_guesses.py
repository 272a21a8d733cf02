"""Programs as users of PyTorch, Keras and scikit-learn guess them: each runs, or one sentence says what to write.

docs/howto/from_pytorch.md shows the same.
"""

import copy
import io
import pickle

import numpy as np
import pytest

import nn
from nn.registry import registered

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
Y = (X @ RNG.normal(size=(4, 3))).argmax(axis=1)


def make(outputs=3, loss=None, optimizer=None):
    layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))
    return nn.Trainer(nn.Network(layers, (4,)), loss or nn.CrossEntropyLoss(), optimizer or nn.Adam(0.02))


def test_pytorchs_loop():
    trainer, loader = make(), nn.Loader(nn.data.Dataset(X, Y), 20)
    orders = []
    for _ in range(2):
        for x, y in loader:
            trainer.step(x, y)
            orders.append(x)
    assert trainer.steps == 6 == 2 * len(loader) and not np.array_equal(orders[0], orders[3]), "a new order each time"
    named = [x for x, _, _ in loader.epoch(0)]
    assert np.array_equal(orders[0], named[0])


def test_a_data_set_is_indexed():
    data = nn.data.Dataset(X, Y)
    x, y = data[3]
    assert np.array_equal(x, X[3].astype(np.float32)) and y == Y[3] and np.array_equal(data[-1][0], data[59][0])
    assert len(data) == 60 == sum(1 for _ in data)
    assert data[10:14][0].shape == (4, 4) and data[[1, 5]][1].tolist() == Y[[1, 5]].tolist()
    with pytest.raises(IndexError, match="sample 60 of 60"):
        data[60]


def test_state_dicts_and_parameters():
    one, other = make(), make()
    one.step(X.astype(np.float32), Y)
    other.load_state_dict(one.state_dict())
    assert np.array_equal(one.predict(X), other.predict(X)) and other.steps == 1
    names = dict(one.named_parameters())
    assert {key: array.shape for key, array in names.items()} == {
        "2.W": (16, 3), "2.b": (3,), "0.W": (4, 16), "0.b": (16,)
    }  # fmt: skip
    assert sum(p.size for p in one.parameters()) == one.network.layout.count == 131
    names["0.b"][...] = 7
    assert (one.state_dict()["param/0.b"] == 7).all(), "views, which may be written into"
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert np.array_equal(again.predict(X), one.predict(X))


def test_fit_takes_lists_splits_and_batches_of_ones_own():
    for data in (
        (X, Y),
        (X.tolist(), Y.tolist()),
        nn.data.Dataset(X, Y),
        [(X[:30], Y[:30]), (X[30:].tolist(), Y[30:])],
    ):
        training = nn.fit(make(), data, epochs=30, batch=None if isinstance(data, list) else 30)
        assert training.history[-1]["loss"] < 0.5 < training.history[0]["loss"], type(data)
        assert training.trainer.steps == 60
    train, test, validation = (nn.data.Dataset(X[a:b], Y[a:b]) for a, b in ((0, 40), (40, 50), (50, 60)))
    splits = nn.data.Data(train, test, "mine", validation)
    training = nn.fit(make(), splits, epochs=2)
    assert "validation_accuracy" in training.history[0] and training.result.keys() == {"loss", "accuracy"}
    assert training.result == nn.evaluate(training.trainer, splits.test)
    assert repr(training).startswith("Training(2 of 2 epochs, 4 steps, loss=")


def test_batches_of_another_librarys_loader():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    training = nn.fit(make(), torch.utils.data.DataLoader(data, batch_size=20), epochs=20)
    assert training.history[-1]["loss"] < 0.5 and training.trainer.steps == 60


def test_binary_classification_end_to_end():
    labels = (X[:, 0] > 0).astype(int)
    for y in (labels, labels[:, None], labels.astype(bool), labels.tolist(), labels.astype(float)):
        trainer = make(1, nn.BCEWithLogitsLoss())
        training = nn.fit(trainer, (X, y), epochs=40, validation=(X, y))
        assert training.history[-1]["validation_accuracy"] > 0.9, type(y)
    assert ((trainer.predict(X)[:, 0] > 0) == labels).mean() > 0.9


def test_a_trainer_evaluates_as_nn_evaluate_does():
    trainer = make()
    scores = trainer.evaluate(X.tolist(), Y)
    assert scores == nn.evaluate(trainer, (X, Y)) and scores.keys() == {"loss", "accuracy"}
    assert scores["accuracy"] == (trainer.predict(X).argmax(axis=1) == Y).mean()


def test_metrics_by_name_and_as_functions():
    def largest_error(z, y):
        return np.abs(z - y).max(axis=-1)

    trainer = make(2, nn.MSELoss())
    scores = nn.evaluate(trainer, (X, X[:, :2]), metrics=["mae", "rmse", largest_error])
    z = trainer.predict(X)
    assert scores.keys() == {"loss", "mae", "rmse", "largest_error"}
    np.testing.assert_allclose(scores["mae"], np.abs(z - X[:, :2]).mean(), rtol=1e-6)
    np.testing.assert_allclose(scores["largest_error"], np.abs(z - X[:, :2]).max(axis=1).mean(), rtol=1e-6)
    assert "top_5_accuracy" in nn.evaluate(make(), (X, Y), metrics="top_5_accuracy")


def test_names_are_where_they_are_looked_for():
    schedule = nn.schedules.Warmup(nn.schedules.Cosine(0.1, 60), 5)
    stop = nn.callbacks.EarlyStopping(patience=2, metric="validation_loss")
    training = nn.fit(make(), (X, Y), 5, [stop, nn.callbacks.Progress(say=lambda line: None)], (X, Y), schedule)
    assert training.history[-1]["lr"] < 0.1
    rates = [kind().lr for kind in (nn.SGD, nn.Adagrad, nn.Adam, nn.AdamW, nn.RMSprop)]
    assert rates == [0.01, 0.01, 0.001, 0.001, 0.001]
    assert repr(nn.Adam(0.01)) == "Adam(lr=0.01)" and repr(nn.SGD(momentum=0.9)) == "SGD(lr=0.01, momentum=0.9)"


def test_fine_tuning_of_a_saved_network(tmp_path):
    one = make()
    nn.fit(one, (X, Y), 5)
    model = nn.load(nn.save(one, tmp_path / "network.npz"))
    other = make(2)
    assert other.load_weights(model) == ["2.W", "2.b"], "the new head is drawn"
    other.freeze("0")
    before = dict(other.named_parameters())["0.W"].copy()
    nn.fit(other, (X, Y % 2), 5)
    assert np.array_equal(before, dict(other.named_parameters())["0.W"])
    assert np.array_equal(before, dict(model.named_parameters())["0.W"])
    assert "frozen 0" in repr(other) and other.summary().endswith("frozen: 0")
    with pytest.raises(ValueError, match="no parameter of network has the name and shape of one of these weights"):
        make().load_weights({"param/x": np.ones(3)})


def test_progress_is_shown_where_a_person_looks(capsys, monkeypatch):
    nn.fit(make(), (X, Y), 2)
    assert capsys.readouterr().out == "", "not in a file or a pipe"
    nn.fit(make(), (X, Y), 2, verbose=True)
    assert capsys.readouterr().out.count("epoch ") == 2
    monkeypatch.setattr("nn.training.fit.is_interactive", lambda: True)
    nn.fit(make(), (X, Y), 2)
    assert "epoch 2/2" in capsys.readouterr().out
    nn.fit(make(), (X, Y), 2, verbose=False)
    nn.fit(make(), (X, Y), 2, nn.callbacks.Progress(say=lambda line: None))
    assert capsys.readouterr().out == "", "a Progress of one's own is enough"


@pytest.mark.parametrize("stream", [None, object(), "closed"])
def test_training_needs_no_console(stream, monkeypatch):
    """Programs without a console have no sys.stdout; others replace it, or close it."""
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr("sys.stdout", stream)
    assert nn.fit(make(), (X, Y), 1).epoch == 1


def test_models_are_functions_of_shape_and_classes():
    network = nn.models.resnet20((32, 32, 3), 10)
    assert isinstance(network, nn.Network) and network.out_shape == (10,) and network.layout.count == 269_722
    assert network.layout.specs.keys() == nn.models.build("resnet20", (32, 32, 3), 10).layout.specs.keys()
    assert nn.models.mlp((784,), 10, 784, 30, 10, dtype="float64").dtype == np.float64
    names = {name.replace("-", "_") for name in registered("model")}
    assert all(getattr(nn.models, name).__name__ == name for name in names) and names <= set(nn.models.__all__)


def test_a_sample_is_predicted_as_a_batch_of_one():
    trainer = make()
    assert np.array_equal(trainer.predict(X[:1].tolist()), trainer.predict(X[:1]))
    assert trainer.predict(X, batch=7).shape == (60, 3)
    with pytest.raises(nn.ShapeError, match="single sample"):
        trainer.predict(X[0])


class Pairs:
    """A data set as PyTorch has it."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return X[i], Y[i]


INSTEAD = {
    "fit as a method": (lambda t: t.fit(X, Y), AttributeError, r"has no 'fit': nn\.fit\(trainer, data"),
    "eval": (lambda t: t.eval(), AttributeError, "in evaluation mode.*by themselves"),
    "train": (lambda t: t.train(), AttributeError, r"nn\.fit\(trainer"),
    "zero_grad": (lambda t: t.zero_grad(), AttributeError, r"trainer\.step\(x, y\)"),
    "compile": (lambda t: t.compile("adam"), AttributeError, r"nn\.Trainer\(network, loss, optimizer\)"),
    "score": (lambda t: t.score(X, Y), AttributeError, r"trainer\.evaluate\(x, y\)"),
    "cuda": (lambda t: t.cuda(), AttributeError, "on the processor"),
    "call": (lambda t: t(X), TypeError, r"trainer\.predict\(x\)"),
    "GRU": (lambda t: nn.GRU, AttributeError, r"nn has no 'GRU': nn\.LSTM\(in_features, features\) and nn\.RNN"),
    "optim.SGD": (lambda t: nn.optim.SGD, AttributeError, r"nn\.optim has no 'SGD': did you mean nn\.SGD\?$"),
    "layers.Linear": (lambda t: nn.layers.Linear, AttributeError, r"did you mean nn\.Linear\?$"),
    "lr_scheduler": (lambda t: nn.optim.lr_scheduler, AttributeError, r"nn\.schedules$"),
    "StepLR": (lambda t: nn.schedules.StepLR, AttributeError, r"nn\.schedules\.Step\(lr, every\)"),
    "ModelCheckpoint": (lambda t: nn.callbacks.ModelCheckpoint, AttributeError, "KeepCheckpoints"),
    "resnet18": (lambda t: nn.models.resnet18, AttributeError, r"did you mean nn\.models\.resnet"),
    "F1": (lambda t: nn.metrics.F1, AttributeError, "mean over rows"),
    "CrossEntropy": (lambda t: nn.losses.CrossEntropy, AttributeError, r"did you mean nn\.(losses\.)?CrossEntropyLoss"),
    "kaiming": (lambda t: nn.initializers.kaiming_normal_, AttributeError, r"nn\.initializers\.he$"),
    "nothing like it": (lambda t: nn.Zzz, AttributeError, r"nn has no 'Zzz': dir\(nn\) lists what there is$"),
    "manual_seed": (lambda t: nn.manual_seed, AttributeError, "seed=0"),
    "utils": (lambda t: nn.utils, AttributeError, r"nn\.ClipGlobalNorm"),
    "clip_grad_norm_": (lambda t: t.clip_grad_norm_(1.0), AttributeError, r"nn\.ClipGlobalNorm"),
    "no_sync": (lambda t: t.no_sync(), AttributeError, "accumulate=4"),
    "module": (lambda t: t.module, AttributeError, r"trainer\.network"),
    "misspelled": (lambda t: t.setp(X, Y), AttributeError, "has no 'setp'"),
    "parameters for the optimizer": (lambda t: nn.SGD(t.parameters()), TypeError, "the trainer gives the parameters"),
    "with a rate": (lambda t: nn.SGD(t.parameters(), lr=0.1), TypeError, "first argument is the learning rate"),
    "betas": (lambda t: nn.Adam(betas=(0.9, 0.99)), TypeError, "takes no 'betas': write beta1=; it takes lr"),
    "p of dropout": (lambda t: nn.Dropout(p=0.5), TypeError, "Dropout takes no 'p': write rate=; it takes rate"),
    "negative_slope": (lambda t: nn.LeakyReLU(negative_slope=0.1), TypeError, "write slope="),
    "class_weight": (lambda t: nn.CrossEntropyLoss(class_weight=[1, 2]), TypeError, "write class_weights="),
    "an argument of none": (lambda t: nn.ReLU(inplace=True), TypeError, "ReLU takes no 'inplace'; it takes nothing"),
    "Module": (lambda t: nn.Module, AttributeError, r"no 'Module': a layer is a subclass of nn\.Layer"),
    "DataLoader": (lambda t: nn.DataLoader, AttributeError, r"nn\.Loader\(dataset, batch"),
    "words for classes": (lambda t: nn.fit(t, (X, Y.astype(str)), 1), ValueError, r"np\.unique\(y, return_inverse"),
    "samples one by one": (lambda t: nn.Loader(Pairs(), 8), TypeError, r"nn\.data\.Dataset\(\*map\(np\.stack, zip"),
    "learning_rate": (lambda t: nn.Adam(learning_rate=0.1), TypeError, "takes no 'learning_rate': write lr="),
    "batch_size": (lambda t: nn.fit(t, (X, Y), 1, batch_size=8), TypeError, "fit takes no 'batch_size': write batch="),
    "targets as an argument": (
        lambda t: nn.fit(t, X, Y, epochs=5), TypeError, r"nn\.fit\(trainer, \(x, y\), epochs=5\)"
    ),
    "and the epochs behind": (lambda t: nn.fit(t, X, Y, 5), TypeError, r"nn\.fit\(trainer, \(x, y\), epochs=5\)"),
    "val_loss": (
        lambda t: nn.fit(t, (X, Y), 1, nn.EarlyStopping(3, "val_loss"), validation=(X, Y)), ValueError,
        "'validation_loss'",
    ),
    "attention by a number": (
        lambda t: nn.MultiHeadAttention(8, 2, attention=128), ValueError, 'attention'
    ),
    "validation_data": (lambda t: nn.fit(t, (X, Y), 1, validation_data=(X, Y)), TypeError, "write validation="),
    "batch_size of a loader": (lambda t: nn.Loader(nn.data.Dataset(X, Y), batch_size=8), TypeError, "write batch="),
    "a loader of arrays": (lambda t: nn.Loader((X, Y), 8), TypeError, "Dataset"),
    "one-hot": (lambda t: nn.fit(t, (X, np.eye(3)[Y]), 1), TypeError, r"y\.argmax\(axis=-1\)"),
    "column": (lambda t: nn.fit(t, (X, Y[:, None]), 1), ValueError, r"y\[\.\.\., 0\]"),
    "classes as floats": (lambda t: nn.fit(t, (X, Y.astype(float)), 1), TypeError, r"y\.astype\(np\.int64\)"),
    "a metric's name": (lambda t: nn.evaluate(t, (X, Y), metrics="acc"), ValueError, "'accuracy'"),
    "a metric without direction": (
        lambda t: nn.evaluate(t, (X, Y), metrics=lambda z, y: z[:, 0]), ValueError, "is smaller or larger better"
    ),
    "saving the network": (lambda t: nn.save(t.network, "x.npz"), TypeError, "weights"),
}  # fmt: skip


@pytest.mark.parametrize("guess", INSTEAD)
def test_one_sentence_says_what_to_write(guess):
    call, kind, said = INSTEAD[guess]
    with pytest.raises(kind, match=said):
        call(make())


def test_a_loss_called_as_a_function_is_the_mean_over_the_batch():
    z, y = np.array([[0.0, 0.0], [1.0, 3.0]]), np.array([0, 1])
    wanted = (np.log(2) + np.log(1 + np.exp(-2))) / 2
    value, gradient = nn.CrossEntropyLoss()(z, y)
    assert value == pytest.approx(wanted) and gradient.shape == z.shape
    assert nn.CrossEntropyLoss()(z.tolist(), y.tolist())[0] == value  # lists
    assert nn.CrossEntropyLoss()(z, y, 4)[0] == pytest.approx(wanted / 2)
    means = {nn.MSELoss(): 8.5, nn.MAELoss(): 2.5, nn.HuberLoss(): 2.0, nn.QuadraticLoss(): 8.5}
    for loss, mean in means.items():
        assert loss([[1, 2]], [[2, 6]])[0] == pytest.approx(mean), loss


def test_a_weighted_loss_called_as_a_function_divides_by_the_weights():
    z, y = np.zeros((3, 2)), np.array([0, 1, -100])
    assert nn.CrossEntropyLoss(ignore_index=-100)(z, y)[0] == pytest.approx(np.log(2))
    assert nn.CrossEntropyLoss(class_weights=[1.0, 3.0])(z[:2], y[:2])[0] == pytest.approx(np.log(2))
    sequences = np.zeros((2, 5, 3)), np.zeros((2, 5), int)
    assert nn.CrossEntropyLoss()(*sequences)[0] == pytest.approx(np.log(3))


def test_a_loss_called_with_outputs_of_one_dimension_says_which_shape_it_takes():
    with pytest.raises(ValueError, match=r"MSELoss: expected outputs of shape \(N, D\).* given \(3,\): z\[:, None\]"):
        nn.MSELoss()(np.zeros(3), np.zeros(3))
