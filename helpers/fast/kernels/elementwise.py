"""Compute what lies between two linear layers in one pass over memory: residuals, norms, positions, activations."""

from ctypes import c_float, c_int, c_long, c_void_p

import torch

from .compiled import address, function

# The kinds of norms and activations, as in shares.h.
LAYER_NORM, RMS_NORM, ZERO_CENTERED_RMS_NORM = range(3)
TANH_GELU, SILU, GELU, RELU = range(4)

ADD_NORM = (c_void_p,) * 5 + (c_long, c_long, c_float, c_int, c_int)
ROTATE = (c_void_p,) * 3 + (c_long,) * 5 + (c_int,)
ACTIVATE = (c_void_p,) * 3 + (c_long,) * 3 + (c_int,) * 2


def add_norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: int
) -> torch.Tensor:
    """Add `update` to x in place, and return the norm of the result. No gradients are recorded.

    The arguments are not checked: all must be contiguous, on the CPU and of one dtype.

    Args:
        x: [T, size], which is changed; `update`: the same shape, or None.
        weight, bias: [size].
        eps: the number that is added to the variance.
        kind: LAYER_NORM, RMS_NORM (Llama's), or ZERO_CENTERED_RMS_NORM, whose weight is stored less one (Gemma's).
    """
    y = torch.empty_like(x)
    pointers = x.data_ptr(), address(update), weight.data_ptr(), address(bias), y.data_ptr()
    function("add_norm", x.dtype, ADD_NORM)(*pointers, *x.shape, eps, kind, torch.get_num_threads())
    return y


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by their positions, in place (RoPE, as Llama arranges it), and return them.

    Args:
        x: [T, heads, head dim], where the heads of a token are contiguous.
        cos, sin: contiguous [T, rotated], for the first `rotated` numbers of each head, in the dtype of x.
    """
    sizes = *x.shape, cos.shape[1], x.stride(0)
    function("rotate", x.dtype, ROTATE)(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes, torch.get_num_threads())
    return x


def activate(x: torch.Tensor, factor: torch.Tensor | None, kind: int) -> torch.Tensor:
    """Return the activation of x, times `factor` if it is given. A contiguous x is overwritten.

    Args:
        x: [T, size], where the numbers of a token are contiguous.
        factor: the same, with the same strides, or None.
        kind: TANH_GELU (GPT-2's `gelu_new`), SILU, GELU or RELU.
    """
    y = x if x.is_contiguous() else x.new_empty(x.shape)
    pointers = x.data_ptr(), address(factor), y.data_ptr()
    function("activate", x.dtype, ACTIVATE)(*pointers, *x.shape, x.stride(0), kind, torch.get_num_threads())
    return y
