# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Gradient descent: batch, stochastic, mini-batch
#
# Everything that follows in this course, up to thousands of processors, is the repetition of one small act: **look
# which way is downhill, and take a step.** Here it is in the open, on a model with two numbers, so that the whole
# landscape fits on a page. You will
#
# 1. see what is to be minimised: a cost, and its landscape;
# 2. compute its **gradient**, and check it;
# 3. walk downhill, with steps that are too short, right, and too long;
# 4. choose how many samples a step looks at: all (**batch**), one (**stochastic**), or some (**mini-batch**);
# 5. measure what a step over few samples loses, and what it saves;
# 6. recognise handwritten digits with the same loop.
#
# You need derivatives and vectors. Where it says *Your turn* you write a line or two, and the cell below checks it. A
# cell that does not end is stopped with the square above the notebook (*Kernel*, *Interrupt*).

# %%
import matplotlib.pyplot as plt
import numpy as np

import checks
import exercises.descent as exercise
import nn

# %matplotlib inline
checks.style()

# %% [markdown]
# ## A model with two numbers
#
# Forty measurements of $x$ and $y$, and a guess: $y \approx w_0 + w_1 x$. How good is a guess? Square the error of
# every sample, and take half of the mean:
#
# $$ C(w) = \frac{1}{2N} \sum_{i=1}^{N} (w_0 + w_1 x_i - y_i)^2 . $$
#
# The half is there so that the derivative has no 2. Each sample is a row $(1, x_i)$ of a matrix $X$; then the model is
# $Xw$, and the sum is a product, too.

# %%
rng = np.random.default_rng(4)
N = 40
x = rng.uniform(-1, 2.2, N)
y = 0.5 + 1.2 * x + 0.45 * rng.standard_normal(N)
X = np.column_stack([np.ones(N), x])  # (N, 2)
X.flags.writeable = y.flags.writeable = False  # what has been measured stays as it is


def cost(w, X=X, y=y):
    return 0.5 * np.mean((X @ w - y) ** 2)


best = np.linalg.lstsq(X, y, rcond=None)[0]  # for two numbers there is a formula; for millions there is none


def landscape(ax, low=(-1.4, -0.6), high=(1.8, 2.4)):
    """Lines of equal cost over w0 and w1, darker where it is lower, and a star at the bottom."""
    w0, w1 = np.linspace(low[0], high[0], 80), np.linspace(low[1], high[1], 80)
    C = np.array([[cost(np.array([a, b])) for a in w0] for b in w1])
    levels = cost(best) + np.array([0.01, 0.04, 0.1, 0.2, 0.4, 0.7, 1.1, 1.6, 2.3, 3.2])
    ax.contourf(w0, w1, C, [C.min(), *levels, C.max() + 1], cmap="Blues_r", alpha=0.3)
    ax.contour(w0, w1, C, levels, colors="#7f9fc4", linewidths=0.7)
    ax.plot(*best, "*", ms=14, mfc="white", mec=checks.INK, zorder=5)
    ax.set(xlabel="$w_0$", ylabel="$w_1$")


guesses = {"a": np.array([-1.0, 2.0]), "b": np.array([1.4, 0.2]), "best": best}
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9))
left.plot(x, y, "o", ms=5, color=checks.GREY)
landscape(right)
for (name, w), colour in zip(guesses.items(), (checks.RED, checks.ORANGE, checks.INK), strict=True):
    left.plot([-1, 2.2], w[0] + w[1] * np.array([-1, 2.2]), color=colour, label=f"{name}: C = {cost(w):.2f}")
    if name != "best":
        right.plot(*w, "o", ms=9, color=colour)
        right.annotate(name, w, (7, 5), textcoords="offset points", fontsize=12, color=colour, weight="bold")
left.set(title="two guesses and the best line", xlabel="x", ylabel="y")
left.legend()
right.set_title("each line is a point in this landscape")
plt.show()

# %% [markdown]
# On the left a guess is a line, on the right a point. To learn is to move that point to the star. For two numbers we
# can draw the landscape and see the star. For a million we cannot: all that we can do is to stand somewhere in the fog,
# and feel with the foot which way the ground falls.
#
# ## The gradient
#
# The foot is the **gradient**: the derivatives of $C$ with respect to each parameter,
#
# $$ \nabla C = \Big( \frac{\partial C}{\partial w_0}, \frac{\partial C}{\partial w_1} \Big) . $$
#
# It points where $C$ grows fastest, and its length says how fast. Write $e_i = w_0 + w_1 x_i - y_i$ for the error of
# sample $i$. By the chain rule $\partial (\frac12 e_i^2) / \partial w_1 = e_i\, x_i$, and
# $\partial (\frac12 e_i^2) / \partial w_0 = e_i$, whose factor is the 1 in front of $x_i$ in row $i$ of $X$. So each
# sample contributes *its error times its row of X*, and the gradient is the mean of these.
#
# **Exercise 1.** Write it for all samples at once: the errors $Xw - y$, one for each row, and then a product with
# $X^{\mathsf T}$ that adds them up.


# %%
def gradient(w, X=X, y=y):
    """The two derivatives of the cost over these samples, at w."""
    # gap: the mean over the samples of error times row
    # return ...
    # solution
    return X.T @ (X @ w - y) / len(y)
    # wrong: it is 40 times what is wanted
    # return X.T @ (X @ w - y)
    # wrong: the wrong sign
    # return X.T @ (y - X @ w) / len(y)
    # wrong: the gradient of 13 samples
    # return X.T @ (X @ w - y) / 40
    # end


# %%
exercise.check_gradient(gradient, cost, landscape, (guesses["a"], guesses["b"]), X, y)

# %% [markdown]
# From now on this is our compass. At each point of the landscape it gives one arrow, and minus the gradient stands at a
# right angle to the lines of equal cost:

# %%
_, ax = plt.subplots(figsize=(6.4, 4.6))
landscape(ax)
places = np.array([(a, b) for a in np.linspace(-1.2, 1.6, 8) for b in np.linspace(-0.4, 2.2, 8)])
down = -np.array([gradient(w) for w in places])
ax.quiver(*places.T, *down.T, color=checks.INK, angles="xy", scale=14, width=0.004)
ax.set_title("minus the gradient, at 64 places")
plt.show()

# %% [markdown]
# ## Steps
#
# Gradient descent is: take a step against the gradient, and look again,
#
# $$ w \leftarrow w - \eta\, \nabla C(w) . $$
#
# The **learning rate** $\eta$ says how far. It is the one number that everybody who trains networks has to choose, and
# most failures are a wrong one:


# %%
def walk(w, rate, steps):
    """The places on the way, the first one too."""
    path = [w]
    for _ in range(steps):
        path.append(path[-1] - rate * gradient(path[-1]))
    return np.array(path)


curvature = np.linalg.eigvalsh(X.T @ X / N)  # how fast the slope changes, along the valley and across
print(f"curvature along the valley {curvature[0]:.2f}, across {curvature[1]:.2f}: rates above "
      f"{2 / curvature[1]:.2f} must fail")  # fmt: skip
_, axes = plt.subplots(1, 4, figsize=(12.5, 3.3), width_ratios=(1, 1, 1, 1.15))
start = np.array([-1.2, 0.9])
start.flags.writeable = False  # every walk begins here: w = w - ... makes a new array, w -= ... would move the start
for ax, rate, colour in zip(
    axes, (0.05, 0.5, 2.05 / curvature[1]), (checks.ORANGE, checks.GREEN, checks.RED), strict=False
):
    path = walk(start, rate, 15)
    landscape(ax)
    ax.plot(*path.T, ".-", color=colour, lw=1.5)
    ax.set(title=f"rate {rate:.2f}, 15 steps", xlim=(-1.4, 1.8), ylim=(-0.6, 2.4))
    axes[3].semilogy([cost(w) - cost(best) for w in walk(start, rate, 40)], color=colour, label=f"rate {rate:.2f}")
axes[3].set(title="cost above the lowest", xlabel="step", ylim=(1e-8, 10))
axes[3].legend()
plt.show()

# %% [markdown]
# Too short: it will get there, some day. Too long: every step lands on the other side, higher than before. In between
# there is an edge: along a direction with curvature $\lambda$ a step multiplies what is missing by $1 - \eta\lambda$,
# which is larger than 1 in size as soon as $\eta > 2/\lambda$. The steepest direction sets the limit, and the flattest
# one then has to wait.
#
# **Exercise 2.** The valley has the curvature `flat` along and `steep` across. A step leaves $|1 - \eta\lambda|$ of the
# error in each direction. For which rate is the larger of the two as small as it can be? (Draw both over $\eta$: where
# is the lowest point of the upper curve?)


# %%
def best_rate(flat, steep):
    """The rate for which the slower of both directions is as fast as possible."""
    # gap: where both leave the same share of the error
    # return 1 / steep
    # solution
    return 2 / (flat + steep)
    # wrong: is possible
    # return 2 / steep
    # wrong: is possible
    # return 1 / (flat + steep)
    # end


# %%
exercise.check_best_rate(best_rate)

# %% [markdown]
# **Exercise 3.** And how many steps does it take until the error in a direction with curvature $\lambda$ is `factor`
# times smaller than at the start?


# %%
def steps_needed(rate, curvature, factor):
    """The smallest whole number of steps after which no more than 1/factor of the error is left."""
    # gap: each step leaves the same share of it
    # return factor * (1 - rate * curvature)
    # solution
    return np.ceil(np.log(factor) / -np.log(abs(1 - rate * curvature)))
    # wrong: the first time; yours says
    # return np.ceil(np.log(factor) / (rate * curvature))
    # wrong: the first time; yours says
    # return np.ceil(np.log(factor) / -np.log(max(1e-9, 1 - rate * curvature)))
    # wrong: after 2 steps, the first time; yours says 3
    # return int(np.log(factor) / -np.log(abs(1 - rate * curvature))) + 1
    # end


# %%
exercise.check_steps_needed(steps_needed)
flat, steep = curvature
fastest = best_rate(flat, steep)
print(f"our valley, error 1,000 times smaller: {steps_needed(0.05, flat, 1000):.0f} steps with rate 0.05, "
      f"{steps_needed(fastest, flat, 1000):.0f} with the best, {fastest:.2f}")  # fmt: skip

# %% [markdown]
# Keep this picture of a narrow valley: momentum and Adam exist because of it.
#
# ## How many samples does a step look at?
#
# The gradient is a **mean over samples**. To be exact it needs all of them. But a mean over a few, drawn at random, is
# right *on average*, and much cheaper. So there is a choice, the batch size $B$:
#
# | name | a step looks at | steps in an epoch (one pass over all $N$ samples) |
# |---|---|---|
# | **batch** gradient descent | all $N$ | 1 |
# | **stochastic** gradient descent | 1 | $N$ |
# | **mini-batch** | $B$ | $N/B$, rounded up |
#
# They are one loop. In every epoch: shuffle the samples, cut them into pieces of $B$, take a step for each piece. (The
# last piece may be smaller. Its gradient is the mean over what it has.)
#
# **Exercise 4.** Write that loop.


# %%
def descend(B, rate, epochs, seed=0, w=start):
    """The places on the way, one after every step."""
    rng = np.random.default_rng(seed)
    path = [w]
    for _ in range(epochs):
        order = rng.permutation(N)
        # gap: a step for each piece of B samples of `order`; its gradient is gradient(w, X[chosen], y[chosen])
        # path.append(path[-1] - rate * gradient(path[-1]))
        # solution
        for first in range(0, N, B):
            chosen = order[first : first + B]
            path.append(path[-1] - rate * gradient(path[-1], X[chosen], y[chosen]))
        # wrong: 40 samples in pieces of 7, steps an epoch: 6; yours takes 5
        # for first in range(0, N - B + 1, B):
        #     chosen = order[first : first + B]
        #     path.append(path[-1] - rate * gradient(path[-1], X[chosen], y[chosen]))
        # wrong: the path with B = 1
        # for first in range(0, N, B):
        #     chosen = slice(first, first + B)
        #     path.append(path[-1] - rate * gradient(path[-1], X[chosen], y[chosen]))
        # end
    return np.array(path)


# %%
def check_descend(B):
    """Against the same steps, written without a loop over pieces: each sample has the number of its step."""
    order = np.random.default_rng(3).permutation(N)
    want, step_of = [start], np.arange(N) // B
    for step in range(step_of[-1] + 1):
        rows = order[step_of == step]
        want.append(want[-1] - 0.2 * gradient(want[-1], X[rows], y[rows]))

    want = np.array(want)

    def draw(*_):
        _, ax = plt.subplots(figsize=(5.4, 4))
        landscape(ax)
        ax.plot(*want.T, ".-", color=checks.INK, label=f"wanted: {len(want) - 1} steps")
        ax.plot(*path.T, ".-", color=checks.RED, label=f"yours: {len(path) - 1} steps")
        ax.legend(loc="lower left", frameon=True)

    path = checks.call(descend, B, 0.2, 1, seed=3)
    checks.expect(
        len(path) == len(want),
        f"{N} samples in pieces of {B}, steps an epoch: {len(want) - 1}; yours takes {len(path) - 1}.",
        draw,
    )
    checks.same(path, want, f"the path with B = {B}", draw=draw)


for B in (N, 1, 10, 7):
    check_descend(B)
checks.right("all samples, one, ten, and seven with a last piece of five: one loop")

# %%
_, axes = plt.subplots(1, 3, figsize=(12, 3.9), sharey=True)
kinds = {N: ("batch", checks.BLUE), 8: ("mini-batch of 8", checks.GREEN), 1: ("stochastic", checks.RED)}
for ax, (B, (name, colour)) in zip(axes, kinds.items(), strict=True):
    path = descend(B, 0.15, 6)
    landscape(ax)
    ax.plot(*path.T, ".-", color=colour, lw=1.2, ms=4)
    ax.set_title(f"{name}: 6 epochs are {len(path) - 1} steps")
plt.show()

# %% [markdown]
# All three have looked at every sample six times. The blue path made six steps, straight and exact, and is far away.
# The red one made 240, drunk, and reached the bottom in its first epoch; but it does not *stay* there: near the star
# the samples no longer agree which way is down, and each pulls to its own side. The green one has most of the speed and
# little of the noise.
#
# ## What a small batch loses
#
# How far is the gradient of $B$ samples from that of all? Draw many batches and look. The mean over $B$ independent
# samples scatters like $1/\sqrt{B}$: **four times the samples, half the noise.** That is a bad bargain, and the
# reason why small batches win: four small steps are worth more than one that is twice as exact.

# %%
here, draws = np.array([0.2, 0.6]), 400
sizes = np.array([1, 2, 4, 8, 16, 32])
batches = {B: np.array([gradient(here, X[r], y[r]) for r in rng.integers(0, N, (draws, B))]) for B in sizes}
noise = [np.sqrt(np.mean(np.sum((g - gradient(here)) ** 2, axis=1))) for g in batches.values()]

_, axes = plt.subplots(1, 4, figsize=(12.5, 3.2), width_ratios=(1, 1, 1, 1.3))
for ax, B, colour in zip(axes, (1, 4, 16), (checks.RED, checks.ORANGE, checks.GREEN), strict=False):
    ax.plot(*batches[B].T, ".", ms=3, alpha=0.5, color=colour)
    ax.plot(*gradient(here), "+", ms=14, mew=2.5, color=checks.INK)
    ax.set(title=f"400 gradients, B = {B}", xlim=(-2.7, 0.8), ylim=(-5, 0.6), xlabel="$\\partial C/\\partial w_0$")
axes[0].set_ylabel("$\\partial C/\\partial w_1$")
axes[3].loglog(sizes, noise, "o", color=checks.BLUE, label="measured")
axes[3].loglog(sizes, noise[0] / np.sqrt(sizes), "--", color=checks.GREY, label="$1/\\sqrt{B}$")
axes[3].set_xticks(sizes, sizes)
axes[3].set_xticks([], minor=True)
axes[3].set(title="distance from the true gradient", xlabel="batch size B")
axes[3].legend()
plt.show()
assert np.allclose(noise * np.sqrt(sizes), noise[0], rtol=0.15), "the noise falls with the root of the batch size"

# %% [markdown]
# What a large batch has for it is not on this page: its samples can be computed **at the same time**, on many cores or
# many machines. That is what the second half of this course is about, and why notebook 9 asks how large a batch may be.
#
# ## Momentum
#
# Along the narrow valley steps creep, since a rate that would hurry them throws them to and fro across it. A ball keeps
# its velocity: what always points the same way adds up, what points to and fro cancels. **Momentum** (Polyak 1964) does
# just that; $\mu$ says how much of the velocity stays:
#
# $$ v \leftarrow \mu v + \nabla C(w), \qquad w \leftarrow w - \eta\, v . $$
#
# **Exercise 5.** Write one such step.


# %%
def roll(w, v, rate, mu):
    """One step with momentum from w, with the velocity v: (the new w, the new v)."""
    # gap: first the velocity, then the step with it
    # return w - rate * gradient(w), v
    # solution
    v = mu * v + gradient(w)
    return w - rate * v, v
    # wrong: 20 steps with momentum
    # return w - rate * v, mu * v + gradient(w)
    # wrong: 20 steps with momentum
    # v = mu * v + (1 - mu) * gradient(w)
    # return w - rate * v, v
    # wrong: the velocity after the first step
    # v = mu * v - rate * gradient(w)
    # return w + v, v
    # end


# %%
def rolling(rate, mu, steps):
    path, w, v = [start], start, np.zeros(2)
    for _ in range(steps):
        w, v = checks.several(2, roll, w, v, rate, mu)
        path.append(w)
    return np.array(path)


def check_roll():
    """By Polyak's other form, which needs no velocity: minus the gradient's step, plus mu times the last step."""
    want = [start, start - 0.2 * gradient(start)]
    while len(want) < 21:
        want.append(want[-1] - 0.2 * gradient(want[-1]) + 0.7 * (want[-1] - want[-2]))

    def draw(got, want):
        _, ax = plt.subplots(figsize=(5.4, 4))
        landscape(ax)
        ax.plot(*want.T, ".-", color=checks.INK, label="wanted")
        ax.plot(*got.T, ".-", color=checks.RED, label="yours")
        ax.legend(loc="lower left", frameon=True)

    checks.same(rolling(0.2, 0.7, 20), np.array(want), "20 steps with momentum", draw=draw)
    _, v = checks.several(2, roll, start, np.zeros(2), 0.2, 0.7)
    checks.same(v, gradient(start), "the velocity after the first step")


check_roll()
checks.right("that is momentum")

# %%
_, axes = plt.subplots(1, 3, figsize=(12, 3.6))
for ax, mu, colour in zip(axes, (0.0, 0.7), (checks.BLUE, checks.GREEN), strict=False):
    landscape(ax)
    ax.plot(*rolling(0.2, mu, 20).T, ".-", color=colour)
    ax.set_title(f"20 steps, momentum {mu}")
    axes[2].semilogy([cost(w) - cost(best) for w in rolling(0.2, mu, 60)], color=colour, label=f"momentum {mu}")
axes[2].set(title="cost above the lowest", xlabel="step", ylim=(1e-12, 10))
axes[2].legend()
plt.show()

# %% [markdown]
# Like a ball it runs past the bottom and swings back, which are the waves on the right; and it comes down all the same,
# far faster than without.
#
# ## The same loop reads digits
#
# 1,797 digits, written by hand, scanned and reduced to 8 x 8 pixels, come with the package. They are cut in three. From
# the **training** digits the model learns; by the **validation** digits we choose (how many samples a step takes, how
# fast it learns); the **test** digits nobody looks at until the very end: a figure that one has chosen by is too good.
#
# The model is the same line as above, only wider: 64 pixels in, ten numbers out, $z = xW + b$, and the largest is the
# answer. `CrossEntropyLoss` turns the ten numbers into probabilities and says how surprised they are by the truth; what
# its gradient looks like is the next notebook's. `nn.Trainer` makes one step: gradient, update. The batch size is an
# argument of the `Loader`, and nothing else.

# %%
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
images, labels = data.train.batch()
_, axes = plt.subplots(2, 12, figsize=(11, 2.2))
for ax, image, label in zip(axes.flat, images, labels, strict=False):
    ax.imshow(image.reshape(8, 8))
    ax.set_title(label, loc="center", weight="normal")
    ax.axis("off")
plt.show()


def learn(B, rate, epochs=8):
    """(validation accuracy after every epoch, steps, trainer)"""
    network = nn.Network(nn.Sequential(nn.Linear(64, 10)), in_shape=(64,), dtype=np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=rate), seed=0)
    loader = nn.Loader(data.train, batch=B, seed=0)
    training = nn.fit(trainer, loader, epochs=epochs, validation=nn.Loader(data.validation, batch=500, shuffle=False))
    return [record["validation_accuracy"] for record in training.history], trainer.steps, trainer


# %%
n = len(labels)
_, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), sharey=True)
for B, rate, name, colour in (
    (n, 0.5, "batch", checks.BLUE),
    (32, 0.5, "mini-batch of 32", checks.GREEN),
    (1, 0.05, "stochastic", checks.RED),
):
    accuracy, steps, trainer = learn(B, rate)
    each = steps // len(accuracy)
    left.plot(range(1, 9), 100 * np.array(accuracy), ".-", color=colour, label=f"{name}, rate {rate}")
    right.semilogx(each * np.arange(1, 9), 100 * np.array(accuracy), ".-", color=colour, label=f"{each} steps an epoch")
    print(f"{name:>16}: {steps:6,} steps, validation accuracy {accuracy[-1]:.1%}")
left.set(title="by epochs: samples looked at", xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 101))
right.set(title="by steps: updates made", xlabel="steps")
left.legend(loc="lower right")
right.legend(loc="lower right")
plt.show()

# %% [markdown]
# Per sample the small batches win by far; per *step* the large batch does not look so bad, and if its 1,293 samples are
# computed at once on many processors, a step is what takes the time. Which picture is yours depends on your machine.
#
# **Exercise 6.** `nn.SGD` is not magic: its step is yours. Take one step by hand, from the weights that a trainer
# begins with, over one batch. For cross-entropy over softmax the gradient is $X^{\mathsf T}(P - Y)/B$, where row $i$ of
# $P$ has the model's probabilities, $Y$ a 1 at the right digit; for $b$ it is the column sums of $(P - Y)/B$.

# %%
network = nn.Network(nn.Sequential(nn.Linear(64, 10)), in_shape=(64,), dtype=np.float64)
trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.5), seed=0)
W, b = trainer.p[0].W.copy(), trainer.p[0].b.copy()
batch, digits = images[:32], labels[:32]
Y = np.eye(10)[digits]
trainer.step(batch, digits, 32)  # what it makes of W and b is in trainer.p[0]


def by_hand(W, b):
    """(new W, new b) after one step of rate 0.5 over `batch`."""
    z = batch @ W + b
    P = np.exp(z - z.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)  # each row sums to 1
    # gap: one step
    # return W, b
    # solution
    return W - 0.5 * batch.T @ (P - Y) / 32, b - 0.5 * (P - Y).sum(axis=0) / 32
    # wrong: the step of W: it is 32 times
    # return W - 0.5 * batch.T @ (P - Y), b - 0.5 * (P - Y).sum(axis=0)
    # wrong: the step of b
    # return W - 0.5 * batch.T @ (P - Y) / 32, b - 0.5 * (P - Y).mean()
    # end


# %%
new_W, new_b = (np.asarray(each) for each in checks.several(2, by_hand, W.copy(), b.copy()))
checks.same(new_W - W, trainer.p[0].W - W, "the step of W")
checks.same(new_b - b, trainer.p[0].b - b, "the step of b")
checks.right("the same numbers as the library's, to the last digits")

# %% [markdown]
# **To try further.** Give the stochastic walk in the landscape a rate that falls, $\eta_k = \eta_0 / (1 + k/20)$: now
# it comes to rest. Multiply $x$ by 10: why does the valley become so narrow, and what does that say about scaling
# inputs? What does the batch walk do with a rate of exactly $2/\lambda$?
#
# Next: `02_backprop`, where the gradient of a network with layers is found, for the price of two evaluations.
#
# *Sources: Cauchy 1847 (gradient descent); Robbins, Monro 1951 (stochastic approximation); Polyak 1964 (momentum);
# E. Alpaydin and C. Kaynak 1998 (the digits; see `nn/data/digits.md`).*
