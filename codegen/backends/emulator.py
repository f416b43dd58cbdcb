"""The emulator as a backend: any architecture, no GPU, every hazard check on unless told otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..emulator import LaunchError, Memory, Program, PtxError
from . import BackendError, Compiled, Launch, Outcome


class EmulatorBackend:
    name = "emulator"

    def __init__(self, *, seed: int = 0, check: bool = True) -> None:
        self.seed = seed
        self.check = check
        self._programs: dict[str, Program] = {}

    def run(self, compiled: Compiled, launch: Launch, *, progress: Callable[[int], None] | None = None) -> Outcome:
        try:
            program = self._programs.get(compiled.ptx)
            if program is None:
                program = self._programs[compiled.ptx] = Program.from_ptx(compiled.ptx)
            start = time.perf_counter()
            result = program.launch(
                launch.entry,
                grid=launch.grid,
                block=launch.block,
                smem=launch.smem_bytes,
                args=list(launch.args),
                memory=Memory(),
                seed=self.seed,
                check=self.check,
                progress=progress,
                cluster=(launch.cluster, 1, 1),
            )
        except (PtxError, LaunchError) as error:
            raise BackendError(f"{launch.entry}: {error}") from error
        return Outcome(time.perf_counter() - start, result.hazards, result.instructions)
