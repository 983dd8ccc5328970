"""The engine without a model: the same plans, from a clock that a cost function moves. Nothing here imports torch."""

from .simulator import Simulator

__all__ = ["Simulator"]
