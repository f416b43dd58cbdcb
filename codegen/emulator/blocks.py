"""Blocks: runs of instructions that touch nothing but the registers of their warp, executed as few operations on many registers.

A numpy call on 32 lanes is nearly all overhead. Within a block, instructions of one opcode that do not depend on each other become one
call on [instructions, lanes]. Nobody outside the warp can see its registers, so a block is executed as a whole when the warp reaches it,
and the scheduler's quantum then counts its instructions off one by one (Group.ahead): schedules and instruction counts do not change.

A block is executed by a whole warp only. Diverged lanes, and steps that an observer has replaced, go instruction by instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import DECODE_HOOKS, DecodedEntry, Registers
from .tmem import TmemOps, loads_done

if TYPE_CHECKING:
    from .machine import Step, Warp
    from .tensor import WgmmaState

Array = NDArray[Any]
Fetch = tuple[int, Any]
"""(table of the warp, index of its rows), or (-1, a constant)."""

_ANY_SHAPE = re.compile(r"(add|sub|mul|fma|mad|max|min|neg|abs)\..*f32(x2)?$|ex2\.approx(\.ftz)?\.f32$|cvt\..*f16x2\.f32$|(setp|selp)\.")
"""Opcodes whose function takes arrays of any shape and is given by the opcode alone; numpy's own functions always do."""
_SHORTEST = 8
"""Instructions of a block; fewer are only worth the look-up where there is much to share."""
_LONGEST = 512
_LIGHT = 4
"""Instructions from which on one call for all pays where the function is a single numpy call."""


@dataclass(frozen=True)
class Member:
    """One instruction of a block. reads, writes: keys of registers."""

    does: Registers
    reads: frozenset[Any]
    writes: frozenset[Any]
    key: Any
    """Members of one key can share a call; None for those that never do."""
    light: bool


class Block:
    """Consecutive instructions from `start` on; `steps` is made when a warp first comes here."""

    def __init__(self, code: DecodedEntry, start: int, length: int) -> None:
        self.code = code
        self.start = start
        self.length = length
        self._operations: list[Step] | None = None
        places = range(start, start + length)
        filled = {row for place in places for row in code.fills.get(place, ())}
        self._filled = np.array(sorted(filled), np.int64)
        """32-bit registers read that some tcgen05.ld fills."""
        self._watched = 0
        for place in places:
            self._watched |= code.noted.get(place, 0)

    def run(self, w: Warp, r: list[Any]) -> bool:
        """Execute the block; False when it has to go instruction by instruction."""
        if w.cta.check:
            # What the single steps do beside their arithmetic, for all of them at once.
            wgmma: WgmmaState | None = w.wgmma
            if wgmma is not None:
                if wgmma.flying & self._watched:
                    return False
                wgmma.touched |= self._watched
            loads: TmemOps | None = w.tmem_ops
            if loads is not None and loads.loaded != loads.load_time and len(self._filled):
                loads_done(w, loads, int(loads.filled[self._filled].max()))
        operations = self._operations
        if operations is None:
            operations = self._operations = _operations(self.code, self.start, self.length)
        for operation in operations:
            operation(w, r)
        return True


def find_blocks(code: DecodedEntry) -> None:
    """Note the blocks of an entry, by where they begin."""
    targets = {ins.target for ins in code.entry.instructions}
    for ins in code.entry.instructions:
        targets.update(ins.targets)
    start = 0
    count = len(code.full)
    members: list[int] = []
    while start < count:
        end = start
        while end < count and end in code.registers_only and end - start < _LONGEST and (end == start or end not in targets):
            end += 1
        if end - start >= _SHORTEST or _repeats(code, start, end):
            code.blocks[start] = Block(code, start, end - start)
            members.extend(range(start, end))
        start = max(end, start + 1)
    if members:
        pick: Callable[[list[Any]], Any] = itemgetter(*members)
        code.pick_members, code.member_steps = pick, pick(code.full)


def _repeats(code: DecodedEntry, start: int, end: int) -> bool:
    """Whether a few instructions have three alike worth a shared call."""
    opcodes = [code.opcodes[place] for place in range(start, end)]
    return any(opcodes.count(opcode) >= 3 and _ANY_SHAPE.match(opcode) for opcode in set(opcodes))


DECODE_HOOKS.append(find_blocks)


def _members(code: DecodedEntry, start: int, length: int) -> list[Member]:
    result = []
    for place in range(start, start + length):
        does, reads, writes = code.registers_only[place]
        light = bool(does.pairs) or isinstance(does.function, np.ufunc)
        slots = [s for pair in does.pairs for s in pair] or [does.destination, *does.sources]
        tables = tuple(code.homes[slot][0] for slot in slots)
        key: Any = None
        if None not in tables:
            if does.pairs:
                key = tables
            elif light:
                key = (does.function, tables)
            elif _ANY_SHAPE.match(code.opcodes[place]):
                key = (code.opcodes[place], tables)
        result.append(Member(does, reads, writes, key, light))
    return result


def _operations(code: DecodedEntry, start: int, length: int) -> list[Step]:
    """The block's instructions in an order that keeps every dependence, those that can share a call together."""
    members = _members(code, start, length)
    waits, followers = _dependences(members)
    ready: dict[Any, list[int]] = {}
    left: dict[Any, int] = {}
    for number, member in enumerate(members):
        left[_group(member, number)] = left.get(_group(member, number), 0) + 1
        if not waits[number]:
            ready.setdefault(_group(member, number), []).append(number)
    result: list[Step] = []
    while ready:
        # A group that is complete first, then the largest, then the earliest.
        group = max(ready, key=lambda g: (len(ready[g]) == left[g], len(ready[g]), -ready[g][0]))
        chosen = ready.pop(group)
        left[group] -= len(chosen)
        first = members[chosen[0]]
        if len(chosen) == 1 or (first.light and len(chosen) < _LIGHT):
            result += [code.full[start + number] for number in chosen]
        else:
            result += _shared_calls(code, [members[number].does for number in chosen])
        for number in chosen:
            for follower in followers[number]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.setdefault(_group(members[follower], follower), []).append(follower)
    return result


def _group(member: Member, number: int) -> Any:
    return number if member.key is None else member.key


def _dependences(members: list[Member]) -> tuple[list[int], list[list[int]]]:
    """(how many earlier instructions each has to follow, which ones follow each): reads after writes, and writes after either."""
    waits = [0] * len(members)
    followers: list[list[int]] = [[] for _ in members]
    written: dict[Any, int] = {}
    read: dict[Any, list[int]] = {}
    for number, member in enumerate(members):
        before = {written[key] for key in member.reads | member.writes if key in written}
        for key in member.writes:
            before.update(read.pop(key, ()))
        for key in member.reads:
            read.setdefault(key, []).append(number)
        for key in member.writes:
            written[key] = number
        before.discard(number)
        waits[number] = len(before)
        for earlier in before:
            followers[earlier].append(number)
    return waits, followers


def _rows(numbers: list[int]) -> Any:
    """Rows as a number when they are all one, as a slice when they are evenly spaced (numpy then copies nothing), else as an array."""
    step = numbers[1] - numbers[0]
    if any(b - a != step for a, b in pairwise(numbers)):
        return np.array(numbers, np.int64)
    if step == 0:
        return numbers[0]
    end = numbers[-1] + (1 if step > 0 else -1)
    return slice(numbers[0], end if end >= 0 else None, step)


def _fetch(code: DecodedEntry, slots: list[int]) -> Fetch:
    homes = [code.homes[slot] for slot in slots]
    table = homes[0][0]
    assert table is not None
    if table >= 0:
        return table, _rows([row for _, row in homes])
    values = [code.slots[slot].value for slot in slots]
    return -1, values[0] if len(set(slots)) == 1 else np.stack(values)


def _shared_calls(code: DecodedEntry, group: list[Registers]) -> list[Step]:
    """Calls that do what the independent instructions of a group do."""
    if group[0].pairs:
        return [_copy(*(_fetch(code, [does.pairs[k][side] for does in group]) for side in (0, 1))) for k in range(len(group[0].pairs))]
    function = group[0].function
    assert function is not None
    target = _fetch(code, [does.destination for does in group])
    sources = [_fetch(code, [does.sources[k] for does in group]) for k in range(len(group[0].sources))]
    return [_call(function, len(group), target, sources)]


def _copy(target: Fetch, source: Fetch) -> Step:
    (table, rows), (other, picked) = target, source

    def copy(w: Warp, r: list[Any]) -> None:
        tables = w.tables
        tables[table][rows] = picked if other < 0 else tables[other][picked]

    return copy


def _call(function: Callable[..., Any], count: int, target: Fetch, sources: list[Fetch]) -> Step:
    table, rows = target

    def call(w: Warp, r: list[Any]) -> None:
        tables = w.tables
        values = [rows if table < 0 else tables[table][rows] for table, rows in sources]
        of = tables[table]
        if isinstance(rows, slice):
            function(*values, of[rows])
            return
        out = np.empty((count, of.shape[1]), of.dtype)
        function(*values, out)
        of[rows] = out

    return call


__all__ = ["Block", "find_blocks"]
