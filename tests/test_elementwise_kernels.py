"""The kernels for what lies between linear layers compute what PyTorch's operators compute."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from helpers.fast import kernels
from helpers.fast.plain_executor import rotate

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(bool(kernels.unavailable()), reason=f"there are no compiled kernels: {kernels.unavailable()}"),
]
in_both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=["float32", "bfloat16"]
)


@in_both_dtypes
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("size", [1, 15, 16, 771])
@pytest.mark.parametrize("kind", [kernels.LAYER_NORM, kernels.RMS_NORM, kernels.ZERO_CENTERED_RMS_NORM])
@pytest.mark.parametrize("with_update", [False, True])
def test_a_residual_is_added_in_place_and_its_norm_returned(dtype, tolerance, rows, size, kind, with_update):
    torch.manual_seed(0)
    x, update, weight, bias = (torch.randn(*shape).to(dtype) for shape in [(rows, size)] * 2 + [(size,)] * 2)
    x = x + 3  # a mean that LayerNorm has to subtract
    expected_sum = x + update if with_update else x.clone()
    wide = expected_sum.float(), (size,), weight.float() + (kind == kernels.ZERO_CENTERED_RMS_NORM)
    bias = bias if kind == kernels.LAYER_NORM else None
    expected = rms_norm(*wide, 1e-5) if bias is None else layer_norm(*wide, bias.float(), 1e-5)
    actual = kernels.add_norm(x, update if with_update else None, weight, bias, 1e-5, kind)
    assert torch.equal(x, expected_sum)
    torch.testing.assert_close(actual, expected.to(dtype), rtol=tolerance, atol=tolerance)


ACTIVATIONS = {kernels.TANH_GELU: lambda x: gelu(x, approximate="tanh"), kernels.SILU: silu}
of_both_activations = pytest.mark.parametrize("kind", ACTIVATIONS, ids=["GELU", "SiLU"])


@in_both_dtypes
@of_both_activations
@pytest.mark.parametrize("shape", [(0, 3), (5, 1), (3, 100), (40, 1001)])
def test_an_activation_is_that_of_float32_rounded_once(dtype, tolerance, shape, kind):
    torch.manual_seed(0)
    pair = (8 * torch.randn(2, *shape)).to(dtype)
    x, factor = pair
    expected = ACTIVATIONS[kind](x.double())
    exact = {"rtol": tolerance, "atol": tolerance}
    beside = torch.cat([x, factor], dim=1).split(shape[1], dim=1)  # as one layer computes both
    for one in (beside, (x.clone(), factor)):
        torch.testing.assert_close(kernels.activate(*one, kind), (expected * factor.double()).to(dtype), **exact)
    assert kernels.activate(x, None, kind) is x
    torch.testing.assert_close(x, expected.to(dtype), **exact)


@in_both_dtypes
@of_both_activations
def test_the_activation_of_large_numbers_and_nan_is_pytorchs(dtype, tolerance, kind):
    x = torch.tensor([[-1e30, -100, -30, -0.0, 0.0, 30, 100, 1e30, float("inf"), float("nan")]]).to(dtype)
    expected = ACTIVATIONS[kind](x)
    actual = kernels.activate(x, None, kind)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@in_both_dtypes
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (6, 6), (80, 80), (64, 24)])
def test_heads_are_rotated_in_place_by_their_positions(dtype, tolerance, dim, rotated):
    """40 tokens of 3 heads are a view of a larger tensor; numbers behind the rotated ones stay."""
    torch.manual_seed(0)
    all_heads, (cos, sin) = torch.randn(40, 5, dim).to(dtype), torch.randn(2, 40, rotated).to(dtype)
    heads, before = all_heads[:, 1:4], all_heads.clone()
    expected = rotate(heads.float(), cos.float(), sin.float()).to(dtype)
    torch.testing.assert_close(kernels.rotate_(heads, cos, sin), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(all_heads[:, ::4], before[:, ::4])
