"""Scalar instructions against Python integers, exact fractions and numpy, with edge values in every operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("error")

BYTES = {"u16": 2, "s16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8, "s64": 8, "b64": 8, "f64": 8, "b16": 2, "f16": 2, "bf16": 2}
DTYPES: dict[str, Any] = {
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
}  # fmt: skip
BANK = {2: "%h", 4: "%r", 8: "%rd"}


def edge_values(kind: str, seed: int) -> np.ndarray:
    """32 values of a type, the edges among random bits."""
    rng = np.random.default_rng(seed)
    size = BYTES[kind]
    raw = rng.integers(0, 256, (32, size), np.uint8).reshape(-1).view(DTYPES[kind])
    if kind in ("f32", "f64"):
        edges = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1.5, 3e38, 1e-45, -1e-40, 0.1]
    elif kind in ("f16", "bf16"):
        edges = [0.0, -0.0, 1.0, -2.0, math.inf, 0.5]
    else:
        info = np.iinfo(DTYPES[kind])
        edges = [0, 1, info.max, info.min, 2, 31, 7, info.max - 1]
    place = rng.permutation(32)[: len(edges)]
    with np.errstate(over="ignore"):
        raw[place] = np.array(edges, DTYPES[kind])
    return raw


def run_op(assemble: Callable[..., Any], text: str, kinds: list[str], result: str, values: list[np.ndarray]) -> np.ndarray:
    """Run `text` with {d}, {a}, {b}, {c} as registers; operands from arrays, one lane an element, in both a full and a diverged warp."""
    lines = []
    names = {}
    for i, kind in enumerate(kinds):
        size = BYTES[kind]
        register = f"{BANK[size]}{10 + i}"
        names["abcd"[i] if i < 3 else "e"] = register
        lines.append(f"mul.wide.u32 %rd1, %tid, {size}; add.s64 %rd2, %rd{61 + i}, %rd1; ld.global.b{8 * size} {register}, [%rd2];")
    size = BYTES[result]
    names["d"] = f"{BANK[size]}20"
    store = f"mul.wide.u32 %rd1, %tid, {size}; add.s64 %rd2, %rd60, %rd1; st.global.b{8 * size} [%rd2], {names['d']};"
    body = "\n".join(lines) + "\n" + text.format(**names) + "\n" + store
    out = np.zeros(32, DTYPES[result])
    program = assemble(body, "out " + " ".join("xyz"[: len(kinds)]), target="sm_100a")
    assert not program.launch("k", 1, 32, 0, [out, *values]).hazards
    # The same under a mask: odd lanes take another path and must keep what they had.
    masked = "\n".join(lines) + f"\nmov.b{8 * size} {names['d']}, 77; and.b32 %r100, %lane, 1; setp.eq.u32 %p9, %r100, 1; @%p9 bra ODD;\n"
    masked += text.format(**names) + "\nODD: " + store
    partial = np.zeros(32, DTYPES[result])
    assert not assemble(masked, "out " + " ".join("xyz"[: len(kinds)]), target="sm_100a").launch("k", 1, 32, 0, [partial, *values]).hazards
    unsigned = np.dtype(f"u{size}")
    assert (partial.view(unsigned)[0::2] == out.view(unsigned)[0::2]).all()
    assert (partial.view(unsigned)[1::2] == 77).all()
    return out


def wrap(value: int, kind: str) -> int:
    bits = 8 * BYTES[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bit_field(a: int, position: int, length: int, kind: str) -> int:
    bits = 8 * BYTES[kind]
    position, length = position & 255, length & 255
    raw = a & ((1 << bits) - 1)
    sign = 0
    if kind[0] == "s" and length:
        sign = raw >> min(position + length - 1, bits - 1) & 1
    return wrap(
        sum((raw >> (position + i) & 1 if position + i < bits else sign) << i if i < length else sign << i for i in range(bits)), kind
    )


def bit_insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    position, length = position & 255, length & 255
    result = b
    for i in range(length):
        if position + i < bits:
            result = result & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return result


INTEGER_OPS: list[tuple[str, list[str], str, Callable[..., int]]] = [
    *[(f"add.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a + b) for t in ("u16", "s32", "u64")],
    *[(f"sub.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a - b) for t in ("s16", "u32", "s64")],
    ("add.sat.s32 {d}, {a}, {b};", ["s32", "s32"], "s32", lambda a, b: max(-(1 << 31), min((1 << 31) - 1, a + b))),
    *[(f"mul.lo.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a * b) for t in ("u16", "s32", "u64")],
    *[
        (f"mul.hi.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b, t=t: a * b >> 8 * BYTES[t])
        for t in ("u16", "s16", "u32", "s32", "u64", "s64")
    ],
    *[
        (f"mul.wide.{t} {{d}}, {{a}}, {{b}};", [t, t], w, lambda a, b: a * b)
        for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64"))
    ],
    *[(f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", [t, t, t], t, lambda a, b, c: a * b + c) for t in ("s32", "u64")],
    ("mad.wide.s32 {d}, {a}, {b}, {c};", ["s32", "s32", "s64"], "s64", lambda a, b, c: a * b + c),
    ("mad.hi.u32 {d}, {a}, {b}, {c};", ["u32", "u32", "u32"], "u32", lambda a, b, c: (a * b >> 32) + c),
    *[(f"div.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: truncated(a, b) if b else -1) for t in ("u16", "s32", "u32", "s64", "u64")],
    *[(f"rem.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a - truncated(a, b) * b if b else a) for t in ("s32", "u32", "s64")],
    *[(f"abs.{t} {{d}}, {{a}};", [t], t, abs) for t in ("s16", "s32", "s64")],
    *[(f"neg.{t} {{d}}, {{a}};", [t], t, lambda a: -a) for t in ("s32", "s64")],
    *[(f"min.{t} {{d}}, {{a}}, {{b}};", [t, t], t, min) for t in ("u16", "s32", "u64")],
    *[(f"max.{t} {{d}}, {{a}}, {{b}};", [t, t], t, max) for t in ("s16", "u32", "s64")],
    ("sad.s32 {d}, {a}, {b}, {c};", ["s32", "s32", "s32"], "s32", lambda a, b, c: c + abs(a - b)),
    *[(f"and.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a & b) for t in ("b16", "b32", "b64")],
    *[(f"or.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a | b) for t in ("b32", "b64")],
    *[(f"xor.{t} {{d}}, {{a}}, {{b}};", [t, t], t, lambda a, b: a ^ b) for t in ("b16", "b64")],
    *[(f"not.{t} {{d}}, {{a}};", [t], t, lambda a: ~a) for t in ("b16", "b32", "b64")],
    ("cnot.b32 {d}, {a};", ["b32"], "b32", lambda a: int(a == 0)),
    *[(f"shl.{t} {{d}}, {{a}}, {{b}};", [t, "u32"], t, lambda a, b, t=t: a << b if b < 8 * BYTES[t] else 0) for t in ("b16", "b32", "b64")],
    *[(f"shr.{t} {{d}}, {{a}}, {{b}};", [t, "u32"], t, lambda a, b: a >> min(b, 64)) for t in ("u16", "u32", "s32", "u64", "s64")],
    *[(f"shr.{t} {{d}}, {{a}}, {n};", [t], t, lambda a, n=n: a >> n) for t in ("u32", "s32", "s64") for n in (0, 3, 31, 32, 40)],
    ("shf.l.wrap.b32 {d}, {a}, {b}, {c};", ["b32", "b32", "u32"], "b32", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
    ("shf.r.clamp.b32 {d}, {a}, {b}, {c};", ["b32", "b32", "u32"], "b32", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    *[
        (
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};",
            ["b32", "b32", "b32"],
            "b32",
            lambda a, b, c, table=table: sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)),
        )
        for table in (0x96, 0xF8, 0xEA, 0xC0, 0x3C, 0x80, 0xFE, 0xFC, 0x6A, 0xD4, 0x01)
    ],
    *[(f"popc.{t} {{d}}, {{a}};", [t], "u32", lambda a: a.bit_count()) for t in ("b32", "b64")],
    *[(f"clz.{t} {{d}}, {{a}};", [t], "u32", lambda a, t=t: 8 * BYTES[t] - a.bit_length()) for t in ("b32", "b64")],
    ("brev.b32 {d}, {a};", ["b32"], "b32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32 {d}, {a};", ["u32"], "u32", lambda a: a.bit_length() - 1),
    ("bfind.s32 {d}, {a};", ["s32"], "u32", lambda a: (~a if a < 0 else a).bit_length() - 1),
    ("bfind.shiftamt.u32 {d}, {a};", ["u32"], "u32", lambda a: 32 - a.bit_length() if a else -1),
    *[
        (f"bfe.{t} {{d}}, {{a}}, {{b}}, {{c}};", [t, "u32", "u32"], t, lambda a, b, c, t=t: bit_field(a, b, c, t))
        for t in ("u32", "s32", "u64", "s64")
    ],
    *[
        (f"bfi.b32 {{d}}, {{a}}, {{b}}, {p}, {n};", ["b32", "b32"], "b32", lambda a, b, p=p, n=n: bit_insert(a, b, p, n, 32))
        for p, n in ((0, 8), (5, 20), (30, 9), (32, 4), (0, 32), (4, 0))
    ],
    ("bmsk.clamp.b32 {d}, 3, 7;", [], "b32", lambda: 0x3F8),
    ("szext.wrap.s32 {d}, {a}, 5;", ["s32"], "s32", lambda a: (a & 31) - 32 if a & 16 else a & 31),
    ("slct.s32.s32 {d}, {a}, {b}, {c};", ["s32", "s32", "s32"], "s32", lambda a, b, c: a if c >= 0 else b),
    ("dp4a.s32.s32 {d}, {a}, {b}, {c};", ["s32", "s32", "s32"], "s32",
     lambda a, b, c: c + sum(_byte(a, i) * _byte(b, i) for i in range(4))),
]  # fmt: skip


def _byte(value: int, i: int) -> int:
    byte = value >> 8 * i & 255
    return byte - 256 if byte & 128 else byte


@pytest.mark.parametrize(("text", "kinds", "result", "reference"), INTEGER_OPS, ids=[t[0].split(";")[0] for t in INTEGER_OPS])
def test_integer_instruction(assemble, text, kinds, result, reference):
    values = [edge_values(kind, 11 * i + len(text)) for i, kind in enumerate(kinds)]
    for i, kind in enumerate(kinds):
        if kind == "u32" and i and ("shl" in text or "shr" in text or "shf" in text or "bfe" in text):
            values[i] = np.random.default_rng(3).integers(0, 70, 32).astype(np.uint32)
    out = run_op(assemble, text, kinds, result, values)
    expected = [wrap(reference(*[int(v[i]) for v in values]), result) for i in range(32)]
    assert [int(x) for x in out] == expected


def test_extended_precision_addition(assemble):
    """add.cc / addc carry 128-bit sums across 32-bit words, sub.cc / subc borrow."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 1 << 32, (32, 2), np.uint32), rng.integers(0, 1 << 32, (32, 2), np.uint32)
    a[0], b[0] = 0xFFFFFFFF, 1
    for op, sign in (("add", 1), ("sub", -1)):
        out = np.zeros((32, 2), np.uint32)
        program = assemble(
            f"""
            shl.b32 %r1, %tid, 3; cvt.u64.u32 %rd1, %r1; add.s64 %rd2, %rd61, %rd1; add.s64 %rd3, %rd62, %rd1; add.s64 %rd4, %rd60, %rd1;
            ld.global.v2.u32 {{%r2, %r3}}, [%rd2]; ld.global.v2.u32 {{%r4, %r5}}, [%rd3];
            {op}.cc.u32 %r6, %r2, %r4; {op}c.u32 %r7, %r3, %r5; st.global.v2.u32 [%rd4], {{%r6, %r7}};
            """,
            "out x y",
        )
        assert not program.launch("k", 1, 32, 0, [out, a, b]).hazards
        whole = a.view(np.uint64) + b.view(np.uint64) if sign > 0 else a.view(np.uint64) - b.view(np.uint64)
        assert (out.view(np.uint64) == whole).all()


@pytest.mark.parametrize(
    ("mode", "selector", "expected"),
    [
        ("", 0x3210, 0x44332211),
        ("", 0x7654, 0x887766A5),
        ("", 0x6543, 0x7766A544),
        ("", 0xCB98, 0xFF000000),
        (".f4e", 1, 0xA5443322),
        (".rc16", 1, 0x44334433),
    ],
)
def test_byte_permutation(assemble, mode, selector, expected):
    text = f"prmt.b32{mode} {{d}}, {{a}}, {{b}}, {selector};"
    out = run_op(assemble, text, ["b32", "b32"], "b32", [np.full(32, 0x44332211, np.uint32), np.full(32, 0x887766A5, np.uint32)])
    assert [hex(x) for x in out] == [hex(expected)] * 32


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "f32", "f64"])
def test_comparisons_and_their_second_result(assemble, name, kind):
    values = [edge_values(kind, 5), edge_values(kind, 6)]
    values[1][:8] = values[0][:8]
    text = f"setp.{name}.{kind} %p1|%p2, {{a}}, {{b}}; selp.b32 %r30, 1, 0, %p1; selp.b32 %r31, 2, 0, %p2; add.u32 {{d}}, %r30, %r31;"
    out = run_op(assemble, text, [kind, kind], "u32", values)
    for i in range(32):
        a, b = values[0][i].item(), values[1][i].item()
        # Ordered comparisons are false for NaN, ne included.
        holds = COMPARISONS[name](a, b) and not (a != a or b != b)
        assert out[i] == (1 if holds else 2), (a, b)


@pytest.mark.parametrize(
    ("name", "ordered"),
    [("equ", "eq"), ("neu", "ne"), ("ltu", "lt"), ("leu", "le"), ("gtu", "gt"), ("geu", "ge"), ("num", ""), ("nan", "")],
)
def test_unordered_comparisons(assemble, name, ordered):
    values = [edge_values("f32", 7), edge_values("f32", 8)]
    values[0][3], values[1][5], values[1][9:12] = np.nan, np.nan, values[0][9:12]
    out = run_op(assemble, f"setp.{name}.f32 %p1, {{a}}, {{b}}; selp.b32 {{d}}, 1, 0, %p1;", ["f32", "f32"], "u32", values)
    for i in range(32):
        a, b = values[0][i].item(), values[1][i].item()
        nan = a != a or b != b
        expected = nan or COMPARISONS[ordered](a, b) if ordered else (nan if name == "nan" else not nan)
        assert out[i] == expected, (a, b)


def test_comparison_combined_with_a_predicate(assemble):
    """setp.cmp.bool: p = (a cmp b) bool c, q = !(a cmp b) bool c; the predicate may be negated."""
    a, b = np.arange(32, dtype=np.int32), np.full(32, 16, np.int32)
    text = (
        "setp.lt.s32 %p3, {a}, 8; setp.lt.and.s32 %p1|%p2, {a}, {b}, !%p3; selp.b32 %r30, 1, 0, %p1; selp.b32 %r31, 2, 0, %p2;"
        " add.u32 {d}, %r30, %r31;"
    )
    out = run_op(assemble, text, ["s32", "s32"], "u32", [a, b])
    assert out.tolist() == [0] * 8 + [1] * 8 + [2] * 16


FLOAT_OPS: list[tuple[str, int, Callable[..., Any]]] = [
    ("add.rn.f32 {d}, {a}, {b};", 2, lambda a, b: a + b),
    ("sub.f32 {d}, {a}, {b};", 2, lambda a, b: a - b),
    ("mul.rn.f32 {d}, {a}, {b};", 2, lambda a, b: a * b),
    ("div.rn.f32 {d}, {a}, {b};", 2, lambda a, b: a / b),
    ("sqrt.rn.f32 {d}, {a};", 1, np.sqrt),
    ("abs.f32 {d}, {a};", 1, np.abs),
    ("neg.f32 {d}, {a};", 1, np.negative),
    ("copysign.f32 {d}, {a}, {b};", 2, lambda a, b: np.copysign(b, a)),
    ("selp.f32 {d}, {a}, {b}, 1;", 2, lambda a, b: a),
    ("rcp.rn.f32 {d}, {a};", 1, lambda a: np.float32(1) / a),
    (
        "fma.rn.f32 {d}, {a}, {b}, {a};",
        2,
        lambda a, b: (a.astype(np.longdouble) * b.astype(np.longdouble) + a.astype(np.longdouble)).astype(np.float32),
    ),
]


@pytest.mark.parametrize(("text", "count", "reference"), FLOAT_OPS, ids=[t[0].split()[0] for t in FLOAT_OPS])
def test_single_precision(assemble, text, count, reference):
    values = [
        np.where(np.abs(v) > 1e15, np.float32(1.25), v).astype(np.float32) for v in (edge_values("f32", 21 + i) for i in range(count))
    ]
    out = run_op(assemble, text, ["f32"] * count, "f32", values)
    with np.errstate(all="ignore"):
        expected = reference(*values).astype(np.float32)
    nan = np.isnan(expected)
    assert (np.isnan(out) == nan).all()
    assert (out.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all()


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("add.f64 {d}, {a}, {b};", lambda a, b: a + b),
        ("mul.f64 {d}, {a}, {b};", lambda a, b: a * b),
        ("div.rn.f64 {d}, {a}, {b};", lambda a, b: a / b),
        ("max.f64 {d}, {a}, {b};", np.fmax),
    ],
)
def test_double_precision(assemble, text, reference):
    values = [edge_values("f64", 31), edge_values("f64", 32)]
    out = run_op(assemble, text, ["f64", "f64"], "f64", values)
    with np.errstate(all="ignore"):
        expected = reference(*values)
    assert np.array_equal(out, expected, equal_nan=True)


@pytest.mark.parametrize(("opcode", "zeros"), [("max", [0.0, 0.0, 0.0, -0.0]), ("min", [-0.0, -0.0, 0.0, -0.0])])
def test_f64_extremes_order_the_zeros_and_lose_nans(assemble: Callable[..., Any], opcode: str, zeros: list[float]) -> None:
    quiet, signalling = 0x7FF8000000000000, 0x7FF0000000000001
    a = np.array([0.0, -0.0, 0.0, -0.0] * 8, np.float64)
    b = np.array([-0.0, 0.0, 0.0, -0.0] * 8, np.float64)
    out = run_op(assemble, f"{opcode}.f64 {{d}}, {{a}}, {{b}};", ["f64", "f64"], "f64", [a, b])
    assert out.view(np.uint64).tolist() == np.array(zeros * 8, np.float64).view(np.uint64).tolist()
    for nan in (quiet, signalling):
        x = np.full(32, nan, np.uint64).view(np.float64)
        y = np.arange(32, dtype=np.float64)
        for operands in ([x, y], [y, x]):
            assert (run_op(assemble, f"{opcode}.f64 {{d}}, {{a}}, {{b}};", ["f64", "f64"], "f64", operands) == y).all()


def test_flush_to_zero_keeps_the_sign(assemble):
    tiny = np.full(32, -1e-40, np.float32)
    one = np.ones(32, np.float32)
    kept = run_op(assemble, "mul.f32 {d}, {a}, {b};", ["f32", "f32"], "f32", [tiny, one])
    flushed = run_op(assemble, "mul.ftz.f32 {d}, {a}, {b};", ["f32", "f32"], "f32", [tiny, one])
    assert (kept == tiny).all()
    assert (flushed.view(np.uint32) == 0x80000000).all()


def test_three_input_maximum_and_packed_arithmetic(assemble):
    a, b, c = (np.random.default_rng(s).standard_normal(32).astype(np.float32) for s in (1, 2, 3))
    out = run_op(assemble, "max.f32 {d}, {a}, {b}, {c};", ["f32"] * 3, "f32", [a, b, c])
    assert (out == np.maximum(np.maximum(a, b), c)).all()
    text = (
        "mov.b64 %rd30, {{{a}, {b}}}; mov.b64 %rd31, {{{c}, {c}}}; fma.rn.ftz.f32x2 %rd32, %rd30, %rd31, %rd30;"
        " mov.b64 {{%r50, %r51}}, %rd32; add.f32 {d}, %r50, %r51;"
    )
    packed = run_op(assemble, text, ["f32"] * 3, "f32", [a, b, c])

    def fma(x: np.ndarray) -> np.ndarray:
        return (x.astype(np.float64) * c + x).astype(np.float32)

    assert (packed == fma(a) + fma(b)).all()


def test_conversion_to_packed_bfloat16_puts_the_first_operand_high(assemble):
    a, b = edge_values("f32", 41), edge_values("f32", 42)
    out = run_op(assemble, "cvt.rn.bf16x2.f32 {d}, {a}, {b};", ["f32", "f32"], "u32", [a, b])
    with np.errstate(all="ignore"):
        high, low = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    keep = ~(np.isnan(a) | np.isnan(b))
    assert (out[keep] >> 16 == high.view(np.uint16)[keep]).all()
    assert (out[keep] & 0xFFFF == low.view(np.uint16)[keep]).all()


@pytest.mark.parametrize(
    ("target", "source", "text", "reference"),
    [
        ("s64", "s32", "cvt.s64.s32 {d}, {a};", int),
        ("u64", "u32", "cvt.u64.u32 {d}, {a};", int),
        ("u32", "u64", "cvt.u32.u64 {d}, {a};", lambda a: a & 0xFFFFFFFF),
        ("s32", "s32", "cvt.s32.s8 {d}, {a};", lambda a: (a & 255) - 256 if a & 128 else a & 255),
        ("u32", "u32", "cvt.u8.u32 {d}, {a};", lambda a: a & 255),
        ("s16", "s32", "cvt.sat.s16.s32 {d}, {a};", lambda a: max(-32768, min(32767, a))),
        ("u32", "s32", "cvt.sat.u32.s32 {d}, {a};", lambda a: max(0, a)),
    ],
)
def test_integer_conversions(assemble, target, source, text, reference):
    values = edge_values(source, 51)
    out = run_op(assemble, text, [source], target, [values])
    assert [int(x) for x in out] == [reference(int(v)) for v in values]


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("cvt.rni.s32.f32 {d}, {a};", round),
        ("cvt.rzi.s32.f32 {d}, {a};", math.trunc),
        ("cvt.rmi.s32.f32 {d}, {a};", math.floor),
        ("cvt.rpi.s32.f32 {d}, {a};", math.ceil),
    ],
)
def test_rounding_to_integers(assemble, text, reference):
    values = np.random.default_rng(5).uniform(-100, 100, 32).astype(np.float32)
    values[:6] = [0.5, 1.5, -0.5, 2.5, 3e9, -3e9]
    out = run_op(assemble, text, ["f32"], "s32", [values])
    assert out.tolist() == [max(-(1 << 31), min((1 << 31) - 1, reference(float(v)))) for v in values]


def test_floats_of_integers_and_other_widths(assemble):
    values = edge_values("s32", 61)
    assert (run_op(assemble, "cvt.rn.f32.s32 {d}, {a};", ["s32"], "f32", [values]) == values.astype(np.float32)).all()
    single = np.random.default_rng(6).standard_normal(32).astype(np.float32)
    assert (run_op(assemble, "cvt.rn.f16.f32 {d}, {a};", ["f32"], "f16", [single]) == single.astype(np.float16)).all()
    assert (run_op(assemble, "cvt.f64.f32 {d}, {a};", ["f32"], "f64", [single]) == single).all()
    half = single.astype(np.float16)
    assert (run_op(assemble, "cvt.f32.f16 {d}, {a};", ["f16"], "f32", [half]) == half.astype(np.float32)).all()


def test_half_precision_arithmetic_rounds_once(assemble):
    a, b = (np.random.default_rng(s).standard_normal(32).astype(np.float16) for s in (7, 8))
    out = run_op(assemble, "fma.rn.f16 {d}, {a}, {b}, {a};", ["f16", "f16"], "f16", [a, b])
    assert (out == (a.astype(np.float64) * b + a).astype(np.float16)).all()
    out = run_op(
        assemble,
        "add.f16x2 {d}, {a}, {b};",
        ["b32", "b32"],
        "b32",
        [np.repeat(a, 2).view(np.uint32)[:32], np.repeat(b, 2).view(np.uint32)[:32]],
    )
    assert (out.view(np.float16)[0::2] == a + b).all()


def test_moves_pack_and_unpack(assemble):
    a = edge_values("b64", 71)
    text = "mov.b64 {{%r40, %r41}}, {a}; mov.b32 {{%h1, %h2}}, %r41; mov.b32 %r42, {{%h2, %h1}}; mov.b64 {d}, {{%r42, %r40}};"
    out = run_op(assemble, text, ["b64"], "b64", [a])
    high = a >> np.uint64(32)
    swapped = (high >> np.uint64(16)) | (high & np.uint64(0xFFFF)) << np.uint64(16)
    assert (out == (a << np.uint64(32) | swapped)).all()


def test_special_registers(assemble):
    program = assemble(
        """
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %nctaid.x;
        mov.u32 %r6, %lanemask_lt;
        mad.lo.u32 %r7, %r2, %r4, %r1; mad.lo.u32 %r8, %r3, 12, %r7; mul.wide.u32 %rd1, %r8, 8; add.s64 %rd1, %rd60, %rd1;
        mad.lo.u32 %r9, %r5, 1000, %r8; st.global.v2.u32 [%rd1], {%r9, %r6};
        mov.u64 %rd3, %clock64; mov.u64 %rd4, %globaltimer; mov.u64 %rd5, %clock64; setp.le.u64 %p1, %rd5, %rd3; @%p1 trap;
        """,
        "out",
    )
    out = np.zeros((24, 2), np.uint32)
    assert not program.launch("k", 2, (4, 3), 0, [out]).hazards
    assert out[:, 0].tolist() == [2000 + i for i in range(24)]
    assert out[:12, 1].tolist() == [(1 << i) - 1 for i in range(12)]


@pytest.mark.parametrize(
    ("name", "function"),
    [("ex2", np.exp2), ("lg2", np.log2), ("rsqrt", lambda x: 1 / np.sqrt(x)), ("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh)],
)
def test_approximate_functions_are_close(assemble, name, function):
    x = np.random.default_rng(9).uniform(0.1, 3, 32).astype(np.float32)
    out = run_op(assemble, f"{name}.approx.f32 {{d}}, {{a}};", ["f32"], "f32", [x])
    assert np.allclose(out, function(x.astype(np.float64)), rtol=1e-3 if name == "tanh" else 3e-7, atol=1e-6)
