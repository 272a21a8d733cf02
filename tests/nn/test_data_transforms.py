"""Transforms: what they do to an image, and that a sample's own key is all that decides."""

import numpy as np
import pytest

from nn.data import Dataset, Loader, RandomCrop, RandomFlip
from nn.data.transforms import draw, sample_keys


def test_draws_are_uniform_and_independent():
    keys = sample_keys(3, 5, np.arange(100_000))
    for number in (0, 1):
        counts = np.bincount(draw(keys, number, 9), minlength=9)
        # Chi-squared with 8 degrees of freedom: above 35 once in 30,000 seeds; this one is fixed.
        assert ((counts - 100_000 / 9) ** 2 / (100_000 / 9)).sum() < 35
    pairs = np.bincount(9 * draw(keys, 0, 9) + draw(keys, 1, 9), minlength=81)
    assert ((pairs - 100_000 / 81) ** 2 / (100_000 / 81)).sum() < 140  # 80 degrees of freedom
    assert len(np.unique(keys)) == len(keys)


def test_keys_hang_on_seed_epoch_and_sample_alone():
    keys = sample_keys(3, 5, np.arange(50))
    assert np.array_equal(sample_keys(3, 5, np.array([41, 7])), keys[[41, 7]])
    for other in (sample_keys(4, 5, np.arange(50)), sample_keys(3, 6, np.arange(50))):
        assert not (other == keys).any()


def test_crop_cuts_where_the_draws_say():
    x = np.random.default_rng(0).integers(1, 256, (40, 6, 5, 3), np.uint8)
    keys = sample_keys(0, 0, np.arange(40))
    got = RandomCrop(2)(x, keys)
    for i in range(40):
        padded = np.pad(x[i], ((2, 2), (2, 2), (0, 0)))
        top, left = draw(keys, 0, 5)[i], draw(keys, 1, 5)[i]
        assert np.array_equal(got[i], padded[top : top + 6, left : left + 5])
    assert got.shape == x.shape and got.dtype == x.dtype
    assert np.array_equal(RandomCrop(0)(x, keys), x)
    with pytest.raises(ValueError, match="padding"):
        RandomCrop(-1)


def test_flip_mirrors_about_half():
    x = np.random.default_rng(0).integers(0, 256, (400, 3, 4, 2), np.uint8)
    got = RandomFlip()(x.copy(), sample_keys(0, 0, np.arange(400)))
    flipped = [i for i in range(400) if np.array_equal(got[i], x[i, :, ::-1])]
    kept = [i for i in range(400) if np.array_equal(got[i], x[i])]
    assert sorted(flipped + kept) == list(range(400)) and 160 < len(flipped) < 240


@pytest.mark.parametrize("transform", [RandomCrop(2), RandomFlip()])
def test_samples_that_are_no_images_are_refused(transform):
    with pytest.raises(ValueError, match=r"Random.*: expects images .*given samples of shape \(6,\)"):
        transform(np.zeros((5, 6)), sample_keys(0, 0, np.arange(5)))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_sample_is_changed_alike_on_any_number_of_ranks(count):
    x = np.random.default_rng(0).integers(0, 256, (50, 8, 8, 1), np.uint8)
    data = Dataset(x, np.arange(50), scale=1 / 255)
    options = {"seed": 3, "transform": (RandomCrop(2), RandomFlip())}
    whole = {int(i): image for x, y, _ in Loader(data, 9, **options).epoch(4) for image, i in zip(x, y, strict=True)}
    assert any(not np.array_equal(whole[i], data.batch(np.array([i]))[0][0]) for i in range(50))
    for index in range(count):
        for x, y, _ in Loader(data, 11, shard=(index, count), **options).epoch(4):
            for image, i in zip(x, y, strict=True):
                assert np.array_equal(image, whole[int(i)])
    assert np.array_equal(data.x, np.random.default_rng(0).integers(0, 256, (50, 8, 8, 1), np.uint8))


def test_two_transforms_of_a_kind_draw_apart():
    x = np.random.default_rng(0).integers(0, 256, (200, 1, 4, 1), np.uint8)
    data = Dataset(x, np.arange(200), scale=1.0)
    ((got, _, _),) = Loader(data, 200, shuffle=False, transform=(RandomFlip(), RandomFlip())).epoch(0)
    assert 50 < sum(np.array_equal(a, b) for a, b in zip(got, x, strict=True)) < 150
