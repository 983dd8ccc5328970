"""Autoscaling: how many replicas there should be. The policy is the same for real replicas and for simulated ones.

Ray Serve and Knative have this rule, too: enough replicas for a target number of requests each. A new replica takes a
while to start, so a short lull must not end one. Like Kubernetes' Horizontal Pod Autoscaler, the policy therefore takes
the largest of its recent answers: it grows at once and shrinks late.
"""

from collections import deque
from math import ceil, inf


class QueueLengthAutoscaler:
    """Keeps the unfinished requests per replica near a target.

    It remembers its recent answers, so each run needs a new one.

    Args:
        least, most: the limits on the number of replicas.
        target: the unfinished requests per replica, running or queued.
        interval: the seconds from one decision to the next.

    Raises:
        ValueError: a setting is outside its range.
    """

    window = 6  # replicas stop once this many decisions in a row have asked for fewer of them

    def __init__(self, least: int, most: int, target: float, interval: float = 10.0):
        if not 1 <= least <= most:
            raise ValueError(f"An autoscaler keeps at least 1 replica and at most `most`, not {least} to {most}.")
        if not (0 < target < inf and 0 < interval < inf):
            raise ValueError(f"target and interval must be numbers above 0, not {target} and {interval}.")
        self.least, self.most, self.target, self.interval = least, most, target, interval
        self._recent: deque[int] = deque(maxlen=self.window)

    def desired(self, unfinished: int) -> int:
        """Return how many replicas there should be; to be called once per interval.

        Args:
            unfinished: how many requests run or wait, on all replicas together.
        """
        self._recent.append(ceil(unfinished / self.target))
        return min(max(*self._recent, self.least), self.most)
