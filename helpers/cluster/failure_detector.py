"""Where the loss of a replica is noticed.

A replica is lost if its process or its connection ends, if its engine stops, if it does not report for `timeout`
seconds, or if one of its iterations takes longer than that: a replica whose engine hangs can still report.
"""

import asyncio

from .connection import ReplicaConnection
from .replica import ReplicaLost, Report

GRACE = 1.0  # seconds to read a report that came while the front end itself was stopped


async def next_report(handle: ReplicaConnection, timeout: float) -> Report:
    """Return a replica's next report. The outputs in the last report of an engine that has stopped are valid.

    Raises:
        ReplicaLost: it has ended, does not report in time, or hangs in an iteration.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            timer = loop.call_later(timeout, lambda: limit.reschedule(loop.time() + GRACE))
            try:
                report = await handle.report()
            finally:
                timer.cancel()
    except TimeoutError as error:
        raise ReplicaLost(f"no report for {timeout:g} s") from error
    if report.step_seconds > timeout:
        raise ReplicaLost(f"an iteration has taken {report.step_seconds:.1f} s")
    return report
