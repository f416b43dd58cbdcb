"""Warp and warpgroup matrix instructions: wgmma, mma.sync, ldmatrix, stmatrix (PTX ISA 9.1 sections 9.7.14 and 9.7.15).

Each warp of a warpgroup computes its own 16 rows of a wgmma. The operands in shared memory are read when the scheduler decides between
commit and wait; until the wait the accumulator registers hold poison. How products are accumulated is tensor_core.py's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .access import _shared, check_lanes, check_shared
from .alu import Steps
from .asynchronous import shared_reader
from .control import aligned
from .decode import ACCESS_HOOKS, EXIT_HOOKS, Assembler, Code, instruction, uniform
from .hazards import Access
from .layouts import (
    MatrixDescriptor,
    decode_wgmma_descriptor,
    ldmatrix_map,
    mma_a_fragment,
    mma_b_fragment,
    mma_d_fragment,
    operand_offsets,
    wgmma_a_fragment,
    wgmma_d_fragment,
)
from .machine import LANES, Cta, Pending, Warp
from .memory import POISON32, SHARED_START
from .ptx import Immediate, Instruction, Operand, PtxError, Register, Vector
from .tensor_core import multiply_accumulate, widen

Array = NDArray[Any]
Int64 = NDArray[np.int64]


def vector_registers(asm: Assembler, operand: Operand, count: int, *, write: bool = False) -> Int64:
    """Row numbers in the warp's 32-bit bank of a vector of 32-bit registers, which the instruction reads or writes."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise asm.error(f"{asm.instruction.opcode} needs a vector of {count} registers, not {len(items)}")
    rows = []
    for item in items:
        if not isinstance(item, Register) or item.bytes != 4 or item.type == "pred":
            raise asm.error(f"{asm.instruction.opcode}: the vector must be made of 32-bit registers")
        asm.access(item, write=write)
        rows.append(item.index)
    return np.array(rows, np.int64)


@lru_cache(maxsize=4096)
def operand_granules(descriptor: MatrixDescriptor, mn: int, k: int, major: str, shift: int) -> Int64:
    """Distinct shadow granules of a 16-bit operand."""
    return np.unique(operand_offsets(descriptor, mn, k, 2, major) >> shift)


@lru_cache(maxsize=8192)
def operand_words(descriptor: MatrixDescriptor, mn: int, k: int, major: str, first: int, count: int) -> Int64:
    """Indices of 16-bit words in shared memory of rows first .. first + count of an operand."""
    words: Int64 = np.ascontiguousarray(operand_offsets(descriptor, mn, k, 2, major)[first : first + count] >> 1)
    return words


# ---------------------------------------------------------------------------------------------------------------------- wgmma


class Accumulator:
    """Accumulator registers in flight."""

    __slots__ = ("rows", "time", "value")

    def __init__(self, rows: Int64, value: Array) -> None:
        self.rows = rows
        self.value = value
        self.time = 0


class WgmmaState:
    """The wgmma operations of one warp: since the last commit, and in committed groups, oldest first."""

    def __init__(self, actor: int) -> None:
        self.actor = actor
        self.time = 1
        self.open: list[Callable[[], None]] = []
        self.groups: list[tuple[int, Pending, list[Callable[[], None]]]] = []
        self.accumulators: dict[tuple[int, ...], Accumulator] = {}
        # For the checks.
        self.issued: dict[int, tuple[int, int]] = {}
        """Group number to (actor, clock) of the warp when it last issued into the group."""
        self.flying = 0
        """Registers (bit by number) of accumulators and A fragments in flight."""
        self.fragments: list[tuple[int, int]] = []
        """(group, registers) of the A fragments in flight."""
        self.touched = 0
        """Registers accessed since the last wgmma.fence."""
        self.fenced = False
        self.code: Code | None = None


def register_bits(rows: Int64) -> int:
    result = 0
    for row in rows.tolist():
        result |= 1 << row
    return result


def wgmma_state(w: Warp) -> WgmmaState:
    if w.wgmma is None:
        w.wgmma = WgmmaState(w.cta.actor(("wgmma", w.index), f"wgmma of {w.name}"))
        w.cta.cluster.wgmma[w.wgmma.actor] = w.wgmma
    state: WgmmaState = w.wgmma
    return state


@lru_cache(maxsize=64)
def _fragment_index(n: int) -> Int64:
    """[n / 2, 32]: flat index in a warp's 16 x n tile of each accumulator register."""
    rows, cols = wgmma_d_fragment(n)
    return np.ascontiguousarray((rows[:32] * n + cols[:32]).T)


def check_operand(
    w: Warp, code: Code, descriptor: MatrixDescriptor, mn: int, k: int, major: str, epoch: np.int64, reader: int, who: str
) -> None:
    """Bounds, initialisation and race checks of an operand in shared memory."""
    cta = w.cta
    if _operand_fault(w, code, descriptor, mn, k, major, who):
        return
    shadow = cta.shadow
    assert shadow is not None
    granules = operand_granules(descriptor, mn, k, major, shadow.shift)
    last = check_shared(w, code, granules, epoch, False, reader=reader, who=who, proxy=True)
    check_tile(w, code, descriptor, granules, last, shadow.shift, who)


def check_tile(w: Warp, code: Code, descriptor: MatrixDescriptor, granules: Int64, last: Int64 | None, shift: int, who: str) -> None:
    """Hold an operand's descriptor against the tensor load that wrote its first and last granule."""
    tiles = w.cta.cluster.tiles
    if last is None or not tiles:
        return
    for place in (0, -1):
        tile = tiles.get(int(last[place]))
        if tile is None:
            continue
        start, swizzle, row_bytes, load = tile
        address = int(granules[place]) << shift
        pattern = 8 * descriptor.swizzle
        base = (start & (pattern - 1)) >> 7 if pattern else 0
        wrong = ""
        if descriptor.swizzle != swizzle:
            wrong = f"the descriptor says {descriptor.swizzle or 'no'}-byte swizzle, the tensor map {swizzle or 'no'}"
        elif swizzle and row_bytes != swizzle:
            wrong = f"rows of the box are {row_bytes} bytes, not the {swizzle} that its swizzle and the descriptor repeat after"
        elif place == 0 and descriptor.base_offset != base:
            # Where the operand begins; further rows may come in boxes of their own, at any row of the pattern.
            wrong = (
                f"the tile starts {start & (pattern - 1)} bytes into a pattern of {pattern}, "
                f"the descriptor's base offset is {descriptor.base_offset}, not {base}"
            )
        if wrong:
            where = w.cta.launch.regions.shared(address)
            w.cta.report(
                "tensor_map",
                f"{who} (PTX line {code.line}) reads an operand at {where} that the tensor load of PTX line {load.line} wrote: {wrong}",
                code,
                w,
                0,
                address,
                Access(load.line, "the tensor load", 0, w.cta.launch.code.sources.get(load.line, "")),
                place=where,
                missing="one layout in the tensor map, the destination's alignment and the matrix descriptor",
            )
            return


def _operand_fault(w: Warp, code: Code, descriptor: MatrixDescriptor, mn: int, k: int, major: str, who: str) -> bool:
    low, high = _operand_range(descriptor, mn, k, major)
    if low < SHARED_START or high > w.cta.shared_end:
        at = low if low < SHARED_START else high - 2
        w.cta.report(
            "out_of_bounds",
            f"{who} (PTX line {code.line}) reads an operand at shared{low - SHARED_START:+#x} to shared{high - SHARED_START:+#x}: "
            f"the launch has {w.cta.shared_end - SHARED_START} bytes of shared memory",
            code,
            w,
            0,
            at,
        )
        return True
    return False


@lru_cache(maxsize=4096)
def _operand_range(descriptor: MatrixDescriptor, mn: int, k: int, major: str) -> tuple[int, int]:
    offsets = operand_offsets(descriptor, mn, k, 2, major)
    return int(offsets.min()), int(offsets.max()) + 2


def read_operand(w: Warp, descriptor: MatrixDescriptor, mn: int, k: int, major: str, first: int, count: int, fmt: str) -> Array:
    """Rows of a 16-bit operand in shared memory as float64; poison where it leaves shared memory."""
    words = w.cta.words[2]
    index = operand_words(descriptor, mn, k, major, first, count)
    low, high = _operand_range(descriptor, mn, k, major)
    if low >= 0 and high <= 2 * len(words):
        return widen(words[index], fmt)
    inside = (index >= 0) & (index < len(words))
    return widen(np.where(inside, words[np.where(inside, index, 0)], np.uint16(0x7FFF)), fmt)


@instruction("wgmma.mma_async.sp")
def _wgmma_sparse(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    raise asm.error("sparse wgmma is not supported")


@instruction("wgmma.mma_async")
def _wgmma(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.15.5.2"""
    shape = next((w for w in words if w.startswith("m64n")), "")
    types = words[words.index(shape) + 1 :] if shape else []
    if not shape.endswith("k16") or len(types) != 3 or types[0] != "f32" or types[1] != types[2] or types[1] not in ("bf16", "f16"):
        raise asm.error(f"{ins.opcode} is not supported: m64nNk16.f32 of bf16 or f16 is")
    n, fmt = int(shape[4:-3]), types[1]
    index = _fragment_index(n)
    operands = ins.operands
    from_registers = len(operands) > 1 and isinstance(operands[1], Vector)
    expected = 7 if from_registers else 8
    if len(operands) != expected:
        raise asm.error(f"{ins.opcode} takes {expected} operands, not {len(operands)}")
    # Read too when scale-d is true: what is added to then is in flight or checked by its fence.
    rows = vector_registers(asm, operands[0], n // 2, write=True)
    key = tuple(rows.tolist())
    d_bits = register_bits(rows)
    if len(set(key)) != len(key):
        raise asm.error(f"{ins.opcode}: an accumulator register is named twice")
    a_rows = vector_registers(asm, operands[1], 4) if from_registers else None
    a_bits = 0 if a_rows is None else register_bits(a_rows)
    watch_registers(asm, d_bits | a_bits)
    a_desc = -1 if from_registers else asm.source(operands[1], "u64")
    b_desc = asm.source(operands[2], "u64")
    scale_d = operands[3]
    accumulate = asm.source(scale_d, "pred") if not isinstance(scale_d, Immediate) else asm.constant(np.full(32, bool(scale_d.value)))
    scales = [asm.integer(o, "the input scale") for o in operands[4:6]]
    if any(s not in (1, -1) for s in scales):
        raise asm.error(f"{ins.opcode}: input scales are 1 or -1")
    transposes = [asm.integer(o, "the transpose flag") for o in operands[6:]]
    a_major = "k" if from_registers or not transposes[0] else "mn"
    b_major = "mn" if transposes[-1] else "k"
    sign = float(scales[0] * scales[1])
    fragment = wgmma_a_fragment()
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        state = wgmma_state(w)
        cta = w.cta
        quarter = 16 * (w.index % 4)
        add = bool(uniform(r[accumulate], w, "scale-d"))
        a_descriptor = None if from_registers else decode_wgmma_descriptor(uniform(r[a_desc], w, "the A descriptor"))
        b_descriptor = decode_wgmma_descriptor(uniform(r[b_desc], w, "the B descriptor"))
        a_value: Array | None = None
        if a_rows is not None:
            halves = w.B32[a_rows].T.copy().view(np.uint16).reshape(32, 4, 2)
            bits = np.empty((16, 16), np.uint16)
            bits[fragment[0][:32], fragment[1][:32]] = halves
            a_value = widen(bits, fmt)
        if (profile := cta.launch.profile) is not None and w.index % 4 == 0:
            # The warps of a warpgroup share one instruction: its operands are counted once.
            profile.move("wgmma operand", ((0 if from_registers else 64) + n) * 32)
        if cta.check:
            who = f"wgmma of {w.name}"
            epoch = np.int64(state.time << hz.CLOCK_SHIFT | state.actor | int(code.tag))
            if a_descriptor is not None:
                check_operand(w, code, a_descriptor, 64, 16, a_major, epoch, state.actor, who)
            check_operand(w, code, b_descriptor, n, 16, b_major, epoch, state.actor, who)
            _check_issue(w, code, state, d_bits, a_bits, key)
        found = state.accumulators.get(key)
        if found is None:
            found = Accumulator(rows, w.B32[rows].view(np.float32))
            state.accumulators[key] = found
            w.B32[rows] = POISON32
        accumulator = found
        accumulator.time = state.time
        mode = cta.launch.tensor_cores

        def compute() -> None:
            a = a_value
            if a is None:
                assert a_descriptor is not None
                a = read_operand(w, a_descriptor, 64, 16, a_major, quarter, 16, fmt)
            b = read_operand(w, b_descriptor, n, 16, b_major, 0, n, fmt)
            if sign < 0:
                a = -a
            c: Array | None = None
            if add:
                c = np.empty(16 * n, np.float32)
                c[index] = accumulator.value
                c = c.reshape(16, n)
            product = multiply_accumulate(a, b, c, fmt, fmt, mode)
            accumulator.value = product.reshape(-1)[index]

        state.open.append(compute)

    return aligned(asm, (step, step))


def _check_issue(w: Warp, code: Code, state: WgmmaState, d_bits: int, a_bits: int, key: tuple[int, ...]) -> None:
    """9.7.15.7.1: a wgmma.fence before the first wgmma and after other accesses to its registers; those in flight only accumulate on."""
    wrong = ""
    missing = "wgmma.fence.sync.aligned before this wgmma"
    if not state.fenced:
        wrong = "no wgmma.fence comes before the first wgmma of the warp"
    elif state.touched & (d_bits | a_bits):
        register = ((state.touched & (d_bits | a_bits)) & -(state.touched & (d_bits | a_bits))).bit_length() - 1
        what = "an accumulator register" if d_bits >> register & 1 else "a register of the A fragment"
        wrong = f"{what} has been accessed since the last wgmma.fence"
    elif state.flying & a_bits and any(a.time and register_bits(a.rows) & a_bits for a in state.accumulators.values()):
        wrong, missing = "its A fragment is an accumulator in flight", "wgmma.wait_group before this wgmma"
    elif key not in state.accumulators and any(register_bits(a.rows) & d_bits for a in state.accumulators.values()):
        wrong, missing = "its accumulator overlaps one of another shape in flight", "wgmma.wait_group before this wgmma"
    if wrong:
        w.cta.report("wgmma_in_flight", f"{code.opcode} by {w.name} (PTX line {code.line}): {wrong}", code, w, missing=missing)
        state.fenced = True
        state.touched = 0
    state.issued[state.time] = (w.actor, w.track.time)
    state.flying |= d_bits | a_bits
    if a_bits:
        state.fragments.append((state.time, a_bits))
    state.code = code


def watch_registers(asm: Assembler, bits: int) -> None:
    """Have every access to these 32-bit registers noted (DecodedEntry.watch)."""
    asm.watched |= bits


def note_access(w: Warp, code: Code, bits: int) -> None:
    """An instruction other than wgmma accesses registers that some wgmma of the entry names."""
    state: WgmmaState | None = w.wgmma
    if state is None or not w.cta.check:
        return
    state.touched |= bits
    common = bits & state.flying
    if not common:
        return
    other = state.code
    assert other is not None
    accumulates = any(register_bits(a.rows) & common for a in state.accumulators.values())
    what = "an accumulator register" if accumulates else "a register of an A fragment"
    w.cta.report(
        "wgmma_in_flight",
        f"{code.opcode} by {w.name} (PTX line {code.line}) accesses {what} of a wgmma in flight (last issued at PTX line {other.line})",
        code,
        w,
        other=Access(other.line, f"wgmma of {w.name}", 0, w.cta.launch.code.sources.get(other.line, "")),
        missing="wgmma.wait_group between the wgmma and this access",
    )


def _check_exit(cta: Cta, warp: Warp) -> None:
    """wgmma that were never waited for."""
    if not cta.check:
        return
    for w in cta.warps:
        state: WgmmaState | None = w.wgmma
        if state is not None and (state.open or state.groups) and state.code is not None:
            w.cta.report(
                "async_exit",
                f"wgmma of {w.name} (PTX line {state.code.line}) may still be in flight when the warp exits: nothing has waited for it",
                state.code,
                w,
                missing="wgmma.commit_group and wgmma.wait_group 0 before the exit",
            )


EXIT_HOOKS.append(_check_exit)
ACCESS_HOOKS.append(note_access)


@instruction("wgmma.fence")
def _wgmma_fence(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.15.7.1"""

    def step(w: Warp, r: list[Any]) -> None:
        state = wgmma_state(w)
        state.fenced = True
        state.touched = 0

    return aligned(asm, (step, step))


def _run_groups(state: WgmmaState, time: int) -> None:
    for number, _, operations in state.groups:
        if number > time:
            break
        for operation in operations:
            operation()
        operations.clear()


@instruction("wgmma.commit_group")
def _wgmma_commit(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.15.7.2"""

    def step(w: Warp, r: list[Any]) -> None:
        state = wgmma_state(w)
        time, operations = state.time, state.open
        # Groups of a warp complete in order.
        pending = w.cta.launch.defer(w.cta, lambda: _run_groups(state, time))
        state.groups.append((time, pending, operations))
        state.open = []
        state.time += 1

    return aligned(asm, (step, step))


@instruction("wgmma.wait_group")
def _wgmma_wait(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.15.7.3"""
    keep = asm.integer(asm.operands(1)[0], "the number of groups")

    def step(w: Warp, r: list[Any]) -> None:
        state = wgmma_state(w)
        count = max(len(state.groups) - keep, 0)
        if not count:
            return
        time = state.groups[count - 1][0]
        for _, pending, _ in state.groups[:count]:
            w.cta.launch.finish(pending)
        _run_groups(state, time)
        del state.groups[:count]
        for key in [k for k, a in state.accumulators.items() if a.time <= time]:
            accumulator = state.accumulators.pop(key)
            w.B32[accumulator.rows] = accumulator.value.view(np.uint32)
        if w.cta.check:
            w.clock.limits[state.actor] = time << hz.CLOCK_SHIFT | hz.CLOCK_FILL
            state.fragments = [(group, bits) for group, bits in state.fragments if group > time]
            flying = 0
            for _, bits in state.fragments:
                flying |= bits
            for accumulator in state.accumulators.values():
                flying |= register_bits(accumulator.rows)
            state.flying = flying

    return aligned(asm, (step, step))


# ------------------------------------------------------------------------------------------------------------------- mma.sync


@instruction("mma.sync")
def _mma(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.14.5.14"""
    shape = next((w for w in words if w.startswith("m16n8k")), "")
    types = words[-4:]
    if (
        shape not in ("m16n8k8", "m16n8k16")
        or types[0] != "f32"
        or types[3] != "f32"
        or types[1] != types[2]
        or types[1] not in ("bf16", "f16")
    ):
        raise asm.error(f"{ins.opcode} is not supported: m16n8k8 and m16n8k16 .f32 of bf16 or f16 are")
    k, fmt = int(shape[6:]), types[1]
    d, a, b, c = asm.operands(4)
    d_rows = vector_registers(asm, d, 4, write=True)
    c_rows = vector_registers(asm, c, 4) if isinstance(c, Vector) and not _constant(c) else None
    a_rows, b_rows = vector_registers(asm, a, k // 4), vector_registers(asm, b, k // 8)
    c_sources = [asm.source(o, "f32") for o in c.items] if isinstance(c, Vector) else []
    if len(c_sources) != 4:
        raise asm.error(f"{ins.opcode}: C is a vector of 4 registers or constants")
    a_map, b_map, (rows, cols) = mma_a_fragment(k), mma_b_fragment(k), mma_d_fragment()

    def step(w: Warp, r: list[Any]) -> None:
        bits = np.empty((16, k), np.uint16)
        bits[a_map] = w.B32[a_rows].T.copy().view(np.uint16).reshape(32, k // 4, 2)
        other = np.empty((k, 8), np.uint16)
        other[b_map] = w.B32[b_rows].T.copy().view(np.uint16).reshape(32, k // 8, 2)
        start = np.empty((16, 8), np.float32)
        start[rows.T, cols.T] = w.B32[c_rows].view(np.float32) if c_rows is not None else np.stack([r[s] for s in c_sources])
        product = multiply_accumulate(widen(bits, fmt), widen(other.T, fmt), start, fmt, fmt, w.cta.launch.tensor_cores)
        w.B32[d_rows] = product[rows, cols].T.view(np.uint32)

    return aligned(asm, (step, step))


def _constant(vector: Vector) -> bool:
    return any(not isinstance(item, Register) for item in vector.items)


# ------------------------------------------------------------------------------------------------------ ldmatrix and stmatrix


def _matrix_form(asm: Assembler, words: list[str]) -> tuple[int, bool]:
    if "m8n8" not in words or words[-1] != "b16":
        raise asm.error(f"{asm.instruction.opcode} is not supported: .m8n8 .b16 is")
    count = next((int(w[1:]) for w in words if w in ("x1", "x2", "x4")), 0)
    if not count:
        raise asm.error(f"{asm.instruction.opcode} names no count")
    return count, "trans" in words


@instruction("ldmatrix")
def _ldmatrix(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.14.5.15"""
    count, trans = _matrix_form(asm, words)
    operands = asm.operands(2)
    rows = vector_registers(asm, operands[0], count, write=True)
    read = shared_reader(asm, operands[1], words)
    supplier, element = ldmatrix_map(count, trans)
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        address = np.asarray(read(r), np.int64)
        good = _shared(w, code, address[: 8 * count], LANES[: 8 * count], 16, False, False)
        words16 = w.cta.words[2]
        index = (address[supplier] >> 1) + element
        if good is None:
            value = words16[index]
        else:
            valid = good[supplier]
            value = np.where(valid, words16[np.where(valid, index, 0)], np.uint16(0x7FFF))
        w.B32[rows] = np.ascontiguousarray(value).view(np.uint32)[:, :, 0].T

    return aligned(asm, (step, step))


@instruction("stmatrix")
def _stmatrix(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.14.5.16"""
    count, trans = _matrix_form(asm, words)
    operands = asm.operands(2)
    rows = vector_registers(asm, operands[1], count)
    read = shared_reader(asm, operands[0], words)
    supplier, element = ldmatrix_map(count, trans)
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        address = np.asarray(read(r), np.int64)
        good = _shared(w, code, address[: 8 * count], LANES[: 8 * count], 16, True, False)
        value = w.B32[rows].T.copy().view(np.uint16).reshape(32, count, 2)
        index = (address[supplier] >> 1) + element
        if good is not None:
            valid = good[supplier]
            index, value = index[valid], value[valid]
        words16 = w.cta.words[2]
        words16[index] = value
        if w.cta.check and (words16[index] != value).any():
            check_lanes(w, code, "shared", address[: 8 * count], LANES[: 8 * count], [LANES[: 8 * count]])

    return aligned(asm, (step, step))


__all__ = ["PtxError", "check_operand", "read_operand", "vector_registers", "widen"]
