"""What users do beside the usual: arguments in other orders, attributes set later, callbacks, names they guess."""

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


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiHeadAttention(64, 4, 0.1),
        lambda: nn.LSTM(4, 8, 2),
        lambda: nn.SGD(0.1, 0.9, 0.01),
        lambda: nn.MaxPool2d(3, 2, 1, 1),
        lambda: nn.GELU("none"),
        lambda: nn.Linear(4, 3, nn.initializers.he),
    ],
)
def test_another_librarys_order_of_arguments_is_refused(make):
    with pytest.raises(TypeError, match="must be True or False"):
        make()


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
    with pytest.raises(ValueError, match="name is that of a file"):
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
    with pytest.raises(ValueError, match="out of range"):
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
        (lambda: trainer().load_weights("a.npz"), "given a path"),
        (lambda: nn.models.build("lenet5:20,50", (28, 28, 1), 10), "lenet5 takes three numbers"),
        (lambda: nn.Spec(3, None), "a shape is a tuple"),
    ],
)
def test_names_and_shapes_that_people_guess_are_answered(call, message):
    with pytest.raises((TypeError, AttributeError, ValueError), match=message):
        call()
