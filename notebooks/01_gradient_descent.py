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
# This course, up to thousands of processors, repeats one small act: **look which way is downhill, and take a step.**
# Here you see it on a model with two numbers, whose whole landscape fits on a page. You will
#
# 1. see the function that is minimised: a cost, and its landscape;
# 2. compute its **gradient**, and check it;
# 3. walk downhill, with steps that are too short, right, and too long;
# 4. choose how many samples a step looks at: all (**batch**), one (**stochastic**), or some (**mini-batch**);
# 5. measure what a step over few samples loses, and what it saves;
# 6. recognise handwritten digits with the same loop.
#
# You need derivatives and vectors. Where it says *Your turn* you write a line or two, and the cell below checks it. A
# cell that does not end is stopped with the square above the notebook (*Kernel*, *Interrupt*).

# %%
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


landscape = exercise.landscape_of(cost, best)  # lines of equal cost over w0 and w1, a star at the bottom

guesses = {"a": np.array([-1.0, 2.0]), "b": np.array([1.4, 0.2]), "best": best}
exercise.draw_guesses(x, y, landscape, guesses, cost)

# %% [markdown]
# On the left a guess is a line, on the right a point. To learn is to move that point to the star. For two numbers we
# can draw the landscape and see the star. For a million numbers we cannot: we stand in fog, and can only feel with a
# foot which way the ground falls.
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
exercise.draw_arrows(landscape, gradient)

# %% [markdown]
# ## Steps
#
# Gradient descent is: take a step against the gradient, and look again,
#
# $$ w \leftarrow w - \eta\, \nabla C(w) . $$
#
# The **learning rate** $\eta$ says how far. Every training run needs one, and most failures come from a wrong one:


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
start = np.array([-1.2, 0.9])
start.flags.writeable = False  # every walk begins here: w = w - ... makes a new array, w -= ... would move the start
exercise.draw_walks(curvature, walk, start, landscape, cost, best)

# %% [markdown]
# With the short rate the walk arrives late. With the long one every step lands on the other side, higher than before.
# The limit is between them: along a direction with curvature $\lambda$ a step multiplies the error by $1 -
# \eta\lambda$, whose size exceeds 1 as soon as $\eta > 2/\lambda$. The steepest direction sets the limit, and the error
# along the flattest one then shrinks slowly.
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
exercise.check_descend(descend, gradient, landscape, start, X, y)

# %%
exercise.draw_batches(N, descend, landscape)

# %% [markdown]
# All three have looked at every sample six times. The blue path made six steps, straight and exact, and is far away.
# The red one made 240 unsteady steps and reached the bottom in its first epoch. But it does not *stay* there: near the
# star the samples disagree about which way is down, and each step follows another one. The green one has most of the
# speed and little of the noise.
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

exercise.draw_noise(batches, gradient, here, sizes, noise)
assert np.allclose(noise * np.sqrt(sizes), noise[0], rtol=0.15), "the noise falls with the root of the batch size"

# %% [markdown]
# A large batch has an advantage that this page does not show: its samples can be computed **at the same time**, on many
# cores or many machines. The second half of this course is about that, and notebook 9 asks how large a batch may be.
#
# ## Momentum
#
# Along the narrow valley the steps are short, since with a larger rate they would overshoot across it. A ball keeps its
# velocity: components that always point the same way add up, and those that alternate cancel. **Momentum** (Polyak
# 1964) does just that; $\mu$ says how much of the velocity stays:
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


exercise.check_roll(roll, rolling, gradient, landscape, start)

# %%
exercise.draw_momentum(landscape, rolling, cost, best)

# %% [markdown]
# Like a ball it runs past the bottom and swings back: these are the waves on the right. It still comes down far faster
# than without momentum.
#
# ## The same loop reads digits
#
# 1,797 digits, written by hand, scanned and reduced to 8 x 8 pixels, come with the package. They are split into three
# parts. The model learns from the **training** digits. We choose settings, such as the batch size and the rate, by the
# **validation** digits. The **test** digits are used once, at the end: the accuracy on digits by which settings were
# chosen is too optimistic.
#
# The model is the same line as above, only wider: 64 pixels in, ten numbers out, $z = xW + b$, and the largest is the
# answer. `CrossEntropyLoss` turns the ten numbers into probabilities, and is small where the right digit has a large
# one. Its gradient is in exercise 6; notebook 4b derives it. `nn.Trainer` makes one step: gradient, update. The batch
# size is an argument of the `Loader`, and nothing else.

# %%
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
images, labels = data.train.batch()
exercise.draw_digits(images, labels)


def learn(B, rate, epochs=8):
    """(validation accuracy after every epoch, steps)"""
    network = nn.Network(nn.Sequential(nn.Linear(64, 10)), in_shape=(64,), dtype=np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=rate), seed=0)
    loader = nn.Loader(data.train, batch=B, seed=0)
    training = nn.fit(trainer, loader, epochs=epochs, validation=nn.Loader(data.validation, batch=500, shuffle=False))
    return [record["validation_accuracy"] for record in training.history], trainer.steps


# %%
runs = {  # each with a rate that suits it
    "batch": learn(len(labels), 0.5),
    "mini-batch of 32": learn(32, 0.5),
    "stochastic": learn(1, 0.05),
}
for name, (accuracy, steps) in runs.items():
    print(f"{name:>16}: {steps:6,} steps, validation accuracy {accuracy[-1]:.1%}")
exercise.draw_learning(runs)

# %% [markdown]
# Per sample the small batches win by far; per *step* the large batch does not look so bad, and if its 1,293 samples are
# computed at once on many processors, a step is what takes the time. Which picture applies depends on your machine.
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
# Next: `02_backprop`, which computes the gradient of a network with layers, for the price of two evaluations.
#
# *Sources: Cauchy 1847 (gradient descent); Robbins, Monro 1951 (stochastic approximation); Polyak 1964 (momentum);
# E. Alpaydin and C. Kaynak 1998 (the digits; see `nn/data/digits.md`).*
