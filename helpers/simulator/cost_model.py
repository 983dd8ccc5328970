"""The cost model: the seconds of an iteration from six counts of its plan.

    iterations  always 1: reading the weights, and all other work that does not depend on the plan
    prefills    1 if prompts are computed, otherwise 0: their attention takes other kernels than that of decodes
    tokens      the tokens that pass through the layers
    sequences   the rows: sampling, and the engine's work per sequence
    keys        the keys that attention reads, one set per sequence: a decode's whole context
    pairs       the pairs of a token and an earlier one in prefills: their attention grows with the square of the prompt

The seconds are the sum of these counts, each times its coefficient. Adapters add a seventh: each one of an iteration is
read once, however many rows have it. The first few tokens of an iteration can be free: their arithmetic takes less time
than reading the weights (the roofline model; Williams et al., CACM 2009). The coefficients of a machine are measured
(`fit.py`) and kept in a small JSON file. For a machine that cannot be measured, `estimate` computes them from data
sheets. `split` turns the costs of one device into those of several that share the model.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..engine import Plan, Sequence

FEATURES = ("iterations", "prefills", "tokens", "sequences", "keys", "pairs")
MACHINES = {file.stem: file for file in sorted(Path(__file__).with_name("machines").glob("*.json"))}
MOST_SECONDS = 1e9  # per unit: far above any machine's, and low enough for all times to be finite


def features(plan: Plan) -> tuple[float, ...]:
    """Return the counts of a plan, in the order of FEATURES; zeros if it computes nothing."""
    tokens = keys = pairs = 0
    for chunk in plan.chunks:
        number = chunk.tokens
        tokens += number
        keys += chunk.start + number
        if not chunk.is_decode:
            pairs += number * chunk.start + number * (number + 1) // 2
    return bool(plan.chunks), pairs > 0, tokens, len(plan.chunks), keys, pairs


def count_adapters(sequences: Iterable[Sequence]) -> int:
    """Return how many different adapters sequences have."""
    return len({sequence.request.notes.get("adapters") for sequence in sequences} - {None})


@dataclass(frozen=True)
class CostModel:
    """The seconds that each unit of each count takes; a callable for `Simulator(seconds=...)`.

    Attributes:
        iterations, prefills, tokens, sequences, keys, pairs: seconds per unit, from 0 to MOST_SECONDS.
        free_tokens: how many tokens of an iteration take no time of their own.
        adapters: seconds per adapter of an iteration. A fit leaves it at 0: its requests have no adapters.
        sums: how many sums over its devices a pass of the split model takes; 0 if unknown.
        sum_bytes: the bytes of each of these sums, per token.
        about: what the model describes: the machine, the model, the errors of the fit, ...

    Raises:
        ValueError: a coefficient or `sum_bytes` is not a number in this range, all coefficients are 0, `free_tokens` or
            `sums` is not an integer of at least 0, or `about` is not a dict.
    """

    iterations: float = 0.0
    prefills: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    keys: float = 0.0
    pairs: float = 0.0
    free_tokens: int = 0
    adapters: float = 0.0
    sums: int = 0
    sum_bytes: float = 0.0
    about: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        for name in (*FEATURES, "adapters", "sum_bytes"):
            coefficient = getattr(self, name)
            if not isinstance(coefficient, int | float) or not 0 <= coefficient <= MOST_SECONDS:
                raise ValueError(f"{name!r} must be a number from 0 to {MOST_SECONDS:g}, not {coefficient!r}.")
        if not any(self.coefficients):
            raise ValueError("All coefficients are 0, so no iteration would take any time: set at least one.")
        for name in ("free_tokens", "sums"):
            count = getattr(self, name)
            if not isinstance(count, int) or not 0 <= count <= MOST_SECONDS:
                raise ValueError(f"{name!r} must be an integer from 0 to {MOST_SECONDS:g}, not {count!r}.")
        if not isinstance(self.about, dict):
            raise ValueError(f"'about' must be an object, not {self.about!r}.")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The seconds per unit, in the order of FEATURES."""
        return self.iterations, self.prefills, self.tokens, self.sequences, self.keys, self.pairs

    def __call__(self, plan: Plan) -> float:
        """Return the seconds of an iteration, given its plan."""
        adapters = count_adapters(chunk.sequence for chunk in plan.chunks) if self.adapters else 0
        return self.seconds_for(*features(plan), adapters)

    def seconds_for(
        self, iterations: int, prefills: int, tokens: int, sequences: int, keys: int, pairs: int, adapters: int = 0
    ) -> float:
        """Return the seconds of these counts."""
        return (
            self.iterations * iterations
            + self.prefills * prefills
            + self.tokens * max(0, tokens - self.free_tokens)
            + self.sequences * sequences
            + self.keys * keys
            + self.pairs * pairs
            + self.adapters * adapters
        )

    def split(self, size: int, seconds_per_sum: float, bytes_per_second: float) -> "CostModel":
        """Return the costs of a model that is split over devices (tensor parallelism; Shoeybi et al., 2019).

        Each device reads and computes an equal share; sampling and the start of a prefill are not shared out. Each sum
        takes a fixed time, and each of its bytes crosses the link 2 (size - 1) / size times, as in a ring. Free tokens
        are sent like all others; an iteration with fewer tokens is charged for all of them.

        Args:
            size: the number of devices.
            seconds_per_sum: the time of a sum of next to nothing.
            bytes_per_second: how fast a device sends.

        Raises:
            ValueError: `size` is below 1, the link is not described by finite numbers above 0, or the cost model does
                not know its sums.
        """
        if size < 1 or not 0 <= seconds_per_sum < math.inf or not 0 < bytes_per_second < math.inf:
            raise ValueError(
                f"A model is split over at least 1 device, with a finite time per sum and bytes per second above 0, "
                f"not {size}, {seconds_per_sum} and {bytes_per_second}."
            )
        if size == 1:
            return self
        if not self.sums:
            raise ValueError(
                "The cost model does not say how many sums a pass of the split model takes: set 'sums' (usually two "
                "per block and one for the embedding) and 'sum_bytes' (the hidden size times the bytes of a number)."
            )
        sending = self.sums * self.sum_bytes * 2 * (size - 1) / size / bytes_per_second  # per token
        iterations = self.iterations / size + self.sums * seconds_per_sum + self.free_tokens * sending
        shared = {name: getattr(self, name) / size for name in ("keys", "pairs", "adapters")}
        return replace(self, iterations=iterations, tokens=self.tokens / size + sending, **shared)

    def save(self, path: str | Path) -> None:
        """Write the cost model as a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """Read a cost model from a JSON file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not contain a cost model.
        """
        known = [parameter.name for parameter in fields(cls)]
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**saved)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} contains no cost model ({error}). It is a JSON object with some of the keys "
                f"{', '.join(known)}; `python -m helpers.simulator --fit FILE` writes one."
            ) from error


def estimate(
    parameters: float,
    bytes_per_parameter: float,
    kv_bytes_per_token: float,
    attention_width: float,
    bytes_per_second: float,
    operations_per_second: float,
    adapter_bytes: float = 0.0,
    sums: int = 0,
    sum_bytes: float = 0.0,
) -> CostModel:
    """Return a cost model from data sheets, without any overhead: a real iteration takes longer.

    Each iteration reads all weights once, and the keys and values of each sequence. Each token takes two operations per
    parameter, and each pair in a prefill's attention four per unit of width. The times of reading and of computing are
    added, as if they never overlapped.

    Args:
        parameters: of the model.
        bytes_per_parameter: 2 for bf16.
        kv_bytes_per_token: keys and values of a token in all layers.
        attention_width: the number of layers times the width of all query heads together.
        bytes_per_second: how fast the device reads memory.
        operations_per_second: how fast it multiplies and adds.
        adapter_bytes: the matrices of an adapter in all layers.
        sums, sum_bytes: as for `CostModel`.
    """
    return CostModel(
        iterations=parameters * bytes_per_parameter / bytes_per_second,
        tokens=2 * parameters / operations_per_second,
        keys=kv_bytes_per_token / bytes_per_second,
        pairs=4 * attention_width / operations_per_second,
        adapters=adapter_bytes / bytes_per_second,
        sums=sums,
        sum_bytes=sum_bytes,
    )
