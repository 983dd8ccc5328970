"""Autoscalers that forget sooner, so that replicas stop within a test."""

from helpers.cluster.autoscaling import QueueLengthAutoscaler


def with_window(decisions: int) -> type[QueueLengthAutoscaler]:
    """Return a kind of autoscaler whose replicas stop once this many decisions have asked for fewer."""
    return type("QueueLengthAutoscaler", (QueueLengthAutoscaler,), {"window": decisions})
