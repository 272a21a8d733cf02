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
# The gradient of the last notebook, the loop of the one before: now a network learns. And learning is the smaller part
# of the work. The larger one is to *look*: at the curves, at the mistakes, at what the neurons have become, and to know
# which figure one may believe. You will
#
# 1. see why a network needs layers, on a picture of what it decides;
# 2. choose its first weights, so that anything is learned at all;
# 3. train, and stop at the right time;
# 4. find which digits are taken for which, and how sure the network was;
# 5. see what its hidden neurons look for;
# 6. look, once, at the test digits.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import checks
import exercises.digits as exercise
import nn
from nn.analysis import inspection

# %matplotlib inline
checks.style()

# %% [markdown]
# ## Why layers?
#
# Two spirals of points, wound into each other. Which spiral is a new point of? One layer, $z = xW + b$, can only cut
# the plane with straight lines. A hidden layer bends it first: every hidden neuron has a line of its own along which it
# turns from off to on, and the last layer puts together what these lines cut.

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


edge = np.abs(points).max() * 1.08
_, axes = plt.subplots(1, 3, figsize=(11.5, 3.9), sharey=True)
for ax, hidden in zip(axes, ((), (4,), (16, 16)), strict=True):
    trainer, accuracy = classifier(*hidden)
    xs, ys, regions = inspection.decision_regions(trainer, (-edge, -edge), (edge, edge), 120)
    ax.contourf(xs, ys, regions, [-0.5, 0.5, 1.5], colors=[checks.SKY, checks.ORANGE], alpha=0.45)
    for k, colour, mark in ((0, checks.BLUE, "o"), (1, checks.RED, "^")):
        ax.plot(*points[spiral == k].T, mark, ms=3.2, color=colour)
    names = {(): "no hidden layer", (4,): "4 hidden neurons", (16, 16): "two layers of 16"}
    ax.set_title(f"{names[hidden]}: {accuracy:.0%} right")
    ax.set(xlim=(-edge, edge), ylim=(-edge, edge))
plt.show()
assert accuracy > 0.98

# %% [markdown]
# ## The digits, in three parts
#
# 1,797 digits, written by hand, 8 x 8 pixels. The network learns from the **training** digits. By the **validation**
# digits we choose: how many neurons, how fast, how long. What chooses has seen what it chose by, so that figure comes
# out too good. The honest one is that of the **test** digits, at which nobody looks until the end.
#
# **Exercise 1.** Cut indices into three parts, by chance: so many for validation, so many for the test, the others for
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
# `nn.data.load` does so (with the classes evenly spread); its test digits are those of other writers.

# %%
data = nn.data.load("digits", validation=0.1, flat=True, dtype=np.float64)
x_train, y_train = data.train.batch()
x_validation, y_validation = data.validation.batch()
x_test, y_test = data.test.batch()

_, (left, right) = plt.subplots(1, 2, figsize=(10.5, 2.6), width_ratios=(1.6, 1))
means = np.concatenate([x_train[y_train == k].mean(axis=0).reshape(8, 8) for k in range(10)], axis=1)
left.imshow(means)
left.set_title("the mean of all training digits of a kind")
left.axis("off")
for i, (name, labels, colour) in enumerate(
    (("training", y_train, checks.BLUE), ("validation", y_validation, checks.ORANGE), ("test", y_test, checks.GREEN))
):
    counts = np.bincount(labels, minlength=10)
    right.bar(np.arange(10) + 0.27 * (i - 1), counts, 0.27, color=colour, label=f"{name}: {len(labels):,}")
right.set(title="how many of each", xticks=range(10), ylim=(0, 200))
right.legend(ncols=3, fontsize=8, loc="upper center", columnspacing=1, handlelength=1)
plt.show()

# %% [markdown]
# ## The first weights
#
# Before the first step there must be some weights. All zero will not do: then all hidden neurons are the same, get the
# same gradient, and stay the same for ever; thirty neurons that are one. So they are random. How large? The weighted
# input of a neuron is a sum of $n$ terms. If the weights scatter by 1, the sum scatters by about $\sqrt{n}$: in most
# samples the sigmoid is pressed to 0 or 1, where its slope is nearly nothing, and so is everything that backpropagation
# sends through it. Weights that scatter by $1/\sqrt{n}$ give sums that scatter by 1, whatever $n$.
#
# **Exercise 2.** Draw the weights of a layer so.


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
def spread(first_weights):
    """Of what leaves ten layers of 100 and 300 neurons by turns, one after the other, without a squeeze in between."""
    rng = np.random.default_rng(0)
    x, spreads = rng.standard_normal((200, 300)), []
    for inputs, outputs in 5 * [(300, 100), (100, 300)]:
        x = x @ checks.call(first_weights, rng, inputs, outputs)
        spreads.append(x.std())
    return np.array(spreads)


weights = checks.call(first_weights, np.random.default_rng(0), 64, 30)
checks.expect(np.shape(weights) == (64, 30), f"the weights have the shape {np.shape(weights)}, not (64, 30).")
checks.same(
    spread(first_weights), np.ones(10), "the scatter after each layer", tolerance=0.3, draw=exercise.draw_spread
)
checks.right("it neither explodes nor vanishes, through ten layers")

# %% [markdown]
# What it means for learning: the same network, the same steps, four kinds of first weights.

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


_, ax = plt.subplots(figsize=(7, 3))
for (name, scale), colour in zip(
    {"$1/\\sqrt{n}$": 1, "0": 0, "ten times as large": 10, "forty times": 40}.items(),
    (checks.BLUE, checks.RED, checks.ORANGE, checks.PINK),
    strict=True,
):
    ax.plot(range(1, 9), 100 * np.array(accuracies(new_trainer(scale), 8)), ".-", color=colour, label=name)
ax.set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 101), title="first weights")
ax.legend(loc="center right")
plt.show()

# %% [markdown]
# ## Training, and when to stop
#
# `nn.fit` is the loop of notebook 1: for every epoch shuffle, cut in batches, step; and at the end of each look at the
# validation digits. That it is nothing more: here is its first epoch by hand, with the four equations.

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
# Now 120 epochs, with few digits, so that one can see what always happens in the end: from 200 samples a network can
# learn by heart. Its training cost falls for ever; the cost of digits that it has never seen falls, and then rises
# again, slowly. (The cost is cross-entropy here, which charges a high price for being sure and wrong.)

# %%
few = nn.data.Dataset(x_train[:200], y_train[:200], dtype=np.float64)
layers = nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)
network = nn.Network(nn.Sequential(*layers), in_shape=(64,), dtype=np.float64)
student = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.2), seed=0)
history = nn.fit(student, nn.Loader(few, batch=10, seed=0), epochs=120, validation=data.validation).history
training_cost = np.array([record["loss"] for record in history])
validation_cost = np.array([record["validation_loss"] for record in history])


# %% [markdown]
# **Exercise 3.** *Early stopping.* Write the rule that everybody uses: stop when the validation cost has not been lower
# than its lowest for `patience` epochs in a row; keep the network of the lowest. Return both epochs, counted from 0.


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
def draw_stop(got, want):
    _, ax = plt.subplots(figsize=(6.4, 2.8))
    ax.plot(costs, "o-", color=checks.GREY)
    for epoch, y, name, colour in ((want, 0.02, "wanted", checks.INK), (got, 0.12, "yours", checks.RED)):
        ax.axvspan(*epoch, color=colour, alpha=0.15)
        ax.text(
            epoch[0],
            y,
            f"{name}: best {epoch[0]:g}, stop {epoch[1]:g}",
            color=colour,
            transform=ax.get_xaxis_transform(),
        )
    ax.set(xlabel="epoch", ylabel="validation cost")


for costs, patience, want in (
    ([5, 4, 3, 3.5, 3.2, 3.1, 2.9], 3, (2, 5)),
    ([5, 4, 3, 3.5, 3.2, 2.9, 3.0, 3.1], 3, (5, 7)),
    ([5, 4, 3, 2], 2, (3, 3)),
    ([5, 3, 3, 3, 3, 2], 3, (1, 4)),
    ([1, 2, 3, 4, 5], 2, (0, 2)),
):
    got = checks.call(early_stop, np.array(costs), patience)
    checks.same(got, want, f"with patience {patience}, of {costs}", draw=draw_stop)
best, last = early_stop(validation_cost, 10)
checks.right(f"the 200 digits are learned in {best + 1} epochs; after {last + 1} we know it")

# %%
_, ax = plt.subplots(figsize=(7.4, 3.2))
epochs = np.arange(1, len(history) + 1)
ax.semilogy(epochs, training_cost, color=checks.BLUE, label="training")
ax.semilogy(epochs, validation_cost, color=checks.ORANGE, label="validation")
ax.plot(best + 1, validation_cost[best], "*", ms=15, color=checks.RED, zorder=5, label=f"the best: epoch {best + 1}")
ax.axvline(last + 1, color=checks.GREY, ls="--", lw=1.2)
ax.annotate("here we stop", (last + 1, 0.93), (6, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
            color=checks.GREY)  # fmt: skip
ax.set(xlabel="epoch", ylabel="cost", title="200 digits to learn from")
ax.legend()
plt.show()

# %% [markdown]
# With all 1,293 digits there is less to learn by heart, and more to learn:

# %%
validation = nn.Loader(data.validation, batch=500, shuffle=False)
training = nn.fit(trainer, loader, epochs=30, validation=validation)
print(f"after {training.epoch} epochs: validation accuracy {training.history[-1]['validation_accuracy']:.1%}")

# %% [markdown]
# ## What it gets wrong
#
# Always look. **Exercise 4.** Count, for all validation digits: row = what it is, column = what the network says. The
# diagonal is what is right; everything else has a story.


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
def draw_two(got, want):
    _, axes = plt.subplots(1, 2, figsize=(9, 4.2))
    for ax, counts, title in zip(axes, (got, want), ("yours", "wanted"), strict=True):
        exercise.draw_confusion(counts, ax, title)


# The training digits, 100 of them, whose mistakes are known: every 7th is said to be one more.
known = np.where(np.arange(100) % 7 == 0, (y_train[:100] + 1) % 10, y_train[:100])
want = inspection.confusion_matrix(known, y_train[:100], 10)
checks.same(checks.call(confusion, known, y_train[:100]), want, "the counts", draw=draw_two)
checks.right("rows are what it is, columns are what is said")

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
# The largest of the ten outputs is a kind of confidence. A mistake made with 0.5 is a doubt; one made with 0.99 is a
# surprise, and often a digit that you would not read either, or a label that is wrong.
#
# **Exercise 5.** Sort the mistakes: indices of the samples that are wrong, the surest first.


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
def draw_order(got, want):
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    for places, colour, name in ((want, checks.GREY, "wanted"), (got, checks.RED, "yours")):
        there = [int(i) for i in places if -12 <= i < 12]
        ax.plot(random_output[there].max(axis=1), "o-", color=colour, label=f"{name}: {len(places)} samples")
    ax.set(xlabel="place in the list", ylabel="confidence")
    ax.legend()


random_output = np.random.default_rng(5).random((12, 10))
random_labels = random_output.argmax(axis=1)
random_labels[::2] = (random_labels[::2] + 3) % 10  # every second one is wrong
want = sorted(range(0, 12, 2), key=lambda i: -random_output[i].max())
got = checks.call(mistakes, random_output, random_labels)
checks.expect(
    np.shape(got) == (6,),
    f"6 of the 12 samples are wrong, and their indices are expected in an array; yours has {np.size(got)}.",
    lambda: draw_order(np.ravel(got) if np.ndim(got) else np.zeros(0), np.array(want)),
)
checks.same(got, want, "the mistakes, the surest first", draw=draw_order)
checks.right("the most surely wrong come first")

# %%
output = trainer.predict(x_validation)
missed = mistakes(output, y_validation)[:10]
confidence, hit = output.max(axis=1), output.argmax(axis=1) == y_validation

fig = plt.figure(figsize=(11, 2.6))
grid = fig.add_gridspec(1, 2, width_ratios=(1.5, 1))
panel = grid[0].subgridspec(1, max(len(missed), 1))
for k, i in enumerate(missed):
    ax = fig.add_subplot(panel[k])
    ax.imshow(x_validation[i].reshape(8, 8))
    ax.set_title(f"{y_validation[i]} as {output[i].argmax()}\n{confidence[i]:.0%}", loc="center", fontsize=10)
    ax.axis("off")
ax = fig.add_subplot(grid[1])
bins = np.linspace(0, 1, 21)
ax.hist(confidence[hit], bins, color=checks.BLUE, alpha=0.8, label="right")
ax.hist(confidence[~hit], bins, color=checks.RED, label="wrong")
ax.set(yscale="log", xlabel="confidence", ylabel="digits", title="all validation digits")
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## What the neurons look for
#
# The 64 weights into a hidden neuron are an image, too: blue pixels speak for it, red ones against it. And below, how
# strongly each neuron answers to each digit, on average. No neuron is "the 3": a digit is a *pattern* over all thirty.

# %%
fig = plt.figure(figsize=(11, 5))
grid = fig.add_gridspec(2, 1, height_ratios=(1.2, 1))
panel = grid[0].subgridspec(3, 10, wspace=0.02)
most = np.abs(trainer.p[0].W).max() * 0.7
for neuron in range(HIDDEN):
    ax = fig.add_subplot(panel[neuron // 10, neuron % 10])
    ax.imshow(trainer.p[0].W[:, neuron].reshape(8, 8), cmap="RdBu", vmin=-most, vmax=most)
    ax.axis("off")
ax = fig.add_subplot(grid[1])
hidden = sigma(x_train @ trainer.p[0].W + trainer.p[0].b)
shown = ax.imshow([hidden[y_train == k].mean(axis=0) for k in range(10)], cmap="Greys", vmin=0, vmax=1, aspect="auto")
ax.set(xlabel="hidden neuron", ylabel="digit", yticks=range(10), title="mean activation")
fig.colorbar(shown, ax=ax, pad=0.01)
plt.show()

# %% [markdown]
# ## The honest figure
#
# Everything has been chosen. Now, once:

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
# What comes in is paper, 0.


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
_, ax = plt.subplots(figsize=(7, 2.4))
for i, (name, which, colour) in enumerate(
    (("digits as they are", trainer, checks.ORANGE), ("five copies of each", augmented, checks.BLUE))
):
    right_ = [100 * np.mean(which.predict(images).argmax(axis=1) == y_validation) for images in shifted]
    ax.bar(np.arange(5) + 0.4 * i - 0.2, right_, 0.38, color=colour, label=f"learned from {name}")
ax.set_xticks(range(5), ["as it is", "right", "left", "down", "up"])
ax.set(title="validation digits, shifted by a pixel", ylabel="accuracy (%)", ylim=(0, 130))
ax.legend(ncols=2)
plt.show()

# %% [markdown]
# **To try further.** With how few training digits does it still read 80%? Draw that curve. Shift by two pixels: what is
# left of both networks' accuracy? (A network that knows what neighbours are does not need the copies: the next
# notebook.)
#
# Next: `04_convolution`.
#
# *Sources: LeCun et al. 1998, "Efficient BackProp" (first weights); Glorot, Bengio 2010; Prechelt 1998 (early
# stopping); E. Alpaydin and C. Kaynak 1998 (the digits; see `nn/data/digits.md`).*
