"""The cost model: the seconds of an iteration from four counts of its plan.

    iterations  always 1: reading the weights, and all other work that does not depend on the plan
    tokens      the tokens that pass through the layers
    keys        the keys that attention reads, one set per sequence: a decode's whole context
    pairs       the pairs of a token and an earlier one in prefills: their attention grows with the square of the prompt

The seconds are the sum of these counts, each times its coefficient. `estimate` computes the coefficients from data
sheets, and a small JSON file keeps them.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..engine import Plan

FEATURES = ("iterations", "tokens", "keys", "pairs")
MACHINES = {file.stem: file for file in sorted(Path(__file__).with_name("machines").glob("*.json"))}
MOST_SECONDS = 1e9  # per unit: far above any machine's, and low enough for all times to be finite


def features(plan: Plan) -> tuple[int, int, int, int]:
    """Return the counts of a plan, in the order of FEATURES; zeros if it computes nothing."""
    tokens = keys = pairs = 0
    for chunk in plan.chunks:
        number = chunk.tokens
        tokens += number
        keys += chunk.start + number
        if not chunk.is_decode:
            pairs += number * chunk.start + number * (number + 1) // 2
    return int(bool(plan.chunks)), tokens, keys, pairs


@dataclass(frozen=True)
class CostModel:
    """The seconds that each unit of each count takes; a callable for `Simulator(seconds=...)`.

    Attributes:
        iterations, tokens, keys, pairs: seconds per unit, from 0 to MOST_SECONDS.
        about: what the model describes: the machine, the model, the source of the numbers.

    Raises:
        ValueError: a coefficient is not a number in this range, all coefficients are 0, or `about` is not a dict.
    """

    iterations: float = 0.0
    tokens: float = 0.0
    keys: float = 0.0
    pairs: float = 0.0
    about: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        for name in FEATURES:
            coefficient = getattr(self, name)
            if not isinstance(coefficient, int | float) or not 0 <= coefficient <= MOST_SECONDS:
                raise ValueError(f"{name!r} must be a number from 0 to {MOST_SECONDS:g}, not {coefficient!r}.")
        if not any(getattr(self, name) for name in FEATURES):
            raise ValueError("All coefficients are 0, so no iteration would take any time: set at least one.")
        if not isinstance(self.about, dict):
            raise ValueError(f"'about' must be an object, not {self.about!r}.")

    def __call__(self, plan: Plan) -> float:
        """Return the seconds of an iteration, given its plan."""
        return self.of(*features(plan))

    def of(self, iterations: int, tokens: int, keys: int, pairs: int) -> float:
        """Return the seconds of these counts."""
        return self.iterations * iterations + self.tokens * tokens + self.keys * keys + self.pairs * pairs

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
        known = [one.name for one in fields(cls)]
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**saved)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} contains no cost model ({error}): it must be a JSON object with some of the keys "
                f"{', '.join(known)}."
            ) from error


def estimate(
    parameters: float,
    bytes_per_parameter: float,
    kv_bytes_per_token: float,
    attention_width: float,
    bytes_per_second: float,
    operations_per_second: float,
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
    """
    return CostModel(
        iterations=parameters * bytes_per_parameter / bytes_per_second,
        tokens=2 * parameters / operations_per_second,
        keys=kv_bytes_per_token / bytes_per_second,
        pairs=4 * attention_width / operations_per_second,
    )
