"""MXFP4: every code, every scale, the rounding, and shapes that cannot be."""

import pytest
import torch

from modeling_kda.conversion.mxfp4 import GROUP, MAGNITUDES, dequantise, pack, quantise, unpack

# the table of the Microscaling specification, written out
CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_every_code_at_scale_one():
    packed = pack(torch.arange(32, dtype=torch.uint8) % 16)
    values = dequantise(packed, torch.tensor([127], dtype=torch.uint8), torch.float32)
    assert values.tolist() == CODES * 2
    assert values.signbit().tolist() == [code >= 8 for code in range(16)] * 2


def test_the_low_half_of_a_byte_comes_first():
    packed = torch.zeros(16, dtype=torch.uint8)
    packed[3] = 0x72  # codes 2 and 7
    values = dequantise(packed, torch.tensor([127], dtype=torch.uint8), torch.float32)
    assert values[6:8].tolist() == [1.0, 6.0]
    assert unpack(packed)[6:8].tolist() == [2, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_scale(dtype):
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    packed = pack(torch.arange(32, dtype=torch.uint8) % 16).expand(255, 16)
    values = dequantise(packed, scale, dtype)
    exact = torch.tensor(CODES * 2, dtype=torch.float64) * 2.0 ** (scale.double() - 127)
    assert values.dtype == dtype
    assert torch.equal(values.double(), exact.to(dtype).double())
    finite = exact.abs() < 2.0**128 if dtype != torch.float64 else torch.ones_like(exact, dtype=torch.bool)
    assert torch.equal(values[finite].double(), exact[finite])
    assert torch.isfinite(values).equal(finite) and (~finite).any() == (dtype != torch.float64)


def test_half_precision_gets_the_rounded_values():
    packed = torch.randint(0, 256, (9, 16), dtype=torch.uint8)
    scale = torch.tensor([[100], [103], [110], [127], [135], [139], [140], [141], [150]], dtype=torch.uint8)
    exact = dequantise(packed, scale, torch.float64)
    assert torch.equal(dequantise(packed, scale, torch.float16), exact.to(torch.float16))


def test_the_last_scale_is_nan():
    packed = torch.full((16,), 0x22, dtype=torch.uint8)
    assert dequantise(packed, torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_packing_is_undone_by_unpacking():
    codes = torch.randint(0, 16, (3, 5, 64), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes) and pack(codes).shape == (3, 5, 32)


def test_rounding_is_to_the_nearest_and_ties_to_even_codes():
    # 5.99 keeps the scale at 1; borders between magnitudes are 0.25, 0.75, ...
    values = torch.tensor([5.99, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, -0.25, -0.3, -5.0, 2.4, 2.6, 0.0])
    wanted = [6.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -0.5, -4.0, 2.0, 3.0, 0.0]
    packed, scale = quantise(torch.cat([values, torch.zeros(16)]))
    assert scale.tolist() == [127]
    assert dequantise(packed, scale, torch.float32)[:16].tolist() == wanted


@pytest.mark.parametrize(
    ("largest", "exponent"), [(4.0, 0), (6.0, 0), (6.99, 0), (7.0, 1), (8.0, 1), (3.5, 0), (3.49, -1), (1.0, -2)]
)
def test_scales_follow_the_largest_magnitude(largest, exponent):
    weight = torch.full((32,), 0.01)
    weight[7] = -largest
    assert quantise(weight)[1].tolist() == [127 + exponent]


def test_scales_stay_inside_their_range():
    weight = torch.zeros(4, 32, dtype=torch.float64)
    weight[1], weight[2], weight[3] = 2.0**-140, 2.0**130, 2.0**-126
    packed, scale = quantise(weight)
    assert scale[:, 0].tolist() == [0, 0, 254, 0]
    values = dequantise(packed, scale, torch.float64)
    assert (values[0] == 0).all() and (values[1] == 0).all()
    assert (values[2] == 6 * 2.0**127).all() and (values[3] == 2.0**-126).all()


def test_what_is_representable_comes_back():
    packed = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    scale = torch.randint(1, 250, (40, 4), dtype=torch.uint8)
    weight = dequantise(packed, scale)
    assert torch.equal(dequantise(*quantise(weight)), weight)


def test_the_error_is_at_most_half_a_step():
    weight = torch.randn(50, 96)
    back = dequantise(*quantise(weight), torch.float32)
    largest = weight.unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True)
    error = (back - weight).abs().unflatten(-1, (-1, GROUP))
    # the widest gap is from 4 to 6, and the largest magnitude is at least 3.5; above 6 the error is below 1
    assert (error <= largest / 3.5).all() and error.max() > 0
    assert len(MAGNITUDES) == 8


def uint8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dequantise(uint8(4, 15), uint8(4, 1)), r"\[4, 15\] and \[4, 1\]"),
        (lambda: dequantise(uint8(4, 16), uint8(4, 2)), r"\[4, 16\] and \[4, 2\]"),
        (lambda: dequantise(uint8(4, 16), uint8(3, 1)), r"\[4, 16\] and \[3, 1\]"),
        (lambda: dequantise(uint8(4, 16).int(), uint8(4, 1)), "packed must be a uint8 tensor, got torch.int32"),
        (lambda: dequantise(uint8(4, 16), torch.ones(4, 1)), "scale must be a uint8 tensor, got torch.float32"),
        (lambda: quantise(torch.zeros(4, 33)), r"multiple of 32 for MXFP4, got torch.float32 \[4, 33\]"),
        (lambda: quantise(uint8(4, 32)), "must be floating point"),
        (lambda: quantise(torch.full((32,), torch.inf)), "must be finite"),
        (lambda: pack(uint8(3)), r"even last dimension, got torch.uint8 \[3\]"),
    ],
)
def test_what_cannot_be_is_one_clear_error(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
