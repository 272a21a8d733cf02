"""Project 2: your own sharded optimizer, ZeRO stages 1 to 3 (Rajbhandari et al. 2020).

p ranks train the same n parameters with Adam. Rank r owns the slice `own(n, p, r)`.

| stage | a rank keeps between steps |
|---|---|
| 1 | all parameters, its slice of the two moments |
| 2 | the same, and of the gradient only its slice |
| 3 | its slice of parameters, gradient and moments |

Adam, element by element, in step t = 1, 2, ...:  m += (1 - b1) (g - m);  v += (1 - b2) (g^2 - v);
w -= rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Allowed: NumPy, and of the communicator Reduce_scatter, Allgatherv, Allreduce and Bcast.
README.md in this folder says what is graded.
"""

import numpy as np


def own(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (lo, hi), the slice of n elements that a rank owns; the first n % ranks slices have one element more."""
    each, more = divmod(n, ranks)
    lo = rank * each + min(rank, more)
    return lo, lo + each + (rank < more)


class ShardedAdam:
    """Adam of one rank among many.

    Parameters
    ----------
    w : (n,) float64
        all parameters, the same on every rank; copied
    communicator : collectives.Communicator
    stage : 1, 2 or 3
    """

    def __init__(self, w: np.ndarray, communicator, stage: int, rate=0.01, b1=0.9, b2=0.999, eps=1e-8):
        self.communicator, self.stage = communicator, stage
        self.rate, self.b1, self.b2, self.eps = rate, b1, b2, eps
        # Your turn: keep what this stage keeps, and no more.
        self.w = w.copy()

    def parameters(self) -> np.ndarray:
        """Return all parameters (n,). In stage 3 they are gathered (collective), and not kept."""
        return self.w

    def step(self, g: np.ndarray) -> None:
        """Make a step with this rank's gradient (n,); the sum over all ranks is the gradient (collective).

        g is yours only during the call: do not keep it.
        """
        raise NotImplementedError("Your turn")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return {"w", "m", "v"}, each (n,), and {"t"}: whole, the same on every rank (collective)."""
        raise NotImplementedError("Your turn")

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Go on from the state of any number of ranks, of any stage."""
        raise NotImplementedError("Your turn")
