"""How much processor time other programs took while an engine was measured.

With an engine on every core, another program slows it down by more than its share of the time: the engine's threads
wait for the one that was interrupted. So the benchmark reports no figures that were taken beside another program.
"""

import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class OtherPrograms:
    """What programs other than the benchmark and its engines did.

    Attributes:
        cores: how many cores they kept busy on average, the time that a hypervisor took away included.
        busiest: the name of the one that was busiest, or "" if none can be named: it may have ended since.
    """

    cores: float
    busiest: str


class Watch:
    """Measures other programs from its creation until `stop`. Children that end meanwhile must have been waited for."""

    def __init__(self):
        self._start = _Snapshot()

    def stop(self) -> OtherPrograms:
        """Return what other programs did since this object was created."""
        before, after = self._start, _Snapshot()
        seconds = {process: used - before.others.get(process, 0.0) for process, used in after.others.items()}
        busiest = max(seconds, key=seconds.get, default=None)
        busy = (after.busy - before.busy) - (after.own - before.own)
        return OtherPrograms(
            cores=max(0.0, busy / max(after.time - before.time, 0.01)),
            busiest=busiest.info["name"] if busiest and seconds[busiest] > 0 else "",
        )


class _Snapshot:
    """The processor seconds used so far: by all programs, by this one with its children, and by each of the others."""

    def __init__(self):
        self.time = time.perf_counter()
        kinds = ("user", "nice", "system", "irq", "softirq", "steal")
        total = psutil.cpu_times()
        self.busy = sum(getattr(total, kind, 0.0) for kind in kinds)
        process = psutil.Process()
        family = {process, *process.children(recursive=True)}
        self.own = sum(_seconds(process, with_ended_children=True) for process in family)
        self.others = {process: _seconds(process) for process in psutil.process_iter(["name"]) if process not in family}


def _seconds(process: psutil.Process, with_ended_children: bool = False) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended, or belongs to another user
        return 0.0
    used = times.user + times.system
    if with_ended_children:
        used += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return used
