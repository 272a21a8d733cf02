"""The laws of speedup: their golden numbers, and fits that find what a run was made from."""

import dataclasses
import random
from math import inf, nan

import pytest

from parallel.planning import laws


def test_golden_numbers():
    """1/((1-f) + f/p); p - (1-f)(p-1); (1/S - 1/p)/(1 - 1/p)."""
    assert laws.amdahl(8, 0.95) == pytest.approx(5.9259, abs=1e-4)
    assert laws.amdahl(1024, 0.95) == pytest.approx(19.6356, abs=1e-4)
    assert laws.amdahl(inf, 0.95) == pytest.approx(20)
    assert laws.amdahl(7, 1) == 7 and laws.amdahl(7, 0) == 1
    assert laws.gustafson(64, 0.95) == pytest.approx(60.85)
    assert laws.gustafson(7, 1) == 7 and laws.gustafson(7, 0) == 1
    assert laws.karp_flatt(1.95, 2) == pytest.approx(0.025641, abs=1e-6)
    assert laws.strong_efficiency(10.0, 3.0, 4) == pytest.approx(10 / 12) and laws.weak_efficiency(9.0, 10.0) == 0.9


@pytest.mark.parametrize("parallel", [0.0, 0.3, 0.95, 0.999])
def test_karp_flatt_is_amdahl_read_backwards(parallel):
    for ranks in (2, 3, 64, 65_536):
        assert laws.karp_flatt(laws.amdahl(ranks, parallel), ranks) == pytest.approx(1 - parallel, abs=1e-12)


def test_gradients_of_resnet_need_12_8_gbit():
    """100 MB of gradients behind backprop, on many ranks (Goyal et al. 2017, who say 120 ms and divide by 125)."""
    assert 8e-9 * laws.bandwidth_to_hide(100e6, 1e9, 0.125) == pytest.approx(12.8)
    assert 8e-9 * laws.bandwidth_to_hide(100e6, 1e9, 0.120) == pytest.approx(13.333, abs=1e-3)


@pytest.mark.parametrize("serial", [0.0, 0.02, 0.4, 1.0])
def test_a_fit_finds_the_serial_share(serial):
    ranks = (1, 2, 4, 7, 16)
    same = [(p, 3.0 / laws.amdahl(p, 1 - serial)) for p in ranks]
    law = laws.fit_amdahl(same)
    assert law.serial == pytest.approx(serial, abs=1e-9) and law.one == pytest.approx(3.0) and law.error < 1e-9
    assert law.seconds(64) == pytest.approx(3.0 / laws.amdahl(64, 1 - serial))
    grown = [(p, 3.0 * p / laws.gustafson(p, 1 - serial)) for p in ranks]
    law = laws.fit_gustafson(grown)
    assert law.serial == pytest.approx(serial, abs=1e-9) and law.seconds(64) == pytest.approx(
        3.0 * 64 / laws.gustafson(64, 1 - serial)
    )
    shares = laws.serial_shares(same)
    assert [p for p, _ in shares] == [2, 4, 7, 16] and all(e == pytest.approx(serial, abs=1e-9) for _, e in shares)


def test_noise_does_not_make_impossible_laws():
    draw = random.Random(0)
    for _ in range(200):
        runs = [(p, draw.uniform(0.5, 2.0)) for p in (1, 2, 3, 4)]
        for fit in (laws.fit_amdahl, laws.fit_gustafson):
            law = fit(runs)
            assert 0 <= law.serial <= 1 and law.one > 0 and law.error < 2
            assert law.name in str(law)
    superlinear = laws.fit_amdahl([(1, 8.0), (2, 3.0), (4, 1.0)])
    assert superlinear.serial == 0 and laws.serial_shares([(1, 8.0), (2, 3.0)])[0][1] < 0


@pytest.mark.parametrize(
    ("fit", "seconds", "serial"),
    [
        (laws.fit_amdahl, (1.0, 2.5, 6.0), 1.0),  # slower with every rank
        (laws.fit_amdahl, (8.0, 3.0, 1.0), 0.0),  # more than twice as fast with twice the ranks
        (laws.fit_gustafson, (1.0, 2.5, 6.0), 1.0),  # more than twice the time for twice the work
        (laws.fit_gustafson, (1.0, 0.9, 0.8), 0.0),  # less time for more work
    ],
)
def test_beyond_all_serial_shares_the_nearest_law_is_taken(fit, seconds, serial):
    """Of those with that share, no other time of one rank is less off."""
    runs = list(zip((1, 2, 4), seconds, strict=True))
    law = fit(runs)
    assert law.serial == serial
    for one in (0.99 * law.one, 1.01 * law.one):
        other = dataclasses.replace(law, one=one)
        assert law.error < (sum((other.seconds(p) / t - 1) ** 2 for p, t in runs) / 3) ** 0.5


def test_impossible_numbers_are_refused():
    for call, message in (
        (lambda: laws.amdahl(0, 0.5), "ranks: expected at least 1, given 0"),
        (lambda: laws.amdahl(2, 1.5), "parallel share: expected 0 to 1, given 1.5"),
        (lambda: laws.gustafson(2, nan), "parallel share"),
        (lambda: laws.karp_flatt(1.0, 1), "one rank says nothing"),
        (lambda: laws.karp_flatt(0.0, 2), "a speedup above 0, given 0"),
        (lambda: laws.fit_amdahl([(2, 1.0), (2, 1.1)]), r"two numbers of ranks at least, given \[2, 2\]"),
        (lambda: laws.fit_amdahl([(1, 1.0), (2, -1.0)]), "seconds on 2 ranks: expected a number above 0, given -1"),
        (lambda: laws.serial_shares([(2, 1.0), (4, 0.6)]), "compares with one rank"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
