"""Loads, stores, atomics and address conversions (PTX ISA 9.1 sections 9.7.9 and 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as fp
from .access import (
    WINDOWS,
    check_global,
    check_shared,
    global_mapping,
    load,
    observe,
    publish,
    shared_faults,
    shared_index,
    shared_place,
    split_cluster,
    split_generic,
    store,
)
from .alu import Steps, kind_of, storage
from .cluster import owner_of, same_offset
from .control import nothing, scope_of
from .decode import KINDS, Assembler, instruction, kind_bytes
from .machine import LANES, Cta, Warp
from .ptx import Address, Immediate, Instruction, Operand, Register, Sink, Symbol, Vector

Array = NDArray[Any]

_SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "cluster", "local": "local", "param": "param",
    "param::entry": "param", "param::func": "param", "const": "global",
}  # fmt: skip
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_SEMANTICS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc")


def space_of(words: list[str]) -> str:
    return next((_SPACES[w] for w in words if w in _SPACES), "generic")


def semantics_of(words: list[str], default: str) -> str:
    return next((w for w in words if w in _SEMANTICS), default)


def address_reader(asm: Assembler, operand: Operand, default_space: str) -> tuple[Callable[[list[Any]], Array], str]:
    """(function of the registers giving 32 byte addresses, space)."""
    slot, offset, space = asm.address(operand, default_space)
    if space in ("const", "module"):
        space = "global"
    add = np.add
    if offset is None:

        def plain(r: list[Any]) -> Array:
            result: Array = r[slot]
            return result

        return plain, space
    shift = offset

    def moved(r: list[Any]) -> Array:
        result: Array = add(r[slot], shift)
        return result

    return moved, space


def _elements(asm: Assembler, operand: Operand, count: int) -> list[Operand]:
    if count == 1 and not isinstance(operand, Vector):
        return [operand]
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise asm.error(f"{asm.instruction.opcode} needs a vector of {count} registers")
    return list(operand.items)


def _loaded(asm: Assembler, operand: Operand, kind: str) -> tuple[int, Any]:
    """(slot, dtype the loaded bits are seen as before extension or None when the register has the value's width)."""
    size = kind_bytes(kind)
    if isinstance(operand, Sink):
        return -1, None
    if not isinstance(operand, Register) or operand.type == "pred":
        raise asm.error(f"{asm.instruction.opcode}: the destination is not a register")
    width = max(operand.bytes, 2)
    if width < size:
        raise asm.error(f"{asm.instruction.opcode}: register {operand.name} is narrower than the value loaded")
    if width == size:
        return asm.register(operand, f"u{8 * size}", write=True), None
    signed = kind[0] == "s"
    return asm.register(operand, ("s" if signed else "u") + str(8 * width), write=True), KINDS[kind] if signed else None


@instruction("ld", "ldu")
def _ld(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.8 to 9.7.9.10; .acquire and .relaxed by section 8."""
    kind = kind_of(asm, words)
    count = next((_VECTORS[w] for w in words if w in _VECTORS), 1)
    operands = asm.operands(2, 3)
    size = kind_bytes(storage(kind))
    read, space = address_reader(asm, operands[1], space_of(words))
    targets = [_loaded(asm, item, kind) for item in _elements(asm, operands[0], count)]
    code = asm.code
    semantics = semantics_of(words, "weak")
    strong = semantics != "weak"
    scope = scope_of(words)

    if count == 1 and targets[0][0] >= 0 and targets[0][1] is None and not strong:
        ((single, _),) = targets

        def full1(w: Warp, r: list[Any]) -> None:
            r[single][...] = load(w, code, space, read(r), LANES, size, 1)[0]

        def masked1(w: Warp, r: list[Any]) -> None:
            lanes = np.flatnonzero(w.mask)
            r[single][lanes] = load(w, code, space, read(r)[lanes], lanes, size, 1)[0]

        return full1, masked1

    def put(r: list[Any], lanes: Any, values: list[Array]) -> None:
        for (d, dtype), value in zip(targets, values, strict=True):
            if d >= 0:
                r[d][lanes] = value if dtype is None else value.view(dtype)

    def full(w: Warp, r: list[Any]) -> None:
        address = read(r)
        values = load(w, code, space, address, LANES, size, count, strong)
        if strong:
            _after_strong_read(w, space, address, semantics == "acquire", scope)
        put(r, slice(None), values)

    def masked(w: Warp, r: list[Any]) -> None:
        lanes = np.flatnonzero(w.mask)
        address = read(r)[lanes]
        values = load(w, code, space, address, lanes, size, count, strong)
        if strong:
            _after_strong_read(w, space, address, semantics == "acquire", scope)
        put(r, lanes, values)

    return full, masked


def _located(space: str, address: Array) -> list[tuple[str, int]]:
    """(space, address in it) of distinct lane addresses."""
    result = []
    for at in sorted(set(address.tolist())):
        if space == "generic":
            found = split_generic(np.array([at], np.int64))[0][0]
            result.append((found, at - WINDOWS.get(found, 0)))
        else:
            result.append((space, at))
    return result


def _after_strong_read(w: Warp, space: str, address: Array, acquire: bool, scope: int) -> None:
    if not w.cta.check:
        return
    for found, at in _located(space, address):
        for distance, clock in observe(w, found, at, scope):
            if acquire:
                w.clock.join(clock)
                continue
            known = w.acquired[distance]
            if known is None:
                w.acquired[distance] = clock.copy()
            else:
                known.join(clock)


def _before_strong_write(w: Warp, space: str, address: Array, release: bool, scope: int) -> None:
    """Publish at the address what a release, or else the fences before, have ordered; a weaker scope reaches less far."""
    if not w.cta.check:
        return
    if release:
        clocks = [(scope, w.snapshot())]
    else:
        clocks = [(level, clock) for level, clock in enumerate(w.fence_clocks[: scope + 1]) if clock is not None]
    if clocks:
        for found, at in _located(space, address):
            publish(w, found, at, clocks)


@instruction("st")
def _st(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.11; .release and .relaxed by section 8."""
    if words[:1] == ["async"] or words[:1] == ["bulk"]:
        raise asm.error(f"{ins.opcode} is not supported")
    kind = kind_of(asm, words)
    count = next((_VECTORS[w] for w in words if w in _VECTORS), 1)
    operands = asm.operands(2, 3)
    size = kind_bytes(storage(kind))
    read, space = address_reader(asm, operands[0], space_of(words))
    view = f"u{8 * size}"
    sources = []
    for item in _elements(asm, operands[1], count):
        value = item
        if isinstance(item, Immediate) and item.kind != "int":
            sources.append(asm.constant(np.ascontiguousarray(asm.slots[asm.source(item, storage(kind))].value.view(KINDS[view]))))
        else:
            sources.append(asm.source(value, view))
    code = asm.code
    semantics = semantics_of(words, "weak")
    strong = semantics != "weak"
    release = semantics == "release"
    scope = scope_of(words)

    if not strong:

        def full_weak(w: Warp, r: list[Any]) -> None:
            store(w, code, space, read(r), LANES, size, [r[s] for s in sources])

        def masked_weak(w: Warp, r: list[Any]) -> None:
            lanes = np.flatnonzero(w.mask)
            store(w, code, space, read(r)[lanes], lanes, size, [r[s][lanes] for s in sources])

        return full_weak, masked_weak

    def masked(w: Warp, r: list[Any]) -> None:
        lanes = np.flatnonzero(w.mask)
        address = read(r)[lanes]
        _before_strong_write(w, space, address, release, scope)
        store(w, code, space, address, lanes, size, [r[s][lanes] for s in sources], True)

    return masked, masked


# -------------------------------------------------------------------------------------------------------------------- atomics


def _wrap_increment(old: Array, b: Array) -> Array:
    result: Array = np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1))
    return result


def _wrap_decrement(old: Array, b: Array) -> Array:
    result: Array = np.where((old == 0) | (old > b), b, old - old.dtype.type(1))
    return result


ATOMICS: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda old, b: old + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, b: b,
    "inc": _wrap_increment,
    "dec": _wrap_decrement,
}


def _float_atomic(operation: str, kind: str) -> Callable[[Array, Array], Array] | None:
    if kind == "f32":
        return {"add": fp.add_f32, "exch": ATOMICS["exch"]}.get(operation)
    if kind == "f64":
        return {"add": fp.add_f64, "exch": ATOMICS["exch"]}.get(operation)
    fmt = kind.removesuffix("x2")
    table = {"add": fp.add_16, "min": fp.min_16, "max": fp.max_16}
    function = table.get(operation)
    if function is None:
        return None
    half = function
    return lambda old, b: half(old, b, fmt)


@instruction("atom", "red")
def _atom(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.5, 9.7.13.6. Lanes act one after another; semantics default to .relaxed."""
    if words[:1] == ["async"]:
        raise asm.error(f"{ins.opcode} is not supported")
    kind = kind_of(asm, words)
    operation = next((w for w in words if w in ATOMICS or w == "cas"), "")
    if not operation or any(w in _VECTORS for w in words):
        raise asm.error(f"{ins.opcode} is not supported")
    reduces = ins.opcode.startswith("red")
    operands = list(ins.operands)
    if reduces:
        operands.insert(0, Sink())
    # A trailing cache policy is allowed and has no effect.
    expected = 4 if operation == "cas" else 3
    if len(operands) not in (expected, expected + 1):
        raise asm.error(f"{ins.opcode} takes {expected - reduces} operands")
    read, space = address_reader(asm, operands[1], space_of(words))
    view = storage(kind)
    size = kind_bytes(view)
    word = f"u{8 * size}"
    d = -1 if isinstance(operands[0], Sink) else asm.destination(operands[0], word)
    b = asm.source(operands[2], view)
    swap = asm.source(operands[3], view) if operation == "cas" else -1
    packed = kind in ("f16x2", "bf16x2")
    floating = kind in ("f32", "f64", "f16", "bf16") or packed
    function = None if operation == "cas" else _float_atomic(operation, kind) if floating else ATOMICS[operation]
    if function is None and operation != "cas":
        raise asm.error(f"{ins.opcode} is not supported")
    semantics = semantics_of(words, "relaxed")
    scope = scope_of(words)
    acquire, release = semantics in ("acquire", "acq_rel"), semantics in ("release", "acq_rel")
    dtype, raw = KINDS[view], KINDS[word]
    code = asm.code
    per = 2 if packed else 1
    shift = size.bit_length() - 1

    def apply(w: Warp, words_: Array, at: int, lane: int, r: list[Any], old: Array) -> None:
        cell = words_[at : at + 1]
        old[lane] = cell[0]
        value = cell.view(dtype)
        operand = r[b][per * lane : per * lane + per]
        if function is None:
            if value[0] == operand[0]:
                value[0] = r[swap][lane]
        else:
            value[...] = function(value, operand)
        if cell[0] != old[lane]:
            # A failing compare-and-swap, say, is no progress: a warp that repeats it spins.
            w.cta.launch.progress_count += 1

    def shared_atomic(w: Warp, r: list[Any], owner: Cta, at: Array, who: Array, old: Array) -> None:
        if (profile := w.cta.launch.profile) is not None:
            profile.shared_access(code, at, who, size, "atomic")
        good = shared_faults(w, code, at, who, size, True, owner)
        if good is not None:
            at, who = at[good], who[good]
        if w.cta.check and len(at):
            assert owner.shadow is not None
            index, wide = shared_index(owner.shadow, at, size)
            epochs = w.epochs[who] + code.strong_tag
            # A read-modify-write of memory that nothing has written is a read of it.
            _check_initialized(w, owner, index, who, at)
            check_shared(w, code, index, epochs[:, None] if wide else epochs, True, strong=True, owner=owner)
        for lane, place in zip(who.tolist(), at.tolist(), strict=True):
            apply(w, owner.words[size], place >> shift, lane, r, old)

    def step(w: Warp, r: list[Any]) -> None:
        lanes = np.flatnonzero(w.mask)
        address = read(r)[lanes]
        cta = w.cta
        if cta.check:
            _after_strong_read(w, space, address, acquire, scope)
            _before_strong_write(w, space, address, release, scope)
        old = np.zeros(32, raw)
        parts = split_generic(address) if space == "generic" else [(space, None)]
        for found, places in parts:
            pick: Any = slice(None) if places is None else places
            at = address[pick] - (WINDOWS.get(found, 0) if space == "generic" else 0)
            who = lanes[pick]
            if found in ("shared", "cluster"):
                local = found == "shared" and space != "generic"
                for owner, some, offsets in [(cta, None, at)] if local else split_cluster(w, code, at, who):
                    shared_atomic(w, r, owner, offsets, who if some is None else who[some], old)
            elif found == "global":
                if (profile := cta.launch.profile) is not None:
                    profile.move("global atomic", len(who) * size)
                for mapping, inside in global_mapping(w, code, at, who, size, True):
                    sub: Any = slice(None) if inside is None else inside
                    if cta.check:
                        check_global(w, code, mapping, at[sub], size, w.epochs[who[sub]] + code.strong_tag, True, strong=True)
                    for lane, place in zip(who[sub].tolist(), at[sub].tolist(), strict=True):
                        apply(w, mapping.words[size], (place - mapping.base) >> shift, lane, r, old)
            else:
                raise asm.error(f"atomics on {found} memory are not supported")
        if d >= 0:
            np.copyto(r[d], old, where=w.mask)

    def _check_initialized(w: Warp, owner: Cta, index: Any, who: Array, at: Array) -> None:
        shadow = owner.shadow
        assert shadow is not None
        never = shadow.write[index] == 0 if shadow.strong is None else (shadow.write[index] | shadow.strong[index]) == 0
        if never.any():
            place = int(never.reshape(len(who), -1).any(axis=1).argmax())
            w.cta.report(
                "uninitialized",
                f"atomic on {shared_place(w, int(at[place]), owner)} by {w.name} lane {int(who[place])} (PTX line {code.line}), "
                "which nothing has written",
                code,
                w,
                int(who[place]),
                int(at[place]),
                place=shared_place(w, int(at[place]), owner),
                missing="a write before the atomic",
            )

    return step, step


# ------------------------------------------------------------------------------------------------------------------ addresses


@instruction("cvta")
def _cvta(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.20: generic addresses are space addresses plus the window's base; global and const addresses are generic already."""
    to_space = "to" in words
    space = space_of(words)
    operands = asm.operands(2)
    kind = kind_of(asm, words)
    d = asm.destination(operands[0], kind)
    base = WINDOWS.get(space, 0)
    offset = (-base if to_space else base) & 0xFFFF_FFFF_FFFF_FFFF
    source = operands[1]
    if isinstance(source, Symbol):
        where, _ = asm.symbol_address(source.name)
        if where == "param" and not to_space:
            offset = WINDOWS["param"]
    a = asm.source(source, kind)
    if kind == "u32":
        raise asm.error("32-bit generic addresses are not supported")
    constant = np.full(32, offset, np.uint64)

    def convert(x: Array, out: Array) -> None:
        np.add(x, constant, out)

    return asm.lanewise(convert, d, [a], kind)


@instruction("isspacep")
def _isspacep(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.19"""
    space = space_of(words)
    operands = asm.operands(2)
    base = WINDOWS.get(space)

    def test(a: Array, out: Array) -> None:
        top = a >> np.uint64(40)
        if base is None:
            windows = [np.uint64(b >> 40) for b in set(WINDOWS.values())]
            out[...] = ~np.isin(top, windows)
        else:
            out[...] = top == np.uint64(base >> 40)

    return asm.lanewise(test, asm.destination(operands[0], "pred"), [asm.source(operands[1], "u64")], "pred")


@instruction("mapa")
def _mapa(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.24: the address in CTA `rank` that corresponds to an address of the own CTA, generic or shared::cluster."""
    operands = asm.operands(3)
    kind = words[-1]
    d, a, rank = asm.destination(operands[0], kind), asm.source(operands[1], kind), asm.source(operands[2], "u32")
    generic = not any(word.startswith("shared") for word in words)
    if generic and kind != "u64":
        raise asm.error(f"{ins.opcode}: generic addresses are 64-bit")

    def step(w: Warp, r: list[Any]) -> None:
        base = WINDOWS["shared"] if generic else 0
        for lane in np.flatnonzero(w.mask).tolist():
            r[d][lane] = base + same_offset(w.cta, int(r[a][lane]) - base, int(r[rank][lane]))

    return step, step


@instruction("getctarank")
def _getctarank(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.25: the rank of the CTA whose shared memory an address is in."""
    operands = asm.operands(2)
    kind = words[-1]
    d, a = asm.destination(operands[0], "u32"), asm.source(operands[1], kind)
    base = 0 if any(word.startswith("shared") for word in words) else WINDOWS["shared"]

    def step(w: Warp, r: list[Any]) -> None:
        for lane in np.flatnonzero(w.mask).tolist():
            r[d][lane] = owner_of(w.cta, int(r[a][lane]) - base)[0].rank

    return step, step


@instruction("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap")
def _prefetch_map(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.18"""
    if not isinstance(asm.operands(1)[0], Address):
        raise asm.error(f"{ins.opcode} needs an address")
    return nothing, nothing
