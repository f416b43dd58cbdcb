"""Registers that are read before anything has written them.

Which registers may be read unwritten is decided once, when an entry is decoded: those that are live where it begins. Compilers leave
few of them, mostly none, so that only the instructions that touch one of these keep count of the lanes that have written it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .ptx import Instruction

if TYPE_CHECKING:
    from .decode import Assembler, Code
    from .machine import Step, Warp

RegisterKey = tuple[int, int]
"""(storage class in bits, number) of a register."""
_ENDS = ("ret", "exit", "trap")


class Unwritten:
    """What the instructions of one entry read and write, and the registers among that which may be read too early."""

    def __init__(self) -> None:
        self.candidates: dict[RegisterKey, str] = {}
        """Registers that may be read before they are written, with their names."""
        self._instructions: list[tuple[Instruction, Code, dict[RegisterKey, str], dict[RegisterKey, str]]] = []

    def note(self, ins: Instruction, code: Code, uses: dict[RegisterKey, str], writes: dict[RegisterKey, str]) -> None:
        """Add the next instruction."""
        self._instructions.append((ins, code, uses, writes))

    def watch(self, full: list[Step], masked: list[Step], assembler: Assembler) -> None:
        """Find the candidates, and let the steps that touch one keep count."""
        self.candidates = self._live_at_entry()
        for index, (ins, code, uses, writes) in enumerate(self._instructions):
            reads = {k: n for k, n in uses.items() if k in self.candidates}
            written = [k for k in writes if k in self.candidates]
            if reads or written:
                guard = -1 if ins.guard is None else assembler.register(ins.guard, "pred")
                deciding = None if ins.guard is None else (1, ins.guard.index)
                for steps in (full, masked):
                    steps[index] = _counting(steps[index], code, reads, written, guard, ins.guard_negated, deciding)
        self._instructions = []

    def _live_at_entry(self) -> dict[RegisterKey, str]:
        """Registers for which some path from the entry reads before it writes; a write under a guard may not happen."""
        position: dict[RegisterKey, int] = {}
        names: dict[RegisterKey, str] = {}
        for _, _, uses, writes in self._instructions:
            for key, name in (*uses.items(), *writes.items()):
                if key not in position:
                    position[key] = len(position)
                    names[key] = name
        reads, keeps = [], []
        for ins, _, uses, writes in self._instructions:
            reads.append(sum(1 << position[k] for k in uses))
            keeps.append(~(sum(1 << position[k] for k in writes) if ins.guard is None else 0))
        count = len(reads)
        before = [0] * (count + 1)
        changed = True
        while changed:
            changed = False
            for index in range(count - 1, -1, -1):
                ins = self._instructions[index][0]
                after = 0
                if ins.guard is not None or (not ins.opcode.startswith((*_ENDS, "bra")) and not ins.targets):
                    after = before[index + 1]
                if ins.target >= 0:
                    after |= before[ins.target]
                for target in ins.targets:
                    after |= before[target]
                now = reads[index] | after & keeps[index]
                if now != before[index]:
                    before[index] = now
                    changed = True
        return {key: names[key] for key, place in position.items() if before[0] >> place & 1}


def _counting(
    step: Step,
    code: Code,
    reads: dict[RegisterKey, str],
    written: list[RegisterKey],
    guard: int,
    negated: bool,
    deciding: RegisterKey | None,
) -> Step:
    """A step that reports lanes which read an unwritten register, and notes those that write one."""
    from .machine import bits_of

    def counted(w: Warp, r: list[Any]) -> int | None:
        unwritten = w.unwritten
        if not unwritten:
            return step(w, r)
        mask = w.mask
        acting = bits_of(mask if guard < 0 else mask & ~r[guard] if negated else mask & r[guard])
        for key, name in reads.items():
            # The guard itself is read by every lane.
            lanes = unwritten.get(key, 0) & (bits_of(mask) if key == deciding else acting)
            if lanes:
                lane = (lanes & -lanes).bit_length() - 1
                unwritten[key] &= ~lanes
                w.cta.report(
                    "uninitialized",
                    f"read of register {name} by {w.name} lane {lane} (PTX line {code.line}), which nothing has written",
                    code,
                    w,
                    lane,
                    place=f"register {name}",
                    missing="a write on every path that leads to the read",
                )
        result = step(w, r)
        if result is None or result >= 0:
            for key in written:
                left = unwritten.get(key, 0) & ~acting
                if left:
                    unwritten[key] = left
                else:
                    unwritten.pop(key, None)
        return result

    return counted


__all__ = ["RegisterKey", "Unwritten"]
