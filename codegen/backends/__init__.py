"""One interface over the GPU and the emulator: run an entry of a compiled module on numpy arrays, which are written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ..emulator import Hazard, TensorMap, Uninitialized
    from ..emulator.regions import RegionMap

    Argument: TypeAlias = np.ndarray | np.generic | bytes | TensorMap | Uninitialized


class BackendError(Exception):
    """A backend cannot run, or a run went wrong; the message is one line.

    hazards: what the emulator's checks had found by then.
    """

    def __init__(self, message: str, hazards: Sequence[Hazard] = ()) -> None:
        super().__init__(message)
        self.hazards = list(hazards)


class BackendUnavailable(BackendError):
    """This backend cannot be used on this machine; the message says why in one line."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    args, in the order of the entry's parameters: an array is passed as a pointer (and written in place), a numpy scalar by value, bytes
    as a by-value struct, a TensorMap as the 128-byte object that TMA reads; Uninitialized(array) is an output nobody has written yet.
    cluster: CTAs of a cluster along x; 1: a launch without clusters.
    regions: names in dynamic shared memory, for the emulator's findings: name to (offset, bytes) or (offset, bytes, array shape).
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    args: Sequence[Argument]
    cluster: int = 1
    regions: RegionMap = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """seconds: device time of one launch (median, GPU) or wall time of the emulation. hazards: the emulator's findings; None on a GPU."""

    seconds: float
    hazards: list[Hazard] | None = None
    instructions: int | None = None


@dataclass(frozen=True)
class Compiled:
    """The part of a compiled module that a backend needs. cubin is None where only stored PTX is at hand.

    source, file_name: what it was compiled from, for the emulator's findings to name lines of; empty where that is not known.
    """

    arch: str
    ptx: str
    cubin: bytes | None = field(repr=False, default=None)
    source: str = field(repr=False, default="")
    file_name: str = ""


class Backend(Protocol):
    name: str

    def run(self, compiled: Compiled, launch: Launch, *, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run one launch; arrays among its arguments are written in place. Raises BackendError."""
        ...
