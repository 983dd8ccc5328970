"""Measured ceilings are plausible figures; how large they are is nobody's to assert."""

import time

from helpers import hardware


def test_seconds_is_the_median_of_the_repeats_without_the_warm_up():
    naps = iter([0.2, 0.0, 0.0, 0.05])  # the warm-up and one repeat are slow

    assert hardware.seconds(lambda: time.sleep(next(naps)), repeats=3) < 0.05


def test_the_ceilings_are_positive():
    assert hardware.memory_bandwidth(megabytes=8) > 0
    assert hardware.matmul_rate(size=64) > 0
