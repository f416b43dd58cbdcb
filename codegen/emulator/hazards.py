"""Happens-before: vector clocks, shadow memories that remember the last accesses of every byte, and the findings.

An epoch is one int64 that says who accessed a byte and when: clock (23 bits), instruction (18), strong (1), lane (5), actor (16).
Actors are warps and asynchronous operations of one CTA. A vector clock is an int64 array of *limits*: an epoch `e` of actor `a` happened
before iff e <= limits[a], so a whole warp's accesses are compared in a few vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

ACTOR_MASK = 0xFFFF
LANE_SHIFT = 16
STRONG_SHIFT = 21
STRONG = 1 << STRONG_SHIFT
CODE_SHIFT = 22
CODE_LIMIT = 1 << 18
CLOCK_SHIFT = 40
CLOCK_STEP = 1 << CLOCK_SHIFT
CLOCK_FILL = CLOCK_STEP - 1
CLOCK_LIMIT = 1 << 23

GLOBAL_PAGE_SHIFT = 16
_ACTOR = np.int64(ACTOR_MASK)


@dataclass(frozen=True)
class Access:
    """The other side of a finding."""

    line: int
    warp: str
    """Which warp or asynchronous operation, in words."""
    lane: int

    def __str__(self) -> str:
        return f"PTX line {self.line} ({self.warp}, lane {self.lane})"


@dataclass(frozen=True)
class Hazard:
    """One finding. kind is one of DESIGN section 5; line, warp and lane are where it was noticed, `other` the earlier access."""

    kind: str
    message: str
    line: int
    warp: int
    lane: int
    address: int
    other: Access | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Reporter:
    """Collects findings, each (kind, line, other line) once with a count."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int, int], Hazard] = {}
        self._count: dict[tuple[str, int, int], int] = {}

    def add(self, hazard: Hazard) -> None:
        key = (hazard.kind, hazard.line, hazard.other.line if hazard.other else 0)
        self._first.setdefault(key, hazard)
        self._count[key] = self._count.get(key, 0) + 1

    def hazards(self) -> list[Hazard]:
        result = []
        for key, hazard in self._first.items():
            count = self._count[key]
            message = hazard.message if count == 1 else f"{hazard.message} [{count} times]"
            result.append(Hazard(hazard.kind, message, hazard.line, hazard.warp, hazard.lane, hazard.address, hazard.other))
        return result


class Clock:
    """A vector clock: limits of the own CTA's actors, and of other CTAs' where a global-memory synchronisation has brought them."""

    __slots__ = ("foreign", "limits")

    def __init__(self, limits: Int64, foreign: dict[int, Int64] | None = None) -> None:
        self.limits = limits
        self.foreign = foreign

    def copy(self) -> Clock:
        return Clock(self.limits.copy(), None if self.foreign is None else dict(self.foreign))

    def join(self, other: Clock) -> None:
        """Component-wise maximum with a clock of the same CTA."""
        mine, theirs = self.limits, other.limits
        if len(mine) == len(theirs):
            np.maximum(mine, theirs, out=mine)
        elif len(mine) > len(theirs):
            part = mine[: len(theirs)]
            np.maximum(part, theirs, out=part)
        else:
            grown = theirs.copy()
            part = grown[: len(mine)]
            np.maximum(part, mine, out=part)
            self.limits = grown
        if other.foreign is not None:
            self.join_foreign(other.foreign)

    def join_foreign(self, foreign: dict[int, Int64]) -> None:
        if self.foreign is None:
            self.foreign = {}
        for cta, limits in foreign.items():
            known = self.foreign.get(cta)
            if known is None:
                self.foreign[cta] = limits
            elif known is not limits:
                self.foreign[cta] = _maximum(known, limits)


def _maximum(a: Int64, b: Int64) -> Int64:
    if len(a) < len(b):
        a, b = b, a
    result = a.copy()
    np.maximum(result[: len(b)], b, out=result[: len(b)])
    return result


class Shadow:
    """Last accesses of a memory that one CTA's actors share, at a granule that starts coarse and is refined to the narrowest access.

    write [granules]: epoch of the last weak write, 0 when there is none; strong: the same of strong writes, once there are any.
    read [granules, columns]: last read of each reading actor, strong reads in columns of their own.
    """

    def __init__(self, size: int, granule_shift: int, columns: int = 8) -> None:
        self.shift = granule_shift
        count = -(-size >> granule_shift) if granule_shift else size
        self.write: Int64 = np.zeros(count, np.int64)
        self.strong: Int64 | None = None
        self.read: Int64 = np.zeros((count, columns), np.int64)
        self.column_of: dict[tuple[int, bool], int] = {}
        self.column_actors: Int64 = np.zeros(columns, np.int64)

    def column(self, actor: int, strong: bool = False) -> int:
        """The read column of an actor, made on first use. It may reallocate `read`."""
        found = self.column_of.get((actor, strong))
        if found is None:
            found = len(self.column_of)
            if found == self.read.shape[1]:
                self.read = np.concatenate([self.read, np.zeros_like(self.read)], axis=1)
                self.column_actors = np.concatenate([self.column_actors, np.zeros_like(self.column_actors)])
            self.column_of[actor, strong] = found
            self.column_actors[found] = actor
        return found

    def refine(self, granule_shift: int) -> None:
        """Make the granule at most 2^granule_shift bytes."""
        if granule_shift < self.shift:
            factor = 1 << (self.shift - granule_shift)
            self.write = np.repeat(self.write, factor)
            if self.strong is not None:
                self.strong = np.repeat(self.strong, factor)
            self.read = np.repeat(self.read, factor, axis=0)
            self.shift = granule_shift

    def _writes(self, index: Any, limits: Int64, strong: bool) -> tuple[NDArray[np.bool_], Int64, Int64]:
        """(granules whose last write is unordered, that write, the last write of either kind)."""
        last = self.write[index]
        bad = last > limits[last & _ACTOR]
        if self.strong is None:
            return bad, last, last
        atomic = self.strong[index]
        either = np.maximum(last, atomic)
        if strong:
            return bad, last, either
        late = atomic > limits[atomic & _ACTOR]
        return bad | late, np.where(bad, last, atomic), either

    def read_conflict(self, index: Any, limits: Int64, strong: bool) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None, Int64]:
        """(granules whose last write is unordered, granules never written, those writes); None where there are none."""
        bad, before, either = self._writes(index, limits, strong)
        never = either == 0
        return (bad if bad.any() else None), (never if never.any() else None), before

    def write_conflict(self, index: Any, limits: Int64, strong: bool) -> tuple[NDArray[np.bool_], Int64] | None:
        """Granules with an unordered earlier access and those accesses' epochs; None when all are ordered."""
        bad, before, _ = self._writes(index, limits, strong)
        reads = self.read[index]
        unordered = reads > limits[self.column_actors]
        if strong:
            unordered &= (reads & STRONG) == 0
        if not bad.any() and not unordered.any():
            return None
        any_read = unordered.any(axis=-1)
        pick = np.take_along_axis(reads, unordered.argmax(axis=-1)[..., None], axis=-1)[..., 0]
        return bad | any_read, np.where(bad, before, pick)

    def note_write(self, index: Any, epochs: Any, strong: bool) -> None:
        if not strong:
            self.write[index] = epochs
            return
        if self.strong is None:
            self.strong = np.zeros_like(self.write)
        self.strong[index] = epochs


class GlobalShadow:
    """Shadow of global memory, by pages of 64 KiB that exist once touched. Epochs carry the CTA beside them."""

    def __init__(self) -> None:
        self.pages: dict[int, GlobalPage] = {}

    def page(self, number: int) -> GlobalPage:
        found = self.pages.get(number)
        if found is None:
            found = self.pages[number] = GlobalPage()
        return found


class GlobalPage:
    """Accesses of one page: the last weak write, the last strong write, and readers by (CTA, actor) in four weak and two strong buckets."""

    WEAK_BUCKETS = 4
    STRONG_BUCKETS = 2

    def __init__(self) -> None:
        self.shift = 4
        self.count = 1 << (GLOBAL_PAGE_SHIFT - 4)
        self.planes: dict[str, tuple[Int64, NDArray[np.int32]]] = {}
        """"write", "strong" and "read", each (epochs, CTAs), made on first use."""

    def refine(self, shift: int) -> None:
        if shift < self.shift:
            factor = 1 << (self.shift - shift)
            self.planes = {k: (np.repeat(e, factor, axis=0), np.repeat(c, factor, axis=0)) for k, (e, c) in self.planes.items()}
            self.count *= factor
            self.shift = shift

    def _plane(self, name: str, columns: int = 0) -> tuple[Int64, NDArray[np.int32]]:
        found = self.planes.get(name)
        if found is None:
            shape: Any = (self.count, columns) if columns else self.count
            found = self.planes[name] = (np.zeros(shape, np.int64), np.zeros(shape, np.int32))
        return found

    def conflicts(self, index: Any, clock: Clock, cta: int, write: bool, strong: bool) -> list[tuple[NDArray[np.bool_], Int64, Any]]:
        """[(granules with an unordered earlier access, those accesses, their CTAs)], one item a kind of earlier access."""
        result = []
        for name in ("write",) if strong else ("write", "strong"):
            plane = self.planes.get(name)
            if plane is not None:
                last = plane[0][index]
                if last.any():
                    ctas = plane[1][index]
                    bad = unordered(last, ctas, clock, cta)
                    if bad.any():
                        result.append((bad, last, ctas))
        reads = self.planes.get("read") if write else None
        if reads is not None:
            epochs = reads[0][index]
            if epochs.any():
                ctas = reads[1][index]
                late = unordered(epochs, ctas, clock, cta)
                if strong:
                    late &= (epochs & STRONG) == 0
                if late.any():
                    pick = late.argmax(axis=-1)[..., None]
                    result.append(
                        (
                            np.asarray(late.any(axis=-1)),
                            np.take_along_axis(epochs, pick, -1)[..., 0],
                            np.take_along_axis(ctas, pick, -1)[..., 0],
                        )
                    )
        return result

    def note(self, index: Any, epoch: Any, cta: int, write: bool, strong: bool) -> None:
        """Record an access."""
        if write:
            epochs, ctas = self._plane("strong" if strong else "write")
            epochs[index] = epoch
            ctas[index] = cta
            return
        epochs, ctas = self._plane("read", self.WEAK_BUCKETS + self.STRONG_BUCKETS)
        actor = (int(np.asarray(epoch).flat[0]) & ACTOR_MASK) + 3 * cta
        bucket = self.WEAK_BUCKETS + actor % self.STRONG_BUCKETS if strong else actor % self.WEAK_BUCKETS
        epochs[index, bucket] = epoch
        ctas[index, bucket] = cta


def unordered(epochs: Int64, ctas: Any, clock: Clock, cta: int) -> NDArray[np.bool_]:
    """Which of the accesses (epoch, CTA) did not happen before `clock` of CTA number `cta`; epoch 0 is no access."""
    own = ctas == cta
    actor = epochs & _ACTOR
    limits = clock.limits
    bad: NDArray[np.bool_]
    if own.all():
        bad = epochs > limits[np.minimum(actor, len(limits) - 1)]
    else:
        bad = epochs > np.where(own, limits[np.minimum(actor, len(limits) - 1)], 0)
        foreign = clock.foreign
        if foreign:
            flat_bad, flat_cta, flat_epoch = bad.reshape(-1), np.broadcast_to(ctas, bad.shape).reshape(-1), epochs.reshape(-1)
            for place in np.nonzero(flat_bad & ~own.reshape(-1))[0]:
                known = foreign.get(int(flat_cta[place]))
                who = int(flat_epoch[place]) & ACTOR_MASK
                if known is not None and who < len(known) and flat_epoch[place] <= known[who]:
                    flat_bad[place] = False
            bad = flat_bad.reshape(bad.shape)
    return bad
