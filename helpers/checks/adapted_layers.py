"""Count the calls of a linear layer and of its adapters in a student's function."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from torch import Tensor


def with_calls(
    function: Callable,
    x: Tensor,
    weight: Tensor,
    matrices: Mapping[str, tuple[Tensor, Tensor]],
    chunks: Seq[tuple[str | None, int]],
) -> dict:
    """Call a function of inputs, a base layer, adapters, and the chunks of the rows.

    The base layer and the adapters are functions of rows of inputs. Each call reads all of their matrices.

    Args:
        x: float [rows, inputs].
        weight: float [outputs, inputs], of the base layer.
        matrices: A [rank, inputs] and B [outputs, rank], scaling included, of each adapter.
        chunks: the name of its adapter, or None, and the tokens of each.

    Returns:
        the function's outputs, and (what it called, with how many rows), sorted.
    """
    calls = []

    def counted(name: str, *factors: Tensor) -> Callable[[Tensor], Tensor]:
        def layer(rows: Tensor) -> Tensor:
            calls.append((name, rows.numel() // x.shape[1]))
            for factor in factors:
                rows = rows @ factor.T
            return rows

        return layer

    adapters = {name: counted(f"adapter {name}", *factors) for name, factors in matrices.items()}
    outputs = function(x, counted("base", weight), adapters, chunks)
    return {"outputs": outputs, "calls": sorted(calls)}
