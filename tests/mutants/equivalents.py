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
    numbers: tuple[int, ...] = ()
    """Sites of the rule in the kernel; any when empty."""


_COMMIT = "what the MMA thread knows when it issues happens before the wait for its commit, and that order covers the same accesses"

_ACCUMULATOR = "the accumulators were last touched by wgmma of the same shape, which is in order without a fence"

_FILLED = "a key tile takes the ring's 8 slots in 8 steps written out, a merged partition 4: this is not the last, where it wraps"
_FILLED_SHORT = "the same: this step is not the one before the last, where a ring of 7 slots would wrap"

EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        "sm_100a|d128-sm_90a|sm_90a-(exchange|level0|combine)", "^fence.mbarrier_init dropped", "",
        "no other CTA uses these mbarriers, and within the CTA the barrier behind their initialisation orders it",
    ),
    Equivalent(
        "sm_90a-attention", "^fence.mbarrier_init dropped", "",
        "those of the rings: no other CTA uses them, and within the CTA the barrier behind their initialisation orders it", numbers=(0,),
    ),
    Equivalent(
        "sm_100a-combine", "^bar.sync (dropped|weakened|counts half)", r"tcgen05\.dealloc[\s\S]*bar\.sync[\s\S]*ld\.shared\.v4",
        "the barrier before the deallocation orders the same stores; nothing is stored between the two",
    ),
    Equivalent(
        # Not where d256 and d512 use the registers only later: there the load is in flight at the fence that follows.
        "sm_100a", "^tcgen05.wait::ld (dropped|after the signal)", r"^(?!d(256|512).*attention.*#1$)",
        "every register of the load is used before the thread signals, and a use waits for its load",
    ),
    Equivalent(
        "d(256|512|128)-sm_90a-attention", "^exchange keeps to one buffer", "",
        "between two exchanges the warpgroup meets at the barrier that hands P over, or O",
    ),
    Equivalent(
        "^(?!d128_sk).*attention", "^fence.proxy.async after the barrier",
        r"fence\.proxy\.async[^;]*;(?:(?!mbarrier\.arrive)[\s\S])*?bar\.sync",
        "the threads that issue the MMAs or copies execute the fence themselves, after the barrier", before=0,
    ),
    Equivalent(
        "d128_sk-sm_90a-attention", "^fence.proxy.async after the barrier", "",
        "the threads that issue the MMAs or copies execute the fence themselves, after the barrier", numbers=(0, 1),
    ),
    Equivalent("sm_100a-attention", "^mbarrier wait (dropped|weakened)", "", f"softmax's wait for read factors: {_COMMIT}", numbers=(1,)),
    Equivalent("sm_100a-attention", "^mbarrier wait (dropped|weakened)", "", f"correct waits for P.V: {_COMMIT}", numbers=(4,)),
    Equivalent("sm_100a-attention", "^mbarrier arrive weakened", "", f"correct's signal that factors are read: {_COMMIT}", numbers=(3,)),
    Equivalent("sm_100a-attention", "^mbarrier.init with one arrival less", "", f"the barrier of read factors: {_COMMIT}", numbers=(3, 7)),
    Equivalent(
        "sm_100a-attention", "^bar.warp.sync dropped", r"cp\.async\.bulk\.commit_group[\s\S]*bar\.warp\.sync[\s\S]*div\.u32",
        "only where the lanes of a warp meet again: no memory is handed over between them",
    ),
    Equivalent(
        "sm_100a", "^tcgen05.fence::before", r"fence::before[^;]*;[\s\S]{0,200}bar\.sync[\s\S]{0,300}ld\.(volatile\.)?shared\.[bu]32",
        "the first barrier of the kernel: no asynchronous tcgen05 operation comes before it", before=0,
    ),
    Equivalent(
        "sm_100a", "^tcgen05.fence::after", r"bar\.sync[\s\S]{0,100}fence::after[^;]*;[\s\S]{0,100}ld\.(volatile\.)?shared\.[bu]32",
        "the first barrier of the kernel: no asynchronous tcgen05 operation comes before it", before=6,
    ),
    Equivalent(
        "sm_100a", "^tcgen05.fence::after", r"fence::after[^;]*;[\s\S]{0,300}tcgen05\.dealloc",
        "what follows is a deallocation, which is no asynchronous operation", before=0,
    ),
    Equivalent(
        "d128-sm_90a-attention", "^(bar.warp.sync|fence.proxy.async) (dropped|weakened|after)", "",
        "the release of Q: that of the last V slot, just before, orders the same reads of Q and fences them", numbers=(2,),
    ),
    Equivalent(
        "sm_90a-attention", "^fence.proxy.async (dropped|weakened)", r"fence\.proxy\.async\.global;",
        "both ends of the hand-over through global memory fence: who writes a partition, and who copies it; one of them is enough",
        before=0, after=0,
    ),
    Equivalent(
        "sm_90a-attention", "^bar.sync (dropped|weakened|counts half)",
        r"bar\.sync[^;]*;\s*// end inline asm\s*@%p\d+ bra[^;]*;\s*add[\s\S]{0,100}mapa[\s\S]{0,160}mbarrier\.arrive\.release\.cluster",
        "a CTA that has handed its slice to another: the barriers around that hand-over order the same reads", before=0,
    ),
    Equivalent("d256-sm_90a-attention", "^wgmma.fence dropped", "", _ACCUMULATOR, numbers=(1, 3)),
    Equivalent("d512-sm_90a-attention", "^wgmma.fence dropped", "", _ACCUMULATOR, numbers=(1, 2, 3, 5, 6, 7)),
    Equivalent(
        "sm_90a-attention", "^bar.warp.sync dropped", r"cp\.async\.bulk\.(?:commit_group|wait_group\.read)[\s\S]{0,240}bar\.warp\.sync",
        "the leader, which copies and waits for its copies, is the lane that signals for the warp", after=0,
    ),
    Equivalent(
        "d128_sk-sm_90a-attention", "^descriptor with double stride", "",
        "8 rows of Q or P are one group of 8: the stride between groups leads nowhere", numbers=(*range(1, 24, 2),),
    ),
    Equivalent(
        "d128_sk-sm_90a-attention", "^bar.warp.sync dropped",
        r"wait_group\.read[\s\S]{0,300}mbarrier\.arrive[^;]*;[\s\S]{0,60}bar\.warp\.sync",
        "only where the lanes meet again: each has stored an O tile and signals for itself", before=16, after=0,
    ),
    Equivalent(
        "^(?!d128-).*sm_90a-attention", "^bar.warp.sync dropped", "",
        "only where the lanes of a warp meet again: the barrier of all threads behind it orders what they have done", numbers=(1,),
    ),
    Equivalent(
        "sm_90a-attention", "^bar.warp.sync dropped", r"bar\.warp\.sync[^;]*;\s*(?:@%p\d+ bra[^;]*;)?[^;]{0,60}barrier\.cluster\.wait",
        "only where the lanes of a warp meet again: no memory is handed over between them", before=0,
    ),
    Equivalent(
        "sm_90a-attention", "^bar.warp.sync dropped", r"bar\.warp\.sync[^;]*;\s*(?:\$L\w+:|div\.u32)",
        "only where the lanes of a warp meet again: no memory is handed over between them", before=0, after=2,
    ),
    Equivalent(
        "sm_100a-attention", "^bar.warp.sync (dropped|after)",
        r"tcgen05\.wait::st[^;]*;[\s\S]{0,60}tcgen05\.fence::before[^;]*;(?:(?!;)[\s\S]){0,60}(?:setp\.ne\.s32[^;]*;)?\s*bar\.warp\.sync",
        "what is handed over is written by tcgen05.st, an operation of the whole warp that the lane which arrives has waited for", after=0,
    ),
    Equivalent("d512-sm_90a-attention", "^ring one slot too long", "", _FILLED, numbers=(*range(10), 11, 12, 13)),
    Equivalent("d512-sm_90a-attention", "^ring one slot too short", "", _FILLED_SHORT, numbers=(*range(9), 11, 12)),
    Equivalent("d512-sm_90a-attention", "^parity kept when the ring wraps", "", _FILLED, numbers=(*range(6), 7, 8, 9)),
    Equivalent(
        "sm_100a-exchange4_loop", "^instruction dropped", r"mov\.u32\s+%r\d+, %r1;",
        "the same move stands before a branch and after it: with more than one row both are executed", before=0, after=0,
    ),
    Equivalent(
        "sm_100a-attention", "^bar.warp.sync (dropped|after)", r"ld\.shared\.f32[^;]*;\s*bar\.warp\.sync",
        f"correct's signal that factors are read: {_COMMIT}", after=0,
    ),
    Equivalent(
        "d(256|512)-sm_100a-attention", "^tcgen05.fence::before", r"st\.shared\.v4\.u32[\s\S]{0,160}fence::before",
        "the fences before the two arrivals of P stand in for each other: S, which was read before both, is overwritten only after both",
        after=0,
    ),
    Equivalent(
        "d(256|512)-sm_100a-attention", "^tcgen05.fence::after", "",
        "what the wait for the second part of P orders anew are ordinary stores: the wait for the first part has fenced the rest",
        numbers=(7,),
    ),
)  # fmt: skip


def equivalent(mutant: Mutant) -> str | None:
    """Why a mutant is equivalent, or None when it is a bug."""
    lines, line = mutant.subject.listing.lines, mutant.edit.line
    for entry in EQUIVALENTS:
        if entry.numbers and mutant.number not in entry.numbers:
            continue
        around = "\n".join(lines[max(0, line - entry.before) : line + entry.after + 1])
        if entry.near.startswith("^"):
            # A pattern of names, for what the lines around do not show.
            around = mutant.name
        if re.search(entry.subjects, mutant.subject.name) and re.search(entry.rules, mutant.rule) and re.search(entry.near, around):
            return entry.reason
    return None
