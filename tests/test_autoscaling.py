"""The autoscaler grows with the queue at once, and shrinks late."""

import pytest

from helpers.cluster.autoscaling import QueueLengthAutoscaler


def test_there_are_as_many_replicas_as_the_unfinished_requests_need_within_the_limits():
    autoscaler = QueueLengthAutoscaler(2, 5, target=10, window=1)

    answers = [autoscaler.desired(unfinished) for unfinished in (0, 20, 21, 30, 50, 51, 1000)]

    assert answers == [2, 2, 3, 3, 5, 5, 5]


def test_replicas_stop_only_after_as_many_decisions_in_a_row_as_the_window():
    autoscaler = QueueLengthAutoscaler(1, 8, target=10, window=3)

    answers = [autoscaler.desired(unfinished) for unfinished in (80, 10, 10, 40, 10, 10, 10, 10)]

    assert answers == [8, 8, 8, 4, 4, 4, 1, 1]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"least": 0}, "at least 1 replica and at most `most`, not 0 to 4"),
        ({"least": 5}, "not 5 to 4"),
        ({"target": 0}, "above 0, not 0 and 10.0"),
        ({"interval": float("nan")}, "above 0, not 8 and nan"),
        ({"window": 0}, "at least 1, not 0"),
    ],
)
def test_an_autoscaler_says_which_setting_is_out_of_range(settings, reason):
    with pytest.raises(ValueError, match=reason):
        QueueLengthAutoscaler(**{"least": 1, "most": 4, "target": 8} | settings)
