"""A load generator for this or any other OpenAI-compatible server: `python -m helpers.load_test`.

| to read, in this order | its one idea |
| --- | --- |
| `arrivals.py`, `lengths.py`, `prompts.py` | the load: when requests come, how long they are, what they say |
| `client.py` | one request, and the time of every token of its answer |
| `load.py` | all requests at their times, whatever the server does meanwhile |
| `report.py` | the figures |
| `sweep.py` | one rate after the other, and the knee |

The claim: latencies count from when a request was *meant* to be sent, so a server that is slow, or a generator that is
late, cannot hide the time for which a user would have waited ("coordinated omission").
"""

from .arrivals import arrival_times
from .client import Answer
from .lengths import MIXES, lengths
from .load import run_load
from .prompts import texts, token_ids
from .report import LoadResult
from .sweep import capacity, knee, sweep

__all__ = [
    "MIXES",
    "Answer",
    "LoadResult",
    "arrival_times",
    "capacity",
    "knee",
    "lengths",
    "run_load",
    "sweep",
    "texts",
    "token_ids",
]
