"""Frozen layers and rates by layer: steps are PyTorch's with parameter groups, and norms leave out what is frozen."""

import pickle

import numpy as np
import pytest

import nn

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(24, 5)), RNG.integers(0, 3, 24)


def network():
    layers = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
    return nn.Network(nn.Sequential(*layers), (5,), "float64")


def trainer(optimizer):
    return nn.Trainer(network(), nn.CrossEntropyLoss(), optimizer, seed=3)


OPTIMIZERS = {
    "SGD": lambda **more: nn.SGD(0.1, momentum=0.9, weight_decay=0.01, **more),
    "Adam": lambda **more: nn.Adam(0.01, weight_decay=0.01, **more),
    "AdamW": lambda **more: nn.AdamW(0.01, **more),
    "Adagrad": lambda **more: nn.Adagrad(0.05, **more),
    "RMSprop": lambda **more: nn.RMSprop(0.01, momentum=0.5, **more),
    "LARS": lambda **more: nn.LARS(weight_decay=0.01, **more),
    "LAMB": lambda **more: nn.LAMB(0.01, **more),
}


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_rates_by_layer_are_pytorchs_parameter_groups(name):
    torch = pytest.importorskip("torch")
    ours = trainer(OPTIMIZERS[name](rates={"2": 0.1, "4.b": 3.0}, clip=nn.ClipGlobalNorm(0.05)))
    ours.freeze("0")
    arrays = {key: torch.tensor(array.copy(), requires_grad=True) for key, array in ours.named_parameters()}
    for key in ("0.W", "0.b"):
        arrays[key].requires_grad_(False)
    own = ours.optimizer
    decays = {key: own.weight_decay * (".W" in key) for key in arrays}
    groups = [
        {"params": [array], "lr": own.lr * {"2": 0.1, "4.b": 3.0}.get(key if key == "4.b" else key[0], 1.0),
         "weight_decay": decays[key]}
        for key, array in arrays.items()
    ]  # fmt: skip
    options = {
        "SGD": {"momentum": 0.9},
        "RMSprop": {"momentum": 0.5},
        "Adagrad": {"eps": 1e-10},
    }.get(name, {})
    theirs = getattr(torch.optim, name)(groups, **options)
    x, y = torch.tensor(X), torch.tensor(Y)
    for _ in range(6):
        ours.step(X, Y)
        theirs.zero_grad()
        z = x
        for i in ("0", "2", "4"):
            z = z @ arrays[f"{i}.W"] + arrays[f"{i}.b"]
            z = z if i == "4" else torch.tanh(z)
        torch.nn.functional.cross_entropy(z, y).backward()
        trained = [array for array in arrays.values() if array.requires_grad]
        norm = float(sum((array.grad**2).sum() for array in trained)) ** 0.5  # clip_grad_norm_ adds 1e-6 to it
        for array in trained:
            array.grad *= min(1.0, 0.05 / norm)
        theirs.step()
    for key, array in ours.named_parameters():
        np.testing.assert_allclose(array, arrays[key].detach().numpy(), rtol=1e-11, atol=1e-13, err_msg=key)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop"])
def test_a_saved_network_is_fine_tuned_and_unfrozen_with_pytorchs_numbers(name, tmp_path):
    torch = pytest.importorskip("torch")
    before = trainer(OPTIMIZERS[name]())
    before.step(X, Y)
    ours = trainer(OPTIMIZERS[name]())
    assert ours.load_weights(nn.load(nn.save(before, tmp_path / "network.npz"))) == []
    arrays = {key: torch.tensor(array.copy(), requires_grad=True) for key, array in before.named_parameters()}
    own = ours.optimizer
    groups = [{"params": [array], "weight_decay": own.weight_decay * (".W" in key)} for key, array in arrays.items()]
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5}, "Adagrad": {"eps": 1e-10}}[name]
    theirs = getattr(torch.optim, name)(groups, lr=own.lr, **options)
    ours.freeze("0")
    for step in range(6):
        if step == 3:
            ours.unfreeze()
        for key, array in arrays.items():
            array.requires_grad_(step >= 3 or not key.startswith("0."))
        ours.step(X, Y)
        theirs.zero_grad()
        z = torch.tensor(X)
        for i in ("0", "2", "4"):
            z = z @ arrays[f"{i}.W"] + arrays[f"{i}.b"]
            z = z if i == "4" else torch.tanh(z)
        torch.nn.functional.cross_entropy(z, torch.tensor(Y)).backward()
        theirs.step()
        for key, array in ours.named_parameters():
            np.testing.assert_allclose(array, arrays[key].detach().numpy(), rtol=1e-11, atol=1e-13, err_msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_arrays_and_their_moments_stay(name):
    one = trainer(OPTIMIZERS[name]())
    one.step(X, Y)
    before, moments = one.snapshot(), {key: slot.copy() for key, slot in one.slots.items()}
    one.freeze("0", "2.b")
    for _ in range(3):
        one.step(X, Y)
    where = one.network.layout.slices
    for key, array in one.named_parameters():
        frozen = key in ("0.W", "0.b", "2.b")
        assert np.array_equal(array, before[f"param/{key}"]) == frozen, key
        for slot, values in one.slots.items():
            assert np.array_equal(values[where[key]], moments[slot][where[key]]) == frozen, (key, slot)
    one.unfreeze()
    assert not one.frozen
    one.step(X, Y)
    assert not np.array_equal(dict(one.named_parameters())["0.W"], before["param/0.W"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_of_one_changes_no_bit(name):
    plain, named = trainer(OPTIMIZERS[name]()), trainer(OPTIMIZERS[name](rates={"": 1.0}))
    for _ in range(3):
        plain.step(X, Y)
        named.step(X, Y)
    np.testing.assert_allclose(plain.flat_parameters, named.flat_parameters, rtol=1e-12, atol=1e-14)


def test_the_longest_name_counts():
    optimizer = nn.SGD(rates={"": 0.5, "1": 0.0, "1.0.W": 2.0})
    assert [optimizer.rate_of(name) for name in ("0.W", "1.b", "1.0.b", "1.0.W", "10.W")] == [0.5, 0, 0, 2, 0.5]


def test_what_is_no_rate_or_no_layer_is_refused():
    for rates in ({"0": -1}, {"0": "x"}, {0: 1.0}, [1]):
        with pytest.raises(ValueError, match="rates are factors of lr by the names of layers"):
            nn.SGD(rates=rates)
    with pytest.raises(ValueError, match=r"no parameter of network is called '9'.*parameters are 0\.b, 0\.W"):
        trainer(nn.SGD(rates={"9": 0.1}))
    one = trainer(nn.SGD())
    with pytest.raises(ValueError, match="'1'"):
        one.freeze("1")
    assert one.frozen == []


def test_a_frozen_layer_is_frozen_whatever_its_rates_and_has_them_again():
    one = trainer(nn.SGD(0.1, rates={"0.W": 0.1, "2": 0.5, "4": 0.0}))
    before = one.snapshot()
    one.freeze("0", "2")
    one.step(X, Y)
    assert all(np.array_equal(array, before[f"param/{key}"]) for key, array in one.named_parameters())
    copied = pickle.loads(pickle.dumps(one))
    for each in (one, copied):
        each.unfreeze("0.W")
        rates = {key: each.optimizer.rate_of(key) for key, _ in each.named_parameters()}
        assert rates == {"0.W": 0.1, "0.b": 0, "2.W": 0, "2.b": 0, "4.W": 0, "4.b": 0}
        each.freeze("0.W")
        each.unfreeze("0")
        assert [each.optimizer.rate_of(key) for key in ("0.W", "0.b", "2.W", "4.b")] == [0.1, 1, 0, 0]
        each.unfreeze()
        assert not each.frozen
        assert [each.optimizer.rate_of(key) for key in ("0.W", "0.b", "2.W", "4.b")] == [0.1, 1, 0.5, 1]
    all_of_it = trainer(nn.SGD(0.1, rates={"": 0.0}))
    all_of_it.unfreeze("2")
    assert [all_of_it.optimizer.rate_of(key) for key in ("0.W", "2.W")] == [0, 1]
    with pytest.raises(TypeError, match="frozen must be a tuple of names"):
        nn.SGD(frozen="0")
    with pytest.raises(ValueError, match="'9'"):
        trainer(nn.SGD(frozen=("9",)))
