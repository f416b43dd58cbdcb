"""setmaxnreg and griddepcontrol: without effect on values here, with the rules that make them fail on hardware checked."""

from __future__ import annotations

from typing import Any

from .alu import Steps
from .control import aligned, nothing
from .decode import Assembler, instruction
from .machine import RETRY, WARP, Cta, Group, Warp
from .ptx import Instruction

REGISTER_FILE = 65_536
"""32-bit registers of a multiprocessor."""


class RegisterCounts:
    """Registers a thread that the warps of a CTA have asked for, and the warps that wait for some."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.waiting: list[tuple[Warp, Group]] = []


@instruction("setmaxnreg")
def _setmaxnreg(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.19.5. An increase waits until what the warps have asked for fits the register file.

    The ISA wants every warp of a warpgroup to execute the same one. Kernels that ship give the roles within a warpgroup different counts,
    so that is not reported. What a warp holds before its first setmaxnreg is ptxas's choice and counts as nothing.
    """
    if words not in (["inc", "sync", "aligned", "u32"], ["dec", "sync", "aligned", "u32"]):
        raise asm.error(f"{ins.opcode} is not supported")
    count = asm.integer(asm.operands(1)[0], "the register count")
    if count % 8 or not 24 <= count <= 256:
        raise asm.error(f"setmaxnreg {count}: the count is a multiple of 8 in 24..256")
    increases = words[0] == "inc"
    code = asm.code

    def step(w: Warp, r: list[Any]) -> int | None:
        state = _registers(w.cta)
        held = WARP * sum(n for index, n in state.counts.items() if index != w.index)
        if increases and held + WARP * count > REGISTER_FILE:
            w.group.blocked = ("registers", f"{WARP * count} registers ({held} of {REGISTER_FILE} are held by others)", code)
            state.waiting.append((w, w.group))
            return RETRY
        state.counts[w.index] = count
        if not increases:
            for other, group in state.waiting:
                other.wake(group)
            state.waiting.clear()
        return None

    return aligned(asm, (step, step))


def _registers(cta: Cta) -> RegisterCounts:
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
