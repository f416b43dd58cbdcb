"""tcgen05.mma, tcgen05.mma.ws, tcgen05.cp and tcgen05.commit (PTX ISA 9.1 sections 9.7.16.9, 9.7.16.10 and 9.7.16.12).

Each is an asynchronous operation of the thread that issues it. Operands are read and results written when the scheduler decides, at the
latest when a commit reports that everything the thread issued before it is done. MMAs of one thread on the same accumulator with the same
shape happen in order, and so does a copy before an MMA; nothing else is ordered but through commit and its mbarrier. Races are therefore
found by the clock of the issuing warp: each accumulator of a thread is an actor, and so are its operand reads and its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import access
from . import hazards as hz
from .access import check_shared
from .alu import Steps
from .asynchronous import check_visible, mbarrier_at, shared_reader
from .cluster import same_offset
from .decode import EXIT_HOOKS, Assembler, Code, instruction
from .layouts import (
    TMEM_COLUMNS,
    TMEM_LANES,
    InstructionDescriptor,
    MatrixDescriptor,
    decode_instruction_descriptor,
    decode_tcgen05_descriptor,
    operand_offsets,
    tcgen05_d_columns,
    zero_column_mask_enabled,
)
from .machine import Cta, MBarrier, Pending, Warp
from .memory import POISON16, SHARED_START
from .ptx import Address, Immediate, Instruction, Operand, PtxFault, Vector
from .tensor import check_tile
from .tensor_core import multiply_accumulate, widen
from .tmem import TensorMemory, settle_tmem, tensor_limits, tensor_memory

Array = NDArray[Any]
Int64 = NDArray[np.int64]

K = 16
"""Depth of a kind::f16 instruction: 32 bytes of 16-bit elements."""
_EVER = (1 << 62) - 1


# ------------------------------------------------------------------------------------------------------ operands in shared memory

# The swizzle pattern repeats every 1,024 bytes: where an operand's chunks lie depends on its start address modulo 1,024 only.


@lru_cache(maxsize=2048)
def _chunks(descriptor: MatrixDescriptor, rows: int, depth: int, major: str) -> tuple[Int64, int, int]:
    """(16-byte chunk numbers relative to the start's 1,024-byte block, lowest byte, end byte) of a 16-bit operand.

    Chunks are [rows, depth / 8] for a K-major operand and [depth, rows / 8] for an MN-major one.
    """
    offsets = operand_offsets(descriptor, rows, depth, 2, major)
    picked = offsets[:, ::8] if major == "k" else offsets[::8].T
    chunks: Int64 = np.ascontiguousarray(picked >> 4)
    return chunks, int(chunks.min()) << 4, (int(chunks.max()) << 4) + 16


@lru_cache(maxsize=2048)
def _granules(descriptor: MatrixDescriptor, rows: int, depth: int, major: str, shift: int) -> Int64:
    """Shadow granules of an operand, relative to the start's 1,024-byte block."""
    chunks = np.unique(_chunks(descriptor, rows, depth, major)[0])
    if shift >= 4:
        return np.unique(chunks >> (shift - 4))
    return ((chunks << (4 - shift))[:, None] + np.arange(1 << (4 - shift))).reshape(-1)


class SharedOperand:
    """A 16-bit matrix in shared memory that a descriptor describes: rows x depth (M or N x K)."""

    __slots__ = ("base", "depth", "descriptor", "full", "high", "low", "major", "rows")

    def __init__(self, descriptor: MatrixDescriptor, rows: int, depth: int, major: str) -> None:
        self.full = descriptor
        self.base = descriptor.start & ~1023
        self.descriptor = descriptor.advanced(-self.base)
        self.rows, self.depth, self.major = rows, depth, major
        _, low, high = _chunks(self.descriptor, rows, depth, major)
        self.low, self.high = self.base + low, self.base + high

    def check(self, w: Warp, code: Code, epoch: np.int64, reader: int, who: str) -> bool:
        """Bounds, initialisation and race checks; whether the operand can be read."""
        cta = w.cta
        if self.low < SHARED_START or self.high > cta.shared_end:
            cta.report(
                "out_of_bounds",
                f"{who} (PTX line {code.line}) reads an operand at shared{self.low - SHARED_START:+#x} to "
                f"shared{self.high - SHARED_START:+#x}: the launch has {cta.shared_end - SHARED_START} bytes of shared memory",
                code,
                w,
                epoch_lane(epoch),
                self.low,
            )
            return False
        if cta.check:
            shadow = cta.shadow
            assert shadow is not None
            granules = _granules(self.descriptor, self.rows, self.depth, self.major, shadow.shift) + (self.base >> shadow.shift)
            last = check_shared(w, code, granules, epoch, False, reader=reader, who=who, proxy=True)
            check_tile(w, code, self.full, granules, last, shadow.shift, who)
        return True

    def read(self, cta: Cta) -> NDArray[np.uint16]:
        """The elements as [rows, depth] bit patterns."""
        chunks = _chunks(self.descriptor, self.rows, self.depth, self.major)[0]
        words = cta.words[8]
        wide = words[: len(words) // 2 * 2].reshape(-1, 2)[chunks + (self.base >> 4)].view(np.uint16)
        if self.major == "k":
            return wide.reshape(self.rows, self.depth)
        return wide.reshape(self.depth, self.rows).T


def epoch_lane(epoch: Any) -> int:
    return int(epoch) >> hz.LANE_SHIFT & 31


# ------------------------------------------------------------------------------------------------------- blocks of tensor memory


class Block:
    """Cells that an operation touches: lanes low..high of every quarter of 32, `columns` columns from `first`."""

    __slots__ = ("columns", "first", "high", "low")

    def __init__(self, first: int, columns: int, low: int = 0, high: int = 32) -> None:
        self.first, self.columns, self.low, self.high = first, columns, low, high

    def of(self, table: Array) -> Array:
        """[4, lanes, columns, ...]: a view of a table whose first axis counts cells (lane * 512 + column)."""
        shaped = table.reshape(4, 32, TMEM_COLUMNS, *table.shape[1:])
        return shaped[:, self.low : self.high, self.first : self.first + self.columns]

    def cell(self, place: int) -> int:
        """Cell number of a flat position in `of`."""
        height = self.high - self.low
        quarter, rest = divmod(place, height * self.columns)
        lane, column = divmod(rest, self.columns)
        return (32 * quarter + self.low + lane) * TMEM_COLUMNS + self.first + column


def check_block(
    w: Warp,
    code: Code,
    block: Block,
    epoch: np.int64,
    who: str,
    *,
    write: bool,
    reads: bool = False,
    reader: int = -1,
    mask: Array | None = None,
    own: Iterable[int] = (),
) -> bool:
    """Bounds, allocation, initialisation and race checks of a block, then record the access; whether the block exists.

    own: actors whose operations need no tcgen05 fence; reads: the old contents matter too; mask: [quarters, lanes, 1] of the lanes that
    are touched, None for all.
    """
    cta = w.cta
    verb = "write" if write else "read"
    lane = epoch_lane(epoch)
    if block.first + block.columns > TMEM_COLUMNS:
        cta.report(
            "out_of_bounds",
            f"{verb} of tensor memory columns {block.first} to {block.first + block.columns - 1} by {who} (PTX line {code.line}): "
            f"there are {TMEM_COLUMNS} columns",
            code,
            w,
            lane,
            block.first,
        )
        return False
    if not cta.check:
        return True
    memory = tensor_memory(cta)
    used = memory.allocated[block.first : block.first + block.columns]
    if not used.all():
        column = block.first + int((~used).argmax())
        cta.report(
            "tmem_allocation",
            f"{verb} of tensor memory column {column} by {who} (PTX line {code.line}), which is not allocated",
            code,
            w,
            lane,
            column,
        )
    shadow = memory.shadow
    assert shadow is not None
    limits = tensor_limits(w, own)
    region = shadow.region(block.first, block.first + block.columns - 1)
    last = block.of(shadow.write)
    parts = []
    if not hz.covered(last, limits):
        parts.append((last > limits[last & hz.ACTOR_MASK], last))
    if write:
        for reader_ in shadow.late(region, limits):
            seen = block.of(shadow.reads[reader_])
            parts.append((seen > limits[shadow.readers[reader_]], seen))
    for flags, before in parts:
        bad = flags if mask is None else flags & mask
        if bad.any():
            cells = block.of(np.arange(TMEM_LANES * TMEM_COLUMNS)).reshape(-1)
            settle_tmem(w, code, cells, bad, before, epoch, verb, who)
    if not write or reads:
        never = last == 0
        if mask is not None:
            never &= mask
        if never.any():
            cell = block.cell(int(never.argmax()))
            cta.report(
                "uninitialized",
                f"read of {access.tmem_place(cell)} by {who} lane {lane} (PTX line {code.line}), which nothing has written",
                code,
                w,
                lane,
                (cell >> 9) << 16 | cell & 511,
            )
    if write:
        last[...] = epoch if mask is None else np.where(mask, epoch, last)
    else:
        block.of(shadow.reading(reader, region, int(epoch)))[...] = epoch
    return True


# ------------------------------------------------------------------------------------------------ operations of one issuing thread


class Operation:
    """An MMA or copy whose effect is still to come."""

    __slots__ = ("before", "done", "pending", "run")

    def __init__(self, run: Callable[[], None], before: list[Operation]) -> None:
        self.run = run
        self.before = before
        """Operations that happen first."""
        self.done = False
        self.pending: Pending | None = None


class Issuer:
    """The tcgen05 operations of one thread, with an actor for its operand reads, one for its copies, and one an accumulator."""

    def __init__(self, w: Warp, lane: int) -> None:
        self.w = w
        self.lane = lane
        cta = w.cta
        self.reader = cta.actor(("mma operands", w.index, lane), f"the MMA of {w.name}")
        self.copier = cta.actor(("tcgen05.cp", w.index, lane), f"tcgen05.cp of {w.name}")
        self.accumulators: dict[Any, int] = {}
        self.code: Code | None = None
        self.used = 0
        """Number of the commit that the latest operation completes with."""
        self.time = 1
        """Number of the next commit: everything issued until then completes with it."""
        self.outstanding: list[Operation] = []
        self.last: dict[Any, Operation] = {}
        """Latest operation on each accumulator, and the latest copy (None)."""

    def actors(self) -> list[int]:
        return [self.reader, self.copier, *self.accumulators.values()]

    def own(self, *pipelined: int) -> list[int]:
        """Actors whose operations the thread's next is ordered with without a tcgen05 fence: those of the same pipeline, and its warp's
        loads and stores. What only a commit and its mbarrier order needs the fence after the wait, even in one thread."""
        return list(pipelined) if self.w.tmem_ops is None else [*pipelined, *self.w.tmem_ops.own]

    def accumulator(self, key: Any) -> int:
        found = self.accumulators.get(key)
        if found is None:
            found = self.w.cta.actor(("mma", self.w.index, self.lane, key), f"the MMA of {self.w.name}")
            self.accumulators[key] = found
        return found

    def epoch(self, actor: int, code: Code) -> np.int64:
        return np.int64(self.time << hz.CLOCK_SHIFT | actor | self.lane << hz.LANE_SHIFT | int(code.tag))

    def issue(self, key: Any, run: Callable[[], None], after: tuple[Any, ...]) -> None:
        """Queue an effect that follows the latest operations on the keys `after`."""
        launch = self.w.cta.launch
        operation = Operation(run, [o for o in (self.last.get(k) for k in after) if o is not None and not o.done])

        def complete() -> None:
            for earlier in operation.before:
                if not earlier.done:
                    assert earlier.pending is not None
                    launch.finish(earlier.pending)
            operation.before.clear()
            operation.done = True
            operation.run()

        operation.pending = launch.defer(self.w.cta, complete)
        self.last[key] = operation
        if len(self.outstanding) > 64:
            self.outstanding = [o for o in self.outstanding if not o.done]
        self.outstanding.append(operation)

    def commit(self) -> tuple[list[Operation], list[int], int]:
        """(operations that the commit waits for, their actors, time that completes)."""
        waits_for = [o for o in self.outstanding if not o.done]
        time = self.time
        self.time += 1
        self.outstanding = waits_for.copy()
        return waits_for, self.actors(), time


def issuer(w: Warp, lane: int) -> Issuer:
    memory = tensor_memory(w.cta)
    found: Issuer | None = memory.issuers.get((w.index, lane))
    if found is None:
        found = memory.issuers[w.index, lane] = Issuer(w, lane)
    return found


@contextmanager
def _ordered_after(w: Warp, *actors: int) -> Iterator[None]:
    """Regard the actors' operations as happening before what is checked inside: the pipeline keeps their order."""
    limits = w.clock.limits
    saved = [limits[a] for a in actors]
    for actor in actors:
        limits[actor] = _EVER
    try:
        yield
    finally:
        for actor, value in zip(actors, saved, strict=True):
            limits[actor] = value


# ------------------------------------------------------------------------------------------------------------------------- MMA


def _one_cta(asm: Assembler, words: list[str]) -> None:
    opcode = asm.instruction.opcode
    if "cta_group::2" in words:
        raise asm.error(f"{opcode}: pairs of CTAs are not supported")
    if "cta_group::1" not in words:
        raise asm.error(f"{opcode} names no .cta_group::1")


def _check_modifiers(asm: Assembler, words: list[str], ws: bool) -> None:
    opcode = asm.instruction.opcode
    _one_cta(asm, words)
    if not any(w == "kind::f16" for w in words):
        raise asm.error(f"{opcode} is not supported: .kind::f16 is")
    collectors = [w for w in words if w.startswith("collector::")]
    if len(collectors) > 1:
        raise asm.error(f"{opcode} names two collector buffers")
    for word in words:
        if word in ("cta_group::1", "kind::f16"):
            continue
        parts = word.split("::")
        legal = parts[0] == "collector" and len(parts) == 3 and parts[2] in ("fill", "use", "lastuse", "discard")
        legal = legal and (parts[1] in ("b0", "b1", "b2", "b3") if ws else parts[1] == "a")
        if not legal:
            raise asm.error(f"{opcode}: .{word} is not supported")


class _Mma:
    """The decoded operands of one MMA instruction."""

    def __init__(self, asm: Assembler, ins: Instruction, words: list[str], ws: bool) -> None:
        _check_modifiers(asm, words, ws)
        self.ws = ws
        self.code = asm.code
        operands = list(ins.operands)
        if len(operands) < 5:
            raise asm.error(f"{ins.opcode} takes at least 5 operands, not {len(operands)}")
        self.d = self._tmem(asm, operands[0])
        self.a_in_tmem = isinstance(operands[1], Address)
        self.a = self._tmem(asm, operands[1]) if self.a_in_tmem else (asm.source(operands[1], "u64"), None)
        self.b = asm.source(operands[2], "u64")
        self.idesc = asm.source(operands[3], "u32")
        rest = operands[4:]
        self.disabled: list[int] = []
        if not ws and isinstance(rest[0], Vector):
            if len(rest[0].items) != 4:
                raise asm.error(f"{ins.opcode}: the lanes to leave alone are a vector of 4 registers with .cta_group::1")
            self.disabled = [asm.source(item, "u32") for item in rest[0].items]
            rest = rest[1:]
        if not rest or len(rest) > 2:
            raise asm.error(f"{ins.opcode} does not take {len(operands)} operands")
        enable = rest[0]
        self.enable = asm.constant(np.full(32, bool(enable.value))) if isinstance(enable, Immediate) else asm.source(enable, "pred")
        self.mask = -1
        self.scale = 0
        if len(rest) == 2 and ws:
            self.mask = asm.source(rest[1], "u64")
        elif len(rest) == 2:
            self.scale = asm.integer(rest[1], "the scale of D")
            if not 0 <= self.scale <= 15:
                raise asm.error(f"{ins.opcode}: the scale of D is 0..15, not {self.scale}")

    @staticmethod
    def _tmem(asm: Assembler, operand: Operand) -> tuple[int, Array | None]:
        slot, offset, _ = asm.address(operand, "tensor")
        return slot, offset

    def step(self, w: Warp, r: list[Any]) -> None:
        for lane in np.flatnonzero(w.mask).tolist():
            self.issue(w, r, lane)

    def issue(self, w: Warp, r: list[Any], lane: int) -> None:
        code, cta, ws = self.code, w.cta, self.ws
        memory = tensor_memory(cta)
        descriptor = decode_instruction_descriptor(int(r[self.idesc][lane]), ws)
        if self.mask >= 0 and zero_column_mask_enabled(int(r[self.mask][lane])):
            raise PtxFault(f"the zero-column mask {int(r[self.mask][lane]):#x} is not supported: pass 0")
        enable = bool(r[self.enable][lane])
        thread = issuer(w, lane)
        d_address = _address(r, self.d, lane)
        height, low = _lanes(descriptor, ws, d_address >> 16, "accumulator")
        d_block = Block(d_address & 0xFFFF, tcgen05_d_columns(descriptor.m, descriptor.n, ws), low, low + height)
        if (profile := cta.launch.profile) is not None:
            profile.move("tcgen05 operand", ((0 if self.a_in_tmem else descriptor.m) + descriptor.n) * 2 * K)
        key = (d_address, descriptor.m, descriptor.n, ws)
        chain = thread.accumulator(key)
        who = f"the MMA of {w.name}"
        write_mask = self._lanes_written(r, lane, d_block)
        good = True
        epoch = thread.epoch(thread.reader, code)
        a_block: Block | None = None
        a_operand: SharedOperand | None = None
        if self.a_in_tmem:
            if descriptor.a_major != "k":
                raise PtxFault("an A operand in tensor memory cannot be transposed")
            a_address = _address(r, self.a, lane)
            a_height, a_low = _lanes(descriptor, ws, a_address >> 16, "A operand")
            a_block = Block(a_address & 0xFFFF, K // 2, a_low, a_low + a_height)
            with _ordered_after(w, thread.copier):
                good &= check_block(w, code, a_block, epoch, who, write=False, reader=thread.reader, own=thread.own(thread.copier))
        else:
            a_operand = SharedOperand(decode_tcgen05_descriptor(int(r[self.a[0]][lane])), descriptor.m, K, descriptor.a_major)
            good &= a_operand.check(w, code, epoch, thread.reader, who)
        b_operand = SharedOperand(decode_tcgen05_descriptor(int(r[self.b][lane])), descriptor.n, K, descriptor.b_major)
        good &= b_operand.check(w, code, epoch, thread.reader, who)
        with _ordered_after(w, chain, thread.copier):
            good &= check_block(
                w,
                code,
                d_block,
                thread.epoch(chain, code),
                who,
                write=True,
                reads=enable,
                mask=write_mask,
                own=thread.own(chain, thread.copier),
            )
        thread.code, thread.used = code, thread.time
        if not good:
            return
        if (observer := cta.launch.observer) is not None:
            observer.multiply(w, d_block.first - min(memory.blocks, default=0))
        mode = cta.launch.tensor_cores
        groups = 1 if not ws else TMEM_LANES // descriptor.m
        sign = -1.0 if descriptor.negate_a != descriptor.negate_b else 1.0
        scale = np.float32(2.0**-self.scale)
        half = descriptor.d_format == "f16"

        def run() -> None:
            if a_block is not None:
                cells = np.ascontiguousarray(a_block.of(memory.cells.reshape(-1)))
                a_bits = cells.view(np.uint16).reshape(groups, -1, K)
            else:
                assert a_operand is not None
                a_bits = a_operand.read(cta)[None]
            a = widen(a_bits, descriptor.a_format)
            if sign < 0:
                a = -a
            b = widen(b_operand.read(cta), descriptor.b_format).reshape(groups, -1, K)
            target = d_block.of(memory.cells.reshape(-1))
            c: Array | None = None
            if enable:
                old = np.ascontiguousarray(target).reshape(groups, -1, d_block.columns)
                c = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32) if half else old.view(np.float32)
                if self.scale:
                    c = c * scale
            result = multiply_accumulate(a, b, c, descriptor.a_format, descriptor.b_format, mode)
            bits = result.view(np.uint32)
            if half:
                # An f16 accumulator is the low half of its cell; the other half holds nothing.
                bits = result.astype(np.float16).view(np.uint16).astype(np.uint32) | np.uint32(POISON16 << 16)
            bits = bits.reshape(target.shape)
            target[...] = bits if write_mask is None else np.where(write_mask, bits, target)

        thread.issue(key, run, (key, None))

    def _lanes_written(self, r: list[Any], lane: int, block: Block) -> Array | None:
        """[quarters, lanes, 1] of the lanes that the disable-output-lane vector leaves, or None for all."""
        if not self.disabled:
            return None
        words = [int(r[s][lane]) for s in self.disabled]
        if not any(words):
            return None
        bits = np.array(words, np.uint32)[:, None] >> np.arange(32, dtype=np.uint32) & 1
        written: Array = (bits == 0)[:, block.low : block.high, None]
        return written


def _address(r: list[Any], slot: tuple[int, Array | None], lane: int) -> int:
    base, offset = slot
    return int(r[base][lane]) + (int(offset[lane]) if offset is not None else 0)


def _lanes(descriptor: InstructionDescriptor, ws: bool, lane: int, what: str) -> tuple[int, int]:
    """(lanes of each quarter, the first of them) of an operand with this base lane (9.7.16.10.5, alignment column)."""
    half = descriptor.m == 64 and not ws
    if lane and not (half and lane == 16):
        rule = "0 or 16" if half else "0"
        raise PtxFault(f"the {what} of M={descriptor.m}{' .ws' if ws else ''} starts at tensor memory lane {lane}: it must be {rule}")
    return (16, lane) if half else (32, 0)


@instruction("tcgen05.mma.ws")
def _mma_ws(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.10.9.3"""
    mma = _Mma(asm, ins, words, True)
    return mma.step, mma.step


@instruction("tcgen05.mma")
def _mma(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.10.9.1"""
    mma = _Mma(asm, ins, words, False)
    return mma.step, mma.step


@instruction("tcgen05.mma.sp", "tcgen05.mma.ws.sp")
def _sparse(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    raise asm.error(f"{ins.opcode}: sparse MMA is not supported")


@instruction("tcgen05.shift")
def _shift(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    raise asm.error(f"{ins.opcode} is not supported")


# ------------------------------------------------------------------------------------------------------------------------- copy

# Shape -> (rows, 16-byte chunks a row, which rows go to the first lanes of each quarter of 32).
_COPIES: dict[str, tuple[int, int, tuple[slice, ...]]] = {
    "128x256b": (128, 2, tuple(slice(32 * q, 32 * q + 32) for q in range(4))),
    "128x128b": (128, 1, tuple(slice(32 * q, 32 * q + 32) for q in range(4))),
    "64x128b.warpx2::02_13": (64, 1, (slice(0, 32), slice(32, 64), slice(0, 32), slice(32, 64))),
    "64x128b.warpx2::01_23": (64, 1, (slice(0, 32), slice(0, 32), slice(32, 64), slice(32, 64))),
    "32x128b.warpx4": (32, 1, (slice(0, 32),) * 4),
    "4x256b": (4, 2, tuple(slice(q, q + 1) for q in range(4))),
}


@instruction("tcgen05.cp")
def _cp(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.9.2, without decompression of narrow formats."""
    _one_cta(asm, words)
    form = ".".join(w for w in words if w != "cta_group::1")
    if form not in _COPIES:
        raise asm.error(f"{ins.opcode} is not supported: {', '.join(_COPIES)} are")
    rows, chunks, sources = _COPIES[form]
    operands = asm.operands(2)
    slot, offset, _ = asm.address(operands[0], "tensor")
    matrix = asm.source(operands[1], "u64")
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        memory = tensor_memory(cta)
        for lane in np.flatnonzero(w.mask).tolist():
            address = _address(r, (slot, offset), lane)
            if address >> 16:
                raise PtxFault(f"the destination starts at tensor memory lane {address >> 16}: it must be 0")
            thread = issuer(w, lane)
            operand = SharedOperand(decode_tcgen05_descriptor(int(r[matrix][lane])), rows, 8 * chunks, "k")
            block = Block(address & 0xFFFF, 4 * chunks, 0, sources[0].stop - sources[0].start)
            who = f"tcgen05.cp of {w.name}"
            if (profile := cta.launch.profile) is not None:
                profile.move("tcgen05 copy", rows * 16 * chunks)
            good = operand.check(w, code, thread.epoch(thread.reader, code), thread.reader, who)
            good &= check_block(w, code, block, thread.epoch(thread.copier, code), who, write=True, own=thread.own())
            thread.code, thread.used = code, thread.time
            if not good:
                continue

            def run(operand: SharedOperand = operand, block: Block = block) -> None:
                cells = np.ascontiguousarray(operand.read(cta)).view(np.uint32)
                block.of(memory.cells.reshape(-1))[...] = np.stack([cells[part] for part in sources])

            thread.issue(None, run, ())

    return step, step


def _check_exit(cta: Cta, warp: Warp) -> None:
    """MMAs and copies that no thread of the CTA knows to be complete when it exits."""
    clock = cta.exit_clock
    if not cta.check or cta.tmem is None or clock is None:
        return
    for thread in cta.tmem.issuers.values():
        known = int(clock.limits[thread.reader]) >> hz.CLOCK_SHIFT if thread.reader < len(clock.limits) else 0
        if thread.code is not None and known < thread.used:
            cta.report(
                "async_exit",
                f"{thread.code.opcode} of {thread.w.name} (PTX line {thread.code.line}) may still be in flight when the CTA exits: "
                "no commit whose mbarrier has been waited for covers it",
                thread.code,
                thread.w,
                thread.lane,
                missing="tcgen05.commit after it, and a wait for its mbarrier before the exit",
            )


EXIT_HOOKS.append(_check_exit)


# ----------------------------------------------------------------------------------------------------------------------- commit


def arrive_asynchronously(cta: Cta, barrier: MBarrier, code: Code, w: Warp, lane: int, clock: hz.Clock | None) -> None:
    """One arrival by an asynchronous operation of a thread."""
    if (observer := cta.launch.observer) is not None:
        observer.mbarrier_arrive(w, barrier, 1, True)
    barrier.join(clock)
    barrier.last = (f"tcgen05.commit of {w.name}", code.line)
    if barrier.pending == 0:
        cta.report(
            "mbarrier",
            f"{code.opcode} of {w.name} lane {lane} (PTX line {code.line}): an arrival on shared{barrier.address - SHARED_START:+#x}, "
            f"whose phase {barrier.phase} waits for none of its {barrier.expected}",
            code,
            w,
            lane,
            barrier.address,
        )
    else:
        barrier.pending -= 1
    cta.launch.progress_count += 1
    barrier.settle()


@instruction("tcgen05.commit")
def _commit(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.12.1: an arrival once everything that the thread has issued is done."""
    _one_cta(asm, words)
    if "mbarrier::arrive::one" not in words or words[-1] != "b64":
        raise asm.error(f"{ins.opcode} is not supported")
    if "shared::cta" in words:
        raise asm.error(f"{ins.opcode}: the mbarrier is named by a .shared::cluster or a generic address")
    multicast = "multicast::cluster" in words
    operands = asm.operands(2 if multicast else 1)
    read = shared_reader(asm, operands[0], words)
    ranks = asm.source(operands[1], "u16") if multicast else -1
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        launch = cta.launch
        address = read(r)
        for lane in np.flatnonzero(w.mask).tolist():
            at = int(address[lane])
            if ranks >= 0:
                mask = int(r[ranks][lane])
                if not mask or mask >> cta.cluster.size:
                    raise PtxFault(f"the multicast mask {mask:#x} does not name CTAs of a cluster of {cta.cluster.size}")
                places = [same_offset(cta, at, rank) for rank in range(cta.cluster.size) if mask >> rank & 1]
            else:
                places = [at]
            barriers = [mbarrier_at(w, code, place, lane) for place in places]
            waits_for, actors, time = issuer(w, lane).commit()
            clock: hz.Clock | None = None
            if cta.check:
                clock = w.snapshot()
                for actor in actors:
                    # A commit includes tcgen05.fence::before_thread_sync.
                    clock.limits[actor] = time << hz.CLOCK_SHIFT | hz.CLOCK_FILL
                    clock.table[hz.TENSOR, actor] = clock.limits[actor]
                for barrier in barriers:
                    check_visible(w, code, barrier, lane)

            def complete(
                barriers: list[MBarrier] = barriers,
                waits_for: list[Operation] = waits_for,
                clock: hz.Clock | None = clock,
                lane: int = lane,
            ) -> None:
                # What is not ordered among itself may happen in any order.
                launch.random.shuffle(waits_for)
                for operation in waits_for:
                    if not operation.done:
                        assert operation.pending is not None
                        launch.finish(operation.pending)
                for barrier in barriers:
                    arrive_asynchronously(cta, barrier, code, w, lane, clock)

            launch.defer(cta, complete, tuple(barriers))

    return step, step


__all__ = ["Block", "SharedOperand", "TensorMemory", "check_block", "issuer"]
