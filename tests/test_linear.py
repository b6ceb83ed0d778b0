"""A packed weight gives what the plain one gives, with every number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minispec.models.linear import PACK_MIN_NUMBERS, Linear, can_pack


def filled(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> Linear:
    linear = Linear(inputs, outputs, bias, dtype=dtype)
    linear.weight.copy_(torch.randn(outputs, inputs))
    if bias:
        linear.bias.copy_(torch.randn(outputs))
    return linear


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.51)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain_for_any_number_of_rows(dtype, tolerance, bias):
    linear = filled(288, 320, bias, dtype)
    if not can_pack(linear.weight):
        pytest.skip("this build of torch has no packed product for this dtype")
    weight = linear.weight.clone()
    linear.pack()
    assert linear.weight is None and linear.packed is not None
    for rows in (1, 2, 3, 5, 8, 17, 300):
        x = torch.randn(rows, 288, dtype=dtype)
        expected = F.linear(x.double(), weight.double(), None if linear.bias is None else linear.bias.double())
        assert (linear(x).double() - expected).abs().max() < tolerance
    linear.pack()  # a second time changes nothing


def test_small_weights_and_strange_dtypes_stay_as_they_are():
    small = filled(8, 8, True, torch.float32)
    half = filled(512, PACK_MIN_NUMBERS // 512, False, torch.float64)
    for linear in (small, half):
        linear.pack()
        assert linear.packed is None and linear.weight is not None
