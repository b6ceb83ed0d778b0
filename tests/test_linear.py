"""A packed weight gives what the plain one gives for any number of rows; a short one what its rounded numbers give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minispec.models.kernels import RMSNorm
from minispec.models.linear import (
    INT4_GROUP,
    PACK_MIN_NUMBERS,
    Linear,
    bytes_read,
    can_pack,
    quantize,
    stored_bytes,
)


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


@pytest.mark.parametrize("kind,short_rows,levels", [("int8", 3, 255), ("int4", 4, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_short_weights_compute_the_same_for_few_rows_and_for_many(kind, short_rows, levels, dtype, bias):
    linear = filled(288, 320, bias, dtype)
    linear.weight += 3.0  # a range that is not around zero: int4 has a zero of its own, int8 has not
    original = linear.weight.double().clone()
    linear.shorten(kind)
    rounded, groups = linear.weight.double().clone(), original.unflatten(1, (-1, INT4_GROUP))
    if kind == "int4":
        step = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(INT4_GROUP, 1) / (levels - 1)
    else:
        step = original.abs().amax(1, keepdim=True) / 127
    # half a step, and what bfloat16 does to the scale, the zero and the number itself
    assert ((rounded - original).abs() <= 0.5 * step + original.abs() * 2**-6).all()
    assert (rounded - original).abs().max() > 0.1 * step.max()
    linear.pack()
    for rows in (0, 1, 2, short_rows, short_rows + 1, 40):
        x = torch.randn(rows, 288, dtype=dtype)
        exact = F.linear(x.double(), rounded, None if linear.bias is None else linear.bias.double())
        assert linear(x).dtype == dtype
        torch.testing.assert_close(linear(x).double(), exact, atol=0.9, rtol=0.02)


def test_four_bits_give_back_what_was_written_with_four_bits():
    """GGUF's Q4_1 has a smallest number and 16 steps for each 32 inputs; powers of two survive bfloat16."""
    linear = filled(64, 32, False, torch.float32)
    steps = torch.randint(0, 16, (32, 2, 32))
    steps[..., 0], steps[..., 1] = 0, 15
    linear.weight.copy_((steps * 0.25 - 2.0).flatten(1))
    before = linear.weight.clone()
    linear.shorten("int4")
    assert torch.equal(linear.weight, before)


def test_short_bytes_are_counted_as_read_and_both_copies_as_stored():
    for kind, read in (("int8", 320 * 288 + 2 * 320), ("int4", 320 * 288 // 2 + 4 * 320 * 288 // 32)):
        linear = filled(288, 320, False, torch.bfloat16)
        assert bytes_read(320 * 288, linear) == stored_bytes(linear) == 2 * 320 * 288
        linear.shorten(kind)
        assert bytes_read(320 * 288, linear) == read and bytes_read(320, linear) == round(read / 288)
        for _ in range(2):
            assert stored_bytes(linear) == 2 * 320 * 288 + read
            linear.pack()


def test_what_four_bits_cannot_divide_stays_whole():
    model = nn.ModuleList([filled(48, 32, False, torch.float32), filled(64, 24, False, torch.float32)])
    before = [part.weight.clone() for part in model]
    quantize(model, "int4")
    assert [part.short for part in model] == [None, None]
    assert all(torch.equal(part.weight, weight) for part, weight in zip(model, before, strict=True))
    quantize(model, "int8")
    assert all(part.short for part in model)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("size", [5, 64, 576])
def test_the_norm_is_the_formula_and_rows_do_not_meet(dtype, tolerance, size):
    norm = RMSNorm(size, 1e-5, dtype=dtype)
    norm.weight.data = torch.randn(size, dtype=dtype)
    x = torch.cat((torch.randn(7, size), torch.zeros(1, size), 1e-4 * torch.randn(1, size), torch.ones(1, size))).to(
        dtype
    )
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), exact, atol=tolerance, rtol=tolerance)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
