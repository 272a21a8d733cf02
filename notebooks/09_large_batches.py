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
# # 9. Large batches
#
# Data parallelism gives each of p ranks b samples of a step, so a step has p b of them. With 256 GPUs and 32 samples
# each that is a batch of 8,192, and with unchanged settings the network becomes *worse*. This notebook shows why, and
# the remedies:
#
# 1. why large batches are useful;
# 2. **linear scaling**: k times the batch, k times the learning rate, and when that is allowed;
# 3. **warm-up**: why the first steps are different;
# 4. **LARS** and **LAMB**: a rate for each tensor, made of norms.
#
# The number of ranks that share a batch does not matter here: each strategy of this project computes what one process
# computes. So one process is enough to study large batches.

# %%
import matplotlib.pyplot as plt
import numpy as np
from threadpoolctl import threadpool_limits

import checks
import exercises.large_batches as exercise
import nn
from nn.optim.learning_rates import MultiStep, Warmup

# %matplotlib inline
checks.style()
limits = threadpool_limits(1, user_api="blas")  # matrices as small as ours are multiplied fastest by one thread

# %% [markdown]
# ## 1. Why large
#
# A step on p ranks takes the time to compute b samples, and then the time to sum the gradients. The second does not
# depend on b. So with a *fixed* global batch of 256, each of more ranks computes less for the same sum; with a fixed
# batch *on each rank* it computes as much as before. Take ResNet-50: 25.5 million parameters, 1/200 second for a sample
# (forward and backward, on one GPU), a network of 100 Gbit/s. A ring on p ranks sends 2 (p - 1) messages of n/p bytes,
# one after the other (notebook 07).

# %%
ALPHA, BETA, NBYTES = 5e-6, 8 / 100e9, 4 * 25_500_000  # seconds a message, seconds a byte; bytes of the gradients
ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
summing = [2 * (p - 1) * (ALPHA + NBYTES / p * BETA) for p in ranks]  # a ring
images = 1_280_000  # of ImageNet, an epoch

exercise.draw_epochs(images, ranks, summing)

# %% [markdown]
# With one sample on each rank, ranks mostly wait for sums. With 32 on each, the sums take little of the time, but the
# batch is now 32 x 256 = 8,192.
#
# ## 2. What goes wrong
#
# We train on the digits of the package, with a batch of 16 (the data set is small) and with 192. The network has two
# hidden layers and learns for 12 epochs with momentum 0.9; the rate falls to a tenth after two thirds of them.

# %%
data = nn.data.load("digits", validation=0.2, flat=True, normalise=True)
EPOCHS, SMALL, LARGE, RATE = 12, 16, 192, 0.03
K = LARGE // SMALL


def new_network():
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Network(nn.Sequential(*layers), (64,))


def train(batch, optimizer, schedule=None, seed=0, epochs=EPOCHS):
    """Validation error in percent after every epoch."""
    trainer = nn.Trainer(new_network(), nn.CrossEntropyLoss(), optimizer, seed=seed)
    loader = nn.Loader(data.train, batch, seed=seed)
    schedule = schedule and schedule(len(loader))
    try:
        history = nn.fit(trainer, loader, epochs, validation=data.validation, schedule=schedule).history
    except nn.NonFiniteLoss:  # it may happen; from then on the network guesses
        return [90.0] * epochs
    return [100 * (1 - record["validation_accuracy"]) for record in history]


def falling(rate):
    """The rate, and a tenth of it after two thirds of the epochs."""
    return lambda steps: MultiStep(rate, (EPOCHS * 2 // 3 * steps,))


def momentum(rate=RATE):
    return nn.SGD(rate, momentum=0.9, weight_decay=1e-4)


SEEDS = range(4)
curves = {
    f"batch {SMALL}": [train(SMALL, momentum(), falling(RATE), seed) for seed in SEEDS],
    f"batch {LARGE}, the same rate": [train(LARGE, momentum(), falling(RATE), seed) for seed in SEEDS],
}
exercise.draw_errors(curves, "The same rate: too little happens in an epoch")

# %% [markdown]
# The large batch makes 12 times fewer steps, each of the same length. So it does not get far enough.
#
# ## 3. Linear scaling
#
# Write $\ell(x, w)$ for the loss of a sample and $B_j$ for the j-th small batch of n samples. Plain gradient descent
# makes k small steps:
#
# $$ w_{t+k} = w_t - \eta\, \frac1n \sum_{j<k} \sum_{x \in B_j} \nabla \ell(x, w_{t+j}) , $$
#
# and one step with all k n samples and the rate $\hat\eta$ goes to
#
# $$ \hat w_{t+1} = w_t - \hat\eta\, \frac1{kn} \sum_{j<k} \sum_{x \in B_j} \nabla \ell(x, w_t) . $$
#
# They differ only in the parameters at which the gradients are taken. **If** $\nabla\ell(x, w_{t+j}) \approx
# \nabla\ell(x, w_t)$ then they agree, provided that $\hat\eta = k\,\eta$. This is the linear scaling rule (Goyal et al.
# 2017): *k times the batch, k times the rate*.
#
# Is the assumption true? Measure it: from the same parameters make k = 12 small steps, and one large step, and measure
# the distance between their ends, in units of the distance that the small steps cover. It depends on the rate, and on
# the moment of training; so there is a curve for each of three moments.

# %%
network_ = new_network()
loss_function, ctx = nn.CrossEntropyLoss(), network_.context()


def gradient(w, x, y):
    """The gradient of the mean loss of these samples, as one flat array."""
    g = network_.layout.zeros(np.float32)
    output, saved = network_.forward(network_.layout.views(w), x, ctx)
    _, gz = loss_function(output, y, len(x), ctx)
    network_.backward(network_.layout.views(w), network_.layout.views(g), gz, saved, ctx)
    return g


def apart(w, x, y, k, rate):
    """|k small steps - one large step| / |k small steps|, from w."""
    small = w.copy()
    for xs, ys in zip(np.array_split(x, k), np.array_split(y, k), strict=True):
        small -= rate * gradient(small, xs, ys)
    large = w - k * rate * gradient(w, x, y)
    return np.linalg.norm(small - large) / np.linalg.norm(small - w)


x_train, y_train = data.train.batch()
rates, moments = (0.001, 0.003, 0.01, 0.03, 0.1), (0, 20, 320)
found = []
for seed in range(3):
    w, rng = network_.layout.zeros(np.float32), np.random.default_rng(seed)
    network_.layout.initialize(w, seed)
    for step in range(moments[-1] + 1):
        chosen = rng.permutation(len(x_train))[:LARGE]
        if step in moments:
            found.append([apart(w, x_train[chosen], y_train[chosen], K, rate) for rate in rates])
        w -= 0.02 * gradient(w, x_train[chosen[:SMALL]], y_train[chosen[:SMALL]])
found = 100 * np.mean(np.reshape(found, (3, len(moments), len(rates))), axis=0)

exercise.draw_apart(moments, found, rates, K, SMALL, LARGE)
print(f"rate 0.03: {found[0, 3]:.0f}% apart at the start, {found[1, 3]:.0f}% after 20 steps")
assert found[1, 3] < found[0, 3], "at the start the large step goes wrong more than soon after"

# %% [markdown]
# The picture shows two things. The rule holds where steps are short, and fails where they are long: there is a largest
# rate, and so a largest batch. And at the very start, when the gradients change from step to step, it holds *less* than
# 20 steps later. (Much later the ends differ again: then the small steps point in changing directions and cover
# little distance, in units of which we measure.)
#
# ## 4. Warm-up
#
# Therefore training begins with the rate of the small batch and raises it **by the same amount each step** to k times
# as much, over the first epochs (five in the paper, three here): *gradual warm-up*. A sudden jump after those epochs
# (*constant* warm-up) is worse: it only moves the problem from the first step to a later one.
#
# **Exercise 1.** Write the gradual warm-up: at step 0 the rate is `small`, at step `steps` it is `large` and stays so;
# between, it rises by the same amount every step. (The starter code is the constant one.)


# %%
def my_warmup(step, small, large, steps):
    """The learning rate of a step, counted from 0."""
    # gap: a straight line from `small` to `large`; `large` from `steps` on
    # return small if step < steps else large
    # solution
    return small + (large - small) * min(step, steps) / steps
    # wrong: the rate of step 0, 1
    # return small + (large - small) * step / steps
    # wrong: the rate of step 0, 1
    # return large * min(step + 1, steps) / steps
    # end


# %%
wanted = [Warmup(lambda step: 0.24, 10, start=0.015)(step) for step in range(15)]
mine = [checks.call(my_warmup, step, 0.015, 0.24, 10) for step in range(15)]
checks.same(mine, wanted, "the rate of step 0, 1, ...", draw=exercise.draw_rates)
checks.right("a straight line, and flat from step 10 on, as nn.optim.learning_rates.Warmup has it")
exercise.draw_rates(mine, wanted)

# %% [markdown]
# Now all of them, with the large batch:

# %%
WARM = 3  # epochs


def no_warmup(steps):
    return falling(K * RATE)(steps)


def constant_warmup(steps):
    return lambda step: RATE if step < WARM * steps else falling(K * RATE)(steps)(step)


def gradual_warmup(steps):
    return Warmup(falling(K * RATE)(steps), WARM * steps, start=RATE)


for schedule in (no_warmup, constant_warmup, gradual_warmup):
    name = f"batch {LARGE}, {schedule.__name__.replace('_', ' ')}"
    curves[name] = [train(LARGE, momentum(), schedule, seed) for seed in SEEDS]
exercise.draw_errors(curves, f"batch {LARGE}: {K} times the rate")

# %% [markdown]
# Gradual warm-up comes nearest to the small batch; constant warm-up, which jumps after three epochs, is the worst of
# the scaled ones. The shaded range over four seeds is wide: on such a small problem only the order of the curves is
# reliable. On ImageNet, with a batch of 8,192 in place of 256, the error was **23.60%** for the small batch, **23.74**
# with gradual warm-up, **25.88** with constant warm-up and **24.84** without (Goyal et al. 2017).
# `scripts/experiments/large_batch.py` does this with Fashion-MNIST: 10.43% small; 10.64 gradual, 11.94 constant, 11.51
# none.
#
# Two details of the paper are easily forgotten. Biases and the parameters of normalisation get no weight decay; in `nn`
# that is `Spec.decay`. And **momentum correction**: with the rate outside of the velocity, a step is $v\leftarrow
# m\,v+g$, $w \leftarrow w - \eta v$. Some programs put it *inside*, $v \leftarrow m v + \eta g$, $w \leftarrow w - v$.
# With a constant $\eta$ both are the same. In a warm-up it changes in every step, and then v contains gradients times
# the old rate.
#
# **Exercise 2.** Write the step with the rate inside, so that it is the same as the one with the rate outside.


# %%
def momentum_step(w, v, g, rate, last_rate, m):
    """(new w, new v); last_rate was that of the step before."""
    # gap: what is in v has been multiplied by the old rate
    # v = m * v + rate * g
    # return w - v, v
    # solution
    v = m * v * rate / last_rate + rate * g
    return w - v, v
    # wrong: here the rate changes from 0.1 to 0.4
    # v = m * v * last_rate / rate + rate * g
    # return w - v, v
    # wrong: here the rate changes from 0.1 to 0.4
    # v = (m * v + last_rate * g) * rate / last_rate if rate > 0.2 else m * v + rate * g
    # return w - v * rate / last_rate, v
    # end


# %%
exercise.check_correction(momentum_step)

# %% [markdown]
# ## 5. LARS: the layers differ
#
# With still larger batches warm-up is not enough. You et al. (2017) compared two norms, tensor by tensor: that of the
# weight and that of its gradient.

# %%
w = network_.layout.zeros(np.float32)
network_.layout.initialize(w, 0)
g = gradient(w, x_train[:1024], y_train[:1024])
names = [name for name, array in network_.layout.items(w) if array.ndim == 2][::-1]
weights, gradients = dict(network_.layout.items(w)), dict(network_.layout.items(g))
ratios = [np.linalg.norm(weights[name]) / np.linalg.norm(gradients[name]) for name in names]

exercise.draw_ratios(weights, names, ratios)

# %% [markdown]
# With a rate of this size a step would be as long as the weight itself. A common rate has to be small enough for the
# smallest bar, and is then too small for the others; in deep networks the bars differ a hundredfold. **LARS**
# (layer-wise adaptive rate scaling) gives every tensor a local rate:
#
# $$ \lambda = \tau \frac{\lVert w\rVert}{\lVert g\rVert + \beta \lVert w\rVert}, \qquad
#    v \leftarrow m v + \eta \lambda (g + \beta w), \qquad w \leftarrow w - v $$
#
# with the trust $\tau$ = 0.001, the weight decay $\beta$ and the momentum m. So a step is a fixed fraction of the
# weight, whatever the length of the gradient. Biases have $\lambda$ = 1 and no decay.
#
# **Exercise 3.** Write the three formulas for one matrix. `w` and `v` are changed in place. (The starter code has no
# momentum, and no local rate.)


# %%
def my_lars(w, g, v, rate, momentum, trust, decay):
    """One step of LARS for one tensor; changes w and v in place."""
    # gap: the local rate, then v, then w
    # w -= rate * (g + decay * w)
    # solution
    local = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
    v *= momentum
    v += rate * local * (g + decay * w)
    w -= v
    # wrong: look at the local rate
    # local = trust * np.linalg.norm(w) / np.linalg.norm(g)
    # v *= momentum
    # v += rate * local * (g + decay * w)
    # w -= v
    # wrong: what does the momentum do?
    # local = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
    # w -= rate * local * (g + decay * w)
    # end


# %%
exercise.check_lars(my_lars)
plt.show()

# %% [markdown]
# ## 6. LAMB: the same for Adam
#
# Adam has a rate for every *parameter*. **LAMB** (You et al. 2020) gives its step the length of the weight, tensor by
# tensor:
#
# $$ u = \frac{\hat m}{\sqrt{\hat v} + \varepsilon} + \beta w , \qquad
#    w \leftarrow w - \eta \frac{\lVert w\rVert}{\lVert u\rVert} u . $$
#
# BERT was trained with it, with a batch of 32,768 in 76 minutes.
#
# **Exercise 4.** Write the two formulas; m and v are given. (The starter code is Adam with weight decay.)


# %%
def lamb(w, g, m, v, step, rate=0.01, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.01):
    """One step for one tensor."""
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g**2 - v)
    u = (m / (1 - beta1 ** (step + 1))) / (np.sqrt(v / (1 - beta2 ** (step + 1))) + eps) + decay * w
    # gap: as long as the rate times the weight, in the direction of u
    # w -= rate * u
    # solution
    w -= rate * np.linalg.norm(w) / np.linalg.norm(u) * u
    # wrong: is wanted: the rate times the length of the weight
    # w -= rate * u / np.linalg.norm(u)
    # wrong: change it in place
    # w = w - rate * np.linalg.norm(w) / np.linalg.norm(u) * u
    # end


# %%
exercise.check_lamb(lamb)

# %% [markdown]
# ## 7. How large may it be?
#
# Can it be predicted? The gradient of B samples is the true gradient G plus noise. The squared length of the noise is
# $1/B$ of that of one sample, $\Sigma$: on average
#
# $$ |g_B|^2 = |G|^2 + \frac{\Sigma}{B} . $$
#
# While the noise dominates, doubling the batch halves its squared length: such a step is worth about two steps. Beyond
# $B \approx \Sigma / |G|^2$, the **noise scale** (McCandlish et al. 2018), more samples add little. G is unknown, but
# the lengths of gradients of two batch sizes can be measured (on p ranks at no cost: the gradients before and after the
# sum).
#
# **Exercise 5.** Compute the noise scale from two mean squared lengths.


# %%
def noise_scale(small_squared, large_squared, small, large):
    """Sigma / |G|^2, from the mean of |g|^2 for batches of `small` and of `large` samples."""
    # gap: two equations for |G|^2 and Sigma
    # return (small_squared - large_squared) * small / large_squared
    # solution
    noise = (small_squared - large_squared) / (1 / small - 1 / large)
    return noise / (large_squared - noise / large)
    # wrong: the noise scale for
    # noise = (small_squared - large_squared) / (1 / small - 1 / large)
    # return noise / (large_squared + noise / large)
    # end


# %%
exercise.check_noise_scale(noise_scale)

# %%
w, rng = network_.layout.zeros(np.float32), np.random.default_rng(0)
network_.layout.initialize(w, 0)
places, scales = (0, 20, 80, 320), []
for step in range(places[-1] + 1):
    if step in places:
        lengths = [
            np.mean(
                [
                    np.sum(gradient(w, x_train[rows], y_train[rows]) ** 2.0)
                    for rows in rng.integers(len(x_train), size=(200, n))
                ]
            )
            for n in (8, 128)
        ]
        scales.append(noise_scale(*lengths, 8, 128))
    chosen = rng.permutation(len(x_train))[:SMALL]
    w -= 0.03 * gradient(w, x_train[chosen], y_train[chosen])
exercise.draw_noise_scales(places, scales)

# %% [markdown]
# It grows while the network learns: at first the gradients of all samples agree, later they differ. So the batch may
# grow during training.
#
# ## 8. As large as it gets
#
# There are 1,150 digits to train with. How far can the batch grow? Each has 20 epochs, five of them warm-up (for LARS
# and LAMB the rate grows with the square root of the batch, as You et al. 2020 have it):

# %%
sizes = [16, 64, 256, 1024]
families = {
    "SGD, rate not scaled": lambda batch: (momentum(), None),
    "SGD, linear scaling, warm-up": lambda batch: (
        momentum(),
        lambda steps: Warmup(lambda step: RATE * batch / SMALL, max(1, 5 * steps), start=RATE),
    ),
    "LARS, warm-up": lambda batch: (
        nn.LARS(7.0, weight_decay=1e-4),
        lambda steps: Warmup(lambda step: 7.0 * min(1, np.sqrt(batch / 256)), max(1, 5 * steps)),
    ),
    "LAMB, warm-up": lambda batch: (
        nn.LAMB(0.01),
        lambda steps: Warmup(lambda step: 0.01 * np.sqrt(batch / 64), max(1, 5 * steps)),
    ),
}
final = {name: [min(train(batch, *make(batch), epochs=20)[-3:]) for batch in sizes] for name, make in families.items()}
exercise.draw_families(families, sizes, final)
for name, errors in final.items():
    print(f"{name:30}", "  ".join(f"{batch:5}: {error:4.1f}%" for batch, error in zip(sizes, errors, strict=True)))

# %% [markdown]
# With the small batch's rate the error grows with the batch. With linear scaling and warm-up it stays constant for a
# while, until the assumption of section 3 fails: at 1,024 samples the rate is 64 times as high, and nothing is learned.
# LARS and LAMB, whose steps are a fraction of the weights, do not fail like this; but their error, too, is above that
# of the small batch. Beyond some batch more samples in a step bring nothing. This limits data parallelism whatever the
# network, and is a reason for the other strategies of this course.
#
# ## Try
#
# - Give every run the same number of *steps* instead of epochs. Is the large batch still worse?
# - Section 3 with momentum, and k = 64. What is the largest k with less than a quarter of the way between the two?
# - `python scripts/train.py --ranks 2 --batch 512 --linear-scaling 64 --schedule "multistep:at=8/12,warmup=5"`
#
# *Sources: Goyal et al. 2017, Accurate, large minibatch SGD; You, Gitman, Ginsburg 2017 (LARS); You et al. 2020
# (LAMB); McCandlish et al. 2018 (noise scale).*
#
# Next: `10_asynchrony.py`, where ranks stop waiting for each other.
#
# This system's page has commands and measurements: [Large batches](../docs/systems/large_batches.md).
