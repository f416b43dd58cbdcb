"""Bounded systematic exploration: every order of the synchronisation events of one CTA (or cluster) that can make a difference.

A launch is executed again and again, each time with another order of its events: arrivals at barriers and mbarriers, completions of copies
and commits, atomics and other strong accesses, fence.sc, allocations of tensor memory. Between events a warp runs alone: what it does
there is ordered, or is a race that the clocks report in any order. A wait is no event: it goes on as soon as it can.

Which orders differ is decided by dynamic partial-order reduction with sleep sets (Flanagan and Godefroid, POPL 2005; Godefroid 1996). Two
events depend on each other when they are on one object and either belong to different phases of it, or count into its transaction bytes on
their own, or write the same strong location. Arrivals in one phase commute. So a kernel in which every phase waits for the one before has
one order, and exploring it is a proof for its inputs; each order that could come out otherwise is tried.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .hazards import Hazard
from .machine import PAUSE, Cta, MBarrier, Pending, Run, Warp
from .observe import Observer
from .ptx import PtxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .decode import DecodedEntry
    from .machine import Step

Process = tuple[Any, ...]
"""("warp", CTA, warp) or ("operation", process that issued it, its number)."""

_EVENTS = (
    "bar.", "barrier.sync", "barrier.arrive", "barrier.red", "barrier.cta", "barrier.cluster.arrive", "mbarrier.arrive",
    "mbarrier.expect_tx", "mbarrier.complete_tx", "atom.", "red.", "tcgen05.alloc", "tcgen05.dealloc", "fence.sc", "membar.",
)  # fmt: skip
_QUIET = ("bar.warp", "red.async", "membar.proxy")
_STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")
_STRETCH = 1 << 16
"""Instructions that a warp may run between two events."""


def is_event(opcode: str) -> bool:
    """Whether an instruction is a synchronisation event."""
    if opcode.startswith(_QUIET):
        return False
    if opcode.startswith(_EVENTS):
        return True
    words = opcode.split(".")
    return words[0] in ("ld", "st") and any(w in _STRONG for w in words[1:])


@dataclass(frozen=True)
class Effect:
    """What an event does to one object. exclusive: its order with any other event on the object matters; completes: the phase is over."""

    target: Any
    phase: int
    exclusive: bool = False
    reads: bool = False
    completes: bool = False


def dependent(a: tuple[Effect, ...], b: tuple[Effect, ...]) -> bool:
    """Whether the order of two events that have happened can make a difference."""
    return any(
        x.target == y.target and not (x.reads and y.reads) and (x.exclusive or y.exclusive or x.phase != y.phase) for x in a for y in b
    )


def wakes(done: tuple[Effect, ...], sleeping: tuple[Effect, ...]) -> bool:
    """Whether an event changes what one that was tried before would do now."""
    return dependent(done, sleeping) or any(x.target == y.target and x.completes for x in done for y in sleeping)


@dataclass
class _Event:
    process: Process
    number: int
    """Counted among the events of its process, from 1."""
    effects: tuple[Effect, ...]
    clock: dict[Process, int]
    state: int


@dataclass
class _State:
    """A point of choice: what could go on, what has been tried, what still has to be."""

    candidates: tuple[Process, ...]
    sleep: dict[Process, tuple[Effect, ...]]
    chosen: Process
    done: dict[Process, tuple[Effect, ...]] = field(default_factory=dict)
    todo: set[Process] = field(default_factory=set)


@dataclass
class Exploration:
    """What systematic exploration found.

    complete: every order that can make a difference was executed. interleavings: orders executed to their end; events: synchronisation
    events of the longest; left: choices that were still open when the limit was reached; hazards: findings of all orders, each once;
    deadlocks: orders that ended in one; outputs: how many different outputs there were.
    """

    complete: bool
    interleavings: int
    events: int
    left: int
    hazards: list[Hazard]
    deadlocks: int
    outputs: int

    def __str__(self) -> str:
        orders = f"{self.interleavings} interleaving{'s' if self.interleavings != 1 else ''}"
        if self.complete:
            text = f"all {orders} of {self.events} synchronisation events (equivalent ones counted once)"
        else:
            text = f"{orders} of {self.events} synchronisation events, stopped at the limit with {self.left} choices left"
        parts = [text]
        if self.deadlocks:
            parts.append(f"{self.deadlocks} end in a deadlock")
        if self.outputs > 1:
            parts.append(f"{self.outputs} different outputs")
        return ", ".join(parts)


class _Fixed:
    """No chance: the scheduler's draws in an exploration."""

    def random(self) -> float:
        return 0.5

    def randrange(self, *_: int) -> int:
        return 0

    def choice(self, items: Any) -> Any:
        return items[0]

    def shuffle(self, items: Any) -> None:
        """Keep the order."""


class _Watcher(Observer):
    """Notes what the event under way does, and which waits pass."""

    def __init__(self, run: ExploringRun) -> None:
        super().__init__()
        self.run = run

    def mbarrier_arrive(self, warp: Warp, barrier: MBarrier, count: int, asynchronous: bool) -> None:
        self.run.touched.append((barrier, barrier.phase))

    def mbarrier_wait(self, warp: Warp, barrier: MBarrier, passed: bool) -> None:
        if passed:
            self.run.know(self.run.process_of(warp), ("mbarrier", barrier.cta.index, barrier.address), barrier.phase - 1)

    def barrier_arrive(self, warp: Warp, number: int, threads: int, waits: bool) -> None:
        self.run.touch_named(warp, number, waits)

    def barrier_complete(self, cta: Cta, number: int) -> None:
        self.run.generations[cta.index, number] = self.run.generations.get((cta.index, number), 0) + 1


class ExploringRun(Run):
    """One execution under the explorer's choices: follows `plan`, then goes on with the first process that does not sleep."""

    def __init__(self, *, plan: list[_State], **options: Any) -> None:
        super().__init__(observer=None, **options)
        self.observer = _Watcher(self)
        self.use(_pausing(self.code))
        self.random = _Fixed()  # type: ignore[assignment]
        self.residency = self.total_clusters
        self.permit: Warp | None = None
        self.states = plan
        """Points of choice so far; the ones that were planned come first."""
        self.trace: list[_Event] = []
        self.redundant = False
        """Everything that could go on sleeps: an equivalent order has been executed."""
        self.deadlocked = False
        self.effects: list[Effect] = []
        self.touched: list[tuple[MBarrier, int]] = []
        """(mbarrier, phase) that the event under way arrives in."""
        self.current: Process = ()
        self.clocks: dict[Process, dict[Process, int]] = {}
        self.generations: dict[tuple[int, int], int] = {}
        self.phases: dict[tuple[Any, int], dict[Process, int]] = {}
        """(object, phase) to what its arrivals knew."""
        self.joins: dict[Process, list[tuple[Any, int]]] = {}
        """Phases that a warp's wait has passed: known from its next event on."""
        self.operations: dict[Process, Pending] = {}
        self.issued: dict[Process, int] = {}
        self.sleep: dict[Process, tuple[Effect, ...]] = {}
        self.depth = 0

    # -------------------------------------------------------------------------------------------------- what events do

    @staticmethod
    def process_of(warp: Warp) -> Process:
        return ("warp", warp.cta.index, warp.index)

    def know(self, process: Process, target: Any, phase: int) -> None:
        self.joins.setdefault(process, []).append((target, phase))

    def touch_named(self, warp: Warp, number: int, waits: bool) -> None:
        generation = self.generations.get((warp.cta.index, number), 0)
        target = ("barrier", warp.cta.index, number)
        bar = warp.cta.barriers[number]
        self.effects.append(Effect(target, generation, completes=bar.arrived + 32 >= bar.count))
        if waits:
            self.know(self.process_of(warp), target, generation)

    def defer(self, cta: Cta, complete: Callable[[], None], reports: tuple[MBarrier, ...] = ()) -> Pending:
        pending = super().defer(cta, complete, reports)
        if reports:
            issuer = self.current
            number = self.issued[issuer] = self.issued.get(issuer, 0) + 1
            process = ("operation", issuer, number)
            self.operations[process] = pending
            self._settle_clock(issuer)
            self.clocks[process] = dict(self.clocks.get(issuer, {}))
        return pending

    # ---------------------------------------------------------------------------------------------------------- running

    def run(self) -> None:
        for _ in range(self.total_clusters):
            self.start_cluster()
        released = -1
        while True:
            self._advance()
            candidates = self._candidates()
            if candidates:
                if not self._choose(candidates):
                    return
                continue
            if not self.resident:
                return
            if self.pending:
                self._complete_one()
            elif released != self.progress_count and self._release_parked():
                released = self.progress_count
            elif not self._force_converged():
                self._deadlock()
                self.deadlocked = True
                return

    def _advance(self) -> None:
        """Run every warp to its next event, wait or end."""
        moved = True
        while moved:
            moved = False
            for warp in sorted(self.ready, key=lambda w: (w.cta.index, w.index)):
                if warp.paused or not warp.ready:
                    continue
                moved = True
                self._stretch(warp)

    def _stretch(self, warp: Warp) -> None:
        self.current = self.process_of(warp)
        ran = warp.run(_STRETCH)
        self.instructions += ran
        if self.instructions > self.budget:
            raise PtxError(f"the launch was stopped after {self.instructions} warp instructions, its budget is {self.budget}")
        place = self.ready.index(warp)
        if warp.done:
            self._remove(place)
            self._warp_done(warp)
        elif warp.pick() is None:
            self._remove(place)

    def _candidates(self) -> tuple[Process, ...]:
        waiting = set(map(id, self.pending))
        self.operations = {p: pending for p, pending in self.operations.items() if id(pending) in waiting}
        return (*sorted(self.process_of(w) for w in self.ready), *self.operations)

    def _choose(self, candidates: tuple[Process, ...]) -> bool:
        depth = len(self.trace)
        if depth < len(self.states):
            state = self.states[depth]
            process = state.chosen
            self.sleep = state.sleep | {p: e for p, e in state.done.items() if p != process}
            if process not in candidates:
                raise RuntimeError("an execution of the exploration could not be repeated")
        else:
            awake = [p for p in candidates if p not in self.sleep]
            if not awake:
                self.redundant = True
                return False
            process = awake[0]
            self.states.append(_State(candidates, dict(self.sleep), process))
        self._execute(process, depth)
        return True

    def _execute(self, process: Process, depth: int) -> None:
        self.effects, self.touched = [], []
        self.current = process
        self.depth = depth
        self._settle_clock(process)
        if process[0] == "operation":
            pending = self.operations.pop(process)
            self.touched += [(barrier, barrier.phase) for barrier in pending.reports]
            self.finish(pending)
            self.note()
            return
        warp = next(w for w in self.ready if self.process_of(w) == process)
        self.permit, warp.paused = warp, False
        self._stretch(warp)

    # ------------------------------------------------------------------------------------------------- order of events

    def _settle_clock(self, process: Process) -> None:
        """Let a process know the phases that its waits have passed since its last event."""
        clock = self.clocks.setdefault(process, {})
        for target, phase in self.joins.pop(process, []):
            while phase >= 0 and (known := self.phases.get((target, phase))) is not None:
                if all(clock.get(p, 0) >= n for p, n in known.items()):
                    break
                _join(clock, known)
                phase -= 1

    def note(self) -> None:
        """Record the event just executed, and where its order with earlier ones could have been another."""
        process = self.current
        for barrier, phase in dict.fromkeys(self.touched):
            target = ("mbarrier", barrier.cta.index, barrier.address)
            self.effects.append(Effect(target, phase, completes=barrier.phase > phase))
        effects = tuple(self.effects)
        clock = self.clocks.setdefault(process, {})
        number = clock.get(process, 0) + 1
        earlier = [event for event in self.trace if event.process != process and dependent(event.effects, effects)]
        for event in earlier:
            if clock.get(event.process, 0) < event.number:
                self._reconsider(event.state, process)
        for event in earlier:
            _join(clock, event.clock)
        clock[process] = number
        self.trace.append(_Event(process, number, effects, dict(clock), self.depth))
        for effect in effects:
            _join(self.phases.setdefault((effect.target, effect.phase), {}), clock)
        self.states[self.depth].done[process] = effects
        self.sleep = {p: e for p, e in self.sleep.items() if p != process and not wakes(effects, e)}

    def _reconsider(self, place: int, process: Process) -> None:
        """At an earlier point of choice, `process` or what leads to it should also be tried."""
        state = self.states[place]
        while process not in state.candidates and process[0] == "operation":
            process = process[1]
        state.todo.update((process,) if process in state.candidates else state.candidates)


def _join(clock: dict[Process, int], other: dict[Process, int]) -> None:
    for process, number in other.items():
        if clock.get(process, 0) < number:
            clock[process] = number


def _pausing(code: DecodedEntry) -> DecodedEntry:
    """The same code, with a warp stopping before each event until it has permission."""
    result = copy.copy(code)
    result.full, result.masked = list(code.full), list(code.masked)
    predicates = {slot.index: place for place, slot in enumerate(code.slots) if slot.source == "reg" and slot.bits == 1}
    for index, ins in enumerate(code.entry.instructions):
        if is_event(ins.opcode):
            guard = -1 if ins.guard is None else predicates[ins.guard.index]
            for table in (result.full, result.masked):
                table[index] = _stopping(table[index], ins.opcode, guard, ins.guard_negated)
    return result


def _stopping(step: Step, opcode: str, guard: int, negated: bool) -> Step:
    words = opcode.split(".")
    memory = words[0] in ("ld", "st", "atom", "red")
    tensor = opcode.startswith(("tcgen05.alloc", "tcgen05.dealloc"))
    fence = words[0] in ("fence", "membar")
    counts = opcode.startswith(("mbarrier.expect_tx", "mbarrier.complete_tx"))

    def stop(w: Warp, r: list[Any]) -> int | None:
        if guard >= 0 and not ((~r[guard] if negated else r[guard]) & w.mask).any():
            return step(w, r)
        run: Any = w.cta.launch
        if run.permit is not w:
            w.paused = True
            return PAUSE
        run.permit = None
        phase = w.cta.cluster.phase
        result = step(w, r)
        if memory:
            run.effects.append(Effect("memory", 0, True, words[0] == "ld"))
        elif fence:
            run.effects.append(Effect("fences", 0, True))
        elif tensor:
            run.effects.append(Effect("tensor memory", 0, True))
        elif counts:
            run.effects.append(Effect("transaction bytes", 0, True))
        elif opcode.startswith("barrier.cluster"):
            run.effects.append(Effect("cluster barrier", phase, completes=w.cta.cluster.phase > phase))
        run.note()
        return result

    return stop


def explore(make: Callable[[list[_State]], tuple[ExploringRun, Callable[[], bytes]]], limit: int) -> Exploration:
    """Run `make(plan)` again and again until every order that differs has been executed, or `limit` executions are done.

    make: sets up a launch from scratch and gives it with a function that digests its outputs.
    """
    states: list[_State] = []
    interleavings = executions = events = deadlocks = 0
    found: dict[tuple[str, int, int], Hazard] = {}
    outputs: set[bytes] = set()
    while True:
        run, digest = make(states)
        run.run()
        executions += 1
        if not run.redundant:
            interleavings += 1
            events = max(events, len(run.trace))
            deadlocks += run.deadlocked
            if not run.deadlocked:
                outputs.add(digest())
        for hazard in run.reporter.hazards():
            found.setdefault((hazard.kind, hazard.line, hazard.other.line if hazard.other else 0), hazard)
        states = run.states[: len(run.trace)] if run.redundant else run.states
        while states:
            state = states[-1]
            open_ = [p for p in state.candidates if p in state.todo and p not in state.done and p not in state.sleep]
            if open_:
                state.chosen = open_[0]
                break
            states.pop()
        left = sum(len([p for p in s.todo if p not in s.done and p not in s.sleep]) for s in states)
        if not states or executions >= limit:
            return Exploration(not states, interleavings, events, left, list(found.values()), deadlocks, max(len(outputs), 1))


__all__ = ["Effect", "Exploration", "ExploringRun", "dependent", "explore", "is_event"]
