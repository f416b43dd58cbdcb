"""Tensor memory: allocation, tcgen05.ld, tcgen05.st, waits and fences (PTX ISA 9.1 section 9.7.16).

tcgen05.ld and tcgen05.st are asynchronous operations of their warp: another access is ordered after them only through wait::ld and
wait::st. A register that a load fills waits implicitly when used: its value is there at once, and the first instruction that reads it
is ordered after the load. A store lands by the wait at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import access
from . import hazards as hz
from .alu import Steps
from .asynchronous import shared_reader
from .control import aligned
from .decode import DECODE_HOOKS, EXIT_HOOKS, Assembler, Code, DecodedEntry, instruction, uniform
from .layouts import TMEM_COLUMNS, TMEM_LANES, TMEM_SHAPES, tmem_map, tmem_registers
from .machine import RETRY, Cta, Group, Pending, Step, Warp
from .memory import POISON32, SHARED_START
from .ptx import Address, Instruction, Register, Vector
from .tensor import vector_registers

Array = NDArray[Any]
Int64 = NDArray[np.int64]


class TensorMemory:
    """The 128 lanes x 512 columns of a CTA, who allocated what, and the shadow of its cells."""

    def __init__(self, check: bool) -> None:
        self.cells: NDArray[np.uint32] = np.full((TMEM_LANES, TMEM_COLUMNS), POISON32, np.uint32)
        self.allocated = np.zeros(TMEM_COLUMNS, np.bool_)
        self.blocks: dict[int, tuple[int, Code]] = {}
        """First column to (columns, the allocating instruction)."""
        self.unread: dict[int, int] = {}
        """First column of a block to where in shared memory its address was written."""
        self.smallest = TMEM_COLUMNS
        self.relinquished = False
        self.waiting: list[tuple[Warp, Group]] = []
        self.issuers: dict[tuple[int, int], Any] = {}
        """Threads (warp, lane) that have issued MMAs or copies."""
        self.shadow = hz.Shadow(TMEM_LANES * TMEM_COLUMNS, 0, TMEM_COLUMNS) if check else None


def tensor_memory(cta: Cta) -> TensorMemory:
    if cta.tmem is None:
        cta.tmem = TensorMemory(cta.check)
    result: TensorMemory = cta.tmem
    return result


class TmemOps:
    """Loads and stores of one warp since its waits."""

    def __init__(self, w: Warp) -> None:
        self.load_actor = w.cta.actor(("tcgen05.ld", w.index), f"tcgen05.ld of {w.name}")
        self.store_actor = w.cta.actor(("tcgen05.st", w.index), f"tcgen05.st of {w.name}")
        self.load_time = 0
        """Number of loads issued."""
        self.loaded = 0
        """Loads known to be complete, by a wait or by the use of a register that they filled."""
        self.filled: Int64 = np.zeros(len(w.B32), np.int64)
        """Per 32-bit register, the load that last filled it."""
        self.store_time = 1
        self.stores: list[Pending] = []
        self.own = (self.load_actor, self.store_actor)


def tensor_limits(w: Warp, own: Iterable[int]) -> Int64:
    """Limits of the tcgen05 operations that are ordered with the warp's next: its own, and others' that both fences have ordered."""
    limits = w.clock.limits
    after = np.zeros(len(limits), np.int64)
    if w.tensor_after is not None:
        size = min(len(after), len(w.tensor_after))
        after[:size] = w.tensor_after[:size]
    for actor in own:
        if actor < len(after):
            after[actor] = hz.EVER
    return np.minimum(limits, after)


def own_actors(w: Warp) -> list[int]:
    """Actors of all tcgen05 operations of the warp."""
    result = [] if w.tmem_ops is None else list(w.tmem_ops.own)
    if w.cta.tmem is not None:
        for (index, _), issuer in w.cta.tmem.issuers.items():
            if index == w.index:
                result += issuer.actors()
    return result


def tmem_ops(w: Warp) -> TmemOps:
    if w.tmem_ops is None:
        w.tmem_ops = TmemOps(w)
    result: TmemOps = w.tmem_ops
    return result


# ------------------------------------------------------------------------------------------------------------------ allocation


def _one_cta(asm: Assembler, words: list[str]) -> None:
    if "cta_group::2" in words:
        raise asm.error(f"{asm.instruction.opcode}: pairs of CTAs are not supported")


def _columns_fault(w: Warp, code: Code, columns: int) -> bool:
    if columns in (32, 64, 128, 256, 512):
        return False
    w.cta.report(
        "tmem_allocation",
        f"{code.opcode} of {columns} columns by {w.name} (PTX line {code.line}): the number is a power of two in 32..512",
        code,
        w,
    )
    return True


@instruction("tcgen05.alloc")
def _alloc(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.7.1"""
    _one_cta(asm, words)
    operands = asm.operands(2)
    read = shared_reader(asm, operands[0], words)
    count = asm.source(operands[1], "u32")
    code = asm.code

    def step(w: Warp, r: list[Any]) -> int | None:
        cta = w.cta
        memory = tensor_memory(cta)
        columns = uniform(r[count], w, "the number of columns")
        if _columns_fault(w, code, columns):
            columns = min(max(32, 1 << (columns - 1).bit_length()), TMEM_COLUMNS) if columns > 0 else 32
        if memory.relinquished:
            cta.report("tmem_allocation", f"{code.opcode} by {w.name} (PTX line {code.line}) after the permit was relinquished", code, w)
        if columns > memory.smallest:
            cta.report(
                "tmem_allocation",
                f"{code.opcode} of {columns} columns by {w.name} (PTX line {code.line}) after one of {memory.smallest}: "
                "sizes must not increase",
                code,
                w,
            )
        free = [f for f in range(0, TMEM_COLUMNS - columns + 1, 32) if not memory.allocated[f : f + columns].any()]
        if free:
            # Where a block lies is nothing to rely on.
            first = cta.launch.random.choice(free)
        else:
            w.group.blocked = ("tmem", f"{columns} free columns of tensor memory", code)
            memory.waiting.append((w, w.group))
            return RETRY
        memory.smallest = columns
        memory.allocated[first : first + columns] = True
        memory.blocks[first] = (columns, code)
        # What an earlier owner left is not this one's data.
        memory.cells[:, first : first + columns] = POISON32
        if memory.shadow is not None:
            memory.shadow.write.reshape(TMEM_LANES, TMEM_COLUMNS)[:, first : first + columns] = 0
            memory.shadow.reads.reshape(-1, TMEM_LANES, TMEM_COLUMNS)[:, :, first : first + columns] = 0
        address = np.asarray(read(r), np.int64)
        lane = int(w.mask.argmax())
        if cta.check:
            # The whole warp makes the allocation, before and after what each of its lanes does.
            w.sync_lanes()
        access.store(w, code, "shared", address[lane : lane + 1], np.array([lane]), 4, [np.array([first], np.uint32)])
        memory.unread[first] = int(address[lane])
        if cta.check:
            w.sync_lanes()
        if cta.shadow is not None and SHARED_START <= address[lane] <= cta.shared_end - 4:
            cta.shadow.reads[:, int(address[lane]) >> cta.shadow.shift] = 0
        cta.launch.progress_count += 1
        return None

    return aligned(asm, (step, step))


@instruction("tcgen05.dealloc")
def _dealloc(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.7.1"""
    _one_cta(asm, words)
    operands = asm.operands(2)
    base, count = asm.source(operands[0], "u32"), asm.source(operands[1], "u32")
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        memory = tensor_memory(cta)
        address, columns = uniform(r[base], w, "the address"), uniform(r[count], w, "the number of columns")
        first = address & 0xFFFF
        block = memory.blocks.get(first)
        if block is None or address >> 16 or block[0] != columns:
            what = "is not allocated" if block is None else f"was allocated with {block[0]} columns at PTX line {block[1].line}"
            cta.report(
                "tmem_allocation",
                f"{code.opcode} of {columns} columns at tensor memory address {address:#x} by {w.name} (PTX line {code.line}): "
                f"the block {what}",
                code,
                w,
                0,
                address,
            )
            if block is None:
                return
        assert block is not None
        if memory.shadow is not None:
            _check_free(w, code, memory, first, block[0])
            _check_base(w, memory, first, block)
        del memory.blocks[first]
        memory.allocated[first : first + block[0]] = False
        for other, group in memory.waiting:
            other.wake(group)
        memory.waiting.clear()

    return aligned(asm, (step, step))


def _check_base(w: Warp, memory: TensorMemory, first: int, block: tuple[int, Code]) -> None:
    """Report a block whose address nobody has read from shared memory, although its cells were used."""
    shadow = w.cta.shadow
    at = memory.unread.pop(first, None)
    assert memory.shadow is not None
    cells = memory.shadow.write.reshape(TMEM_LANES, TMEM_COLUMNS)[:, first : first + block[0]]
    if shadow is None or at is None or not cells.any() or shadow.reads[:, at >> shadow.shift].any():
        return
    place = access.shared_place(w, at)
    w.cta.report(
        "tmem_allocation",
        f"the address of the {block[0]} columns allocated at PTX line {block[1].line} was written to {place} and never read: "
        "the base of tensor memory is assumed",
        block[1],
        w,
        0,
        at,
        place=place,
        missing=f"a load of the address from {place} after the allocation",
    )


def _check_free(w: Warp, code: Code, memory: TensorMemory, first: int, columns: int) -> None:
    """Freeing is an access to every cell: whatever used them must have happened before, and the fences must order it."""
    shadow = memory.shadow
    assert shadow is not None
    index = (np.arange(TMEM_LANES)[:, None] * TMEM_COLUMNS + np.arange(first, first + columns)).reshape(-1)
    # Deallocation is synchronous: after_thread_sync says nothing about it, but what came before has to be fenced where it was done.
    limits = w.clock.limits
    ordered = w.clock.table[hz.TENSOR].copy()
    ordered[[a for a in own_actors(w) if a < len(ordered)]] = hz.EVER
    parts, _ = shadow.conflicts(index, np.minimum(limits, ordered), True, False)
    for bad, before in parts:
        settle_tmem(w, code, index, bad, before, np.int64(0), "deallocation", w.name)


@instruction("tcgen05.relinquish_alloc_permit")
def _relinquish(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.7.1"""
    _one_cta(asm, words)

    def step(w: Warp, r: list[Any]) -> None:
        tensor_memory(w.cta).relinquished = True

    return aligned(asm, (step, step))


def _report_leaks(cta: Cta, warp: Warp) -> None:
    if cta.tmem is None:
        return
    for first, (columns, code) in cta.tmem.blocks.items():
        cta.report(
            "tmem_allocation",
            f"{columns} columns of tensor memory from column {first}, allocated at PTX line {code.line}, "
            "are not deallocated when the CTA exits",
            code,
            warp,
            0,
            first,
        )


EXIT_HOOKS.append(_report_leaks)


# ------------------------------------------------------------------------------------------------------------- loads and stores


def _address(cell: int) -> int:
    """Tensor memory address (lane << 16 | column) of a cell number."""
    return (cell >> 9) << 16 | (cell & 511)


def _cells(w: Warp, code: Code, address: int, shape: str, lane: Int64, column: Int64, write: bool) -> tuple[Int64, Int64, Array | None]:
    """(lanes, columns, cells that exist or None for all) of an access, after the checks of lanes, bounds and allocation."""
    cta = w.cta
    memory = tensor_memory(cta)
    base, first = address >> 16, address & 0xFFFF
    quarter = w.index % 4
    verb = "write" if write else "read"
    # A base lane below 32 counts from the warp's own quarter, as hardware takes it.
    if base >= 32 and base // 32 != quarter:
        cta.report(
            "tmem_lane",
            f"{verb} of tensor memory lane {base} by {w.name} (PTX line {code.line}): "
            f"the warp reaches lanes {32 * quarter} to {32 * quarter + 31} only",
            code,
            w,
            0,
            address,
        )
    elif base % 32 + TMEM_SHAPES[shape][2] > 32:
        cta.report(
            "tmem_lane",
            f"{verb} of tensor memory lanes {base % 32} to {base % 32 + TMEM_SHAPES[shape][2] - 1} of its quarter "
            f"by {w.name} (PTX line {code.line})",
            code,
            w,
            0,
            address,
        )
    lanes = lane + 32 * quarter + base % 32 if base < 32 or base // 32 == quarter else lane + base
    columns = column + first
    valid: Array | None = None
    if int(columns.max()) >= TMEM_COLUMNS or int(lanes.max()) >= TMEM_LANES:
        valid = (columns < TMEM_COLUMNS) & ((lanes if lanes.ndim == columns.ndim else lanes[..., None]) < TMEM_LANES)
        place = int((~valid).argmax())
        outside = int(np.broadcast_to(columns, valid.shape).flat[place])
        row = int(np.broadcast_to(lanes if lanes.ndim == valid.ndim else lanes[..., None], valid.shape).flat[place])
        wide = outside >= TMEM_COLUMNS
        what, limit = (f"column {outside}", f"{TMEM_COLUMNS} columns") if wide else (f"lane {row}", f"{TMEM_LANES} lanes")
        cta.report(
            "out_of_bounds",
            f"{verb} of tensor memory {what} by {w.name} (PTX line {code.line}): there are {limit}",
            code,
            w,
            0,
            address,
        )
    if cta.check:
        used = memory.allocated[np.minimum(columns, TMEM_COLUMNS - 1)]
        if not used.all():
            column_ = int(columns.flat[int((~used).argmax())])
            if column_ < TMEM_COLUMNS:
                cta.report(
                    "tmem_allocation",
                    f"{verb} of tensor memory column {column_} by {w.name} (PTX line {code.line}), which is not allocated",
                    code,
                    w,
                    0,
                    column_,
                )
    return lanes, columns, valid


def check_tmem(w: Warp, code: Code, index: Int64, epochs: Any, write: bool, reader: int, who: str) -> None:
    """Race and initialisation checks of cells (lane * 512 + column), then record the access."""
    shadow = tensor_memory(w.cta).shadow
    assert shadow is not None
    parts, last = shadow.conflicts(index, tensor_limits(w, tmem_ops(w).own), write, False)
    for bad, before in parts:
        settle_tmem(w, code, index.reshape(-1), bad, before, epochs, "write" if write else "read", who)
    if write:
        shadow.write[index] = epochs
        return
    if not last.all():
        never = last == 0
        place = int(never.argmax())
        cell = int(index.flat[place])
        lane = int(np.broadcast_to(epochs, index.shape).flat[place]) >> hz.LANE_SHIFT & 31
        w.cta.report(
            "uninitialized",
            f"read of {access.tmem_place(cell)} by {who} lane {lane} (PTX line {code.line}), which nothing has written",
            code,
            w,
            lane,
            _address(cell),
        )
    shadow.note_read(index, epochs, reader)


def settle_tmem(w: Warp, code: Code, cells: Int64, bad: Array, before: Array, epochs: Any, verb: str, who: str) -> None:
    """Report accesses to cells (flat, as `bad` and `before`) that are not ordered, or ordered by a barrier without the tcgen05 fences."""
    places = np.flatnonzero(bad)
    seen = before.reshape(-1)[places]
    happened = w.clock.covers(hz.ORDER, seen)
    for flags, kind in ((~happened, "race"), (happened, "tcgen05_fence")):
        if flags.any():
            place = int(flags.argmax())
            cell = int(cells[places[place]])
            lane = int(np.broadcast_to(epochs, bad.shape).flat[places[place]]) >> hz.LANE_SHIFT & 31
            access.report_conflict(w, code, kind, verb, access.tmem_place(cell), lane, _address(cell), int(seen[place]), who)


def _form(asm: Assembler, words: list[str]) -> tuple[str, int, bool]:
    shape = next((w for w in words if w in TMEM_SHAPES), "")
    num = next((int(w[1:]) for w in words if w[:1] == "x" and w[1:].isdigit()), 0)
    if not shape or not num or words[-1] != "b32":
        raise asm.error(f"{asm.instruction.opcode} is not supported")
    return shape, num, "pack::16b" in words or "unpack::16b" in words


def _epochs(w: Warp, actor: int, time: int, code: Code, index: Int64) -> Array:
    lanes = np.arange(32, dtype=np.int64) << hz.LANE_SHIFT
    epochs = lanes + np.int64(time << hz.CLOCK_SHIFT | actor | int(code.tag))
    return np.broadcast_to(epochs.reshape(32, *([1] * (index.ndim - 1))), index.shape)


@instruction("tcgen05.ld")
def _ld(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.8.1"""
    shape, num, pack = _form(asm, words)
    if "red" in words:
        raise asm.error(f"{ins.opcode} is not supported")
    operands = asm.operands(3 if shape == "16x32bx2" else 2)
    rows = vector_registers(asm, operands[0], tmem_registers(shape, num), write=True)
    split = asm.integer(operands[2], "the half split") if shape == "16x32bx2" else 0
    lane, column = tmem_map(shape, num, split, pack)
    slot, offset, _ = asm.address(operands[1], "tensor")
    code = asm.code
    whole = shape == "32x32b" and not pack

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        address = uniform(r[slot] if offset is None else r[slot] + offset, w, "the tensor memory address")
        if (profile := cta.launch.profile) is not None:
            profile.move("tensor memory load", 4 * column.size)
        lanes, columns, valid = _cells(w, code, address, shape, lane, column, False)
        if pack:
            lanes = lanes[..., None]
        memory = tensor_memory(cta)
        if cta.check:
            index = np.broadcast_to(np.minimum(lanes, TMEM_LANES - 1) * TMEM_COLUMNS + np.minimum(columns, TMEM_COLUMNS - 1), columns.shape)
            state = tmem_ops(w)
            state.load_time += 1
            state.filled[rows] = state.load_time
            epochs = _epochs(w, state.load_actor, state.load_time, code, index)
            check_tmem(w, code, index, epochs, False, state.load_actor, f"tcgen05.ld of {w.name}")
        if valid is None:
            if whole:
                first, top = int(columns[0, 0]), int(lanes[0, 0])
                w.B32[rows] = memory.cells[top : top + 32, first : first + num].T
                return
            cells = memory.cells[lanes, columns]
        else:
            cells = np.where(
                valid, memory.cells[np.minimum(lanes, TMEM_LANES - 1), np.minimum(columns, TMEM_COLUMNS - 1)], np.uint32(POISON32)
            )
        if pack:
            cells = (cells[..., 0] & np.uint32(0xFFFF)) | cells[..., 1] << np.uint32(16)
        w.B32[rows] = cells.T

    return aligned(asm, (step, step))


@instruction("tcgen05.st")
def _st(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.8.2"""
    shape, num, unpack = _form(asm, words)
    operands = asm.operands(3 if shape == "16x32bx2" else 2)
    split = asm.integer(operands[1], "the half split") if shape == "16x32bx2" else 0
    rows = vector_registers(asm, operands[-1], tmem_registers(shape, num))
    lane, column = tmem_map(shape, num, split, unpack)
    slot, offset, _ = asm.address(operands[0], "tensor")
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        address = uniform(r[slot] if offset is None else r[slot] + offset, w, "the tensor memory address")
        if (profile := cta.launch.profile) is not None:
            profile.move("tensor memory store", 4 * column.size)
        lanes, columns, valid = _cells(w, code, address, shape, lane, column, True)
        value = w.B32[rows].T
        if unpack:
            lanes = lanes[..., None]
            value = np.stack([value & np.uint32(0xFFFF), value >> np.uint32(16)], axis=-1)
        memory = tensor_memory(cta)
        lanes = np.broadcast_to(lanes, columns.shape)
        if valid is not None:
            lanes, columns, value = lanes[valid], columns[valid], value[valid]
        state = tmem_ops(w)
        if cta.check:
            index = lanes * TMEM_COLUMNS + columns
            if valid is None:
                epochs: Any = _epochs(w, state.store_actor, state.store_time, code, index)
            else:
                epochs = np.int64(state.store_time << hz.CLOCK_SHIFT | state.store_actor | int(code.tag))
            check_tmem(w, code, index, epochs, True, -1, f"tcgen05.st of {w.name}")

        def land() -> None:
            memory.cells[lanes, columns] = value

        state.stores.append(cta.launch.defer(cta, land))

    return aligned(asm, (step, step))


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.8.5"""
    loads = ins.opcode.startswith("tcgen05.wait::ld")

    def step(w: Warp, r: list[Any]) -> None:
        state = tmem_ops(w)
        if loads:
            loads_done(w, state, state.load_time)
            return
        time = state.store_time
        state.store_time += 1
        for pending in state.stores:
            w.cta.launch.finish(pending)
        state.stores.clear()
        if w.cta.check:
            w.clock.limits[state.store_actor] = time << hz.CLOCK_SHIFT | hz.CLOCK_FILL

    return aligned(asm, (step, step))


def loads_done(w: Warp, state: TmemOps, time: int) -> None:
    """The loads of a warp up to number `time` are complete: later accesses are ordered after them."""
    if w.cta.check and time > state.loaded:
        state.loaded = time
        w.clock.limits[state.load_actor] = time << hz.CLOCK_SHIFT | hz.CLOCK_FILL


def _read_registers(ins: Instruction) -> set[int]:
    """32-bit registers that an instruction reads: every operand but the first, which most instructions write."""
    first = 0 if ins.opcode.startswith(_WITHOUT_RESULT) else 1
    found: set[int] = set()
    queue: list[Any] = list(ins.operands[first:])
    while queue:
        operand = queue.pop()
        if isinstance(operand, Register):
            if operand.bytes == 4 and operand.type != "pred":
                found.add(operand.index)
        elif isinstance(operand, Vector):
            queue += operand.items
        elif isinstance(operand, Address):
            queue += [operand.base, *operand.coordinates]
    return found


_WITHOUT_RESULT = ("st.", "stmatrix", "red.", "tcgen05.st", "tcgen05.mma", "tcgen05.cp", "cp.", "bar", "mbarrier.", "wgmma.", "prefetch")


def _complete_loads_on_use(decoded: DecodedEntry) -> None:
    """Wrap the instructions that read a register some tcgen05.ld fills: a true dependence waits for the load (9.7.16.6.4.5)."""
    loads = [ins for ins in decoded.entry.instructions if ins.opcode.startswith("tcgen05.ld")]
    targets: set[int] = set()
    for ins in loads:
        first = ins.operands[0]
        items = first.items if isinstance(first, Vector) else (first,)
        targets |= {item.index for item in items if isinstance(item, Register)}
    if not targets:
        return
    for place, ins in enumerate(decoded.entry.instructions):
        rows = _read_registers(ins) & targets
        if rows and not ins.opcode.startswith("tcgen05.ld"):
            index = np.array(sorted(rows), np.int64)
            decoded.fills[place] = rows
            decoded.full[place] = _after_loads(decoded.full[place], index)
            decoded.masked[place] = _after_loads(decoded.masked[place], index)


def _after_loads(step: Step, rows: Int64) -> Step:
    def wrapped(w: Warp, r: list[Any]) -> int | None:
        state: TmemOps | None = w.tmem_ops
        if state is not None and state.loaded != state.load_time:
            loads_done(w, state, int(state.filled[rows].max()))
        return step(w, r)

    return wrapped


DECODE_HOOKS.append(_complete_loads_on_use)


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.16.6.4: before_thread_sync orders the thread's earlier tcgen05 operations with the synchronisation that follows, and
    after_thread_sync what synchronisation has brought with its later ones."""
    asm.operands(0)
    if ins.opcode.endswith("before_thread_sync"):

        def before(w: Warp, r: list[Any]) -> None:
            if w.cta.check:
                table = w.clock.table
                for actor in own_actors(w):
                    if actor < table.shape[1]:
                        table[hz.TENSOR, actor] = table[hz.ORDER, actor]

        return before, before

    def after(w: Warp, r: list[Any]) -> None:
        if w.cta.check:
            w.tensor_after = w.clock.table[hz.TENSOR].copy()

    return after, after
