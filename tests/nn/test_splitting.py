"""Validation data: who is held out, that nobody is in two sets, and that nothing is read that need not be."""

import resource

import numpy as np
import pytest

from nn.data import DataError, Dataset, Loader, hold_out, load


def numbered(n=50):
    """Samples that say which they are."""
    return Dataset(np.arange(n, dtype=np.float32)[:, None], np.arange(n), "numbered")


def test_each_sample_is_in_one_part_and_keeps_its_target():
    train, validation = hold_out(numbered(), 0.1, seed=3)
    assert (len(train), len(validation)) == (45, 5)
    assert sorted([*train.y, *validation.y]) == list(range(50))
    assert (np.diff(train.y) > 0).all() and (np.diff(validation.y) > 0).all(), "in the order of the data set"
    for part in (train, validation):
        assert (part.batch()[0][:, 0] == part.y).all() and part.classes == 50
    assert validation.y.tolist() != list(range(45, 50)), "drawn, for data may be sorted"


def test_the_seed_draws_and_nothing_else():
    first, again, other = (hold_out(numbered(), 0.1, seed)[1].y.tolist() for seed in (0, 0, 1))
    assert first == again != other
    order = Loader(numbered(), 50, seed=0).order(0)
    assert set(order[:5]) != set(first) != set(order[45:]), "not the draw of the first epoch's order"


def test_a_share_is_below_one_and_a_number_is_not():
    for validation, count in ((0.1, 5), (0.5, 25), (0.001, 1), (1, 1), (10, 10), (49.0, 49)):
        assert len(hold_out(numbered(), validation)[1]) == count


@pytest.mark.parametrize(
    "validation, message",
    [
        (50, "numbered: of 50 training samples 50 cannot be held out for validation: nothing would be left"),
        (0.999, "of 50 training samples 50 cannot be held out"),
        (1.5, "a fraction above 0 and below 1, or a number of samples, given 1.5"),
        (-0.1, "given -0.1"),
        (0, "given 0"),
        (float("nan"), "given nan"),
        (float("inf"), "given inf"),
    ],
)
def test_what_cannot_be_held_out_is_refused(validation, message):
    with pytest.raises(DataError, match=message):
        hold_out(numbered(), validation)


def test_digits():
    whole, data = load("digits"), load("digits", validation=0.1)
    assert whole.validation is None
    assert [len(split) for split in (data.train, data.validation, data.test)] == [1293, 144, 360]
    parts = [image.tobytes() for split in (data.train, data.validation) for image in split.x]
    assert sorted(parts) == sorted(image.tobytes() for image in whole.train.x)
    assert np.array_equal(data.test.x, whole.test.x)
    assert np.array_equal(data.validation.x, load("digits", validation=0.1, seed=0).validation.x)


def test_limit_is_of_each_split_and_moments_are_of_what_is_trained_on():
    data = load("digits", validation=100, limit=50, normalise=True, flat=True, dtype=np.float64)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [50, 50, 50]
    assert {split.in_shape for split in (data.train, data.validation, data.test)} == {(64,)}
    assert abs(data.train.batch()[0].mean()) < 1e-12 and abs(data.validation.batch()[0].mean()) > 1e-4


def test_of_a_text_the_last_samples_are_held_out(tmp_path):
    text = bytes(np.random.default_rng(0).integers(32, 127, 1000).astype(np.uint8))
    (tmp_path / "a.txt").write_bytes(text)
    data = load(f"text:{tmp_path / 'a.txt'}", length=10, validation=0.1)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [80, 9, 9]
    assert data.train.x.tobytes() == text[:800] and data.validation.x.tobytes() == text[800:890]
    assert data.test.x.tobytes() == text[900:990]
    assert np.shares_memory(data.train.x, data.validation.x) or data.train.mapped, "views of the text"


def test_a_validation_split_of_its_own_is_taken(tmp_path):
    x, y = np.arange(12.0).reshape(12, 1), np.arange(12) % 3
    arrays = {"x_train": x[:6], "y_train": y[:6], "x_test": x[6:8], "y_test": y[6:8]}
    own = {"x_validation": x[8:], "y_validation": y[8:]}
    np.savez(tmp_path / "a.npz", **arrays, **own)
    for key, array in (arrays | own).items():
        np.save(tmp_path / f"{key}.npy", array)
    for place in (tmp_path / "a.npz", tmp_path):
        data = load(place, validation=0.1)
        assert len(data.train) == 6 and data.validation.x.tolist() == x[8:].tolist()
        assert load(place).validation is None, "0 is for none"
    np.savez(tmp_path / "a.npz", **arrays, x_validation=x)
    with pytest.raises(DataError, match=r"a\.npz: holds no array 'y_validation'"):
        load(tmp_path / "a.npz", validation=0.1)
    np.savez(tmp_path / "a.npz", **arrays, x_validation=np.ones((2, 3)), y_validation=y[:2])
    with pytest.raises(DataError, match=r"shape \(1,\), validation samples \(3,\)"):
        load(tmp_path / "a.npz", validation=0.1)


def test_of_a_memory_map_nothing_is_copied(tmp_path):
    count, shape = 10_000, (224, 224, 3)  # 1.5 GB of which the file system stores what is written
    x = np.lib.format.open_memmap(tmp_path / "x_train.npy", "w+", np.uint8, (count, *shape))
    x[::100, 0, 0, 0] = marked = np.arange(0, count, 100) % 25
    np.save(tmp_path / "y_train.npy", np.where(np.arange(count) % 100, 251, np.arange(count) % 25))
    np.save(tmp_path / "x_test.npy", np.zeros((5, *shape), np.uint8))
    np.save(tmp_path / "y_test.npy", np.arange(5))
    del x
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = load(tmp_path, validation=0.1)
    assert (len(data.train), len(data.validation)) == (9_000, 1_000) and data.train.mapped
    found = 0
    for split in (data.train, data.validation.flat()):
        places = np.flatnonzero(np.asarray(split.y) < 251)
        found += len(places)
        images, labels = split.batch(places[:16])
        assert np.array_equal(np.rint(images.reshape(len(labels), -1)[:, 0] * 255).astype(int), labels)
        next(Loader(split, 16).epoch(0))
    assert found == len(marked)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_rows_of_a_memory_map_are_an_array_to_those_who_ask(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 2, 1)).astype(np.uint8)
    for key, array in {"x_train": x, "y_train": np.arange(40) % 4, "x_test": x[:2], "y_test": [0, 1]}.items():
        np.save(tmp_path / f"{key}.npy", array)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(40) % 4, x_test=x[:2], y_test=[0, 1])
    mapped, read = (load(place, validation=0.25, seed=5).train for place in (tmp_path, tmp_path / "a.npz"))
    assert mapped.mapped and not read.mapped
    for left, right in ((mapped, read), (mapped.flat(), read.flat()), (mapped.head(7), read.head(7))):
        assert left.in_shape == right.in_shape and len(left) == len(right)
        assert np.array_equal(left.x, right.x) and np.array_equal(left.batch()[0], right.batch()[0])
        assert np.array_equal(left.batch(np.array([3, 1]))[0], right.batch(np.array([3, 1]))[0])
    assert np.allclose(mapped.moments(), read.moments())


def labelled(*sizes):
    """So many samples of each class, in order."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset(np.arange(len(y), dtype=np.float32)[:, None], y, "labelled")


@pytest.mark.parametrize(
    "sizes, validation, expected",
    [
        ((3, 297), 0.1, (1, 29)),
        ((100, 200), 30, (10, 20)),
        ((5, 5, 5, 85), 4, (1, 1, 1, 1)),
        ((2, 2, 2, 94), 0.1, (1, 1, 1, 7)),
        ((2, 2), 0.7, None),  # 3 of 4: no class can be in both parts
        ((1, 9), 0.5, (0, 5)),  # one sample: it is trained on
        ((2, 98), 0.95, (1, 94)),
        ((50, 50), 1, None),
        ((34, 33, 33), 10, (4, 3, 3)),
    ],
)
def test_each_class_has_its_share_of_both_parts(sizes, validation, expected):
    data, drawn = labelled(*sizes), set()
    for seed in range(30):
        train, held = hold_out(data, validation, seed)
        counts = np.bincount(held.y, minlength=len(sizes))
        assert expected is None or tuple(counts) == expected
        assert sorted([*train.x[:, 0], *held.x[:, 0]]) == list(range(len(data)))
        assert (np.diff(held.x[:, 0]) > 0).all(), "in the order of the data set"
        drawn.add(tuple(held.x[:, 0]))
    assert len(drawn) > 1, "the seed draws which"


def test_more_classes_than_samples_held_out():
    for seed in range(20):
        counts = np.bincount(hold_out(labelled(*[4] * 50), 10, seed)[1].y)
        assert counts.sum() == 10 and counts.max() == 1
