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
# # Backpropagation, by hand
#
# A neural network learns by asking one question about each of its weights: *if I made you a little larger, would the
# result get better or worse, and how fast?* The answer is a derivative. Backpropagation is the way to get all of
# these derivatives, thousands or billions, for about the price of two more evaluations of the network.
#
# In this notebook you
#
# 1. compute a two-layer network neuron by neuron, and then as two matrix products;
# 2. derive the **four equations** of backpropagation, and program them;
# 3. see that `nn`, the engine of this project, computes the same to the last digits;
# 4. **test** a gradient, and see a wrong one fail;
# 5. train on handwritten digits with one loop that is batch, stochastic and mini-batch gradient descent;
# 6. look at the digits that it gets wrong.
#
# You need derivatives, the chain rule and matrix products. At the end of most sections is an exercise with a check.

# %%
import matplotlib.pyplot as plt
import numpy as np

import nn

plt.rcParams.update({"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The data
#
# 1,797 digits, written by hand, scanned and reduced to 8 x 8 pixels from 0 (paper) to 1 (ink). They come with the
# package. We take each as a vector of 64 numbers and compute in float64, so that rounding does not blur the
# comparisons.
#
# They are cut in three. From the **training** digits the network learns. On the **validation** digits we look how well
# it does while we still choose: how many samples a step takes, how fast it learns, how long. What chooses has seen what
# it chose by, so that figure comes out too good; the honest one is that of the **test** digits, which nobody looks at
# until the end.

# %%
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
x_train, y_train = data.train.batch()
x_validation, y_validation = data.validation.batch()
x_test, y_test = data.test.batch()
print("training:", x_train.shape, "  validation:", x_validation.shape, "  test:", x_test.shape)


def show_digits(images, titles, columns=10):
    """Rows of images, each with a title."""
    rows = -(-len(images) // columns)
    _, axes = plt.subplots(rows, columns, figsize=(columns * 0.9, rows * 1.15), squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for ax, image, title in zip(axes.flat, images, titles, strict=False):
        ax.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(title, fontsize=9)
    plt.show()


show_digits(x_train[::72], y_train[::72])

# %% [markdown]
# ## 1. The network
#
# A **neuron** takes the numbers $a_k$ of the layer before it, weighs and adds them, and squeezes the sum to between
# 0 and 1:
#
# $$ z_j = \sum_k a_k W_{kj} + b_j, \qquad a_j = \sigma(z_j), \qquad \sigma(z) = \frac{1}{1 + e^{-z}} . $$
#
# $z_j$ is its *weighted input*, $a_j$ its *activation*, $W_{kj}$ the weight on the way from neuron $k$ to neuron $j$,
# and $b_j$ its bias. Our network has 64 inputs, a hidden layer of 30 neurons, and 10 outputs, one for each digit:
#
# $$ x = a^0 \;\longrightarrow\; z^1, a^1 \;\longrightarrow\; z^2, a^2 . $$
#
# The number on top says which layer (it is no power).

# %%
INPUTS, HIDDEN, OUTPUTS = 64, 30, 10
rng = np.random.default_rng(1)
W1, b1 = rng.standard_normal((INPUTS, HIDDEN)) / np.sqrt(INPUTS), rng.standard_normal(HIDDEN)
W2, b2 = rng.standard_normal((HIDDEN, OUTPUTS)) / np.sqrt(HIDDEN), rng.standard_normal(OUTPUTS)


def sigma(z):
    return 1 / (1 + np.exp(-z))


def layer_by_loops(a, W, b):
    """Weighted inputs of a layer for one sample, one neuron after the other."""
    z = np.zeros(len(b))
    for j in range(len(b)):
        z[j] = b[j]
        for k in range(len(a)):
            z[j] += a[k] * W[k, j]
    return z


x, y = x_train[0], np.eye(OUTPUTS)[y_train[0]]  # y: 1 at the right digit, else 0
z1 = layer_by_loops(x, W1, b1)
a1 = sigma(z1)
z2 = layer_by_loops(a1, W2, b2)
a2 = sigma(z2)
print("output:", a2.round(2))
print("wanted:", y.astype(int))

# %% [markdown]
# The two loops are a vector times a matrix: $z = a\,W + b$. And if we put many samples into one matrix, **a row a
# sample**, then the same line computes all of them. That is how `nn` and this notebook have it. (Many books write a
# column a sample, and $z = W a + b$: their $W$ is the transpose of ours. Nothing else differs.)


# %%
def forward(x, W1, b1, W2, b2):
    """Activations of both layers; x is one sample, or one a row."""
    a1 = sigma(x @ W1 + b1)
    a2 = sigma(a1 @ W2 + b2)
    return a1, a2


assert np.allclose(forward(x, W1, b1, W2, b2)[1], a2, rtol=1e-12)
assert np.allclose(forward(x_train, W1, b1, W2, b2)[1][0], a2, rtol=1e-12)  # all samples at once; ours is the first

# %% [markdown]
# ## 2. The cost, and what is wanted
#
# How wrong is the output? The **quadratic cost** of a sample:
#
# $$ C = \frac12 \sum_j (a^2_j - y_j)^2 . $$
#
# We want $\partial C / \partial W$ and $\partial C / \partial b$ for both layers: 2,260 numbers. The slow way is to
# change one parameter by a little, run the network again, and see by how much the cost changes. That takes 2,261
# evaluations; or 4,520, where each parameter is changed in both directions, as below, which is more exact.


# %%
def cost(x, y, W1, b1, W2, b2):
    return 0.5 * np.sum((forward(x, W1, b1, W2, b2)[1] - y) ** 2)


def slow_derivative(parameter, index, eps=1e-5):
    """dC/d(parameter[index]) by central difference; the parameter is put back afterwards."""
    value = parameter[index]
    parameter[index] = value + eps
    above = cost(x, y, W1, b1, W2, b2)
    parameter[index] = value - eps
    below = cost(x, y, W1, b1, W2, b2)
    parameter[index] = value
    return (above - below) / (2 * eps)


print("dC/dW2[3, 7] is about", slow_derivative(W2, (3, 7)))

# %% [markdown]
# ## 3. The four equations
#
# The trick is to ask first for a derivative that nobody wants: that with respect to the weighted inputs,
#
# $$ \delta^l_j = \frac{\partial C}{\partial z^l_j} , $$
#
# the **error** of neuron $j$ in layer $l$: how fast the cost grows if this neuron gets a little more input.
# Everything that happens to the cost because of this neuron's weights happens through $z^l_j$, so all else follows
# from it.
#
# **(1) The last layer.** $z_j$ acts on $C$ only through $a_j = \sigma(z_j)$. The chain rule, and
# $\partial C/\partial a_j = a_j - y_j$:
#
# $$ \delta^L_j = (a^L_j - y_j)\, \sigma'(z^L_j) . $$
#
# **(2) One layer down.** $z^l_k$ acts on the cost only through the neurons $j$ of the next layer, and on each of them
# by $z^{l+1}_j = \sum_k \sigma(z^l_k) W_{kj} + b_j$, whose derivative is $\sigma'(z^l_k) W_{kj}$. Add up all ways:
#
# $$ \delta^l_k = \sigma'(z^l_k) \sum_j W^{l+1}_{kj}\, \delta^{l+1}_j . $$
#
# Forward, neuron $j$ collects activations over the weights that lead to it. Backward, neuron $k$ collects errors over
# the weights that lead from it: the same weights, walked the other way.
#
# **(3) Biases.** $b_j$ is added to $z_j$, so
#
# $$ \frac{\partial C}{\partial b^l_j} = \delta^l_j . $$
#
# **(4) Weights.** $W_{kj}$ stands in $z_j$ with the factor $a_k$, so
#
# $$ \frac{\partial C}{\partial W^l_{kj}} = a^{l-1}_k\, \delta^l_j : $$
#
# what came in at one end of the weight, times the error at the other end.
#
# One thing is left: $\sigma'$. From $\sigma(z) = 1/(1+e^{-z})$ follows $\sigma'(z) = \sigma(z)\,(1-\sigma(z)) =
# a\,(1-a)$. So we need not keep $z$: the activation is enough.


# %%
def draw_ways():
    """Which weights a neuron uses in each direction."""
    _, panels = plt.subplots(1, 2, figsize=(8.4, 2.7), sharey=True)
    left, right = np.linspace(-1.5, 1.5, 4), np.linspace(-1, 1, 3)
    for ax, title in zip(
        panels, (r"forward: $z_j=\sum_k a_k W_{kj}$", r"backward: $\sum_j W_{kj}\,\delta_j$"), strict=True
    ):
        forward_way = ax is panels[0]
        for k, yk in enumerate(left):
            for j, yj in enumerate(right):
                used = j == 1 if forward_way else k == 1
                start, end = ((0.1, yk), (0.9, yj)) if forward_way else ((0.9, yj), (0.1, yk))
                style = dict(arrowstyle="-|>", lw=1.8, color="C0" if forward_way else "C3") if used else None
                ax.annotate("", end, start, arrowprops=style or dict(arrowstyle="-", lw=0.6, color="0.8"))
        ax.plot([0] * 4, left, "o", ms=17, mfc="white", mec="0.3")
        ax.plot([1] * 3, right, "o", ms=17, mfc="white", mec="0.3")
        ax.text(0, left[1], "$k$", ha="center", va="center")
        ax.text(1, right[1], "$j$", ha="center", va="center")
        ax.set(title=title, xlim=(-0.3, 1.3), ylim=(-2, 2))
        ax.axis("off")
    plt.show()


draw_ways()

# %% [markdown]
# The four equations, neuron by neuron, for one sample:


# %%
def backward_by_loops(x, y, W2, a1, a2):
    """dC/dW1, dC/db1, dC/dW2, dC/db2 of one sample."""
    delta2 = np.zeros(OUTPUTS)
    for j in range(OUTPUTS):
        delta2[j] = (a2[j] - y[j]) * a2[j] * (1 - a2[j])  # (1)
    delta1 = np.zeros(HIDDEN)
    for k in range(HIDDEN):
        for j in range(OUTPUTS):
            delta1[k] += W2[k, j] * delta2[j]  # (2)
        delta1[k] *= a1[k] * (1 - a1[k])
    gW1, gW2 = np.zeros((INPUTS, HIDDEN)), np.zeros((HIDDEN, OUTPUTS))
    for j in range(OUTPUTS):
        for k in range(HIDDEN):
            gW2[k, j] = a1[k] * delta2[j]  # (4)
    for j in range(HIDDEN):
        for k in range(INPUTS):
            gW1[k, j] = x[k] * delta1[j]
    return gW1, delta1, gW2, delta2  # (3): the gradient of b is delta itself


gW1, gb1, gW2, gb2 = backward_by_loops(x, y, W2, a1, a2)
print("dC/dW2[3, 7]  backprop:", gW2[3, 7], "  slow way:", slow_derivative(W2, (3, 7)))
print("dC/dW1[20, 5] backprop:", gW1[20, 5], "  slow way:", slow_derivative(W1, (20, 5)))

# %% [markdown]
# ## 4. The same as matrices
#
# For a batch of $B$ samples, one a row, the cost is the **mean** over the samples. With $\odot$ for the product
# element by element, the four equations are:
#
# $$
# \begin{aligned}
# \delta^2 &= \tfrac1B\,(a^2 - y) \odot a^2 \odot (1 - a^2) && (1)\\
# \delta^1 &= \delta^2\, (W^2)^{\mathsf T} \odot a^1 \odot (1 - a^1) && (2)\\
# \partial C/\partial b^l &= \text{sum of the rows of } \delta^l && (3)\\
# \partial C/\partial W^l &= (a^{l-1})^{\mathsf T}\, \delta^l && (4)
# \end{aligned}
# $$
#
# The matrix product in (4) adds up the samples by itself: its sum runs over the rows.


# %%
def backward(x, y, W2, a1, a2):
    """dC/dW1, dC/db1, dC/dW2, dC/db2 of the mean cost of a batch."""
    delta2 = (a2 - y) * a2 * (1 - a2) / len(x)  # (1)
    delta1 = delta2 @ W2.T * a1 * (1 - a1)  # (2)
    return x.T @ delta1, delta1.sum(axis=0), a1.T @ delta2, delta2.sum(axis=0)  # (4) (3) (4) (3)


batch, wanted = x_train[:32], np.eye(OUTPUTS)[y_train[:32]]
a1, a2 = forward(batch, W1, b1, W2, b2)
by_hand = backward(batch, wanted, W2, a1, a2)

# The mean of what the loops give for each sample must be the same.
by_loops = [backward_by_loops(batch[i], wanted[i], W2, a1[i], a2[i]) for i in range(32)]
for name, ours, theirs in zip(("gW1", "gb1", "gW2", "gb2"), by_hand, zip(*by_loops, strict=True), strict=True):
    difference = np.abs(ours - np.mean(theirs, axis=0)).max()
    print(f"{name}: largest difference {difference:.1e}")
    assert difference < 1e-15

# %% [markdown]
# ## 5. The same in `nn`
#
# In `nn` a layer is a function and its derivative. It holds no arrays: parameters `p`, gradients `g` and what
# backward needs (`saved`) are handed in and out. Each layer does its part of the chain rule without knowing its
# neighbours: it is given `gy`, the derivative of the cost with respect to its output, and returns `gx`, that with
# respect to its input. The four equations fall into pieces:
#
# | layer | forward | backward | which equation |
# |---|---|---|---|
# | `QuadraticLoss` | $\frac{1}{2B}\sum (z-y)^2$ | $(z - y)/B$ | first factor of (1) |
# | `Sigmoid` | $y = \sigma(x)$ | `gx = gy * y * (1 - y)` | second factor of (1) and (2) |
# | `Linear` | $y = xW + b$ | `gx = gy @ W.T` | first factor of (2) |
# | | | `g.b = gy.sum(0)`, `g.W = x.T @ gy` | (3) and (4) |
#
# Read them in `nn/losses.py`, `nn/layers/activations.py` and `nn/layers/dense.py`: `Linear` and `Sigmoid` are a dozen
# lines each.
#
# All parameters of a network lie in **one** flat array, and so do all gradients; `views` shows them as matrices. So
# an update is one line for the whole network, and so is sending all gradients to another process (the next notebook).

# %%
network = nn.Network(
    nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, OUTPUTS), nn.Sigmoid()),
    in_shape=(INPUTS,),
    dtype=np.float64,
)
print(network.summary())

parameters, gradients = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
p, g, run = network.layout.views(parameters), network.layout.views(gradients), network.run()
p[0].W[...], p[0].b[...], p[2].W[...], p[2].b[...] = W1, b1, W2, b2  # the same weights as ours

output, saved = network.forward(p, batch, run)
loss, gz = nn.QuadraticLoss()(output, y_train[:32], 32, run)  # the 32 is B
network.backward(p, g, gz, saved, run)


def relative(ours, theirs):
    """The largest difference, in units of the largest entry."""
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


for name, ours, theirs in zip(("gW1", "gb1", "gW2", "gb2"), by_hand, (g[0].W, g[0].b, g[2].W, g[2].b), strict=True):
    print(f"{name}: by hand and nn differ by {relative(ours, theirs):.1e}")
    assert relative(ours, theirs) < 1e-12
assert relative(a2, output) < 1e-12
assert abs(loss - cost(batch, wanted, W1, b1, W2, b2) / 32) < 1e-12 * loss

# %% [markdown]
# **Exercise 1.** A famous cost makes equation (1) simpler. With the cross-entropy
# $C = -\sum_j \big[ y_j \ln a_j + (1 - y_j) \ln (1 - a_j) \big]$, find $\delta^L_j$ for a sigmoid output. Work out
# $\partial C/\partial a_j$, multiply by $\sigma'(z_j) = a_j (1 - a_j)$, and see what cancels. Then write it below.


# %%
def my_delta(a, y):
    return (a - y) * a * (1 - a)  # that of the quadratic cost: change it


def check_delta(delta):
    """Compare with the slow derivative of the cross-entropy."""

    def cross_entropy(z):
        return -np.sum(y * np.log(sigma(z)) + (1 - y) * np.log(1 - sigma(z)))

    z, eps = np.linspace(-2, 2, OUTPUTS), 1e-5
    slow = [(cross_entropy(z + eps * e) - cross_entropy(z - eps * e)) / (2 * eps) for e in np.eye(OUTPUTS)]
    return bool(np.allclose(delta(sigma(z), y), slow, rtol=1e-6))


print("right!" if check_delta(my_delta) else "not yet: this is not the derivative of the cross-entropy")

# %% [markdown]
# ## 6. Is a gradient right?
#
# A wrong derivative does not crash. The network often learns all the same, only worse, so that nobody notices.
# Therefore every layer of `nn` is tested against the definition of the derivative. The slow way of section 2
# would test one parameter at a time. It is enough to test **one random direction** over all parameters together: for
# a vector $d$ of length 1,
#
# $$ \frac{C(w + \varepsilon d) - C(w - \varepsilon d)}{2 \varepsilon} \;\approx\; \nabla C \cdot d . $$
#
# If any entry of the gradient is wrong, a random direction will show it. Two evaluations, whatever the number
# of parameters. How small should $\varepsilon$ be? Too large, and the curve bends away from its tangent: an error
# like $\varepsilon^2$. Too small, and the two costs agree in all digits that a float64 has: an error like
# $10^{-16}/\varepsilon$.

# %%
direction = network.layout.zeros(np.float64)
for _, array in network.layout.items(direction):
    array[...] = rng.standard_normal(array.shape)
direction /= np.linalg.norm(direction)


def mean_cost(w):
    output, _ = network.forward(network.layout.views(w), batch, run)
    return nn.QuadraticLoss()(output, y_train[:32], 32, run)[0]


def directional_error(gradient, eps):
    """How far the gradient is from the numerical derivative along `direction`, relative."""
    numerical = (mean_cost(parameters + eps * direction) - mean_cost(parameters - eps * direction)) / (2 * eps)
    return abs(numerical - gradient @ direction) / abs(numerical)


# A deliberately wrong gradient, as a control: (2) without its sigma'.
wrong = network.layout.zeros(np.float64)
wrong_views = network.layout.views(wrong)
delta2 = (a2 - wanted) * a2 * (1 - a2) / 32
delta1 = delta2 @ W2.T
wrong_views[2].W[...], wrong_views[2].b[...] = a1.T @ delta2, delta2.sum(axis=0)
wrong_views[0].W[...], wrong_views[0].b[...] = batch.T @ delta1, delta1.sum(axis=0)

steps = np.logspace(-11, 0, 45)
figure, ax = plt.subplots(figsize=(6.4, 3))
ax.loglog(steps, [directional_error(wrong, eps) for eps in steps], ".-", color="C3", label="(2) without $\\sigma'$")
ax.loglog(steps, [directional_error(gradients, eps) for eps in steps], ".-", color="C0", label="backprop")
ax.set(xlabel=r"step $\varepsilon$", ylabel="relative error")
ax.legend(frameon=False)
plt.show()

print(f"at 1e-5: backprop {directional_error(gradients, 1e-5):.0e}, wrong {directional_error(wrong, 1e-5):.0e}")
assert directional_error(gradients, 1e-5) < 1e-7
assert directional_error(wrong, 1e-5) > 1e-2

# %% [markdown]
# The blue V has both errors: rounding on the left, curvature on the right. The red line is wrong at any step. This is
# what `nn.gradcheck` does with any layer, its input included. A layer of your own needs three methods, or fewer if it
# is almost one that there is. Here is a sigmoid whose derivative was "simplified" from $y(1-y)$ to $y$:


# %%
class HastySigmoid(nn.Sigmoid):
    def backward(self, p, g, gy, y, run):
        return gy * y


inputs = rng.standard_normal((5, 8))
print(f"Sigmoid:      {nn.gradcheck(nn.Sigmoid(), inputs):.0e}")
print(f"HastySigmoid: {nn.gradcheck(HastySigmoid(), inputs):.0e}")
assert nn.gradcheck(nn.Sigmoid(), inputs) < 1e-6 < 1e-2 < nn.gradcheck(HastySigmoid(), inputs)

# %% [markdown]
# **Exercise 2.** Write a layer of your own: *softsign*, $y = x / (1 + |x|)$, with the derivative $1/(1+|x|)^2$.
# Forward returns `y` and what backward will need; `backward` gets that back as `saved`, and `gy`.


# %%
class MySoftsign(nn.Layer):
    def forward(self, p, x, run):
        return x / (1 + np.abs(x)), x

    def backward(self, p, g, gy, saved, run):
        return gy  # change it


def check_softsign(layer):
    return nn.gradcheck(layer, inputs) < 1e-6


print("right!" if check_softsign(MySoftsign()) else "not yet: backward is not the derivative of forward")

# %% [markdown]
# ## 7. Gradient descent: one loop
#
# The gradient points uphill. So take a step downhill, of length $\eta$ (the *learning rate*) times the gradient:
# $w \leftarrow w - \eta \nabla C$. And again. How many samples should one step look at?
#
# - all of them: **batch** gradient descent, the true gradient of the whole training cost, but few steps;
# - one: **stochastic** gradient descent, many steps, each after the nose of a single sample;
# - some: **mini-batches**, what everybody does. A matrix product over 10 samples costs hardly more than over one.
#
# They are the same loop. Only the number differs.


# %%
def descend(batch_size, rate, epochs):
    """Train a new network by hand; the accuracy on the validation digits after every epoch."""
    rng = np.random.default_rng(2)
    w = [rng.standard_normal((INPUTS, HIDDEN)) / np.sqrt(INPUTS), np.zeros(HIDDEN)]
    w += [rng.standard_normal((HIDDEN, OUTPUTS)) / np.sqrt(HIDDEN), np.zeros(OUTPUTS)]
    targets = np.eye(OUTPUTS)[y_train]
    accuracy = []
    for _ in range(epochs):
        order = rng.permutation(len(x_train))
        for start in range(0, len(x_train), batch_size):
            chosen = order[start : start + batch_size]
            x, y = x_train[chosen], targets[chosen]
            a1, a2 = forward(x, *w)
            for parameter, gradient in zip(w, backward(x, y, w[2], a1, a2), strict=True):
                parameter -= rate * gradient
        accuracy.append(np.mean(forward(x_validation, *w)[1].argmax(axis=1) == y_validation))
    return accuracy


figure, ax = plt.subplots(figsize=(6.4, 3.2))
n = len(x_train)
for batch_size, rate, label in ((n, 3.0, f"batch ({n})"), (10, 3.0, "mini-batch (10)"), (1, 0.5, "stochastic (1)")):
    accuracy = descend(batch_size, rate, epochs=10)
    ax.plot(range(1, 11), 100 * np.array(accuracy), ".-", label=f"{label}, rate {rate}")
    print(f"{label:>16}: {10 * -(-n // batch_size):6} steps, accuracy {accuracy[-1]:.1%}")
ax.set(xlabel="epochs (passes over all samples)", ylabel="validation accuracy (%)", ylim=(0, 101))
ax.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# All three have looked at every sample ten times. Batch descent has made ten steps.
#
# ## 8. Train
#
# Now with the engine. `nn.Serial` is what makes one step: forward, backward, update. `nn.fit` is the loop. For the
# first epoch we make the same steps by hand, from the same initial weights over the same batches, and compare.

# %%
trainer = nn.Serial(network, nn.QuadraticLoss(), nn.SGD(lr=3.0), seed=0)
loader = nn.Loader(data.train, batch=10, seed=0)
validation = nn.Loader(data.validation, batch=500, shuffle=False)
test = nn.Loader(data.test, batch=500, shuffle=False)

w = [array.copy() for array in (trainer.p[0].W, trainer.p[0].b, trainer.p[2].W, trainer.p[2].b)]
for x, labels, _ in loader.epoch(0):
    a1, a2 = forward(x, *w)
    for parameter, gradient in zip(w, backward(x, np.eye(OUTPUTS)[labels], w[2], a1, a2), strict=True):
        parameter -= 3.0 * gradient

training = nn.fit(trainer, loader, epochs=1, validation=validation)
worst = max(
    relative(ours, p)
    for ours, p in zip(w, (trainer.p[0].W, trainer.p[0].b, trainer.p[2].W, trainer.p[2].b), strict=True)
)
print(f"after {trainer.steps} steps, by hand and nn differ by {worst:.1e}")
assert worst < 1e-10

# %%
training = nn.fit(trainer, loader, epochs=30, validation=validation, progress=training.progress(), test=test)
print(f"after {training.epoch} epochs: validation accuracy {training.history[-1]['validation_accuracy']:.1%}")
print(f"and, looked at once, test accuracy {training.result['accuracy']:.1%}")
assert training.result["accuracy"] > 0.95

figure, ax = plt.subplots(figsize=(6.4, 3))
epochs = [record["epoch"] for record in training.history]
ax.semilogy(epochs, [record["loss"] for record in training.history], ".-", label="training")
ax.semilogy(epochs, [record["validation_loss"] for record in training.history], ".-", label="validation")
ax.set(xlabel="epoch", ylabel="cost")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The training cost is the mean over an epoch, while the network is still learning; so it begins above the cost of the
# validation digits, which is taken at the end of the epoch. Later it goes on falling when the other has stopped: the
# network has begun to learn its own samples by heart.
#
# ## 9. What it gets wrong
#
# Always look. Here are all misclassified test digits, what they are, and what the network takes them for.

# %%
output = trainer.predict(x_test)
guess = output.argmax(axis=1)
missed = np.flatnonzero(guess != y_test)
print(f"{len(missed)} of {len(y_test)} test digits are misclassified")
show_digits(x_test[missed], [f"{y_test[i]} as {guess[i]}" for i in missed])

# %% [markdown]
# And what do the hidden neurons look for? The 64 weights into one of them are an image too: blue pixels speak for it,
# red ones against it.

# %%
figure, axes = plt.subplots(3, 10, figsize=(9, 2.9))
for ax, weights in zip(axes.flat, trainer.p[0].W.T, strict=True):
    ax.imshow(weights.reshape(8, 8), cmap="RdBu", vmin=-4, vmax=4)
    ax.axis("off")
plt.show()

# %% [markdown]
# **Exercise 3.** How sure is the network when it is wrong? For every test digit take the largest output (its
# confidence). Compute the mean confidence over the right answers, and over the wrong ones.

# %%
confidence_right = confidence_wrong = 0.0  # change it: two means of output.max(axis=1)


def check_confidence(right, wrong):
    best = np.sort(output, axis=1)[:, -1]
    hits = y_test == guess
    return bool(np.isclose(right, best[hits].mean()) and np.isclose(wrong, best[~hits].mean()))


print("right!" if check_confidence(confidence_right, confidence_wrong) else "not yet")

# %% [markdown]
# **To try further.** Start with all weights 0: why does nothing good come of it? (What do the hidden neurons have in
# common, now and after a step?) Draw the weights from $N(0, 1)$ without the division by $\sqrt{64}$ and watch the
# first epochs. Put in a third layer: which lines of the four equations change?
#
# ## Solutions
#
# Look only when you have tried.


# %%
def solution_1(a, y):
    return a - y  # sigma' cancels: an output that is wrong and saturated learns fast all the same


class Solution2(nn.Layer):
    def forward(self, p, x, run):
        return x / (1 + np.abs(x)), x

    def backward(self, p, g, gy, saved, run):
        return gy / (1 + np.abs(saved)) ** 2


confidence, hits = output.max(axis=1), guess == y_test
solution_3 = confidence[hits].mean(), confidence[~hits].mean()

assert check_delta(solution_1)
assert check_softsign(Solution2())
assert check_confidence(*solution_3)
print(f"mean confidence: {solution_3[0]:.2f} where right, {solution_3[1]:.2f} where wrong")

# %% [markdown]
# Next: `02_first_ranks.py`, where two processes share the work and add up their gradients.
#
# *Sources: Rumelhart, Hinton, Williams 1986 (backpropagation); Nielsen 2015 (this experiment, and the quadratic cost
# with one half); E. Alpaydin and C. Kaynak 1998 (the digits; see `nn/data/digits.md`).*
