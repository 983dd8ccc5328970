"""A load generator for this or any other OpenAI-compatible server: `python -m helpers.load_test`.

| read in this order | its one idea |
| --- | --- |
| `arrivals.py`, `lengths.py`, `prompts.py` | the load: when requests arrive, how long they are, and what they say |
| `client.py` | one request, and the time at which each token of its response arrived |
| `load.py` | all requests at their times, however the server behaves |
| `report.py` | the figures |
| `sweep.py` | a series of rates, and the knee |

The claim: latencies are measured from the time at which a request was *meant* to be sent. A slow server or a late load
generator therefore cannot hide the time for which a user would have waited ("coordinated omission").
"""

from .arrivals import arrival_times
from .client import RequestResult
from .lengths import MIXES, lengths
from .load import run_load
from .prompts import texts, token_ids
from .report import LoadResult
from .sweep import capacity, knee, sweep

__all__ = [
    "MIXES",
    "LoadResult",
    "RequestResult",
    "arrival_times",
    "capacity",
    "knee",
    "lengths",
    "run_load",
    "sweep",
    "texts",
    "token_ids",
]
