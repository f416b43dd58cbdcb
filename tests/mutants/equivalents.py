"""Mutants that are no bugs: what they change is ordered or decided elsewhere too. Each entry says which, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .subjects import Mutant


@dataclass(frozen=True)
class Equivalent:
    subjects: str
    """Pattern of subject names."""
    rules: str
    """Pattern of rule names."""
    near: str
    """Pattern found in the edited line or the lines around it."""
    reason: str
    before: int = 12
    after: int = 12


EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        "sm_100a-combine", "^bar.sync (dropped|weakened|counts half)", r"tcgen05\.dealloc[\s\S]*bar\.sync[\s\S]*ld\.shared\.v4",
        "the barrier before the deallocation orders the same stores; nothing is stored between the two",
    ),
    Equivalent(
        "sm_100a-combine", "^bar.sync (dropped|before the last store)", r"st\.global[\s\S]*bar\.sync[\s\S]*tcgen05\.dealloc",
        "the combine's own barrier comes after every use of a loaded register, and the barrier after the deallocation orders the stores",
    ),
    Equivalent(
        "sm_100a", "^tcgen05.wait::ld (dropped|after the signal)", "",
        "every register of the load is used before the thread signals, and a use waits for its load",
    ),
    Equivalent(
        "sm_90a-attention", "^exchange keeps to one buffer", "",
        "between two exchanges the warpgroup meets at the barrier that hands P over",
    ),
    Equivalent(
        "attention", "^fence.proxy.async after the barrier", r"fence\.proxy\.async[^;]*;(?:(?!mbarrier\.arrive)[\s\S])*?bar\.sync",
        "the threads that issue the MMAs or copies execute the fence themselves, after the barrier", before=0,
    ),
)  # fmt: skip


def equivalent(mutant: Mutant) -> str | None:
    """Why a mutant is equivalent, or None when it is a bug."""
    lines, line = mutant.subject.listing.lines, mutant.edit.line
    for entry in EQUIVALENTS:
        around = "\n".join(lines[max(0, line - entry.before) : line + entry.after + 1])
        if re.search(entry.subjects, mutant.subject.name) and re.search(entry.rules, mutant.rule) and re.search(entry.near, around):
            return entry.reason
    return None
