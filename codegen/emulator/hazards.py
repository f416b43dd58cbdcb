"""Happens-before: vector clocks, shadow memories that remember the last accesses of every byte, and the findings.

An epoch is one int64 that says who accessed a byte and when: clock (23 bits), instruction (18), strong (1), lane (5), actor (16).
Actors are warps, diverged lanes of a warp and asynchronous operations of one cluster. A vector clock is an int64 array of *limits*: an
epoch `e` of actor `a` happened before iff e <= limits[a], so a whole warp's accesses are compared in a few vector operations.

A clock has further planes of limits, which travel with it: what a proxy fence has made visible to the asynchronous proxy, which mbarrier
initialisations are visible to it, and which tcgen05 operations are ordered with thread synchronisation. An access that needs more than
happens-before is held against the lower of two planes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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

EVER = (1 << 62) - 1
"""The limit of an actor all of whose operations are ordered."""

# Planes of a clock.
ORDER = 0
"""Happens-before."""
SHARED_PROXY = 1
"""Generic accesses that a fence.proxy.async on the way has ordered with the asynchronous proxy in shared memory."""
GLOBAL_PROXY = 2
"""The same in global memory."""
INITS = 3
"""mbarrier.init that a fence.mbarrier_init on the way has made visible."""
TENSOR = 4
"""tcgen05 operations that a tcgen05.fence::before_thread_sync or a commit has ordered with the synchronisation that follows."""
PLANES = 5

GLOBAL_PAGE_SHIFT = 16
_ACTOR = np.array(ACTOR_MASK, np.int64)


@dataclass(frozen=True)
class Access:
    """The other side of a finding."""

    line: int
    warp: str
    """Which warp or asynchronous operation, in words."""
    lane: int
    source: str = ""
    """file:line of the source, where the PTX has line information."""

    def __str__(self) -> str:
        return f"PTX line {self.line}" + (f", {self.source}" if self.source else "") + f" ({self.warp}, lane {self.lane})"


@dataclass(frozen=True)
class Hazard:
    """One finding. kind is one of those docs/checks.md lists; line, warp and lane are where it was noticed, `other` the earlier access."""

    kind: str
    message: str
    line: int
    warp: int
    lane: int
    address: int
    other: Access | None = None
    place: str = ""
    """The address in words: region, offset, and the name of what lies there."""
    missing: str = ""
    """What would have ordered or allowed the access."""
    source: str = ""
    """file:line of the source, where the PTX has line information."""
    count: int = 1
    """How often it was found."""
    cta: int = 0
    """The CTA that the warp is one of."""
    who: str = ""
    """The warp in words, with its CTA where there are several."""

    def __str__(self) -> str:
        times = f" [{self.count} times]" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{times}"

    def report(self) -> str:
        """The finding in one line, then, indented, both accesses and what is missing, as far as known."""
        lines = [str(self)]
        here = Access(self.line, self.who or f"warp {self.warp}", self.lane, self.source)
        lines.append(f"    at     {here}" + (f": {self.place}" if self.place else ""))
        if self.other is not None:
            lines.append(f"    after  {self.other}")
        if self.missing:
            lines.append(f"    needs  {self.missing}")
        return "\n".join(lines)

    def at_sources(self, lines: Mapping[int, str]) -> Hazard:
        """The finding with file:line for the PTX lines that `lines` knows."""
        other = self.other and replace(self.other, source=lines.get(self.other.line, self.other.source))
        return replace(self, source=lines.get(self.line, self.source), other=other)

    def as_json(self) -> dict[str, Any]:
        """The finding as plain values, for json.dumps."""
        return asdict(self)


class Reporter:
    """Collects findings, each kind at a pair of lines once with a count."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int, int], Hazard] = {}
        self._count: dict[tuple[str, int, int], int] = {}

    def add(self, hazard: Hazard) -> None:
        # Which of two unordered accesses came first is chance: they are one finding.
        lines = sorted((hazard.line, hazard.other.line if hazard.other else 0))
        key = (hazard.kind, lines[0], lines[1])
        self._first.setdefault(key, hazard)
        self._count[key] = self._count.get(key, 0) + 1

    def hazards(self) -> list[Hazard]:
        result = []
        for key, hazard in self._first.items():
            result.append(replace(hazard, count=self._count[key]))
        return result


class Clock:
    """A vector clock: limits of the own cluster's actors, and of other clusters' where a global-memory synchronisation has brought them.

    table [planes, actors]; limits is its first plane. lanes: (plane, actor) to {lane mask: limit} for what only some lanes of an actor
    have released. foreign: cluster to its clock. Inner dictionaries and foreign clocks are replaced, never changed: copies share them.
    """

    __slots__ = ("foreign", "lanes", "limits", "table")

    def __init__(
        self, table: Int64, foreign: dict[int, Clock] | None = None, lanes: dict[tuple[int, int], dict[int, int]] | None = None
    ) -> None:
        self.table = table
        self.limits: Int64 = table[ORDER]
        self.foreign = foreign
        self.lanes = lanes

    def copy(self) -> Clock:
        return Clock(self.table.copy(), self.foreign and dict(self.foreign), self.lanes and dict(self.lanes))

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` actors."""
        if capacity > self.table.shape[1]:
            grown = np.zeros((PLANES, capacity), np.int64)
            grown[:, : self.table.shape[1]] = self.table
            self.table = grown
            self.limits = grown[ORDER]

    def join(self, other: Clock) -> None:
        """Component-wise maximum with a clock of the same cluster."""
        mine, theirs = self.table, other.table
        if mine.shape[1] < theirs.shape[1]:
            self.grow(theirs.shape[1])
            mine = self.table
        if mine.shape[1] > theirs.shape[1]:
            mine = mine[:, : theirs.shape[1]]
        np.maximum(mine, theirs, out=mine)
        if other.lanes:
            known = self.lanes or {}
            for key, masks in other.lanes.items():
                # Clocks that have met before mostly share these.
                if known.get(key) is masks:
                    continue
                for bits, limit in masks.items():
                    self.note_lanes(*key, bits, limit)
                if self.lanes is not None and self.lanes.get(key) == masks:
                    self.lanes[key] = masks
        if other.foreign is not None:
            self.join_foreign(other.foreign)

    def note_lanes(self, plane: int, actor: int, bits: int, limit: int) -> None:
        """What these lanes of an actor did up to `limit` is ordered in the sense of `plane`."""
        if actor < self.table.shape[1] and self.table.item(plane, actor) >= limit:
            return
        if self.lanes is None:
            self.lanes = {}
        known = self.lanes.get((plane, actor))
        if known is None:
            self.lanes[plane, actor] = {bits: limit}
        elif known.get(bits, -1) < limit:
            floor = int(self.table[plane, actor]) if actor < self.table.shape[1] else 0
            self.lanes[plane, actor] = {b: v for b, v in known.items() if v > floor} | {bits: limit}

    def join_foreign(self, foreign: dict[int, Clock]) -> None:
        if self.foreign is None:
            self.foreign = {}
        for cluster, clock in foreign.items():
            known = self.foreign.get(cluster)
            if known is None:
                self.foreign[cluster] = clock
            elif known is not clock:
                joined = known.copy()
                joined.join(clock)
                self.foreign[cluster] = joined

    def fence(self, plane: int) -> None:
        """Note that everything before now is ordered in the sense of `plane` too."""
        np.maximum(self.table[plane], self.limits, out=self.table[plane])
        if self.lanes:
            for (of, actor), masks in list(self.lanes.items()):
                if of == ORDER:
                    for bits, limit in masks.items():
                        self.note_lanes(plane, actor, bits, limit)
        if self.foreign and plane == GLOBAL_PROXY:
            fenced = {}
            for cluster, clock in self.foreign.items():
                fenced[cluster] = clock.copy()
                fenced[cluster].fence(plane)
            self.foreign = fenced

    def lower(self, plane: int, floor: Int64) -> Int64:
        """Limits of what happened before and is ordered in the sense of `plane`, which actors with a floor of EVER need not be."""
        limits = self.limits
        result: Int64 = np.minimum(limits, np.maximum(self.table[plane], floor[: len(limits)]))
        return result

    def covers(self, plane: int, epochs: Int64) -> NDArray[np.bool_]:
        """Which accesses are ordered in the sense of `plane`: the whole answer, lanes included, for the few that limits alone refuse."""
        actors = epochs & _ACTOR
        row = self.table[plane]
        result: NDArray[np.bool_] = np.where(actors < len(row), epochs <= row[np.minimum(actors, len(row) - 1)], epochs == 0)
        if self.lanes:
            lane = epochs >> LANE_SHIFT & 31
            for (of, actor), masks in self.lanes.items():
                if of == plane:
                    for bits, limit in masks.items():
                        result |= (actors == actor) & (np.int64(bits) >> lane & 1).astype(np.bool_) & (epochs <= limit)
        return result


_REGION = 9
"""Bytes of a region of a shadow, as a power of two."""
_COLUMN_REGION = 4
"""Columns of one."""


class Shadow:
    """Last accesses of a memory that one CTA's actors share, at a granule that starts coarse and is refined to the narrowest access.

    write [granules]: epoch of the last weak write, 0 when there is none; strong: the same of strong writes, once there are any.
    reads [readers, granules]: last read of each reading actor, strong reads in rows of their own.
    newest [readers, regions]: a limit that covers all the reads of a region, so that most readers need no look at their reads.
    """

    def __init__(self, size: int, granule_shift: int, columns: int = 0) -> None:
        """columns: granules in a row of a two-dimensional memory, whose regions are columns; 0 for one that goes on and on."""
        self.shift = granule_shift
        self._columns = columns
        self._regions = columns >> _COLUMN_REGION if columns else (size >> _REGION) + 1
        count = -(-size >> granule_shift) if granule_shift else size
        self.write: Int64 = np.zeros(count, np.int64)
        self.strong: Int64 | None = None
        self._row_of: dict[tuple[int, bool], int] = {}
        self._make_room(16)

    def _make_room(self, readers: int) -> None:
        # Rows that nobody uses cost no memory: the system gives zeroed pages when they are first touched.
        used = len(self._row_of)
        table: Int64 = np.zeros((readers, len(self.write)), np.int64)
        newest: Int64 = np.zeros((readers, self._regions), np.int64)
        actors: Int64 = np.zeros(readers, np.int64)
        if used:
            table[:used], newest[:used], actors[:used] = self.reads, self.newest, self.readers
        self._table, self._newest, self._actors = table, newest, actors
        self._show(used)

    def _show(self, used: int) -> None:
        self.reads: Int64 = self._table[:used]
        self.newest: Int64 = self._newest[:used]
        self.readers: Int64 = self._actors[:used]
        """The actor of each reader."""

    def _region(self, index: Any) -> slice:
        """The regions that granules lie in, or those between them too."""
        if isinstance(index, slice):
            if self._columns:
                return slice(0, self._regions)
            low, high = index.start, index.stop - 1
        else:
            flat = index & (self._columns - 1) if self._columns else index
            if not flat.size:
                return slice(0, 0)  # an access all of which was out of bounds
            low, high = int(flat.min()), int(flat.max())
        return self.region(low, high)

    def region(self, low: int, high: int) -> slice:
        """The regions from one granule (or column) to another."""
        shift = _COLUMN_REGION if self._columns else _REGION - self.shift
        return slice(low >> shift, (high >> shift) + 1)

    def note_read(self, index: Any, epochs: Any, actor: int, strong: bool = False) -> None:
        """Record reads by one actor at one time, by whatever lanes."""
        some = np.asarray(epochs)
        self.reading(actor, self._region(index), int(some.flat[0]) if some.size else 0, strong)[index] = epochs

    def reading(self, actor: int, region: slice, epoch: int, strong: bool = False) -> Int64:
        """The reads of an actor [granules], to note those of `epoch` (of any lane) in `region` in. It may reallocate `reads`."""
        row = self._row_of.get((actor, strong))
        if row is None:
            row = len(self._row_of)
            if row == len(self._table):
                self._make_room(2 * row)
            self._row_of[actor, strong] = row
            self._show(row + 1)
            self.readers[row] = actor
        self.newest[row, region] = epoch | CLOCK_FILL  # the time of an actor only goes on
        result: Int64 = self.reads[row]
        return result

    def late(self, region: slice, limits: Int64) -> list[int]:
        """Readers that may have reads in the region which the limits do not cover."""
        newest = np.maximum.reduce(self.newest[:, region], axis=1, initial=0)
        result: list[int] = (newest > limits[self.readers]).nonzero()[0].tolist()
        return result

    def refine(self, granule_shift: int) -> None:
        """Make the granule at most 2^granule_shift bytes."""
        if granule_shift < self.shift:
            factor = 1 << (self.shift - granule_shift)
            self.write = np.repeat(self.write, factor)
            if self.strong is not None:
                self.strong = np.repeat(self.strong, factor)
            used = self.reads
            self._table = np.zeros((len(self._table), len(self.write)), np.int64)
            self._table[: len(used)] = np.repeat(used, factor, axis=1)
            self._show(len(used))
            self.shift = granule_shift

    def conflicts(
        self, index: Any, limits: Int64, write: bool, strong: bool, write_limits: Int64 | None = None
    ) -> tuple[list[tuple[NDArray[np.bool_], Int64]], Int64]:
        """([(granules with an earlier access that the limits do not cover, that access)], each granule's last write).

        One item a kind of earlier access. write_limits: limits for the earlier writes where they have to be ordered by more than reads.
        """
        parts: list[tuple[NDArray[np.bool_], Int64]] = []
        of_writes = limits if write_limits is None else write_limits
        taken = not isinstance(index, slice)
        last: Int64 = self.write.take(index) if taken else self.write[index]
        if not covered(last, of_writes):
            bad = last > of_writes[last & _ACTOR]
            if np.count_nonzero(bad):
                parts.append((bad, last))
        if self.strong is not None:
            atomic = self.strong[index]
            if not strong:
                late = atomic > of_writes[atomic & _ACTOR]
                if np.count_nonzero(late):
                    parts.append((late, atomic))
            last = np.maximum(last, atomic)
        if write:
            for reader in self.late(self._region(index), limits):
                reads = self.reads[reader].take(index) if taken else self.reads[reader, index]
                unordered = reads > limits[self.readers[reader]]
                if strong:
                    unordered &= (reads & STRONG) == 0
                if np.count_nonzero(unordered):
                    parts.append((unordered, reads))
        return parts, last

    def note_write(self, index: Any, epochs: Any, strong: bool) -> None:
        if not strong:
            self.write[index] = epochs
            return
        if self.strong is None:
            self.strong = np.zeros_like(self.write)
        self.strong[index] = epochs


_MANY = 512
"""Accesses from which on a look at the smallest and the largest costs less than one at each."""


def covered(epochs: Int64, limits: Int64) -> bool:
    """Whether accesses are known at a glance to be covered: mostly one operation has written all of a tile. False leaves it open."""
    if epochs.size < _MANY:
        return False
    largest = epochs.max()
    return bool(largest <= limits[largest & _ACTOR] and largest == epochs.min())


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

    def conflicts(
        self, index: Any, clock: Clock, cta: int, write: bool, strong: bool, floor: Int64 | None = None
    ) -> list[tuple[NDArray[np.bool_], Int64, Any]]:
        """[(granules with an unordered earlier access, those accesses, their CTAs)], one item a kind of earlier access.

        floor: given for an access through the asynchronous proxy, which earlier accesses have to be fenced for (Clock.lower).
        """
        result = []
        for name in ("write",) if strong else ("write", "strong"):
            plane = self.planes.get(name)
            if plane is not None:
                last = plane[0][index]
                if np.count_nonzero(last):
                    ctas = plane[1][index]
                    bad = unordered(last, ctas, clock, cta, floor)
                    if np.count_nonzero(bad):
                        result.append((bad, last, ctas))
        reads = self.planes.get("read") if write else None
        if reads is not None:
            epochs = reads[0][index]
            if np.count_nonzero(epochs):
                ctas = reads[1][index]
                late = unordered(epochs, ctas, clock, cta, floor)
                if strong:
                    late &= (epochs & STRONG) == 0
                columns = np.flatnonzero(late.reshape(-1, late.shape[-1]).any(axis=0))
                result += [(late[..., c], epochs[..., c], ctas[..., c]) for c in columns.tolist()]
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


def unordered(epochs: Int64, ctas: Any, clock: Clock, cta: int, floor: Int64 | None = None) -> NDArray[np.bool_]:
    """Which accesses (epoch, cluster) are not ordered before `clock` of cluster number `cta` by its limits alone; epoch 0 is no access.

    floor: accesses have to be ordered with the asynchronous proxy in global memory too.
    """
    own = ctas == cta
    actor = epochs & _ACTOR
    limits = clock.limits if floor is None else clock.lower(GLOBAL_PROXY, floor)
    bad: NDArray[np.bool_] = epochs > np.where(own, limits[np.minimum(actor, len(limits) - 1)], 0)
    return bad
