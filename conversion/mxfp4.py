"""MXFP4 weights, as Kimi K3 stores its experts: 4-bit floats, and one power of two for every 32 of them.

An element is a sign bit and a magnitude out of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1). Two elements share a byte, the one
with the even index in the low four bits. Each 32 elements along the last dimension share a scale 2^(e - 127), stored
as the byte e (E8M0); e = 255 is NaN. The format is that of the OCP Microscaling specification, the layout that of
compressed-tensors' `mxfp4-pack-quantized`.

PyTorch 2.13 names the two formats as dtypes, but converts no 4-bit floats and multiplies by them on Blackwell GPUs
only. So weights are dequantised when a checkpoint is converted.
"""

import torch
import torch.nn.functional as F

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_SCALE = 255


def dequantise(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Weights from their stored form.

    Args:
        packed: uint8 [..., N / 2].
        scale: uint8 [..., N / 32].
        dtype: of the result. Every value is exact in bfloat16, float32 and float64; those from 2^128 on, which the two
            largest scales reach, are infinite below float64.

    Returns: [..., N].

    Raises: ValueError for other dtypes or shapes.
    """
    _check_stored(packed, scale)
    # half precision has too few exponents for the scales
    wide = torch.float32 if dtype.itemsize < 4 and dtype != torch.bfloat16 else dtype
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=wide, device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # [256, 2], the values in each byte
    groups = F.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (-1, GROUP))
    # the dtype knows that 255 is NaN, and that 0 is 2^-127 although that is no normal float32
    factor = scale.view(torch.float8_e8m0fnu).to(torch.float32).to(wide)
    return (groups * factor[..., None]).flatten(-2).to(dtype)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest MXFP4 weights, with the scales that compressed-tensors' min-max observer takes: the largest
    magnitude of a group is rounded to a power of two, down below 1.75 times that power, and lands between 3.5 and 7.
    Halfway cases go to the even code; what is above 6 becomes 6.

    Args: weight: floating point [..., N], finite, N a multiple of 32.
    Returns: packed, uint8 [..., N / 2], and scale, uint8 [..., N / 32].
    Raises: ValueError for a width that is no multiple of 32, or values that are not finite.
    """
    if not weight.is_floating_point() or weight.dim() < 1 or weight.shape[-1] % GROUP or not weight.shape[-1]:
        raise ValueError(
            f"weights must be floating point with a last dimension that is a multiple of {GROUP} for MXFP4, got "
            f"{weight.dtype} {list(weight.shape)}"
        )
    groups = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise ValueError("weights must be finite for MXFP4; look for inf and nan in them")
    # frexp: largest = mantissa * 2^exponent with a mantissa in [0.5, 1)
    mantissa, exponent = torch.frexp(largest)
    # 2 is the exponent of 4, the largest power of two among the magnitudes
    stored = (exponent - 1 + (mantissa >= 0.875).int() - 2 + 127).clamp(0, NAN_SCALE - 1)
    stored = torch.where(largest > 0, stored, 0)
    scaled = groups * torch.exp2(127.0 - stored.to(groups.dtype))[..., None]
    return pack(_nearest(scaled).flatten(-2)), stored.to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes below 16, [..., N] -> [..., N / 2]. Raises: ValueError for an odd N."""
    if codes.dtype != torch.uint8 or codes.dim() < 1 or codes.shape[-1] % 2:
        raise ValueError(f"codes must be uint8 with an even last dimension, got {codes.dtype} {list(codes.shape)}")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., N / 2] -> uint8 codes below 16, [..., N]."""
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


def _nearest(scaled):
    """Codes of the nearest magnitudes with the sign: steps of 0.5 below 2, of 1 below 4 and of 2 from there on."""
    size = scaled.abs()
    above = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    codes = torch.where(size < 2, (2 * size).round(), above).clamp(max=7)
    return codes.to(torch.uint8) | scaled.signbit().to(torch.uint8) << 3


def _check_stored(packed, scale):
    for name, tensor in {"packed": packed, "scale": scale}.items():
        if tensor.dtype != torch.uint8 or tensor.dim() < 1:
            raise ValueError(f"MXFP4 {name} must be a uint8 tensor, got {tensor.dtype} {list(tensor.shape)}")
    wanted = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP)
    if packed.shape[-1] * 2 % GROUP or tuple(scale.shape) != wanted:
        raise ValueError(
            f"MXFP4 weights need one scale for every {GROUP} elements, two elements a byte: a packed tensor "
            f"[..., N / 2] and a scale [..., N / {GROUP}], got {list(packed.shape)} and {list(scale.shape)}"
        )
