"""A load generator for this or any other OpenAI-compatible server: `python -m helpers.load_test`.

    arrivals.py   when requests arrive
    lengths.py    how long they are
    prompts.py    what they say
    client.py     one request, and the time at which each chunk of its response arrived
    load.py       all requests of a load test, in an open or a closed loop
    report.py     the latencies, the throughput and the goodput
    sweep.py      a series of rates, and the knee

Latencies are measured from the time at which a request was *meant* to be sent. A slow server or a late load generator
therefore cannot hide the time for which a user would have waited ("coordinated omission").
"""

from .arrivals import arrival_times
from .client import RequestResult
from .lengths import MIXES, lengths
from .load import run_load
from .prompts import texts, token_ids
from .report import LoadResult
from .sweep import capacity, sweep
