"""Tensor-core arithmetic: D = A . B^T + C of one matrix instruction, as pure functions on arrays.

Two models of the accumulation, which the ISA leaves open ("at least single precision"). `exact`: the products and the accumulator are
summed in float64 and rounded to nearest once an instruction. `truncating`: what Hopper and Blackwell tensor cores are measured to do: the
exact products and the accumulator are aligned to the largest exponent among them, each truncated to 25 fractional bits, summed exactly,
and the sum truncated to float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

MODES = ("exact", "truncating")
"""Accumulation models, the default first."""

FRACTION_BITS = 25
"""Bits that an aligned addend keeps below the largest exponent."""

_SIGNIFICAND = {"f16": (10, -14), "bf16": (7, -126)}  # fraction bits, exponent of subnormals
_NAN = np.uint32(0x7FFF_FFFF)
_NO_EXPONENT = -(1 << 20)  # exponent of a zero: below every other


def widen(bits: NDArray[Any], fmt: str) -> Float64:
    """16-bit patterns of any shape as float64. fmt: "bf16" or "f16"."""
    if fmt == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(np.float16).astype(np.float64)


def multiply_accumulate(a: Float64, b: Float64, c: Float32 | None, fmt_a: str, fmt_b: str, mode: str = "exact") -> Float32:
    """One instruction's D = A . B^T + C.

    a [..., m, k] and b [..., n, k]: operands of format fmt_a and fmt_b ("bf16", "f16") as float64, leading dimensions broadcast;
    c [..., m, n]: the float32 accumulator, None for zero. Returns float32 [..., m, n].
    """
    if mode == "truncating":
        return truncated_dot(a, b, c, fmt_a, fmt_b)
    product = a @ np.swapaxes(b, -1, -2)
    if c is not None:
        product += c
    result: Float32 = product.astype(np.float32)
    return result


def _split(x: Float64, fmt: str) -> tuple[Int64, Int64]:
    """(signed integer significand, exponent) of finite values: x = significand * 2^(exponent - fraction bits)."""
    fraction, smallest = _SIGNIFICAND[fmt]
    mantissa, exponent = np.frexp(x)
    exponent = np.maximum(exponent.astype(np.int64) - 1, smallest)
    significand = np.ldexp(x, fraction - exponent).astype(np.int64)
    return significand, np.where(mantissa == 0, _NO_EXPONENT, exponent)


def truncated_dot(a: Float64, b: Float64, c: Float32 | None, fmt_a: str, fmt_b: str, fraction_bits: int = FRACTION_BITS) -> Float32:
    """multiply_accumulate in the truncating model. NaN results are 0x7FFFFFFF and a zero sum is +0."""
    k = a.shape[-1]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all() and (c is None or np.isfinite(c).all()))
    with np.errstate(all="ignore"):
        special = None if finite else _special(a, b, c, shape)
        if not finite:
            a, b = np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0)
            c = None if c is None else np.where(np.isfinite(c), c, np.float32(0))
        significand_a, exponent_a = _split(a, fmt_a)
        significand_b, exponent_b = _split(b, fmt_b)
        # k outermost and contiguous, so that each step works on whole result-shaped arrays.
        columns_a = [np.moveaxis(x, -1, 0)[..., :, None] for x in (significand_a, exponent_a)]
        columns_b = [np.moveaxis(x, -1, 0)[..., None, :] for x in (significand_b, exponent_b)]
        largest = np.full(shape, _NO_EXPONENT, np.int64)
        exponents = np.empty((k, *shape), np.int64)
        for step in range(k):
            np.add(columns_a[1][step], columns_b[1][step], out=exponents[step])
            np.maximum(largest, exponents[step], out=largest)
        if c is not None:
            wide = c.astype(np.float64)
            mantissa, exponent = np.frexp(wide)
            exponent_c = np.where(mantissa == 0, _NO_EXPONENT, np.maximum(exponent.astype(np.int64) - 1, -126))
            np.maximum(largest, exponent_c, out=largest)
        # An all-zero sum has no exponent: any will do.
        np.maximum(largest, -1024, out=largest)
        product_bits = _SIGNIFICAND[fmt_a][0] + _SIGNIFICAND[fmt_b][0]
        total = np.zeros(shape, np.int64)
        for step in range(k):
            product = columns_a[0][step] * columns_b[0][step]
            total += _align(product, exponents[step] - largest + (fraction_bits - product_bits))
        if c is not None:
            total += _align(np.ldexp(wide, 23 - exponent_c.clip(-126)).astype(np.int64), exponent_c - largest + (fraction_bits - 23))
        result = _truncate(np.ldexp(total.astype(np.float64), largest - fraction_bits))
    if special is not None:
        result = np.where(np.isnan(special), _NAN.view(np.float32), np.where(np.isinf(special), special, result))
    return result


def _align(value: Int64, shift: Int64) -> Int64:
    """value * 2^shift, truncated toward zero."""
    left = np.clip(shift, 0, 40)
    right = np.clip(-shift, 0, 63)
    magnitude = (np.abs(value) << left) >> right
    aligned: Int64 = np.where(value < 0, -magnitude, magnitude)
    return aligned


def _truncate(x: Float64) -> Float32:
    """float64 to float32 toward zero; beyond the largest float32, infinity."""
    result = x.astype(np.float32)
    beyond = np.abs(result.astype(np.float64)) > np.abs(x)
    overflow = np.abs(x) >= 2.0**128
    result = np.where(beyond & ~overflow, np.nextafter(result, np.float32(0)), result)
    truncated: Float32 = np.where(x == 0, np.float32(0), result).astype(np.float32)
    return truncated


def _special(a: Float64, b: Float64, c: Float32 | None, shape: tuple[int, ...]) -> Float32:
    """What the infinities and NaNs among the operands make of each result: NaN, an infinity, or a finite value where they do not reach."""
    result = np.zeros(shape, np.float32) if c is None else np.where(np.isfinite(c), np.float32(0), c)
    for step in range(a.shape[-1]):
        x, y = a[..., :, step, None], b[..., None, :, step]
        product = x * y
        result = result + np.where(np.isfinite(x) & np.isfinite(y), 0.0, product).astype(np.float32)
    special: Float32 = np.broadcast_to(result, shape).astype(np.float32)
    return special


__all__ = ["FRACTION_BITS", "MODES", "multiply_accumulate", "truncated_dot", "widen"]
