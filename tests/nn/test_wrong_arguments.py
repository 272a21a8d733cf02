"""What `fit` takes as data; and that a wrong argument, as one gives it in a notebook, is answered by a sentence."""

import numpy as np
import pytest

import nn
from nn.data import Dataset
from nn.data.dataset import DataError
from nn.models.googlenet import AuxiliaryLoss

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 6, 6, 1)).astype(np.float32)
Y = RNG.integers(0, 3, 40)
DATA = Dataset(X, Y, "dots")


def network():
    return nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), (6, 6, 1), name="net")


def trainer(seed=3):
    return nn.Trainer(network(), nn.CrossEntropyLoss(), nn.SGD(lr=0.1), seed)


def misnamed(setting, value):
    one = trainer()
    setattr(one.optimizer, setting, value)
    nn.fit(one, (X, Y), 1)


class Count(nn.Callback):
    steps = 0

    def on_step(self, training, loss):
        self.steps += 1


def test_arrays_datasets_and_loaders_are_the_same():
    """The same samples in the same order: the same bits."""
    one, many = trainer(), []
    expected = nn.fit(one, nn.Loader(DATA, 16, seed=3), 2, validation=nn.Loader(DATA, 500, shuffle=False))
    for data in ((X, Y), [X, Y], DATA):
        other = trainer()
        training = nn.fit(other, data, 2, batch=16, validation=data, test=data)
        many.append(other.digest())
        for record, same in zip(training.history, expected.history, strict=True):
            assert {**record, "seconds": 0, "images_per_second": 0} == {**same, "seconds": 0, "images_per_second": 0}
        assert training.result == pytest.approx(nn.evaluate(one, data, batch=7))
    assert set(many) == {one.digest()}
    assert nn.fit(trainer(), DATA, 2, batch=20).trainer.digest() != one.digest(), "control"


def test_one_callback_or_several():
    for callbacks in (Count(), [Count()], (Count(),), iter([Count()])):
        last = callbacks if isinstance(callbacks, Count) else None
        if last is None:
            callbacks = list(callbacks)
            (last,) = callbacks
        nn.fit(trainer(), (X, Y), 2, callbacks, batch=8)
        assert last.steps == 10


def test_one_number_a_sample_is_a_column():
    values = X.sum(axis=(1, 2, 3))
    net = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(36, 1)), (6, 6, 1))
    training = nn.fit(nn.Trainer(net, nn.MSELoss(), nn.SGD(lr=0.01)), (X, values), 3)
    assert training.history[-1]["loss"] < training.history[0]["loss"]
    wide = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(36, 1)), (6, 6, 1), np.float64)
    nn.fit(nn.Trainer(wide, nn.MSELoss(), nn.SGD(lr=0.01)), (X, values), 1)  # converted to the network's dtype


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.QuadraticLoss()], ids=repr)
@pytest.mark.parametrize("outputs", [1, 3])
def test_whole_numbers_for_every_output_are_no_classes(loss, outputs):
    """0 and 1 as values: there is no largest output that could be right; of logits each is on one side of 0."""
    net = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(36, outputs)), (6, 6, 1))
    values = RNG.integers(0, 2, (40, outputs))
    assert set(nn.evaluate(nn.Trainer(net, loss, nn.SGD(lr=0.1)), (X, values))) == {"loss"} | (
        {"accuracy"} if isinstance(loss, nn.BCEWithLogitsLoss) else set()
    )


@pytest.mark.parametrize("dtype", ["u1", ">i2", "<u8", ">u8"])
def test_classes_of_any_whole_numbers(dtype):
    one, other = trainer(), trainer()
    assert one.step(X, Y) == other.step(X, Y.astype(dtype)) and one.digest() == other.digest()
    with pytest.raises(ValueError, match="3"):
        other.step(X, (Y * 0 + 3).astype(dtype))
    if dtype == ">i2":
        with pytest.raises(ValueError, match="256"):
            other.step(X, (Y * 0 + 256).astype(dtype))


def test_samples_are_chosen_by_a_mask_as_arrays_are():
    for x in (X, X[..., ::-1], X[:, ::2]):  # contiguous, and not
        data = Dataset(x, Y)
        for mask in (Y == 1, (Y == 1).tolist()):
            some, targets = data.batch(mask)
            assert np.array_equal(some, x[Y == 1]) and (targets == 1).all() and len(targets) == (Y == 1).sum()


def trained():
    return nn.Model(network(), trainer())


def fit(*arguments, **named):
    return nn.fit(trainer(), *arguments, **named)


LOSS, RATE = nn.CrossEntropyLoss(), nn.SGD(lr=0.1)
WRONG = {
    # about data
    "text for samples": (lambda: fit(("abc", Y), 1), TypeError, "train: x must be an array, given a str"),
    "number for targets": (lambda: fit((X, 3), 1), TypeError, "train: y must be an array, given a int"),
    "uneven targets": (lambda: fit((X[:2], [[1], [1, 2]]), 1), ValueError, "train: targets must have one shape"),
    "generator": (lambda: fit((b for b in [(X, Y)]), 1), TypeError, "a generator has one epoch and no length: give"),
    "arrays in a list": (lambda: fit([X, Y, Y], 1), TypeError, r"expected batches \(x, y\), given an array"),
    "no targets": (lambda: fit(X, 1), TypeError, r"train: expected arrays \(x, y\).*array of samples without targets"),
    "a Data": (lambda: nn.evaluate(trainer(), nn.data.load("digits")), TypeError, r"digits is a Data.*give digits\.tr"),
    "three arrays": (lambda: fit((X, Y, Y), 1), TypeError, r"expected arrays \(x, y\), a Dataset or a Loader"),
    "no channels": (lambda: fit((X[..., 0], Y), 1), ValueError, r"given \(6, 6\): x\[\.\.\., None\] adds"),
    "flat": (lambda: fit(DATA.flat(), 1), ValueError, r"given \(36,\): x\.reshape\(len\(x\), 6, 6, 1\)"),
    "flat in a loader": (lambda: fit(nn.Loader(DATA.flat(), 8), 1), ValueError, r"given \(36,\): x\.reshape"),
    "bytes": (lambda: fit((X.astype(np.uint8), Y), 1), TypeError, "x holds uint8: give floats, such as x / 255"),
    "lengths": (lambda: fit((X, Y[:9]), 1), ValueError, "9 targets"),
    "validation": (lambda: fit((X, Y), 1, validation=X), TypeError, "fit: validation: expected arrays"),
    "test": (lambda: fit((X, Y), 1, test=(X, None)), TypeError, "fit: test: y must be an array, given a NoneType"),
    "evaluate": (lambda: nn.evaluate(trainer(), X), TypeError, r"evaluate: expected arrays \(x, y\)"),
    "loader of a tuple": (lambda: nn.Loader((X, Y), 4), TypeError, r"Loader: .*a tuple of two: .*Dataset\(x, y\)"),
    "loader of an array": (lambda: nn.Loader(X, 4), TypeError, r"Loader: .*given an array: nn\.data\.Dataset\(x, y\)"),
    "loader of a Data": (lambda: nn.Loader(nn.data.load("digits"), 4), TypeError, r"give digits\.train"),
    "batch": (lambda: nn.Loader(DATA, "4"), TypeError, "Loader: batch must be a whole number, given '4'"),
    "ragged": (lambda: Dataset([[1.0, 2.0], [1.0]], [0, 1]), ValueError, "samples must be arrays of one shape"),
    "another shard": (
        lambda: fit(nn.Loader(DATA, 8, shard=(1, 2)), 1), ValueError, r"train: .*shard \(1, 2\), .*trainer\.shard"
    ),
    "another shard's scores": (
        lambda: nn.evaluate(trainer(), nn.Loader(DATA, 8, shard=(0, 2))), ValueError, r"evaluate: .*shard=trainer\.sha"
    ),
    "number for a shard": (lambda: nn.Loader(DATA, 8, shard=2), TypeError, r"shard must be \(index, count\).*given 2"),
    "one of a shard": (lambda: nn.Loader(DATA, 8, shard=(0,)), TypeError, r"shard must be .*given \(0,\)"),
    "seed": (lambda: nn.Loader(DATA, 8, seed=-1), ValueError, "Loader: seed must be .*not negative, given -1"),
    "no seed": (lambda: nn.Loader(DATA, 8, seed=None), ValueError, "Loader: seed must be .*given None"),
    "text to prefetch": (lambda: nn.Loader(DATA, 8, prefetch="2"), TypeError, "prefetch must be a .*given '2'"),
    "transform's class": (
        lambda: nn.Loader(DATA, 8, transform=nn.data.RandomFlip), TypeError, "transform is a .*class itself: call it"
    ),
    "text for a transform": (lambda: nn.Loader(DATA, 8, transform="flip"), TypeError, "transform is .*given 'f'"),
    "transform that drops": (
        lambda: fit(nn.Loader(DATA, 8, transform=lambda x, keys: x[:3], prefetch=0), 1), ValueError,
        "of 40 samples the transform .* made 3 samples",
    ),
    "transform of nothing": (
        lambda: fit(nn.Loader(DATA, 8, transform=lambda x, keys: None), 1), ValueError, "transform .* made None"
    ),
    "scale of other channels": (
        lambda: Dataset(np.zeros((4, 2, 2, 6)), np.arange(4), scale=np.ones(3)), DataError, r"scale must .*\(2, 2, 6\)"
    ),
    "text for a scale": (lambda: Dataset(X, Y, scale="1"), DataError, "scale must be a number, .*given '1'"),
    "shift of NaN": (lambda: Dataset(X, Y, shift=np.nan), DataError, "shift must be a number, .*given nan"),
    "half a class": (lambda: Dataset(X, Y, classes=3.5), DataError, r"classes must be their number, given 3\.5"),
    "hold out of an array": (lambda: nn.data.hold_out(X, 0.1), TypeError, "hold_out: .*given an array"),
    "no full batch": (lambda: fit(nn.Loader(DATA, 41, drop_last=True), 1), ValueError, "no batch in epoch 1.*drop_l"),
    # about training
    "network for a trainer": (lambda: nn.fit(network(), DATA, 1), TypeError, "fit takes a trainer first.*Network"),
    "nothing to evaluate": (lambda: nn.evaluate(network(), DATA), TypeError, "evaluate takes a trainer first"),
    "callback's class": (lambda: fit(DATA, 1, Count), TypeError, "instances of nn.Callback.*class itself: call it"),
    "callback's class in a list": (lambda: fit(DATA, 1, [Count]), TypeError, "class itself: call it"),
    "function": (lambda: fit(DATA, 1, [print]), TypeError, r"instances of nn\.Callback, given <built-in"),
    "number for callbacks": (lambda: fit(DATA, 1, 3), TypeError, r"instances of nn\.Callback, given 3"),
    "epochs": (lambda: fit(DATA, 1.5), TypeError, r"fit: epochs must be a whole number, given 1\.5"),
    "epochs below 0": (lambda: fit(DATA, -1), ValueError, "fit: epochs"),
    "schedule": (lambda: fit(DATA, 1, schedule=0.1), TypeError, "schedule must be a function step -> rate"),
    "progress": (lambda: fit(DATA, 1, progress=nn.Progress()), TypeError, "progress is a dict.*is it a callback"),
    "schedule of a text": (lambda: fit(DATA, 1, schedule=lambda step: "0.1"), ValueError, r"schedule\(0\) .*'0\.1'"),
    "schedule of nothing": (
        lambda: fit(DATA, 1, schedule=lambda step: None), ValueError, r"schedule\(0\) must be a learning.*given None"
    ),
    "schedule of NaN": (lambda: fit(DATA, 1, schedule=lambda step: np.nan), ValueError, r"schedule\(0\) .*given nan"),
    "schedule below 0": (lambda: fit(DATA, 1, schedule=lambda step: -0.1), ValueError, r"schedule\(0\) .*given -0\.1"),
    "loss's class": (lambda: nn.Trainer(network(), nn.MSELoss, RATE), TypeError, "takes a loss.*class itself: call it"),
    "layer as network": (lambda: nn.Trainer(nn.Linear(3, 2), LOSS, RATE), TypeError, r"Network\(layers, in_shape\)"),
    "rate for an optimizer": (lambda: nn.Trainer(network(), LOSS, 0.1), TypeError, "takes an optimizer.*given 0.1"),
    "swapped": (lambda: nn.Trainer(network(), RATE, LOSS), TypeError, "takes a loss, such as .*given SGD"),
    # about a step
    "step of a list": (lambda: trainer().step(X.tolist(), Y), TypeError, "given a list"),
    "targets of a list": (lambda: trainer().step(X, Y.tolist()), TypeError, "targets must be an array, given a list"),
    "no micro-batches": (lambda: trainer().step(X, Y, accumulate=0), ValueError, "accumulate"),
    "half a batch": (lambda: trainer().step(X, Y, accumulate=1.5), TypeError, r"accumulate must be .*given 1\.5"),
    "a single sample": (lambda: trainer().step(1.0, 2), TypeError, r"x = 1\.0"),
    "sizes as a tuple": (lambda: nn.Reshape((2, 3)), TypeError, r"size by size, such as nn\.Reshape\(2, 3\)"),
    "size to be inferred": (lambda: nn.Reshape(-1, 3), ValueError, "Reshape: shape"),
    "more targets": (lambda: trainer().step(X[:8], Y), ValueError, "step 0 of net: 8 samples but 40 targets"),
    "text for a total": (lambda: trainer().step(X, Y, "40"), TypeError, "given '40'"),
    "total of NaN": (lambda: trainer().step(X, Y, np.nan), TypeError, "total_weight"),
    "one-hot": (lambda: trainer().step(X, np.eye(3)[Y]), TypeError, r"of one-hot rows these are y\.argmax\(axis=-1\)"),
    "missing axis": (lambda: trainer().predict(X[..., 0]), nn.ShapeError, "None"),
    "scores": (lambda: trainer().sum_scores(X, Y.tolist()), TypeError, "targets must be an array, given a list"),
    "patience": (lambda: nn.EarlyStopping("3"), TypeError, "patience must be a whole number, given '3'"),
    "directory to keep": (lambda: nn.KeepCheckpoints("d"), TypeError, r"KeepCheckpoints: .*Checkpoints\('d'\) makes"),
    "directory of the best": (lambda: nn.RestoreBest("d"), TypeError, r"RestoreBest: .*nn\.Checkpoints\('d'\) makes"),
    "directory to stop": (lambda: nn.EarlyStopping(1, checkpoints="d"), TypeError, r"EarlyStopping: .*Checkpoints\("),
    "best of nothing": (
        lambda: fit(DATA, 2, nn.RestoreBest(nn.Checkpoints("d"))), ValueError, "RestoreBest"
    ),
    "share": (lambda: nn.data.load("digits", validation="0.1"), DataError, "'0.1'"),
    "steps to keep": (
        lambda: nn.KeepCheckpoints(nn.Checkpoints("d"), steps="5"), TypeError, "steps must be a whole .*given '5'"
    ),
    "no seed of a trainer": (
        lambda: nn.Trainer(network(), LOSS, RATE, None), TypeError, "seed must be a whole number, given None"
    ),
    "seed below 0": (lambda: nn.Trainer(network(), LOSS, RATE, -1), ValueError, "seed"),
    "state of nothing": (lambda: trainer().load_state_dict(None), ValueError, "is a dict of arrays.*given None"),
    "state of a Model": (lambda: trainer().load_state_dict(trained()), ValueError, "is a dict .*given Model"),
    "state of lists": (
        lambda: trainer().load_state_dict({k: [1] for k in trainer().state_dict()}), ValueError, r"array, given \[1\]"
    ),
    # about files
    "file first": (lambda: nn.save("a.npz", trainer()), TypeError, "given 'a"),
    "load a network": (lambda: nn.load(network()), TypeError, r'a path, such as "digits\.npz", given Network'),
    "load a directory": (lambda: nn.load("."), IsADirectoryError, r"name the file in it, such as network\.npz"),
    "about": (lambda: nn.save(trainer(), "a.npz", about=[1]), TypeError, r"must be a dict, given \[1\]"),
    "lists to save": (
        lambda: nn.Model(network(), {"param/1.W": [1.0]}), TypeError, r"arrays by name, .*\[1\.0\] by 'par"
    ),
    "number for a key": (lambda: nn.Model(network(), {1: X[0, 0, 0]}), TypeError, "arrays by name, .* by 1"),
    "export into": (lambda: nn.export_onnx(trainer(), 3), TypeError, "file must be a path, .*given 3"),
    "about a model": (
        lambda: nn.export_onnx(trainer(), "a.onnx", about=[1]), TypeError, "export_onnx: about must be a"
    ),
    "an array about a model": (
        lambda: nn.export_onnx(trainer(), "a.onnx", {"a": X}), TypeError, "JSON"
    ),
    "no samples at a time": (lambda: trained().predict(X, batch=0), ValueError, "predict: batch .*at least 1, given 0"),
    "text at a time": (lambda: trained().predict(X, batch="3"), TypeError, "predict: batch .*, given '3'"),
    # about networks
    "list of layers": (lambda: nn.Sequential([nn.ReLU()]), TypeError, r"a list of layers: nn.Sequential\(\*layers\)"),
    "network of a list": (lambda: nn.Network([nn.ReLU()], (3,)), TypeError, r"Sequential\(\*layers\) is one"),
    "number for a shape": (lambda: nn.Network(nn.ReLU(), 3), TypeError, "in_shape is that of one sample, .*given 3"),
    "batch axis": (lambda: nn.Network(nn.ReLU(), (None, 3)), TypeError, "in_shape is that of one sample"),
    "initializer": (
        lambda: nn.Network(nn.Linear(3, 2, init="he"), (3,)), TypeError, r"\(3, 2\), come from a function .*given 'he'"
    ),
    "number for a name": (lambda: nn.Network(nn.ReLU(), (3,), name=3), TypeError, "name must be a text, given 3"),
    "size of a model": (lambda: nn.models.build("lenet5", 28, 10), TypeError, "lenet5.*in_shape is .*given 28"),
    "model first": (lambda: nn.models.build((28, 28, 1), "lenet5", 10), TypeError, r"model is a text, .*given \(28"),
    "no step": (lambda: nn.gradcheck(nn.ReLU(), np.ones((2, 3)), eps=0), ValueError, "eps"),
    "dtype": (lambda: nn.Network(nn.ReLU(), (3,), "float16"), TypeError, "must be float32 or float64, given 'float16'"),
    "text for a size": (lambda: nn.Linear("3", 2), TypeError, "Linear: in_features must be a whole number, given '3'"),
    "shape for a size": (lambda: nn.Linear((8, 8), 2), TypeError, r"must be a whole number, given \(8, 8\)"),
    "text for a rate": (lambda: nn.Dropout("0.5"), TypeError, "Dropout: rate must be a number, given '0.5'"),
    "number for a clip": (lambda: nn.SGD(0.1, clip=1.0), TypeError, r"SGD: clip must be .*ClipGlobalNorm.*given 1\.0"),
    "clip's class": (lambda: nn.Adam(0.1, clip=nn.ClipNorm), TypeError, "Adam: clip must be .*given <class"),
    "weights first": (lambda: nn.CrossEntropyLoss([1, 2, 3]), TypeError, "takes nothing by position.*class_weights="),
    "text to ignore": (lambda: nn.NLLLoss(ignore_index="pad"), TypeError, "NLLLoss: ignore_index .*given 'pad'"),
    "text for delta": (lambda: nn.HuberLoss("1"), TypeError, "HuberLoss: delta must be a number, given '1'"),
    "text for masked": (lambda: nn.MaskedCrossEntropyLoss("a"), TypeError, "masked must be a whole number, given 'a'"),
    "lr below 0": (lambda: nn.SGD(lr=np.float32(-1)), ValueError, "SGD: lr"),
    "beta above 1": (lambda: nn.Adam(0.1, beta1=np.float32(1.5)), ValueError, "beta1"),
    "eps of 0": (lambda: nn.Adam(eps=0.0), ValueError, "Adam: eps"),
    "no eps": (lambda: nn.RMSprop(eps=0), ValueError, "RMSprop: eps"),
    "half an id": (lambda: nn.Embedding(9, 4, padding=2.5), TypeError, "Embedding: padding .*whole number, given 2.5"),
    "two paddings": (
        lambda: nn.Network(nn.Parallel(nn.Embedding(9, 4, padding=0), nn.Embedding(9, 4, padding=8)), (3,)),
        ValueError, "have the paddings 0, 8, and attention has one padding mask",
    ),
    "negative shape": (lambda: nn.Network(nn.ReLU(), (-3,)), ValueError, r"no negative size, given \(-3,\)"),
    "factor below 0": (
        lambda: AuxiliaryLoss(nn.CrossEntropyLoss(), -0.3), ValueError, "auxiliary_weight"
    ),
    "rate of no layer": (lambda: misnamed("rates", {"typo": 0.5}), ValueError, "'typo'"),
    "frozen no layer": (lambda: misnamed("frozen", ("typo",)), ValueError, "'typo'"),
    "text for lr": (lambda: nn.SGD(lr="0.1"), TypeError, "SGD: lr must be a number, given '0.1'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_gets_a_sentence(case):
    call, kind, said = WRONG[case]
    with pytest.raises(kind, match=f"(?s){said}") as told:
        call()
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


def test_hyper_parameters_are_checked_when_they_are_set_too():
    one = trainer()
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="SGD: lr"):
            one.optimizer.lr = wrong
    with pytest.raises(ValueError, match="momentum"):
        one.optimizer.momentum = 1.0
    with pytest.raises(TypeError, match="clip"):
        one.optimizer.clip = 1.0
    assert (one.optimizer.lr, one.optimizer.momentum, one.optimizer.clip) == (0.1, 0.0, None)
    one.optimizer.lr = np.float32(0.5)


@pytest.mark.parametrize("kind", [nn.SGD, nn.RMSprop])
def test_momentum_that_is_switched_on_midway(kind):
    one = nn.Trainer(network(), nn.CrossEntropyLoss(), kind(lr=0.1))
    one.step(X, Y)
    one.optimizer.momentum = 0.9
    before = one.digest()
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: the trainer was made without 'velocity'.*before a trainer"
    ):
        one.step(X, Y)
    assert one.digest() == before and one.steps == 1


def test_outputs_that_are_not_numbers_are_not_right():
    one = trainer()
    one.flat_parameters[:] = np.nan
    assert nn.evaluate(one, (X, 0 * Y))["accuracy"] == 0


def test_a_parameter_that_was_no_number_before_the_first_step():
    one = trainer()
    one.p[1].W[0, 0] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match=r"parameter 1\.W"):
        one.step(X, Y)


def test_numbers_of_numpy_in_a_record(tmp_path):
    class Score(nn.Callback):
        def on_epoch(self, training, record):
            record["score"], record["count"] = np.float32(0.5), np.int64(3)

    keep = nn.KeepCheckpoints(nn.Checkpoints(tmp_path / "kept"))
    training = nn.fit(trainer(), DATA, 1, [Score(), nn.Metrics(tmp_path / "metrics.jsonl"), keep])
    assert type(training.history[0]["score"]) is float and type(training.history[0]["count"]) is int


def test_a_callback_method_that_nobody_calls():
    class Keras(nn.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise AssertionError

    with pytest.raises(
        TypeError, match=r"Keras has on_epoch_end, which is never called.*on_begin, on_end, on_epoch, on_step"
    ):
        nn.fit(trainer(), DATA, 1, Keras())


class Measured(nn.Callback):
    """A validation loss that is best in the second of three epochs."""

    def on_epoch(self, training, record):
        record["validation_loss"] = [3.0, 1.0, 2.0][record["epoch"] - 1]


def test_the_best_of_another_run_is_not_put_back(tmp_path):
    """One in the same directory, whose best epoch has the same number."""
    checkpoints, lines, at = nn.Checkpoints(tmp_path), [], {}
    best = nn.RestoreBest(checkpoints, "validation_loss", say=lines.append)
    keep = nn.KeepCheckpoints(checkpoints, best="validation_loss")
    first = trainer(seed=9)
    nn.fit(first, DATA, 3, [Measured(), keep, best])
    assert best.epoch == 2 and not lines
    second = trainer(seed=1)

    class Digest(nn.Callback):
        def on_epoch(self, training, record):
            at[record["epoch"]] = training.trainer.digest()

    nn.fit(second, DATA, 3, [Measured(), Digest(), best])
    assert best.epoch == 3 and second.digest() == at[3] != first.digest()
    assert len(lines) == 1 and "is of another run, whose epoch 2 had another loss" in lines[0]
