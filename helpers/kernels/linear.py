"""A linear layer for few rows, on a copy of its weight in the order in which `linear.cpp` reads it."""

import functools
from ctypes import c_int, c_long, c_void_p

import torch
from torch.nn.functional import pad

from .compiled import DTYPES, library

INPUTS_IN_A_WORD = {torch.float32: 1, torch.bfloat16: 2}  # a word: 32 bits


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [out, in] (with any strides) in the order in which `linear` reads it.

    Returns:
        float32 [panels, in, columns] or bfloat16 [panels, in / 2, columns, 2]; what is missing is filled up with zeros.
    """
    columns, together = library().panel_columns(), INPUTS_IN_A_WORD[weight.dtype]
    outputs, inputs = weight.shape
    whole = pad(weight.detach(), (0, -inputs % together, 0, -outputs % columns))
    panels = whole.view(-1, columns, whole.shape[1] // together, together).transpose(1, 2).contiguous()
    return panels.squeeze(-1)


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """x [..., in] times a packed weight, plus bias [out]: [..., out]. No gradients are recorded.

    Raises:
        ValueError: x or bias are not of the weight's dtype or not on the CPU, or one of them is not of its size.
    """
    together = INPUTS_IN_A_WORD[packed.dtype]
    if x.shape[-1] % together:
        x = pad(x, (0, -x.shape[-1] % together))
    for tensor in (x,) if bias is None else (x, bias):
        if tensor.dtype != packed.dtype or tensor.device.type != "cpu":
            raise ValueError(f"The weight is {packed.dtype} on the CPU, not {tensor.dtype} on {tensor.device}.")
    inputs = packed.shape[1] * together
    if x.shape[-1] != inputs:
        raise ValueError(f"The layer takes {inputs} numbers, not {x.shape[-1]}.")
    room = packed.shape[0] * packed.shape[2]
    if not room - packed.shape[2] < outputs <= room or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(f"A weight in {packed.shape[0]} panels and this bias do not have {outputs} outputs.")
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    _kernel(x.dtype)(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        torch.get_num_threads(),
    )
    return y


@functools.cache
def _kernel(dtype: torch.dtype):
    kernel = getattr(library(), f"linear_{DTYPES[dtype]}")
    kernel.argtypes, kernel.restype = [c_void_p] * 4 + [c_long] * 3 + [c_int], None
    return kernel
