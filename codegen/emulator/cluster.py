"""Clusters: the CTAs that can reach each other's shared memory, their common actors and vector clocks, and the cluster barrier.

A CTA that is launched without a cluster is one of its own. Actor numbers, and with them clocks and epochs, count over a cluster, so that
accesses to the shared memory of another CTA are compared like those to the own.

Shared-memory addresses: an address below 2^24 is an offset in the CTA's own window (.shared::cta); `mapa` gives (rank + 1) << 24 | offset,
valid where .shared::cluster or generic addresses are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .hazards import Clock
from .ptx import PtxError, PtxFault

if TYPE_CHECKING:
    from .decode import Code
    from .machine import Cta, Group, Run, Warp

MAX_CLUSTER = 8
"""Largest portable cluster."""

RANK_SHIFT = 24
"""Bits of an offset in one CTA's window of shared memory."""
_OFFSET = (1 << RANK_SHIFT) - 1


class Cluster:
    """CTAs launched together, in rank order."""

    def __init__(self, launch: Run, index: int, position: tuple[int, int, int]) -> None:
        self.launch = launch
        self.index = index
        self.position = position
        """%clusterid."""
        self.size = launch.cluster_size
        self.ctas: list[Cta] = []
        self.capacity = self.size * launch.warps + 64
        self.actor_names: list[str] = []
        self.family: NDArray[np.int64] = np.full(self.capacity, -1, np.int64)
        """Of each actor that is a warp or lanes of one, the warp's actor; -1 for others."""
        self.floor: NDArray[np.int64] = np.full(self.capacity, hz.EVER, np.int64)
        """0 for actors whose accesses go through the generic proxy, EVER for others (Clock.lower)."""
        self.actors: dict[Any, int] = {}
        self.wgmma: dict[int, Any] = {}
        """Actor to the wgmma operations of a warp."""
        self.in_flight: dict[int, tuple[int, Cta, Code, Warp, str]] = {}
        """Actor of an asynchronous operation to (clock, CTA that it works for, instruction, warp, what it is), for the check at exit."""
        self.tiles: dict[int, tuple[int, int, int, Code]] = {}
        """Epoch of a tensor load to (start, swizzle, bytes of a box row, instruction)."""
        self.slots: list[int] = []
        self.slot_times: list[int] = []
        # The cluster barrier: phase, the lanes that have arrived in it, and the clocks they released.
        self.phase = 0
        self.arrived: dict[Warp, int] = {}
        self.clock: Clock | None = None
        self.done: Clock | None = None
        self.waiting: list[tuple[Warp, Group]] = []

    # ------------------------------------------------------------------------------------------------------------- actors

    def add_warps(self, warps: list[Warp]) -> None:
        for warp in warps:
            self.family[warp.main] = warp.main
            self.floor[warp.main] = 0
            self.actor_names.append(warp.name)

    def lane_actor(self, warp: Warp, lane: int) -> int:
        """The actor of diverged lanes of a warp, by their lowest."""
        number = self.actor(("lanes", warp.main, lane), warp.name, generic=True)
        self.family[number] = warp.main
        return number

    def actor(self, key: Any, name: str, generic: bool = False) -> int:
        """The actor number of a named asynchronous engine, made on first use. generic: it works through the generic proxy."""
        found = self.actors.get(key)
        if found is None:
            found = self.actors[key] = self.new_actor(name)
            if generic:
                self.floor[found] = 0
        return found

    def new_actor(self, name: str) -> int:
        number = len(self.actor_names)
        if number > hz.ACTOR_MASK:
            raise PtxError("more than 65,536 asynchronous operations of one cluster are outstanding")
        self.actor_names.append(name)
        if number >= self.capacity:
            more = self.capacity
            self.capacity *= 2
            self.family = np.concatenate([self.family, np.full(more, -1, np.int64)])
            self.floor = np.concatenate([self.floor, np.full(more, hz.EVER, np.int64)])
            for cta in self.ctas:
                for warp in cta.warps:
                    for track in (warp.track, *warp.tracks.values(), *(g.track for g in warp.groups)):
                        track.clock.grow(self.capacity)
        return number

    def async_slot(self, warp: Warp, name: str) -> tuple[int, int]:
        """(actor, clock) for one asynchronous operation: a slot is reused only by an issuer that knows its last operation complete."""
        limits = warp.clock.limits
        for place, actor in enumerate(self.slots):
            if limits[actor] >> hz.CLOCK_SHIFT >= self.slot_times[place]:
                self.slot_times[place] += 1
                self.actor_names[actor] = name
                return actor, self.slot_times[place]
        actor = self.new_actor(name)
        self.slots.append(actor)
        self.slot_times.append(1)
        return actor, 1

    def settle_proxy(self, clock: Clock) -> None:
        """Make a clock fit for other clusters: they do not know which actors here need no proxy fence."""
        size = clock.table.shape[1]
        np.maximum(clock.table[hz.GLOBAL_PROXY], self.floor[:size], out=clock.table[hz.GLOBAL_PROXY])

    def still_reading(self, warp: Warp, epoch: int) -> bool:
        """Whether an unordered access is that of a wgmma whose issue the warp knows of, but not its completion."""
        state = self.wgmma.get(epoch & hz.ACTOR_MASK)
        issued = None if state is None else state.issued.get(epoch >> hz.CLOCK_SHIFT)
        if issued is None:
            return False
        actor, time = issued
        return bool(self.family[actor] == warp.main or warp.clock.limits[actor] >> hz.CLOCK_SHIFT >= time)

    # ------------------------------------------------------------------------------------------------------ cluster barrier

    def arrive(self, warp: Warp, bits: int, release: bool) -> int:
        """Lanes arrive (9.7.13.3); returns those that had arrived in this phase already."""
        twice = self.arrived.get(warp, 0) & bits
        self.arrived[warp] = self.arrived.get(warp, 0) | bits
        if self.launch.check:
            if release:
                clock = warp.snapshot()
            else:
                # A relaxed arrival passes on what fences have released, and mbarriers that a fence.mbarrier_init covers.
                clock = Clock(np.zeros_like(warp.clock.table))
                clock.table[hz.INITS] = warp.clock.table[hz.INITS]
                if warp.fence_clocks[1] is not None:
                    clock.join(warp.fence_clocks[1])
            if self.clock is None:
                self.clock = clock
            else:
                self.clock.join(clock)
        self.launch.progress_count += 1
        self.settle()
        return twice

    def settle(self) -> None:
        """Complete the phase when every lane that has not exited has arrived."""
        if not self.arrived:
            return
        for cta in self.ctas:
            for warp in cta.warps:
                if not warp.done and warp.live_bits & ~self.arrived.get(warp, 0):
                    return
        self.phase += 1
        self.arrived.clear()
        # The accumulated clock stays: completing a later phase implies the earlier ones.
        self.done = None if self.clock is None else self.clock.copy()
        for warp, group in self.waiting:
            warp.wake(group)
        self.waiting.clear()
        self.launch.progress_count += 1

    @property
    def threads(self) -> int:
        """Threads that have not exited."""
        return sum(w.live_bits.bit_count() for cta in self.ctas for w in cta.warps if not w.done)


class SequentialFences:
    """What the fence.sc of a launch have released so far: a later one of them acquires it where each is within the other's scope."""

    def __init__(self) -> None:
        self._ctas: dict[int, Clock] = {}
        self._clusters: dict[int, Clock] = {}
        self._device = Clock(np.zeros((hz.PLANES, 1), np.int64))
        """Its foreign clocks are those of every cluster."""

    def acquire(self, warp: Warp, scope: int) -> None:
        """Order the earlier fences before the warp; scope as in control.scope_of."""
        own = warp.cta.cluster.index
        foreign = self._device.foreign or {}
        near = (self._ctas.get(warp.cta.index), self._clusters.get(own) if scope else None, foreign.get(own) if scope > 1 else None)
        for clock in near:
            if clock is not None:
                warp.clock.join(clock)
        if scope > 1 and foreign:
            warp.clock.join_foreign({cluster: clock for cluster, clock in foreign.items() if cluster != own})

    def release(self, warp: Warp, scope: int, clock: Clock) -> None:
        """Let later fences know what the warp has done."""
        cta = warp.cta
        _add(self._ctas, cta.index, clock)
        if scope:
            _add(self._clusters, cta.cluster.index, clock)
        if scope > 1:
            alone = Clock(clock.table.copy(), None, clock.lanes)
            cta.cluster.settle_proxy(alone)
            self._device.join_foreign({**(clock.foreign or {}), cta.cluster.index: alone})


def _add(clocks: dict[int, Clock], key: int, clock: Clock) -> None:
    known = clocks.get(key)
    if known is None:
        clocks[key] = clock.copy()
    else:
        known.join(clock)


def owner_of(cta: Cta, address: int) -> tuple[Cta, int]:
    """(CTA whose shared memory an address is in, offset there). PtxFault for a rank that the cluster does not have."""
    rank = (address >> RANK_SHIFT) - 1
    if rank < 0:
        return cta, address
    if rank >= cta.cluster.size:
        raise PtxFault(f"the shared::cluster address {address:#x} names no CTA of a cluster of {cta.cluster.size}")
    return cta.cluster.ctas[rank], address & _OFFSET


def same_offset(cta: Cta, address: int, rank: int) -> int:
    """The address in CTA `rank` of the cluster that corresponds to an address."""
    if rank >= cta.cluster.size:
        raise PtxFault(f"rank {rank} is outside a cluster of {cta.cluster.size}")
    return (rank + 1) << RANK_SHIFT | address & _OFFSET


__all__ = ["MAX_CLUSTER", "RANK_SHIFT", "Cluster", "SequentialFences", "owner_of", "same_offset"]
