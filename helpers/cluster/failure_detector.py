"""Where the loss of a replica is noticed.

A replica is lost if its process or its connection ends, if its engine stops, if it does not report for `timeout`
seconds, or if one of its iterations takes longer than that: a replica whose engine hangs can still report.
"""

import asyncio

from .replica import ReplicaHandle, ReplicaLost, Report

GRACE = 1.0  # seconds to read a report that came while the front end itself was stopped


class FailureDetector:
    """Reads a replica's reports, and notices when it is lost.

    Args:
        handle: how to call the replica.
        timeout: seconds without a report, or within one iteration, after which it is lost.
    """

    def __init__(self, handle: ReplicaHandle, timeout: float):
        self._handle, self._timeout = handle, timeout

    async def next_report(self) -> Report:
        """Return the replica's next report.

        Raises:
            ReplicaLost: it has ended, does not report in time, or hangs in an iteration.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                timer = loop.call_later(self._timeout, lambda: limit.reschedule(loop.time() + GRACE))
                try:
                    report = await self._handle.report()
                finally:
                    timer.cancel()
        except TimeoutError as error:
            raise ReplicaLost(f"no report for {self._timeout:g} s") from error
        if report.step_seconds > self._timeout:
            raise ReplicaLost(f"an iteration has taken {report.step_seconds:.1f} s")
        return report

    def check_engine(self, report: Report) -> None:
        """Raise ReplicaLost if the engine has stopped. The outputs of this last report are valid."""
        if report.error is not None:
            raise ReplicaLost(f"its engine has stopped: {report.error}")
