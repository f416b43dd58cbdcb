"""Single changes to PTX, made by rule: what each rule changes, where it applies, and how the emulator must find it.

A rule looks at the listing of one entry and yields edits. Each edit replaces whole lines by whole lines, so that the line numbers of a
mutant are those of the original. `kinds` are the hazard kinds of which one has to be among the findings; "value" is a wrong result,
"deadlock" a launch that does not end, "refused" PTX that the emulator declines to execute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ORDER = ("race", "tcgen05_fence")
"""An access that nothing orders any more; tcgen05 accesses need a synchronisation between their fences."""
EARLY = ("race", "uninitialized")
"""Data are used before they are there; before anything is there, in the first phase."""
HANG_OR_EARLY = ("race", "deadlock", "mbarrier")
"""A wait that never ends, or one that ends a phase early."""
UNFINISHED = ("race", "async_exit")
"""An asynchronous copy that nothing waits for: its source is used again, or the thread exits before it is done."""
WRONG_DATA = ("value", "uninitialized", "race", "out_of_bounds", "tensor_map", "refused")
"""Other bytes than those meant are read or written."""


@dataclass(frozen=True)
class Edit:
    """New text of some lines (index from 0), and the line that the mutant is named after."""

    line: int
    lines: dict[int, str]


class Listing:
    """Lines of a PTX file, those of other entries blank, and the range of one entry in it."""

    def __init__(self, text: str, entry: str) -> None:
        self.lines = text.split("\n")
        starts = [i for i, line in enumerate(self.lines) if ".entry " in line]
        ends = [next(i for i in range(start, len(self.lines)) if self.lines[i] == "}") for start in starts]
        for start, end in zip(starts, ends, strict=True):
            if re.search(rf"\.entry {re.escape(entry)}\b", self.lines[start]):
                self.start, self.end = start, end
            else:
                self.lines[start : end + 1] = [""] * (end + 1 - start)
        self._constants: dict[str, set[str]] = {}
        for line in self.lines[self.start : self.end]:
            if found := re.match(r"\s*mov\.[ub]32\s+(%r\d+), (\S+);", line):
                self._constants.setdefault(found[1], set()).add(found[2])

    def find(self, pattern: str, start: int | None = None, reach: int | None = None) -> Iterator[tuple[int, re.Match[str]]]:
        """Lines of the entry that match, from `start` on for `reach` lines."""
        first = self.start if start is None else start
        last = self.end if reach is None else min(self.end, first + reach)
        for index in range(first, last):
            if found := re.search(pattern, self.lines[index]):
                yield index, found

    def before(self, pattern: str, index: int, reach: int) -> int | None:
        """The nearest line above that matches, before any label."""
        for place in range(index - 1, max(self.start, index - reach), -1):
            if self.lines[place].startswith("$L"):
                return None
            if re.search(pattern, self.lines[place]):
                return place
        return None

    def constant(self, operand: str) -> int | None:
        """The value of an operand that is a literal or a register with one literal value."""
        if re.fullmatch(r"-?\d+", operand):
            return int(operand)
        values = self._constants.get(operand, set())
        if len(values) == 1 and re.fullmatch(r"-?\d+", only := next(iter(values))):
            return int(only)
        return None

    def apply(self, edit: Edit) -> str:
        lines = list(self.lines)
        for index, text in edit.lines.items():
            lines[index] = text
        return "\n".join(lines)


@dataclass(frozen=True)
class Rule:
    name: str
    kinds: tuple[str, ...]
    edits: Callable[[Listing], Iterator[Edit]]
    plain: bool = False
    """Changes plain loads, stores and arithmetic: for the unit kernels, which have little else."""


RULES: list[Rule] = []
Replacement = str | Callable[[re.Match[str]], str]


def rule(
    name: str, *kinds: str, plain: bool = False
) -> Callable[[Callable[[Listing], Iterator[Edit]]], Callable[[Listing], Iterator[Edit]]]:
    def register(edits: Callable[[Listing], Iterator[Edit]]) -> Callable[[Listing], Iterator[Edit]]:
        RULES.append(Rule(name, kinds, edits, plain))
        return edits

    return register


def substitution(name: str, kinds: tuple[str, ...], pattern: str, replacement: Replacement, plain: bool = False) -> None:
    """A rule that rewrites part of every line that matches."""

    @rule(name, *kinds, plain=plain)
    def edits(text: Listing) -> Iterator[Edit]:
        for index, _ in text.find(pattern):
            changed = re.sub(pattern, replacement, text.lines[index])
            if changed != text.lines[index]:
                yield Edit(index, {index: changed})


def dropped(name: str, kinds: tuple[str, ...], pattern: str, plain: bool = False) -> None:
    substitution(name, kinds, rf"^\s*{pattern}[^;]*;", "", plain)


# --- barriers of threads ----------------------------------------------------------------------------------------------

BAR = r"bar\.sync (\S+), (\S+);"

dropped("bar.sync dropped", ORDER, r"bar\.sync")
substitution("bar.sync weakened to bar.arrive", ORDER, r"\bbar\.sync\b", "bar.arrive")
dropped("bar.warp.sync dropped", ORDER, r"bar\.warp\.sync")


@rule("bar.sync counts half of its threads", "race", "barrier")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(BAR):
        threads = text.constant(found[2])
        if threads is not None and threads >= 64:
            yield Edit(index, {index: f"bar.sync {found[1]}, {threads // 64 * 32};"})


@rule("bar.sync waits for a warp too many", "deadlock", "barrier")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(BAR):
        threads = text.constant(found[2])
        if threads is not None:
            yield Edit(index, {index: f"bar.sync {found[1]}, {threads + 32};"})


@rule("bar.sync before the last store that it orders", *ORDER)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(BAR):
        threads = text.constant(found[2])
        store = text.before(r"^\s*st\.shared", index, 12)
        if threads is None or store is None or text.before(rf"\s{re.escape(found[1])},", index, index - store) is not None:
            continue
        yield Edit(index, {store: f"bar.sync {found[1]}, {threads}; {text.lines[store]}", index: ""})


# --- mbarriers --------------------------------------------------------------------------------------------------------

WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, \[(\S+)\], (\S+);"
ARRIVE = r"^\s*mbarrier\.arrive\.shared::cta\.b64 _, \[(\S+)\];"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[(\S+)\], (\S+);"
INIT = r"mbarrier\.init\.shared::cta\.b64 \[(\S+)\], (\S+);"

substitution("mbarrier wait dropped", EARLY, WAIT, "setp.eq.u32 complete, 0, 0;")
substitution(
    "mbarrier wait on the other parity",
    HANG_OR_EARLY,
    WAIT,
    r"{ .reg .b32 other; xor.b32 other, \2, 1; mbarrier.try_wait.parity.shared::cta.b64 complete, [\1], other; }",
)
substitution("mbarrier wait weakened to relaxed", ORDER, r"try_wait\.parity\.shared", "try_wait.parity.relaxed.cta.shared")
dropped("mbarrier arrive dropped", ("deadlock",), r"mbarrier\.arrive\.shared")
substitution("mbarrier arrive twice", HANG_OR_EARLY, ARRIVE, r"\g<0> \g<0>")
substitution("mbarrier arrive weakened to relaxed", ("race", "mbarrier"), r"mbarrier\.arrive\.shared", "mbarrier.arrive.relaxed.cta.shared")
substitution("expect_tx dropped", ("race", "mbarrier", "deadlock"), EXPECT, r"mbarrier.arrive.shared::cta.b64 _, [\1];")
substitution("expect_tx of 16 bytes more", ("deadlock", "mbarrier"), EXPECT,
             r"{ .reg .b32 more; add.u32 more, \2, 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, [\1], more; }")  # fmt: skip
substitution("expect_tx of 16 bytes less", ("deadlock", "mbarrier", "race"), EXPECT,
             r"{ .reg .b32 less; sub.u32 less, \2, 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, [\1], less; }")  # fmt: skip
dropped("mbarrier.init dropped", ("uninitialized", "mbarrier"), r"mbarrier\.init")
substitution("mbarrier.init with one arrival more", ("deadlock",), INIT,
             r"{ .reg .b32 more; add.u32 more, \2, 1; mbarrier.init.shared::cta.b64 [\1], more; }")  # fmt: skip


@rule("mbarrier.init with one arrival less", *HANG_OR_EARLY, "uninitialized")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(INIT):
        count = text.constant(found[2])
        if count is not None and count > 1:
            less = f"{{ .reg .b32 less; mov.u32 less, {count - 1}; mbarrier.init.shared::cta.b64 [{found[1]}], less; }}"
            yield Edit(index, {index: less})


@rule("mbarrier arrive by every lane", "mbarrier", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, _ in text.find(ARRIVE):
        branch = text.before(r"^\s*@!?%p\d+ bra", index, 9)
        if branch is not None:
            yield Edit(index, {branch: ""})


@rule("bar.warp.sync after the arrival that it orders", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"^\s*bar\.warp\.sync[^;]*;"):
        if next(text.find(ARRIVE, index, 12), None) is None:
            continue
        label = next(text.find(r"^\$L\w+:", index, 16), None)
        if label is not None:
            yield Edit(index, {index: "", label[0]: f"{text.lines[label[0]]} {found[0].strip()}"})


# --- rings, phases, sequences -----------------------------------------------------------------------------------------


def _ring_steps(text: Listing) -> Iterator[tuple[int, re.Match[str], str]]:
    """(line, match of `slot == slots`, predicate) of each ring advance."""
    for index, found in text.find(r"^\s*setp\.eq\.s32\s+(%p\d+), (%r\d+), ([2-9]);"):
        if any(True for _ in text.find(rf"selp\.b32\s+%r\d+, 0, {found[2]}, {found[1]};", index, 4)):
            yield index, found, found[1]


@rule("ring one slot too long", "mbarrier", "race", "deadlock", "uninitialized", "out_of_bounds")
def _(text: Listing) -> Iterator[Edit]:
    for index, found, predicate in _ring_steps(text):
        yield Edit(index, {index: f"setp.eq.s32 {predicate}, {found[2]}, {int(found[3]) + 1};"})


@rule("ring one slot too short", "mbarrier", "race", "deadlock", "uninitialized")
def _(text: Listing) -> Iterator[Edit]:
    for index, found, predicate in _ring_steps(text):
        yield Edit(index, {index: f"setp.eq.s32 {predicate}, {found[2]}, {int(found[3]) - 1};"})


@rule("parity kept when the ring wraps", *HANG_OR_EARLY)
def _(text: Listing) -> Iterator[Edit]:
    for index, _, predicate in _ring_steps(text):
        for place, flag in text.find(rf"selp\.u32\s+(%r\d+), 1, 0, {predicate};", index, 5):
            for at, flip in text.find(rf"xor\.b32\s+(%r\d+), (%r\d+), {flag[1]};", place, 3):
                yield Edit(at, {at: f"mov.b32 {flip[1]}, {flip[2]};"})


@rule("phase bit not flipped", *HANG_OR_EARLY)
def _(text: Listing) -> Iterator[Edit]:
    for index, _ in text.find(r"^\s*xor\.b32\s+(%r\d+), \1, 1;"):
        yield Edit(index, {index: ""})


@rule("exchange keeps to one buffer", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"^\s*and\.b32\s+(%r\d+), (%r\d+), 1;"):
        # Buffer numbers go into an address, a few lines on; parities go into a wait.
        if any(True for _ in text.find(r"shl\.b32\s+%r\d+, %r\d+, 7;", index, 6)):
            yield Edit(index, {index: f"mov.b32 {found[1]}, 0;"})


# --- fences -----------------------------------------------------------------------------------------------------------

PROXY = r"^\s*fence\.proxy\.async[.\w:]*;"

dropped("fence.proxy.async dropped", ("proxy_fence", "race"), r"fence\.proxy\.async")
substitution("fence.proxy.async weakened to fence.acq_rel", ("proxy_fence", "race"), PROXY, "fence.acq_rel.cta;")
dropped("fence.mbarrier_init dropped", ("mbarrier", "proxy_fence", "race"), r"fence\.mbarrier_init")
substitution("atomic weakened to relaxed", ORDER, r"\batom\.acq_rel\b", "atom.relaxed")


@rule("fence.proxy.async after the barrier that publishes the data", "proxy_fence", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(PROXY):
        after = next(text.find(rf"{ARRIVE}|{BAR}", index + 1, 14), None)
        if after is not None:
            yield Edit(index, {index: "", after[0]: f"{text.lines[after[0]]} {found[0].strip()}"})


# --- bulk copies ------------------------------------------------------------------------------------------------------

dropped("bulk commit dropped", UNFINISHED, r"cp\.async\.bulk\.commit_group")
dropped("bulk wait dropped", UNFINISHED, r"cp\.async\.bulk\.wait_group")
substitution("bulk wait leaves one group in flight", UNFINISHED, r"(cp\.async\.bulk\.wait_group[.\w]*) 0;", r"\1 1;")


@rule("copy lands 1,024 bytes further", *WRONG_DATA)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\S* \[(%r\d+)\]"):
        yield Edit(index, {index: text.lines[index].replace(f"[{found[1]}]", f"[{found[1]}+1024]", 1)})


@rule("copy of the neighbouring rows", *WRONG_DATA)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(cp\.async\.bulk\.tensor\.5d\.shared\S*) (\[\S+\]), \[(%rd\d+), \{ (%r\d+), (%r\d+), (.*)"):
        operation, target, tensor_map, first, second, rest = found.groups()
        yield Edit(
            index,
            {index: f"{{ .reg .b32 row; add.u32 row, {second}, 1; {operation} {target}, [{tensor_map}, {{ {first}, row, {rest} }}"},
        )


# --- wgmma ------------------------------------------------------------------------------------------------------------

IN_FLIGHT = ("wgmma_in_flight",)

dropped("wgmma.fence dropped", IN_FLIGHT, r"wgmma\.fence")
dropped("wgmma.commit_group dropped", ("wgmma_in_flight", "race"), r"wgmma\.commit_group")
dropped("wgmma.wait_group dropped", ("wgmma_in_flight", "race"), r"wgmma\.wait_group")


@rule("wgmma.wait_group leaves one group more in flight", "wgmma_in_flight", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"wgmma\.wait_group\.sync\.aligned (\d+);"):
        yield Edit(index, {index: f"wgmma.wait_group.sync.aligned {int(found[1]) + 1};"})


@rule("wgmma.wait_group after the slot is released", "wgmma_in_flight", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"^\s*wgmma\.wait_group[^;]*;"):
        if next(text.find(ARRIVE, index, 12), None) is None:
            continue
        label = next(text.find(r"^\$L\w+:", index, 16), None)
        if label is not None:
            yield Edit(index, {index: "", label[0]: f"{text.lines[label[0]]} {found[0].strip()}"})


@rule("wgmma operand with the other transposition", *WRONG_DATA)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(wgmma\.mma_async.*), (\d), (\d);"):
        yield Edit(index, {index: f"{found[1]}, {1 - int(found[2])}, {found[3]};"})


# --- tcgen05 ----------------------------------------------------------------------------------------------------------

T_FENCE = ("tcgen05_fence",)
T_ORDER = ("race", "tcgen05_fence")

dropped("tcgen05.fence::before_thread_sync dropped", T_FENCE, r"tcgen05\.fence::before")
dropped("tcgen05.fence::after_thread_sync dropped", T_FENCE, r"tcgen05\.fence::after")
dropped("tcgen05.wait::ld dropped", T_ORDER, r"tcgen05\.wait::ld")
dropped("tcgen05.wait::st dropped", T_ORDER, r"tcgen05\.wait::st")
substitution("tcgen05.wait::st for the loads only", T_ORDER, r"tcgen05\.wait::st", "tcgen05.wait::ld")
dropped("tcgen05.commit dropped", ("deadlock",), r"tcgen05\.commit")
dropped("tcgen05.dealloc dropped", ("tmem_allocation",), r"tcgen05\.dealloc")


@rule("tcgen05.wait::ld after the signal that it orders", *T_ORDER)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"^\s*tcgen05\.wait::ld[^;]*;"):
        after = next(text.find(BAR, index, 14), None)
        if after is not None:
            yield Edit(index, {index: "", after[0]: f"{text.lines[after[0]]} {found[0].strip()}"})


@rule("tcgen05.commit before the last MMA that it reports", "race")
def _(text: Listing) -> Iterator[Edit]:
    for index, _ in text.find(r"^\s*tcgen05\.commit"):
        mma = text.before(r"^\s*tcgen05\.mma", index, 10)
        if mma is None or "accumulate" not in text.lines[mma - 1]:
            continue
        block = f"{{ .reg .pred accumulate; {text.lines[mma - 1].strip()} {text.lines[mma].strip()} }}"
        yield Edit(index, {mma: "", index: f"{text.lines[index]} {block}"})


@rule("tcgen05.alloc of half the columns", "tmem_allocation")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(tcgen05\.alloc\S* \[\S+\]), (\S+);"):
        columns = text.constant(found[2])
        if columns is not None and columns > 32:
            yield Edit(index, {index: f"{found[1]}, {columns // 2};"})


@rule("tcgen05.dealloc of half the columns", "tmem_allocation")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(tcgen05\.dealloc\S* \S+), (\S+);"):
        columns = text.constant(found[2])
        if columns is not None and columns > 32:
            yield Edit(index, {index: f"{found[1]}, {columns // 2};"})


@rule("tensor memory read in the next warp's lanes", "tmem_lane")
def _(text: Listing) -> Iterator[Edit]:
    for index, _ in text.find(r"tcgen05\.ld\.sync"):
        yield Edit(index, {index: re.sub(r"\[(%r\d+)(\+\d+)?\]", rf"[\1+{32 << 16}]", text.lines[index])})


@rule("tensor memory written one column further", *WRONG_DATA, "tmem_allocation")
def _(text: Listing) -> Iterator[Edit]:
    for index, _ in text.find(r"tcgen05\.st\.sync"):
        yield Edit(index, {index: re.sub(r"\[(%r\d+)\]", r"[\1+1]", text.lines[index])})


@rule("first MMA adds to what is there", "uninitialized", "value")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"setp\.ne\.b32 accumulate, (\S+), 0;"):
        if text.constant(found[1]) == 0 or text.before(rf"selp\.u32\s+{re.escape(found[1])},", index, 60) is not None:
            yield Edit(index, {index: "setp.eq.u32 accumulate, 0, 0;"})


@rule("later MMA does not add", "value")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"setp\.ne\.b32 accumulate, (\S+), 0;"):
        if text.constant(found[1]) == 1:
            yield Edit(index, {index: "setp.ne.u32 accumulate, 0, 0;"})


# --- descriptors ------------------------------------------------------------------------------------------------------


def _descriptors(text: Listing) -> Iterator[tuple[int, re.Match[str], int]]:
    """Matrix descriptors: constants with a swizzle mode in their top bits that are or-ed to an address."""
    for index, found in text.find(r"^\s*or\.b64\s+(%rd\d+), (%rd\d+), (\d{19});"):
        yield index, found, int(found[3])


def _descriptor_rule(name: str, kinds: tuple[str, ...], change: Callable[[int], int]) -> None:
    @rule(name, *kinds)
    def edits(text: Listing) -> Iterator[Edit]:
        for index, found, value in _descriptors(text):
            yield Edit(index, {index: f"or.b64 {found[1]}, {found[2]}, {change(value)};"})


_descriptor_rule("descriptor without swizzle", WRONG_DATA, lambda value: value & ~(7 << 61))
_descriptor_rule("descriptor with a 64-byte swizzle", WRONG_DATA, lambda value: value & ~(7 << 61) | 4 << 61)
_descriptor_rule("descriptor with double stride", WRONG_DATA, lambda value: value & ~(0x3FFF << 32) | (value >> 32 & 0x3FFF) * 2 << 32)


@rule("instruction descriptor with the other major mode of B", *WRONG_DATA)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(tcgen05\.mma\S* \[\S+\], \S+, \S+), (%r\d+), accumulate;"):
        value = text.constant(found[2])
        if value is not None:
            yield Edit(index, {index: f"{{ .reg .b32 other; mov.b32 other, {value ^ 1 << 16}; {found[1]}, other, accumulate; }}"})


@rule("instruction descriptor with f16 for bf16", "value", "refused")
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(tcgen05\.mma\S* \[\S+\], \S+, \S+), (%r\d+), accumulate;"):
        value = text.constant(found[2])
        if value is not None:
            yield Edit(index, {index: f"{{ .reg .b32 other; mov.b32 other, {value ^ 0x480}; {found[1]}, other, accumulate; }}"})


substitution("stmatrix without .trans", ("value",), r"(stmatrix\.sync\.aligned\.m8n8\.x\d)\.trans", r"\1")


@rule("shared memory written 16 bytes further", *WRONG_DATA)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"(st\.shared\S*\s+)\[(%rd\d+)(?:\+(\d+))?\]"):
        place = f"{found[1]}[{found[2]}+{int(found[3] or 0) + 16}]"
        yield Edit(index, {index: text.lines[index].replace(found[0], place, 1)})


# --- plain loads, stores and arithmetic -------------------------------------------------------------------------------

LOST = ("value", "uninitialized")
"""What nothing writes any more is read."""

dropped("store dropped", LOST, r"st\.(shared|global)", plain=True)
dropped("load dropped", LOST, r"ld\.(shared|global)", plain=True)
dropped("instruction dropped", (*WRONG_DATA, "misaligned", "deadlock", "barrier", "mbarrier", "tmem_allocation", "tmem_lane"),
        r"(add|sub|mul|mad|fma|max|shl|shr|and|or|xor|bfi|cvt|cvta|mov|neg|setp|selp|ex2|rcp|ld\.param)\.", plain=True)  # fmt: skip
substitution("comparison the other way round", (*WRONG_DATA, "deadlock", "barrier", "tmem_allocation"), r"\bsetp\.(eq|ne)\.",
             lambda found: "setp.ne." if found[1] == "eq" else "setp.eq.", plain=True)  # fmt: skip
substitution("mask of one bit less", (*WRONG_DATA, "deadlock", "barrier"), r"(and\.b32\s+%r\d+, %r\d+, )(128|127|63|31|1);",
             lambda found: f"{found[1]}{int(found[2]) >> 1};", plain=True)  # fmt: skip
substitution("shift by one place more", (*WRONG_DATA, "deadlock", "barrier", "misaligned"), r"(sh[lr]\.[bu]\d+\s+\S+ \S+ )(\d+);",
             lambda found: f"{found[1]}{int(found[2]) + 1};", plain=True)  # fmt: skip
substitution("minimum for maximum", ("value",), r"\bmax\.", "min.", plain=True)
substitution("difference for sum", ("value",), r"\badd(\.rn)?(\.ftz)?\.f32\b", r"sub\1\2.f32", plain=True)
substitution("sum for product", ("value",), r"\bmul(\.rn)?(\.ftz)?\.f32\b", r"add\1\2.f32", plain=True)
substitution("branch on the other condition", ("value", "deadlock", "race", "uninitialized", "out_of_bounds", "barrier", "tmem_allocation"),
             r"^(\s*)@(%p\d+) bra", r"\1@!\2 bra", plain=True)  # fmt: skip
substitution("counter moves on by two", (*WRONG_DATA, "deadlock"), r"add\.s32(\s+)(%r\d+), \2, 1;", r"add.s32\1\2, \2, 2;", plain=True)


@rule("memory read or written one element further", *WRONG_DATA, "misaligned", plain=True)
def _(text: Listing) -> Iterator[Edit]:
    for index, found in text.find(r"((?:ld|st)\.(?:shared|global)(\S*)\s+.*)\[(%rd\d+)(?:\+(\d+))?\]"):
        step = 16 if ".v4" in found[2] else 8 if ".v2" in found[2] else 4
        place = f"{found[1]}[{found[3]}+{int(found[4] or 0) + step}]"
        yield Edit(index, {index: text.lines[index].replace(found[0], place, 1)})


def sites(text: Listing, plain: bool) -> int:
    """How many single changes the rules make of a listing; plain: those of plain instructions too."""
    return sum(1 for rule in RULES if plain or not rule.plain for _ in rule.edits(text))
