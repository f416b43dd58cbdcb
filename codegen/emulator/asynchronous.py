"""mbarriers, bulk copies, tensor copies and cp.async (PTX ISA 9.1 sections 9.7.9.25 to 9.7.9.27 and 9.7.13.15).

An asynchronous copy is checked and recorded when it is issued, under an actor of its own; its bytes move when the scheduler decides, at
the latest where something waits for them. Loads report to an mbarrier, stores belong to bulk groups of the issuing thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .access import (
    WINDOWS,
    check_alive,
    check_global,
    check_shared,
    global_mapping,
    race_message,
    shared_faults,
    shared_index,
    shared_place,
)
from .alu import Steps
from .cluster import owner_of, same_offset
from .decode import EXIT_HOOKS, Assembler, Code, instruction, uniform
from .hazards import Clock
from .layouts import swizzle_chunks, tma_rows
from .machine import BLOCK, LANES, MBARRIER_LIMIT, RETRY, Cta, MBarrier, Pending, Warp
from .memops import ATOMICS, address_reader
from .memory import PARAM_WINDOW, SHARED_START, Mapping, TensorMap
from .numerics import add_f32
from .ptx import Address, Immediate, Instruction, Operand, PtxFault, Sink

Array = NDArray[Any]
Int64 = NDArray[np.int64]
Reader = Callable[[list[Any]], Array]

TENSOR_MAP_MAGIC = b"fa4gen.tensormap"


def shared_reader(asm: Assembler, operand: Operand, words: list[str]) -> Reader:
    """Function of the registers giving 32 addresses in shared memory, from shared or generic addresses."""
    named = any(w.startswith("shared") for w in words)
    read, space = address_reader(asm, operand, "shared" if named else "generic")
    if space == "shared":
        return read
    base = np.int64(WINDOWS["shared"])
    limit = np.int64(1 << 32)

    def generic(r: list[Any]) -> Array:
        address = read(r)
        # Inline assembly often passes a 32-bit shared address where a generic one is due; only real generic addresses are moved.
        return np.where(address >= limit, address - base, address)

    return generic


# ------------------------------------------------------------------------------------------------------------------ mbarriers


def mbarrier_at(w: Warp, code: Code, address: int, lane: int, strong: bool = True) -> MBarrier:
    """The object at an address of the cluster's shared memory, with the checks of an access to it."""
    owner, address = owner_of(w.cta, address)
    if owner is not w.cta:
        check_alive(w, code, owner, lane)
    found = owner.mbarriers.get(address)
    if owner.check:
        if found is not None and found.line:
            _check_intact(w, code, owner, found, lane)
        touch_mbarrier(w, code, owner, address, lane, strong)
    if found is None:
        place = shared_place(w, address, owner)
        gone = owner.invalid.get(address)
        owner.report(
            "uninitialized" if gone is None else "mbarrier",
            f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}) on {place}, "
            + ("where no mbarrier is initialised" if gone is None else f"an mbarrier that was invalidated at PTX line {gone}"),
            code,
            w,
            lane,
            address,
            place=place,
            missing="mbarrier.init before",
        )
        found = owner.mbarriers[address] = MBarrier(address, 1, owner)
    return found


def _check_intact(w: Warp, code: Code, owner: Cta, barrier: MBarrier, lane: int) -> None:
    """Report an ordinary store to the bytes of an mbarrier since its initialisation (9.7.13.15.2: only mbarrier operations may)."""
    shadow = owner.shadow
    assert shadow is not None
    if not SHARED_START <= barrier.address <= owner.shared_end - 8:
        return
    index, _ = shared_index(shadow, np.array([barrier.address], np.int64), 8)
    last = shadow.write[index].reshape(-1)
    if (last == barrier.init).all():
        return
    other = w.cta.access_of(int(last[last != barrier.init][0]))
    barrier.init = last[0]
    place = shared_place(w, barrier.address, owner)
    w.cta.report(
        "mbarrier",
        f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}) on {place}: the mbarrier (initialised at PTX line {barrier.line}) "
        f"has been overwritten by {other.warp} lane {other.lane} (PTX line {other.line})",
        code,
        w,
        lane,
        barrier.address,
        other,
        place=place,
        missing="mbarrier.inval before the memory is used otherwise",
    )


def check_visible(w: Warp, code: Code, barrier: MBarrier, lane: int) -> None:
    """Report an mbarrier that an asynchronous operation is to signal, but whose initialisation is not visible to it.

    Within a CTA what orders the initialisation before the issuing thread is enough; for another CTA of the cluster only a fence
    (fence.mbarrier_init, or one of the proxy) makes it visible.
    """
    if not w.cta.check or not barrier.line:
        return
    init = np.array([barrier.init], np.int64)
    clock = w.clock
    if clock.covers(hz.INITS, init)[0] or clock.covers(hz.SHARED_PROXY, init)[0] or barrier.code is None:
        return
    own = barrier.cta is w.cta
    if own and clock.covers(hz.ORDER, init)[0]:
        return
    other = w.cta.access_of(int(barrier.init))
    place = shared_place(w, barrier.address, barrier.cta)
    # Reported where the fence is missing, once for all the operations that signal the mbarrier.
    w.cta.report(
        "mbarrier",
        f"the mbarrier at {place}, initialised by {other.warp} lane {other.lane} (PTX line {other.line}), is signalled by {code.opcode} "
        f"(PTX line {code.line}), but its initialisation is not {'ordered before that' if own else 'fenced for another CTA'}",
        barrier.code,
        w,
        other.lane,
        barrier.address,
        place=place,
        missing=f"a barrier after PTX line {other.line}"
        if own
        else f"fence.mbarrier_init (or fence.proxy.async) after PTX line {other.line}, before the barrier that follows",
    )


def touch_mbarrier(w: Warp, code: Code, owner: Cta, address: int, lane: int, strong: bool) -> None:
    shadow = owner.shadow
    assert shadow is not None
    tag = code.strong_tag if strong else code.tag
    if strong and SHARED_START <= address <= owner.shared_end - 8 and not address & 7 and shadow.shift <= 3:
        # What nearly every one comes to: ordered with a single initialisation and nothing else but strong accesses.
        part = slice(address >> shadow.shift, (address + 8) >> shadow.shift)
        last = shadow.write[part].tolist()
        actor = last[0] & hz.ACTOR_MASK
        table = w.clock.table
        limit = max(table.item(hz.ORDER, actor), table.item(hz.INITS, actor))
        if last[0] <= limit and last.count(last[0]) == len(last) and not shadow.reads[:, part].any():
            shadow.note_write(part, w.epochs[lane] + tag, strong)
            return
    one = np.array([address], np.int64)
    if shared_faults(w, code, one, np.array([lane], np.int64), 8, True, owner) is not None:
        return
    index, wide = shared_index(shadow, one, 8)
    epochs = w.epochs[lane : lane + 1] + tag
    check_shared(w, code, index, epochs[:, None] if wide else epochs, True, strong=strong, owner=owner, inits=strong)


def _by_address(address: Array, mask: Array) -> list[tuple[int, Int64]]:
    """[(address, lanes)] of the active lanes."""
    lanes = np.flatnonzero(mask)
    active = address[lanes]
    if (active == active[0]).all():
        return [(int(active[0]), lanes)]
    return [(int(at), lanes[active == at]) for at in np.unique(active)]


def arrive(w: Warp, code: Code, barrier: MBarrier, count: int, lane: int, release: bool = True, settle: bool = True) -> int:
    """Count arrivals; returns the state before."""
    state = barrier.phase | barrier.pending << 32
    if (observer := w.cta.launch.observer) is not None:
        observer.mbarrier_arrive(w, barrier, count, False)
    if w.cta.check:
        if release:
            barrier.join(w.snapshot())
        else:
            barrier.relaxed = True
        barrier.last = (w.name, code.line)
        barrier.arrivers[w.main] = (barrier.phase, code.line)
    if count > barrier.pending:
        w.cta.report(
            "mbarrier",
            f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}): {count} arrivals on {barrier.place}, "
            f"whose phase {barrier.phase} waits for {barrier.pending} of {barrier.expected} only",
            code,
            w,
            lane,
            barrier.address,
        )
        count = barrier.pending
    barrier.pending -= count
    w.cta.launch.progress_count += 1
    if settle:
        barrier.settle()
    return state


def expect(w: Warp, code: Code, barrier: MBarrier, amount: int, lane: int) -> None:
    barrier.tx += amount
    w.cta.launch.progress_count += 1
    if (observer := w.cta.launch.observer) is not None:
        observer.mbarrier_expect(w, barrier, amount)
    if abs(barrier.tx) > MBARRIER_LIMIT:
        w.cta.report(
            "mbarrier",
            f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}): transaction count {barrier.tx} is beyond 2^20 - 1",
            code,
            w,
            lane,
            barrier.address,
        )


@instruction("mbarrier.init")
def _init(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.9"""
    operands = asm.operands(2)
    read, count = shared_reader(asm, operands[0], words), asm.source(operands[1], "u32")
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        address = read(r)
        for lane in np.flatnonzero(w.mask).tolist():
            at, expected = int(address[lane]), int(r[count][lane])
            if not 1 <= expected <= MBARRIER_LIMIT:
                raise PtxFault(f"an arrival count of {expected} is not in 1..2^20-1")
            if w.cta.check:
                touch_mbarrier(w, code, w.cta, at, lane, False)
            old = w.cta.mbarriers.get(at)
            if old is not None and (old.waiting or old.line):
                state = f"while {old.waiting[0][0].name} waits on it" if old.waiting else f"which is live since PTX line {old.line}"
                w.cta.report(
                    "mbarrier",
                    f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}) on {old.place} {state}",
                    code,
                    w,
                    lane,
                    at,
                    place=old.place,
                    missing="mbarrier.inval once nobody uses the mbarrier any more",
                )
            barrier = w.cta.mbarriers[at] = MBarrier(at, expected, w.cta)
            barrier.init = w.epochs[lane] + code.tag
            barrier.line, barrier.code = code.line, code
            if (observer := w.cta.launch.observer) is not None:
                observer.mbarrier_init(w, barrier)

    return step, step


@instruction("mbarrier.inval")
def _inval(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.10"""
    read = shared_reader(asm, asm.operands(1)[0], words)
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        for at, lanes in _by_address(read(r), w.mask):
            mbarrier_at(w, code, at, int(lanes[0]), strong=False)
            w.cta.mbarriers.pop(at, None)
            w.cta.invalid[at] = code.line

    return step, step


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def _expect_tx(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.11, 9.7.13.15.12"""
    operands = asm.operands(2)
    read, amount = shared_reader(asm, operands[0], words), asm.source(operands[1], "u32")
    complete = ins.opcode.startswith("mbarrier.complete_tx")
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        address = read(r)
        for lane in np.flatnonzero(w.mask).tolist():
            barrier = mbarrier_at(w, code, int(address[lane]), lane)
            value = int(r[amount][lane])
            if complete:
                barrier.tx -= value
                barrier.relaxed = True
                barrier.settle()
            else:
                expect(w, code, barrier, value, lane)

    return step, step


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.13, 9.7.13.15.14. Default semantics: release at CTA scope."""
    drop = ins.opcode.startswith("mbarrier.arrive_drop")
    with_tx = "expect_tx" in words
    no_complete = "noComplete" in words
    operands = list(ins.operands)
    if operands and isinstance(operands[0], Address):
        operands.insert(0, Sink())
    if len(operands) not in (2, 3) or (with_tx and len(operands) != 3):
        raise asm.error(f"{ins.opcode} does not take {len(ins.operands)} operands")
    d = asm.destination(operands[0], "u64")
    read = shared_reader(asm, operands[1], words)
    extra = asm.source(operands[2], "u32") if len(operands) == 3 else -1
    release = "relaxed" not in words
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        for at, lanes in _by_address(read(r), w.mask):
            barrier = mbarrier_at(w, code, at, int(lanes[0]))
            first = int(lanes[0])
            if with_tx:
                expect(w, code, barrier, int(r[extra][lanes].astype(np.int64).sum()), first)
                count = len(lanes)
            elif extra >= 0:
                count = int(r[extra][lanes].astype(np.int64).sum())
            else:
                count = len(lanes)
            if drop:
                barrier.expected -= count
            if no_complete and count >= barrier.pending:
                raise PtxFault("an arrival with .noComplete would complete the phase")
            state = arrive(w, code, barrier, count, first, release)
            r[d][lanes] = np.uint64(state)

    return step, step


@instruction("mbarrier.pending_count")
def _pending_count(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.17"""
    operands = asm.operands(2)

    def pending(state: Array, out: Array) -> None:
        out[...] = state >> np.uint64(32)

    return asm.lanewise(pending, asm.destination(operands[0], "u32"), [asm.source(operands[1], "u64")], "u32")


@instruction("mbarrier.test_wait", "mbarrier.try_wait")
def _wait(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.16. A test that fails parks the warp until the phase changes, now and then returning false instead as hardware may."""
    parity = "parity" in words
    operands = asm.operands(3, 4)
    p = asm.destination(operands[0], "pred")
    read = shared_reader(asm, operands[1], words)
    token = asm.source(operands[2], "u32" if parity else "u64")
    acquire = "relaxed" not in words
    code = asm.code
    blocking = parity and ins.opcode.startswith("mbarrier.try_wait")

    def passed(barrier: MBarrier, value: int) -> bool:
        if parity:
            return (barrier.phase & 1) != (value & 1)
        return barrier.phase != (value & 0xFFFF_FFFF)

    def step(w: Warp, r: list[Any]) -> int | None:
        address, mask = read(r), w.mask
        lane = int(mask.argmax())
        group = w.group
        single = bool((address[mask] == address[lane]).all() and (r[token][mask] == r[token][lane]).all())
        lanes = [lane] if single else np.flatnonzero(mask).tolist()
        for each in lanes:
            barrier = mbarrier_at(w, code, int(address[each]), each)
            done = passed(barrier, int(r[token][each]))
            if (observer := w.cta.launch.observer) is not None:
                observer.mbarrier_wait(w, barrier, done)
            if done and w.cta.check:
                if acquire and barrier.done is not None:
                    w.clock.join(barrier.done)
                _note_passed(w, code, barrier, each, blocking)
            if single:
                if not done and not group.spurious and w.cta.launch.random.random() >= 0.1:
                    group.blocked = ("mbarrier", barrier, code)
                    if group.parked < 0:
                        group.parked = barrier.phase
                    elif w.cta.check and barrier.phase > group.parked + 1:
                        _report_missed(w, code, barrier, each, group.parked)
                        group.parked = barrier.phase
                    barrier.waiting.append((w, group))
                    return RETRY
                np.copyto(r[p], done, where=mask)
            else:
                r[p][each] = done
        group.spurious = False
        return None

    return step, step


def _note_passed(w: Warp, code: Code, barrier: MBarrier, lane: int, blocking: bool) -> None:
    """Remember a wait that has passed; report one (blocking: try_wait by parity) that passes by a phase its own warp has left behind."""
    w.group.parked = -1
    done = barrier.phase - 1
    if done < 0:
        return
    arrived = barrier.arrivers.get(w.main)
    if blocking and arrived is not None and arrived[0] == barrier.phase and barrier.passed.get(w.main) == done:
        w.cta.report(
            "mbarrier",
            f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}) on {barrier.place} passes by phase {done}, which the warp has "
            f"waited for before, although it has arrived in phase {barrier.phase} since: the parity is that of the wrong phase",
            code,
            w,
            lane,
            barrier.address,
            place=barrier.place,
            missing=f"a wait for phase {barrier.phase}",
        )
    barrier.passed[w.main] = done
    barrier.observers[w.actor] = (w.track.time, w, code)


def _report_missed(w: Warp, code: Code, barrier: MBarrier, lane: int, phase: int) -> None:
    w.cta.report(
        "mbarrier",
        f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}) on {barrier.place} has missed phase {phase}: "
        f"the mbarrier is in phase {barrier.phase} already, two ahead, and its parity says that phase {phase} is not complete",
        code,
        w,
        lane,
        barrier.address,
        place=barrier.place,
        missing=f"arrivals of phase {phase + 1} that wait until {w.name} has passed phase {phase}",
    )


# ---------------------------------------------------------------------------------------------------------------- tensor maps


def tensor_map_at(w: Warp, code: Code, address: int) -> TensorMap:
    """The tensor map whose record a generic address points to."""
    launch = w.cta.launch
    if address >> 40 == PARAM_WINDOW >> 40:
        offset = address - PARAM_WINDOW
        raw = launch.params[offset : offset + 24].tobytes()
    else:
        mapping = launch.memory.find(address)
        raw = b"" if mapping is None else mapping.bytes[address - mapping.base : address - mapping.base + 24].tobytes()
    if address % 64:
        w.cta.report(
            "tensor_map",
            f"{code.opcode} by {w.name} (PTX line {code.line}): the tensor map at {address:#x} is not aligned to 64 bytes",
            code,
            w,
            int(w.mask.argmax()),
            address,
        )
    number = int.from_bytes(raw[16:24], "little")
    if raw[:16] != TENSOR_MAP_MAGIC or number >= len(launch.tensor_maps):
        raise PtxFault(f"there is no tensor map at {address:#x}: pass a TensorMap as the parameter")
    return launch.tensor_maps[number]


class Box:
    """One box of a tensor map at given coordinates: its rows in global memory and its bytes in shared memory."""

    def __init__(self, w: Warp, tensor_map: TensorMap, coordinates: list[int]) -> None:
        if len(coordinates) != len(tensor_map.shape):
            raise PtxFault(f"{len(coordinates)} coordinates for a tensor map of rank {len(tensor_map.shape)}")
        steps = None if all(s == 1 for s in tensor_map.element_strides) else tensor_map.element_strides
        self.element_bytes = int(tensor_map.dtype.itemsize)
        self.rows = tma_rows(tensor_map.shape, tensor_map.strides, tensor_map.box, coordinates, self.element_bytes, steps)
        self.bytes = self.rows.box_bytes
        self.swizzle = tensor_map.swizzle
        self.mapping = w.cta.launch.memory.mapping(tensor_map.array)
        self.base = self.mapping.base + tensor_map.offset_bytes
        self.offset = tensor_map.offset_bytes
        self.fill = tensor_map.oob_nan

    def pieces(self) -> tuple[Int64, int]:
        """(device addresses, size) of equal power-of-two pieces that cover the box's bytes in bounds."""
        rows = self.rows
        starts = rows.global_offset if rows.whole else rows.global_offset[rows.inside]
        if not len(starts):
            return starts, 16
        union = int(np.bitwise_or.reduce(starts)) | self.offset | rows.length | 16
        size = union & -union
        return ((starts + self.base)[:, None] + np.arange(0, rows.length, size)).reshape(-1), size

    def _columns(self) -> tuple[Array, Array, Int64, Any]:
        """(words of the mapping, step, first word of each row, rows) for whole-word transfers."""
        rows = self.rows
        inside = slice(None) if rows.whole else rows.inside
        starts = rows.global_offset[inside] + self.offset
        union = (int(np.bitwise_or.reduce(starts)) if len(starts) else 0) | rows.length | rows.first | 8
        size = union & -union
        return self.mapping.words[size], np.arange(rows.length // size), starts // size, inside

    def read(self) -> Array:
        """The box's bytes, dense, out-of-bounds elements filled."""
        rows = self.rows
        words, columns, starts, inside = self._columns()
        data: Array
        if rows.whole:
            data = words[starts[:, None] + columns]
            return np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        if self.fill:
            nan = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}.get(self.element_bytes, 0)
            data = np.full(self.bytes // self.element_bytes, nan, np.dtype(f"u{self.element_bytes}")).view(np.uint8)
        else:
            data = np.zeros(self.bytes, np.uint8)
        if len(starts):
            table = data.view(words.dtype).reshape(len(rows.inside), -1)
            first = rows.first // words.dtype.itemsize
            table[inside, first : first + len(columns)] = words[starts[:, None] + columns]
        return data

    def write(self, data: Array, combine: Callable[[Array, Array], Array] | None = None) -> None:
        """Store the box's bytes that are in bounds."""
        rows = self.rows
        words, columns, starts, inside = self._columns()
        if not len(starts):
            return
        table = data.view(words.dtype).reshape(len(rows.inside), -1)
        first = rows.first // words.dtype.itemsize
        target = starts[:, None] + columns
        value = table[inside, first : first + len(columns)]
        words[target] = value if combine is None else combine(words[target], np.ascontiguousarray(value))


def gather_box(cta: Cta, address: int, size: int, mode: int) -> Array:
    """A dense box from (swizzled) shared memory."""
    chunks = cta.words[8][: len(cta.words[8]) // 2 * 2].reshape(-1, 2)
    place = address // 16 + swizzle_chunks(address % 1024, size // 16, mode)
    return chunks[place].view(np.uint8).reshape(-1)


def scatter_box(cta: Cta, address: int, data: Array, mode: int) -> None:
    chunks = cta.words[8][: len(cta.words[8]) // 2 * 2].reshape(-1, 2)
    place = address // 16 + swizzle_chunks(address % 1024, len(data) // 16, mode)
    chunks[place] = data.view(np.uint64).reshape(-1, 2)


def _shared_box_fault(w: Warp, code: Code, address: int, size: int, align: int, lane: int, verb: str, owner: Cta | None = None) -> bool:
    """Report a box that does not lie in shared memory or is misaligned."""
    cta = w.cta if owner is None else owner
    place = f"{verb} of {size} bytes at shared{address - SHARED_START:+#x} by the copy of {w.name} lane {lane} (PTX line {code.line})"
    if address < SHARED_START or address + size > cta.shared_end:
        cta.report(
            "out_of_bounds", f"{place}: the launch has {cta.shared_end - SHARED_START} bytes of shared memory", code, w, lane, address
        )
        return True
    if address % align:
        cta.report("misaligned", f"{place}: the address must be a multiple of {align}", code, w, lane, address)
        return True
    return False


def _granules(cta: Cta, address: int, size: int) -> slice:
    shadow = cta.shadow
    assert shadow is not None
    narrow = (address | size | 16) & -(address | size | 16)
    if narrow < 1 << shadow.shift:
        shadow.refine(narrow.bit_length() - 1)
    return slice(address >> shadow.shift, (address + size) >> shadow.shift)


def _epoch(actor: int, time: int, lane: int, code: Code) -> np.int64:
    return np.int64((time << hz.CLOCK_SHIFT) | actor | lane << hz.LANE_SHIFT | int(code.tag))


def in_flight(cta: Cta, slot: tuple[int, int], code: Code, w: Warp, who: str) -> None:
    """Note an asynchronous operation of a warp that the CTA has to wait for before it exits."""
    cta.cluster.in_flight[slot[0]] = (slot[1], cta, code, w, who)


def _check_exit(cta: Cta, warp: Warp) -> None:
    """Report asynchronous operations that nobody has waited for when the CTA exits: its memory goes while they work on it."""
    clock = cta.exit_clock
    if not cta.check or clock is None:
        return
    for actor, (time, owner, code, issuer, who) in list(cta.cluster.in_flight.items()):
        if owner is not cta:
            continue
        if actor >= len(clock.limits) or clock.limits[actor] >> hz.CLOCK_SHIFT < time:
            name = f"CTA {cta.index}" if cta.launch.total > 1 else "the CTA"
            waits = "a wait for it by some thread of the CTA: its mbarrier, or cp.async.bulk.wait_group by the thread that issued it"
            cta.report(
                "async_exit",
                f"{who} ({code.opcode}, PTX line {code.line}) may still be in flight when {name} exits: nothing has waited for it",
                code,
                issuer,
                missing=waits,
            )
        del cta.cluster.in_flight[actor]


EXIT_HOOKS.append(_check_exit)


def complete_on(w: Warp, barrier: MBarrier, size: int, slot: tuple[int, int] | None, move: Callable[[], None]) -> None:
    """Queue an asynchronous write that reports `size` bytes to an mbarrier when it is done."""
    clock: Clock | None = None
    if slot is not None:
        clock = w.snapshot()
        actor, time = slot
        clock.grow(actor + 1)
        clock.limits[actor] = time << hz.CLOCK_SHIFT | hz.CLOCK_FILL

    def complete() -> None:
        move()
        barrier.tx -= size
        barrier.join(clock)
        barrier.settle()

    w.cta.launch.defer(w.cta, complete, (barrier,))


# -------------------------------------------------------------------------------------------------------------- tensor copies


def _coordinates(asm: Assembler, operand: Operand, rank: int) -> tuple[int, list[int]]:
    """(slot of the map's address, slots of the coordinates)."""
    if not isinstance(operand, Address):
        raise asm.error(f"{asm.instruction.opcode}: expected [map, {{coordinates}}]")
    if len(operand.coordinates) != rank:
        raise asm.error(f"{asm.instruction.opcode}: {len(operand.coordinates)} coordinates for a {rank}d copy")
    return 0, [asm.source(c, "s32") for c in operand.coordinates]


def _map_reader(asm: Assembler, operand: Operand) -> Reader:
    assert isinstance(operand, Address)
    read, space = address_reader(asm, operand, "generic")
    if space == "param":
        return lambda r: read(r) + np.int64(PARAM_WINDOW)
    return read


def _rank(asm: Assembler, words: list[str]) -> int:
    rank = next((w for w in words if len(w) == 2 and w[1] == "d" and w[0] in "12345"), "")
    if not rank:
        raise asm.error(f"{asm.instruction.opcode} names no dimension")
    return int(rank[0])


@instruction("cp.async.bulk.tensor")
def _tensor_copy(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.27.1.2, .tile mode."""
    rank = _rank(asm, words)
    for word in words:
        if word.startswith(("im2col", "tile::")):
            raise asm.error(f"{ins.opcode}: .{word} is not supported")
    code = asm.code
    if "bulk_group" in words:
        _operand_count(asm, ins, words, 2)
        return _tensor_store(asm, ins.operands[0], ins.operands[1], rank, None)
    if len(ins.operands) < 3 or "global" not in words:
        raise asm.error(f"{ins.opcode}: this form of copy is not supported")
    _operand_count(asm, ins, words, 3)
    target = shared_reader(asm, ins.operands[0], ["shared"] if any(w.startswith("shared") for w in words) else words)
    map_address = _map_reader(asm, ins.operands[1])
    _, coordinates = _coordinates(asm, ins.operands[1], rank)
    barrier_address = shared_reader(asm, ins.operands[2], words)
    ranks = _multicast(asm, ins, words, 3)

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        for lane in np.flatnonzero(w.mask).tolist():
            tensor_map = tensor_map_at(w, code, int(map_address(r)[lane]))
            box = Box(w, tensor_map, [int(r[c][lane]) for c in coordinates])
            mask = int(r[ranks][lane]) if ranks >= 0 else None
            who = f"the tensor load of {w.name}"
            for owner, address, barrier in _targets(w, code, lane, int(target(r)[lane]), int(barrier_address(r)[lane]), mask):
                slot: tuple[int, int] | None = None
                fault = _shared_box_fault(w, code, address, box.bytes, 128, lane, "write", owner)
                if cta.check:
                    slot = cta.async_slot(w, who)
                    epoch = _epoch(*slot, lane, code)
                    if not fault:
                        check_shared(w, code, _granules(owner, address, box.bytes), epoch, True, who=who, owner=owner, proxy=True)
                        cta.cluster.tiles[int(epoch)] = (address, box.swizzle, box.rows.row_bytes, code)
                    starts, size = box.pieces()
                    if len(starts):
                        check_global(w, code, box.mapping, starts, size, epoch, False, who=who, proxy=True)
                    in_flight(owner, slot, code, w, who)
                    check_visible(w, code, barrier, lane)

                if cta.launch.observer is not None:
                    cta.launch.observer.copy(w, tensor_map, [int(r[c][lane]) for c in coordinates], address, barrier)
                if (profile := cta.launch.profile) is not None:
                    profile.move("tensor copy load", box.bytes)

                def move(box: Box = box, owner: Cta = owner, address: int = address, fault: bool = fault) -> None:
                    if not fault:
                        scatter_box(owner, address, box.read(), box.swizzle)

                complete_on(w, barrier, box.bytes, slot, move)

    return step, step


def _operand_count(asm: Assembler, ins: Instruction, words: list[str], fixed: int) -> None:
    """Refuses a copy that lacks the mask or the cache policy its modifiers announce, or has more than they do."""
    hinted = "L2::cache_hint" in words
    expected = fixed + ("multicast::cluster" in words) + hinted
    if len(ins.operands) != expected:
        raise asm.error(f"{ins.opcode} takes {expected} operands")
    if hinted:
        asm.source(ins.operands[-1], "u64")


def _multicast(asm: Assembler, ins: Instruction, words: list[str], place: int) -> int:
    """Slot of the mask of ranks of a .multicast::cluster copy, -1 when it has none."""
    if "multicast::cluster" not in words:
        return -1
    if len(ins.operands) <= place:
        raise asm.error(f"{ins.opcode} names no mask of CTAs")
    return asm.source(ins.operands[place], "u16")


def _targets(w: Warp, code: Code, lane: int, address: int, barrier_address: int, mask: int | None) -> list[tuple[Cta, int, MBarrier]]:
    """[(CTA, offset, mbarrier)] of a copy into shared memory; mask: ranks of a multicast, each at the same offsets."""
    cta = w.cta
    if mask is None:
        owner, offset = owner_of(cta, address)
        if owner is not cta:
            check_alive(w, code, owner, lane)
        barrier = mbarrier_at(w, code, barrier_address, lane)
        if barrier.cta is not owner:
            raise PtxFault("the mbarrier is not in the shared memory of the CTA that is written")
        return [(owner, offset, barrier)]
    if not mask or mask >> cta.cluster.size:
        raise PtxFault(f"the multicast mask {mask:#x} does not name CTAs of a cluster of {cta.cluster.size}")
    result = []
    for rank in range(cta.cluster.size):
        if mask >> rank & 1:
            owner, offset = owner_of(cta, same_offset(cta, address, rank))
            check_alive(w, code, owner, lane)
            result.append((owner, offset, mbarrier_at(w, code, same_offset(cta, barrier_address, rank), lane)))
    return result


class BulkGroups:
    """Bulk groups of one thread: operations since the last commit, and committed groups, oldest first."""

    def __init__(self) -> None:
        self.time = 1
        self.open: list[Pending] = []
        self.groups: list[tuple[int, list[Pending]]] = []
        self.read_done = 0
        self.write_done = 0


def _bulk(w: Warp, lane: int) -> BulkGroups:
    found: BulkGroups | None = w.bulk.get(lane)
    if found is None:
        found = w.bulk[lane] = BulkGroups()
    return found


def _bulk_actors(w: Warp, lane: int) -> tuple[int, int]:
    cta = w.cta
    return (
        cta.actor(("bulk read", w.index, lane), f"the bulk store of {w.name}"),
        cta.actor(("bulk write", w.index, lane), f"the bulk store of {w.name}"),
    )


def _tensor_store(asm: Assembler, target: Operand, source: Operand, rank: int, combine: Any) -> Steps:
    code = asm.code
    map_address = _map_reader(asm, target)
    _, coordinates = _coordinates(asm, target, rank)
    source_address = shared_reader(asm, source, ["shared"])

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        for lane in np.flatnonzero(w.mask).tolist():
            tensor_map = tensor_map_at(w, code, int(map_address(r)[lane]))
            box = Box(w, tensor_map, [int(r[c][lane]) for c in coordinates])
            if not box.mapping.writable:
                raise PtxFault(f"the tensor map's array {box.mapping.name} is read-only")
            address = int(source_address(r)[lane])
            groups = _bulk(w, lane)
            fault = _shared_box_fault(w, code, address, box.bytes, 128, lane, "read")
            starts, size = box.pieces()
            if cta.check:
                reader, writer = _bulk_actors(w, lane)
                who = f"the bulk store of {w.name}"
                if not fault:
                    epoch = _epoch(reader, groups.time, lane, code)
                    check_shared(w, code, _granules(cta, address, box.bytes), epoch, False, reader=reader, who=who, proxy=True)
                if len(starts):
                    check_global(w, code, box.mapping, starts, size, _epoch(writer, groups.time, lane, code), True, who=who, proxy=True)
                in_flight(cta, (reader, groups.time), code, w, who)

            if cta.launch.observer is not None:
                cta.launch.observer.copy(w, tensor_map, [int(r[c][lane]) for c in coordinates], address, None)
            if (profile := cta.launch.profile) is not None:
                profile.move("tensor copy store", box.bytes)

            def move(box: Box = box, address: int = address, fault: bool = fault) -> None:
                if not fault:
                    box.write(gather_box(cta, address, box.bytes, box.swizzle), combine)

            groups.open.append(cta.launch.defer(cta, move))

    return step, step


@instruction("cp.async.bulk.prefetch")
def _prefetch(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.4.3, 9.7.9.27.1.4: checked, without effect."""
    code = asm.code
    if words[0] == "tensor":
        rank = _rank(asm, words)
        map_address = _map_reader(asm, ins.operands[0])
        _coordinates(asm, ins.operands[0], rank)

        def step(w: Warp, r: list[Any]) -> None:
            for lane in np.flatnonzero(w.mask).tolist():
                tensor_map_at(w, code, int(map_address(r)[lane]))

        return step, step

    def ignore(w: Warp, r: list[Any]) -> None:
        return None

    return ignore, ignore


# ---------------------------------------------------------------------------------------------------------------- bulk copies


def _bulk_faults(w: Warp, code: Code, address: int, size: int, lane: int, mapping_of: int, write: bool) -> Mapping | None:
    """The mapping of a global range, or None after reporting that it is out of bounds or misaligned."""
    found = w.cta.launch.memory.find(mapping_of)
    verb = "write" if write else "read"
    place = f"{verb} of {size} bytes at global address {mapping_of:#x} by the copy of {w.name} lane {lane} (PTX line {code.line})"
    if found is None or mapping_of + size > found.end or (write and not found.writable):
        nearest = w.cta.launch.memory.nearest(mapping_of)
        w.cta.report("out_of_bounds", f"{place}: outside every writable mapping (nearest: {nearest})", code, w, lane, mapping_of)
        return None
    if mapping_of % 16:
        w.cta.report("misaligned", f"{place}: the address must be a multiple of 16", code, w, lane, mapping_of)
        return None
    return found


@instruction("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk_copy(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.4.1, 9.7.9.25.4.2"""
    code = asm.code
    combine: Callable[[Array, Array], Array] | None = None
    if ins.opcode.startswith("cp.reduce"):
        kind, operation = words[-1], next((w for w in words if w in ATOMICS), "")
        if "tensor" in words:
            if "add" not in words or "bulk_group" not in words:
                raise asm.error(f"{ins.opcode} is not supported")
            raise asm.error(f"{ins.opcode} is not supported")
        if kind == "f32" and operation == "add":

            def combine(old: Array, new: Array) -> Array:
                return add_f32(old.view(np.float32).reshape(-1), new.view(np.float32).reshape(-1)).view(old.dtype).reshape(old.shape)

        elif kind in ("u32", "s32", "u64", "s64") and operation in ("add", "min", "max", "and", "or", "xor"):
            dtype = np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
            function = ATOMICS[operation]

            def combine(old: Array, new: Array) -> Array:
                return function(old.view(dtype), new.view(dtype)).view(old.dtype)

        else:
            raise asm.error(f"{ins.opcode} is not supported")
    operands = ins.operands
    to_global = "bulk_group" in words
    if "global" not in words and "shared::cta" in words and combine is None:
        return _bulk_between(asm, ins)
    if len(operands) < (3 if to_global else 4) or "global" not in words:
        raise asm.error(f"{ins.opcode}: this form of copy is not supported")
    _operand_count(asm, ins, words, (3 if to_global else 4) + ("cp_mask" in words))
    ranks = -1 if to_global else _multicast(asm, ins, words, 4)
    shared_address = shared_reader(asm, operands[1 if to_global else 0], ["shared"])
    global_address, _ = address_reader(asm, operands[0 if to_global else 1], "global")
    length = asm.source(operands[2], "u32")
    barrier_address = shared_reader(asm, operands[3], words) if not to_global else None

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        for lane in np.flatnonzero(w.mask).tolist():
            size, inside, outside = int(r[length][lane]), int(shared_address(r)[lane]), int(global_address(r)[lane])
            if size % 16:
                raise PtxFault(f"a bulk copy of {size} bytes: the size must be a multiple of 16")
            mapping = _bulk_faults(w, code, inside, size, lane, outside, to_global)
            # One that does not fit is refused below: only so many bytes are ever looked at.
            starts = np.arange(outside, outside + min(size, len(cta.smem)), 16)
            if (profile := cta.launch.profile) is not None:
                profile.move("bulk copy store" if to_global else "bulk copy load", size)
            if to_global:
                fault = _shared_box_fault(w, code, inside, size, 16, lane, "read") or mapping is None
                groups = _bulk(w, lane)
                if cta.check and not fault and size:
                    assert mapping is not None
                    reader, writer = _bulk_actors(w, lane)
                    who = f"the bulk store of {w.name}"
                    epoch = _epoch(reader, groups.time, lane, code)
                    check_shared(w, code, _granules(cta, inside, size), epoch, False, reader=reader, who=who, proxy=True)
                    check_global(w, code, mapping, starts, 16, _epoch(writer, groups.time, lane, code), True, who=who, proxy=True)
                    in_flight(cta, (reader, groups.time), code, w, who)

                def put(
                    mapping: Mapping | None = mapping, inside: int = inside, outside: int = outside, size: int = size, fault: bool = fault
                ) -> None:
                    if fault or mapping is None:
                        return
                    data = cta.smem[inside : inside + size]
                    target = mapping.bytes[outside - mapping.base : outside - mapping.base + size]
                    if combine is None:
                        target[...] = data
                    else:
                        target[...] = combine(target.copy().view(np.uint64), data.copy().view(np.uint64)).view(np.uint8)

                groups.open.append(cta.launch.defer(cta, put))
                continue
            assert barrier_address is not None
            mask = int(r[ranks][lane]) if ranks >= 0 else None
            for owner, place, barrier in _targets(w, code, lane, inside, int(barrier_address(r)[lane]), mask):
                slot: tuple[int, int] | None = None
                fault = _shared_box_fault(w, code, place, size, 16, lane, "write", owner) or mapping is None
                if cta.check:
                    who = f"the bulk load of {w.name}"
                    slot = cta.async_slot(w, who)
                    if not fault and size:
                        assert mapping is not None
                        epoch = _epoch(*slot, lane, code)
                        check_shared(w, code, _granules(owner, place, size), epoch, True, who=who, owner=owner, proxy=True)
                        check_global(w, code, mapping, starts, 16, epoch, False, who=who, proxy=True)
                    in_flight(owner, slot, code, w, who)
                    check_visible(w, code, barrier, lane)

                def move(
                    mapping: Mapping | None = mapping,
                    owner: Cta = owner,
                    place: int = place,
                    outside: int = outside,
                    size: int = size,
                    fault: bool = fault,
                ) -> None:
                    if not fault and mapping is not None:
                        owner.smem[place : place + size] = mapping.bytes[outside - mapping.base : outside - mapping.base + size]

                complete_on(w, barrier, size, slot, move)

    return step, step


def _bulk_between(asm: Assembler, ins: Instruction) -> Steps:
    """cp.async.bulk.shared::cluster.shared::cta: from the own shared memory to that of a CTA of the cluster."""
    operands = asm.operands(4)
    target, source = shared_reader(asm, operands[0], ["shared"]), shared_reader(asm, operands[1], ["shared"])
    length = asm.source(operands[2], "u32")
    barrier_address = shared_reader(asm, operands[3], ["shared"])
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        for lane in np.flatnonzero(w.mask).tolist():
            size, start = int(r[length][lane]), int(source(r)[lane])
            if size % 16:
                raise PtxFault(f"a bulk copy of {size} bytes: the size must be a multiple of 16")
            ((owner, place, barrier),) = _targets(w, code, lane, int(target(r)[lane]), int(barrier_address(r)[lane]), None)
            if (profile := cta.launch.profile) is not None:
                profile.move("bulk copy shared to shared", size)
            fault = _shared_box_fault(w, code, place, size, 16, lane, "write", owner)
            fault |= _shared_box_fault(w, code, start, size, 16, lane, "read")
            slot: tuple[int, int] | None = None
            if cta.check:
                who = f"the bulk copy of {w.name}"
                slot = cta.async_slot(w, who)
                if not fault and size:
                    epoch = _epoch(*slot, lane, code)
                    check_shared(w, code, _granules(cta, start, size), epoch, False, reader=slot[0], who=who, proxy=True)
                    check_shared(w, code, _granules(owner, place, size), epoch, True, who=who, owner=owner, proxy=True)
                in_flight(owner, slot, code, w, who)
                check_visible(w, code, barrier, lane)

            def move(owner: Cta = owner, place: int = place, start: int = start, size: int = size, fault: bool = fault) -> None:
                if not fault:
                    owner.smem[place : place + size] = cta.smem[start : start + size]

            complete_on(w, barrier, size, slot, move)

    return step, step


@instruction("cp.async.bulk.commit_group")
def _bulk_commit(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.3.2"""

    def step(w: Warp, r: list[Any]) -> None:
        for lane, groups in w.bulk.items():
            if w.mask[lane]:
                groups.groups.append((groups.time, groups.open))
                groups.open = []
                groups.time += 1

    return step, step


@instruction("cp.async.bulk.wait_group")
def _bulk_wait(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.3.3. With .read only the sources are known to have been read."""
    keep = asm.integer(asm.operands(1)[0], "the number of groups")
    read_only = "read" in words

    def step(w: Warp, r: list[Any]) -> None:
        for lane, groups in w.bulk.items():
            if not w.mask[lane]:
                continue
            done = groups.groups[: len(groups.groups) - keep] if keep < len(groups.groups) else []
            for _, pendings in done:
                for pending in pendings:
                    w.cta.launch.finish(pending)
            if not done:
                continue
            time = done[-1][0]
            if w.cta.check:
                reader, writer = _bulk_actors(w, lane)
                limits = w.clock.limits
                limits[reader] = max(int(limits[reader]), time << hz.CLOCK_SHIFT | hz.CLOCK_FILL)
                if not read_only:
                    limits[writer] = max(int(limits[writer]), time << hz.CLOCK_SHIFT | hz.CLOCK_FILL)
            if not read_only:
                del groups.groups[: len(done)]

    return step, step


# ------------------------------------------------------------------------------------------------------------------- cp.async


class CopyGroups:
    """Non-bulk asynchronous copies of a warp."""

    def __init__(self, actor: int) -> None:
        self.actor = actor
        self.time = 1
        self.open: list[Pending] = []
        self.groups: list[tuple[int, list[Pending]]] = []


def _copies(w: Warp) -> CopyGroups:
    if w.cp_async is None:
        # cp.async works through the generic proxy (9.7.9.25.1).
        w.cp_async = CopyGroups(w.cta.actor(("cp.async", w.index), f"cp.async of {w.name}", generic=True))
    result: CopyGroups = w.cp_async
    return result


@instruction("cp.async")
def _cp_async(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.2.1"""
    operands = ins.operands
    if len(operands) < 3:
        raise asm.error(f"{ins.opcode} takes at least 3 operands")
    target = shared_reader(asm, operands[0], ["shared"])
    source, _ = address_reader(asm, operands[1], "global")
    size = asm.integer(operands[2], "the copy size")
    if size not in (4, 8, 16):
        raise asm.error(f"{ins.opcode}: the copy size is 4, 8 or 16, not {size}")
    hinted = "L2::cache_hint" in words
    extra = operands[3] if len(operands) - hinted > 3 else None
    amount = asm.source(extra, "u32") if extra is not None else -1
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        lanes = np.flatnonzero(w.mask)
        to, come = target(r)[lanes], source(r)[lanes]
        good = shared_faults(w, code, to, lanes, size, True)
        if good is not None:
            lanes, to, come = lanes[good], to[good], come[good]
        count = r[amount][lanes].astype(np.int64) if amount >= 0 else np.full(len(lanes), size, np.int64)
        if (profile := cta.launch.profile) is not None:
            profile.move("cp.async load", int(count.sum()))
        copies = _copies(w)
        parts: list[tuple[Mapping, Array, Array, Array]] = []
        reads = np.flatnonzero(count > 0)
        if len(reads):
            for mapping, pick in global_mapping(w, code, come[reads], lanes[reads], size, False):
                chosen = reads if pick is None else reads[pick]
                parts.append((mapping, to[chosen], come[chosen], count[chosen]))
        if cta.check and len(lanes):
            assert cta.shadow is not None
            base = np.int64(copies.time << hz.CLOCK_SHIFT | copies.actor | int(code.tag))
            epochs = (lanes << hz.LANE_SHIFT) + base
            index, wide = shared_index(cta.shadow, to, size)
            who = f"cp.async of {w.name}"
            in_flight(cta, (copies.actor, copies.time), code, w, who)
            check_shared(w, code, index, epochs[:, None] if wide else epochs, True, who=who)
            for mapping, _, start, _ in parts:
                check_global(w, code, mapping, start, size, base, False, who=who)

        def move() -> None:
            span = np.arange(size)
            cta.smem[to[:, None] + span] = 0
            for mapping, at, start, used in parts:
                data = mapping.bytes[np.minimum(start - mapping.base, mapping.size - size)[:, None] + span]
                cta.smem[at[:, None] + span] = np.where(span < used[:, None], data, np.uint8(0))

        copies.open.append(cta.launch.defer(cta, move))

    return step, step


@instruction("cp.async.commit_group")
def _cp_commit(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.3.1"""

    def step(w: Warp, r: list[Any]) -> None:
        copies = _copies(w)
        copies.groups.append((copies.time, copies.open))
        copies.open = []
        copies.time += 1

    return step, step


def _finish_copies(w: Warp, groups: list[tuple[int, list[Pending]]]) -> None:
    copies = _copies(w)
    for time, pendings in groups:
        for pending in pendings:
            w.cta.launch.finish(pending)
        if w.cta.check:
            limits = w.clock.limits
            limits[copies.actor] = max(int(limits[copies.actor]), time << hz.CLOCK_SHIFT | hz.CLOCK_FILL)


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _cp_wait(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25.3.1"""
    everything = ins.opcode.startswith("cp.async.wait_all")
    keep = 0 if everything else asm.integer(asm.operands(1)[0], "the number of groups")

    def step(w: Warp, r: list[Any]) -> None:
        copies = _copies(w)
        if everything:
            copies.groups.append((copies.time, copies.open))
            copies.open = []
            copies.time += 1
        count = max(len(copies.groups) - keep, 0)
        _finish_copies(w, copies.groups[:count])
        del copies.groups[:count]

    return step, step


@instruction("cp.async.mbarrier.arrive")
def _cp_arrive(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15.15: an arrival once all earlier cp.async of the thread are done; without .noinc the pending count grows first."""
    read = shared_reader(asm, asm.operands(1)[0], words)
    increase = "noinc" not in words
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        copies = _copies(w)
        waits_for = [p for _, pendings in copies.groups for p in pendings] + list(copies.open)
        time = copies.time
        copies.groups.append((time, copies.open))
        copies.open = []
        copies.time += 1
        for at, lanes in _by_address(read(r), w.mask):
            barrier = mbarrier_at(w, code, at, int(lanes[0]))
            count = len(lanes)
            if increase:
                barrier.pending += count
            clock = w.snapshot() if w.cta.check else None
            if clock is not None:
                clock.limits[copies.actor] = time << hz.CLOCK_SHIFT | hz.CLOCK_FILL

            def complete(barrier: MBarrier = barrier, count: int = count, clock: Clock | None = clock) -> None:
                for pending in waits_for:
                    w.cta.launch.finish(pending)
                barrier.join(clock)
                barrier.pending -= min(count, barrier.pending)
                barrier.settle()

            w.cta.launch.defer(w.cta, complete, (barrier,))

    return step, step


__all__ = ["BLOCK", "LANES", "Immediate", "arrive", "check_visible", "in_flight", "mbarrier_at", "race_message", "shared_reader", "uniform"]
