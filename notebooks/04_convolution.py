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
# # 4. Convolution: loops, im2col, Winograd, and what it costs
#
# The network of the last notebook does not know that pixels have neighbours. Shift a digit by one pixel, and every
# weight gets a pixel that it was not trained for. A **convolution** looks for the same small pattern at every place.
# Image networks spend nearly all of their time in this layer, so this notebook also shows how to make it fast:
#
# 1. what it computes, by seven loops;
# 2. what it costs: multiplications and weights, counted;
# 3. **im2col**: the loops as one matrix product;
# 4. **Winograd**: fewer multiplications than the definition has;
# 5. a race of the three;
# 6. a small network of convolutions, and what its filters have become.

# %%
import time
from itertools import product

import numpy as np

import checks
import exercises.convolution as exercise
import nn
from nn.analysis import pictures
from nn.layers import winograd

# %matplotlib inline
checks.style()

data = nn.data.load("digits", validation=0.1, dtype=np.float64)
x_train, y_train = data.train.batch()  # (1293, 8, 8, 1): images, height, width, channels
x_validation, y_validation = data.validation.batch()
print(x_train.shape)

# %% [markdown]
# ## A filter
#
# Multiply a patch of 3 x 3 pixels by nine weights and add up the products: the sum is large where the patch looks like
# the weights. Done at every place, the sums are an image again, a **feature map**: it shows *where* the pattern is.
#
# $$ y_{ij} = \sum_{u=0}^{2} \sum_{v=0}^{2} x_{i+u,\; j+v}\, w_{uv} . $$
#
# A real layer has several input channels $c$ (which are added up, too) and several filters $k$ (each gives one output
# channel). Axes here and in `nn`: images `x[n, i, j, c]`, weights `w[u, v, c, k]`.
#
# **Exercise 1.** Write the statement inside the seven loops.


# %%
def by_loops(x, w):
    """Convolution of x (N, H, W, C) with w (KH, KW, C, K), without padding: (N, H-KH+1, W-KW+1, K)."""
    (N, H, W, C), (KH, KW, _, K) = x.shape, w.shape
    y = np.zeros((N, H - KH + 1, W - KW + 1, K))
    for n, i, j, k in product(*map(range, y.shape)):
        for u, v, c in product(range(KH), range(KW), range(C)):
            # gap: one product, added to one element of y
            # pass
            # solution
            y[n, i, j, k] += x[n, i + u, j + v, c] * w[u, v, c, k]
            # wrong: y of 2 images
            # y[n, i, j, k] += x[n, i, j, c] * w[u, v, c, k]
            # wrong: y of 2 images
            # y[n, i, j, k] = x[n, i + u, j + v, c] * w[u, v, c, k]
            # end
    return y


# %%
def library(x, w):
    """The same by nn.Conv2d."""
    layer = nn.Conv2d(x.shape[3], w.shape[3], w.shape[:2], bias=False)
    network = nn.Network(layer, in_shape=x.shape[1:], dtype=np.float64)
    p = network.layout.views(network.layout.zeros(np.float64))
    p.W[...] = w
    return network.forward(p, np.ascontiguousarray(x, np.float64), network.context())[0].copy()


rng = np.random.default_rng(0)
x, w = rng.standard_normal((2, 6, 5, 3)), rng.standard_normal((3, 2, 3, 4))
checks.same(checks.call(by_loops, x, w), library(x, w), "y of 2 images of 6 x 5, 3 channels, 4 filters of 3 x 2")
checks.right("the same as nn.Conv2d, with an odd kernel, too")

# %% [markdown]
# Four filters that one can write down, on three digits. Blue: the pattern is there. Red: its opposite is.

# %%
edge = np.array([[1.0, 1, 1], [0, 0, 0], [-1, -1, -1]])
filters = {"ink above paper": edge, "ink left of paper": edge.T, "a dot": 9 * np.eye(3)[1][:, None] * np.eye(3)[1] - 1}
filters["a stroke like \\"] = 3 * np.eye(3) - 1
bank = np.stack(list(filters.values()), axis=-1)[:, :, None, :]
shown = x_train[[3, 15, 1]]
maps = by_loops(np.pad(shown, ((0, 0), (1, 1), (1, 1), (0, 0))), bank)

exercise.draw_maps(shown, filters, maps)

# %% [markdown]
# ## What it costs
#
# Every output is a sum of $K_h K_w C$ products, and there are $N H' W' K$ outputs ($H'$, $W'$: the size of the output).
# One product and its addition is a **MAC**, a multiply-accumulate. There are only $K_h K_w C K$ weights, and each is
# used $H' W'$ times for an image: *few weights, much work.* A fully connected layer uses each weight once.
#
# **Exercise 2.** Count both for a layer whose zeros around the image (padding) keep its size.


# %%
def count(height, width, channels, filters, kernel):
    """(MACs of one image, weights without biases) of a padded convolution, kernel x kernel."""
    # gap: from the two sentences above
    # return ..., ...
    # solution
    weights = kernel * kernel * channels * filters
    return height * width * weights, weights
    # wrong: (MACs, weights)
    # weights = kernel * channels * filters
    # return height * width * weights, weights
    # wrong: (MACs, weights)
    # weights = kernel * kernel * channels * filters
    # return height * width * channels * weights, weights
    # end


# %%
for shape, filters_, kernel in (((28, 28, 1), 32, 3), ((14, 7, 32), 64, 3), ((224, 224, 3), 64, 7)):
    layer = nn.Conv2d(shape[2], filters_, kernel, padding="same", bias=False)
    network = nn.Network(layer, in_shape=shape)
    got = checks.call(count, *shape, filters_, kernel)
    checks.same(got, (layer.macs(shape), network.layout.count), f"(MACs, weights) of {layer!r} on {shape}")
checks.right("as the library counts them")

# %% [markdown]
# And how large is the output? A kernel may move by more than a pixel at a time (**stride**), and zeros may be put
# around the image (**padding**); a place counts only if the whole kernel is inside.
#
# **Exercise 3.** How many places are there along one axis?


# %%
def output_size(size, kernel, stride, padding):
    """Places of a kernel along `size` pixels, with `padding` zeros at both ends."""
    # gap: the first place is at the first zero; a place that does not fit does not count
    # return size - kernel + 1
    # solution
    return (size + 2 * padding - kernel) // stride + 1
    # wrong: places in 8 pixels
    # return (size + padding - kernel) // stride + 1
    # wrong: places in 224 pixels
    # return (size + 2 * padding - kernel) / stride + 1
    # end


# %%
exercise.check_size(output_size)

# %% [markdown]
# Where are the weights and the work of whole networks? Here are two classics, layer by layer:

# %%
exercise.draw_networks()

# %% [markdown]
# The weights are all in the last layers, the work is all in the first ones. Remember this picture: it decides how such
# a network is spread over many processors (notebook 14, "one weird trick").
#
# ## im2col: the loops as a matrix product
#
# Computers multiply large matrices at full speed. So write the patch of every place as a **row**: a matrix of $N H' W'$
# rows and $K_h K_w C$ columns. The weights, laid flat, are a matrix of $K_h K_w C$ rows and $K$ columns. Their product
# is the convolution.

# %%
pictures.im2col(np.arange(20.0).reshape(4, 5), (3, 3), row=0)

# %% [markdown]
# Pixel 7 is in all six rows. That is the price: inside a larger image, every pixel is copied nine times.
#
# **Exercise 4.** NumPy can show all patches without copying anything: `sliding_window_view(x, (KH, KW), axis=(1, 2))`
# has the axes `[n, i, j, c, u, v]`. Put the last three in the order of the weights, and make two matrices of it.

# %%
from numpy.lib.stride_tricks import sliding_window_view


def by_im2col(x, w):
    """The same convolution as one matrix product."""
    C, (KH, KW, _, K) = x.shape[3], w.shape
    patches = sliding_window_view(x, (KH, KW), axis=(1, 2))  # (N, H', W', C, KH, KW)
    # gap: columns (N H' W', KH KW C), then one product with the weights laid flat
    # columns = patches.reshape(-1, C * KH * KW)
    # return (columns @ w.reshape(-1, K)).reshape(*patches.shape[:3], K)
    # solution
    columns = patches.transpose(0, 1, 2, 4, 5, 3).reshape(-1, KH * KW * C)
    return (columns @ w.reshape(-1, K)).reshape(*patches.shape[:3], K)
    # wrong: y by im2col
    # columns = patches.transpose(0, 1, 2, 5, 4, 3).reshape(-1, KH * KW * C)
    # return (columns @ w.reshape(-1, K)).reshape(*patches.shape[:3], K)
    # end


# %%
checks.same(checks.call(by_im2col, x, w), by_loops(x, w), "y by im2col")
checks.right("one matrix product instead of seven loops")

# %% [markdown]
# (A common mistake: the order of the axes is not that of the weights. Then numbers are multiplied by the wrong weights,
# and no error is raised.) `nn` does the same, but never makes the whole matrix: it fills a piece that fits into the
# cache, and multiplies it at once (`nn/layers/im2col.py`).
#
# ## Winograd: fewer multiplications
#
# Two neighbouring outputs of a filter with three weights:
#
# $$ y_0 = d_0 g_0 + d_1 g_1 + d_2 g_2, \qquad y_1 = d_1 g_0 + d_2 g_1 + d_3 g_2 : $$
#
# six multiplications. Four are enough (Winograd 1980). Compute
#
# $$ m_1 = (d_0 - d_2)\, g_0, \quad
#    m_2 = (d_1 + d_2)\, \tfrac{g_0 + g_1 + g_2}{2}, \quad
#    m_3 = (d_2 - d_1)\, \tfrac{g_0 - g_1 + g_2}{2}, \quad
#    m_4 = (d_1 - d_3)\, g_2 . $$
#
# The right factor of each product is computed once for the filter and used at every place. **Exercise 5.** Put $y_0$
# and $y_1$ together from the four products, with additions only. (Write out $m_2 + m_3$ and $m_2 - m_3$ first.)


# %%
def two_outputs(d, g):
    """(y0, y1) of four inputs and three weights, with four multiplications."""
    m1 = (d[0] - d[2]) * g[0]
    m2 = (d[1] + d[2]) * (g[0] + g[1] + g[2]) / 2
    m3 = (d[2] - d[1]) * (g[0] - g[1] + g[2]) / 2
    m4 = (d[1] - d[3]) * g[2]
    # gap: additions and subtractions only
    # return m1 + m2, m3 + m4
    # solution
    return m1 + m2 + m3, m2 - m3 - m4
    # wrong: (y0, y1)
    # return m1 + m2 + m3, m2 - m3 + m4
    # end


# %%
for _ in range(5):
    d, g = rng.standard_normal(4), rng.standard_normal(3)
    checks.same(checks.call(two_outputs, d, g), np.correlate(d, g, "valid"), "(y0, y1)")
checks.right("four multiplications do what six did")

# %% [markdown]
# The general method: a sum like this is a product of polynomials, and a polynomial is determined by its values at
# enough points. Evaluate both at the points ($B^{\mathsf T}$ and $G$), multiply the values, and interpolate
# ($A^{\mathsf T}$). In two dimensions with a kernel of 3 x 3 and tiles of 4 x 4 outputs:
#
# $$ Y = A^{\mathsf T} \big[\, (G\, w\, G^{\mathsf T}) \odot (B^{\mathsf T} x\, B) \,\big] A , $$
#
# 36 multiplications for 16 outputs, where the definition has 144. Why not larger tiles? They need more points, the
# entries of the matrices grow, and so does the rounding error:

# %%
A, B, G = winograd.cook_toom(4, 3)  # the library's, for 4 outputs and 3 weights: six points
image, kernel = rng.standard_normal((6, 6)), rng.standard_normal((3, 3))
Y = A.T @ ((G @ kernel @ G.T) * (B.T @ image @ B)) @ A
assert np.allclose(Y, by_loops(image[None, :, :, None], kernel[:, :, None, None])[0, ..., 0], rtol=1e-12)


def with_points(points, outputs, taps=3):
    """The same three matrices for any points."""
    n = outputs + taps - 1
    A, G, B = np.zeros((n, outputs)), np.zeros((n, taps)), np.zeros((n, n))
    for j, p in enumerate(points):
        others = np.delete(points, j)
        A[j], G[j] = p ** np.arange(outputs), p ** np.arange(taps) / np.prod(p - others)
        B[:-1, j] = np.poly(others)[::-1]
    A[-1, -1] = G[-1, -1] = 1
    B[:, -1] = np.poly(points)[::-1]
    return A, B, G


tiles, saved, errors = [2, 4, 6, 8], [], []
several = np.array([0, 1, -1, 2, -2, 0.5, -0.5, 3, -3.0])
for m in tiles:
    a, b, g = (matrix.astype(np.float32) for matrix in with_points(several[: m + 1], m))
    off = []
    for _ in range(200):
        d, k = rng.standard_normal((m + 2, m + 2)), rng.standard_normal((3, 3))
        exact = by_im2col(d[None, :, :, None], k[:, :, None, None])[0, ..., 0]
        d, k = d.astype(np.float32), k.astype(np.float32)
        off.append(a.T @ ((g @ k @ g.T) * (b.T @ d @ b)) @ a - exact)
    saved.append(9 * m * m / (m + 2) ** 2)
    errors.append(np.sqrt(np.mean(np.square(off))))

exercise.draw_tiles(tiles, saved, errors)

# %% [markdown]
# Some libraries go on to tiles of 6 x 6 outputs, where the error is larger still. `nn` stops at 4 x 4, with points that
# halve the error: 0, ±2/3, ±3/2 and infinity. Winograd pays only with many channels, because the transforms cost, too:
# `winograd.cost` counts both.
#
# ## The race
#
# One layer, three ways, in billions of MACs a second. (Winograd's are the MACs of the *definition*: it does fewer.)

# %%
C, size, N = 32, 16, 8
layer = nn.Conv2d(C, C, 3, padding=1, bias=False)
network = nn.Network(layer, in_shape=(size, size, C), dtype=np.float32)
p, ctx = network.layout.views(network.layout.zeros(np.float32)), network.context()
x = rng.standard_normal((N, size, size, C)).astype(np.float32)
p.W[...] = rng.standard_normal(p.W.shape)
padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
macs = N * layer.macs((size, size, C))


def rate(call, macs, repeats):
    call()
    best = min(timed(call) for _ in range(repeats))
    return macs / best / 1e9


def timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


corner = padded[:1, :5, :5]  # nine outputs of each filter are enough of the loops
rates = {
    "loops": rate(lambda: by_loops(corner, p.W), 9 * C * C * 9, 1),
    "im2col, yours": rate(lambda: by_im2col(padded, p.W), macs, 10),
    f"nn.Conv2d\n({layer.algorithm(layer.geometry((size, size))).__name__.split('.')[-1]})": rate(
        lambda: network.forward(p, x, ctx), macs, 10
    ),
}
a = rng.standard_normal((1024, 1024)).astype(np.float32)
rates["a large matrix\nproduct"] = rate(lambda: a @ a, 1024**3, 5)
exercise.draw_race(rates, N, size, C)
assert np.abs(network.forward(p, x, ctx)[0] - by_im2col(padded, p.W)).max() < 1e-2

# %% [markdown]
# The first bar and the third differ by five powers of ten, and they compute the same. Always know which of these bars
# your own code is.
#
# ## Backward
#
# A convolution is linear in $x$ and in $w$, so the four equations of notebook 2 hold as they are. In indices: the
# weight $w_{uv}$ has multiplied $x_{i+u, j+v}$ on its way to $y_{ij}$, at every place. So its gradient adds up over
# places: $gw_{uv} = \sum_{ij} x_{i+u, j+v}\, gy_{ij}$; and $x_{ij}$ was used by the outputs around it:
# $gx_{ij} = \sum_{uv} gy_{i-u, j-v}\, w_{uv}$. Both are convolutions again: that is why training costs three times as
# much as predicting.
#
# **Exercise 6.** Write gw, with channels and images. With the columns of exercise 4 it is equation (4) of notebook 2:
# one matrix product. Or loop over u and v.


# %%
def weight_gradient(x, gy, kernel):
    """(KH, KW, C, K), for x (N, H, W, C), gy (N, H', W', K) and kernel (KH, KW)."""
    (KH, KW), (_, height, width, K) = kernel, gy.shape
    gw = np.zeros((KH, KW, x.shape[3], K))
    # gap: the sum over images and places
    # pass
    # solution
    for u, v in product(range(KH), range(KW)):
        gw[u, v] = np.einsum("nijc,nijk->ck", x[:, u : u + height, v : v + width], gy)
    # wrong: it is the mean over the images
    # for u, v in product(range(KH), range(KW)):
    #     gw[u, v] = np.einsum("nijc,nijk->ck", x[:, u : u + height, v : v + width], gy) / len(x)
    # wrong: the gradient of w
    # for u, v in product(range(KH), range(KW)):
    #     gw[u, v] = np.einsum("nijc,nijk->ck", x[:, KH - 1 - u :][:, :height, KW - 1 - v :][:, :, :width], gy)
    # end
    return gw


# %%
exercise.check_weight_gradient(weight_gradient)

# %% [markdown]
# Between convolutions the image is often made smaller. **Max pooling** takes the largest of each 2 x 2 pixels of a
# channel. Backward, only that one has had an influence: it gets the gradient, the other three get 0.
#
# **Exercise 7.** Write both, for even heights and widths.


# %%
def max_pool(x):
    """(N, H, W, C) to (N, H/2, W/2, C)."""
    N, H, W, C = x.shape
    # gap: two axes more, then the largest over them
    # return x[:, ::2, ::2]
    # solution
    return x.reshape(N, H // 2, 2, W // 2, 2, C).max(axis=(2, 4))
    # wrong: the largest of each 2 x 2
    # return x.reshape(N, 2, H // 2, 2, W // 2, C).max(axis=(1, 3))
    # end


def max_pool_backward(x, gy):
    """The gradient of x."""
    # gap: to the largest, and to no other
    # return gy.repeat(2, axis=1).repeat(2, axis=2)
    # solution
    largest = max_pool(x).repeat(2, axis=1).repeat(2, axis=2)
    return np.where(x == largest, gy.repeat(2, axis=1).repeat(2, axis=2), 0)
    # wrong: inputs get a gradient
    # return gy.repeat(2, axis=1).repeat(2, axis=2) / 4
    # end


# %%
exercise.check_pooling(max_pool, max_pool_backward)

# %% [markdown]
# (Where two pixels are equally large, `nn.MaxPool2d` chooses the first.) The definition of the derivative agrees with
# the library's convolution:

# %%
print(f"gradcheck of Conv2d: {nn.gradcheck(nn.Conv2d(3, 4, 3, padding=1), rng.standard_normal((2, 6, 5, 3))):.0e}")

# %% [markdown]
# ## Digits, shifted
#
# Two networks with about as many parameters, trained on digits as they are (12 epochs, and 20 with convolutions), and
# then shown digits that are shifted.


# %%
def train(*layers, epochs=12):
    network = nn.Network(nn.Sequential(*layers), in_shape=(8, 8, 1), dtype=np.float64)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.1, momentum=0.9), seed=0)
    nn.fit(trainer, nn.Loader(data.train, batch=32, seed=0), epochs)
    return trainer


dense = train(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
conv = train(
    nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.GlobalMaxPool2d(),
    nn.Linear(16, 10),
    epochs=20,
)  # fmt: skip


def shifted(images, pixels):
    """To the right; what leaves is lost."""
    return np.pad(images, ((0, 0), (0, 0), (pixels, 0), (0, 0)))[:, :, : images.shape[2]]


shifts = range(4)
exercise.draw_shifts(shifted, x_validation, shifts, dense, conv, y_validation)

# %% [markdown]
# These are the filters that training found:

# %%
pictures.filters(conv.p[0].W)

# %%
maps = np.maximum(library(np.pad(x_train[3:4], ((0, 0), (1, 1), (1, 1), (0, 0))), conv.p[0].W) + conv.p[0].b, 0)[0]
exercise.draw_found(maps)

# %% [markdown]
# **To try further.** Replace `GlobalMaxPool2d` by `Flatten` (and the last layer by `Linear(1024, 10)`): the accuracy on
# unshifted digits rises, that on shifted ones falls. Why? Count the MACs of a convolution with stride 2. Which is
# cheaper, one kernel of 5 x 5 or two of 3 x 3, and which sees farther?
#
# Next: `04b_training`: what else it takes until a deep network learns.
#
# *Sources: LeCun et al. 1989; Chellapilla, Puri, Simard 2006 (im2col); Winograd 1980; Lavin, Gray 2016; Sze et al. 2017
# (counting); Barabasz et al. 2020 (points).*
