"""The measured limit of a machine is a plausible figure. No test asserts how large it is."""

from types import SimpleNamespace

import pytest

from helpers import hardware


def test_seconds_is_the_median_of_the_repeats_without_the_warm_up(monkeypatch):
    now, durations = 0.0, iter([5.0, 1.0, 1.0, 7.0])  # the warm-up and one repeat are slow

    def function():
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: now))
    assert hardware.seconds(function, repeats=3) == pytest.approx(1.0)


def test_the_bandwidth_is_positive():
    assert hardware.memory_bandwidth(megabytes=8) > 0
