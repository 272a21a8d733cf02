"""Cross-entropy of outputs that are cut: each rank has the logits of some classes, and no rank has all.

    loss = |q| log sum exp(z) - q . z,    q[c] = w[c] ((1-e) onehot[c] + e/V)

The ranks find the largest logit of each row, then add up two numbers a row, sum exp(z) and q . z; the gradient
|q| softmax(z) - q needs no more. Cost: allreduces of one and of two numbers a row, in place of gathering V of them.
Columns that one rank has more than another are none: a vocabulary need not divide. Source: Shoeybi et al. 2019.
"""

from __future__ import annotations

import numpy as np

from nn.losses import CrossEntropyLoss, Loss
from parallel.strategies.tensor.moves import Cut


class SplitCrossEntropy(Loss):
    """A cross-entropy that takes this rank's part of the logits, or, in evaluation, all of them.

    Parameters
    ----------
    loss : CrossEntropyLoss
        With its smoothing, weights and ignored class.
    classes : int
        V, of all ranks.
    """

    def __init__(self, loss: CrossEntropyLoss, classes: int):
        self.loss, self.cut = loss, Cut(-1, classes)

    def __repr__(self):
        return repr(self.loss)

    def rows(self, out_shape):
        return self.loss.rows(out_shape)

    def __call__(self, z, target, total, ctx):
        if not ctx.training:
            return self.loss(z, target, total, ctx)
        group, classes, smoothing = ctx.group("tensor"), self.cut.size, self.loss.label_smoothing
        lo, hi = self.cut.bounds(group.rank, group.size)
        labels = self.loss.check(np.broadcast_to(z.dtype.type(0), (*z.shape[:-1], classes)), target)
        spread = np.full(classes, smoothing / classes, z.dtype)
        if self.loss.class_weights is not None:
            spread *= self.loss.class_weights
        labels, kept, own = self.loss.row_weights(labels, z.dtype)
        own = own * (1 - smoothing)
        weight = own + kept * spread.sum()  # |q|
        spread = spread[lo:hi]
        here = np.flatnonzero((labels >= lo) & (labels < hi))
        at = here, labels[here] - lo

        gz = ctx.empty(z.shape, z.dtype)
        rows, prob = z.reshape(-1, hi - lo), gz.reshape(-1, hi - lo)
        largest = rows.max(axis=1)
        group.maximum(largest)
        np.subtract(rows, largest[:, None], out=prob)
        sums = np.zeros((2, len(rows)), z.dtype)  # of exp(z), and of q z
        if smoothing:
            sums[1] = kept * (prob @ spread)
        sums[1, here] += own[here] * prob[at]
        np.exp(prob, out=prob)
        np.add.reduce(prob, axis=1, out=sums[0])
        group.sum(sums)
        value = float(weight @ np.log(sums[0])) - float(np.add.reduce(sums[1]))
        prob *= (weight / (sums[0] * total))[:, None]
        if smoothing:
            prob -= spread / total
            prob[kept == 0] = 0
        prob[at] -= own[here] / total
        return value / total, gz
