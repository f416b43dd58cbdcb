"""Control flow, barriers of the CTA, warp-wide exchanges and fences (PTX ISA 9.1 sections 9.7.10, 9.7.13 and 9.7.19)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .alu import Steps, kind_of
from .decode import KINDS, Assembler, Code, instruction, kind_bytes, uniform
from .machine import ALL, FULL_BITS, LANES, NONE_BYTES, RETRY, SPLIT, WARP, YIELD, Warp, bits_of, mask_of
from .machine import EXIT as EXIT_CODE
from .memory import POISON32
from .ptx import Immediate, Instruction, Negated, Operand, Pair, PtxError, PtxFault

Array = NDArray[Any]


def handles_guard(builder: Any) -> Any:
    """Mark a builder whose steps evaluate the guard themselves."""
    builder.handles_guard = True
    return builder


@instruction("bra")
@handles_guard
def _bra(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.12.3. Lanes that disagree become two groups."""
    target = ins.target
    if ins.guard is None:

        def jump(w: Warp, r: list[Any]) -> int:
            return target

        return jump, jump
    p = asm.register(ins.guard, "pred")
    negated = ins.guard_negated
    take = bytes(WARP) if negated else ALL.tobytes()
    skip = ALL.tobytes() if negated else bytes(WARP)

    def full(w: Warp, r: list[Any]) -> int | None:
        value = r[p].tobytes()
        if value == take:
            return target
        if value == skip:
            return None
        w.split = (~r[p] if negated else r[p].copy(), target)
        return SPLIT

    def masked(w: Warp, r: list[Any]) -> int | None:
        mask = w.mask
        taken = mask & ~r[p] if negated else mask & r[p]
        value = taken.tobytes()
        if value == NONE_BYTES:
            return None
        if value == mask.tobytes():
            return target
        w.split = (taken, target)
        return SPLIT

    return full, masked


@instruction("brx.idx")
def _brx(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.12.4. Only for an index that the active lanes share."""
    index = asm.source(ins.operands[0], "u32")
    targets = ins.targets

    def jump(w: Warp, r: list[Any]) -> int:
        choice = uniform(r[index], w, "the branch index")
        if choice >= len(targets):
            raise PtxFault(f"index {choice} is outside the table of {len(targets)} targets")
        return targets[choice]

    return jump, jump


@instruction("ret", "exit")
def _exit(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.12.6, 9.7.12.7"""

    def leave(w: Warp, r: list[Any]) -> int:
        w.split = (w.mask, 0)
        return EXIT_CODE

    return leave, leave


@instruction("trap")
def _trap(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.19.3"""
    line = ins.line

    def trap(w: Warp, r: list[Any]) -> None:
        raise PtxError(f"trap executed by {w.name}", line)

    return trap, trap


def nothing(w: Warp, r: list[Any]) -> None:
    """An instruction without effect here."""


@instruction("brkpt", "pmevent", "discard", "applypriority", "prefetch", "prefetchu", "createpolicy.none")
def _nothing(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """Hints and what only a debugger or profiler sees."""
    return nothing, nothing


@instruction("createpolicy")
def _createpolicy(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.19: cache policies are opaque and have no effect here."""
    return asm.lanewise(lambda out: out.fill(0), asm.destination(ins.operands[0], "u64"), [], "u64")


@instruction("nanosleep")
def _nanosleep(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.19.2"""

    def sleep(w: Warp, r: list[Any]) -> int:
        return YIELD

    return sleep, sleep


# ---------------------------------------------------------------------------------------------------------------- barriers


def _note_absent(w: Warp, code: Code, members: int) -> None:
    """Report lanes that have to execute an instruction and are predicated off, unless they have been reported as being elsewhere."""
    executing = bits_of(w.mask)
    absent = members & w.live_bits & ~executing
    if absent and not w.group.forced:
        w.cta.report(
            "barrier",
            f"{code.opcode} at PTX line {code.line} is executed by part of {w.name} only (lanes {absent:#010x} are predicated off)",
            code,
            w,
            lane=(executing & -executing).bit_length() - 1,
        )
    w.group.forced = False


def aligned(asm: Assembler, steps: Steps, what: Callable[[], None] | None = None) -> Steps:
    """Make steps of an `.aligned` instruction: a partial warp waits for its other lanes and is reported when they cannot come."""
    code = asm.code
    full_step, masked_step = steps

    def masked(w: Warp, r: list[Any]) -> int | None:
        if w.converge(FULL_BITS, code):
            return RETRY
        _note_absent(w, code, FULL_BITS)
        return masked_step(w, r)

    return full_step, masked


@instruction("bar", "barrier")
def _bar(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.1, 9.7.13.2"""
    if words[:1] == ["cta"]:
        words = words[1:]
    if words[:1] == ["warp"]:
        return _bar_warp(asm, ins)
    operation = words[0]
    operands = ins.operands
    code = asm.code
    reduction = words[1] if operation == "red" else ""
    first = 1 if operation == "red" else 0
    if len(operands) <= first:
        raise asm.error(f"{ins.opcode} names no barrier")
    number = asm.source(operands[first], "s32")
    plain = len(operands) - first
    count = -1
    vote: Operand | None = None
    if operation == "red":
        vote = operands[-1]
        plain -= 1
    if plain > 2 or operation not in ("sync", "arrive", "red"):
        raise asm.error(f"{ins.opcode} with {len(operands)} operands is not a barrier instruction")
    if plain == 2:
        count = asm.source(operands[first + 1], "s32")
    elif operation == "arrive":
        raise asm.error(f"{ins.opcode} needs a thread count")

    def who(w: Warp, r: list[Any]) -> tuple[int, int | None]:
        mask = w.mask
        lane = 0 if mask is ALL else int(mask.argmax())
        numbers = r[number]
        if mask is ALL and (numbers != numbers[0]).any():
            raise PtxFault("the barrier id differs between the lanes of a warp")
        return int(numbers[lane]), None if count < 0 else int(r[count][lane])

    if operation in ("sync", "arrive"):
        wait = True if operation == "sync" else None

        def step(w: Warp, r: list[Any]) -> int | None:
            a, b = who(w, r)
            return w.cta.bar_arrive(w, code, a, b, wait)

    else:
        kind = "u32" if reduction == "popc" else "pred"
        d = asm.destination(operands[0], kind)
        assert vote is not None
        negated = isinstance(vote, Negated)
        source = asm.register(vote.operand, "pred") if isinstance(vote, Negated) else asm.source(vote, "pred")

        def step(w: Warp, r: list[Any]) -> int | None:
            a, b = who(w, r)
            mask = w.mask
            value = (~r[source] if negated else r[source]) & mask
            # Lanes that do not take part must not decide an `and`.
            ballot = value | ~mask if reduction == "and" else value

            def resume(warp: Warp, votes: list[Array]) -> None:
                if reduction == "and":
                    result: Any = all(bool(v.all()) for v in votes)
                elif reduction == "or":
                    result = any(bool(v.any()) for v in votes)
                else:
                    result = sum(int(v.sum()) for v in votes)
                np.copyto(warp.R[d], np.array(result).astype(KINDS[kind]), where=mask)

            return w.cta.bar_arrive(w, code, a, b, resume, ballot)

    if ins.opcode.startswith("barrier") and "aligned" not in words:
        return step, step
    return aligned(asm, (step, step))


def _bar_warp(asm: Assembler, ins: Instruction) -> Steps:
    """bar.warp.sync (9.7.13.3)"""
    members = asm.source(asm.operands(1)[0], "u32")
    code = asm.code

    def masked(w: Warp, r: list[Any]) -> int | None:
        named = _members(r[members], w)
        if w.converge(named, code):
            return RETRY
        _note_absent(w, code, named)
        if w.cta.check:
            w.sync_lanes()
        return None

    def full(w: Warp, r: list[Any]) -> None:
        if w.cta.check:
            w.sync_lanes()

    return full, masked


def _members(value: Array, w: Warp) -> int:
    return int(value[int(w.mask.argmax())])


def synchronized(asm: Assembler, members: int, step: Any) -> Steps:
    """Steps of a `.sync` instruction: lanes that the member mask names come first."""
    code = asm.code

    def masked(w: Warp, r: list[Any]) -> int | None:
        named = _members(r[members], w)
        if w.converge(named, code):
            return RETRY
        _note_absent(w, code, named)
        step(w, r)
        return None

    def full(w: Warp, r: list[Any]) -> None:
        step(w, r)

    return full, masked


# ------------------------------------------------------------------------------------------------------ warp-wide exchanges


@instruction("shfl.sync")
def _shfl(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.6. A source lane that does not take part gives poison."""
    mode = words[0]
    operands = asm.operands(5)
    target = operands[0]
    d = asm.destination(target.first if isinstance(target, Pair) else target, "u32")
    p = asm.destination(target.second, "pred") if isinstance(target, Pair) else -1
    a, b, c, members = (asm.source(o, "u32") for o in operands[1:])

    def route(delta: Array, control: Array) -> tuple[Array, Array]:
        by, clamp, segment = (
            (delta & np.uint32(31)).astype(np.int64),
            (control & np.uint32(31)).astype(np.int64),
            (control >> np.uint32(8) & np.uint32(31)),
        )
        segment = segment.astype(np.int64)
        last = (LANES & segment) | (clamp & ~segment)
        first = LANES & segment
        if mode == "up":
            lane = LANES - by
            valid = lane >= last
        elif mode == "down":
            lane = LANES + by
            valid = lane <= last
        elif mode == "bfly":
            lane = LANES ^ by
            valid = lane <= last
        elif mode == "idx":
            lane = first | (by & ~segment)
            valid = lane <= last
        else:
            raise asm.error(f"{ins.opcode}: unknown mode .{mode}")
        return np.where(valid, lane, LANES), valid

    fixed = (
        route(asm.slots[b].value, asm.slots[c].value) if isinstance(operands[2], Immediate) and isinstance(operands[3], Immediate) else None
    )

    def full(w: Warp, r: list[Any]) -> None:
        lane, valid = route(r[b], r[c]) if fixed is None else fixed
        r[d][...] = r[a][lane]
        if p >= 0:
            r[p][...] = valid

    def step(w: Warp, r: list[Any]) -> None:
        lane, valid = route(r[b], r[c]) if fixed is None else fixed
        mask = w.mask
        value = np.where(mask[lane], r[a][lane], np.uint32(POISON32))
        np.copyto(r[d], value, where=mask)
        if p >= 0:
            np.copyto(r[p], valid, where=mask)

    return full, synchronized(asm, members, step)[1]


@instruction("vote.sync")
def _vote(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.11"""
    mode = words[0]
    target, vote, member = asm.operands(3)
    negated = isinstance(vote, Negated)
    source = asm.register(vote.operand, "pred") if isinstance(vote, Negated) else asm.source(vote, "pred")
    members = asm.source(member, "u32")
    kind = "u32" if mode == "ballot" else "pred"
    d = asm.destination(target, kind)

    def step(w: Warp, r: list[Any]) -> None:
        mask = w.mask
        value = (~r[source] if negated else r[source]) & mask
        ones = bits_of(value)
        if mode == "ballot":
            result: Any = np.uint32(ones)
        elif mode == "any":
            result = ones != 0
        elif mode == "all":
            result = ones == bits_of(mask)
        else:
            result = ones in (0, bits_of(mask))
        np.copyto(r[d], result, where=mask)

    return synchronized(asm, members, step)


@instruction("activemask")
def _activemask(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.12"""
    d = asm.destination(asm.operands(1)[0], "u32")

    def step(w: Warp, r: list[Any]) -> None:
        np.copyto(r[d], np.uint32(bits_of(w.mask)), where=w.mask)

    return step, step


@instruction("elect.sync")
def _elect(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.14. The leader is the lowest lane."""
    target, member = asm.operands(2)
    if not isinstance(target, Pair):
        raise asm.error("elect.sync writes d|p")
    d, p, members = asm.destination(target.first, "u32"), asm.destination(target.second, "pred"), asm.source(member, "u32")

    def step(w: Warp, r: list[Any]) -> None:
        mask = w.mask
        leader = int(mask.argmax())
        np.copyto(r[d], np.uint32(leader), where=mask)
        np.copyto(r[p], leader == LANES, where=mask)

    return synchronized(asm, members, step)


@instruction("match")
def _match(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.13"""
    mode = words[0]
    kind = "u" + kind_of(asm, words)[1:]
    target, value, member = asm.operands(3)
    pair = isinstance(target, Pair)
    d = asm.destination(target.first if isinstance(target, Pair) else target, "u32")
    p = asm.destination(target.second, "pred") if isinstance(target, Pair) else -1
    a, members = asm.source(value, kind), asm.source(member, "u32")

    def step(w: Warp, r: list[Any]) -> None:
        mask = w.mask
        same = (r[a][:, None] == r[a][None, :]) & mask[None, :]
        if mode == "any":
            result = (same.astype(np.uint64) << LANES.astype(np.uint64)).sum(axis=1).astype(np.uint32)
            np.copyto(r[d], result, where=mask)
            return
        equal = bool(same[int(mask.argmax())][mask].all())
        np.copyto(r[d], np.uint32(bits_of(mask) if equal else 0), where=mask)
        if pair:
            np.copyto(r[p], equal, where=mask)

    return synchronized(asm, members, step)


@instruction("redux.sync")
def _redux(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.15"""
    operation, kind = words[0], words[-1]
    target, value, member = asm.operands(3)
    view = "u32" if kind == "b32" else kind
    d, a, members = asm.destination(target, view), asm.source(value, view), asm.source(member, "u32")
    absolute, nan = "abs" in words, "NaN" in words
    functions: dict[str, Any] = {
        "add": lambda x: np.add.reduce(x, dtype=x.dtype), "min": lambda x: x.min(), "max": lambda x: x.max(),
        "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
    }  # fmt: skip
    if kind == "f32":
        functions = {"min": np.min if nan else np.fmin.reduce, "max": np.max if nan else np.fmax.reduce}
    function = functions.get(operation)
    if function is None:
        raise asm.error(f"{ins.opcode} is not supported")

    def step(w: Warp, r: list[Any]) -> None:
        active = r[a][w.mask]
        np.copyto(r[d], function(np.abs(active) if absolute else active), where=w.mask)

    return synchronized(asm, members, step)


# --------------------------------------------------------------------------------------------------------------------- fences


@instruction("fence", "membar")
def _fence(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.4. A proxy fence orders what its thread has done and knows of with the asynchronous proxy, wherever on the way it stands.

    Those of fence.sc that reach each other have one order, and each synchronises with the later ones (8.9.1 and 8.9.3).
    """
    if words[:1] == ["mbarrier_init"]:

        def visible(w: Warp, r: list[Any]) -> None:
            if w.cta.check:
                w.fence_proxy(hz.INITS)

        return visible, visible
    if words[:1] == ["proxy"]:
        if words[1:2] != ["async"]:
            # Aliases and tensor maps in memory do not exist here.
            return nothing, nothing
        spaces = {w.split("::")[0] for w in words[2:] if w.split("::")[0] in ("shared", "global")} or {"shared", "global"}
        planes = [plane for space, plane in (("shared", hz.SHARED_PROXY), ("global", hz.GLOBAL_PROXY)) if space in spaces]

        def proxy(w: Warp, r: list[Any]) -> None:
            if w.cta.check:
                w.fence_proxy(*planes)

        return proxy, proxy
    scope = scope_of(words)
    # membar is fence.sc of its scope.
    sequential = ins.opcode.startswith("membar") or "sc" in words

    def step(w: Warp, r: list[Any]) -> None:
        if not w.cta.check:
            return
        if sequential:
            w.cta.launch.fences.acquire(w, scope)
        for level in range(scope + 1):
            clock = w.acquired[level]
            if clock is not None:
                w.clock.join(clock)
                w.acquired[level] = None
        released = w.snapshot()
        w.fence_clocks[: scope + 1] = [released] * (scope + 1)
        if sequential:
            w.cta.launch.fences.release(w, scope, released)

    return step, step


def scope_of(words: list[str]) -> int:
    """How far an operation or fence reaches: 0 the CTA, 1 the cluster, 2 the device or system, which is the default."""
    return next((_SCOPES[w] for w in words if w in _SCOPES), 2)


_SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 2, "gl": 2}


__all__ = ["aligned", "kind_bytes", "mask_of", "nothing", "synchronized"]
