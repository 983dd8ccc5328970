"""Compare what a function returned with what the reference returns, and describe the first difference.

Numbers may differ by float32's rounding, and numpy's numbers count as Python's. Numbers that differ are never printed
alike.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

import torch
from transformers import Cache

from ..engine import Sequence as EngineSequence

NO_RETURN = " (is a `return` missing?)"
RELATIVE, ABSOLUTE = 1e-5, 1e-7  # float32 has 24 bits of precision, and a few rounding errors add up


@dataclass(frozen=True)
class Grids:
    """The expected and the actual rows of cells; cells that hold one of `pads` are padding."""

    expected: Sequence[Sequence]
    actual: Sequence[Sequence]
    title: str
    pads: tuple = (None,)

    def picture(self):
        from .. import plots  # matplotlib takes a second to import, and most checks pass

        return plots.compare(self.expected, self.actual, self.title, self.pads)


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
        path: the keys that lead to it, such as ("attention_mask",).
        message: a sentence without its full stop.
        grids: what to draw beside it.
        what: the part that differs, in words.
        is_of_kind: whether the whole result is of the wrong kind: not a list, not a tensor, a tensor of another shape.
    """

    path: tuple
    message: str
    grids: Grids | None = None
    what: str = ""
    is_of_kind: bool = False


def difference(got, right, names: tuple[str, ...] = (), *, name: str = "", strict: bool = True) -> Difference | None:
    """Return the first difference between two values; None if they are equal.

    Args:
        got: what a student's function returned.
        right: what the reference returned.
        names: of the parts of a tuple.
        name: of the value, for messages; without one it is "the result".
        strict: whether the types of numbers, tensors and sequences matter, too.
    """
    found = _Comparison(names, strict).compare(got, right, name or "the result", ())
    if found and found.path and isinstance(found.path[0], int):  # a part is None: there is a `return`
        found = replace(found, message=found.message.replace(NO_RETURN, ""))
    return found and replace(found, is_of_kind=not found.path and _is_of_another_kind(got, right))


class _Comparison:
    def __init__(self, names: tuple[str, ...], strict: bool):
        self.names, self.strict = names, strict

    def compare(self, got, right, what: str, path: tuple) -> Difference | None:
        """Dispatch on the type of the right value."""
        if right is None or isinstance(right, str | bytes | bool | type):
            same = type(got) is type(right) and got == right
            if isinstance(right, bool):  # 1 and numpy's True are True
                same = same or ((isinstance(got, Integral) or type(got).__name__ in ("bool_", "bool")) and got == right)
            return None if same else self._differs(got, right, what, path)
        for right_type, compare in (
            (torch.Tensor, self._tensors), (Cache, self._caches), (Real, self._numbers),
            (EngineSequence, self._sequences), (Mapping, self._mappings), (list | tuple | deque, self._lists),
        ):  # fmt: skip
            if isinstance(right, right_type):
                return compare(got, right, what, path)
        if isinstance(right, set | frozenset):
            return None if got == right else self._differs(got, right, what, path)
        if dataclasses.is_dataclass(right):
            if type(got) is not type(right):
                return self._differs(got, right, what, path)
            fields = [field.name for field in dataclasses.fields(right)]
            pairs = (self.compare(getattr(got, f), getattr(right, f), f"`{f}` of {what}", (*path, f)) for f in fields)
            return next(filter(None, pairs), None)
        return None  # a model or a generator of random numbers: not compared

    def _differs(self, got, right, what: str, path: tuple) -> Difference:
        plain = type(got) is type(right) or isinstance(got, str | int | float | list | tuple | None)
        shown = _short(got) if plain and not (got is None and what == "the result") else kind(got)
        return Difference(path, f"{what} should be {_short(right)}, but is {shown}", what=what)

    def _numbers(self, got, right, what: str, path: tuple) -> Difference | None:
        if isinstance(got, torch.Tensor) and got.numel() == 1 and got.dtype != torch.bool and not path:
            got = got.item()  # inside a list, a tensor is not a number: JSON and the next verb refuse it
        if not is_number(got):
            return _should_be("an int" if isinstance(right, Integral) else "a number", got, what, path)
        if not math.isclose(got, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE * 1e-5):
            expected, actual = _apart(right, got)
            return Difference(path, f"{what} should be {expected}, but is {actual}", what=what)
        if self.strict and isinstance(right, Integral) and not isinstance(got, Integral):
            return Difference(path, f"{what} should be an int, but is the float {got!r}", what=what)
        return None

    def _tensors(self, got, right: torch.Tensor, what: str, path: tuple) -> Difference | None:
        if not isinstance(got, torch.Tensor):
            return _should_be("a tensor", got, what, path)
        if got.shape != right.shape:
            shapes = f"{what} has shape {list(got.shape)}, but should have {list(right.shape)}"
            return Difference(path, shapes, _grids(got, right, what), what)
        if got.device.type != right.device.type:
            message = f"{what} is on the device {got.device.type!r}, but should be on {right.device.type!r}"
            return Difference(path, f"{message}: a forward pass cannot mix devices", what=what)
        got_values, right_values = got.detach().cpu(), right.detach().cpu()
        if right.dtype.is_floating_point or got.dtype.is_floating_point:
            got_values, right_values = got_values.double(), right_values.double()
            largest = right_values.nan_to_num(posinf=0, neginf=0).abs().max().item() if right_values.numel() else 0.0
            # Small numbers may be differences of large ones, and have their rounding errors.
            same = torch.isclose(got_values, right_values, rtol=RELATIVE, atol=max(ABSOLUTE, RELATIVE * largest))
        else:
            same = got_values == right_values
        if not same.all():
            indices = (~same).nonzero()[0].tolist()
            axes = {1: ["row"], 2: ["row", "column"], 4: ["row", "head", "column", "number"]}
            axes = axes.get(right.dim(), [f"axis {axis}, place" for axis in range(right.dim())])
            where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, indices, strict=True))
            expected, actual = _apart(right[tuple(indices)].item(), got[tuple(indices)].item())
            message = f"{what}{where and f', {where}'}: expected {expected}, got {actual}"
            return Difference(path, message, _grids(got, right, what), what)
        if self.strict and got.dtype != right.dtype:
            kinds = f"{what} holds {name_of(got.dtype)}, but should hold {name_of(right.dtype)}"
            why = "ids, positions and masks are integers" if right.dtype == torch.int64 else "dtypes must agree"
            return Difference(path, f"{kinds}: {why}, and tensors of different dtypes cannot be merged", what=what)
        return None

    def _caches(self, got, right: Cache, what: str, path: tuple) -> Difference | None:
        if not hasattr(got, "layers"):
            return _should_be("a transformers cache, as the model expects", got, what, path)
        if len(got.layers) != len(right.layers):
            message = f"{what} has {len(got.layers)} layers, but should have {len(right.layers)}"
            return Difference(path, message, what=what)
        pairs = (
            self.compare(
                getattr(got_layer, part), getattr(right_layer, part), f"{part} of layer {number}", (*path, number, part)
            )
            for number, (got_layer, right_layer) in enumerate(zip(got.layers, right.layers, strict=True))
            for part in ("keys", "values")
        )
        return next(filter(None, pairs), None)

    def _lists(self, got, right, what: str, path: tuple) -> Difference | None:
        pair = isinstance(right, tuple) and len(right) > 1
        if pair and not path and isinstance(got, list | tuple) and len(got) != len(right):
            parts = f", {' and '.join(self.names)}" if self.names else ""
            return Difference(path, f"{what} should be {len(right)} values{parts}, but is {_short(got)}", what=what)
        is_tuple = type(got) is tuple and isinstance(right, list)
        if not isinstance(got, list | tuple | deque) or (self.strict and is_tuple):
            parts = f": {' and '.join(self.names)}" if pair and not path and self.names else ""
            wanted = f"{len(right)} values{parts}" if pair else "a list"
            return _should_be(wanted, got, what, path)
        if len(got) == len(right):
            for index, (got_item, right_item) in enumerate(zip(got, right, strict=True)):
                named = self.names[index] if isinstance(right, tuple) and not path and self.names else ""
                found = self.compare(got_item, right_item, named or f"{what}, place {index}", (*path, index))
                if found and not named and _is_plain(got) and _is_plain(right) and list(got) != list(right):
                    return self._differs(got, right, what, path)
                if found:
                    return found
            return None
        if _is_plain(got) and _is_plain(right) and max(len(got), len(right)) <= 24:
            return self._differs(got, right, what, path)
        return Difference(path, f"{what} has {len(got)} entries, but should have {len(right)}", what=what)

    def _mappings(self, got, right: Mapping, what: str, path: tuple) -> Difference | None:
        if not isinstance(got, Mapping):
            return _should_be("a dict", got, what, path)
        if missing := [key for key in right if key not in got]:
            return Difference((*path, missing[0]), f"{what} has no {missing[0]!r}", what=what)
        if extra := [key for key in got if key not in right]:
            return Difference((*path, extra[0]), f"{what} has {extra[0]!r}, which should not be there", what=what)
        named = {key: f"{what[:-1]}[{key!r}]`" if what.startswith("`") else f"`{key}`" for key in right}
        pairs = (self.compare(got[key], right[key], named[key], (*path, key)) for key in right)
        return next(filter(None, pairs), None)

    def _sequences(self, got, right: EngineSequence, what: str, path: tuple) -> Difference | None:
        if not isinstance(got, EngineSequence):
            return _should_be("a sequence", got, what, path)
        if got.request_id != right.request_id:
            message = f"{what} should be the sequence {right.request_id}, but is {got.request_id}"
            return Difference(path, message, what=what)
        # Copies do not share their request's bookkeeping.
        got_fields, right_fields = (
            vars(sequence) | {"request": (sequence.max_tokens, sequence.priority)} for sequence in (got, right)
        )
        changed = f"sequence {got.request_id} was changed"
        return None if got_fields == right_fields else Difference(path, changed, what=f"a sequence in {what}")


def _should_be(wanted: str, got, what: str, path: tuple) -> Difference:
    return Difference(path, f"{what} should be {wanted}, but is {kind(got)}", what=what)


def _is_of_another_kind(got, right) -> bool:
    if isinstance(right, torch.Tensor):
        return not isinstance(got, torch.Tensor) or got.shape != right.shape
    if isinstance(right, tuple):
        return not isinstance(got, list | tuple) or len(got) != len(right)
    groups = Real, str, Mapping, list | tuple | deque, EngineSequence
    return not any(isinstance(got, group) and isinstance(right, group) for group in groups)


def is_number(value) -> bool:
    """Return whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _apart(first, second) -> tuple[str, str]:
    """Return two different numbers as texts that differ."""
    if isinstance(first, Integral) and isinstance(second, Integral):
        return str(first), str(second)
    for digits in (4, 6, 9, 17):
        texts = f"{float(first):.{digits}g}", f"{float(second):.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(first), repr(second)


def _is_plain(value) -> bool:
    """Return whether all values can be printed on one line; a dict counts if its own values can."""
    values = [part for item in value for part in (item.values() if isinstance(item, dict) else [item])]
    plain = str | int | float | None
    return len(repr(value)) <= 160 and all(
        _is_plain(part) if isinstance(part, list | tuple) else isinstance(part, plain) for part in values
    )


def _grids(got: torch.Tensor, right: torch.Tensor, what: str) -> Grids | None:
    """Return both as grids if they have rows and columns and are small enough to be drawn."""
    title = what.strip("`")
    if got.dim() == right.dim() == 4 and 0 not in (*got.shape, *right.shape):
        got, right = got[:, 0, :, 0], right[:, 0, :, 0]
        title += " (first head, first number)"
    if {got.dim(), right.dim()} != {2} or max(got.numel(), right.numel()) > 400 or got.device.type == "meta":
        return None
    got, right = (grid.double().round(decimals=3) if grid.is_floating_point() else grid.long() for grid in (got, right))
    return Grids(right.tolist(), got.tolist(), title, (None, 0) if "mask" in title else (None,))


def first_line(text: str) -> str:
    """Return the first line of an exception's text, or as much of it as a message has room for."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 160 else f"{line[:157]}..."


def _short(value) -> str:
    return first_line(repr(value))


def kind(value) -> str:
    """Return what a value is, in words: "a list", "a tensor of int64 with shape [2, 3]"."""
    if value is None:
        return f"None{NO_RETURN}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {name_of(value.dtype)} with shape {list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's short name: int64 rather than torch.int64."""
    return str(dtype).removeprefix("torch.")


def show_in_notebook(draw: Callable) -> None:
    """Show what a function makes of the module `plots`; do nothing where pictures cannot be shown: in a terminal."""
    try:
        from IPython import display, get_ipython
    except ImportError:
        return
    if hasattr(get_ipython(), "kernel"):
        from .. import plots

        display.display(draw(plots))
