"""Batches by hand, small enough to be drawn, and what a batch and its cache must be like after a verb.

The key of row a's first token begins with 10 in layer 0 and with 110 in layer 1, its value with the negative of that:
wherever a number of the cache ends up, one can see which token it belongs to.
"""

from collections.abc import Callable

import torch

from .. import kv_cache
from ..models import load_model
from .differences import Grids, Wrong, expect_device, expect_dtype, kind

LISTS = ("request_ids", "token_ids", "tokens_remaining")
TENSORS = ("input_ids", "position_ids", "attention_mask")

LAYERS, HEADS, DIMENSION = 2, 2, 3  # all axes of a cache of different length, where they can


def hand_made(*rows: tuple[str, int, int]) -> dict:
    """A prefilled batch of rows (request id, tokens in the cache, tokens remaining).

    The tokens of row "a" are 10, 11, ..., those of "b" are 20, 21, ...; the newest is not in the cache yet.
    """
    device = load_model()[0].device
    width = max(length for _, length, _ in rows)
    ids = [name for name, _, _ in rows]
    first = [10 * (ord(name) - ord("a") + 1) for name in ids]
    lengths = [length for _, length, _ in rows]
    tokens = [[0] * (width - n) + list(range(start, start + n)) for start, n in zip(first, lengths, strict=True)]
    newest = [start + n for start, n in zip(first, lengths, strict=True)]

    cache = kv_cache.new()
    for layer in range(LAYERS):
        keys = torch.tensor(tokens, dtype=torch.float32, device=device)[:, None, :, None]
        keys = keys.repeat(1, HEADS, 1, DIMENSION)
        keys[keys != 0] += 100 * layer
        keys *= 1 + torch.arange(HEADS, device=device)[:, None, None] + 4 * torch.arange(DIMENSION, device=device)
        cache.update(keys, -keys, layer)
    return {
        "request_ids": ids,
        "input_ids": torch.tensor(newest, device=device)[:, None],
        "position_ids": torch.tensor(lengths, device=device)[:, None],
        "attention_mask": torch.tensor([[0] * (width - n) + [1] * (n + 1) for n in lengths], device=device),
        "past_key_values": cache,
        "responses": [f"text {name}" for name in ids],
        "token_ids": [[token - 1, token] for token in newest],
        "tokens_remaining": [left for _, _, left in rows],
        "finish_reasons": [None if left else "length" for _, _, left in rows],
    }


def expect_batch(value, cache: bool = True) -> None:
    """Say in words if a value is no batch: a dict with everything that the next verb will ask for."""
    if not isinstance(value, dict):
        raise Wrong(f"should return a batch, a dict; it returned {kind(value)}.")
    for key in (*LISTS, *TENSORS, *(["past_key_values"] if cache else [])):
        if value.get(key) is None:
            raise Wrong(f"returns a batch without {key!r}, and the next verb will ask for it.")
    for key in LISTS:
        if not isinstance(value[key], list):
            raise Wrong(f"`{key}` should be a list with an entry for each row, and is {kind(value[key])}.")


Reason = Callable[[torch.Tensor, torch.Tensor, Callable[[dict], torch.Tensor], str], str | None]


def layers_of(cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) of each layer, where a cache still is one."""
    if not hasattr(cache, "layers"):
        raise Wrong(f"`past_key_values` should stay a transformers cache, which the model takes; it is {kind(cache)}.")
    return [(layer.keys, layer.values) for layer in cache.layers]


def expect_cache(cache, expected: dict, why: Reason) -> None:
    """Compare keys and values, layer by layer, where the mask shows them.

    Args:
        cache: what came.
        expected: the batch as it should be.
        why: recognises misconceptions: from (tensor that came, tensor expected, the same tensor of any other batch,
            "keys" or "values") to what is wrong in words, or None.
    """
    layers, wanted = layers_of(cache), layers_of(expected["past_key_values"])
    if len(layers) != len(wanted):
        raise Wrong(
            f"the cache has {len(layers)} layers, the model has {len(wanted)}: every layer keeps keys and values of "
            f"its own, and all go the same way."
        )
    visible = expected["attention_mask"][:, :-1].cpu() == 1
    for layer, (pair, right_pair) in enumerate(zip(layers, wanted, strict=True)):
        for part, name in enumerate(("keys", "values")):
            got, right = pair[part], right_pair[part]
            if got is None:
                raise Wrong(f"layer {layer} of the cache has no {name}.")
            expect_device(got, f"the cache ({name})", [right.device])

            def same_tensor(batch: dict, layer=layer, part=part) -> torch.Tensor:
                return layers_of(batch["past_key_values"])[layer][part].cpu()

            got, right = got.cpu(), right.cpu()
            message = None
            if got.shape != right.shape or not torch.equal(hide(got, visible), hide(right, visible)):
                message = why(got, right, same_tensor, name) or _plain(got, right, visible, name)
            if message is None:
                expect_dtype(got, f"the cache ({name})", right.dtype)
                if not torch.isfinite(got).all():
                    raise Wrong(
                        f"the new columns of the {name} hold numbers that are not finite. The mask hides a column by "
                        f"giving it weight 0, and 0 times infinity is no number: zeros are safe."
                    )
                continue
            if layer:
                message = f"layer 0 is right, layer {layer} is not: {message}. Every layer has a cache of its own"
            elif part:
                message = f"the keys are right, the values are not: {message}. A token's key and value go together"
            grids = Grids(_cells(right), _cells(got), f"{name} of layer {layer} (first head, first number)", (None, 0))
            raise Wrong(f"{message}.", grids)


def hide(tensor: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Zeros where the mask hides a column; what stands there makes no difference."""
    return torch.where(visible[:, None, :, None], tensor.double(), 0.0)


def _plain(got: torch.Tensor, right: torch.Tensor, visible: torch.Tensor, name: str) -> str:
    if got.shape != right.shape:
        return (
            f"the {name} have shape {list(got.shape)}, and should have {list(right.shape)} "
            f"(rows, heads, columns, head dimension)"
        )
    row, _, column, _ = (hide(got, visible) != hide(right, visible)).nonzero()[0].tolist()
    return f"row {row}, column {column} of the {name} does not belong to the token that stands there"


def _cells(tensor: torch.Tensor) -> list[list]:
    """A row of numbers for each row of a layer: enough to see which token stands where."""
    if tensor.dim() != 4 or 0 in tensor.shape:
        return []
    return [[round(cell) if abs(cell) < 1e6 else cell for cell in row] for row in tensor[:, 0, :, 0].tolist()]
