"""setmaxnreg and griddepcontrol: without effect on values here, with the rules that make them fail on hardware checked."""

from __future__ import annotations

from typing import Any

from .alu import Steps
from .control import aligned, nothing
from .decode import Assembler, Code, instruction
from .machine import RETRY, WARP, Cta, Group, Warp
from .ptx import Instruction

WARPGROUP = 4
REGISTER_FILE = 65_536
"""32-bit registers of a multiprocessor."""


class RegisterCounts:
    """The setmaxnreg instructions of a CTA's warpgroups, in order, and where each warp is in them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Warp, Group]] = []
        self.sequence: dict[int, list[tuple[int, Code]]] = {}
        self.position: dict[int, int] = {}

    def current(self, warpgroup: int) -> int:
        """Registers a thread that the warpgroup has set last, 0 when it never has."""
        known = self.sequence.get(warpgroup)
        return known[-1][0] if known else 0


@instruction("setmaxnreg")
def _setmaxnreg(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.19.5. Every warp of a warpgroup executes the same ones; .inc waits until what all warpgroups ask for fits the register file."""
    if words not in (["inc", "sync", "aligned", "u32"], ["dec", "sync", "aligned", "u32"]):
        raise asm.error(f"{ins.opcode} is not supported")
    count = asm.integer(asm.operands(1)[0], "the register count")
    if count % 8 or not 24 <= count <= 256:
        raise asm.error(f"setmaxnreg {count}: the count is a multiple of 8 in 24..256")
    increases = words[0] == "inc"
    code = asm.code

    def step(w: Warp, r: list[Any]) -> int | None:
        cta = w.cta
        counts = _counts(cta)
        warpgroup = w.index // WARPGROUP
        place = counts.position.get(w.index, 0)
        sequence = counts.sequence.setdefault(warpgroup, [])
        if place < len(sequence):
            counts.position[w.index] = place + 1
            expected, other = sequence[place]
            if expected != count or other.opcode != code.opcode:
                cta.report(
                    "barrier",
                    f"{code.opcode} {count} by {w.name} (PTX line {code.line}), where another warp of its warpgroup has executed "
                    f"{other.opcode} {expected} (PTX line {other.line})",
                    code,
                    w,
                )
            return None
        held = sum(counts.current(g) for g in counts.sequence if g != warpgroup)
        if increases and (held + count) * WARPGROUP * WARP > REGISTER_FILE:
            w.group.blocked = (
                "registers",
                f"registers ({held * WARPGROUP * WARP} of {REGISTER_FILE} are held, {code.opcode} {count})",
                code,
            )
            counts.waiting.append((w, w.group))
            return RETRY
        counts.position[w.index] = place + 1
        sequence.append((count, code))
        if not increases:
            for other_warp, group in counts.waiting:
                other_warp.wake(group)
            counts.waiting.clear()
        return None

    return aligned(asm, (step, step))


def _counts(cta: Cta) -> RegisterCounts:
    if cta.registers is None:
        cta.registers = RegisterCounts()
    result: RegisterCounts = cta.registers
    return result


@instruction("griddepcontrol")
def _griddepcontrol(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.13: the grid runs alone, so what it depends on is complete."""
    asm.operands(0)
    if words not in (["wait"], ["launch_dependents"]):
        raise asm.error(f"{ins.opcode} is not supported")
    return nothing, nothing


__all__ = ["REGISTER_FILE", "RegisterCounts"]
