"""A PTX emulator on numpy that checks what it runs: races, missing waits, bounds, barriers. Knows PTX only."""

from .hazards import Hazard
from .memory import Memory, TensorMap, Uninitialized
from .observe import Observer
from .program import LaunchError, LaunchResult, Program
from .ptx import PtxError

__all__ = ["Hazard", "LaunchError", "LaunchResult", "Memory", "Observer", "Program", "PtxError", "TensorMap", "Uninitialized"]
