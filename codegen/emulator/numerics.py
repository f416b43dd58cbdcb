"""Arithmetic of PTX on numpy arrays, bit for bit: one function per instruction family, with the ISA section it follows (PTX ISA 9.1).

Conventions
- Operands are arrays of one or more dimensions (32 lanes, or any shape); f32 values are float32 arrays, f64 float64, 16-bit floats are
  uint16 bit patterns with a format name ("f16" or "bf16"), 8-bit floats uint8 patterns ("e4m3", "e5m2").
- Packed forms need no functions of their own: view a uint32 operand as uint16 (f16x2, bf16x2), a uint64 one as float32 (f32x2), and
  view the result back.
- rounding is "rn", "rz", "rm" or "rp"; `ftz` flushes subnormal inputs and results to zeros of their sign, a result being subnormal when
  it is after rounding to 24 bits with an unbounded exponent; `sat` clamps to [0, 1] with NaN becoming +0.
- A NaN result is the canonical one of NVIDIA GPUs: 0x7fffffff in f32, 0x7fff in 16 bits, 0x7f in 8 bits. f64 arithmetic and the
  conversions that only widen or narrow a payload keep it.
- Call these under `np.errstate(all="ignore")`: entering it here would cost as much as the arithmetic.

Exactness: everything is exactly what an H200 returns (an exactly rounded result where the ISA asks for one), except the functions whose
docstring says "not bit-exact".
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from importlib import resources
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .ptx import PtxFault

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

POISON_BYTE = 0xFF
"""Filling memory with this byte makes every float read from it a NaN: f64, f32, f16, bf16, e4m3 and e5m2 alike."""
POISON_WORD = 0xFFFFFFFF

CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)
CANONICAL_NAN_16 = np.uint16(0x7FFF)
CANONICAL_NAN_8 = np.uint8(0x7F)
_NAN_F32 = np.array([CANONICAL_NAN_F32]).view(np.float32)[0]
_NAN_F64 = np.uint64(0xFFF8000000000000)
_QUIET_F64 = np.uint64(0x0008000000000000)

_ROUNDINGS = ("rn", "rz", "rm", "rp")
# Arrays without axes: numpy takes half as long over them as over scalars, which it converts at every call.
_SIGN = np.array(0x80000000, np.uint32)
_MAGNITUDE = np.array(0x7FFFFFFF, np.uint32)
_EXPONENT = np.array(0x7F800000, np.uint32)
_MIN_NORMAL = np.float32(2.0**-126)
_MIN_NORMAL_BITS = np.array(0x00800000, np.uint32)
_HALF_BF16, _SIXTEEN, _ONE_BIT = np.array(0x7FFF, np.uint32), np.array(16, np.uint32), np.array(1, np.uint32)
_BELOW_F32 = np.array(0x1FFFFFFF, np.int64)
_MIDPOINT = np.array(0x10000000, np.int64)
"""The bits of an f64 below those of an f32, and their value halfway between two normal f32."""
_SCALE = 2.0**64


def _check_rounding(rounding: str) -> None:
    if rounding not in _ROUNDINGS:
        raise PtxFault(f"rounding {rounding!r} is none of {', '.join(_ROUNDINGS)}")


# ------------------------------------------------------------------------------------------------------ shared f32 helpers


def some(flags: NDArray[Any]) -> bool:
    """Whether any element is not zero: what .any() says, in a fifth of the time for a few lanes."""
    return bool(np.count_nonzero(flags))


def every(flags: NDArray[Any]) -> bool:
    """Whether no element is zero, as `some`."""
    return bool(np.count_nonzero(flags) == flags.size)


def _has_nan(x: F32) -> bool:
    """Whether an element is NaN. The dot product of x with itself is NaN only then: the cheapest test for a few lanes."""
    if x.ndim == 1:
        square = np.dot(x, x)
        return bool(square != square)
    return some(x != x)


def _canonical(x: F32) -> F32:
    """x with every NaN replaced by the canonical one."""
    return np.where(x != x, _NAN_F32, x) if _has_nan(x) else x


def flush_f32(x: F32) -> F32:
    """Subnormal values become zeros of their sign (.ftz)."""
    bits = x.view(np.uint32)
    exponent = bits & _EXPONENT
    if every(exponent):
        return x
    return np.where(exponent == 0, bits & _SIGN, bits).view(np.float32)


def _flush_tiny(result: F32, scaled: Any) -> F32:
    """Flush a rounded result that is subnormal before the range of the exponent limits it (.ftz).

    2^-126 - 2^-150, which rounds up to 2^-126 as a subnormal, is flushed: 24 bits can hold it. scaled() gives the results times 2^64
    with the same rounding; it is asked only if some result is 2^-126.
    """
    magnitude = result.view(np.uint32) & _MAGNITUDE
    if every(magnitude > _MIN_NORMAL_BITS):
        return result
    tiny = magnitude < _MIN_NORMAL_BITS
    least = magnitude == _MIN_NORMAL_BITS
    if some(least):
        tiny |= least & (np.abs(scaled()) < np.float32(2.0**-62))
    return np.where(tiny, np.copysign(np.float32(0), result), result)


def saturate_f32(x: F32) -> F32:
    """Clamp to [+0, 1]; NaN and -0 become +0 (.sat)."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def _finish(x: F32, ftz: bool, sat: bool) -> F32:
    x = _canonical(x)
    if ftz:
        x = flush_f32(x)
    return saturate_f32(x) if sat else x


def _step_f32(x: F32, compare: NDArray[Any], rounding: str) -> F32:
    """Correct x, a rounding to nearest of some exact value, for a directed rounding.

    compare: sign of (x - exact), elementwise; NaN counts as equal.
    """
    if rounding == "rn":
        return x
    bits = x.view(np.int32)
    negative = bits < 0
    if rounding == "rz":
        too_far = np.where(negative, compare < 0, compare > 0)
        return (bits - too_far).view(np.float32)
    wrong = compare > 0 if rounding == "rm" else compare < 0
    grows = negative if rounding == "rm" else ~negative  # the magnitude grows when a negative value moves down
    return (bits + np.where(wrong, np.where(grows, 1, -1), 0).astype(np.int32)).view(np.float32)


def _narrow_f32(x: F64, rounding: str) -> F32:
    """f64 -> f32 with one rounding."""
    nearest = x.astype(np.float32)
    return nearest if rounding == "rn" else _step_f32(nearest, nearest.astype(np.float64) - x, rounding)


def _odd_sum(a: F64, b: F64) -> F64:
    """a + b rounded to odd in f64: the sum truncated, its last bit set when inexact.

    TwoSum gives the exact rounding error, whose sign says which of the two f64 neighbours of the exact sum has the odd last bit.
    Rounding that to a format with at least two bits fewer equals rounding the exact sum (Boldo and Melquiond 2008).
    """
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    inexact = (error > 0) | (error < 0)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact & ((bits & 1) == 0), step, 0)).view(np.float64)


def _sum_f32(a: F64, b: F64, rounding: str) -> F32:
    """a + b rounded once to f32."""
    result = _narrow_f32(_odd_sum(a, b), rounding)
    if rounding == "rm":  # an exact zero of operands of different signs is -0
        negative = np.signbit(a) | np.signbit(b)
        result = np.where((result == 0) & negative & (a + b == 0), np.float32(-0.0), result)
    return result


# ------------------------------------------------------------------------------------------------------------ f32 arithmetic


def add_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """add{.rnd}{.ftz}{.sat}.f32 (9.7.3.3)."""
    if ftz:
        a, b = flush_f32(a), flush_f32(b)
    if rounding == "rn":
        return _finish(a + b, ftz, sat)
    _check_rounding(rounding)
    return _finish(_sum_f32(a.astype(np.float64), b.astype(np.float64), rounding), ftz, sat)


def sub_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """sub{.rnd}{.ftz}{.sat}.f32 (9.7.3.4)."""
    return add_f32(a, -b, rounding, ftz, sat)


def mul_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """mul{.rnd}{.ftz}{.sat}.f32 (9.7.3.5)."""
    if ftz:
        a, b = flush_f32(a), flush_f32(b)
    if rounding == "rn":
        result = a * b
    else:
        _check_rounding(rounding)
        result = _narrow_f32(np.multiply(a, b, dtype=np.float64), rounding)
    if ftz:
        result = _flush_tiny(result, lambda: _narrow_f32(np.multiply(a, b, dtype=np.float64) * _SCALE, rounding))
    return _finish(result, False, sat)


def fma_f32(a: F32, b: F32, c: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """fma.rnd{.ftz}{.sat}.f32: a * b + c rounded once (9.7.3.6).

    The product of two f32 is exact in f64. Rounding their f64 sum with c again can only go wrong where that sum lies on the midpoint of
    two f32 values: of two normal ones where the bits below an f32's are those of one half, of two subnormal ones where at least the low
    28 bits are zero. Only then is the sum's rounding error computed. With .ftz it does not matter for subnormal results.
    """
    if ftz:
        a, b, c = flush_f32(a), flush_f32(b), flush_f32(c)
    product: F64 = np.multiply(a, b, dtype=np.float64)
    if rounding == "rn":
        total: F64 = np.add(product, c, dtype=np.float64)
        below = total.view(np.int64) & _BELOW_F32
        if some(below == _MIDPOINT) or (not ftz and not every(below) and some((np.abs(total) < 2.0**-126) & (total != 0))):
            total = _odd_sum(product, c.astype(np.float64))
        result = total.astype(np.float32)
    else:
        _check_rounding(rounding)
        result = _sum_f32(product, c.astype(np.float64), rounding)
    if ftz:
        result = _flush_tiny(result, lambda: _narrow_f32(_odd_sum(product, c.astype(np.float64)) * _SCALE, rounding))
    return _finish(result, False, sat)


def div_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False) -> F32:
    """div.rnd{.ftz}.f32, exactly rounded (9.7.3.8)."""
    _check_rounding(rounding)
    if ftz:
        a, b = flush_f32(a), flush_f32(b)
    quotient = a / b
    if rounding != "rn":  # quotient * b is exact in f64, so its difference to a has the right sign
        excess = (quotient.astype(np.float64) * b - a) * np.sign(b)
        quotient = _step_f32(quotient, np.where(np.isinf(quotient) & np.isfinite(a) & (b != 0), quotient, excess), rounding)
    if ftz:
        quotient = _flush_tiny(quotient, lambda: div_f32(a * np.float32(_SCALE), b, rounding))
    return _canonical(quotient)


def rcp_f32(x: F32, rounding: str = "rn", ftz: bool = False) -> F32:
    """rcp.rnd{.ftz}.f32, exactly rounded (9.7.3.13)."""
    return div_f32(np.ones_like(x), x, rounding, ftz)


def sqrt_f32(x: F32, rounding: str = "rn", ftz: bool = False) -> F32:
    """sqrt.rnd{.ftz}.f32, exactly rounded (9.7.3.15)."""
    _check_rounding(rounding)
    if ftz:
        x = flush_f32(x)
    root = np.sqrt(x)
    if rounding != "rn":
        wide = root.astype(np.float64)
        root = _step_f32(root, wide * wide - x, rounding)
    return _finish(root, ftz, False)


def abs_f32(x: F32, ftz: bool = False) -> F32:
    """abs{.ftz}.f32: clears the sign bit; NaN becomes canonical (9.7.3.9)."""
    return _finish((x.view(np.uint32) & _MAGNITUDE).view(np.float32), ftz, False)


def neg_f32(x: F32, ftz: bool = False) -> F32:
    """neg{.ftz}.f32: flips the sign bit; NaN becomes canonical (9.7.3.10)."""
    return _finish((x.view(np.uint32) ^ _SIGN).view(np.float32), ftz, False)


def _extremum(a: F32, b: F32, ftz: bool, nan: bool, largest: bool) -> F32:
    if ftz:
        a, b = flush_f32(a), flush_f32(b)
    result = (np.fmax if largest else np.fmin)(a, b)
    if not every(result):  # a zero: of equal operands max takes the positive, min the negative one
        abits, bbits = a.view(np.uint32), b.view(np.uint32)
        result = np.where(a == b, (abits & bbits if largest else abits | bbits).view(np.float32), result)
    if nan:
        return np.where((a != a) | (b != b), _NAN_F32, result)
    if _has_nan(result):  # of two NaNs, or of one signalling NaN, which fmax treats as it likes
        result = np.where(a != a, b, np.where(b != b, a, result))
        result = np.where(result != result, _NAN_F32, result)
    return result


def max_f32(a: F32, b: F32, ftz: bool = False, nan: bool = False) -> F32:
    """max{.ftz}{.NaN}.f32: +0 > -0; a NaN loses to a number, or wins with .NaN (9.7.3.12). Three inputs: two nested calls."""
    return _extremum(a, b, ftz, nan, largest=True)


def min_f32(a: F32, b: F32, ftz: bool = False, nan: bool = False) -> F32:
    """min{.ftz}{.NaN}.f32: -0 < +0; a NaN loses to a number, or wins with .NaN (9.7.3.11). Three inputs: two nested calls."""
    return _extremum(a, b, ftz, nan, largest=False)


# ------------------------------------------------------------------------------------------------------------ f64 arithmetic


def _round_fraction(value: Fraction, rounding: str) -> float:
    try:
        nearest = float(value)  # int / int rounds once, to nearest even, subnormals included
    except OverflowError:
        nearest = math.inf if value > 0 else -math.inf
    if rounding == "rn":
        return nearest
    above = nearest == math.inf or (nearest != -math.inf and Fraction(nearest) > value)
    below = nearest == -math.inf or (nearest != math.inf and Fraction(nearest) < value)
    down = rounding == "rm" or (rounding == "rz" and value > 0)
    if above and down:
        return math.nextafter(nearest, -math.inf)
    if below and not down:
        return math.nextafter(nearest, math.inf)
    return nearest


def _exact_f64(operation: Any, rounding: str, approximate: F64, *operands: F64) -> F64:
    """operation over Fractions, rounded once, for every element whose operands are finite; zeros keep the sign of `approximate`."""
    result = approximate.copy()
    flat = result.reshape(-1)
    columns = [np.broadcast_to(x, result.shape).reshape(-1) for x in operands]
    for i, values in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if all(map(math.isfinite, values)):
            exact = operation(*map(Fraction, values))
            if exact:
                rounded = _round_fraction(exact, rounding)
                flat[i] = rounded if rounded else math.copysign(0.0, exact)
    return result


def _nan_f64(result: F64, *priority: F64) -> F64:
    """result with its NaNs as an H200 has them: the first NaN of `priority`, quiet, else the default NaN 0xfff8000000000000."""
    if not (result != result).any():
        return result
    payload = np.full(result.shape, _NAN_F64)
    for x in reversed(priority):
        payload = np.where(x != x, x.view(np.uint64) | _QUIET_F64, payload)
    return np.where(result != result, payload.view(np.float64), result)


def _zero_sum_f64(result: F64, a: F64, b: F64, rounding: str) -> F64:
    return np.where((result == 0) & (np.signbit(a) | np.signbit(b)) & (a + b == 0), -0.0, result) if rounding == "rm" else result


def add_f64(a: F64, b: F64, rounding: str = "rn") -> F64:
    """add{.rnd}.f64 (9.7.3.3)."""
    _check_rounding(rounding)
    result = a + b
    if rounding != "rn":
        result = _zero_sum_f64(_exact_f64(lambda x, y: x + y, rounding, result, a, b), a, b, rounding)
    return _nan_f64(result, b, a)


def mul_f64(a: F64, b: F64, rounding: str = "rn") -> F64:
    """mul{.rnd}.f64 (9.7.3.5)."""
    _check_rounding(rounding)
    result = a * b
    return _nan_f64(result if rounding == "rn" else _exact_f64(lambda x, y: x * y, rounding, result, a, b), b, a)


def fma_f64(a: F64, b: F64, c: F64, rounding: str = "rn") -> F64:
    """fma.rnd.f64: exact rational arithmetic, one element at a time (9.7.3.6)."""
    _check_rounding(rounding)
    finite = np.isfinite(a) & np.isfinite(b)
    approximate = np.where(finite & ~np.isfinite(c), c, a * b + c)  # a finite product cannot meet an infinite c as an infinity
    approximate = np.where(finite & np.isfinite(c) & (a != 0) & (b != 0), 0.0, approximate)
    result = _exact_f64(lambda x, y, z: x * y + z, rounding, approximate, a, b, c)
    if rounding == "rm":
        opposite = (np.signbit(a) ^ np.signbit(b)) | np.signbit(c)
        exact_zero = (result == 0) & (_exact_f64(lambda x, y, z: x * y + z, "rp", approximate, a, b, c) == 0)
        result = np.where(exact_zero & opposite, -0.0, result)
    return _nan_f64(result, b, c, a)


def div_f64(a: F64, b: F64, rounding: str = "rn") -> F64:
    """div.rnd.f64 (9.7.3.8)."""
    _check_rounding(rounding)
    result = a / b
    if rounding != "rn":
        safe = np.where(b == 0, np.inf, b)
        result = np.where(b == 0, result, _exact_f64(lambda x, y: x / y, rounding, result, a, safe))
    return _nan_f64(result, a, b)


def _extremum_f64(a: F64, b: F64, largest: bool) -> F64:
    result = (np.fmax if largest else np.fmin)(a, b)
    abits, bbits = a.view(np.uint64), b.view(np.uint64)
    result = np.where(a == b, (abits & bbits if largest else abits | bbits).view(np.float64), result)
    result = np.where(a != a, b, np.where(b != b, a, result))  # fmax treats signalling NaNs as it likes
    return _nan_f64(result, b, a)


def max_f64(a: F64, b: F64) -> F64:
    """max.f64: +0 > -0, a NaN loses to a number (9.7.3.12)."""
    return _extremum_f64(a, b, largest=True)


def min_f64(a: F64, b: F64) -> F64:
    """min.f64: -0 < +0, a NaN loses to a number (9.7.3.11)."""
    return _extremum_f64(a, b, largest=False)


# --------------------------------------------------------------------------------------------------------- 16-bit arithmetic


def f16_to_f32(x: U16) -> F32:
    """cvt.f32.f16, exact; NaN becomes canonical (9.7.9.21)."""
    return _canonical(x.view(np.float16).astype(np.float32))


def bf16_to_f32(x: U16) -> F32:
    """cvt.f32.bf16, exact; a NaN keeps its payload (9.7.9.21)."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _widen(x: U16, fmt: str) -> F64:
    if fmt == "f16":
        return x.view(np.float16).astype(np.float64)
    if fmt == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    raise PtxFault(f"16-bit float format {fmt!r} is neither 'f16' nor 'bf16'")


def _narrow_16(x: F64, fmt: str) -> U16:
    """Round an odd-rounded f64 once, to nearest even."""
    if fmt == "f16":
        result: U16 = x.astype(np.float16).view(np.uint16)
        return np.where(x != x, CANONICAL_NAN_16, result)
    single = x.astype(np.float32)
    wide = single.astype(np.float64)
    bits = single.view(np.int32)
    # To odd again, so that the second rounding stays harmless; an overflow to infinity is final.
    inexact = (wide != x) & np.isfinite(single) & ((bits & 1) == 0)
    step = np.where((np.abs(wide) < np.abs(x)), 1, -1)
    return f32_to_bf16((bits + np.where(inexact, step, 0).astype(np.int32)).view(np.float32))


def add_16(a: U16, b: U16, fmt: str) -> U16:
    """add{.rn}.f16/.bf16, and their x2 forms through a uint16 view (9.7.4.1)."""
    return _narrow_16(_odd_sum(_widen(a, fmt), _widen(b, fmt)), fmt)


def sub_16(a: U16, b: U16, fmt: str) -> U16:
    """sub{.rn}.f16/.bf16 (9.7.4.2)."""
    return _narrow_16(_odd_sum(_widen(a, fmt), -_widen(b, fmt)), fmt)


def mul_16(a: U16, b: U16, fmt: str) -> U16:
    """mul{.rn}.f16/.bf16 (9.7.4.3)."""
    return _narrow_16(_widen(a, fmt) * _widen(b, fmt), fmt)


def fma_16(a: U16, b: U16, c: U16, fmt: str, relu: bool = False) -> U16:
    """fma.rn{.relu}.f16/.bf16, rounded once; .relu clamps negative results to +0 and NaN to the canonical NaN (9.7.4.4)."""
    result = _narrow_16(_odd_sum(_widen(a, fmt) * _widen(b, fmt), _widen(c, fmt)), fmt)
    return _relu_16(result) if relu else result


def _relu_16(bits: U16) -> U16:
    return np.where(bits & np.uint16(0x8000), np.uint16(0), bits)


def _extremum_16(a: U16, b: U16, fmt: str, nan: bool, largest: bool) -> U16:
    infinity = np.uint16(0x7C00 if fmt == "f16" else 0x7F80)
    magnitude = np.uint16(0x7FFF)
    ka, kb = ((x.view(np.int16) ^ (x.view(np.int16) >> 15 & np.int16(0x7FFF))) for x in (a, b))  # orders as the values do, -0 < +0
    result = np.where((ka >= kb) if largest else (ka <= kb), a, b)
    a_nan, b_nan = (a & magnitude) > infinity, (b & magnitude) > infinity
    if nan:
        return np.where(a_nan | b_nan, CANONICAL_NAN_16, result)
    result = np.where(a_nan, b, np.where(b_nan, a, result))
    return np.where(a_nan & b_nan, CANONICAL_NAN_16, result)


def max_16(a: U16, b: U16, fmt: str, nan: bool = False) -> U16:
    """max{.NaN}.f16/.bf16 (9.7.4.8)."""
    return _extremum_16(a, b, fmt, nan, largest=True)


def min_16(a: U16, b: U16, fmt: str, nan: bool = False) -> U16:
    """min{.NaN}.f16/.bf16 (9.7.4.7)."""
    return _extremum_16(a, b, fmt, nan, largest=False)


def _canonical_16(x: U16, fmt: str | None) -> U16:
    if fmt is None:
        return x
    return np.where((x & np.uint16(0x7FFF)) > np.uint16(0x7C00 if fmt == "f16" else 0x7F80), CANONICAL_NAN_16, x)


def abs_16(x: U16, fmt: str | None = None) -> U16:
    """abs.f16/.bf16: clears the sign bit; NaN becomes canonical, or keeps its payload when no format is given (9.7.4.6)."""
    return _canonical_16(x & np.uint16(0x7FFF), fmt)


def neg_16(x: U16, fmt: str | None = None) -> U16:
    """neg.f16/.bf16: flips the sign bit; NaN becomes canonical, or keeps its payload when no format is given (9.7.4.5)."""
    return _canonical_16(x ^ np.uint16(0x8000), fmt)


# ---------------------------------------------------------------------------------------------------------------- conversions


def f32_to_bf16(x: F32, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> U16:
    """cvt.{rn,rz}{.satfinite}{.relu}.bf16.f32 (9.7.9.21)."""
    bits = x.view(np.uint32)
    if rounding == "rn":
        result = ((bits + _HALF_BF16 + (bits >> _SIXTEEN & _ONE_BIT)) >> _SIXTEEN).astype(np.uint16)
    elif rounding == "rz":
        result = (bits >> np.uint32(16)).astype(np.uint16)
    else:
        raise PtxFault(f"cvt to bf16 rounds rn or rz, not {rounding!r}")
    return _finish_16(x, result, 0x7F7F, 0x7F80, relu, satfinite)


def f32_to_f16(x: F32, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> U16:
    """cvt.{rn,rz,rm,rp}{.satfinite}{.relu}.f16.f32 (9.7.9.21)."""
    _check_rounding(rounding)
    nearest = x.astype(np.float16)
    result: U16 = nearest.view(np.uint16)
    if rounding != "rn":
        difference = nearest.astype(np.float64) - x
        negative = result >= 0x8000
        if rounding == "rz":
            result = result - np.where(negative, difference < 0, difference > 0).astype(np.uint16)
        else:
            wrong = difference > 0 if rounding == "rm" else difference < 0
            grows = negative if rounding == "rm" else ~negative
            result = (result.astype(np.int32) + np.where(wrong, np.where(grows, 1, -1), 0)).astype(np.uint16)
    return _finish_16(x, result, 0x7BFF, 0x7C00, relu, satfinite)


def _finish_16(x: F32, bits: U16, largest: int, infinity: int, relu: bool, satfinite: bool) -> U16:
    if satfinite:
        over = (bits & np.uint16(0x7FFF)) >= infinity
        bits = np.where(over, (bits & np.uint16(0x8000)) | np.uint16(largest), bits)
    nan = x != x
    if some(nan):
        bits = np.where(nan, CANONICAL_NAN_16, bits)
    return _relu_16(bits) if relu else bits


def f32_to_tf32(x: F32, rounding: str = "rna", relu: bool = False) -> U32:
    """cvt.{rna,rn,rz}{.relu}.tf32.f32: 10 mantissa bits, the low 13 bits zero (9.7.9.21).

    NaN gives 0x7fffe000, except with rna, which truncates it as an H200 does (0x7f800001 becomes an infinity).
    """
    bits = x.view(np.uint32)
    if rounding == "rna":
        rounded = bits + np.uint32(0x1000)
    elif rounding == "rn":
        rounded = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    elif rounding == "rz":
        rounded = bits
    else:
        raise PtxFault(f"cvt to tf32 rounds rna, rn or rz, not {rounding!r}")
    kept = np.uint32(0xFFFFE000)
    result = np.where(np.isfinite(x), rounded, bits) & kept
    if relu:
        result = np.where(result & _SIGN, np.uint32(0), result)
    return result if rounding == "rna" else np.where(x != x, CANONICAL_NAN_F32 & kept, result)


_F8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def f32_to_f8(x: F32, fmt: str, relu: bool = False) -> U8:
    """cvt.rn.satfinite{.relu}.e4m3x2/.e5m2x2.f32, one element each (9.7.9.21). Overflow and infinities become the largest finite value."""
    dtype, largest = _F8[fmt]
    bits: U8 = np.clip(x, np.float32(-largest), np.float32(largest)).astype(dtype).view(np.uint8)
    if relu:
        bits = np.where(bits & np.uint8(0x80), np.uint8(0), bits)
    return np.where(x != x, CANONICAL_NAN_8, bits)


def f8_to_f16(x: U8, fmt: str, relu: bool = False) -> U16:
    """cvt.rn{.relu}.f16x2.e4m3x2/.e5m2x2, one element each, exact (9.7.9.21)."""
    wide = x.view(_F8[fmt][0]).astype(np.float32)
    return f32_to_f16(wide, "rn", relu)


_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_to_integral_f32(x: F32, rounding: str, ftz: bool = False, sat: bool = False) -> F32:
    """cvt.{rni,rzi,rmi,rpi}{.ftz}{.sat}.f32.f32 (9.7.9.21)."""
    return _finish(_INTEGRAL[rounding](flush_f32(x) if ftz else x), ftz, sat)


def float_to_int(x: F32 | F64, dtype: Any, rounding: str, ftz: bool = False) -> NDArray[Any]:
    """cvt.{rni,rzi,rmi,rpi}{.ftz}.<integer>.{f32,f64}: saturates to the integer's range (9.7.9.21).

    NaN gives 0, except that f64 sources and 64-bit destinations give the pattern with only the top bit set.
    """
    info = np.iinfo(dtype)
    wide_nan = x.dtype == np.float64 or info.bits == 64
    if ftz and x.dtype == np.float32:
        x = flush_f32(x)  # type: ignore[arg-type]
    value = _INTEGRAL[rounding](x.astype(np.float64))
    above, below, nan = value >= 2.0 ** (info.bits - (info.min < 0)), value < info.min, value != value
    safe = np.where(above | below | nan, 0.0, value)
    result = safe.astype(dtype)
    result = np.where(above, np.array(info.max, dtype), np.where(below, np.array(info.min, dtype), result))
    nan_value = np.array(1 << (info.bits - 1), np.uint64).astype(dtype) if wide_nan else np.array(0, dtype)
    return np.where(nan, nan_value, result)


def int_to_f32(x: NDArray[Any], rounding: str = "rn") -> F32:
    """cvt.rnd.f32.<integer>, one rounding from any signed or unsigned width (9.7.9.21)."""
    _check_rounding(rounding)
    if rounding == "rn":
        return x.astype(np.float32)
    return _sum_f32(*_split_integer(x), rounding) + np.float32(0)


def int_to_f64(x: NDArray[Any], rounding: str = "rn") -> F64:
    """cvt.rnd.f64.<integer> (9.7.9.21)."""
    result = x.astype(np.float64)
    return result if rounding == "rn" else add_f64(*_split_integer(x), rounding) + 0.0


def _split_integer(x: NDArray[Any]) -> tuple[F64, F64]:
    """An integer as the exact sum of two f64."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64), np.zeros(x.shape)
    return (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)


def f64_to_f32(x: F64, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """cvt.rnd{.ftz}{.sat}.f32.f64; a NaN keeps its sign and leading payload bits (9.7.9.21)."""
    _check_rounding(rounding)
    result = _narrow_f32(x, rounding)
    if ftz:
        result = _flush_tiny(result, lambda: _narrow_f32(x * _SCALE, rounding))
    if sat:
        return saturate_f32(result)
    nan = x != x
    if nan.any():
        bits = x.view(np.uint64)
        kept = (bits >> np.uint64(32) & np.uint64(0x80000000)) | (bits >> np.uint64(29) & np.uint64(0x3FFFFF)) | np.uint64(0x7FC00000)
        result = np.where(nan, kept.astype(np.uint32).view(np.float32), result)
    return result


def f32_to_f64(x: F32, ftz: bool = False) -> F64:
    """cvt{.ftz}.f64.f32, exact; a NaN keeps its payload and becomes quiet (9.7.9.21)."""
    result = (flush_f32(x) if ftz else x).astype(np.float64)
    nan = x != x
    if nan.any():
        bits = x.view(np.uint32).astype(np.uint64)
        kept = (bits & np.uint64(0x80000000)) << np.uint64(32) | (bits & np.uint64(0x3FFFFF)) << np.uint64(29)
        result = np.where(nan, (kept | np.uint64(0x7FF8000000000000)).view(np.float64), result)
    return result


# -------------------------------------------------------------------------------------------------- approximate functions: exact


_FRACTION = np.int32(0x7FFFFF)
_ONE = np.int32(0x3F800000)


@lru_cache(maxsize=2)
def _table(name: str) -> NDArray[np.int32]:
    """int32 [2^23]: f32 bit patterns of MUFU.`name` on an H200 for a 23-bit fraction f, EX2 as 2^f, RCP as 1 / (1 + f).

    Both are monotonic, so the file holds the magnitude of each step from one entry to the next, as uint8; both start at 1.0.
    """
    with resources.files(__package__).joinpath(f"h200_{name}.npz").open("rb") as file, np.load(file) as archive:
        steps = archive["step"]
    table = np.empty(1 << 23, dtype=np.int32)
    table[0] = 0
    np.cumsum(steps, dtype=np.int32, out=table[1:])
    table = _ONE - table if name == "rcp" else _ONE + table
    table.setflags(write=False)
    return table


def _ex2_ftz(x: F32) -> F32:
    """MUFU.EX2, the rule measured over all 2^32 inputs of an H200 (compute capability 9.0, driver 580.159.04).

    |x| is truncated to 23 fraction bits. A negative x is then negated by one's complement, unless the fraction is zero: integers stay
    exact. The integer part becomes the exponent, the fraction indexes a table of 2^f. Subnormal results are flushed.
    """
    # Outside [-127, 128] the result is that of the bound: 0 or infinity.
    bounded = np.minimum(np.maximum(x, np.float32(-127)), np.float32(128))
    fixed = (bounded * np.float32(2.0**23)).astype(np.int32)
    fraction = fixed & _FRACTION
    index = fraction - ((fraction != 0) & (fixed < 0))
    bits = _table("ex2")[index] + (fixed - fraction)
    bits *= bits >= np.int32(0x00800000)  # flush
    return _propagate(bits.view(np.float32), x)


def _rcp_ftz(x: F32) -> F32:
    """MUFU.RCP, the rule measured over all 2^32 inputs of an H200: the mantissa from a table, the exponent exact.

    Subnormal inputs count as zeros, subnormal results are flushed to zeros of their sign.
    """
    bits = x.view(np.int32)
    exponent = bits & np.int32(0x7F800000)
    result = _table("rcp")[bits & _FRACTION] + (_ONE - exponent)
    result *= result >= np.int32(0x00800000)  # flush
    if not every(exponent):
        result = np.where(exponent == 0, np.int32(0x7F800000), result)
    return _propagate((result | (bits & np.int32(-0x80000000))).view(np.float32), x)


def _propagate(result: F32, x: F32) -> F32:
    """result, NaN where x is."""
    return np.where(x != x, _NAN_F32, result) if _has_nan(x) else result


def ex2_approx(x: F32, ftz: bool) -> F32:
    """ex2.approx{.ftz}.f32, bit for bit an H200 (9.7.3.21).

    Without .ftz an input below -126 is halved and the result squared, as ptxas expands it, so that subnormal results appear.
    """
    if ftz:
        return _ex2_ftz(x)
    low = x < np.float32(-126)
    if not low.any():
        return _ex2_ftz(x)
    root = _ex2_ftz(np.where(low, x * np.float32(0.5), x))
    return np.where(low, root * root, root)


def rcp_approx(x: F32, ftz: bool) -> F32:
    """rcp.approx{.ftz}.f32, bit for bit an H200 (9.7.3.13).

    Without .ftz inputs below 2^-126 are scaled by 2^24 and inputs above 2^126 by 1/4, and the result again, as ptxas expands it.
    """
    if ftz:
        return _rcp_ftz(x)
    magnitude = np.abs(x)
    scale = np.where(magnitude < _MIN_NORMAL, np.float32(2.0**24), np.float32(1))
    scale = np.where(magnitude > np.float32(2.0**126), np.float32(0.25), scale)
    return _canonical(scale * _rcp_ftz(x * scale))


def div_approx(a: F32, b: F32, ftz: bool = False) -> F32:
    """div.approx{.ftz}.f32, bit for bit an H200: a * rcp.approx.ftz(b) (9.7.3.8).

    Without .ftz both operands are scaled by 2^24 where b is subnormal, as ptxas expands it; |b| > 2^126 gives a zero either way.
    """
    if not ftz:
        scale = np.where(np.abs(b) < _MIN_NORMAL, np.float32(2.0**24), np.float32(1))
        a, b = a * scale, b * scale
    return mul_f32(a, _rcp_ftz(b), "rn", ftz)


def div_full(a: F32, b: F32, ftz: bool = False) -> F32:
    """div.full{.ftz}.f32, bit for bit an H200: div.approx with both operands scaled by 1/4 where |b| > 2^126 (9.7.3.8)."""
    scale = np.where(np.abs(b) > np.float32(2.0**126), np.float32(0.25), np.float32(1))
    return div_approx(mul_f32(a, scale, "rn", ftz), mul_f32(b, scale, "rn", ftz), ftz)


def ex2_approx_16(x: U16, fmt: str) -> U16:
    """ex2.approx.f16, ex2.approx.ftz.bf16 and their x2 forms, bit for bit an H200: ex2.approx.f32 truncated (9.7.4.10).

    Measured over all 65,536 inputs of each. f16 results from 2^16 on become infinity.
    """
    wide = ex2_approx(_canonical(_widen(x, fmt).astype(np.float32)), ftz=True)
    if fmt == "bf16":
        return f32_to_bf16(wide, "rz")
    return np.where(wide >= np.float32(65536), np.uint16(0x7C00), f32_to_f16(wide, "rz"))


# ---------------------------------------------------------------------------------------------- approximate functions: accuracy only


def _approximate(function: Any, x: F32, ftz: bool) -> F32:
    if ftz:
        x = flush_f32(x)
    return _finish(function(x.astype(np.float64)).astype(np.float32), ftz, False)


def lg2_approx(x: F32, ftz: bool = False) -> F32:
    """lg2.approx{.ftz}.f32: the correctly rounded log2, not bit-exact (ISA: 2^-22 absolute in (0.5, 2), relative elsewhere; 9.7.3.20)."""
    return _approximate(np.log2, x, ftz)


def rsqrt_approx(x: F32, ftz: bool = False) -> F32:
    """rsqrt.approx{.ftz}.f32: correctly rounded, not bit-exact (ISA: 2^-22.9 relative; 9.7.3.17)."""
    return _approximate(lambda v: 1.0 / np.sqrt(v), x, ftz)


def sqrt_approx(x: F32, ftz: bool = False) -> F32:
    """sqrt.approx{.ftz}.f32: correctly rounded, not bit-exact (ISA: 2^-23 relative; 9.7.3.15)."""
    return _approximate(np.sqrt, x, ftz)


def sin_approx(x: F32, ftz: bool = False) -> F32:
    """sin.approx{.ftz}.f32: correctly rounded, not bit-exact (ISA: 2^-20.5 absolute in [-pi, pi]; 9.7.3.18)."""
    return _approximate(np.sin, x, ftz)


def cos_approx(x: F32, ftz: bool = False) -> F32:
    """cos.approx{.ftz}.f32: correctly rounded, not bit-exact (ISA: 2^-20.5 absolute in [-pi, pi]; 9.7.3.19)."""
    return _approximate(np.cos, x, ftz)


def tanh_approx(x: F32) -> F32:
    """tanh.approx.f32: correctly rounded, not bit-exact (ISA: 2^-11 relative; 9.7.3.22)."""
    return _approximate(np.tanh, x, False)


def tanh_approx_16(x: U16, fmt: str) -> U16:
    """tanh.approx.f16/.bf16 and their x2 forms, correctly rounded; not bit-exact (9.7.4.9)."""
    return _narrow_16(np.tanh(_widen(x, fmt)), fmt)
