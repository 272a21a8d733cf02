"""The checks of 09_large_batches.py."""

import numpy as np

import checks
import nn


@checks.explain_errors
def check_correction(momentum_step):
    rng = np.random.default_rng(14)
    w = theirs = rng.standard_normal(4)
    v, outside, last = np.zeros(4), np.zeros(4), 0.1
    for step, rate in enumerate((0.1, 0.1, 0.4, 0.4, 0.05)):
        g = rng.standard_normal(4)
        outside = 0.9 * outside + g
        theirs = theirs - rate * outside
        w, v = (np.asarray(a, float) for a in checks.several(2, momentum_step, w.copy(), v.copy(), g, rate, last, 0.9))
        said = (
            ""
            if rate == last
            else f"; here the rate changes from {last:g} to {rate:g}, and v still has the old one in it"
        )
        checks.expect(
            np.allclose(w, theirs, rtol=1e-9),
            f"step {step} goes elsewhere than with the rate outside of the velocity{said}.",
        )
        last = rate
    checks.right("the same steps as with the rate outside, however it changes")


@checks.explain_errors
def check_lamb(lamb):
    one = nn.Network(nn.Linear(8, 8, bias=False), (8,), np.float64)
    theirs = one.layout.zeros(np.float64)
    one.layout.initialize(theirs, 0)
    ours, slots = theirs.copy(), {name: one.layout.zeros(np.float64) for name in nn.LAMB(0.01).slots}
    m, v, rng = np.zeros_like(ours), np.zeros_like(ours), np.random.default_rng(2)
    for step in range(10):
        g, before = rng.standard_normal(ours.shape), (ours.copy(), theirs.copy())
        checks.change(lamb, ours, g.copy(), m, v, step)
        nn.LAMB(0.01).update(theirs, g, slots, step, one.layout.region())
        checks.expect(not np.array_equal(ours, before[0]), "w stays as it was given: change it in place, w -= ...")
        lengths = [np.linalg.norm(new - old) for new, old in zip((ours, theirs), before, strict=True)]
        checks.expect(
            np.isclose(*lengths, rtol=1e-9),
            f"step {step} is {lengths[0]:.3g} long, and {lengths[1]:.3g} is wanted: the rate times the length "
            "of the weight, in "
            "the direction u.",
        )
        checks.same(ours, theirs, f"w after step {step}")
    checks.right("ten steps as nn.LAMB makes them")


@checks.explain_errors
def check_noise_scale(noise_scale):
    for signal, noise in ((1.0, 50.0), (0.01, 3.0), (4.0, 4.0)):
        small, large = 8, 128
        got = float(checks.numbers(noise_scale, signal + noise / small, signal + noise / large, small, large))
        naive = signal + noise / large
        checks.expect(
            not np.isclose(got, (signal + noise / small - naive) * small / naive, rtol=1e-3),
            "the large batch's gradient has noise in it, too: solve both equations for both unknowns.",
        )
        checks.same(
            got, noise / signal, f"the noise scale for |G|^2 = {signal:g} and a variance of {noise:g}", tolerance=1e-6
        )
    checks.right("two equations, two unknowns")
