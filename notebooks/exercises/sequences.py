"""The checks of 19_long_sequences.py."""

import numpy as np

import checks


@checks.explain_errors
def check_mask(mask):
    for size, length in ((1, 8), (4, 64), (3, 24)):
        chunk = length // (2 * size)
        parts = []
        for r in range(size):
            parts.append([c * chunk + i for c in (r, 2 * size - 1 - r) for i in range(chunk)])
        for one in range(size):
            for two in range(size):
                got = np.asarray(checks.call(mask, np.array(parts[one]), np.array(parts[two])))
                checks.expect(
                    got.shape == (2 * chunk, 2 * chunk),
                    f"a row for each of {2 * chunk} queries, a column for each of {2 * chunk} keys; yours: "
                    f"{got.shape}.",
                )
                want = np.array([[key <= query for key in parts[two]] for query in parts[one]])
                future = np.logical_and(got, ~want).sum()
                checks.expect(
                    not future,
                    f"queries of rank {one}, keys of rank {two}: {future} pairs look into the future. Which "
                    "row a position has in its "
                    "part says nothing; its place in the sequence does.",
                )
                checks.expect(
                    (got == want).all(),
                    f"queries of rank {one}, keys of rank {two}: {int((want & ~got).sum())} pairs are hidden "
                    "that may be seen; a "
                    "position sees itself.",
                )
    checks.right("by positions, whoever has them")
