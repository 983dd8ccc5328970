"""What is wrong, in words and side by side: the vocabulary in which all checks speak.

A check first recognises misconceptions, by computing what each of them would give. Only what nobody foresaw is
reported as a plain difference ("row 1, column 3: expected 0, got 1").
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Number

import torch


@dataclass(frozen=True)
class Grids:
    """Expected beside actual, rows of cells; cells that hold one of `pads` are padding."""

    expected: Sequence[Sequence]
    actual: Sequence[Sequence]
    title: str
    pads: tuple = (None,)

    def picture(self):
        """Both grids as a `plots.Picture`."""
        from .. import plots  # matplotlib takes a second to import, and most checks pass

        return plots.compare(self.expected, self.actual, self.title, self.pads)

    def __str__(self) -> str:
        """Both grids as text; a star marks what differs."""
        columns = max((len(row) for row in [*self.expected, *self.actual]), default=0)
        cells = [[], []]
        for y in range(max(len(self.expected), len(self.actual))):
            # Rows are lined up at their right edges, as a batch is.
            one, other = (
                [None] * (columns - len(row)) + ["." if cell in self.pads else str(cell) for cell in row]
                for row in (_row(self.expected, y), _row(self.actual, y))
            )
            cells[0].append(["" if cell is None else f"{cell} " for cell in one])
            marked = zip(one, other, strict=True)
            cells[1].append(["" if b is None else f"{b} " if a == b else f"{b}*" for a, b in marked])
        wide = max((len(cell) for side in cells for row in side for cell in row), default=1)
        left, right = ([" ".join(cell.rjust(wide) for cell in row) for row in side] for side in cells)
        width = max([len(line) for line in left] + [8])
        lines = [f"  {self.title}  (. is padding, * differs)", f"  {'expected'.ljust(width)}    yours"]
        return "\n".join(lines + [f"  {a.ljust(width)}    {b}" for a, b in zip(left, right, strict=True)])


def in_notebook() -> bool:
    """Whether pictures can be shown: in a Jupyter kernel, not in a terminal and not in a grader's plain Python."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


class Wrong(Exception):
    """An attempt is not right: the message for the student, and what to draw beside it."""

    def __init__(self, message: str, grids: Grids | None = None):
        super().__init__(message)
        self.message, self.grids = message, grids


def _row(grid: Sequence[Sequence], y: int) -> list:
    return list(grid[y]) if y < len(grid) else []


def first_line(text: str, limit: int = 160) -> str:
    """The first line of an exception's text, which is all that a student wants to read of it."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 3] + "..."


def kind(value) -> str:
    """What a value is, in words: "a list", "a tensor of int64 with shape [2, 3]"."""
    if value is None:
        return "None (is a `return` missing?)"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {name_of(value.dtype)} with shape {list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def name_of(dtype: torch.dtype) -> str:
    """int64 rather than torch.int64."""
    return str(dtype).removeprefix("torch.")


def expect_tensor(
    value,
    what: str,
    shape: Sequence[int] | None = None,
    meaning: str = "",
    dtype: torch.dtype = torch.int64,
    devices: Iterable[torch.device | str] | None = None,
) -> None:
    """Say in words if a value is no tensor, or one of the wrong shape, dtype or device, in this order.

    Args:
        what: how the message calls the value ("`input_ids`").
        meaning: what the shape stands for ("a row for each request").
        devices: those that are right; where the model is, above all.
    """
    if not isinstance(value, torch.Tensor):
        raise Wrong(f"{what} should be a tensor, and is {kind(value)}.")
    if shape is not None and list(value.shape) != list(shape):
        meaning = f": {meaning}" if meaning else ""
        raise Wrong(f"{what} has shape {list(value.shape)}, and should have {list(shape)}{meaning}.")
    expect_dtype(value, what, dtype)
    if devices is not None:
        expect_device(value, what, devices)


def expect_device(value, what: str, devices: Iterable[torch.device | str]) -> None:
    """Say in words if a tensor is where the model's tensors are not. To be asked before its numbers are read."""
    allowed = sorted({torch.device(device).type for device in devices})
    if isinstance(value, torch.Tensor) and value.device.type not in allowed:
        raise Wrong(
            f"{what} is on the device {value.device.type!r}, and should be on {' or '.join(map(repr, allowed))}: a "
            f"forward pass cannot mix devices."
        )


def expect_dtype(value: torch.Tensor, what: str, dtype: torch.dtype) -> None:
    """Say in words if a tensor holds numbers of the wrong kind."""
    if value.dtype == dtype:
        return
    why = {
        torch.int64: "ids, positions and masks are whole numbers, and tensors of different types do not merge",
        torch.float32: "the cache keeps the numbers that the model computed, in the model's own precision",
    }.get(dtype, "tensors of different types do not merge")
    raise Wrong(f"{what} holds {name_of(value.dtype)}, and should hold {name_of(dtype)}: {why}.")


def expect_ids(value, what: str) -> None:
    """Say in words if a value is not a plain list of token ids."""
    if not isinstance(value, list):
        raise Wrong(f"{what} should be a list of token ids, and is {kind(value)}.")
    for place, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise Wrong(f"{what} should hold plain numbers, and at place {place} stands {kind(token)}.")


def expect_pair(value, what: str) -> None:
    """Say in words if a value is not the two things that were asked for."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        of = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise Wrong(f"should return two things, {what}; it returned {kind(value)}{of}.")


def expect_number(value) -> None:
    """Say in words if a value is no number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return
    if not isinstance(value, Number) or isinstance(value, bool):
        raise Wrong(f"should return a number; it returned {kind(value)}.")


def is_count(value) -> bool:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def same(one, other) -> bool:
    """Equal tensors, of whatever dtype and wherever, or equal lists."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.all(one.cpu() == other.cpu()))
    return type(one) is type(other) and one == other


def recognise(actual, expected, misconceptions: Iterable[tuple[object, str]], grids: Grids | None = None) -> None:
    """Raise the message of the first misconception that gives just what the attempt gave, unless that is right."""
    if same(actual, expected):
        return
    for result, message in misconceptions:
        if same(actual, result):
            raise Wrong(message, grids)


def expect_equal(actual: torch.Tensor, expected: torch.Tensor, what: str, title: str, pads: tuple = (None,)) -> None:
    """The plain difference of two tensors of equal shape, [rows] or [rows, columns]; the first cell is named."""
    different = (actual.cpu() != expected.cpu()).nonzero()
    if not len(different):
        return
    place = different[0].tolist()
    where = ", ".join(f"{axis} {index}" for axis, index in zip(("row", "column"), place, strict=False))
    grids = Grids(expected.tolist(), actual.tolist(), title, pads) if expected.dim() == 2 else None
    raise Wrong(f"{what}, {where}: expected {expected[tuple(place)].item()}, got {actual[tuple(place)].item()}.", grids)


def expect_numbers(
    got: Sequence[float],
    expected: Sequence[float],
    misconceptions: Iterable[tuple[Sequence, str]],
    given: Sequence[str],
) -> None:
    """Recognise a formula by what it gives in all cases; else name the first case that is off."""
    if all(map(close, got, expected)):
        return
    for results, message in misconceptions:
        if all(map(close, got, results)):
            raise Wrong(message)
    case = next(case for case in range(len(got)) if not close(got[case], expected[case]))
    raise Wrong(f"{given[case]}: expected {expected[case]:.6g}, got {got[case]:.6g}.")


def close(one: float, other: float) -> bool:
    """Equal but for rounding."""
    return one == other or abs(one - other) <= 1e-9 * max(abs(one), abs(other)) < float("inf")
