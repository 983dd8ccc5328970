"""The engine without a model: the same plans, from a clock that a cost function moves. Nothing here imports torch."""

from .simulate import simulate
from .simulator import SimulatedRunner, Simulator

__all__ = ["SimulatedRunner", "Simulator", "simulate"]
