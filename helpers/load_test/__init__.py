"""A load generator for this or any other OpenAI-compatible server: `python -m helpers.load_test`.

    workload.py   when requests arrive, how long they are, and what they say
    client.py     one request, and the time at which each chunk of its response arrived
    load.py       all requests of a load test, in an open or a closed loop
    report.py     the latencies, the throughput and the goodput
    sweep.py      a series of rates, and the knee

Latencies are measured from the time at which a request was *meant* to be sent. A slow server or a late load generator
therefore cannot hide the time for which a user would have waited ("coordinated omission").
"""

from .client import RequestResult
from .load import run_load
from .report import LoadResult
from .sweep import capacity, sweep
from .workload import MIXES, arrival_times, lengths, texts, token_ids
