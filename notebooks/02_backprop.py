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
# # 2. Backpropagation: four equations
#
# To learn, a neural network needs the answer to one question about each of its weights: *if this weight were a little
# larger, would the result get better or worse, and how fast?* The answer is a derivative. Backpropagation computes all
# of these derivatives, thousands or billions, for about the price of two more evaluations of the network.
#
# In this notebook you
#
# 1. compute a two-layer network neuron by neuron, and then as two matrix products;
# 2. derive the **four equations** of backpropagation, and program them;
# 3. see that `nn`, the engine of this project, computes the same to the last digits;
# 4. **test** a gradient, and see a wrong one fail;
# 5. write a layer of your own, and a loss.
#
# You need derivatives, the chain rule and matrix products.

# %%
import time

import numpy as np

import checks
import exercises.backprop as exercise
import nn

# %matplotlib inline
checks.style()

# The digits of the last notebook; float64, so that rounding does not blur the comparisons.
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
x_train, y_train = data.train.batch()

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


exercise.draw_network(x, a1, a2, y)

# %% [markdown]
# The weights are random, and so are the outputs. The two loops are a vector times a matrix: $z = a\,W + b$. And if we
# put many samples into one matrix, **a row a sample**, then the same line computes all of them. `nn` and this notebook
# do it this way. (Many books write a column a sample, and $z = W a + b$: their $W$ is the transpose of ours. Nothing
# else differs.)


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

exercise.draw_one_weight(W2, cost, x, y, W1, b1, b2, slow_derivative)

# %% [markdown]
# ## 3. The four equations
#
# The trick is to compute another derivative first, that with respect to the weighted inputs,
#
# $$ \delta^l_j = \frac{\partial C}{\partial z^l_j} , $$
#
# the **error** of neuron $j$ in layer $l$: how fast the cost grows if this neuron gets a little more input. The
# neuron's weights and bias change the cost only through $z^l_j$, so their derivatives follow from it.
#
# **(1) The last layer.** $z_j$ acts on $C$ only through $a_j = \sigma(z_j)$. The chain rule, and
# $\partial C/\partial a_j = a_j - y_j$:
#
# $$ \delta^L_j = (a^L_j - y_j)\, \sigma'(z^L_j) . $$
#
# **(2) One layer down.** $z^l_k$ acts on the cost only through the neurons $j$ of the next layer, and on each of them
# by $z^{l+1}_j = \sum_k \sigma(z^l_k) W_{kj} + b_j$, whose derivative is $\sigma'(z^l_k) W_{kj}$. Sum over all of them:
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
# the activation at one end of the weight, times the error at the other end.
#
# One thing is left: $\sigma'$. From $\sigma(z) = 1/(1+e^{-z})$ follows $\sigma'(z) = \sigma(z)\,(1-\sigma(z)) =
# a\,(1-a)$. So we need not keep $z$: the activation is enough.


# %%
exercise.draw_ways()

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
# The matrix product in (4) sums over the samples, since its sum runs over the rows.
#
# **Exercise 1.** Write them. The check compares with the loops above, sample by sample.


# %%
def backward(x, y, W2, a1, a2):
    """dC/dW1, dC/db1, dC/dW2, dC/db2 of the mean cost of a batch."""
    # gap: the four equations, for a batch; x, y, a1 and a2 have a row a sample
    # delta2 = ...
    # delta1 = ...
    # return ..., ..., ..., ...
    # solution
    delta2 = (a2 - y) * a2 * (1 - a2) / len(x)  # (1)
    delta1 = delta2 @ W2.T * a1 * (1 - a1)  # (2)
    return x.T @ delta1, delta1.sum(axis=0), a1.T @ delta2, delta2.sum(axis=0)  # (4) (3) (4) (3)
    # wrong: it is 32 times
    # delta2 = (a2 - y) * a2 * (1 - a2)
    # delta1 = delta2 @ W2.T * a1 * (1 - a1)
    # return x.T @ delta1, delta1.sum(axis=0), a1.T @ delta2, delta2.sum(axis=0)
    # wrong: dC/db1
    # delta2 = (a2 - y) * a2 * (1 - a2) / len(x)
    # delta1 = delta2 @ W2.T
    # return x.T @ delta1, delta1.sum(axis=0), a1.T @ delta2, delta2.sum(axis=0)
    # end


# %%
batch, wanted = x_train[:32], np.eye(OUTPUTS)[y_train[:32]]
a1, a2 = forward(batch, W1, b1, W2, b2)
by_hand = checks.several(4, backward, batch, wanted, W2, a1, a2)

# The mean of what the loops give for each sample must be the same.
by_loops = [backward_by_loops(batch[i], wanted[i], W2, a1[i], a2[i]) for i in range(32)]
names = "dC/dW1", "dC/db1", "dC/dW2", "dC/db2"
for name, ours, theirs in zip(
    reversed(names), reversed(by_hand), reversed([*zip(*by_loops, strict=True)]), strict=True
):
    checks.same(ours, np.mean(theirs, axis=0), name)
checks.right("the four equations, as four matrix expressions")

# %% [markdown]
# More layers need no more equations: (2) is used once more for each.
#
# **Exercise 2.** Write backward for any number of sigmoid layers, without biases. `activations` has x first, then
# $a^1$, $a^2$ and so on; so the layer of `weights[l]` has the input `activations[l]` and the output `activations[l +
# 1]`.


# %%
def backward_deep(y, weights, activations):
    """dC/dW of every layer, the first layer first, for the mean quadratic cost of a batch."""
    # gap: (1) for the last layer, then (4) and (2) from layer to layer
    # delta = (activations[-1] - y) / len(y)
    # return [a.T @ delta for a in activations[:-1]]
    # solution
    a, gradients = activations[-1], []
    delta = (a - y) * a * (1 - a) / len(y)
    for W, a in zip(reversed(weights), reversed(activations[:-1]), strict=True):
        gradients.append(a.T @ delta)
        delta = delta @ W.T * a * (1 - a)
    return gradients[::-1]
    # wrong: the gradient of matrix 1 of 2
    # a, gradients = activations[-1], []
    # delta = (a - y) * a * (1 - a) / len(y)
    # for W, a in zip(reversed(weights), reversed(activations[:-1]), strict=True):
    #     gradients.append(a.T @ delta)
    #     delta = delta @ W.T
    # return gradients[::-1]
    # wrong: yours is of the type ndarray
    # delta = (activations[-1] - y) * activations[-1] * (1 - activations[-1]) / len(y)
    # return activations[-2].T @ delta
    # wrong: first layer first
    # a, gradients = activations[-1], []
    # delta = (a - y) * a * (1 - a) / len(y)
    # for W, a in zip(reversed(weights), reversed(activations[:-1]), strict=True):
    #     gradients.append(a.T @ delta)
    #     delta = delta @ W.T * a * (1 - a)
    # return gradients
    # end


# %%
exercise.check_deep(backward_deep)

# %% [markdown]
# What does it cost? Here are both ways, for all 2,260 derivatives of the batch:

# %%
begin = time.perf_counter()
for _ in range(20):
    backward(batch, wanted, W2, *forward(batch, W1, b1, W2, b2))
fast = (time.perf_counter() - begin) / 20
begin = time.perf_counter()
for _ in range(20):
    cost(batch, wanted, W1, b1, W2, b2)
count = W1.size + b1.size + W2.size + b2.size
slow = (time.perf_counter() - begin) / 20 * 2 * count

exercise.draw_times(fast, slow)

# %% [markdown]
# ## 5. The same in `nn`
#
# In `nn` a layer is a function and its derivative. It holds no arrays: parameters `p` and what backward needs
# (`saved`) are handed in and out. Each layer does its part of the chain rule without knowing its neighbours: it is
# given `gy`, the derivative of the cost with respect to its output, and returns `gx`, that with respect to its input,
# and the gradients of its parameters by name. The four equations fall into pieces:
#
# | layer | forward | backward | which equation |
# |---|---|---|---|
# | `QuadraticLoss` | $\frac{1}{2B}\sum (z-y)^2$ | $(z - y)/B$ | first factor of (1) |
# | `Sigmoid` | $y = \sigma(x)$ | `gx = gy * y * (1 - y)` | second factor of (1) and (2) |
# | `Linear` | $y = xW + b$ | `gx = gy @ W.T` | first factor of (2) |
# | | | `"b": gy.sum(0)`, `"W": x.T @ gy` | (3) and (4) |
#
# Read them in `nn/losses.py`, `nn/layers/activations.py` and `nn/layers/dense.py`: `Linear` and `Sigmoid` are a dozen
# lines each.
#
# All parameters of a network lie in **one** flat array, and so do all gradients; `views` shows them as matrices. So
# an update is one line for the whole network, and so is sending all gradients to another process (notebook 8).

# %%
network = nn.Network(
    nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, OUTPUTS), nn.Sigmoid()),
    in_shape=(INPUTS,),
    dtype=np.float64,
)
print(network.summary())

parameters, gradients = network.layout.zeros(np.float64), network.layout.zeros(np.float64)
p, g, ctx = network.layout.views(parameters), network.layout.views(gradients), network.context()
p[0].W[...], p[0].b[...], p[2].W[...], p[2].b[...] = W1, b1, W2, b2  # the same weights as ours

output, saved = network.forward(p, batch, ctx)
loss, gz = nn.QuadraticLoss()(output, y_train[:32], 32, ctx)  # the 32 is B
network.backward(p, g, gz, saved, ctx)


def relative(ours, theirs):
    """The largest difference, in units of the largest entry."""
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


for name, ours, theirs in zip(("gW1", "gb1", "gW2", "gb2"), by_hand, (g[0].W, g[0].b, g[2].W, g[2].b), strict=True):
    print(f"{name}: by hand and nn differ by {relative(ours, theirs):.1e}")
    assert relative(ours, theirs) < 1e-12
assert relative(a2, output) < 1e-12
assert abs(loss - cost(batch, wanted, W1, b1, W2, b2) / 32) < 1e-12 * loss

# %% [markdown]
# **Exercise 3.** A famous cost makes equation (1) simpler. With the cross-entropy
# $C = -\sum_j \big[ y_j \ln a_j + (1 - y_j) \ln (1 - a_j) \big]$, find $\delta^L_j$ for a sigmoid output. Work out
# $\partial C/\partial a_j$, multiply by $\sigma'(z_j) = a_j (1 - a_j)$, and see what cancels.


# %%
def delta_of_cross_entropy(a, y):
    # gap: equation (1) for the cross-entropy; this is that of the quadratic cost
    # return (a - y) * a * (1 - a)
    # solution
    return a - y  # sigma' cancels: an output that is wrong and saturated learns fast all the same
    # wrong: it has the wrong sign
    # return y - a
    # end


# %%
exercise.check_delta(delta_of_cross_entropy)
exercise.draw_push(delta_of_cross_entropy)

# %% [markdown]
# On the far left the output is as wrong as it can be. Cross-entropy pushes with full force; the quadratic cost hardly
# at all, since $\sigma'$ is nearly 0 there: a network that is very wrong, and learns nothing from it.

# %% [markdown]
# ## 6. Is a gradient right?
#
# A wrong derivative does not crash. The network often still learns, only worse, and the error stays unnoticed.
# Therefore every layer of `nn` is tested against the definition of the derivative. The slow way of section 2 would test
# one parameter at a time. It is enough to test **one random direction** over all parameters together: for a vector $d$
# of length 1,
#
# $$ \frac{C(w + \varepsilon d) - C(w - \varepsilon d)}{2 \varepsilon} \;\approx\; \nabla C \cdot d . $$
#
# If any entry of the gradient is wrong, a random direction will show it. Two evaluations, whatever the number
# of parameters. How small should $\varepsilon$ be? Too large, and the curve bends away from its tangent: an error
# like $\varepsilon^2$. Too small, and the two costs agree in all digits that a float64 has: an error like
# $10^{-16}/\varepsilon$.
#
# **Exercise 4.** Write the left side, for any function of a vector.


# %%
def directional_derivative(f, w, d, eps):
    """How fast f grows along d, at w."""
    # gap: by both sides
    # return (f(w + eps * d) - f(w)) / eps
    # solution
    return (f(w + eps * d) - f(w - eps * d)) / (2 * eps)
    # wrong: times what, over which distance
    # return (f(w + eps * d) - f(w - eps * d)) / eps
    # wrong: it changes w
    # w += eps * d
    # high = f(w)
    # return (high - f(w - 2 * eps * d)) / (2 * eps)
    # wrong: yours makes 12
    # return sum(d[i] * (f(w + eps * e) - f(w - eps * e)) / (2 * eps) for i, e in enumerate(np.eye(len(w))))
    # end


# %%
exercise.check_direction(directional_derivative)

# %%
direction = network.layout.zeros(np.float64)
for _, array in network.layout.items(direction):
    array[...] = rng.standard_normal(array.shape)
direction /= np.linalg.norm(direction)


def mean_cost(w):
    output, _ = network.forward(network.layout.views(w), batch, ctx)
    return nn.QuadraticLoss()(output, y_train[:32], 32, ctx)[0]


def directional_error(gradient, eps):
    """How far the gradient is from the numerical derivative along `direction`, relative."""
    numerical = directional_derivative(mean_cost, parameters, direction, eps)
    return abs(numerical - gradient @ direction) / abs(numerical)


# A deliberately wrong gradient, as a control: (2) without its sigma'.
wrong = network.layout.zeros(np.float64)
wrong_views = network.layout.views(wrong)
delta2 = (a2 - wanted) * a2 * (1 - a2) / 32
delta1 = delta2 @ W2.T
wrong_views[2].W[...], wrong_views[2].b[...] = a1.T @ delta2, delta2.sum(axis=0)
wrong_views[0].W[...], wrong_views[0].b[...] = batch.T @ delta1, delta1.sum(axis=0)

exercise.draw_steps(directional_error, wrong, gradients)

print(f"at 1e-5: backprop {directional_error(gradients, 1e-5):.0e}, wrong {directional_error(wrong, 1e-5):.0e}")
assert directional_error(gradients, 1e-5) < 1e-7
assert directional_error(wrong, 1e-5) > 1e-2

# %% [markdown]
# The blue V shows both errors: rounding on the left, curvature on the right. The red gradient is wrong at every step.
# This is what `nn.gradcheck` does with any layer, its input included. A layer of your own needs three methods, or fewer
# if it inherits from a layer that is nearly the same. Here is a sigmoid whose derivative was "simplified" from $y(1-y)$
# to $y$:


# %%
class HastySigmoid(nn.Sigmoid):
    def backward(self, p, gy, y, ctx):
        return gy * y, {}  # no parameters, so no gradients of any


inputs = rng.standard_normal((5, 8))
print(f"Sigmoid:      {nn.gradcheck(nn.Sigmoid(), inputs):.0e}")
print(f"HastySigmoid: {nn.gradcheck(HastySigmoid(), inputs):.0e}")
assert nn.gradcheck(nn.Sigmoid(), inputs) < 1e-6 < 1e-2 < nn.gradcheck(HastySigmoid(), inputs)

# %% [markdown]
# **Exercise 5.** Write a layer of your own: *softsign*, $y = x / (1 + |x|)$, with the derivative $1/(1+|x|)^2$.
# Forward returns `y` and what backward will need; `backward` gets that back as `saved`, and `gy`. It returns the
# gradient of its input, and those of its parameters by name: there are none.


# %%
class Softsign(nn.Layer):
    def forward(self, p, x, ctx):
        return x / (1 + np.abs(x)), x

    def backward(self, p, gy, saved, ctx):
        # gap: the chain rule: gy times the derivative
        # return gy, {}
        # solution
        return gy / (1 + np.abs(saved)) ** 2, {}
        # wrong: backward is not the derivative of forward
        # return gy / (1 + np.abs(saved)), {}
        # end


# %%
exercise.check_layer(Softsign(), inputs)

# %% [markdown]
# **Exercise 6.** A loss has a gradient, too. The *Huber* loss is quadratic for small errors $e = z - y$ and linear for
# large ones, so that a single outlier does not dominate the gradient: $\frac12 e^2$ where $|e| \le 1$, else $|e| -
# \frac12$. Its derivative with respect to $z$?


# %%
def huber_gradient(e):
    """dC/dz of each sample, for the errors e."""
    # gap: the derivative of both branches
    # return e
    # solution
    return np.clip(e, -1, 1)
    # wrong: the gradient
    # return np.sign(e)
    # wrong: the gradient
    # return np.where(np.abs(e) <= 1, e, 1)
    # end


# %%
exercise.check_huber(huber_gradient)

# %% [markdown]
# **To try further.** Start with all weights 0: why does the network not learn? (What do the hidden neurons have in
# common, before and after a step?) Leave out the sigmoid at the end: which line changes? How does the V of the gradient
# check look in float32, and where is its lowest point?
#
# Next: `03_digits`, where this network learns to read.
#
# *Sources: Rumelhart, Hinton, Williams 1986 (backpropagation); Nielsen 2015 (the four equations, and the quadratic cost
# with one half); Huber 1964; Bergstra et al. 2009 (softsign).*
