"""Mixed precision: what is kept is float16, what is computed is not; a step that overflows is none."""

import numpy as np
import pytest

import nn
from nn.core.memory_pool import MemoryPool
from nn.core.mixed_precision import BLOCK, MixedPrecision, nbytes
from nn.training import loss_scale
from nn.training.loss_scale import LossScale

SEED = 3


@pytest.fixture
def half():
    return MixedPrecision(MemoryPool())


def small(dtype=np.float32, mixed=True):
    layers = nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.BatchNorm1d(24), nn.Linear(24, 10)
    return nn.Network(nn.Sequential(*layers), (8, 8, 1), dtype, mixed=mixed)


def trainer(network=None, optimizer=None):
    return nn.Trainer(network or small(), nn.CrossEntropyLoss(), optimizer or nn.Adam(0.01), SEED)


def batch(number=0, samples=16):
    rng = np.random.default_rng(number)
    return rng.random((samples, 8, 8, 1)).astype(np.float32), rng.integers(0, 10, samples)


def test_every_float16_comes_back_and_is_reached(half):
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].reshape(-1, 2)
    there = half.unpack(every, np.float32)
    np.testing.assert_array_equal(there.view(np.uint32), every.astype(np.float32).view(np.uint32))
    np.testing.assert_array_equal(half.pack(there).view(np.uint16), every.view(np.uint16))
    assert not half.overflowed


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-8, 1e4])
def test_rounding_is_to_nearest_whatever_the_size(half, size):
    x = np.random.default_rng(1).standard_normal(3 * BLOCK // 2).astype(np.float32) * size
    x = x.clip(-65504, 65504).reshape(-1, 2)
    error, least = (np.abs(half.astype(np.float64) - x) for half in (half.pack(x), x.astype(np.float16)))
    assert (error <= 1.001 * least).all()  # below 6e-5 what is nearly a tie is rounded to one first
    assert not half.overflowed
    transposed = half.pack(x.T)
    np.testing.assert_array_equal(transposed, half.pack(np.ascontiguousarray(x.T)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_too_large_is_noted(half, dtype):
    x = np.zeros((3, BLOCK), dtype)
    for value, too_large in ((65504, False), (-65504, False), (-70000, True), (1e30, True), (np.inf, True)):
        half.overflowed = False
        x[2, -1] = value
        half.pack(x)
        assert half.overflowed is too_large, value
        half.overflowed = False
        half.scale = 0.5
        half.rounded(x, small().context())
        assert half.overflowed == (too_large and value != -70000), value
    x[2, -1], half.overflowed, half.scale = np.nan, False, 1.0
    half.pack(x)
    assert half.overflowed
    half.overflowed = False
    half.rounded(x, small().context())
    assert half.overflowed


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_a_gradient_is_rounded_as_it_would_be_packed(half, dtype, scale):
    gy = (np.random.default_rng(2).standard_normal((50, 1000)) * 1e-4 / scale).astype(dtype)
    half.scale = scale
    want = half.unpack(half.pack(gy, scale), dtype, scale)
    np.testing.assert_array_equal(half.rounded(gy, small().context()), want)
    assert (want != gy).any()


@pytest.mark.parametrize(
    ("model", "in_shape"), [("cnn", (28, 28, 1)), ("resnet20", (16, 16, 3)), ("transformer:32,2,2", (16,))]
)
def test_what_is_kept_takes_half_the_memory(model, in_shape):
    """Counted: floats that forward saves for backward, but for statistics; nothing that layers share is there twice."""
    sizes = {}
    for name in "float32", "mixed":
        network = nn.models.build(model, in_shape, 10)
        network.mixed = name == "mixed"
        w, ctx = network.layout.zeros(np.float32), network.context()
        network.layout.initialize(w, SEED)
        ids = model.startswith("t")
        x = np.zeros((8, *in_shape), int) if ids else np.ones((8, *in_shape), np.float32)
        _, saved = network.forward(network.layout.views(w), x, ctx)
        sizes[name] = nbytes(saved, floats=True) - (0 if ids else x.nbytes)
    assert 0.5 <= sizes["mixed"] / sizes["float32"] < 0.52, sizes


def test_a_view_in_another_shape_is_the_same_float16_and_a_transposed_one_is_not():
    mixed, x = MixedPrecision(MemoryPool()), np.random.default_rng(0).standard_normal((4, 6), np.float32)
    mixed.begin(None, training=True)
    kept, flat, turned = mixed.keep(x, x + 1, x), x.reshape(2, 12), x.T
    for y in flat, turned:
        mixed.keep(None, y, x)
    flat, turned = (mixed.keep(y, y, x) for y in (flat, turned))
    assert np.shares_memory(flat, kept) and np.array_equal(flat, kept.reshape(2, 12))
    assert np.array_equal(turned, kept.T)


def test_the_pool_of_a_deep_network_needs_less():
    """The memory of whole steps, workspaces and gradients included."""
    used = {}
    for on in False, True:
        layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.Tanh())]
        one = trainer(nn.Network(nn.Sequential(*layers), (64,), mixed=on))
        for _ in range(2):
            one.step(np.random.default_rng(0).random((1024, 64), np.float32), np.arange(1024) % 10)
        used[on] = one.ctx.network_context.pool.nbytes
    assert used[True] < 0.75 * used[False], used


def test_the_loss_scale_is_that_of_the_paper():
    """Bit for bit: gz times the scale, float16 as it is, and gradients divided by the scale."""
    x, y = batch()
    network, scale = small(), 2.0**14
    w, ctx = network.layout.zeros(np.float32), network.context()
    network.layout.initialize(w, SEED)
    p = network.layout.views(w)
    found = []
    for outside, inside in ((1.0, scale), (scale, 1.0)):
        ctx.network_context.mixed_precision.scale = inside
        g = network.layout.zeros(np.float32)
        z, saved = network.forward(p, x, ctx)
        gz = nn.CrossEntropyLoss()(z, y, len(x), ctx)[1] * np.float32(outside)
        network.backward(p, network.layout.views(g), gz, saved, ctx)
        found.append(g / np.float32(outside))
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 0


def test_small_gradients_need_the_scale():
    """Control: what is below 3e-8 is nothing in float16, and something with the scale."""
    x, y = batch()
    for scale, there in ((1.0, False), (2.0**16, True)):
        one = trainer()
        one.mixed_precision.scale = scale
        one.compute_gradients(x, y, 1 << 26)  # as if the batch were so large
        assert bool(np.abs(one.gradients).max()) is there


def test_steps_that_overflow_are_skipped_and_counted_and_make_no_difference():
    """The scale comes down until it fits; then all goes on as if it had always been so small."""
    x, y = batch()
    high, low = trainer(), trainer()
    before, skips = high.flat_parameters.copy(), 0
    high.loss_scale.array[0] = 2.0**23
    while True:
        buffers = high.buffers.copy()
        high.step(x, y)
        if high.loss_scale.skipped == skips:
            break
        skips += 1
        np.testing.assert_array_equal(high.flat_parameters, before)
        np.testing.assert_array_equal(high.buffers, buffers)
        assert high.steps == skips and high.updates == 0
    assert skips >= 3 and high.loss_scale.scale == 2.0 ** (23 - skips)
    low.loss_scale.array[0] = high.loss_scale.scale
    low.step(x, y)
    np.testing.assert_array_equal(high.flat_parameters, low.flat_parameters)
    assert high.loss_scale_record() == {"loss_scale": low.loss_scale.scale, "skipped_steps": skips}


def test_the_scale_grows_again_and_has_its_ends():
    scale = LossScale(growth=2)
    scale.count_overflow(0)
    assert scale.scale == loss_scale.INITIAL / 2 and scale.skipped == 1
    for expected in (0.5, 1, 1, 2):
        scale.count_update()
        assert scale.scale == expected * loss_scale.INITIAL
    scale.array[:2] = loss_scale.LARGEST, 1
    scale.count_update()
    assert scale.scale == loss_scale.LARGEST


def test_an_activation_too_large_for_any_scale_ends_in_an_error():
    one, (x, y) = trainer(), batch()
    one.loss_scale.array[0] = 2.0
    before = one.flat_parameters.copy()
    one.step(x * 1e7, y)
    with pytest.raises(FloatingPointError, match="step 1: an activation, or the gradient of one, is beyond float16"):
        one.step(x * 1e7, y)
    np.testing.assert_array_equal(one.flat_parameters, before)


def test_a_run_that_is_resumed_has_its_scale():
    first = trainer()
    first.loss_scale.growth = 3
    first.loss_scale.array[0] = 2.0**23
    for i in range(5):
        first.step(*batch(i))
    second = trainer()
    second.loss_scale.growth = 3
    second.load_state_dict({name: array.copy() for name, array in first.state_items()})
    assert second.loss_scale.skipped == first.loss_scale.skipped > 0
    for one in (first, second):
        for i in range(5, 15):
            one.step(*batch(i))
    np.testing.assert_array_equal(first.flat_parameters, second.flat_parameters)
    np.testing.assert_array_equal(first.loss_scale.array, second.loss_scale.array)
    assert first.loss_scale.array[0] != 2.0**23
    with pytest.raises(ValueError, match="lacks loss_scale"):
        trainer().load_state_dict(trainer(small(mixed=False)).state_dict())


def test_a_single_layer_and_containers_keep_float16_too():
    """Kept so in every place: backward's gradients are those of float32 up to float16's rounding, and not the same."""
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    branches = nn.Parallel(nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.Tanh()))
    roots = nn.Linear(6, 6), nn.Residual(inner), branches, nn.Recompute(inner), nn.Recompute(nn.Linear(6, 6))
    x = np.random.default_rng(4).standard_normal((5, 6)).astype(np.float32)
    for root in roots:
        root = nn.Sequential(nn.Linear(6, 6), root) if root is not roots[0] else root
        gradients, sizes = [], []
        for on in False, True:
            network = nn.Network(root, (6,), mixed=on)
            w, g, ctx = network.layout.zeros(np.float32), network.layout.zeros(np.float32), network.context()
            network.layout.initialize(w, SEED)
            y, saved = network.forward(network.layout.views(w), x, ctx)
            sizes.append(nbytes(saved, floats=True))
            network.backward(network.layout.views(w), network.layout.views(g), np.cos(y), saved, ctx)
            gradients.append(g)
        np.testing.assert_allclose(gradients[1], gradients[0], rtol=0, atol=2e-3 * np.abs(gradients[0]).max())
        assert (gradients[0] != gradients[1]).any()
        assert root is roots[0] or sizes[1] < sizes[0]  # that one saves what it is given


def test_evaluation_keeps_what_it_is_given():
    network = small()
    ctx = network.context()
    ctx.micro_batch.training = False
    _, saved = network.forward(network.layout.views(network.layout.zeros(np.float32)), batch()[0], ctx)
    assert all(array.dtype != np.float16 for array in saved if isinstance(array, np.ndarray))


@pytest.mark.parametrize("model", ["mlp:64,48,10", "transformer:16,2,1"])
def test_training_ends_where_float32_does(model):
    """Within 0.02 nats; the figures of README are those of Fashion-MNIST and Shakespeare."""
    losses, train = [], nn.data.load("digits", limit=320).train
    if model.startswith("t"):  # every id is the sum of the two before
        ids = np.random.default_rng(0).integers(0, 8, (320, 17))
        for t in range(2, 17):
            ids[:, t] = (ids[:, t - 1] + ids[:, t - 2]) % 8
        train = nn.data.Dataset(ids[:, :-1], ids[:, 1:], classes=8)
    for on in False, True:
        network = nn.models.build(model, train.x.shape[1:], train.classes)
        network.mixed = on
        one = nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(0.003), SEED)
        training = nn.fit(one, nn.Loader(train, batch=32, shard=(0, 1)), epochs=4)
        losses.append(training.history[-1]["loss"])
    assert losses[1] != losses[0] and abs(losses[1] - losses[0]) < 0.02, losses
    assert losses[0] < 0.8 * training.history[0]["loss"]


def test_what_layers_with_parameters_take_is_float16():
    """Forward and backward, and between the children of the root; but for the batch and the outputs."""
    taken, gotten = {}, {}

    class Spy(nn.Linear):
        def forward(self, p, x, ctx):
            taken[ctx.path] = x.copy()
            return super().forward(p, x, ctx)

        def backward(self, p, gy, saved, ctx):
            gotten[ctx.path] = gy.copy()
            return super().backward(p, gy, saved, ctx)

    inner = nn.Residual(nn.Sequential(Spy(12, 12), nn.Sigmoid(), Spy(12, 12)))
    network = nn.Network(nn.Sequential(Spy(6, 12), inner, nn.Tanh(), Spy(12, 4)), (6,), mixed=True)
    one = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    one.loss_scale.array[0] = 2.0**10
    x = np.random.default_rng(2).standard_normal((7, 6)).astype(np.float32)
    outputs = []
    one.ctx.network_context.after_forward = lambda path, layer, y: outputs.append(y.copy())
    one.step(x, np.arange(7) % 4)
    exact = lambda array, scale=1.0: np.array_equal(array, (array * scale).astype(np.float16).astype("f4") / scale)
    np.testing.assert_array_equal(taken["0"], x)
    assert not exact(x) and not exact(outputs[-1]), "the batch and the outputs are as they are"
    assert taken.keys() == gotten.keys() == {"0", "1.body.0", "1.body.2", "3"}
    for path in taken:
        assert path == "0" or exact(taken[path]), path
        assert exact(gotten[path], 2.0**10), path


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_too_large_becomes_the_largest_and_what_is_not_finite_stays_so(half, dtype):
    """So a step that will be skipped has a loss, and one that is lost is found where it begins."""
    x = np.array([[1.0, 7e4, -1e30, np.inf, -np.inf, np.nan, -2.5]], dtype)
    want = np.array([[1.0, 65504, -65504, np.inf, -np.inf, np.nan, -2.5]], dtype)
    np.testing.assert_array_equal(half.unpack(half.pack(x), dtype), want)
    assert half.overflowed
    half.scale = 4.0
    np.testing.assert_array_equal(
        half.rounded(x, small().context()), np.where(np.isfinite(x), want.clip(-16376, 16376), x).astype(dtype)
    )


def test_one_channel_is_kept_as_many_are():
    """A rank may have one of a layer's: what it keeps of it is no statistic."""
    for channels in 1, 2:
        network = nn.Network(nn.Sequential(nn.Conv2d(1, channels, 3), nn.Tanh()), (5, 5, 1), mixed=True)
        p = network.layout.views(network.layout.zeros(np.float32))
        _, saved = network.forward(p, np.zeros((2, 5, 5, 1), np.float32), network.context())
        assert saved[1].dtype == np.float16
