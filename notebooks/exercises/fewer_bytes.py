"""The checks of 11_fewer_bytes.py."""

import numpy as np

import checks


@checks.explain_errors
def check_scale(scale):
    for largest, ranks in ((1.0, 1), (1.0, 4), (3e-9, 8), (700.0, 3), (65504.0, 1), (1e-3, 64)):
        got = float(checks.numbers(scale, largest, ranks))
        checks.expect(got > 0, f"a positive number is expected, not {got:g}.")
        checks.expect(
            np.log2(got) == round(np.log2(got)),
            f"{got:g} is no power of two: to multiply by it changes digits, not only the exponent.",
        )
        checks.expect(
            got * largest * ranks <= 65504,
            f"with numbers up to {largest:g} on {ranks} ranks and the scale {got:g} the sum may become "
            f"{got * largest * ranks:g}, above 65,504: it would be infinite.",
        )
        checks.expect(
            2 * got * largest * ranks > 65504,
            f"with numbers up to {largest:g} on {ranks} ranks the scale may be larger than {got:g}; small "
            "gradients are lost.",
        )
    checks.right("as large as the sum allows")


@checks.explain_errors
def check_signs(pack, unpack):
    rng = np.random.default_rng(17)
    for count in (16, 21):
        p = rng.standard_normal(count) + 0.3
        bits, high, low = checks.several(3, pack, p.copy())
        checks.expect(
            isinstance(bits, np.ndarray) and bits.dtype == np.uint8, "the bits are an array of uint8 (np.packbits)."
        )
        checks.expect(
            bits.nbytes == -(-count // 8),
            f"{count} signs need {-(-count // 8)} bytes, eight in each; yours takes {bits.nbytes}.",
        )
        got = checks.numbers(unpack, bits, high, low, count, shape=(count,))
        want = np.where(p > 0, p[p > 0].mean(), p[p <= 0].mean())
        checks.expect(np.array_equal(got > 0, p > 0), "the signs do not come back in their places.")
        checks.same(got, want, "what is decoded: the mean of the positive numbers, and that of the others")
    checks.right("a bit for each number, and two means")


@checks.explain_errors
def check_dgc(dgc):
    rng = np.random.default_rng(18)
    u, v, u2, v2 = np.zeros((4, 12))
    for step in range(8):
        g = rng.standard_normal(12) * np.linspace(0.1, 2, 12)
        sent = checks.numbers(dgc, g.copy(), u, v, 0.9, 2, shape=(12,))
        u2 = 0.9 * u2 + g
        v2 = v2 + u2
        chosen = sorted(range(12), key=lambda i: -abs(v2[i]))[:2]
        want = np.zeros(12)
        for i in chosen:
            want[i], u2[i], v2[i] = v2[i], 0, 0
        checks.expect(
            np.count_nonzero(sent) == 2, f"step {step}: 2 numbers are to be sent, yours are {np.count_nonzero(sent)}."
        )
        checks.same(sent, want, f"what is sent in step {step}" + (": what is in v?" if step else ""))
        checks.same(v, v2, f"v after step {step}: 0 where it was sent")
        checks.same(u, u2, f"u after step {step}: 0 where v was sent")
    checks.right("velocities are remembered in place of gradients, and both end where they were sent")
