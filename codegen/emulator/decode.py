"""Decoding: every instruction becomes two callables, one for a full warp and one under a lane mask, over resolved register slots.

A slot is an index into `Warp.R`, the list of the warp's 32-lane vectors: a register seen as one type, a constant, or a special register.
Tables of instructions register themselves with `@instruction`; an entry receives the assembler and the instruction and returns its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .machine import ALL_BYTES, BLOCK_AHEAD, LANES, NONE_BYTES, Step, Warp, bits_of
from .memory import POISON32
from .ptx import (
    Address,
    Choices,
    Entry,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    PtxError,
    PtxFault,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    Words,
)
from .unwritten import RegisterKey, Unwritten

if TYPE_CHECKING:
    from .blocks import Block
    from .machine import Cta

Array = NDArray[Any]

KINDS = Choices({
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64,
    "f32x2": np.float32, "u16x2": np.uint16, "s16x2": np.int16,
})  # fmt: skip
PACKED = ("f32x2", "u16x2", "s16x2")
_PACKED_BYTES = {"u16x2": 4, "s16x2": 4, "f32x2": 8}


def kind_bytes(kind: str) -> int:
    """Bytes of one lane's value of a kind."""
    return _PACKED_BYTES.get(kind) or int(np.dtype(KINDS[kind]).itemsize)


class Code:
    """Where an instruction is: its index, line and opcode, and the part of an epoch that names it."""

    __slots__ = ("index", "line", "opcode", "strong_tag", "tag")

    def __init__(self, index: int, line: int, opcode: str) -> None:
        self.index = index
        self.line = line
        self.opcode = opcode
        self.tag = np.int64(min(index, hz.CODE_LIMIT - 1) << hz.CODE_SHIFT)
        self.strong_tag = np.int64(int(self.tag) | hz.STRONG)


@dataclass(frozen=True)
class Slot:
    """How a warp makes one entry of R."""

    source: str
    """reg, const or special."""
    bits: int = 0
    index: int = 0
    dtype: Any = None
    stride: int = 1
    part: int = 0
    """Which of the register's `stride` parts, lowest first."""
    value: Any = None


@dataclass(frozen=True)
class Registers:
    """What a step does that touches nothing but registers: function(*sources, destination), or copies of slots to slots."""

    function: Callable[..., Any] | None = None
    destination: int = -1
    sources: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    """(destination, source) of each copy, in order."""


WarpRegisters = tuple[dict[int, Array], list[Array], list[Any]]
"""Banks by bits, the banks seen as one type each, and R."""
MAX_SPARE = 32
"""Warps whose registers are kept for others, of one entry: 1 MiB or so each."""
Builder = Callable[["Assembler", Instruction, list[str]], "tuple[Step, Step]"]
TABLE: dict[str, Builder] = {}


def instruction(*names: str) -> Callable[[Builder], Builder]:
    """Register the semantics of opcodes. A name is the leading part of the opcode; the longest registered one is used."""

    def register(builder: Builder) -> Builder:
        for name in names:
            if name in TABLE:
                raise RuntimeError(f"instruction {name} is defined twice")
            TABLE[name] = builder
        return builder

    return register


def find_builder(words: Words) -> tuple[Builder, Words] | None:
    for length in range(min(len(words), 4), 0, -1):
        builder = TABLE.get(".".join(words[:length]))
        if builder is not None:
            return builder, words[length:]
    return None


def signed64(value: int) -> int:
    """An address wrapped to a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def constant_bits(operand: Immediate, kind: str) -> Array:
    """A literal as a 32-lane vector of `kind`; packed kinds hold the literal's 32- or 64-bit pattern."""
    value = operand.value
    dtype = np.dtype(KINDS[kind])
    if kind in PACKED:
        raw = np.uint32 if kind_bytes(kind) == 4 else np.uint64
        return np.full(32, value & ((1 << 8 * kind_bytes(kind)) - 1), raw).view(dtype)
    if kind == "pred":
        return np.full(32, bool(value), np.bool_)
    if operand.kind == "int":
        if dtype.kind in "iu":
            size = dtype.itemsize
            return np.full(32, value & ((1 << 8 * size) - 1), np.dtype(f"u{size}")).view(dtype)
        with np.errstate(over="ignore"):
            return np.full(32, value).astype(dtype)
    number = np.array(value, np.uint32 if operand.kind == "f32" else np.uint64)
    if dtype.kind in "iu":
        size = dtype.itemsize
        if size == 4 and operand.kind == "f64":
            number = number.view(np.float64).astype(np.float32).view(np.uint32)
        return np.full(32, int(number) & ((1 << 8 * size) - 1), np.dtype(f"u{size}")).view(dtype)
    with np.errstate(over="ignore"):
        return np.full(32, number.view(np.float32 if operand.kind == "f32" else np.float64).astype(dtype))


class Assembler:
    """Decodes one entry. Slots are shared between instructions."""

    def __init__(self, module: Module, entry: Entry, addresses: dict[str, tuple[str, int]], shared_bytes: int, local_bytes: int) -> None:
        self.module = module
        self.entry = entry
        self.addresses = addresses
        """Variable name to (space, address in that space)."""
        self.shared_bytes = shared_bytes
        self.local_bytes = local_bytes
        self.slots: list[Slot] = []
        self._known: dict[Any, int] = {}
        self.instruction: Instruction = entry.instructions[0]
        self.code = Code(0, 0, "")
        self.params = {p.name: p for p in entry.params}
        self.uses: dict[RegisterKey, str] = {}
        self.writes: dict[RegisterKey, str] = {}
        """Registers that the instruction under way reads and writes, with their names."""
        self.registers_only: dict[Step, Registers] = {}
        """Steps of a whole warp that touch nothing but registers, and what they do."""
        self.watched = 0
        """32-bit registers (bit by number) that some wgmma names: what else accesses them is noted."""

    # --------------------------------------------------------------------------------------------------------------- slots

    def error(self, message: str) -> PtxError:
        return PtxError(message, self.instruction.line)

    def _slot(self, key: Any, slot: Slot) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.slots)
            self.slots.append(slot)
        return found

    def access(self, register: Register, *, write: bool) -> None:
        """Note that the instruction reads or writes a register; a write of a part counts as one of the whole."""
        bits = 1 if register.type == "pred" else max(16, 8 * register.bytes)
        (self.writes if write else self.uses)[bits, register.index] = register.name

    def register(self, register: Register, kind: str, part: int = 0, *, write: bool = False) -> int:
        """Slot of a register seen as `kind`, which may be narrower than the register (then part `part` of it, 0 the lowest)."""
        self.access(register, write=write)
        bits = 1 if register.type == "pred" else max(16, 8 * register.bytes)
        if bits > 64:
            raise self.error(f"{self.instruction.opcode}: register {register.name}: 128-bit registers are not supported")
        if (kind == "pred") != (bits == 1):
            raise self.error(f"{self.instruction.opcode}: register {register.name} is .{register.type}, not .{kind}")
        size = kind_bytes(kind)
        width = 1 if bits == 1 else bits // 8
        if size > width:
            raise self.error(f"{self.instruction.opcode}: register {register.name} of {width} bytes is too narrow for .{kind}")
        if kind in PACKED and size != width:
            raise self.error(f"{self.instruction.opcode}: register {register.name} is .{register.type}, not .{kind}")
        stride = 1 if kind in PACKED else width // size
        return self._slot((bits, register.index, kind, part), Slot("reg", bits, register.index, KINDS[kind], stride, part))

    def raw(self, register: Register, *, write: bool = False) -> int:
        """Slot of a register as unsigned bits of its own width."""
        return self.register(register, {"pred": "pred"}.get(register.type) or f"u{max(16, 8 * register.bytes)}", write=write)

    def constant(self, value: Array) -> int:
        value = np.ascontiguousarray(value)
        value.setflags(write=False)
        return self._slot(("const", value.dtype.str, str(value.dtype), value.tobytes()), Slot("const", value=value))

    def symbol_address(self, name: str) -> tuple[str, int]:
        """(space, address) of a variable or parameter."""
        found = self.addresses.get(name)
        if found is None:
            param = self.params.get(name)
            if param is None:
                raise self.error(f"unknown name {name}")
            return "param", param.offset
        return found

    def source(self, operand: Operand, kind: str) -> int:
        """Slot of a source operand read as `kind`."""
        if isinstance(operand, Register):
            return self.register(operand, kind)
        if isinstance(operand, Immediate):
            return self.constant(constant_bits(operand, kind))
        if isinstance(operand, Symbol):
            _, address = self.symbol_address(operand.name)
            return self.constant(constant_bits(Immediate(address + operand.offset), kind))
        if isinstance(operand, Special):
            dtype = np.uint64 if operand.name.endswith("64") or operand.name == "%globaltimer" else np.uint32
            return self._slot(("special", operand.name, kind), Slot("special", dtype=dtype, value=(operand.name, KINDS[kind])))
        raise self.error(f"{self.instruction.opcode}: unexpected source operand {type(operand).__name__.lower()}")

    def destination(self, operand: Operand, kind: str) -> int:
        if isinstance(operand, Sink):
            # A sink needs somewhere to write that nobody reads.
            size = kind_bytes(kind)
            return self._slot(("sink", kind), Slot("sink", bits=1 if kind == "pred" else 8 * size, dtype=KINDS[kind]))
        if not isinstance(operand, Register):
            raise self.error(f"{self.instruction.opcode}: the destination is not a register")
        return self.register(operand, kind, write=True)

    def operands(self, *counts: int) -> Sequence[Operand]:
        found = self.instruction.operands
        if len(found) not in counts:
            expected = " or ".join(str(c) for c in counts)
            raise self.error(f"{self.instruction.opcode} takes {expected} operands, not {len(found)}")
        return found

    def integer(self, operand: Operand, what: str) -> int:
        if not isinstance(operand, Immediate) or operand.kind != "int":
            raise self.error(f"{self.instruction.opcode}: {what} must be an integer constant")
        return operand.value

    # ----------------------------------------------------------------------------------------------------------- step makers

    def lanewise(self, function: Callable[..., Any], destination: int, sources: Sequence[int], kind: str) -> tuple[Step, Step]:
        """Steps of an elementwise instruction: function(*sources, out)."""
        d = destination
        dtype = KINDS[kind]
        packed = kind in PACKED
        scratch = np.empty(64 if packed else 32, dtype)
        masked: Step
        copyto = np.copyto
        if packed:
            lane_type = np.uint32 if kind_bytes(kind) == 4 else np.uint64
            lanes = scratch.view(lane_type)

            def store(w: Warp, r: list[Any]) -> None:
                copyto(r[d].view(lane_type), lanes, where=w.mask)
        else:

            def store(w: Warp, r: list[Any]) -> None:
                copyto(r[d], scratch, where=w.mask)

        full: Step
        if len(sources) == 1:
            (a,) = sources

            def full(w: Warp, r: list[Any]) -> None:
                function(r[a], r[d])

            def masked(w: Warp, r: list[Any]) -> None:
                function(r[a], scratch)
                store(w, r)
        elif len(sources) == 2:
            a, b = sources

            def full(w: Warp, r: list[Any]) -> None:
                function(r[a], r[b], r[d])

            def masked(w: Warp, r: list[Any]) -> None:
                function(r[a], r[b], scratch)
                store(w, r)
        elif len(sources) == 3:
            a, b, c = sources

            def full(w: Warp, r: list[Any]) -> None:
                function(r[a], r[b], r[c], r[d])

            def masked(w: Warp, r: list[Any]) -> None:
                function(r[a], r[b], r[c], scratch)
                store(w, r)
        else:
            many = tuple(sources)

            def full(w: Warp, r: list[Any]) -> None:
                function(*[r[s] for s in many], r[d])

            def masked(w: Warp, r: list[Any]) -> None:
                function(*[r[s] for s in many], scratch)
                store(w, r)

        self.registers_only[full] = Registers(function, d, tuple(sources))
        return full, masked

    def address(self, operand: Operand, default_space: str) -> tuple[int, Array | None, str]:
        """(slot of the base as s64, 32-lane offset to add or None, space that a symbol base names or `default_space`)."""
        if not isinstance(operand, Address):
            raise self.error(f"{self.instruction.opcode}: expected an address in brackets")
        base = operand.base
        if isinstance(base, Symbol):
            space, address = self.symbol_address(base.name)
            return self.constant(np.full(32, signed64(address + base.offset + operand.offset), np.int64)), None, space
        if isinstance(base, Immediate):
            return self.constant(np.full(32, signed64(base.value + operand.offset), np.int64)), None, default_space
        if base.type == "pred" or base.bytes < 4:
            raise self.error(f"{self.instruction.opcode}: register {base.name} cannot hold an address")
        slot = self.register(base, "u32" if base.bytes == 4 else "s64")
        offset = np.full(32, signed64(operand.offset), np.int64) if operand.offset or base.bytes == 4 else None
        if offset is not None:
            offset.setflags(write=False)
        return slot, offset, default_space

    def guard(self, steps: tuple[Step, Step]) -> tuple[Step, Step]:
        """Apply the instruction's guard predicate."""
        register = self.instruction.guard
        if register is None:
            return steps
        p = self.register(register, "pred")
        negated = self.instruction.guard_negated
        take, skip = (NONE_BYTES, ALL_BYTES) if negated else (ALL_BYTES, NONE_BYTES)
        plain, masked = steps

        def full(w: Warp, r: list[Any]) -> int | None:
            value = r[p].tobytes()
            if value == take:
                return plain(w, r)
            if value == skip:
                return None
            saved = w.mask
            w.mask = ~r[p] if negated else r[p].copy()
            result = masked(w, r)
            w.mask = saved
            return result

        def partial(w: Warp, r: list[Any]) -> int | None:
            saved = w.mask
            mask = saved & ~r[p] if negated else saved & r[p]
            if mask.tobytes() == NONE_BYTES:
                return None
            w.mask = mask
            result = masked(w, r)
            w.mask = saved
            return result

        return full, partial


def block_ahead(w: Warp, r: list[Any]) -> int:
    """The step where a block begins: the warp decides whether to run it as one."""
    return BLOCK_AHEAD


def uniform(value: Array, w: Warp, what: str) -> int:
    """The value of an operand that must be the same in every active lane."""
    active = value[w.mask]
    first = active[0]
    if (active != first).any():
        raise PtxFault(f"{what} differs between lanes")
    return int(first)


class DecodedEntry:
    """An entry ready to run."""

    def __init__(self, assembler: Assembler) -> None:
        entry = assembler.entry
        self.entry = entry
        self.full: list[Step] = []
        self.masked: list[Step] = []
        self.lines = [i.line for i in entry.instructions]
        self.opcodes = [i.opcode for i in entry.instructions]
        self.unwritten = Unwritten()
        self.registers_only: dict[int, tuple[Registers, frozenset[RegisterKey], frozenset[RegisterKey]]] = {}
        """By instruction: what it does if it touches nothing but registers, those it reads and those it writes."""
        self.fills: dict[int, Iterable[int]] = {}
        """By instruction: the 32-bit registers it reads that some tcgen05.ld fills."""
        self.noted: dict[int, int] = {}
        """By instruction: the watched registers (bit by number) that it accesses."""
        self.blocks: dict[int, Block] = {}
        """By first instruction: runs of instructions that touch nothing but registers."""
        self.spare: list[WarpRegisters] = []
        """Registers of warps that have ended."""
        self.pick_members: Callable[[list[Step]], Any] | None = None
        self.member_steps: Any = ()
        """The steps of the instructions of blocks, and what picks them from a list of all."""
        for index, ins in enumerate(entry.instructions):
            assembler.instruction = ins
            assembler.code = Code(index, ins.line, ins.opcode)
            assembler.uses, assembler.writes = {}, {}
            found = find_builder(Words(ins.opcode.split(".")))
            if found is None:
                raise PtxError(f"unknown instruction {ins.opcode}", ins.line)
            builder, modifiers = found
            try:
                steps = builder(assembler, ins, modifiers)
                steps = steps if getattr(builder, "handles_guard", False) else assembler.guard(steps)
            except PtxFault as error:
                raise PtxError(f"{ins.opcode}: {error}", ins.line) from error
            self.full.append(steps[0])
            self.masked.append(steps[1])
            does = assembler.registers_only.get(steps[0])
            if does is not None:
                self.registers_only[index] = (does, frozenset(assembler.uses), frozenset(assembler.writes))
            self.unwritten.note(ins, assembler.code, assembler.uses, assembler.writes)
        plain = list(self.full)
        self.unwritten.watch(self.full, self.masked, assembler)
        # An instruction that keeps count of the lanes that have written a register does so one by one.
        self.registers_only = {index: each for index, each in self.registers_only.items() if self.full[index] is plain[index]}
        self.sources = {i.line: i.source for i in entry.instructions if i.source}
        """PTX line to file:line of the source."""
        if assembler.watched:
            for index, ins in enumerate(entry.instructions):
                bits = register_mask(ins) & assembler.watched
                if bits and not ins.opcode.startswith("wgmma.mma_async"):
                    code = Code(index, ins.line, ins.opcode)
                    self.noted[index] = bits
                    self.full[index] = _noting(self.full[index], code, bits)
                    self.masked[index] = _noting(self.masked[index], code, bits)
        counts = entry.register_counts
        self.counts = {bits: counts.get(bits, 0) for bits in (1, 16, 32, 64, 128)}
        self.slots = assembler.slots
        self._lay_out()
        self.local_bytes = assembler.local_bytes
        self.exit_hooks: list[Callable[[Cta, Warp], None]] = []
        for hook in DECODE_HOOKS:
            hook(self)

    def steps(self) -> tuple[list[Step], dict[int, Block]]:
        """(steps of a whole warp with BLOCK_AHEAD where a block begins, the blocks); no blocks where someone has replaced steps of them."""
        if self.pick_members is None or self.pick_members(self.full) != self.member_steps:
            return self.full, {}
        steps = list(self.full)
        for start in self.blocks:
            steps[start] = block_ahead
        return steps, self.blocks

    def cta_exit(self, cta: Cta, warp: Warp) -> None:
        for hook in EXIT_HOOKS:
            hook(cta, warp)

    def _lay_out(self) -> None:
        """Where the entries of R come from, so that `attach` makes them in few steps: rows of banks seen as one type, then the rest."""
        slots = self.slots
        self.constants = [slot.value for slot in slots if slot.source == "const"]
        self.made = [(place, slot) for place, slot in enumerate(slots) if slot.source in ("sink", "special")]
        self.views = list(dict.fromkeys((slot.bits, slot.dtype, slot.stride, slot.part) for slot in slots if slot.source == "reg"))
        first: dict[tuple[Any, ...], int] = {}
        place = 0
        for view in self.views:
            first[view] = place
            place += self.counts[view[0]] + (view[0] == 1)
        constants, made = place, place + len(self.constants)
        places = []
        numbers = {view: number for number, view in enumerate(self.views)}
        self.homes: list[tuple[int | None, int]] = []
        """Of each slot (number among the tables of a warp, row); (-1, 0) of a constant, (None, 0) of what is neither."""
        for slot in slots:
            if slot.source == "reg":
                self.homes.append((numbers[slot.bits, slot.dtype, slot.stride, slot.part], slot.index))
            else:
                self.homes.append((-1 if slot.source == "const" else None, 0))
            if slot.source == "reg":
                places.append(first[slot.bits, slot.dtype, slot.stride, slot.part] + slot.index)
            elif slot.source == "const":
                places.append(constants)
                constants += 1
            else:
                places.append(made)
                made += 1
        # itemgetter of one place gives no tuple.
        self.chosen: Callable[[list[Any]], tuple[Any, ...]] = (
            itemgetter(*places) if len(places) > 1 else lambda pool: tuple(pool[place] for place in places)
        )

    def attach(self, warp: Warp) -> None:
        """Give a warp its registers: poison until written, predicates false."""
        banks, warp.tables, warp.R = self.spare.pop() if self.spare else self._make_registers()
        banks[1].fill(False)
        banks[16].fill(POISON32 & 0xFFFF)
        banks[32].fill(POISON32)
        banks[64].fill(POISON32 << 32 | POISON32)
        warp.B16, warp.B32, warp.B64 = banks[16], banks[32], banks[64]
        warp.banks = banks
        warp.unwritten = dict.fromkeys(self.unwritten.candidates, bits_of(warp.mask)) if warp.cta.check else {}
        if self.local_bytes:
            warp.local = np.full((32, (self.local_bytes + 15) // 16 * 16), 0xFF, np.uint8)
            if warp.cta.check:
                warp.local_written = np.zeros(warp.local.shape, np.bool_)
        for place, slot in self.made:
            if slot.source == "sink":
                made = np.zeros(32, np.bool_) if slot.bits == 1 else np.zeros(32 * slot.bits // 8, np.uint8).view(slot.dtype)
            else:
                name, dtype = slot.value
                made = special_register(warp, name).astype(dtype)
            warp.R[place] = made

    def _make_registers(self) -> WarpRegisters:
        counts = self.counts
        banks: dict[int, Array] = {
            1: np.empty((counts[1] + 1, 32), np.bool_), 16: np.empty((counts[16], 32), np.uint16),
            32: np.empty((counts[32], 32), np.uint32), 64: np.empty((counts[64], 32), np.uint64),
        }  # fmt: skip
        tables = [banks[bits].view(kind)[:, part::stride] for bits, kind, stride, part in self.views]
        pool: list[Any] = []
        for table in tables:
            pool.extend(table)
        pool += self.constants
        pool += [None] * len(self.made)
        return banks, tables, list(self.chosen(pool))

    def detach(self, warp: Warp) -> None:
        """Take the registers of a warp that has ended, for another: thousands of views of them are dear to make."""
        if len(self.spare) < MAX_SPARE:
            self.spare.append((warp.banks, warp.tables, warp.R))
        warp.banks, warp.tables, warp.R = {}, [], []


DECODE_HOOKS: list[Callable[[DecodedEntry], None]] = []
"""Called with every decoded entry; may wrap its steps."""
EXIT_HOOKS: list[Callable[[Any, Warp], None]] = []
ACCESS_HOOKS: list[Callable[[Warp, Code, int], None]] = []
"""Told of accesses to watched registers: (warp, instruction, registers)."""


def register_mask(ins: Instruction) -> int:
    """32-bit registers (bit by number) that an instruction names."""
    result = 0
    stack: list[Any] = list(ins.operands)
    while stack:
        operand = stack.pop()
        if isinstance(operand, Register):
            if operand.type != "pred" and operand.bytes == 4:
                result |= 1 << operand.index
        elif isinstance(operand, Vector):
            stack += operand.items
        elif isinstance(operand, Pair):
            stack += (operand.first, operand.second)
        elif isinstance(operand, Address):
            stack += (operand.base, *operand.coordinates)
    return result


def _noting(step: Step, code: Code, bits: int) -> Step:
    def noted(w: Warp, r: list[Any]) -> int | None:
        if w.wgmma is not None:
            for hook in ACCESS_HOOKS:
                hook(w, code, bits)
        return step(w, r)

    return noted


def special_register(warp: Warp, name: str) -> Array:
    """Values of a special register that does not change while the warp runs (section 10)."""
    run = warp.cta.launch
    cluster = warp.cta.cluster
    axis = "xyzw".find(name[-1]) if "." in name else -1
    base = name.split(".", 1)[0]
    if base == "%tid":
        linear = warp.index * 32 + LANES
        x, y = run.block[0], run.block[1]
        return np.array([linear % x, linear // x % y, linear // (x * y), 0 * linear][axis])
    values: dict[str, Any] = {
        "%ntid": (*run.block, 1), "%ctaid": (*warp.cta.ctaid, 0), "%nctaid": (*run.grid, 1),
        "%clusterid": (*cluster.position, 0), "%nclusterid": (*run.cluster_grid, 1), "%cluster_nctaid": (*run.cluster_dims, 1),
        "%cluster_ctaid": (*(c % d for c, d in zip(warp.cta.ctaid, run.cluster_dims, strict=True)), 0),
    }  # fmt: skip
    if base in values:
        return np.full(32, values[base][axis], np.int64)
    lane_masks = {
        "%lanemask_eq": 1 << LANES, "%lanemask_lt": (1 << LANES) - 1, "%lanemask_le": (2 << LANES) - 1,
        "%lanemask_ge": (1 << 32) - (1 << LANES), "%lanemask_gt": (1 << 32) - (2 << LANES),
    }  # fmt: skip
    if base in lane_masks:
        return np.asarray(lane_masks[base])
    scalars = {
        "%warpid": warp.index, "%nwarpid": run.warps, "%smid": warp.cta.index % 132, "%nsmid": 132, "%gridid": 0,
        "%is_explicit_cluster": int(cluster.size > 1),
        "%cluster_ctarank": warp.cta.rank, "%cluster_nctarank": cluster.size, "%dynamic_smem_size": run.dynamic_bytes,
        "%total_smem_size": run.shared_bytes,
        "%aggr_smem_size": run.shared_bytes,
    }  # fmt: skip
    if base == "%laneid":
        return LANES
    if base in scalars:
        return np.full(32, scalars[base], np.int64)
    raise PtxError(f"special register {name} is not supported")


__all__ = ["KINDS", "PACKED", "TABLE", "Assembler", "Code", "DecodedEntry", "Negated", "instruction", "kind_bytes", "uniform"]
