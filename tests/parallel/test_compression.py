"""Methods of compression, each on the gradients of one rank: what a message stands for, and what it leaves behind."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st

import nn
from nn.core.layer import Sequential
from nn.registry import registered
from parallel.command.main import main
from parallel.strategies.declaration import STATELESS
from parallel.sync.compression import parse
from parallel.sync.compression.packing import digits, pack, pack_indices, unpack, unpack_indices
from parallel.sync.compression.sparsification import SAMPLE, largest, likely

ROOT = Path(__file__).parents[2]
FED_BACK = ("onebit", "signsgd", "topk:0.05", "threshold:0.8", "dgc:0.05,momentum=0")
LAYERS = nn.Flatten(), nn.Linear(48, 50), nn.Sigmoid(), nn.Linear(50, 10), nn.Linear(10, 3)


def layout():
    return nn.Network(Sequential(*LAYERS), (4, 4, 3), np.float64).layout


def attached(text: str, dtype="f8", **given):
    return parse(text).attach(layout().region(), dtype, **given)


def gradients(seed: int = 0, dtype="f8") -> np.ndarray:
    """Random numbers of very different sizes where the layout has entries, zeros in its padding."""
    rng, buffer = np.random.default_rng(seed), layout().zeros(dtype)
    for i, (_, array) in enumerate(layout().items(buffer)):
        array[...] = rng.standard_normal(array.shape) ** 3 * 3.0**-i
    return buffer


def sent(compressor, g, step: int = 0) -> np.ndarray:
    """What the message for g stands for."""
    total = np.zeros_like(g)
    compressor.decode(compressor.encode(g.copy(), step), total)
    return total


# ------------------------------------------------------------------------------------------------------ packing


@settings(deadline=None, max_examples=60)
@given(base=st.integers(2, 65535), count=st.integers(0, 200), seed=st.integers(0, 99))
def test_codes_are_what_they_were(base, count, seed):
    codes = np.random.default_rng(seed).integers(0, base, count).astype(np.uint16)
    packed = pack(codes, base)
    assert (unpack(packed, base, count) == codes).all()
    assert len(packed) == -(-count // digits(base)) and base ** digits(base) <= 2**32 < base ** (digits(base) + 1)


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 300_000), share=st.sampled_from((0, 1e-4, 0.01, 0.06, 0.07, 0.5, 1)), seed=st.integers(0, 9))
def test_indices_are_what_they_were(size, share, seed):
    indices = np.sort(np.random.default_rng(seed).permutation(size)[: math.ceil(share * size)])
    fields = [np.ascontiguousarray(field).view(np.uint8) for field in pack_indices(indices, size)]
    fields = np.concatenate([np.zeros(0, np.uint8), *fields])
    assert (np.arange(size)[unpack_indices(fields, len(indices), size)] == indices).all()
    blocks = -(-size // 65536)
    assert len(fields) == (
        0 if share == 1 or len(indices) == size else min(-(-size // 8), 2 * len(indices) + 4 * blocks)
    )


@pytest.mark.parametrize("kind", ["random", "sorted", "periodic", "mostly zero", "equal", "not a number"])
def test_of_many_a_sample_tells_where_the_largest_are(kind):
    n = 9 * SAMPLE + 5
    rng, stride = np.random.default_rng(3), n // SAMPLE | 1
    p = rng.standard_normal(n)
    if kind == "sorted":
        p.sort()
    elif kind == "periodic":  # what the sample sees is nothing like the others
        p[::stride] *= 1e-3
    elif kind == "mostly zero":
        p[rng.random(n) < 0.999] = 0
    elif kind == "equal":
        p[:] = 1
    elif kind == "not a number":
        p[[7, n - 1]] = np.nan
    for count in (1, 37, n // 100, n // 4, n - 1):
        chosen, room = largest(p, count), np.empty(n)
        assert len(chosen) == count and (np.diff(chosen) > 0).all()
        assert (largest(p, count, room) == chosen).all() and np.array_equal(room, np.abs(p), equal_nan=True)
        key = np.where(np.isnan(p), np.inf, np.abs(p))
        want = np.sort(np.argsort(-key, kind="stable")[:count])  # of equal ones the first
        assert (chosen == want).all(), (kind, count)
    if kind == "random":
        assert len(likely(np.abs(p), n // 100)) < n // 30, "few others"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(0, 31))
def test_the_largest_are_as_many_as_asked_for(values, count):
    p = np.array(values, float)
    chosen = largest(p, count) if count else np.arange(0)
    assert len(chosen) == min(count, len(p)) and (np.diff(chosen) > 0).all()
    rest = np.delete(np.abs(p), chosen)
    assert not len(rest) or not len(chosen) or rest.max() <= np.abs(p[chosen]).min()


# ------------------------------------------------------------------------------------- what all have in common


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("text", FED_BACK)
def test_nothing_is_lost(text, dtype):
    """The sum of all that was sent and the memory are the sum of the gradients; without the memory they are not."""
    compressor, forgetful = attached(text, dtype), attached(text, dtype)
    names = {"dgc": "v"}.get(text[:3], "error")
    all_sent, all_gradients, remembered_less = (layout().zeros("f8") for _ in range(3))
    for step in range(6):
        g = gradients(step, dtype)
        all_gradients += g
        all_sent += sent(compressor, g, step)
        remembered_less += sent(forgetful, g, step)
        for memory in forgetful.memory.values():
            memory[:] = 0
    scale, eps = np.abs(all_gradients).max(), np.finfo(dtype).eps
    assert np.abs(all_sent + compressor.memory[names] - all_gradients).max() < 20 * eps * scale
    assert np.abs(all_sent - all_gradients).max() > 1e-3 * scale, "something is in the memory"
    assert np.abs(remembered_less - all_gradients).max() > 1e-3 * scale, "a control: without it the sum is another"


@pytest.mark.parametrize("text", ["none", "topk:1", "threshold:0", "dgc:1,momentum=0", "dgc:1"])
def test_all_that_there_is_is_the_dense_gradient(text):
    compressor = attached(text)
    for step in range(3):
        assert (sent(compressor, gradients(step), step) == gradients(step)).all()
    assert not any(memory.any() for memory in compressor.memory.values())


@pytest.mark.parametrize("text", [name for name in registered("compressor") if name != "powersgd"])
def test_a_zero_gradient_and_the_padding_stay_zero(text):
    compressor = attached(text)
    assert not sent(compressor, layout().zeros("f8")).any()
    padding = np.ones(layout().size, bool)
    for place in layout().slices.values():
        padding[place] = False
    assert padding.any()
    assert not sent(compressor, gradients(), 1)[padding].any()


@pytest.mark.parametrize("text", STATELESS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_was_not_finite_leaves_nothing_behind(text, bad):
    """In shards gradients are sent before all ranks know that the step is refused, or skipped."""
    tried, g = attached(text), gradients()
    with np.errstate(all="ignore"):
        sent(tried, np.full_like(g, bad))
    np.testing.assert_array_equal(sent(tried, g, step=1), sent(attached(text), g, step=1))


@pytest.mark.parametrize("text", ["qsgd:4", "terngrad"])
def test_random_numbers_depend_on_seed_step_and_rank_alone(text):
    def message(seed=1, step=2, rank=0):
        compressor = attached(text, seed=seed, shard=(rank, 2))
        compressor.encode(gradients(), 0)  # what was drawn before does not count
        return compressor.encode(gradients(), step).tobytes()

    assert message() == message()
    assert len({message(), message(seed=2), message(step=3), message(rank=1)}) == 4


@pytest.mark.parametrize(
    "text, expected",
    [
        ("fp16", lambda n, tensors: 8 + 2 * n),
        ("qsgd:4", lambda n, tensors: 4 * -(-n // 512) + 4 * -(-n // 10)),
        ("qsgd:7", lambda n, tensors: 4 * -(-n // 512) + 4 * -(-n // 8)),
        ("terngrad", lambda n, tensors: 4 * tensors + 4 * -(-n // 20)),
        ("onebit", lambda n, tensors: 8 * tensors + n // 8),
        ("signsgd", lambda n, tensors: 4 * tensors + n // 8),
        ("topk:0.01", lambda n, tensors: 8 + 4 + 6 * math.ceil(n / 100)),
        ("topk:0.25", lambda n, tensors: 8 + 4 * n // 4 + n // 8),
        ("topk:1", lambda n, tensors: 8 + 4 * n),
    ],
)
def test_messages_are_as_short_as_they_claim(text, expected):
    length = len(attached(text, "f4").encode(gradients(dtype="f4"), 0))
    bytes_ = expected(layout().size, len(layout().slices))
    assert length == -(-bytes_ // 8) * 8


def test_a_shard_is_compressed_alone():
    """As for a parameter server: the layout is cut anywhere, also within a tensor."""
    size, g = layout().size, gradients()
    for text in ("threshold:0.5", "qsgd:8", "onebit", "dgc:0.01", "fp16"):
        total = np.zeros(size)
        for lo, hi in ((0, 800), (800, size)):
            worker, server = (parse(text).attach(layout().region(lo, hi), "f8") for _ in range(2))
            server.decode(worker.encode(g[lo:hi].copy(), 0), total[lo:hi])
        if text == "threshold:0.5":
            assert (total == np.where(np.abs(g) >= 0.5, g, 0)).all()
        assert total.any() and np.dot(total, g) > 0


# --------------------------------------------------------------------------------------------------- each alone


def test_fp16_rounds_to_eleven_bits_whatever_the_scale():
    for scale in (1e-30, 1.0, 1e30):
        g = gradients() * scale
        np.testing.assert_allclose(sent(attached("fp16"), g), g, rtol=2**-11, atol=np.abs(g).max() * 2**-24)
    assert not sent(attached("fp16"), gradients() * 1e-306).any(), "below the smallest number that can be scaled up"
    assert not math.isfinite(np.abs(sent(attached("fp16"), np.full(layout().size, np.nan))).max())


@pytest.mark.parametrize("levels", [1, 4, 20])
def test_qsgd_is_unbiased_and_within_its_variance(levels):
    compressor, g, draws = attached(f"qsgd:{levels}"), gradients(), 400
    samples = np.array([sent(compressor, g, step) for step in range(draws)])
    norms = np.concatenate([np.full(len(part), np.linalg.norm(part)) for part in np.split(g, range(512, len(g), 512))])
    spacing = norms / levels
    assert np.abs(samples - g).max() <= spacing.max() * (1 + 1e-6)
    assert (np.abs(samples.mean(0) - g) <= 6 * 0.5 * spacing / math.sqrt(draws) + 1e-12).all(), "unbiased"
    for lo in range(0, len(g), 512):
        part = slice(lo, min(lo + 512, len(g)))
        variance, n = samples[:, part].var(0).sum(), 512
        assert variance <= min(n / levels**2, math.sqrt(n) / levels) * norms[lo] ** 2 * 1.05
        exact = (spacing[lo] ** 2 * (lambda f: f * (1 - f))(np.abs(g[part]) / spacing[lo] % 1)).sum()
        assert variance == pytest.approx(exact, rel=0.1), "that of rounding up with the probability of the fraction"


def test_terngrad_draws_ones_as_often_as_g_is_large():
    compressor, g, draws = attached("terngrad"), gradients(), 600
    samples = np.array([sent(compressor, g, step) for step in range(draws)])
    for place in layout().slices.values():
        x = g[place]
        clipped = np.clip(x, *(2.5 * math.sqrt((x**2).mean()) * np.array([-1, 1])))
        s = np.abs(clipped).max()
        np.testing.assert_allclose(np.unique(np.abs(samples[:, place])), [0, s], rtol=1e-6)
        assert (np.sign(samples[:, place]) * np.sign(x) >= 0).all()
        often, p = (samples[:, place] != 0).mean(0), np.abs(clipped) / s
        assert (np.abs(often - p) <= 6 * np.sqrt(p * (1 - p) / draws) + 6 / draws).all()
    assert any(np.abs(g[place]).max() > 2.5 * g[place].std() for place in layout().slices.values()), "some were clipped"


def test_terngrad_takes_the_largest_of_all_ranks():
    def maximum(scales):
        scales[:] = 7

    compressor, total = attached("terngrad"), layout().zeros("f8")
    compressor.decode(compressor.encode(gradients(), 0, maximum), total)
    assert set(np.abs(total)) == {0, 7}


def test_onebit_sends_the_two_means():
    g = gradients()
    got = sent(attached("onebit"), g)
    for place in layout().slices.values():
        x = g[place]
        upper, lower = (part.mean() if len(part) else 0 for part in (x[x >= 0], x[x < 0]))
        expected = np.where(x >= 0, upper, lower)
        np.testing.assert_allclose(got[place], expected, rtol=1e-6)


def test_signsgd_sends_the_mean_size():
    g, compressor = gradients(), attached("signsgd")
    first = sent(compressor, g)
    for place in layout().slices.values():
        np.testing.assert_allclose(first[place], np.abs(g[place]).mean() * np.sign(g[place]), rtol=1e-6)
    p, second = 2 * g - first, sent(compressor, g, 1)
    for place in layout().slices.values():
        np.testing.assert_allclose(second[place], np.abs(p[place]).mean() * np.sign(p[place]), rtol=1e-6)


def test_topk_takes_the_largest_of_all_tensors():
    g = gradients()
    got, k = sent(attached("topk:0.01"), g), math.ceil(0.01 * len(g))
    assert np.count_nonzero(got) == k
    assert set(np.flatnonzero(got)) == set(np.argsort(-np.abs(g))[:k])


def reference_dgc(steps: int, ratio: float, momentum: float, masking: bool) -> list[np.ndarray]:
    """The algorithm of the paper, a tensor and an element at a time."""
    u, v, out = layout().zeros("f8"), layout().zeros("f8"), []
    for step in range(steps):
        total = layout().zeros("f8")
        u = momentum * u + gradients(step)
        v = v + u
        for place in layout().slices.values():
            order = sorted(range(place.start, place.stop), key=lambda i: -abs(v[i]))
            for i in order[: math.ceil(ratio * len(order))]:
                total[i], v[i] = v[i], 0.0
                u[i] = 0.0 if masking else u[i]
        out.append(total)
    return out


@pytest.mark.parametrize("masking", [True, False])
def test_dgc_corrects_momentum_and_masks_it(masking):
    compressor = attached(f"dgc:0.02,momentum=0.7,masking={int(masking)}")
    got = [sent(compressor, gradients(step), step) for step in range(4)]
    for mine, expected in zip(got, reference_dgc(4, 0.02, 0.7, masking), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=0)
    others = reference_dgc(4, 0.02, 0.7, not masking)
    assert not all(np.allclose(mine, other) for mine, other in zip(got, others, strict=True))


def test_dgc_without_masking_that_sends_all_is_momentum():
    compressor, velocity = attached("dgc:1,momentum=0.9,masking=0"), 0
    for step in range(4):
        velocity = 0.9 * velocity + gradients(step)
        np.testing.assert_allclose(sent(compressor, gradients(step), step), velocity, rtol=1e-13)


def test_dgc_warms_up():
    compressor = parse("dgc:0.001,epoch=10")
    shares = [compressor.ratio_at(10 * epoch + 9) for epoch in range(6)]
    np.testing.assert_allclose(1 - np.array(shares), [0.75, 0.9375, 0.984375, 0.99609375, 0.999, 0.999])
    assert compressor.ratio_at(10) == 0.25**2 and compressor.ratio_at(9) == 0.25
    assert parse("dgc:0.1,epoch=10").ratio_at(15) == 0.1, "never less than asked for"
    assert parse("dgc:0.001").ratio_at(0) == 0.001


def test_dgc_clips_what_this_rank_adds():
    g = gradients()
    got = sent(attached("dgc:1,momentum=0,clip=0.5", shard=(1, 4)), g)
    np.testing.assert_allclose(got, g / np.linalg.norm(g) * 0.5 / math.sqrt(4), rtol=1e-12)
    assert (sent(attached("dgc:1,momentum=0,clip=1e9"), g) == g).all()


def test_dgc_wants_no_second_momentum():
    for optimizer in (nn.SGD(0.1, 0.9), nn.Adam(0.1), nn.LARS(0.1)):
        with pytest.raises(ValueError, match=r"dgc has the momentum itself \(0.9\).*use SGD"):
            parse("dgc").check(optimizer)
    for optimizer in (nn.SGD(0.1), nn.LARS(0.1, momentum=0.0), nn.Adagrad(0.1), nn.RMSprop(0.1)):
        parse("dgc").check(optimizer)
    parse("topk").check(nn.Adam(0.1))


def test_powersgd_has_no_messages_of_one_rank():
    compressor = attached("powersgd:2")
    with pytest.raises(TypeError, match="sums over all ranks; use --strategy ddp"):
        compressor.encode(gradients(), 0)
    with pytest.raises(TypeError, match="PowerSGD"):
        compressor.decode(np.zeros(8, np.uint8), gradients())


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("zip", "unknown compressor 'zip': known are dgc, fp16, none"),
        ("topk:0", "the ratio must be above 0 and at most 1, given 0.0"),
        ("topk:1.5", "given 1.5"),
        ("topk:many", "ratio must be a number, given 'many'"),
        ("topk:0.1,k=3", "what is 'k=3'. topk takes ratio=NUMBER"),
        ("onebit:3", "onebit takes nothing"),
        ("qsgd:0", "levels must be 1 to 32767, given 0"),
        ("qsgd:2.5", "levels must be a whole number, given '2.5'"),
        ("threshold:-1", "must not be negative"),
        ("dgc:0.01,momentum=1", r"momentum must be in \[0, 1\), given 1.0"),
        ("dgc:0.01,clip=-1", "clip and epoch must not be negative"),
        ("powersgd:0", "the rank must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(text)


def test_what_is_asked_for_is_what_there_is():
    assert repr(parse("dgc:0.01,clip=5")) == "DGC(ratio=0.01, momentum=0.9, clip=5.0, epoch=0, masking=True)"
    assert [repr(parse(name)) for name in ("fp16", "powersgd")] == ["Half()", "PowerSGD(rank=4)"]


@pytest.mark.exhaustive
def test_from_the_command_line(tmp_path, capsys):
    """Bytes are in the result and told; a resumed run has the bits of one that never stopped, memories included."""

    def train(*given):
        small = ["--ranks", 2, "--model", "mlp:64,16,10", "--limit", 200, "--threads", 1, "--no-pictures"]
        command = [sys.executable, "scripts/train.py", *map(str, [*small, *given])]
        done = subprocess.run(
            command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def result(name):
        return json.loads((tmp_path / name / "result.json").read_text())

    said = train("--compress", "dgc:0.01", "--epochs", 2, "--memory", "--inspect", "--out", tmp_path / "straight")
    assert "memory of each rank" in said and (tmp_path / "straight" / "inspection").exists()
    straight = result("straight")
    assert 0 < straight["bytes_sent"] < 0.4 * straight["bytes_dense"]
    assert "DGC(ratio=0.01" in said
    assert f"{straight['bytes_sent']:,.0f} bytes on the wire a rank and step, counted" in said
    train("--compress", "dgc:0.01", "--epochs", 1, "--out", tmp_path / "resumed")
    train("--resume", tmp_path / "resumed", "--epochs", 2)
    assert result("resumed")["parameters_sha256"] == straight["parameters_sha256"]
    refused = ["--ranks", "2", "--compress", "topk", "--reproducible", "8"]
    assert main(refused) == 2 and "--reproducible cannot be combined with --compress" in capsys.readouterr().err
