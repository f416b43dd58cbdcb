"""Which warp runs next: seeded policies of the scheduler.

random          any warp that can run, for a random number of instructions
round-robin     the warps in turn, the same number of instructions each
starve:SET      warps of the set run only when no other warp can
ahead:SET       warps of the set run whenever they can
SET is warp numbers within a CTA, such as 4 or 4-7 or 0,8-11; `async` stands for the asynchronous operations: starved they land only where
something waits for them, ahead they land at once.
Whatever the policy, who polls memory in vain gives way now and then, so that no policy makes a correct kernel hang.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machine import Run, Warp

PATIENCE = 4096
"""Warp instructions without progress after which a preferred warp gives way."""


class Schedule:
    """A policy of one launch. ValueError for text that names none."""

    def __init__(self, text: str = "random") -> None:
        self.text = text
        self.policy, _, members = text.partition(":")
        self.warps: frozenset[int] = frozenset()
        self.asynchronous = members == "async"
        if self.policy in ("starve", "ahead") and members:
            if not self.asynchronous:
                self.warps = _members(text, members)
        elif text not in ("random", "round-robin"):
            raise ValueError(f"schedule {text!r} is none of random, round-robin, starve:WARPS and ahead:WARPS")
        self._turn = -1

    def eagerness(self, drawn: float) -> float:
        """How likely an asynchronous operation lands before each turn of a warp."""
        if not self.asynchronous:
            return drawn
        return 1.0 if self.policy == "ahead" else 0.0

    def pick(self, run: Run) -> int:
        """Index of the warp among run.ready that runs next."""
        ready = run.ready
        if len(ready) == 1:
            return 0
        if self.policy == "round-robin":
            self._turn += 1
            keys = [(w.cta.index * run.warps + w.index - self._turn) % (run.total * run.warps) for w in ready]
            place = keys.index(min(keys))
            chosen = ready[place]
            self._turn = chosen.cta.index * run.warps + chosen.index
            return place
        if self.warps and run.idle < PATIENCE:
            wanted = self.policy == "ahead"
            preferred = [place for place, w in enumerate(ready) if (w.index in self.warps) == wanted]
            if preferred:
                return preferred[run.random.randrange(len(preferred))]
        return run.random.randrange(len(ready))

    def quantum(self, run: Run, warp: Warp) -> int:
        """Instructions that the warp may run."""
        if self.policy == "round-robin":
            return run.quantum
        return run.random.randrange(1, 2 * run.quantum)


def _members(text: str, members: str) -> frozenset[int]:
    result: set[int] = set()
    for part in members.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match is None:
            raise ValueError(f"schedule {text!r}: {part!r} is not a warp or a range of warps")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"schedule {text!r}: the range {part!r} is empty")
        result.update(range(first, last + 1))
    return frozenset(result)


__all__ = ["PATIENCE", "Schedule"]
