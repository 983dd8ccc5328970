"""The engine without a model: the same plans, on a clock that a cost model advances. Only fitting needs torch.

simulator.py    `Simulator`: an engine whose runner computes nothing
simulate.py     `simulate`: requests with lengths become a trace
cost_model.py   the seconds of an iteration, from six counts of its plan
fit.py          finds the weights for this machine, and measures the errors of the predictions
timing.py       times iterations whose plans are chosen
stretch.py      many decode-only iterations, computed in one step
replica.py      a replica for long runs, without outputs and without a trace
fleet.py        replicas behind a router
trace_files.py  reads and writes traces in published formats: when requests arrived, and how long they were
synthetic.py    invented requests with similar statistics
__main__.py     the command line: how many replicas does a trace need?
"""

from .cost_model import CostModel
from .fleet import FleetResult, TimedRequest, simulate_fleet
from .replica import SimulatedReplica
from .simulate import simulate
from .simulator import SimulatedRunner, Simulator
from .synthetic import synthetic_trace
from .trace_files import read_trace, write_trace

__all__ = [
    "CostModel",
    "FleetResult",
    "SimulatedReplica",
    "SimulatedRunner",
    "Simulator",
    "TimedRequest",
    "read_trace",
    "simulate",
    "simulate_fleet",
    "synthetic_trace",
    "write_trace",
]
