"""The accumulation models of tensor cores: against exact rational arithmetic, and where they differ."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen.emulator.tensor_core import multiply_accumulate, truncated_dot, widen

pytestmark = pytest.mark.filterwarnings("error")

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
SMALLEST = {"bf16": -126, "f16": -14}


def exponent(value: Fraction, smallest: int) -> int:
    """Exponent of the leading bit, that of the smallest normal number for subnormals."""
    size = abs(value)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** power > size:
        power -= 1
    return max(power, smallest)


def truncate(value: Fraction, unit: Fraction) -> Fraction:
    return int(value / unit) * unit


def rational_dot(a: list[Fraction], b: list[Fraction], c: Fraction, fmt: str) -> float:
    """One element by the definition: align to the largest exponent, truncate to 25 fractional bits, add, truncate to float32."""
    addends = [(x * y, exponent(x, SMALLEST[fmt]) + exponent(y, SMALLEST[fmt])) for x, y in zip(a, b, strict=True) if x and y]
    if c:
        addends.append((c, exponent(c, -126)))
    if not addends:
        return 0.0
    unit = Fraction(2) ** (max(e for _, e in addends) - 25)
    total = sum((truncate(value, unit) for value, _ in addends), Fraction(0))
    if not total:
        return 0.0
    result = truncate(total, Fraction(2) ** (exponent(total, -126) - 23))
    return math.inf * (1 if result > 0 else -1) if abs(result) >= Fraction(2) ** 128 else float(result)


def operands(rng: np.random.Generator, shape: tuple[int, ...], fmt: str, spread: int) -> np.ndarray:
    value = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
    value[rng.random(shape) < 0.05] = 0
    if fmt == "f16":
        value = np.clip(value, -65504, 65504)
    return value.astype(DTYPES[fmt]).astype(np.float64)


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
@pytest.mark.parametrize("spread", [0, 3, 12, 40])
@pytest.mark.parametrize("k", [8, 16])
def test_truncating_model_is_the_definition(fmt, spread, k):
    rng = np.random.default_rng(7 * spread + k)
    a, b = operands(rng, (6, k), fmt, spread), operands(rng, (9, k), fmt, spread)
    c = (rng.standard_normal((6, 9)) * np.exp2(rng.integers(-spread, spread + 1, (6, 9)))).astype(np.float32)
    c[0, :3] = 0, np.float32(1e-40), np.float32(-3e-39)
    for accumulator in (c, None):
        got = truncated_dot(a, b, accumulator, fmt, fmt)
        for i in range(6):
            for j in range(9):
                start = Fraction(0) if accumulator is None else Fraction(float(accumulator[i, j]))
                want = rational_dot([Fraction(x) for x in a[i]], [Fraction(x) for x in b[j]], start, fmt)
                assert got[i, j] == np.float32(want), (i, j)


def test_subnormal_results_and_cancellation():
    """A sum far below its addends keeps only the bits above 2^-25 of the largest; subnormal results truncate at 2^-149."""
    a = np.zeros((1, 16))
    a[0, :3] = 1.0, -1.0, 2.0**-13
    b = np.zeros((1, 16))
    b[0, :3] = 2.0**10, 2.0**10, 2.0**-13 + 2.0**-20
    # 2^-26 and 2^-33 lie below 2^(10 - 25).
    assert truncated_dot(a, b, None, "bf16", "bf16")[0, 0] == 0
    a, b = np.zeros((1, 16)), np.zeros((1, 16))
    a[0, 0], b[0, 0] = 1.5 * 2.0**-75, 1.25 * 2.0**-70
    assert truncated_dot(a, b, None, "bf16", "bf16")[0, 0] == np.float32(int(1.875 * 2**4) * 2.0**-149)
    assert truncated_dot(-a, b, None, "bf16", "bf16")[0, 0] == np.float32(-int(1.875 * 2**4) * 2.0**-149)


def test_overflow_infinities_and_nan():
    big = np.full((1, 16), 2.0**127)
    one = np.ones((1, 16))
    assert truncated_dot(big, one, None, "bf16", "bf16")[0, 0] == np.inf
    assert truncated_dot(-big, one, None, "bf16", "bf16")[0, 0] == -np.inf
    largest = np.zeros((1, 16))
    largest[0, 0] = 2.0**127 * 1.9921875
    top = np.array([[2.0**120 * (1 - 2.0**-24)]], np.float32)
    # Just below 2^128, where rounding to nearest would overflow.
    assert np.isfinite(truncated_dot(largest, one, top, "bf16", "bf16")[0, 0])
    for x, y, c, want in [
        (np.inf, 1.0, 0.0, np.inf),
        (np.inf, -2.0, 5.0, -np.inf),
        (np.inf, 0.0, 0.0, np.nan),
        (np.inf, 1.0, -np.inf, np.nan),
        (np.nan, 0.0, 0.0, np.nan),
        (1.0, 1.0, np.inf, np.inf),
        (1.0, 1.0, np.nan, np.nan),
    ]:
        a, b = np.ones((1, 16)), np.ones((1, 16))
        a[0, 3], b[0, 3] = x, y
        got = truncated_dot(a, b, np.full((1, 1), c, np.float32), "f16", "f16")
        if np.isnan(want):
            assert got.view(np.uint32)[0, 0] == 0x7FFFFFFF
        else:
            assert got[0, 0] == want


def test_special_values_leave_other_elements_alone():
    rng = np.random.default_rng(1)
    a, b = operands(rng, (4, 16), "bf16", 2), operands(rng, (5, 16), "bf16", 2)
    clean = truncated_dot(a, b, None, "bf16", "bf16")
    b[2, 7] = np.nan
    dirty = truncated_dot(a, b, None, "bf16", "bf16")
    assert np.isnan(dirty[:, 2]).all()
    keep = [0, 1, 3, 4]
    assert (clean[:, keep] == dirty[:, keep]).all()


def test_modes_differ_by_rounding_only_and_truncation_is_toward_zero():
    rng = np.random.default_rng(3)
    a, b = operands(rng, (32, 16), "bf16", 0), operands(rng, (64, 16), "bf16", 0)
    exact = multiply_accumulate(a, b, None, "bf16", "bf16")
    truncating = multiply_accumulate(a, b, None, "bf16", "bf16", "truncating")
    assert (exact == (a @ b.T).astype(np.float32)).all()
    largest = np.abs(a[:, None] * b[None]).max(axis=-1)
    assert (np.abs(exact - truncating) <= largest * 18 * 2.0**-24).all()
    assert (exact != truncating).mean() > 0.05
    # A chain of positive products loses about half an ulp a step.
    positive = np.abs(a), np.abs(b)
    assert (multiply_accumulate(*positive, None, "bf16", "bf16", "truncating") <= positive[0] @ positive[1].T).all()


def test_leading_dimensions_broadcast():
    rng = np.random.default_rng(4)
    a, b = operands(rng, (1, 32, 16), "f16", 1), operands(rng, (4, 8, 16), "f16", 1)
    for mode in ("exact", "truncating"):
        got = multiply_accumulate(a, b, None, "f16", "f16", mode)
        assert got.shape == (4, 32, 8)
        for g in range(4):
            assert (got[g] == multiply_accumulate(a[0], b[g], None, "f16", "f16", mode)).all()


def test_widen():
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    assert widen(bits, "bf16").tolist() == [1.0, -2.0, math.inf, 2.0**-133]
    assert widen(np.array([0x3C00, 0xC000, 0x0001], np.uint16), "f16").tolist() == [1.0, -2.0, 2.0**-24]
