"""Choose the backend of every linear layer by timing the available ones on this machine.

For each shape of weight, each backend is timed with a few numbers of rows. Before a weight is read again, a buffer as
large as the last-level cache is read, so the weight has left the cache, as it has when the other layers of a model have
run in between. The backends take turns. Other programs can only slow a call down, so the fastest of a few rounds
counts. The rounds of all shapes take turns, too, so that a slow phase of the machine affects one round of each.

A copy of a weight costs memory. It is kept only if for some number of rows it saves at least `MIN_SAVING` of the time
that the fastest backend takes without it.

The times are kept as a JSON file beside the compiled kernels, under a fingerprint of everything that they depend on. So
a machine measures a model's shapes once. Times that were measured while other programs took a core are used, but not
kept.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..hardware import cpuinfo
from ..models.integer_products import IntegerLinear
from ..models.quantization import QuantizedLinear
from .kernels import compiled
from .linear_backends import COPYING, Layer, backends_of, bytes_of, inputs_of, kind_of

ROWS = (1, 4, 8, 16, 64, 256, 1024)  # other numbers of rows use the choice for the nearest of these
ROUNDS = 3
BUDGET = 3.0  # seconds; once it is spent, one round is enough, and more rows than FEW are not timed
FEW = 16
MIN_SAVING = 0.15
METHOD = 3  # how times are measured: times that another method gave are measured again
TOLERATED = 0.2  # cores that other programs may take from this one during a measurement that is kept
log = logging.getLogger(__name__)
_measuring = threading.Lock()  # engines that are made in several threads would slow down each other's products


@dataclass(frozen=True)
class Times:
    """What was measured for one shape of weight.

    Attributes:
        seconds: for each backend, the seconds per call with the first numbers in `ROWS`. All lists are equally long.
    """

    seconds: dict[str, list[float]]

    def choose(self, backends: Sequence[str]) -> list[str]:
        """Return the backend for each number in `ROWS`, among these backends; a copy only if it pays."""
        kept = [name for name in backends if name != COPYING]
        if COPYING in backends:
            best = [min(times) for times in zip(*(self.seconds[name] for name in kept), strict=True)]
            pairs = zip(self.seconds[COPYING], best, strict=True)
            if any(new <= (1 - MIN_SAVING) * old for new, old in pairs):
                kept.append(COPYING)
        return self.fastest(kept)

    def fastest(self, kept: Sequence[str]) -> list[str]:
        """Return the fastest of these backends for each number in `ROWS`."""
        timed = len(self.seconds[kept[0]])
        chosen = [min(kept, key=lambda name: self.seconds[name][index]) for index in range(timed)]
        return chosen + chosen[-1:] * (len(ROWS) - timed)


@functools.cache  # every layer asks for a thousand numbers
def nearest(rows: int) -> int:
    """Return the index of the number in `ROWS` that is nearest to this number of rows, by their ratio."""
    return min(range(len(ROWS)), key=lambda index: abs(math.log(max(rows, 1) / ROWS[index])))


def shape_of(layer: Layer) -> str:
    """Return what the times of a layer depend on: its class, which tells the order of its weight, and its sizes."""
    if isinstance(layer, QuantizedLinear):
        scales = f"{layer.scales.shape[1]} {layer.scales.dtype}".replace("torch.", "")
        inputs = "int8 by " if isinstance(layer, IntegerLinear) else ""
        return f"{inputs}{layer.weights} {layer.out_features}x{layer.in_features} scales {scales}"
    return f"{type(layer).__name__} {'x'.join(map(str, layer.weight.shape))}"


def times_of(layers: Sequence[Layer], backends: Sequence[str]) -> dict[str, Times]:
    """Return the times of every shape among the layers, which are of one kind: kept ones, or measured now.

    Args:
        backends: names of available backends.
    """
    examples = {shape_of(layer): layer for layer in layers}
    machine = fingerprint(kind_of(layers[0])[0], sorted(examples), backends)
    with _measuring:
        if (kept := load(machine)) is not None:
            return kept
        start, busy = time.perf_counter(), busy_elsewhere()
        times = measure(examples, backends, sum(map(bytes_of, layers)))
        took = time.perf_counter() - start
        log.info("Timed %d shapes in %.1f s.", len(times), took)
        if torch.get_num_threads() + (busy_elsewhere() - busy) / took <= (os.cpu_count() or 1) + TOLERATED:
            save(machine, times)
        else:
            log.info("These times are not kept, because other programs were running.")
    return times


def busy_elsewhere() -> float:
    """Return the CPU seconds that other programs have taken since the system started; 0 if unknown."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, fields)
    except (OSError, ValueError):  # not Linux, or another format
        return 0.0
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK") - time.process_time()


# --- measuring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(examples: dict[str, Layer], backends: Sequence[str], model_bytes: int) -> dict[str, Times]:
    """Time the backends on a layer of each shape, in rounds, within a budget of seconds.

    The first round times few rows in any case. It times many rows if that takes no longer than what is left of the
    budget, or than the shape's share of half of it: a large LM head must not take all.
    """
    evict = evictor(min(last_level_cache(), model_bytes))
    timers = {shape: _LayerTimer(layer, backends) for shape, layer in examples.items()}
    deadline, share = time.perf_counter() + BUDGET, BUDGET / 2 / len(timers)
    for number in range(ROUNDS):
        for rows in ROWS:
            for timer in timers.values():
                left = deadline - time.perf_counter()
                if number > 0 and left < 0:
                    break
                if rows in timer.seconds or (number == 0 and (rows <= FEW or timer.estimate(rows) < max(left, share))):
                    timer.run_round(rows, evict)
    return {shape: timer.times() for shape, timer in timers.items()}


class _LayerTimer:
    """The products of one layer, and the seconds that each took in every round, for each number of rows."""

    def __init__(self, layer: Layer, backends: Sequence[str]):
        self.layer, self.backends = layer, list(backends)
        self.copying = {COPYING} if not isinstance(layer, QuantizedLinear) else set()
        self.products = {name: backends_of(layer)[name](layer) for name in backends}
        self.seconds: dict[int, list[dict[str, float]]] = {}

    def estimate(self, rows: int) -> float:
        """Return about how long a first round takes: a call of each product to warm up, and one that is timed."""
        most = max(self.seconds)
        return 2 * sum(self.seconds[most][0].values()) * rows / most

    def run_round(self, rows: int, evict: Callable[[], object]) -> None:
        """Time one call of each product, with its weight out of the cache.

        Copies are read once, so only the layer's own weight has to be evicted again. Eviction slows down Python, too,
        so the order changes: each product has a round in which no eviction precedes it, if there are three.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, inputs_of(self.layer), device="cpu", generator=generator).to(kind_of(self.layer)[0])
        rounds = self.seconds.setdefault(rows, [])
        if not rounds:
            for product in self.products.values():
                product(x)  # the first call with a shape prepares the later ones
        names = self.backends
        taken: dict[str, float] = {}
        for name in (names, names[::-1], names[2:] + names[:2])[len(rounds) % 3]:
            if not taken or (name not in self.copying and taken.keys() - self.copying):
                evict()
            start = time.perf_counter()
            self.products[name](x)
            taken[name] = time.perf_counter() - start
        rounds.append(taken)

    def times(self) -> Times:
        """Return the shortest time of each product."""
        measured = [self.seconds[rows] for rows in sorted(self.seconds)]
        return Times({name: [min(taken[name] for taken in rounds) for rounds in measured] for name in self.backends})


def evictor(num_bytes: int) -> Callable[[], object]:
    """Return a function that reads this many bytes, so that other data leaves the cache."""
    return torch.ones(max(1, num_bytes // 4), dtype=torch.float32, device="cpu").sum


def last_level_cache() -> int:
    """Return the bytes of the last-level cache of the first core, or 32 MiB if unknown."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            number = path.read_text().strip()
            sizes.append(int(number[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[number[-1]])
    return max(sizes, default=32 * 2**20)


# --- keeping ----------------------------------------------------------------------------------------------------------


def fingerprint(dtype: torch.dtype, shapes: Sequence[str], backends: Sequence[str]) -> dict:
    """Return everything that the times depend on."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "waiting threads": os.environ.get("OMP_WAIT_POLICY", ""),
        "torch": torch.__version__,
        "kernels": Path(compiled.library()._name).name if any("compiled" in name for name in backends) else None,
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": list(shapes),
        "backends": list(backends),
        "rows": list(ROWS),
        "method": METHOD,
    }


def processor() -> str:
    """Return the processor's name and its instructions, as far as the system tells them."""
    fields = cpuinfo()
    if not fields:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")  # x86, then ARM
    return "; ".join(fields[name] for name in names if name in fields)


def path_of(machine: dict) -> Path:
    """Return the file that keeps the times measured under this fingerprint; its name is a hash of it."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return compiled.cache_folder() / f"linear-{digest}.json"


def load(machine: dict) -> dict[str, Times] | None:
    """Return the times kept under this fingerprint; None if there are none, or if they cannot be read."""
    try:
        kept = json.loads(path_of(machine).read_text())
        return {shape: Times(**fields) for shape, fields in kept["times"].items()}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # the last: no home folder
        return None


def save(machine: dict, times: dict[str, Times]) -> None:
    """Keep times for later processes, if the cache folder can be written."""
    contents = {"machine": machine, "times": {shape: asdict(shape_times) for shape, shape_times in times.items()}}
    try:
        path = path_of(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # another process may be writing the same file
            temporary = Path(folder, path.name)
            temporary.write_text(json.dumps(contents, indent=1))
            temporary.replace(path)
    except (OSError, RuntimeError) as error:  # the latter: there is no home folder
        log.info("The times of linear layers are not kept: %s", error)
