"""Lesson 6, the model with a student's `pack` and `attend_row`, to show that packing changes no token."""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq

import torch
from transformers import AttentionInterface

from ..models import clone_sharing_weights, load_model


class Reader:
    """Runs a model with a student's `pack` and `attend_row`, and keeps the keys and values of each request.

    Args:
        pack, attend_row: the student's functions.

    Attributes:
        columns: the number of columns of each row so far.
    """

    def __init__(self, pack: Callable, attend_row: Callable):
        self.pack, self.attend_row = pack, attend_row
        self.model = clone_sharing_weights(load_model()[0])  # which is not changed
        self.columns: list[int] = []
        self._kept: dict[tuple[Hashable, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._parts: list[tuple[Hashable, int, int]] = []  # of the current row
        AttentionInterface.register("exercise", lambda *args, **kwargs: None)
        self.model.set_attn_implementation("exercise")
        self.model.config.pad_token_id = None  # a row has no pads, so no warning about a missing mask is needed

    def read(self, chunks: Mapping[Hashable, Seq[int]]) -> dict[Hashable, torch.Tensor]:
        """Run a forward pass over {request: its next token ids}; return {request: logits after the last of them}."""
        cached = [self._kept[request, 0][0].shape[1] if (request, 0) in self._kept else 0 for request in chunks]
        ids, positions, columns = self.pack([list(chunk) for chunk in chunks.values()], cached)
        self._parts = [(request, start, end) for request, (start, end) in zip(chunks, columns, strict=True)]
        self.columns.append(len(ids))
        AttentionInterface.register("exercise", self._attend)  # replaces the function of another reader
        device = self.model.device
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
            ).logits[0]
        return {request: logits[end - 1] for request, _, end in self._parts}

    def _attend(self, module, query, key, value, attention_mask, scaling=None, **_):
        keys, values = [], []
        for request, start, end in self._parts:
            pair = tuple(one[0, :, start:end].cpu() for one in (key, value))  # the exercises use only the CPU
            if old := self._kept.get((request, module.layer_idx)):
                pair = tuple(torch.cat(both, dim=1) for both in zip(old, pair, strict=True))
            self._kept[request, module.layer_idx] = pair
            groups = query.shape[1] // key.shape[1]  # several heads may share a key
            keys.append(pair[0].repeat_interleave(groups, dim=0))
            values.append(pair[1].repeat_interleave(groups, dim=0))
        if scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)  # the exercise divides by the square root
        columns = [(start, end) for _, start, end in self._parts]
        output = self.attend_row(query[0].cpu(), keys, values, columns)
        return output.transpose(0, 1)[None].to(query.device), None
