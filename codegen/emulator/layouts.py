"""Where the elements of matrices and tiles live: shared-memory descriptors, fragments, tensor memory, TMA boxes.

Pure functions of their arguments, without machine state. Maps come back as read-only arrays and are cached, so that a caller may
ask for them on every instruction. Section numbers are those of PTX ISA 9.1. Violations of a rule raise PtxFault with one line.

Swizzle modes are written as the swizzle width in bytes: 0 (none), 32, 64, 128, and `SWIZZLE_128B_ATOM_32B`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ptx import PtxFault

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

SWIZZLE_128B_ATOM_32B = 12832
"""The 128-byte swizzle that moves 32-byte atoms (tcgen05 descriptors' mode 1)."""

# mode -> (lowest bit of the field that is XORed, its number of bits); the other XOR operand always starts at bit 7.
_SWIZZLE_BITS = {0: (4, 0), 32: (4, 1), 64: (4, 2), 128: (4, 3), SWIZZLE_128B_ATOM_32B: (5, 2)}
_SWIZZLE_WIDTH = {0: 16, 32: 32, 64: 64, 128: 128, SWIZZLE_128B_ATOM_32B: 128}


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


# ---------------------------------------------------------------------------------------------------------------- swizzle


def swizzle(byte_address: Any, mode: int, base_offset: int = 0) -> Any:
    """Absolute shared-memory byte address(es) after the swizzle of `mode` (5.5.7).

    32/64/128: bits [4, 4+b) ^= bits [7, 7+b) with b = 1/2/3; SWIZZLE_128B_ATOM_32B: bits [5, 7) ^= bits [7, 9).
    `base_offset` is the descriptor field of that name: the pattern's first row is row `base_offset` of its 1024-byte
    (512, 256) period, so the row index that enters the XOR is counted from there. Scalars and integer arrays of any shape.
    """
    try:
        low, bits = _SWIZZLE_BITS[mode]
    except KeyError:
        raise PtxFault(f"swizzle mode {mode} is none of 0, 32, 64, 128, SWIZZLE_128B_ATOM_32B") from None
    if not bits:
        return byte_address
    row = (byte_address >> 7) - base_offset
    return byte_address ^ ((row & ((1 << bits) - 1)) << low)


@lru_cache(maxsize=512)
def swizzle_chunks(phase: int, count: int, mode: int) -> Int64:
    """Where `count` consecutive 16-byte chunks go: index of the destination chunk relative to the first, unswizzled one.

    `phase` is the destination address modulo 1024 and a multiple of 128 when swizzled, so that no index is negative.
    `smem.reshape(-1, 16)[destination // 16 + swizzle_chunks(destination % 1024, n, mode)] = data.reshape(n, 16)`
    writes a dense TMA box. Returns int64 [count], read-only.
    """
    if mode and phase % 128:
        raise PtxFault(f"a swizzled tile needs a destination aligned to 128 bytes, not address % 1024 = {phase}")
    if phase % 16:
        raise PtxFault(f"a tile needs a destination aligned to 16 bytes, not address % 1024 = {phase}")
    linear = phase + 16 * np.arange(count, dtype=np.int64)
    result: Int64 = (swizzle(linear, mode) - phase) // 16
    return _frozen(result)


# ------------------------------------------------------------------------------------------ shared-memory matrix descriptors

_WGMMA_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SWIZZLE = {0: 0, 1: SWIZZLE_128B_ATOM_32B, 2: 128, 4: 64, 6: 32}


@dataclass(frozen=True)
class MatrixDescriptor:
    """A shared-memory matrix descriptor, decoded (9.7.15.5.1.2.2 for wgmma, 9.7.16.4.1 for tcgen05). Offsets in bytes."""

    start: int
    """Absolute shared-memory address of element (0, 0)."""
    leading: int
    """LBO, leading dimension byte offset."""
    stride: int
    """SBO, stride dimension byte offset."""
    base_offset: int
    swizzle: int
    """0, 32, 64, 128 or SWIZZLE_128B_ATOM_32B."""

    def advanced(self, byte_offset: int) -> MatrixDescriptor:
        """The same matrix with its start moved (a k step inside or past the swizzle atom)."""
        return MatrixDescriptor(self.start + byte_offset, self.leading, self.stride, self.base_offset, self.swizzle)


def _common_fields(value: int) -> tuple[int, int, int, int]:
    return (value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, value >> 49 & 7


@lru_cache(maxsize=4096)
def decode_wgmma_descriptor(value: int) -> MatrixDescriptor:
    """Decode a 64-bit wgmma descriptor (sm_90a). PtxFault when reserved bits are set."""
    value = int(value)
    if reserved := value & ~(0xC00E_3FFF_3FFF_3FFF):
        raise PtxFault(f"wgmma matrix descriptor {value:#018x} has reserved bits set ({reserved:#x})")
    start, leading, stride, base = _common_fields(value)
    return MatrixDescriptor(start, leading, stride, base, _WGMMA_SWIZZLE[value >> 62])


@lru_cache(maxsize=4096)
def decode_tcgen05_descriptor(value: int) -> MatrixDescriptor:
    """Decode a 64-bit tcgen05 descriptor (sm_100a). PtxFault for reserved bits, a wrong version or an unknown swizzle mode.

    Bit 52 (LBO as an absolute address) exists on sm_103a only and is refused.
    """
    value = int(value)
    if value >> 52 & 1:
        raise PtxFault(f"tcgen05 matrix descriptor {value:#018x}: bit 52 (absolute leading address) does not exist on sm_100a")
    if reserved := value & ~(0xE00E_7FFF_3FFF_3FFF | 1 << 47):
        raise PtxFault(f"tcgen05 matrix descriptor {value:#018x} has reserved bits set ({reserved:#x})")
    if value >> 46 & 3 != 1:
        raise PtxFault(f"tcgen05 matrix descriptor {value:#018x}: bits 46-48 must be 0b001")
    mode = value >> 61
    if mode not in _TCGEN05_SWIZZLE:
        raise PtxFault(f"tcgen05 matrix descriptor {value:#018x}: swizzle mode {mode} is none of 0, 1, 2, 4, 6")
    start, leading, stride, base = _common_fields(value)
    return MatrixDescriptor(start, leading, stride, base, _TCGEN05_SWIZZLE[mode])


def _encode_common(descriptor: MatrixDescriptor) -> int:
    value = 0
    for name, shift in (("start", 0), ("leading", 16), ("stride", 32)):
        field: int = getattr(descriptor, name)
        if field % 16 or not 0 <= field < 1 << 18:
            raise PtxFault(f"matrix descriptor {name} {field} is not a multiple of 16 in [0, 2^18)")
        value |= field >> 4 << shift
    if not 0 <= descriptor.base_offset < 8:
        raise PtxFault(f"matrix descriptor base offset {descriptor.base_offset} is not in 0..7")
    return value | descriptor.base_offset << 49


def encode_wgmma_descriptor(descriptor: MatrixDescriptor) -> int:
    """The 64-bit value of a wgmma descriptor; inverse of decode_wgmma_descriptor."""
    for code, mode in _WGMMA_SWIZZLE.items():
        if mode == descriptor.swizzle:
            return _encode_common(descriptor) | code << 62
    raise PtxFault(f"wgmma matrix descriptors have no swizzle mode {descriptor.swizzle}")


def encode_tcgen05_descriptor(descriptor: MatrixDescriptor) -> int:
    """The 64-bit value of a tcgen05 descriptor; inverse of decode_tcgen05_descriptor."""
    for code, mode in _TCGEN05_SWIZZLE.items():
        if mode == descriptor.swizzle:
            return _encode_common(descriptor) | 1 << 46 | code << 61
    raise PtxFault(f"tcgen05 matrix descriptors have no swizzle mode {descriptor.swizzle}")


@lru_cache(maxsize=512)
def _operand_pattern(leading: int, stride: int, mode: int, mn: int, k: int, element_bytes: int, major: str) -> Int64:
    """Byte offsets [mn, k] from the start address, before the swizzle: the canonical layouts of 9.7.16.3."""
    row = np.arange(mn, dtype=np.int64)[:, None]
    col = np.arange(k, dtype=np.int64)[None, :]
    per_chunk = 16 // element_bytes
    width = _SWIZZLE_WIDTH[mode]
    if major == "k":
        if mode == 0:
            return (row % 8) * 16 + (row // 8) * stride + (col // per_chunk) * leading + (col % per_chunk) * element_bytes
        return (row % 8) * width + (row // 8) * stride + col * element_bytes
    if mode == 0:
        # The two offsets swap roles here: SBO separates 16-byte chunks along MN, LBO separates groups of 8 along K.
        return (row % per_chunk) * element_bytes + (row // per_chunk) * stride + (col % 8) * 16 + (col // 8) * leading
    per_row = width // element_bytes
    group = 4 if mode == SWIZZLE_128B_ATOM_32B else 8  # k rows in one swizzle period
    return (row % per_row) * element_bytes + (row // per_row) * leading + (col % group) * width + (col // group) * stride


@lru_cache(maxsize=1024)
def operand_offsets(descriptor: MatrixDescriptor, mn: int, k: int, element_bytes: int, major: str) -> Int64:
    """Absolute shared-memory byte address of every element of an operand: int64 [mn, k], read-only (9.7.15.5.1, 9.7.16.3).

    mn: M of an A operand, N of a B operand; k: depth of one instruction (32 bytes of elements); major: "k" or "mn".
    A K-major row is at most one swizzle width long: k steps beyond it move the descriptor's start address, not LBO.
    """
    mode = descriptor.swizzle
    if major not in ("k", "mn"):
        raise PtxFault(f"operand major {major!r} is neither 'k' nor 'mn'")
    if element_bytes not in (1, 2, 4):
        raise PtxFault(f"operand elements of {element_bytes} bytes do not exist")
    if mode == SWIZZLE_128B_ATOM_32B and not (major == "mn" and element_bytes == 4):
        raise PtxFault("the 128-byte swizzle with 32-byte atoms is for MN-major 32-bit elements only")
    if major == "mn" and element_bytes == 4 and mode != SWIZZLE_128B_ATOM_32B:
        raise PtxFault("MN-major 32-bit operands need the 128-byte swizzle with 32-byte atoms")
    if major == "k" and mode and k * element_bytes > mode:
        raise PtxFault(f"a K-major row of {k * element_bytes} bytes is longer than the {mode}-byte swizzle")
    pattern = _operand_pattern(descriptor.leading, descriptor.stride, mode, mn, k, element_bytes, major)
    result: Int64 = swizzle(descriptor.start + pattern, mode, descriptor.base_offset)
    return _frozen(result)


# ----------------------------------------------------------------------------------------------------- register fragments


@lru_cache(maxsize=64)
def wgmma_d_fragment(n: int) -> tuple[Int64, Int64]:
    """Rows and columns of a wgmma m64n`n` f32 accumulator: two int64 [128, n // 2] (thread of the warpgroup, register) (9.7.15.5.1).

    An f16 accumulator packs registers 2i and 2i + 1 of this map into one 32-bit register, low half first.
    """
    if n % 8 or not 8 <= n <= 256:
        raise PtxFault(f"wgmma n = {n} is not a multiple of 8 in 8..256")
    thread = np.arange(128, dtype=np.int64)[:, None]
    register = np.arange(n // 2, dtype=np.int64)[None, :]
    group, quad = thread % 32 // 4, thread % 4
    rows = 16 * (thread // 32) + group + 8 * (register // 2 % 2)
    cols = 8 * (register // 4) + 2 * quad + register % 2
    return _frozen(rows), _frozen(cols)


@lru_cache(maxsize=1)
def wgmma_a_fragment() -> tuple[Int64, Int64]:
    """Rows and k of a wgmma m64k16 16-bit A operand in registers: two int64 [128, 4, 2] (thread, register, half: 0 = low) (9.7.15.5.1)."""
    rows, cols, _, _ = _mma_ab(16)
    warp = np.arange(128, dtype=np.int64)[:, None, None] // 32
    return _frozen(np.tile(rows, (4, 1, 1)) + 16 * warp), _frozen(np.tile(cols, (4, 1, 1)))


@lru_cache(maxsize=4)
def _mma_ab(k: int) -> tuple[Int64, Int64, Int64, Int64]:
    lane = np.arange(32, dtype=np.int64)[:, None, None]
    half = np.arange(2, dtype=np.int64)[None, None, :]
    group, quad = lane // 4, lane % 4
    a = np.arange(k // 4, dtype=np.int64)[None, :, None]
    a_row, a_col = np.broadcast_arrays(group + 8 * (a % 2) + 0 * half, 2 * quad + half + 8 * (a // 2))
    b = np.arange(k // 8, dtype=np.int64)[None, :, None]
    b_row, b_col = np.broadcast_arrays(2 * quad + half + 8 * b, group + 0 * half + 0 * b)
    return a_row, a_col, b_row, b_col


@lru_cache(maxsize=4)
def mma_a_fragment(k: int = 16) -> tuple[Int64, Int64]:
    """Rows and k of the 16-bit A operand of mma.sync m16n8k16 (k8): two int64 [32, k // 4, 2] (lane, register, half) (9.7.14.5)."""
    _check_mma_k(k)
    rows, cols, _, _ = _mma_ab(k)
    return _frozen(rows.copy()), _frozen(cols.copy())


@lru_cache(maxsize=4)
def mma_b_fragment(k: int = 16) -> tuple[Int64, Int64]:
    """k and n of the 16-bit B operand of mma.sync m16n8k16 (k8): two int64 [32, k // 8, 2] (lane, register, half) (9.7.14.5)."""
    _check_mma_k(k)
    _, _, rows, cols = _mma_ab(k)
    return _frozen(rows.copy()), _frozen(cols.copy())


@lru_cache(maxsize=1)
def mma_d_fragment() -> tuple[Int64, Int64]:
    """Rows and columns of the f32 C/D operands of mma.sync m16n8: two int64 [32, 4] (lane, register) (9.7.14.5)."""
    rows, cols = wgmma_d_fragment(8)
    return _frozen(rows[:32].copy()), _frozen(cols[:32].copy())


def _check_mma_k(k: int) -> None:
    if k not in (8, 16):
        raise PtxFault(f"mma.sync m16n8k{k} has no 16-bit form: k is 8 or 16")


@lru_cache(maxsize=8)
def ldmatrix_map(num: int, trans: bool = False) -> tuple[Int64, Int64]:
    """Sources of ldmatrix .m8n8 .x`num` .b16, destinations of stmatrix (9.7.14.5.15, 9.7.14.5.16).

    Returns (supplier, element), two int64 [32, num, 2] (lane, register, half: 0 = low): the lane whose address operand points to
    the 16-byte row, and the index of the 16-bit element in that row. Matrix i takes its row addresses from lanes 8i .. 8i + 7.
    """
    if num not in (1, 2, 4):
        raise PtxFault(f"ldmatrix/stmatrix .x{num}: the count is 1, 2 or 4")
    lane = np.arange(32, dtype=np.int64)[:, None, None]
    matrix = np.arange(num, dtype=np.int64)[None, :, None]
    half = np.arange(2, dtype=np.int64)[None, None, :]
    along, across = lane // 4 + 0 * matrix + 0 * half, 2 * (lane % 4) + half + 0 * matrix
    row, element = (across, along) if trans else (along, across)
    return _frozen(8 * matrix + row), _frozen(element + 0 * matrix)


# ---------------------------------------------------------------------------------------------------------- tensor memory

# shape -> (registers per repetition, largest repetition, lanes touched, columns per repetition)
TMEM_SHAPES = {
    "32x32b": (1, 128, 32, 1),
    "16x64b": (1, 128, 16, 2),
    "16x128b": (2, 64, 16, 4),
    "16x256b": (4, 32, 16, 8),
    "16x32bx2": (1, 128, 16, 1),
}
TMEM_LANES = 128
TMEM_COLUMNS = 512


def tmem_registers(shape: str, num: int) -> int:
    """32-bit registers of a tcgen05.ld/st of this shape and repetition (9.7.16.8.2, Table 49); the same with pack/unpack."""
    if shape not in TMEM_SHAPES:
        raise PtxFault(f"tcgen05.ld/st shape {shape!r} is none of {', '.join(TMEM_SHAPES)}")
    registers, largest, _, _ = TMEM_SHAPES[shape]
    if num < 1 or num > largest or num & (num - 1):
        raise PtxFault(f"tcgen05.ld/st.{shape}.x{num}: the repetition is a power of two up to {largest}")
    return registers * num


@lru_cache(maxsize=256)
def tmem_map(shape: str, num: int, half_split: int = 0, pack16: bool = False) -> tuple[Int64, Int64]:
    """Cells of a tcgen05.ld/st: (lane, column), relative to the base address (9.7.16.2.3, 9.7.16.8).

    Both int64 [32, registers] (lane of the warp, register). With `pack16` (.pack::16b of ld, .unpack::16b of st) the column array is
    [32, registers, 2]: the cells whose low halves are the low and the high half of the register, two adjacent columns.
    half_split: the immediate of .16x32bx2, the column distance of the cells of lanes 16..31.
    """
    registers = tmem_registers(shape, num)
    t = np.arange(32, dtype=np.int64)[:, None]
    r = np.arange(registers, dtype=np.int64)[None, :]
    if half_split and shape != "16x32bx2":
        raise PtxFault(f"tcgen05.ld/st.{shape} has no half-split offset")
    split: Int64 = np.zeros((32, 1), dtype=np.int64)
    if shape == "32x32b":
        lane, column = t, r
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t & 1), (t >> 1 & 1) + 2 * r
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (r & 1), (t & 3) + 4 * (r >> 1)
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (r >> 1 & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)
    else:
        lane, column = t % 16, r
        split = np.where(t >= 16, half_split, 0)
    lane, column, split = (np.array(x) for x in np.broadcast_arrays(lane, column, split))
    column = 2 * column[..., None] + np.arange(2) + split[..., None] if pack16 else column + split
    return _frozen(lane), _frozen(column)


@lru_cache(maxsize=64)
def tcgen05_d_layout(m: int, n: int, ws: bool, base_lane: int = 0) -> tuple[Int64, Int64]:
    """Cells of a one-CTA tcgen05.mma accumulator: (lane, column relative to the D column), two int64 [m, n] (9.7.16.10.5).

    M=128: layout D. M=64 .ws: E, two column halves in lanes 0-63 and 64-127. M=32 .ws: G, four column quarters. M=64 without .ws: F,
    16 lanes of every 32 (the upper 16 when base_lane is 16). An f16 accumulator uses the low half of the same cells.
    """
    row = np.arange(m, dtype=np.int64)[:, None]
    col = np.arange(n, dtype=np.int64)[None, :]
    half_datapath = m == 64 and not ws
    if base_lane and not (half_datapath and base_lane == 16):
        raise PtxFault(f"a tcgen05 accumulator with M={m}{' .ws' if ws else ''} cannot start at lane {base_lane}")
    if half_datapath:
        lane, column = 32 * (row // 16) + row % 16 + base_lane + 0 * col, col + 0 * row
    else:
        groups = _lane_groups(m, ws)
        width = n // groups
        lane, column = row + m * (col // width), col % width + 0 * row
    return _frozen(lane), _frozen(column)


def _lane_groups(m: int, ws: bool) -> int:
    if m == 128:
        return 1
    if ws and m in (32, 64):
        return 128 // m
    raise PtxFault(f"tcgen05.mma{'.ws' if ws else ''} has no M={m}")


def tcgen05_d_columns(m: int, n: int, ws: bool) -> int:
    """Tensor-memory columns of an accumulator (9.7.16.10.5)."""
    return n if m == 64 and not ws else n // _lane_groups(m, ws)


@lru_cache(maxsize=64)
def tcgen05_a_layout(m: int, k: int, ws: bool, base_lane: int = 0) -> tuple[Int64, Int64, Int64]:
    """Cells of a K-major 16-bit A operand in tensor memory: (lane [groups, m], column [k], half [k]) (9.7.16.10.2, 9.7.16.10.5).

    Two elements a cell, even k in the low half (half 0). With .ws each lane group reads its own copy of A: group g (the g-th slice of
    N // groups columns of B and D) takes row m from lane m + M * g. groups is 1 for M=128 and without .ws, 2 for M=64, 4 for M=32.
    """
    row = np.arange(m, dtype=np.int64)
    if m == 64 and not ws:
        lane = (32 * (row // 16) + row % 16 + base_lane)[None, :]
    else:
        groups = _lane_groups(m, ws)
        lane = row[None, :] + m * np.arange(groups, dtype=np.int64)[:, None]
    depth = np.arange(k, dtype=np.int64)
    return _frozen(lane), _frozen(depth // 2), _frozen(depth % 2)


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of a dense tcgen05.mma kind::f16 (9.7.16.4.2). k is 16."""

    m: int
    n: int
    a_format: str = "bf16"
    """f16 or bf16."""
    b_format: str = "bf16"
    d_format: str = "f32"
    """f16 or f32."""
    a_major: str = "k"
    """k or mn."""
    b_major: str = "k"
    negate_a: bool = False
    negate_b: bool = False
    max_shift: int = 0
    """Largest column shift of a zero-column mask: 0, 8, 16 or 32; .ws only."""


_FORMATS = ("f16", "bf16")
_MAX_SHIFTS = (0, 8, 16, 32)


def _check_instruction(descriptor: InstructionDescriptor, ws: bool) -> None:
    m, n = descriptor.m, descriptor.n
    if ws:
        legal = m in (32, 64, 128) and n in (64, 128, 256)
        rule = "M in {32, 64, 128}, N in {64, 128, 256}"
    else:
        step = {64: 8, 128: 16}.get(m, 0)
        legal = bool(step) and step <= n <= 256 and n % step == 0
        rule = "M=64 with N a multiple of 8 up to 256, or M=128 with N a multiple of 16 up to 256"
    if not legal:
        raise PtxFault(f"tcgen05.mma{'.ws' if ws else ''} kind::f16 has no shape M={m}, N={n}: it needs {rule}")
    if descriptor.d_format == "f16" and (descriptor.a_format, descriptor.b_format) != ("f16", "f16"):
        raise PtxFault("tcgen05.mma kind::f16 with an f16 accumulator needs f16 A and B")
    if descriptor.max_shift and not ws:
        raise PtxFault("the instruction descriptor's maximum column shift is for tcgen05.mma.ws only")


@lru_cache(maxsize=256)
def decode_instruction_descriptor(value: int, ws: bool) -> InstructionDescriptor:
    """Decode and check the instruction descriptor of kind::f16, cta_group::1 (9.7.16.4.2, shapes of 9.7.16.2.1).

    PtxFault for reserved bits, sparsity, formats other than f16/bf16 and f16/f32, and illegal shapes.
    """
    value = int(value)
    if value & 0b111:
        raise PtxFault(f"instruction descriptor {value:#010x}: sparse MMA is not supported")
    if value >> 3 & 1:
        raise PtxFault(f"instruction descriptor {value:#010x}: the saturate bit is for integer kinds only")
    if reserved := value & (1 << 6 | 1 << 23 | 1 << 29):
        raise PtxFault(f"instruction descriptor {value:#010x} has reserved bits set ({reserved:#x})")
    d, a, b = value >> 4 & 3, value >> 7 & 7, value >> 10 & 7
    if d > 1 or a > 1 or b > 1:
        raise PtxFault(f"instruction descriptor {value:#010x}: kind::f16 has no formats D={d}, A={a}, B={b}")
    descriptor = InstructionDescriptor(
        m=(value >> 24 & 31) << 4,
        n=(value >> 17 & 63) << 3,
        a_format=_FORMATS[a],
        b_format=_FORMATS[b],
        d_format=("f16", "f32")[d],
        a_major=("k", "mn")[value >> 15 & 1],
        b_major=("k", "mn")[value >> 16 & 1],
        negate_a=bool(value >> 13 & 1),
        negate_b=bool(value >> 14 & 1),
        max_shift=_MAX_SHIFTS[value >> 30 & 3],
    )
    _check_instruction(descriptor, ws)
    return descriptor


def encode_instruction_descriptor(descriptor: InstructionDescriptor, ws: bool) -> int:
    """The 32-bit value; inverse of decode_instruction_descriptor, with the same checks."""
    _check_instruction(descriptor, ws)
    return (
        ("f16", "f32").index(descriptor.d_format) << 4
        | _FORMATS.index(descriptor.a_format) << 7
        | _FORMATS.index(descriptor.b_format) << 10
        | int(descriptor.negate_a) << 13
        | int(descriptor.negate_b) << 14
        | ("k", "mn").index(descriptor.a_major) << 15
        | ("k", "mn").index(descriptor.b_major) << 16
        | descriptor.n >> 3 << 17
        | descriptor.m >> 4 << 24
        | _MAX_SHIFTS.index(descriptor.max_shift) << 30
    )


def zero_column_mask_enabled(value: int) -> bool:
    """Whether a zero-column mask descriptor masks anything (bit 39; 9.7.16.4.3). Masks themselves are not modelled."""
    return bool(int(value) >> 39 & 1)


# -------------------------------------------------------------------------------------------------------------- TMA tiles


@dataclass(frozen=True, eq=False)
class TmaRows:
    """A TMA box as rows of contiguous bytes. Element strides never apply to the innermost dimension (driver API), so rows are dense.

    Row i of the box holds `row_bytes` bytes at box offset i * row_bytes (before the swizzle). Its bytes [first, first + length) come
    from global byte offsets global_offset[i] .. + length when inside[i]; every other byte of the box is out of bounds.
    """

    row_bytes: int
    global_offset: Int64
    """[rows]: byte offset from the tensor's base of the row's first byte in bounds; meaningful only where `inside`."""
    inside: Bool
    """[rows]: every outer coordinate is in bounds and the row has bytes in bounds."""
    first: int
    length: int
    whole: bool
    """No byte of the box is out of bounds."""

    @property
    def box_bytes(self) -> int:
        """Bytes of the whole box: what the load adds to the barrier's transaction count, out-of-bounds bytes included."""
        return self.row_bytes * len(self.inside)


@lru_cache(maxsize=256)
def _outer_index(counts: tuple[int, ...]) -> Int64:
    """Index of every box row along each outer dimension: int64 [dims, rows], last dimension fastest."""
    return _frozen(np.indices(counts, dtype=np.int64).reshape(len(counts), -1))


def tma_box_shape(box: Sequence[int], element_strides: Sequence[int] | None = None) -> tuple[int, ...]:
    """Shape of a box in shared memory, outermost first: ceil(box / element stride), the innermost stride being ignored."""
    if element_strides is None:
        return tuple(box)
    outer = [math.ceil(extent / step) for extent, step in zip(box[:-1], element_strides[:-1], strict=True)]
    return (*outer, box[-1])


def tma_rows(
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    coords: Sequence[int],
    element_bytes: int,
    element_strides: Sequence[int] | None = None,
) -> TmaRows:
    """The rows of a tiled-mode TMA box (5.5.3, 9.7.9.27; interleave none).

    shape, box [rank] in elements, strides [rank - 1] in bytes, element_strides [rank]: outermost dimension first, the innermost
    dimension being dense. coords [rank]: innermost first, as the instruction has them; may be negative or past the end.
    """
    rank = len(shape)
    if not len(box) == len(coords) == rank or len(strides) != rank - 1:
        raise PtxFault(f"a rank-{rank} tensor map needs {rank} box extents and coordinates and {rank - 1} strides")
    counts = tma_box_shape(box, element_strides)
    inner = int(coords[0])
    low, high = max(inner, 0), min(inner + counts[-1], shape[-1])
    length = max(high - low, 0) * element_bytes
    first = (low - inner) * element_bytes if length else 0
    rows = math.prod(counts[:-1])
    offset: Int64 = np.full(rows, low * element_bytes, dtype=np.int64)
    inside: Bool = np.full(rows, length > 0)
    if rank > 1:
        index = _outer_index(counts[:-1])
        for axis in range(rank - 1):
            step = 1 if element_strides is None else element_strides[axis]
            start, last = int(coords[rank - 1 - axis]), int(coords[rank - 1 - axis]) + (counts[axis] - 1) * step
            position = index[axis] * step + start
            offset += position * strides[axis]
            if start < 0 or last >= shape[axis]:
                inside &= (position >= 0) & (position < shape[axis])
    whole = length == counts[-1] * element_bytes and bool(inside.all())
    return TmaRows(counts[-1] * element_bytes, offset, inside, first, length, whole)


def tma_tile(
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    coords: Sequence[int],
    element_bytes: int,
    smem_address: int,
    swizzle_mode: int = 0,
    element_strides: Sequence[int] | None = None,
) -> tuple[Int64, Int64, Bool]:
    """Every element of a TMA box: (global byte offset, absolute shared-memory byte address, in bounds), each [*box shape].

    Arguments as in tma_rows; the box is dense in shared memory at smem_address (128-byte aligned when swizzled) and the swizzle acts
    on the absolute address. Global offsets of elements out of bounds are not to be used.
    """
    counts = tma_box_shape(box, element_strides)
    rows = tma_rows(shape, strides, box, coords, element_bytes, element_strides)
    if swizzle_mode and smem_address % 128:
        raise PtxFault(f"a swizzled tile needs a shared-memory address aligned to 128 bytes, not {smem_address:#x}")
    if swizzle_mode and rows.row_bytes > _SWIZZLE_WIDTH.get(swizzle_mode, 0):
        raise PtxFault(f"a box row of {rows.row_bytes} bytes is wider than swizzle mode {swizzle_mode}")
    column = np.arange(counts[-1], dtype=np.int64) * element_bytes
    offset = rows.global_offset[:, None] + (column - rows.first)[None, :]
    inside = rows.inside[:, None] & ((column >= rows.first) & (column < rows.first + rows.length))[None, :]
    linear = smem_address + np.arange(math.prod(counts), dtype=np.int64) * element_bytes
    smem: Int64 = swizzle(linear, swizzle_mode)
    return offset.reshape(counts), smem.reshape(counts), inside.reshape(counts)
