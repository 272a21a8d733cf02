"""Optimizers against PyTorch in float64, against plain twins of the papers' formulas, and in parts."""

import copy
import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from nn.core.layer import Spec
from nn.core.layout import Layout
from nn.initializers import zeros
from nn.optim.clipping import BLOCK_BYTES, ClipGlobalNorm, ClipNorm, ClipValue
from nn.optim.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, RMSprop
from nn.registry import registered

LAYOUT = Layout(
    {
        "0": {"W": Spec((5, 7), zeros), "b": Spec((7,), zeros, decay=False)},
        "1": {"gamma": Spec((3,), zeros, decay=False), "W": Spec((4, 16), zeros)},
        "2": {"W": Spec((2, 2), zeros), "dead": Spec((3, 3), zeros)},
    }
)

BLOCK = BLOCK_BYTES // 8  # of float64
BIG_SPECS = {"W": Spec((3 * BLOCK + 5,), zeros), "b": Spec((3 * BLOCK + 5,), zeros, decay=False)}
BIG = Layout({"0": BIG_SPECS})  # tensors of several blocks
PICKED = np.r_[0:50, BLOCK - 3 : BLOCK + 3, 3 * BLOCK - 20 : 3 * BLOCK + 5]

OPTIMIZERS = [
    SGD(0.1),
    SGD(0.1, weight_decay=0.01),
    SGD(0.1, 0.9),
    SGD(0.1, 0.9, weight_decay=0.01),
    SGD(0.1, 0.9, nesterov=True),
    SGD(0.1, 0.9, nesterov=True, weight_decay=0.01),
    Adagrad(0.1),
    Adagrad(0.1, weight_decay=0.01),
    RMSprop(0.01),
    RMSprop(0.01, 0.9, momentum=0.8, weight_decay=0.01),
    Adam(0.01),
    Adam(0.01, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.01),
    AdamW(0.01),
    AdamW(0.01, beta1=0.8, beta2=0.99, weight_decay=0.1),
    LARS(0.1),
    LARS(0.1, 0.8, trust=0.01, weight_decay=0.01),
    LAMB(0.01),
    LAMB(0.01, beta1=0.8, beta2=0.99, weight_decay=0.1),
]
TWINS = [optimizer for optimizer in OPTIMIZERS if isinstance(optimizer, (LARS, LAMB))]


def start(seed=0, dtype=np.float64, layout=LAYOUT):
    """Parameters, and a function step -> gradients that does not depend on them."""
    w = layout.zeros(dtype)
    for name, array in layout.items(w):
        array[...] = np.random.default_rng([seed, *name.encode()]).standard_normal(array.shape)

    def gradients(step):
        g = layout.zeros(dtype)
        for name, array in layout.items(g):
            if not name.endswith("dead"):
                array[...] = np.random.default_rng([seed, step, *name.encode()]).standard_normal(array.shape)
        return g

    return w, gradients


def train(optimizer, steps=10, dtype=np.float64, layout=LAYOUT):
    w, gradients = start(dtype=dtype, layout=layout)
    slots = {name: layout.zeros(dtype) for name in optimizer.slots}
    for step in range(steps):
        optimizer.update(w, gradients(step), slots, step, layout.region())
    return w, slots


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o not in TWINS], ids=repr)
def test_ten_steps_equal_pytorch(optimizer):
    torch = pytest.importorskip("torch")
    kind, o = type(optimizer), optimizer
    options = {
        SGD: lambda: {"momentum": o.momentum, "nesterov": o.nesterov},
        Adagrad: lambda: {"eps": o.eps},
        RMSprop: lambda: {"alpha": o.alpha, "momentum": o.momentum, "eps": o.eps},
        Adam: lambda: {"betas": (o.beta1, o.beta2), "eps": o.eps},
        AdamW: lambda: {"betas": (o.beta1, o.beta2), "eps": o.eps},
    }[kind]()
    w, gradients = start()
    theirs = {name: torch.tensor(array.copy(), requires_grad=True) for name, array in LAYOUT.items(w)}
    decayed = [t for name, t in theirs.items() if LAYOUT.specs[name].decay]
    exempt = [t for name, t in theirs.items() if not LAYOUT.specs[name].decay]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    reference = getattr(torch.optim, kind.__name__)(groups, lr=o.lr, **options)
    for step in range(10):
        for name, array in LAYOUT.items(gradients(step)):
            theirs[name].grad = torch.tensor(array)
        reference.step()
    ours, _ = train(optimizer)
    for name, array in LAYOUT.items(ours):
        np.testing.assert_allclose(array, theirs[name].detach(), rtol=1e-10, atol=1e-12, err_msg=name)


def plain_lars(o, w, g, v, step, decay):
    if not decay or np.linalg.norm(w) == 0 or np.linalg.norm(g) == 0:
        rate = 1.0
    else:
        rate = o.trust * np.linalg.norm(w) / (np.linalg.norm(g) + o.weight_decay * np.linalg.norm(w))
    v = o.momentum * v + o.lr * rate * (g + (o.weight_decay * w if decay else 0))
    return w - v, v


def plain_lamb(o, w, g, moments, step, decay):
    m, v = moments
    m = o.beta1 * m + (1 - o.beta1) * g
    v = o.beta2 * v + (1 - o.beta2) * g**2
    u = (m / (1 - o.beta1 ** (step + 1))) / (np.sqrt(v / (1 - o.beta2 ** (step + 1))) + o.eps)
    ratio = 1.0
    if decay:
        u = u + o.weight_decay * w
        if np.linalg.norm(w) > 0 and np.linalg.norm(u) > 0:
            ratio = np.linalg.norm(w) / np.linalg.norm(u)
    return w - o.lr * ratio * u, (m, v)


@pytest.mark.parametrize("layout, steps", [(LAYOUT, 10), (BIG, 2)], ids=["small", "blocks"])
@pytest.mark.parametrize("optimizer", TWINS, ids=repr)
def test_layerwise_rates_equal_the_papers_formulas(optimizer, layout, steps):
    lars = isinstance(optimizer, LARS)
    w, gradients = start(layout=layout)
    twin = {name: array.copy() for name, array in layout.items(w)}
    kept = {name: (np.zeros_like(a) if lars else (np.zeros_like(a),) * 2) for name, a in twin.items()}
    for step in range(steps):
        for name, g in layout.items(gradients(step)):
            formula = plain_lars if lars else plain_lamb
            decay = layout.specs[name].decay
            twin[name], kept[name] = formula(optimizer, twin[name], g, kept[name], step, decay)
    ours, _ = train(optimizer, steps, layout=layout)
    for name, array in layout.items(ours):
        np.testing.assert_allclose(array, twin[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_layerwise_rates_start_from_zero_weights(kind):
    """A tensor of zeros has no norm to be relative to: it moves at the plain rate, instead of never."""
    layout = Layout({"0": {"W": Spec((4, 4), zeros)}})
    w, g = layout.zeros(np.float64), np.full(layout.size, 0.5)
    optimizer = kind(0.1)
    optimizer.update(w, g, {name: layout.zeros(np.float64) for name in optimizer.slots}, 0, layout.region())
    np.testing.assert_allclose(w, -0.1 * (0.5 if kind is LARS else 1.0), rtol=1e-5)


@pytest.mark.parametrize("clip", [None, ClipGlobalNorm(1.0), ClipNorm(0.5), ClipValue(0.3)], ids=repr)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_updating_in_parts_equals_updating_the_whole(optimizer, clip):
    """Cuts in the middle of tensors; norms are summed over the parts, in lockstep as ranks would."""
    optimizer = copy.copy(optimizer)
    optimizer.clip = clip
    whole, whole_slots = train(optimizer)
    w, gradients = start()
    slots = {name: LAYOUT.zeros(np.float64) for name in optimizer.slots}
    cuts = [0, 21, 22, 70, 70, 100, LAYOUT.size]
    regions = [LAYOUT.region(a, b) for a, b in pairwise(cuts)]
    for step in range(10):
        in_lockstep(optimizer, w, gradients(step), slots, step, regions)
    np.testing.assert_allclose(w, whole, rtol=1e-12, atol=1e-14)
    for name, slot in slots.items():
        np.testing.assert_allclose(slot, whole_slots[name], rtol=1e-12, atol=1e-14)
    if clip is None and not isinstance(optimizer, (LARS, LAMB)):
        np.testing.assert_array_equal(w, whole)  # elementwise: bit for bit


def in_lockstep(optimizer, w, g, slots, step, regions):
    """Update every region, each with sums over all of them: run again with more sums known, until none is missing."""
    known = []
    while True:
        copies, asked = [], []
        for region in regions:
            here = slice(region.lo, region.hi)
            part = [w[here].copy(), g[here].copy(), {name: slot[here].copy() for name, slot in slots.items()}]
            sums = iter(known)

            def sum_over_slices(array, sums=sums, asked=asked):
                total = next(sums, None)
                if total is None:
                    asked.append(array.copy())
                    raise StopIteration
                array[...] = total

            try:
                optimizer.update(*part, step, region, sum_over_slices)
            except StopIteration:
                continue
            copies.append((here, part))
        if not asked:
            break
        assert len(asked) == len(regions), "every part must ask alike"
        known.append(sum(asked))
    for here, (w_part, _, slot_parts) in copies:
        w[here] = w_part
        for name, part in slot_parts.items():
            slots[name][here] = part


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_padding_stays_zero_and_float32_follows_float64(optimizer, dtype):
    w, slots = train(optimizer, dtype=dtype)
    padding = np.ones(LAYOUT.size, bool)
    for place in LAYOUT.slices.values():
        padding[place] = False
    assert padding.any() and w.dtype == dtype
    for buffer in (w, *slots.values()):
        assert not buffer[padding].any()
    np.testing.assert_allclose(w, train(optimizer)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o not in TWINS], ids=repr)
def test_blocks_change_nothing(optimizer):
    """Entries at the borders of blocks move like the same entries in a small layout, bit for bit."""
    few = Layout({"0": {name: Spec(PICKED.shape, zeros, spec.decay) for name, spec in BIG_SPECS.items()}})
    w, gradients = start(layout=BIG)
    w_few = pick(w, few)
    slots = {name: BIG.zeros(np.float64) for name in optimizer.slots}
    slots_few = {name: few.zeros(np.float64) for name in optimizer.slots}
    for step in range(2):
        g = gradients(step)
        optimizer.update(w_few, pick(g, few), slots_few, step, few.region())
        optimizer.update(w, g, slots, step, BIG.region())
    np.testing.assert_array_equal(pick(w, few), w_few)


def pick(buffer, few):
    chosen = few.zeros(np.float64)
    for name, array in BIG.items(buffer):
        chosen[few.slices[name]] = array[PICKED]
    return chosen


def test_exempt_tensors_are_not_decayed():
    for optimizer in (SGD(0.1, weight_decay=0.5), AdamW(0.1, weight_decay=0.5), LAMB(0.1, weight_decay=0.5)):
        w, _ = start()
        before = {name: array.copy() for name, array in LAYOUT.items(w)}
        slots = {name: LAYOUT.zeros(np.float64) for name in optimizer.slots}
        optimizer.update(w, LAYOUT.zeros(np.float64), slots, 0, LAYOUT.region())
        for name, array in LAYOUT.items(w):
            assert (array == before[name]).all() == (not LAYOUT.specs[name].decay), name


def test_no_temporary_of_full_size():
    size = 1 << 20
    layout = Layout({"0": {"W": Spec((size,), zeros)}})
    w, g = layout.zeros(np.float32), layout.zeros(np.float32)
    for optimizer in OPTIMIZERS:
        slots = {name: layout.zeros(np.float32) for name in optimizer.slots}
        tracemalloc.start()
        optimizer.update(w, g, slots, 0, layout.region())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * BLOCK_BYTES, optimizer


def test_an_empty_region_is_no_special_case():
    for optimizer in OPTIMIZERS:
        nothing = np.zeros(0, np.float32)
        optimizer.update(nothing, nothing, dict.fromkeys(optimizer.slots, nothing), 0, LAYOUT.region(21, 21))


def test_wrong_hyper_parameters_are_named():
    for make, name in (
        (lambda: SGD(-1), "SGD: lr"),
        (lambda: SGD(math.nan), "SGD: lr"),
        (lambda: SGD(0.1, 1.0), "SGD: momentum"),
        (lambda: SGD(0.1, nesterov=True), "SGD: nesterov needs a momentum"),
        (lambda: Adam(0.1, beta2=1.0), "Adam: beta2"),
        (lambda: AdamW(0.1, weight_decay=-1), "AdamW: weight_decay"),
        (lambda: RMSprop(0.1, alpha=1.5), "RMSprop: alpha"),
    ):
        with pytest.raises(ValueError, match=name):
            make()
    assert sorted(registered("optimizer")) == ["adagrad", "adam", "adamw", "lamb", "lars", "rmsprop", "sgd"]


def test_rates_are_a_copy():
    rates = {"0": 0.5}
    optimizer = SGD(0.1, rates=rates)
    rates["0"] = -1
    assert optimizer.rates == {"0": 0.5}
