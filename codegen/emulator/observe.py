"""Watching a launch: an observer is told of barriers and asynchronous operations while the launch runs. Without one, nothing is called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import DecodedEntry
    from .machine import Cta, MBarrier, Pending, Step, Warp
    from .memory import TensorMap


class Observer:
    """Told of what happens in a launch; every method does nothing until overridden.

    step: warp instructions executed so far, all warps together: the time of an event.
    warp, opcode, line: of the instruction under way. watch: opcodes (leading parts) whose execution `executed` is told of.
    """

    watch: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.step = 0
        self.warp: Warp | None = None
        self.opcode = ""
        self.line = 0

    def executed(self, warp: Warp) -> None:
        """A watched instruction is done."""

    def mbarrier_init(self, warp: Warp, barrier: MBarrier) -> None:
        """An mbarrier now counts `barrier.expected` arrivals a phase."""

    def mbarrier_arrive(self, warp: Warp, barrier: MBarrier, count: int, asynchronous: bool) -> None:
        """Arrivals, of the warp or (asynchronous) of a commit that it issued; called before they count."""

    def mbarrier_expect(self, warp: Warp, barrier: MBarrier, amount: int) -> None:
        """The phase under way expects `amount` more bytes."""

    def mbarrier_wait(self, warp: Warp, barrier: MBarrier, passed: bool) -> None:
        """A test of a phase; one that failed comes again."""

    def mbarrier_phase(self, barrier: MBarrier) -> None:
        """A phase is complete; barrier.phase is the next one."""

    def barrier_arrive(self, warp: Warp, number: int, threads: int, waits: bool) -> None:
        """A warp arrives at a named barrier that counts `threads` (bar.sync waits, bar.arrive does not)."""

    def barrier_complete(self, cta: Cta, number: int) -> None:
        """Everybody has arrived at a named barrier."""

    def copy(self, warp: Warp, tensor_map: TensorMap, coordinates: Sequence[int], address: int, barrier: MBarrier | None) -> None:
        """A tensor copy is issued, to or from `address` in shared memory; its effect is deferred next. barrier: of a load."""

    def multiply(self, warp: Warp, column: int) -> None:
        """An MMA into tensor memory is issued, its accumulator `column` columns into the CTA's allocation; its effect is deferred next."""

    def deferred(self, pending: Pending) -> None:
        """An asynchronous effect is queued by the instruction under way."""

    def landed(self, pending: Pending) -> None:
        """An asynchronous effect happens now."""


def watched(code: DecodedEntry, observer: Observer) -> DecodedEntry:
    """The same code with steps that keep the observer's clock."""
    result = copy.copy(code)
    result.full = [_watched(code, observer, index, step) for index, step in enumerate(code.full)]
    result.masked = [_watched(code, observer, index, step) for index, step in enumerate(code.masked)]
    return result


def _watched(code: DecodedEntry, observer: Observer, index: int, step: Step) -> Step:
    opcode, line = code.opcodes[index], code.lines[index]

    def run(w: Warp, r: list[Any]) -> int | None:
        observer.step += 1
        observer.warp, observer.opcode, observer.line = w, opcode, line
        return step(w, r)

    if not opcode.startswith(observer.watch or ("\0",)):
        return run

    def run_and_tell(w: Warp, r: list[Any]) -> int | None:
        result = run(w, r)
        observer.executed(w)
        return result

    return run_and_tell


def landing(observer: Observer, pending: Pending) -> Callable[[], None]:
    """The effect of `pending`, telling the observer first."""
    effect = pending.complete

    def complete() -> None:
        observer.landed(pending)
        effect()

    return complete


__all__ = ["Observer", "landing", "watched"]
