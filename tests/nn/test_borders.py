"""What users do beside the usual: arguments in other orders, attributes set later, callbacks, names they guess."""

import copy
import inspect
import operator
import threading

import numpy as np
import pytest

import nn
from nn.analysis.inspection import activations, gradients
from nn.core.layer import Sequential

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((60, 6)).astype(np.float32), RNG.integers(0, 3, 60)


def trainer(*layers, loss=None):
    layers = layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Trainer(nn.Network(Sequential(*layers), (6,)), loss or nn.CrossEntropyLoss(), nn.SGD(0.1))


# What may stand first in PyTorch, beyond what means the same here: refused, whatever its position means there.
POSITIONAL = {
    "Linear": (4, 3, True, "cpu"),
    "Conv2d": (4, 4, 3, 1, 0, 1, 1, True, "zeros"),
    "MaxPool2d": (3, 2, 1, 1),
    "AvgPool2d": (3, 2, 1, False, True, None),
    "AdaptiveAvgPool2d": (3, None),
    "BatchNorm1d": (8, 1e-5, 0.1, True),
    "BatchNorm2d": (8, 1e-5, 0.1, True, True),
    "LayerNorm": (8, 1e-5, True),
    "RMSNorm": (8, 1e-5, True),
    "LocalResponseNorm": (5, 1e-4, 0.75, 1.0, None),
    "Dropout": (0.5, True),
    "Embedding": (9, 4, 0),
    "RNN": (4, 8, 2),
    "LSTM": (4, 8, True),
    "MultiHeadAttention": (64, 4, 0.1),
    "Flatten": (1,),
    "Softmax": (1,),
    "LogSoftmax": (-1,),
    "ReLU": (True,),
    "LeakyReLU": (0.01, True),
    "GELU": ("tanh",),
    "MSELoss": (None,),
    "MAELoss": (None,),
    "HuberLoss": ("mean", 1.0),
    "NLLLoss": ([1, 2], None, -100),
    "CrossEntropyLoss": ([1, 2],),
    "BCEWithLogitsLoss": ([1, 2],),
    "SGD": (0.1, 0.9, 0.0),
    "Adagrad": (0.01, 0.0),
    "RMSprop": (0.01, 0.99, 1e-8),
    "Adam": (0.001, (0.9, 0.999)),
    "AdamW": (0.001, 0.004),
    "schedules.Step": ("optimizer", 30),
    "schedules.MultiStep": ("optimizer", (30, 60)),
    "schedules.Exponential": ("optimizer", 0.9),
    "schedules.Polynomial": ("optimizer", 5),
    "schedules.Cosine": ("optimizer", 100),
    "schedules.Plateau": ("optimizer", "min"),
    "schedules.Warmup": (0.1, 100),
    "callbacks.EarlyStopping": ("val_loss", 0, 5),
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_another_librarys_order_of_arguments_is_refused(name):
    with pytest.raises((TypeError, ValueError), match=f"^{name.split('.')[-1]}"):
        operator.attrgetter(name)(nn)(*POSITIONAL[name])


def test_what_stands_first_in_pytorch_and_here_means_the_same():
    torch = pytest.importorskip("torch")
    same = {
        "in_features",
        "out_features",
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
    }
    same |= {"groups", "bias", "eps", "momentum", "lr", "alpha", "beta", "k", "size", "output_size", "ceil_mode"}
    same |= {"count_include_pad"}
    renamed = {"num_features": "features", "normalized_shape": "features", "num_embeddings": "vocabulary"}
    renamed |= {"embedding_dim": "features", "input_size": "in_features", "hidden_size": "features", "p": "rate"}
    renamed |= {"negative_slope": "slope", "embed_dim": "features", "num_heads": "heads", "weight": "class_weights"}
    theirs_lack_names = {"RNN": ["input_size", "hidden_size"], "LSTM": ["input_size", "hidden_size"]}
    for name, given in POSITIONAL.items():
        other = getattr(torch.nn, name, None) or getattr(torch.optim, name, None)
        if other is None:
            continue
        there = theirs_lack_names.get(name) or [key for key in inspect.signature(other).parameters if key != "params"]
        here = [
            key for key, p in inspect.signature(getattr(nn, name)).parameters.items() if p.kind is not p.KEYWORD_ONLY
        ]
        for ours, key in zip(here[: len(given)], there, strict=False):
            means_the_same = ours == renamed.get(key, key) and (key in same or key in renamed)
            refused = key in ("dropout", "approximate", "dilation", "reduction")  # of another type than ours: see above
            assert means_the_same or refused, f"{name}: {key} in PyTorch, {ours} here"


def test_an_attribute_that_is_set_before_a_network_is_made_counts():
    conv = nn.Conv2d(1, 4, 3)
    conv.geometry((8, 8))
    conv.padding = 1
    assert nn.Network(conv, (8, 8, 1)).out_shape == (8, 8, 4)
    experts = nn.MixtureOfExperts(4, 2)
    experts.activation = "relu"
    assert isinstance(experts.apply, nn.ReLU)
    attention = nn.MultiHeadAttention(8, 2)
    attention.attention = "blocks:4"
    assert attention.block_size == 4


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (trainer, "lr", r"a Trainer has no 'lr': to set it would change nothing: trainer\.optimizer\.lr$"),
        (trainer, "batch", r"nn\.fit\(trainer, data, epochs=5, batch=64\)"),
        (trainer, "step_count", "a Trainer has no 'step_count': to set it would change nothing$"),
        (trainer, "optimizer", "Trainer: optimizer cannot be set: make a new Trainer with it"),
        (trainer, "loss", "Trainer: loss cannot be set"),
        (trainer, "seed", "Trainer: seed cannot be set"),
        (lambda: trainer().network, "dtype", "Network: dtype cannot be set"),
        (lambda: trainer().network, "inshape", "a Network has no 'inshape'.*: did you mean in_shape"),
        (lambda: nn.SGD(0.1), "learning_rate", "a SGD has no 'learning_rate'.*: lr$"),
        (lambda: nn.Adam(), "momentum", "an? Adam has no 'momentum'"),
        (lambda: nn.ClipNorm(1.0), "max_norm", "a ClipNorm has no 'max_norm'"),
        (lambda: nn.Dropout(), "p", "a Dropout has no 'p'.*: rate$"),
        (lambda: nn.CrossEntropyLoss(), "weight", r"CrossEntropyLoss\.weight is a method, .*: class_weights$"),
        (lambda: nn.schedules.Plateau(0.1), "pacience", "did you mean patience"),
        (lambda: nn.Loader(nn.data.Dataset(X, Y)), "batch_size", "a Loader has no 'batch_size'"),
        (lambda: nn.data.Dataset(X, Y), "transform", "a Dataset has no 'transform'"),
        (lambda: nn.metrics.TopKAccuracy(3), "top", "a TopKAccuracy has no 'top'"),
        (lambda: nn.fit(trainer(), (X, Y), 1), "stopped", "a Training has no 'stopped'.*: did you mean stop"),
        (lambda: nn.Model(trainer().network, trainer()), "weights", "a Model has no 'weights'"),
    ],
)
def test_an_attribute_that_nobody_reads_is_refused(make, name, words):
    for thing in (make(), copy.deepcopy(make())):
        with pytest.raises(AttributeError, match=words):
            setattr(thing, name, 1)


def test_a_class_of_ones_own_has_the_attributes_that_its_constructor_sets():
    class Halved(nn.Loss):
        def __init__(self):
            self.seen = 0

    loss = Halved()
    loss.seen = 3
    assert loss.seen == 3 and str(inspect.signature(nn.Dropout)) == "(rate: 'float' = 0.5)"
    with pytest.raises(AttributeError, match="Halved"):
        loss.others = 4


class Stops(nn.Callback):
    def on_epoch(self, training, record):
        training.stop = True


def test_callbacks_do_not_undo_each_other():
    found = nn.fit(trainer(), (X, Y), 6, [Stops(), nn.EarlyStopping(patience=5)], validation=(X, Y))
    assert found.epoch == 1


class Endless:
    """A loader of one's own, without a length."""

    def epoch(self, epoch, start_step=0):
        for lo in range(20 * start_step, 60, 20):
            yield X[lo : lo + 20], Y[lo : lo + 20], 20


def test_progress_of_a_loader_without_a_length():
    lines = []
    nn.fit(trainer(), Endless(), 2, nn.callbacks.Progress(every=0, say=lines.append))
    assert sum("step 2  loss" in line for line in lines) == 2 and lines[-1].startswith("epoch 2/2")


@pytest.mark.parametrize("data", [nn.Loader(nn.data.Dataset(X, Y), 20), [(X, Y), (X, Y)], Endless()])
def test_a_size_of_batches_is_refused_for_data_that_have_their_own(data):
    for call in (lambda: nn.fit(trainer(), data, 1, batch=8), lambda: nn.evaluate(trainer(), data, batch=8)):
        with pytest.raises(TypeError, match=f"a {type(data).__name__} has batches of its own: leave out batch=8"):
            call()


def test_after_the_best_epoch_is_restored_training_goes_on_from_there():
    """Steps, epoch and history are of one moment: the rest is trained as if the worse epochs had not been."""

    class Scores(nn.Callback):
        values = {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.3}

        def on_epoch(self, training, record):
            record["score"] = self.values.get(record["epoch"], 0.0)

    def run(epochs, one, **options):
        stop = nn.EarlyStopping(2, "score", mode="max")
        return nn.fit(one, (X, Y), epochs, [Scores(), stop], schedule=lambda step: 0.1 / (1 + step), **options)

    stopped = run(9, trainer())
    assert stopped.epoch == len(stopped.history) == 4 and stopped.restored == 2
    assert "restored epoch 2" in repr(stopped)
    progress = stopped.progress()
    assert progress["epoch"] == len(progress["history"]) == 2 and stopped.trainer.steps == 4 == stopped.step
    whole = nn.fit(trainer(), (X, Y), 3, schedule=lambda step: 0.1 / (1 + step))
    again = nn.fit(stopped.trainer, (X, Y), 3, progress=progress, schedule=lambda step: 0.1 / (1 + step))
    assert again.trainer.digest() == whole.trainer.digest() and again.epoch == 3


def test_the_callers_progress_stays_as_it_is():
    one = trainer()
    progress = nn.fit(one, (X, Y), 2).progress()
    before = repr(progress)
    for _ in range(2):
        nn.fit(one, (X, Y), 3, progress=progress)
        assert repr(progress) == before
        one = trainer()


def test_a_run_without_validation_goes_on_with_some():
    one = trainer()
    progress = nn.fit(one, (X, Y), 1).progress()
    found = nn.fit(one, (X, Y), 3, [nn.EarlyStopping(patience=2)], validation=(X, Y), progress=progress)
    assert found.epoch == 3


def test_checkpoints_refuse_what_would_lose_or_misplace_them(tmp_path):
    with pytest.raises(ValueError, match="Checkpoints: keep"):
        nn.Checkpoints(tmp_path, keep=-1)
    with pytest.raises(ValueError, match="name"):
        nn.Checkpoints(tmp_path).save(trainer().state_dict(), {}, name="../best")


def test_files_that_others_are_writing_stay(tmp_path):
    one, stop = trainer(), threading.Event()
    checkpoints, state = nn.Checkpoints(tmp_path), one.state_dict()

    def save():
        while not stop.is_set():
            checkpoints.save(state, {})

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(40):
            nn.save(one, tmp_path / "model.npz")
    finally:
        stop.set()
        thread.join()


def test_inspection_sees_every_layer_once_and_the_mean_of_this_batch():
    many = np.concatenate([X] * 11)
    assert len(activations(trainer(), many)) == len(activations(trainer(), X))
    weighted = trainer(loss=nn.CrossEntropyLoss(class_weights=[0.1, 1.0, 5.0]))
    before = gradients(weighted, X, Y)
    weighted.step(X[:2], Y[:2])
    weighted.load_state_dict(trainer(loss=weighted.loss).state_dict())
    np.testing.assert_allclose([each.std for each in gradients(weighted, X, Y)], [each.std for each in before])


def test_two_layers_and_names_never_share_random_numbers():
    class Draws(nn.Layer):
        def __init__(self, name=""):
            self.name = name

        def forward(self, p, x, ctx):
            self.drawn.append(ctx.random(x.shape, self.name))
            return x.copy(), None

        def backward(self, p, gy, saved, ctx):
            return gy.copy(), {}

    Draws.drawn = []
    layers = [Draws("0" if i == 1 else "") for i in range(11)]
    network = nn.Network(Sequential(*layers), (6,))
    network.forward(network.layout.views(network.layout.zeros(np.float32)), X, network.context())
    assert not np.array_equal(Draws.drawn[1], Draws.drawn[10])


def test_a_step_that_fails_leaves_the_running_statistics():
    one = trainer(nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = one.buffers.copy()
    with pytest.raises(ValueError):
        one.step(X, np.full(60, 7))
    assert np.array_equal(one.buffers, before)


# ------------------------------------------------------------------------------------- what a user's own code does


class NoPair(nn.Loss):
    targets = "values"

    def __call__(self, z, target, total, ctx):
        return 0.0


class Column(nn.Loss):
    targets = "values"

    def __call__(self, z, target, total, ctx):
        d = z - target.reshape(-1)  # (N, N)
        return float((d**2).sum() / total), 2 * d / total


@pytest.mark.parametrize(
    "loss, message", [(NoPair(), "must return a pair"), (Column(), "gradient must have the shape of the outputs")]
)
def test_a_loss_of_ones_own_is_named_where_it_is_wrong(loss, message):
    one = nn.Trainer(nn.Network(nn.Linear(6, 1), (6,)), loss, nn.SGD(0.1))
    with pytest.raises((TypeError, nn.ShapeError), match=message):
        one.step(X, Y[:, None].astype(np.float32))


def test_values_are_compared_with_outputs_of_their_shape():
    one = trainer(loss=nn.MSELoss())
    with pytest.raises(ValueError, match=r"targets must have their shape \(N, 3\), given \(60,\)"):
        nn.fit(one, (X, Y), 1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nn.Network(nn.Linear(6, 3), (6,))(X), "a network has no weights"),
        (lambda: nn.Network(nn.Linear(6, 3), (6,)).predict, "a network has no weights"),
        (lambda: nn.L1Loss, r"nn.MAELoss\(\)"),
        (lambda: nn.Conv2D, "did you mean nn.Conv2d"),
        (lambda: trainer().p[0].weight, "there is no array 'weight' here, only W, b"),
        (lambda: trainer().p[0]["W"], "p.W, not p"),
        (lambda: trainer().freeze(0), "freeze takes names of layers"),
        (lambda: trainer().step(X[:1], Y[0]), "of one sample they are"),
        (lambda: trainer().step(X[:1], 3), "of one sample they are"),
        (lambda: trainer().load_weights("a.npz"), "given a path"),
        (lambda: nn.models.build("lenet5:20,50", (28, 28, 1), 10), "lenet5 takes three numbers"),
        (lambda: nn.Spec(3, None), "a shape is a tuple"),
    ],
)
def test_names_and_shapes_that_people_guess_are_answered(call, message):
    with pytest.raises((TypeError, AttributeError, ValueError), match=message):
        call()


def test_a_group_that_nobody_has_registered_is_refused():
    ctx = nn.Network(nn.ReLU(), (3,)).context()
    assert ctx.group("data").size == 1
    with pytest.raises(ValueError, match="unknown group 'dat': did you mean 'data'"):
        ctx.group("dat")
