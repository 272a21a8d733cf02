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
# # 4b. Training that works
#
# Four equations and a loop are enough to train two layers. Twenty layers need more. This notebook has the missing
# pieces; you write each of them in a few lines:
#
# 1. **softmax and cross-entropy**: the usual loss, and its gradient;
# 2. **Adam**: a step length for each parameter; and **AdamW**;
# 3. **vanishing gradients**, and **initialisation** for ReLU;
# 4. **normalisation**: by the batch, and by the sample;
# 5. **regularisation**: weight decay and **dropout**;
# 6. the **learning-rate schedule**, and **clipping**;
# 7. all 1,797 digits, each of them tested once: **cross-validation**.
#
# The later notebooks use all of it: ZeRO (12) shares Adam's memory, tensor parallelism (14) cuts the cross-entropy, and
# large batches (9) need a schedule.

# %%
import numpy as np
from threadpoolctl import threadpool_limits

import checks
import exercises.training as exercise
import nn
from checks import BLUE, GREEN, ORANGE, RED

# %matplotlib inline
checks.style()
limits = threadpool_limits(1, user_api="blas")  # small matrices are multiplied fastest by one thread

# %% [markdown]
# ## 1. Softmax and cross-entropy
#
# A network for K classes has K outputs $z_k$, which may be any numbers. **Softmax** makes probabilities of them:
#
# $$ p_k = \frac{e^{z_k}}{\sum_j e^{z_j}} . $$
#
# The **cross-entropy** of a sample whose class is $y$ is $-\ln p_y$: it is 0 where the network is certain and right,
# and grows without limit where it is certain and wrong. It needs only the logarithm,
#
# $$ \ln p_k = z_k - \ln \sum_j e^{z_j} . $$
#
# In floating point $e^{1000}$ is infinite. But adding the same number to all outputs of a sample changes no
# probability: numerator and denominator get the same factor.
#
# **Exercise 1.** Write the logarithm of softmax, for a row a sample, so that it is right for all outputs.


# %%
def log_softmax(z):
    """ln p for z of shape (samples, classes)."""
    # gap: shift each row first
    # return np.log(np.exp(z) / np.exp(z).sum(axis=1, keepdims=True))
    # solution
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    # wrong: one sum for each row
    # z = z - z.max()
    # return z - np.log(np.exp(z).sum())
    # wrong: Make a new array
    # z -= z.max(axis=1, keepdims=True)
    # return z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    # wrong: which number makes the largest exponent 0
    # z = z - z.max()
    # return z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    # wrong: far apart
    # z = z - z.mean(axis=1, keepdims=True)
    # return z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    # wrong: far apart
    # e = np.exp(z - z.max(axis=1, keepdims=True))
    # return np.log(e / e.sum(axis=1, keepdims=True))
    # end


# %%
exercise.check_log_softmax(log_softmax)

# %% [markdown]
# Its gradient is simple. With $Y_k = 1$ for the right class and else 0,
#
# $$ \frac{\partial}{\partial z_k} \Big( \ln \sum_j e^{z_j} - z_y \Big) = p_k - Y_k : $$
#
# *what the network says minus what is true.* It contains no slope of an activation function, which could be 0 (as for
# the sigmoid in notebook 2).
#
# **Exercise 2.** Write the gradient of the **mean** cross-entropy of a batch.


# %%
def cross_entropy_gradient(z, labels):
    """The gradient with respect to z, (samples, classes); labels are the classes of the samples."""
    # gap: probabilities, minus 1 at the labels, for the mean over the samples
    # return np.exp(log_softmax(z))
    # solution
    gz = np.exp(log_softmax(z))
    gz[np.arange(len(z)), labels] -= 1
    return gz / len(z)
    # wrong: the gradient of the sum over the samples
    # gz = np.exp(log_softmax(z))
    # gz[np.arange(len(z)), labels] -= 1
    # return gz
    # wrong: the gradient:
    # gz = np.exp(log_softmax(z))
    # gz[:, labels] -= 1
    # return gz / len(z)
    # end


# %%
exercise.check_cross_entropy(cross_entropy_gradient)

# %% [markdown]
# ## 2. Adam
#
# Notebook 1 ended in a narrow valley: one rate for all directions is too large for one and too small for the other.
# **Momentum** helps by remembering. **Adam** (Kingma, Ba 2015) remembers two things for every parameter, the mean of
# its gradients and the mean of their squares,
#
# $$ m \leftarrow \beta_1 m + (1 - \beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\, g^2, $$
#
# and divides one by the root of the other. Both begin at 0, so in step t = 1, 2, ... they are too small by $1 -
# \beta^t$, and that is corrected:
#
# $$ w \leftarrow w - \eta\, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \varepsilon} . $$
#
# **Exercise 3.** Write a step.


# %%
def adam_step(w, g, m, v, t, rate, beta1=0.9, beta2=0.999, eps=1e-8):
    """(new w, new m, new v) of step t = 1, 2, ..."""
    # gap: both means, then the corrected step
    # m, v = g, g**2
    # return w - rate * m / (np.sqrt(v) + eps), m, v
    # solution
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    return w - rate * m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps), m, v
    # wrong: what corrects m and v, which began at 0
    # m = beta1 * m + (1 - beta1) * g
    # v = beta2 * v + (1 - beta2) * g**2
    # return w - rate * m / (np.sqrt(v) + eps), m, v
    # wrong: Is eps added to the root, not inside it
    # m = beta1 * m + (1 - beta1) * g
    # v = beta2 * v + (1 - beta2) * g**2
    # return w - rate * m / (1 - beta1**t) / np.sqrt(v / (1 - beta2**t) + eps), m, v
    # wrong: an epsilon missing
    # m = beta1 * m + (1 - beta1) * g
    # v = beta2 * v + (1 - beta2) * g**2
    # return w - rate * m / (1 - beta1**t) / np.sqrt(v / (1 - beta2**t)), m, v
    # wrong: v after step 1
    # m = beta1 * m + (1 - beta1) * g
    # v = beta2 * v + (1 - beta2) * np.abs(g)
    # return w - rate * m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps), m, v
    # end


# %%
exercise.check_adam(adam_step)

# %% [markdown]
# Here is a valley that is a hundred times steeper across than along. All methods begin at the same place, and each has
# the best of three rates:


# %%
def slope(w):
    """The gradient of (w0^2 + 100 w1^2) / 2."""
    return w * np.array([1.0, 100.0])


def descend(kind, rate, steps=60):
    w, m, v, path = np.array([-4.0, 1.0]), np.zeros(2), np.zeros(2), [np.array([-4.0, 1.0])]
    for t in range(1, steps + 1):
        if kind == "Adam":
            w, m, v = adam_step(w, slope(w), m, v, t, rate)
        else:
            m = (0.8 if kind == "momentum" else 0) * m + slope(w)
            w = w - rate * m
        path.append(w)
    return np.array(path)


kinds = {"gradient descent": BLUE, "momentum": GREEN, "Adam": ORANGE}
tried = {"gradient descent": (0.005, 0.01, 0.019), "momentum": (0.005, 0.01, 0.02), "Adam": (0.1, 0.3, 0.5)}
exercise.draw_valley(kinds, descend, tried)

# %% [markdown]
# With the best of its rates momentum is ahead here. Adam has another strength: its steps are as long along the valley
# as across it, whatever the curvatures are. So the same rate, 0.001, is a good first guess for very different networks.
# Its price is memory: two more numbers for every parameter. Notebook 12 divides these among ranks.
#
# **Weight decay** pulls every weight a little towards 0, unless the data push it away. Added to the gradient ($g +
# \lambda w$), Adam would divide it by $\sqrt v$ as it divides g: weights with large gradients would hardly decay.
# **AdamW** (Loshchilov, Hutter 2019) separates the two: a step of Adam with g alone, and then $- \eta \lambda w$, with
# the weights before the step.
#
# **Exercise 4.** Write AdamW with your `adam_step`.


# %%
def adamw_step(w, g, m, v, t, rate, decay):
    """(new w, new m, new v)."""
    # gap: the decay does not pass through m and v
    # return adam_step(w, g + decay * w, m, v, t, rate)
    # solution
    moved, m, v = adam_step(w, g, m, v, t, rate)
    return moved - rate * decay * w, m, v
    # wrong: w after a step
    # moved, m, v = adam_step(w, g, m, v, t, rate)
    # return moved - decay * w, m, v
    # wrong: a value from after the step
    # moved, m, v = adam_step(w, g, m, v, t, rate)
    # return moved - rate * decay * moved, m, v
    # end


# %%
exercise.check_decay(adamw_step, adam_step)

# %% [markdown]
# ## 3. Gradients that vanish
#
# Backpropagation multiplies the error by a matrix and by a slope, layer after layer. If these factors are smaller than
# 1, the gradient of the first layers of a deep network is nearly 0: it **vanishes**. If they are larger than 1, it
# **explodes**. The slope of a sigmoid is at most 1/4; that of ReLU is 1 or 0.
#
# **Exercise 5.** Measure it. Given the matrices of a network without biases, the activations $a^l$ behind each layer,
# and the gradient of the cost with respect to the *last activations*, return the lengths (`np.linalg.norm`) of
# $\delta^l = \partial C/\partial z^l$ for every layer, the first layer first. `slope(a)` is the slope of the activation
# function, from its output.


# %%
def gradient_norms(weights, activations, gradient, slope):
    """|dC/dz| of each layer; gradient is dC/da of the last one, a row a sample."""
    norms = []
    # gap: from the last layer to the first: times the slope, note the length, back through the matrix
    # for W, a in zip(reversed(weights), reversed(activations)):
    #     norms.append(np.linalg.norm(gradient))
    #     gradient = gradient @ W.T
    # return norms[::-1]
    # solution
    for W, a in zip(reversed(weights), reversed(activations), strict=True):
        delta = gradient * slope(a)
        norms.append(np.linalg.norm(delta))
        gradient = delta @ W.T
    return norms[::-1]
    # wrong: the last layer first
    # for W, a in zip(reversed(weights), reversed(activations)):
    #     gradient = gradient * slope(a)
    #     norms.append(np.linalg.norm(gradient))
    #     gradient = gradient @ W.T
    # return norms
    # end


# %%
exercise.check_norms(gradient_norms)

# %% [markdown]
# Weights that scatter by $1/\sqrt n$ keep the size of what passes through a *linear* layer (notebook 3). ReLU sets half
# of it to 0, and with it half of the sum of squares.
#
# **Exercise 6.** Draw weights for layers with ReLU, so that the mean square of the activations stays the same from
# layer to layer (He et al. 2015).


# %%
def he_weights(rng, inputs, outputs):
    """(inputs, outputs) normal numbers."""
    # gap: of the right size for ReLU
    # return rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
    # solution
    return rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
    # wrong: times as large. ReLU makes half of them 0
    # return rng.standard_normal((inputs, outputs)) * 2 / np.sqrt(inputs)
    # wrong: times as large. ReLU makes half of them 0
    # return rng.standard_normal((inputs, outputs)) * np.sqrt(2 / outputs)
    # wrong: times as large. ReLU makes half of them 0
    # return rng.standard_normal((inputs, outputs)) * np.sqrt(4 / (inputs + outputs))
    # end


# %%
exercise.check_he(he_weights)

# %%
DEPTH, WIDTH = 30, 100
sigmoid = lambda z: 1 / (1 + np.exp(-z))
relu = lambda z: np.maximum(z, 0)
narrow = lambda rng, n, m: rng.standard_normal((n, m)) / np.sqrt(n)
setups = {
    "sigmoid, $1/\\sqrt{n}$": (sigmoid, lambda a: a * (1 - a), narrow, RED),
    "ReLU, $1/\\sqrt{n}$": (relu, lambda a: (a > 0) * 1.0, narrow, ORANGE),
    "ReLU, He": (relu, lambda a: (a > 0) * 1.0, he_weights, BLUE),
}
errors = {}
for name, (f, slope_of, draw_weights, _) in setups.items():
    rng = np.random.default_rng(0)
    matrices = [draw_weights(rng, WIDTH, WIDTH) for _ in range(DEPTH)]
    a, activations = rng.standard_normal((64, WIDTH)), []
    for W in matrices:
        a = f(a @ W)
        activations.append(a)
    norms = np.array(gradient_norms(matrices, activations, rng.standard_normal(a.shape), slope_of))
    errors[name] = norms / norms[-1]
exercise.draw_vanishing(errors, DEPTH, setups)
for name, norms in errors.items():
    print(f"{name:24}: the first layer has {norms[0]:.1e} of the last one's gradient")
assert errors["ReLU, He"][0] > 0.05 and errors["sigmoid, $1/\\sqrt{n}$"][0] < 1e-10

# %% [markdown]
# That is why sigmoids went out of use inside deep networks. A third remedy is to leave a way past each layer, $x +
# f(x)$: a **residual connection** (He et al. 2016), whose slope has a 1 in it whatever f does. Transformers have one
# around every layer (notebook 13b).
#
# ## 4. Normalisation
#
# Training changes the weights, and with them the size of the activations. **Batch normalisation** (Ioffe, Szegedy 2015)
# makes every feature have mean 0 and deviation 1 over the batch, in every step. But in evaluation there may be one
# sample only. So a running mean and variance are kept in training, $r \leftarrow 0.9\, r + 0.1\, \text{batch}$, and
# used in evaluation.
#
# **Exercise 7.** Write it, without the scale and shift that usually follow. Where a variance is used, add
# $\varepsilon = 10^{-5}$ to it under the root.


# %%
def batch_norm(x, running_mean, running_variance, training, eps=1e-5):
    """(y, new running mean, new running variance); x: (samples, features)."""
    # gap: by the batch in training, by what was remembered in evaluation
    # mean, variance = x.mean(axis=0), x.var(axis=0)
    # return (x - mean) / np.sqrt(variance + eps), running_mean, running_variance
    # solution
    mean, variance = running_mean, running_variance
    if training:
        mean, variance = x.mean(axis=0), x.var(axis=0)
        running_mean = 0.9 * running_mean + 0.1 * mean
        running_variance = 0.9 * running_variance + 0.1 * variance
    return (x - mean) / np.sqrt(variance + eps), running_mean, running_variance
    # wrong: each feature (column) of y must have mean 0
    # mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    # return (x - mean) / np.sqrt(variance + eps), running_mean, running_variance
    # wrong: the running mean and variance after evaluation
    # mean, variance = (x.mean(axis=0), x.var(axis=0)) if training else (running_mean, running_variance)
    # new = 0.9 * running_mean + 0.1 * x.mean(axis=0), 0.9 * running_variance + 0.1 * x.var(axis=0)
    # return (x - mean) / np.sqrt(variance + eps), *new
    # end


# %%
exercise.check_batch_norm(batch_norm)

# %% [markdown]
# Batch normalisation makes a sample's output depend on the other samples of the batch: with many ranks one must decide
# *which* batch, that of a rank or that of all ranks. **Layer normalisation** (Ba, Kiros, Hinton 2016) avoids that. It
# takes mean and deviation over the features of **each sample**: $h = (x - \mu) / \sigma$. Transformers use it.
#
# Its gradient has three terms, since $\mu$ and $\sigma$ depend on x as well. With $\overline{\,\cdot\,}$ for the mean
# over the features:
#
# $$ g_x = \frac{1}{\sigma} \big( g_h - \overline{g_h} - h\; \overline{g_h\, h} \big) . $$
#
# **Exercise 8.** Write it. (Here $\varepsilon$ is left out: $\sigma$ is `x.std`.)


# %%
def layer_norm_backward(x, gh):
    """The gradient of x, for h = (x - mean) / deviation of each row, and gh, that of h."""
    # gap: the three terms; means are over axis 1
    # return gh / x.std(axis=1, keepdims=True)
    # solution
    sigma = x.std(axis=1, keepdims=True)
    h = (x - x.mean(axis=1, keepdims=True)) / sigma
    return (gh - gh.mean(axis=1, keepdims=True) - h * (gh * h).mean(axis=1, keepdims=True)) / sigma
    # wrong: the gradient of x:
    # sigma = x.std(axis=1, keepdims=True)
    # return (gh - gh.mean(axis=1, keepdims=True)) / sigma
    # end


# %%
exercise.check_layer_norm(layer_norm_backward)

# %% [markdown]
# ## 5. Dropout
#
# To learn samples by heart, neurons must work together in fixed combinations. **Dropout** (Srivastava et al. 2014) sets
# each number to 0 with the probability `rate`, anew in each step, so that no neuron can rely on another one. The
# numbers that are kept are divided by 1 - rate, so that the next layer gets the same on average. In evaluation nothing
# is dropped.
#
# **Exercise 9.** Write it. `rng.random(shape)` gives numbers between 0 and 1.


# %%
def dropout(x, rate, rng, training):
    """x with some numbers set to 0, in training."""
    # gap: a mask of numbers to keep, and the scale
    # return np.where(rng.random(x.shape) >= rate, x, 0)
    # solution
    if not training:
        return x
    return np.where(rng.random(x.shape) >= rate, x / (1 - rate), 0)
    # wrong: a quarter is to be 0
    # return np.where(rng.random(x.shape) < rate, x / (1 - rate), 0) if training else x
    # wrong: each number is dropped by itself
    # return np.where(rng.random((len(x), 1)) >= rate, x / (1 - rate), 0) if training else x
    # wrong: in evaluation nothing is dropped
    # return np.where(rng.random(x.shape) >= rate, x / (1 - rate), 0)
    # end


# %%
exercise.check_dropout(dropout)

# %% [markdown]
# How much do weight decay and dropout help? Here are 400 digits to learn from, a quarter of them with a *wrong label*.
# A network that learns by heart learns these, too:

# %%
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
x_train, y_train = (array[:400].copy() for array in data.train.batch())
rng = np.random.default_rng(0)
mislabelled = rng.permutation(400)[:100]
y_train[mislabelled] = (y_train[mislabelled] + rng.integers(1, 10, 100)) % 10
few = nn.data.Dataset(x_train, y_train, dtype=np.float64)


def final_errors(rate=0.0, decay=0.0, seeds=3):
    """Errors in percent, (of the training labels, of the validation digits), after 60 epochs: the mean over seeds."""
    errors = []
    for seed in range(seeds):
        layers = nn.Linear(64, 200), nn.ReLU(), nn.Dropout(rate), nn.Linear(200, 10)
        network = nn.Network(nn.Sequential(*layers), in_shape=(64,), dtype=np.float64)
        trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(0.1, weight_decay=decay), seed=seed)
        nn.fit(trainer, nn.Loader(few, batch=10, seed=seed), epochs=60)
        errors.append([100 * (1 - nn.evaluate(trainer, part)["accuracy"]) for part in (few, data.validation)])
    return np.mean(errors, axis=0)


regularised = {
    "neither": final_errors(),
    "weight decay 0.01": final_errors(decay=0.01),
    "dropout 0.5": final_errors(rate=0.5),
}
exercise.draw_regularised(regularised)
assert max(regularised["weight decay 0.01"][1], regularised["dropout 0.5"][1]) < regularised["neither"][1]

# %% [markdown]
# Without them the network agrees with most of the wrong labels, and makes more mistakes on new digits. The other two
# disagree with more of the training labels, which is right.
#
# ## 6. Schedule and clipping
#
# Large steps reach the valley quickly, small ones reach its bottom. The usual schedule of the rate for large networks:
# a straight **warm-up** for the first steps, then down along half a **cosine**,
#
# $$ \eta(t) = \tfrac12\, \eta_{\max} \Big( 1 + \cos \frac{\pi\,(t - t_w)}{t_{\text{end}} - t_w} \Big)
#    \qquad \text{from } t = t_w \text{ on.} $$
#
# **Exercise 10.** During warm-up, step t = 0, 1, ..., $t_w - 1$ has the rate $\eta_{\max} (t + 1)/t_w$, so that step 0
# changes the parameters.


# %%
def rate_of(t, largest, warm, steps):
    """The learning rate of step t = 0, 1, ..., steps."""
    # gap: up, then down
    # return largest * t / warm if t < warm else largest
    # solution
    if t < warm:
        return largest * (t + 1) / warm
    return largest / 2 * (1 + np.cos(np.pi * (t - warm) / (steps - warm)))
    # wrong: the rate of step 0 is 0
    # return largest * t / warm if t < warm else largest / 2 * (1 + np.cos(np.pi * (t - warm) / (steps - warm)))
    # wrong: the rate of step 0, 1, ..., 100
    # return largest * (t + 1) / warm if t < warm else largest / 2 * (1 + np.cos(np.pi * t / steps))
    # end


# %%
exercise.check_rate(rate_of)

# %% [markdown]
# A sample with a very large loss can make a step far too long. **Clipping** limits the length of the gradient: of *all*
# gradients of the network together, so that the direction of the step stays (Pascanu et al. 2013).
#
# **Exercise 11.** Write it, for a list of arrays.


# %%
def clip(gradients, limit):
    """The gradients, scaled so that all together are at most `limit` long."""
    # gap: one length for all of them
    # return [g * min(1, limit / np.linalg.norm(g)) if g.any() else g for g in gradients]
    # solution
    length = np.sqrt(sum(np.sum(g**2) for g in gradients))
    return [g * min(1, limit / length) for g in gradients]
    # wrong: gradients that are shorter than the limit stay as they are
    # length = np.sqrt(sum(np.sum(g**2) for g in gradients))
    # return [g * limit / length for g in gradients]
    # wrong: 2 is the limit
    # length = np.sqrt(sum(np.sum(g**2) for g in gradients))
    # return [g / max(1, length) for g in gradients]
    # wrong: 2 is the limit
    # length = sum(np.linalg.norm(g) for g in gradients)
    # return [g * min(1, limit / length) for g in gradients]
    # end


# %%
exercise.check_clip(clip)

# %% [markdown]
# ## 7. All digits, each tested once
#
# Notebook 3 kept some digits aside for the test; they are few, so its accuracy was uncertain. **Cross-validation** uses
# all 1,797 for both. Cut the samples into k parts, the *folds*. For each fold train a new network on all the others,
# and test it on this one. Every digit is then tested once, by a network that has not seen it.
#
# **Exercise 12.** Yield the k pairs (indices to learn from, indices to test), for indices that have been shuffled.
# `np.array_split` cuts an array into k parts of nearly equal length.


# %%
def folds(order, k):
    """Pairs of index arrays."""
    # gap: each part once for the test, all others for learning
    # for i in range(k):
    #     yield order, order[i * (len(order) // k) : (i + 1) * (len(order) // k)]
    # solution
    parts = np.array_split(order, k)
    for i in range(k):
        yield np.concatenate(parts[:i] + parts[i + 1 :]), parts[i]
    # wrong: in this order
    # parts = np.array_split(order, k)
    # for i in range(k):
    #     yield parts[i], np.concatenate(parts[:i] + parts[i + 1 :])
    # wrong: cut `order` as it is
    # parts = np.array_split(np.sort(order), k)
    # for i in range(k):
    #     yield np.concatenate(parts[:i] + parts[i + 1 :]), parts[i]
    # wrong: learned from and tested in the same fold
    # for test in np.array_split(order, k):
    #     yield order, test
    # wrong: what becomes of the remainder
    # n = len(order) // k
    # for i in range(k):
    #     test = order[i * n : (i + 1) * n]
    #     yield np.setdiff1d(order, test), test
    # end


# %%
exercise.check_folds(folds)

# %% [markdown]
# Now with everything: ReLU and He's weights, dropout, AdamW, your schedule; ten folds of all digits.

# %%
parts = [part.batch() for part in (data.train, data.validation, data.test)]
x_all, y_all = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
EPOCHS, BATCH, HE = 20, 32, {"init": nn.initializers.he}
wrong_digits = []
for train, test in folds(np.random.default_rng(0).permutation(len(x_all)), 10):
    hidden = nn.Linear(64, 128, **HE), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128, **HE), nn.ReLU()
    layers = *hidden, nn.Linear(128, 10)
    network = nn.Network(nn.Sequential(*layers), in_shape=(64,), dtype=np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.AdamW(0.003, weight_decay=0.01), seed=0)
    loader = nn.Loader(nn.data.Dataset(x_all[train], y_all[train], dtype=np.float64), batch=BATCH, seed=0)
    steps = EPOCHS * len(loader)
    nn.fit(trainer, loader, epochs=EPOCHS, schedule=lambda t, steps=steps: rate_of(t, 0.003, 50, steps))
    wrong_digits += test[trainer.predict(x_all[test]).argmax(axis=1) != y_all[test]].tolist()

accuracy = 1 - len(wrong_digits) / len(x_all)
uncertainty = 1.96 * np.sqrt(accuracy * (1 - accuracy) / len(x_all))
print(f"{len(x_all):,} digits, each tested once: {accuracy:.2%} right, give or take {uncertainty:.2%}")
exercise.draw_wrong_digits(wrong_digits, x_all, y_all)
assert accuracy > 0.97

# %% [markdown]
# The networks misread these digits. Could you read all of them?
#
# **To try further.** Leave out one thing at a time (dropout, the schedule, He's weights), and compare. The same network
# on 60,000 digits of MNIST: `python scripts/train.py --data mnist --model mlp:784,128,128,10`.
#
# Next: `05_messages`, where a second process comes in.
#
# *Sources: Kingma, Ba 2015; Loshchilov, Hutter 2019; He et al. 2015, 2016; Ioffe, Szegedy 2015; Ba, Kiros, Hinton 2016;
# Srivastava et al. 2014; Loshchilov, Hutter 2017 (cosine); Pascanu, Mikolov, Bengio 2013 (clipping).*
