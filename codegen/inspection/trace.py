"""What the barriers and asynchronous engines of an emulated launch do, and the same as Chrome-trace JSON for Perfetto or chrome://tracing.

Time is the number of warp instructions that the emulator has executed, all warps together: it orders events, and says nothing of how long
the hardware takes. A row is a warp, named by its role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..emulator import Observer

if TYPE_CHECKING:
    from ..emulator import TensorMap
    from ..emulator.machine import Cta, Group, MBarrier, Pending, Warp

MMA_OPCODES = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
EXIT_OPCODES = ("ret", "exit")


@dataclass
class Slice:
    """Something a warp does from step `start` to step `end`. kind: "role", "wait", "barrier" or "issue"."""

    cta: int
    warp: int
    kind: str
    name: str
    start: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Flight:
    """An asynchronous operation from its issue to its effect. kind: "load", "store", "mma" or "commit"."""

    cta: int
    warp: int
    kind: str
    name: str
    start: int
    end: int = -1
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class BarrierLog:
    """What was seen of one mbarrier: the count it was initialised with, per phase who arrived and the bytes expected, and who waited."""

    count: int
    phases: list[Counter[tuple[int, str]]] = field(default_factory=lambda: [Counter()])
    expected_bytes: list[int] = field(default_factory=lambda: [0])
    waits: set[int] = field(default_factory=set)

    @property
    def complete(self) -> int:
        """Phases that are complete."""
        return len(self.phases) - 1


@dataclass(frozen=True)
class Copy:
    """A tensor load: the array it reads, its coordinates (innermost first), where it goes in shared memory, and the mbarrier's offset."""

    warp: int
    array: str
    coordinates: tuple[int, ...]
    offset: int
    mbarrier: int


class Recorder(Observer):
    """Records a launch. arrays: names of its tensor maps, by id(). base: address of offset 0 of the dynamic shared memory.
    label: text for a copy, from the array's name and the coordinates. accumulator: name of what lies at a column of tensor memory.

    slices, flights: what happened when; mbarriers: (CTA, offset in shared memory) -> what was seen of it; named: (CTA, id) -> for each
    completion the threads counted and the warps that came; copies: CTA -> tensor loads in the order of their issue.
    """

    watch = (*MMA_OPCODES, *EXIT_OPCODES)

    def __init__(
        self,
        arrays: Mapping[int, str],
        base: int,
        label: Callable[[str, Sequence[int]], str] = lambda array, coordinates: array,
        accumulator: Callable[[int], str] = str,
    ) -> None:
        super().__init__()
        self.label = label
        self.accumulator = accumulator
        self.arrays = arrays
        self.base = base
        self.slices: list[Slice] = []
        self.flights: list[Flight] = []
        self.mbarriers: dict[tuple[int, int], BarrierLog] = {}
        self.named: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
        self.copies: dict[int, list[Copy]] = {}
        self.exits: dict[tuple[int, int], int] = {}
        self._waits: dict[Group, Slice] = {}
        self._arrived: dict[tuple[int, int], list[tuple[Slice, int]]] = {}
        self._bursts: dict[Warp, Slice] = {}
        self._groups: dict[Warp, Slice] = {}
        self._copy: tuple[str, str, dict[str, Any]] | None = None
        self._product = ""
        self._in_flight: dict[int, tuple[Pending, Flight]] = {}
        self._landing: Flight | None = None

    # --- barriers -----------------------------------------------------------------------------------------------------

    def offset(self, barrier: MBarrier) -> int:
        """Where an mbarrier lies in the dynamic shared memory of its CTA."""
        return barrier.address - self.base

    def _log(self, barrier: MBarrier) -> BarrierLog:
        return self.mbarriers.setdefault((barrier.cta.index, self.offset(barrier)), BarrierLog(barrier.expected))

    def mbarrier_init(self, warp: Warp, barrier: MBarrier) -> None:
        self.mbarriers[warp.cta.index, self.offset(barrier)] = BarrierLog(barrier.expected)

    def mbarrier_arrive(self, warp: Warp, barrier: MBarrier, count: int, asynchronous: bool) -> None:
        how = "commit" if asynchronous else "expect_tx" if "expect_tx" in self.opcode else "arrive"
        self._log(barrier).phases[-1][warp.index, how] += count
        if asynchronous and self._landing is not None:
            self._landing.args["mbarrier"] = self.offset(barrier)

    def mbarrier_expect(self, warp: Warp, barrier: MBarrier, amount: int) -> None:
        self._log(barrier).expected_bytes[-1] += amount

    def mbarrier_phase(self, barrier: MBarrier) -> None:
        log = self._log(barrier)
        log.phases.append(Counter())
        log.expected_bytes.append(0)

    def mbarrier_wait(self, warp: Warp, barrier: MBarrier, passed: bool) -> None:
        self._log(barrier).waits.add(warp.index)
        key = warp.group
        wait = self._waits.get(key)
        if wait is None:
            self._bursts.pop(warp, None)
            args = {"mbarrier": self.offset(barrier), "phase": barrier.phase, "PTX line": self.line}
            wait = self._waits[key] = self._slice(warp, "wait", "", args)
        if passed:
            wait.end = self.step
            # The phase that was waited for is the one before the one under way.
            wait.args["phase"] = barrier.phase - 1
            del self._waits[key]

    def barrier_arrive(self, warp: Warp, number: int, threads: int, waits: bool) -> None:
        self._bursts.pop(warp, None)
        here = self._slice(warp, "barrier", "", {"barrier": number, "threads": threads, "PTX line": self.line})
        self._arrived.setdefault((warp.cta.index, number), []).append((here, threads))

    def barrier_complete(self, cta: Cta, number: int) -> None:
        arrived = self._arrived.pop((cta.index, number), [])
        for here, _ in arrived:
            here.end = self.step
        threads = arrived[0][1] if arrived else 0
        self.named.setdefault((cta.index, number), []).append((threads, tuple(sorted(here.warp for here, _ in arrived))))

    # --- instructions and asynchronous operations ---------------------------------------------------------------------

    def executed(self, warp: Warp) -> None:
        if self.opcode.startswith(EXIT_OPCODES):
            self.exits[warp.cta.index, warp.index] = self.step
        elif self.opcode.startswith(MMA_OPCODES):
            burst = self._burst(warp, self._product or ".".join(self.opcode.split(".")[:2]))
            self._product = ""
            if self.opcode.startswith("wgmma"):
                self._groups.setdefault(warp, burst)

    def copy(self, warp: Warp, tensor_map: TensorMap, coordinates: Sequence[int], address: int, barrier: MBarrier | None) -> None:
        array = self.arrays.get(id(tensor_map), "?")
        where = {"array": array, "coordinates": list(coordinates), "shared": address - self.base}
        verb = "load" if barrier is not None else "store"
        self._copy = (verb, f"{verb} {self.label(array, coordinates)}", where)
        if barrier is None:
            return
        where["mbarrier"] = self.offset(barrier)
        loads = self.copies.setdefault(warp.cta.index, [])
        loads.append(Copy(warp.index, array, tuple(coordinates), address - self.base, self.offset(barrier)))

    def multiply(self, warp: Warp, column: int) -> None:
        self._product = f"tcgen05.mma -> {self.accumulator(column)}"

    def deferred(self, pending: Pending) -> None:
        warp = self.warp
        assert warp is not None
        start = self.step - 1
        args: dict[str, Any] = {}
        if self.opcode.startswith("tcgen05.mma"):
            kind, name = "mma", self._product
        elif self.opcode.startswith("wgmma.commit_group"):
            kind, name = "mma", "wgmma group"
            first = self._groups.pop(warp, None)
            start = start if first is None else first.start
            self._bursts.pop(warp, None)
        elif self.opcode.startswith("tcgen05.commit"):
            kind, name = "commit", "commit"
        elif self._copy is not None:
            kind, name, args = self._copy
            self._copy = None
            self._burst(warp, f"issue {name}")
        elif self.opcode.startswith("cp.async.bulk"):
            kind, name = ("load" if "complete_tx" in self.opcode else "store"), "bulk copy"
        else:
            return
        flight = Flight(warp.cta.index, warp.index, kind, name, start, args=args | {"PTX line": self.line})
        self.flights.append(flight)
        self._in_flight[id(pending)] = (pending, flight)

    def landed(self, pending: Pending) -> None:
        _, flight = self._in_flight.pop(id(pending), (None, None))
        if flight is None:
            return
        flight.end = self.step
        if flight.kind == "commit":
            # What it waits for lands within it; then it arrives.
            self._landing = flight

    def _slice(self, warp: Warp, kind: str, name: str, args: dict[str, Any]) -> Slice:
        result = Slice(warp.cta.index, warp.index, kind, name, self.step - 1, -1, args)
        self.slices.append(result)
        return result

    def _burst(self, warp: Warp, name: str) -> Slice:
        """The slice of equal instructions that a warp issues without waiting in between."""
        burst = self._bursts.get(warp)
        if burst is None or burst.name != name:
            burst = self._bursts[warp] = self._slice(warp, "issue", name, {"count": 0})
        burst.end = self.step
        burst.args["count"] += 1
        return burst

    def finish(self) -> None:
        """Ends what has not ended, as it is after a deadlock: such slices have `unfinished` among their arguments."""
        events: list[Slice | Flight] = [*self.slices, *self.flights]
        for item in events:
            if item.end < 0:
                item.end = max(self.step, item.start + 1)
                item.args["unfinished"] = True


# --- Chrome trace -----------------------------------------------------------------------------------------------------


def chrome_trace(
    recorder: Recorder,
    *,
    row: Callable[[int], str],
    mbarrier: Callable[[int], str],
    barrier: Callable[[int, int], str],
    metadata: Mapping[str, object],
) -> dict[str, Any]:
    """The trace as an object for json.dump. row: name of a warp; mbarrier: name at an offset; barrier: name of (id, threads)."""
    recorder.finish()
    told: list[Slice | Flight] = [*recorder.slices, *recorder.flights]
    warps = sorted({(item.cta, item.warp) for item in told} | set(recorder.exits))
    events: list[dict[str, Any]] = []
    for cta in sorted({cta for cta, _ in warps}):
        events.append({"ph": "M", "name": "process_name", "pid": cta, "tid": 0, "args": {"name": f"CTA {cta}"}})
    for cta, warp in warps:
        events.append({"ph": "M", "name": "thread_name", "pid": cta, "tid": warp, "args": {"name": row(warp)}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": cta, "tid": warp, "args": {"sort_index": warp}})
    # A warp whose idle lanes have left may still be at work, or be waiting in vain.
    ends = {key: recorder.exits.get(key, recorder.step) for key in warps}
    for item in recorder.slices:
        ends[item.cta, item.warp] = max(ends[item.cta, item.warp], item.end)
    slices = [Slice(cta, warp, "role", row(warp), 0, end) for (cta, warp), end in ends.items()]
    for item in recorder.slices:
        if item.kind == "wait":
            item.name = f"wait {mbarrier(item.args['mbarrier'])}"
        elif item.kind == "barrier":
            item.name = barrier(item.args["barrier"], item.args["threads"])
        slices.append(item)
    # A slice before those inside it.
    for item in sorted(slices, key=lambda s: (s.cta, s.warp, s.start, -s.end)):
        duration = max(item.end - item.start, 1)
        events.append(
            {
                "ph": "X",
                "name": item.name,
                "cat": item.kind,
                "pid": item.cta,
                "tid": item.warp,
                "ts": item.start,
                "dur": duration,
                "args": item.args,
            }
        )
    for number, flight in enumerate(recorder.flights):
        name = flight.name
        if flight.kind in ("commit", "load") and "mbarrier" in flight.args:
            flight.args["signals"] = mbarrier(flight.args["mbarrier"])
            name = f"{name} -> {flight.args['signals']}"
        common = {"name": name, "cat": flight.kind, "id": f"{number:#x}", "pid": flight.cta, "tid": flight.warp}
        events.append({"ph": "b", "ts": flight.start, **common, "args": flight.args})
        events.append({"ph": "e", "ts": max(flight.end, flight.start + 1), **common})
    time = "1 us = 1 warp instruction executed by the emulator, all warps together: an order of events, not a duration on hardware"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"time": time, **metadata}}


__all__ = ["BarrierLog", "Copy", "Flight", "Recorder", "Slice", "chrome_trace"]
