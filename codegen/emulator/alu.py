"""Scalar instructions: integer, logic, floating point, comparison, conversion, moves (PTX ISA 9.1 sections 9.7.1 to 9.7.9).

A semantic function takes the lane vectors of its operands and an output vector. Floating-point arithmetic is numerics.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as fp
from .decode import KINDS, Assembler, Registers, Slot, instruction, kind_bytes
from .machine import LANES, Step, Warp
from .ptx import Choices, Immediate, Instruction, Negated, Operand, Pair, PtxError, Register, Special, Vector

Array = NDArray[Any]
Lane = Callable[..., Any]
Steps = tuple[Step, Step]

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp")


def into1(function: Callable[[Array], Any]) -> Lane:
    def call(a: Array, out: Array) -> None:
        out[...] = function(a)

    return call


def into2(function: Callable[[Array, Array], Any]) -> Lane:
    def call(a: Array, b: Array, out: Array) -> None:
        out[...] = function(a, b)

    return call


def into3(function: Callable[[Array, Array, Array], Any]) -> Lane:
    def call(a: Array, b: Array, c: Array, out: Array) -> None:
        out[...] = function(a, b, c)

    return call


_BITS = ("b16", "b32", "b64")
_WORDS = ("u32", "s32", "u64", "s64")
_INTEGERS = ("u16", "s16", *_WORDS)
_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("and", "or", "xor", "not"), ("pred", *_BITS)),
    **dict.fromkeys(("cnot", "shl"), _BITS),
    "shr": (*_BITS, *_INTEGERS),
    **dict.fromkeys(("clz", "popc", "match"), ("b32", "b64")),
    **dict.fromkeys(("addc", "subc"), _WORDS),
    **dict.fromkeys(("sad", "rem"), _INTEGERS),
    "szext": ("u32", "s32"),
    "cvta": ("u32", "u64"),
    "testp": ("f32", "f64"),
}
"""Types that the ISA gives instructions whose arithmetic other types have not."""


def kind_of(asm: Assembler, words: list[str]) -> str:
    """The operand type: the last modifier. Predicates are for logic and mov alone."""
    kind = words[-1] if words else ""
    if kind not in KINDS and kind not in _FLOATS:
        raise asm.error(f"{asm.instruction.opcode}: {kind!r} is not a type")
    name = asm.instruction.opcode.partition(".")[0]
    if kind not in _TYPES.get(name, (kind,)) or (kind == "pred" and name not in ("and", "or", "xor", "not", "mov")):
        raise asm.error(f"{asm.instruction.opcode}: {name} has no type .{kind}")
    return kind


def storage(kind: str) -> str:
    """How registers of a type are viewed: 16-bit floats as bit patterns."""
    return {"f16": "b16", "bf16": "b16", "f16x2": "u16x2", "bf16x2": "u16x2"}.get(kind, kind)


def float_format(kind: str) -> str:
    return kind.removesuffix("x2")


def rounding_of(words: list[str], default: str = "rn") -> str:
    return next((w for w in words if w in _ROUNDINGS), default)


def simple(
    asm: Assembler, function: Lane, kind: str, count: int, destination: str | None = None, sources: list[str] | None = None
) -> Steps:
    """Steps of `op d, a, ...` with every operand of one kind unless given."""
    operands = asm.operands(count + 1)
    kinds = sources or [kind] * count
    d = asm.destination(operands[0], destination or kind)
    return asm.lanewise(function, d, [asm.source(o, k) for o, k in zip(operands[1:], kinds, strict=True)], destination or kind)


def _refuse(asm: Assembler, words: list[str], *allowed: str) -> None:
    for word in words:
        if word not in allowed:
            raise asm.error(f"{asm.instruction.opcode}: modifier .{word} is not supported")


# ------------------------------------------------------------------------------------------------------------ add, sub, mul


def _carry(asm: Assembler) -> int:
    return asm._slot(("carry",), Slot("sink", bits=32, dtype=np.uint32))


def _with_carry(asm: Assembler, kind: str, subtract: bool, use: bool, keep: bool) -> Steps:
    """add.cc, addc, sub.cc, subc (9.7.2): the carry flag is one word a lane."""
    operands = asm.operands(3)
    unsigned = "u" + kind[1:]
    d, a, b, c = asm.destination(operands[0], unsigned), asm.source(operands[1], unsigned), asm.source(operands[2], unsigned), _carry(asm)
    dtype = KINDS[unsigned]

    def compute(r: list[Any]) -> tuple[Array, Array]:
        x, y = r[a], ~r[b] if subtract else r[b]
        carry = (r[c] if use else np.full(32, 1 if subtract else 0, np.uint32)).astype(dtype)
        part = x + y
        total = part + carry
        return total, ((part < x) | (total < part)).astype(np.uint32)

    def full(w: Warp, r: list[Any]) -> None:
        r[d][...], out = compute(r)
        if keep:
            r[c][...] = out

    def masked(w: Warp, r: list[Any]) -> None:
        value, out = compute(r)
        np.copyto(r[d], value, where=w.mask)
        if keep:
            np.copyto(r[c], out, where=w.mask)

    return full, masked


def _saturating(function: Callable[[Array, Array], Array]) -> Lane:
    def call(a: Array, b: Array, out: Array) -> None:
        out[...] = np.clip(function(a.astype(np.int64), b.astype(np.int64)), -(1 << 31), (1 << 31) - 1)

    return call


def _add_sub(asm: Assembler, words: list[str], integer: Any, single: Any, double: Any, half: Any, subtract: bool) -> Steps:
    kind = kind_of(asm, words)
    if "cc" in words:
        return _with_carry(asm, kind, subtract, False, True)
    if kind in ("f32", "f32x2"):
        _refuse(asm, words[:-1], *_ROUNDINGS, "ftz", "sat")
        mode, ftz, sat = rounding_of(words), "ftz" in words, "sat" in words
        return simple(asm, into2(lambda a, b: single(a, b, mode, ftz, sat)), kind, 2)
    if kind == "f64":
        mode = rounding_of(words)
        return simple(asm, into2(lambda a, b: double(a, b, mode)), kind, 2)
    if kind in _FLOATS:
        fmt = float_format(kind)
        return simple(asm, into2(lambda a, b: half(a, b, fmt)), storage(kind), 2)
    if "sat" in words:
        return simple(asm, _saturating(integer), kind, 2)
    _refuse(asm, words[:-1])
    return simple(asm, integer, kind, 2)


@instruction("add")
def _add(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.1, 9.7.3.3, 9.7.4.1"""
    return _add_sub(asm, words, np.add, fp.add_f32, fp.add_f64, fp.add_16, False)


@instruction("sub")
def _sub(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.2, 9.7.3.4, 9.7.4.2"""
    return _add_sub(asm, words, np.subtract, fp.sub_f32, lambda a, b, mode: fp.add_f64(a, -b, mode), fp.sub_16, True)


@instruction("addc", "subc")
def _addc(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.2.2, 9.7.2.4"""
    return _with_carry(asm, kind_of(asm, words), ins.opcode.startswith("sub"), True, "cc" in words)


def high_product(a: Array, b: Array) -> Array:
    """Upper half of the full product of two vectors of one integer type."""
    size = a.dtype.itemsize
    if size < 8:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        result: Array = ((a.astype(wide) * b.astype(wide)) >> wide(8 * size)).astype(a.dtype)
        return result
    mask, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    al, ah, bl, bh = ua & mask, ua >> half, ub & mask, ub >> half
    middle = ah * bl + ((al * bl) >> half)
    other = al * bh + (middle & mask)
    high = ah * bh + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    full: Array = high.view(a.dtype)
    return full


_WIDER = Choices({"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"})


def _wide(a: Array, b: Array, out: Array) -> None:
    np.multiply(a, b, out, dtype=out.dtype, casting="unsafe")


@instruction("mul", "mul24")
def _mul(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.3, 9.7.1.5, 9.7.3.5, 9.7.4.3"""
    kind = kind_of(asm, words)
    if kind in ("f32", "f32x2"):
        _refuse(asm, words[:-1], *_ROUNDINGS, "ftz", "sat")
        mode, ftz, sat = rounding_of(words), "ftz" in words, "sat" in words
        return simple(asm, into2(lambda a, b: fp.mul_f32(a, b, mode, ftz, sat)), kind, 2)
    if kind == "f64":
        mode = rounding_of(words)
        return simple(asm, into2(lambda a, b: fp.mul_f64(a, b, mode)), kind, 2)
    if kind in _FLOATS:
        fmt = float_format(kind)
        return simple(asm, into2(lambda a, b: fp.mul_16(a, b, fmt)), storage(kind), 2)
    if "wide" in words:
        return simple(asm, _wide, kind, 2, destination=_WIDER[kind])
    if "hi" in words:
        return simple(asm, into2(high_product), kind, 2)
    return simple(asm, np.multiply, kind, 2)


@instruction("mad", "mad24", "fma")
def _mad(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.4, 9.7.3.6, 9.7.3.7, 9.7.4.4. mad.f32 and mad.f64 are fma on every supported target."""
    kind = kind_of(asm, words)
    if kind in ("f32", "f32x2"):
        _refuse(asm, words[:-1], *_ROUNDINGS, "ftz", "sat")
        mode, ftz, sat = rounding_of(words), "ftz" in words, "sat" in words
        return simple(asm, into3(lambda a, b, c: fp.fma_f32(a, b, c, mode, ftz, sat)), kind, 3)
    if kind == "f64":
        mode = rounding_of(words)
        return simple(asm, into3(lambda a, b, c: fp.fma_f64(a, b, c, mode)), kind, 3)
    if kind in _FLOATS:
        fmt, relu = float_format(kind), "relu" in words
        _refuse(asm, words[:-1], "rn", "relu", "ftz")
        return simple(asm, into3(lambda a, b, c: fp.fma_16(a, b, c, fmt, relu)), storage(kind), 3)
    if "cc" in words or "sat" in words:
        raise asm.error(f"{ins.opcode} is not supported")
    if "wide" in words:
        wide = _WIDER[kind]

        def mad_wide(a: Array, b: Array, c: Array, out: Array) -> None:
            out[...] = np.multiply(a, b, dtype=out.dtype) + c

        return simple(asm, mad_wide, wide, 3, sources=[kind, kind, wide])
    if "hi" in words:
        return simple(asm, into3(lambda a, b, c: high_product(a, b) + c), kind, 3)
    return simple(asm, into3(lambda a, b, c: a * b + c), kind, 3)


# --------------------------------------------------------------------------------------------------- division, sign, extremes


def quotient(a: Array, b: Array) -> Array:
    """Integer division truncating toward zero; a zero divisor gives all ones, as on hardware."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        result = a // safe
    else:
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        magnitude = np.abs(a).view(unsigned) // np.abs(safe).view(unsigned)
        result = np.where((a < 0) ^ (safe < 0), -magnitude.view(a.dtype), magnitude.view(a.dtype))
    value: Array = np.where(zero, np.array(-1).astype(a.dtype), result)
    return value


def remainder(a: Array, b: Array) -> Array:
    zero = b == 0
    value: Array = np.where(zero, a, a - quotient(a, b) * b)
    return value


@instruction("div")
def _div(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.7, 9.7.3.8"""
    kind = kind_of(asm, words)
    ftz = "ftz" in words
    if kind == "f32":
        if "approx" in words:
            return simple(asm, into2(lambda a, b: fp.div_approx(a, b, ftz)), kind, 2)
        if "full" in words:
            return simple(asm, into2(lambda a, b: fp.div_full(a, b, ftz)), kind, 2)
        mode = rounding_of(words)
        return simple(asm, into2(lambda a, b: fp.div_f32(a, b, mode, ftz)), kind, 2)
    if kind == "f64":
        mode = rounding_of(words)
        return simple(asm, into2(lambda a, b: fp.div_f64(a, b, mode)), kind, 2)
    return simple(asm, into2(quotient), kind, 2)


@instruction("rem")
def _rem(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.8"""
    return simple(asm, into2(remainder), kind_of(asm, words), 2)


@instruction("abs")
def _abs(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.9, 9.7.3.9, 9.7.4.6"""
    kind = kind_of(asm, words)
    if kind == "f32":
        ftz = "ftz" in words
        return simple(asm, into1(lambda a: fp.abs_f32(a, ftz)), kind, 1)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return simple(asm, into1(fp.abs_16), storage(kind), 1)
    return simple(asm, np.abs, kind, 1)


@instruction("neg")
def _neg(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.10, 9.7.3.10, 9.7.4.5"""
    kind = kind_of(asm, words)
    if kind == "f32":
        ftz = "ftz" in words
        return simple(asm, into1(lambda a: fp.neg_f32(a, ftz)), kind, 1)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return simple(asm, into1(fp.neg_16), storage(kind), 1)
    return simple(asm, np.negative, kind, 1)


def _maximum(a: Array, b: Array, out: Array) -> None:
    np.maximum(a, b, out=out)


def _minimum(a: Array, b: Array, out: Array) -> None:
    np.minimum(a, b, out=out)


def _extreme(asm: Assembler, words: list[str], integer: Any, single: Any, half: Any, double: Any) -> Steps:
    kind = kind_of(asm, words)
    ftz, nan = "ftz" in words, "NaN" in words
    if kind == "f32":
        _refuse(asm, words[:-1], "ftz", "NaN")
        if len(asm.instruction.operands) == 4:
            return simple(asm, into3(lambda a, b, c: single(single(a, b, ftz, nan), c, ftz, nan)), kind, 3)
        return simple(asm, into2(lambda a, b: single(a, b, ftz, nan)), kind, 2)
    if kind == "f64":
        return simple(asm, double, kind, 2)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        fmt = float_format(kind)
        return simple(asm, into2(lambda a, b: half(a, b, fmt, nan)), storage(kind), 2)
    if "relu" in words:
        zero = KINDS[kind](0)

        def clamped(a: Array, b: Array, out: Array) -> None:
            integer(a, b, out)
            np.maximum(out, zero, out=out)

        return simple(asm, clamped, kind, 2)
    return simple(asm, integer, kind, 2)


@instruction("max")
def _max(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.12, 9.7.3.12, 9.7.4.8"""
    return _extreme(asm, words, _maximum, fp.max_f32, fp.max_16, into2(fp.max_f64))


@instruction("min")
def _min(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.11, 9.7.3.11, 9.7.4.7"""
    return _extreme(asm, words, _minimum, fp.min_f32, fp.min_16, into2(fp.min_f64))


@instruction("sad")
def _sad(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.6"""
    return simple(asm, into3(lambda a, b, c: c + np.where(a < b, b - a, a - b)), kind_of(asm, words), 3)


@instruction("copysign")
def _copysign(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.3.2: the sign of a on the magnitude of b."""
    return simple(asm, into2(lambda a, b: np.copysign(b, a)), kind_of(asm, words), 2)


@instruction("testp")
def _testp(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.3.1"""
    kind = kind_of(asm, words)
    tiny = np.finfo(KINDS[kind]).tiny
    tests = Choices(
        {
            "finite": np.isfinite,
            "infinite": np.isinf,
            "number": lambda a: ~np.isnan(a),
            "notanumber": np.isnan,
            "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
            "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
        }
    )
    return simple(asm, into1(tests[words[0]]), kind, 1, destination="pred")


# ------------------------------------------------------------------------------------------------------- special functions


def _special(name: str, approximate: Any, exact: Any, section: str) -> None:
    def build(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
        kind = kind_of(asm, words)
        ftz = "ftz" in words
        if kind == "f32":
            if "approx" in words:
                return simple(asm, into1(lambda a: approximate(a, ftz)), kind, 1)
            if exact is not None:
                mode = rounding_of(words)
                return simple(asm, into1(lambda a: exact(a, mode, ftz)), kind, 1)
        elif kind == "f64" and name in ("rcp", "sqrt", "rsqrt"):
            mode = rounding_of(words)
            one = np.ones(32)
            doubles: dict[str, Callable[[Array], Any]] = {
                "rcp": lambda a: fp.div_f64(one, a, mode),
                "sqrt": np.sqrt,
                "rsqrt": lambda a: 1.0 / np.sqrt(a),
            }
            return simple(asm, into1(doubles[name]), kind, 1)
        elif kind in ("f16", "bf16", "f16x2", "bf16x2") and name in ("ex2", "tanh"):
            fmt = float_format(kind)
            half = fp.ex2_approx_16 if name == "ex2" else fp.tanh_approx_16
            return simple(asm, into1(lambda a: half(a, fmt)), storage(kind), 1)
        raise asm.error(f"{ins.opcode} is not supported")

    build.__doc__ = section
    instruction(name)(build)


_special("ex2", fp.ex2_approx, None, "9.7.3.21")
_special("lg2", fp.lg2_approx, None, "9.7.3.20")
_special("rcp", fp.rcp_approx, fp.rcp_f32, "9.7.3.13")
_special("sqrt", fp.sqrt_approx, fp.sqrt_f32, "9.7.3.15")
_special("rsqrt", fp.rsqrt_approx, None, "9.7.3.17")
_special("sin", fp.sin_approx, None, "9.7.3.18")
_special("cos", fp.cos_approx, None, "9.7.3.19")
_special("tanh", lambda a, ftz: fp.tanh_approx(a), None, "9.7.3.22")


# ------------------------------------------------------------------------------------------------------------- bits and logic


def _logic(name: str, function: Any, predicate: Any, count: int, section: str) -> None:
    def build(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
        kind = kind_of(asm, words)
        return simple(asm, predicate if kind == "pred" else function, kind, count)

    build.__doc__ = section
    instruction(name)(build)


_logic("and", np.bitwise_and, np.logical_and, 2, "9.7.8.1")
_logic("or", np.bitwise_or, np.logical_or, 2, "9.7.8.2")
_logic("xor", np.bitwise_xor, np.logical_xor, 2, "9.7.8.3")
_logic("not", np.bitwise_not, np.logical_not, 1, "9.7.8.4")


@instruction("cnot")
def _cnot(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.8.5"""
    return simple(asm, into1(lambda a: a == 0), kind_of(asm, words), 1)


def _shift(asm: Assembler, words: list[str], left: bool) -> Steps:
    kind = kind_of(asm, words)
    bits = 8 * kind_bytes(kind)
    operands = asm.operands(3)
    amount = operands[2]
    if isinstance(amount, Immediate):
        # Amounts beyond the width are clamped to it; numpy defines shifts by exactly the width that way.
        count = min(amount.value & 0xFFFF_FFFF, bits)
        d, a = asm.destination(operands[0], kind), asm.source(operands[1], kind)
        by = asm.constant(np.full(32, count, KINDS[kind]))
        return asm.lanewise(np.left_shift if left else np.right_shift, d, [a, by], kind)
    dtype = KINDS[kind]
    operation = np.left_shift if left else np.right_shift

    def shift(a: Array, b: Array, out: Array) -> None:
        operation(a, np.minimum(b, np.uint32(bits)).astype(dtype), out)

    return simple(asm, shift, kind, 2, sources=[kind, "u32"])


@instruction("shl")
def _shl(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.8.7"""
    return _shift(asm, words, True)


@instruction("shr")
def _shr(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.8.8"""
    return _shift(asm, words, False)


@instruction("shf")
def _shf(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.8.6: funnel shift of {b, a}."""
    wrap, left = "wrap" in words, "l" in words

    def shift(a: Array, b: Array, c: Array, out: Array) -> None:
        n = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        out[...] = (both << n) >> np.uint64(32) if left else both >> n

    return simple(asm, shift, "u32", 3)


@instruction("lop3")
def _lop3(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.8.5: any three-input function, given by its truth table."""
    operands = asm.operands(5)
    table = asm.integer(operands[4], "the truth table")
    known: dict[int, Lane] = {
        0xC0: lambda a, b, c, out: np.bitwise_and(a, b, out),
        0x3C: lambda a, b, c, out: np.bitwise_xor(a, b, out),
        0xFC: lambda a, b, c, out: np.bitwise_or(a, b, out),
        0x96: into3(lambda a, b, c: a ^ b ^ c),
        0xFE: into3(lambda a, b, c: a | b | c),
        0x80: into3(lambda a, b, c: a & b & c),
        0xF8: into3(lambda a, b, c: a | b & c),
        0xEA: into3(lambda a, b, c: a & b | c),
    }

    def general(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(32, np.uint32)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    sources = [asm.source(o, "u32") for o in operands[1:4]]
    return asm.lanewise(known.get(table, into3(general)), asm.destination(operands[0], "u32"), sources, "u32")


@instruction("prmt")
def _prmt(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.7: bytes of {b, a} picked by the selector's nibbles; the modes are the ISA's table of selections."""
    mode = words[-1] if words[-1] != "b32" else ""
    tables = Choices({
        "f4e": ["3210", "4321", "5432", "6543"], "b4e": ["5670", "6701", "7012", "0123"], "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"], "ecr": ["0000", "1110", "2210", "3210"], "rc16": ["1010", "3232", "1010", "3232"],
    })  # fmt: skip
    choice = np.array([int(x, 16) for x in tables[mode]], np.uint32) if mode else None

    def permute(a: Array, b: Array, c: Array, out: Array) -> None:
        selector = c if choice is None else choice[c & np.uint32(3)]
        data = np.empty((32, 8), np.uint8)
        data[:, :4] = np.ascontiguousarray(a).view(np.uint8).reshape(32, 4)
        data[:, 4:] = np.ascontiguousarray(b).view(np.uint8).reshape(32, 4)
        nibbles = (selector[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
        picked = data[LANES[:, None], nibbles & np.uint32(7)]
        sign = (nibbles & np.uint32(8)) != 0
        picked = np.where(sign, np.where(picked & np.uint8(0x80), np.uint8(0xFF), np.uint8(0)), picked)
        out[...] = np.ascontiguousarray(picked).view(np.uint32)[:, 0]

    return simple(asm, permute, "u32", 3)


def _unsigned_bits(a: Array) -> Array:
    return a.view(np.dtype(f"u{a.dtype.itemsize}"))


@instruction("popc")
def _popc(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.16"""
    return simple(asm, into1(np.bitwise_count), kind_of(asm, words), 1, destination="u32")


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    spread = a.copy()
    step = 1
    while step < bits:
        spread |= spread >> a.dtype.type(step)
        step *= 2
    result: Array = bits - np.bitwise_count(spread).astype(np.int64)
    return result


@instruction("clz")
def _clz(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.17"""
    return simple(asm, into1(_leading_zeros), kind_of(asm, words), 1, destination="u32")


@instruction("bfind")
def _bfind(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.18: position of the top significant bit, or its distance from the top with .shiftamt; -1 when there is none."""
    kind = kind_of(asm, words)
    shift_amount = "shiftamt" in words

    def find(a: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        magnitude = _unsigned_bits(np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a)
        zeros = _leading_zeros(magnitude)
        position = zeros if shift_amount else bits - 1 - zeros
        return np.where(zeros == bits, -1, position).astype(np.int32).view(np.uint32)

    return simple(asm, into1(find), kind, 1, destination="u32")


@instruction("brev")
def _brev(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.20"""

    def reverse(a: Array) -> Array:
        raw = np.ascontiguousarray(a).view(np.uint8).reshape(32, -1)
        bits = np.unpackbits(raw, axis=1, bitorder="little")[:, ::-1]
        return np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(a.dtype)

    return simple(asm, into1(reverse), kind_of(asm, words), 1)


@instruction("bfe")
def _bfe(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.21"""
    kind = kind_of(asm, words)
    bits = 8 * kind_bytes(kind)

    def extract(a: Array, b: Array, c: Array) -> Array:
        position, length = (b & np.uint32(0xFF)).astype(np.int64), (c & np.uint32(0xFF)).astype(np.int64)
        raw = _unsigned_bits(a).astype(np.uint64)
        shifted = np.where(position < bits, raw >> np.minimum(position, 63).astype(np.uint64), np.uint64(0))
        mask = np.where(
            length >= 64, np.uint64(0xFFFF_FFFF_FFFF_FFFF), (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1)
        )
        value = shifted & mask
        if kind[0] == "s":
            top = np.clip(np.minimum(position + length - 1, bits - 1), 0, 63)
            sign = (raw >> top.astype(np.uint64)) & np.uint64(1)
            kept = np.minimum(length, np.maximum(bits - position, 0))
            fill = np.where(kept >= 64, np.uint64(0), ~((np.uint64(1) << np.minimum(kept, 63).astype(np.uint64)) - np.uint64(1)))
            value = np.where((sign != 0) & (length > 0), value | fill, value)
        return value.astype(np.dtype(f"u{a.dtype.itemsize}")).view(a.dtype)

    return simple(asm, into3(extract), kind, 3, sources=[kind, "u32", "u32"])


@instruction("bfi")
def _bfi(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.22: the low bits of a inserted into b at position c, length d."""
    kind = kind_of(asm, words)
    bits = 8 * kind_bytes(kind)

    def insert(a: Array, b: Array, c: Array, n: Array, out: Array) -> None:
        position, length = (c & np.uint32(0xFF)).astype(np.uint64), (n & np.uint32(0xFF)).astype(np.uint64)
        ones = np.where(length >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(length, np.uint64(63))) - np.uint64(1))
        place = np.minimum(position, np.uint64(63))
        mask = np.where(position >= bits, np.uint64(0), ones << place)
        value = (b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << place) & mask)
        out[...] = value.astype(b.dtype)

    return simple(asm, insert, kind, 4, sources=[kind, kind, "u32", "u32"])


@instruction("bmsk")
def _bmsk(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.24"""
    wrap = "wrap" in words

    def mask(a: Array, b: Array, out: Array) -> None:
        position, length = a.astype(np.uint64), b.astype(np.uint64)
        if wrap:
            position, length = position & np.uint64(31), length & np.uint64(31)
        ones = (np.uint64(1) << np.minimum(length, np.uint64(32))) - np.uint64(1)
        out[...] = np.where(position > 31, np.uint64(0), ones << np.minimum(position, np.uint64(32))).astype(np.uint32)

    return simple(asm, mask, "u32", 2)


@instruction("szext")
def _szext(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.23: sign or zero extension from bit position b."""
    kind = kind_of(asm, words)
    wrap = "wrap" in words

    def extend(a: Array, b: Array) -> Array:
        n = (b & np.uint32(31) if wrap else np.minimum(b, np.uint32(32))).astype(np.int64)
        low = a.view(np.uint32).astype(np.int64) & ((1 << n) - 1)
        if kind == "s32":
            low = np.where((n > 0) & (low >> np.maximum(n - 1, 0) & 1 == 1), low - (1 << n), low)
        return low.astype(np.uint32 if kind == "u32" else np.int32)

    return simple(asm, into2(extend), kind, 2, sources=[kind, "u32"])


@instruction("dp4a", "dp2a")
def _dot(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.1.25, 9.7.1.26"""
    if ins.opcode.startswith("dp2a"):
        raise asm.error("dp2a is not supported")
    kinds = Choices({"u32": np.uint8, "s32": np.int8})
    left, right = kinds[words[-2]], kinds[words[-1]]
    kind = "s32" if "s32" in words else "u32"

    def dot(a: Array, b: Array, c: Array) -> Array:
        x = np.ascontiguousarray(a).view(left).reshape(32, 4).astype(np.int64)
        y = np.ascontiguousarray(b).view(right).reshape(32, 4).astype(np.int64)
        total: Array = (x * y).sum(axis=1).astype(np.uint32).view(KINDS[kind]) + c
        return total

    return simple(asm, into3(dot), kind, 3, sources=["u32", "u32", kind])


# -------------------------------------------------------------------------------------------------- comparison and selection


def comparison(name: str, kind: str, ftz: bool, asm: Assembler) -> tuple[Lane, str]:
    """(function(a, b, out bool), view) of a comparison operator (tables of 9.3.1 and 9.7.6)."""
    signed = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    ordered: dict[str, Any] = {
        "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    }  # fmt: skip
    if kind not in _FLOATS:
        functions = {**ordered, "ne": np.not_equal}
        operator = functions.get(signed.get(name, name))
        if operator is None:
            raise asm.error(f"{asm.instruction.opcode}: unknown comparison .{name}")
        view = "u" + kind[1:] if name in signed or (kind[0] == "b" and kind != "b8") else kind
        return operator, view

    fmt = float_format(kind)

    def widen(a: Array) -> Array:
        if kind in ("f16", "f16x2"):
            return fp.f16_to_f32(a)
        if kind in ("bf16", "bf16x2"):
            return fp.bf16_to_f32(a)
        return fp.flush_f32(a) if ftz and fmt == "f32" else a

    convert = kind not in ("f32", "f64") or ftz
    unordered = {"equ": "eq", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
    base: Any
    if name in ordered:
        base = ordered[name]
    elif name in unordered:
        compare = ordered[unordered[name]]

        def base(a: Array, b: Array, out: Array) -> None:
            out[...] = compare(a, b) | (a != a) | (b != b)
    elif name == "ne":

        def base(a: Array, b: Array, out: Array) -> None:
            out[...] = (a < b) | (a > b)
    elif name == "neu":
        base = np.not_equal
    elif name == "num":

        def base(a: Array, b: Array, out: Array) -> None:
            out[...] = (a == a) & (b == b)
    elif name == "nan":

        def base(a: Array, b: Array, out: Array) -> None:
            out[...] = (a != a) | (b != b)
    else:
        raise asm.error(f"{asm.instruction.opcode}: unknown comparison .{name}")
    if not convert:
        return base, storage(kind)

    def converted(a: Array, b: Array, out: Array) -> None:
        base(widen(a), widen(b), out)

    return converted, storage(kind)


_BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _predicate_source(asm: Assembler, operand: Operand) -> tuple[int, bool]:
    if isinstance(operand, Negated):
        return asm.register(operand.operand, "pred"), True
    return asm.source(operand, "pred"), False


@instruction("setp")
def _setp(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.6.2, 9.7.7.2. A packed 16-bit comparison writes one predicate a half."""
    kind = kind_of(asm, words)
    operands = asm.operands(3, 4)
    boolean = next((w for w in words[1:-1] if w in _BOOLEAN), "")
    if bool(boolean) != (len(operands) == 4):
        raise asm.error(f"{ins.opcode}: the boolean operator and the predicate operand go together")
    compare, view = comparison(words[0], kind, "ftz" in words, asm)
    target = operands[0]
    if isinstance(target, Pair):
        p, q = asm.destination(target.first, "pred"), asm.destination(target.second, "pred")
    else:
        p, q = asm.destination(target, "pred"), -1
    a, b = asm.source(operands[1], view), asm.source(operands[2], view)
    if view in ("u16x2", "s16x2"):
        return _setp_packed(asm, compare, p, q, a, b, boolean, operands)
    if q < 0 and not boolean:
        return asm.lanewise(compare, p, [a, b], "pred")
    combine = _BOOLEAN.get(boolean)
    c, negated = _predicate_source(asm, operands[3]) if boolean else (-1, False)
    first, second = np.empty(32, np.bool_), np.empty(32, np.bool_)

    def compute(r: list[Any]) -> None:
        compare(r[a], r[b], first)
        np.logical_not(first, second)
        if combine is not None:
            other = ~r[c] if negated else r[c]
            combine(first, other, first)
            combine(second, other, second)

    def full(w: Warp, r: list[Any]) -> None:
        compute(r)
        r[p][...] = first
        if q >= 0:
            r[q][...] = second

    def masked(w: Warp, r: list[Any]) -> None:
        compute(r)
        np.copyto(r[p], first, where=w.mask)
        if q >= 0:
            np.copyto(r[q], second, where=w.mask)

    return full, masked


def _setp_packed(asm: Assembler, compare: Lane, p: int, q: int, a: int, b: int, boolean: str, operands: Any) -> Steps:
    combine = _BOOLEAN.get(boolean)
    c, negated = _predicate_source(asm, operands[3]) if boolean else (-1, False)
    both = np.empty(64, np.bool_)

    def masked(w: Warp, r: list[Any]) -> None:
        compare(r[a], r[b], both)
        for slot, half in ((p, both[0::2]), (q, both[1::2])):
            if slot >= 0:
                value = half if combine is None else combine(half, ~r[c] if negated else r[c])
                np.copyto(r[slot], value, where=w.mask)

    return masked, masked


@instruction("set")
def _set(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.6.1, 9.7.7.1: 1.0 or all ones where the comparison holds."""
    result, kind = words[-2], words[-1]
    operands = asm.operands(3, 4)
    boolean = next((w for w in words[1:-2] if w in _BOOLEAN), "")
    compare, view = comparison(words[0], kind, "ftz" in words, asm)
    if view in ("u16x2", "s16x2") or result in ("f16", "bf16", "f16x2", "bf16x2", "u16", "s16"):
        raise asm.error(f"{ins.opcode} is not supported")
    combine = _BOOLEAN.get(boolean)
    yes = np.array(1.0 if result == "f32" else -1).astype(KINDS[result])
    sources = [asm.source(operands[1], view), asm.source(operands[2], view)]
    flag = np.empty(32, np.bool_)
    if combine is None:

        def plain(a: Array, b: Array, out: Array) -> None:
            compare(a, b, flag)
            out[...] = np.where(flag, yes, out.dtype.type(0))

        return asm.lanewise(plain, asm.destination(operands[0], result), sources, result)
    c, negated = _predicate_source(asm, operands[3])

    def combined(a: Array, b: Array, p: Array, out: Array) -> None:
        compare(a, b, flag)
        out[...] = np.where(combine(flag, ~p if negated else p), yes, out.dtype.type(0))

    return asm.lanewise(combined, asm.destination(operands[0], result), [*sources, c], result)


@instruction("selp")
def _selp(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.6.3"""
    kind = storage(kind_of(asm, words))
    operands = asm.operands(4)
    p, negated = _predicate_source(asm, operands[3])
    a, b = (asm.source(operands[1], kind), asm.source(operands[2], kind))
    if negated:
        a, b = b, a
    return asm.lanewise(into3(lambda x, y, c: np.where(c, x, y)), asm.destination(operands[0], kind), [a, b, p], kind)


@instruction("slct")
def _slct(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.6.4: a where c >= 0, else b."""
    kind = storage(words[-2])
    ftz = "ftz" in words

    def select(a: Array, b: Array, c: Array) -> Array:
        return np.where((fp.flush_f32(c) if ftz else c) >= 0, a, b)

    return simple(asm, into3(select), kind, 3, sources=[kind, kind, words[-1]])


# ------------------------------------------------------------------------------------------------------------ moves


_TIMERS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


def copy_steps(asm: Assembler, pairs: list[tuple[int, int]]) -> Steps:
    """Steps that copy slots to slots, in order."""
    steps = _copy_steps(pairs)
    asm.registers_only[steps[0]] = Registers(pairs=tuple(pairs))
    return steps


def _copy_steps(pairs: list[tuple[int, int]]) -> Steps:
    copyto = np.copyto
    if len(pairs) == 1:
        ((d, s),) = pairs

        def full1(w: Warp, r: list[Any]) -> None:
            r[d][...] = r[s]

        def masked1(w: Warp, r: list[Any]) -> None:
            copyto(r[d], r[s], where=w.mask)

        return full1, masked1
    if len(pairs) == 2:
        (d, s), (e, t) = pairs

        def full2(w: Warp, r: list[Any]) -> None:
            r[d][...] = r[s]
            r[e][...] = r[t]

        def masked2(w: Warp, r: list[Any]) -> None:
            copyto(r[d], r[s], where=w.mask)
            copyto(r[e], r[t], where=w.mask)

        return full2, masked2

    def full(w: Warp, r: list[Any]) -> None:
        for d, s in pairs:
            r[d][...] = r[s]

    def masked(w: Warp, r: list[Any]) -> None:
        for d, s in pairs:
            copyto(r[d], r[s], where=w.mask)

    return full, masked


@instruction("mov")
def _mov(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.3, 9.7.9.4 (packing and unpacking)"""
    kind = kind_of(asm, words) if words and words[-1] != "b128" else "b128"
    target, value = asm.operands(2)
    if isinstance(target, Vector) or isinstance(value, Vector):
        return _mov_vector(asm, kind, target, value)
    if kind == "b128":
        raise asm.error("mov.b128 between registers is not supported")
    if isinstance(value, Special) and value.name in _TIMERS:
        name = value.name
        d = asm.destination(target, storage(kind))
        dtype = KINDS[storage(kind)]

        def read(w: Warp, r: list[Any]) -> None:
            # Time is counted in instructions: monotonic, and the same for every seed that schedules alike.
            now = w.cta.launch.instructions + 1
            w.cta.launch.instructions += 1
            value = now >> 32 if name.endswith("_hi") else now
            np.copyto(r[d], np.full(32, value).astype(dtype), where=w.mask)

        return read, read
    view = "pred" if kind == "pred" else "u" + str(8 * kind_bytes(storage(kind)))
    if isinstance(value, Special | Immediate):
        view = storage(kind)
    return copy_steps(asm, [(asm.destination(target, view), asm.source(value, view))])


def _part_kind(size: int) -> str:
    return f"u{8 * size}"


def _mov_vector(asm: Assembler, kind: str, target: Operand, value: Operand) -> Steps:
    if kind == "b128":
        raise asm.error("mov.b128 is not supported")
    size = kind_bytes(storage(kind))
    if isinstance(target, Vector) and isinstance(value, Vector):
        raise asm.error("mov between two vectors is not a form of mov")
    items = target.items if isinstance(target, Vector) else value.items if isinstance(value, Vector) else ()
    part = size // max(len(items), 1)
    if part not in (1, 2, 4) or part * len(items) != size:
        raise asm.error(f"{asm.instruction.opcode}: {len(items)} elements do not make {size} bytes")
    view = _part_kind(part)
    pairs: list[tuple[int, int]] = []
    if isinstance(target, Vector):
        if not isinstance(value, Register):
            constant = asm.source(value, f"u{8 * size}")
            whole = asm.slots[constant].value
            if not isinstance(whole, np.ndarray):
                raise asm.error("mov takes several registers' worth from a register or a constant only")
            for i, item in enumerate(items):
                pieces = np.ascontiguousarray(whole.view(KINDS[view])[i :: len(items)])
                pairs.append((_whole_destination(asm, item, part), asm.constant(pieces)))
            return copy_steps(asm, pairs)
        for i, item in enumerate(items):
            pairs.append((_whole_destination(asm, item, part), asm.register(value, view, i)))
        return copy_steps(asm, pairs)
    if not isinstance(target, Register):
        raise asm.error("the destination of mov is not a register")
    for i, item in enumerate(items):
        pairs.append((asm.register(target, view, i, write=True), asm.source(item, view)))
    return copy_steps(asm, pairs)


def _whole_destination(asm: Assembler, item: Operand, part: int) -> int:
    """A destination of `part` bytes; a wider register is zero-extended into."""
    if isinstance(item, Register) and item.type != "pred":
        return asm.raw(item, write=True)
    return asm.destination(item, _part_kind(part))


# -------------------------------------------------------------------------------------------------------------- conversion


_INTEGRAL = ("rni", "rzi", "rmi", "rpi")


def _read_float(kind: str, ftz: bool) -> Callable[[Array], Array]:
    """16- and 32-bit floats as float32, f64 as it is."""
    if kind == "f16":
        return fp.f16_to_f32
    if kind == "bf16":
        return fp.bf16_to_f32
    if kind == "f32" and ftz:
        return fp.flush_f32
    return lambda a: a


@instruction("cvt")
def _cvt(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.21"""
    if len(words) >= 2 and words[-2] in ("bf16x2", "f16x2") and words[-1] == "f32":
        return _cvt_pack(asm, words)
    if "pack" in words:
        raise asm.error(f"{ins.opcode} is not supported")
    if len(words) < 2:
        raise asm.error(f"{ins.opcode} names no types")
    if any(w.endswith("x2") or w in ("tf32", "e4m3", "e5m2") for w in words[-2:]):
        return _cvt_special(asm, words)
    target, source = words[-2], words[-1]
    for kind in (target, source):
        if kind not in INTEGERS and kind not in ("f16", "bf16", "f32", "f64"):
            raise asm.error(f"{ins.opcode}: {kind!r} is not a type of cvt")
    ftz, sat, relu, satfinite = "ftz" in words, "sat" in words, "relu" in words, "satfinite" in words
    integral = next((w for w in words if w in _INTEGRAL), "")
    operands = asm.operands(2)
    register = operands[0]
    if not isinstance(register, Register):
        raise asm.error("the destination of cvt is not a register")
    a = asm.source(operands[1], storage(source))
    if target in INTEGERS:
        # A destination register wider than the type receives the extended value.
        width = max(register.bytes, 2)
        d_kind = ("s" if target[0] == "s" else "u") + str(8 * width)
        d = asm.register(register, d_kind, write=True)
        narrow = KINDS[target] if kind_bytes(target) < width else None
        if source in INTEGERS:
            if sat:
                info = np.iinfo(KINDS[target])

                def saturate(x: Array, out: Array) -> None:
                    if x.dtype.kind == "u":
                        out[...] = np.minimum(x, min(info.max, np.iinfo(x.dtype).max)).astype(KINDS[target])
                    else:
                        limits = np.iinfo(x.dtype)
                        out[...] = np.clip(x, max(info.min, limits.min), min(info.max, limits.max)).astype(KINDS[target])

                return asm.lanewise(saturate, d, [a], d_kind)
            if narrow is None:
                return asm.lanewise(_assign, d, [a], d_kind)
            return asm.lanewise(into1(lambda x: x.astype(narrow)), d, [a], d_kind)
        read = _read_float(source, ftz)
        mode = integral or "rzi"
        dtype = KINDS[target]
        return asm.lanewise(into1(lambda x: fp.float_to_int(read(x), dtype, mode)), d, [a], d_kind)
    d_kind = storage(target)
    d = asm.register(register, d_kind, write=True)
    rounding = rounding_of(words)
    if source in INTEGERS:
        if target == "f64":
            return asm.lanewise(into1(lambda x: fp.int_to_f64(x, rounding)), d, [a], d_kind)
        if target == "f32":

            def to_single(x: Array) -> Array:
                value = fp.int_to_f32(x, rounding)
                return fp.saturate_f32(value) if sat else value

            return asm.lanewise(into1(to_single), d, [a], d_kind)
        # Integers of up to 32 bits are exact in f64, and narrowing that once is correct; f16 rounds the f64 directly.
        if target == "f16" and rounding == "rn":
            return asm.lanewise(into1(lambda x: x.astype(np.float64).astype(np.float16).view(np.uint16)), d, [a], d_kind)
        raise asm.error(f"{ins.opcode} is not supported")
    read = _read_float(source, ftz)
    if target == "f64":
        if source == "f64":
            return asm.lanewise(into1(_round_double(integral)), d, [a], d_kind)
        return asm.lanewise(into1(lambda x: fp.f32_to_f64(read(x), ftz)), d, [a], d_kind)
    if target == "f32":
        if source == "f64":
            return asm.lanewise(into1(lambda x: fp.f64_to_f32(x, rounding, ftz, sat)), d, [a], d_kind)
        if integral:
            return asm.lanewise(into1(lambda x: fp.round_to_integral_f32(read(x), integral, ftz, sat)), d, [a], d_kind)
        return asm.lanewise(into1(lambda x: fp.saturate_f32(read(x)) if sat else read(x)), d, [a], d_kind)
    half: Callable[[Array], Array]
    if source == "f64":
        if target == "f16":
            half = lambda x: x.astype(np.float16).view(np.uint16)  # noqa: E731
        else:
            raise asm.error(f"{ins.opcode} is not supported")
    elif integral:
        narrow16 = fp.f32_to_f16 if target == "f16" else fp.f32_to_bf16
        half = lambda x: narrow16(fp.round_to_integral_f32(read(x), integral))  # noqa: E731
    elif target == source:
        half = lambda x: x  # noqa: E731
    elif target == "f16":
        half = lambda x: fp.f32_to_f16(read(x), rounding, relu, satfinite)  # noqa: E731
    else:
        half = lambda x: fp.f32_to_bf16(read(x), rounding, relu, satfinite)  # noqa: E731
    if sat:
        plain = half
        half = lambda x: plain(fp.saturate_f32(x))  # noqa: E731
    return asm.lanewise(into1(half), d, [a], d_kind)


def _assign(a: Array, out: Array) -> None:
    out[...] = a


def _round_double(mode: str) -> Callable[[Array], Array]:
    table: dict[str, Callable[[Array], Array]] = {"": lambda x: x, "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    return table[mode]


def _cvt_pack(asm: Assembler, words: list[str]) -> Steps:
    """cvt.rn.bf16x2.f32 d, a, b: a goes to the high half."""
    relu, satfinite, rounding = "relu" in words, "satfinite" in words, rounding_of(words)
    if "rs" in words:
        raise asm.error("stochastic rounding is not supported")
    narrow = fp.f32_to_bf16 if words[-2] == "bf16x2" else fp.f32_to_f16

    def pack(a: Array, b: Array, out: Array) -> None:
        both = np.empty(out.shape, np.float32)
        both[..., 0::2] = b
        both[..., 1::2] = a
        out[...] = narrow(both, rounding, relu, satfinite)

    operands = asm.operands(3)
    d = asm.destination(operands[0], "u16x2")
    return asm.lanewise(pack, d, [asm.source(operands[1], "f32"), asm.source(operands[2], "f32")], "u16x2")


def _cvt_special(asm: Assembler, words: list[str]) -> Steps:
    target, source = words[-2], words[-1]
    relu = "relu" in words
    operands = asm.instruction.operands
    if target == "tf32" and source == "f32":
        rounding = next((w for w in words if w in ("rna", "rn", "rz")), "rna")
        return simple(asm, into1(lambda x: fp.f32_to_tf32(x, rounding, relu)), "u32", 1, sources=["f32"])
    if target in ("e4m3x2", "e5m2x2") and source == "f32" and len(operands) == 3:
        fmt = target[:4]

        def narrow(a: Array, b: Array, out: Array) -> None:
            out[...] = fp.f32_to_f8(a, fmt, relu).astype(np.uint16) << np.uint16(8) | fp.f32_to_f8(b, fmt, relu)

        return simple(asm, narrow, "u16", 2, sources=["f32", "f32"])
    if target == "f16x2" and source in ("e4m3x2", "e5m2x2"):
        fmt = source[:4]

        def widen(a: Array, out: Array) -> None:
            out[0::2] = fp.f8_to_f16((a & np.uint16(0xFF)).astype(np.uint8), fmt, relu)
            out[1::2] = fp.f8_to_f16((a >> np.uint16(8)).astype(np.uint8), fmt, relu)

        return simple(asm, widen, "u16x2", 1, sources=["u16"])
    raise asm.error(f"{asm.instruction.opcode} is not supported")


__all__ = ["INTEGERS", "PtxError", "copy_steps", "kind_of", "simple", "storage"]
