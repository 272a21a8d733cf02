"""The checks and pictures of 13b_attention.py."""

import matplotlib.pyplot as plt
import numpy as np

import checks
from checks import BLUE, GREY, ORANGE, RED
from exercises.training import derivative


def reference(q, k, v, causal=False):
    """Attention, one query after the other."""
    y, weights = np.zeros((len(q), v.shape[1])), np.zeros((len(q), len(k)))
    for t in range(len(q)):
        seen = t + 1 if causal else len(k)
        e = np.array([np.exp(q[t] @ k[s] / q.shape[1] ** 0.5) for s in range(seen)])
        weights[t, :seen] = e / e.sum()
        y[t] = weights[t, :seen] @ v[:seen]
    return y, weights


def example(seed=0, length=5, features=4):
    return np.random.default_rng(seed).standard_normal((3, length, features))


@checks.explain_errors
def check_attention(attention):
    q, k, v = example()
    k, v = np.concatenate([k, k[:2] + 1]), np.concatenate([v, v[:2] - 1])  # more keys than queries
    y, weights = checks.arrays([(len(q), v.shape[1]), (len(q), len(k))], attention, q, k, v)
    want_y, want = reference(q, k, v)
    checks.expect(
        weights.shape == (5, 7), f"5 queries and 7 keys have weights of shape (5, 7); yours: {weights.shape}."
    )
    checks.expect(
        np.allclose(weights.sum(axis=1), 1),
        f"the weights of a query sum to 1; yours sum to {weights.sum(axis=1).round(2).tolist()}: the softmax of a row.",
    )
    e = np.exp(q @ k.T)
    checks.expect(
        not np.allclose(weights, e / e.sum(axis=1, keepdims=True)),
        "the scores are not divided by the root of the number of features: with many of them the softmax would "
        "be nearly 0 or 1.",
    )
    checks.same(weights, want, "the weights of [query, key]")
    checks.same(y, want_y, "y")
    checks.right("each position gets a mean of all values, weighted by what it looks for")


@checks.explain_errors
def check_causal(attention):
    q, k, v = example(1)
    y, weights = checks.arrays([(len(q), v.shape[1]), (len(q), len(k))], attention, q, k, v)
    want_y, want = reference(q, k, v, causal=True)
    checks.expect(
        np.isfinite(weights).all(), "some weights are not finite: a position that sees nothing, not even itself?"
    )
    future = np.triu(np.abs(weights), 1).max()
    checks.expect(future < 1e-12, f"a position looks at a later one, with the weight {future:.2f}.")
    checks.expect(
        np.allclose(weights.sum(axis=1), 1),
        "what a position may see must have weights that sum to 1: set the scores of the others to minus "
        "infinity, before the "
        "softmax, not their weights to 0 behind it.",
    )
    checks.same(weights, want, "the weights of [query, key]")
    checks.same(y, want_y, "y")
    moved = v.copy()
    moved[3:] += 5
    checks.same(checks.several(2, attention, q, k, moved)[0][:3], y[:3], "y of the first three, if later values change")
    checks.right("what comes later changes nothing before it: so all positions are trained at once")


@checks.explain_errors
def check_softmax_backward(softmax_backward):
    rng = np.random.default_rng(2)
    s, gp = rng.standard_normal((2, 3, 5))

    def cost(s):
        e = np.exp(s)
        return np.sum(gp * e / e.sum(axis=1, keepdims=True))

    p = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    got = checks.numbers(softmax_backward, p, gp, shape=s.shape)
    checks.expect(
        np.allclose(got.sum(axis=1), 0),
        f"adding a number to all scores of a row changes nothing, so the gradients of a row sum to 0; yours sum to "
        f"{got.sum(axis=1).round(3).tolist()}.",
    )
    checks.same(got, derivative(cost, s), "the gradient of the scores", tolerance=1e-6)
    checks.right("as by differences, and every row sums to 0")


@checks.explain_errors
def check_backward(attention_backward):
    q, k, v = example(3)
    gy = np.random.default_rng(4).standard_normal(v.shape)
    _, p = reference(q, k, v)
    grads = checks.several(3, attention_backward, q, k, v, p, gy)
    costs = (
        lambda a: np.sum(gy * reference(a, k, v)[0]),
        lambda a: np.sum(gy * reference(q, a, v)[0]),
        lambda a: np.sum(gy * reference(q, k, a)[0]),
    )
    for name, got, cost, x in zip("vqk", (grads[2], *grads[:2]), (costs[2], *costs[:2]), (v, q, k), strict=True):
        want = derivative(cost, x)
        checks.expect(
            np.shape(got) == want.shape, f"g{name} has the shape {np.shape(got)}, and {want.shape} is expected."
        )
        checks.expect(
            name == "v" or not np.allclose(got, 2 * want, atol=1e-6),
            f"g{name} is 2 times too long, the root of the 4 features: the scores were divided by it, and so "
            "is their gradient.",
        )
        checks.same(got, want, f"g{name}", tolerance=1e-6)
    checks.right("gq, gk and gv as by differences")


@checks.explain_errors
def check_heads(split, merge):
    x = np.arange(3 * 8.0).reshape(3, 8)
    got = checks.numbers(split, x.copy(), 2, shape=(2, 3, 4))
    want = np.stack([x[:, :4], x[:, 4:]])
    checks.same(got, want, "the heads of [head, position, feature]: head 0 has the first columns of every position")
    back = checks.numbers(merge, want.copy(), shape=(3, 8))
    checks.same(back, x, "the heads side by side again")
    checks.right("split, and merged again, nothing moves")


@checks.explain_errors
def check_rotary(rotate):
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 6))
    turned = checks.numbers(rotate, q.copy(), 3, shape=(6,))
    checks.expect(
        np.isclose(np.linalg.norm(turned), np.linalg.norm(q)),
        f"a rotation changes no length; {np.linalg.norm(q):.3f} became {np.linalg.norm(turned):.3f}.",
    )
    checks.same(rotate(q.copy(), 0), q, "position 0: no rotation")
    scores = np.array([[rotate(q, t + d) @ rotate(k, t) for t in (0, 2, 9)] for d in (0, 1, 5)])
    checks.expect(
        np.allclose(scores, scores[:, :1]),
        "the score of a query and a key at the same distance must be the same wherever they are.",
    )
    pairs = q[0::2] + 1j * q[1::2]
    wanted = pairs * np.exp(1j * 3 / 10_000.0 ** (np.arange(3) / 3))
    want = np.stack([wanted.real, wanted.imag], axis=1).ravel()
    checks.same(turned, want, "q at position 3: the pairs (0, 1), (2, 3), (4, 5)")
    checks.right("scores depend on the distance alone")


@checks.explain_errors
def check_cache(step):
    q, k, v = example(6, 6)
    want, _ = reference(q, k, v, causal=True)
    keys, values = np.zeros((0, 4)), np.zeros((0, 4))
    for t in range(6):
        y, keys, values = (np.asarray(a, float) for a in checks.several(3, step, q[t], k[t], v[t], keys, values))
        checks.expect(
            keys.shape == (t + 1, 4) and values.shape == (t + 1, 4),
            f"after position {t} there are {t + 1} keys and values; yours have the shapes {keys.shape} and "
            f"{values.shape}.",
        )
        checks.same(y, want[t], f"y of position {t}")
    checks.right("one position at a time gives what all of them at once give")


@checks.explain_errors
def check_count(parameters, operations):
    for width, length in ((64, 16), (12_288, 2_048)):
        matrices = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
        got = float(checks.numbers(parameters, width))
        checks.same(got, sum(n * m for n, m in matrices), f"the weights of a block of {width} features")
        got = float(checks.numbers(operations, width, length))
        want = 2.0 * length * sum(n * m for n, m in matrices) + 2 * 2.0 * length * length * width
        said = f"the operations of a block of {width} features, {length} positions"
        checks.expect(
            not np.isclose(got, want - 2 * 2.0 * length * length * width),
            f"{said}: scores and weighted values are products, too: {length} times {length} of them.",
        )
        checks.same(got, want, said)
    checks.right("12 D^2 weights; for short sequences the matrices are what costs, for long ones the scores")


class Counted:
    """A layer, tanh of a shifted input, that counts its calls, and the arrays of a step that are alive."""

    alive = calls = most = 0

    def __init__(self, shift):
        self.shift = shift

    def forward(self, x):
        type(self).calls += 1
        return Kept(np.tanh(np.asarray(x) + self.shift))

    def backward(self, x, gy):
        """The gradient of x, from the same x that forward had."""
        return np.asarray(gy) * (1 - np.tanh(np.asarray(x) + self.shift) ** 2)


class Kept(np.ndarray):
    """An activation: counted from when it is made until nothing refers to it."""

    def __new__(cls, array):
        made = array.view(cls)
        made.counted = True
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        return made

    def __array_finalize__(self, _):
        self.counted = False

    def __del__(self):
        Counted.alive -= self.counted


@checks.explain_errors
def check_checkpointing(checkpointed):
    count, size = 16, 4
    layers = [Counted(0.1 * i) for i in range(count)]
    x, gy = np.linspace(-1, 1, 5), np.ones(5)
    inputs, a = [], x
    for layer in layers:
        inputs.append(a)
        a = np.tanh(a + layer.shift)
    want = gy
    for layer, a in zip(reversed(layers), reversed(inputs), strict=True):
        want = want * (1 - np.tanh(a + layer.shift) ** 2)
    Counted.calls = Counted.alive = Counted.most = 0
    got = np.asarray(checks.numbers(checkpointed, layers, x, gy, size, shape=(5,)))
    checks.same(got, want, "the gradient of x")
    calls, most = Counted.calls, Counted.most
    checks.expect(
        most <= count // size + size + 1,
        f"{most} activations were there at once; {count // size} inputs of segments and the {size} activations of one "
        f"segment are enough.",
        lambda: draw_kept(count, size, most),
    )
    checks.expect(
        calls <= 2 * count,
        f"forward of a layer was called {calls} times; twice for each of {count} layers is enough: begin again "
        "at the input "
        "of the segment, not at x.",
    )
    checks.right(f"{most} activations at once instead of {count + 1}, for {calls} calls of forward instead of {count}")


def draw_kept(count, size, most):
    _, ax = plt.subplots(figsize=(6, 1.6))
    ax.barh(["enough", "yours"], [count // size + size, most], color=[GREY, RED])
    ax.set(title="activations in memory at once", xlabel=f"of {count} layers")


@checks.explain_errors
def check_segment(best_size):
    for count in (16, 100, 64, 12):
        got = float(checks.numbers(best_size, count))
        checks.expect(got == round(got) and 1 <= got <= count, f"a whole number of layers is expected, not {got:g}.")
        kept = {size: -(-count // size) + size for size in range(1, count + 1)}
        checks.expect(
            kept[int(got)] == min(kept.values()),
            f"of {count} layers in segments of {got:.0f} there are {kept[int(got)]} activations at once, and "
            f"{min(kept.values())} are possible.",
        )
    checks.right("segments as long as there are segments: about the root of the number of layers")


def draw_weights(weights, follows, causal_attention, x):
    """Weights of attention with and without the future."""
    _, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    axes[0].imshow(weights, cmap="Blues", vmin=0, vmax=1)
    axes[0].plot(follows, range(8), "o", mfc="none", color=RED, label="the one that is looked for")
    axes[0].set(title="weights", xlabel="key of position", ylabel="query of position")
    axes[0].legend(loc="upper left", bbox_to_anchor=(0, -0.2))
    axes[1].imshow(causal_attention(6 * x[:, 16:], x[:, :16], x[:, :16])[1], cmap="Blues", vmin=0, vmax=1)
    axes[1].set(title="causal: only what came before", xlabel="key of position")
    plt.show()


def draw_distances(distances, rotate, vector):
    """Score of a vector with itself over the distance."""
    _, ax = plt.subplots(figsize=(7, 2.6))
    ax.plot(distances, [rotate(vector, t) @ rotate(vector, 0) / (vector @ vector) for t in distances], color=BLUE)
    ax.set(
        title="score of a vector with itself, at a distance",
        xlabel="positions between query and key",
        ylabel="of distance 0",
    )
    plt.show()


def draw_segments(best_size, L):
    """Activations in memory at once, over the length of a segment of L layers."""
    sizes, best = np.arange(1, L + 1), best_size(L)
    _, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(sizes, -(-L // sizes) + sizes, color=BLUE, label="with checkpoints")
    ax.axhline(L, color=GREY, ls=":", label="all kept")
    ax.plot(best, -(-L // best) + best, "o", ms=9, color=RED, label=f"segments of {best}")
    ax.set(title=f"activations in memory at once, {L} layers", xlabel="layers of a segment", ylabel="activations")
    ax.set_ylim(0, 110)
    ax.legend()
    plt.show()


def draw_quadratic(block_operations, width):
    """What scores and weighted values take of the operations of a block, over the number of positions."""
    lengths = 2 ** np.arange(8, 18)
    scores = np.array([4 * int(T) ** 2 * width for T in lengths], float)
    everything = np.array([block_operations(width, int(T)) for T in lengths], float)
    _, ax = plt.subplots(figsize=(7, 2.8))
    ax.semilogx(lengths, 100 * scores / everything, "o-", color=ORANGE)
    ax.axvline(6 * width, color=GREY, ls=":")
    ax.annotate(" T = 6 D", (6 * width, 5), color=GREY)
    ax.set(title=f"what scores and values take of a block of {width:,} features", xlabel="positions T")
    ax.set_ylabel("operations (%)")
    plt.show()
