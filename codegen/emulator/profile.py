"""What a launch does to memory, by PTX line: shared-memory wavefronts against the ideal, and bytes by engine.

Shared memory has 32 banks of 4 bytes. A warp's access is served in passes: all lanes at once up to 32 bits a lane, half-warps at 64 bits,
quarter-warps at 128 bits (8 rows of 16 bytes of ldmatrix and stmatrix alike). A pass takes as many wavefronts as its busiest bank has
different words; lanes that touch the same word share it. The ideal is one wavefront a pass. Bulk and tensor copies, matrix operands and
mbarriers go past the banks' arbiter for lanes and are counted in bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .decode import Code

Array = NDArray[Any]

BANKS = 32
BANK_BYTES = 4


def wavefronts(address: Array, lanes: Array, size: int) -> tuple[int, int]:
    """(wavefronts, ideal) of one access of `size` bytes a lane by `lanes` at byte addresses `address` of shared memory."""
    width = 32 if size <= 4 else 256 // (2 * size) if size <= 16 else 8
    total = ideal = 0
    group = lanes // width
    for number in range(32 // width):
        chosen = address[group == number]
        if not len(chosen):
            continue
        ideal += 1
        words = chosen // BANK_BYTES
        if size > BANK_BYTES:
            words = (words[:, None] + np.arange(size // BANK_BYTES)).reshape(-1)
        banks = np.bincount(np.unique(words) % BANKS, minlength=BANKS)
        total += int(banks.max())
    return total, ideal


@dataclass
class SharedLine:
    """Accesses of one PTX line to shared memory. wavefronts and ideal: summed over executions; lanes: active ones, summed."""

    line: int
    opcode: str
    executions: int = 0
    lanes: int = 0
    bytes: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the ideal."""
        return self.wavefronts - self.ideal


@dataclass
class Traffic:
    """One kind of transfer: operations (an access of a warp, a copy, an operand read) and bytes."""

    operations: int = 0
    bytes: int = 0


ENGINES = (
    "global load", "global store", "global atomic", "shared load", "shared store", "shared atomic", "cp.async load",
    "tensor copy load", "tensor copy store", "bulk copy load", "bulk copy store", "bulk copy shared to shared",
    "wgmma operand", "tcgen05 operand", "tcgen05 copy", "tensor memory load", "tensor memory store",
)  # fmt: skip


@dataclass
class Profile:
    """Counts of one launch. Memory accesses of lanes count the bytes of active lanes, each as often as it is asked for."""

    shared: dict[int, SharedLine] = field(default_factory=dict)
    """By instruction index."""
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def move(self, engine: str, size: int) -> None:
        """Count one operation of an engine."""
        found = self.traffic.get(engine)
        if found is None:
            found = self.traffic[engine] = Traffic()
        found.operations += 1
        found.bytes += size

    def shared_access(self, code: Code, address: Array, lanes: Array, size: int, kind: str) -> None:
        """Count one access of a warp to shared memory. kind: load, store or atomic; the latter has no wavefronts here."""
        found = self.shared.get(code.index)
        if found is None:
            found = self.shared[code.index] = SharedLine(code.line, code.opcode)
        found.executions += 1
        found.lanes += len(lanes)
        found.bytes += len(lanes) * size
        if kind != "atomic":
            total, ideal = wavefronts(address, lanes, size)
            found.wavefronts += total
            found.ideal += ideal
        self.move(f"shared {kind}", len(lanes) * size)

    @property
    def lines(self) -> list[SharedLine]:
        """Lines in program order."""
        return [self.shared[index] for index in sorted(self.shared)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shared": [
                {"line": s.line, "opcode": s.opcode, "executions": s.executions, "lanes": s.lanes, "bytes": s.bytes,
                 "wavefronts": s.wavefronts, "ideal": s.ideal}
                for s in self.lines
            ],
            "traffic": {name: {"operations": t.operations, "bytes": t.bytes} for name, t in self._ordered()},
        }  # fmt: skip

    def _ordered(self) -> list[tuple[str, Traffic]]:
        return [(name, self.traffic[name]) for name in ENGINES if name in self.traffic]

    def __str__(self) -> str:
        """Two tables: shared-memory lines with their wavefronts, and bytes by engine."""
        rows = [("PTX line", "instruction", "executions", "wavefronts", "ideal", "conflicts")]
        rows += [
            (str(s.line), s.opcode, str(s.executions))
            + (("-", "-", "-") if "atom" in s.opcode or s.opcode.startswith("red") else (str(s.wavefronts), str(s.ideal), str(s.conflicts)))
            for s in self.lines
        ]
        wave = sum(s.wavefronts for s in self.lines)
        ideal = sum(s.ideal for s in self.lines)
        rows.append(("total", "", str(sum(s.executions for s in self.lines)), str(wave), str(ideal), str(wave - ideal)))
        moved = [("engine", "operations", "bytes"), *((name, str(t.operations), str(t.bytes)) for name, t in self._ordered())]
        return "\n\n".join([_table(rows, left=(1,)), _table(moved, left=(0,))])


def _table(rows: list[Any], left: tuple[int, ...]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


__all__ = ["ENGINES", "Profile", "SharedLine", "Traffic", "wavefronts"]
