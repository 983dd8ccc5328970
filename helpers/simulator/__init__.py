"""The engine without a model: the same plans, on a clock that a cost model advances.

simulator.py          `Simulator`: an engine whose runner computes nothing
cost_model.py         the seconds of an iteration, from four counts of its plan
stretch.py            many decode-only iterations, computed in one step
simulated_replica.py  a replica for long runs, without outputs and without a trace
replica_set.py        replicas behind a router, which start, fail and stop
fleet.py              a trace of requests on such a fleet
fleet_result.py       what a fleet did
disaggregation.py     prefill and decode on separate replicas
trace_files.py        reads traces in published formats: when requests arrived, and how long they were
synthetic.py          invented requests with similar statistics
__main__.py           the command line: how many replicas does a trace need?
"""

from .cost_model import CostModel
from .disaggregation import simulate_disaggregated
from .fleet import TimedRequest, simulate_fleet
from .fleet_result import FleetResult, Lifetime
from .simulated_replica import SimulatedReplica
from .simulator import SimulatedRunner, Simulator
from .synthetic import synthetic_trace
from .trace_files import read_trace
