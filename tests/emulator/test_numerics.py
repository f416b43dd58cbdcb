"""PTX arithmetic against exact integer arithmetic and against results stored from an H200 (data/h200_numerics.npz)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import inf, isfinite, ldexp, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4gen.codegen.emulator import numerics as N

H200 = Path(__file__).parents[1] / "data" / "h200_numerics.npz"
ROUNDINGS = ("rn", "rz", "rm", "rp")
# format -> (bits of the significand, exponent of the smallest subnormal, largest finite value)
FORMATS = {
    "f32": (24, -149, ldexp(2**24 - 1, 104)),
    "f16": (11, -24, 65504.0),
    "bf16": (8, -133, ldexp(255, 120)),
    "f64": (53, -1074, sys.float_info.max),
    "e4m3": (4, -9, 448.0),
    "e5m2": (3, -16, 57344.0),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def round_exact(value: Fraction, fmt: str, rounding: str) -> float:
    """value (not zero) rounded once to a format, as a Python float."""
    bits, least, largest = FORMATS[fmt]
    sign, magnitude = (-1 if value < 0 else 1), abs(value)
    down = {"rz": True, "rm": sign > 0, "rp": sign < 0}.get(rounding)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = max(exponent - bits + 1, least)
    scaled = magnitude / Fraction(2) ** unit
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if down is None:
        whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    elif not down:
        whole += rest > 0
    if Fraction(whole) * Fraction(2) ** unit > Fraction(largest):
        return sign * (largest if down else inf)
    return sign * ldexp(whole, unit)


def raw(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random f32 bit patterns."""
    return np.frombuffer(rng.bytes(4 * count), dtype=np.float32).copy()


def middling(rng: np.random.Generator, count: int, low: int = 96, high: int = 160) -> np.ndarray:
    """Random f32 whose biased exponents are in [low, high)."""
    bits = np.frombuffer(rng.bytes(4 * count), dtype=np.uint32) & np.uint32(0x807FFFFF)
    return (bits | rng.integers(low, high, count).astype(np.uint32) << np.uint32(23)).view(np.float32)


EDGES = np.array(
    [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x4B800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], np.uint32
)
EDGES = np.concatenate([EDGES, EDGES | np.uint32(0x80000000)]).view(np.float32)


def triples(count: int = 10_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands of a * b + c: random ones, near cancellations, ties, subnormal results, edges."""
    rng = np.random.default_rng(7)
    a, b, c = (np.concatenate([raw(rng, count), middling(rng, count)]) for _ in range(3))
    a2, b2 = middling(rng, count), middling(rng, count)
    near = -(a2 * b2) * rng.choice(np.array([1, 1 + 2**-23, 1 - 2**-24, 2.0**24, 2.0**-24, 2.0**-40, -(2.0**25)], np.float32), count)
    small_a, small_b = middling(rng, count, 58, 70), middling(rng, count, 46, 60)  # products around 2^-149 .. 2^-126
    ulps = rng.integers(0, 50, count).astype(np.uint32).view(np.float32)
    # Products a hair beside a midpoint: (1 + 2^-12)^2 scaled, against a c that makes the tie.
    tie_a, tie_b = np.full(count, 1 + 2.0**-12, np.float32), np.full(count, 1 + 2.0**-12, np.float32)
    tie_c = np.ldexp(rng.choice(np.array([1.0, 3, 5, -1, -3]), count), rng.integers(-50, 30, count)).astype(np.float32)
    ea, eb, ec = (x.ravel() for x in np.meshgrid(EDGES, EDGES, EDGES[::3]))
    return (
        np.concatenate([a, a2, small_a, tie_a, ea]),
        np.concatenate([b, b2, small_b, tie_b, eb]),
        np.concatenate([c, near.astype(np.float32), ulps, tie_c, ec]),
    )


def assert_exact(got: np.ndarray, exact: Callable[..., Fraction | None], fmt: str, rounding: str, *operands: np.ndarray) -> None:
    """got equals the operation over Fractions, rounded once, wherever every operand is finite and the exact result not zero."""
    checked = 0
    for result, *values in zip(got.astype(np.float64).tolist(), *(x.astype(np.float64).tolist() for x in operands), strict=True):
        if not all(map(isfinite, values)):
            continue
        value = exact(*map(Fraction, values))
        if value:
            want = round_exact(value, fmt, rounding)
            assert result == want, (fmt, rounding, [v.hex() for v in values], result.hex(), want.hex())
            checked += 1
    assert checked > len(got) // 3


# ------------------------------------------------------------------------------------------------------- exact rounding


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_f32_arithmetic_is_rounded_once(rounding: str) -> None:
    a, b, c = triples()
    assert_exact(N.fma_f32(a, b, c, rounding), lambda x, y, z: x * y + z, "f32", rounding, a, b, c)
    part = slice(None, None, 3)
    a, b = a[part], b[part]
    assert_exact(N.add_f32(a, b, rounding), lambda x, y: x + y, "f32", rounding, a, b)
    assert_exact(N.sub_f32(a, b, rounding), lambda x, y: x - y, "f32", rounding, a, b)
    assert_exact(N.mul_f32(a, b, rounding), lambda x, y: x * y, "f32", rounding, a, b)
    assert_exact(N.div_f32(a, b, rounding), lambda x, y: x / y if y else None, "f32", rounding, a, b)
    assert_exact(N.rcp_f32(a, rounding), lambda x: 1 / x if x else None, "f32", rounding, a)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_sqrt_brackets_the_exact_root(rounding: str) -> None:
    rng = np.random.default_rng(3)
    x = np.abs(np.concatenate([raw(rng, 4000), middling(rng, 2000), (np.arange(1, 500, dtype=np.float32)) ** 2]))
    x = x[np.isfinite(x) & (x > 0)]
    root = N.sqrt_f32(x, rounding)
    below, above = np.nextafter(root, np.float32(-inf)), np.nextafter(root, np.float32(inf))
    for v, r, lo, hi in zip(*(y.tolist() for y in (x, root, below, above)), strict=True):
        exact, r2 = Fraction(v), Fraction(r) ** 2
        if rounding == "rn":
            assert (Fraction(lo) + Fraction(r)) ** 2 <= 4 * exact <= (Fraction(r) + Fraction(hi)) ** 2
        elif rounding == "rp":
            assert Fraction(lo) ** 2 < exact <= r2
        else:
            assert r2 <= exact < Fraction(hi) ** 2


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_half_arithmetic_is_rounded_once(fmt: str) -> None:
    rng = np.random.default_rng(11)
    widen = N.f16_to_f32 if fmt == "f16" else N.bf16_to_f32

    def operand(count: int = 3000) -> np.ndarray:
        bits = np.frombuffer(rng.bytes(2 * count), np.uint16)
        mild = bits & np.uint16(0x83FF if fmt == "f16" else 0x807F)
        exponent = rng.integers(*((5, 25) if fmt == "f16" else (55, 140)), count).astype(np.uint16)
        return np.concatenate([bits, mild | exponent << np.uint16(10 if fmt == "f16" else 7)])

    a, b, c = operand(), operand(), operand()
    wa, wb, wc = widen(a), widen(b), widen(c)
    assert_exact(widen(N.fma_16(a, b, c, fmt)), lambda x, y, z: x * y + z, fmt, "rn", wa, wb, wc)
    assert_exact(widen(N.add_16(a, b, fmt)), lambda x, y: x + y, fmt, "rn", wa, wb)
    assert_exact(widen(N.sub_16(a, b, fmt)), lambda x, y: x - y, fmt, "rn", wa, wb)
    assert_exact(widen(N.mul_16(a, b, fmt)), lambda x, y: x * y, fmt, "rn", wa, wb)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_f64_arithmetic_is_rounded_once(rounding: str) -> None:
    rng = np.random.default_rng(5)
    a, b, c = (np.concatenate([np.frombuffer(rng.bytes(8 * 300)), rng.standard_normal(700)]) for _ in range(3))
    c[600:] = -(a * b)[600:]
    assert_exact(N.fma_f64(a, b, c, rounding), lambda x, y, z: x * y + z, "f64", rounding, a, b, c)
    assert_exact(N.add_f64(a, b, rounding), lambda x, y: x + y, "f64", rounding, a, b)
    assert_exact(N.mul_f64(a, b, rounding), lambda x, y: x * y, "f64", rounding, a, b)
    assert_exact(N.div_f64(a, b, rounding), lambda x, y: x / y if y else None, "f64", rounding, a, b)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_narrowing_conversions_are_rounded_once(rounding: str) -> None:
    rng = np.random.default_rng(13)
    x = np.concatenate([raw(rng, 3000), middling(rng, 4000, 100, 145), EDGES])
    f16 = N.f16_to_f32(N.f32_to_f16(x, rounding))
    assert_exact(f16, lambda v: v, "f16", rounding, x)
    if rounding in ("rn", "rz"):
        assert_exact(N.bf16_to_f32(N.f32_to_bf16(x, rounding)), lambda v: v, "bf16", rounding, x)
    wide = np.concatenate([np.frombuffer(rng.bytes(8 * 500)), x[:4000] * (1 + rng.random(4000) * 2.0**-22)])
    assert_exact(N.f64_to_f32(wide, rounding), lambda v: v, "f32", rounding, wide)
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        integers = np.frombuffer(rng.bytes(8 * 1000), dtype=dtype)
        integers = integers >> rng.integers(0, 8 * integers.itemsize - 1, integers.size).astype(dtype)
        got = N.int_to_f32(integers, rounding).astype(np.float64).tolist()
        wide_got = N.int_to_f64(integers, rounding).tolist()
        for value, single, double in zip(integers.tolist(), got, wide_got, strict=True):
            if value:
                assert single == round_exact(Fraction(value), "f32", rounding)
                assert double == round_exact(Fraction(value), "f64", rounding)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8_conversion_rounds_once_and_saturates(fmt: str) -> None:
    rng = np.random.default_rng(17)
    ties = np.ldexp(rng.integers(-255, 256, 3000), rng.integers(-16, 10, 3000)).astype(np.float32)
    x = np.concatenate([middling(rng, 5000, 108, 146), ties])
    got = N.f16_to_f32(N.f8_to_f16(N.f32_to_f8(x, fmt), fmt))
    largest = FORMATS[fmt][2]
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        if value:
            want = round_exact(Fraction(value), fmt, "rn")
            assert result == max(-largest, min(largest, want)), (value, result, want)
    special = np.array([inf, -inf, nan, -0.0], np.float32)
    assert N.f32_to_f8(special, fmt).tolist() == [*{"e4m3": (0x7E, 0xFE), "e5m2": (0x7B, 0xFB)}[fmt], 0x7F, 0x80]


def test_float_to_int_rounds_saturates_and_maps_nan() -> None:
    x = np.array([0.5, 1.5, -0.5, -1.5, 2.7, -2.7, 3e9, -3e9, 1e20, -1e20, inf, -inf, nan], np.float32)
    assert N.float_to_int(x, np.int32, "rni").tolist() == [0, 2, 0, -2, 3, -3, *[2**31 - 1, -(2**31)] * 3, 0]
    assert N.float_to_int(x, np.int32, "rzi").tolist()[:6] == [0, 1, 0, -1, 2, -2]
    assert N.float_to_int(x, np.int32, "rmi").tolist()[:6] == [0, 1, -1, -2, 2, -3]
    assert N.float_to_int(x, np.int32, "rpi").tolist()[:6] == [1, 2, 0, -1, 3, -2]
    assert N.float_to_int(x, np.uint32, "rzi").tolist() == [0, 1, 0, 0, 2, 0, 3000000000, 0, 2**32 - 1, 0, 2**32 - 1, 0, 0]
    assert N.float_to_int(x, np.int64, "rzi").tolist()[-5:] == [2**63 - 1, -(2**63), 2**63 - 1, -(2**63), -(2**63)]
    assert N.float_to_int(x, np.uint64, "rzi").tolist()[-5:] == [2**64 - 1, 0, 2**64 - 1, 0, 2**63]
    assert N.float_to_int(x.astype(np.float64), np.int32, "rzi").tolist()[-1] == -(2**31)


def test_signed_zeros_of_exact_sums() -> None:
    zero, one = np.zeros(4, np.float32), np.array([1.0, -0.0, 0.0, -0.0], np.float32)
    other = np.array([-1.0, 0.0, 0.0, -0.0], np.float32)
    for rounding in ROUNDINGS:
        negative = [rounding == "rm", rounding == "rm", False, True]
        assert np.signbit(N.add_f32(one, other, rounding)).tolist() == negative
        assert np.signbit(N.fma_f32(one, zero + 1, other, rounding)).tolist() == negative
        assert np.signbit(N.add_f64(one.astype(np.float64), other.astype(np.float64), rounding)).tolist() == negative
        assert np.signbit(N.fma_f64(one.astype(np.float64), np.ones(4), other.astype(np.float64), rounding)).tolist() == negative


def test_max_min_follow_the_nan_and_zero_rules() -> None:
    a = np.array([0.0, -0.0, nan, 1.0, nan, -inf, 0.0, -5.0], np.float32)
    b = np.array([-0.0, 0.0, 1.0, nan, nan, inf, -5.0, -0.0], np.float32)
    assert N.max_f32(a, b).view(np.uint32).tolist() == [0, 0, 0x3F800000, 0x3F800000, 0x7FFFFFFF, 0x7F800000, 0, 0x80000000]
    low = [0x80000000, 0x80000000, 0x3F800000, 0x3F800000, 0x7FFFFFFF, 0xFF800000, 0xC0A00000, 0xC0A00000]
    assert N.min_f32(a, b).view(np.uint32).tolist() == low
    assert N.max_f32(a, b, nan=True).view(np.uint32).tolist()[2:5] == [0x7FFFFFFF] * 3
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    for count in (1, 32):  # numpy's own fmax differs between the two
        many, number = np.repeat(signalling, count), np.full(count, -0.0, np.float32)
        for result in (N.max_f32(many, number), N.max_f32(number, many), N.min_f32(many, number)):
            assert (result.view(np.uint32) == 0x80000000).all()
        assert (N.max_f32(many, many).view(np.uint32) == 0x7FFFFFFF).all()
    subnormal = np.array([1, 0x80000001], np.uint32).view(np.float32)
    assert N.max_f32(subnormal, subnormal, ftz=True).view(np.uint32).tolist() == [0, 0x80000000]


def test_sign_operations_on_halves() -> None:
    x = np.array([0x3C00, 0x8000, 0xFC00, 0x7C01, 0xFF81], np.uint16)
    assert N.neg_16(x, "f16").tolist() == [0xBC00, 0, 0x7C00, 0x7FFF, 0x7FFF]
    assert N.abs_16(x, "bf16").tolist() == [0x3C00, 0, 0x7C00, 0x7C01, 0x7FFF]
    assert N.neg_16(x).tolist() == [0xBC00, 0, 0x7C00, 0xFC01, 0x7F81]


def test_saturation() -> None:
    x = np.array([-1.0, -0.0, 0.25, 1.5, inf, -inf, nan], np.float32)
    assert N.saturate_f32(x).view(np.uint32).tolist() == np.array([0, 0, 0.25, 1, 1, 0, 0], np.float32).view(np.uint32).tolist()


def test_bad_modes_are_refused() -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="rounding 'up'"):
        N.fma_f32(x, x, x, "up")
    with pytest.raises(ValueError, match="'tf32'"):
        N.add_16(x.view(np.uint16), x.view(np.uint16), "tf32")
    with pytest.raises(ValueError, match="rm"):
        N.f32_to_bf16(x, "rm")


# --------------------------------------------------------------------------------------------- stored results of an H200


def _cases() -> dict[str, Callable[..., np.ndarray]]:
    cases: dict[str, Callable[..., Any]] = {
        "u_rcp_rz": lambda x: N.rcp_f32(x, "rz"),
        "u_sqrt_rp": lambda x: N.sqrt_f32(x, "rp"),
        "u_tf32_rna": lambda x: N.f32_to_tf32(x, "rna"),
        "u_tf32_rn": lambda x: N.f32_to_tf32(x, "rn"),
        "u_tf32_rz_relu": lambda x: N.f32_to_tf32(x, "rz", relu=True),
        "u_rzi_s16": lambda x: N.float_to_int(x, np.int16, "rzi"),
        "u_rni_ftz_s32": lambda x: N.float_to_int(x, np.int32, "rni", ftz=True),
        "u_f64": N.f32_to_f64,
        "u_sat": N.saturate_f32,
        "u_ftz_sat": lambda x: N.saturate_f32(N.flush_f32(x)),
        "t_fma_rn_sat": lambda a, b, c: N.fma_f32(a, b, c, sat=True),
        "t_fma_rn_ftz_sat": lambda a, b, c: N.fma_f32(a, b, c, ftz=True, sat=True),
        "b_mul_rn_sat": lambda a, b: N.mul_f32(a, b, sat=True),
        "b_add_rn_sat": lambda a, b: N.add_f32(a, b, sat=True),
        "b_div_rn_ftz": lambda a, b: N.div_f32(a, b, ftz=True),
        "b_div_approx": N.div_approx,
        "b_div_approx_ftz": lambda a, b: N.div_approx(a, b, True),
        "b_div_full": N.div_full,
        "h_f16_f32": N.f16_to_f32,
        "h_bf16_f32": N.bf16_to_f32,
        "y_add": N.add_f64,
        "y_mul": N.mul_f64,
        "y_div": N.div_f64,
        "y_max": N.max_f64,
        "x_fma_rn": N.fma_f64,
        "x_fma_rz": lambda a, b, c: N.fma_f64(a, b, c, "rz"),
    }
    for ftz in (False, True):
        q = "_ftz" if ftz else ""
        cases |= {
            "w_ex2_approx" + q: lambda x, ftz=ftz: N.ex2_approx(x, ftz),
            "w_rcp_approx" + q: lambda x, ftz=ftz: N.rcp_approx(x, ftz),
            "u_sqrt_rn" + q: lambda x, ftz=ftz: N.sqrt_f32(x, "rn", ftz),
            "u_rcp_rn" + q: lambda x, ftz=ftz: N.rcp_f32(x, "rn", ftz),
            "u_abs" + q: lambda x, ftz=ftz: N.abs_f32(x, ftz),
            "u_neg" + q: lambda x, ftz=ftz: N.neg_f32(x, ftz),
        }
        for n in ("", "_NaN"):
            cases[f"b_max{q}{n}"] = lambda a, b, ftz=ftz, n=n: N.max_f32(a, b, ftz, bool(n))
            cases[f"b_min{q}{n}"] = lambda a, b, ftz=ftz, n=n: N.min_f32(a, b, ftz, bool(n))
        for r in ROUNDINGS:
            cases[f"b_add_{r}{q}"] = lambda a, b, r=r, ftz=ftz: N.add_f32(a, b, r, ftz)
            cases[f"b_sub_{r}{q}"] = lambda a, b, r=r, ftz=ftz: N.sub_f32(a, b, r, ftz)
            cases[f"b_mul_{r}{q}"] = lambda a, b, r=r, ftz=ftz: N.mul_f32(a, b, r, ftz)
            cases[f"t_fma_{r}{q}"] = lambda a, b, c, r=r, ftz=ftz: N.fma_f32(a, b, c, r, ftz)
    for r in ROUNDINGS:
        cases[f"b_div_{r}"] = lambda a, b, r=r: N.div_f32(a, b, r)
        cases[f"d_{r}_f32"] = lambda x, r=r: N.f64_to_f32(x, r)
        cases[f"u_{r}i_f32"] = lambda x, r=r: N.round_to_integral_f32(x, r + "i")
        for name, dtype in (("s32", np.int32), ("u32", np.uint32), ("s64", np.int64), ("u64", np.uint64)):
            cases[f"u_{r}i_{name}"] = lambda x, r=r, dtype=dtype: N.float_to_int(x, dtype, r + "i")
            cases[f"i_{r}_{name}"] = lambda x, r=r, dtype=dtype: N.int_to_f32(x.astype(np.uint64).astype(dtype), r)
    for r in ("rn", "rz"):
        for q in ("", "_relu"):
            cases[f"u_f16_{r}{q}"] = lambda x, r=r, q=q: N.f32_to_f16(x, r, bool(q))
            cases[f"u_bf16_{r}{q}"] = lambda x, r=r, q=q: N.f32_to_bf16(x, r, bool(q))
    for f in ("e4m3", "e5m2"):
        cases[f"u_{f}"] = lambda x, f=f: N.f32_to_f8(x, f).astype(np.uint16)
        cases[f"u_{f}_relu"] = lambda x, f=f: N.f32_to_f8(x, f, relu=True).astype(np.uint16)
        cases[f"h_{f}_up"] = lambda x, f=f: N.f8_to_f16(x.view(np.uint8), f)
    for f in ("f16", "bf16"):
        cases |= {
            f"g_add_{f}x2": lambda a, b, f=f: N.add_16(a, b, f),
            f"g_sub_{f}x2": lambda a, b, f=f: N.sub_16(a, b, f),
            f"g_mul_{f}x2": lambda a, b, f=f: N.mul_16(a, b, f),
            f"k_fma_{f}x2": lambda a, b, c, f=f: N.fma_16(a, b, c, f),
            f"k_fma_relu_{f}x2": lambda a, b, c, f=f: N.fma_16(a, b, c, f, relu=True),
            f"h_neg_{f}": lambda x, f=f: N.neg_16(x, f),
            f"h_abs_{f}": lambda x, f=f: N.abs_16(x, f),
        }
        for n in ("", "_NaN"):
            cases[f"g_max{n}_{f}x2"] = lambda a, b, f=f, n=n: N.max_16(a, b, f, bool(n))
            cases[f"g_min{n}_{f}x2"] = lambda a, b, f=f, n=n: N.min_16(a, b, f, bool(n))
    return cases


CASES = _cases()
# set of inputs -> how their bits are read
VIEWS = dict.fromkeys("uwbt", np.float32) | dict.fromkeys("ghk", np.uint16) | dict.fromkeys("dxy", np.float64) | {"i": np.uint64}
APPROXIMATE = {"u_lg2_approx", "u_rsqrt_approx", "u_sqrt_approx", "u_sin", "u_cos", "u_tanh"}


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(H200) as archive:
        return dict(archive)


def _inputs(stored: dict[str, np.ndarray], kind: str) -> list[np.ndarray]:
    names = ["in_x0", "in_x1"] if kind == "y" else [f"in_{kind}{i}" for i in range(3) if f"in_{kind}{i}" in stored]
    return [stored[name].view(VIEWS[kind]) for name in names]


@pytest.mark.parametrize("name", CASES)
def test_matches_an_h200_bit_for_bit(stored: dict[str, np.ndarray], name: str) -> None:
    inputs = _inputs(stored, name[0])
    want = stored[name]
    got = np.ascontiguousarray(CASES[name](*inputs)).view(want.dtype)
    wrong = np.nonzero(got != want)[0]
    assert not wrong.size, [(*(hex(int(x.view(f"u{x.itemsize}")[i])) for x in inputs), hex(got[i]), hex(want[i])) for i in wrong[:4]]


def test_every_stored_result_is_compared(stored: dict[str, np.ndarray]) -> None:
    results = {name for name in stored if not name.startswith("in_")}
    assert results == set(CASES) | APPROXIMATE | {"h_ex2_f16_all", "h_ex2_bf16_all", "source"}


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_ex2_of_every_16_bit_float(stored: dict[str, np.ndarray], fmt: str) -> None:
    want = np.cumsum(stored[f"h_ex2_{fmt}_all"].astype(np.int64)).astype(np.uint16)
    assert (N.ex2_approx_16(np.arange(65536, dtype=np.uint16), fmt) == want).all()


@pytest.mark.parametrize(
    ("name", "function", "low", "high", "bound"),
    [
        ("u_lg2_approx", N.lg2_approx, 0.0, inf, 2.0**-21),
        ("u_rsqrt_approx", N.rsqrt_approx, 2.0**-126, inf, 2.0**-22),
        ("u_sqrt_approx", N.sqrt_approx, 2.0**-126, inf, 2.0**-22),
        ("u_sin", N.sin_approx, -3.14159, 3.14159, 2.0**-20),
        ("u_cos", N.cos_approx, -3.14159, 3.14159, 2.0**-20),
        ("u_tanh", N.tanh_approx, -inf, inf, 2.0**-10),
    ],
)
def test_inexact_functions_stay_within_their_bound(
    stored: dict[str, np.ndarray], name: str, function: Any, low: float, high: float, bound: float
) -> None:
    (x,) = _inputs(stored, "u")
    got, want = function(x).astype(np.float64), stored[name].view(np.float32).astype(np.float64)
    chosen = (x > low) & (x < high)
    error = np.abs(got - want)[chosen]
    if name not in ("u_sin", "u_cos"):
        error = error / np.maximum(np.abs(want[chosen]), 1.0 if name == "u_lg2_approx" else 2.0**-126)
    assert chosen.sum() > 50
    assert error.max() <= bound
    if name in ("u_lg2_approx", "u_rsqrt_approx", "u_sqrt_approx"):  # outside the domain too: NaN, infinities, zeros
        special = ~(np.isfinite(want) & (want != 0))
        assert np.array_equal(got[special], want[special], equal_nan=True)


# ---------------------------------------------------------------------------------------- ex2 and rcp over whole binades


def _binade(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.uint32).view(np.float32)


def _deltas(got: np.ndarray, exact: np.ndarray) -> dict[int, int]:
    """Counts of (result - correctly rounded result) in ulps."""
    delta = got.view(np.int32).astype(np.int64) - exact.astype(np.float32).view(np.int32)
    values, counts = np.unique(delta, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def test_ex2_errors_are_those_counted_on_an_h200() -> None:
    """The counts come from another measurement than the table; those outside [1, 2) check the rule around the table."""
    x = _binade(0x3F800000, 0x40000000)
    assert _deltas(N.ex2_approx(x, True), np.exp2(x.astype(np.float64))) == {-1: 3_093, 0: 5_125_875, 1: 3_259_640}
    x = _binade(0x3F000000, 0x3F800000)
    assert _deltas(N.ex2_approx(x, True), np.exp2(x.astype(np.float64))) == {-1: 835_145, 0: 5_752_831, 1: 1_800_632}
    x = _binade(0xBF000001, 0xBF800001)
    assert _deltas(N.ex2_approx(x, True), np.exp2(x.astype(np.float64)))[-2] == 58
    x = _binade(0xC1200001, 0xC1A00001)
    assert _deltas(N.ex2_approx(x, True), np.exp2(x.astype(np.float64)))[-2] == 103_116


def test_rcp_errors_are_those_counted_on_an_h200() -> None:
    x = _binade(0x3F800000, 0x40000000)
    assert _deltas(N.rcp_approx(x, True), 1.0 / x.astype(np.float64)) == {-1: 374_723, 0: 7_280_086, 1: 733_799}


floats = st.integers(0, 2**32 - 1).map(lambda bits: np.array([bits], np.uint32).view(np.float32))


@settings(max_examples=300, deadline=None)
@given(x=floats, ftz=st.booleans())
def test_ex2_and_rcp_stay_within_the_documented_error(x: np.ndarray, ftz: bool) -> None:
    value = float(x[0])
    if not isfinite(value):
        return
    with np.errstate(all="ignore"):
        for got, exact in (
            (float(N.ex2_approx(x, ftz)[0]), float(np.exp2(np.float64(value)))),
            (float(N.rcp_approx(x, ftz)[0]), 1 / value if value else inf),
        ):
            if ftz and (abs(exact) < 2.0**-126 or 0 < abs(value) < 2.0**-126):
                continue
            if abs(exact) >= 2.0**128:
                assert abs(got) == inf
            elif abs(exact) >= 2.0**-126:
                assert abs(got - exact) <= 2.5 * abs(exact) * 2.0**-23
            else:
                assert abs(got - exact) <= 3 * 2.0**-149


@settings(max_examples=200, deadline=None)
@given(a=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), b=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
def test_lanes_are_independent_and_shapes_are_kept(a: list[int], b: list[int]) -> None:
    x, y = np.array(a, np.uint32).view(np.float32), np.array(b, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        for function in (N.add_f32, N.mul_f32, N.max_f32, N.min_f32, N.div_f32, lambda p, q: N.fma_f32(p, q, p, "rn", True)):
            whole = function(x, y)
            assert whole.dtype == np.float32
            assert (function(x.reshape(4, 8), y.reshape(4, 8)).reshape(-1).view(np.uint32) == whole.view(np.uint32)).all()
            single = [function(x[i : i + 1], y[i : i + 1]).view(np.uint32)[0] for i in range(0, 32, 11)]
            assert single == whole.view(np.uint32)[::11].tolist()


def test_importing_loads_no_table() -> None:
    code = "from fa4gen.codegen.emulator import numerics; print(numerics._table.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "0"


def test_poison_is_nan_in_every_format() -> None:
    poison = np.full(8, N.POISON_BYTE, np.uint8)
    assert np.isnan(poison.view(np.float64)).all()
    assert np.isnan(poison.view(np.float32)).all()
    assert np.isnan(N.f16_to_f32(poison.view(np.uint16))).all()
    assert np.isnan(N.bf16_to_f32(poison.view(np.uint16))).all()
    for fmt in ("e4m3", "e5m2"):
        assert np.isnan(N.f16_to_f32(N.f8_to_f16(poison, fmt))).all()
    assert poison.view(np.uint32)[0] == N.POISON_WORD
