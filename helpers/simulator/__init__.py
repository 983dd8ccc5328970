"""The engine without a model: the same plans, on a clock that a cost model advances. Only fitting needs torch.

simulator.py          `Simulator`: an engine whose runner computes nothing
simulate.py           `simulate`: requests with lengths become a trace
cost_model.py         the seconds of an iteration, from six counts of its plan
fit.py                finds the coefficients of this machine, and measures the errors of the predictions
stretch.py            many decode-only iterations, computed in one step
simulated_replica.py  a replica for long runs, without outputs and without a trace
replica_set.py        replicas behind a router, which start, fail and stop
fleet.py              a trace of requests on such a fleet
fleet_result.py       what a fleet did
disaggregation.py     prefill and decode on separate replicas
trace_files.py        reads and writes traces in published formats: when requests arrived, and how long they were
synthetic.py          invented requests with similar statistics
__main__.py           the command line: how many replicas does a trace need?
"""

from .cost_model import CostModel
from .disaggregation import simulate_disaggregated
from .fleet import AdaptedRequest, TimedRequest, random_failures, simulate_fleet
from .fleet_result import FleetResult, Lifetime
from .simulate import simulate
from .simulated_replica import SimulatedReplica
from .simulator import SimulatedRunner, Simulator
from .synthetic import synthetic_trace
from .trace_files import read_trace, write_trace
