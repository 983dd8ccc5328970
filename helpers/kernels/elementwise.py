"""Compute what lies between two linear layers in one pass over memory: a residual and its norm, and GELU."""

from ctypes import c_float, c_int, c_long, c_void_p

import torch

from .compiled import address, function

ADD_NORM = (c_void_p,) * 5 + (c_long, c_long, c_float, c_int, c_int)
GELU = (c_void_p, c_long, c_int)


def add_norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
) -> torch.Tensor:
    """Add `update` to x in place, and return the norm of the result. No gradients are recorded.

    The arguments are not checked: all must be contiguous, on the CPU and of one dtype.

    Args:
        x: [T, size], which is changed; `update`: the same shape, or None.
        weight, bias: [size].
        eps: the number that is added to the variance.
        rms: whether the norm is RMSNorm (Llama's), else LayerNorm.
    """
    y = torch.empty_like(x)
    pointers = x.data_ptr(), address(update), weight.data_ptr(), address(bias), y.data_ptr()
    function("add_norm", x.dtype, ADD_NORM)(*pointers, *x.shape, eps, rms, torch.get_num_threads())
    return y


def gelu_(x: torch.Tensor) -> torch.Tensor:
    """Replace a contiguous x by its GELU in the tanh form (GPT-2's `gelu_new`), and return it."""
    function("gelu", x.dtype, GELU)(x.data_ptr(), x.numel(), torch.get_num_threads())
    return x
