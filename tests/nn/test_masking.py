"""Hidden ids: which are hidden, what stands there, and that the loss is the mean over them alone."""

import numpy as np
import pytest

import nn
from nn.data.dataset import DataError, Dataset
from nn.data.masking import MASK, masked
from nn.data.text import text_datasets


def text(length=40):
    return text_datasets(np.random.default_rng(0).integers(32, 127, 40_000).astype(np.uint8), "noise", length)[0]


def test_every_sample_hides_as_many_and_tells_nothing_else():
    plain, hidden = text(), masked(text(), 0.15)
    asked = hidden.y >= 0
    assert (asked.sum(axis=1) == 6).all()
    assert (hidden.x[~asked] == plain.x[~asked]).all() and (hidden.y[asked] == plain.x[asked]).all()
    assert np.ptp(asked.mean(axis=0)) < 0.15, "every position is chosen about as often"
    shares = [(hidden.x[asked] == MASK).mean(), (hidden.x[asked] == plain.x[asked]).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1], atol=0.02)
    assert (masked(text(), 0.15).x == hidden.x).all() and (masked(text(), 0.15, seed=1).x != hidden.x).any()


def test_a_vocabulary_without_ids_to_hide_is_refused():
    ids = np.zeros((4, 6), int)
    with pytest.raises(DataError, match="a vocabulary needs more than 2, given 1"):
        masked(Dataset(ids, ids), 0.5)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_share_out_of_range_is_refused(share):
    with pytest.raises(DataError, match="fraction of hidden ids"):
        masked(text(), share)


def test_only_sequences_of_ids_can_be_masked():
    targets = np.zeros(4, int)
    numbers = nn.data.Dataset(np.ones((4, 6)), targets, classes=1)
    pairs = nn.data.Dataset(np.ones((4, 6, 2), np.uint8), targets, classes=1)
    for dataset in (nn.data.load("digits").train, numbers, pairs):
        with pytest.raises(DataError, match="only sequences of ids"):
            masked(dataset)


def test_loss_is_the_mean_over_hidden_positions_and_their_ids_are_counted():
    data = masked(text(10), 0.3)
    network = nn.models.build("encoder:16,2,1", (10,), 256, "float64")
    trainer = nn.Trainer(network, nn.MaskedCrossEntropyLoss(3), nn.SGD(0.1))
    x, y = data.batch(slice(0, 8))
    z = trainer.predict(x)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    asked = y >= 0
    want = -log_p[asked, y[asked]].mean()
    loss, count, correct, positions = trainer.sum_scores(x, y)
    assert count == positions == 24 and loss / count == pytest.approx(want, rel=1e-12)
    assert correct == np.count_nonzero(z.argmax(-1)[asked] == y[asked])


def test_an_encoder_learns_to_tell_hidden_ids():
    """Each sample repeats one letter: all but the hidden places give it away."""
    letters = np.random.default_rng(1).integers(97, 107, 200).astype(np.uint8)
    samples = np.repeat(letters[:, None], 8, axis=1)
    data = masked(nn.data.Dataset(samples, samples, classes=256), 0.25)
    trainer = nn.Trainer(
        nn.models.build("encoder:16,2,1", (8,), 256), nn.MaskedCrossEntropyLoss(2), nn.Adam(0.01), seed=0
    )
    training = nn.fit(trainer, nn.Loader(data, 20), 30, validation=nn.Loader(data, 200, shuffle=False))
    assert training.history[-1]["validation_accuracy"] > 0.9


@pytest.mark.parametrize("kind", [np.uint16, np.int64])
def test_large_ids_are_targets_without_wrapping(kind):
    ids = np.full((3, 8), 40_000, kind)
    hidden = masked(nn.data.Dataset(ids, ids, classes=50_000), 0.5)
    assert set(hidden.y.ravel().tolist()) == {-1, 40_000}
