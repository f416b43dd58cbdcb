"""Warps, CTAs, their barriers and the seeded scheduler.

A warp executes decoded instructions (callables of the warp and its register list) for a random quantum, then the scheduler draws the next
warp or completes a pending asynchronous operation. Diverged warps are a set of lane groups with their own program counters: the group
that is furthest behind runs, groups that meet merge, and `.sync` instructions hold a group until the lanes they name have come.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .cluster import Cluster, SequentialFences
from .hazards import Access, Clock, Hazard, Reporter, Shadow
from .memory import POISON32, SHARED_START, Memory, TensorMap
from .observe import Observer, landing
from .profile import Profile
from .ptx import PtxError, PtxFault
from .regions import Regions
from .schedule import Schedule

if TYPE_CHECKING:
    from .decode import Code

Array = NDArray[Any]
Bool = NDArray[np.bool_]
Step = Callable[["Warp", list[Any]], "int | None"]

# What a step returns instead of a program counter.
BLOCK = -1
"""The group waits; it continues after this instruction."""
RETRY = -2
"""The group waits; it executes this instruction again."""
SPLIT = -3
"""Warp.split = (lanes that branch, target)."""
EXIT = -4
"""Warp.split = (lanes that exit, 0)."""
YIELD = -5
"""The quantum ends after this instruction."""
PAUSE = -6
"""The quantum ends before this instruction."""
BLOCK_AHEAD = -7
"""A block of instructions that touch nothing but registers begins here."""

WARP = 32
LANES = np.arange(WARP, dtype=np.int64)
ALL = np.ones(WARP, np.bool_)
ALL.setflags(write=False)
ALL_BYTES = ALL.tobytes()
NONE_BYTES = bytes(WARP)
FULL_BITS = 0xFFFF_FFFF
NAMED_BARRIERS = 16
MAX_RESIDENT = 1024
"""CTAs that are resident at most; more are started only when the resident ones cannot go on."""
MIN_RESIDENT = 132
"""CTAs that may be resident whatever they take: one for each SM of a large chip."""
RESIDENT_BYTES = 1 << 31
"""Memory that resident CTAs beyond MIN_RESIDENT may take, as estimated."""
SHADOW_BYTES = 24
"""Bytes of shadow for a byte of shared memory, about."""
NAMED_WAITS = 32
"""Waits (of all the warps that wait at one place) that a deadlock report names at most."""
STALL_INSTRUCTIONS = 4096
"""Warp instructions without any change of memory or barriers after which polling warps are helped on."""
MBARRIER_LIMIT = (1 << 20) - 1


def bits_of(mask: Bool) -> int:
    """Lane mask as an integer, lane 0 in bit 0."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def mask_of(bits: int) -> Bool:
    """Integer lane mask as 32 booleans."""
    return np.unpackbits(np.frombuffer((bits & FULL_BITS).to_bytes(4, "little"), np.uint8), bitorder="little").astype(np.bool_)


class Track:
    """One strand of happens-before: a warp, or lanes of it that have diverged, with an actor, a clock and the epochs of its accesses."""

    __slots__ = ("actor", "alone", "bits", "clock", "epochs", "time")

    def __init__(self, actor: int, clock: Clock, bits: int, time: int = 1, alone: bool = True) -> None:
        self.actor = actor
        self.alone = alone
        """Whether no other lanes than these have used the actor: then one limit says what all its accesses so far are."""
        self.clock = clock
        """What all its lanes know. Its own limit is that of its last bar.warp.sync: what a lane did since is news to the other lanes."""
        self.bits = bits
        self.time = time
        self.epochs: Array = (LANES << hz.LANE_SHIFT) | np.int64(actor | time << hz.CLOCK_SHIFT)

    @property
    def now(self) -> int:
        """The limit that covers everything done so far."""
        return self.time << hz.CLOCK_SHIFT | hz.CLOCK_FILL

    def tick(self) -> None:
        """Begin a new epoch: accesses from here on are not covered by what was released before."""
        self.time += 1
        self.epochs += hz.CLOCK_STEP
        if self.time >= hz.CLOCK_LIMIT - 2:
            raise PtxError(f"a warp has released more than {hz.CLOCK_LIMIT} times: the checks cannot follow it (run without checks)")

    def released(self) -> Clock:
        """A copy of the clock with everything that its lanes have done."""
        result = self.clock.copy()
        note_done(result, hz.ORDER, self.actor, self.bits, self.now, self.alone)
        return result


def note_done(clock: Clock, plane: int, actor: int, bits: int, limit: int, whole: bool) -> None:
    """Add to a clock what these lanes of an actor did up to a limit; whole: nobody else did anything under that actor."""
    if whole:
        clock.grow(actor + 1)
        clock.table[plane, actor] = max(int(clock.table[plane, actor]), limit)
    else:
        clock.note_lanes(plane, actor, bits, limit)


class Group:
    """Lanes of a warp that share a program counter."""

    __slots__ = ("ahead", "bits", "blocked", "forced", "mask", "parked", "pc", "spurious", "track")

    def __init__(self, pc: int, mask: Bool, track: Track) -> None:
        self.pc = pc
        self.ahead = 0
        """Instructions from `pc` on that have been executed with their block, but not been counted yet."""
        self.track = track
        self.parked = -1
        """Phase of the mbarrier that the group has been waiting for."""
        self.mask = mask
        self.bits = bits_of(mask)
        self.blocked: tuple[Any, ...] | None = None
        self.forced = False
        self.spurious = False


class Warp:
    """One warp: registers, lane groups and its vector clock."""

    def __init__(self, cta: Cta, index: int, lanes: int) -> None:
        self.cta = cta
        self.index = index
        self.actor = cta.rank * cta.launch.warps + index
        self.name = f"warp {index}" if cta.launch.total == 1 else f"CTA {cta.index} warp {index}"
        self.mask: Bool = ALL if lanes == WARP else np.arange(WARP) < lanes
        self.main = self.actor
        """Actor of the warp while it is whole; `actor` is that of the lanes that run."""
        self.track = Track(self.actor, Clock(np.zeros((hz.PLANES, cta.cluster.capacity), np.int64)), bits_of(self.mask))
        self.tracks: dict[int, Track] = {}
        """The last strand of each actor of diverged lanes, by the lowest lane, and 32 more for each level of divergence within another."""
        self.used_by: dict[int, int] = {}
        """Lanes that have used such an actor, by the same number."""
        self.groups = [Group(0, self.mask, self.track)]
        self.group = self.groups[0]
        self.live_bits = self.group.bits
        self.split: tuple[Bool, int] = (ALL, 0)
        self.done = False
        self.ready = False
        self.executed = 0
        """Instructions of all its turns."""
        self.paused = False
        """Stopped before an event of an exploration."""
        self.R: list[Any] = []
        self.banks: dict[int, Array] = {}
        """Registers by their bits, [registers, lanes]."""
        self.tables: list[Array] = []
        """The banks of registers seen as one type each, [registers, lanes]."""
        self.B16: Array
        self.B32: Array
        self.B64: Array
        self.local: NDArray[np.uint8] | None = None
        self.local_written: Bool | None = None
        """Bytes of local memory that have been written, of each lane; only with checks."""
        self.unwritten: dict[tuple[int, int], int] = {}
        """Lanes in which a register that may be read before it is written has not been written."""
        # Happens-before: the strand of the lanes that run.
        self.clock = self.track.clock
        self.epochs = self.track.epochs
        self.fence_clocks: list[Clock | None] = [None, None, None]
        """The clock at the last fence of at least each scope: CTA, cluster, device."""
        self.acquired: list[Clock | None] = [None, None, None]
        """What relaxed reads have seen released, by how far away: a fence of that scope acquires it."""
        self.unsynced: Clock | None = None
        """What diverged lanes knew when they met the others again, who know it only after the next barrier of the warp."""
        self.apart: dict[tuple[int, int], tuple[int, bool]] = {}
        """What they did, likewise: (actor, lanes) to (limit, whether the actor is theirs alone)."""
        self.unsynced_bits = 0
        self.tensor_after: Array | None = None
        """Limits of the tcgen05 operations that a tcgen05.fence::after_thread_sync has ordered with those to come."""
        # Asynchronous operations of this warp, oldest first.
        self.wgmma: Any = None
        self.bulk: dict[int, Any] = {}
        self.cp_async: Any = None
        self.tmem_ops: Any = None
        self.cluster_phase: Array = np.full(WARP, -1, np.int64)
        """Phase of the cluster barrier in which each lane has arrived without having waited, or -1."""

    # ----------------------------------------------------------------------------------------------------- happens-before

    def snapshot(self) -> Clock:
        """The clock to publish at a release; a new epoch begins."""
        result = self.clock.copy()
        self._own(result, hz.ORDER)
        bits = bits_of(self.mask)
        if self.unsynced is not None and self.unsynced_bits & bits:
            result.join(self.unsynced)
            self._note_apart(result, hz.ORDER, bits)
        self.track.tick()
        return result

    def _note_apart(self, clock: Clock, plane: int, bits: int) -> None:
        """Add to a clock what these lanes did while they had diverged: of a strand's accesses those of its lanes among them."""
        for (actor, of), (limit, alone) in self.apart.items():
            if of & bits:
                note_done(clock, plane, actor, of & bits, limit, alone and not of & ~bits)

    def _own(self, clock: Clock, plane: int) -> None:
        """Add to a clock what the executing lanes themselves have done."""
        track = self.track
        bits = FULL_BITS if self.mask is ALL else bits_of(self.mask)
        if track.alone and (bits == track.bits or bits == self.live_bits):
            clock.table[plane, track.actor] = track.now
        else:
            clock.note_lanes(plane, track.actor, bits, track.now)

    def sync_lanes(self) -> None:
        """bar.warp.sync: the executing lanes' accesses are ordered with each other's (9.7.13.3)."""
        if self.unsynced is not None:
            bits = bits_of(self.mask)
            self.clock.join(self.unsynced)
            self._note_apart(self.clock, hz.ORDER, bits)
            self.apart = {(actor, of & ~bits): done for (actor, of), done in self.apart.items() if of & ~bits}
            self.unsynced_bits &= ~bits
            if not self.apart:
                self.unsynced = None
        self._own(self.clock, hz.ORDER)
        self.track.tick()

    def fence_proxy(self, *planes: int) -> None:
        """Order what the executing lanes have done or know of in the sense of the planes."""
        bits = bits_of(self.mask)
        for plane in planes:
            self.clock.fence(plane)
            self._own(self.clock, plane)
            if self.unsynced is not None and self.unsynced_bits & bits:
                self.unsynced.fence(plane)
                self._note_apart(self.clock, plane, bits)
        self.track.tick()

    def _enter(self, group: Group) -> None:
        self.group = group
        track = group.track
        if track is not self.track:
            self.track, self.actor, self.clock, self.epochs = track, track.actor, track.clock, track.epochs

    def _branch_track(self, bits: int) -> Track:
        """A strand for lanes that leave the running ones: it knows what they knew; what either does from now on is news to the other."""
        cta = self.cta
        clock = self.clock.copy()
        clock.note_lanes(hz.ORDER, self.actor, bits, self.track.now)
        self.track.tick()
        if any(not bits & ~of for _, of in self.apart):
            assert self.unsynced is not None
            clock.join(self.unsynced)
        self._note_apart(clock, hz.ORDER, bits)
        key = (bits & -bits).bit_length() - 1
        alive = {group.track.actor for group in self.groups}
        while (known := self.tracks.get(key)) is not None and known.actor in alive:
            key += WARP
        actor = cta.cluster.lane_actor(self, key)
        clock.grow(cta.cluster.capacity)
        used_by = self.used_by[key] = self.used_by.get(key, 0) | bits
        track = self.tracks[key] = Track(actor, clock, bits, known.time + 1 if known else 1, alone=used_by == bits)
        return track

    def _meet(self, group: Group, other: Group) -> None:
        """Two groups become one, without an order between what they did apart."""
        if group.track is other.track:
            return
        keep, leave = group.track, other.track
        if leave.actor == self.main or (keep.actor != self.main and other.bits.bit_count() > group.bits.bit_count()):
            keep, leave = leave, keep
        if self.unsynced is None:
            self.unsynced = leave.clock.copy()
        else:
            self.unsynced.join(leave.clock)
        self.apart[leave.actor, leave.bits] = (leave.now, leave.alone)
        self.unsynced_bits |= leave.bits
        group.track = keep

    def _left(self) -> Clock | None:
        """What the lanes that have met others again knew and did."""
        if self.unsynced is None:
            return None
        result = self.unsynced.copy()
        self._note_apart(result, hz.ORDER, FULL_BITS)
        return result

    # ------------------------------------------------------------------------------------------------------------ running

    def pick(self) -> Group | None:
        groups = self.groups
        if len(groups) == 1:
            group = groups[0]
            return None if group.blocked else group
        runnable = [g for g in groups if g.blocked is None]
        if not runnable:
            return None
        if len(runnable) > 1 and self.cta.launch.random.random() < 0.05:
            return self.cta.launch.random.choice(runnable)
        return min(runnable, key=lambda g: g.pc)

    def run(self, quantum: int) -> int:
        """Execute up to `quantum` instructions; returns how many were."""
        left = quantum
        launch = self.cta.launch
        code, steps = launch.code, launch.steps
        registers = self.R
        while left > 0:
            group = self.pick()
            if group is None:
                break
            if group.ahead:
                counted = min(left, group.ahead)
                group.ahead -= counted
                group.pc += counted
                left -= counted
                continue
            self._enter(group)
            self.mask = group.mask
            ops = steps if group.bits == FULL_BITS else code.masked
            pc = group.pc
            alone = len(self.groups) == 1
            result: int | None = None
            try:
                if alone:
                    while left > 0:
                        left -= 1
                        result = ops[pc](self, registers)
                        if result is None:
                            pc += 1
                        elif result >= 0:
                            pc = result
                        elif result == BLOCK_AHEAD:
                            block = launch.blocks[pc]
                            if not block.run(self, registers):
                                code.full[pc](self, registers)
                                pc += 1
                            elif block.length <= left:
                                left -= block.length - 1
                                pc += block.length
                            else:
                                group.ahead = block.length - 1 - left
                                pc += 1 + left
                                left = 0
                            result = None
                        else:
                            break
                else:
                    others = {g.pc for g in self.groups if g is not group}
                    behind = min((g.pc for g in self.groups if g is not group and g.blocked is None), default=1 << 60)
                    while left > 0:
                        left -= 1
                        result = ops[pc](self, registers)
                        if result is None:
                            pc += 1
                        elif result >= 0:
                            pc = result
                        else:
                            break
                        if pc in others or pc > behind:
                            break
            except PtxFault as error:
                raise PtxError(f"{code.opcodes[pc]}: {error}", code.lines[pc]) from error
            group.pc = pc
            if result is not None and result < 0:
                if result == SPLIT:
                    self._split(group)
                elif result == EXIT:
                    self._exit(group)
                elif result == BLOCK:
                    group.pc = pc + 1
                elif result == YIELD:
                    group.pc = pc + 1
                    self._merge(group)
                    break
                elif result == PAUSE:
                    break
                if self.done:
                    break
            if len(self.groups) > 1:
                self._merge(group)
        return quantum - left

    def _split(self, group: Group) -> None:
        taken, target = self.split
        rest = group.mask & ~taken
        other = Group(target, taken, group.track)
        group.mask = rest
        group.bits = bits_of(rest)
        group.pc += 1
        self.groups.append(other)
        if self.cta.check:
            apart = min(group, other, key=lambda g: g.bits.bit_count())
            apart.track = self._branch_track(apart.bits)

    def _exit(self, group: Group) -> None:
        gone = self.split[0]
        if self.cta.check:
            self.cta.left(group.track.released(), self._left())
        self.live_bits &= ~bits_of(gone)
        rest = group.mask & ~gone
        if rest.any():
            group.mask = rest
            group.bits = bits_of(rest)
            group.pc += 1
        else:
            self.groups.remove(group)
        if not self.groups:
            self.done = True
            return
        for waiting in self.groups:
            if waiting.blocked and waiting.blocked[0] == "converge":
                waiting.blocked = None
        self.cta.cluster.settle()

    def _merge(self, group: Group) -> None:
        if group not in self.groups:
            return
        for other in self.groups:
            # A group that is parked inside a barrier has arrived already: it is past its instruction and must not absorb others.
            if other is group or other.pc != group.pc or (other.blocked and other.blocked[0] != "converge") or group.blocked:
                continue
            self._meet(group, other)
            group.mask = group.mask | other.mask
            group.bits |= other.bits
            self.groups.remove(other)
            for waiting in self.groups:
                if waiting.blocked and waiting.blocked[0] == "converge":
                    waiting.blocked = None
            return

    def wake(self, group: Group) -> None:
        group.blocked = None
        self.cta.launch.make_ready(self)

    def converge(self, member_bits: int, code: Code) -> bool:
        """Whether lanes that a `.sync` instruction names are still elsewhere: the group then waits for them."""
        group = self.group
        if group.forced or not member_bits & self.live_bits & ~group.bits:
            return False
        group.blocked = ("converge", code)
        return True


class NamedBarrier:
    """bar.sync / bar.arrive state of one barrier id (9.7.13.1)."""

    def __init__(self) -> None:
        self.count = 0
        self.arrived = 0
        self.clock: Clock | None = None
        self.waiting: list[tuple[Warp, Group, Any]] = []
        self.arrivals: list[tuple[str, int, int]] = []
        self.whole = False
        self.votes: list[Bool] = []


class MBarrier:
    """An mbarrier object (9.7.13.15): phase, pending and expected arrivals, transaction bytes, and the clock of the phase under way."""

    def __init__(self, address: int, expected: int, cta: Cta) -> None:
        self.address = address
        self.expected = expected
        self.pending = expected
        self.tx = 0
        self.phase = 0
        self.cta = cta
        self.clock: Clock | None = None
        self.done: Clock | None = None
        self.waiting: list[tuple[Warp, Group]] = []
        # For the checks.
        self.init = np.int64(0)
        """Epoch of the mbarrier.init."""
        self.line = 0
        self.code: Code | None = None
        """The mbarrier.init, and its PTX line."""
        self.last: tuple[str, int] | None = None
        """Who arrived last, and its PTX line."""
        self.observers: dict[int, tuple[int, Warp, Code]] = {}
        """Actor to (clock, warp, instruction) of the waits that passed on the last completed phase."""
        self.arrivers: dict[int, tuple[int, int]] = {}
        """Warp to the phase of its last arrival, and the PTX line."""
        self.passed: dict[int, int] = {}
        """Warp to the last phase that a wait of it has passed on."""
        self.relaxed = False

    def join(self, clock: Clock | None) -> None:
        if clock is None:
            return
        if self.clock is None:
            self.clock = clock.copy()
        else:
            self.clock.join(clock)

    def settle(self) -> None:
        """Complete the phase when nothing is pending."""
        if self.pending == 0 and self.tx == 0:
            if self.observers:
                self._check_observed()
            self.phase += 1
            self.pending = self.expected
            # The accumulated clock stays: completing a later phase implies the earlier ones.
            self.done = None if self.clock is None else self.clock.copy()
            for warp, group in self.waiting:
                warp.wake(group)
            self.waiting.clear()
            self.cta.launch.progress_count += 1
            if (observer := self.cta.launch.observer) is not None:
                observer.mbarrier_phase(self)

    def _check_observed(self) -> None:
        """A phase may complete only after every wait for the one before has been seen to pass: else a wait can miss it altogether."""
        clock = self.clock
        if clock is not None and not self.relaxed:
            for actor, (time, warp, code) in self.observers.items():
                known = int(clock.limits[actor]) if actor < len(clock.limits) else 0
                # What any lane has released will do: the lanes of a warp test together.
                known = max(known, *((clock.lanes or {}).get((hz.ORDER, actor), {}).values()), 0)
                if known >> hz.CLOCK_SHIFT < time:
                    arrival = f", last by {self.last[0]} (PTX line {self.last[1]})" if self.last else ""
                    self.cta.report(
                        "mbarrier",
                        f"phase {self.phase} of the mbarrier at {self.place} completes{arrival} without waiting for "
                        f"{warp.name}, whose wait (PTX line {code.line}) for phase {self.phase - 1} could then miss it",
                        code,
                        warp,
                        0,
                        self.address,
                        None if self.last is None else Access(self.last[1], self.last[0], 0),
                        missing=f"{warp.name} passing phase {self.phase - 1} before the arrivals of phase {self.phase}",
                    )
        self.observers.clear()
        self.relaxed = False

    @property
    def place(self) -> str:
        return self.cta.launch.regions.shared(self.address)


class Pending:
    """An asynchronous operation whose effect is still to come."""

    __slots__ = ("complete", "cta", "reports")

    def __init__(self, cta: Cta, complete: Callable[[], None], reports: tuple[MBarrier, ...] = ()) -> None:
        self.cta = cta
        self.complete = complete
        self.reports = reports
        """mbarriers that it arrives at or brings bytes to."""


class Cta:
    """A thread block: shared and tensor memory, barriers, warps."""

    def __init__(self, launch: Run, index: int, ctaid: tuple[int, int, int], cluster: Cluster) -> None:
        self.launch = launch
        self.index = index
        self.ctaid = ctaid
        self.check = launch.check
        self.cluster = cluster
        self.rank = len(cluster.ctas)
        cluster.ctas.append(self)
        size = SHARED_START + launch.shared_bytes
        self.shared_end = size
        self.smem = np.full((size + 31) // 16 * 4, POISON32, np.uint32).view(np.uint8)
        self.words: dict[int, Array] = {
            1: self.smem,
            2: self.smem.view(np.uint16),
            4: self.smem.view(np.uint32),
            8: self.smem.view(np.uint64),
        }
        self.shadow = Shadow(len(self.smem), 4) if self.check else None
        self.barriers = [NamedBarrier() for _ in range(NAMED_BARRIERS)]
        self.mbarriers: dict[int, MBarrier] = {}
        self.sync_clocks: dict[int, dict[tuple[int, int, int], Clock]] = {}
        """Shared address to what has been released there, by (scope, CTA, cluster) of the release."""
        self.tmem: Any = None
        self.registers: Any = None
        self.warps = [Warp(self, i, min(WARP, launch.threads - WARP * i)) for i in range(launch.warps)]
        cluster.add_warps(self.warps)
        self.exit_clock: Clock | None = None
        """What all threads that have exited knew."""
        self.invalid: dict[int, int] = {}
        """Address of an invalidated mbarrier to the PTX line of the mbarrier.inval."""
        self.live = len(self.warps)
        self.pending = 0
        for warp in self.warps:
            launch.code.attach(warp)

    # ------------------------------------------------------------------------------------------------------------- actors

    def actor(self, key: Any, name: str, generic: bool = False) -> int:
        """The actor number of a named asynchronous engine of this CTA, made on first use. generic: it works through the generic proxy."""
        return self.cluster.actor((self.rank, key), name, generic)

    def async_slot(self, warp: Warp, name: str) -> tuple[int, int]:
        """(actor, clock) for one asynchronous operation."""
        return self.cluster.async_slot(warp, name)

    def release(self) -> None:
        """Let go of the memories: CTAs and warps refer to each other, and the collector of cycles takes its time."""
        self.shadow = self.tmem = None
        self.smem = np.zeros(0, np.uint8)
        self.words.clear()
        for warp in self.warps:
            self.launch.code.detach(warp)
            warp.local = warp.local_written = warp.wgmma = warp.tmem_ops = None

    def left(self, clock: Clock, also: Clock | None) -> None:
        """Threads exit with this clock."""
        if self.exit_clock is None:
            self.exit_clock = clock
        else:
            self.exit_clock.join(clock)
        if also is not None:
            self.exit_clock.join(also)

    # ------------------------------------------------------------------------------------------------------------- hazards

    def access_of(self, epoch: int, cluster: int | None = None) -> Access:
        """An epoch of this or another cluster in words."""
        code = (epoch >> hz.CODE_SHIFT) & (hz.CODE_LIMIT - 1)
        lines = self.launch.code.lines
        line = lines[code] if code < len(lines) else 0
        actor = epoch & hz.ACTOR_MASK
        owner = self.cluster if cluster is None else self.launch.clusters.get(cluster)
        if owner is not None and actor < len(owner.actor_names):
            name = owner.actor_names[actor]
        else:
            what = "CTA" if self.cluster.size == 1 else "cluster"
            name = f"{what} {cluster} " + (f"warp {actor}" if actor < self.cluster.size * self.launch.warps else "asynchronous operation")
        return Access(line, name, (epoch >> hz.LANE_SHIFT) & 31, self.launch.code.sources.get(line, ""))

    def report(
        self,
        kind: str,
        message: str,
        code: Code,
        warp: Warp | int,
        lane: int = 0,
        address: int = 0,
        other: Access | None = None,
        *,
        place: str = "",
        missing: str = "",
    ) -> None:
        """Add a finding. place: the address in words; missing: what would have ordered or allowed the access."""
        if not self.check and kind not in ("deadlock", "barrier"):
            return
        index, cta, who = (warp, self.index, "") if isinstance(warp, int) else (warp.index, warp.cta.index, warp.name)
        source = self.launch.code.sources.get(code.line, "")
        found = Hazard(kind, message, code.line, index, int(lane), int(address), other, place, missing, source, cta=cta, who=who)
        self.launch.reporter.add(found)

    # --------------------------------------------------------------------------------------------------------- named barriers

    def bar_arrive(self, warp: Warp, code: Code, number: int, count: int | None, wait: Any, vote: Bool | None = None) -> int | None:
        """One warp's arrival at a named barrier; `wait` is None for bar.arrive, else a callable run when the warp continues (or True)."""
        launch = self.launch
        if not 0 <= number < NAMED_BARRIERS:
            self.report("barrier", f"barrier id {number} at PTX line {code.line} is not in 0..15 ({warp.name})", code, warp)
            return None
        if count is not None and (count % WARP or count <= 0 or count > 1024):
            self.report(
                "barrier",
                f"thread count {count} of barrier {number} at PTX line {code.line} is not a multiple of 32 in 32..1024 ({warp.name})",
                code,
                warp,
            )
            count = max(WARP, -(-count // WARP) * WARP)
        bar = self.barriers[number]
        whole = count is None
        expected = WARP * self.live if count is None else count
        if not bar.arrived:
            bar.count, bar.whole = expected, whole
        elif bar.count != expected and not (whole and bar.whole):
            first = bar.arrivals[0]
            self.report(
                "barrier",
                f"barrier {number}: {warp.name} at PTX line {code.line} names {expected} threads, "
                f"but {first[0]} at PTX line {first[1]} named {bar.count} for the same generation",
                code,
                warp,
                other=Access(first[1], first[0], 0),
            )
        group = warp.group
        lanes = WARP if group.bits == warp.live_bits else group.bits.bit_count()
        if launch.check:
            for name, line, index in bar.arrivals:
                if index == warp.index and lanes == WARP:
                    self.report(
                        "barrier",
                        f"barrier {number}: {warp.name} arrives at PTX line {code.line} a second time in one generation "
                        f"(first at PTX line {line}): "
                        "the barrier completes without a warp it should wait for",
                        code,
                        warp,
                        other=Access(line, name, 0),
                    )
                    break
            clock = warp.snapshot()
            if bar.clock is None:
                bar.clock = clock
            else:
                bar.clock.join(clock)
        bar.arrivals.append((warp.name, code.line, warp.index))
        if launch.observer is not None:
            launch.observer.barrier_arrive(warp, number, bar.count, wait is not None)
        bar.arrived += lanes
        if vote is not None:
            bar.votes.append(vote)
        launch.progress_count += 1
        if bar.arrived > bar.count:
            self.report(
                "barrier",
                f"barrier {number} counts {bar.count} threads, but {bar.arrived} have arrived with {warp.name} at PTX line {code.line}",
                code,
                warp,
            )
        if wait is not None:
            group.blocked = ("bar", number, code)
            bar.waiting.append((warp, group, wait))
        if bar.arrived >= bar.count:
            self.bar_complete(bar)
        if wait is None:
            return None
        return None if group.blocked is None else BLOCK

    def bar_complete(self, bar: NamedBarrier) -> None:
        waiting, clock, votes = bar.waiting, bar.clock, bar.votes
        bar.waiting, bar.clock, bar.arrived, bar.arrivals, bar.votes = [], None, 0, [], []
        self.launch.barriers += 1
        if self.launch.observer is not None:
            self.launch.observer.barrier_complete(self, self.barriers.index(bar))
        for warp, group, action in waiting:
            if clock is not None:
                group.track.clock.join(clock)
            if callable(action):
                action(warp, votes)
            warp.wake(group)

    def warp_left(self, warp: Warp) -> None:
        """A warp has exited: barriers over the whole CTA count the remaining ones."""
        self.live -= 1
        for bar in self.barriers:
            if bar.arrived and bar.whole:
                bar.count = WARP * self.live
                if bar.arrived >= bar.count:
                    self.bar_complete(bar)
        self.cluster.settle()


class Run:
    """One launch under way: CTAs, scheduler, counters."""

    def __init__(
        self,
        *,
        code: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        dynamic_bytes: int,
        params: bytes,
        tensor_maps: list[TensorMap],
        memory: Memory,
        seed: int,
        check: bool,
        budget: int,
        progress: Callable[[int], None] | None,
        tensor_cores: str = "exact",
        cluster: tuple[int, int, int] = (1, 1, 1),
        observer: Observer | None = None,
        profile: Profile | None = None,
        schedule: Schedule | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.use(code)
        self.schedule = Schedule() if schedule is None else schedule
        self.regions = Regions() if regions is None else regions
        self.profile = profile
        self.observer = observer
        self.grid = grid
        self.block = block
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // WARP)
        self.total = grid[0] * grid[1] * grid[2]
        self.cluster_dims = cluster
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.cluster_grid = (grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2])
        self.shared_bytes = shared_bytes
        self.dynamic_bytes = dynamic_bytes
        self.params = np.frombuffer(bytearray(params + bytes(-len(params) % 16 + 16)), np.uint8)
        self.param_bytes = len(params)
        self.tensor_maps = tensor_maps
        self.memory = memory
        self.check = check
        self.budget = budget
        self.progress = progress
        self.tensor_cores = tensor_cores
        self.random = random.Random(seed)
        self.reporter = Reporter()
        self.instructions = 0
        self.barriers = 0
        self.progress_count = 0
        self.idle = 0
        """Warp instructions since something last made progress."""
        self.ready: list[Warp] = []
        self.pending: list[Pending] = []
        self.resident: dict[int, Cta] = {}
        self.clusters: dict[int, Cluster] = {}
        """Clusters with a CTA that has not exited."""
        self.total_clusters = self.total // self.cluster_size
        self.next_cluster = 0
        self.global_shadow = hz.GlobalShadow()
        self.fences = SequentialFences()
        self.global_sync: dict[int, dict[tuple[int, int, int], Clock]] = {}
        """Global address to what has been released there, by (scope, CTA, cluster) of the release."""
        self.stopped = False
        self.polled: dict[Warp, tuple[set[bytes], int]] = {}
        """Of warps that run while lanes wait for others: digests of where they were and what they had in their registers since memory last
        changed, and the instructions they had executed at the last of them."""
        # How eager asynchronous operations are and how long a warp runs are part of what the seed draws.
        self.eagerness = self.schedule.eagerness(self.random.choice((0.0, 0.02, 0.1, 0.4)))
        self.quantum = self.random.choice((8, 32, 128))
        self.residency = min(self.total_clusters, self.random.choice((1, 2, 4)))
        registers = 4 * self.warps * sum(bits * count for bits, count in code.counts.items())
        self.max_resident = max(
            MIN_RESIDENT, min(MAX_RESIDENT, RESIDENT_BYTES // ((SHADOW_BYTES if check else 1) * (SHARED_START + shared_bytes) + registers))
        )

    def use(self, code: Any) -> None:
        """Run this decoded entry."""
        self.code = code
        self.steps, self.blocks = code.steps()

    # ------------------------------------------------------------------------------------------------------------ services

    def make_ready(self, warp: Warp) -> None:
        if not warp.ready and not warp.done:
            warp.ready = True
            self.ready.append(warp)

    def defer(self, cta: Cta, complete: Callable[[], None], reports: tuple[MBarrier, ...] = ()) -> Pending:
        """Queue an asynchronous effect; the scheduler chooses when it happens. reports: mbarriers that it signals."""
        pending = Pending(cta, complete, reports)
        if self.observer is not None:
            pending.complete = landing(self.observer, pending)
            self.observer.deferred(pending)
        self.pending.append(pending)
        cta.pending += 1
        self.progress_count += 1
        return pending

    def finish(self, pending: Pending) -> None:
        """Make a queued effect happen now, if it has not yet."""
        if pending in self.pending:
            self.pending.remove(pending)
            pending.cta.pending -= 1
            self.progress_count += 1
            pending.complete()

    def _complete_one(self) -> None:
        place = self.random.randrange(len(self.pending))
        pending = self.pending.pop(place)
        pending.cta.pending -= 1
        self.progress_count += 1
        pending.complete()

    # ----------------------------------------------------------------------------------------------------------- scheduling

    def start_cluster(self) -> None:
        """Start the next cluster's CTAs together."""
        index = self.next_cluster
        self.next_cluster += 1
        nx, ny = self.cluster_grid[:2]
        position = (index % nx, index // nx % ny, index // (nx * ny))
        cluster = self.clusters[index] = Cluster(self, index, position)
        cx, cy, _ = self.cluster_dims
        for rank in range(self.cluster_size):
            inside = (rank % cx, rank // cx % cy, rank // (cx * cy))
            x, y, z = (p * d + i for p, d, i in zip(position, self.cluster_dims, inside, strict=True))
            number = x + self.grid[0] * (y + self.grid[1] * z)
            self.resident[number] = Cta(self, number, (x, y, z), cluster)
        for cta in cluster.ctas:
            for warp in cta.warps:
                self.make_ready(warp)

    def run(self) -> None:
        """Run the grid to its end, to a deadlock (reported) or to the end of the instruction budget (PtxError)."""
        rng = self.random
        mark = last = -1
        report_at = 1 << 14
        stall_at = hang_at = 0
        for _ in range(self.residency):
            self.start_cluster()
        ready = self.ready
        while not self.stopped:
            if not ready:
                if self.pending:
                    self._complete_one()
                    continue
                if not self.resident and self.next_cluster >= self.total_clusters:
                    return
                if self.next_cluster < self.total_clusters and len(self.resident) < self.max_resident:
                    # Nothing resident can go on: what it waits for may come from a CTA that has not started.
                    self.start_cluster()
                    continue
                if mark != self.progress_count and self._release_parked():
                    mark = self.progress_count
                    continue
                if self._force_converged():
                    continue
                self._deadlock()
                return
            if self.pending and rng.random() < self.eagerness:
                self._complete_one()
            place = self.schedule.pick(self)
            warp = ready[place]
            before = self.progress_count
            ran = warp.run(self.schedule.quantum(self, warp))
            self.instructions += ran
            warp.executed += ran
            self.idle = self.idle + ran if before == self.progress_count else 0
            if warp.done:
                self._remove(place)
                self._warp_done(warp)
            elif warp.pick() is None:
                self._remove(place)
            if self.instructions >= report_at:
                report_at = self.instructions + (1 << 14)
                if self.instructions > self.budget:
                    raise PtxError(f"the launch was stopped after {self.instructions} warp instructions, its budget is {self.budget}")
                if self.progress is not None:
                    self.progress(self.instructions)
            if self.progress_count != last:
                last = self.progress_count
                stall_at, hang_at = self.instructions + STALL_INSTRUCTIONS, self.instructions + self.budget // 20
                self.polled.clear()
            elif self.instructions >= stall_at:
                stall_at = self.instructions + STALL_INSTRUCTIONS
                self._help_spinning(self.instructions >= hang_at)

    def _help_spinning(self, hangs: bool) -> None:
        """Warps run, but nothing changes: bring on what they may be polling for, or report that they spin for good."""
        if self.pending:
            self._complete_one()
        elif self.next_cluster < self.total_clusters and len(self.resident) < self.max_resident:
            self.start_cluster()
        elif hangs:
            self._deadlock()
            self.stopped = True
        elif not self._release_parked():
            waiting = dict.fromkeys(warp for warp, group in self._groups() if group.blocked and group.blocked[0] == "converge")
            running = [w for cta in self.resident.values() for w in cta.warps if any(group.blocked is None for group in w.groups)]
            polling = {warp for warp in dict.fromkeys([*waiting, *running]) if self._polls(warp)}
            # A warp that computes may come to what the others poll for.
            if all(warp in polling for warp in running):
                self._force_converged([warp for warp in waiting if warp in polling])

    def _polls(self, warp: Warp) -> bool:
        """Whether the running lanes of a warp are where they have been since memory last changed, with the same in their registers: they
        poll. Until then they may be computing, however long, and come where the others wait for them. A warp that had no turn in between
        is where it was, whatever it does."""
        state = hashlib.blake2b(digest_size=16)
        runs = False
        for group in warp.groups:
            if group.blocked is None:
                runs = True
                state.update(f"{group.pc} {group.ahead} {group.bits}".encode())
                for bank in warp.banks.values():
                    state.update(bank[:, group.mask].tobytes())
                if warp.local is not None:
                    state.update(warp.local.tobytes())
        seen, executed = self.polled.get(warp, (set(), -1))
        repeats = state.digest() in seen and (not runs or warp.executed != executed)
        seen.add(state.digest())
        self.polled[warp] = seen, warp.executed
        return repeats

    def _remove(self, place: int) -> None:
        warp = self.ready[place]
        last = self.ready.pop()
        if last is not warp:
            self.ready[place] = last
        warp.ready = False

    def _warp_done(self, warp: Warp) -> None:
        cta = warp.cta
        self.progress_count += 1
        cta.warp_left(warp)
        if cta.live == 0:
            # Whatever is still in flight lands before the CTA's resources go.
            for pending in [p for p in self.pending if p.cta is cta]:
                self.finish(pending)
            self.code.cta_exit(cta, warp)
            del self.resident[cta.index]
            cluster = cta.cluster
            if all(c.live == 0 for c in cluster.ctas):
                del self.clusters[cluster.index]
                for gone in cluster.ctas:
                    gone.release()
                if self.next_cluster < self.total_clusters:
                    self.start_cluster()

    def _groups(self) -> list[tuple[Warp, Group]]:
        return [(w, g) for cta in self.resident.values() for w in cta.warps if not w.done for g in w.groups if g.blocked]

    def _release_parked(self) -> bool:
        """Let every parked mbarrier test return false once, as the ISA allows: a program that polls may go on elsewhere."""
        released = False
        for warp, group in self._groups():
            assert group.blocked is not None
            if group.blocked[0] == "mbarrier":
                barrier = group.blocked[1]
                barrier.waiting = [(w, g) for w, g in barrier.waiting if g is not group]
                group.spurious = True
                warp.wake(group)
                released = True
        return released

    def _force_converged(self, among: list[Warp] | None = None) -> bool:
        """Lanes that a `.sync` instruction names cannot come, in one of these warps or any: report the divergence and let the partial warp
        go on."""
        for warp, group in self._groups():
            assert group.blocked is not None
            if group.blocked[0] == "converge" and (among is None or warp in among):
                code = group.blocked[1]
                missing = warp.live_bits & ~group.bits
                elsewhere = ", ".join(f"PTX line {self.code.lines[g.pc]}" for g in warp.groups if g is not group)
                warp.cta.report(
                    "barrier",
                    f"{code.opcode} at PTX line {code.line} is executed by part of {warp.name} only "
                    f"(lanes {missing:#010x} are at {elsewhere})",
                    code,
                    warp,
                    lane=(group.bits & -group.bits).bit_length() - 1,
                )
                group.forced = True
                warp.wake(group)
                return True
        return False

    def _report_imbalance(self) -> None:
        """Report mbarriers that wait for no arrival any more, but whose bytes do not balance."""
        for warp, group in self._groups():
            assert group.blocked is not None
            if group.blocked[0] != "mbarrier":
                continue
            barrier: MBarrier = group.blocked[1]
            if barrier.pending == 0 and barrier.tx:
                line = self.code.lines[min(group.pc, len(self.code.lines) - 1)]
                owner = f" of CTA {barrier.cta.index}" if self.total > 1 else ""
                text = f"mbarrier {barrier.place}{owner}: phase {barrier.phase} has all its arrivals, but {_imbalance(barrier)}"
                source = self.code.sources.get(line, "")
                self.reporter.add(Hazard("mbarrier", text, line, warp.index, 0, 0, source=source, cta=warp.cta.index, who=warp.name))

    def _deadlock(self) -> None:
        """Report that nobody can go on: who waits, for what, and who would have to come."""
        waits: dict[tuple[Cta, int, str], list[int]] = {}
        first: tuple[Warp, Any] | None = None
        for warp, group in self._groups():
            assert group.blocked is not None
            kind, what, code = (*group.blocked, None, None)[:3]
            line = self.code.lines[min(group.pc, len(self.code.lines) - 1)]
            if kind == "bar":
                line = code.line
                text = _describe_barrier(warp.cta, what)
            elif kind == "mbarrier":
                text = _describe_mbarrier(what)
            elif kind == "cluster":
                text = _describe_cluster(what)
            else:
                text = str(what)
            if first is None:
                first = (warp, line)
            waits.setdefault((warp.cta, line, f"for {text}"), []).append(warp.index)
        for warp in self.ready:
            line = self.code.lines[min(warp.group.pc, len(self.code.lines) - 1)]
            first = first or (warp, line)
            waits.setdefault((warp.cta, line, ""), []).append(warp.index)
        if first is None:
            raise PtxError("internal: the scheduler has no runnable warp and no waiting one")
        alike: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
        for (cta, line, what), indices in waits.items():
            alike.setdefault((line, what, tuple(sorted(set(indices)))), []).append(cta.index)
        parts = []
        for (line, what, warps), ctas in alike.items():
            source = self.code.sources.get(line, "")
            one = len(warps) == len(ctas) == 1
            who = (f"{ranges('CTA', ctas)} " if self.total > 1 else "") + ranges("warp", list(warps))
            at = f"at PTX line {line}" + (f", {source}," if source else "")
            parts.append(f"{who} {at} wait{'s' if one else ''} {what}" if what else f"{who} spin{'s' if one else ''} {at.rstrip(',')}")
        if len(parts) > NAMED_WAITS:
            parts[NAMED_WAITS:] = [f"and {len(parts) - NAMED_WAITS} more wait"]
        warp, line = first
        source = self.code.sources.get(line, "")
        message = "no warp can go on: " + "; ".join(parts)
        self.reporter.add(Hazard("deadlock", message, line, warp.index, 0, 0, source=source, cta=warp.cta.index, who=warp.name))
        self._report_imbalance()


def _imbalance(barrier: MBarrier) -> str:
    """How the bytes that an mbarrier's phase was told to expect differ from those that came, when neither will change any more."""
    if barrier.tx > 0:
        return f"{barrier.tx:,} bytes that expect_tx announced never came"
    return f"{-barrier.tx:,} bytes more came than expect_tx announced"


def ranges(what: str, indices: list[int]) -> str:
    """Numbers in words: warp 3, warps 4-7, warps 0, 4-7."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{what}{'s' if len(indices) > 1 else ''} {words}"


def _describe_barrier(cta: Cta, number: int) -> str:
    bar = cta.barriers[number]
    text = f"barrier {number} ({bar.arrived} of {bar.count} threads have arrived)"
    arrived = {index for _, _, index in bar.arrivals}
    left = [w.index for w in cta.warps if w.done and w.index not in arrived]
    away = [w.index for w in cta.warps if not w.done and w.index not in arrived]
    if away:
        text += f", which {ranges('warp', away)} never reached"
    if left:
        text += f", and {ranges('warp', left)} exited without"
    return text


def _describe_cluster(cluster: Cluster) -> str:
    count = sum(bits.bit_count() for bits in cluster.arrived.values())
    text = f"the cluster barrier, phase {cluster.phase} ({count} of {cluster.threads} threads have arrived)"
    absent = []
    for cta in cluster.ctas:
        away = [w.index for w in cta.warps if not w.done and w.live_bits & ~cluster.arrived.get(w, 0)]
        if away:
            absent.append((f"CTA {cta.index} " if cluster.size > 1 else "") + ranges("warp", away))
    return text + (f", which {', '.join(absent)} never reached" if absent else "")


def _describe_mbarrier(barrier: MBarrier) -> str:
    needs = []
    if barrier.pending:
        needs.append(f"{barrier.pending} more arrival{'s' if barrier.pending > 1 else ''}")
    if barrier.tx:
        needs.append(f"{barrier.tx:,} bytes" if barrier.tx > 0 else f"{-barrier.tx:,} bytes announced that have come already")
    last = f"last arrived: {barrier.last[0]} at PTX line {barrier.last[1]}" if barrier.last else "nobody has arrived yet"
    names = barrier.cta.cluster.actor_names
    absent = [f"{names[main]} at PTX line {line}" for main, (phase, line) in sorted(barrier.arrivers.items()) if phase < barrier.phase]
    if absent and barrier.pending:
        last += f"; in earlier phases arrived, and not yet in this one: {', '.join(absent)}"
    return (
        f"mbarrier {barrier.place} (phase {barrier.phase}, parity {barrier.phase & 1}, {barrier.pending} of {barrier.expected} arrivals "
        f"pending, {barrier.tx} transaction bytes outstanding; phase {barrier.phase} needs {' and '.join(needs) or 'nothing'}; {last})"
    )


__all__ = [
    "ALL", "ALL_BYTES", "BLOCK", "BLOCK_AHEAD", "EXIT", "FULL_BITS", "LANES", "MBARRIER_LIMIT", "NONE_BYTES", "PAUSE", "RETRY", "SPLIT",
    "WARP", "YIELD",
    "Cta", "Group", "MBarrier", "Pending", "Run", "Track", "Warp", "bits_of", "mask_of", "ranges",
]  # fmt: skip
