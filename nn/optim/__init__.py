"""Optimizers, and what goes with them: clipping, learning rates, L-BFGS.

| file | holds |
|---|---|
| optimizers.py | SGD, Adam and the others, in place on flat buffers |
| clipping.py | gradients that are too large, and norms of tensors in flat buffers |
| learning_rates.py | functions from a step to a rate |
| lbfgs.py | full-batch minimisation with a line search |
"""

from functools import partial

from nn.guesses import refuse_name

__getattr__ = partial(refuse_name, __name__)
