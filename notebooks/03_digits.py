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
# # 3. A network reads digits
#
# With the gradient of notebook 2 and the loop of notebook 1 a network learns. Training it is the smaller part of the
# work. The larger one is to *look*: at the curves, at the mistakes, at what the neurons respond to, and to know which
# figure can be trusted. You will
#
# 1. see why a network needs layers, on a picture of what it decides;
# 2. choose its first weights, so that anything is learned at all;
# 3. train, and stop at the right time;
# 4. find which digits are mistaken for which others, and how confident the network was;
# 5. see what its hidden neurons look for;
# 6. look, once, at the test digits.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
import exercises.digits as exercise
import nn

# %matplotlib inline
checks.style()

# %% [markdown]
# ## Why layers?
#
# Two spirals of points, wound into each other. To which spiral does a new point belong? One layer, $z = xW + b$, can
# only cut the plane with straight lines. A hidden layer bends it first: every hidden neuron has a line of its own along
# which it turns from off to on, and the last layer combines these half-planes.

# %%
points, spiral = nn.data.synthetic.spirals(400, 2, turns=1.5, seed=1)
points = points.astype(np.float64)


def classifier(*hidden, rate=0.3, steps=1000):
    """A network of two inputs, trained on the spirals: (trainer, share of points that it gets right)."""
    sizes, layers = (2, *hidden), []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    network = nn.Network(nn.Sequential(*layers, nn.Linear(sizes[-1], 2)), in_shape=(2,), dtype=np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=rate, momentum=0.9), seed=3)
    for _ in range(steps):
        trainer.step(points, spiral, len(points))
    return trainer, np.mean(trainer.predict(points).argmax(axis=1) == spiral)


trained = {hidden: classifier(*hidden) for hidden in ((), (4,), (16, 16))}
exercise.draw_regions(points, spiral, trained)
assert trained[16, 16][1] > 0.98

# %% [markdown]
# ## The digits, in three parts
#
# 1,797 digits, written by hand, 8 x 8 pixels. The network learns from the **training** digits. We choose by the
# **validation** digits: how many neurons, which rate, how long. So the accuracy on them is too optimistic. The **test**
# digits, which are used once at the end, give the honest figure.
#
# **Exercise 1.** Split indices into three parts, at random: `validation` of them, `test` of them, and the others for
# training. (`rng.permutation(count)` gives the numbers from 0 on in a random order.)


# %%
def three_parts(rng, count, validation, test):
    """Indices (for training, for validation, for the test) of `count` samples."""
    # gap: each index in one part
    # return np.arange(count), rng.permutation(count)[:validation], rng.permutation(count)[:test]
    # solution
    order = rng.permutation(count)
    return order[validation + test :], order[:validation], order[validation : validation + test]
    # wrong: some samples are in two parts
    # one, two = rng.permutation(count), rng.permutation(count)
    # return one[validation + test :], one[:validation], two[:test]
    # wrong: Shuffle first
    # order = np.arange(count)
    # return order[: -validation - test], order[-validation - test : -test], order[-test:]
    # wrong: Shuffle first
    # order = np.arange(count)[::-1]
    # return order[validation + test :], order[:validation], order[validation : validation + test]
    # wrong: leave 50 for training
    # return count - validation - test, validation, test
    # end


# %%
exercise.check_parts(three_parts)

# %% [markdown]
# `nn.data.load` does it, with the classes evenly spread. Its test digits were written by other people.

# %%
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
x_train, y_train = data.train.batch()
x_validation, y_validation = data.validation.batch()
x_test, y_test = data.test.batch()

exercise.draw_parts(x_train, y_train, y_validation, y_test)

# %% [markdown]
# ## The first weights
#
# Before the first step there must be some weights. They cannot all be zero: then all hidden neurons are equal, get
# equal gradients, and stay equal: thirty neurons that act as one. So they are random. How large? The weighted input of
# a neuron is a sum of $n$ terms. If the weights scatter by 1, the sum scatters by about $\sqrt{n}$: for most samples
# the sigmoid is then near 0 or 1, where its slope is nearly 0, and so is the gradient that passes through it. Weights
# that scatter by $1/\sqrt{n}$ give sums that scatter by 1, whatever $n$.
#
# **Exercise 2.** Draw the weights of a layer with this scatter.


# %%
def first_weights(rng, inputs, outputs):
    """(inputs, outputs) random weights for which the weighted inputs scatter by about 1, for inputs that do."""
    # gap: normal numbers, of the right size
    # return rng.standard_normal((inputs, outputs))
    # solution
    return rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
    # wrong: the scatter after each layer
    # return rng.standard_normal((inputs, outputs)) / np.sqrt(outputs)
    # wrong: the weights have the shape
    # return rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
    # end


# %%
exercise.check_first_weights(first_weights)

# %% [markdown]
# Here is its effect on learning: the same network, the same steps, four kinds of first weights.

# %%
HIDDEN = 30


def new_trainer(scale=1.0, rate=3.0):
    network = nn.Network(
        nn.Sequential(nn.Linear(64, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, 10), nn.Sigmoid()),
        in_shape=(64,),
        dtype=np.float64,
    )
    trainer, rng = nn.Trainer(network, nn.QuadraticLoss(), nn.SGD(lr=rate), seed=0), np.random.default_rng(1)
    for layer, (inputs, outputs) in ((0, (64, HIDDEN)), (2, (HIDDEN, 10))):
        trainer.p[layer].W[...] = scale * first_weights(rng, inputs, outputs)
        trainer.p[layer].b[...] = 0
    return trainer


def accuracies(trainer, epochs):
    loader = nn.Loader(data.train, batch=10, seed=0)
    return [r["validation_accuracy"] for r in nn.fit(trainer, loader, epochs, validation=data.validation).history]


exercise.draw_first_weights(accuracies, new_trainer)

# %% [markdown]
# ## Training, and when to stop
#
# `nn.fit` is the loop of notebook 1: for every epoch shuffle, cut in batches, step; and at the end of each look at the
# validation digits. Here is its first epoch by hand, with the four equations: the result is the same.

# %%
trainer = new_trainer()
loader = nn.Loader(data.train, batch=10, seed=0)
W1, b1, W2, b2 = (a.copy() for a in (trainer.p[0].W, trainer.p[0].b, trainer.p[2].W, trainer.p[2].b))
sigma = lambda z: 1 / (1 + np.exp(-z))
for x, labels, count in loader.epoch(0):
    a1 = sigma(x @ W1 + b1)
    a2 = sigma(a1 @ W2 + b2)
    delta2 = (a2 - np.eye(10)[labels]) * a2 * (1 - a2) / count  # (1)
    delta1 = delta2 @ W2.T * a1 * (1 - a1)  # (2)
    W1 -= 3.0 * x.T @ delta1  # (4)
    b1 -= 3.0 * delta1.sum(axis=0)  # (3)
    W2 -= 3.0 * a1.T @ delta2
    b2 -= 3.0 * delta2.sum(axis=0)

training = nn.fit(trainer, loader, epochs=1, validation=data.validation)
worst = max(np.abs(a - b).max() for a, b in ((W1, trainer.p[0].W), (b2, trainer.p[2].b)))
print(f"after {trainer.steps} steps, by hand and nn.fit differ by {worst:.0e}")
assert worst < 1e-10

# %% [markdown]
# Now 120 epochs with few digits, to show **overfitting**: a network can learn 200 samples by heart. Its training cost
# keeps falling; the cost of digits that it has never seen falls, and then slowly rises again. (The cost is
# cross-entropy here, which is large for confident mistakes.)

# %%
few = nn.data.Dataset(x_train[:200], y_train[:200], dtype=np.float64)
layers = nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)
network = nn.Network(nn.Sequential(*layers), in_shape=(64,), dtype=np.float64)
student = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.2), seed=0)
history = nn.fit(student, nn.Loader(few, batch=10, seed=0), epochs=120, validation=data.validation).history
training_cost = np.array([record["loss"] for record in history])
validation_cost = np.array([record["validation_loss"] for record in history])


# %% [markdown]
# **Exercise 3.** *Early stopping.* Write the usual rule: stop when the validation cost has not reached a new minimum
# for `patience` epochs in a row, and keep the network of the minimum. Return both epochs, counted from 0.


# %%
def early_stop(costs, patience):
    """(the epoch of the lowest cost so far, the epoch after which we stop; the last one if we never do)."""
    best = 0
    for epoch in range(len(costs)):
        # gap: remember the best; stop when it is `patience` epochs ago
        # pass
        # solution
        if costs[epoch] < costs[best]:
            best = epoch
        elif epoch - best >= patience:
            return best, epoch
        # wrong: with patience 3
        # if costs[epoch] < costs[best]:
        #     best = epoch
        # elif epoch - best > patience:
        #     return best, epoch
        # wrong: with patience 3
        # if epoch and costs[epoch] < costs[epoch - 1]:
        #     best = epoch
        # elif epoch - best >= patience:
        #     return best, epoch
        # wrong: with patience 3, of [5, 3, 3, 3, 3, 2]
        # if costs[epoch] <= costs[best]:
        #     best = epoch
        # elif epoch - best >= patience:
        #     return best, epoch
        # end
    return best, len(costs) - 1


# %%
exercise.check_stop(early_stop)
best, last = early_stop(validation_cost, 10)
checks.right(f"the 200 digits are learned in {best + 1} epochs; after {last + 1} we know it")

# %%
exercise.draw_two_costs(history, training_cost, validation_cost, best, last)

# %% [markdown]
# With all 1,293 digits the network overfits less, and learns more:

# %%
validation = nn.Loader(data.validation, batch=500, shuffle=False)
training = nn.fit(trainer, loader, epochs=30, validation=validation)
print(f"after {training.epoch} epochs: validation accuracy {training.history[-1]['validation_accuracy']:.1%}")

# %% [markdown]
# ## What it gets wrong
#
# Always look at the mistakes. **Exercise 4.** Count, for all validation digits: the row is the true digit, the column
# the network's answer. The diagonal holds the right answers; look at the others one by one.


# %%
def confusion(predicted, true):
    """(10, 10) counts: how often digit i was taken for digit j."""
    counts = np.zeros((10, 10), int)
    # gap: for each sample one more in its place
    # pass
    # solution
    for i, j in zip(true, predicted, strict=True):
        counts[i, j] += 1
    # wrong: the counts
    # for i, j in zip(true, predicted, strict=True):
    #     counts[j, i] += 1
    # wrong: the counts
    # counts[true, predicted] += 1
    # end
    return counts


# %%
exercise.check_confusion(confusion, y_train[:100])

# %%
every = [(x_validation, y_validation), (x_train, y_train)]
_, axes = plt.subplots(1, 2, figsize=(9.6, 4.4))
for ax, (x, y), name in zip(axes, every, ("validation", "training"), strict=True):
    guess = trainer.predict(x).argmax(axis=1)
    exercise.draw_confusion(confusion(guess, y), ax, f"{name}: {np.mean(guess == y):.1%} right")
plt.show()

# %% [markdown]
# ## How sure was it?
#
# The largest of the ten outputs is a kind of confidence. A mistake with 0.5 was a doubtful case. One with 0.99 is often
# a digit that you could not read either, or has a wrong label.
#
# **Exercise 5.** Sort the mistakes: indices of the samples that are wrong, the most confident first.


# %%
def mistakes(output, labels):
    """Indices of the rows of `output` (samples, 10) whose largest entry is not at their label; the largest first."""
    # gap: which are wrong, and in which order
    # return np.arange(len(labels))
    # solution
    wrong = np.flatnonzero(output.argmax(axis=1) != labels)
    return wrong[np.argsort(-output[wrong].max(axis=1))]
    # wrong: the mistakes, the surest first
    # return np.flatnonzero(output.argmax(axis=1) != labels)
    # wrong: the mistakes, the surest first
    # wrong = np.flatnonzero(output.argmax(axis=1) != labels)
    # return np.argsort(-output[wrong].max(axis=1))
    # end


# %%
exercise.check_mistakes(mistakes)

# %%
output = trainer.predict(x_validation)
missed = mistakes(output, y_validation)[:10]
confidence, hit = output.max(axis=1), output.argmax(axis=1) == y_validation

exercise.draw_mistakes(missed, x_validation, y_validation, output, confidence, hit)

# %% [markdown]
# ## What the neurons look for
#
# The 64 weights into a hidden neuron are an image, too: ink on blue pixels raises its activation, ink on red ones
# lowers it. Below is the mean activation of each neuron for each digit. No neuron is "the 3": a digit is a *pattern*
# over all thirty.

# %%
exercise.draw_neurons(trainer, HIDDEN, sigma, x_train, y_train)

# %% [markdown]
# ## The honest figure
#
# Everything is chosen. Now use the test digits, once:

# %%
test = nn.evaluate(trainer, data.test)
n = len(y_test)
error = 1.96 * np.sqrt(test["accuracy"] * (1 - test["accuracy"]) / n)
print(f"test accuracy {test['accuracy']:.1%}, give or take {error:.1%}: {n} digits are a sample, too")
assert test["accuracy"] > 0.93

# %% [markdown]
# ## More data from the data
#
# To this network the pixels are 64 unrelated numbers: it does not know which ones are neighbours. Shift a digit by one
# pixel, and every weight gets another pixel. One remedy is to *show* it such digits: **augmentation**.
#
# **Exercise 6.** Make five images of each: as it is, and shifted by one pixel to the right, to the left, down, and up.
# The pixels that come in are 0, as paper is.


# %%
def shifted_copies(images):
    """(N, 8, 8) to (5 N, 8, 8): all as they are, then all shifted right, left, down, up."""
    # gap: what leaves the image is lost
    # return np.concatenate([images, *(np.roll(images, by, axis) for axis in (2, 1) for by in (1, -1))])
    # solution
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    corners = (1, 1), (1, 0), (1, 2), (0, 1), (2, 1)
    return np.concatenate([padded[:, row : row + 8, column : column + 8] for row, column in corners])
    # wrong: the copies: as they are, right, left, down, up
    # padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    # corners = (1, 1), (1, 2), (1, 0), (2, 1), (0, 1)
    # return np.concatenate([padded[:, row : row + 8, column : column + 8] for row, column in corners])
    # wrong: the copies: as they are, right, left, down, up
    # padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")
    # corners = (1, 1), (1, 0), (1, 2), (0, 1), (2, 1)
    # return np.concatenate([padded[:, row : row + 8, column : column + 8] for row, column in corners])
    # wrong: is expected
    # return np.pad(images, ((0, 0), (1, 1), (1, 1)))
    # end


# %%
exercise.check_neighbours(shifted_copies)

# %%
copies = shifted_copies(x_train.reshape(-1, 8, 8)).reshape(-1, 64)
more = nn.data.Dataset(copies, np.tile(y_train, 5), dtype=np.float64)
augmented = new_trainer()
nn.fit(augmented, nn.Loader(more, batch=10, seed=0), epochs=8)
shifted = shifted_copies(x_validation.reshape(-1, 8, 8)).reshape(5, -1, 64)
exercise.draw_shifted(trainer, augmented, y_validation, shifted)

# %% [markdown]
# **To try further.** With how few training digits does it still read 80%? Draw that curve. Shift by two pixels: what is
# left of both networks' accuracy? (A network that knows what neighbours are does not need the copies: the next
# notebook.)
#
# Next: `04_convolution`.
#
# *Sources: LeCun et al. 1998, "Efficient BackProp" (first weights); Glorot, Bengio 2010; Prechelt 1998 (early
# stopping); E. Alpaydin and C. Kaynak 1998 (the digits; see `nn/data/digits.md`).*
