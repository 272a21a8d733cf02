"""Copies and pickles of trainers and networks, and several threads that use one of them."""

import copy
import math
import multiprocessing
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import nn
from nn.models import build
from nn.models.googlenet import AuxiliaryLoss
from nn.registry import registered

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 60)
COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "protocol 2": lambda one: pickle.loads(pickle.dumps(one, 2)),
}


def trainer(optimizer, mixed=False, loss=None):
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    network = nn.Network(nn.Sequential(*layers), (6,), mixed=mixed)
    return nn.Trainer(network, loss or nn.CrossEntropyLoss(), optimizer, seed=3)


def losses(one, steps=4):
    return [one.step(X, Y, accumulate=2) for _ in range(steps)]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "optimizer", [nn.SGD(0.1), nn.SGD(0.1, 0.9, clip=nn.ClipGlobalNorm(1.0)), nn.LAMB(0.01)], ids=lambda o: repr(o)[:20]
)
def test_a_copy_in_the_middle_of_training_goes_on_as_the_original(copied, mixed, optimizer):
    one = trainer(copy.deepcopy(optimizer), mixed)
    losses(one)
    if mixed:  # a step that is skipped, so that updates and steps differ
        one.loss_scale.count_overflow(one.steps)
        one.steps += 1
    other = copied(one)
    at = one.digest()
    theirs = losses(other)
    assert one.digest() == at != other.digest(), "they share nothing"
    assert losses(one) == theirs
    assert one.digest() == other.digest() and one.updates == other.updates
    for (name, a), (also, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == also and np.array_equal(a, b)
    other.optimizer.lr = 0.0
    assert one.optimizer.lr > 0
    assert np.array_equal(one.predict(X), other.predict(X))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_trained_network_predicts_alike(copied, tmp_path):
    one = trainer(nn.Adam(0.01))
    losses(one)
    trained = nn.load(nn.save(one, tmp_path / "t.npz", {"classes": ["a", "b", "c"]}))
    other = copied(trained)
    assert np.array_equal(other.predict(X), one.predict(X)) and other.about == trained.about
    other.flat_parameters *= 2  # what it predicts with
    assert not np.array_equal(other.predict(X), one.predict(X))


@pytest.mark.parametrize("name", registered("model"))
def test_networks_of_all_models_can_be_pickled(name):
    network = build(name, (16,) if name in ("transformer", "lstm", "encoder") else (231, 231, 3), 10)
    again = pickle.loads(pickle.dumps(network))
    assert again.summary() == network.summary()
    name = min(network.layout.specs, key=lambda name: math.prod(network.layout.specs[name].shape))
    assert np.array_equal(network.layout.draw(name, 5), again.layout.draw(name, 5))


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(class_weights=[0.5, 1, 1.5]), AuxiliaryLoss(nn.CrossEntropyLoss()), nn.CrossEntropyLoss()],
)
def test_losses_can_be_pickled(loss):
    one, other = trainer(nn.SGD(0.1), loss=loss), trainer(nn.SGD(0.1), loss=pickle.loads(pickle.dumps(loss)))
    assert losses(one) == losses(other)


def test_optimizers_can_be_pickled():
    for kind in (nn.SGD, nn.Adagrad, nn.RMSprop, nn.Adam, nn.AdamW, nn.LARS, nn.LAMB):
        one = kind(lr=0.5, clip=nn.ClipGlobalNorm(2.0))
        assert repr(pickle.loads(pickle.dumps(one))) == repr(one)


def trained_there(one):
    return losses(one), one.digest()


def test_a_trainer_goes_to_another_process_and_back():
    one = trainer(nn.Adam(0.01))
    losses(one)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        theirs, digest = pool.apply(trained_there, (one,))
        (again,) = pool.map(copy.copy, [one])
    assert losses(one) == theirs and one.digest() == digest
    assert losses(again) == theirs


def several(threads, work):
    """Let threads begin together; what they return."""
    barrier = threading.Barrier(threads)

    def begin(i):
        barrier.wait(60)
        return work(i)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


@pytest.mark.parametrize("kind", ["trainer", "trained", "mixed"])
def test_threads_predict_with_one_network(kind):
    """Batches of several sizes, each thread's own: what each gets is what it would get alone."""
    layers = nn.Linear(6, 256), nn.LeakyReLU(0.1), nn.Linear(256, 256), nn.LayerNorm(256), nn.Dropout(0.5)
    network = nn.Network(nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Linear(256, 3)), (6,), mixed=kind == "mixed")
    one = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1))
    one.step(X, Y)
    model = one if kind == "trainer" else nn.Model(network, one)
    inputs = [RNG.standard_normal((samples, 6)).astype(np.float32) for samples in (512, 300, 3, 64)]
    with threadpool_limits(1, "blas"):  # so that threads are in NumPy at the same time
        expected = [model.predict(x).copy() for x in inputs]
        more = {} if kind == "trainer" else {"batch": 100}

        def work(i):
            return sum(not np.array_equal(model.predict(inputs[i], **more), expected[i]) for _ in range(40))

        expected = [model.predict(x, **more).copy() for x in inputs]
        assert several(4, work) == [0] * 4
    if kind != "trainer":
        pools = {id(ctx.network_context.pool) for ctx in model._idle}
        assert 1 <= len(model._idle) <= 4 and len(pools) == len(model._idle)


def test_predictions_and_evaluation_while_another_thread_trains():
    """Each is of the parameters between two steps, and training is what it would be alone."""
    one, alone = trainer(nn.SGD(0.1)), trainer(nn.SGD(0.1))
    between = [alone.predict(X).tobytes()]
    for _ in range(30):
        alone.step(X, Y)
        between.append(alone.predict(X).tobytes())

    def work(i):
        if i == 0:
            return [one.step(X, Y) for _ in range(30)] and []
        return [(one.sum_scores(X, Y), one.predict(X).tobytes())[1] for _ in range(60)]

    _, *predictions = several(3, work)
    assert one.digest() == alone.digest()
    assert {each for some in predictions for each in some} <= set(between)


MOMENTS = COPIES | {"snapshot": nn.Trainer.snapshot, "model": lambda one: nn.Model(one.network, one)}


@pytest.mark.parametrize("copied", MOMENTS.values(), ids=MOMENTS)
def test_what_is_copied_while_another_thread_trains_is_of_one_moment(copied):
    one, other, done = trainer(nn.Adam(0.01)), trainer(nn.Adam(0.01)), threading.Event()

    def train():
        while not done.is_set():
            one.step(X, Y)

    thread, interval = threading.Thread(target=train), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        copies = [copied(one) for _ in range(40)]
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    for each in copies:
        state = each if isinstance(each, dict) else each.state_dict()
        agree = lambda: all(np.array_equal(array, other.state_dict()[name]) for name, array in state.items())  # noqa: B023
        while not agree() and other.steps < one.steps:
            other.step(X, Y)
        assert agree()


def test_threads_evaluate_with_metrics_of_their_own():
    one = trainer(nn.SGD(0.1))
    wanted = {(): set(), ("perplexity",): {"perplexity"}, ("top_5_accuracy",): {"top_5_accuracy"}}

    def evaluate(metrics):
        names = [set(nn.evaluate(one, (X, Y), batch=7, metrics=metrics)) for _ in range(30)]
        return all(found == {"loss", "accuracy"} | wanted[metrics] for found in names)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(evaluate, wanted))
    assert [metric.name for metric in one.metrics] == ["accuracy"], "they are the trainer's own again"


def test_an_optimizer_that_needs_several_evaluations_is_refused_at_once():
    class Searching(nn.SGD):
        searches = True

    with pytest.raises(TypeError, match=r"Searching evaluates a batch several times.*parallel\.Sandblaster.*LBFGS"):
        trainer(Searching())
