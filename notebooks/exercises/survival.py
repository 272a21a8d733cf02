"""The checks of 16_survive.py."""

import numpy as np

import checks


@checks.explain_errors
def check_chance(chance):
    rng = np.random.default_rng(22)
    for machines, years, hours in ((1024, 5, 24 * 7), (1, 5, 24), (1024, 5, 24), (200, 3, 100)):
        mean = years * 365 * 24
        got = float(checks.numbers(chance, machines, mean, hours))
        checks.expect(0 <= got <= 1, f"a probability lies between 0 and 1; yours is {got:.3g}.")
        tried = np.mean(rng.exponential(mean / machines, 200_000) > hours)
        checks.expect(
            abs(got - tried) < 0.01,
            f"{machines:,} machines that fail once in {years} years, {hours} hours: of 200,000 runs "
            f"{tried:.1%} came through, and "
            f"yours says {got:.1%}.",
        )
    checks.right("as in 200,000 runs with failures at random moments")


@checks.explain_errors
def check_restore(restore):
    rng = np.random.default_rng(23)
    for size in (3, 4, 6):
        parts = rng.integers(0, 100, size=(size, size - 1, 2))
        sums = np.zeros((size, 2), int)
        for r in range(size):
            for k in range(1, size):
                sums[(r + k) % size] += parts[r, k - 1]
        for lost in range(size):
            damaged, kept = parts.copy(), sums.copy()
            damaged[lost], kept[lost] = -(10**6), -(10**6)  # what is read of it is wrong
            got = checks.numbers(restore, damaged, kept, lost, shape=(size - 1, 2))
            checks.expect(
                np.abs(got).max() < 10**5,
                f"rank {lost} of {size} is lost, and yours has used something that only it had.",
            )
            checks.same(got, parts[lost], f"the pieces of rank {lost} of {size}")
    checks.right("whichever is lost, the others know it")
