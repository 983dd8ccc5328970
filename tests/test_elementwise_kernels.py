"""The kernels for what lies between linear layers compute what PyTorch's operators compute."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm

from helpers import kernels

pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable()), reason=f"there are no compiled kernels: {kernels.unavailable()}"
)
in_both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=["float32", "bfloat16"]
)


@in_both_dtypes
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("size", [1, 15, 16, 771])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("with_update", [False, True])
def test_a_residual_is_added_in_place_and_its_norm_returned(dtype, tolerance, rows, size, rms, with_update):
    torch.manual_seed(0)
    x, update, weight, bias = (torch.randn(*shape).to(dtype) for shape in [(rows, size)] * 2 + [(size,)] * 2)
    x = x + 3  # a mean that LayerNorm has to subtract
    expected_sum = x + update if with_update else x.clone()
    wide = expected_sum.float(), (size,), weight.float()
    expected = rms_norm(*wide, 1e-5) if rms else layer_norm(*wide, bias.float(), 1e-5)
    actual = kernels.add_norm(x, update if with_update else None, weight, None if rms else bias, 1e-5, rms)
    assert torch.equal(x, expected_sum)
    torch.testing.assert_close(actual, expected.to(dtype), rtol=tolerance, atol=tolerance)


@in_both_dtypes
@pytest.mark.parametrize("shape", [(0,), (5,), (3, 100), (40, 1001)])
def test_gelu_is_that_of_float32_rounded_once(dtype, tolerance, shape):
    torch.manual_seed(0)
    x = (8 * torch.randn(*shape)).to(dtype)
    expected = gelu(x.double(), approximate="tanh").to(dtype)
    assert kernels.gelu_(x) is x
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


@in_both_dtypes
def test_gelu_of_large_numbers_infinity_and_nan_is_pytorchs(dtype, tolerance):
    x = torch.tensor([-1e30, -100, -30, -0.0, 0.0, 30, 100, 1e30, float("inf"), float("nan")]).to(dtype)
    expected = gelu(x, approximate="tanh")
    torch.testing.assert_close(kernels.gelu_(x), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@in_both_dtypes
def test_the_norm_of_a_row_does_not_depend_on_the_other_rows(dtype, tolerance):
    x, weight = torch.randn(50, 771).to(dtype), torch.randn(771).to(dtype)
    together = kernels.add_norm(x, None, weight, None, 1e-5, rms=True)
    assert all(
        torch.equal(kernels.add_norm(x[r : r + 1], None, weight, None, 1e-5, True)[0], together[r]) for r in range(50)
    )
